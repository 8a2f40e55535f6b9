/* SPDX-License-Identifier: MIT */
/* driver.c: what the flashmla program asks of libcuda.so.1, over ordinary memory. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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
