/* SPDX-License-Identifier: MIT */
/*
 * Arbitrary args for every call but fmla_decode, as fuzz_decode.c does for that one. The first byte of an input chooses
 * the call.
 */
#include "fuzz_input.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define SHAPE(...)                                                                                                     \
    (int64_t[])                                                                                                        \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }

static int64_t next_of(int64_t n)
{
    return n < INT64_MAX ? n + 1 : n;
}

static int64_t product(int64_t a, int64_t b)
{
    int64_t result;
    return __builtin_mul_overflow(a, b, &result) ? INT64_MAX : result;
}

static void prefill(input *in)
{
    fmla_prefill_args a = FMLA_PREFILL_ARGS_INIT;
    const int64_t s_q = number(in, 4), h_q = number(in, 8), h_kv = take(in, 4) ? 1 : number(in, 3);
    const int64_t s_kv = number(in, 20), topk = number(in, 30), d = take(in, 2) ? 576 : number(in, 100);
    const fmla_dtype dtype = take(in, 2) ? FMLA_BF16 : FMLA_F16;
    size_t bytes;
    a.q = tensor(in, dtype, 3, SHAPE(s_q, h_q, d));
    a.kv = tensor(in, dtype, 3, SHAPE(s_kv, h_kv, d));
    a.indices = tensor(in, FMLA_I32, 3, SHAPE(s_q, h_kv, topk));
    a.topk_length = tensor_or_none(in, FMLA_I32, 1, SHAPE(s_q));
    a.attn_sink = tensor_or_none(in, FMLA_F32, 1, SHAPE(h_q));
    a.out = tensor(in, dtype, 3, SHAPE(s_q, h_q, d > 512 ? 512 : d));
    a.lse = tensor_or_none(in, FMLA_F32, 2, SHAPE(s_q, h_q));
    a.max_logits = tensor_or_none(in, FMLA_F32, 2, SHAPE(s_q, h_q));
    expect_sentence(fmla_prefill_workspace_size(cpu_context(), &a, &bytes));
    expect_sentence(fmla_prefill(cpu_context(), &a, NULL));
}

static fmla_fused_params fused_params(input *in, int64_t s_q, int64_t h_q)
{
    fmla_fused_params f;
    memset(&f, 0, sizeof f);
    const int64_t positions = number(in, 30), rope = take(in, 4) ? 64 : number(in, 80);
    const int64_t heads = h_q > 0 && h_q < 4096 ? h_q : 0;
    f.q_norm = number_32(in, 2);
    f.rms_norm_eps = 1e-6f;
    f.q_layout = number_32(in, 2);
    f.rope_style = number_32(in, 2);
    f.rope_dim = (int32_t)rope;
    f.n_wv_group = take(in, 2) ? 1 : number_32(in, 5);
    const int64_t group = f.n_wv_group > 0 ? heads / f.n_wv_group : 0;
    f.token_positions = tensor(in, FMLA_I32, 1, SHAPE(s_q));
    f.cos_sin_cache = tensor(in, FMLA_F32, 2, SHAPE(positions, rope));
    f.attn_sink = tensor_or_none(in, FMLA_F32, 1, SHAPE(h_q));
    f.out_fp8 = tensor(in, FMLA_F8_E4M3, 3, SHAPE(s_q, f.n_wv_group, group * 512));
    const int64_t words = group * 4, aligned = s_q >= 0 && s_q < 4096 ? (s_q + 3) / 4 * 4 : 0;
    f.out_scale = tensor(in, FMLA_I32, 3, SHAPE(aligned, f.n_wv_group, words));
    f.out_scale.shape[0] = s_q;
    f.out_scale.stride[0] = 1;
    f.out_scale.stride[1] = aligned * words;
    f.out_scale.stride[2] = aligned;
    f.lse = tensor_or_none(in, FMLA_F32, 2, SHAPE(s_q, h_q));
    f.max_logits = tensor_or_none(in, FMLA_F32, 2, SHAPE(s_q, h_q));
    return f;
}

