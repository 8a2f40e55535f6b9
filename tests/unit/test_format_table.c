/* SPDX-License-Identifier: MIT */
/*
 * The table of formats, and the check of descriptions that callers make.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"

/* A made-up record: 4-bit codes, one fp32 scale for 64, RoPE before the scales and a gap before both. */
static const fmla_format_info made_up = {.struct_size = sizeof(fmla_format_info),
                                         .format = FMLA_KV_CUSTOM,
                                         .layout = FMLA_LAYOUT_RECORD,
                                         .name = "made-up",
                                         .d_qk = 288,
                                         .quant_dims = 256,
                                         .rope_dims = 32,
                                         .element = FMLA_F4_E2M1,
                                         .group = 64,
                                         .scale = FMLA_F32,
                                         .bytes_per_token = 224,
                                         .data_row_bytes = 224,
                                         .rope_offset = 136,
                                         .scale_offset = 201};

static void rows_are_the_published_formats(void **state)
{
    (void)state;
    static const struct {
        fmla_kv_format format;
        const char *name;
        int32_t d_qk, bytes, extra_only;
    } want[] = {{FMLA_KV_BF16, "bf16", 0, 0, 0},           {FMLA_KV_F16, "f16", 0, 0, 0},
                {FMLA_KV_V32, "v32", 576, 656, 0},         {FMLA_KV_V4, "v4", 512, 584, 0},
                {FMLA_KV_V41, "v41", 512, 528, 0},         {FMLA_KV_V41_PAGE, "v41-page", 512, 528, 0},
                {FMLA_KV_V41_FP4, "v41-fp4", 512, 288, 1}, {FMLA_KV_V41_FP4_PAGE, "v41-fp4-page", 512, 288, 1}};
    assert_int_equal(sizeof want / sizeof want[0], FMLA_KV_COUNT - 1);
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        const fmla_format_info *row = fmlai_format_row(want[i].format);
        assert_non_null(row);
        assert_int_equal(row->struct_size, sizeof *row);
        assert_int_equal(row->format, want[i].format);
        assert_string_equal(row->name, want[i].name);
        assert_int_equal(row->d_qk, want[i].d_qk);
        assert_int_equal(row->extra_only, want[i].extra_only);
        int64_t bytes = want[i].bytes ? want[i].bytes : 1152;
        assert_int_equal(fmlai_format_token_bytes(row, 576), bytes);
    }
    assert_null(fmlai_format_row(FMLA_KV_NONE));
    assert_null(fmlai_format_row(FMLA_KV_COUNT));
    assert_null(fmlai_format_row(FMLA_KV_CUSTOM));
    assert_null(fmlai_format_row((fmla_kv_format)-1));
}

/* The bytes of a quantised row are codes, scales, RoPE part and at most a scale row's padding. */
static void quantised_rows_are_valid_and_full(void **state)
{
    (void)state;
    for (int format = FMLA_KV_V32; format < FMLA_KV_COUNT; format++) {
        const fmla_format_info *row = fmlai_format_row((fmla_kv_format)format);
        const char *why = NULL;
        assert_true(fmlai_format_valid(row, &why));
        assert_string_equal(why, "");
        int32_t codes = row->element == FMLA_F4_E2M1 ? row->quant_dims / 2 : row->quant_dims;
        int32_t scales = row->quant_dims / row->group * fmlai_scale_bytes(row);
        int32_t padding = row->format == FMLA_KV_V4 ? 1 : 0;
        assert_int_equal(codes + scales + 2 * row->rope_dims + padding, row->bytes_per_token);
    }
}

static void plain_layouts_are_no_description(void **state)
{
    (void)state;
    const char *why = NULL;
    assert_false(fmlai_format_valid(fmlai_format_row(FMLA_KV_BF16), &why));
    assert_non_null(strstr(why, "layout"));
}

static void assert_fault(fmla_format_info info, const char *word)
{
    const char *why = NULL;
    assert_false(fmlai_format_valid(&info, &why));
    if (!strstr(why, word)) {
        fail_msg("\"%s\" does not name %s", why, word);
    }
}

