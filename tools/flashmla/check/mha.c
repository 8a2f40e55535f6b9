/* SPDX-License-Identifier: MIT */
/* mha.c: multi-head attention, forward and backward. Heads are independent, so the reference takes some of them.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/check.h"
#include "problem/numbers.h"

/* Heads first..first+n-1 of a packed tensor. */
static fmla_tensor heads_of(const fmla_tensor *t, int64_t first, int64_t n)
{
    fmla_tensor view = *t;
    if (t->rank != 0) {
        view.data = (char *)t->data + first * t->stride[1] * (int64_t)fmla_dtype_size((fmla_dtype)t->dtype);
        view.shape[1] = n;
    }
    return view;
}

static bool no_keys(const problem *p, int64_t token)
{
    const int32_t *q = p->cu_seqlens_q.data, *kv = p->cu_seqlens_kv.data;
    int64_t i = 0;
    while (token >= q[i + 1]) {
        i++;
    }
    int64_t s_q = q[i + 1] - q[i], s_kv = kv[i + 1] - kv[i];
    return s_kv == 0 || (p->c.causal && s_kv - s_q + (token - q[i]) + 1 <= 0);
}

static int published_applies(const test_case *c)
{
    return c->data == DATA_PLAIN;
}

static verdict finish(checker *k, const problem *p, const comparison *c, const char *name)
{
    char why[512];
    double *worst = &k->worst[p->c.op][c->what];
    if (c->what != QUANTITY_LSE && c->what != QUANTITY_MAX_LOGITS) {
        k->last = *c;
    }
    *worst = c->worst > *worst ? c->worst : *worst;
    return compare_end(c, why, sizeof why) == 0 ? VERDICT_PASSED : check_fail(k, "%s%s", name, why);
}

/* Kept between tests of one reference: memory of the oracle's results. */
typedef struct truth {
    memory mem;
    any_args args;
} truth;

static fmla_status oracle_forward(checker *k, const problem *p, int64_t kv_head, truth *t)
{
    int64_t group = p->c.h_q / p->c.h_kv;
    problem_args(p, &t->args);
    fmla_mha_forward_args *f = &t->args.mha_forward;
    f->q = heads_of(&p->q, kv_head * group, group);
    f->k = heads_of(&p->k, kv_head, 1);
    f->v = heads_of(&p->v, kv_head, 1);
    f->out = memory_tensor_4(&t->mem, FMLA_F64, 3, p->tokens, group, p->c.d_v, 0, 0, 0);
    f->lse = memory_tensor_4(&t->mem, FMLA_F64, 2, p->tokens, group, 0, 0, 0, 0);
    f->abs_out = memory_tensor_4(&t->mem, FMLA_F64, 3, p->tokens, group, p->c.d_v, 0, 0, 0);
    f->abs_logit = memory_tensor_4(&t->mem, FMLA_F64, 2, p->tokens, group, 0, 0, 0, 0);
    return engine_run(&k->oracle, &t->mem, FMLA_OP_MHA_FORWARD, &t->args);
}

static verdict compare_forward(checker *k, const problem *p, int64_t kv_head, const truth *t)
{
    const fmla_mha_forward_args *f = &t->args.mha_forward;
    int64_t group = p->c.h_q / p->c.h_kv;
    comparison out, lse;
    compare_begin(&out, QUANTITY_OUT, k->class, p->out.dtype, FMLA_OP_MHA_FORWARD, published_applies(&p->c));
    compare_begin(&lse, QUANTITY_LSE, k->class, FMLA_F32, FMLA_OP_MHA_FORWARD, published_applies(&p->c));
    for (int64_t i = 0; i < p->tokens; i++) {
        for (int64_t g = 0; g < group; g++) {
            int64_t h = kv_head * group + g;
            double L = tensor_get(&f->abs_logit, i, g, 0, 0);
            L = isfinite(L) ? L : 0;
            compare_add(&lse, tensor_get(&p->lse, i, h, 0, 0), tensor_get(&f->lse, i, g, 0, 0), 0, L, i, h);
            for (int64_t d = 0; d < p->c.d_v; d++) {
                compare_add(&out, tensor_get(&p->out, i, h, d, 0), tensor_get(&f->out, i, g, d, 0),
                            tensor_get(&f->abs_out, i, g, d, 0), L, i, h);
            }
        }
    }
    verdict v = finish(k, p, &lse, "");
    return v == VERDICT_PASSED ? finish(k, p, &out, "") : v;
}

