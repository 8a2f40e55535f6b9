/* SPDX-License-Identifier: MIT */
/* problem.c: queries, sinks, outputs and the args of a call. */
#include "problem/problem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem/numbers.h"

bool case_is_dense(const test_case *c)
{
    return c->op == FMLA_OP_DENSE_DECODE;
}

bool case_is_prefill(const test_case *c)
{
    return c->op == FMLA_OP_SPARSE_PREFILL || c->op == FMLA_OP_FUSED_PREFILL;
}

bool case_is_fused(const test_case *c)
{
    return c->op == FMLA_OP_FUSED_PREFILL || c->op == FMLA_OP_FUSED_DECODE;
}

bool case_is_mqa(const test_case *c)
{
    return c->op <= FMLA_OP_FUSED_DECODE;
}

/* Requests and query tokens. Prefill: one request; fused decode: every query token is a request of its own. */
static void lay_tokens(problem *p, rng *r)
{
    const test_case *c = &p->c;
    p->batch = case_is_prefill(c) ? 1 : c->b;
    p->n_q = xcalloc((size_t)p->batch + 1, sizeof *p->n_q);
    for (int64_t i = 0; i < p->batch; i++) {
        bool any = c->ragged && i < p->batch - 1; /* the last has all */
        p->n_q[i] = any ? rng_below(r, c->s_q + 1) : c->s_q;
        p->tokens += p->n_q[i];
    }
    p->request = xcalloc((size_t)p->tokens + 1, sizeof *p->request);
    p->inner = xcalloc((size_t)p->tokens + 1, sizeof *p->inner);
    for (int64_t i = 0, t = 0; i < p->batch; i++) {
        for (int64_t j = 0; j < p->n_q[i]; j++, t++) {
            p->request[t] = i;
            p->inner[t] = j;
        }
    }
    if (c->ragged) {
        p->cu_seqlens_q = memory_tensor_4(&p->mem, FMLA_I32, 1, p->batch + 1, 0, 0, 0, 0, 0);
        int32_t *cu = p->cu_seqlens_q.data;
        for (int64_t i = 0; i < p->batch; i++) {
            cu[i + 1] = cu[i] + (int32_t)p->n_q[i];
        }
    }
}

#define BANK_LEAST ((int64_t)8 << 20)
#define BANK_SIZE  ((int64_t)1 << 20)

row_bank bank_make(rng *r, fmla_dtype dtype, int64_t rows, int64_t width, double factor, double limit)
{
    row_bank bank = {0};
    if (rows * width < BANK_LEAST || fmla_dtype_size(dtype) != 2 || width > BANK_SIZE / 2) {
        return bank;
    }
    bank.numbers = xmalloc((size_t)BANK_SIZE * 2);
    for (int64_t i = 0; i < BANK_SIZE; i++) {
        double x = rng_normal(r);
        x = x > limit ? limit : x < -limit ? -limit : x;
        number_set(bank.numbers, dtype, i, x * factor);
    }
    return bank;
}

void bank_take(const row_bank *bank, rng *r, uint16_t *row, int64_t width)
{
    memcpy(row, bank->numbers + rng_below(r, BANK_SIZE - width), (size_t)width * 2);
}

