/* SPDX-License-Identifier: MIT */
/*
 * Reading tokens: worked byte examples of every format, all pairs of code and scale byte, formats described
 * by the caller, strides, alignment, and the ends of pools.
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

/* ---- worked examples: dims 0, 1, 2 = 1, 0.5, -3, the first RoPE dim = 1, the rest 0, in slot 1 of a page of
 * 2 ------ */

static void write_example(const fmlai_pool *pool)
{
    float token[D_MAX] = {1.0f, 0.5f, -3.0f};
    if (pool->format.rope_dims > 0) {
        token[pool->format.quant_dims] = 1.0f;
    }
    fmlai_token_write(pool, 1, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
}

/* The page must hold `expected` from `first` on, 0xA5 elsewhere, and read back as the values of the example.
 */
static void check_example(fmla_kv_format format, const uint8_t *expected)
{
    uint8_t page[2 * 656 + 64];
    memset(page, 0xA5, sizeof page);
    fmlai_pool pool = pool_over(page, fmlai_format_row(format), 1, 2, 0, 0, 1);
    write_example(&pool);
    assert_memory_equal(page, expected, sizeof page);
    float token[D_MAX];
    fmlai_token_read(&pool, 1, 0, token);
    assert_true(token[0] == 1.0f && token[1] == 0.5f && token[2] == -3.0f);
    for (int32_t j = 3; j < pool.format.d_qk; j++) {
        bool rope = pool.format.rope_dims > 0 && j == pool.format.quant_dims;
        assert_true(token[j] == (rope ? 1.0f : 0.0f));
    }
}

static uint8_t *blank_page(uint8_t *page)
{
    return memset(page, 0xA5, 2 * 656 + 64);
}

static void example_v32(void **state)
{
    (void)state;
    uint8_t page[2 * 656 + 64], *p = blank_page(page) + 656;
    static const uint8_t scales[] = {0, 0, 0, 0x3C, 0, 0, 0, 0x39, 0, 0, 0, 0x39, 0, 0, 0, 0x39};
    memset(p, 0, 656);
    memcpy(p, "\x70\x68\xFC", 3);
    memcpy(p + 512, scales, 16);
    memcpy(p + 528, "\x80\x3F", 2);
    check_example(FMLA_KV_V32, page);
}

static void example_v4(void **state)
{
    (void)state;
    uint8_t page[2 * 656 + 64], *p = blank_page(page);
    memset(p + 576, 0, 576);
    memcpy(p + 576, "\x70\x68\xFC", 3);
    memcpy(p + 1024, "\x80\x3F", 2);
    memcpy(p + 1160, "\x78\x72\x72\x72\x72\x72\x72\x00", 8);
    check_example(FMLA_KV_V4, page);
}

static void example_v41(void **state)
{
    (void)state;
    uint8_t page[2 * 656 + 64], *p = blank_page(page) + 528;
    memset(p, 0, 512);
    memcpy(p, "\x70\x68\xFC", 3);
    memset(p + 512, 0x72, 16);
    p[512] = 0x78;
    check_example(FMLA_KV_V41, page);
}

static void example_v41_page(void **state)
{
    (void)state;
    uint8_t page[2 * 656 + 64], *p = blank_page(page);
    memset(p + 512, 0, 512);
    memcpy(p + 512, "\x70\x68\xFC", 3);
    memset(p + 1040, 0x72, 16);
    p[1040] = 0x78;
    check_example(FMLA_KV_V41_PAGE, page);
}

static void example_v41_fp4(void **state)
{
    (void)state;
    uint8_t page[2 * 656 + 64], *p = blank_page(page) + 288;
    memset(p, 0, 256);
    memcpy(p, "\x24\x0F", 2);
    memset(p + 256, 0x01, 32);
    p[256] = 0x30;
    check_example(FMLA_KV_V41_FP4, page);
}

static void example_v41_fp4_page(void **state)
{
    (void)state;
    uint8_t page[2 * 656 + 64], *p = blank_page(page);
    memset(p + 256, 0, 256);
    memcpy(p + 256, "\x24\x0F", 2);
    memset(p + 544, 0x01, 32);
    p[544] = 0x30;
    check_example(FMLA_KV_V41_FP4_PAGE, page);
}

static void example_plain(void **state)
{
    (void)state;
    uint8_t *memory = malloc(3 * 73728);
    assert_non_null(memory);
    static const fmla_kv_format formats[] = {FMLA_KV_BF16, FMLA_KV_F16};
    static const uint8_t one[2][2] = {{0x80, 0x3F}, {0x00, 0x3C}};
    for (int k = 0; k < 2; k++) {
        memset(memory, 0, 3 * 73728);
        fmlai_pool pool = pool_over(memory, fmlai_format_row(formats[k]), 3, 64, 0, 576, 1);
        float token[D_MAX] = {0.0f};
        token[512] = 1.0f;
        fmlai_token_write(&pool, 2 * 64 + 3, 0, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
        assert_memory_equal(memory + 151936, one[k], 2);
        memset(token, 0x55, sizeof token);
        fmlai_token_read(&pool, 2 * 64 + 3, 0, token);
        assert_true(token[511] == 0.0f && token[512] == 1.0f && token[513] == 0.0f);
    }
    free(memory);
}

static void plain_heads_have_a_stride(void **state)
{
    (void)state;
    uint8_t memory[2 * 3 * 3 * 8 + 7];
    fmlai_pool pool = pool_over(memory + 1, fmlai_format_row(FMLA_KV_F16), 2, 3, 0, 4, 3);
    pool.token_stride = 8; /* heads outside, tokens inside */
    pool.head_stride = 24;
    for (int64_t slot = 0; slot < 6; slot++) {
        for (int32_t head = 0; head < 3; head++) {
            float token[4] = {(float)slot, (float)head, 0x1p-24f, 65504.0f};
            fmlai_token_write(&pool, slot, head, token, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
        }
    }
    for (int64_t slot = 0; slot < 6; slot++) {
        for (int32_t head = 0; head < 3; head++) {
            float token[4];
            fmlai_token_read(&pool, slot, head, token);
            assert_true(token[0] == (float)slot && token[1] == (float)head);
            assert_true(token[2] == 0x1p-24f && token[3] == 65504.0f); /* fp16 as it is, not through bf16 */
        }
    }
}

/* ---- all codes with all scales
 * ------------------------------------------------------------------------------- */

static void check_product(double code, double scale, float exact, float seen)
{
    double product = code * scale; /* exact: 4 and 4 significant bits, a range far inside double's */
    assert_true(same_f32(exact, (float)product));
    assert_true(same_f32(seen, (float)reference_round(&reference_bf16, product)));
}

/* Every group of a token gets another scale byte, every token other codes, so that all pairs meet. */
static void c094_every_code_with_every_scale_byte_e4m3(void **state)
{
    (void)state;
    static const fmla_kv_format formats[] = {FMLA_KV_V4, FMLA_KV_V41, FMLA_KV_V41_PAGE};
    for (int k = 0; k < 3; k++) {
        uint8_t page[3 * 584];
        fmlai_pool pool = pool_over(page, fmlai_format_row(formats[k]), 1, 3, 0, 0, 1);
        int32_t group = pool.format.group;
        for (int scale = 0; scale < 256; scale++) {
            for (int first = 0; first < 256; first += group) {
                memset(page, 0xFF, sizeof page);
                uint8_t *row = (uint8_t *)(uintptr_t)fmlai_pool_row(&pool, 2);
                uint8_t *scales = (uint8_t *)(uintptr_t)fmlai_pool_scales(&pool, 2);
                for (int32_t i = 0; i < group; i++) {
                    row[2 * group + i] = (uint8_t)(first + i);
                }
                scales[2] = (uint8_t)scale;
                float exact[D_MAX], seen[D_MAX];
                fmlai_token_read_f32(&pool, 2, 0, exact);
                fmlai_token_read(&pool, 2, 0, seen);
                for (int32_t i = 0; i < group; i++) {
                    check_product(reference_e4m3_value(first + i), reference_e8m0_value(scale), exact[2 * group + i],
                                  seen[2 * group + i]);
                }
            }
        }
    }
}

static void every_code_with_every_scale_byte_e2m1(void **state)
{
    (void)state;
    static const fmla_kv_format formats[] = {FMLA_KV_V41_FP4, FMLA_KV_V41_FP4_PAGE};
    for (int k = 0; k < 2; k++) {
        uint8_t page[3 * 288];
        fmlai_pool pool = pool_over(page, fmlai_format_row(formats[k]), 1, 3, 0, 0, 1);
        for (int scale = 0; scale < 256; scale++) {
            memset(page, 0x7F, sizeof page);
            uint8_t *row = (uint8_t *)(uintptr_t)fmlai_pool_row(&pool, 1);
            uint8_t *scales = (uint8_t *)(uintptr_t)fmlai_pool_scales(&pool, 1);
            memset(scales, scale, 32);
            for (int byte = 0; byte < 256; byte++) {
                row[byte] = (uint8_t)byte;
            }
            float exact[D_MAX], seen[D_MAX];
            fmlai_token_read_f32(&pool, 1, 0, exact);
            fmlai_token_read(&pool, 1, 0, seen);
            for (int j = 0; j < 512; j++) {
                int code = j % 2 ? j / 2 >> 4 : j / 2 & 15;
                check_product(reference_e2m1_value(code), reference_e4m3_value(scale), exact[j], seen[j]);
                assert_true(same_f32(exact[j], seen[j])); /* always exact */
            }
        }
    }
}

/* Scales of V32 are any float: one fp32 product, then one rounding to bf16. */
static void v32_scales_need_not_be_powers_of_two(void **state)
{
    (void)state;
    uint8_t record[656];
    fmlai_pool pool = pool_over(record, fmlai_format_row(FMLA_KV_V32), 1, 1, 0, 0, 1);
    static const float special[] = {0.0f, -1.0f, 1e-45f, 3.0e38f, INFINITY, -INFINITY, NAN, 0x1p-127f};
    uint64_t seed = 7;
    for (int round = 0; round < 300; round++) {
        float scales[4];
        for (int g = 0; g < 4; g++) {
            scales[g] = round < 2 ? special[round * 4 + g] : ldexpf(1.0f + test_random_unit(&seed) / 2, round - 150);
        }
        for (int j = 0; j < 512; j++) {
            record[j] = (uint8_t)(test_random(&seed) >> 32);
        }
        memcpy(record + 512, scales, sizeof scales);
        float exact[D_MAX], seen[D_MAX];
        fmlai_token_read_f32(&pool, 0, 0, exact);
        fmlai_token_read(&pool, 0, 0, seen);
        for (int j = 0; j < 512; j++) {
            float product = (float)(reference_e4m3_value(record[j]) * (double)scales[j / 128]);
            assert_true(same_f32(exact[j], product));
            assert_true(same_f32(seen[j], (float)reference_round(&reference_bf16, (double)product)));
        }
    }
}

static void rope_parts_are_verbatim(void **state)
{
    (void)state;
    static const fmla_kv_format formats[] = {FMLA_KV_V32, FMLA_KV_V4};
    for (int k = 0; k < 2; k++) {
        uint8_t page[656];
        fmlai_pool pool = pool_over(page, fmlai_format_row(formats[k]), 1, 1, 0, 0, 1);
        pool.outer_scale = 3.0f; /* of no concern to RoPE */
        for (int base = 0; base < 65536; base += 64) {
            memset(page, 0, sizeof page);
            for (int i = 0; i < 64; i++) {
                page[pool.format.rope_offset + 2 * i] = (uint8_t)(base + i);
                page[pool.format.rope_offset + 2 * i + 1] = (uint8_t)((base + i) >> 8);
            }
            float token[D_MAX];
            fmlai_token_read(&pool, 0, 0, token);
            for (int i = 0; i < 64; i++) {
                float want = fmlai_f32_from_bf16((uint16_t)(base + i));
                assert_true(same_f32(token[pool.format.quant_dims + i], want));
            }
        }
    }
}

static void parts_of_a_token_equal_the_whole(void **state)
{
    (void)state;
    uint8_t record[656];
    uint64_t seed = 3;
    for (int i = 0; i < 656; i++) {
        record[i] = (uint8_t)(test_random(&seed) >> 32);
    }
    for (int format = FMLA_KV_V32; format < FMLA_KV_COUNT; format++) {
        fmlai_pool pool = pool_over(record, fmlai_format_row((fmla_kv_format)format), 1, 1, 0, 0, 1);
        float whole[D_MAX], part[D_MAX];
        fmlai_token_read_f32(&pool, 0, 0, whole);
        for (int round = 0; round < 200; round++) {
            int32_t begin = (int32_t)(test_random(&seed) % (uint64_t)(pool.format.d_qk + 1));
            int32_t end = begin + (int32_t)(test_random(&seed) % (uint64_t)(pool.format.d_qk - begin + 1));
            part[end - begin] = 77.0f;
            fmlai_token_read_dims(&pool, 0, 0, begin, end, part);
            for (int32_t j = begin; j < end; j++) {
                assert_true(same_f32(part[j - begin], whole[j]));
            }
            assert_true(part[end - begin] == 77.0f);
        }
    }
}

/* ---- where tokens lie
 * ---------------------------------------------------------------------------------------- */

static void fill(float *token, int32_t d, uint64_t *seed)
{
    for (int32_t j = 0; j < d; j++) {
        token[j] = fmlai_f32_from_bf16(fmlai_bf16_from_f32(test_random_unit(seed)));
    }
}

/* Exact and padded page strides of V4 name the same bytes: data and scales from the page's start, excess
 * untouched. */
static void c054_v4_page_strides_are_data(void **state)
{
    (void)state;
    static const int64_t strides[][2] = {{64, 37376}, {64, 37440}, {64, 37441}, {256, 149504}, {256, 149760}};
    for (int k = 0; k < 5; k++) {
        int64_t size = strides[k][0], stride = strides[k][1];
        uint8_t *memory = malloc((size_t)(2 * stride));
        assert_non_null(memory);
        memset(memory, 0xA5, (size_t)(2 * stride));
        fmlai_pool pool = pool_over(memory, fmlai_format_row(FMLA_KV_V4), 2, size, stride, 0, 1);
        uint64_t seed = 5;
        for (int64_t slot = 0; slot < 2 * size; slot++) {
            float token[D_MAX];
            fill(token, 512, &seed);
            fmlai_token_write(&pool, slot, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            uint8_t single[584];
            fmlai_pool one = pool_over(single, fmlai_format_row(FMLA_KV_V4), 1, 1, 0, 0, 1);
            fmlai_token_write(&one, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            const uint8_t *page = memory + slot / size * stride;
            assert_memory_equal(page + slot % size * 576, single, 576);
            assert_memory_equal(page + size * 576 + slot % size * 8, single + 576, 8);
        }
        for (int64_t page = 0; page < 2; page++) {
            for (int64_t i = size * 584; i < stride; i++) {
                assert_int_equal(memory[page * stride + i], 0xA5);
            }
        }
        free(memory);
    }
}

static void promise_6_any_page_size_stride_and_alignment(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 31, 32, 64};
    for (int format = FMLA_KV_BF16; format < FMLA_KV_COUNT; format++) {
        const fmla_format_info *row = fmlai_format_row((fmla_kv_format)format);
        for (int k = 0; k < 8; k++) {
            int64_t size = sizes[k % 4];
            int64_t stride = size * fmlai_format_token_bytes(row, 576) + (k < 4 ? 0 : 2 * k + 1);
            fmlai_pool pool = pool_over(NULL, row, 3, size, stride, 576, 1);
            guarded g = guarded_make(pool_bytes(&pool, 1)); /* an odd address now and then, the end exact */
            pool.data = g.data;
            uint64_t seed = 11;
            float want[D_MAX], token[D_MAX];
            for (int64_t slot = 0; slot < 3 * size; slot++) {
                fill(token, pool.format.d_qk, &seed);
                fmlai_token_write(&pool, slot, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            }
            uint8_t single[1152];
            fmlai_pool one = pool_over(single, row, 1, 1, 0, 576, 1);
            seed = 11;
            for (int64_t slot = 0; slot < 3 * size; slot++) {
                fill(token, pool.format.d_qk, &seed);
                fmlai_token_write(&one, 0, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
                fmlai_token_read(&one, 0, 0, want);
                fmlai_token_read(&pool, slot, 0, token);
                assert_memory_equal(token, want, (size_t)pool.format.d_qk * sizeof *want);
            }
            guarded_free(&g);
        }
    }
}

/* Every neighbour of the token that is read holds NaN, and so does the padding. */
static void promise_1_a_token_depends_on_its_own_bytes(void **state)
{
    (void)state;
    for (int format = FMLA_KV_BF16; format < FMLA_KV_COUNT; format++) {
        const fmla_format_info *row = fmlai_format_row((fmla_kv_format)format);
        uint8_t memory[3 * (5 * 1152 + 33)];
        int64_t stride = 5 * fmlai_format_token_bytes(row, 576) + 33;
        fmlai_pool pool = pool_over(memory, row, 3, 5, stride, 576, 1);
        for (int64_t slot = 0; slot < 15; slot++) {
            memset(memory, 0xFF, sizeof memory);
            float token[D_MAX], back[D_MAX];
            uint64_t seed = 13 + (uint64_t)slot;
            fill(token, pool.format.d_qk, &seed);
            fmlai_token_write(&pool, slot, 0, token, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
            fmlai_token_read(&pool, slot, 0, back);
            for (int32_t j = 0; j < pool.format.d_qk; j++) {
                assert_true(fabsf(back[j] - token[j]) <= 0.25f);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(example_v32),
        cmocka_unit_test(example_v4),
        cmocka_unit_test(example_v41),
        cmocka_unit_test(example_v41_page),
        cmocka_unit_test(example_v41_fp4),
        cmocka_unit_test(example_v41_fp4_page),
        cmocka_unit_test(example_plain),
        cmocka_unit_test(plain_heads_have_a_stride),
        cmocka_unit_test(c094_every_code_with_every_scale_byte_e4m3),
        cmocka_unit_test(every_code_with_every_scale_byte_e2m1),
        cmocka_unit_test(v32_scales_need_not_be_powers_of_two),
        cmocka_unit_test(rope_parts_are_verbatim),
        cmocka_unit_test(parts_of_a_token_equal_the_whole),
        cmocka_unit_test(c054_v4_page_strides_are_data),
        cmocka_unit_test(promise_6_any_page_size_stride_and_alignment),
        cmocka_unit_test(promise_1_a_token_depends_on_its_own_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
