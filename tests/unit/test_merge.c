/* SPDX-License-Identifier: MIT */
/*
 * Merging on the CPU against the oracle: empty states, sinks, NaN, lse of any size.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support_cpu.h"
#include "support_numbers.h"
#include "support_oracle.h"

enum { MERGE_TOKENS = 9, MERGE_HEADS = 5, MERGE_D = 150, MERGE_STATES = 6 };

typedef struct merge_case {
    fmlai_merge p;
    fmlai_merge_state states[MERGE_STATES];
    float outs[MERGE_STATES][MERGE_TOKENS * MERGE_HEADS * MERGE_D];
    float lses[MERGE_STATES][MERGE_TOKENS * MERGE_HEADS];
    float sink[MERGE_HEADS];
    double out[MERGE_TOKENS * MERGE_HEADS * MERGE_D], lse[MERGE_TOKENS * MERGE_HEADS]; /* oracle's */
    float got_out[MERGE_TOKENS * MERGE_HEADS * MERGE_D], got_lse[MERGE_TOKENS * MERGE_HEADS];
} merge_case;

static merge_case *merge_make(uint64_t seed)
{
    merge_case *m = calloc(1, sizeof *m);
    assert_non_null(m);
    for (int32_t s = 0; s < MERGE_STATES; s++) {
        for (int32_t i = 0; i < MERGE_TOKENS * MERGE_HEADS; i++) {
            uint64_t kind = test_random(&seed) % 5;
            m->lses[s][i] = kind == 0 ? -INFINITY : kind == 1 ? INFINITY : test_random_unit(&seed) * 20.0f;
            /* What an empty state holds must not matter. */
            for (int32_t d = 0; d < MERGE_D; d++) {
                m->outs[s][i * MERGE_D + d] = kind < 2 ? NAN : test_random_unit(&seed);
            }
        }
        m->states[s].out = (fmlai_packed){m->outs[s], FMLA_F32, {MERGE_HEADS * MERGE_D, MERGE_D}};
        m->states[s].lse = (fmlai_packed){m->lses[s], FMLA_F32, {MERGE_HEADS, 1}};
    }
    m->p = (fmlai_merge){.tokens = MERGE_TOKENS,
                         .heads = MERGE_HEADS,
                         .d = MERGE_D,
                         .count = MERGE_STATES,
                         .states = m->states,
                         .empty_lse = -INFINITY};
    return m;
}

static void merge_run_oracle(merge_case *m)
{
    m->p.result.out = (fmlai_packed){m->out, FMLA_F64, {MERGE_HEADS * MERGE_D, MERGE_D}};
    m->p.result.lse = (fmlai_packed){m->lse, FMLA_F64, {MERGE_HEADS, 1}};
    oracle_merge(&m->p);
}

static void merge_run_cpu(merge_case *m, int32_t threads)
{
    fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, threads);
    fmlai_call call = cpu_call();
    memset(m->got_out, 0x5A, sizeof m->got_out);
    memset(m->got_lse, 0x5A, sizeof m->got_lse);
    m->p.result.out = (fmlai_packed){m->got_out, FMLA_F32, {MERGE_HEADS * MERGE_D, MERGE_D}};
    m->p.result.lse = (fmlai_packed){m->got_lse, FMLA_F32, {MERGE_HEADS, 1}};
    assert_int_equal(fmlai_cpu_backend.merge(cpu, &m->p, &call), FMLA_OK);
    cpu_close(cpu);
}

/* One rounding to float at the end, and a few ulp of double before it. */
static void merge_check(merge_case *m, int32_t threads)
{
    merge_run_oracle(m);
    merge_run_cpu(m, threads);
    for (int32_t i = 0; i < MERGE_TOKENS * MERGE_HEADS * MERGE_D; i++) {
        assert_close((double)m->got_out[i], m->out[i], 0x1.01p-24 * fabs(m->out[i]) + 1e-14);
    }
    for (int32_t i = 0; i < MERGE_TOKENS * MERGE_HEADS; i++) {
        assert_close((double)m->got_lse[i], m->lse[i], 0x1.01p-24 * fabs(m->lse[i]) + 1e-14);
    }
}

