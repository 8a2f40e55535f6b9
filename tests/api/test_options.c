/* SPDX-License-Identifier: MIT */
/* Options reach the computation: each is switched, and the result changes as it must (promise 3: never ignored). */
#include <math.h>
#include <stdio.h>

#include "support_calls.h"

static calls *c;

static int set_up(void **state)
{
    *state = c = calls_new(make_context(FMLA_DEVICE_CPU, 1));
    return 0;
}

static void expect_ok(fmla_status status)
{
    if (status != FMLA_OK) {
        fail_msg("%d: %s", (int)status, fmla_context_error(c->context));
    }
}

static void fill(void *data, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        ((uint16_t *)data)[i] = (uint16_t)(0x3E00u + (seed >> 24) + ((seed >> 8) & 0x8000u));
    }
}

static bool near(float a, float b)
{
    return fabsf(a - b) <= 1e-5f * (1.0f + fabsf(b));
}

static void base_two_multiplies_lse_and_max_logits(void **state)
{
    (void)state;
    float lse[12], max_logits[12];
    calls_reset(c);
    fill(c->prefill.q.data, 3 * 4 * 64, 1);
    fill(c->prefill.kv.data, 7 * 64, 2);
    expect_ok(fmla_prefill(c->context, &c->prefill, NULL));
    memcpy(lse, c->prefill.lse.data, sizeof lse);
    memcpy(max_logits, c->prefill.max_logits.data, sizeof max_logits);
    c->prefill.lse_base = FMLA_LSE_BASE2;
    expect_ok(fmla_prefill(c->context, &c->prefill, NULL));
    for (int32_t i = 0; i < 8; i++) {
        assert_true(near(((float *)c->prefill.lse.data)[i], lse[i] * (float)M_LOG2E));
        assert_true(near(((float *)c->prefill.max_logits.data)[i], max_logits[i] * (float)M_LOG2E));
    }
    for (int32_t i = 8; i < 12; i++) { /* topk_length 0 */
        assert_true(((float *)c->prefill.lse.data)[i] == -INFINITY);
    }

    calls_reset(c);
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    float natural = ((float *)c->dense.lse.data)[0];
    c->dense.lse_base = FMLA_LSE_BASE2;
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    assert_true(near(((float *)c->dense.lse.data)[0], natural * (float)M_LOG2E));
}

static void default_scale_is_the_square_root(void **state)
{
    (void)state;
    unsigned char first[2 * 2 * 4 * 512 * 2];
    calls_reset(c);
    fill(c->dense.q.data, 2 * 2 * 4 * 576, 3);
    fill(c->dense.kv.data, 6 * 4 * 576, 4);
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    memcpy(first, c->dense.out.data, sizeof first);
    c->dense.softmax_scale = 1.0f / 24.0f; /* 576^-0.5 */
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    assert_memory_equal(first, c->dense.out.data, sizeof first);
    c->dense.softmax_scale = -1.0f / 24.0f;
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    assert_memory_not_equal(first, c->dense.out.data, sizeof first);
    c->dense.softmax_scale = 0.0f; /* used as it is: every token weighs the same */
    c->dense.attn_sink = (fmla_tensor){0};
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    assert_true(near(((float *)c->dense.lse.data)[0], logf(5.0f)));
    assert_true(near(((float *)c->dense.lse.data)[15], logf(12.0f)));
}

static void run_fused(unsigned char *codes)
{
    expect_ok(fmla_fused_prefill(c->context, &c->fused_prefill, NULL));
    memcpy(codes, c->fused_prefill.fused.out_fp8.data, 3 * 8 * 512);
}

static void start_fused(void)
{
    calls_reset(c);
    fill(c->fused_prefill.q.data, 3 * 8 * 512, 5);
    fill(c->fused_prefill.kv.data, 5 * 512, 6);
    float *table = c->fused_prefill.fused.cos_sin_cache.data;
    for (int32_t i = 0; i < 10 * 64; i++) {
        double angle = 0.1 * (i / 64 + 1) * (i % 32 + 1);
        table[i] = (float)(i % 64 < 32 ? cos(angle) : sin(angle));
    }
}

/* The permuted storage of q, undone by hand, is the plain layout's q. */
static void q_layout_names_the_storage(void **state)
{
    (void)state;
    static unsigned char permuted[3 * 8 * 512], plain[3 * 8 * 512];
    static uint16_t stored[3 * 8 * 512];
    start_fused();
    run_fused(permuted);
    memcpy(stored, c->fused_prefill.q.data, sizeof stored);
    for (int32_t t = 0; t < 3; t++) {
        for (int32_t h = 0; h < 8; h++) {
            for (int32_t d = 0; d < 512; d++) {
                ((uint16_t *)c->fused_prefill.q.data)[(t * 8 + h) * 512 + d] =
                    stored[t * 8 * 512 + d / 16 * (8 * 16) + h * 16 + d % 16];
            }
        }
    }
    run_fused(plain);
    assert_memory_not_equal(permuted, plain, sizeof plain);
    c->fused_prefill.fused.q_layout = FMLA_Q_PLAIN;
    run_fused(plain);
    assert_memory_equal(permuted, plain, sizeof plain);
}

