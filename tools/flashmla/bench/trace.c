/* SPDX-License-Identifier: MIT */
/* trace.c: records of kernels from CUPTI, found at run time. */
#include "bench/trace.h"

#include "program.h"

#ifdef FLASHMLA_HAVE_CUPTI

#include <cupti_activity.h>
#include <cupti_version.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "bench/driver.h"
#include "problem/memory.h"

#define BUFFER_BYTES ((size_t)256 << 10)

struct bench_trace {
    void *library;
    CUptiResult (*version)(uint32_t *version);
    CUptiResult (*callbacks)(CUpti_BuffersCallbackRequestFunc give, CUpti_BuffersCallbackCompleteFunc take);
    CUptiResult (*enable)(CUpti_ActivityKind kind);
    CUptiResult (*disable)(CUpti_ActivityKind kind);
    CUptiResult (*flush)(uint32_t flag);
    CUptiResult (*next)(uint8_t *buffer, size_t valid, CUpti_Activity **record);
    bench_kernel kernels[BENCH_KERNELS_MAX];
    int count; /* of kernels seen; those beyond the array are only counted */
};

static bench_trace *current; /* the owner of what CUPTI hands over */

static void give_buffer(uint8_t **room, size_t *size, size_t *records)
{
    *room = malloc(BUFFER_BYTES);
    *size = *room != NULL ? BUFFER_BYTES : 0;
    *records = 0; /* as many as fit */
}

/* What is read here lies at the beginning that all versions since the ninth share. */
static void keep(bench_trace *t, const CUpti_ActivityKernel9 *record)
{
    if (t->count < BENCH_KERNELS_MAX) {
        bench_kernel *k = &t->kernels[t->count];
        snprintf(k->name, sizeof k->name, "%s", record->name != NULL ? record->name : "");
        k->begin = record->start;
        k->end = record->end;
    }
    t->count++;
}

static void take_buffer(CUcontext context, uint32_t stream, uint8_t *records, size_t size, size_t valid)
{
    CUpti_Activity *record = NULL;
    (void)context, (void)stream, (void)size;
    while (valid > 0 && current != NULL && current->next(records, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            keep(current, (const CUpti_ActivityKernel9 *)record);
        }
    }
    free(records);
}

/* Of the header's major version. */
static void *load(void)
{
    static const char *const folders[] = {"", "/usr/local/cuda/extras/CUPTI/lib64/", "/usr/local/cuda/lib64/"};
    char name[128];
    void *library = NULL;
    for (size_t i = 0; i < sizeof folders / sizeof folders[0] && library == NULL; i++) {
        snprintf(name, sizeof name, "%slibcupti.so.%d", folders[i], CUDA_VERSION / 1000);
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

static bench_trace *without(const char *why)
{
    fprintf(stderr, "flashmla: %s: spans of kernels are not measured\n", why);
    return NULL;
}

#define T(name, member) {name, offsetof(bench_trace, member)}

bench_trace *bench_trace_open(void)
{
    static const bench_symbol symbols[] = {
        T("cuptiGetVersion", version),
        T("cuptiActivityRegisterCallbacks", callbacks),
        T("cuptiActivityEnable", enable),
        T("cuptiActivityDisable", disable),
        T("cuptiActivityFlushAll", flush),
        T("cuptiActivityGetNextRecord", next),
    };
    uint32_t version = 0;
    void *library = load();
    if (library == NULL) {
        return without("no CUPTI here");
    }
    bench_trace *t = xcalloc(1, sizeof *t);
    t->library = library;
    bool good = bench_symbols_find(library, symbols, sizeof symbols / sizeof symbols[0], t) == NULL &&
                t->version(&version) == CUPTI_SUCCESS && version >= CUPTI_API_VERSION && current == NULL;
    if (good) {
        current = t;
        good = t->callbacks(give_buffer, take_buffer) == CUPTI_SUCCESS;
    }
    if (!good) {
        current = NULL;
        dlclose(library);
        free(t);
        return without("CUPTI is too old, or fails");
    }
    return t;
}

void bench_trace_close(bench_trace *t)
{
    if (t == NULL) {
        return;
    }
    current = NULL;
    free(t); /* the library stays: threads of its own may still leave it */
}

bool bench_trace_start(bench_trace *t)
{
    t->count = 0;
    return t->enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) == CUPTI_SUCCESS;
}

void bench_trace_stop(bench_trace *t)
{
    t->disable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    t->flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    t->count = 0;
}

static int compare_begins(const void *a, const void *b)
{
    uint64_t x = ((const bench_kernel *)a)->begin, y = ((const bench_kernel *)b)->begin;
    return (x > y) - (x < y);
}

int bench_trace_take(bench_trace *t, bench_kernel *kernels)
{
    if (t->flush(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED) != CUPTI_SUCCESS) {
        return -1;
    }
    int count = t->count, stored = count < BENCH_KERNELS_MAX ? count : BENCH_KERNELS_MAX;
    t->count = 0;
    memcpy(kernels, t->kernels, (size_t)stored * sizeof *kernels);
    qsort(kernels, (size_t)stored, sizeof *kernels, compare_begins);
    return count;
}

#else

bench_trace *bench_trace_open(void)
{
    fprintf(stderr, "flashmla: built without CUPTI's header: spans of kernels are not measured\n");
    return NULL;
}

void bench_trace_close(bench_trace *t)
{
    (void)t;
}

bool bench_trace_start(bench_trace *t)
{
    (void)t;
    return false;
}

void bench_trace_stop(bench_trace *t)
{
    (void)t;
}

int bench_trace_take(bench_trace *t, bench_kernel *kernels)
{
    (void)t, (void)kernels;
    return -1;
}

#endif
