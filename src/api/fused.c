/* SPDX-License-Identifier: MIT */
/* fused.c: fmla_fused_prefill and fmla_fused_decode: the two differ in their caches alone. */
#include <math.h>

#include "describe.h"

#define D          512 /* d_qk and d_v of the fused operations */
#define CHUNK      32  /* output dims per scale byte */
#define WORD_BYTES 4   /* scale bytes per word */

static void describe_queries(fmlai_checker *c, const fmla_tensor *q, fmlai_frame *f, fmlai_mqa *p)
{
    FMLAI_EXPECT(c, q, .name = "q", .dtypes = FMLAI_BIT(FMLA_BF16), .flags = FMLAI_LAST, .letters = "s_q, h_q, d_qk",
                 .rank = 3, .shape = {FMLAI_ANY, FMLAI_ANY, D});
    if (fmlai_failed(c)) {
        return;
    }
    if (q->shape[1] > 1 && q->stride[1] != D) {
        fmlai_invalid(c, "q: stride[1] is %lld; allowed: %d, the heads of a token are contiguous",
                      (long long)q->stride[1], D);
    }
    f->s_q = f->tokens = q->shape[0];
    p->batch = 1;
    p->s_q = p->num_tokens = f->tokens;
    p->h_q = fmlai_check_width(c, "h_q", q->shape[1]);
    p->h_kv = 1;
    p->d_qk = D;
    p->d_v = D;
    p->lse_factor = 1.0f;
    p->q = fmlai_rows_of(c, f, q);
}

/* Norm, RoPE and the places of codes and scales. */
static void describe_prologue(fmlai_checker *c, const fmla_fused_params *a, const fmlai_frame *f, fmlai_fused *u)
{
    int32_t rope_dim = a->rope_dim == 0 ? 64 : a->rope_dim;
    fmlai_check_range(c, "fused.q_norm", a->q_norm, 0, 1);
    fmlai_check_range(c, "fused.q_layout", a->q_layout, FMLA_Q_PERMUTED, FMLA_Q_PLAIN);
    fmlai_check_range(c, "fused.rope_style", a->rope_style, FMLA_ROPE_INTERLEAVED, FMLA_ROPE_NEOX);
    fmlai_check_zero(c, "fused.reserved0", a->reserved0);
    fmlai_check_zero(c, "fused.reserved1", a->reserved1[0] | a->reserved1[1] | a->reserved1[2] | a->reserved1[3]);
    if (rope_dim < 2 || rope_dim > D || rope_dim % 2 != 0) {
        fmlai_invalid(c, "fused.rope_dim: %d; allowed: 0 (means 64), or an even number 2..%d", (int)a->rope_dim, D);
    }
    if (a->q_norm && !(a->rms_norm_eps >= 0.0f && isfinite(a->rms_norm_eps))) {
        fmlai_invalid(c, "fused.rms_norm_eps: %g; allowed: finite and not negative", (double)a->rms_norm_eps);
    }
    FMLAI_EXPECT(c, &a->token_positions, .name = "fused.token_positions", .dtypes = FMLAI_BIT(FMLA_I32),
                 .letters = "s_q", .rank = 1, .shape = {f->tokens});
    FMLAI_EXPECT(c, &a->cos_sin_cache, .name = "fused.cos_sin_cache", .dtypes = FMLAI_BIT(FMLA_F32),
                 .flags = FMLAI_LAST, .letters = "n, rope_dim", .rank = 2, .shape = {FMLAI_ANY, rope_dim});
    u->enabled = true;
    u->q_norm = a->q_norm != 0;
    u->q_permuted = a->q_layout == FMLA_Q_PERMUTED;
    u->rope_neox = a->rope_style == FMLA_ROPE_NEOX;
    u->eps = a->rms_norm_eps;
    u->rope_dim = rope_dim;
    u->positions = fmlai_data(c, &a->token_positions);
    u->position_stride = a->token_positions.stride[0];
    u->cos_sin = fmlai_data(c, &a->cos_sin_cache);
    u->cos_sin_rows = a->cos_sin_cache.shape[0];
    u->cos_sin_stride = a->cos_sin_cache.stride[0];
    fmlai_check_positions(c, "fused.token_positions", u->positions, u->position_stride, f->tokens, u->cos_sin_rows);
}

