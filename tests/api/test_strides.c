/* SPDX-License-Identifier: MIT */
/*
 * Strides are the caller's: every call gives the same bits when each of its tensors lies in a larger buffer, every
 * dimension over-allocated, and when pages and tokens of caches are padded. What lies between is NaN on the way in and
 * stays as it was on the way out. Lengths per request and per query token, batched and ragged, say the same.
 */
#include <stdio.h>
#include <stdlib.h>

#include "support_calls.h"

static calls *c;

static int set_up(void **state)
{
    *state = c = calls_new(make_context(FMLA_DEVICE_CPU, 2));
    return 0;
}

static void expect_ok(fmla_status status)
{
    if (status != FMLA_OK) {
        fail_msg("%d: %s", (int)status, fmla_context_error(c->context));
    }
}

/* Values that make rows differ: bf16 numbers around 1/2, from a counter. */
static void fill(const fmla_tensor *t, uint32_t seed)
{
    int64_t count = 1;
    for (int32_t i = 0; i < t->rank; i++) {
        count *= t->shape[i];
    }
    for (int64_t i = 0; i < count && t->dtype == FMLA_BF16; i++) {
        seed = seed * 1664525u + 1013904223u;
        ((uint16_t *)t->data)[i] = (uint16_t)(0x3E00u + (seed >> 24) + ((seed >> 8) & 0x8000u));
    }
}

/* ---- views in larger buffers ------------------------------------------------------------------------------------- */

typedef struct view {
    fmla_tensor *tensor;
    bool output;
    fmla_tensor plain;
    unsigned char *buffer;
    size_t size;
} view;

static size_t offset_of(const fmla_tensor *t, const int64_t *index)
{
    int64_t at = 0;
    for (int32_t i = 0; i < t->rank; i++) {
        at += index[i] * t->stride[i];
    }
    return (size_t)at * fmla_dtype_size((fmla_dtype)t->dtype);
}

static bool next_index(const fmla_tensor *t, int64_t *index)
{
    for (int32_t i = t->rank - 1; i >= 0; i--) {
        if (++index[i] < t->shape[i]) {
            return true;
        }
        index[i] = 0;
    }
    return false;
}

static void copy_elements(const fmla_tensor *dst, const fmla_tensor *src)
{
    int64_t index[FMLA_MAX_RANK] = {0};
    do {
        memcpy((unsigned char *)dst->data + offset_of(dst, index), (unsigned char *)src->data + offset_of(src, index),
               fmla_dtype_size((fmla_dtype)src->dtype));
    } while (next_index(src, index));
}

/* Lays a tensor out with every dimension one larger, the last 8 larger; scalars per token also transposed. */
static void spread(view *v, bool transpose)
{
    fmla_tensor *t = v->tensor;
    v->plain = *t;
    v->buffer = NULL;
    if (t->rank == 0) {
        return;
    }
    int64_t stride = 1;
    for (int32_t i = t->rank - 1; i >= 0; i--) {
        int32_t dim = transpose ? t->rank - 1 - i : i;
        t->stride[dim] = stride;
        stride *= t->shape[dim] + (i == t->rank - 1 ? 8 : 1);
    }
    v->size = (size_t)stride * fmla_dtype_size((fmla_dtype)t->dtype);
    v->buffer = aligned_alloc(64, (v->size + 63) / 64 * 64);
    assert_non_null(v->buffer);
    memset(v->buffer, 0xFF, v->size); /* NaN, or index -1 */
    t->data = v->buffer;
    if (!v->output) {
        copy_elements(t, &v->plain);
    }
}

/* Compares an output with the plain run's and sees that nothing between its elements was written. */
static void gather(view *v, const unsigned char *expected, const unsigned char *arena)
{
    if (v->buffer == NULL) {
        return;
    }
    if (v->output) {
        fmla_tensor want = v->plain;
        want.data = (void *)(uintptr_t)(expected + ((unsigned char *)v->plain.data - arena));
        int64_t index[FMLA_MAX_RANK] = {0};
        size_t size = fmla_dtype_size((fmla_dtype)want.dtype);
        do {
            unsigned char *got = v->buffer + offset_of(v->tensor, index);
            assert_memory_equal(got, (unsigned char *)want.data + offset_of(&want, index), size);
            memset(got, 0xFF, size);
        } while (next_index(&want, index));
        for (size_t i = 0; i < v->size; i++) {
            assert_int_equal(v->buffer[i], 0xFF);
        }
    }
    *v->tensor = v->plain;
    free(v->buffer);
}

