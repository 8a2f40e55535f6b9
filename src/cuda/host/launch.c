/* SPDX-License-Identifier: MIT */
/* launch.c: launches, the current device, and failures in words. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "cuda_host.h"

/* The plugin's own copy: it links nothing of libflashmla.so. */
fmla_status fmlai_fail(fmlai_error *error, fmla_status status, const char *format, ...)
{
    if (error != NULL) {
        va_list list;
        va_start(list, format);
        error->status = status;
        vsnprintf(error->text, sizeof error->text, format, list);
        va_end(list);
    }
    return status;
}

fmla_status fmlac_cuda_fail(fmlai_error *error, cudaError_t code, const char *what)
{
    (void)cudaGetLastError();
    fmla_status status = code == cudaErrorMemoryAllocation ? FMLA_ERROR_OUT_OF_MEMORY : FMLA_ERROR_DEVICE;
    return fmlai_fail(error, status, "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
}

fmla_status fmlac_enter(int device, int *before, fmlai_error *error)
{
    cudaError_t code = cudaGetDevice(before);
    if (code == cudaSuccess && *before != device) {
        code = cudaSetDevice(device);
    }
    return code == cudaSuccess ? FMLA_OK : fmlac_cuda_fail(error, code, "cudaSetDevice");
}

void fmlac_leave(int before)
{
    int now = before;
    if (cudaGetDevice(&now) == cudaSuccess && now != before) {
        (void)cudaSetDevice(before);
    }
}

fmla_status fmlac_enqueue(const fmlac_state *state, const fmlai_call *call, const fmlac_launch *launch,
                          const void *params)
{
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    memset(attributes, 0, sizeof attributes);
    if (launch->dependent && state->dependent_launch) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (launch->cluster > 0) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count].val.clusterDim.x = (unsigned)launch->cluster;
        attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
        count++;
    }
    cudaLaunchConfig_t config = {
        .blockDim = {(unsigned)launch->threads, 1, 1},
        .dynamicSmemBytes = launch->shared,
        .stream = (cudaStream_t)call->stream,
        .attrs = attributes,
        .numAttrs = count,
    };
    void *arguments[1] = {(void *)(uintptr_t)params};
    if (launch->blocks > INT32_MAX) {
        return fmlai_fail(call->error, FMLA_ERROR_UNSUPPORTED, "%s: %lld blocks; allowed: below 2^31", launch->name,
                          (long long)launch->blocks);
    }
    config.gridDim = (dim3){(unsigned)launch->blocks, 1, 1};
    (void)cudaGetLastError(); /* what an earlier caller left behind is not ours to report */
    cudaError_t code = cudaSuccess;
    if (launch->shared > 40 * 1024) { /* 48 KiB with what a kernel has of its own need no leave */
        code = cudaFuncSetAttribute(launch->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)launch->shared);
    }
    if (code == cudaSuccess && launch->cluster > 8) {
        code = cudaFuncSetAttribute(launch->kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    if (code == cudaSuccess) {
        code = cudaLaunchKernelExC(&config, launch->kernel, arguments);
    }
    return code == cudaSuccess ? FMLA_OK : fmlac_cuda_fail(call->error, code, launch->name);
}

fmla_status fmlac_run(const fmlac_state *state, const fmlai_call *call, const fmlac_launch *launch, const void *params)
{
    int before;
    fmla_status status = fmlac_enter(state->device, &before, call->error);
    if (status == FMLA_OK) {
        status = fmlac_enqueue(state, call, launch, params);
        fmlac_leave(before);
    }
    return status;
}
