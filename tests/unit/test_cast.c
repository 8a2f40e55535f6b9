/* SPDX-License-Identifier: MIT */
/*
 * The cast of fused outputs: scale bytes and codes, from floats and from doubles.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"
#include "support_cpu.h"
#include "support_numbers.h"

#define N 32

static uint8_t cast_of(float first, float rest, uint8_t *codes)
{
    float x[N];
    double wide[N];
    uint8_t wide_codes[N];
    for (int i = 0; i < N; i++) {
        x[i] = i == 0 ? first : rest;
        wide[i] = (double)x[i];
    }
    uint8_t scale = fmlai_fp8_cast_group(x, N, codes);
    assert_int_equal(fmlai_fp8_cast_group_f64(wide, N, wide_codes), scale);
    assert_memory_equal(codes, wide_codes, N);
    return scale;
}

static void scale_bytes_at_their_edges(void **state)
{
    (void)state;
    uint8_t codes[N];
    for (int e = -21; e <= 119; e++) {
        float exact = ldexpf(448.0f, e);
        assert_int_equal(cast_of(-exact, 0.0f, codes), e + 127);
        assert_int_equal(codes[0], 0xFE);
        assert_int_equal(cast_of(exact * (450.0f / 448.0f), 0.0f, codes), e + 128);
        assert_int_equal(codes[0], 0x76);
    }
    assert_int_equal(cast_of(FLT_MAX, 0.0f, codes), 127 + 120);
    assert_int_equal(codes[0], 0x78);
}

static void c093_zero_groups_have_the_smallest_scale(void **state)
{
    (void)state;
    uint8_t codes[N];
    static const uint8_t zero[N] = {0};
    assert_int_equal(cast_of(0.0f, 0.0f, codes), 0x69);
    assert_memory_equal(codes, zero, N);
    assert_int_equal(cast_of(-0.0f, 0.0f, codes), 0x69);
    assert_int_equal(codes[0], 0x80);
    assert_int_equal(cast_of(1e-4f, 0.0f, codes), 0x69);
    assert_int_equal(cast_of(0x1p-149f, 0.0f, codes), 0x69);
    assert_int_equal(codes[0], 0);
    assert_int_equal(cast_of(ldexpf(448.0f, -22) * 1.01f, 0.0f, codes), 0x6A);
}

static void nan_stays_an_element_s_own_matter(void **state)
{
    (void)state;
    uint8_t codes[N];
    assert_int_equal(cast_of(NAN, 448.0f, codes), 127);
    assert_int_equal(codes[0], 0x7F);
    assert_int_equal(codes[1], 0x7E);
    assert_int_equal(cast_of(copysignf(NAN, -1.0f), 0.0f, codes), 0x69);
    assert_int_equal(codes[0], 0x7F);
    assert_int_equal(cast_of(NAN, NAN, codes), 0x69);
}

static void infinity_makes_the_group_nan(void **state)
{
    (void)state;
    uint8_t codes[N], nan[N];
    memset(nan, 0x7F, sizeof nan);
    assert_int_equal(cast_of(-INFINITY, 1.0f, codes), 0xFF);
    assert_memory_equal(codes, nan, N);
    assert_int_equal(cast_of(INFINITY, NAN, codes), 0xFF);
    double wide[2] = {1e300, 1.0}; /* infinite as a float */
    assert_int_equal(fmlai_fp8_cast_group_f64(wide, 2, codes), 0xFF);
    assert_int_equal(codes[1], 0x7F);
}

static void random_groups_equal_the_rule(void **state)
{
    (void)state;
    uint64_t seed = 32;
    for (int round = 0; round < 3000; round++) {
        float x[128];
        double wide[128];
        uint8_t codes[128], wide_codes[128];
        int n = 1 + round % 128, largest = -25 + round % 60;
        double amax = (double)1e-4f;
        for (int i = 0; i < n; i++) {
            x[i] = ldexpf(test_random_unit(&seed), largest);
            wide[i] = (double)x[i];
            amax = fmax(amax, fabs(wide[i]));
        }
        int e = reference_ceil_log2((double)((float)amax / 448.0f));
        assert_int_equal(fmlai_fp8_cast_group(x, n, codes), e + 127);
        assert_int_equal(fmlai_fp8_cast_group_f64(wide, n, wide_codes), reference_ceil_log2(amax / 448.0) + 127);
        for (int i = 0; i < n; i++) {
            double want = reference_round(&reference_e4m3, ldexp(wide[i], -e));
            assert_true(reference_e4m3_value(codes[i]) == want);
        }
    }
}

