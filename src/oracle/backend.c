/* SPDX-License-Identifier: MIT */
/*
 * backend.c: the oracle as a backend.
 */
#include "../plan/plan.h"
#include "oracle.h"

static fmla_status oracle_open(const fmla_context_config *config, const fmlai_allocator *allocator,
                               void **state, fmlai_error *error)
{
    fmlai_oracle *oracle = allocator->alloc(allocator->user, sizeof *oracle);
    (void)config;
    if (!oracle) {
        return fmlai_fail(error, FMLA_ERROR_OUT_OF_MEMORY, "no memory for the oracle's state (%zu bytes)",
                          sizeof *oracle);
    }
    *oracle = (fmlai_oracle){.allocator = *allocator};
    *state = oracle;
    return FMLA_OK;
}

static void oracle_close(void *state)
{
    fmlai_oracle *oracle = state;
    fmlai_allocator allocator = oracle->allocator;
    if (oracle->row) {
        allocator.release(allocator.user, oracle->row);
    }
    allocator.release(allocator.user, oracle);
}

static fmla_status oracle_device_info(int32_t index, fmla_device_info *info, fmlai_error *error)
{
    if (index != 0) {
        return fmlai_fail(error, FMLA_ERROR_NO_DEVICE, "index is %d, but there is one oracle, number 0",
                          (int)index);
    }
    *info = (fmla_device_info){
        .struct_size = sizeof *info,
        .device = FMLA_DEVICE_ORACLE,
        .name = "float64 reference",
        .kernels = "oracle",
        .compute_units = 1,
        .capability = FMLA_ISA_SCALAR,
    };
    return FMLA_OK;
}

static fmla_isa oracle_isa(const void *state)
{
    (void)state;
    return FMLA_ISA_SCALAR;
}

static int32_t oracle_threads(const void *state)
{
    (void)state;
    return 1;
}

static void *oracle_workspace_alloc(void *state, size_t size)
{
    fmlai_oracle *oracle = state;
    return oracle->allocator.alloc(oracle->allocator.user, size);
}

static void oracle_workspace_release(void *state, void *memory)
{
    fmlai_oracle *oracle = state;
    oracle->allocator.release(oracle->allocator.user, memory);
}

static fmla_status oracle_schedule(void *state, const fmlai_schedule *p, const fmlai_call *call)
{
    (void)state;
    return fmlai_plan_schedule(p, call->error);
}

const fmlai_backend fmlai_oracle_backend = {
    .abi = FMLAI_BACKEND_ABI,
    .name = "oracle",
    .open = oracle_open,
    .close = oracle_close,
    .device_info = oracle_device_info,
    .isa = oracle_isa,
    .threads = oracle_threads,
    .workspace_alloc = oracle_workspace_alloc,
    .workspace_release = oracle_workspace_release,
    .mqa_workspace = fmlai_oracle_mqa_workspace,
    .mqa = fmlai_oracle_mqa,
    .mha_forward_workspace = fmlai_oracle_mha_workspace,
    .mha_forward = fmlai_oracle_mha_forward,
    .mha_backward_workspace = fmlai_oracle_mha_workspace,
    .mha_backward = fmlai_oracle_mha_backward,
    .quantize = fmlai_oracle_quantize,
    .dequantize = fmlai_oracle_dequantize,
    .convert = fmlai_oracle_convert,
    .indices_convert = fmlai_oracle_indices_convert,
    .fp8_cast = fmlai_oracle_fp8_cast,
    .merge = fmlai_oracle_merge,
    .permute = fmlai_oracle_permute,
    .schedule = oracle_schedule,
};