static fmla_status oracle_backward(checker *k, const problem *p, int64_t kv_head, truth *t)
{
    int64_t group = p->c.h_q / p->c.h_kv, tokens_kv = p->k.shape[0];
    problem_args(p, &t->args);
    fmla_mha_backward_args *b = &t->args.mha_backward;
    fmla_tensor *per_q[] = {&b->q, &b->out, &b->lse, &b->dout};
    fmla_tensor *per_kv[] = {&b->k, &b->v};
    for (int i = 0; i < 4; i++) {
        *per_q[i] = heads_of(per_q[i], kv_head * group, group);
    }
    for (int i = 0; i < 2; i++) {
        *per_kv[i] = heads_of(per_kv[i], kv_head, 1);
    }
    b->dq = memory_tensor_4(&t->mem, FMLA_F64, 3, p->tokens, group, p->c.d_qk, 0, 0, 0);
    b->dk = memory_tensor_4(&t->mem, FMLA_F64, 3, tokens_kv, 1, p->c.d_qk, 0, 0, 0);
    b->dv = memory_tensor_4(&t->mem, FMLA_F64, 3, tokens_kv, 1, p->c.d_v, 0, 0, 0);
    return engine_run(&k->oracle, &t->mem, FMLA_OP_MHA_BACKWARD, &t->args);
}

static verdict compare_gradient(checker *k, const problem *p, const fmla_tensor *answer, const fmla_tensor *exact,
                                int64_t first, const char *name)
{
    comparison c;
    /* The published kernels have no backward for grouped heads, whose gradients are sums over the group. */
    int theirs = published_applies(&p->c) && p->c.h_q == p->c.h_kv;
    compare_begin(&c, QUANTITY_GRADIENT, k->class, answer->dtype, FMLA_OP_MHA_BACKWARD, theirs);
    for (int64_t t = 0; t < exact->shape[0]; t++) {
        bool lonely = answer == &p->dq && no_keys(p, t);
        for (int64_t g = 0; g < exact->shape[1]; g++) {
            for (int64_t d = 0; d < exact->shape[2]; d++) {
                double x = tensor_get(answer, t, first + g, d, 0);
                if (lonely && x != 0) {
                    return check_fail(k, "dq of query token %lld, which sees no key, is %g", (long long)t, x);
                }
                compare_add(&c, x, tensor_get(exact, t, g, d, 0), 0, 0, t, first + g);
            }
        }
    }
    return finish(k, p, &c, name);
}

static verdict compare_backward(checker *k, const problem *p, int64_t kv_head, const truth *t)
{
    const fmla_mha_backward_args *b = &t->args.mha_backward;
    int64_t group = p->c.h_q / p->c.h_kv;
    verdict v = compare_gradient(k, p, &p->dq, &b->dq, kv_head * group, "dq: ");
    if (v == VERDICT_PASSED) {
        v = compare_gradient(k, p, &p->dk, &b->dk, kv_head, "dk: ");
    }
    return v == VERDICT_PASSED ? compare_gradient(k, p, &p->dv, &b->dv, kv_head, "dv: ") : v;
}

/* As many KV heads as the budget allows, at least one; the last is always among them. */
verdict check_mha_outputs(checker *k, const problem *p)
{
    bool backward = p->c.op == FMLA_OP_MHA_BACKWARD;
    double pairs = (double)p->tokens * (double)p->k.shape[0] / (double)p->batch;
    double cost = pairs * (double)(p->c.h_q / p->c.h_kv) * (double)(p->c.d_qk + p->c.d_v) * (backward ? 3 : 1);
    int64_t heads = (int64_t)(k->budget / (cost + 1));
    heads = heads < 1 ? 1 : heads > p->c.h_kv ? p->c.h_kv : heads;
    verdict v = VERDICT_PASSED;
    for (int64_t h = p->c.h_kv - heads; h < p->c.h_kv && v == VERDICT_PASSED; h++) {
        truth t = {0};
        fmla_status status = backward ? oracle_backward(k, p, h, &t) : oracle_forward(k, p, h, &t);
        if (status != FMLA_OK) {
            cli_status(k->oracle.context, status, "reference");
            v = VERDICT_BROKEN;
        } else {
            v = backward ? compare_backward(k, p, h, &t) : compare_forward(k, p, h, &t);
        }
        memory_free(&t.mem);
    }
    return v;
}

verdict check_mha(checker *k, const test_case *c)
{
    problem p;
    any_args args;
    uint8_t *results = NULL;
    size_t size = 0;
    if (problem_build(&p, c, &k->oracle) != CLI_OK) {
        return VERDICT_BROKEN;
    }
    problem_args(&p, &args);
    verdict v = check_run(k, &k->engine, &p, &args, &results, &size);
    if (v == VERDICT_PASSED) {
        v = check_mha_outputs(k, &p);
    }
    if (v == VERDICT_PASSED) {
        v = check_again(k, &p, results, size);
    }
    free(results);
    problem_free(&p);
    return v;
}
