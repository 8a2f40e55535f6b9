/* SPDX-License-Identifier: MIT */
/*
 * The oracle's multi-head attention: forward by hand, backward against central differences of forward.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "support_numbers.h"
#include "support_oracle.h"

#define D_QK   5
#define D_V    3
#define HEADS  4
#define TOKENS 9 /* at most, of queries and of keys */
#define Q_SIZE (TOKENS * HEADS * D_QK)
#define V_SIZE (TOKENS * HEADS * D_V)
#define EXACT  1e-14
#define STEP   1e-4 /* of central differences: their error is about STEP^2 */
#define SLOPE  1e-6

/* Inputs, outputs and gradients in float64, contiguous. */
typedef struct fixture {
    double q[Q_SIZE], k[Q_SIZE], v[V_SIZE], out[V_SIZE], dout[V_SIZE], lse[TOKENS * HEADS];
    double dq[Q_SIZE], dk[Q_SIZE], dv[V_SIZE], abs_out[V_SIZE], abs_logit[TOKENS * HEADS];
    fmlai_mha p;
} fixture;

static fmlai_packed packed(double *data, int32_t heads, int64_t width)
{
    return (fmlai_packed){.data = data, .dtype = FMLA_F64, .stride = {heads * width, width}};
}

static void randomise(double *x, int64_t n, uint64_t *seed)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = (double)test_random_unit(seed);
    }
}

static void setup(fixture *f, int32_t h_q, int32_t h_kv)
{
    uint64_t seed = 7;
    memset(f, 0, sizeof *f);
    randomise(f->q, Q_SIZE, &seed);
    randomise(f->k, Q_SIZE, &seed);
    randomise(f->v, V_SIZE, &seed);
    randomise(f->dout, V_SIZE, &seed);
    f->p = (fmlai_mha){
        .batch = 1,
        .total_q = TOKENS,
        .total_kv = TOKENS,
        .h_q = h_q,
        .h_kv = h_kv,
        .d_qk = D_QK,
        .d_v = D_V,
        .scale = 0.75f,
        .empty_lse = -INFINITY,
        .q = packed(f->q, h_q, D_QK),
        .k = packed(f->k, h_kv, D_QK),
        .v = packed(f->v, h_kv, D_V),
        .out = packed(f->out, h_q, D_V),
        .lse = packed(f->lse, h_q, 1),
        .dout = packed(f->dout, h_q, D_V),
        .dq = packed(f->dq, h_q, D_QK),
        .dk = packed(f->dk, h_kv, D_QK),
        .dv = packed(f->dv, h_kv, D_V),
        .abs_out = packed(f->abs_out, h_q, D_V),
        .abs_logit = packed(f->abs_logit, h_q, 1),
    };
}

/* ---- forward ----------------------------------------------------------------------------------------------
 */

static void two_keys_by_hand(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 1, 1);
    f.p.total_q = 1;
    f.p.total_kv = 2;
    f.p.scale = 0.5f;
    memcpy(f.q, (double[D_QK]){1, 0, 0, 0, 2}, sizeof(double[D_QK]));
    memcpy(f.k, (double[2 * D_QK]){1, 9, 9, 9, 0.5, 2, 9, 9, 9, -1}, sizeof(double[2 * D_QK]));
    memcpy(f.v, (double[2 * D_V]){1, -2, 3, 2, 6, -5}, sizeof(double[2 * D_V]));
    oracle_mha_forward(&f.p);
    double p0 = 1 / (1 + exp(-1)); /* logits 1 and 0 */
    assert_close(f.lse[0], log(exp(1) + 1), EXACT);
    assert_close(f.abs_logit[0], 0.5 * (2 + 2), EXACT);
    for (int d = 0; d < D_V; d++) {
        assert_close(f.out[d], p0 * f.v[d] + (1 - p0) * f.v[D_V + d], 10 * EXACT);
        assert_close(f.abs_out[d], p0 * fabs(f.v[d]) + (1 - p0) * fabs(f.v[D_V + d]), 10 * EXACT);
    }
}

static void causal_is_aligned_to_the_end(void **state)
{
    static const int32_t keys[4] = {2, 3, 5, 9};
    (void)state;
    for (int i = 0; i < 4; i++) {
        fixture f;
        setup(&f, 2, 1);
        memset(f.q, 0, sizeof f.q);
        f.p.causal = true;
        f.p.total_q = 3;
        f.p.total_kv = keys[i];
        oracle_mha_forward(&f.p);
        for (int32_t j = 0; j < 3; j++) {
            int32_t seen = keys[i] - 3 + j + 1;
            assert_close(f.lse[j * 2], seen > 0 ? log(seen) : -INFINITY, EXACT);
        }
    }
}

