/* SPDX-License-Identifier: MIT */
/*
 * cupti.c: what the flashmla program asks of libcupti.so, for kernels that runtime.c has run. A stand-in like driver.c.
 */
#include <cupti_activity.h>
#include <cupti_version.h>
#include <stdbool.h>
#include <string.h>

#define VISIBLE __attribute__((visibility("default")))
#define ROOM    256

void emulated_cupti_kernel(uint64_t begin, uint64_t end);

static CUpti_ActivityKernel9 records[ROOM];
static size_t count;
static bool active;
static CUpti_BuffersCallbackRequestFunc request;
static CUpti_BuffersCallbackCompleteFunc complete;

/* Called by runtime.c after each kernel, if the program has loaded this library. */
VISIBLE void emulated_cupti_kernel(uint64_t begin, uint64_t end)
{
    if (active && count < ROOM) {
        records[count++] = (CUpti_ActivityKernel9){
            .kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, .start = begin, .end = end, .name = "emulated"};
    }
}

VISIBLE CUptiResult cuptiGetVersion(uint32_t *version)
{
    *version = CUPTI_API_VERSION;
    return CUPTI_SUCCESS;
}

VISIBLE CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc give,
                                                   CUpti_BuffersCallbackCompleteFunc take)
{
    request = give;
    complete = take;
    return CUPTI_SUCCESS;
}

VISIBLE CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind)
{
    active = kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    return CUPTI_SUCCESS;
}

VISIBLE CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind)
{
    active = active && kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    return CUPTI_SUCCESS;
}

VISIBLE CUptiResult cuptiActivityFlushAll(uint32_t flag)
{
    uint8_t *buffer = NULL;
    size_t size = 0, most = 0;
    (void)flag;
    if (count > 0) {
        request(&buffer, &size, &most);
        if (size < count * sizeof records[0]) {
            return CUPTI_ERROR_OUT_OF_MEMORY;
        }
        memcpy(buffer, records, count * sizeof records[0]);
        complete(NULL, 0, buffer, size, count * sizeof records[0]);
        count = 0;
    }
    return CUPTI_SUCCESS;
}

VISIBLE CUptiResult cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid, CUpti_Activity **record)
{
    uint8_t *next = *record == NULL ? buffer : (uint8_t *)*record + sizeof records[0];
    if (next >= buffer + valid) {
        return CUPTI_ERROR_MAX_LIMIT_REACHED;
    }
    *record = (CUpti_Activity *)next;
    return CUPTI_SUCCESS;
}
