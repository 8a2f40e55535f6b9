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

static calls *new_calls(void)
{
    calls *c = aligned_alloc(64, (sizeof *c + 63) / 64 * 64);
    assert_non_null(c);
    memset(c, 0, sizeof *c);
    return c;
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
    calls *c = new_calls();
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
    calls *c = new_calls();
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
    calls *c = new_calls();
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

/* C132: sizes depend on shapes alone (data may be NULL) and never shrink when a shape grows. */
static void c132_size_is_exact_and_monotone(void **state)
{
    (void)state;
    calls *c = new_calls();
    size_t last = 0, size, bare;
    c->context = make_context(FMLA_DEVICE_CPU, 2);
    calls_reset(c);
    for (int64_t heads = 1; heads <= 300; heads += heads < 20 ? 1 : 40) {
        c->prefill.q = fmla_tensor_3d(NULL, FMLA_BF16, 3, heads, 64);
        c->prefill.out = fmla_tensor_3d(NULL, FMLA_BF16, 3, heads, 32);
        c->prefill.lse = (fmla_tensor){0};
        c->prefill.max_logits = (fmla_tensor){0};
        c->prefill.attn_sink = (fmla_tensor){0};
        assert_int_equal(fmla_prefill_workspace_size(c->context, &c->prefill, &size), FMLA_OK);
        assert_true(size >= last);
        last = size;
    }
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
        cmocka_unit_test(promise_11_any_allocation_may_fail), cmocka_unit_test(steady_state_allocates_nothing),
        cmocka_unit_test(caller_workspace_of_exact_size),     cmocka_unit_test(c132_size_is_exact_and_monotone),
        cmocka_unit_test(reserve_takes_the_memory_once),      cmocka_unit_test(misaligned_allocator_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