static view in(fmla_tensor *tensor)
{
    return (view){.tensor = tensor};
}

static view out(fmla_tensor *tensor)
{
    return (view){.tensor = tensor, .output = true};
}

static void run_spread(fmla_operation operation, view *views, size_t count)
{
    unsigned char *expected = malloc(sizeof c->outputs);
    assert_non_null(expected);
    for (size_t i = 0; i < count; i++) {
        if (!views[i].output) {
            fill(views[i].tensor, (uint32_t)i + 1);
        }
    }
    expect_ok(calls_run(c, operation));
    memcpy(expected, c->outputs, sizeof c->outputs);
    for (size_t i = 0; i < count; i++) {
        /* lse, max_logits: strides are free in any order */
        spread(&views[i], views[i].output && views[i].tensor->dtype == FMLA_F32 && views[i].tensor->rank < 4);
    }
    expect_ok(calls_run(c, operation));
    for (size_t i = 0; i < count; i++) {
        gather(&views[i], expected, c->outputs);
    }
    free(expected);
}

#define RUN_SPREAD(operation, ...)                                                                                     \
    do {                                                                                                               \
        view views[] = {__VA_ARGS__};                                                                                  \
        run_spread(operation, views, sizeof views / sizeof views[0]);                                                  \
    } while (0)

static void attention_honours_strides(void **state)
{
    (void)state;
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_DENSE_DECODE, in(&c->dense.q), in(&c->dense.block_table), out(&c->dense.out), out(&c->dense.lse),
               out(&c->dense.max_logits));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_SPARSE_DECODE, in(&c->sparse.q), in(&c->sparse.indices), in(&c->sparse.extra_indices),
               in(&c->sparse.topk_length), in(&c->sparse.extra_topk_length), out(&c->sparse.out), out(&c->sparse.lse),
               out(&c->sparse.max_logits));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_SPARSE_PREFILL, in(&c->prefill.q), in(&c->prefill.kv), in(&c->prefill.indices),
               in(&c->prefill.topk_length), out(&c->prefill.out), out(&c->prefill.lse), out(&c->prefill.max_logits));
    calls_reset(c);
    fmla_fused_params *f = &c->fused_prefill.fused;
    RUN_SPREAD(FMLA_OP_FUSED_PREFILL, in(&c->fused_prefill.kv), in(&c->fused_prefill.indices),
               in(&c->fused_prefill.topk_length), in(&f->token_positions), in(&f->cos_sin_cache), out(&f->lse),
               out(&f->max_logits));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_MHA_FORWARD, in(&c->forward.q), in(&c->forward.k), in(&c->forward.v), out(&c->forward.out),
               out(&c->forward.lse));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_MHA_BACKWARD, in(&c->backward.q), in(&c->backward.k), in(&c->backward.v), in(&c->backward.out),
               in(&c->backward.lse), in(&c->backward.dout), out(&c->backward.dq), out(&c->backward.dk),
               out(&c->backward.dv));
}

