/* SPDX-License-Identifier: MIT */
/* Host memory: every allocation may fail, nothing leaks, and a steady caller makes the library allocate nothing. */
#include <stdio.h>
#include <stdlib.h>

#include "support_calls.h"

/* An allocator that counts, and fails at the n-th request. */
typedef struct counting {
    int64_t requests, live;
    int64_t fail_at; /* -1: never */
    size_t misalign;
} counting;

static void *count_alloc(void *user, size_t size)
{
    counting *m = user;
    if (m->requests++ == m->fail_at) {
        return NULL;
    }
    m->live++;
    return (char *)aligned_alloc(64, (size + 127) / 64 * 64) + m->misalign;
}

static void count_release(void *user, void *memory)
{
    counting *m = user;
    assert_non_null(memory);
    m->live--;
    free((char *)memory - m->misalign);
}

static fmla_context_config counted(fmla_device device, counting *m)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    config.device = (int32_t)device;
    config.threads = device == FMLA_DEVICE_CPU ? 3 : 0;
    config.alloc = count_alloc;
    config.release = count_release;
    config.alloc_user = m;
    return config;
}

/* Makes a context while the n-th request fails, for n = 0, 1, ... until none is left to fail. */
static void fail_creation(fmla_device device)
{
    fmla_status status = FMLA_ERROR_OUT_OF_MEMORY;
    for (int64_t n = 0; status != FMLA_OK; n++) {
        counting m = {.fail_at = n};
        fmla_context *context = NULL;
        fmla_context_config config = counted(device, &m);
        status = fmla_context_create(&config, &context);
        if (status != FMLA_OK) {
            assert_int_equal(status, FMLA_ERROR_OUT_OF_MEMORY);
            assert_non_null(strstr(fmla_last_create_error(), "memory"));
            assert_null(context);
        }
        fmla_context_destroy(context);
        assert_int_equal(m.live, 0);
        assert_true(n < 100);
    }
}

/* One operation in a fresh context, while the n-th request of the call fails. */
static void fail_operation(calls *c, fmla_device device, fmla_operation operation)
{
    fmla_status status = FMLA_ERROR_OUT_OF_MEMORY;
    for (int64_t n = 0; status != FMLA_OK; n++) {
        counting m = {.fail_at = -1};
        fmla_context_config config = counted(device, &m);
        assert_int_equal(fmla_context_create(&config, &c->context), FMLA_OK);
        calls_reset(c);
        m.fail_at = m.requests + n;
        status = calls_run(c, operation);
        if (status != FMLA_OK) {
            assert_int_equal(status, FMLA_ERROR_OUT_OF_MEMORY);
            assert_non_null(strstr(fmla_context_error(c->context), "memory"));
            assert_true(calls_outputs_untouched(c));
            m.fail_at = -1;
            assert_int_equal(calls_run(c, operation), FMLA_OK); /* the failure did no harm */
        }
        assert_true(calls_guards_intact(c));
        fmla_context_destroy(c->context);
        assert_int_equal(m.live, 0);
        assert_true(n < 100);
    }
}

static void promise_11_any_allocation_may_fail(void **state)
{
    (void)state;
    static const fmla_device devices[] = {FMLA_DEVICE_CPU, FMLA_DEVICE_ORACLE};
    calls *c = calls_new(NULL);
    for (size_t d = 0; d < 2; d++) {
        fail_creation(devices[d]);
        for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
            fail_operation(c, devices[d], (fmla_operation)op);
        }
    }
    free(c);
}

static void steady_state_allocates_nothing(void **state)
{
    (void)state;
    counting m = {.fail_at = -1};
    fmla_context_config config = counted(FMLA_DEVICE_CPU, &m);
    calls *c = calls_new(NULL);
    assert_int_equal(fmla_context_create(&config, &c->context), FMLA_OK);
    int64_t after_first = 0;
    for (int32_t round = 0; round < 3; round++) {
        calls_reset(c);
        for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
            assert_int_equal(calls_run(c, (fmla_operation)op), FMLA_OK);
        }
        if (round == 0) {
            after_first = m.requests;
        }
        assert_int_equal(m.requests, after_first);
    }
    fmla_context_destroy(c->context);
    assert_int_equal(m.live, 0);
    free(c);
}

