/* SPDX-License-Identifier: MIT */
/*
 * The kernels of every usable tier that work on rows of floats: RoPE and bf16 to the bit, sums in float64, P and dS of
 * backward.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "support_cpu.h"
#include "support_numbers.h"

#define COUNT(array) ((int32_t)(sizeof(array) / sizeof(array)[0]))

static void for_each_table(void (*body)(const fmlai_tile_kernels *k))
{
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_cpu *cpu = cpu_open(*isa, 1);
        body(&cpu->tile_f32);
        body(&cpu->tile_bf16);
        cpu_close(cpu);
    }
}

static void rotation_of(const fmlai_tile_kernels *k)
{
    static const int32_t pair_counts[] = {1, 7, 8, 19, 32};
    uint64_t seed = 11;
    for (int32_t n = 0; n < COUNT(pair_counts); n++) {
        for (int neox = 0; neox < 2; neox++) {
            float x[64], expected[64], angles[64];
            int32_t pairs = pair_counts[n];
            for (int32_t i = 0; i < 2 * pairs; i++) {
                expected[i] = x[i] = test_random_unit(&seed);
                angles[i] = test_random_unit(&seed);
            }
            for (int32_t i = 0; i < pairs; i++) {
                float *a = expected + (neox ? i : 2 * i), *b = neox ? a + pairs : a + 1;
                float x0 = *a, x1 = *b, c = angles[i], s = angles[pairs + i];
                *a = fmlai_f32_from_bf16(fmlai_bf16_from_f32(fmaf(x0, c, -(x1 * s))));
                *b = fmlai_f32_from_bf16(fmlai_bf16_from_f32(fmaf(x0, s, x1 * c)));
            }
            k->rotate(x, angles, pairs, neox);
            assert_memory_equal(x, expected, (size_t)(2 * pairs) * sizeof *x);
            for (int32_t i = 0; i < pairs; i++) {
                float *a = expected + (neox ? i : 2 * i), *b = neox ? a + pairs : a + 1;
                double x0 = *a, x1 = *b, c = angles[i], s = angles[pairs + i];
                *a = (float)(x0 * c + x1 * s);
                *b = (float)(x1 * c - x0 * s);
            }
            k->unrotate(x, angles, pairs, neox);
            assert_memory_equal(x, expected, (size_t)(2 * pairs) * sizeof *x);
        }
    }
}

static void row_sums_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 12;
    for (int32_t n = 16; n <= 528; n += 16) {
        float x[528], narrow[528];
        double sums[528], before[528], squares = 0;
        int32_t odd = n - n / 16 % 16; /* fold and finish take any number */
        for (int32_t i = 0; i < n; i++) {
            x[i] = test_random_unit(&seed);
            sums[i] = before[i] = (double)test_random_unit(&seed);
            squares += (double)x[i] * x[i];
        }
        double rows[5] = {0};
        int32_t wide = n >= 96 ? (n - 64) / 16 * 16 : 0; /* row r of 5 begins at x[16 * r] */
        k->squares(rows, x, 16, 1, n);
        assert_true(fabs(rows[0] - squares) <= 1e-12 * squares);
        k->squares(rows, x, 16, 5, wide);
        for (int32_t r = 0; r < 5; r++) {
            double alone;
            k->squares(&alone, x + 16 * r, 0, 1, wide);
            assert_true(alone == rows[r]);
        }
        k->fold(sums, x, 0.75, 0.3, odd);
        for (int32_t i = 0; i < odd; i++) {
            assert_true(fabs(sums[i] - (before[i] * 0.75 + (double)x[i] * 0.3)) <= 1e-15);
        }
        k->begin(before, x, odd);
        for (int32_t i = 0; i < odd; i++) {
            assert_true(before[i] == (double)x[i]);
        }
        k->finish(narrow, sums, 1.7, odd);
        for (int32_t i = 0; i < odd; i++) {
            assert_true(narrow[i] == (float)(sums[i] * 1.7));
        }
    }
}