static void merge_equals_the_oracle(void **state)
{
    const float sinks[] = {-INFINITY, INFINITY, 0.0f, 1e4f, -1e4f, NAN, 3.4e38f, -3.4e38f};
    (void)state;
    for (int32_t n = 0; n < 12; n++) {
        merge_case *m = merge_make(100 + (uint64_t)n);
        for (int32_t h = 0; h < MERGE_HEADS; h++) {
            m->sink[h] = sinks[(n + h) % 8];
        }
        m->p.sink = n < 4 ? NULL : m->sink;
        m->p.count = 1 + n % MERGE_STATES;
        m->p.empty_lse = n % 2 ? INFINITY : -INFINITY;
        merge_check(m, 1 + n % 3);
        free(m);
    }
}

static void c019_merge_of_empty_states(void **state)
{
    const float infinities[] = {-INFINITY, INFINITY};
    (void)state;
    for (int32_t n = 0; n < 4; n++) {
        merge_case *m = merge_make(1);
        m->p.count = 2;
        m->lses[0][0] = infinities[n % 2];
        m->lses[1][0] = infinities[n / 2];
        m->lses[0][1] = infinities[n % 2]; /* (empty, x) and (x, empty): x */
        m->lses[1][1] = 1.25f;
        m->lses[0][2] = -0.5f;
        m->lses[1][2] = infinities[n / 2];
        for (int32_t d = 0; d < MERGE_D; d++) {
            m->outs[1][MERGE_D + d] = (float)d;
            m->outs[0][2 * MERGE_D + d] = (float)-d;
        }
        merge_run_cpu(m, 1);
        assert_true(m->got_lse[0] == -INFINITY && m->got_lse[1] == 1.25f && m->got_lse[2] == -0.5f);
        for (int32_t d = 0; d < MERGE_D; d++) {
            assert_true(m->got_out[d] == 0.0f);
            assert_true(m->got_out[MERGE_D + d] == (float)d);
            assert_true(m->got_out[2 * MERGE_D + d] == (float)-d);
        }
        free(m);
    }
}

static void merge_keeps_nan_and_survives_extreme_lse(void **state)
{
    merge_case *m = merge_make(2);
    (void)state;
    for (int32_t s = 0; s < MERGE_STATES; s++) {
        m->lses[s][0] = s == 2 ? NAN : 0.0f;
        m->lses[s][1] = s == 0 ? 3e38f : -3e38f;
        m->lses[s][2] = 1e-3f * (float)s;
        for (int32_t d = 0; d < 3 * MERGE_D; d++) {
            m->outs[s][d] = 1.0f;
        }
    }
    m->outs[1][2 * MERGE_D + 7] = NAN;
    merge_check(m, 2);
    assert_true(isnan(m->got_lse[0]) && isnan(m->got_out[0]));
    assert_true(m->got_lse[1] == 3e38f && m->got_out[MERGE_D] == 1.0f);
    assert_true(isnan(m->got_out[2 * MERGE_D + 7]) && fabsf(m->got_out[2 * MERGE_D + 8] - 1.0f) < 1e-6f);
    free(m);
}

/* bf16 in and out, no lse wanted. */
static void merge_in_bf16(void **state)
{
    enum { N = MERGE_TOKENS * MERGE_HEADS * MERGE_D };
    static uint16_t halves[2][N], got[N];
    merge_case *m = merge_make(3);
    fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, 3);
    fmlai_call call = cpu_call();
    (void)state;
    m->p.count = 2;
    for (int32_t s = 0; s < 2; s++) {
        for (int32_t i = 0; i < N; i++) {
            halves[s][i] = fmlai_bf16_from_f32(m->outs[s][i]);
        }
        m->states[s].out.data = halves[s];
        m->states[s].out.dtype = FMLA_BF16;
    }
    merge_run_oracle(m);
    m->p.result.out = (fmlai_packed){got, FMLA_BF16, {MERGE_HEADS * MERGE_D, MERGE_D}};
    m->p.result.lse.data = NULL;
    assert_int_equal(fmlai_cpu_backend.merge(cpu, &m->p, &call), FMLA_OK);
    for (int32_t i = 0; i < N; i++) {
        assert_close((double)fmlai_f32_from_bf16(got[i]), m->out[i], 0x1.01p-8 * fabs(m->out[i]) + 0x1p-18);
    }
    cpu_close(cpu);
    free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merge_equals_the_oracle),
        cmocka_unit_test(c019_merge_of_empty_states),
        cmocka_unit_test(merge_keeps_nan_and_survives_extreme_lse),
        cmocka_unit_test(merge_in_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
