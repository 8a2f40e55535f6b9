/* SPDX-License-Identifier: MIT */
/* reference.c: rows of a problem as a plain problem for the oracle. */
#include "check/reference.h"

#include <stdlib.h>
#include <string.h>

#include "problem/numbers.h"

/* Query tokens and heads whose cost fits: heads are halved first, as long as there are more of them. */
static void choose(reference *r, const problem *p, double budget)
{
    int64_t group = p->c.h_q / p->c.h_kv;
    double attended = 1;
    for (int64_t t = 0; t < p->tokens; t++) {
        attended += (double)(scope_count(p, &p->main, t) + scope_count(p, &p->extra, t));
    }
    double each = attended / (double)(p->tokens ? p->tokens : 1) * (double)(p->c.d_qk + p->c.d_v);
    r->tokens = p->tokens;
    r->heads = group;
    while ((double)r->tokens * (double)r->heads * each > budget && r->tokens * r->heads > 1) {
        if (r->heads > 4 && r->heads * 2 > r->tokens) {
            r->heads = (r->heads + 1) / 2;
        } else if (r->tokens > 2) {
            r->tokens = (r->tokens + 1) / 2;
        } else {
            r->heads = r->heads > 1 ? (r->heads + 1) / 2 : 1;
            r->tokens = r->heads > 1 ? r->tokens : (r->tokens + 1) / 2;
        }
    }
    rng random;
    rng_seed(&random, (uint64_t)p->c.seed + 77);
    r->token = xmalloc((size_t)(r->tokens + 1) * sizeof *r->token);
    r->head = xmalloc((size_t)(r->heads + 1) * sizeof *r->head);
    rng_subset(&random, r->token, r->tokens, p->tokens);
    if (r->tokens > 1 && r->tokens < p->tokens) {
        /* The last query token is the one that sees most; a subset need not contain it. */
        bool there = false;
        for (int64_t i = 0; i < r->tokens; i++) {
            there = there || r->token[i] == p->tokens - 1;
        }
        r->token[0] = there ? r->token[0] : p->tokens - 1;
    }
    rng_subset(&random, r->head, r->heads, group);
    for (int64_t i = 0; i < r->heads; i++) {
        r->head[i] += r->kv_head * group;
    }
}

bool reference_is_whole(const reference *r, const problem *p)
{
    return r->tokens == p->tokens && r->heads == p->c.h_q / p->c.h_kv;
}

/* The chosen rows of q, heads in plain order of dims. */
static fmla_tensor gather_q(reference *r, const problem *p)
{
    const test_case *c = &p->c;
    fmla_tensor q = memory_tensor_4(&r->mem, (fmla_dtype)c->dtype, 3, r->tokens, r->heads, c->d_qk, 0, 0, 0);
    bool permuted = case_is_fused(c) && !c->plain_q;
    for (int64_t i = 0; i < r->tokens; i++) {
        int64_t t = r->token[i];
        for (int64_t k = 0; k < r->heads; k++) {
            int64_t h = r->head[k];
            int64_t at = p->q.rank == 4 ? tensor_offset(&p->q, p->request[t], p->inner[t], permuted ? 0 : h, 0)
                                        : tensor_offset(&p->q, t, permuted ? 0 : h, 0, 0);
            for (int64_t d = 0; d < c->d_qk; d++) {
                int64_t from = permuted ? at + (d / 16) * c->h_q * 16 + h * 16 + d % 16 : at + d;
                ((uint16_t *)q.data)[(i * r->heads + k) * c->d_qk + d] = ((const uint16_t *)p->q.data)[from];
            }
        }
    }
    return q;
}

static fmla_tensor gather_sink(reference *r, const problem *p)
{
    fmla_tensor sink = {0};
    if (p->sink.rank != 0) {
        sink = memory_tensor_4(&r->mem, FMLA_F32, 1, r->heads, 0, 0, 0, 0, 0);
        for (int64_t k = 0; k < r->heads; k++) {
            ((float *)sink.data)[k] = ((const float *)p->sink.data)[r->head[k]];
        }
    }
    return sink;
}