static void gradients_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 13;
    for (int by_token = 0; by_token < 2; by_token++) {
        enum { ROWS = 40, LANES = 48, TOKENS = 21 };
        _Alignas(64) float s[TOKENS * LANES], ds[TOKENS * LANES];
        float s0[TOKENS * LANES], ds0[TOKENS * LANES], lse2[FMLAI_TILE_ROWS] = {0}, delta[FMLAI_TILE_ROWS] = {0};
        int32_t visible[FMLAI_TILE_ROWS] = {0};
        for (int32_t i = 0; i < TOKENS * LANES; i++) {
            s0[i] = s[i] = 8 * test_random_unit(&seed);
            ds0[i] = ds[i] = test_random_unit(&seed);
        }
        for (int32_t r = 0; r < ROWS; r++) {
            lse2[r] = 10 * test_random_unit(&seed);
            delta[r] = test_random_unit(&seed);
            visible[r] = (int32_t)(test_random(&seed) % (TOKENS + 1));
        }
        k->gradients(s, ds, 1.5f, lse2, delta, by_token, visible, ROWS, TOKENS);
        for (int32_t t = 0; t < TOKENS; t++) {
            for (int32_t r = 0; r < ROWS; r++) {
                int32_t at = t * LANES + r, of = by_token ? t : r;
                double p = exp2((double)s0[at] * 1.5 - (double)lse2[of]), d = p * ((double)ds0[at] - (double)delta[of]);
                bool seen = t < visible[r];
                assert_true(seen ? fabs(s[at] - p) <= 1e-5 * p : s[at] == 0.0f);
                assert_true(seen ? fabs(ds[at] - d) <= 1e-5 * (fabs(d) + p) : ds[at] == 0.0f);
            }
        }
    }
}

/* Every exponent and sign, halves that tie, infinities and NaN, at any alignment. */
static void narrowed_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 11;
    for (int32_t n = 0; n < 70; n++) {
        float x[80];
        uint16_t narrow[80];
        float factor = n % 3 == 0 ? 1.0f : n % 3 == 1 ? -0.3f : 0x1p-100f;
        int32_t shift = n % 5;
        memset(narrow, 0xA5, sizeof narrow);
        for (int32_t i = 0; i < 80; i++) {
            uint32_t bits = (uint32_t)test_random(&seed);
            bits = i % 4 == 0 ? (bits & 0xFFFF0000u) | 0x8000 : i % 17 == 1 ? bits | 0x7F800000 : bits;
            bits = i % 19 == 2 ? bits & 0xFF800000u : i % 23 == 3 ? (bits & 0x80000000u) | 0x7F800000 : bits;
            x[i] = fmlai_f32_of_bits(bits);
        }
        k->narrow(narrow + shift, x + shift, factor, n);
        for (int32_t i = 0; i < 80; i++) {
            uint16_t expected = 0xA5A5;
            if (i >= shift && i < shift + n) {
                fmlai_store_f32(&expected, FMLA_BF16, 0, x[i] * factor);
            }
            assert_int_equal(narrow[i], expected);
        }
    }
}

/* Rows of any width and distance, from any byte. */
static void widened_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 14;
    for (int32_t n = 0; n < 40; n++) {
        enum { ROWS = 3, STRIDE = 50 };
        uint8_t bytes[1 + 2 * ROWS * STRIDE];
        float x[ROWS * STRIDE];
        for (int32_t i = 0; i < COUNT(bytes); i++) {
            bytes[i] = (uint8_t)test_random(&seed);
        }
        memset(x, 0xA5, sizeof x);
        k->widen(x, 41, bytes + n % 2, STRIDE, ROWS, n);
        for (int32_t i = 0; i < ROWS * 41; i++) {
            uint32_t half = i % 41 < n ? (uint32_t)bytes[n % 2 + 2 * (i / 41 * STRIDE + i % 41)] |
                                             (uint32_t)bytes[n % 2 + 2 * (i / 41 * STRIDE + i % 41) + 1] << 8
                                       : 0;
            assert_int_equal(fmlai_bits_of_f32(x[i]), i % 41 < n ? half << 16 : 0xA5A5A5A5u);
        }
    }
}

static void widened_rows(void **state)
{
    (void)state;
    for_each_table(widened_of);
}

static void rotation_equals_its_definition(void **state)
{
    (void)state;
    for_each_table(rotation_of);
}

static void row_sums_agree_with_float64(void **state)
{
    (void)state;
    for_each_table(row_sums_of);
}

static void gradients_agree_with_float64(void **state)
{
    (void)state;
    for_each_table(gradients_of);
}

static void narrowed_as_the_formats_do(void **state)
{
    (void)state;
    for_each_table(narrowed_of);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rotation_equals_its_definition),
        cmocka_unit_test(row_sums_agree_with_float64),
        cmocka_unit_test(gradients_agree_with_float64),
        cmocka_unit_test(widened_rows),
        cmocka_unit_test(narrowed_as_the_formats_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
