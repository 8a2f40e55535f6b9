/* SPDX-License-Identifier: MIT */
/* Faults that users of such libraries met at the boundary, each by its number. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "support_calls.h"

static calls *c;

static int set_up(void **state)
{
    *state = c = calls_new(make_context(FMLA_DEVICE_CPU, 2));
    return 0;
}

static void expect(fmla_status status, fmla_status expected, const char *words)
{
    if (status != expected || strstr(fmla_context_error(c->context), words) == NULL) {
        fail_msg("status %d (expected %d), \"%s\" (expected \"%s\")", (int)status, (int)expected,
                 fmla_context_error(c->context), words);
    }
}

static uint16_t *halves(const fmla_tensor *t)
{
    return t->data;
}

/* Distinct small values: bf16 of (i * 7 % 61 - 30) / 64 has an exact representation. */
static void fill_distinct(void *data, size_t count)
{
    uint16_t *x = data;
    for (size_t i = 0; i < count; i++) {
        float value = (float)((int)(i * 7 % 61) - 30) / 64.0f;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        x[i] = (uint16_t)(bits >> 16);
    }
}

/* Neighbours that end the main list, and then tokens of the extra one, where tokens are multiplied in groups: bits are
 * those of one list over one cache. Slots behind the neighbours hold NaN. */
static void two_bf16_caches_have_the_bits_of_one(void **state)
{
    (void)state;
    enum { H = 3, D = 64, DV = 32, SLOTS = 64, TOKENS = 23, MAIN = 19 };
    int32_t list[TOKENS];
    calls_reset(c);
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT, b = FMLA_DECODE_ARGS_INIT;
    uint16_t *q = calls_input(c, H * D * 2), *cache = calls_input(c, SLOTS * D * 2);
    float *out = calls_output(c, H * DV * 4), *expected = calls_output(c, H * DV * 4);
    fill_distinct(q, H * D);
    fill_distinct(cache, SLOTS * D);
    for (int32_t i = 0; i < TOKENS; i++) {
        list[i] = i < MAIN ? i : 60 - 3 * i % 16;
    }
    memset(cache + MAIN * D, 0xFF, 8 * D * sizeof *cache);
    b.q = fmla_tensor_4d(q, FMLA_BF16, 1, 1, H, D);
    b.kv = (fmla_kv_cache){.data = cache, .format = FMLA_KV_BF16, .num_pages = 1, .page_size = SLOTS};
    a = b;
    b.indices = fmla_tensor_3d(list, FMLA_I32, 1, 1, TOKENS);
    b.out = fmla_tensor_4d(expected, FMLA_F32, 1, 1, H, DV);
    expect(fmla_decode(c->context, &b, NULL), FMLA_OK, "");
    a.extra_kv = a.kv;
    a.indices = fmla_tensor_3d(list, FMLA_I32, 1, 1, MAIN);
    a.extra_indices = fmla_tensor_3d(list + MAIN, FMLA_I32, 1, 1, TOKENS - MAIN);
    a.out = fmla_tensor_4d(out, FMLA_F32, 1, 1, H, DV);
    expect(fmla_decode(c->context, &a, NULL), FMLA_OK, "");
    assert_memory_equal(out, expected, H * DV * sizeof *out);
    assert_true(out[0] == out[0]);
    assert_true(calls_guards_intact(c));
}

