/* SPDX-License-Identifier: MIT */
/*
 * small.c: merge, permutations of weights, positions to slots, schedules. Each is short enough to be computed
 * here a second time, from its definition.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/check.h"
#include "problem/numbers.h"

/* ---- merge --------------------------------------------------------------------------------------------------- */

#define STATES_MAX 64

typedef struct states {
    fmla_tensor outs[STATES_MAX], lses[STATES_MAX];
    int32_t count;
} states;

/* n tokens, h heads; a third of the states empty, whose out is NaN. */
static void make_states(states *s, memory *m, rng *r, const test_case *c)
{
    s->count = (int32_t)c->topk;
    for (int32_t i = 0; i < s->count; i++) {
        s->outs[i] = memory_tensor_4(m, (fmla_dtype)c->dtype, 3, c->count, c->h_q, c->d_v, 0, (int)c->pad, 0xFF);
        s->lses[i] = memory_tensor_4(m, FMLA_F32, 2, c->count, c->h_q, 0, 0, (int)c->pad, 0xFF);
        for (int64_t t = 0; t < c->count; t++) {
            bool all_empty = t % 5 == 0;
            for (int64_t h = 0; h < c->h_q; h++) {
                bool empty = all_empty || rng_below(r, 3) == 0;
                double spread = c->data == DATA_SHARP ? 200 : 3;
                tensor_set(&s->lses[i], t, h, 0, 0,
                           empty ? (rng_below(r, 2) ? (double)INFINITY : -(double)INFINITY) : rng_normal(r) * spread);
                for (int64_t d = 0; d < c->d_v && !empty; d++) {
                    tensor_set(&s->outs[i], t, h, d, 0, rng_normal(r));
                }
            }
        }
    }
}

/* The merged lse of a row, and the weight of each state in out; the sum of weights is below 1 when there is a sink. */
static double merge_row(const states *s, const fmla_tensor *sink, int64_t t, int64_t h, double *weight)
{
    double top = -(double)INFINITY, sum = 0;
    for (int32_t i = 0; i < s->count; i++) {
        double x = tensor_get(&s->lses[i], t, h, 0, 0);
        top = isfinite(x) && x > top ? x : top;
    }
    for (int32_t i = 0; i < s->count; i++) {
        double x = tensor_get(&s->lses[i], t, h, 0, 0);
        weight[i] = isfinite(x) ? exp(x - top) : 0;
        sum += weight[i];
    }
    double lse = sum > 0 ? top + log(sum) : -(double)INFINITY;
    double share = sum > 0 && sink->rank != 0 ? 1 / (1 + exp(tensor_get(sink, h, 0, 0, 0) - lse)) : 1;
    for (int32_t i = 0; i < s->count; i++) {
        weight[i] = sum > 0 ? weight[i] / sum * share : 0;
    }
    return lse;
}

static verdict compare_merge(checker *k, const test_case *c, const states *s, const fmla_merge_args *a)
{
    double rounding = c->dtype == FMLA_BF16 ? 0x1p-8 : c->dtype == FMLA_F16 ? 0x1p-11 : 0x1p-23;
    double floor = c->dtype == FMLA_F16 ? 0x1p-25 : 1e-30; /* half of the smallest step */
    for (int64_t t = 0; t < c->count; t++) {
        for (int64_t h = 0; h < c->h_q; h++) {
            double weight[STATES_MAX];
            double lse = merge_row(s, &a->attn_sink, t, h, weight);
            double got = tensor_get(&a->lse, t, h, 0, 0);
            double want = isfinite(lse) ? lse : c->pos_inf ? (double)INFINITY : lse;
            if (isfinite(want) ? !(fabs(got - want) <= 0x1p-21 * fabs(want) + 0x1p-20) : got != want) {
                return check_fail(k, "lse of token %lld, head %lld is %.9g, not %.9g", (long long)t, (long long)h, got,
                                  want);
            }
            for (int64_t d = 0; d < c->d_v; d++) {
                double exact = 0, size = 0;
                for (int32_t i = 0; i < s->count; i++) {
                    double x = weight[i] > 0 ? tensor_get(&s->outs[i], t, h, d, 0) : 0;
                    exact += weight[i] * x;
                    size += weight[i] * fabs(x);
                }
                double x = tensor_get(&a->out, t, h, d, 0);
                double top = fabs(lse) < 1e6 ? fabs(lse) : 0;
                if (!(fabs(x - exact) <= 1.01 * rounding * fabs(exact) + (0x1p-18 + 0x1p-22 * top) * size + floor)) {
                    return check_fail(k, "out of token %lld, head %lld, dim %lld is %.9g, not %.9g", (long long)t,
                                      (long long)h, (long long)d, x, exact);
                }
            }
        }
    }
    return VERDICT_PASSED;
}