/* The double's amax decides, not its float's: a hair above a power of two needs the next one. */
static void doubles_are_not_rounded_to_float_first(void **state)
{
    (void)state;
    double wide[2] = {448.0 * (1.0 + 0x1p-40), 1.0 + 0x1p-3 + 0x1p-40};
    uint8_t codes[2];
    assert_int_equal(fmlai_fp8_cast_group_f64(wide, 2, codes), 128);
    wide[0] = 448.0;
    wide[1] = 1.0 + 0x1p-4 + 0x1p-40; /* as a float a tie, which would fall to 1 */
    assert_int_equal(fmlai_fp8_cast_group_f64(wide, 2, codes), 127);
    assert_int_equal(codes[1], 0x39);
}

/* Every tier's form of the cast: exponents from end to end, ties, NaN and infinity. */
static void the_cpu_s_cast_equals_the_rule(void **state)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 3.4e38f};
    uint64_t seed = 170;
    (void)state;
    for (int i = 0; i < 20000; i++) {
        float x[128];
        uint8_t codes[128], expected[128];
        int n = i % 4 == 0 ? 128 : 32, low = (int)(test_random(&seed) % 240) - 125;
        for (int j = 0; j < n; j++) {
            x[j] = test_random_bf16(&seed, low, low + (int)(test_random(&seed) % 14));
            x[j] = i % 3 == 0 ? ldexpf(rintf(ldexpf(x[j], 4 - low)), low - 4) : x[j] * test_random_unit(&seed);
        }
        x[i % n] = i % 17 == 0 ? odd[i % 6] : x[i % n];
        uint8_t scale = fmlai_fp8_cast_group(x, n, expected);
        for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
            fmlai_cpu *cpu = cpu_open(*isa, 1);
            assert_int_equal(cpu->quant.cast(x, n, codes), scale);
            assert_memory_equal(codes, expected, (size_t)n);
            cpu_close(cpu);
        }
    }
}

/* The same of rows of groups, of which some are not finite. */
static void rows_are_cast_group_by_group(void **state)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, 3.4e38f};
    enum { GROUPS = 35, STRIDE = 40 };
    uint64_t seed = 171;
    (void)state;
    for (int i = 0; i < 500; i++) {
        float x[GROUPS * 32];
        uint8_t codes[GROUPS * STRIDE], expected[GROUPS * STRIDE], scales[GROUPS], groups = (uint8_t)(i % (GROUPS + 1));
        for (int g = 0; g < GROUPS; g++) {
            int low = (int)(test_random(&seed) % 240) - 125;
            for (int j = 0; j < 32; j++) {
                x[32 * g + j] = test_random_bf16(&seed, low, low + (int)(test_random(&seed) % 14));
                x[32 * g + j] *= j % 3 == 0 ? 1.0f : test_random_unit(&seed);
            }
            if (test_random(&seed) % 9 == 0) {
                x[32 * g + (int)(test_random(&seed) % 32)] = odd[test_random(&seed) % 6];
            }
        }
        for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
            fmlai_cpu *cpu = cpu_open(*isa, 1);
            memset(codes, 0xA5, sizeof codes);
            memset(expected, 0xA5, sizeof expected);
            cpu->quant.cast_row(x, groups, codes, STRIDE, scales);
            for (int g = 0; g < groups; g++) {
                assert_int_equal(scales[g], fmlai_fp8_cast_group(x + 32 * g, 32, expected + STRIDE * g));
            }
            assert_memory_equal(codes, expected, sizeof codes);
            cpu_close(cpu);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scale_bytes_at_their_edges),        cmocka_unit_test(c093_zero_groups_have_the_smallest_scale),
        cmocka_unit_test(nan_stays_an_element_s_own_matter), cmocka_unit_test(infinity_makes_the_group_nan),
        cmocka_unit_test(random_groups_equal_the_rule),      cmocka_unit_test(doubles_are_not_rounded_to_float_first),
        cmocka_unit_test(the_cpu_s_cast_equals_the_rule),    cmocka_unit_test(rows_are_cast_group_by_group),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