static void make_q(problem *p, rng *r)
{
    const test_case *c = &p->c;
    bool batched = (c->op == FMLA_OP_DENSE_DECODE || c->op == FMLA_OP_SPARSE_DECODE) && !c->ragged;
    fmla_dtype dtype = (fmla_dtype)c->dtype;
    double factor = c->data == DATA_SHARP ? 40 : 1;
    if (batched) {
        p->q = memory_tensor_4(&p->mem, dtype, 4, c->b, c->s_q, c->h_q, c->d_qk, (int)c->pad, 0xFF);
    } else {
        p->q =
            memory_tensor_4(&p->mem, dtype, 3, p->tokens, c->h_q, c->d_qk, 0, case_is_fused(c) ? 0 : (int)c->pad, 0xFF);
    }
    rng shift;
    rng_seed(&shift, (uint64_t)c->seed ^ 0x5EED);
    double *offset = xcalloc((size_t)c->d_qk, sizeof *offset);
    for (int64_t j = 0; j < c->d_qk && c->data == DATA_SHIFTED; j++) {
        offset[j] = (rng_uniform(&shift) - 0.5) * 600;
    }
    row_bank bank = {0};
    if (c->data != DATA_SHIFTED) {
        bank = bank_make(r, dtype, p->tokens * c->h_q, c->d_qk, factor, 1);
    }
    for (int64_t t = 0; t < p->tokens; t++) {
        for (int64_t h = 0; h < c->h_q; h++) {
            int64_t at =
                batched ? tensor_offset(&p->q, p->request[t], p->inner[t], h, 0) : tensor_offset(&p->q, t, h, 0, 0);
            if (bank.numbers != NULL) {
                bank_take(&bank, r, (uint16_t *)p->q.data + at, c->d_qk);
                continue;
            }
            for (int64_t j = 0; j < c->d_qk; j++) {
                double x = rng_normal(r);
                x = x > 1 ? 1 : x < -1 ? -1 : x;
                number_set(p->q.data, dtype, at + j, x * factor + offset[j]);
            }
        }
    }
    free(offset);
    free(bank.numbers);
}

static void make_sink(problem *p, rng *r)
{
    static const float extremes[] = {0, 1e4f, -1e4f, 3e38f, -3e38f, INFINITY, -INFINITY, 1};
    if (p->c.sink == SINK_NONE) {
        return;
    }
    p->sink = memory_tensor_4(&p->mem, FMLA_F32, 1, p->c.h_q, 0, 0, 0, 0, 0);
    for (int64_t h = 0; h < p->c.h_q; h++) {
        double x = rng_normal(r);
        double u = rng_uniform(r);
        if (p->c.sink == SINK_MIXED) {
            x = u < 0.31 ? -INFINITY : u < 0.62 ? INFINITY : x;
        } else if (p->c.sink == SINK_EXTREME) {
            x = (double)extremes[rng_below(r, 8)];
        }
        ((float *)p->sink.data)[h] = (float)x;
    }
}

/* A contiguous tensor seen with its last two dimensions swapped in memory. */
static fmla_tensor transposed(memory *m, fmla_dtype dtype, int32_t rank, int64_t n0, int64_t n1, int64_t n2)
{
    fmla_tensor t = rank == 3 ? memory_tensor_4(m, dtype, 3, n0, n2, n1, 0, 0, POISON_BYTE)
                              : memory_tensor_4(m, dtype, 2, n1, n0, 0, 0, 0, POISON_BYTE);
    int32_t a = rank - 2, b = rank - 1;
    int64_t shape = t.shape[a], stride = t.stride[a];
    t.shape[a] = t.shape[b];
    t.stride[a] = t.stride[b];
    t.shape[b] = shape;
    t.stride[b] = stride;
    return t;
}

static fmla_tensor make_lse(problem *p)
{
    const test_case *c = &p->c;
    int pad = (int)c->pad;
    if (case_is_prefill(c) || case_is_fused(c)) {
        return memory_tensor_4(&p->mem, FMLA_F32, 2, p->tokens, c->h_q, 0, 0, pad, POISON_BYTE);
    }
    if (c->ragged) {
        return c->seed % 3 ? transposed(&p->mem, FMLA_F32, 2, c->h_q, p->tokens, 0)
                           : memory_tensor_4(&p->mem, FMLA_F32, 2, c->h_q, p->tokens, 0, 0, pad, POISON_BYTE);
    }
    return c->seed % 3 ? transposed(&p->mem, FMLA_F32, 3, c->b, c->h_q, c->s_q)
                       : memory_tensor_4(&p->mem, FMLA_F32, 3, c->b, c->h_q, c->s_q, 0, pad, POISON_BYTE);
}