/* Attended entries only, -1 elsewhere. */
static fmla_tensor gather_indices(reference *r, const problem *p, const scope *s, int32_t rank)
{
    int64_t n = s->topk ? s->topk : 1;
    fmla_tensor t = rank == 3 ? memory_tensor_4(&r->mem, FMLA_I32, 3, r->tokens, 1, n, 0, 0, 0xFF)
                              : memory_tensor_4(&r->mem, FMLA_I32, 2, r->tokens, n, 0, 0, 0, 0xFF);
    for (int64_t i = 0; i < r->tokens; i++) {
        int64_t count = scope_count(p, s, r->token[i]);
        for (int64_t j = 0; j < count; j++) {
            ((int32_t *)t.data)[i * n + j] = (int32_t)scope_slot(p, s, r->token[i], r->kv_head, j);
        }
    }
    return t;
}

static void gather_dense(reference *r, const problem *p, fmla_decode_args *a)
{
    const scope *s = &p->main;
    a->cache_seqlens = memory_tensor_4(&r->mem, FMLA_I32, 1, r->tokens, 0, 0, 0, 0, 0);
    a->block_table = memory_tensor_4(&r->mem, FMLA_I32, 2, r->tokens, s->pages_max, 0, 0, 0, 0);
    for (int64_t i = 0; i < r->tokens; i++) {
        ((int32_t *)a->cache_seqlens.data)[i] = (int32_t)scope_count(p, s, r->token[i]);
        for (int64_t j = 0; j < s->pages_max; j++) {
            int64_t page = s->page_at[p->request[r->token[i]] * s->pages_max + j];
            ((int32_t *)a->block_table.data)[i * s->pages_max + j] = (int32_t)(page < 0 ? 0 : page);
        }
    }
}

static void run_decode_args(reference *r, const problem *p, any_args *args)
{
    fmla_decode_args *a = &args->decode;
    *a = (fmla_decode_args)FMLA_DECODE_ARGS_INIT;
    a->softmax_scale = p->scale;
    a->q = gather_q(r, p);
    fmla_tensor q = a->q;
    a->q = fmla_tensor_4d(q.data, (fmla_dtype)q.dtype, r->tokens, 1, r->heads, p->c.d_qk);
    a->kv = p->c.h_kv > 1 ? cache_head(&p->main.cache, (int32_t)r->kv_head) : p->main.cache;
    a->attn_sink = gather_sink(r, p);
    if (case_is_dense(&p->c)) {
        gather_dense(r, p, a);
    } else {
        a->indices = gather_indices(r, p, &p->main, 3);
        if (p->extra.cache.format != FMLA_KV_NONE) {
            a->extra_kv = p->extra.cache;
            a->extra_indices = gather_indices(r, p, &p->extra, 3);
        }
    }
    a->out = fmla_tensor_4d(r->out, FMLA_F64, r->tokens, 1, r->heads, r->d_v);
    a->abs_out = fmla_tensor_4d(r->abs_out, FMLA_F64, r->tokens, 1, r->heads, r->d_v);
    a->lse = fmla_tensor_3d(r->lse, FMLA_F64, r->tokens, r->heads, 1);
    a->max_logits = fmla_tensor_3d(r->max_logits, FMLA_F64, r->tokens, r->heads, 1);
    a->abs_logit = fmla_tensor_3d(r->abs_logit, FMLA_F64, r->tokens, r->heads, 1);
}

static void run_prefill_args(reference *r, const problem *p, any_args *args)
{
    fmla_prefill_args *a = &args->prefill;
    *a = (fmla_prefill_args)FMLA_PREFILL_ARGS_INIT;
    a->softmax_scale = p->scale;
    a->q = gather_q(r, p);
    a->kv = p->kv;
    a->kv.data = (uint16_t *)p->kv.data + r->kv_head * p->kv.stride[1];
    a->kv.shape[1] = 1;
    a->indices = gather_indices(r, p, &p->main, 2);
    a->attn_sink = gather_sink(r, p);
    a->out = fmla_tensor_3d(r->out, FMLA_F64, r->tokens, r->heads, r->d_v);
    a->abs_out = fmla_tensor_3d(r->abs_out, FMLA_F64, r->tokens, r->heads, r->d_v);
    a->lse = fmla_tensor_2d(r->lse, FMLA_F64, r->tokens, r->heads);
    a->max_logits = fmla_tensor_2d(r->max_logits, FMLA_F64, r->tokens, r->heads);
    a->abs_logit = fmla_tensor_2d(r->abs_logit, FMLA_F64, r->tokens, r->heads);
}

