/* SPDX-License-Identifier: MIT */
/*
 * Number formats: against figures of another implementation (golden casts), against arithmetic
 * (support_numbers), and at the edges.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"
#include "support_golden.h"
#include "support_numbers.h"

static double value_bf16(double x)
{
    return fmlai_f32_from_bf16(fmlai_bf16_from_f64(x));
}

static double value_f16(double x)
{
    return fmlai_f32_from_f16(fmlai_f16_from_f64(x));
}

static double value_e4m3(double x)
{
    return fmlai_f32_from_e4m3(fmlai_e4m3_from_f64_saturating(x));
}

static double value_e2m1(double x)
{
    return fmlai_f32_from_e2m1(fmlai_e2m1_from_f32((float)x));
}

static void golden_casts(void **state)
{
    (void)state;
    golden *g = golden_open("casts.safetensors");
    golden_tensor bits = golden_get(g, "bf16_bits"), e4m3 = golden_get(g, "e4m3_of_bf16");
    golden_tensor e2m1 = golden_get(g, "e2m1_of_bf16");
    assert_int_equal(bits.count, 65536);
    for (int64_t i = 0; i < bits.count; i++) {
        int32_t b = 0;
        memcpy(&b, bits.data + i * 4, sizeof b);
        float x = fmlai_f32_from_bf16((uint16_t)b);
        if (isnan(x)) {
            assert_int_equal(fmlai_e4m3_from_f32(x) & 0x7F, e4m3.data[i] & 0x7F);
            assert_int_equal(fmlai_e2m1_from_f32(x) & 7, e2m1.data[i] & 7);
        } else {
            assert_int_equal(fmlai_e4m3_from_f32(x), e4m3.data[i]);
            assert_int_equal(fmlai_e2m1_from_f32(x), e2m1.data[i]);
        }
    }
    golden_tensor wide = golden_get(g, "f32_of_e8m0"), bf16 = golden_get(g, "bf16_of_e8m0");
    golden_tensor of_e4m3 = golden_get(g, "bf16_of_e4m3");
    for (int code = 0; code < 256; code++) {
        float x = fmlai_f32_from_e8m0((uint8_t)code);
        assert_true(same_f32(x, fmlai_load_f32(wide.data, FMLA_F32, code)));
        assert_true(same_f32(x, fmlai_load_f32(bf16.data, FMLA_BF16, code)));
        assert_true(same_f32(fmlai_f32_from_e4m3((uint8_t)code), fmlai_load_f32(of_e4m3.data, FMLA_BF16, code)));
    }
    golden_close(g);
}

static void every_code_has_its_value_and_comes_back(void **state)
{
    (void)state;
    for (int code = 0; code < 65536; code++) {
        float x = fmlai_f32_from_bf16((uint16_t)code);
        float y = fmlai_f32_from_f16((uint16_t)code);
        if (!isnan(x)) {
            assert_int_equal(fmlai_bf16_from_f32(x), code);
            assert_int_equal(fmlai_bf16_from_f64((double)x), code);
        } else {
            assert_true(isnan(fmlai_f32_from_bf16(fmlai_bf16_from_f32(x))));
        }
        int e = code >> 10 & 31, m = code & 1023;
        double magnitude = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
        assert_true(same_f32(y, (float)(code & 0x8000 ? -magnitude : magnitude)));
        assert_true(isnan(y) || fmlai_f16_from_f32(y) == code);
    }
    for (int code = 0; code < 256; code++) {
        float x = fmlai_f32_from_e4m3((uint8_t)code);
        assert_true(same_f32(x, (float)reference_e4m3_value(code)));
        assert_int_equal(fmlai_e4m3_from_f32(x), code);
        float s = fmlai_f32_from_e8m0((uint8_t)code);
        assert_true(same_f32(s, (float)reference_e8m0_value(code)));
        assert_int_equal(fmlai_e8m0_from_f32(s), code);
        float f = fmlai_f32_from_e2m1((uint8_t)code);
        assert_true(same_f32(f, (float)reference_e2m1_value(code)));
        assert_int_equal(fmlai_e2m1_from_f32(f), code & 15);
    }
}

/* At every boundary between two neighbours a and b of a format: the tie, and the doubles on both sides of it.
 */
static void rounding_is_to_nearest_even_in_every_binade(void **state)
{
    (void)state;
    static const struct {
        const reference_format *format;
        double (*convert)(double);
        bool saturates;
        bool from_f32;
    } cases[] = {{&reference_bf16, value_bf16, false, false},
                 {&reference_f16, value_f16, false, false},
                 {&reference_e4m3, value_e4m3, true, false},
                 {&reference_e2m1, value_e2m1, true, true}};
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        const reference_format *f = cases[c].format;
        int steps = 1 << f->fraction_bits;
        for (int e = f->min_exponent - 1; ldexp(1.0, e) <= f->largest; e++) {
            double quantum = ldexp(1.0, (e < f->min_exponent ? f->min_exponent : e) - f->fraction_bits);
            for (int i = 0; i < steps; i++) {
                double a = e < f->min_exponent ? i * quantum : ldexp(1.0, e) + i * quantum;
                double tie = a + quantum / 2;
                double below = cases[c].from_f32 ? nextafterf((float)tie, 0.0f) : nextafter(tie, 0.0);
                double above = cases[c].from_f32 ? nextafterf((float)tie, INFINITY) : nextafter(tie, INFINITY);
                const double points[] = {a, below, tie, above, -a, -below, -tie, -above};
                for (int k = 0; k < 8; k++) {
                    double want = reference_round(f, points[k]);
                    want = isinf(want) && cases[c].saturates ? copysign(f->largest, want) : want;
                    assert_true(same_f32((float)cases[c].convert(points[k]), (float)want));
                }
            }
        }
    }
}

