/* SPDX-License-Identifier: MIT */
/*
 * mha.c: dense multi-head attention over packed sequences, forward and backward.
 *
 * Query i of a request with s_q queries and s_k keys sees keys 0..n-1: n = s_k, or with causal n = s_k - s_q
 * + i + 1, aligned to the end of both. Query head h reads KV head h / (h_q / h_kv).
 *
 *   forward    as mqa.c, without sink; a row without keys: out 0, lse as asked
 *   backward   P = exp(scale q.k - lse), D = rowsum(dO * O), dS = P (dO.v - D), with the given O and lse:
 *              dQ = scale sum_j dS k_j, dK = scale sum_i dS q_i, dV = sum_i P dO_i, the last two over all
 *              heads that share the KV head. A row without keys, or with an infinite lse, gives and gets
 *              exactly zero.
 *
 * Backward visits every (query, key) pair twice: by query for dQ, by key for dK and dV, so that each result
 * is summed in float64 in one place and rounded once.
 */
#include "oracle.h"

/* Tokens begin..begin + count - 1 of a packed tensor: one request's. */
typedef struct span {
    int64_t begin;
    int64_t count;
} span;

/* Vectors of one query row and of one key, and sums, in the workspace. */
typedef struct scratch {
    double *q, *k;             /* [d_qk] */
    double *v, *out, *dout;    /* [d_v] */
    double *sum_k;             /* [d_qk] */
    double *sum_v, *magnitude; /* [d_v] */
} scratch;

size_t fmlai_oracle_mha_workspace(const void *state, const fmlai_mha *p)
{
    (void)state;
    return ((size_t)p->d_qk * 3 + (size_t)p->d_v * 5) * sizeof(double);
}

static scratch scratch_in(void *workspace, const fmlai_mha *p)
{
    scratch s;
    s.q = workspace;
    s.k = s.q + p->d_qk;
    s.sum_k = s.k + p->d_qk;
    s.v = s.sum_k + p->d_qk;
    s.out = s.v + p->d_v;
    s.dout = s.out + p->d_v;
    s.sum_v = s.dout + p->d_v;
    s.magnitude = s.sum_v + p->d_v;
    return s;
}

static span span_of(const int32_t *cu_seqlens, int64_t request, int64_t total)
{
    if (!cu_seqlens) {
        return (span){.begin = 0, .count = total};
    }
    return (span){.begin = cu_seqlens[request],
                  .count = (int64_t)cu_seqlens[request + 1] - cu_seqlens[request]};
}

/* Number of keys that query i sees. */
static int64_t keys_seen(const fmlai_mha *p, span queries, span keys, int64_t i)
{
    int64_t n = p->causal ? keys.count - queries.count + i + 1 : keys.count;
    return n < 0 ? 0 : n;
}

static void clear(double *x, int64_t n)
{
    memset(x, 0, (size_t)n * sizeof *x);
}

/* Logit of the loaded query with key `token`, which is loaded too. */
static double logit(const fmlai_mha *p, const scratch *s, int64_t token, int32_t kv_head)
{
    fmlai_oracle_load(&p->k, token, kv_head, p->d_qk, s->k);
    return (double)p->scale * fmlai_oracle_dot(s->q, s->k, p->d_qk);
}

static void forward_row(const fmlai_mha *p, const scratch *s, span keys, int64_t seen, int64_t token,
                        int32_t head)
{
    int32_t kv_head = head / (p->h_q / p->h_kv);
    double max = -INFINITY, sum = 0, max_abs = 0;

    fmlai_oracle_load(&p->q, token, head, p->d_qk, s->q);
    clear(s->sum_v, p->d_v);
    clear(s->magnitude, p->d_v);
    for (int64_t j = 0; j < seen; j++) {
        max = fmlai_oracle_max(max, logit(p, s, keys.begin + j, kv_head));
        double size = fabs((double)p->scale) * fmlai_oracle_dot_abs(s->q, s->k, p->d_qk);
        max_abs = fmlai_oracle_max(max_abs, size);
    }
    bool lonely = max == -INFINITY;
    for (int64_t j = 0; !lonely && j < seen; j++) {
        double weight = exp(logit(p, s, keys.begin + j, kv_head) - max);
        fmlai_oracle_load(&p->v, keys.begin + j, kv_head, p->d_v, s->v);
        sum += weight;
        for (int32_t d = 0; d < p->d_v; d++) {
            s->sum_v[d] += weight * s->v[d];
            s->magnitude[d] += weight * fabs(s->v[d]);
        }
    }
    for (int32_t d = 0; !lonely && d < p->d_v; d++) {
        s->sum_v[d] /= sum;
        s->magnitude[d] /= sum;
    }
    double lse = lonely ? (double)p->empty_lse : max + log(sum);
    fmlai_oracle_store(&p->out, token, head, p->d_v, s->sum_v);
    if (p->lse.data) {
        fmlai_oracle_store(&p->lse, token, head, 1, &lse);
    }
    if (p->abs_out.data) {
        fmlai_oracle_store(&p->abs_out, token, head, p->d_v, s->magnitude);
    }
    if (p->abs_logit.data) {
        fmlai_oracle_store(&p->abs_logit, token, head, 1, &max_abs);
    }
}

