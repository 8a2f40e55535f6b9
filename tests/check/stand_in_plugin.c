/* SPDX-License-Identifier: MIT */
/*
 * stand_in_plugin.c: the CPU backend as a CUDA plugin, over a driver whose device memory is the host's: what the
 * program does for a device, without one. FLASHMLA_FAULT names what the attention kernel does wrong, and the checks
 * must see it:
 *
 *   input, late     writes to q after the first call, or after the second
 *   front           writes in front of q
 *   guard           writes in front of out
 *   gap             writes behind a row of out, where padded strides leave room
 *   bits            gives another bit in the second call
 *   end             ends the process in the second call
 */
#include <stdlib.h>
#include <string.h>

#include "backend.h"

static fmlai_backend backend;
static int calls;

static void misbehave(const char *fault, const fmlai_mqa *p)
{
    uint8_t *q = p->q.data, *out = p->out.data;
    calls++;
    if (strcmp(fault, calls == 1 ? "input" : calls == 2 ? "late" : "") == 0) {
        q[1] ^= 1;
    } else if (strcmp(fault, "front") == 0) {
        q[-1] = 0;
    } else if (strcmp(fault, "guard") == 0) {
        out[-1] ^= 1;
    } else if (strcmp(fault, "gap") == 0) {
        out[2 * p->d_v] ^= 1;
    } else if (strcmp(fault, "bits") == 0 && calls == 2) {
        out[0] ^= 1;
    } else if (strcmp(fault, "end") == 0 && calls == 2) {
        _Exit(3);
    }
}

static fmla_status stand_in_mqa(void *state, const fmlai_mqa *p, const fmlai_call *call)
{
    fmla_status status = fmlai_cpu_backend.mqa(state, p, call);
    const char *fault = getenv("FLASHMLA_FAULT");
    if (status == FMLA_OK && fault != NULL) {
        misbehave(fault, p);
    }
    return status;
}

static fmla_status stand_in_info(int32_t index, fmla_device_info *info, fmlai_error *error)
{
    fmla_status status = fmlai_cpu_backend.device_info(index, info, error);
    info->device = FMLA_DEVICE_CUDA;
    return status;
}

__attribute__((visibility("default"))) const fmlai_backend *fmlai_cuda_backend(uint32_t abi);

const fmlai_backend *fmlai_cuda_backend(uint32_t abi)
{
    backend = fmlai_cpu_backend;
    backend.name = "stand-in";
    backend.device_info = stand_in_info;
    backend.mqa = stand_in_mqa;
    return abi == FMLAI_BACKEND_ABI ? &backend : NULL;
}
