/* SPDX-License-Identifier: MIT */
/*
 * Problems of dense multi-head attention.
 */
#include "support_mha.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support_numbers.h"
#include "support_oracle.h"

/* A tensor with gaps after each head and each token; all bytes 0xFF, which is NaN in every float format. */
static fmlai_packed make_tensor(mha_problem *m, fmla_dtype dtype, int64_t tokens, int32_t heads, int32_t d)
{
    size_t element = dtype == FMLA_F64 ? 8 : dtype == FMLA_F32 ? 4 : 2;
    fmlai_packed t = {.dtype = dtype, .stride = {(int64_t)heads * (d + 3) + 5, d + 3}};
    size_t size = (size_t)(tokens * t.stride[0] + 1) * element;
    t.data = malloc(size);
    assert_non_null(t.data);
    assert_true(m->memory_count < 24);
    memset(t.data, 0xFF, size);
    m->sizes[m->memory_count] = size;
    m->memory[m->memory_count++] = t.data;
    return t;
}

float mha_get(const fmlai_packed *t, int64_t token, int32_t head, int32_t d)
{
    return fmlai_load_f32(t->data, t->dtype, token * t->stride[0] + head * t->stride[1] + d);
}

void mha_set(const fmlai_packed *t, int64_t token, int32_t head, int32_t d, float x)
{
    fmlai_store_f32(t->data, t->dtype, token * t->stride[0] + head * t->stride[1] + d, x);
}

void mha_fill(const fmlai_packed *t, int64_t token, int32_t head, int32_t d, float x)
{
    for (int32_t i = 0; i < d; i++) {
        mha_set(t, token, head, i, x);
    }
}

static void randomize(const fmlai_packed *t, int64_t tokens, int32_t heads, int32_t d, float size,
                      uint64_t *seed)
{
    for (int64_t i = 0; i < tokens; i++) {
        for (int32_t h = 0; h < heads; h++) {
            for (int32_t j = 0; j < d; j++) {
                mha_set(t, i, h, j, size * test_random_unit(seed));
            }
        }
    }
}

static int32_t longest(const int32_t *lengths, int32_t count)
{
    int32_t most = 1;
    for (int32_t i = 0; i < count; i++) {
        most = lengths[i] > most ? lengths[i] : most;
    }
    return most;
}

void mha_make(mha_problem *m, const mha_shape *s)
{
    fmlai_mha *p = &m->p;
    uint64_t seed = s->seed + 1000;
    float size = s->size == 0.0f ? 1.0f : s->size;
    memset(m, 0, sizeof *m);
    for (int32_t b = 0; b < s->batch; b++) {
        m->cu_q[b + 1] = m->cu_q[b] + s->q_lens[b];
        m->cu_kv[b + 1] = m->cu_kv[b] + s->kv_lens[b];
    }
    *p = (fmlai_mha){.batch = s->batch,
                     .total_q = m->cu_q[s->batch],
                     .total_kv = m->cu_kv[s->batch],
                     .max_seqlen_q = longest(s->q_lens, s->batch),
                     .max_seqlen_kv = longest(s->kv_lens, s->batch),
                     .cu_seqlens_q = s->no_cu ? NULL : m->cu_q,
                     .cu_seqlens_kv = s->no_cu ? NULL : m->cu_kv,
                     .h_q = s->h_q,
                     .h_kv = s->h_kv,
                     .d_qk = s->d_qk,
                     .d_v = s->d_v,
                     .scale = s->scale == 0.0f ? 1.0f / sqrtf((float)s->d_qk) : s->scale,
                     .causal = s->causal,
                     .empty_lse = -INFINITY};
    p->q = make_tensor(m, s->dtype, p->total_q, s->h_q, s->d_qk);
    p->k = make_tensor(m, s->dtype, p->total_kv, s->h_kv, s->d_qk);
    p->v = make_tensor(m, s->dtype, p->total_kv, s->h_kv, s->d_v);
    p->dout = make_tensor(m, s->dtype, p->total_q, s->h_q, s->d_v);
    randomize(&p->q, p->total_q, s->h_q, s->d_qk, size, &seed);
    randomize(&p->k, p->total_kv, s->h_kv, s->d_qk, size, &seed);
    randomize(&p->v, p->total_kv, s->h_kv, s->d_v, size, &seed);
    randomize(&p->dout, p->total_q, s->h_q, s->d_v, size, &seed);
    p->out = make_tensor(m, s->dtype, p->total_q, s->h_q, s->d_v);
    p->lse = make_tensor(m, FMLA_F32, p->total_q, s->h_q, 1);
    p->dq = make_tensor(m, s->dtype, p->total_q, s->h_q, s->d_qk);
    p->dk = make_tensor(m, s->dtype, p->total_kv, s->h_kv, s->d_qk);
    p->dv = make_tensor(m, s->dtype, p->total_kv, s->h_kv, s->d_v);
    m->oracle = *p;
    m->oracle.out = make_tensor(m, FMLA_F64, p->total_q, s->h_q, s->d_v);
    m->oracle.lse = make_tensor(m, FMLA_F64, p->total_q, s->h_q, 1);
    m->oracle.abs_out = make_tensor(m, FMLA_F64, p->total_q, s->h_q, s->d_v);
    m->oracle.abs_logit = make_tensor(m, FMLA_F64, p->total_q, s->h_q, 1);
    m->oracle.dq = make_tensor(m, FMLA_F64, p->total_q, s->h_q, s->d_qk);
    m->oracle.dk = make_tensor(m, FMLA_F64, p->total_kv, s->h_kv, s->d_qk);
    m->oracle.dv = make_tensor(m, FMLA_F64, p->total_kv, s->h_kv, s->d_v);
}