static void fused_prefill(input *in)
{
    fmla_fused_prefill_args a = FMLA_FUSED_PREFILL_ARGS_INIT;
    const int64_t s_q = number(in, 4), h_q = number(in, 9), s_kv = number(in, 12), topk = number(in, 20);
    size_t bytes;
    a.q = tensor(in, FMLA_BF16, 3, SHAPE(s_q, h_q, 512));
    a.kv = tensor(in, FMLA_BF16, 3, SHAPE(s_kv, 1, 512));
    a.indices = tensor(in, FMLA_I32, 2, SHAPE(s_q, topk));
    a.topk_length = tensor_or_none(in, FMLA_I32, 1, SHAPE(s_q));
    a.fused = fused_params(in, s_q, h_q);
    expect_sentence(fmla_fused_prefill_workspace_size(cpu_context(), &a, &bytes));
    expect_sentence(fmla_fused_prefill(cpu_context(), &a, NULL));
}

static void fused_decode(input *in)
{
    fmla_fused_decode_args a = FMLA_FUSED_DECODE_ARGS_INIT;
    const int64_t s_q = number(in, 4), h_q = number(in, 9), topk = number(in, 20);
    size_t bytes;
    a.q = tensor(in, FMLA_BF16, 3, SHAPE(s_q, h_q, 512));
    a.kv = cache(in, 512);
    a.indices = tensor(in, FMLA_I32, 2, SHAPE(s_q, topk));
    a.topk_length = tensor_or_none(in, FMLA_I32, 1, SHAPE(s_q));
    if (take(in, 2)) {
        a.extra_kv = cache(in, 512);
        a.extra_indices = tensor(in, FMLA_I32, 2, SHAPE(s_q, number(in, 20)));
        a.extra_topk_length = tensor_or_none(in, FMLA_I32, 1, SHAPE(s_q));
    }
    a.fused = fused_params(in, s_q, h_q);
    expect_sentence(fmla_fused_decode_workspace_size(cpu_context(), &a, &bytes));
    expect_sentence(fmla_fused_decode(cpu_context(), &a, NULL));
}

static void mha(input *in, bool backward)
{
    const int64_t total_q = number(in, 20), total_kv = number(in, 20), h_q = number(in, 5), h_kv = number(in, 5);
    const int64_t d_qk = take(in, 2) ? 192 : number(in, 70), d_v = take(in, 2) ? 128 : number(in, 70);
    const int64_t b = number(in, 4);
    const fmla_dtype dtype = take(in, 2) ? FMLA_BF16 : FMLA_F16;
    const fmla_tensor q = tensor(in, dtype, 3, SHAPE(total_q, h_q, d_qk));
    const fmla_tensor k = tensor(in, dtype, 3, SHAPE(total_kv, h_kv, d_qk));
    const fmla_tensor v = tensor(in, dtype, 3, SHAPE(total_kv, h_kv, d_v));
    const fmla_tensor of_q = tensor_or_none(in, FMLA_I32, 1, SHAPE(next_of(b)));
    const fmla_tensor of_kv = tensor_or_none(in, FMLA_I32, 1, SHAPE(next_of(b)));
    const fmla_tensor out = tensor(in, dtype, 3, SHAPE(total_q, h_q, d_v));
    const fmla_tensor lse = tensor_or_none(in, FMLA_F32, 2, SHAPE(total_q, h_q));
    const int64_t max_q = take(in, 4) ? 0 : number(in, 20), max_kv = take(in, 4) ? 0 : number(in, 20);
    size_t bytes;
    if (!backward) {
        fmla_mha_forward_args a = FMLA_MHA_FORWARD_ARGS_INIT;
        a.q = q, a.k = k, a.v = v, a.cu_seqlens_q = of_q, a.cu_seqlens_kv = of_kv, a.out = out, a.lse = lse;
        a.max_seqlen_q = max_q, a.max_seqlen_kv = max_kv, a.causal = number_32(in, 2);
        expect_sentence(fmla_mha_forward_workspace_size(cpu_context(), &a, &bytes));
        expect_sentence(fmla_mha_forward(cpu_context(), &a, NULL));
        return;
    }
    fmla_mha_backward_args a = FMLA_MHA_BACKWARD_ARGS_INIT;
    a.q = q, a.k = k, a.v = v, a.cu_seqlens_q = of_q, a.cu_seqlens_kv = of_kv, a.out = out, a.lse = lse;
    a.max_seqlen_q = max_q, a.max_seqlen_kv = max_kv, a.causal = number_32(in, 2);
    a.dout = tensor(in, dtype, 3, SHAPE(total_q, h_q, d_v));
    a.dq = tensor(in, dtype, 3, SHAPE(total_q, h_q, d_qk));
    a.dk = tensor(in, dtype, 3, SHAPE(total_kv, h_kv, d_qk));
    a.dv = tensor(in, dtype, 3, SHAPE(total_kv, h_kv, d_v));
    expect_sentence(fmla_mha_backward_workspace_size(cpu_context(), &a, &bytes));
    expect_sentence(fmla_mha_backward(cpu_context(), &a, NULL));
}