/* C141: the style of RoPE is explicit; with angles zero there is no difference, otherwise there is. */
static void c141_rope_style_is_explicit(void **state)
{
    (void)state;
    static unsigned char interleaved[3 * 8 * 512], neox[3 * 8 * 512];
    for (int32_t identity = 0; identity < 2; identity++) {
        start_fused();
        for (int32_t i = 0; identity && i < 10 * 64; i++) {
            ((float *)c->fused_prefill.fused.cos_sin_cache.data)[i] = i % 64 < 32 ? 1.0f : 0.0f;
        }
        run_fused(interleaved);
        c->fused_prefill.fused.rope_style = FMLA_ROPE_NEOX;
        run_fused(neox);
        assert_int_equal(memcmp(interleaved, neox, sizeof neox) == 0, identity);
    }
}

static void norm_and_its_epsilon_count(void **state)
{
    (void)state;
    static unsigned char with[3 * 8 * 512], without[3 * 8 * 512];
    start_fused();
    run_fused(with);
    float lse = ((float *)c->fused_prefill.fused.lse.data)[0];
    c->fused_prefill.fused.rms_norm_eps = 10.0f;
    run_fused(without);
    assert_true(((float *)c->fused_prefill.fused.lse.data)[0] != lse);
    c->fused_prefill.fused.rms_norm_eps = 1e-4f;
    c->fused_prefill.fused.q_norm = 0;
    run_fused(without);
    assert_memory_not_equal(with, without, sizeof with);
}

/* The outer scale is divided out by the writer and multiplied in by the reader. */
static void c102_outer_scale_in_writer_and_reader(void **state)
{
    (void)state;
    float row[576];
    calls_reset(c);
    c->dequantize.src.data = c->quantize.dst.data;
    fill(c->quantize.src.data, 3 * 576, 7);
    expect_ok(fmla_quantize(c->context, &c->quantize, NULL));
    expect_ok(fmla_dequantize(c->context, &c->dequantize, NULL));
    memcpy(row, c->dequantize.dst.data, sizeof row);
    c->dequantize.src.outer_scale = 4.0;
    expect_ok(fmla_dequantize(c->context, &c->dequantize, NULL));
    for (int32_t i = 0; i < 512; i++) {
        assert_true(((float *)c->dequantize.dst.data)[i] == 4.0f * row[i]);
    }
    c->quantize.dst.outer_scale = 4.0;
    expect_ok(fmla_quantize(c->context, &c->quantize, NULL));
    expect_ok(fmla_dequantize(c->context, &c->dequantize, NULL));
    for (int32_t i = 0; i < 512; i++) {
        assert_true(((float *)c->dequantize.dst.data)[i] == row[i]); /* scales are powers of two: nothing is lost */
    }
}

/* The quantiser of 2025 stores amax / 448 as it is, the later one a power of two. */
static void quantizer_is_chosen_by_the_caller(void **state)
{
    (void)state;
    calls_reset(c);
    memset(c->quantize.src.data, 0, 3 * 576 * 2);
    for (int32_t i = 0; i < 512; i++) {
        ((uint16_t *)c->quantize.src.data)[i] = 0x4040; /* 3 */
    }
    const unsigned char *record = (const unsigned char *)c->quantize.dst.data + 6 * 656;
    float scale;
    expect_ok(fmla_quantize(c->context, &c->quantize, NULL));
    memcpy(&scale, record + 512, sizeof scale);
    assert_true(scale == 0.0078125f && record[0] == 0x7C); /* 2^-7, 384 */
    c->quantize.quantizer = FMLA_QUANTIZER_V32_2025;
    expect_ok(fmla_quantize(c->context, &c->quantize, NULL));
    memcpy(&scale, record + 512, sizeof scale);
    assert_true(scale == 219.0f / 32768.0f && record[0] == 0x7E); /* bf16(3 / 448), 448 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(base_two_multiplies_lse_and_max_logits),
        cmocka_unit_test(default_scale_is_the_square_root),
        cmocka_unit_test(q_layout_names_the_storage),
        cmocka_unit_test(c141_rope_style_is_explicit),
        cmocka_unit_test(norm_and_its_epsilon_count),
        cmocka_unit_test(c102_outer_scale_in_writer_and_reader),
        cmocka_unit_test(quantizer_is_chosen_by_the_caller),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