static void sequences_do_not_see_each_other(void **state)
{
    static const int32_t cu_q[5] = {0, 2, 2, 5, 9}, cu_kv[5] = {0, 4, 6, 6, 9};
    fixture f, alone;
    (void)state;
    setup(&f, 2, 2);
    f.p.batch = 4;
    f.p.cu_seqlens_q = cu_q;
    f.p.cu_seqlens_kv = cu_kv;
    oracle_mha_forward(&f.p);
    for (int r = 0; r < 4; r++) {
        int64_t count = cu_q[r + 1] - cu_q[r];
        setup(&alone, 2, 2);
        alone.p.total_q = count;
        alone.p.total_kv = cu_kv[r + 1] - cu_kv[r];
        alone.p.q.data = alone.q + cu_q[r] * 2 * D_QK;
        alone.p.k.data = alone.k + cu_kv[r] * 2 * D_QK;
        alone.p.v.data = alone.v + cu_kv[r] * 2 * D_V;
        oracle_mha_forward(&alone.p);
        assert_memory_equal(f.out + cu_q[r] * 2 * D_V, alone.out, (size_t)count * 2 * D_V * sizeof(double));
        assert_memory_equal(f.lse + cu_q[r] * 2, alone.lse, (size_t)count * 2 * sizeof(double));
    }
    assert_true(f.lse[2 * 2] == -INFINITY); /* request 2 has queries and no keys */
    assert_true(f.out[2 * 2 * D_V] == 0);
}

static void grouped_heads_share_keys_and_values(void **state)
{
    fixture f, expanded;
    (void)state;
    setup(&f, 4, 2);
    setup(&expanded, 4, 4);
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < 4; h++) {
            memcpy(expanded.k + (t * 4 + h) * D_QK, f.k + (t * 2 + h / 2) * D_QK, D_QK * sizeof(double));
            memcpy(expanded.v + (t * 4 + h) * D_V, f.v + (t * 2 + h / 2) * D_V, D_V * sizeof(double));
        }
    }
    oracle_mha_forward(&f.p);
    oracle_mha_forward(&expanded.p);
    assert_memory_equal(f.out, expanded.out, sizeof f.out);
    assert_memory_equal(f.lse, expanded.lse, sizeof f.lse);

    oracle_mha_backward(&f.p);
    oracle_mha_backward(&expanded.p);
    assert_memory_equal(f.dq, expanded.dq, sizeof f.dq);
    for (int t = 0; t < TOKENS; t++) {
        for (int h = 0; h < 2; h++) {
            for (int d = 0; d < D_QK; d++) {
                const double *dk = expanded.dk + (t * 4 + h * 2) * D_QK + d;
                assert_close(f.dk[(t * 2 + h) * D_QK + d], dk[0] + dk[D_QK], 10 * EXACT);
            }
            for (int d = 0; d < D_V; d++) {
                const double *dv = expanded.dv + (t * 4 + h * 2) * D_V + d;
                assert_close(f.dv[(t * 2 + h) * D_V + d], dv[0] + dv[D_V], 10 * EXACT);
            }
        }
    }
}

static void nan_reaches_the_rows_that_see_it(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 1, 1);
    f.p.causal = true;
    f.k[5 * D_QK] = NAN;    /* key 5 */
    f.v[7 * D_V + 1] = NAN; /* value 7, one element */
    oracle_mha_forward(&f.p);
    for (int j = 0; j < TOKENS; j++) {
        assert_int_equal(isnan(f.lse[j]), j >= 5);
        assert_int_equal(isnan(f.out[j * D_V]), j >= 5);
    }
}

/* ---- backward ---------------------------------------------------------------------------------------------
 */

/* sum(out * dout): its gradients are what backward computes. */
static double loss(fixture *f)
{
    double sum = 0;
    oracle_mha_forward(&f->p);
    for (int i = 0; i < V_SIZE; i++) {
        sum += f->out[i] * f->dout[i];
    }
    return sum;
}

static void check_gradient(fixture *f, double *x, const double *gradient, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        double kept = x[i];
        x[i] = kept + STEP;
        double above = loss(f);
        x[i] = kept - STEP;
        double below = loss(f);
        x[i] = kept;
        assert_close(gradient[i], (above - below) / (2 * STEP), SLOPE);
    }
}

static void check_backward(fixture *f)
{
    oracle_mha_forward(&f->p);
    oracle_mha_backward(&f->p);
    check_gradient(f, f->q, f->dq, f->p.total_q * f->p.h_q * D_QK);
    check_gradient(f, f->k, f->dk, f->p.total_kv * f->p.h_kv * D_QK);
    check_gradient(f, f->v, f->dv, f->p.total_kv * f->p.h_kv * D_V);
}

static void gradients_are_the_slopes_of_forward(void **state)
{
    static const int32_t cu_q[4] = {0, 4, 5, 9}, cu_kv[4] = {0, 2, 6, 9};
    static const int32_t heads[3][2] = {{1, 1}, {2, 2}, {4, 2}};
    (void)state;
    for (int i = 0; i < 3; i++) {
        for (int causal = 0; causal < 2; causal++) {
            fixture f;
            setup(&f, heads[i][0], heads[i][1]);
            f.p.causal = causal;
            check_backward(&f);
            f.p.batch = 3; /* with causal, queries 0 and 1 of the first request see nothing */
            f.p.cu_seqlens_q = cu_q;
            f.p.cu_seqlens_kv = cu_kv;
            check_backward(&f);
        }
    }
}

