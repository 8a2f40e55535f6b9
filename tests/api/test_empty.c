/* SPDX-License-Identifier: MIT */
/* Empty sets and zero-size calls: they succeed, and every output that exists is defined. On the CPU and the oracle. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "support_calls.h"

static calls *c;

static int set_up(void **state)
{
    (void)state;
    c = calls_new(NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    free(c);
    return 0;
}

static void on_every_host_device(void (*body)(void))
{
    static const fmla_device devices[] = {FMLA_DEVICE_CPU, FMLA_DEVICE_ORACLE};
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        c->context = make_context(devices[i], 0);
        body();
        fmla_context_destroy(c->context);
    }
}

static void expect_ok(fmla_status status)
{
    if (status != FMLA_OK) {
        fail_msg("%s: %d, %s", fmla_device_name(fmla_context_device(c->context)), (int)status,
                 fmla_context_error(c->context));
    }
}

/* The first `rank` sizes of a tensor as given; its data gone. */
static void resize(fmla_tensor *t, int32_t dim, int64_t n)
{
    if (t->rank != 0) {
        t->shape[dim] = n;
        t->data = NULL;
    }
}

static bool all_bytes(const void *data, size_t size, unsigned char byte)
{
    for (size_t i = 0; i < size; i++) {
        if (((const unsigned char *)data)[i] != byte) {
            return false;
        }
    }
    return true;
}

static bool all_floats(const fmla_tensor *t, size_t count, float value)
{
    for (size_t i = 0; i < count; i++) {
        if (((const float *)t->data)[i] != value) {
            return false;
        }
    }
    return true;
}

/* ---- no rows --------------------------------------------------------------------------------------------------- */

static void decode_without_requests(void)
{
    calls_reset(c);
    fmla_tensor *tensors[] = {&c->dense.q,   &c->dense.block_table, &c->dense.cache_seqlens,
                              &c->dense.out, &c->dense.lse,         &c->dense.max_logits};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        resize(tensors[i], 0, 0);
    }
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    resize(&c->dense.block_table, 1, 0);
    c->dense.kv.num_pages = 0;
    c->dense.kv.data = NULL;
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    size_t size = 1;
    expect_ok(fmla_decode_workspace_size(c->context, &c->dense, &size));
    assert_int_equal(size, 0);

    fmla_tensor *sparse[] = {&c->sparse.q,           &c->sparse.indices,           &c->sparse.extra_indices,
                             &c->sparse.topk_length, &c->sparse.extra_topk_length, &c->sparse.out,
                             &c->sparse.lse,         &c->sparse.max_logits};
    for (size_t i = 0; i < sizeof sparse / sizeof sparse[0]; i++) {
        resize(sparse[i], 0, 0);
    }
    expect_ok(fmla_decode(c->context, &c->sparse, NULL));
    assert_true(calls_outputs_untouched(c));
}

static void decode_without_tokens(void)
{
    static const int32_t cu[3] = {0, 0, 0};
    calls_reset(c);
    resize(&c->dense.q, 1, 0);
    resize(&c->dense.out, 1, 0);
    resize(&c->dense.lse, 2, 0);
    resize(&c->dense.max_logits, 2, 0);
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    c->dense.q = fmla_tensor_3d(NULL, FMLA_BF16, 0, 4, 576);
    c->dense.out = fmla_tensor_3d(NULL, FMLA_BF16, 0, 4, 512);
    c->dense.lse = fmla_tensor_2d(NULL, FMLA_F32, 4, 0);
    c->dense.max_logits = c->dense.lse;
    c->dense.cu_seqlens_q = fmla_tensor_1d(cu, FMLA_I32, 3);
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    assert_true(calls_outputs_untouched(c));
}

