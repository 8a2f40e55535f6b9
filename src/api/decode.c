/* SPDX-License-Identifier: MIT */
/* decode.c: fmla_decode, dense and sparse. */
#include <math.h>

#include "describe.h"

/* q, and with it the frame: [b, s_q, h_q, d_qk], ragged [total_q, h_q, d_qk] with cu_seqlens_q. */
static void describe_queries(fmlai_checker *c, const fmla_decode_args *a, fmlai_frame *f, fmlai_mqa *p)
{
    const fmla_tensor *q = &a->q, *cu = &a->cu_seqlens_q;
    const bool ragged = fmlai_present(cu);
    FMLAI_EXPECT(c, q, .name = "q", .dtypes = FMLAI_HALF, .flags = FMLAI_LAST,
                 .letters = ragged ? "total_q, h_q, d_qk" : "b, s_q, h_q, d_qk", .rank = ragged ? 3 : 4,
                 .shape = {FMLAI_ANY, FMLAI_ANY, FMLAI_ANY, FMLAI_ANY});
    FMLAI_EXPECT(c, cu, .name = "cu_seqlens_q", .dtypes = FMLAI_BIT(FMLA_I32), .flags = FMLAI_OPTIONAL | FMLAI_LAST,
                 .letters = "b + 1", .rank = 1, .shape = {FMLAI_ANY});
    if (ragged && cu->shape[0] < 1) {
        fmlai_invalid(c, "cu_seqlens_q: has no entries; allowed: b + 1 of them");
    }
    if (fmlai_failed(c)) {
        return;
    }
    f->flat = ragged;
    f->letters = ragged ? "total_q" : "b, s_q";
    f->batch = ragged ? cu->shape[0] - 1 : q->shape[0];
    f->s_q = ragged ? q->shape[0] : q->shape[1];
    f->tokens = ragged ? f->s_q : f->batch * f->s_q;
    if (f->batch == 0 && f->tokens > 0) {
        fmlai_invalid(c, "cu_seqlens_q: names no requests; q has %lld tokens, allowed: none", (long long)f->tokens);
    }
    p->batch = f->batch;
    p->s_q = f->s_q;
    p->num_tokens = f->tokens;
    p->h_q = fmlai_check_width(c, "h_q", q->shape[q->rank - 2]);
    p->d_qk = fmlai_check_width(c, "d_qk", q->shape[q->rank - 1]);
    p->q = fmlai_rows_of(c, f, q);
    if (ragged) {
        p->cu_seqlens_q = fmlai_data(c, cu);
        fmlai_check_cu_seqlens(c, "cu_seqlens_q", p->cu_seqlens_q, f->batch, f->tokens, "", 0);
    }
}

static void describe_dense(fmlai_checker *c, const fmla_decode_args *a, const fmlai_frame *f, fmlai_mqa *p)
{
    static const char *const why = "without indices";
    fmlai_token_list *list = &p->main;
    list->kind = FMLAI_LIST_PAGED;
    fmlai_check_no_cache(c, "extra_kv", &a->extra_kv, why);
    fmlai_check_absent(c, &a->extra_indices, "extra_indices", why);
    fmlai_check_absent(c, &a->topk_length, "topk_length", why);
    fmlai_check_absent(c, &a->extra_topk_length, "extra_topk_length", why);
    fmlai_describe_pool(c, "kv", &a->kv, p->d_qk, &list->pool, &p->h_kv);
    FMLAI_EXPECT(c, &a->cache_seqlens, .name = "cache_seqlens", .dtypes = FMLAI_BIT(FMLA_I32), .flags = FMLAI_LAST,
                 .letters = "b", .rank = 1, .shape = {f->batch});
    FMLAI_EXPECT(c, &a->block_table, .name = "block_table", .dtypes = FMLAI_BIT(FMLA_I32),
                 .flags = FMLAI_OPTIONAL | FMLAI_LAST, .letters = "b, max_pages", .rank = 2,
                 .shape = {f->batch, FMLAI_ANY});
    list->bound = fmlai_describe_lengths(c, f, "kv_bound", &a->kv_bound, false);
    if (fmlai_present(&a->kv_bound) && a->causal) {
        fmlai_invalid(c, "causal: 1; allowed: 0 with kv_bound");
    }
    if (fmlai_failed(c)) {
        return;
    }
    list->causal = a->causal != 0;
    list->seqlens = fmlai_data(c, &a->cache_seqlens);
    if (fmlai_present(&a->block_table)) {
        list->block_table = fmlai_data(c, &a->block_table);
        list->table_stride = a->block_table.stride[0];
        list->max_pages = a->block_table.shape[1];
    } else if (f->batch > 0) {
        if (list->pool.num_pages % f->batch != 0) {
            fmlai_invalid(c, "kv.num_pages: %lld; allowed without block_table: a multiple of b, %lld",
                          (long long)list->pool.num_pages, (long long)f->batch);
            return;
        }
        list->max_pages = list->pool.num_pages / f->batch;
    }
    fmlai_check_paged(c, "cache_seqlens", list, f->batch);
}