fmla_status fmlai_oracle_mha_forward(void *state, const fmlai_mha *p, const fmlai_call *call)
{
    scratch s = scratch_in(call->workspace, p);
    (void)state;
    for (int64_t r = 0; r < p->batch; r++) {
        span queries = span_of(p->cu_seqlens_q, r, p->total_q);
        span keys = span_of(p->cu_seqlens_kv, r, p->total_kv);
        for (int64_t i = 0; i < queries.count; i++) {
            for (int32_t head = 0; head < p->h_q; head++) {
                forward_row(p, &s, keys, keys_seen(p, queries, keys, i), queries.begin + i, head);
            }
        }
    }
    return FMLA_OK;
}

/* What backward needs of a query row besides q and dO, which are left in the scratch. */
typedef struct query_row {
    bool lonely;
    double lse;
    double d; /* rowsum(dO * O) */
} query_row;

static query_row load_query(const fmlai_mha *p, const scratch *s, int64_t token, int32_t head)
{
    query_row row;
    fmlai_oracle_load(&p->lse, token, head, 1, &row.lse);
    row.lonely = isinf(row.lse);
    if (!row.lonely) {
        fmlai_oracle_load(&p->q, token, head, p->d_qk, s->q);
        fmlai_oracle_load(&p->dout, token, head, p->d_v, s->dout);
        fmlai_oracle_load(&p->out, token, head, p->d_v, s->out);
        row.d = fmlai_oracle_dot(s->dout, s->out, p->d_v);
    }
    return row;
}

/* P and dS of the loaded row with key `token`. */
static double pair(const fmlai_mha *p, const scratch *s, const query_row *row, int64_t token, int32_t kv_head,
                   double *ds)
{
    double weight = exp(logit(p, s, token, kv_head) - row->lse);
    fmlai_oracle_load(&p->v, token, kv_head, p->d_v, s->v);
    *ds = weight * (fmlai_oracle_dot(s->dout, s->v, p->d_v) - row->d);
    return weight;
}

static void backward_query(const fmlai_mha *p, const scratch *s, span keys, int64_t seen, int64_t token,
                           int32_t head)
{
    query_row row = load_query(p, s, token, head);
    clear(s->sum_k, p->d_qk);
    for (int64_t j = 0; !row.lonely && j < seen; j++) {
        double ds;
        pair(p, s, &row, keys.begin + j, head / (p->h_q / p->h_kv), &ds);
        for (int32_t d = 0; d < p->d_qk; d++) {
            s->sum_k[d] += (double)p->scale * ds * s->k[d];
        }
    }
    fmlai_oracle_store(&p->dq, token, head, p->d_qk, s->sum_k);
}

static void backward_key(const fmlai_mha *p, const scratch *s, span queries, span keys, int64_t j,
                         int32_t kv_head)
{
    int32_t group = p->h_q / p->h_kv;
    int64_t key = keys.begin + j;

    clear(s->sum_k, p->d_qk);
    clear(s->sum_v, p->d_v);
    for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t i = 0; i < queries.count; i++) {
            query_row row = load_query(p, s, queries.begin + i, head);
            if (row.lonely || j >= keys_seen(p, queries, keys, i)) {
                continue;
            }
            double ds;
            double weight = pair(p, s, &row, key, kv_head, &ds);
            for (int32_t d = 0; d < p->d_qk; d++) {
                s->sum_k[d] += (double)p->scale * ds * s->q[d];
            }
            for (int32_t d = 0; d < p->d_v; d++) {
                s->sum_v[d] += weight * s->dout[d];
            }
        }
    }
    fmlai_oracle_store(&p->dk, key, kv_head, p->d_qk, s->sum_k);
    fmlai_oracle_store(&p->dv, key, kv_head, p->d_v, s->sum_v);
}

fmla_status fmlai_oracle_mha_backward(void *state, const fmlai_mha *p, const fmlai_call *call)
{
    scratch s = scratch_in(call->workspace, p);
    (void)state;
    for (int64_t r = 0; r < p->batch; r++) {
        span queries = span_of(p->cu_seqlens_q, r, p->total_q);
        span keys = span_of(p->cu_seqlens_kv, r, p->total_kv);
        for (int64_t i = 0; i < queries.count; i++) {
            for (int32_t head = 0; head < p->h_q; head++) {
                backward_query(p, &s, keys, keys_seen(p, queries, keys, i), queries.begin + i, head);
            }
        }
        for (int64_t j = 0; j < keys.count; j++) {
            for (int32_t kv_head = 0; kv_head < p->h_kv; kv_head++) {
                backward_key(p, &s, queries, keys, j, kv_head);
            }
        }
    }
    return FMLA_OK;
}
