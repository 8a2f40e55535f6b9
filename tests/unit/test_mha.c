/* SPDX-License-Identifier: MIT */
/*
 * Dense multi-head attention on the CPU, forward and backward, every tier against the oracle.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support_mha.h"
#include "support_numbers.h"
#include "support_oracle.h"

/* Forward and backward in every tier. */
static void check_all(const mha_shape *shape)
{
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_cpu *cpu = cpu_open(*isa, 2);
        mha_problem m;
        mha_make(&m, shape);
        mha_check_forward(&m, cpu);
        mha_check_backward(&m, cpu);
        mha_free(&m);
        cpu_close(cpu);
    }
}

static void one_sequence(void **state)
{
    mha_shape s = {.batch = 1,
                   .q_lens = {150},
                   .kv_lens = {170},
                   .h_q = 2,
                   .h_kv = 2,
                   .d_qk = 192,
                   .d_v = 128,
                   .dtype = FMLA_BF16,
                   .seed = 1};
    (void)state;
    check_all(&s);
    s.causal = true;
    s.no_cu = true;
    check_all(&s);
    s.dtype = FMLA_F16;
    s.d_qk = 128;
    check_all(&s);
    s.h_q = s.h_kv = 8; /* backward in one pass */
    s.q_lens[0] = 270;
    check_all(&s);
    s.dtype = FMLA_BF16;
    check_all(&s);
}

static void odd_widths(void **state)
{
    mha_shape s = {.batch = 2,
                   .q_lens = {20, 33},
                   .kv_lens = {40, 17},
                   .h_q = 3,
                   .h_kv = 1,
                   .d_qk = 33,
                   .d_v = 17,
                   .causal = true,
                   .dtype = FMLA_BF16,
                   .seed = 2};
    (void)state;
    check_all(&s);
    s.d_qk = 1;
    s.d_v = 1;
    check_all(&s);
    s.d_qk = 255;
    s.d_v = 256;
    s.dtype = FMLA_F16;
    check_all(&s);
}

static void any_sign_of_scale(void **state)
{
    const float scales[] = {-0.2f, 1e-30f, 3.0f};
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        mha_shape s = {.batch = 1,
                       .q_lens = {30},
                       .kv_lens = {70},
                       .h_q = 2,
                       .h_kv = 1,
                       .d_qk = 64,
                       .d_v = 32,
                       .dtype = FMLA_BF16,
                       .scale = scales[i],
                       .seed = 3 + i};
        check_all(&s);
    }
}

static void c016_causal_rows_without_a_visible_key(void **state)
{
    const int32_t widths[] = {192, 128};
    (void)state;
    for (size_t w = 0; w < 2; w++) {
        mha_shape s = {.batch = 1,
                       .q_lens = {8},
                       .kv_lens = {3},
                       .h_q = 2,
                       .h_kv = 2,
                       .d_qk = widths[w],
                       .d_v = 128,
                       .causal = true,
                       .dtype = FMLA_BF16,
                       .seed = 4};
        for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
            fmlai_cpu *cpu = cpu_open(*isa, 1);
            mha_problem m;
            mha_make(&m, &s);
            mha_check_forward(&m, cpu);
            for (int64_t t = 0; t < 8; t++) {
                for (int32_t h = 0; h < 2; h++) {
                    float lse = mha_get(&m.p.lse, t, h, 0);
                    assert_true(t < 5 ? lse == -INFINITY : isfinite(lse));
                    assert_true(t >= 5 || mha_get(&m.p.out, t, h, 9) == 0.0f);
                }
            }
            m.p.empty_lse = INFINITY;
            cpu_mha_forward(cpu, &m.p);
            assert_true(mha_get(&m.p.lse, 0, 0, 0) == INFINITY);
            mha_free(&m);
            cpu_close(cpu);
        }
    }
}