/* C009, C010: the last chunk of a chunked prefill may be empty. */
static void prefill_without_tokens(void)
{
    calls_reset(c);
    fmla_tensor *tensors[] = {&c->prefill.q,   &c->prefill.indices, &c->prefill.topk_length,
                              &c->prefill.out, &c->prefill.lse,     &c->prefill.max_logits};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++) {
        resize(tensors[i], 0, 0);
    }
    expect_ok(fmla_prefill(c->context, &c->prefill, NULL));
    fmla_fused_params *f = &c->fused_prefill.fused, *g = &c->fused_decode.fused;
    fmla_tensor *fused[] = {&c->fused_prefill.q,
                            &c->fused_prefill.indices,
                            &c->fused_prefill.topk_length,
                            &f->token_positions,
                            &f->out_fp8,
                            &f->out_scale,
                            &f->lse,
                            &f->max_logits,
                            &c->fused_decode.q,
                            &c->fused_decode.indices,
                            &c->fused_decode.topk_length,
                            &g->token_positions,
                            &g->out_fp8,
                            &g->out_scale,
                            &g->lse,
                            &g->max_logits};
    for (size_t i = 0; i < sizeof fused / sizeof fused[0]; i++) {
        resize(fused[i], 0, 0);
    }
    expect_ok(fmla_fused_prefill(c->context, &c->fused_prefill, NULL));
    expect_ok(fmla_fused_decode(c->context, &c->fused_decode, NULL));
    assert_true(calls_outputs_untouched(c));
}

static void small_operations_without_rows(void)
{
    calls_reset(c);
    resize(&c->quantize.src, 0, 0);
    resize(&c->quantize.slots, 0, 0);
    expect_ok(fmla_quantize(c->context, &c->quantize, NULL));
    resize(&c->dequantize.dst, 0, 0);
    resize(&c->dequantize.slots, 0, 0);
    expect_ok(fmla_dequantize(c->context, &c->dequantize, NULL));
    resize(&c->convert.src_slots, 0, 0);
    resize(&c->convert.dst_slots, 0, 0);
    expect_ok(fmla_convert(c->context, &c->convert, NULL));
    c->convert.src_slots = c->convert.dst_slots = (fmla_tensor){0};
    c->convert.src.num_pages = 0;
    c->convert.src.data = NULL;
    expect_ok(fmla_convert(c->context, &c->convert, NULL));
    resize(&c->indices_convert.positions, 2, 0);
    resize(&c->indices_convert.indices, 2, 0);
    expect_ok(fmla_indices_convert(c->context, &c->indices_convert, NULL));
    resize(&c->fp8_cast.src, 0, 0);
    resize(&c->fp8_cast.codes, 0, 0);
    resize(&c->fp8_cast.scale, 0, 0);
    expect_ok(fmla_fp8_cast(c->context, &c->fp8_cast, NULL));
    for (int32_t i = 0; i < 2; i++) {
        resize(&c->merge_outs[i], 0, 0);
        resize(&c->merge_lses[i], 0, 0);
    }
    resize(&c->merge.out, 0, 0);
    resize(&c->merge.lse, 0, 0);
    expect_ok(fmla_merge(c->context, &c->merge, NULL));
    fmla_tensor *wv[] = {&c->permute_wv.weight, &c->permute_wv.scale, &c->permute_wv.out_weight,
                         &c->permute_wv.out_scale};
    for (size_t i = 0; i < 4; i++) {
        resize(wv[i], 0, 0);
    }
    expect_ok(fmla_permute_wv(c->context, &c->permute_wv, NULL));
    assert_true(calls_outputs_untouched(c));
}

static void promise_2_calls_without_rows_succeed(void **state)
{
    (void)state;
    on_every_host_device(decode_without_requests);
    on_every_host_device(decode_without_tokens);
    on_every_host_device(prefill_without_tokens);
    on_every_host_device(small_operations_without_rows);
}

/* ---- rows with nothing to attend --------------------------------------------------------------------------------- */

static void expect_lonely(const fmla_tensor *out, size_t out_bytes, const fmla_tensor *lse, size_t rows, float empty)
{
    assert_true(all_bytes(out->data, out_bytes, 0));
    assert_true(all_floats(lse, rows, empty));
    assert_true(calls_guards_intact(c));
}

