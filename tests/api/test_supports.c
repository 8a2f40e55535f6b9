/* SPDX-License-Identifier: MIT */
/* fmla_supports and the calls themselves give one answer, and it is the published one. */
#include <stdio.h>

#include "support_calls.h"

static calls *c;

static int set_up(void **state)
{
    *state = c = calls_new(make_context(FMLA_DEVICE_CPU, 1));
    return 0;
}

static int32_t width_of(int32_t format)
{
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    assert_int_equal(fmla_format_get((fmla_kv_format)format, &info), FMLA_OK);
    return info.d_qk == 0 ? 576 : info.d_qk;
}

/* A sparse decode call with these formats; memory is ample for each of them. */
static void set_formats(int32_t main, int32_t extra, fmla_dtype q_dtype)
{
    calls_reset(c);
    int32_t d_qk = width_of(main);
    c->sparse.q = fmla_tensor_4d(calls_input(c, 2 * 2 * 4 * 576 * 2), q_dtype, 2, 2, 4, d_qk);
    c->sparse.out = fmla_tensor_4d(c->sparse.out.data, FMLA_BF16, 2, 2, 4, 512);
    c->sparse.out.dtype = (int32_t)q_dtype;
    c->sparse.kv = (fmla_kv_cache){.data = calls_input(c, 8 * 1152), .format = main, .num_pages = 2, .page_size = 4};
    if (extra == FMLA_KV_NONE) {
        c->sparse.extra_kv = (fmla_kv_cache){0};
        c->sparse.extra_indices = (fmla_tensor){0};
        c->sparse.extra_topk_length = (fmla_tensor){0};
    } else {
        c->sparse.extra_kv =
            (fmla_kv_cache){.data = calls_input(c, 8 * 1152), .format = extra, .num_pages = 4, .page_size = 2};
    }
}

static int32_t supports(fmla_operation operation, int32_t main, int32_t extra, fmla_dtype dtype, int32_t d_qk)
{
    fmla_support_query query = FMLA_SUPPORT_QUERY_INIT;
    query.operation = (int32_t)operation;
    query.kv_format = main;
    query.extra_format = extra;
    query.q_dtype = (int32_t)dtype;
    query.d_qk = d_qk;
    query.h_q = 4;
    query.h_kv = 1;
    query.d_v = 512;
    return fmla_supports(c->context, &query);
}

/* The published pairs; every format may stand alone but the fp4 ones. */
static bool legal(int32_t main, int32_t extra)
{
    static const int32_t pairs[][2] = {
        {FMLA_KV_BF16, FMLA_KV_BF16},   {FMLA_KV_F16, FMLA_KV_F16},
        {FMLA_KV_V32, FMLA_KV_V32},     {FMLA_KV_V4, FMLA_KV_V4},
        {FMLA_KV_V41, FMLA_KV_V41},     {FMLA_KV_V41_PAGE, FMLA_KV_V41_PAGE},
        {FMLA_KV_V41, FMLA_KV_V41_FP4}, {FMLA_KV_V41_PAGE, FMLA_KV_V41_FP4_PAGE},
    };
    if (extra == FMLA_KV_NONE) {
        return main != FMLA_KV_V41_FP4 && main != FMLA_KV_V41_FP4_PAGE;
    }
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        if (pairs[i][0] == main && pairs[i][1] == extra) {
            return true;
        }
    }
    return false;
}

