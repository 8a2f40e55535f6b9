/* SPDX-License-Identifier: MIT */
/* Every status can be had, and BUSY protects a context from itself. */
#include <stdio.h>
#include <stdlib.h>

#include "fake_plugin.h"
#include "support_calls.h"

static calls *c;

static int set_up(void **state)
{
    *state = c = calls_new(make_context(FMLA_DEVICE_CPU, 1));
    return 0;
}

static void *no_memory(void *user, size_t size)
{
    (void)user;
    (void)size;
    return NULL;
}

static void no_release(void *user, void *memory)
{
    (void)user;
    (void)memory;
}

static fmla_status create(fmla_context_config config)
{
    fmla_context *context = NULL;
    fmla_status status = fmla_context_create(&config, &context);
    assert_true((status == FMLA_OK) == (context != NULL));
    fmla_context_destroy(context);
    return status;
}

static fmla_status too_small(void)
{
    size_t need;
    calls_reset(c);
    assert_int_equal(fmla_decode_workspace_size(c->context, &c->dense, &need), FMLA_OK);
    assert_true(need > 1);
    c->dense.workspace = calls_input(c, 64);
    c->dense.workspace_size = 1;
    fmla_status status = fmla_decode(c->context, &c->dense, NULL);
    char words[64];
    snprintf(words, sizeof words, "workspace_size: 1; allowed: at least %zu", need);
    assert_string_equal(fmla_context_error(c->context), words);
    assert_true(calls_outputs_untouched(c));
    return status;
}

static void promise_11_every_status_is_reachable(void **state)
{
    (void)state;
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *device;
    calls_reset(c);
    assert_int_equal(calls_run(c, FMLA_OP_DENSE_DECODE), FMLA_OK);
    c->dense.causal = 5;
    assert_int_equal(calls_run(c, FMLA_OP_DENSE_DECODE), FMLA_ERROR_INVALID_ARGUMENT);
    calls_reset(c);
    c->dense.abs_out = c->dense.out;
    assert_int_equal(calls_run(c, FMLA_OP_DENSE_DECODE), FMLA_ERROR_UNSUPPORTED);
    assert_int_equal(too_small(), FMLA_ERROR_WORKSPACE_TOO_SMALL);

    config.device = FMLA_DEVICE_CPU;
    config.alloc = no_memory;
    config.release = no_release;
    assert_int_equal(create(config), FMLA_ERROR_OUT_OF_MEMORY);
    config = (fmla_context_config)FMLA_CONTEXT_CONFIG_INIT;
    config.device = FMLA_DEVICE_CPU;
    config.device_index = 1;
    assert_int_equal(create(config), FMLA_ERROR_NO_DEVICE);

    config.device = FMLA_DEVICE_CUDA;
    assert_int_equal(setenv("FLASHMLA_CUDA_PLUGIN", "/nowhere/libflashmla_cuda.so", 1), 0);
    assert_int_equal(create(config), FMLA_ERROR_NO_BACKEND);
    assert_non_null(strstr(fmla_last_create_error(), "libflashmla_cuda.so cannot be loaded: /nowhere/"));
    assert_int_equal(setenv("FLASHMLA_CUDA_PLUGIN", FAKE_PLUGIN, 1), 0);
    assert_int_equal(create(config), FMLA_ERROR_UNSUPPORTED_DEVICE);

    config.device_index = 0;
    assert_int_equal(fmla_context_create(&config, &device), FMLA_OK);
    calls_reset(c);
    assert_int_equal(fmla_decode(device, &c->dense, FAKE_BAD_STREAM), FMLA_ERROR_DEVICE);
    assert_string_equal(fmla_context_error(device), "launch failed");
    fmla_context_destroy(device);
}

/* ---- BUSY: the caller's thread pool calls back into the context that is running it --------------------------------
 */

typedef struct reentry {
    fmla_context *context;
    calls *again;
    int32_t entered, refused;
} reentry;

static void reenter(void *pool, int64_t count, fmla_parallel_body body, void *user)
{
    reentry *r = pool;
    size_t size;
    fmla_support_query query = FMLA_SUPPORT_QUERY_INIT;
    query.operation = FMLA_OP_MERGE;
    r->entered++;
    r->refused += fmla_merge(r->context, &r->again->merge, NULL) == FMLA_ERROR_BUSY;
    r->refused += fmla_decode(r->context, &r->again->dense, NULL) == FMLA_ERROR_BUSY;
    r->refused += fmla_decode_workspace_size(r->context, &r->again->dense, &size) == FMLA_ERROR_BUSY;
    r->refused += fmla_context_reserve(r->context, 100000000) == FMLA_ERROR_BUSY;
    r->refused += fmla_supports(r->context, &query) == 1; /* a question about the table may be asked */
    for (int64_t i = 0; i < count; i++) {
        body(user, i);
    }
}

static void promise_10_a_second_call_in_a_context_is_busy(void **state)
{
    (void)state;
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    reentry r = {.again = c};
    calls_reset(c);
    config.device = FMLA_DEVICE_CPU;
    config.threads = 2;
    config.parallel_for = reenter;
    config.parallel_for_pool = &r;
    assert_int_equal(fmla_context_create(&config, &r.context), FMLA_OK);
    assert_int_equal(fmla_decode(r.context, &c->dense, NULL), FMLA_OK);
    assert_true(r.entered > 0);
    assert_int_equal(r.refused, 5 * r.entered);
    assert_true(calls_guards_intact(c));
    /* Refused calls left nothing behind: the next is served. */
    assert_int_equal(fmla_merge(r.context, &c->merge, NULL), FMLA_OK);
    fmla_context_destroy(r.context);
}

static void names_are_total(void **state)
{
    (void)state;
    for (int32_t i = -3; i < 300; i++) {
        assert_non_null(fmla_status_string((fmla_status)i));
        assert_non_null(fmla_dtype_name((fmla_dtype)i));
        assert_non_null(fmla_isa_name((fmla_isa)i));
        assert_non_null(fmla_device_name((fmla_device)i));
        assert_non_null(fmla_operation_name((fmla_operation)i));
    }
    static const int32_t statuses[] = {0, 1, 2, 3, 4, 10, 11, 12, 13, 14};
    for (size_t i = 0; i < sizeof statuses / sizeof statuses[0]; i++) {
        assert_string_not_equal(fmla_status_string((fmla_status)statuses[i]), "unknown");
    }
    for (int32_t i = 0; i < FMLA_OP_COUNT; i++) {
        assert_string_not_equal(fmla_operation_name((fmla_operation)i), "unknown");
    }
    for (int32_t i = 0; i < FMLA_ISA_COUNT; i++) {
        assert_string_not_equal(fmla_isa_name((fmla_isa)i), "unknown");
    }
    assert_string_equal(fmla_status_string((fmla_status)5), "unknown");
    assert_string_equal(fmla_dtype_name((fmla_dtype)11), "unknown");
    assert_string_equal(fmla_operation_name(FMLA_OP_COUNT), "unknown");
    assert_string_equal(fmla_isa_name(FMLA_ISA_COUNT), "unknown");
    assert_int_equal(fmla_dtype_size(FMLA_F4_E2M1), 0);
    assert_int_equal(fmla_dtype_size((fmla_dtype)99), 0);
    assert_int_equal(fmla_dtype_size(FMLA_I64), 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_11_every_status_is_reachable),
        cmocka_unit_test(promise_10_a_second_call_in_a_context_is_busy),
        cmocka_unit_test(names_are_total),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