/* Ragged queries have no hint to get wrong: rows are right for every token, each as in its own call. */
static void c039_c040_ragged_queries_leave_no_row_behind(void **state)
{
    (void)state;
    static const int32_t cu[5] = {0, 1, 4, 4, 9}, lengths[5] = {3, 9, 4, 12};
    const int64_t h = 3, d = 64, d_v = 32;
    calls_reset(c);
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    void *q = calls_input(c, 9 * 3 * 64 * 2), *cache = calls_input(c, 16 * 4 * 64 * 2);
    float *out = calls_output(c, 9 * 3 * 32 * 4), *lse = calls_output(c, 9 * 3 * 4);
    float *one_out = calls_output(c, 5 * 3 * 32 * 4), *one_lse = calls_output(c, 5 * 3 * 4);
    fill_distinct(q, 9 * 3 * 64);
    fill_distinct(cache, 16 * 4 * 64);
    a.causal = 1;
    a.q = fmla_tensor_3d(q, FMLA_BF16, 9, h, d);
    a.kv = (fmla_kv_cache){.data = cache, .format = FMLA_KV_BF16, .num_pages = 16, .page_size = 4};
    a.cu_seqlens_q = fmla_tensor_1d(cu, FMLA_I32, 5);
    a.cache_seqlens = fmla_tensor_1d(lengths, FMLA_I32, 4);
    a.out = fmla_tensor_3d(out, FMLA_F32, 9, h, d_v);
    a.lse = fmla_tensor_2d(lse, FMLA_F32, h, 9);
    expect(fmla_decode(c->context, &a, NULL), FMLA_OK, "");
    for (int32_t r = 0; r < 4; r++) {
        int64_t s_q = cu[r + 1] - cu[r];
        fmla_decode_args one = FMLA_DECODE_ARGS_INIT;
        one.causal = 1;
        one.q = fmla_tensor_4d((char *)q + cu[r] * h * d * 2, FMLA_BF16, 1, s_q, h, d);
        one.kv = a.kv;
        one.kv.data = (char *)cache + r * 4 * 4 * 64 * 2;
        one.kv.num_pages = 4;
        one.cache_seqlens = fmla_tensor_1d(lengths + r, FMLA_I32, 1);
        one.out = fmla_tensor_4d(one_out, FMLA_F32, 1, s_q, h, d_v);
        one.lse = fmla_tensor_3d(one_lse, FMLA_F32, 1, h, s_q);
        expect(fmla_decode(c->context, &one, NULL), FMLA_OK, "");
        assert_memory_equal(one_out, out + cu[r] * h * d_v, (size_t)(s_q * h * d_v) * sizeof(float));
        for (int64_t i = 0; i < h; i++) {
            assert_memory_equal(one_lse + i * s_q, lse + i * 9 + cu[r], (size_t)s_q * sizeof(float));
        }
    }
    assert_true(calls_guards_intact(c));
}

static void c040_too_small_a_maximum_is_an_error(void **state)
{
    (void)state;
    calls_reset(c);
    c->forward.max_seqlen_q = 2;
    expect(fmla_mha_forward(c->context, &c->forward, NULL), FMLA_ERROR_INVALID_ARGUMENT,
           "max_seqlen_q: 2; request 1 has 3 tokens");
    assert_true(calls_outputs_untouched(c));
    c->forward.max_seqlen_q = 100;
    expect(fmla_mha_forward(c->context, &c->forward, NULL), FMLA_OK, "");
    unsigned char first[5 * 4 * 16 * 2];
    memcpy(first, c->forward.out.data, sizeof first);
    c->forward.max_seqlen_q = c->forward.max_seqlen_kv = 0;
    expect(fmla_mha_forward(c->context, &c->forward, NULL), FMLA_OK, "");
    assert_memory_equal(first, c->forward.out.data, sizeof first);
}

/* The cache that is not paged at all: [b, s_max, 1, 576]. */
static void c058_cache_without_block_table(void **state)
{
    (void)state;
    static const int32_t identity[4] = {0, 1, 0, 0};
    calls_reset(c);
    fill_distinct(c->dense.q.data, 2 * 2 * 4 * 576);
    fill_distinct(c->dense.kv.data, 6 * 4 * 576);
    c->dense.kv.num_pages = 2;
    c->dense.kv.page_size = 12;
    c->dense.block_table = fmla_tensor_2d(identity, FMLA_I32, 2, 1);
    expect(fmla_decode(c->context, &c->dense, NULL), FMLA_OK, "");
    unsigned char *first = malloc(sizeof c->outputs);
    assert_non_null(first);
    memcpy(first, c->outputs, sizeof c->outputs);
    c->dense.block_table = (fmla_tensor){0};
    expect(fmla_decode(c->context, &c->dense, NULL), FMLA_OK, "");
    assert_memory_equal(first, c->outputs, sizeof c->outputs);
    free(first);
    /* A row stride: the buffer may have room for more tokens than this call may see. */
    c->dense.kv.page_size = 11;
    c->dense.kv.page_stride_bytes = 12 * 1152;
    expect(fmla_decode(c->context, &c->dense, NULL), FMLA_ERROR_INVALID_ARGUMENT,
           "cache_seqlens[1]: 12; the cache has for a request 1 pages of 11 tokens, allowed: 0..11");
}