static fmla_dtype plain_type(input *in)
{
    static const fmla_dtype types[] = {FMLA_BF16, FMLA_F16, FMLA_F32};
    return types[take(in, 3)];
}

/* Tokens of a cache on one side, rows of numbers on the other. */
static void rows_and_cache(input *in, bool quantize)
{
    const int64_t n = number(in, 12), d = take(in, 2) ? 512 : take(in, 2) ? 576 : number(in, 80);
    const fmla_tensor rows = tensor(in, plain_type(in), 2, SHAPE(n, d));
    const fmla_tensor slots = tensor_or_none(in, FMLA_I32, 1, SHAPE(n));
    const fmla_kv_cache kv = cache(in, d);
    if (quantize) {
        fmla_quantize_args a = FMLA_QUANTIZE_ARGS_INIT;
        a.src = rows, a.slots = slots, a.dst = kv, a.quantizer = number_32(in, 2);
        expect_sentence(fmla_quantize(cpu_context(), &a, NULL));
    } else {
        fmla_dequantize_args a = FMLA_DEQUANTIZE_ARGS_INIT;
        a.src = kv, a.slots = slots, a.dst = rows;
        expect_sentence(fmla_dequantize(cpu_context(), &a, NULL));
    }
}

static void convert(input *in)
{
    fmla_convert_args a = FMLA_CONVERT_ARGS_INIT;
    const int64_t n = number(in, 12);
    a.src = cache(in, 576); /* a plain cache has the width of the other one, at most this */
    a.dst = cache(in, 576);
    a.src_slots = tensor_or_none(in, FMLA_I32, 1, SHAPE(n));
    a.dst_slots = tensor_or_none(in, FMLA_I32, 1, SHAPE(n));
    expect_sentence(fmla_convert(cpu_context(), &a, NULL));
}

static void indices_convert(input *in)
{
    fmla_indices_convert_args a = FMLA_INDICES_CONVERT_ARGS_INIT;
    const int64_t b = number(in, 4), s_q = number(in, 4), topk = number(in, 20);
    a.page_size = number(in, 9);
    a.positions = tensor(in, FMLA_I32, 3, SHAPE(b, s_q, topk));
    a.block_table = tensor(in, FMLA_I32, 2, SHAPE(b, number(in, 9)));
    a.indices = tensor(in, FMLA_I32, 3, SHAPE(b, s_q, topk));
    expect_sentence(fmla_indices_convert(cpu_context(), &a, NULL));
}

/* Scale words of `rows` rows, token-aligned column-major. */
static fmla_tensor scale_words(input *in, int64_t rows, int64_t words)
{
    const int64_t aligned = rows >= 0 && rows < 65536 ? (rows + 3) / 4 * 4 : 0;
    fmla_tensor t = tensor(in, FMLA_I32, 2, SHAPE(words, aligned));
    t.shape[0] = rows;
    t.shape[1] = words;
    t.stride[0] = 1;
    t.stride[1] = aligned;
    return t;
}

static void fp8_cast(input *in)
{
    fmla_fp8_cast_args a = FMLA_FP8_CAST_ARGS_INIT;
    const int64_t n = number(in, 9), d = take(in, 2) ? 512 : number(in, 700);
    a.group = take(in, 2) ? 32 : take(in, 2) ? 128 : number_32(in, 200);
    a.src = tensor(in, plain_type(in), 2, SHAPE(n, d));
    a.codes = tensor(in, FMLA_F8_E4M3, 2, SHAPE(n, d));
    a.scale = scale_words(in, n, a.group > 0 ? d / a.group / 4 : 0);
    expect_sentence(fmla_fp8_cast(cpu_context(), &a, NULL));
}

static void merge(input *in)
{
    fmla_merge_args a = FMLA_MERGE_ARGS_INIT;
    fmla_tensor outs[3], lses[3];
    const int64_t n = number(in, 5), h = number(in, 5), d = number(in, 80);
    for (int i = 0; i < 3; i++) {
        outs[i] = tensor(in, plain_type(in), 3, SHAPE(n, h, d));
        lses[i] = tensor(in, FMLA_F32, 2, SHAPE(n, h));
    }
    a.outs = outs;
    a.lses = lses;
    a.count = (int32_t)take(in, 4);
    a.attn_sink = tensor_or_none(in, FMLA_F32, 1, SHAPE(h));
    a.out = tensor(in, plain_type(in), 3, SHAPE(n, h, d));
    a.lse = tensor_or_none(in, FMLA_F32, 2, SHAPE(n, h));
    expect_sentence(fmla_merge(cpu_context(), &a, NULL));
}