static void decode_of_nothing(void)
{
    static const int32_t zero[2] = {0, 0};
    calls_reset(c);
    c->dense.cache_seqlens = fmla_tensor_1d(zero, FMLA_I32, 2);
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    expect_lonely(&c->dense.out, 2 * 2 * 4 * 512 * 2, &c->dense.lse, 16, -INFINITY);
    assert_true(all_floats(&c->dense.max_logits, 16, -INFINITY));

    calls_reset(c); /* no pages, no memory, no table columns */
    c->dense.cache_seqlens = fmla_tensor_1d(zero, FMLA_I32, 2);
    c->dense.kv.num_pages = 0;
    c->dense.kv.data = NULL;
    resize(&c->dense.block_table, 1, 0);
    c->dense.empty_lse = FMLA_EMPTY_LSE_POS_INF;
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    expect_lonely(&c->dense.out, 2 * 2 * 4 * 512 * 2, &c->dense.lse, 16, INFINITY);

    calls_reset(c); /* no index slots at all, and none that is valid */
    c->sparse.extra_kv = (fmla_kv_cache){0};
    c->sparse.extra_indices = c->sparse.extra_topk_length = c->sparse.topk_length = (fmla_tensor){0};
    c->sparse.kv.num_pages = 0;
    c->sparse.kv.data = NULL;
    expect_ok(fmla_decode(c->context, &c->sparse, NULL));
    expect_lonely(&c->sparse.out, 2 * 2 * 4 * 512 * 2, &c->sparse.lse, 16, -INFINITY);
    calls_reset(c);
    c->sparse.extra_kv = (fmla_kv_cache){0};
    c->sparse.extra_indices = c->sparse.extra_topk_length = (fmla_tensor){0};
    resize(&c->sparse.indices, 2, 0);
    expect_ok(fmla_decode(c->context, &c->sparse, NULL));
    expect_lonely(&c->sparse.out, 2 * 2 * 4 * 512 * 2, &c->sparse.lse, 16, -INFINITY);
}

/* C015: only padding in the main scope, the extra scope, both: with a sink, out is 0 still. */
static void sparse_of_padding(void)
{
    static const int32_t nothing[24] = {-1, -2, INT32_MIN, 8, 9, INT32_MAX, -1, 2147480000, 100, -1, -1, 8,
                                        -1, -2, INT32_MIN, 8, 9, INT32_MAX, -1, 2147480000, 100, -1, -1, 8};
    static const float sink[4] = {0.0f, 5.0f, 1e4f, INFINITY};
    calls_reset(c);
    c->sparse.attn_sink = fmla_tensor_1d(sink, FMLA_F32, 4);
    c->sparse.indices = fmla_tensor_3d(nothing, FMLA_I32, 2, 2, 6);
    c->sparse.extra_indices = fmla_tensor_3d(nothing, FMLA_I32, 2, 2, 4);
    expect_ok(fmla_decode(c->context, &c->sparse, NULL));
    expect_lonely(&c->sparse.out, 2 * 2 * 4 * 512 * 2, &c->sparse.lse, 16, -INFINITY);
}

static void prefill_of_nothing(void)
{
    calls_reset(c);
    resize(&c->prefill.kv, 0, 0);
    expect_ok(fmla_prefill(c->context, &c->prefill, NULL));
    expect_lonely(&c->prefill.out, 3 * 4 * 32 * 2, &c->prefill.lse, 12, -INFINITY);
    resize(&c->fused_prefill.kv, 0, 0);
    expect_ok(fmla_fused_prefill(c->context, &c->fused_prefill, NULL));
    expect_lonely(&c->fused_prefill.fused.out_fp8, 3 * 8 * 512, &c->fused_prefill.fused.lse, 24, -INFINITY);
    const unsigned char *scale = c->fused_prefill.fused.out_scale.data; /* words of [2][16][4 tokens] */
    for (size_t word = 0; word < 2 * 16 * 4; word++) {
        unsigned char byte = word % 4 == 3 ? 0 : 0x69; /* C143: the padding token's words are zero */
        assert_true(all_bytes(scale + 4 * word, 4, byte));
    }
    c->fused_decode.kv.num_pages = 0;
    c->fused_decode.kv.data = NULL;
    expect_ok(fmla_fused_decode(c->context, &c->fused_decode, NULL));
    expect_lonely(&c->fused_decode.fused.out_fp8, 3 * 8 * 512, &c->fused_decode.fused.lse, 24, -INFINITY);
}