static void c099_every_pair_of_formats(void **state)
{
    (void)state;
    for (int32_t main = FMLA_KV_BF16; main < FMLA_KV_COUNT; main++) {
        for (int32_t extra = FMLA_KV_NONE; extra < FMLA_KV_COUNT; extra++) {
            fmla_dtype dtype = main == FMLA_KV_F16 ? FMLA_F16 : FMLA_BF16;
            set_formats(main, extra, dtype);
            bool expected = legal(main, extra);
            fmla_status status = fmla_decode(c->context, &c->sparse, NULL);
            if (status != (expected ? FMLA_OK : FMLA_ERROR_INVALID_ARGUMENT)) {
                fail_msg("main %d, extra %d: status %d, %s", main, extra, (int)status, fmla_context_error(c->context));
            }
            assert_int_equal(calls_outputs_untouched(c), !expected);
            assert_int_equal(supports(FMLA_OP_SPARSE_DECODE, main, extra, dtype, width_of(main)), expected);
            if (!expected) {
                assert_non_null(strstr(fmla_context_error(c->context), "kv: "));
            }
        }
    }
    set_formats(FMLA_KV_V41_FP4, FMLA_KV_NONE, FMLA_BF16);
    assert_int_equal(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    assert_string_equal(fmla_context_error(c->context),
                        "kv: format is v41-fp4; allowed: a main format, this one is legal as extra_kv only");
    set_formats(FMLA_KV_V41, FMLA_KV_V4, FMLA_BF16);
    assert_int_equal(fmla_decode(c->context, &c->sparse, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    assert_string_equal(fmla_context_error(c->context),
                        "extra_kv: format is v4; allowed beside kv's v41: v41, v41-fp4");
}

/* C150: a format or dtype that does not fit is a status, whatever the numbers: never an abort. */
static void c150_every_dtype_with_every_format(void **state)
{
    (void)state;
    for (int32_t format = FMLA_KV_BF16; format < FMLA_KV_COUNT; format++) {
        for (int32_t dtype = FMLA_BF16; dtype <= FMLA_F4_E2M1; dtype++) {
            bool half = dtype == FMLA_BF16 || dtype == FMLA_F16;
            bool plain = format == FMLA_KV_BF16 || format == FMLA_KV_F16;
            bool expected =
                half && legal(format, FMLA_KV_NONE) && (!plain || (format == FMLA_KV_BF16) == (dtype == FMLA_BF16));
            set_formats(format, FMLA_KV_NONE, (fmla_dtype)dtype);
            fmla_status status = fmla_decode(c->context, &c->sparse, NULL);
            assert_int_equal(status, expected ? FMLA_OK : FMLA_ERROR_INVALID_ARGUMENT);
            assert_int_equal(supports(FMLA_OP_SPARSE_DECODE, format, FMLA_KV_NONE, (fmla_dtype)dtype, width_of(format)),
                             expected);
        }
    }
}

/* C103: every main format serves dense decode too. */
static void c103_dense_decode_over_every_format(void **state)
{
    (void)state;
    for (int32_t format = FMLA_KV_BF16; format < FMLA_KV_COUNT; format++) {
        bool expected = legal(format, FMLA_KV_NONE);
        fmla_dtype dtype = format == FMLA_KV_F16 ? FMLA_F16 : FMLA_BF16;
        calls_reset(c);
        c->dense.q = fmla_tensor_4d(c->dense.q.data, dtype, 2, 2, 4, width_of(format));
        c->dense.out.dtype = (int32_t)dtype;
        c->dense.kv.format = format;
        assert_int_equal(fmla_decode(c->context, &c->dense, NULL), expected ? FMLA_OK : FMLA_ERROR_INVALID_ARGUMENT);
        assert_int_equal(supports(FMLA_OP_DENSE_DECODE, format, FMLA_KV_NONE, dtype, width_of(format)), expected);
    }
}

static void widths_and_heads(void **state)
{
    (void)state;
    fmla_support_query q = FMLA_SUPPORT_QUERY_INIT;
    struct {
        fmla_operation operation;
        int32_t format, h_q, h_kv, d_qk, d_v, expected;
        const char *words;
    } questions[] = {
        {FMLA_OP_DENSE_DECODE, FMLA_KV_BF16, 1, 1, 1, 1, 1, ""},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_BF16, 127, 1, 1024, 1024, 1, ""},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_BF16, 126, 3, 320, 256, 1, ""},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_BF16, 126, 4, 320, 256, 0, "h_q: 126; allowed: a multiple of h_kv, 4"},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_BF16, 1, 1, 1025, 512, 0, "d_qk: 1025"},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_BF16, 1, 1, 512, 576, 0, "d_v: 576; allowed: at most d_qk, 512"},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_V4, 8, 8, 512, 512, 0, "h_kv: 8; allowed with a quantised format: 1"},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_V4, 8, 1, 576, 512, 0,
         "kv: format v4 has d_qk 512; allowed: a format of d_qk 576"},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_V4, 8, 1, 512, 256, 0, "d_v: 256; allowed with format v4: 512"},
        {FMLA_OP_DENSE_DECODE, 9, 8, 1, 512, 512, 0, "kv: format is 9"},
        {FMLA_OP_SPARSE_DECODE, FMLA_KV_BF16, 8, 2, 512, 512, 0, "h_kv: 2; allowed in sparse_decode: 1"},
        {FMLA_OP_SPARSE_PREFILL, FMLA_KV_BF16, 8, 2, 512, 512, 1, ""},
        {FMLA_OP_SPARSE_PREFILL, FMLA_KV_V4, 8, 1, 512, 512, 0,
         "kv: format is v4; allowed in sparse_prefill: bf16, f16"},
        {FMLA_OP_FUSED_PREFILL, FMLA_KV_BF16, 8, 1, 512, 512, 1, ""},
        {FMLA_OP_FUSED_PREFILL, FMLA_KV_BF16, 8, 1, 576, 512, 0, "d_qk: 576; allowed in fused_prefill: 512"},
        {FMLA_OP_FUSED_DECODE, FMLA_KV_V32, 8, 1, 0, 0, 0, "kv: format v32 has d_qk 576"},
        {FMLA_OP_FUSED_DECODE, FMLA_KV_V4, 8, 1, 0, 0, 1, ""},
        {FMLA_OP_MHA_FORWARD, 0, 32, 4, 192, 128, 1, ""},
        {FMLA_OP_MHA_FORWARD, FMLA_KV_BF16, 32, 4, 192, 128, 0, "kv: format is 1; allowed: none in this operation"},
        {FMLA_OP_MHA_BACKWARD, 0, 32, 4, 257, 128, 0, "d_qk: 257; allowed in mha_backward: 1..256"},
        {FMLA_OP_QUANTIZE, FMLA_KV_V41_FP4, 0, 1, 512, 0, 1, ""},
        {FMLA_OP_QUANTIZE, FMLA_KV_V41_FP4, 0, 1, 576, 0, 0, "kv: format v41-fp4 has d_qk 512"},
        {FMLA_OP_MERGE, 0, 0, 0, 0, 0, 1, ""},
        {FMLA_OP_COUNT, 0, 0, 0, 0, 0, 0, "operation: 16; allowed: 0..15"},
        {(fmla_operation)-1, 0, 0, 0, 0, 0, 0, "operation: -1"},
        {FMLA_OP_DENSE_DECODE, FMLA_KV_BF16, -1, 0, 0, 0, 0, "h_q: -1"},
    };
    for (size_t i = 0; i < sizeof questions / sizeof questions[0]; i++) {
        q.operation = (int32_t)questions[i].operation;
        q.kv_format = questions[i].format;
        q.h_q = questions[i].h_q;
        q.h_kv = questions[i].h_kv;
        q.d_qk = questions[i].d_qk;
        q.d_v = questions[i].d_v;
        int32_t answer = fmla_supports(c->context, &q);
        if (answer != questions[i].expected ||
            (!answer && strstr(fmla_context_error(c->context), questions[i].words) == NULL)) {
            fail_msg("question %zu: %d, \"%s\"", i, answer, fmla_context_error(c->context));
        }
    }
    for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
        fmla_support_query any = FMLA_SUPPORT_QUERY_INIT;
        any.operation = op;
        assert_int_equal(fmla_supports(c->context, &any), 1);
    }
    q.struct_size = 0;
    assert_int_equal(fmla_supports(c->context, &q), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c099_every_pair_of_formats),
        cmocka_unit_test(c150_every_dtype_with_every_format),
        cmocka_unit_test(c103_dense_decode_over_every_format),
        cmocka_unit_test(widths_and_heads),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