/* The caller's workspace of exactly the size asked for is enough, used instead of an own one, and not overrun. */
static void caller_workspace_of_exact_size(void **state)
{
    (void)state;
    counting m = {.fail_at = -1};
    fmla_context_config config = counted(FMLA_DEVICE_CPU, &m);
    calls *c = calls_new(NULL);
    assert_int_equal(fmla_context_create(&config, &c->context), FMLA_OK);
    int64_t before = m.requests;
    for (int32_t op = 0; op <= FMLA_OP_MHA_BACKWARD; op++) {
        size_t size;
        calls_reset(c);
        assert_int_equal(calls_measure(c, (fmla_operation)op, &size), FMLA_OK);
        unsigned char *workspace = aligned_alloc(64, (size + 64 + 63) / 64 * 64 + 64);
        assert_non_null(workspace);
        memset(workspace + size, 0xA5, 64);
        void *memory = size > 0 ? workspace : NULL;
        c->dense.workspace = c->sparse.workspace = c->prefill.workspace = c->fused_prefill.workspace = memory;
        c->fused_decode.workspace = c->forward.workspace = c->backward.workspace = memory;
        c->dense.workspace_size = c->sparse.workspace_size = c->prefill.workspace_size = size;
        c->fused_prefill.workspace_size = c->fused_decode.workspace_size = size;
        c->forward.workspace_size = c->backward.workspace_size = size;
        assert_int_equal(calls_run(c, (fmla_operation)op), FMLA_OK);
        for (int32_t i = 0; i < 64; i++) {
            assert_int_equal(workspace[size + (size_t)i], 0xA5);
        }
        free(workspace);
    }
    assert_int_equal(m.requests, before);
    fmla_context_destroy(c->context);
    free(c);
}

/* ---- C132: sizes depend on shapes alone (data may be NULL) and never shrink when a shape grows ------------------- */

typedef struct shapes {
    int64_t b, s_q, heads, width, tokens, topk;
} shapes;

static size_t dense_size(fmla_context *context, const shapes *n)
{
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    size_t size = 0;
    a.q = fmla_tensor_4d(NULL, FMLA_BF16, n->b, n->s_q, n->heads, n->width);
    a.kv = (fmla_kv_cache){.format = FMLA_KV_BF16, .num_pages = n->tokens, .page_size = 16};
    a.block_table = fmla_tensor_2d(NULL, FMLA_I32, n->b, n->tokens);
    a.cache_seqlens = fmla_tensor_1d(NULL, FMLA_I32, n->b);
    a.out = fmla_tensor_4d(NULL, FMLA_BF16, n->b, n->s_q, n->heads, n->width);
    assert_int_equal(fmla_decode_workspace_size(context, &a, &size), FMLA_OK);
    return size;
}

static size_t sparse_size(fmla_context *context, const shapes *n)
{
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    size_t size = 0;
    a.q = fmla_tensor_4d(NULL, FMLA_BF16, n->b, n->s_q, n->heads, 512);
    a.kv = (fmla_kv_cache){.format = FMLA_KV_V41, .num_pages = n->tokens, .page_size = 16};
    a.indices = fmla_tensor_3d(NULL, FMLA_I32, n->b, n->s_q, n->topk);
    a.out = fmla_tensor_4d(NULL, FMLA_BF16, n->b, n->s_q, n->heads, 512);
    assert_int_equal(fmla_decode_workspace_size(context, &a, &size), FMLA_OK);
    return size;
}

static size_t prefill_size(fmla_context *context, const shapes *n)
{
    fmla_prefill_args a = FMLA_PREFILL_ARGS_INIT;
    size_t size = 0;
    a.q = fmla_tensor_3d(NULL, FMLA_F16, n->s_q, n->heads, n->width);
    a.kv = fmla_tensor_3d(NULL, FMLA_F16, n->tokens, 1, n->width);
    a.indices = fmla_tensor_2d(NULL, FMLA_I32, n->s_q, n->topk);
    a.out = fmla_tensor_3d(NULL, FMLA_F16, n->s_q, n->heads, n->width);
    assert_int_equal(fmla_prefill_workspace_size(context, &a, &size), FMLA_OK);
    return size;
}

static size_t forward_size(fmla_context *context, const shapes *n)
{
    fmla_mha_forward_args a = FMLA_MHA_FORWARD_ARGS_INIT;
    size_t size = 0;
    a.q = fmla_tensor_3d(NULL, FMLA_BF16, n->b * n->s_q, n->heads, n->width);
    a.k = a.v = fmla_tensor_3d(NULL, FMLA_BF16, n->tokens, 1, n->width);
    a.out = a.q;
    assert_int_equal(fmla_mha_forward_workspace_size(context, &a, &size), FMLA_OK);
    return size;
}

static size_t backward_size(fmla_context *context, const shapes *n)
{
    fmla_mha_backward_args a = FMLA_MHA_BACKWARD_ARGS_INIT;
    size_t size = 0;
    a.q = a.out = a.dout = a.dq = fmla_tensor_3d(NULL, FMLA_BF16, n->b * n->s_q, n->heads, n->width);
    a.k = a.v = a.dk = a.dv = fmla_tensor_3d(NULL, FMLA_BF16, n->tokens, 1, n->width);
    a.lse = fmla_tensor_2d(NULL, FMLA_F32, n->b * n->s_q, n->heads);
    assert_int_equal(fmla_mha_backward_workspace_size(context, &a, &size), FMLA_OK);
    return size;
}