static void make_outputs(problem *p)
{
    const test_case *c = &p->c;
    fmla_dtype dtype = (fmla_dtype)(c->out ? c->out : c->dtype);
    if (case_is_fused(c)) {
        int64_t group = c->group ? c->group : c->h_q;
        int64_t groups = c->h_q / group, words = group * 512 / 128, rows = (p->tokens + 3) / 4 * 4;
        p->out = memory_tensor_4(&p->mem, FMLA_U8, 3, p->tokens, groups, group * 512, 0, 0, POISON_BYTE);
        p->out_scale = memory_tensor_4(&p->mem, FMLA_I32, 3, groups, words, rows, 0, 0, POISON_BYTE);
        fmla_tensor *t = &p->out_scale;
        t->shape[0] = p->tokens;
        t->shape[1] = groups;
        t->shape[2] = words;
        t->stride[0] = 1;
        t->stride[1] = rows * words;
        t->stride[2] = rows;
    } else if (p->q.rank == 4) {
        p->out = memory_tensor_4(&p->mem, dtype, 4, c->b, c->s_q, c->h_q, c->d_v, (int)c->pad, POISON_BYTE);
    } else {
        p->out = memory_tensor_4(&p->mem, dtype, 3, p->tokens, c->h_q, c->d_v, 0, (int)c->pad, POISON_BYTE);
    }
    p->lse = make_lse(p);
    p->max_logits = make_lse(p);
}

#define ANGLE_ROWS 4096

/* cos, then sin, of 32 angles of each position; made once. */
static const float *angles(void)
{
    static float table[ANGLE_ROWS * 64];
    if (table[0] == 0) {
        double turn[32];
        for (int64_t j = 0; j < 32; j++) {
            turn[j] = pow(1e5, -(double)j / 32);
        }
        for (int64_t i = 0; i < ANGLE_ROWS; i++) {
            for (int64_t j = 0; j < 32; j++) {
                double angle = (double)i * turn[j];
                table[i * 64 + j] = (float)cos(angle);
                table[i * 64 + 32 + j] = (float)sin(angle);
            }
        }
    }
    return table;
}

void problem_build_fused(problem *p, rng *r)
{
    const int64_t rows = ANGLE_ROWS;
    p->positions = memory_tensor_4(&p->mem, FMLA_I32, 1, p->tokens, 0, 0, 0, 0, 0);
    p->cos_sin = memory_tensor_4(&p->mem, FMLA_F32, 2, rows, 64, 0, 0, 0, 0);
    for (int64_t t = 0; t < p->tokens; t++) {
        ((int32_t *)p->positions.data)[t] = (int32_t)(t == 0 ? rows - 1 : rng_below(r, rows));
    }
    memcpy(p->cos_sin.data, angles(), sizeof(float) * ANGLE_ROWS * 64);
}

/* Seven sizes out of ten leave the scale to the library or take a usual one; the case may name any. */
static float choose_scale(const test_case *c)
{
    if (c->scale != 0) {
        return (float)c->scale;
    }
    return c->seed % 4 == 0 ? FMLA_SCALE_DEFAULT : (float)pow((double)c->d_qk, c->seed % 4 == 1 ? -0.55 : -0.5);
}