static void c060a_indices_of_two_and_three_dimensions(void **state)
{
    (void)state;
    unsigned char first[3 * 4 * 32 * 2];
    calls_reset(c);
    fill_distinct(c->prefill.q.data, 3 * 4 * 64);
    fill_distinct(c->prefill.kv.data, 7 * 64);
    const int64_t row = c->prefill.indices.stride[0];
    expect(fmla_prefill(c->context, &c->prefill, NULL), FMLA_OK, "");
    memcpy(first, c->prefill.out.data, sizeof first);
    c->prefill.indices = fmla_tensor_2d(c->prefill.indices.data, FMLA_I32, 3, 5);
    c->prefill.indices.stride[0] = row;
    memset(c->prefill.out.data, 0, sizeof first);
    expect(fmla_prefill(c->context, &c->prefill, NULL), FMLA_OK, "");
    assert_memory_equal(first, c->prefill.out.data, sizeof first);
    /* The middle dimension's stride says nothing when there is one KV head. */
    c->prefill.indices = fmla_tensor_3d(c->prefill.indices.data, FMLA_I32, 3, 1, 5);
    c->prefill.indices.stride[1] = 123456789;
    expect(fmla_prefill(c->context, &c->prefill, NULL), FMLA_OK, "");
    assert_memory_equal(first, c->prefill.out.data, sizeof first);
    c->prefill.indices = fmla_tensor_3d(c->prefill.indices.data, FMLA_I32, 1, 3, 5);
    expect(fmla_prefill(c->context, &c->prefill, NULL), FMLA_ERROR_INVALID_ARGUMENT, "indices: shape is [1, 3, 5]");
}

static void c060b_position_past_the_table(void **state)
{
    (void)state;
    calls_reset(c);
    ((int32_t *)c->indices_convert.positions.data)[7] = 8;
    expect(fmla_indices_convert(c->context, &c->indices_convert, NULL), FMLA_ERROR_INVALID_ARGUMENT,
           "positions[1, 0, 1]: 8; block_table has 2 pages of 4 tokens");
    assert_true(calls_outputs_untouched(c));
    ((int32_t *)c->indices_convert.positions.data)[7] = 7;
    expect(fmla_indices_convert(c->context, &c->indices_convert, NULL), FMLA_OK, "");
    static const int32_t expected[12] = {20, 7, -1, 23, 4, 5, 38, 39, 1, -1, 0, 39};
    assert_memory_equal(c->indices_convert.indices.data, expected, sizeof expected);
}

/* Outputs of exactly the size that shapes say: no byte before or after any of them changes, in any operation. */
static void c061_canaries_around_every_output(void **state)
{
    (void)state;
    for (int32_t threads = 1; threads <= 3; threads += 2) {
        fmla_context *own = c->context;
        c->context = make_context(FMLA_DEVICE_CPU, threads);
        for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
            calls_reset(c);
            expect(calls_run(c, (fmla_operation)op), FMLA_OK, "");
            assert_true(calls_guards_intact(c));
        }
        fmla_context_destroy(c->context);
        c->context = own;
    }
}

/* Gathering a 656-byte cache honours its format: 448 * 2^-13 style records come back as their values. */
static void c061_gather_of_a_v32_cache(void **state)
{
    (void)state;
    calls_reset(c);
    uint8_t *record = (uint8_t *)c->dequantize.src.data + 6 * 656;
    const float scale = 0.5f;
    record[0] = 0x38; /* 1 */
    record[1] = 0xFC; /* -384 */
    memcpy(record + 512, &scale, sizeof scale);
    record[528] = 0x80; /* dim 512: bf16 1 */
    record[529] = 0x3F;
    expect(fmla_dequantize(c->context, &c->dequantize, NULL), FMLA_OK, "");
    const float *row = c->dequantize.dst.data;
    assert_true(row[0] == 0.5f && row[1] == -192.0f && row[512] == 1.0f);
    for (int32_t i = 0; i < 576; i++) {
        assert_true(row[576 + i] == 0.0f); /* slot -1 */
    }
}