/* One dimension grows from 1 through numbers around powers of two while the others stay. */
static void grow(fmla_context *context, size_t (*size_of)(fmla_context *, const shapes *), size_t dimension,
                 int64_t most, shapes n)
{
    static const int64_t steps[] = {1,   2,   3,   7,   8,   9,    15,   16,   17,    31,   33,  63,
                                    64,  65,  100, 127, 128, 129,  130,  200,  255,   256,  257, 300,
                                    384, 385, 500, 513, 800, 1025, 2000, 4097, 10000, 70000};
    int64_t *growing = (int64_t *)((char *)&n + dimension);
    size_t last = 0;
    for (size_t i = 0; i < sizeof steps / sizeof steps[0] && steps[i] <= most; i++) {
        *growing = steps[i];
        size_t size = size_of(context, &n);
        if (size < last) {
            fail_msg("dimension %zu at %lld: %zu bytes after %zu", dimension / sizeof(int64_t), (long long)steps[i],
                     size, last);
        }
        last = size;
    }
}

static void c132_sizes_never_shrink_when_a_shape_grows(void **state)
{
    (void)state;
    static const shapes starts[] = {{1, 1, 1, 64, 1, 1}, {2, 2, 16, 128, 40, 128}, {5, 3, 128, 192, 600, 2048}};
    for (int32_t threads = 1; threads <= 4; threads += 3) {
        fmla_context *context = make_context(FMLA_DEVICE_CPU, threads);
        for (size_t i = 0; i < sizeof starts / sizeof starts[0]; i++) {
            for (size_t d = 0; d < sizeof(shapes); d += sizeof(int64_t)) {
                int64_t most = d == offsetof(shapes, width) ? 1000 : 70000;
                grow(context, dense_size, d, most, starts[i]);
                grow(context, sparse_size, d, most, starts[i]);
                grow(context, prefill_size, d, most, starts[i]);
                grow(context, forward_size, d, most > 1000 ? most : 256, starts[i]);
                grow(context, backward_size, d, most > 1000 ? most : 256, starts[i]);
            }
        }
        fmla_context_destroy(context);
    }
}

static void c132_sizes_do_not_depend_on_data(void **state)
{
    (void)state;
    calls *c = calls_new(NULL);
    size_t size, bare;
    c->context = make_context(FMLA_DEVICE_CPU, 2);
    calls_reset(c);
    assert_int_equal(fmla_decode_workspace_size(c->context, &c->dense, &size), FMLA_OK);
    c->dense.q.data = c->dense.out.data = c->dense.lse.data = c->dense.max_logits.data = c->dense.kv.data = NULL;
    c->dense.block_table.data = c->dense.cache_seqlens.data = c->dense.attn_sink.data = NULL;
    assert_int_equal(fmla_decode_workspace_size(c->context, &c->dense, &bare), FMLA_OK);
    assert_int_equal(size, bare);
    assert_true(calls_outputs_untouched(c));
    fmla_context_destroy(c->context);
    free(c);
}

static void reserve_takes_the_memory_once(void **state)
{
    (void)state;
    counting m = {.fail_at = -1};
    fmla_context_config config = counted(FMLA_DEVICE_CPU, &m);
    fmla_context *context;
    assert_int_equal(fmla_context_create(&config, &context), FMLA_OK);
    int64_t before = m.requests;
    assert_int_equal(fmla_context_reserve(context, 1 << 20), FMLA_OK);
    assert_int_equal(m.requests, before + 1);
    assert_int_equal(fmla_context_reserve(context, 1 << 20), FMLA_OK);
    assert_int_equal(fmla_context_reserve(context, 1), FMLA_OK);
    assert_int_equal(m.requests, before + 1);
    m.fail_at = m.requests;
    assert_int_equal(fmla_context_reserve(context, 1 << 21), FMLA_ERROR_OUT_OF_MEMORY);
    assert_int_equal(fmla_context_reserve(context, 1 << 20), FMLA_OK); /* still there */
    fmla_context_destroy(context);
    assert_int_equal(m.live, 0);
}

static void misaligned_allocator_is_refused(void **state)
{
    (void)state;
    counting m = {.fail_at = -1, .misalign = 16};
    fmla_context_config config = counted(FMLA_DEVICE_CPU, &m);
    fmla_context *context;
    assert_int_equal(fmla_context_create(&config, &context), FMLA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fmla_last_create_error(), "alloc: returned"));
    assert_int_equal(m.live, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_11_any_allocation_may_fail),
        cmocka_unit_test(steady_state_allocates_nothing),
        cmocka_unit_test(caller_workspace_of_exact_size),
        cmocka_unit_test(c132_sizes_never_shrink_when_a_shape_grows),
        cmocka_unit_test(c132_sizes_do_not_depend_on_data),
        cmocka_unit_test(reserve_takes_the_memory_once),
        cmocka_unit_test(misaligned_allocator_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