int problem_build(problem *p, const test_case *c, engine *maker)
{
    rng r;
    memset(p, 0, sizeof *p);
    p->c = *c;
    rng_seed(&r, (uint64_t)c->seed);
    p->scale = choose_scale(c);
    int status = CLI_OK;
    if (!case_is_mqa(c)) {
        status = problem_build_mha(p, &r, maker);
    } else {
        lay_tokens(p, &r);
        make_q(p, &r);
        make_sink(p, &r);
        status = scope_build(p, &p->main, &r, maker, false);
        if (status == CLI_OK && c->extra != FMLA_KV_NONE) {
            status = scope_build(p, &p->extra, &r, maker, true);
        }
        if (case_is_fused(c)) {
            problem_build_fused(p, &r);
        }
        make_outputs(p);
        const fmla_kv_cache *pool = &p->main.cache;
        p->kv = fmla_tensor_3d(pool->data, (fmla_dtype)c->dtype, pool->page_size, pool->num_heads, c->d_qk);
        p->kv.stride[0] = pool->token_stride_bytes / 2;
        p->kv.stride[1] = pool->head_stride_bytes / 2;
        p->kv.shape[0] = c->s_kv;
    }
    if (status != CLI_OK) {
        problem_free(p);
    }
    return status;
}

void problem_free(problem *p)
{
    memory_free(&p->mem);
    free(p->request);
    free(p->inner);
    free(p->n_q);
    scope_free(&p->main);
    scope_free(&p->extra);
    memset(p, 0, sizeof *p);
}

int problem_outputs(const problem *p, const fmla_tensor **outputs)
{
    const fmla_tensor *all[4] = {&p->out, &p->lse, &p->max_logits, &p->out_scale};
    int n = 0;
    if (p->c.op == FMLA_OP_MHA_BACKWARD) {
        outputs[0] = &p->dq;
        outputs[1] = &p->dk;
        outputs[2] = &p->dv;
        return 3;
    }
    for (int i = 0; i < 4; i++) {
        if (all[i]->rank != 0) {
            outputs[n++] = all[i];
        }
    }
    return n;
}

void problem_poison(problem *p)
{
    const fmla_tensor *outputs[4];
    int n = problem_outputs(p, outputs);
    for (int i = 0; i < n; i++) {
        memory_fill(&p->mem, outputs[i]->data, POISON_BYTE);
    }
}

static void fused_args(const problem *p, fmla_fused_params *f)
{
    const test_case *c = &p->c;
    f->q_norm = (int32_t)c->norm;
    f->rms_norm_eps = 1e-4f;
    f->q_layout = c->plain_q ? FMLA_Q_PLAIN : FMLA_Q_PERMUTED;
    f->rope_style = c->neox ? FMLA_ROPE_NEOX : FMLA_ROPE_INTERLEAVED;
    f->n_wv_group = (int32_t)(c->group ? c->h_q / c->group : 1);
    f->token_positions = p->positions;
    f->cos_sin_cache = p->cos_sin;
    f->attn_sink = p->sink;
    f->out_fp8 = p->out;
    f->out_scale = p->out_scale;
    f->lse = p->lse;
    f->max_logits = p->max_logits;
    f->empty_lse = c->pos_inf ? FMLA_EMPTY_LSE_POS_INF : FMLA_EMPTY_LSE_NEG_INF;
}

static void decode_args(const problem *p, fmla_decode_args *a)
{
    const test_case *c = &p->c;
    *a = (fmla_decode_args)FMLA_DECODE_ARGS_INIT;
    a->softmax_scale = p->scale;
    a->causal = (int32_t)c->causal;
    a->q = p->q;
    a->kv = p->main.cache;
    a->extra_kv = p->extra.cache;
    a->block_table = p->main.block_table;
    a->cache_seqlens = p->main.seqlens;
    a->kv_bound = p->main.bound;
    a->indices = p->main.indices;
    a->extra_indices = p->extra.indices;
    a->topk_length = p->main.length;
    a->extra_topk_length = p->extra.length;
    a->attn_sink = p->sink;
    a->cu_seqlens_q = p->cu_seqlens_q;
    a->out = p->out;
    a->lse = p->lse;
    a->max_logits = p->max_logits;
    a->empty_lse = c->pos_inf ? FMLA_EMPTY_LSE_POS_INF : FMLA_EMPTY_LSE_NEG_INF;
    a->lse_base = c->base2 ? FMLA_LSE_BASE2 : FMLA_LSE_NATURAL;
    a->batch_invariant = c->again != 0;
}