verdict check_merge(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    any_args a;
    states s;
    if (c->topk < 1 || c->topk > STATES_MAX) {
        return check_fail(k, "topk, the number of states, is not in 1..%d", STATES_MAX);
    }
    rng_seed(&r, (uint64_t)c->seed);
    make_states(&s, &m, &r, c);
    memset(&a, 0, sizeof a);
    a.merge = (fmla_merge_args)FMLA_MERGE_ARGS_INIT;
    a.merge.outs = s.outs;
    a.merge.lses = s.lses;
    a.merge.count = s.count;
    a.merge.empty_lse = c->pos_inf ? FMLA_EMPTY_LSE_POS_INF : FMLA_EMPTY_LSE_NEG_INF;
    if (c->sink != SINK_NONE) {
        a.merge.attn_sink = memory_tensor_4(&m, FMLA_F32, 1, c->h_q, 0, 0, 0, 0, 0);
        for (int64_t h = 0; h < c->h_q; h++) {
            double x = h % 3 == 0 ? (double)INFINITY : h % 3 == 1 ? -(double)INFINITY : rng_normal(&r);
            tensor_set(&a.merge.attn_sink, h, 0, 0, 0, x);
        }
    }
    a.merge.out = memory_tensor_4(&m, (fmla_dtype)c->dtype, 3, c->count, c->h_q, c->d_v, 0, (int)c->pad, POISON_BYTE);
    a.merge.lse = memory_tensor_4(&m, FMLA_F32, 2, c->count, c->h_q, 0, 0, (int)c->pad, POISON_BYTE);
    fmla_status status = engine_run(&k->engine, &m, FMLA_OP_MERGE, &a);
    verdict v = status == FMLA_OK ? compare_merge(k, c, &s, &a.merge) : check_status(k, &k->engine, status, "");
    if (v == VERDICT_PASSED && !memory_intact(&m)) {
        v = check_fail(k, "guard bytes around a tensor were overwritten");
    }
    memory_free(&m);
    return v;
}

/* ---- permutations -------------------------------------------------------------------------------------------- */

static void random_bytes(rng *r, const fmla_tensor *t)
{
    size_t size = tensor_span(t);
    for (size_t i = 0; i < size; i++) {
        ((uint8_t *)t->data)[i] = (uint8_t)rng_below(r, 256);
    }
}

static uint8_t scale_byte(const fmla_tensor *t, int64_t group, int64_t row, int64_t byte)
{
    int64_t word = t->rank == 3 ? tensor_offset(t, group, row, byte / 4, 0) : tensor_offset(t, row, byte / 4, 0, 0);
    return (uint8_t)(((const uint32_t *)t->data)[word] >> (8 * (byte % 4)));
}