/* One field changed at a time: the sentence names it. */
#define FAULT(field, value, word)                                                                                      \
    do {                                                                                                               \
        fmla_format_info info = made_up;                                                                               \
        info.field = value;                                                                                            \
        assert_fault(info, word);                                                                                      \
    } while (0)

static void c101_faults_of_a_description_are_named(void **state)
{
    (void)state;
    const char *why = NULL;
    assert_true(fmlai_format_valid(&made_up, &why));
    FAULT(layout, 3, "layout");
    FAULT(layout, FMLA_LAYOUT_PLAIN, "layout");
    FAULT(element, FMLA_BF16, "element");
    FAULT(element, FMLA_F8_E8M0, "element");
    FAULT(quant_dims, 0, "quant_dims");
    FAULT(quant_dims, -256, "quant_dims");
    FAULT(quant_dims, 255, "even");
    FAULT(rope_dims, -32, "rope_dims");
    FAULT(d_qk, 289, "d_qk");
    FAULT(scale, FMLA_BF16, "scale");
    FAULT(scale, FMLA_DTYPE_NONE, "group");
    FAULT(group, 0, "group");
    FAULT(group, -64, "group");
    FAULT(group, 48, "group");
    FAULT(data_row_bytes, 223, "data_row_bytes");
    FAULT(bytes_per_token, 225, "bytes_per_token");
    FAULT(scale_row_bytes, 16, "scale_row_bytes");
    FAULT(rope_offset, 161, "rope_offset");
    FAULT(rope_offset, -1, "rope_offset");
    FAULT(rope_offset, 127, "rope_offset");
    FAULT(rope_offset, INT32_MAX, "rope_offset");
    FAULT(scale_offset, 209, "scale_offset");
    FAULT(scale_offset, -1, "scale_offset");
    FAULT(scale_offset, 127, "scale_offset");
    FAULT(scale_offset, 199, "scale_offset");
    FAULT(scale_offset, INT32_MAX, "scale_offset");
    fmla_format_info small = made_up;
    small.data_row_bytes = small.bytes_per_token = 127;
    assert_fault(small, "data_row_bytes");
    small.data_row_bytes = small.bytes_per_token = -1;
    assert_fault(small, "data_row_bytes");
}

static void c101_faults_of_a_page_description_are_named(void **state)
{
    (void)state;
    fmla_format_info page = made_up;
    page.layout = FMLA_LAYOUT_PAGE;
    page.data_row_bytes = 200;
    page.scale_row_bytes = 24;
    page.scale_offset = 8;
    const char *why = NULL;
    assert_true(fmlai_format_valid(&page, &why));
    fmla_format_info bad = page;
    bad.scale_offset = 9;
    assert_fault(bad, "scale_offset");
    bad.scale_offset = -1;
    assert_fault(bad, "scale_offset");
    bad = page;
    bad.scale_row_bytes = 23;
    assert_fault(bad, "scale_row_bytes");
    bad = page;
    bad.data_row_bytes = 225;
    bad.scale_row_bytes = -1;
    assert_fault(bad, "bytes_per_token");
    bad = page;
    bad.rope_offset = 137;
    assert_fault(bad, "rope_offset");
}

static void a_description_may_have_no_scales_and_no_rope(void **state)
{
    (void)state;
    fmla_format_info info = made_up;
    const char *why = NULL;
    info.scale = FMLA_DTYPE_NONE;
    info.group = 0;
    info.rope_dims = 0;
    info.d_qk = info.quant_dims;
    info.data_row_bytes = info.bytes_per_token = 128;
    assert_true(fmlai_format_valid(&info, &why));
    assert_int_equal(fmlai_scale_bytes(&info), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_are_the_published_formats),
        cmocka_unit_test(quantised_rows_are_valid_and_full),
        cmocka_unit_test(plain_layouts_are_no_description),
        cmocka_unit_test(c101_faults_of_a_description_are_named),
        cmocka_unit_test(c101_faults_of_a_page_description_are_named),
        cmocka_unit_test(a_description_may_have_no_scales_and_no_rope),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
