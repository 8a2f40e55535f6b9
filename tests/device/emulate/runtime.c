/* SPDX-License-Identifier: MIT */
/*
 * runtime.c: the functions of the CUDA runtime (and of the driver, for the flashmla program) that are called on the way
 * to a kernel, over ordinary memory and the emulated block of emulate.cpp. The device pretends to be of compute
 * capability FLASHMLA_EMULATE_CAPABILITY (default 90: 9.0) with FLASHMLA_EMULATE_PROCESSORS multiprocessors (8) and
 * FLASHMLA_EMULATE_SHARED_KIB of shared memory (227).
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define VISIBLE __attribute__((visibility("default")))

typedef struct emu_index {
    unsigned x, y, z;
} emu_index;

void emu_launch(const void *function, const void *params, bool large, emu_index grid, emu_index block, unsigned cluster,
                size_t shared_bytes);
extern void fmlak_merge_sm80(void);

static cudaError_t last = cudaSuccess;

static int processors(void)
{
    const char *text = getenv("FLASHMLA_EMULATE_PROCESSORS");
    return text ? atoi(text) : 8;
}

static int shared_bytes(void)
{
    const char *text = getenv("FLASHMLA_EMULATE_SHARED_KIB");
    return text ? atoi(text) * 1024 : 232448;
}

/* 10 * major + minor. */
static int capability(void)
{
    const char *text = getenv("FLASHMLA_EMULATE_CAPABILITY");
    return text ? atoi(text) : 90;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device)
{
    (void)device;
    *value = name == cudaDevAttrMultiProcessorCount                ? processors()
             : name == cudaDevAttrComputeCapabilityMajor           ? capability() / 10
             : name == cudaDevAttrComputeCapabilityMinor           ? capability() % 10
             : name == cudaDevAttrMaxSharedMemoryPerBlockOptin     ? shared_bytes()
             : name == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? shared_bytes() + 1024
             : name == cudaDevAttrL2CacheSize                      ? 1 << 18
                                                                   : 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "emulated");
    p->major = capability() / 10;
    p->minor = capability() % 10;
    p->multiProcessorCount = processors();
    p->sharedMemPerBlockOptin = (size_t)shared_bytes();
    p->totalGlobalMem = (size_t)1 << 30;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t size)
{
    *memory = aligned_alloc(256, (size + 255) / 256 * 256);
    if (*memory) {
        memset(*memory, 0xFF, size);
    }
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFree(void *memory)
{
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t code = last;
    last = cudaSuccess;
    return code;
}

const char *cudaGetErrorString(cudaError_t code)
{
    return code == cudaSuccess ? "no error" : "emulated failure";
}

const char *cudaGetErrorName(cudaError_t code)
{
    return code == cudaSuccess ? "cudaSuccess" : "cudaError";
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    (void)function;
    (void)attribute;
    return value <= shared_bytes() ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaOccupancyMaxActiveClusters(int *count, const void *function, const cudaLaunchConfig_t *config)
{
    (void)function;
    *count = processors() / (int)config->attrs[0].val.clusterDim.x;
    return cudaSuccess;
}

static uint64_t nanoseconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* Tells the stand-in for CUPTI, if the program has loaded it. */
static void trace(uint64_t begin, uint64_t end)
{
    char name[32];
    snprintf(name, sizeof name, "libcupti.so.%d", CUDA_VERSION / 1000);
    void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    void *symbol = library != NULL ? dlsym(library, "emulated_cupti_kernel") : NULL;
    if (symbol != NULL) {
        void (*tell)(uint64_t, uint64_t);
        memcpy(&tell, &symbol, sizeof tell);
        tell(begin, end);
    }
    if (library != NULL) {
        dlclose(library);
    }
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments)
{
    emu_index grid = {config->gridDim.x, 1, 1}, block = {config->blockDim.x, 1, 1};
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; i++) {
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
            cluster = config->attrs[i].val.clusterDim.x;
        }
    }
    if (config->dynamicSmemBytes > (size_t)shared_bytes() || grid.x == 0 || cluster == 0 || cluster > 16 ||
        grid.x % cluster != 0 || block.x > 1024 || block.x * cluster > 8192) {
        last = cudaErrorInvalidValue;
        return last;
    }
    uint64_t begin = nanoseconds();
    emu_launch(function, arguments[0], function == (const void *)fmlak_merge_sm80, grid, block, cluster,
               config->dynamicSmemBytes);
    trace(begin, nanoseconds());
    return cudaSuccess;
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream)
{
    (void)stream;
    for (size_t i = 0; i < height; i++) {
        memset((char *)to + i * pitch, value, width);
    }
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream)
{
    (void)stream;
    memset(to, value, size);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    (void)kind;
    (void)stream;
    memcpy(to, from, size);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    (void)stream;
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

/* The beginning of a tensor map is what the double of ptx/tma.cuh reads. */
typedef struct emu_tensor_map {
    void *data;
    uint64_t dims[4], strides[3];
    uint32_t box[4];
    uint32_t row; /* bytes of a row in shared memory, by which it is swizzled: 128, 64 */
} emu_tensor_map;

static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data, const cuuint64_t *dims,
                       const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill)
{
    emu_tensor_map m = {.data = data};
    (void)type, (void)steps, (void)interleave, (void)promotion, (void)fill;
    if (rank != 4 || (swizzle != CU_TENSOR_MAP_SWIZZLE_128B && swizzle != CU_TENSOR_MAP_SWIZZLE_64B) ||
        (uintptr_t)data % 16) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    m.row = swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
    if (box[0] * 2 != m.row) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < 4; i++) {
        m.dims[i] = dims[i];
        m.box[i] = box[i];
        if (i < 3) {
            m.strides[i] = strides[i];
        }
    }
    memcpy(map, &m, sizeof m);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *found)
{
    (void)version, (void)flags;
    bool known = strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    CUresult (*pointer)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                        const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                        CUtensorMapL2promotion, CUtensorMapFloatOOBfill) = encode;
    memcpy(function, &pointer, sizeof pointer);
    *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