static verdict permute_q_b(checker *k, const test_case *c, memory *m, rng *r)
{
    any_args a;
    memset(&a, 0, sizeof a);
    a.permute_q_b = (fmla_permute_q_b_args)FMLA_PERMUTE_Q_B_ARGS_INIT;
    fmla_permute_q_b_args *q = &a.permute_q_b;
    int64_t d_q = c->d_qk, rows = c->h_q * d_q, width = c->count, words = width / c->group / 4;
    q->h_q = (int32_t)c->h_q;
    q->d_q = (int32_t)d_q;
    q->weight = memory_tensor_4(m, FMLA_U8, 2, rows, width, 0, 0, (int)c->pad, 0);
    q->scale = memory_scale_words(m, 2, 1, rows, words);
    q->out_weight = memory_tensor_4(m, FMLA_U8, 2, rows, width, 0, 0, 0, POISON_BYTE);
    q->out_scale = memory_scale_words(m, 2, 1, rows, words);
    random_bytes(r, &q->weight);
    random_bytes(r, &q->scale);
    fmla_status status = engine_run(&k->engine, m, FMLA_OP_PERMUTE_Q_B, &a);
    if (status != FMLA_OK) {
        return check_status(k, &k->engine, status, "");
    }
    for (int64_t h = 0; h < c->h_q; h++) {
        for (int64_t d = 0; d < d_q; d++) {
            int64_t from = h * d_q + d, to = d % 16 + 16 * h + d / 16 * (16 * c->h_q);
            const uint8_t *x = (const uint8_t *)q->weight.data + from * q->weight.stride[0];
            bool same = memcmp(x, (const uint8_t *)q->out_weight.data + to * width, (size_t)width) == 0;
            for (int64_t w = 0; w < words; w++) {
                same = same && tensor_i32(&q->scale, from, w, 0) == tensor_i32(&q->out_scale, to, w, 0);
            }
            if (!same) {
                return check_fail(k, "row %lld did not move to row %lld", (long long)from, (long long)to);
            }
        }
    }
    return VERDICT_PASSED;
}

static verdict permute_wv(checker *k, const test_case *c, memory *m, rng *r)
{
    any_args a;
    memset(&a, 0, sizeof a);
    a.permute_wv = (fmla_permute_wv_args)FMLA_PERMUTE_WV_ARGS_INIT;
    fmla_permute_wv_args *p = &a.permute_wv;
    int64_t G = c->group, d_o = c->d_v, groups = c->h_q / G, rows = c->count, width = G * d_o;
    p->wv_group_size = (int32_t)G;
    p->d_o = (int32_t)d_o;
    p->weight = memory_tensor_4(m, FMLA_U8, 3, groups, rows, width, 0, (int)c->pad, 0);
    p->scale = memory_scale_words(m, 3, groups, rows, width / 128);
    p->out_weight = memory_tensor_4(m, FMLA_U8, 3, groups, rows, width, 0, 0, POISON_BYTE);
    p->out_scale = memory_scale_words(m, 3, groups, rows, width / 128);
    random_bytes(r, &p->weight);
    random_bytes(r, &p->scale);
    fmla_status status = engine_run(&k->engine, m, FMLA_OP_PERMUTE_WV, &a);
    if (status != FMLA_OK) {
        return check_status(k, &k->engine, status, "");
    }
    for (int64_t n = 0; n < groups; n++) {
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t j = 0; j < width; j++) {
                int64_t g = j / d_o, d = j % d_o, to = d / 32 * (32 * G) + 32 * g + d % 32;
                uint8_t x = ((const uint8_t *)p->weight.data)[tensor_offset(&p->weight, n, row, j, 0)];
                uint8_t y = ((const uint8_t *)p->out_weight.data)[tensor_offset(&p->out_weight, n, row, to, 0)];
                if (x != y || scale_byte(&p->scale, n, row, g * (d_o / 32) + d / 32) !=
                                  scale_byte(&p->out_scale, n, row, d / 32 * G + g)) {
                    return check_fail(k, "group %lld, row %lld: column %lld did not move to %lld with its scale",
                                      (long long)n, (long long)row, (long long)j, (long long)to);
                }
            }
        }
    }
    return VERDICT_PASSED;
}

