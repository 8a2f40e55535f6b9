/* SPDX-License-Identifier: MIT */
/*
 * check.c: FLASHMLA_CHECK=1. Values in device tensors that the kernels would treat as "not attended" are looked for by
 * one kernel before the call, and the first is reported. This waits for the device, so it is for finding faults, and it
 * is left out while a stream is captured into a graph.
 */
#include "cuda_host.h"

extern void fmlak_check_lengths_sm80(void);
extern void fmlak_check_entries_sm80(void);

static const char *const kinds[] = {"cache_seqlens",     "block_table",   "kv_bound",
                                    "indices",           "extra_indices", "topk_length",
                                    "extra_topk_length", "cu_seqlens_q",  "token_positions"};

fmla_status fmlac_check_mqa(const fmlac_state *state, const fmlac_mqa *p, const fmlai_call *call)
{
    cudaStream_t stream = (cudaStream_t)call->stream;
    enum cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    struct {
        fmlac_mqa mqa;
        fmlac_report *report;
    } params = {*p, state->report};
    fmlac_report report;
    cudaError_t code = cudaStreamIsCapturing(stream, &capture);
    if (code != cudaSuccess) {
        return fmlac_cuda_fail(call->error, code, "cudaStreamIsCapturing");
    }
    if (capture != cudaStreamCaptureStatusNone) {
        return FMLA_OK;
    }
    int64_t rows = p->batch > p->num_tokens ? p->batch : p->num_tokens;
    fmlac_launch lengths = {.kernel = (const void *)fmlak_check_lengths_sm80,
                            .name = "fmlak_check_lengths_sm80",
                            .blocks = fmlac_ceil(rows + 1, 256),
                            .threads = 256};
    fmlac_launch entries = {.kernel = (const void *)fmlak_check_entries_sm80,
                            .name = "fmlak_check_entries_sm80",
                            .blocks = rows * p->h_kv,
                            .threads = 256};
    code = cudaMemsetAsync(state->report, 0xFF, sizeof report, stream);
    fmla_status status = code == cudaSuccess ? FMLA_OK : fmlac_cuda_fail(call->error, code, "cudaMemsetAsync");
    if (status == FMLA_OK) {
        status = fmlac_enqueue(state, call, &lengths, &params);
    }
    if (status == FMLA_OK) {
        status = fmlac_enqueue(state, call, &entries, &params);
    }
    if (status != FMLA_OK) {
        return status;
    }
    code = cudaMemcpyAsync(&report, state->report, sizeof report, cudaMemcpyDeviceToHost, stream);
    if (code == cudaSuccess) {
        code = cudaStreamSynchronize(stream);
    }
    if (code != cudaSuccess) {
        return fmlac_cuda_fail(call->error, code, "fmlak_check_entries_sm80");
    }
    if (report.place == ~0ull) {
        return FMLA_OK;
    }
    unsigned kind = (unsigned)(report.place >> 56);
    return fmlai_fail(call->error, FMLA_ERROR_INVALID_ARGUMENT, "%s: element %llu is %d, out of range",
                      kind < sizeof kinds / sizeof kinds[0] ? kinds[kind] : "tensor",
                      report.place & 0xFFFFFFFFFFFFFFull, (int)report.value);
}
