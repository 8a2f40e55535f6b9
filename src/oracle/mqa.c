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
 * share its KV head.
 *
 * NaN in an attended token reaches the maximum, hence all of the row; a token that is not attended is not
 * read at all. A row without tokens is lonely, and so is one whose logits are all -infinity: out 0, max
 * -infinity, lse as asked.
 */
#include "oracle.h"

/* One row while its tokens pass by. */
typedef struct row {
    double *query;     /* [d_qk] */
    double *out;       /* [d_v] sum of exp(logit - max) v */
    double *magnitude; /* [d_v] sum of exp(logit - max) |v| */
    double factor;     /* scale * rho */
    double max;
    double sum;     /* of exp(logit - max) */
    double max_abs; /* |factor| * max sum |q_j k_j| */
} row;

/* What a pass does with a token that `count` rows attend. */
typedef void (*token_step)(const fmlai_mqa *p, row *rows, int32_t count, const double *k);

/* Workspace: the rows of one query token, their arrays, one token as floats and as doubles. */
typedef struct scratch {
    row *rows;
    double *k;
    float *k_f32;
} scratch;

size_t fmlai_oracle_mqa_workspace(const void *state, const fmlai_mqa *p)
{
    size_t doubles = (size_t)p->h_q * (size_t)(p->d_qk + 2 * p->d_v) + (size_t)p->d_qk;
    (void)state;
    return (size_t)p->h_q * sizeof(row) + doubles * sizeof(double) + (size_t)p->d_qk * sizeof(float);
}

static scratch scratch_in(void *workspace, const fmlai_mqa *p)
{
    row *rows = workspace;
    double *next = (double *)(rows + p->h_q);
    for (int32_t h = 0; h < p->h_q; h++) {
        rows[h].query = next;
        rows[h].out = next + p->d_qk;
        rows[h].magnitude = rows[h].out + p->d_v;
        next = rows[h].magnitude + p->d_v;
    }
    return (scratch){.rows = rows, .k = next, .k_f32 = (float *)(next + p->d_qk)};
}

static void begin_row(const fmlai_mqa *p, int64_t token, int32_t head, row *r)
{
    double rho = 1;
    if (p->fused.enabled) {
        rho = fmlai_oracle_fused_query(p, token, head, r->query);
    } else {
        int64_t offset = fmlai_row_offset(&p->q, p, token, head);
        for (int32_t d = 0; d < p->d_qk; d++) {
            r->query[d] = fmlai_load_f64(p->q.data, p->q.dtype, offset + d);
        }
    }
    r->factor = (double)p->scale * rho;
    r->max = -INFINITY;
    r->sum = 0;
    r->max_abs = 0;
    memset(r->out, 0, (size_t)p->d_v * sizeof(double));
    memset(r->magnitude, 0, (size_t)p->d_v * sizeof(double));
}

/* Shows every attended token of (query token, KV head) to `step`. */
static void for_each_token(const fmlai_mqa *p, int64_t token, int32_t kv_head, row *rows, int32_t count,
                           const scratch *s, token_step step)
{
    const fmlai_token_list *lists[2] = {&p->main, &p->extra};
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
                s->k[d] = s->k_f32[d];
            }
            step(p, rows, count, s->k);
        }
    }
}

static void find_max(const fmlai_mqa *p, row *rows, int32_t count, const double *k)
{
    for (row *r = rows; r < rows + count; r++) {
        r->max = fmlai_oracle_max(r->max, r->factor * fmlai_oracle_dot(r->query, k, p->d_qk));
        if (p->abs_logit.data) {
            double size = fabs(r->factor) * fmlai_oracle_dot_abs(r->query, k, p->d_qk);
            r->max_abs = fmlai_oracle_max(r->max_abs, size);
        }
    }
}

static void add_token(const fmlai_mqa *p, row *rows, int32_t count, const double *k)
{
    for (row *r = rows; r < rows + count; r++) {
        double weight = exp(r->factor * fmlai_oracle_dot(r->query, k, p->d_qk) - r->max);
        r->sum += weight;
        for (int32_t d = 0; d < p->d_v; d++) {
            r->out[d] += weight * k[d];
        }
        for (int32_t d = 0; p->abs_out.data && d < p->d_v; d++) {
            r->magnitude[d] += weight * fabs(k[d]);
        }
    }
}

static void store_scalar(const fmlai_mqa *p, const fmlai_rows *x, int64_t token, int32_t head, double value)
{
    if (x->data) {
        fmlai_store_f64(x->data, x->dtype, fmlai_row_offset(x, p, token, head), value);
    }
}

static void store_vector(const fmlai_mqa *p, const fmlai_rows *x, int64_t token, int32_t head,
                         const double *value)
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
    int32_t count = p->h_q / p->h_kv; /* heads per KV head */
    (void)state;

    if (p->fused.enabled) {
        fmlai_oracle_fused_begin(p);
    }
    for (int64_t token = 0; token < p->num_tokens; token++) {
        for (int32_t head = 0; head < p->h_q; head++) {
            begin_row(p, token, head, &s.rows[head]);
        }
        for (int32_t kv_head = 0; kv_head < p->h_kv; kv_head++) {
            row *rows = s.rows + kv_head * count;
            for_each_token(p, token, kv_head, rows, count, &s, find_max);
            for_each_token(p, token, kv_head, rows, count, &s, add_token);
        }
        for (int32_t head = 0; head < p->h_q; head++) {
            finish_row(p, token, head, &s.rows[head]);
        }
    }
    return FMLA_OK;
}
