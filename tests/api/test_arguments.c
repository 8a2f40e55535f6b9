/* SPDX-License-Identifier: MIT */
/* Every wrong argument is an error that names it, and writes nothing: the table is faults.def. */
#include <math.h>
#include <stdio.h>

#include "support_calls.h"

typedef struct fault {
    fmla_operation operation;
    int32_t which; /* the line of faults.def */
    const char *code;
    fmla_status status;
    const char *words;
} fault;

static const fault faults[] = {
#define FAULT(operation, code, status, words) {FMLA_OP_##operation, __LINE__, #code, FMLA_ERROR_##status, words},
#include "faults.def"
#undef FAULT
};

static void break_call(calls *c, int32_t which)
{
    switch (which) {
/* clang-format off */
#define FAULT(operation, code, status, words) case __LINE__: code; break;
/* clang-format on */
#include "faults.def"
#undef FAULT
    default:
        fail();
    }
}

static int set_up(void **state)
{
    *state = calls_new(make_context(FMLA_DEVICE_CPU, 1));
    return 0;
}

/* What the table starts from. */
static void unbroken_calls_succeed(void **state)
{
    calls *c = *state;
    for (int32_t op = 0; op < FMLA_OP_COUNT; op++) {
        calls_reset(c);
        fmla_status status = calls_run(c, (fmla_operation)op);
        if (status != FMLA_OK) {
            fail_msg("%s: %d %s", fmla_operation_name((fmla_operation)op), (int)status, fmla_context_error(c->context));
        }
        assert_false(calls_outputs_untouched(c));
        assert_true(calls_guards_intact(c));
    }
}

static void promise_3_wrong_arguments_are_named_and_write_nothing(void **state)
{
    calls *c = *state;
    size_t failed = 0;
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        const fault *f = &faults[i];
        calls_reset(c);
        break_call(c, f->which);
        fmla_status status = calls_run(c, f->operation);
        const char *text = fmla_context_error(c->context);
        bool untouched = calls_outputs_untouched(c);
        if (status != f->status || strstr(text, f->words) == NULL || !untouched) {
            print_error("%s, {%s}:\n  status %d (expected %d), %s\n  says     \"%s\"\n  expected \"%s\"\n",
                        fmla_operation_name(f->operation), f->code, (int)status, (int)f->status,
                        untouched ? "nothing written" : "OUTPUT WRITTEN", text, f->words);
            failed++;
        }
    }
    assert_int_equal(failed, 0);
}

/* A size question refuses what the call refuses, as far as it does not look at data. */
static void sizes_refuse_what_calls_refuse(void **state)
{
    calls *c = *state;
    size_t size, failed = 0;
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) {
        const fault *f = &faults[i];
        bool about_data = strstr(f->code, "data") != NULL || strstr(f->code, "workspace") != NULL ||
                          strstr(f->words, "max_seqlen") != NULL;
        if (f->operation > FMLA_OP_MHA_BACKWARD || about_data) {
            continue;
        }
        calls_reset(c);
        break_call(c, f->which);
        fmla_status status = calls_measure(c, f->operation, &size);
        if (status != f->status || strstr(fmla_context_error(c->context), f->words) == NULL) {
            print_error("%s, {%s}: status %d, \"%s\"\n", fmla_operation_name(f->operation), f->code, (int)status,
                        fmla_context_error(c->context));
            failed++;
        }
    }
    assert_int_equal(failed, 0);
}

static void null_everywhere(void **state)
{
    calls *c = *state;
    size_t size;
    calls_reset(c);
    assert_int_equal(fmla_decode(NULL, &c->dense, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_decode(c->context, NULL, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fmla_context_error(c->context), "args: is NULL"));
    assert_int_equal(fmla_decode_workspace_size(c->context, NULL, &size), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_decode_workspace_size(c->context, &c->dense, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fmla_context_error(c->context), "size: is NULL"));
    assert_int_equal(fmla_merge(c->context, NULL, NULL), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_decode(c->context, &c->dense, c), FMLA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(fmla_context_error(c->context), "stream: "));
    assert_int_equal(fmla_context_reserve(NULL, 1), FMLA_ERROR_INVALID_ARGUMENT);
    assert_int_equal(fmla_supports(NULL, NULL), 0);
    assert_int_equal(fmla_supports(c->context, NULL), 0);
    assert_string_equal(fmla_context_error(NULL), "");
    assert_int_equal(fmla_context_threads(NULL), 0);
    fmla_context_destroy(NULL);
    assert_true(calls_outputs_untouched(c));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(unbroken_calls_succeed),
        cmocka_unit_test(promise_3_wrong_arguments_are_named_and_write_nothing),
        cmocka_unit_test(sizes_refuse_what_calls_refuse),
        cmocka_unit_test(null_everywhere),
    };
    return cmocka_run_group_tests(tests, set_up, calls_tear_down);
}