static void small_operations_honour_strides(void **state)
{
    (void)state;
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_QUANTIZE, in(&c->quantize.src), in(&c->quantize.slots));
    calls_reset(c);
    c->dequantize.dst.dtype = FMLA_BF16;
    RUN_SPREAD(FMLA_OP_DEQUANTIZE, in(&c->dequantize.slots), out(&c->dequantize.dst));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_CONVERT, in(&c->convert.src_slots), in(&c->convert.dst_slots));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_INDICES_CONVERT, in(&c->indices_convert.positions), in(&c->indices_convert.block_table),
               out(&c->indices_convert.indices));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_FP8_CAST, in(&c->fp8_cast.src), out(&c->fp8_cast.codes));
    calls_reset(c);
    c->merge_outs[0].dtype = c->merge_outs[1].dtype = c->merge.out.dtype = FMLA_BF16;
    RUN_SPREAD(FMLA_OP_MERGE, in(&c->merge_outs[0]), in(&c->merge_outs[1]), in(&c->merge_lses[0]),
               in(&c->merge_lses[1]), out(&c->merge.out), out(&c->merge.lse));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_PERMUTE_Q_B, in(&c->permute_q_b.weight));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_PERMUTE_WV, in(&c->permute_wv.weight));
    calls_reset(c);
    RUN_SPREAD(FMLA_OP_SCHEDULE, out(&c->schedule.metadata));
}

/* ---- caches ------------------------------------------------------------------------------------------------------ */

/* Plain caches: pages, tokens and heads padded; and heads before tokens. */
static void promise_6_page_token_and_head_strides(void **state)
{
    (void)state;
    static const int64_t token_and_head[][2] = {{2 * 1160, 1160}, {1200, 4 * 1200}, {5000, 1152}};
    const size_t out_bytes = 2 * 2 * 4 * 512 * 2;
    calls_reset(c);
    fmla_tensor values = fmla_tensor_4d(calls_input(c, 6 * 4 * 2 * 1152), FMLA_BF16, 6, 4, 2, 576);
    fill(&values, 5);
    fill(&c->dense.q, 6);
    c->dense.kv.data = values.data;
    c->dense.kv.num_heads = 2;
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    unsigned char *expected = malloc(out_bytes);
    assert_non_null(expected);
    memcpy(expected, c->dense.out.data, out_bytes);
    for (size_t i = 0; i < sizeof token_and_head / sizeof token_and_head[0]; i++) {
        const int64_t token = token_and_head[i][0], head = token_and_head[i][1], page = 4 * token + 2 * head + 6;
        unsigned char *padded = malloc((size_t)(6 * page));
        assert_non_null(padded);
        memset(padded, 0xFF, (size_t)(6 * page));
        for (int64_t n = 0; n < 6 * 4 * 2; n++) {
            memcpy(padded + n / 8 * page + n / 2 % 4 * token + n % 2 * head, (unsigned char *)values.data + n * 1152,
                   1152);
        }
        c->dense.kv.data = padded;
        c->dense.kv.page_stride_bytes = page;
        c->dense.kv.token_stride_bytes = token;
        c->dense.kv.head_stride_bytes = head;
        memset(c->dense.out.data, 0, out_bytes);
        expect_ok(fmla_decode(c->context, &c->dense, NULL));
        assert_memory_equal(expected, c->dense.out.data, out_bytes);
        free(padded);
    }
    free(expected);
}

/* Quantised caches: any page stride, odd addresses included. */
static void promise_6_quantised_pages_at_odd_addresses(void **state)
{
    (void)state;
    const size_t out_bytes = 2 * 2 * 4 * 512 * 2;
    calls_reset(c);
    unsigned char *expected = malloc(out_bytes), *odd = malloc(2 * (4 * 528 + 13) + 3);
    assert_non_null(expected);
    assert_non_null(odd);
    for (int32_t i = 0; i < 8 * 528; i++) {
        ((unsigned char *)c->sparse.kv.data)[i] = (unsigned char)(i % 528 < 512 ? 0x20 + i % 0x30 : 0x7D + i % 3);
    }
    expect_ok(fmla_decode(c->context, &c->sparse, NULL));
    memcpy(expected, c->sparse.out.data, out_bytes);
    memset(odd, 0xFF, 2 * (4 * 528 + 13) + 3);
    memcpy(odd + 3, c->sparse.kv.data, 4 * 528);
    memcpy(odd + 3 + 4 * 528 + 13, (unsigned char *)c->sparse.kv.data + 4 * 528, 4 * 528);
    c->sparse.kv.data = odd + 3;
    c->sparse.kv.page_stride_bytes = 4 * 528 + 13;
    memset(c->sparse.out.data, 0, out_bytes);
    expect_ok(fmla_decode(c->context, &c->sparse, NULL));
    assert_memory_equal(expected, c->sparse.out.data, out_bytes);
    free(expected);
    free(odd);
}

