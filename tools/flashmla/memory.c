/* SPDX-License-Identifier: MIT */
/*
 * memory.c: tensors' memory on the device of a context. The library takes pointers and leaves memory to its
 * caller; for CUDA the program asks the driver, found at run time, so that it starts on machines that have
 * none.
 */
#include "device.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

struct cli_memory {
    bool host;
    bool pooled; /* blocks are cut from the pool, and there is nothing to release */
    cuda_driver cuda;
    void **blocks;
    size_t count;
    size_t capacity;
};

#define POOL_UNIT ((size_t)64 << 20)
#define CHUNKS    64

/* Device memory that is used again: asking the driver for some, and giving it back, holds up every process that uses
 * the device. One memory at a time has it. */
static struct {
    bool on, taken;
    uintptr_t chunks[CHUNKS];
    size_t sizes[CHUNKS];
    size_t count, used; /* bytes of the last chunk */
    size_t wanted;      /* bytes that one chunk should have had */
    bool forget;        /* when it is next taken, the chunks go back first */
} pool;

static int pool_new(cuda_driver *cuda, size_t size, uintptr_t *pointer)
{
    size_t rounded = (size + 255) & ~(size_t)255;

    if (pool.count == 0 || pool.used + rounded > pool.sizes[pool.count - 1]) {
        size_t chunk = pool.count == 0 && pool.wanted > rounded ? pool.wanted : rounded;
        chunk = (chunk + POOL_UNIT - 1) / POOL_UNIT * POOL_UNIT;
        if (pool.count == CHUNKS || cuda->alloc(&pool.chunks[pool.count], chunk) != 0) {
            return 1;
        }
        pool.sizes[pool.count++] = chunk;
        pool.used = 0;
    }
    *pointer = pool.chunks[pool.count - 1] + pool.used;
    pool.used += rounded;
    return 0;
}

static void pool_release(const cuda_driver *cuda)
{
    pool.wanted = 0;
    for (size_t i = 0; i < pool.count; i++) {
        pool.wanted += pool.sizes[i];
        cuda->release(pool.chunks[i]);
    }
    pool.count = 0;
}

void cli_memory_pool(bool on, bool forget)
{
    pool.on = on;
    pool.forget = forget;
}

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
        !load(cuda, "cuCtxSetCurrent", &cuda->set_current) || !load(cuda, "cuCtxSynchronize", &cuda->synchronize) ||
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
    cuda->context = context;
    if (!load(cuda, "cuModuleLoadData", &cuda->module_load) ||
        !load(cuda, "cuModuleGetFunction", &cuda->module_function) || !load(cuda, "cuLaunchKernel", &cuda->launch)) {
        cuda->module_load = NULL;
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
    m->pooled = !m->host && pool.on && !pool.taken;
    if (m->pooled) {
        pool.taken = true;
        if (pool.forget || pool.count > 1) {
            pool_release(&m->cuda);
        }
        pool.wanted = pool.forget ? 0 : pool.wanted;
        pool.used = 0;
        pool.forget = false;
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
    for (size_t i = 0; i < memory->count && !memory->pooled; i++) {
        release_block(memory, memory->blocks[i]);
    }
    pool.taken = pool.taken && !memory->pooled;
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
            int code =
                memory->pooled ? pool_new(&memory->cuda, rounded, &pointer) : memory->cuda.alloc(&pointer, rounded);
            block = code == 0 ? (void *)pointer : NULL;
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

cuda_driver *cli_memory_cuda(cli_memory *memory)
{
    return memory->host ? NULL : &memory->cuda;
}
