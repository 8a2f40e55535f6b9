/* SPDX-License-Identifier: MIT */
/* mha.c: packed sequences for multi-head attention, forward and backward. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem/problem.h"
#include "problem/numbers.h"

/* Lengths of the sequences: fixed, or bell-shaped; some of either side empty when asked; keys may be fewer than
 * queries. */
static fmla_tensor draw_lengths(problem *p, rng *r, int64_t n, int64_t *total)
{
    fmla_tensor t = memory_tensor_4(&p->mem, FMLA_I32, 1, p->batch + 1, 0, 0, 0, 0, 0);
    int32_t *cu = t.data;
    for (int64_t i = 0; i < p->batch; i++) {
        int64_t length = n;
        if (p->c.varlen) {
            length = (int64_t)((double)n * (1 + 0.5 * rng_normal(r)));
            length = length < 1 ? 1 : length;
        }
        if (p->c.zero_len && rng_uniform(r) < 0.4) {
            length = 0;
        }
        cu[i + 1] = cu[i] + (int32_t)length;
    }
    *total = cu[p->batch];
    return t;
}

static fmla_tensor random_tensor(problem *p, rng *r, int64_t tokens, int64_t heads, int64_t d, double factor)
{
    fmla_dtype dtype = (fmla_dtype)p->c.dtype;
    fmla_tensor t = memory_tensor_4(&p->mem, dtype, 3, tokens, heads, d, 0, (int)p->c.pad, 0xFF);
    row_bank bank = bank_make(r, dtype, tokens * heads, d, factor, 4);
    for (int64_t i = 0; i < tokens; i++) {
        for (int64_t h = 0; h < heads; h++) {
            int64_t at = tensor_offset(&t, i, h, 0, 0);
            if (bank.numbers != NULL) {
                bank_take(&bank, r, (uint16_t *)t.data + at, d);
                continue;
            }
            for (int64_t j = 0; j < d; j++) {
                number_set(t.data, dtype, at + j, rng_normal(r) * factor);
            }
        }
    }
    free(bank.numbers);
    return t;
}

static fmla_tensor output(problem *p, fmla_dtype dtype, int64_t tokens, int64_t heads, int64_t d)
{
    return memory_tensor_4(&p->mem, dtype, d ? 3 : 2, tokens, heads, d, 0, (int)p->c.pad, POISON_BYTE);
}

/* Backward takes what forward made: maker's, rounded to the dtypes of the call. */
static int make_forward(problem *p, engine *maker)
{
    any_args a;
    test_case c = p->c;
    p->c.op = FMLA_OP_MHA_FORWARD;
    problem_mha_args(p, &a);
    p->c = c;
    fmla_status status = engine_run(maker, &p->mem, FMLA_OP_MHA_FORWARD, &a);
    return status == FMLA_OK ? CLI_OK : cli_status(maker->context, status, "forward for backward");
}

int problem_build_mha(problem *p, rng *r, engine *maker)
{
    const test_case *c = &p->c;
    int64_t total_kv;
    p->batch = c->b;
    p->cu_seqlens_q = draw_lengths(p, r, c->s_q, &p->tokens);
    p->cu_seqlens_kv = draw_lengths(p, r, c->s_kv, &total_kv);
    double factor = c->data == DATA_SHARP ? 3 : c->data == DATA_PLAIN ? 0.1 : 1;
    p->q = random_tensor(p, r, p->tokens, c->h_q, c->d_qk, factor);
    p->k = random_tensor(p, r, total_kv, c->h_kv, c->d_qk, factor);
    p->v = random_tensor(p, r, total_kv, c->h_kv, c->d_v, c->data == DATA_PLAIN ? 0.1 : 1);
    const int32_t *kv = p->cu_seqlens_kv.data;
    for (int64_t i = 0; i < p->batch && c->nan && c->op == FMLA_OP_MHA_FORWARD; i++) {
        for (int64_t h = 0; h < c->h_kv && kv[i + 1] > kv[i]; h++) {
            tensor_set(&p->k, kv[i + 1] - 1, h, h % c->d_qk, 0, (double)NAN);
            tensor_set(&p->v, kv[i + 1] - 1, h, h % c->d_v, 0, (double)NAN);
        }
    }
    p->out = output(p, (fmla_dtype)c->dtype, p->tokens, c->h_q, c->d_v);
    p->lse = output(p, FMLA_F32, p->tokens, c->h_q, 0);
    if (c->op == FMLA_OP_MHA_FORWARD) {
        return CLI_OK;
    }
    p->dout = random_tensor(p, r, p->tokens, c->h_q, c->d_v, c->data == DATA_PLAIN ? 0.1 : 1);
    p->dq = output(p, (fmla_dtype)c->dtype, p->tokens, c->h_q, c->d_qk);
    p->dk = output(p, (fmla_dtype)c->dtype, total_kv, c->h_kv, c->d_qk);
    p->dv = output(p, (fmla_dtype)c->dtype, total_kv, c->h_kv, c->d_v);
    return make_forward(p, maker);
}

void problem_mha_args(const problem *p, any_args *a)
{
    memset(a, 0, sizeof *a);
    if (p->c.op == FMLA_OP_MHA_FORWARD) {
        fmla_mha_forward_args *f = &a->mha_forward;
        *f = (fmla_mha_forward_args)FMLA_MHA_FORWARD_ARGS_INIT;
        f->softmax_scale = p->scale;
        f->causal = (int32_t)p->c.causal;
        f->q = p->q;
        f->k = p->k;
        f->v = p->v;
        f->cu_seqlens_q = p->cu_seqlens_q;
        f->cu_seqlens_kv = p->cu_seqlens_kv;
        f->out = p->out;
        f->lse = p->lse;
        f->empty_lse = p->c.pos_inf ? FMLA_EMPTY_LSE_POS_INF : FMLA_EMPTY_LSE_NEG_INF;
        return;
    }
    fmla_mha_backward_args *b = &a->mha_backward;
    *b = (fmla_mha_backward_args)FMLA_MHA_BACKWARD_ARGS_INIT;
    b->softmax_scale = p->scale;
    b->causal = (int32_t)p->c.causal;
    b->q = p->q;
    b->k = p->k;
    b->v = p->v;
    b->out = p->out;
    b->lse = p->lse;
    b->dout = p->dout;
    b->cu_seqlens_q = p->cu_seqlens_q;
    b->cu_seqlens_kv = p->cu_seqlens_kv;
    b->dq = p->dq;
    b->dk = p->dk;
    b->dv = p->dv;
}