static void describe_sparse(fmlai_checker *c, const fmla_decode_args *a, const fmlai_frame *f, fmlai_mqa *p)
{
    static const char *const why = "with indices";
    int32_t extra_heads;
    fmlai_check_absent(c, &a->block_table, "block_table", why);
    fmlai_check_absent(c, &a->cache_seqlens, "cache_seqlens", why);
    fmlai_check_absent(c, &a->kv_bound, "kv_bound", why);
    if (a->causal) {
        fmlai_invalid(c, "causal: 1; allowed: 0 with indices");
    }
    fmlai_describe_pool(c, "kv", &a->kv, p->d_qk, &p->main.pool, &p->h_kv);
    fmlai_describe_indices(c, f, "indices", &a->indices, &p->main);
    p->main.length = fmlai_describe_lengths(c, f, "topk_length", &a->topk_length, true);
    if (!fmlai_cache_present(&a->extra_kv)) {
        fmlai_check_no_cache(c, "extra_kv", &a->extra_kv, "its format is 0");
        fmlai_check_absent(c, &a->extra_indices, "extra_indices", "without extra_kv");
        fmlai_check_absent(c, &a->extra_topk_length, "extra_topk_length", "without extra_kv");
        return;
    }
    fmlai_describe_pool(c, "extra_kv", &a->extra_kv, p->d_qk, &p->extra.pool, &extra_heads);
    if (extra_heads != 1) {
        fmlai_invalid(c, "extra_kv.num_heads: %d; allowed: 1", (int)extra_heads);
    }
    fmlai_describe_indices(c, f, "extra_indices", &a->extra_indices, &p->extra);
    p->extra.length = fmlai_describe_lengths(c, f, "extra_topk_length", &a->extra_topk_length, true);
}

/* A [b, h_q, s_q] tensor, ragged [h_q, total_q]. */
static fmlai_rows describe_head_first(fmlai_checker *c, const fmlai_frame *f, const fmlai_mqa *p, const char *name,
                                      const fmla_tensor *t, uint32_t dtypes)
{
    const fmlai_pattern ragged = {.name = name,
                                  .dtypes = dtypes,
                                  .flags = FMLAI_OPTIONAL | FMLAI_OUTPUT,
                                  .letters = "h_q, total_q",
                                  .rank = 2,
                                  .shape = {p->h_q, f->tokens}};
    const fmlai_pattern batched = {.name = name,
                                   .dtypes = dtypes,
                                   .flags = FMLAI_OPTIONAL | FMLAI_OUTPUT,
                                   .letters = "b, h_q, s_q",
                                   .rank = 3,
                                   .shape = {f->batch, p->h_q, f->s_q}};
    fmlai_check_tensor(c, t, f->flat ? &ragged : &batched);
    return fmlai_head_first_rows_of(c, f, t);
}

