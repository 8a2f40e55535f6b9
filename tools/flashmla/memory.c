/* SPDX-License-Identifier: MIT */
/*
 * memory.c: tensors' memory on the device of a context. The library takes pointers and leaves memory to its
 * caller; for CUDA the program asks the driver, found at run time, so that it starts on machines that have
 * none.
 */
#include "program.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* The driver functions that are needed, by their documented signatures (CUresult and CUdevice are ints). */
typedef struct cuda_driver {
    void *library;
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*set_current)(void *context);
    int (*synchronize)(void);
    int (*alloc)(uintptr_t *pointer, size_t size);
    int (*release)(uintptr_t pointer);
    int (*to_device)(uintptr_t target, const void *source, size_t size);
    int (*to_host)(void *target, uintptr_t source, size_t size);
    int (*fill)(uintptr_t target, unsigned char byte, size_t size);
    int device;
} cuda_driver;

struct cli_memory {
    bool host;
    cuda_driver cuda;
    void **blocks;
    size_t count;
    size_t capacity;
};

/* A function pointer out of dlsym, by way of memcpy: ISO C has no cast between the two kinds of pointer. */
static bool load(cuda_driver *cuda, const char *name, void *slot)
{
    void *symbol = dlsym(cuda->library, name);

    memcpy(slot, &symbol, sizeof symbol);
    return symbol != NULL;
}

static int open_cuda(cuda_driver *cuda, int32_t device_index)
{
    void *context = NULL;

    cuda->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (cuda->library == NULL) {
        return cli_error("the CUDA driver (libcuda.so.1) cannot be loaded: %s", dlerror());
    }
    if (!load(cuda, "cuInit", &cuda->init) || !load(cuda, "cuDeviceGet", &cuda->device_get) ||
        !load(cuda, "cuDevicePrimaryCtxRetain", &cuda->primary_retain) ||
        !load(cuda, "cuDevicePrimaryCtxRelease_v2", &cuda->primary_release) ||
        !load(cuda, "cuCtxSetCurrent", &cuda->set_current) ||
        !load(cuda, "cuCtxSynchronize", &cuda->synchronize) ||
        !load(cuda, "cuMemAlloc_v2", &cuda->alloc) || !load(cuda, "cuMemFree_v2", &cuda->release) ||
        !load(cuda, "cuMemcpyHtoD_v2", &cuda->to_device) || !load(cuda, "cuMemcpyDtoH_v2", &cuda->to_host) ||
        !load(cuda, "cuMemsetD8_v2", &cuda->fill)) {
        dlclose(cuda->library);
        return cli_error("the CUDA driver lacks a function that the program needs");
    }
    if (cuda->init(0) != 0 || cuda->device_get(&cuda->device, device_index) != 0 ||
        cuda->primary_retain(&context, cuda->device) != 0) {
        dlclose(cuda->library);
        return cli_error("the CUDA driver does not open device %d", (int)device_index);
    }
    if (cuda->set_current(context) != 0) {
        cuda->primary_release(cuda->device);
        dlclose(cuda->library);
        return cli_error("the CUDA driver does not open device %d", (int)device_index);
    }
    return CLI_OK;
}

int cli_memory_open(const fmla_context *context, int32_t device_index, cli_memory **memory)
{
    cli_memory *m = calloc(1, sizeof *m);

    *memory = NULL;
    if (m == NULL) {
        return cli_error("not enough memory");
    }
    m->host = fmla_context_device(context) != FMLA_DEVICE_CUDA;
    if (!m->host && open_cuda(&m->cuda, device_index) != CLI_OK) {
        free(m);
        return CLI_ERROR;
    }
    *memory = m;
    return CLI_OK;
}

static void release_block(cli_memory *memory, void *block)
{
    if (memory->host) {
        free(block);
    } else {
        memory->cuda.release((uintptr_t)block);
    }
}

void cli_memory_close(cli_memory *memory)
{
    if (memory == NULL) {
        return;
    }
    for (size_t i = 0; i < memory->count; i++) {
        release_block(memory, memory->blocks[i]);
    }
    if (!memory->host) {
        memory->cuda.primary_release(memory->cuda.device);
        dlclose(memory->cuda.library);
    }
    free(memory->blocks);
    free(memory);
}

void *cli_memory_new(cli_memory *memory, size_t size)
{
    void *block = NULL;

    if (memory->count == memory->capacity) {
        size_t capacity = memory->capacity == 0 ? 32 : 2 * memory->capacity;
        void **blocks = realloc(memory->blocks, capacity * sizeof *blocks);
        if (blocks == NULL) {
            cli_error("not enough memory");
            return NULL;
        }
        memory->blocks = blocks;
        memory->capacity = capacity;
    }
    if (size <= SIZE_MAX - 64) {
        size_t rounded = (size + 64) & ~(size_t)63; /* never 0 */
        if (memory->host) {
            block = aligned_alloc(64, rounded);
        } else {
            uintptr_t pointer = 0;
            block = memory->cuda.alloc(&pointer, rounded) == 0 ? (void *)pointer : NULL;
        }
    }
    if (block == NULL) {
        cli_error("not enough %s memory for %zu bytes", memory->host ? "host" : "device", size);
        return NULL;
    }
    memory->blocks[memory->count++] = block;
    return block;
}

int cli_memory_upload(cli_memory *memory, void *block, const void *source, size_t size)
{
    if (size == 0) {
        return CLI_OK;
    }
    if (memory->host) {
        memcpy(block, source, size);
        return CLI_OK;
    }
    int code = memory->cuda.to_device((uintptr_t)block, source, size);
    return code == 0 ? CLI_OK : cli_error("copy to the device failed (CUDA error %d)", code);
}

int cli_memory_fill(cli_memory *memory, void *block, uint8_t byte, size_t size)
{
    if (size == 0) {
        return CLI_OK;
    }
    if (memory->host) {
        memset(block, byte, size);
        return CLI_OK;
    }
    int code = memory->cuda.fill((uintptr_t)block, byte, size);
    return code == 0 ? CLI_OK : cli_error("filling memory of the device failed (CUDA error %d)", code);
}

int cli_memory_download(cli_memory *memory, void *target, const void *block, size_t size)
{
    if (size == 0) {
        return CLI_OK;
    }
    if (memory->host) {
        memcpy(target, block, size);
        return CLI_OK;
    }
    int code = memory->cuda.to_host(target, (uintptr_t)block, size);
    return code == 0 ? CLI_OK : cli_error("copy from the device failed (CUDA error %d)", code);
}

int cli_memory_synchronize(cli_memory *memory)
{
    int code = memory->host ? 0 : memory->cuda.synchronize();

    return code == 0 ? CLI_OK : cli_error("the device reported a failure (CUDA error %d)", code);
}

bool cli_memory_is_host(const cli_memory *memory)
{
    return memory->host;
}
