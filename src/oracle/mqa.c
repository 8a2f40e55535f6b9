/* SPDX-License-Identifier: MIT */
/*
 * mqa.c: rows of queries attend lists of tokens: dense decode, sparse decode, sparse prefill and the fused
 * operations.
 *
 * For one row with the tokens T that it attends (main list, then extra list; an entry counts as often as it
 * occurs):
 *
 *   logit_t = scale * rho * (q . k_t)                       rho = 1 unless fused
 *   lse     = ln sum exp(logit_t)        max = max logit_t
 *   out     = sum exp(logit_t) v_t / (sum exp(logit_t) + exp(sink))      v_t = the first d_v elements of k_t
 *
 * computed in two passes over T: first the maximum, then everything relative to it. The logits of the second
 * pass are computed anew, so a list may be of any length. A token is read once per pass for all heads that
 * share its KV head, and those heads' queries lie side by side: every sum still runs from left to right and
 * over the tokens in their order, but many of them run together.
 *
 * NaN in an attended token reaches the maximum, hence all of the row; a token that is not attended is not
 * read at all. A row without tokens is lonely, and so is one whose logits are all -infinity: out 0, max
 * -infinity, lse as asked.
 */
#include "oracle.h"

#define LANES  4 /* rows and */
#define TOKENS 4 /* tokens whose products run together */

/* Numbers of two rows, side by side wherever doubles may lie. */
typedef double pair __attribute__((vector_size(2 * sizeof(double)), aligned(sizeof(double))));

/* One row while its tokens pass by. */
typedef struct row {
    double *out;       /* [d_v] sum of exp(logit - max) v */
    double *magnitude; /* [d_v] sum of exp(logit - max) |v| */
    double factor;     /* scale * rho */
    double max;
    double sum;     /* of exp(logit - max) */
    double max_abs; /* |factor| * max sum |q_j k_j| */
} row;

/* The rows of one query token that share a KV head. */
typedef struct group {
    row *rows;
    int32_t count;
    int32_t width; /* count rounded up to whole lanes */
    double *query; /* [d_qk][width]; the lanes behind count hold zeros */
    double *query_abs;
} group;

/* Workspace: the rows of one query token, one group's queries and their magnitudes, one query, up to TOKENS tokens as
 * doubles and their magnitudes, one as floats. */
typedef struct scratch {
    row *rows;
    double *queries, *queries_abs;
    double *query;     /* [d_qk] */
    double *k, *k_abs; /* [TOKENS][d_qk] */
    float *k_f32;
} scratch;

/* What a pass does with the tokens, all of which the group attends. */
typedef void (*token_step)(const fmlai_mqa *p, const group *g, const scratch *s, int32_t tokens);

static int32_t heads_per_group(const fmlai_mqa *p)
{
    return p->h_q / p->h_kv;
}

static int32_t group_width(const fmlai_mqa *p)
{
    return (heads_per_group(p) + LANES - 1) / LANES * LANES;
}

size_t fmlai_oracle_mqa_workspace(const void *state, const fmlai_mqa *p)
{
    size_t sums = (size_t)p->h_q * 2 * (size_t)p->d_v;
    size_t vectors = (2 * (size_t)group_width(p) + 1 + 2 * TOKENS) * (size_t)p->d_qk;
    (void)state;
    return (size_t)p->h_q * sizeof(row) + (sums + vectors) * sizeof(double) + (size_t)p->d_qk * sizeof(float);
}

static scratch scratch_in(void *workspace, const fmlai_mqa *p)
{
    row *rows = workspace;
    double *next = (double *)(rows + p->h_q);
    for (int32_t h = 0; h < p->h_q; h++) {
        rows[h].out = next;
        rows[h].magnitude = next + p->d_v;
        next += 2 * p->d_v;
    }
    int64_t queries = (int64_t)group_width(p) * p->d_qk, tokens = (int64_t)TOKENS * p->d_qk;
    scratch s = {.rows = rows, .queries = next, .queries_abs = next + queries, .query = next + 2 * queries};
    s.k = s.query + p->d_qk;
    s.k_abs = s.k + tokens;
    s.k_f32 = (float *)(s.k_abs + tokens);
    return s;
}

static group group_of(const fmlai_mqa *p, const scratch *s, int32_t kv_head)
{
    int32_t count = heads_per_group(p);
    return (group){.rows = s->rows + (int64_t)kv_head * count,
                   .count = count,
                   .width = group_width(p),
                   .query = s->queries,
                   .query_abs = s->queries_abs};
}

