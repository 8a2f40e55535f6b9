/* SPDX-License-Identifier: MIT */
/* Contexts: configuration, environment, size-first structs, what a context says about itself. */
#include <stdio.h>
#include <stdlib.h>

#include "support_calls.h"

static calls *c;

static int set_up(void **state)
{
    unsetenv("FLASHMLA_ISA");
    setenv("FLASHMLA_CUDA_PLUGIN", "/nowhere/plugin.so", 1);
    *state = c = calls_new(make_context(FMLA_DEVICE_CPU, 1));
    return 0;
}

static void expect_failure(const fmla_context_config *config, fmla_status status, const char *words)
{
    fmla_context *context = c->context;
    assert_int_equal(fmla_context_create(config, &context), status);
    assert_null(context);
    if (strstr(fmla_last_create_error(), words) == NULL) {
        fail_msg("says \"%s\", expected \"%s\"", fmla_last_create_error(), words);
    }
}

static void some_parallel_for(void *pool, int64_t count, fmla_parallel_body body, void *user)
{
    (void)pool;
    for (int64_t i = count - 1; i >= 0; i--) {
        body(user, i);
    }
}

static void *some_alloc(void *user, size_t size)
{
    (void)user;
    return aligned_alloc(64, (size + 63) / 64 * 64);
}

#define EXPECT(field, value, status, words)                                                                            \
    do {                                                                                                               \
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;                                                         \
        config.device = FMLA_DEVICE_CPU;                                                                               \
        config.field = (value);                                                                                        \
        expect_failure(&config, FMLA_ERROR_##status, words);                                                           \
    } while (0)

static void wrong_configuration_is_named(void **state)
{
    (void)state;
    EXPECT(struct_size, 0, INVALID_ARGUMENT, "config.struct_size: 0");
    EXPECT(struct_size, 1 << 20, INVALID_ARGUMENT, "config.struct_size: 1048576");
    EXPECT(device, 4, INVALID_ARGUMENT, "device: 4; allowed: 0..3");
    EXPECT(device, -1, INVALID_ARGUMENT, "device: -1");
    EXPECT(device_index, 1, NO_DEVICE, "device_index: 1; allowed: 0");
    EXPECT(device_index, -1, NO_DEVICE, "device_index: -1");
    EXPECT(threads, -1, INVALID_ARGUMENT, "threads: -1");
    EXPECT(isa, 6, INVALID_ARGUMENT, "isa: 6; allowed: 0..5");
    EXPECT(spin_us, -2, INVALID_ARGUMENT, "spin_us: -2");
    EXPECT(cuda_profile_kib, 100, INVALID_ARGUMENT, "cuda_profile_kib: 100; allowed: 0, 99, 163, 227");
    EXPECT(cuda_kernels, 6, INVALID_ARGUMENT, "cuda_kernels: 6");
    EXPECT(strict, 2, INVALID_ARGUMENT, "strict: 2");
    EXPECT(parallel_for_pool, c, INVALID_ARGUMENT, "parallel_for: is NULL");
    EXPECT(alloc, some_alloc, INVALID_ARGUMENT, "release: is NULL");
    EXPECT(device, FMLA_DEVICE_CUDA, NO_BACKEND, "libflashmla_cuda.so cannot be loaded");
    assert_int_equal(fmla_context_create(NULL, NULL), FMLA_ERROR_INVALID_ARGUMENT);
}

static void environment_names_the_isa(void **state)
{
    (void)state;
    fmla_context *context;
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    config.device = FMLA_DEVICE_CPU;
    setenv("FLASHMLA_ISA", "sse9", 1);
    expect_failure(&config, FMLA_ERROR_INVALID_ARGUMENT,
                   "FLASHMLA_ISA: \"sse9\"; allowed: auto, scalar, avx2, avx512bf16, amx, neon");
    setenv("FLASHMLA_ISA", "scalar", 1);
    assert_int_equal(fmla_context_create(&config, &context), FMLA_OK);
    assert_int_equal(fmla_context_isa(context), FMLA_ISA_SCALAR);
    fmla_context_destroy(context);
    setenv("FLASHMLA_ISA", "", 1);
    assert_int_equal(fmla_context_create(&config, &context), FMLA_OK);
    fmla_isa best = fmla_context_isa(context);
    assert_true(fmla_isa_available(best));
    fmla_context_destroy(context);
    setenv("FLASHMLA_ISA", "scalar", 1); /* what the caller says comes first */
    config.isa = (int32_t)best;
    assert_int_equal(fmla_context_create(&config, &context), FMLA_OK);
    assert_int_equal(fmla_context_isa(context), best);
    fmla_context_destroy(context);
    unsetenv("FLASHMLA_ISA");
}

static void promise_12_a_missing_isa_is_refused(void **state)
{
    (void)state;
    int32_t refused = 0;
    for (int32_t isa = FMLA_ISA_SCALAR; isa < FMLA_ISA_COUNT; isa++) {
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
        fmla_context *context = NULL;
        config.device = FMLA_DEVICE_CPU;
        config.isa = isa;
        fmla_status status = fmla_context_create(&config, &context);
        assert_int_equal(status, fmla_isa_available((fmla_isa)isa) ? FMLA_OK : FMLA_ERROR_UNSUPPORTED);
        refused += status != FMLA_OK;
        if (status == FMLA_OK) {
            assert_int_equal(fmla_context_isa(context), isa);
        }
        fmla_context_destroy(context);
    }
    assert_true(refused > 0); /* no processor has both NEON and AMX */
    assert_int_equal(fmla_isa_available(FMLA_ISA_SCALAR), 1);
    assert_int_equal(fmla_isa_available(FMLA_ISA_AUTO), 0);
    assert_int_equal(fmla_isa_available(FMLA_ISA_COUNT), 0);
    assert_int_equal(fmla_isa_available((fmla_isa)-5), 0);
}

static void contexts_say_what_they_are(void **state)
{
    (void)state;
    fmla_context *context;
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    config.threads = 3;
    assert_int_equal(fmla_context_create(&config, &context), FMLA_OK); /* AUTO without a plugin: the CPU */
    assert_int_equal(fmla_context_device(context), FMLA_DEVICE_CPU);
    assert_int_equal(fmla_context_threads(context), 3);
    assert_string_equal(fmla_context_error(context), "");
    fmla_context_destroy(context);
    assert_int_equal(fmla_context_create(NULL, &context), FMLA_OK);
    assert_true(fmla_context_threads(context) >= 1);
    fmla_context_destroy(context);
    config = (fmla_context_config)FMLA_CONTEXT_CONFIG_INIT;
    config.device = FMLA_DEVICE_ORACLE;
    assert_int_equal(fmla_context_create(&config, &context), FMLA_OK);
    assert_int_equal(fmla_context_device(context), FMLA_DEVICE_ORACLE);
    assert_int_equal(fmla_context_threads(context), 1);
    fmla_context_destroy(context);
}

static void callers_thread_pool_gives_the_same_bits(void **state)
{
    (void)state;
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *own = c->context;
    config.device = FMLA_DEVICE_CPU;
    config.threads = 4;
    config.parallel_for = some_parallel_for;
    calls_reset(c);
    assert_int_equal(fmla_context_create(&config, &c->context), FMLA_OK);
    for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
        assert_int_equal(calls_run(c, (fmla_operation)op), FMLA_OK);
    }
    fmla_context_destroy(c->context);
    c->context = own;
    unsigned char *first = malloc(sizeof c->outputs);
    assert_non_null(first);
    memcpy(first, c->outputs, sizeof c->outputs);
    calls_reset(c);
    for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
        assert_int_equal(calls_run(c, (fmla_operation)op), FMLA_OK);
    }
    assert_memory_equal(first, c->outputs, sizeof c->outputs);
    free(first);
}

