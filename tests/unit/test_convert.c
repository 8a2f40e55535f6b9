/* SPDX-License-Identifier: MIT */
/*
 * Formats that callers describe, the outer scale, and conversion between pools.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"
#include "support_numbers.h"
#include "support_pool.h"

#define D_MAX 1024

static const fmla_dtype elements[] = {FMLA_F8_E4M3, FMLA_F4_E2M1};
static const fmla_dtype scales_of[] = {FMLA_DTYPE_NONE, FMLA_F32, FMLA_F8_E8M0, FMLA_F8_E4M3};

static void random_token(float *token, int32_t d, float largest, uint64_t *seed)
{
    for (int32_t j = 0; j < d; j++) {
        token[j] = fmlai_f32_from_bf16(fmlai_bf16_from_f32(test_random_unit(seed) * largest));
    }
}

/*
 * A layout that nobody ships: groups of 40 (4-bit groups that begin inside a byte with 5), odd offsets, gaps, RoPE
 * between codes and scales.
 */
static fmla_format_info made_up(fmla_kv_layout layout, fmla_dtype element, fmla_dtype scale, int32_t group)
{
    fmla_format_info f = {.struct_size = sizeof f, .format = FMLA_KV_CUSTOM, .layout = layout, .name = "made-up"};
    f.quant_dims = 200;
    f.rope_dims = 6;
    f.d_qk = 206;
    f.element = element;
    f.scale = scale;
    f.group = scale == FMLA_DTYPE_NONE ? 0 : group;
    int32_t codes = element == FMLA_F4_E2M1 ? 100 : 200;
    int32_t scale_bytes = f.group > 0 ? 200 / group * fmlai_scale_bytes(&f) : 0;
    f.rope_offset = codes + 3;
    f.data_row_bytes = f.rope_offset + 12 + 2;
    f.scale_offset = f.group > 0 ? 1 : 0;
    if (layout == FMLA_LAYOUT_RECORD) {
        f.scale_offset += f.data_row_bytes;
        f.data_row_bytes += 1 + scale_bytes + 4;
        f.bytes_per_token = f.data_row_bytes;
    } else {
        f.scale_row_bytes = f.group > 0 ? scale_bytes + 4 : 0;
        f.bytes_per_token = f.data_row_bytes + f.scale_row_bytes;
    }
    return f;
}

/* Value of dim j by the description's words, straight from the page's bytes. */
static double described_value(const fmla_format_info *f, const uint8_t *page, int64_t size, int64_t p, int32_t j)
{
    const uint8_t *row = page + p * f->data_row_bytes;
    const uint8_t *scales =
        f->layout == FMLA_LAYOUT_PAGE ? page + size * f->data_row_bytes + p * f->scale_row_bytes : row;
    scales += f->scale_offset;
    if (j >= f->quant_dims) {
        const uint8_t *at = row + f->rope_offset + 2 * (j - f->quant_dims);
        return (double)fmlai_f32_from_bf16((uint16_t)(at[0] | at[1] << 8));
    }
    double code = f->element == FMLA_F4_E2M1 ? reference_e2m1_value(j % 2 ? row[j / 2] >> 4 : row[j / 2] & 15)
                                             : reference_e4m3_value(row[j]);
    float wide = 1.0f;
    switch (f->scale) {
    case FMLA_F32:
        memcpy(&wide, scales + 4 * (j / f->group), sizeof wide);
        return code * (double)wide;
    case FMLA_F8_E8M0:
        return code * reference_e8m0_value(scales[j / f->group]);
    case FMLA_F8_E4M3:
        return code * reference_e4m3_value(scales[j / f->group]);
    default:
        return code;
    }
}

/* Largest error of a value in a group whose largest magnitude is amax: half a step of the code's top binade, twice as
 * much for a power-of-two scale. */
static double allowed_error(const fmla_format_info *f, double amax)
{
    double step = f->element == FMLA_F4_E2M1 ? 2.0 / 6.0 : 32.0 / 448.0;
    double rounding =
        f->scale == FMLA_F8_E4M3 ? 1.0 / 16.0 : 0.0; /* a scale rounded down saturates the largest values */
    double largest = f->scale == FMLA_DTYPE_NONE ? (f->element == FMLA_F4_E2M1 ? 6.0 : 448.0) : 2.0 * amax;
    return largest * (step / 2.0 + rounding);
}

