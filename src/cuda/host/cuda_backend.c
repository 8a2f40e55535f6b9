/* SPDX-License-Identifier: MIT */
/*
 * cuda_backend.c: the table that the plugin offers and what a context's state is. A device is looked at once, when the
 * context opens; one for which no kernel was built is refused then, before any launch.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_host.h"

#ifndef FMLAC_ARCHS
#define FMLAC_ARCHS "" /* built architectures as CMake spells them, with commas: "80,86,90a" */
#endif

/* NO_BACKEND: no driver; NO_DEVICE: none with this number. */
static fmla_status count_devices(int32_t index, fmlai_error *error)
{
    int count = 0;
    cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaErrorNoDevice) {
        count = 0;
    } else if (code != cudaSuccess) {
        (void)cudaGetLastError();
        return fmlai_fail(error, FMLA_ERROR_NO_BACKEND, "the CUDA driver is missing or does not answer: %s",
                          cudaGetErrorString(code));
    }
    (void)cudaGetLastError();
    if (index < 0 || index >= count) {
        return fmlai_fail(error, FMLA_ERROR_NO_DEVICE, "device_index: %d; this machine has %d CUDA devices", (int)index,
                          count);
    }
    return FMLA_OK;
}

static int attribute(enum cudaDeviceAttr name, int device)
{
    int value = 0;
    return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : 0;
}

static int capability_of(int device)
{
    return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
           attribute(cudaDevAttrComputeCapabilityMinor, device);
}

/* Whether the plugin holds machine code for a capability: the same major version and at most its minor one; an
 * architecture with a letter runs on exactly that capability. */
static bool built_for(int capability)
{
    for (const char *arch = FMLAC_ARCHS; *arch;) {
        char *end;
        int number = (int)strtol(arch, &end, 10);
        bool exact = *end == 'a';
        if (number == capability || (!exact && number / 10 == capability / 10 && number < capability)) {
            return true;
        }
        while (*end && *end != ',') {
            end++;
        }
        arch = *end ? end + 1 : end;
    }
    return false;
}

/* A choice of the configuration, or where it is 0, of the environment: for programs that offer no switch. */
static int32_t chosen(int32_t value, const char *variable)
{
    const char *text = value == 0 ? getenv(variable) : NULL;
    return text ? (int32_t)strtol(text, NULL, 10) : value;
}

static fmla_status read_device(fmlac_state *state, const fmla_context_config *config, fmlai_error *error)
{
    int device = state->device;
    int32_t kib = chosen(config->cuda_profile_kib, "FLASHMLA_CUDA_PROFILE_KIB");
    int32_t kernels = chosen(config->cuda_kernels, "FLASHMLA_CUDA_KERNELS");
    state->processors = attribute(cudaDevAttrMultiProcessorCount, device);
    state->capability = capability_of(device);
    state->shared_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    state->shared_processor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    state->l2_bytes = attribute(cudaDevAttrL2CacheSize, device);
    state->dependent_launch = state->capability >= 90;
    if (!built_for(state->capability)) {
        return fmlai_fail(error, FMLA_ERROR_UNSUPPORTED_DEVICE, "device %d has compute capability %d.%d; built: %s",
                          device, state->capability / 10, state->capability % 10, FMLAC_ARCHS);
    }
    if (kib > 0 && kib * 1024 > state->shared_block) {
        return fmlai_fail(error, FMLA_ERROR_UNSUPPORTED, "cuda_profile_kib: %d; this device has %d KiB per block",
                          (int)kib, state->shared_block / 1024);
    }
    if (kib > 0) {
        state->shared_block = kib * 1024;
    }
    fmlac_hopper_open(state, kernels);
    if (kernels >= 2 && !state->hopper) {
        return fmlai_fail(error, FMLA_ERROR_UNSUPPORTED,
                          "cuda_kernels: %d (Hopper); this device or this build offers 1 (portable)", (int)kernels);
    }
    return FMLA_OK;
}

static fmla_status open_state(const fmla_context_config *config, const fmlai_allocator *allocator, void **opaque,
                              fmlai_error *error)
{
    int before;
    const char *check = getenv("FLASHMLA_CHECK");
    fmla_status status = count_devices(config->device_index, error);
    if (status != FMLA_OK) {
        return status;
    }
    fmlac_state *state = allocator->alloc(allocator->user, sizeof *state);
    if (!state) {
        return fmlai_fail(error, FMLA_ERROR_OUT_OF_MEMORY, "no memory for a CUDA context");
    }
    *state = (fmlac_state){
        .allocator = *allocator, .device = config->device_index, .check = check != NULL && strcmp(check, "1") == 0};
    status = read_device(state, config, error);
    if (status == FMLA_OK && state->hopper && fmlac_enter(state->device, &before, error) == FMLA_OK) {
        fmlac_hopper_clusters(state);
        fmlac_leave(before);
    }
    if (status == FMLA_OK && state->check) {
        status = fmlac_enter(state->device, &before, error);
        if (status == FMLA_OK) {
            cudaError_t code = cudaMalloc((void **)&state->report, sizeof *state->report);
            status = code == cudaSuccess ? FMLA_OK : fmlac_cuda_fail(error, code, "cudaMalloc");
            fmlac_leave(before);
        }
    }
    if (status != FMLA_OK) {
        allocator->release(allocator->user, state);
        return status;
    }
    *opaque = state;
    return FMLA_OK;
}