static void begin_row(const fmlai_mqa *p, int64_t token, int32_t head, const scratch *s)
{
    row *r = &s->rows[head];
    double rho = 1;
    if (p->fused.enabled) {
        rho = fmlai_oracle_fused_query(p, token, head, s->query);
    } else {
        int64_t offset = fmlai_row_offset(&p->q, p, token, head);
        for (int32_t d = 0; d < p->d_qk; d++) {
            s->query[d] = fmlai_load_f64(p->q.data, p->q.dtype, offset + d);
        }
    }
    r->factor = (double)p->scale * rho;
    r->max = -INFINITY;
    r->sum = 0;
    r->max_abs = 0;
    memset(r->out, 0, (size_t)p->d_v * sizeof(double));
    memset(r->magnitude, 0, (size_t)p->d_v * sizeof(double));
}

/* Lays the query that begin_row has read beside those of its group. */
static void lay_query(const fmlai_mqa *p, const group *g, int32_t lane, const double *query)
{
    for (int32_t d = 0; d < p->d_qk; d++) {
        g->query[(int64_t)d * g->width + lane] = query[d];
        g->query_abs[(int64_t)d * g->width + lane] = fabs(query[d]);
    }
}

/* Shows every attended token of (query token, KV head) to `step`, in order. */
static void for_each_token(const fmlai_mqa *p, int64_t token, int32_t kv_head, const group *g, const scratch *s,
                           token_step step)
{
    const fmlai_token_list *lists[2] = {&p->main, &p->extra};
    int32_t waiting = 0;
    for (int which = 0; which < 2; which++) {
        const fmlai_token_list *list = lists[which];
        int64_t entries = list->kind == FMLAI_LIST_NONE ? 0 : fmlai_list_count(list, p, token);
        for (int64_t i = 0; i < entries; i++) {
            int64_t slot = fmlai_list_slot(list, p, token, kv_head, i);
            if (slot < 0) {
                continue;
            }
            fmlai_token_read(&list->pool, slot, kv_head, s->k_f32);
            for (int32_t d = 0; d < p->d_qk; d++) {
                s->k[(int64_t)waiting * p->d_qk + d] = s->k_f32[d];
                s->k_abs[(int64_t)waiting * p->d_qk + d] = fabs((double)s->k_f32[d]);
            }
            if (++waiting == TOKENS) {
                step(p, g, s, waiting);
                waiting = 0;
            }
        }
    }
    if (waiting > 0) {
        step(p, g, s, waiting);
    }
}

/* sum q_j k_j of LANES rows and TOKENS tokens, n dims. Of magnitudes it gives sum |q_j k_j|, to the bit. */
static void dot_all(const double *q, int32_t width, const double *k, int32_t n, double dot[TOKENS][LANES])
{
    const double *k0 = k, *k1 = k0 + n, *k2 = k1 + n, *k3 = k2 + n;
    pair a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}; /* rows 0 and 1 with each token */
    pair b0 = {0}, b1 = {0}, b2 = {0}, b3 = {0}; /* rows 2 and 3 */
    for (int32_t d = 0; d < n; d++) {
        const pair *rows = (const void *)(q + (int64_t)d * width);
        const pair a = rows[0], b = rows[1];
        a0 += a * k0[d];
        b0 += b * k0[d];
        a1 += a * k1[d];
        b1 += b * k1[d];
        a2 += a * k2[d];
        b2 += b * k2[d];
        a3 += a * k3[d];
        b3 += b * k3[d];
    }
    const pair sums[TOKENS * LANES / 2] = {a0, b0, a1, b1, a2, b2, a3, b3};
    memcpy(dot, sums, sizeof sums);
}

static int32_t lanes_from(const group *g, int32_t first)
{
    return g->count - first < LANES ? g->count - first : LANES;
}

static void find_max(const fmlai_mqa *p, const group *g, const scratch *s, int32_t tokens)
{
    double dot[TOKENS][LANES], dot_abs[TOKENS][LANES] = {{0}};
    for (int32_t first = 0; first < g->count; first += LANES) {
        dot_all(g->query + first, g->width, s->k, p->d_qk, dot);
        if (p->abs_logit.data) {
            dot_all(g->query_abs + first, g->width, s->k_abs, p->d_qk, dot_abs);
        }
        for (int32_t i = 0; i < lanes_from(g, first); i++) {
            row *r = &g->rows[first + i];
            for (int32_t t = 0; t < tokens; t++) {
                r->max = fmlai_oracle_max(r->max, r->factor * dot[t][i]);
                r->max_abs = fmlai_oracle_max(r->max_abs, fabs(r->factor) * dot_abs[t][i]);
            }
        }
    }
}