static void permute_q_b(input *in)
{
    fmla_permute_q_b_args a = FMLA_PERMUTE_Q_B_ARGS_INIT;
    a.h_q = number_32(in, 5);
    a.d_q = 16 * number_32(in, 4) % 1024;
    const int64_t rows = product(a.h_q, a.d_q), columns = take(in, 2) ? 256 : number(in, 600), words = columns / 128;
    a.weight = tensor(in, FMLA_F8_E4M3, 2, SHAPE(rows, columns));
    a.scale = scale_words(in, rows, words);
    a.out_weight = tensor(in, FMLA_F8_E4M3, 2, SHAPE(rows, columns));
    a.out_scale = scale_words(in, rows, words);
    expect_sentence(fmla_permute_q_b(cpu_context(), &a, NULL));
}

static void permute_wv(input *in)
{
    fmla_permute_wv_args a = FMLA_PERMUTE_WV_ARGS_INIT;
    const int64_t groups = number(in, 4), d_out = number(in, 9);
    a.wv_group_size = number_32(in, 5);
    a.d_o = take(in, 2) ? 128 : number_32(in, 300);
    const int64_t columns = product(a.wv_group_size, a.d_o), words = columns / 128;
    const int64_t aligned = d_out >= 0 && d_out < 4096 ? (d_out + 3) / 4 * 4 : 0;
    a.weight = tensor(in, FMLA_F8_E4M3, 3, SHAPE(groups, d_out, columns));
    a.out_weight = tensor(in, FMLA_F8_E4M3, 3, SHAPE(groups, d_out, columns));
    fmla_tensor *scales[] = {&a.scale, &a.out_scale};
    for (int i = 0; i < 2; i++) {
        *scales[i] = tensor(in, FMLA_I32, 3, SHAPE(groups, words, aligned));
        scales[i]->shape[1] = d_out;
        scales[i]->shape[2] = words;
        scales[i]->stride[1] = 1;
        scales[i]->stride[2] = aligned;
    }
    expect_sentence(fmla_permute_wv(cpu_context(), &a, NULL));
}

static void schedule(input *in)
{
    fmla_schedule_args a = FMLA_SCHEDULE_ARGS_INIT;
    const int64_t b = number(in, 9), parts = number(in, 20);
    static const int32_t forms[] = {FMLA_SCHEDULE_2025_02, FMLA_SCHEDULE_2025_09, FMLA_SCHEDULE_2026_01};
    a.form = take(in, 16) ? forms[take(in, 3)] : number_32(in, 9);
    a.overhead_blocks = number_32(in, 9);
    a.topk = take(in, 2) ? -1 : number(in, 3000);
    a.batch = number(in, 9);
    a.extra_topk = number(in, 300);
    a.cache_seqlens = tensor_or_none(in, FMLA_I32, 1, SHAPE(b));
    a.topk_length = tensor_or_none(in, FMLA_I32, 1, SHAPE(b));
    a.extra_topk_length = tensor_or_none(in, FMLA_I32, 1, SHAPE(b));
    a.metadata = tensor(in, FMLA_I32, 2, SHAPE(parts, 8));
    a.num_splits = tensor(in, FMLA_I32, 1, SHAPE(next_of(b)));
    expect_sentence(fmla_schedule(cpu_context(), &a, NULL));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {.data = data, .size = size};
    const uint32_t call = take(&in, 14);
    switch (call) {
    case 0:
        prefill(&in);
        break;
    case 1:
        fused_prefill(&in);
        break;
    case 2:
        fused_decode(&in);
        break;
    case 3:
    case 4:
        mha(&in, call == 4);
        break;
    case 5:
    case 6:
        rows_and_cache(&in, call == 5);
        break;
    case 7:
        convert(&in);
        break;
    case 8:
        indices_convert(&in);
        break;
    case 9:
        fp8_cast(&in);
        break;
    case 10:
        merge(&in);
        break;
    case 11:
        permute_q_b(&in);
        break;
    case 12:
        permute_wv(&in);
        break;
    default:
        schedule(&in);
    }
    free_memory(&in);
    return 0;
}