static void doubles_are_rounded_once(void **state)
{
    (void)state;
    /* Rounded to float first, each would be a tie and fall to the even neighbour below. */
    assert_int_equal(fmlai_bf16_from_f64(1.0 + 0x1p-8 + 0x1p-40), 0x3F81);
    assert_int_equal(fmlai_bf16_from_f32((float)(1.0 + 0x1p-8 + 0x1p-40)), 0x3F80);
    assert_int_equal(fmlai_f16_from_f64(1.0 + 0x1p-11 + 0x1p-40), 0x3C01);
    assert_int_equal(fmlai_e4m3_from_f64_saturating(1.0 + 0x1p-4 + 0x1p-40), 0x39);
    /* Below float's smallest number, and far below double's normal ones. */
    assert_int_equal(fmlai_bf16_from_f64(0x1p-134), 0);
    assert_int_equal(fmlai_bf16_from_f64(0x1.0000000001p-134), 1);
    assert_int_equal(fmlai_bf16_from_f64(-DBL_TRUE_MIN), 0x8000);
    assert_int_equal(fmlai_f16_from_f64(-DBL_TRUE_MIN), 0x8000);
    uint64_t seed = 1;
    for (int i = 0; i < 200000; i++) {
        uint64_t r = test_random(&seed);
        double x = ldexp((double)(int64_t)r, (int)(test_random(&seed) % 300) - 213);
        assert_true(same_f32((float)value_bf16(x), (float)reference_round(&reference_bf16, x)));
        assert_true(same_f32((float)value_f16(x), (float)reference_round(&reference_f16, x)));
        float narrow = (float)x;
        assert_true(same_f32(fmlai_f32_from_bf16(fmlai_bf16_from_f32(narrow)),
                             (float)reference_round(&reference_bf16, (double)narrow)));
        assert_true(same_f32(fmlai_f32_from_f16(fmlai_f16_from_f32(narrow)),
                             (float)reference_round(&reference_f16, (double)narrow)));
    }
}

static void overflow_and_special_values(void **state)
{
    (void)state;
    assert_int_equal(fmlai_bf16_from_f32(FLT_MAX), 0x7F80);
    assert_int_equal(fmlai_bf16_from_f32(-INFINITY), 0xFF80);
    assert_int_equal(fmlai_bf16_from_f64(DBL_MAX), 0x7F80);
    assert_int_equal(fmlai_bf16_from_f64(-INFINITY), 0xFF80);
    assert_int_equal(fmlai_f16_from_f32(65519.996f), 0x7BFF);
    assert_int_equal(fmlai_f16_from_f32(65520.0f), 0x7C00);
    assert_int_equal(fmlai_f16_from_f64(-DBL_MAX), 0xFC00);
    uint32_t signalling = 0x7F800001u;
    float nan = 0.0f;
    memcpy(&nan, &signalling, sizeof nan);
    assert_true(isnan(fmlai_f32_from_bf16(fmlai_bf16_from_f32(nan))));
    assert_true(isnan(fmlai_f32_from_f16(fmlai_f16_from_f32(nan))));
    assert_true(isnan(fmlai_f32_from_bf16(fmlai_bf16_from_f64((double)NAN))));

    assert_int_equal(fmlai_e4m3_from_f32(448.0f), 0x7E);
    assert_int_equal(fmlai_e4m3_from_f32(464.0f), 0x7E);
    assert_int_equal(fmlai_e4m3_from_f32(nextafterf(464.0f, 500.0f)), 0x7F);
    assert_int_equal(fmlai_e4m3_from_f32(-465.0f), 0xFF);
    assert_int_equal(fmlai_e4m3_from_f32(-INFINITY), 0xFF);
    assert_int_equal(fmlai_e4m3_from_f32(copysignf(NAN, -1.0f)), 0xFF);
    assert_int_equal(fmlai_e4m3_from_f32(-0.0f), 0x80);
    assert_int_equal(fmlai_e4m3_from_f32_saturating(465.0f), 0x7E);
    assert_int_equal(fmlai_e4m3_from_f32_saturating(-INFINITY), 0xFE);
    assert_int_equal(fmlai_e4m3_from_f32_saturating(NAN) & 0x7F, 0x7F);
    assert_int_equal(fmlai_e4m3_from_f64_saturating(1e300), 0x7E);

    assert_int_equal(fmlai_e8m0_from_f32(INFINITY), 0xFF);
    assert_int_equal(fmlai_e8m0_from_f32(copysignf(NAN, -1.0f)), 0xFF);
}