/* No keys: out 0, lse -inf, dq 0. No queries: dk and dv are there, and 0. */
static void mha_of_nothing(void)
{
    static const int32_t zero[3] = {0, 0, 0};
    calls_reset(c);
    resize(&c->forward.k, 0, 0);
    resize(&c->forward.v, 0, 0);
    c->forward.k.stride[0] = INT64_MIN; /* anything is legal where nobody takes a step */
    c->forward.v.stride[1] = INT64_MAX;
    c->forward.cu_seqlens_kv = fmla_tensor_1d(zero, FMLA_I32, 3);
    expect_ok(fmla_mha_forward(c->context, &c->forward, NULL));
    expect_lonely(&c->forward.out, 5 * 4 * 16 * 2, &c->forward.lse, 20, -INFINITY);

    fmla_mha_backward_args *b = &c->backward;
    b->k = b->v = c->forward.k;
    b->v.shape[2] = 16;
    b->cu_seqlens_kv = c->forward.cu_seqlens_kv;
    resize(&b->dk, 0, 0);
    resize(&b->dv, 0, 0);
    for (size_t i = 0; i < 20; i++) {
        ((float *)b->lse.data)[i] = i % 2 ? INFINITY : -INFINITY;
    }
    expect_ok(fmla_mha_backward(c->context, b, NULL));
    assert_true(all_bytes(b->dq.data, 5 * 4 * 24 * 2, 0));
    assert_true(calls_guards_intact(c));

    calls_reset(c);
    fmla_tensor *queries[] = {&b->q, &b->out, &b->lse, &b->dout, &b->dq};
    for (size_t i = 0; i < sizeof queries / sizeof queries[0]; i++) {
        resize(queries[i], 0, 0);
    }
    b->cu_seqlens_q = fmla_tensor_1d(zero, FMLA_I32, 3);
    expect_ok(fmla_mha_backward(c->context, b, NULL));
    assert_true(all_bytes(b->dk.data, 7 * 2 * 24 * 2, 0));
    assert_true(all_bytes(b->dv.data, 7 * 2 * 16 * 2, 0));
    assert_true(calls_guards_intact(c));

    calls_reset(c);
    fmla_tensor *all[] = {&c->forward.q, &c->forward.k, &c->forward.v, &c->forward.out, &c->forward.lse};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        resize(all[i], 0, 0);
    }
    c->forward.cu_seqlens_q = c->forward.cu_seqlens_kv = fmla_tensor_1d(zero, FMLA_I32, 1);
    expect_ok(fmla_mha_forward(c->context, &c->forward, NULL));
    assert_true(calls_outputs_untouched(c));
}

/* C019: states of either infinity are empty. */
static void merge_of_nothing(void)
{
    calls_reset(c);
    for (int32_t s = 0; s < 2; s++) {
        for (size_t i = 0; i < 6; i++) {
            ((float *)c->merge_lses[s].data)[i] = s == 0 ? INFINITY : -INFINITY;
        }
        memset(c->merge_outs[s].data, 0xFF, 3 * 2 * 8 * 4); /* NaN that may not be read */
    }
    expect_ok(fmla_merge(c->context, &c->merge, NULL));
    expect_lonely(&c->merge.out, 3 * 2 * 8 * 4, &c->merge.lse, 6, -INFINITY);
}

static void schedule_of_nothing(void)
{
    calls_reset(c);
    resize(&c->schedule.cache_seqlens, 0, 0);
    c->schedule.num_splits.shape[0] = 1;
    expect_ok(fmla_schedule(c->context, &c->schedule, NULL));
    assert_int_equal(((int32_t *)c->schedule.num_splits.data)[0], 0);
    for (int32_t part = 0; part < 4; part++) { /* an idle worker's first request is beyond the batch */
        assert_true(((int32_t *)c->schedule.metadata.data)[part * 8] >= 0);
    }
    assert_true(calls_guards_intact(c));
}

static void promise_2_rows_with_nothing_to_attend(void **state)
{
    (void)state;
    on_every_host_device(decode_of_nothing);
    on_every_host_device(sparse_of_padding);
    on_every_host_device(prefill_of_nothing);
    on_every_host_device(merge_of_nothing);
}

static void promise_13_mha_of_nothing(void **state)
{
    (void)state;
    on_every_host_device(mha_of_nothing);
}

static void c021_schedule_of_nothing(void **state)
{
    (void)state;
    on_every_host_device(schedule_of_nothing);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_2_calls_without_rows_succeed),
        cmocka_unit_test(promise_2_rows_with_nothing_to_attend),
        cmocka_unit_test(promise_13_mha_of_nothing),
        cmocka_unit_test(c021_schedule_of_nothing),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
