/* SPDX-License-Identifier: MIT */
/*
 * fake_plugin.c: a CUDA plugin without a device. Device 0 takes every call, touches no tensor and writes what it was
 * given into a journal that tests read; device 1 is one for which no kernel was built; there is no other. A call on
 * stream FAKE_BAD_STREAM fails as a device does.
 */
#include "fake_plugin.h"

#include <stdio.h>
#include <stdlib.h>

#include "backend.h"

/* The only way errors are made belongs to the library; a plugin words its own. */
static fmla_status fail(fmlai_error *error, fmla_status status, const char *text)
{
    error->status = status;
    snprintf(error->text, sizeof error->text, "%s", text);
    return status;
}

static fake_journal journal;

static fmla_status fake_open(const fmla_context_config *config, const fmlai_allocator *allocator, void **state,
                             fmlai_error *error)
{
    (void)allocator;
    *state = &journal;
    if (config->device_index == 1) {
        return fail(error, FMLA_ERROR_UNSUPPORTED_DEVICE, "device_index 1: capability 3.5; built for 8.0, 9.0");
    }
    return config->device_index > 1 ? fail(error, FMLA_ERROR_NO_DEVICE, "device_index: there are 2 devices") : FMLA_OK;
}

static void fake_close(void *state)
{
    (void)state;
}

static fmla_status fake_info(int32_t index, fmla_device_info *info, fmlai_error *error)
{
    if (index > 1) {
        return fail(error, FMLA_ERROR_NO_DEVICE, "index: there are 2 devices");
    }
    info->device = FMLA_DEVICE_CUDA;
    info->index = index;
    snprintf(info->name, sizeof info->name, "fake device %d", (int)index);
    info->capability = index == 0 ? 90 : 35;
    return FMLA_OK;
}

static void *fake_alloc(void *state, size_t size)
{
    fake_journal *j = state;
    j->allocations++;
    return aligned_alloc(64, (size + 63) / 64 * 64);
}

static void fake_release(void *state, void *memory)
{
    fake_journal *j = state;
    j->releases++;
    free(memory);
}

static size_t fake_workspace(const void *state, const fmlai_mqa *p)
{
    (void)state;
    return (size_t)p->num_tokens * 1000;
}

static fmla_status record(void *state, const fmlai_call *call)
{
    fake_journal *j = state;
    j->calls++;
    j->stream = call->stream;
    j->workspace = call->workspace;
    j->workspace_size = call->workspace_size;
    return call->stream == FAKE_BAD_STREAM ? fail(call->error, FMLA_ERROR_DEVICE, "launch failed") : FMLA_OK;
}

static fmla_status fake_mqa(void *state, const fmlai_mqa *p, const fmlai_call *call)
{
    ((fake_journal *)state)->batch_invariant = p->batch_invariant;
    return record(state, call);
}

static fmla_status fake_quantize(void *state, const fmlai_transcode *p, const fmlai_call *call)
{
    (void)p;
    return record(state, call);
}

static fmla_status fake_indices(void *state, const fmlai_indices_convert *p, const fmlai_call *call)
{
    (void)p;
    return record(state, call);
}

/* What this device lacks: queries in fp16, and every operation left out of the table. */
static int32_t fake_supports(const void *state, const fmla_support_query *query, fmlai_error *error)
{
    (void)state;
    if (query->q_dtype == FMLA_F16) {
        fail(error, FMLA_ERROR_UNSUPPORTED, "q: dtype is F16; allowed on this device: BF16");
        return 0;
    }
    return 1;
}

FMLA_API const fmlai_backend *fmlai_cuda_backend(uint32_t abi);
FMLA_API fake_journal *fake_plugin_journal(void);

const fmlai_backend *fmlai_cuda_backend(uint32_t abi)
{
    static const fmlai_backend backend = {
        .abi = FMLAI_BACKEND_ABI,
        .name = "cuda",
        .open = fake_open,
        .close = fake_close,
        .device_info = fake_info,
        .workspace_alloc = fake_alloc,
        .workspace_release = fake_release,
        .supports = fake_supports,
        .mqa_workspace = fake_workspace,
        .mqa = fake_mqa,
        .quantize = fake_quantize,
        .indices_convert = fake_indices,
    };
    return abi == FMLAI_BACKEND_ABI ? &backend : NULL;
}

fake_journal *fake_plugin_journal(void)
{
    return &journal;
}