static void describe_results(fmlai_checker *c, const fmla_decode_args *a, const fmlai_frame *f, fmlai_mqa *p)
{
    const uint32_t f32 = fmlai_result_dtypes(c, FMLAI_BIT(FMLA_F32)), f64 = FMLAI_BIT(FMLA_F64);
    const uint32_t out_dtypes = fmlai_result_dtypes(c, FMLAI_BIT(p->q.dtype) | FMLAI_BIT(FMLA_F32));
    fmlai_pattern out =
        fmlai_token_pattern(f, "out", out_dtypes, FMLAI_LAST | FMLAI_OUTPUT, "h_q, d_v", 2, p->h_q, FMLAI_ANY);
    out.note = "q's dtype, or F32";
    fmlai_check_tensor(c, &a->out, &out);
    if (!fmlai_failed(c)) {
        p->d_v = fmlai_check_width(c, "d_v", a->out.shape[a->out.rank - 1]);
    }
    p->out = fmlai_rows_of(c, f, &a->out);
    p->lse = describe_head_first(c, f, p, "lse", &a->lse, f32);
    p->max_logits = describe_head_first(c, f, p, "max_logits", &a->max_logits, f32);
    p->empty_lse = fmlai_check_empty_lse(c, a->empty_lse);
    fmlai_check_range(c, "lse_base", a->lse_base, FMLA_LSE_NATURAL, FMLA_LSE_BASE2);
    p->lse_factor = a->lse_base == FMLA_LSE_BASE2 ? (float)M_LOG2E : 1.0f;
    fmlai_check_oracle_only(c, &a->abs_out, "abs_out");
    fmlai_check_oracle_only(c, &a->abs_logit, "abs_logit");
    fmlai_pattern abs_out = fmlai_token_pattern(f, "abs_out", f64, FMLAI_OPTIONAL | FMLAI_LAST | FMLAI_OUTPUT,
                                                "h_q, d_v", 2, p->h_q, p->d_v);
    fmlai_check_tensor(c, &a->abs_out, &abs_out);
    p->abs_out = fmlai_rows_of(c, f, &a->abs_out);
    p->abs_logit = describe_head_first(c, f, p, "abs_logit", &a->abs_logit, f64);
}

static void describe(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mqa *p)
{
    const fmla_decode_args *a = args;
    const bool sparse = fmlai_present(&a->indices) || a->indices.data != NULL;
    fmlai_frame f = {.letters = ""};
    fmlai_check_range(c, "causal", a->causal, 0, 1);
    fmlai_check_range(c, "batch_invariant", a->batch_invariant, 0, 1);
    fmlai_check_zero(c, "reserved0", a->reserved0);
    describe_queries(c, a, &f, p);
    if (fmlai_failed(c)) {
        return;
    }
    if (sparse) {
        describe_sparse(c, a, &f, p);
    } else {
        describe_dense(c, a, &f, p);
    }
    p->sink = fmlai_describe_sink(c, &a->attn_sink, p->h_q);
    p->scale = fmlai_check_scale(c, a->softmax_scale, p->d_qk);
    p->batch_invariant = a->batch_invariant != 0;
    describe_results(c, a, &f, p);
    fmlai_check_supported(c, context, sparse ? FMLA_OP_SPARSE_DECODE : FMLA_OP_DENSE_DECODE, p);
}

static const fmlai_mqa_family family = {sizeof(fmla_decode_args), offsetof(fmla_decode_args, workspace), describe};

static fmla_status run(fmla_context *context, const void *args, void *stream)
{
    return fmlai_api_mqa_run(context, &family, args, stream);
}

static fmla_status measure(fmla_context *context, const void *args, void *size)
{
    return fmlai_api_mqa_size(context, &family, args, size);
}

fmla_status fmla_decode(fmla_context *context, const fmla_decode_args *args, void *stream)
{
    return fmlai_guarded(context, run, args, stream);
}

fmla_status fmla_decode_workspace_size(fmla_context *context, const fmla_decode_args *args, size_t *size)
{
    return fmlai_guarded(context, measure, args, size);
}