static void promise_13_rows_without_keys_have_zero_gradient(void **state)
{
    fixture f;
    (void)state;
    for (int sign = 0; sign < 2; sign++) {
        setup(&f, 2, 2);
        f.p.causal = true;
        f.p.total_q = 4;
        f.p.total_kv = 2;
        f.p.empty_lse = sign ? INFINITY : -INFINITY;
        oracle_mha_forward(&f.p);
        for (int i = 0; i < 2 * 2; i++) { /* queries 0 and 1 */
            assert_true(f.lse[i] == (double)f.p.empty_lse);
            f.q[i * D_QK] = NAN;
            f.dout[i * D_V] = NAN;
        }
        memset(f.dq, 0xFF, sizeof f.dq);
        oracle_mha_backward(&f.p);
        for (int i = 0; i < 2 * 2 * D_QK; i++) {
            assert_true(f.dq[i] == 0);
            assert_true(isfinite(f.dk[i]));
        }
        for (int i = 0; i < 2 * 2 * D_V; i++) {
            assert_true(isfinite(f.dv[i]));
        }
    }
    /* a row that has keys, but no finite logit */
    for (int sign = 0; sign < 2; sign++) {
        setup(&f, 1, 1);
        oracle_mha_forward(&f.p);
        f.lse[4] = sign ? INFINITY : -INFINITY;
        f.dout[4 * D_V] = NAN;
        oracle_mha_backward(&f.p);
        for (int d = 0; d < D_QK; d++) {
            assert_true(f.dq[4 * D_QK + d] == 0);
            assert_true(isfinite(f.dk[d]) && isfinite(f.dv[d % D_V]));
        }
    }
    /* no query at all: keys get exactly zero */
    static const int32_t cu_q[3] = {0, 0, 2}, cu_kv[3] = {0, 3, 5};
    setup(&f, 1, 1);
    f.p.batch = 2;
    f.p.cu_seqlens_q = cu_q;
    f.p.cu_seqlens_kv = cu_kv;
    memset(f.dk, 0xFF, sizeof f.dk);
    memset(f.dv, 0xFF, sizeof f.dv);
    oracle_mha_forward(&f.p);
    oracle_mha_backward(&f.p);
    for (int t = 0; t < 3; t++) {
        assert_true(f.dk[t * D_QK] == 0 && f.dv[t * D_V] == 0);
    }
    assert_true(f.dk[3 * D_QK] != 0 && f.dv[3 * D_V] != 0);
}

/* The given out and lse are used as they are: a row whose lse is larger by ln 2 has half the weights. */
static void backward_uses_the_given_lse_and_out(void **state)
{
    fixture f, shifted;
    (void)state;
    setup(&f, 1, 1);
    oracle_mha_forward(&f.p);
    setup(&shifted, 1, 1);
    oracle_mha_forward(&shifted.p);
    for (int i = 0; i < TOKENS; i++) {
        shifted.lse[i] += log(2);
    }
    oracle_mha_backward(&f.p);
    oracle_mha_backward(&shifted.p);
    for (int i = 0; i < TOKENS * D_V; i++) {
        assert_close(shifted.dv[i], f.dv[i] / 2, EXACT);
    }
    for (int i = 0; i < TOKENS * D_QK; i++) {
        assert_close(shifted.dq[i], f.dq[i] / 2, EXACT);
    }
    memset(shifted.out, 0, sizeof shifted.out); /* D = 0: dq = scale sum P (dO v) k */
    oracle_mha_backward(&shifted.p);
    double dq = 0;
    for (int j = 0; j < TOKENS; j++) {
        double logit = 0, dp = 0;
        for (int d = 0; d < D_QK; d++) {
            logit += 0.75 * f.q[d] * f.k[j * D_QK + d];
        }
        for (int d = 0; d < D_V; d++) {
            dp += f.dout[d] * f.v[j * D_V + d];
        }
        dq += 0.75 * exp(logit - f.lse[0]) / 2 * dp * f.k[j * D_QK];
    }
    assert_close(shifted.dq[0], dq, EXACT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_keys_by_hand),
        cmocka_unit_test(causal_is_aligned_to_the_end),
        cmocka_unit_test(sequences_do_not_see_each_other),
        cmocka_unit_test(grouped_heads_share_keys_and_values),
        cmocka_unit_test(nan_reaches_the_rows_that_see_it),
        cmocka_unit_test(gradients_are_the_slopes_of_forward),
        cmocka_unit_test(promise_13_rows_without_keys_have_zero_gradient),
        cmocka_unit_test(backward_uses_the_given_lse_and_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