static void check_made_up(const fmla_format_info *f, float largest)
{
    const int64_t size = 3;
    const char *why = NULL;
    if (!fmlai_format_valid(f, &why)) {
        fail_msg("%s", why);
    }
    uint8_t page[3 * 1100];
    memset(page, 0xA5, sizeof page);
    fmlai_pool pool = pool_over(page, f, 1, size, 0, 0, 1);
    assert_true(pool_bytes(&pool, 1) < sizeof page);
    uint64_t seed = 101;
    for (int64_t p = 0; p < size; p++) {
        float token[D_MAX], back[D_MAX];
        random_token(token, f->d_qk, largest, &seed);
        fmlai_token_write(&pool, p, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
        fmlai_token_read_f32(&pool, p, 0, back);
        for (int32_t j = 0; j < f->d_qk; j++) {
            assert_true(same_f32(back[j], (float)described_value(f, page, size, p, j)));
            double error = j < f->quant_dims ? allowed_error(f, (double)largest) : 0.0;
            assert_true(fabs((double)back[j] - (double)token[j]) <= error);
        }
    }
    for (size_t i = (size_t)(size * f->bytes_per_token); i < sizeof page; i++) {
        assert_int_equal(page[i], 0xA5);
    }
}

static void c101_made_up_layouts_of_every_kind(void **state)
{
    (void)state;
    static const fmla_kv_layout layouts[] = {FMLA_LAYOUT_RECORD, FMLA_LAYOUT_PAGE};
    static const int32_t groups[] = {40, 5, 200, 1};
    for (int k = 0; k < 2 * 2 * 4 * 4; k++) {
        fmla_format_info f = made_up(layouts[k & 1], elements[k >> 1 & 1], scales_of[k >> 2 & 3], groups[k >> 4]);
        check_made_up(&f, 5.0f);
    }
}

/* A per-tensor cache: no scales in the record, values beyond the codes saturate, NaN stays. */
static void codes_without_scales_saturate(void **state)
{
    (void)state;
    uint8_t record[320];
    fmla_format_info f = made_up(FMLA_LAYOUT_RECORD, FMLA_F8_E4M3, FMLA_DTYPE_NONE, 0);
    fmlai_pool pool = pool_over(record, &f, 1, 1, 0, 0, 1);
    float token[D_MAX] = {1e9f, -1e9f, INFINITY, NAN, 3.0f}, back[D_MAX];
    fmlai_token_write(&pool, 0, 0, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
    fmlai_token_read(&pool, 0, 0, back);
    assert_true(back[0] == 448.0f && back[1] == -448.0f && back[2] == 448.0f && isnan(back[3]) && back[4] == 3.0f);
}

/* ---- outer scale ----------------------------------------------------------------------------------------------- */

static void c102_outer_scale_divides_in_the_writer_and_multiplies_in_the_reader(void **state)
{
    (void)state;
    static const float outers[] = {1.0f, 3.0f, 0.37f, 0x1p-20f, 1e4f};
    uint64_t seed = 102;
    for (int format = FMLA_KV_V32; format < FMLA_KV_COUNT; format++) {
        for (int k = 0; k < 5; k++) {
            uint8_t record[656], plain[656];
            const fmla_format_info *row = fmlai_format_row((fmla_kv_format)format);
            fmlai_pool scaled = pool_over(record, row, 1, 1, 0, 0, 1), unscaled = pool_over(plain, row, 1, 1, 0, 0, 1);
            scaled.outer_scale = outers[k];
            float token[D_MAX], divided[D_MAX], a[D_MAX], b[D_MAX];
            random_token(token, row->d_qk, 30.0f, &seed);
            for (int32_t j = 0; j < row->d_qk; j++) {
                divided[j] = j < row->quant_dims ? token[j] / outers[k] : token[j];
            }
            fmlai_token_write(&scaled, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            fmlai_token_write(&unscaled, 0, 0, divided, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
            assert_memory_equal(record, plain, (size_t)row->bytes_per_token);
            fmlai_token_read_f32(&scaled, 0, 0, a);
            fmlai_token_read_f32(&unscaled, 0, 0, b);
            for (int32_t j = 0; j < row->d_qk; j++) {
                assert_true(same_f32(a[j], j < row->quant_dims ? b[j] * outers[k] : b[j]));
            }
        }
    }
}

/* The writer's quotient is a division: a product with the reciprocal would be off by a bit, which ties of codes show.
 */
static void c102_the_writer_divides(void **state)
{
    (void)state;
    uint8_t record[320];
    fmla_format_info f = made_up(FMLA_LAYOUT_RECORD, FMLA_F8_E4M3, FMLA_DTYPE_NONE, 0);
    fmlai_pool pool = pool_over(record, &f, 1, 1, 0, 0, 1);
    uint64_t seed = 103;
    for (int round = 0; round < 200; round++) {
        pool.outer_scale = 1.5f + test_random_unit(&seed) / 2;
        float token[D_MAX] = {0.0f};
        for (int j = 0; j < 200; j++) {
            token[j] = (1.0625f + 0.125f * (float)(j % 8)) * pool.outer_scale;
        }
        fmlai_token_write(&pool, 0, 0, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
        for (int j = 0; j < 200; j++) {
            float quotient = token[j] / pool.outer_scale;
            assert_true(reference_e4m3_value(record[j]) == reference_round(&reference_e4m3, (double)quotient));
        }
    }
}

static double fp4_error(float largest, float outer)
{
    uint8_t record[288];
    fmlai_pool pool = pool_over(record, fmlai_format_row(FMLA_KV_V41_FP4), 1, 1, 0, 0, 1);
    pool.outer_scale = outer;
    uint64_t seed = 1020;
    float token[D_MAX], back[D_MAX];
    random_token(token, 512, largest, &seed);
    fmlai_token_write(&pool, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
    fmlai_token_read(&pool, 0, 0, back);
    double error = 0.0, sum = 0.0;
    for (int j = 0; j < 512; j++) {
        error += fabs((double)back[j] - (double)token[j]);
        sum += fabs((double)token[j]);
    }
    return error / sum;
}

/* Values outside the reach of e2m1 * e4m3 are lost without an outer scale and kept with one made from their amax. */
static void c102_an_outer_scale_keeps_what_fp4_would_lose(void **state)
{
    (void)state;
    static const float largest[] = {1e6f, 1e-4f};
    for (int k = 0; k < 2; k++) {
        assert_true(fp4_error(largest[k], 1.0f) > 0.9);
        assert_true(fp4_error(largest[k], largest[k] / 2688.0f) < 0.15);
    }
}

/* ---- conversion -------------------------------------------------------------------------------------------------- */

/* Random bytes, NaN codes and scales among them, so that nothing but a copy brings them over unchanged. */
static void check_same_bytes(const fmla_format_info *from, const fmla_format_info *to)
{
    uint8_t a[3 * 1152], b[4 * 1152], c[3 * 1152];
    uint64_t seed = 31;
    for (size_t i = 0; i < sizeof a; i++) {
        a[i] = (uint8_t)(test_random(&seed) >> 32);
    }
    memset(b, 0xA5, sizeof b);
    memset(c, 0xA5, sizeof c);
    fmlai_pool src = pool_over(a, from, 1, 3, 0, 576, 1), dst = pool_over(b, to, 2, 2, 0, 576, 1);
    fmlai_pool back = pool_over(c, from, 1, 3, 0, 576, 1);
    for (int64_t slot = 0; slot < 3; slot++) {
        float want[D_MAX], got[D_MAX];
        fmlai_token_convert(&dst, slot, &src, slot, 0);
        fmlai_token_read_f32(&src, slot, 0, want);
        fmlai_token_read_f32(&dst, slot, 0, got);
        for (int32_t j = 0; j < src.format.d_qk; j++) {
            assert_true(same_f32(want[j], got[j]));
        }
        fmlai_token_convert(&back, slot, &dst, slot, 0);
    }
    if (from->format == FMLA_KV_V4) { /* its pad byte is written 0 */
        for (int64_t slot = 0; slot < 3; slot++) {
            a[3 * 576 + 8 * slot + 7] = 0;
        }
    }
    assert_memory_equal(a, c, (size_t)(3 * fmlai_format_token_bytes(from, 576)));
}

static void layouts_of_the_same_codes_exchange_bytes(void **state)
{
    (void)state;
    static const fmla_kv_format pairs[][2] = {{FMLA_KV_V41, FMLA_KV_V41_PAGE},
                                              {FMLA_KV_V41_PAGE, FMLA_KV_V41},
                                              {FMLA_KV_V41_FP4, FMLA_KV_V41_FP4_PAGE},
                                              {FMLA_KV_V41_FP4_PAGE, FMLA_KV_V41_FP4},
                                              {FMLA_KV_V32, FMLA_KV_V32},
                                              {FMLA_KV_V4, FMLA_KV_V4},
                                              {FMLA_KV_BF16, FMLA_KV_BF16},
                                              {FMLA_KV_F16, FMLA_KV_F16}};
    for (size_t k = 0; k < sizeof pairs / sizeof pairs[0]; k++) {
        check_same_bytes(fmlai_format_row(pairs[k][0]), fmlai_format_row(pairs[k][1]));
    }
    fmla_format_info v32 = *fmlai_format_row(FMLA_KV_V32), moved = v32;
    moved.format = FMLA_KV_CUSTOM; /* RoPE first, then the scales */
    moved.rope_offset = 512;
    moved.scale_offset = 640;
    check_same_bytes(&v32, &moved);
}

/* Between different codes: what the destination's writer makes of what attention sees in the source. */
static void conversion_is_reading_then_writing(void **state)
{
    (void)state;
    uint64_t seed = 17;
    for (int from = FMLA_KV_BF16; from < FMLA_KV_COUNT; from++) {
        for (int to = FMLA_KV_BF16; to < FMLA_KV_COUNT; to++) {
            const fmla_format_info *f = fmlai_format_row((fmla_kv_format)from),
                                   *t = fmlai_format_row((fmla_kv_format)to);
            int32_t d = f->d_qk ? f->d_qk : t->d_qk ? t->d_qk : 300;
            bool copied = f->element == t->element && f->group == t->group && f->scale == t->scale;
            if (copied || (t->d_qk && t->d_qk != d)) {
                continue;
            }
            uint8_t a[1152], b[1152], expected[1152];
            memset(b, 0xA5, sizeof b);
            memset(expected, 0xA5, sizeof expected);
            fmlai_pool src = pool_over(a, f, 1, 1, 0, d, 1), dst = pool_over(b, t, 1, 1, 0, d, 1);
            fmlai_pool want = pool_over(expected, t, 1, 1, 0, d, 1);
            src.outer_scale = f->quant_dims > 0 ? 0.37f : 1.0f; /* products that bf16 must round */
            float token[D_MAX];
            for (int32_t j = 0; j < d; j++) {
                token[j] = test_random_unit(&seed);
            }
            fmlai_token_write(&src, 0, 0, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
            fmlai_token_convert(&dst, 0, &src, 0, 0);
            fmlai_token_read(&src, 0, 0, token);
            fmlai_token_write(&want, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            assert_memory_equal(b, expected, sizeof b);
        }
    }
}

static void check_heads(fmla_kv_format from, fmla_kv_format to)
{
    uint8_t a[2 * 2 * 3 * 8], b[2 * 2 * 3 * 8];
    fmlai_pool src = pool_over(a, fmlai_format_row(from), 2, 2, 0, 4, 3);
    fmlai_pool dst = pool_over(b, fmlai_format_row(to), 1, 4, 0, 4, 3);
    dst.token_stride = 8;
    dst.head_stride = 32;
    for (int k = 0; k < 12; k++) {
        float token[4] = {(float)k, 0.5f, -1.0f, (float)-k};
        fmlai_token_write(&src, k / 3, k % 3, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
    }
    for (int k = 0; k < 12; k++) {
        fmlai_token_convert(&dst, 3 - k / 3, &src, k / 3, k % 3);
    }
    for (int k = 0; k < 12; k++) {
        float token[4];
        fmlai_token_read(&dst, 3 - k / 3, k % 3, token);
        assert_true(token[0] == (float)k && token[1] == 0.5f && token[3] == (float)-k);
    }
}

static void conversion_keeps_heads_apart(void **state)
{
    (void)state;
    check_heads(FMLA_KV_F16, FMLA_KV_BF16);
    check_heads(FMLA_KV_F16, FMLA_KV_F16);
}

static void pools_with_different_outer_scales_are_requantised(void **state)
{
    (void)state;
    uint8_t a[528], b[528];
    uint64_t seed = 19;
    const fmla_format_info *row = fmlai_format_row(FMLA_KV_V41);
    fmlai_pool src = pool_over(a, row, 1, 1, 0, 0, 1), dst = pool_over(b, row, 1, 1, 0, 0, 1);
    src.outer_scale = 3.0f;
    float token[D_MAX], back[D_MAX];
    random_token(token, 512, 3.0f, &seed);
    fmlai_token_write(&src, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
    fmlai_token_convert(&dst, 0, &src, 0, 0);
    fmlai_token_read(&src, 0, 0, token);
    fmlai_token_read(&dst, 0, 0, back);
    for (int j = 0; j < 512; j++) {
        assert_true(fabsf(token[j] - back[j]) <= 3.0f / 14.0f);
    }
    dst.outer_scale = 3.0f;
    fmlai_token_convert(&dst, 0, &src, 0, 0);
    assert_memory_equal(a, b, sizeof a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c101_made_up_layouts_of_every_kind),
        cmocka_unit_test(codes_without_scales_saturate),
        cmocka_unit_test(c102_outer_scale_divides_in_the_writer_and_multiplies_in_the_reader),
        cmocka_unit_test(c102_the_writer_divides),
        cmocka_unit_test(c102_an_outer_scale_keeps_what_fp4_would_lose),
        cmocka_unit_test(layouts_of_the_same_codes_exchange_bytes),
        cmocka_unit_test(conversion_is_reading_then_writing),
        cmocka_unit_test(conversion_keeps_heads_apart),
        cmocka_unit_test(pools_with_different_outer_scales_are_requantised),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