/* The last failure stays readable; another context's is another. */
static void errors_belong_to_their_context(void **state)
{
    (void)state;
    fmla_context *other = make_context(FMLA_DEVICE_CPU, 1);
    calls_reset(c);
    c->dense.causal = 7;
    assert_int_equal(calls_run(c, FMLA_OP_DENSE_DECODE), FMLA_ERROR_INVALID_ARGUMENT);
    assert_string_equal(fmla_context_error(c->context), "causal: 7; allowed: 0..1");
    assert_string_equal(fmla_context_error(other), "");
    fmla_context_destroy(other);
}

/* ---- size-first structs ----------------------------------------------------------------------------------------- */

static union {
    size_t size;
    unsigned char bytes[8192];
} longer;

static fmla_status decode_sized(size_t size)
{
    memcpy(longer.bytes, &c->dense, sizeof c->dense);
    longer.size = size;
    return fmla_decode(c->context, (const fmla_decode_args *)(const void *)&longer, NULL);
}

static void longer_and_shorter_callers(void **state)
{
    (void)state;
    memset(&longer, 0, sizeof longer);
    calls_reset(c);
    assert_int_equal(decode_sized(sizeof c->dense + 40), FMLA_OK); /* a newer caller that asks for nothing new */
    calls_reset(c);
    longer.bytes[sizeof c->dense + 39] = 1; /* and one that does */
    assert_int_equal(decode_sized(sizeof c->dense + 40), FMLA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fmla_context_error(c->context), "newer struct"));
    assert_true(calls_outputs_untouched(c));
    assert_int_equal(decode_sized(sizeof c->dense + 39), FMLA_OK); /* beyond its size nothing counts */
    calls_reset(c);
    c->dense.workspace_size = 77; /* an older caller did not have this member: what lies there is not looked at */
    c->dense.abs_out.rank = 4;
    assert_int_equal(decode_sized(offsetof(fmla_decode_args, abs_out)), FMLA_OK);
    calls_reset(c);
    assert_int_equal(decode_sized(offsetof(fmla_decode_args, out)), FMLA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fmla_context_error(c->context), "out: is absent"));
}

