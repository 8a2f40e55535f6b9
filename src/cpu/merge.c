/* SPDX-License-Identifier: MIT */
/*
 * merge.c: joins attention results over disjoint token sets. Per (token, head): m = the largest lse of the
 * states that are not empty, weight_s = exp(lse_s - m), in double because a merge of many states must not
 * lose what each of them has; out = sum weight_s out_s / (sum weight_s + exp(sink - m)), lse = m + ln sum
 * weight_s.
 */
#include <math.h>
#include <string.h>

#include "rows.h"

#define ROWS_PER_TASK 16
#define DIMS_AT_ONCE  512

typedef struct merge_job {
    const fmlai_merge *p;
    const fmlai_tile_kernels *kernels;
} merge_job;

static double lse_of(const fmlai_merge_state *s, int64_t token, int32_t head)
{
    return fmlai_load_f32(s->lse.data, s->lse.dtype, token * s->lse.stride[0] + head * s->lse.stride[1]);
}

/* m; -infinity: every state is empty; NaN: some lse is. */
static double largest_lse(const fmlai_merge *p, int64_t token, int32_t head)
{
    double m = -INFINITY;
    for (int32_t s = 0; s < p->count; s++) {
        double lse = lse_of(&p->states[s], token, head);
        if (isnan(lse)) {
            return lse;
        }
        m = isinf(lse) || lse < m ? m : lse;
    }
    return m;
}

static double sum_of_weights(const fmlai_merge *p, int64_t token, int32_t head, double m)
{
    double sum = 0.0;
    for (int32_t s = 0; s < p->count; s++) {
        double lse = lse_of(&p->states[s], token, head);
        sum += isinf(lse) ? 0.0 : exp(lse - m);
    }
    return sum;
}

/* sum += weight * dims d..d+n-1 of every state that is not empty; the rest is not read. */
static void add_states(const merge_job *job, int64_t token, int32_t head, double m, int32_t d, int32_t n,
                       double *sum)
{
    const fmlai_merge *p = job->p;
    float x[DIMS_AT_ONCE];
    for (int32_t s = 0; s < p->count; s++) {
        const fmlai_packed *out = &p->states[s].out;
        double lse = lse_of(&p->states[s], token, head);
        if (isinf(lse)) {
            continue;
        }
        double weight = exp(lse - m);
        fmlai_row_load(x, out->data, out->dtype, token * out->stride[0] + head * out->stride[1] + d, n);
        job->kernels->fold(sum, x, 1.0, weight, n);
    }
}

static void merge_row(const merge_job *job, int64_t token, int32_t head)
{
    const fmlai_merge *p = job->p;
    const fmlai_packed *out = &p->result.out;
    double m = largest_lse(p, token, head);
    bool empty = m == -INFINITY;
    double total = empty ? 0.0 : sum_of_weights(p, token, head, m);
    double sink = p->sink ? (double)p->sink[head] : -INFINITY;
    /* An infinite denominator (sink +infinity, or far above m) makes the row 0, as 1 / infinity is. */
    double factor = empty ? 0.0 : 1.0 / (total + exp(sink - m));

    for (int32_t d = 0; d < p->d; d += DIMS_AT_ONCE) {
        int32_t n = p->d - d < DIMS_AT_ONCE ? p->d - d : DIMS_AT_ONCE;
        double sum[DIMS_AT_ONCE];
        float x[DIMS_AT_ONCE];
        memset(sum, 0, sizeof sum);
        if (!empty) {
            add_states(job, token, head, m, d, n, sum);
        }
        job->kernels->finish(x, sum, factor, n);
        fmlai_row_store(out->data, out->dtype, token * out->stride[0] + head * out->stride[1] + d, x, n);
    }
    if (p->result.lse.data) {
        const fmlai_packed *lse = &p->result.lse;
        fmlai_store_f64(lse->data, lse->dtype, token * lse->stride[0] + head * lse->stride[1],
                        empty ? (double)p->empty_lse : m + log(total));
    }
}

static void merge_task(void *user, int64_t task, int32_t worker)
{
    const merge_job *job = user;
    const fmlai_merge *p = job->p;
    int64_t total = p->tokens * p->heads;
    int64_t end = (task + 1) * ROWS_PER_TASK < total ? (task + 1) * ROWS_PER_TASK : total;
    (void)worker;
    for (int64_t i = task * ROWS_PER_TASK; i < end; i++) {
        merge_row(job, i / p->heads, (int32_t)(i % p->heads));
    }
}

fmla_status fmlai_cpu_merge(void *state, const fmlai_merge *p, const fmlai_call *call)
{
    const fmlai_cpu *cpu = state;
    merge_job job = {p, &cpu->tile_f32};
    (void)call;
    fmlai_cpu_run(cpu, (p->tokens * p->heads + ROWS_PER_TASK - 1) / ROWS_PER_TASK, merge_task, &job);
    return FMLA_OK;
}