verdict check_permute(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    rng_seed(&r, (uint64_t)c->seed);
    verdict v = c->op == FMLA_OP_PERMUTE_Q_B ? permute_q_b(k, c, &m, &r) : permute_wv(k, c, &m, &r);
    if (v == VERDICT_PASSED && !memory_intact(&m)) {
        v = check_fail(k, "guard bytes around a tensor were overwritten");
    }
    memory_free(&m);
    return v;
}

/* ---- positions ----------------------------------------------------------------------------------------------- */

verdict check_indices_convert(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    any_args a;
    rng_seed(&r, (uint64_t)c->seed);
    int64_t width = (c->s_kv + c->page - 1) / c->page;
    memset(&a, 0, sizeof a);
    a.indices_convert = (fmla_indices_convert_args)FMLA_INDICES_CONVERT_ARGS_INIT;
    fmla_indices_convert_args *i = &a.indices_convert;
    i->page_size = c->page;
    i->positions = memory_tensor_4(&m, FMLA_I32, 3, c->b, c->s_q, c->topk, 0, (int)c->pad, 0);
    i->indices = memory_tensor_4(&m, FMLA_I32, 3, c->b, c->s_q, c->topk, 0, (int)c->pad, POISON_BYTE);
    i->block_table = memory_tensor_4(&m, FMLA_I32, 2, c->b, width, 0, 0, (int)c->pad, 0);
    int64_t *order = xmalloc((size_t)(c->b * width) * sizeof *order);
    rng_permutation(&r, order, c->b * width);
    for (int64_t n = 0; n < c->b * width; n++) {
        tensor_set(&i->block_table, n / width, n % width, 0, 0, (double)order[n]);
    }
    free(order);
    for (int64_t n = 0; n < c->b * c->s_q * c->topk; n++) {
        int64_t x = rng_below(&r, 5) == 0 ? -1 - rng_below(&r, 1000) : rng_below(&r, c->s_kv);
        tensor_set(&i->positions, n / (c->s_q * c->topk), n / c->topk % c->s_q, n % c->topk, 0, (double)x);
    }
    fmla_status status = engine_run(&k->engine, &m, FMLA_OP_INDICES_CONVERT, &a);
    verdict v = status == FMLA_OK ? VERDICT_PASSED : check_status(k, &k->engine, status, "");
    for (int64_t n = 0; n < c->b * c->s_q * c->topk && v == VERDICT_PASSED; n++) {
        int64_t q = n / (c->s_q * c->topk), s = n / c->topk % c->s_q, j = n % c->topk;
        int64_t x = tensor_i32(&i->positions, q, s, j), got = tensor_i32(&i->indices, q, s, j);
        int64_t want = x < 0 ? -1 : (int64_t)tensor_i32(&i->block_table, q, x / c->page, 0) * c->page + x % c->page;
        if (got != want) {
            v = check_fail(k, "position %lld of request %lld is slot %lld, not %lld", (long long)x, (long long)q,
                           (long long)got, (long long)want);
        }
    }
    if (v == VERDICT_PASSED && !memory_intact(&m)) {
        v = check_fail(k, "guard bytes around a tensor were overwritten");
    }
    memory_free(&m);
    return v;
}

/* ---- schedules ----------------------------------------------------------------------------------------------- */

/* The published cutting rule: part by part, a budget of blocks and a fixed price for every piece. Blocks form
 * (2026-01). */
