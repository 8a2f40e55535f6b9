/* SPDX-License-Identifier: MIT */
/*
 * share.c: deals a list of cases to shares that run side by side and should end together: the dearest case first, each
 * to the share that has the least so far. What a case costs is estimated from the bytes that it makes, moves and looks
 * at, because that, and not arithmetic, is what it takes on a device.
 */
#include <stdlib.h>
#include <string.h>

#include "check/check.h"

/* All of them in bytes that are made, or moved to a device and looked at. */
#define COST_LEAST      20e6 /* of the smallest case */
#define COST_ENTRY      40.0 /* of an index: drawn, counted and read */
#define COST_MULTIPLIED 0.5  /* of a multiplication of the reference */

#define MEMORY_LEAST 256e6 /* a process holds it in any case */

static double times_run(const test_case *c)
{
    double runs = 1;
    for (int64_t ways = c->again; ways != 0; ways &= ways - 1) {
        runs++;
    }
    return runs;
}

static double token_bytes(int64_t format, int64_t d_qk)
{
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    if (fmla_format_get((fmla_kv_format)format, &info) != FMLA_OK) {
        return 0;
    }
    return info.bytes_per_token > 0 ? (double)info.bytes_per_token : 2 * (double)d_qk;
}

double share_cost(const test_case *c, double budget)
{
    bool mha = c->op == FMLA_OP_MHA_FORWARD || c->op == FMLA_OP_MHA_BACKWARD;
    if (!case_is_mqa(c) && !mha) {
        return COST_LEAST + (double)(c->count * c->d_qk * c->h_q) * 4;
    }
    bool sparse = !mha && !case_is_dense(c);
    double requests = case_is_prefill(c) ? 1 : (double)c->b, tokens = requests * (double)c->s_q;
    double rows = tokens * (double)c->h_q, width = (double)(c->d_qk + c->d_v), runs = times_run(c);
    double listed = sparse ? (double)(c->topk + c->e_topk) : (double)c->s_kv;
    double cache = (double)c->s_kv * (mha ? 2 * width : token_bytes(c->format, c->d_qk)) * (double)c->h_kv +
                   (double)c->e_kv * token_bytes(c->extra, c->d_qk);
    double inputs = requests * cache + rows * (double)c->d_qk * 2, outputs = rows * (double)c->d_v * 2;
    double multiplied = rows * listed * width;
    return COST_LEAST + inputs * (2 + runs) + outputs * 2 * runs + (sparse ? tokens * listed * COST_ENTRY : 0) +
           (multiplied < budget ? multiplied : budget) * COST_MULTIPLIED;
}

double share_memory(const test_case *c, int choices)
{
    bool mha = c->op == FMLA_OP_MHA_FORWARD || c->op == FMLA_OP_MHA_BACKWARD, more = c->op == FMLA_OP_MHA_BACKWARD;
    if (!case_is_mqa(c) && !mha) {
        return MEMORY_LEAST;
    }
    bool sparse = !mha && !case_is_dense(c);
    double requests = case_is_prefill(c) ? 1 : (double)c->b, tokens = requests * (double)c->s_q;
    double rows = tokens * (double)c->h_q, slots = requests * (double)(c->s_kv + c->e_kv);
    double pools = c->again & AGAIN_PAGES ? 2 : 1, orders = c->again & AGAIN_ORDER ? 2 : 1;
    double lists = 1 + (c->again & AGAIN_PAGES ? 1 : 0) + (c->again & AGAIN_TAIL ? 1 : 0) + (orders - 1);
    /* Padding: a token more on each page, 128 elements more in each row. */
    double page = c->pad && !mha ? 1 + 1 / (double)(c->page < c->e_page ? c->page : c->e_page) : 1;
    double wide = c->pad ? 128 : 0, dtype = c->out == FMLA_F32 ? 4 : 2;
    double cache = (double)c->s_kv * token_bytes(c->format, c->d_qk) * (double)c->h_kv +
                   (c->extra ? (double)c->e_kv * token_bytes(c->extra, c->d_qk) : 0);
    double keys = (double)(c->s_kv * c->h_kv) * ((double)(c->d_qk + c->d_v) + 2 * wide) * 2 * (more ? 2 : 1);
    double queries = rows * ((double)c->d_qk + wide) * 2 * (more ? 2 : 1) * orders;
    double outputs = rows * (((double)c->d_v + wide) * dtype * orders + (double)c->d_v * dtype * choices);
    return MEMORY_LEAST + requests * (mha ? keys : cache * page * pools + 256) + queries + outputs * (more ? 2 : 1) +
           slots * 16 * pools + (sparse ? tokens * (double)(c->topk + c->e_topk) * 4 * lists : 0);
}

typedef struct priced {
    double cost;
    size_t index;
} priced;

static int dearest_first(const void *a, const void *b)
{
    const priced *x = a, *y = b;
    if (x->cost != y->cost) {
        return x->cost < y->cost ? 1 : -1;
    }
    return x->index < y->index ? -1 : 1;
}

/* Indices of all cases, the dearest first. */
static priced *price_all(const case_list *list, double budget)
{
    priced *order = xmalloc((list->count + 1) * sizeof *order);
    for (size_t i = 0; i < list->count; i++) {
        order[i] = (priced){share_cost(&list->cases[i], budget), i};
    }
    qsort(order, list->count, sizeof *order, dearest_first);
    return order;
}

size_t *share_order(const case_list *list, double budget)
{
    priced *priced_list = price_all(list, budget);
    size_t *order = xmalloc((list->count + 1) * sizeof *order);
    for (size_t i = 0; i < list->count; i++) {
        order[i] = priced_list[i].index;
    }
    free(priced_list);
    return order;
}

void share_deal(case_list *list, int64_t share, int64_t shares, double budget)
{
    priced *order = price_all(list, budget);
    double *loads = xcalloc((size_t)shares, sizeof *loads);
    bool *ours = xcalloc(list->count + 1, sizeof *ours);
    for (size_t i = 0; i < list->count; i++) {
        int64_t least = 0;
        for (int64_t k = 1; k < shares; k++) {
            least = loads[k] < loads[least] ? k : least;
        }
        loads[least] += order[i].cost;
        ours[order[i].index] = least == share - 1;
    }
    /* Neighbours in the list are alike, and the largest must not all be in memory at one time: every share begins
     * elsewhere. */
    size_t kept = 0, first = (size_t)((double)list->count * (double)(share - 1) / (double)shares);
    test_case *cases = xmalloc((list->count + 1) * sizeof *cases);
    for (size_t n = 0; n < list->count; n++) {
        size_t i = (first + n) % list->count;
        if (ours[i]) {
            cases[kept++] = list->cases[i];
        }
    }
    free(list->cases);
    list->cases = cases;
    list->capacity = list->count + 1;
    list->count = kept;
    free(order);
    free(loads);
    free(ours);
}
