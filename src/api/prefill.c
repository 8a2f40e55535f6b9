/* SPDX-License-Identifier: MIT */
/* prefill.c: fmla_prefill, sparse attention of many query tokens over one unpaged tensor. */
#include <math.h>

#include "describe.h"

static void describe_inputs(fmlai_checker *c, const fmla_prefill_args *a, fmlai_frame *f, fmlai_mqa *p)
{
    FMLAI_EXPECT(c, &a->q, .name = "q", .dtypes = FMLAI_HALF, .flags = FMLAI_LAST, .letters = "s_q, h_q, d_qk",
                 .rank = 3, .shape = {FMLAI_ANY, FMLAI_ANY, FMLAI_ANY});
    if (fmlai_failed(c)) {
        return;
    }
    f->s_q = f->tokens = a->q.shape[0];
    p->batch = 1;
    p->s_q = p->num_tokens = f->tokens;
    p->h_q = fmlai_check_width(c, "h_q", a->q.shape[1]);
    p->d_qk = fmlai_check_width(c, "d_qk", a->q.shape[2]);
    p->q = fmlai_rows_of(c, f, &a->q);
    FMLAI_EXPECT(c, &a->kv, .name = "kv", .dtypes = FMLAI_BIT(a->q.dtype), .note = "q's dtype", .flags = FMLAI_LAST,
                 .letters = "s_kv, h_kv, d_qk", .rank = 3, .shape = {FMLAI_ANY, FMLAI_ANY, p->d_qk});
    fmlai_describe_tensor_pool(c, &a->kv, &p->main.pool);
    if (fmlai_failed(c)) {
        return;
    }
    p->h_kv = fmlai_check_width(c, "h_kv", a->kv.shape[1]);
    const bool flat = a->indices.rank == 2 && p->h_kv == 1;
    FMLAI_EXPECT(c, &a->indices, .name = "indices", .dtypes = FMLAI_BIT(FMLA_I32), .flags = FMLAI_LAST,
                 .letters = flat ? "s_q, topk" : "s_q, h_kv, topk", .rank = flat ? 2 : 3,
                 .shape = {f->tokens, flat ? FMLAI_ANY : p->h_kv, FMLAI_ANY});
    p->main.kind = FMLAI_LIST_INDEXED;
    p->main.indices = fmlai_data(c, &a->indices);
    p->main.index_inner = a->indices.stride[0];
    p->main.index_head = flat || p->h_kv == 1 ? 0 : a->indices.stride[1];
    p->main.topk = a->indices.shape[flat ? 1 : 2];
    p->main.length = fmlai_describe_lengths(c, f, "topk_length", &a->topk_length, false);
    p->sink = fmlai_describe_sink(c, &a->attn_sink, p->h_q);
    p->scale = fmlai_check_scale(c, a->softmax_scale, p->d_qk);
}

static void describe_results(fmlai_checker *c, const fmla_prefill_args *a, const fmlai_frame *f, fmlai_mqa *p)
{
    const uint32_t f32 = fmlai_result_dtypes(c, FMLAI_BIT(FMLA_F32)), f64 = FMLAI_BIT(FMLA_F64);
    const uint32_t out_dtypes = fmlai_result_dtypes(c, FMLAI_BIT(p->q.dtype) | FMLAI_BIT(FMLA_F32));
    const uint32_t flags = FMLAI_OPTIONAL | FMLAI_OUTPUT;
    fmlai_pattern pattern =
        fmlai_token_pattern(f, "out", out_dtypes, FMLAI_LAST | FMLAI_OUTPUT, "h_q, d_v", 2, p->h_q, FMLAI_ANY);
    pattern.note = "q's dtype, or F32";
    fmlai_check_tensor(c, &a->out, &pattern);
    if (!fmlai_failed(c)) {
        p->d_v = fmlai_check_width(c, "d_v", a->out.shape[2]);
    }
    pattern = fmlai_token_pattern(f, "lse", f32, flags, "h_q", 1, p->h_q, 0);
    fmlai_check_tensor(c, &a->lse, &pattern);
    pattern = fmlai_token_pattern(f, "max_logits", f32, flags, "h_q", 1, p->h_q, 0);
    fmlai_check_tensor(c, &a->max_logits, &pattern);
    fmlai_check_oracle_only(c, &a->abs_out, "abs_out");
    pattern = fmlai_token_pattern(f, "abs_out", f64, flags | FMLAI_LAST, "h_q, d_v", 2, p->h_q, p->d_v);
    fmlai_check_tensor(c, &a->abs_out, &pattern);
    fmlai_check_oracle_only(c, &a->abs_logit, "abs_logit");
    pattern = fmlai_token_pattern(f, "abs_logit", f64, flags, "h_q", 1, p->h_q, 0);
    fmlai_check_tensor(c, &a->abs_logit, &pattern);
    p->out = fmlai_rows_of(c, f, &a->out);
    p->lse = fmlai_rows_of(c, f, &a->lse);
    p->max_logits = fmlai_rows_of(c, f, &a->max_logits);
    p->abs_out = fmlai_rows_of(c, f, &a->abs_out);
    p->abs_logit = fmlai_rows_of(c, f, &a->abs_logit);
    p->empty_lse = fmlai_check_empty_lse(c, a->empty_lse);
    fmlai_check_range(c, "lse_base", a->lse_base, FMLA_LSE_NATURAL, FMLA_LSE_BASE2);
    p->lse_factor = a->lse_base == FMLA_LSE_BASE2 ? (float)M_LOG2E : 1.0f;
}

static void describe(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mqa *p)
{
    const fmla_prefill_args *a = args;
    fmlai_frame f = {.flat = true, .letters = "s_q", .batch = 1};
    fmlai_check_zero(c, "reserved0", a->reserved0);
    p->batch_invariant = true; /* there is no switch: prompts are cut into chunks, and rows may not depend on that */
    describe_inputs(c, a, &f, p);
    if (fmlai_failed(c)) {
        return;
    }
    describe_results(c, a, &f, p);
    fmlai_check_supported(c, context, FMLA_OP_SPARSE_PREFILL, p);
}

static const fmlai_mqa_family family = {sizeof(fmla_prefill_args), offsetof(fmla_prefill_args, workspace), describe};

static fmla_status run(fmla_context *context, const void *args, void *stream)
{
    return fmlai_api_mqa_run(context, &family, args, stream);
}

static fmla_status measure(fmla_context *context, const void *args, void *size)
{
    return fmlai_api_mqa_size(context, &family, args, size);
}

fmla_status fmla_prefill(fmla_context *context, const fmla_prefill_args *args, void *stream)
{
    return fmlai_guarded(context, run, args, stream);
}

fmla_status fmla_prefill_workspace_size(fmla_context *context, const fmla_prefill_args *args, size_t *size)
{
    return fmlai_guarded(context, measure, args, size);
}