static void cut(const int64_t *blocks, int64_t batch, int64_t parts, int64_t price, int32_t *rows, int32_t *splits)
{
    int64_t total = 0, request = 0, block = 0, split = 0;
    for (int64_t i = 0; i < batch; i++) {
        total += blocks[i] + price;
    }
    int64_t payload = (total + parts - 1) / parts + price;
    splits[0] = 0;
    for (int64_t part = 0; part < parts; part++) {
        int64_t budget = payload, first = request, begin = block, first_split = split;
        while (request < batch) {
            int64_t rest = blocks[request] - block;
            if (budget >= rest + price) {
                budget -= rest + price;
                splits[request + 1] = splits[request] + (int32_t)split + 1;
                request++;
                block = split = 0;
            } else {
                if (budget > price) {
                    block += budget - price;
                    split++;
                }
                break;
            }
        }
        int32_t *row = rows + part * 8;
        row[0] = (int32_t)first;
        row[1] = (int32_t)(block > 0 ? request : request - 1);
        row[2] = (int32_t)begin;
        row[3] = (int32_t)(block > 0 ? block : request > 0 ? blocks[request - 1] : 0);
        row[4] = (int32_t)first_split;
    }
}

static verdict compare_schedule(checker *k, const test_case *c, const fmla_schedule_args *s, const int32_t *rows,
                                const int32_t *splits, const int64_t *lengths)
{
    for (int64_t i = 0; i <= c->b; i++) {
        if (tensor_i32(&s->num_splits, i, 0, 0) != splits[i]) {
            return check_fail(k, "num_splits[%lld] is %d, not %d", (long long)i, tensor_i32(&s->num_splits, i, 0, 0),
                              splits[i]);
        }
    }
    for (int64_t part = 0; part < c->count && rows[part * 8] < c->b; part++) {
        for (int64_t j = 0; j < 5; j++) {
            int32_t got = tensor_i32(&s->metadata, part, j, 0), want = rows[part * 8 + j];
            if (j == 3 && lengths[rows[part * 8 + 1]] == 0) {
                want = 0; /* an empty request's end */
            }
            if (got != want) {
                return check_fail(k, "part %lld, column %lld is %d, not %d", (long long)part, (long long)j, got, want);
            }
        }
    }
    return VERDICT_PASSED;
}

verdict check_schedule(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    any_args a;
    rng_seed(&r, (uint64_t)c->seed);
    memset(&a, 0, sizeof a);
    a.schedule = (fmla_schedule_args)FMLA_SCHEDULE_ARGS_INIT;
    fmla_schedule_args *s = &a.schedule;
    s->cache_seqlens = memory_tensor_4(&m, FMLA_I32, 1, c->b, 0, 0, 0, 0, 0);
    s->topk = -1;
    s->batch = c->b;
    s->form = FMLA_SCHEDULE_2026_01;
    s->overhead_blocks = c->group ? (int32_t)c->group : 5;
    s->metadata = memory_tensor_4(&m, FMLA_I32, 2, c->count, 8, 0, 0, 0, POISON_BYTE);
    s->num_splits = memory_tensor_4(&m, FMLA_I32, 1, c->b + 1, 0, 0, 0, 0, POISON_BYTE);
    int64_t *lengths = xcalloc((size_t)c->b + 1, sizeof *lengths);
    int64_t *blocks = xcalloc((size_t)c->b + 1, sizeof *blocks);
    int32_t *rows = xcalloc((size_t)c->count * 8, sizeof *rows);
    int32_t *splits = xcalloc((size_t)c->b + 1, sizeof *splits);
    for (int64_t i = 0; i < c->b; i++) {
        lengths[i] = c->zero_len && rng_below(&r, 3) == 0 ? 0 : rng_below(&r, 2 * c->s_kv) + 1;
        ((int32_t *)s->cache_seqlens.data)[i] = (int32_t)lengths[i];
        blocks[i] = ((lengths[i] > 1 ? lengths[i] : 1) - 1) / 64 + 1;
    }
    cut(blocks, c->b, c->count, s->overhead_blocks, rows, splits);
    fmla_status status = engine_run(&k->engine, &m, FMLA_OP_SCHEDULE, &a);
    verdict v =
        status == FMLA_OK ? compare_schedule(k, c, s, rows, splits, lengths) : check_status(k, &k->engine, status, "");
    free(lengths);
    free(blocks);
    free(rows);
    free(splits);
    memory_free(&m);
    return v;
}