/* A context in two chunks, one request without tokens in the second, merged in order. */
static void c018_chunk_without_tokens_merges(void **state)
{
    mha_shape s = {.batch = 3,
                   .q_lens = {5, 7, 4},
                   .kv_lens = {40, 20, 33},
                   .h_q = 2,
                   .h_kv = 2,
                   .d_qk = 192,
                   .d_v = 128,
                   .dtype = FMLA_BF16,
                   .seed = 5};
    const int32_t first[] = {25, 20, 30};
    fmlai_cpu *cpu = cpu_open(fmlai_isa_best(), 2);
    fmlai_call call = cpu_call();
    mha_problem whole, part[2];
    fmlai_merge_state states[2];
    (void)state;
    mha_make(&whole, &s);
    cpu_mha_forward(cpu, &whole.p);
    for (int32_t c = 0; c < 2; c++) {
        mha_shape chunk = s;
        for (int32_t b = 0; b < 3; b++) {
            chunk.kv_lens[b] = c == 0 ? first[b] : s.kv_lens[b] - first[b];
        }
        mha_make(&part[c], &chunk);
        part[c].p.q = whole.p.q;
        for (int32_t b = 0; b < 3; b++) {
            for (int32_t j = 0; j < chunk.kv_lens[b]; j++) {
                for (int32_t h = 0; h < 2; h++) {
                    int64_t from = whole.cu_kv[b] + j + (c == 0 ? 0 : first[b]), to = part[c].cu_kv[b] + j;
                    for (int32_t d = 0; d < 192; d++) {
                        mha_set(&part[c].p.k, to, h, d, mha_get(&whole.p.k, from, h, d));
                    }
                    for (int32_t d = 0; d < 128; d++) {
                        mha_set(&part[c].p.v, to, h, d, mha_get(&whole.p.v, from, h, d));
                    }
                }
            }
        }
        cpu_mha_forward(cpu, &part[c].p);
        states[c] = (fmlai_merge_state){.out = part[c].p.out, .lse = part[c].p.lse};
    }
    fmlai_merge merge = {.tokens = 16,
                         .heads = 2,
                         .d = 128,
                         .count = 2,
                         .states = states,
                         .empty_lse = -INFINITY,
                         .result = {.out = part[0].p.dout, .lse = part[0].p.lse}};
    assert_int_equal(fmlai_cpu_backend.merge(cpu, &merge, &call), FMLA_OK);
    for (int64_t t = 0; t < 16; t++) {
        for (int32_t h = 0; h < 2; h++) {
            assert_close((double)mha_get(&merge.result.lse, t, h, 0), (double)mha_get(&whole.p.lse, t, h, 0),
                         1e-5);
            for (int32_t d = 0; d < 128; d++) {
                double want = (double)mha_get(&whole.p.out, t, h, d);
                assert_close((double)mha_get(&merge.result.out, t, h, d), want, 1e-3 + 0x1p-7 * fabs(want));
            }
        }
    }
    mha_free(&whole);
    mha_free(&part[0]);
    mha_free(&part[1]);
    cpu_close(cpu);
}

static void c135_queries_outnumber_keys(void **state)
{
    mha_shape s = {.batch = 3,
                   .q_lens = {76, 34, 146},
                   .kv_lens = {1, 1, 1},
                   .h_q = 2,
                   .h_kv = 2,
                   .d_qk = 192,
                   .d_v = 128,
                   .causal = true,
                   .dtype = FMLA_BF16,
                   .size = 3.0f,
                   .seed = 6};
    (void)state;
    check_all(&s);
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_cpu *cpu = cpu_open(*isa, 2);
        mha_problem m;
        mha_make(&m, &s);
        cpu_mha_forward(cpu, &m.p);
        cpu_mha_backward(cpu, &m.p);
        for (int32_t b = 0; b < 3; b++) {
            for (int64_t t = m.cu_q[b]; t < m.cu_q[b + 1] - 1; t++) {
                for (int32_t d = 0; d < 192; d++) {
                    assert_true(mha_get(&m.p.dq, t, 1, d) == 0.0f);
                }
            }
        }
        mha_free(&m);
        cpu_close(cpu);
    }
}