static void *workspace_alloc(void *opaque, size_t size)
{
    const fmlac_state *state = opaque;
    void *memory = NULL;
    int before;
    if (fmlac_enter(state->device, &before, NULL) != FMLA_OK) {
        return NULL;
    }
    if (cudaMalloc(&memory, size) != cudaSuccess) {
        (void)cudaGetLastError();
        memory = NULL;
    }
    fmlac_leave(before);
    return memory;
}

static void workspace_release(void *opaque, void *memory)
{
    const fmlac_state *state = opaque;
    int before;
    if (memory && fmlac_enter(state->device, &before, NULL) == FMLA_OK) {
        (void)cudaFree(memory);
        (void)cudaGetLastError();
        fmlac_leave(before);
    }
}

static void close_state(void *opaque)
{
    fmlac_state *state = opaque;
    fmlai_allocator allocator = state->allocator;
    workspace_release(state, state->report);
    allocator.release(allocator.user, state);
}

/* What a context on a device would use, best first. */
static void name_kernels(int device, char *text, size_t size)
{
    fmlac_state state = {.device = device,
                         .capability = capability_of(device),
                         .shared_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
    int32_t kib = chosen(0, "FLASHMLA_CUDA_PROFILE_KIB");
    if (kib > 0 && kib * 1024 < state.shared_block) {
        state.shared_block = kib * 1024;
    }
    fmlac_hopper_open(&state, chosen(0, "FLASHMLA_CUDA_KERNELS"));
    bool built = built_for(state.capability);
    snprintf(text, size, "%s", !built ? "none" : state.hopper ? "hopper portable" : "portable");
}

static fmla_status device_info(int32_t index, fmla_device_info *info, fmlai_error *error)
{
    struct cudaDeviceProp properties;
    fmla_status status = count_devices(index, error);
    if (status != FMLA_OK) {
        return status;
    }
    cudaError_t code = cudaGetDeviceProperties(&properties, index);
    if (code != cudaSuccess) {
        return fmlac_cuda_fail(error, code, "cudaGetDeviceProperties");
    }
    info->device = FMLA_DEVICE_CUDA;
    info->index = index;
    snprintf(info->name, sizeof info->name, "%.127s", properties.name);
    name_kernels(index, info->kernels, sizeof info->kernels);
    info->compute_units = properties.multiProcessorCount;
    info->capability = 10 * properties.major + properties.minor;
    info->memory_bytes = (int64_t)properties.totalGlobalMem;
    info->shared_memory_bytes = (int64_t)properties.sharedMemPerBlockOptin;
    return FMLA_OK;
}

static fmla_isa no_isa(const void *opaque)
{
    (void)opaque;
    return FMLA_ISA_AUTO;
}

static int32_t no_threads(const void *opaque)
{
    (void)opaque;
    return 0;
}

static const fmlai_backend backend = {
    .abi = FMLAI_BACKEND_ABI,
    .name = "cuda",
    .open = open_state,
    .close = close_state,
    .device_info = device_info,
    .isa = no_isa,
    .threads = no_threads,
    .workspace_alloc = workspace_alloc,
    .workspace_release = workspace_release,
    .mqa_workspace = fmlac_mqa_workspace,
    .mqa = fmlac_mqa_run,
    .mha_forward_workspace = fmlac_mha_forward_workspace,
    .mha_forward = fmlac_mha_forward,
    .mha_backward_workspace = fmlac_mha_backward_workspace,
    .mha_backward = fmlac_mha_backward,
    .quantize = fmlac_quantize,
    .dequantize = fmlac_dequantize,
    .convert = fmlac_convert_run,
    .indices_convert = fmlac_indices_convert_run,
    .fp8_cast = fmlac_fp8_cast_run,
    .merge = fmlac_merge_run,
    .permute = fmlac_permute_run,
    .schedule = fmlac_schedule_run,
};

/* The plugin's one exported symbol. NULL: it speaks another version of the table. */
__attribute__((visibility("default"))) const fmlai_backend *fmlai_cuda_backend(uint32_t abi);

const fmlai_backend *fmlai_cuda_backend(uint32_t abi)
{
    return abi == FMLAI_BACKEND_ABI ? &backend : NULL;
}
