/* SPDX-License-Identifier: MIT */
/*
 * driver.c: what the flashmla program asks of libcuda.so.1, over ordinary memory. Work is done when it is enqueued,
 * also while a stream is captured; a graph then holds nothing, so launching it takes no time. Events read the clock.
 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uintptr_t pointer;

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int index);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxSetCurrent(void *context);
int cuCtxSynchronize(void);
int cuMemAlloc_v2(pointer *memory, size_t size);
int cuMemFree_v2(pointer memory);
int cuMemcpyHtoD_v2(pointer to, const void *from, size_t size);
int cuMemcpyDtoH_v2(void *to, pointer from, size_t size);
int cuMemcpyDtoDAsync_v2(pointer to, pointer from, size_t size, void *stream);
int cuMemsetD8_v2(pointer to, unsigned char value, size_t size);
int cuMemsetD8Async(pointer to, unsigned char value, size_t size, void *stream);
int cuMemGetInfo_v2(size_t *available, size_t *total);
int cuStreamCreate(void **stream, unsigned flags);
int cuStreamDestroy_v2(void *stream);
int cuStreamSynchronize(void *stream);
int cuStreamBeginCapture_v2(void *stream, int mode);
int cuStreamEndCapture(void *stream, void **graph);
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags);
int cuGraphLaunch(void *executable, void *stream);
int cuGraphDestroy(void *graph);
int cuGraphExecDestroy(void *executable);
int cuEventCreate(void **event, unsigned flags);
int cuEventRecord(void *event, void *stream);
int cuEventElapsedTime(float *milliseconds, void *from, void *to);
int cuEventDestroy_v2(void *event);

int cuModuleLoadData(void **module, const void *text);
int cuModuleGetFunction(void **function, void *module, const char *name);
int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra);

static char handle; /* what streams and graphs point at */

int cuInit(unsigned flags)
{
    return (int)flags * 0;
}

int cuDeviceGet(int *device, int index)
{
    *device = index;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    static char one;
    *context = &one;
    return device;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    return device;
}

int cuCtxSetCurrent(void *context)
{
    return context == NULL;
}

int cuCtxSynchronize(void)
{
    return 0;
}

int cuMemAlloc_v2(pointer *memory, size_t size)
{
    *memory = (pointer)aligned_alloc(256, (size + 255) / 256 * 256);
    return *memory == 0;
}

int cuMemFree_v2(pointer memory)
{
    free((void *)memory);
    return 0;
}

int cuMemcpyHtoD_v2(pointer to, const void *from, size_t size)
{
    memcpy((void *)to, from, size);
    return 0;
}

int cuMemcpyDtoH_v2(void *to, pointer from, size_t size)
{
    memcpy(to, (const void *)from, size);
    return 0;
}

int cuMemcpyDtoDAsync_v2(pointer to, pointer from, size_t size, void *stream)
{
    memcpy((void *)to, (const void *)from, size);
    return stream == NULL;
}

int cuMemsetD8_v2(pointer to, unsigned char value, size_t size)
{
    memset((void *)to, value, size);
    return 0;
}

int cuMemsetD8Async(pointer to, unsigned char value, size_t size, void *stream)
{
    memset((void *)to, value, size);
    return stream == NULL;
}

int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    *available = *total = (size_t)64 << 20;
    return 0;
}

int cuStreamCreate(void **stream, unsigned flags)
{
    *stream = &handle;
    return flags > 1;
}

int cuStreamDestroy_v2(void *stream)
{
    return stream != &handle;
}

int cuStreamSynchronize(void *stream)
{
    return stream != &handle;
}

int cuStreamBeginCapture_v2(void *stream, int mode)
{
    return stream != &handle || mode < 0;
}

int cuStreamEndCapture(void *stream, void **graph)
{
    *graph = &handle;
    return stream != &handle;
}

int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags)
{
    *executable = graph;
    return flags != 0;
}

int cuGraphLaunch(void *executable, void *stream)
{
    return executable != &handle || stream != &handle;
}

int cuGraphDestroy(void *graph)
{
    return graph != &handle;
}

int cuGraphExecDestroy(void *executable)
{
    return executable != &handle;
}

int cuEventCreate(void **event, unsigned flags)
{
    *event = calloc(1, sizeof(struct timespec));
    return *event == NULL || flags != 0;
}

int cuEventRecord(void *event, void *stream)
{
    return clock_gettime(CLOCK_MONOTONIC, event) != 0 || stream == NULL;
}

int cuEventElapsedTime(float *milliseconds, void *from, void *to)
{
    const struct timespec *a = from, *b = to;
    *milliseconds = (float)((double)(b->tv_sec - a->tv_sec) * 1e3 + (double)(b->tv_nsec - a->tv_nsec) * 1e-6);
    return 0;
}

int cuEventDestroy_v2(void *event)
{
    free(event);
    return 0;
}

/* The one kernel that the program brings as text: a number that depends on every word of a block and its place. */
int cuModuleLoadData(void **module, const void *text)
{
    *module = &handle;
    return strstr(text, ".entry hash(") == NULL || getenv("FLASHMLA_DRIVER_WITHOUT_MODULES") != NULL;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    *function = module;
    return strcmp(name, "hash") != 0;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra)
{
    const uint64_t *words = *(const uint64_t **)arguments[0];
    uint64_t count = *(uint64_t *)arguments[1], *result = *(uint64_t **)arguments[2], factor = 1;
    for (uint64_t i = 0; i < count; i++, factor = factor * 0x9E3779B97F4A7C15u + 2) {
        *result += words[i] * factor; /* an odd one: no change of a word is lost */
    }
    return function != &handle || grid_x * grid_y * grid_z * block_x * block_y * block_z == 0 || shared != 0 ||
           stream != NULL || extra != NULL;
}
