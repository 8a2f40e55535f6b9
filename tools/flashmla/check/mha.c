/* SPDX-License-Identifier: MIT */
/*
 * mha.c: multi-head attention, forward and backward. Heads are independent, so the reference takes some of them. Where
 * one head is more than the budget allows it takes single rows: a query with the keys that it sees (out, lse, dq), a
 * key with the queries that see it (dk, dv), both being problems of one sequence without a mask.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/check.h"
#include "problem/numbers.h"

#define WHOLE_HEAD 2e9  /* multiplications that one whole head may cost */
#define MAKER_MAX  1e9  /* multiplications that the oracle is asked for in preparing backward */
#define ROWS_MIN   6
#define ROWS_MAX   96

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

/* Part of a problem: all of it, or queries and keys of one sequence that all see each other. */
typedef struct piece {
    bool whole;
    int64_t q, q_count, kv, kv_count;
} piece;

static fmla_tensor rows_of(const fmla_tensor *t, int64_t first, int64_t n)
{
    fmla_tensor view = *t;
    if (t->rank != 0) {
        view.data = (char *)t->data + first * t->stride[0] * (int64_t)fmla_dtype_size((fmla_dtype)t->dtype);
        view.shape[0] = n;
    }
    return view;
}

/* Rows of the piece and heads of one KV head, of a tensor that has a row for each query (or key). */
static fmla_tensor part_of(const fmla_tensor *t, const piece *part, bool keys, int64_t first, int64_t heads)
{
    fmla_tensor view = heads_of(t, first, heads);
    return part->whole ? view : rows_of(&view, keys ? part->kv : part->q, keys ? part->kv_count : part->q_count);
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

/* What is compared: forward: lse, out; backward: dq, dk, dv. Single rows are summed up before they are judged. */
typedef struct sums {
    comparison of[3];
} sums;

static void sums_begin(checker *k, const problem *p, sums *s)
{
    bool backward = p->c.op == FMLA_OP_MHA_BACKWARD;
    /* The published kernels have no backward for grouped heads, whose gradients are sums over the group. */
    int theirs = published_applies(&p->c) && (!backward || p->c.h_q == p->c.h_kv);
    if (!backward) {
        compare_begin(&s->of[0], QUANTITY_LSE, k->class, FMLA_F32, FMLA_OP_MHA_FORWARD, theirs);
        compare_begin(&s->of[1], QUANTITY_OUT, k->class, p->out.dtype, FMLA_OP_MHA_FORWARD, theirs);
        return;
    }
    const fmla_tensor *gradients[] = {&p->dq, &p->dk, &p->dv};
    for (int i = 0; i < 3; i++) {
        compare_begin(&s->of[i], QUANTITY_GRADIENT, k->class, gradients[i]->dtype, FMLA_OP_MHA_BACKWARD, theirs);
    }
}

static verdict sums_finish(checker *k, const problem *p, const sums *s)
{
    static const char *const names[] = {"dq: ", "dk: ", "dv: "};
    bool backward = p->c.op == FMLA_OP_MHA_BACKWARD;
    verdict v = VERDICT_PASSED;
    for (int i = 0; i < (backward ? 3 : 2) && v == VERDICT_PASSED; i++) {
        v = finish(k, p, &s->of[i], backward ? names[i] : "");
    }
    return v;
}

/* Kept between tests of one reference: memory of the oracle's results. */
typedef struct truth {
    memory mem;
    any_args args;
} truth;

static fmla_status oracle_forward(checker *k, const problem *p, int64_t kv_head, const piece *part, truth *t)
{
    int64_t group = p->c.h_q / p->c.h_kv;
    problem_args(p, &t->args);
    fmla_mha_forward_args *f = &t->args.mha_forward;
    f->q = part_of(&p->q, part, false, kv_head * group, group);
    f->k = part_of(&p->k, part, true, kv_head, 1);
    f->v = part_of(&p->v, part, true, kv_head, 1);
    if (!part->whole) {
        f->cu_seqlens_q = f->cu_seqlens_kv = (fmla_tensor){0};
        f->causal = 0;
    }
    int64_t tokens = f->q.shape[0];
    f->out = memory_tensor_4(&t->mem, FMLA_F64, 3, tokens, group, p->c.d_v, 0, 0, 0);
    f->lse = memory_tensor_4(&t->mem, FMLA_F64, 2, tokens, group, 0, 0, 0, 0);
    f->abs_out = memory_tensor_4(&t->mem, FMLA_F64, 3, tokens, group, p->c.d_v, 0, 0, 0);
    f->abs_logit = memory_tensor_4(&t->mem, FMLA_F64, 2, tokens, group, 0, 0, 0, 0);
    return engine_run(&k->oracle, &t->mem, FMLA_OP_MHA_FORWARD, &t->args);
}

static void compare_forward(const problem *p, int64_t kv_head, const piece *part, const truth *t, sums *s)
{
    const fmla_mha_forward_args *f = &t->args.mha_forward;
    int64_t group = p->c.h_q / p->c.h_kv;
    for (int64_t i = 0; i < f->q.shape[0]; i++) {
        for (int64_t g = 0; g < group; g++) {
            int64_t h = kv_head * group + g, row = i + (part->whole ? 0 : part->q);
            double L = tensor_get(&f->abs_logit, i, g, 0, 0);
            L = isfinite(L) ? L : 0;
            compare_add(&s->of[0], tensor_get(&p->lse, row, h, 0, 0), tensor_get(&f->lse, i, g, 0, 0), 0, L, row, h);
            for (int64_t d = 0; d < p->c.d_v; d++) {
                compare_add(&s->of[1], tensor_get(&p->out, row, h, d, 0), tensor_get(&f->out, i, g, d, 0),
                            tensor_get(&f->abs_out, i, g, d, 0), L, row, h);
            }
        }
    }
}

static fmla_status oracle_backward(checker *k, const problem *p, int64_t kv_head, const piece *part, truth *t)
{
    int64_t group = p->c.h_q / p->c.h_kv;
    problem_args(p, &t->args);
    fmla_mha_backward_args *b = &t->args.mha_backward;
    fmla_tensor *per_q[] = {&b->q, &b->out, &b->lse, &b->dout};
    fmla_tensor *per_kv[] = {&b->k, &b->v};
    for (int i = 0; i < 4; i++) {
        *per_q[i] = part_of(per_q[i], part, false, kv_head * group, group);
    }
    for (int i = 0; i < 2; i++) {
        *per_kv[i] = part_of(per_kv[i], part, true, kv_head, 1);
    }
    if (!part->whole) {
        b->cu_seqlens_q = b->cu_seqlens_kv = (fmla_tensor){0};
        b->causal = 0;
    }
    int64_t tokens_q = b->q.shape[0], tokens_kv = b->k.shape[0];
    b->dq = memory_tensor_4(&t->mem, FMLA_F64, 3, tokens_q, group, p->c.d_qk, 0, 0, 0);
    b->dk = memory_tensor_4(&t->mem, FMLA_F64, 3, tokens_kv, 1, p->c.d_qk, 0, 0, 0);
    b->dv = memory_tensor_4(&t->mem, FMLA_F64, 3, tokens_kv, 1, p->c.d_v, 0, 0, 0);
    return engine_run(&k->oracle, &t->mem, FMLA_OP_MHA_BACKWARD, &t->args);
}

/* Rows from `row` and heads from `first` of an answer. */
static verdict compare_gradient(checker *k, const problem *p, const fmla_tensor *answer, const fmla_tensor *exact,
                                int64_t row, int64_t first, comparison *c)
{
    for (int64_t t = 0; t < exact->shape[0]; t++) {
        bool lonely = answer == &p->dq && no_keys(p, row + t);
        for (int64_t g = 0; g < exact->shape[1]; g++) {
            for (int64_t d = 0; d < exact->shape[2]; d++) {
                double x = tensor_get(answer, row + t, first + g, d, 0);
                if (lonely && x != 0) {
                    return check_fail(k, "dq of query token %lld, which sees no key, is %g", (long long)(row + t), x);
                }
                compare_add(c, x, tensor_get(exact, t, g, d, 0), 0, 0, row + t, first + g);
            }
        }
    }
    return VERDICT_PASSED;
}

/* The sum of squares of a row; 0 if it is not finite: then the gradients are not, and nothing is allowed. */
static double row_squares(const fmla_tensor *t, int64_t row, int64_t head)
{
    double sum = 0;
    for (int64_t d = 0; d < t->shape[2]; d++) {
        double x = tensor_get(t, row, head, d, 0);
        sum += x * x;
    }
    return isfinite(sum) ? sum : 0;
}

static double row_squares_max(const fmla_tensor *t)
{
    double most = 0;
    for (int64_t row = 0; row < t->shape[0]; row++) {
        for (int64_t head = 0; head < t->shape[1]; head++) {
            most = fmax(most, row_squares(t, row, head));
        }
    }
    return most;
}

/*
 * dq_i = scale sum_j p_ij (dout_i v_j - delta_i) k_j, dk_j likewise. With one weight near 1 the difference is next to
 * nothing, and what fp32 sums of dout_i v_j leave of it is rounding: 2^-24 |dout_i| |v_j|. In dk_j these add up with
 * the squares of p_ij, as dout_i do in dv_j.
 */
static void allow_differences(const problem *p, const fmla_mha_backward_args *b, bool of_query, bool of_key, sums *s)
{
    double scale = 0x1p-24 * p->scale;
    if (of_query) {
        double of_keys = row_squares_max(&b->k) * row_squares_max(&b->v);
        for (int64_t t = 0; t < b->dq.shape[0]; t++) {
            for (int64_t g = 0; g < b->dq.shape[1]; g++) {
                compare_slack(&s->of[0], scale * sqrt(row_squares(&b->dout, t, g) * of_keys), 1);
            }
        }
    }
    if (of_key) {
        double of_q = row_squares_max(&b->q);
        for (int64_t t = 0; t < b->dk.shape[0]; t++) {
            compare_slack(&s->of[1], scale * sqrt(row_squares(&b->v, t, 0) * row_squares(&b->dv, t, 0) * of_q), 1);
        }
    }
}

/* dq of the queries and dk and dv of the keys of a piece; of a row alone only its own are whole sums. */
static verdict compare_backward(checker *k, const problem *p, int64_t kv_head, const piece *part, const truth *t,
                                sums *s)
{
    const fmla_mha_backward_args *b = &t->args.mha_backward;
    int64_t group = p->c.h_q / p->c.h_kv, q = part->whole ? 0 : part->q, kv = part->whole ? 0 : part->kv;
    bool of_query = part->whole || part->q_count == 1, of_key = part->whole || !of_query;
    verdict v = VERDICT_PASSED;
    allow_differences(p, b, of_query, of_key, s);
    if (of_query) {
        v = compare_gradient(k, p, &p->dq, &b->dq, q, kv_head * group, &s->of[0]);
    }
    if (v == VERDICT_PASSED && of_key) {
        v = compare_gradient(k, p, &p->dk, &b->dk, kv, kv_head, &s->of[1]);
    }
    return v == VERDICT_PASSED && of_key ? compare_gradient(k, p, &p->dv, &b->dv, kv, kv_head, &s->of[2]) : v;
}

static verdict check_piece(checker *k, const problem *p, int64_t kv_head, const piece *part, sums *s)
{
    bool backward = p->c.op == FMLA_OP_MHA_BACKWARD;
    truth t = {0};
    verdict v = VERDICT_PASSED;
    fmla_status status =
        backward ? oracle_backward(k, p, kv_head, part, &t) : oracle_forward(k, p, kv_head, part, &t);
    if (status != FMLA_OK) {
        cli_status(k->oracle.context, status, "reference");
        v = VERDICT_BROKEN;
    } else if (backward) {
        v = compare_backward(k, p, kv_head, part, &t, s);
    } else {
        compare_forward(p, kv_head, part, &t, s);
    }
    memory_free(&t.mem);
    return v;
}

/* A query token (or key token) of sequence i with all that it sees (or is seen by). */
static piece row_piece(const problem *p, int64_t i, int64_t row, bool of_key)
{
    const int32_t *q = p->cu_seqlens_q.data, *kv = p->cu_seqlens_kv.data;
    int64_t s_q = q[i + 1] - q[i], s_kv = kv[i + 1] - kv[i];
    piece part = {false, q[i], s_q, kv[i], s_kv};
    if (of_key) {
        int64_t first = p->c.causal ? row - (s_kv - s_q) : 0; /* the first query that sees it */
        first = first < 0 ? 0 : first;
        part.kv += row;
        part.kv_count = 1;
        part.q += first;
        part.q_count -= first;
    } else {
        int64_t seen = p->c.causal ? s_kv - s_q + row + 1 : s_kv;
        part.q += row;
        part.q_count = 1;
        part.kv_count = seen < 0 ? 0 : seen;
    }
    return part;
}

/* Single rows, as many as the budget allows, of any head. */
static verdict check_rows(checker *k, const problem *p)
{
    const int32_t *q = p->cu_seqlens_q.data, *kv = p->cu_seqlens_kv.data;
    bool backward = p->c.op == FMLA_OP_MHA_BACKWARD;
    double spent = 0, width = (double)(p->c.h_q / p->c.h_kv) * (double)(p->c.d_qk + p->c.d_v) * (backward ? 2 : 1);
    verdict v = VERDICT_PASSED;
    sums s;
    rng r;
    sums_begin(k, p, &s);
    rng_seed(&r, (uint64_t)p->c.seed + 78);
    for (int n = 0; n < ROWS_MAX && v == VERDICT_PASSED && (n < ROWS_MIN || spent < k->budget); n++) {
        int64_t i = rng_below(&r, p->batch), head = rng_below(&r, p->c.h_kv);
        bool of_key = backward && n % 2 == 1;
        int64_t rows = of_key ? kv[i + 1] - kv[i] : q[i + 1] - q[i];
        if (rows == 0) {
            continue;
        }
        piece part = row_piece(p, i, n < 4 ? rows - 1 : rng_below(&r, rows), of_key); /* first: the longest */
        if (part.q_count != 1 || !of_key) { /* a key that one query sees would be taken for a query */
            v = check_piece(k, p, head, &part, &s);
        }
        spent += width * (double)part.q_count * (double)part.kv_count;
    }
    return v == VERDICT_PASSED ? sums_finish(k, p, &s) : v;
}

/* Triples of query, key and dimension of one KV head. */
static double head_cost(const test_case *c)
{
    double cost = (double)c->b * (double)c->s_q * (double)c->s_kv * (double)(c->h_q / c->h_kv);
    return cost * (double)(c->d_qk + c->d_v) * (c->op == FMLA_OP_MHA_BACKWARD ? 3 : 1);
}

/* As many KV heads as the budget allows; the last is always among them. */
verdict check_mha_outputs(checker *k, const problem *p)
{
    const piece whole = {.whole = true};
    double cost = head_cost(&p->c);
    int64_t heads = (int64_t)(k->budget / (cost + 1));
    heads = heads < 1 ? 1 : heads > p->c.h_kv ? p->c.h_kv : heads;
    if (cost > WHOLE_HEAD) {
        return check_rows(k, p);
    }
    verdict v = VERDICT_PASSED;
    for (int64_t h = p->c.h_kv - heads; h < p->c.h_kv && v == VERDICT_PASSED; h++) {
        sums s;
        sums_begin(k, p, &s);
        v = check_piece(k, p, h, &whole, &s);
        v = v == VERDICT_PASSED ? sums_finish(k, p, &s) : v;
    }
    return v;
}

verdict check_mha(checker *k, const test_case *c)
{
    problem p;
    any_args args;
    uint8_t *results = NULL;
    size_t size = 0;
    /* What backward gets of forward is an input: of large problems it may be the kernels' own. */
    bool large = head_cost(c) * (double)c->h_kv > MAKER_MAX;
    if (problem_build(&p, c, large ? &k->engine : &k->oracle) != CLI_OK) {
        return VERDICT_BROKEN;
    }
    p.lasting = true;
    problem_args(&p, &args);
    verdict v = check_run(k, &k->engine, &p, &args, &results, &size);
    if (v == VERDICT_PASSED) {
        v = check_mha_outputs(k, &p);
    }
    if (v == VERDICT_PASSED && (c->again & AGAIN_THREADS)) {
        v = check_again_threads(k, &p, results);
    }
    v = check_end(k, &k->engine, &p, v);
    free(results);
    problem_free(&p);
    return v;
}