static void e2m1_ties_go_to_the_even_code(void **state)
{
    (void)state;
    static const float ties[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    static const uint8_t codes[] = {0, 2, 2, 4, 4, 6, 6};
    for (int i = 0; i < 7; i++) {
        assert_int_equal(fmlai_e2m1_from_f32(ties[i]), codes[i]);
        assert_int_equal(fmlai_e2m1_from_f32(-ties[i]), codes[i] | 8);
    }
    assert_int_equal(fmlai_e2m1_from_f32(nextafterf(5.0f, 6.0f)), 7);
    assert_int_equal(fmlai_e2m1_from_f32(-1e30f), 15);
    assert_int_equal(fmlai_e2m1_from_f32(INFINITY), 7);
    assert_int_equal(fmlai_e2m1_from_f32(-0.0f), 8);
    assert_int_equal(fmlai_e2m1_from_f32(-0.1f), 8);
    assert_int_equal(fmlai_e2m1_from_f32(NAN) & 7, 0);
}

static void c094_scale_bytes_0_and_255(void **state)
{
    (void)state;
    assert_true(same_f32(fmlai_f32_from_e8m0(0), 0x1p-127f));
    assert_true(same_f32(fmlai_f32_from_e8m0(1), 0x1p-126f));
    assert_true(same_f32(fmlai_f32_from_e8m0(127), 1.0f));
    assert_true(same_f32(fmlai_f32_from_e8m0(134), 128.0f));
    assert_true(same_f32(fmlai_f32_from_e8m0(254), 0x1p127f));
    assert_true(isnan(fmlai_f32_from_e8m0(255)));
}

static void ceil_log2_keeps_powers_of_two(void **state)
{
    (void)state;
    for (int e = -149; e <= 127; e++) {
        float x = ldexpf(1.0f, e);
        assert_int_equal(fmlai_ceil_log2_f32(x), e);
        assert_int_equal(fmlai_ceil_log2_f32(nextafterf(x, INFINITY)), e + 1);
        if (e > -149) {
            float below = nextafterf(x, 0.0f);
            assert_int_equal(fmlai_ceil_log2_f32(below), reference_ceil_log2((double)below));
        }
    }
}

/* A double that is no float becomes 0 or infinity: whoever takes one must check the float, not the double. */
static void c097_a_double_outside_float_becomes_0_or_infinity(void **state)
{
    (void)state;
    float x = 1.0f;
    fmlai_store_f64(&x, FMLA_F32, 0, 1e-50);
    assert_true(same_f32(x, 0.0f));
    fmlai_store_f64(&x, FMLA_F32, 0, -1e300);
    assert_true(same_f32(x, -INFINITY));
    uint16_t half = 1;
    fmlai_store_f64(&half, FMLA_F16, 0, 1e-50);
    assert_int_equal(half, 0);
    fmlai_store_f64(&half, FMLA_BF16, 0, 1e300);
    assert_int_equal(half, 0x7F80);
}

static void elements_of_tensors_of_any_alignment(void **state)
{
    (void)state;
    static const fmla_dtype dtypes[] = {FMLA_BF16, FMLA_F16, FMLA_F32, FMLA_F64};
    static const int sizes[] = {2, 2, 4, 8};
    for (int k = 0; k < 4; k++) {
        uint8_t memory[40], expected[40];
        memset(memory, 0xA5, sizeof memory);
        memset(expected, 0xA5, sizeof expected);
        fmlai_store_f32(memory + 1, dtypes[k], 2, -1.5f);
        assert_true(same_f32(fmlai_load_f32(memory + 1, dtypes[k], 2), -1.5f));
        assert_true(fmlai_load_f64(memory + 1, dtypes[k], 2) == -1.5);
        memcpy(expected + 1 + 2 * sizes[k], memory + 1 + 2 * sizes[k], (size_t)sizes[k]);
        assert_memory_equal(memory, expected, sizeof memory);
    }
    double third = 1.0 / 3.0, back = 0.0;
    fmlai_store_f64(&back, FMLA_F64, 0, third);
    assert_true(back == third && fmlai_load_f64(&back, FMLA_F64, 0) == third);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_casts),
        cmocka_unit_test(every_code_has_its_value_and_comes_back),
        cmocka_unit_test(rounding_is_to_nearest_even_in_every_binade),
        cmocka_unit_test(doubles_are_rounded_once),
        cmocka_unit_test(overflow_and_special_values),
        cmocka_unit_test(e2m1_ties_go_to_the_even_code),
        cmocka_unit_test(c094_scale_bytes_0_and_255),
        cmocka_unit_test(ceil_log2_keeps_powers_of_two),
        cmocka_unit_test(c097_a_double_outside_float_becomes_0_or_infinity),
        cmocka_unit_test(elements_of_tensors_of_any_alignment),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