/* out_scale [s_q, n_wv_group, words]: strides 1, A * words, A. */
static void describe_scales(fmlai_checker *c, const fmla_tensor *t, const fmlai_frame *f, fmlai_fused *u)
{
    const int64_t words = (int64_t)u->group_heads * D / CHUNK / WORD_BYTES;
    int64_t group_stride = 0;
    FMLAI_EXPECT(c, t, .name = "fused.out_scale", .dtypes = FMLAI_BIT(FMLA_I32), .letters = "s_q, n_wv_group, words",
                 .rank = 3, .shape = {f->tokens, u->groups, words});
    if (fmlai_failed(c) || f->tokens == 0) {
        return;
    }
    const int64_t rows = t->stride[2];
    if (rows < f->tokens || rows % 4 != 0) {
        fmlai_invalid(c, "fused.out_scale: stride[2] is %lld; allowed: a multiple of 4, at least s_q = %lld",
                      (long long)rows, (long long)f->tokens);
    } else if (f->tokens > 1 && t->stride[0] != 1) {
        fmlai_invalid(c, "fused.out_scale: stride[0] is %lld; allowed: 1", (long long)t->stride[0]);
    } else if (!fmlai_mul(rows, words, &group_stride) || (u->groups > 1 && t->stride[1] != group_stride)) {
        fmlai_invalid(c, "fused.out_scale: stride[1] is %lld; allowed: %lld, stride[2] * words",
                      (long long)t->stride[1], (long long)group_stride);
    }
    u->scale = fmlai_data(c, t);
    u->scale_rows = rows;
}

static void describe_epilogue(fmlai_checker *c, const fmla_fused_params *a, const fmlai_frame *f, fmlai_mqa *p)
{
    const uint32_t f32 = fmlai_result_dtypes(c, FMLAI_BIT(FMLA_F32)), f64 = FMLAI_BIT(FMLA_F64);
    const uint32_t flags = FMLAI_OPTIONAL | FMLAI_OUTPUT;
    fmlai_fused *u = &p->fused;
    if (a->n_wv_group < 1 || p->h_q % a->n_wv_group != 0) {
        fmlai_invalid(c, "fused.n_wv_group: %d; allowed: a divisor of h_q, %d", (int)a->n_wv_group, (int)p->h_q);
        return;
    }
    u->groups = a->n_wv_group;
    u->group_heads = p->h_q / a->n_wv_group;
    FMLAI_EXPECT(c, &a->out_fp8, .name = "fused.out_fp8", .dtypes = FMLAI_CODES, .flags = FMLAI_DENSE,
                 .letters = "s_q, n_wv_group, G * 512", .rank = 3,
                 .shape = {f->tokens, u->groups, (int64_t)u->group_heads * D});
    u->codes = fmlai_data(c, &a->out_fp8);
    describe_scales(c, &a->out_scale, f, u);
    fmlai_pattern pattern = fmlai_token_pattern(f, "fused.lse", f32, flags, "h_q", 1, p->h_q, 0);
    fmlai_check_tensor(c, &a->lse, &pattern);
    pattern.name = "fused.max_logits";
    fmlai_check_tensor(c, &a->max_logits, &pattern);
    pattern = fmlai_token_pattern(f, "fused.abs_logit", f64, flags, "h_q", 1, p->h_q, 0);
    fmlai_check_oracle_only(c, &a->abs_logit, pattern.name);
    fmlai_check_tensor(c, &a->abs_logit, &pattern);
    pattern = fmlai_token_pattern(f, "fused.abs_out", f64, flags | FMLAI_LAST, "h_q, d_v", 2, p->h_q, D);
    fmlai_check_oracle_only(c, &a->abs_out, pattern.name);
    fmlai_check_tensor(c, &a->abs_out, &pattern);
    pattern.name = "fused.out_exact";
    fmlai_check_oracle_only(c, &a->out_exact, pattern.name);
    fmlai_check_tensor(c, &a->out_exact, &pattern);
    p->out = fmlai_rows_of(c, f, &a->out_exact);
    p->lse = fmlai_rows_of(c, f, &a->lse);
    p->max_logits = fmlai_rows_of(c, f, &a->max_logits);
    p->abs_out = fmlai_rows_of(c, f, &a->abs_out);
    p->abs_logit = fmlai_rows_of(c, f, &a->abs_logit);
    p->empty_lse = fmlai_check_empty_lse(c, a->empty_lse);
}

static void describe_fused(fmlai_checker *c, const fmla_fused_params *a, const fmlai_frame *f, float scale,
                           fmlai_mqa *p)
{
    p->scale = fmlai_check_scale(c, scale, D);
    p->batch_invariant = true;
    p->sink = fmlai_describe_sink(c, &a->attn_sink, p->h_q);
    describe_prologue(c, a, f, &p->fused);
    if (!fmlai_failed(c)) {
        describe_epilogue(c, a, f, p);
    }
}