void mha_free(mha_problem *m)
{
    for (int32_t i = 0; i < m->memory_count; i++) {
        free(m->memory[i]);
    }
}

static bool rounds_weights(const mha_problem *m, const fmlai_cpu *cpu)
{
    return m->p.q.dtype == FMLA_BF16 && cpu->tile_bf16.dtype == FMLA_BF16;
}

/*
 * The energy of the error against that of the tensor, sum (a - b)^2 <= limit * sum (a^2 + b^2): what the
 * "cosine difference" of docs/numerics.md measures. Elements count at least 2^-8 each, because a gradient may
 * be exactly 0 where products cancel.
 */
static void check_tensor(const char *name, const fmlai_packed *got, const fmlai_packed *want, int64_t tokens,
                         int32_t heads, int32_t d, double limit)
{
    int64_t count = tokens * heads * d;
    double errors = 0, squares = 0x1p-16 * (double)count;
    for (int64_t t = 0; t < tokens; t++) {
        for (int32_t h = 0; h < heads; h++) {
            for (int32_t j = 0; j < d; j++) {
                double a = (double)mha_get(got, t, h, j);
                double b =
                    fmlai_load_f64(want->data, want->dtype, t * want->stride[0] + h * want->stride[1] + j);
                if (!isfinite(a) || !isfinite(b)) {
                    fail_msg("%s of token %d, head %d, dim %d: %g, should be %g", name, (int)t, h, j, a, b);
                }
                errors += (a - b) * (a - b);
                squares += a * a + b * b;
            }
        }
    }
    if (!(errors <= limit * squares)) {
        fail_msg("%s (%d elements) differs by %g; allowed: %g", name, (int)count, errors / squares, limit);
    }
}

void mha_check_forward(mha_problem *m, fmlai_cpu *cpu)
{
    const fmlai_mha *p = &m->p, *o = &m->oracle;
    bool rounded = rounds_weights(m, cpu), half = p->q.dtype == FMLA_F16;
    double unit = half ? 0x1p-11 : 0x1p-8;
    cpu_mha_forward(cpu, p);
    oracle_mha_forward(o);
    for (int64_t t = 0; t < p->total_q; t++) {
        for (int32_t h = 0; h < p->h_q; h++) {
            double lse, logit;
            lse = fmlai_load_f64(o->lse.data, FMLA_F64, t * o->lse.stride[0] + h * o->lse.stride[1]);
            logit = fmlai_load_f64(o->abs_logit.data, FMLA_F64,
                                   t * o->abs_logit.stride[0] + h * o->abs_logit.stride[1]);
            assert_close((double)mha_get(&p->lse, t, h, 0), lse,
                         0x1p-22 * fabs(lse) + 0x1p-19 * logit + 0x1p-23);
            for (int32_t d = 0; d < p->d_v; d++) {
                int64_t at = t * o->out.stride[0] + h * o->out.stride[1] + d;
                double want = fmlai_load_f64(o->out.data, FMLA_F64, at);
                double mass = fmlai_load_f64(o->abs_out.data, FMLA_F64, at);
                assert_close((double)mha_get(&p->out, t, h, d), want,
                             1.01 * unit * fabs(want) + (rounded ? unit : 0x1p-18) * mass +
                                 (half ? 0x1p-25 : 0));
            }
        }
    }
}

void mha_check_backward(mha_problem *m, fmlai_cpu *cpu)
{
    fmlai_mha *p = &m->p, *o = &m->oracle;
    double limit = rounds_weights(m, cpu) ? 5e-6 : 2e-6;
    /* A few keys with like weights have them all just above a power of two, where a bf16 rounding errs most:
     * its variance is 2^-14 / 12, and there are two, of the weight and of the result. */
    for (int32_t b = 0; b < p->batch && rounds_weights(m, cpu); b++) {
        int32_t keys = m->cu_kv[b + 1] - m->cu_kv[b];
        limit = keys > 0 && keys <= 4 ? 2 * 0x1p-14 / 12 : limit;
    }
    cpu_mha_forward(cpu, p);
    cpu_mha_backward(cpu, p);
    fmlai_packed out = o->out, lse = o->lse;
    o->out = p->out;
    o->lse = p->lse;
    oracle_mha_backward(o);
    o->out = out;
    o->lse = lse;
    check_tensor("dq", &p->dq, &o->dq, p->total_q, p->h_q, p->d_qk, limit);
    check_tensor("dk", &p->dk, &o->dk, p->total_kv, p->h_kv, p->d_qk, limit);
    check_tensor("dv", &p->dv, &o->dv, p->total_kv, p->h_kv, p->d_v, limit);
}