/* Logits of about +-80 and rows whose lse is -infinity; what such rows hold must not reach a gradient. */
static void c136_promise_13_masked_rows_get_and_give_nothing(void **state)
{
    const float infinities[] = {-INFINITY, INFINITY};
    mha_shape s = {.batch = 3,
                   .q_lens = {40, 9, 3},
                   .kv_lens = {30, 0, 5},
                   .h_q = 4,
                   .h_kv = 2,
                   .d_qk = 64,
                   .d_v = 32,
                   .causal = true,
                   .dtype = FMLA_BF16,
                   .size = 4.0f,
                   .scale = 0.3f,
                   .seed = 7};
    (void)state;
    check_all(&s);
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        for (int32_t n = 0; n < 2; n++) {
            fmlai_cpu *cpu = cpu_open(*isa, 2);
            mha_problem m;
            mha_make(&m, &s);
            m.p.empty_lse = infinities[n];
            cpu_mha_forward(cpu, &m.p);
            for (int64_t t = 0; t < m.p.total_q; t++) {
                bool lonely = t < 10 || (t >= 40 && t < 49);
                assert_true((isinf(mha_get(&m.p.lse, t, 0, 0)) != 0) == lonely);
                for (int32_t h = 0; h < 4 && lonely; h++) {
                    mha_fill(&m.p.q, t, h, 64, NAN);
                    mha_fill(&m.p.dout, t, h, 32, NAN);
                    mha_fill(&m.p.out, t, h, 32, NAN);
                }
            }
            /* A row that sees keys, declared empty by its lse. */
            mha_set(&m.p.lse, 20, 3, 0, infinities[n]);
            mha_fill(&m.p.dout, 20, 3, 32, NAN);
            cpu_mha_backward(cpu, &m.p);
            for (int64_t t = 0; t < m.p.total_q; t++) {
                for (int32_t h = 0; h < 4; h++) {
                    for (int32_t d = 0; d < 64; d++) {
                        float x = mha_get(&m.p.dq, t, h, d);
                        assert_true(isinf(mha_get(&m.p.lse, t, h, 0)) ? x == 0.0f : isfinite(x));
                    }
                }
            }
            for (int64_t t = 0; t < m.p.total_kv; t++) {
                for (int32_t d = 0; d < 64; d++) {
                    assert_true(isfinite(mha_get(&m.p.dk, t, 1, d)));
                    assert_true(isfinite(mha_get(&m.p.dv, t, 1, d / 2)));
                }
            }
            mha_free(&m);
            cpu_close(cpu);
        }
    }
}

/* Lengths around the blocks' sizes, nothing included. */
static void c138_irregular_lengths(void **state)
{
    const int32_t lengths[] = {0, 1, 2, 31, 63, 64, 65, 127, 128, 129};
    uint64_t seed = 99;
    (void)state;
    for (uint64_t n = 0; n < 24; n++) {
        mha_shape s = {.batch = 4,
                       .h_q = 2,
                       .h_kv = 1 + (int32_t)(n % 2),
                       .d_qk = 20,
                       .d_v = 12,
                       .causal = n % 3 != 0,
                       .dtype = n % 4 == 3 ? FMLA_F16 : FMLA_BF16,
                       .seed = n};
        for (int32_t b = 0; b < 4; b++) {
            s.q_lens[b] = lengths[test_random(&seed) % 10];
            s.kv_lens[b] = lengths[test_random(&seed) % 10];
        }
        check_all(&s);
    }
}

static void c139_value_width_differs_and_heads_are_grouped(void **state)
{
    mha_shape s = {.batch = 2,
                   .q_lens = {19, 5},
                   .kv_lens = {23, 40},
                   .h_q = 16,
                   .h_kv = 4,
                   .d_qk = 192,
                   .d_v = 128,
                   .dtype = FMLA_BF16,
                   .seed = 8};
    (void)state;
    check_all(&s);
    s.h_q = 12;
    s.h_kv = 3;
    s.causal = true;
    check_all(&s);
}

/* Forward and backward on 1, 2, 3 and 8 threads. */
static void same_bits_on_any_threads(const mha_shape *shape)
{
    const int32_t threads[] = {1, 2, 3, 8};
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        mha_problem m[4];
        for (int32_t n = 0; n < 4; n++) {
            fmlai_cpu *cpu = cpu_open(*isa, threads[n]);
            mha_make(&m[n], shape);
            cpu_mha_forward(cpu, &m[n].p);
            cpu_mha_backward(cpu, &m[n].p);
            for (int32_t i = 0; i < m[0].memory_count; i++) {
                assert_memory_equal(m[n].memory[i], m[0].memory[i], m[0].sizes[i]);
            }
            cpu_close(cpu);
        }
        for (int32_t n = 0; n < 4; n++) {
            mha_free(&m[n]);
        }
    }
}

/* Few threads have heads enough to go through P and dS once, many have not; one pass gives the bits of two. */
static void promise_8_same_bits_on_any_threads(void **state)
{
    mha_shape s = {.batch = 3,
                   .q_lens = {140, 1, 70},
                   .kv_lens = {150, 129, 20},
                   .h_q = 4,
                   .h_kv = 2,
                   .d_qk = 48,
                   .d_v = 40,
                   .causal = true,
                   .dtype = FMLA_BF16,
                   .seed = 9};
    (void)state;
    same_bits_on_any_threads(&s);
    s.h_kv = 4;
    same_bits_on_any_threads(&s);
    s.dtype = FMLA_F16;
    s.q_lens[1] = 290;
    same_bits_on_any_threads(&s);
    s.causal = false;
    s.kv_lens[1] = 256;
    same_bits_on_any_threads(&s);
    s.dtype = FMLA_BF16;
    s.scale = -0.2f;
    same_bits_on_any_threads(&s);
    s.causal = true;
    s.batch = 1;
    s.h_q = s.h_kv = 3;
    s.q_lens[0] = 330;
    s.kv_lens[0] = 270;
    same_bits_on_any_threads(&s);
}