static void describe_prefill(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mqa *p)
{
    const fmla_fused_prefill_args *a = args;
    fmlai_frame f = {.flat = true, .letters = "s_q", .batch = 1};
    fmla_tensor indices = a->indices;
    fmlai_check_zero(c, "reserved0", a->reserved0);
    describe_queries(c, &a->q, &f, p);
    FMLAI_EXPECT(c, &a->kv, .name = "kv", .dtypes = FMLAI_BIT(FMLA_BF16), .flags = FMLAI_LAST,
                 .letters = "s_kv, h_kv, d_qk", .rank = 3, .shape = {FMLAI_ANY, 1, D});
    fmlai_describe_tensor_pool(c, &a->kv, &p->main.pool);
    if (indices.rank == 3) {
        FMLAI_EXPECT(c, &indices, .name = "indices", .dtypes = FMLAI_BIT(FMLA_I32), .flags = FMLAI_LAST,
                     .letters = "s_q, h_kv, topk", .rank = 3, .shape = {f.tokens, 1, FMLAI_ANY});
        indices.rank = 2;
        indices.shape[1] = indices.shape[2];
        indices.stride[1] = indices.stride[2];
    }
    fmlai_describe_indices(c, &f, "indices", &indices, &p->main);
    p->main.length = fmlai_describe_lengths(c, &f, "topk_length", &a->topk_length, false);
    if (!fmlai_failed(c)) {
        describe_fused(c, &a->fused, &f, a->softmax_scale, p);
    }
    fmlai_check_supported(c, context, FMLA_OP_FUSED_PREFILL, p);
}

static void describe_decode(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mqa *p)
{
    const fmla_fused_decode_args *a = args;
    fmlai_frame f = {.flat = true, .letters = "s_q", .batch = 1};
    int32_t heads = 1, extra_heads = 1;
    fmlai_check_zero(c, "reserved0", a->reserved0);
    describe_queries(c, &a->q, &f, p);
    fmlai_describe_pool(c, "kv", &a->kv, D, &p->main.pool, &heads);
    fmlai_describe_indices(c, &f, "indices", &a->indices, &p->main);
    p->main.length = fmlai_describe_lengths(c, &f, "topk_length", &a->topk_length, false);
    if (fmlai_cache_present(&a->extra_kv)) {
        fmlai_describe_pool(c, "extra_kv", &a->extra_kv, D, &p->extra.pool, &extra_heads);
        fmlai_describe_indices(c, &f, "extra_indices", &a->extra_indices, &p->extra);
        p->extra.length = fmlai_describe_lengths(c, &f, "extra_topk_length", &a->extra_topk_length, false);
    } else {
        fmlai_check_no_cache(c, "extra_kv", &a->extra_kv, "its format is 0");
        fmlai_check_absent(c, &a->extra_indices, "extra_indices", "without extra_kv");
        fmlai_check_absent(c, &a->extra_topk_length, "extra_topk_length", "without extra_kv");
    }
    if (heads != 1 || extra_heads != 1) {
        fmlai_invalid(c, "%s.num_heads: %d; allowed: 1", heads != 1 ? "kv" : "extra_kv",
                      (int)(heads != 1 ? heads : extra_heads));
    }
    if (!fmlai_failed(c)) {
        describe_fused(c, &a->fused, &f, a->softmax_scale, p);
    }
    fmlai_check_supported(c, context, FMLA_OP_FUSED_DECODE, p);
}

static const fmlai_mqa_family prefill_family = {sizeof(fmla_fused_prefill_args),
                                                offsetof(fmla_fused_prefill_args, workspace), describe_prefill};

static fmla_status prefill_run(fmla_context *context, const void *args, void *stream)
{
    return fmlai_api_mqa_run(context, &prefill_family, args, stream);
}

static fmla_status prefill_measure(fmla_context *context, const void *args, void *size)
{
    return fmlai_api_mqa_size(context, &prefill_family, args, size);
}

fmla_status fmla_fused_prefill(fmla_context *context, const fmla_fused_prefill_args *args, void *stream)
{
    return fmlai_guarded(context, prefill_run, args, stream);
}

fmla_status fmla_fused_prefill_workspace_size(fmla_context *context, const fmla_fused_prefill_args *args, size_t *size)
{
    return fmlai_guarded(context, prefill_measure, args, size);
}

static const fmlai_mqa_family decode_family = {sizeof(fmla_fused_decode_args),
                                               offsetof(fmla_fused_decode_args, workspace), describe_decode};

static fmla_status decode_run(fmla_context *context, const void *args, void *stream)
{
    return fmlai_api_mqa_run(context, &decode_family, args, stream);
}

static fmla_status decode_measure(fmla_context *context, const void *args, void *size)
{
    return fmlai_api_mqa_size(context, &decode_family, args, size);
}

fmla_status fmla_fused_decode(fmla_context *context, const fmla_fused_decode_args *args, void *stream)
{
    return fmlai_guarded(context, decode_run, args, stream);
}

fmla_status fmla_fused_decode_workspace_size(fmla_context *context, const fmla_fused_decode_args *args, size_t *size)
{
    return fmlai_guarded(context, decode_measure, args, size);
}