static void c097_outer_scale_must_be_a_normal_float(void **state)
{
    (void)state;
    static const double bad[] = {1e-50, 1e-39, 1e300, -1.0, NAN, INFINITY, -INFINITY, 3.5e38};
    static const double good[] = {0.0, 1.0, 0.25, 1.2e-38, 3.4e38};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        calls_reset(c);
        c->quantize.dst.outer_scale = bad[i];
        expect(fmla_quantize(c->context, &c->quantize, NULL), FMLA_ERROR_INVALID_ARGUMENT, "dst.outer_scale: ");
        c->sparse.extra_kv.outer_scale = bad[i];
        expect(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_INVALID_ARGUMENT, "extra_kv.outer_scale: ");
        assert_true(calls_outputs_untouched(c));
    }
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        calls_reset(c);
        c->quantize.dst.outer_scale = good[i];
        expect(fmla_quantize(c->context, &c->quantize, NULL), FMLA_OK, "");
    }
}

static void c100_wrong_width_says_the_expected_bytes(void **state)
{
    (void)state;
    calls_reset(c);
    c->dequantize.src.token_stride_bytes = 576;
    expect(fmla_dequantize(c->context, &c->dequantize, NULL), FMLA_ERROR_INVALID_ARGUMENT,
           "src.token_stride_bytes: 576; allowed: 0 or 656 (format v32 takes 656 bytes per token)");
    c->dequantize.src.token_stride_bytes = 656;
    c->dequantize.src.page_stride_bytes = 4 * 576;
    expect(fmla_dequantize(c->context, &c->dequantize, NULL), FMLA_ERROR_INVALID_ARGUMENT,
           "src.page_stride_bytes: 2304; allowed: 0 or at least 2624 (4 tokens of 656 bytes, format v32)");
    c->dequantize.src.page_stride_bytes = 0;
    expect(fmla_dequantize(c->context, &c->dequantize, NULL), FMLA_OK, "");
}

/* C054: V4 pages of 64 tokens come exact (37,376 bytes) and padded to a multiple of 576 (37,440): stride is data. */
static void c054_both_page_strides_of_v4(void **state)
{
    (void)state;
    unsigned char first[3 * 8 * 4];
    for (int32_t round = 0; round < 2; round++) {
        int64_t stride = round == 0 ? 37376 : 37440;
        calls_reset(c);
        uint8_t *pages = calls_input(c, 2 * 37440);
        for (int32_t i = 0; i < 37376; i++) { /* page 1 holds the tokens that are indexed */
            pages[stride + i] = (uint8_t)(i % 64 + 0x20);
        }
        c->fused_decode.kv = (fmla_kv_cache){
            .data = pages, .format = FMLA_KV_V4, .num_pages = 2, .page_size = 64, .page_stride_bytes = stride};
        for (int32_t i = 0; i < 12; i++) {
            ((int32_t *)c->fused_decode.indices.data)[i] = 64 + i * 5;
        }
        expect(fmla_fused_decode(c->context, &c->fused_decode, NULL), FMLA_OK, "");
        if (round == 0) {
            memcpy(first, c->fused_decode.fused.lse.data, sizeof first);
        }
        assert_memory_equal(first, c->fused_decode.fused.lse.data, sizeof first);
    }
}