static void fused_parts(reference *r, const problem *p, fmla_fused_params *f)
{
    int64_t n = r->tokens, words = r->heads * 4, rows = (n + 3) / 4 * 4;
    f->q_norm = (int32_t)p->c.norm;
    f->rms_norm_eps = 1e-4f;
    f->q_layout = FMLA_Q_PLAIN;
    f->rope_style = p->c.neox ? FMLA_ROPE_NEOX : FMLA_ROPE_INTERLEAVED;
    f->n_wv_group = 1;
    f->token_positions = memory_tensor_4(&r->mem, FMLA_I32, 1, n, 0, 0, 0, 0, 0);
    for (int64_t i = 0; i < n; i++) {
        ((int32_t *)f->token_positions.data)[i] = tensor_i32(&p->positions, r->token[i], 0, 0);
    }
    f->cos_sin_cache = p->cos_sin;
    f->attn_sink = gather_sink(r, p);
    f->out_fp8 = memory_tensor_4(&r->mem, FMLA_U8, 3, n, 1, r->heads * 512, 0, 0, 0);
    f->out_scale = memory_tensor_4(&r->mem, FMLA_I32, 3, 1, words, rows, 0, 0, 0);
    f->out_scale.shape[0] = n;
    f->out_scale.shape[1] = 1;
    f->out_scale.shape[2] = words;
    f->out_scale.stride[0] = 1;
    f->out_scale.stride[1] = rows * words;
    f->out_scale.stride[2] = rows;
    f->lse = fmla_tensor_2d(r->lse, FMLA_F64, n, r->heads);
    f->max_logits = fmla_tensor_2d(r->max_logits, FMLA_F64, n, r->heads);
    f->out_exact = fmla_tensor_3d(r->out, FMLA_F64, n, r->heads, 512);
    f->abs_out = fmla_tensor_3d(r->abs_out, FMLA_F64, n, r->heads, 512);
    f->abs_logit = fmla_tensor_2d(r->abs_logit, FMLA_F64, n, r->heads);
}

static void run_fused_args(reference *r, const problem *p, any_args *args)
{
    if (p->c.op == FMLA_OP_FUSED_PREFILL) {
        fmla_fused_prefill_args *a = &args->fused_prefill;
        *a = (fmla_fused_prefill_args)FMLA_FUSED_PREFILL_ARGS_INIT;
        a->softmax_scale = p->scale;
        a->q = gather_q(r, p);
        a->kv = p->kv;
        a->indices = gather_indices(r, p, &p->main, 2);
        fused_parts(r, p, &a->fused);
        return;
    }
    fmla_fused_decode_args *a = &args->fused_decode;
    *a = (fmla_fused_decode_args)FMLA_FUSED_DECODE_ARGS_INIT;
    a->softmax_scale = p->scale;
    a->q = gather_q(r, p);
    a->kv = p->main.cache;
    a->indices = gather_indices(r, p, &p->main, 2);
    if (p->extra.cache.format != FMLA_KV_NONE) {
        a->extra_kv = p->extra.cache;
        a->extra_indices = gather_indices(r, p, &p->extra, 2);
    }
    fused_parts(r, p, &a->fused);
}

int reference_make(reference *r, const problem *p, engine *oracle, int64_t kv_head, double budget)
{
    memset(r, 0, sizeof *r);
    r->kv_head = kv_head;
    r->d_v = p->c.d_v;
    choose(r, p, budget);
    size_t rows = (size_t)(r->tokens * r->heads);
    r->out = memory_take(&r->mem, rows * (size_t)r->d_v * sizeof(double), 0);
    r->abs_out = memory_take(&r->mem, rows * (size_t)r->d_v * sizeof(double), 0);
    r->lse = memory_take(&r->mem, rows * sizeof(double), 0);
    r->max_logits = memory_take(&r->mem, rows * sizeof(double), 0);
    r->abs_logit = memory_take(&r->mem, rows * sizeof(double), 0);
    any_args args;
    memset(&args, 0, sizeof args);
    if (case_is_fused(&p->c)) {
        run_fused_args(r, p, &args);
    } else if (p->c.op == FMLA_OP_SPARSE_PREFILL) {
        run_prefill_args(r, p, &args);
    } else {
        run_decode_args(r, p, &args);
    }
    fmla_status status = engine_run(oracle, &r->mem, (fmla_operation)p->c.op, &args);
    if (status != FMLA_OK) {
        reference_free(r);
        return cli_status(oracle->context, status, "reference");
    }
    return CLI_OK;
}

void reference_free(reference *r)
{
    free(r->token);
    free(r->head);
    memory_free(&r->mem);
    memset(r, 0, sizeof *r);
}
