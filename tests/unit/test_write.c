/* SPDX-License-Identifier: MIT */
/*
 * Quantisers: against another implementation's bytes (golden formats), against a second writer made of
 * arithmetic on doubles, and at the corners. NaN and infinities are followed to what a reader sees.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"
#include "support_golden.h"
#include "support_numbers.h"
#include "support_pool.h"

#define D_MAX 1024

/* ---- golden bytes
 * ---------------------------------------------------------------------------------------------- */

static void check_golden_case(const golden *g, const char *name, fmla_kv_format format, const char *bytes_name)
{
    char key[64];
    snprintf(key, sizeof key, "%s.k", name);
    golden_tensor k = golden_get(g, key);
    snprintf(key, sizeof key, "%s.dequant", name);
    golden_tensor dequant = golden_get(g, key);
    snprintf(key, sizeof key, "%s.%s", name, bytes_name);
    golden_tensor bytes = golden_get(g, key);
    int64_t tokens = k.shape[0] * k.shape[1];
    int32_t d = (int32_t)k.shape[3];

    uint8_t *memory = malloc((size_t)bytes.count);
    assert_non_null(memory);
    memset(memory, 0xA5, (size_t)bytes.count);
    fmlai_pool pool = pool_over(memory, fmlai_format_row(format), k.shape[0], k.shape[1], 0, 0, 1);
    assert_int_equal(bytes.count, pool.num_pages * pool.page_stride);
    for (int64_t slot = 0; slot < tokens; slot++) {
        float token[D_MAX];
        for (int32_t j = 0; j < d; j++) {
            token[j] = fmlai_load_f32(k.data, FMLA_BF16, slot * d + j);
        }
        fmlai_token_write(&pool, slot, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
    }
    for (int64_t i = 0; i < bytes.count; i++) {
        if (memory[i] != bytes.data[i]) {
            fail_msg("%s: byte %lld is %02x, not %02x", name, (long long)i, memory[i], bytes.data[i]);
        }
    }
    for (int64_t slot = 0; slot < tokens; slot++) {
        float token[D_MAX];
        fmlai_token_read(&pool, slot, 0, token);
        for (int32_t j = 0; j < d; j++) {
            assert_true(same_f32(token[j], fmlai_load_f32(dequant.data, FMLA_BF16, slot * d + j)));
        }
    }
    free(memory);
}

static void golden_formats(void **state)
{
    (void)state;
    golden *g = golden_open("formats_a.safetensors");
    check_golden_case(g, "v32.p64", FMLA_KV_V32, "bytes");
    check_golden_case(g, "v32.p5", FMLA_KV_V32, "bytes");
    check_golden_case(g, "v4.p64", FMLA_KV_V4, "page_bytes");
    check_golden_case(g, "v4.p5", FMLA_KV_V4, "page_bytes");
    check_golden_case(g, "v41.p64", FMLA_KV_V41, "bytes");
    check_golden_case(g, "v41.p5", FMLA_KV_V41, "bytes");
    check_golden_case(g, "v41fp4.p64", FMLA_KV_V41_FP4, "bytes");
    check_golden_case(g, "v41fp4.p5", FMLA_KV_V41_FP4, "bytes");
    golden_close(g);
}

/* ---- a second writer
 * ------------------------------------------------------------------------------------------- */

static uint8_t reference_code(const reference_format *format, double (*value)(int), int codes, double x)
{
    double rounded = reference_round(format, x);
    rounded = fabs(rounded) > format->largest ? copysign(format->largest, x) : rounded;
    for (int code = 0; code < codes; code++) {
        double v = value(code);
        if (v == rounded && signbit(v) == signbit(rounded)) {
            return (uint8_t)code;
        }
    }
    fail_msg("%g is no value of the format", rounded);
    return 0;
}

static uint8_t reference_e4m3_code(double x)
{
    return reference_code(&reference_e4m3, reference_e4m3_value, 256, x);
}

static double amax_of(const float *x, int32_t n)
{
    double amax = 0.0;
    for (int32_t i = 0; i < n; i++) {
        amax = fmax(amax, fabs((double)x[i]));
    }
    return amax;
}

/* Exponent of quantiser A's scale. */
static int reference_exponent(const float *x, int32_t n)
{
    float quotient = (float)amax_of(x, n) / 448.0f;
    return reference_ceil_log2((double)fmaxf(quotient, 1e-4f));
}

static void reference_v32(const float *token, uint8_t *record)
{
    for (int g = 0; g < 4; g++) {
        int e = reference_exponent(token + 128 * g, 128);
        float scale = ldexpf(1.0f, e);
        memcpy(record + 512 + 4 * g, &scale, 4);
        for (int j = 128 * g; j < 128 * g + 128; j++) {
            record[j] = reference_e4m3_code(ldexp((double)token[j], -e));
        }
    }
    for (int j = 0; j < 64; j++) {
        uint32_t bits = 0;
        memcpy(&bits, &token[512 + j], 4);
        record[528 + 2 * j] = (uint8_t)(bits >> 16);
        record[529 + 2 * j] = (uint8_t)(bits >> 24);
    }
}

static void random_token(float *token, int32_t d, uint64_t *seed)
{
    int spread = (int)(test_random(seed) % 24);
    for (int32_t j = 0; j < d; j++) {
        token[j] = test_random_bf16(seed, -spread, 3);
    }
}

static void c096_v32_records_of_many_tokens_and_strides(void **state)
{
    (void)state;
    uint64_t seed = 96;
    for (int64_t n = 1; n <= 300; n += n < 4 ? 1 : 37) {
        int64_t size = 1 + (int64_t)(test_random(&seed) % 70);
        int64_t pages = (n + size - 1) / size;
        int64_t stride = size * 656 + (int64_t)(test_random(&seed) % 700);
        uint8_t *memory = malloc((size_t)(pages * stride)), *expected = malloc((size_t)(pages * stride));
        assert_true(memory && expected);
        memset(memory, 0xA5, (size_t)(pages * stride));
        memset(expected, 0xA5, (size_t)(pages * stride));
        fmlai_pool pool = pool_over(memory, fmlai_format_row(FMLA_KV_V32), pages, size, stride, 0, 1);
        for (int64_t slot = 0; slot < n; slot++) {
            float token[D_MAX];
            random_token(token, 576, &seed);
            fmlai_token_write(&pool, slot, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            reference_v32(token, expected + slot / size * stride + slot % size * 656);
        }
        assert_memory_equal(memory, expected, (size_t)(pages * stride));
        free(memory);
        free(expected);
    }
}

static void fp4_bytes_equal_a_second_writer_s(void **state)
{
    (void)state;
    uint64_t seed = 4;
    for (int round = 0; round < 200; round++) {
        uint8_t record[288], expected[288] = {0};
        float token[D_MAX];
        fmlai_pool pool = pool_over(record, fmlai_format_row(FMLA_KV_V41_FP4), 1, 1, 0, 0, 1);
        random_token(token, 512, &seed);
        for (int g = 0; g < 32; g++) {
            float s = fminf(fmaxf((float)amax_of(token + 16 * g, 16) / 6.0f, 0x1p-9f), 448.0f);
            expected[256 + g] = reference_e4m3_code((double)s);
            float scale = (float)reference_e4m3_value(expected[256 + g]);
            for (int j = 16 * g; j < 16 * g + 16; j++) {
                double y = (double)(token[j] / scale);
                int code = reference_code(&reference_e2m1, reference_e2m1_value, 16, y);
                expected[j / 2] |= (uint8_t)(code << (j % 2 ? 4 : 0));
            }
        }
        fmlai_token_write(&pool, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
        assert_memory_equal(record, expected, sizeof record);
    }
}

/* ---- corners
 * ----------------------------------------------------------------------------------------------------- */

static void c093_zero_tokens_have_finite_smallest_scales(void **state)
{
    (void)state;
    for (int sign = 0; sign < 2; sign++) {
        for (int format = FMLA_KV_BF16; format < FMLA_KV_COUNT; format++) {
            uint8_t record[1152];
            fmlai_pool pool = pool_over(record, fmlai_format_row((fmla_kv_format)format), 1, 1, 0, 576, 1);
            const fmla_format_info *f = &pool.format;
            float token[D_MAX];
            for (int32_t j = 0; j < D_MAX; j++) {
                token[j] = sign ? -0.0f : 0.0f;
            }
            fmlai_token_write(&pool, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            const uint8_t *scales = fmlai_pool_scales(&pool, 0);
            static const uint8_t smallest_f32[] = {0, 0, 0, 0x39}; /* 2^-13 */
            for (int32_t g = 0; f->group > 0 && g < f->quant_dims / f->group; g++) {
                if (f->scale == FMLA_F32) {
                    assert_memory_equal(scales + 4 * g, smallest_f32, 4);
                } else {
                    assert_int_equal(scales[g], f->scale == FMLA_F8_E8M0 ? 0x72 : 0x01);
                }
            }
            float back[D_MAX];
            fmlai_token_read(&pool, 0, 0, back);
            assert_memory_equal(back, token, (size_t)f->d_qk * sizeof *back); /* -0 comes back as -0 */
        }
    }
}

/* The first group's scale byte, or a float scale's exponent in the same coding, when the group's first value
 * is x. */
static int scale_for(fmla_kv_format format, float x, uint8_t *code)
{
    uint8_t record[656];
    fmlai_pool pool = pool_over(record, fmlai_format_row(format), 1, 1, 0, 0, 1);
    float token[D_MAX] = {x}, scale = 0.0f;
    fmlai_token_write(&pool, 0, 0, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
    *code = record[0];
    if (pool.format.scale == FMLA_F32) {
        memcpy(&scale, fmlai_pool_scales(&pool, 0), sizeof scale);
        return fmlai_e8m0_from_f32(scale);
    }
    return *fmlai_pool_scales(&pool, 0);
}

static void power_of_two_scales_at_their_edges(void **state)
{
    (void)state;
    static const fmla_kv_format formats[] = {FMLA_KV_V32, FMLA_KV_V4, FMLA_KV_V41, FMLA_KV_V41_PAGE};
    for (int k = 0; k < 4; k++) {
        uint8_t code = 0;
        for (int e = -13; e <= 119; e++) {
            float exact = ldexpf(448.0f, e); /* 448 * 2^e keeps e; the next bf16 needs e + 1 */
            assert_int_equal(scale_for(formats[k], exact, &code), e + 127);
            assert_int_equal(code, 0x7E);
            assert_int_equal(scale_for(formats[k], -exact * (450.0f / 448.0f), &code), e + 128);
            assert_int_equal(code, 0xF6);
        }
        assert_int_equal(scale_for(formats[k], 0.0546875f, &code), 114);
        assert_int_equal(scale_for(formats[k], 0.05493164f, &code), 115); /* the next bf16 */
        assert_int_equal(scale_for(formats[k], 1e-4f * 448.0f, &code), 114);
        assert_int_equal(scale_for(formats[k], 0x1p-133f, &code), 114); /* a bf16 subnormal */
        assert_int_equal(code, 0);
        assert_int_equal(scale_for(formats[k], -0x1p-133f, &code), 114);
        assert_int_equal(code, 0x80);
        assert_int_equal(scale_for(formats[k], 0x1.FEp127f, &code), 127 + 120); /* bf16's largest */
        assert_int_equal(scale_for(formats[k], FLT_MAX, &code), 127 + 120);
        assert_int_equal(code, 0x78); /* 2^128 / 2^120 = 256 */
    }
}

static void e4m3_scales_at_their_edges(void **state)
{
    (void)state;
    uint8_t code = 0;
    assert_int_equal(scale_for(FMLA_KV_V41_FP4, 7.0f, &code), 0x39);
    assert_int_equal(code, 7); /* 7 / 1.125 saturates at 6: it reads back as 6.75 */
    assert_int_equal(scale_for(FMLA_KV_V41_FP4, 2688.0f, &code), 0x7E);
    assert_int_equal(scale_for(FMLA_KV_V41_FP4, FLT_MAX, &code), 0x7E);
    assert_int_equal(code, 7);
    assert_int_equal(scale_for(FMLA_KV_V41_FP4, -6.0f * 0x1p-9f, &code), 0x01);
    assert_int_equal(code, 15);
    assert_int_equal(scale_for(FMLA_KV_V41_FP4, 0x1p-133f, &code), 0x01);
    assert_int_equal(code, 0);
    /* amax / 6 = 1.1875 lies between 1.125 and 1.25: the tie goes to the even code 1.25 */
    assert_int_equal(scale_for(FMLA_KV_V41_FP4, 7.125f, &code), 0x3A);
    /* ties of the codes, of both signs, under scale 1 */
    static const float ties[] = {6.0f,   0.25f, -0.25f, 0.75f, -0.75f, 1.25f, -1.25f, 1.75f,
                                 -1.75f, 2.5f,  -2.5f,  3.5f,  -3.5f,  5.0f,  -5.0f,  -0.0f};
    static const uint8_t codes[] = {7, 0, 8, 2, 10, 2, 10, 4, 12, 4, 12, 6, 14, 6, 14, 8};
    uint8_t record[288];
    float token[D_MAX] = {0.0f};
    memcpy(token, ties, sizeof ties);
    fmlai_pool pool = pool_over(record, fmlai_format_row(FMLA_KV_V41_FP4), 1, 1, 0, 0, 1);
    fmlai_token_write(&pool, 0, 0, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
    for (int i = 0; i < 16; i++) {
        assert_int_equal(record[i / 2] >> (i % 2 * 4) & 15, codes[i]);
    }
}

/* A group with a NaN or an infinity reads as NaN throughout, its neighbours as if nothing were there. */
static void groups_with_nan_or_infinity_decode_to_nan(void **state)
{
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY, copysignf(NAN, -1.0f)};
    for (int format = FMLA_KV_V32; format < FMLA_KV_COUNT; format++) {
        for (int k = 0; k < 4; k++) {
            uint8_t record[656];
            fmlai_pool pool = pool_over(record, fmlai_format_row((fmla_kv_format)format), 1, 1, 0, 0, 1);
            int32_t group = pool.format.group;
            float token[D_MAX] = {0.0f}, back[D_MAX];
            for (int32_t j = 0; j < group; j++) {
                token[group + j] = j % 2 ? 1.0f : 0.0f;
            }
            token[2 * group - 1] = bad[k];
            fmlai_token_write(&pool, 0, 0, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
            fmlai_token_read(&pool, 0, 0, back);
            for (int32_t j = 0; j < pool.format.d_qk; j++) {
                assert_true(j >= group && j < 2 * group ? isnan(back[j]) : back[j] == 0.0f);
            }
            const uint8_t *scales = fmlai_pool_scales(&pool, 0);
            if (pool.format.scale == FMLA_F8_E8M0) {
                assert_int_equal(scales[1], 0xFF);
            } else if (pool.format.scale == FMLA_F8_E4M3) {
                assert_int_equal(scales[1], 0x7F);
                for (int32_t j = 0; j < 8; j++) {
                    assert_int_equal(record[8 + j], 0);
                }
            }
        }
    }
}

/* ---- the first V32 quantiser
 * -------------------------------------------------------------------------------------- */

static float first_scale_2025(const float *token, fmla_dtype dtype, float *back)
{
    uint8_t record[656];
    float scale = 0.0f;
    fmlai_pool pool = pool_over(record, fmlai_format_row(FMLA_KV_V32), 1, 1, 0, 0, 1);
    fmlai_token_write(&pool, 0, 0, token, dtype, FMLA_QUANTIZER_V32_2025);
    fmlai_token_read_f32(&pool, 0, 0, back);
    memcpy(&scale, record + 512, sizeof scale);
    for (int j = 0; j < 128; j++) {
        double y = (double)(token[j] / scale);
        if (isfinite(y)) {
            assert_int_equal(record[j], reference_e4m3_code(y));
        }
    }
    return scale;
}

static void v32_2025_scales_are_rounded_to_the_source_s_dtype(void **state)
{
    (void)state;
    uint64_t seed = 2025;
    float token[D_MAX] = {0.0f}, back[D_MAX];
    for (int round = 0; round < 100; round++) {
        for (int j = 0; j < 128; j++) {
            token[j] = test_random_bf16(&seed, -8, 4);
        }
        float quotient = (float)amax_of(token, 128) / 448.0f;
        float bf16 = (float)reference_round(&reference_bf16, (double)quotient);
        float f16 = (float)reference_round(&reference_f16, (double)quotient);
        assert_true(same_f32(first_scale_2025(token, FMLA_BF16, back), bf16));
        assert_true(same_f32(first_scale_2025(token, FMLA_F16, back), f16));
        assert_true(same_f32(first_scale_2025(token, FMLA_F32, back), quotient));
    }
}

static void v32_2025_groups_without_a_scale_get_1(void **state)
{
    (void)state;
    float token[D_MAX] = {0.0f}, back[D_MAX];
    assert_true(first_scale_2025(token, FMLA_BF16, back) == 1.0f);
    assert_true(back[0] == 0.0f && back[127] == 0.0f);
    token[5] = 0x1p-24f; /* fp16's smallest number: its quotient rounds to 0 */
    assert_true(first_scale_2025(token, FMLA_F16, back) == 1.0f);
    assert_true(back[5] == 0.0f);
    token[5] = NAN;
    assert_true(isnan(first_scale_2025(token, FMLA_BF16, back)));
    assert_true(isnan(back[0]) && isnan(back[5]));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(golden_formats),
        cmocka_unit_test(c096_v32_records_of_many_tokens_and_strides),
        cmocka_unit_test(fp4_bytes_equal_a_second_writer_s),
        cmocka_unit_test(c093_zero_tokens_have_finite_smallest_scales),
        cmocka_unit_test(power_of_two_scales_at_their_edges),
        cmocka_unit_test(e4m3_scales_at_their_edges),
        cmocka_unit_test(groups_with_nan_or_infinity_decode_to_nan),
        cmocka_unit_test(v32_2025_scales_are_rounded_to_the_source_s_dtype),
        cmocka_unit_test(v32_2025_groups_without_a_scale_get_1),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