/* sums += weights[0] v_0 + weights[1] v_1 + ..., one after the other. */
static void add_weighted(double *restrict sums, int32_t n, const double *weights, const double *restrict v,
                         int64_t stride, int32_t tokens)
{
    if (tokens == TOKENS) {
        const double *v1 = v + stride, *v2 = v1 + stride, *v3 = v2 + stride;
        for (int32_t d = 0; d < n; d++) {
            sums[d] = sums[d] + weights[0] * v[d] + weights[1] * v1[d] + weights[2] * v2[d] + weights[3] * v3[d];
        }
        return;
    }
    for (int32_t t = 0; t < tokens; t++) {
        for (int32_t d = 0; d < n; d++) {
            sums[d] += weights[t] * v[t * stride + d];
        }
    }
}

static void add_tokens(const fmlai_mqa *p, const group *g, const scratch *s, int32_t tokens)
{
    double dot[TOKENS][LANES];
    for (int32_t first = 0; first < g->count; first += LANES) {
        dot_all(g->query + first, g->width, s->k, p->d_qk, dot);
        for (int32_t i = 0; i < lanes_from(g, first); i++) {
            row *r = &g->rows[first + i];
            double weights[TOKENS];
            for (int32_t t = 0; t < tokens; t++) {
                weights[t] = exp(r->factor * dot[t][i] - r->max);
                r->sum += weights[t];
            }
            add_weighted(r->out, p->d_v, weights, s->k, p->d_qk, tokens);
            if (p->abs_out.data) {
                add_weighted(r->magnitude, p->d_v, weights, s->k_abs, p->d_qk, tokens);
            }
        }
    }
}

static void store_scalar(const fmlai_mqa *p, const fmlai_rows *x, int64_t token, int32_t head, double value)
{
    if (x->data) {
        fmlai_store_f64(x->data, x->dtype, fmlai_row_offset(x, p, token, head), value);
    }
}

static void store_vector(const fmlai_mqa *p, const fmlai_rows *x, int64_t token, int32_t head, const double *value)
{
    for (int32_t d = 0; x->data && d < p->d_v; d++) {
        fmlai_store_f64(x->data, x->dtype, fmlai_row_offset(x, p, token, head) + d, value[d]);
    }
}

/* Divides by the sum, the sink's share included, and writes the row's results. */
static void finish_row(const fmlai_mqa *p, int64_t token, int32_t head, row *r)
{
    bool lonely = r->max == -INFINITY;
    double total = r->sum + (p->sink ? exp((double)p->sink[head] - r->max) : 0);
    for (int32_t d = 0; d < p->d_v; d++) {
        r->out[d] = lonely ? 0 : r->out[d] / total;
        r->magnitude[d] = lonely ? 0 : r->magnitude[d] / total;
    }
    if (p->fused.enabled) {
        fmlai_oracle_fused_unrotate(p, token, r->out, r->magnitude);
        fmlai_oracle_fused_cast(p, token, head, r->out);
    }
    store_vector(p, &p->out, token, head, r->out);
    store_vector(p, &p->abs_out, token, head, r->magnitude);
    store_scalar(p, &p->lse, token, head,
                 lonely ? (double)p->empty_lse : (r->max + log(r->sum)) * (double)p->lse_factor);
    store_scalar(p, &p->max_logits, token, head, lonely ? -INFINITY : r->max * (double)p->lse_factor);
    store_scalar(p, &p->abs_logit, token, head, r->max_abs);
}

fmla_status fmlai_oracle_mqa(void *state, const fmlai_mqa *p, const fmlai_call *call)
{
    scratch s = scratch_in(call->workspace, p);
    (void)state;

    /* What no query or token fills takes part in products that nobody looks at. */
    memset(s.k, 0, 2 * TOKENS * (size_t)p->d_qk * sizeof(double));
    memset(s.queries, 0, 2 * (size_t)group_width(p) * (size_t)p->d_qk * sizeof(double));
    if (p->fused.enabled) {
        fmlai_oracle_fused_begin(p);
    }
    for (int64_t token = 0; token < p->num_tokens; token++) {
        for (int32_t kv_head = 0; kv_head < p->h_kv; kv_head++) {
            group g = group_of(p, &s, kv_head);
            for (int32_t i = 0; i < g.count; i++) {
                begin_row(p, token, kv_head * g.count + i, &s);
                lay_query(p, &g, i, s.query);
            }
            for_each_token(p, token, kv_head, &g, &s, find_max);
            for_each_token(p, token, kv_head, &g, &s, add_tokens);
        }
        for (int32_t head = 0; head < p->h_q; head++) {
            finish_row(p, token, head, &s.rows[head]);
        }
    }
    return FMLA_OK;
}