static void c145_rope_positions_stay_in_the_table(void **state)
{
    (void)state;
    static const int32_t bad[] = {10, -1, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char words[96];
        calls_reset(c);
        ((int32_t *)c->fused_prefill.fused.token_positions.data)[1] = bad[i];
        snprintf(words, sizeof words, "fused.token_positions[1]: %d; cos_sin_cache has 10 rows, allowed: 0..9",
                 (int)bad[i]);
        expect(fmla_fused_prefill(c->context, &c->fused_prefill, NULL), FMLA_ERROR_INVALID_ARGUMENT, words);
        assert_true(calls_outputs_untouched(c));
    }
    calls_reset(c);
    ((int32_t *)c->fused_prefill.fused.token_positions.data)[1] = 9;
    expect(fmla_fused_prefill(c->context, &c->fused_prefill, NULL), FMLA_OK, "");
}

/* C088: an option that one operation lacks is an error there, and one that it has makes a difference. */
static void c088_sink_is_never_dropped(void **state)
{
    (void)state;
    unsigned char with[2 * 2 * 4 * 512 * 2];
    for (int32_t op = FMLA_OP_DENSE_DECODE; op <= FMLA_OP_SPARSE_DECODE; op++) {
        calls_reset(c);
        fmla_decode_args *a = op == FMLA_OP_DENSE_DECODE ? &c->dense : &c->sparse;
        expect(fmla_decode(c->context, a, NULL), FMLA_OK, "");
        memcpy(with, a->out.data, sizeof with);
        a->attn_sink = (fmla_tensor){0};
        expect(fmla_decode(c->context, a, NULL), FMLA_OK, "");
        assert_memory_not_equal(with, a->out.data, sizeof with);
    }
    assert_true(halves(&c->sparse.out)[0] != 0);
}

/* C101: a record nobody published, described by the caller, and descriptions that contradict themselves. */
static void c101_custom_format(void **state)
{
    (void)state;
    calls_reset(c);
    c->custom = (fmla_format_info)FMLA_FORMAT_INFO_INIT;
    assert_int_equal(fmla_format_get(FMLA_KV_V41_FP4, &c->custom), FMLA_OK);
    c->custom.layout = FMLA_LAYOUT_RECORD; /* 352 bytes: 64 of something else between codes and scales */
    c->custom.bytes_per_token = c->custom.data_row_bytes = 352;
    c->custom.scale_offset = 320;
    c->custom.extra_only = 0;
    c->sparse.extra_kv = (fmla_kv_cache){.data = calls_input(c, 8 * 352),
                                         .format = FMLA_KV_CUSTOM,
                                         .num_pages = 4,
                                         .page_size = 2,
                                         .custom = &c->custom};
    expect(fmla_decode(c->context, &c->sparse, NULL), FMLA_OK, "");
    c->sparse.extra_kv.token_stride_bytes = 288;
    expect(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_INVALID_ARGUMENT, "allowed: 0 or 352");
    c->sparse.extra_kv.token_stride_bytes = 0;
    c->custom.scale_offset = 340;
    expect(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_INVALID_ARGUMENT, "extra_kv.custom: ");
    c->custom.scale_offset = 320;
    c->custom.extra_only = 1;
    c->sparse.kv = c->sparse.extra_kv;
    expect(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_INVALID_ARGUMENT, "legal as extra_kv only");
    c->custom.struct_size = 0;
    expect(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_INVALID_ARGUMENT, "custom.struct_size: 0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c039_c040_ragged_queries_leave_no_row_behind),
        cmocka_unit_test(c040_too_small_a_maximum_is_an_error),
        cmocka_unit_test(c054_both_page_strides_of_v4),
        cmocka_unit_test(c058_cache_without_block_table),
        cmocka_unit_test(c060a_indices_of_two_and_three_dimensions),
        cmocka_unit_test(c060b_position_past_the_table),
        cmocka_unit_test(c061_canaries_around_every_output),
        cmocka_unit_test(c061_gather_of_a_v32_cache),
        cmocka_unit_test(c088_sink_is_never_dropped),
        cmocka_unit_test(c097_outer_scale_must_be_a_normal_float),
        cmocka_unit_test(c100_wrong_width_says_the_expected_bytes),
        cmocka_unit_test(c101_custom_format),
        cmocka_unit_test(two_bf16_caches_have_the_bits_of_one),
        cmocka_unit_test(c145_rope_positions_stay_in_the_table),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