/* NaN in the last key reaches only the last query; NaN in the first query reaches only the keys that it sees.
 */
static void promise_2_nan_stays_where_it_is_attended(void **state)
{
    mha_shape s = {.batch = 2,
                   .q_lens = {20, 30},
                   .kv_lens = {20, 35},
                   .h_q = 2,
                   .h_kv = 2,
                   .d_qk = 32,
                   .d_v = 32,
                   .causal = true,
                   .dtype = FMLA_BF16,
                   .seed = 10};
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_cpu *cpu = cpu_open(*isa, 2);
        mha_problem m;
        mha_make(&m, &s);
        mha_fill(&m.p.k, 19, 0, 32, NAN);
        mha_fill(&m.p.v, 19, 1, 32, NAN);
        mha_fill(&m.p.q, 20, 0, 32, NAN); /* second request, query 0: sees keys 0..5 */
        mha_fill(&m.p.dout, 20, 1, 32, NAN);
        cpu_mha_forward(cpu, &m.p);
        cpu_mha_backward(cpu, &m.p);
        for (int64_t t = 0; t < 50; t++) {
            assert_true(isnan(mha_get(&m.p.out, t, 0, 3)) == (t == 19 || t == 20));
            assert_true(isnan(mha_get(&m.p.lse, t, 0, 0)) == (t == 19 || t == 20));
            assert_true(isnan(mha_get(&m.p.out, t, 1, 3)) == (t == 19));
            assert_true(isfinite(mha_get(&m.p.lse, t, 1, 0)));
            assert_true(isnan(mha_get(&m.p.dq, t, 0, 3)) == (t == 19 || t == 20));
            assert_true(isnan(mha_get(&m.p.dq, t, 1, 3)) == (t == 19 || t == 20));
        }
        /* Query 19 of the first request carries its NaN to every key that it sees; the second request's keys
         * 0..5 see query 0, keys 6.. do not. */
        for (int64_t t = 20; t < 55; t++) {
            bool sees = t < 26;
            assert_true(isnan(mha_get(&m.p.dk, t, 0, 3)) == sees);
            assert_true(isnan(mha_get(&m.p.dv, t, 0, 3)) == sees);
            assert_true(isnan(mha_get(&m.p.dk, t, 1, 3)) == sees);
            assert_true(isnan(mha_get(&m.p.dv, t, 1, 3)) == sees);
        }
        mha_free(&m);
        cpu_close(cpu);
    }
}

static void results_without_lse(void **state)
{
    mha_shape s = {.batch = 1,
                   .q_lens = {4},
                   .kv_lens = {9},
                   .h_q = 1,
                   .h_kv = 1,
                   .d_qk = 16,
                   .d_v = 16,
                   .dtype = FMLA_BF16,
                   .seed = 11};
    fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, 1);
    mha_problem a, b;
    (void)state;
    mha_make(&a, &s);
    mha_make(&b, &s);
    cpu_mha_forward(cpu, &a.p);
    b.p.lse.data = NULL;
    cpu_mha_forward(cpu, &b.p);
    for (int64_t t = 0; t < 4; t++) {
        for (int32_t d = 0; d < 16; d++) {
            assert_true(mha_get(&a.p.out, t, 0, d) == mha_get(&b.p.out, t, 0, d));
        }
    }
    mha_free(&a);
    mha_free(&b);
    cpu_close(cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_sequence),
        cmocka_unit_test(odd_widths),
        cmocka_unit_test(any_sign_of_scale),
        cmocka_unit_test(c016_causal_rows_without_a_visible_key),
        cmocka_unit_test(c018_chunk_without_tokens_merges),
        cmocka_unit_test(c135_queries_outnumber_keys),
        cmocka_unit_test(c136_promise_13_masked_rows_get_and_give_nothing),
        cmocka_unit_test(c138_irregular_lengths),
        cmocka_unit_test(c139_value_width_differs_and_heads_are_grouped),
        cmocka_unit_test(promise_8_same_bits_on_any_threads),
        cmocka_unit_test(promise_2_nan_stays_where_it_is_attended),
        cmocka_unit_test(results_without_lse),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
