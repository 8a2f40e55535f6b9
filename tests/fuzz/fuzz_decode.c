/* SPDX-License-Identifier: MIT */
/*
 * Arbitrary args for fmla_decode: shapes, strides, formats, lengths, block tables and indices come from the input. The
 * call succeeds or says what is wrong; it never touches memory that is not the call's (ASan watches).
 */
#include "fuzz_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {.data = data, .size = size};
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    const int64_t b = number(&in, 4), s_q = number(&in, 4), h_q = number(&in, 8), topk = number(&in, 40);
    const bool sparse = take(&in, 2), ragged = take(&in, 8) == 7;
    int64_t d = take(&in, 2) ? 512 : take(&in, 2) ? 576 : number(&in, 80);
    a.kv = cache(&in, d);
    if (a.kv.format == FMLA_KV_V32 && !seldom(&in)) {
        d = 576;
    } else if (a.kv.format > FMLA_KV_V32 && a.kv.format < FMLA_KV_COUNT && !seldom(&in)) {
        d = 512;
    }
    const fmla_dtype dtype = a.kv.format == FMLA_KV_F16 ? FMLA_F16 : FMLA_BF16;
    const int64_t d_v = d > 512 ? 512 : d;
    if (ragged) {
        a.q = tensor(&in, dtype, 3, (int64_t[]){s_q, h_q, d});
        a.out = tensor(&in, dtype, 3, (int64_t[]){s_q, h_q, d_v});
        a.lse = tensor_or_none(&in, FMLA_F32, 2, (int64_t[]){h_q, s_q});
        a.cu_seqlens_q = tensor(&in, FMLA_I32, 1, (int64_t[]){b < INT64_MAX ? b + 1 : b});
    } else {
        a.q = tensor(&in, dtype, 4, (int64_t[]){b, s_q, h_q, d});
        a.out = tensor(&in, take(&in, 4) ? dtype : FMLA_F32, 4, (int64_t[]){b, s_q, h_q, d_v});
        a.lse = tensor_or_none(&in, FMLA_F32, 3, (int64_t[]){b, h_q, s_q});
        a.max_logits = tensor_or_none(&in, FMLA_F32, 3, (int64_t[]){b, h_q, s_q});
    }
    if (sparse) {
        a.indices = tensor(&in, FMLA_I32, 3, (int64_t[]){b, s_q, topk});
        a.topk_length = tensor_or_none(&in, FMLA_I32, 1, (int64_t[]){b});
        if (take(&in, 2)) {
            const int64_t extra_topk = number(&in, 40);
            a.extra_kv = cache(&in, d);
            a.extra_indices = tensor(&in, FMLA_I32, 3, (int64_t[]){b, s_q, extra_topk});
            a.extra_topk_length = tensor_or_none(&in, FMLA_I32, 2, (int64_t[]){b, s_q});
        }
    } else {
        a.cache_seqlens = tensor(&in, FMLA_I32, 1, (int64_t[]){b});
        a.block_table = tensor_or_none(&in, FMLA_I32, 2, (int64_t[]){b, number(&in, 9)});
        if (take(&in, 4) == 3) {
            a.kv_bound = tensor(&in, FMLA_I32, 2, (int64_t[]){b, s_q});
        }
        a.causal = number_32(&in, 2);
    }
    a.attn_sink = tensor_or_none(&in, FMLA_F32, 1, (int64_t[]){h_q});
    if (seldom(&in)) {
        a.softmax_scale = (float)number(&in, 8);
        a.lse_base = number_32(&in, 3);
        a.empty_lse = number_32(&in, 3);
    }
    if (seldom(&in)) {
        a.workspace_size = (size_t)number(&in, 65536);
        a.workspace = memory(&in, (int64_t)a.workspace_size);
    }
    size_t bytes = 0;
    expect_sentence(fmla_decode_workspace_size(cpu_context(), &a, &bytes));
    expect_sentence(fmla_decode(cpu_context(), &a, NULL));
    free_memory(&in);
    return 0;
}