static void longer_and_shorter_answers(void **state)
{
    (void)state;
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    memset(&longer, 0xFF, sizeof longer);
    longer.size = sizeof info + 16;
    assert_int_equal(fmla_format_get(FMLA_KV_V4, (fmla_format_info *)(void *)&longer), FMLA_OK);
    assert_int_equal(longer.size, sizeof info + 16);
    for (size_t i = sizeof info; i < sizeof info + 16; i++) {
        assert_int_equal(longer.bytes[i], 0); /* what this library does not know */
    }
    assert_int_equal(longer.bytes[sizeof info + 16], 0xFF);
    memset(&longer, 0xFF, sizeof longer);
    longer.size = offsetof(fmla_format_info, d_qk);
    assert_int_equal(fmla_format_get(FMLA_KV_V4, (fmla_format_info *)(void *)&longer), FMLA_OK);
    assert_string_equal((const char *)longer.bytes + offsetof(fmla_format_info, name), "v4");
    assert_int_equal(longer.bytes[offsetof(fmla_format_info, d_qk)], 0xFF);
    assert_int_equal(fmla_format_get(FMLA_KV_NONE, &info), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_format_get(FMLA_KV_CUSTOM, &info), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_format_get(FMLA_KV_V4, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    info.struct_size = 0;
    assert_int_equal(fmla_format_get(FMLA_KV_V4, &info), FMLA_ERROR_INVALID_ARGUMENT);
}

static void formats_have_names(void **state)
{
    (void)state;
    for (int32_t f = FMLA_KV_BF16; f < FMLA_KV_COUNT; f++) {
        fmla_format_info info = FMLA_FORMAT_INFO_INIT;
        assert_int_equal(fmla_format_get((fmla_kv_format)f, &info), FMLA_OK);
        assert_int_equal(info.format, f);
        assert_int_equal(fmla_format_by_name(info.name), f);
    }
    assert_int_equal(fmla_format_by_name("v5"), FMLA_KV_NONE);
    assert_int_equal(fmla_format_by_name(""), FMLA_KV_NONE);
    assert_int_equal(fmla_format_by_name(NULL), FMLA_KV_NONE);
}

static void devices_answer(void **state)
{
    (void)state;
    fmla_device_info info = FMLA_DEVICE_INFO_INIT;
    assert_int_equal(fmla_device_get(FMLA_DEVICE_CPU, 0, &info), FMLA_OK);
    assert_int_equal(info.device, FMLA_DEVICE_CPU);
    assert_true(info.compute_units >= 1);
    assert_non_null(strstr(info.kernels, "scalar"));
    assert_int_equal(fmla_device_get(FMLA_DEVICE_CPU, 1, &info), FMLA_ERROR_NO_DEVICE);
    assert_int_equal(fmla_device_get(FMLA_DEVICE_CPU, -1, &info), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_device_get(FMLA_DEVICE_CPU, 0, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_device_get((fmla_device)9, 0, &info), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_device_get(FMLA_DEVICE_CUDA, 0, &info), FMLA_ERROR_NO_BACKEND);
    assert_int_equal(fmla_device_get(FMLA_DEVICE_AUTO, 0, &info), FMLA_OK);
    assert_int_equal(info.device, FMLA_DEVICE_CPU);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wrong_configuration_is_named),
        cmocka_unit_test(environment_names_the_isa),
        cmocka_unit_test(promise_12_a_missing_isa_is_refused),
        cmocka_unit_test(contexts_say_what_they_are),
        cmocka_unit_test(callers_thread_pool_gives_the_same_bits),
        cmocka_unit_test(errors_belong_to_their_context),
        cmocka_unit_test(longer_and_shorter_callers),
        cmocka_unit_test(longer_and_shorter_answers),
        cmocka_unit_test(formats_have_names),
        cmocka_unit_test(devices_answer),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