/* ---- lengths ----------------------------------------------------------------------------------------------------- */

/* [b], [b, s_q] with a broadcast stride, and ragged [b] and [total_q] name the same lengths. */
static void lengths_per_request_and_per_token(void **state)
{
    (void)state;
    static const int32_t per_request[2] = {6, 3}, per_token[4] = {6, 6, 3, 3}, cu[3] = {0, 2, 4};
    static const int32_t extra_per_token[4] = {0, 0, 4, 4};
    const size_t out_bytes = 2 * 2 * 4 * 512 * 2;
    calls_reset(c);
    fill(&c->sparse.q, 9);
    c->sparse.lse = c->sparse.max_logits = (fmla_tensor){0};
    expect_ok(fmla_decode(c->context, &c->sparse, NULL));
    unsigned char *expected = malloc(out_bytes);
    assert_non_null(expected);
    memcpy(expected, c->sparse.out.data, out_bytes);
    for (int32_t form = 0; form < 4; form++) {
        fmla_decode_args a = c->sparse;
        if (form >= 2) { /* ragged: two requests of two tokens */
            a.cu_seqlens_q = fmla_tensor_1d(cu, FMLA_I32, 3);
            a.q = fmla_tensor_3d(a.q.data, FMLA_BF16, 4, 4, 512);
            a.out = fmla_tensor_3d(a.out.data, FMLA_BF16, 4, 4, 512);
            a.indices = fmla_tensor_2d(a.indices.data, FMLA_I32, 4, 6);
            a.extra_indices = fmla_tensor_2d(a.extra_indices.data, FMLA_I32, 4, 4);
        }
        if (form == 0) {
            a.topk_length = fmla_tensor_2d(per_request, FMLA_I32, 2, 2);
            a.topk_length.stride[0] = 1;
            a.topk_length.stride[1] = 0;
        } else if (form == 1) {
            a.topk_length = fmla_tensor_2d(per_token, FMLA_I32, 2, 2);
            a.extra_topk_length = fmla_tensor_2d(extra_per_token, FMLA_I32, 2, 2);
        } else if (form == 3) {
            a.topk_length = fmla_tensor_1d(per_token, FMLA_I32, 4);
            a.extra_topk_length = fmla_tensor_1d(extra_per_token, FMLA_I32, 4);
        }
        memset(a.out.data, 0, out_bytes);
        expect_ok(fmla_decode(c->context, &a, NULL));
        assert_memory_equal(expected, a.out.data, out_bytes);
    }
    free(expected);
}

/* kv_bound says what causal says, when it is filled so. */
static void c042_explicit_bound_equals_causal(void **state)
{
    (void)state;
    static const int32_t bound[4] = {4, 5, 11, 12};
    unsigned char expected[2 * 2 * 4 * 512 * 2];
    calls_reset(c);
    fill(&c->dense.q, 11);
    fmla_tensor values = fmla_tensor_1d(c->dense.kv.data, FMLA_BF16, 6 * 4 * 576);
    fill(&values, 12);
    c->dense.causal = 1;
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    memcpy(expected, c->dense.out.data, sizeof expected);
    c->dense.causal = 0;
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    assert_memory_not_equal(expected, c->dense.out.data, sizeof expected);
    c->dense.kv_bound = fmla_tensor_2d(bound, FMLA_I32, 2, 2);
    expect_ok(fmla_decode(c->context, &c->dense, NULL));
    assert_memory_equal(expected, c->dense.out.data, sizeof expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_honours_strides),
        cmocka_unit_test(small_operations_honour_strides),
        cmocka_unit_test(promise_6_page_token_and_head_strides),
        cmocka_unit_test(promise_6_quantised_pages_at_odd_addresses),
        cmocka_unit_test(lengths_per_request_and_per_token),
        cmocka_unit_test(c042_explicit_bound_equals_causal),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