void problem_args(const problem *p, any_args *a)
{
    const test_case *c = &p->c;
    memset(a, 0, sizeof *a);
    if (!case_is_mqa(c)) {
        problem_mha_args(p, a);
    } else if (c->op == FMLA_OP_SPARSE_PREFILL) {
        a->prefill = (fmla_prefill_args)FMLA_PREFILL_ARGS_INIT;
        a->prefill.softmax_scale = p->scale;
        a->prefill.empty_lse = c->pos_inf ? FMLA_EMPTY_LSE_POS_INF : FMLA_EMPTY_LSE_NEG_INF;
        a->prefill.lse_base = c->base2 ? FMLA_LSE_BASE2 : FMLA_LSE_NATURAL;
        a->prefill.q = p->q;
        a->prefill.kv = p->kv;
        a->prefill.indices = p->main.indices;
        a->prefill.topk_length = p->main.length;
        a->prefill.attn_sink = p->sink;
        a->prefill.out = p->out;
        a->prefill.lse = p->lse;
        a->prefill.max_logits = p->max_logits;
    } else if (c->op == FMLA_OP_FUSED_PREFILL) {
        a->fused_prefill = (fmla_fused_prefill_args)FMLA_FUSED_PREFILL_ARGS_INIT;
        a->fused_prefill.softmax_scale = p->scale;
        a->fused_prefill.q = p->q;
        a->fused_prefill.kv = p->kv;
        a->fused_prefill.indices = p->main.indices;
        a->fused_prefill.topk_length = p->main.length;
        fused_args(p, &a->fused_prefill.fused);
    } else if (c->op == FMLA_OP_FUSED_DECODE) {
        a->fused_decode = (fmla_fused_decode_args)FMLA_FUSED_DECODE_ARGS_INIT;
        a->fused_decode.softmax_scale = p->scale;
        a->fused_decode.q = p->q;
        a->fused_decode.kv = p->main.cache;
        a->fused_decode.extra_kv = p->extra.cache;
        a->fused_decode.indices = p->main.indices;
        a->fused_decode.extra_indices = p->extra.indices;
        a->fused_decode.topk_length = p->main.length;
        a->fused_decode.extra_topk_length = p->extra.length;
        fused_args(p, &a->fused_decode.fused);
    } else {
        decode_args(p, &a->decode);
    }
}

int64_t problem_attended(const problem *p, int64_t token, int64_t kv_head)
{
    return scope_attended(p, &p->main, token, kv_head) + scope_attended(p, &p->extra, token, kv_head);
}

bool problem_attends_nan(const problem *p, int64_t token, int64_t kv_head)
{
    const scope *scopes[2] = {&p->main, &p->extra};
    for (int i = 0; i < 2 && p->c.nan; i++) {
        int64_t count = scope_count(p, scopes[i], token);
        for (int64_t j = 0; j < count; j++) {
            int64_t slot = scope_slot(p, scopes[i], token, kv_head, j);
            if (slot >= 0 && scopes[i]->used[slot] < 0) {
                return true;
            }
        }
    }
    return false;
}

int64_t problem_out_offset(const problem *p, int64_t token, int64_t head)
{
    return p->out.rank == 4 ? tensor_offset(&p->out, p->request[token], p->inner[token], head, 0)
                            : tensor_offset(&p->out, token, head, 0, 0);
}

int64_t problem_lse_offset(const problem *p, const fmla_tensor *t, int64_t token, int64_t head)
{
    if (t->rank == 3) {
        return tensor_offset(t, p->request[token], head, p->inner[token], 0);
    }
    bool heads_first = p->c.ragged && p->c.op <= FMLA_OP_SPARSE_DECODE;
    return heads_first ? tensor_offset(t, head, token, 0, 0) : tensor_offset(t, token, head, 0, 0);
}
