/* SPDX-License-Identifier: MIT */
/* Sizes, offsets and values of the public header are those of layout.def, and every enum's names are listed there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <flashmla/flashmla.h>

typedef struct pin {
    const char *what;
    size_t here;
    size_t pinned;
} pin;

static const pin pins[] = {
#define SIZE(type, n)         {"sizeof " #type, sizeof(type), n},
#define FIELD(type, field, n) {#type "." #field, offsetof(type, field), n},
#define VALUE(name, n)        {#name, (size_t)(name), n},
#include "layout.def"
#undef SIZE
#undef FIELD
#undef VALUE
};

static void layout_is_pinned(void **state)
{
    (void)state;
    size_t wrong = 0;
    if (sizeof(void *) != 8) {
        skip();
    }
    for (size_t i = 0; i < sizeof pins / sizeof pins[0]; i++) {
        if (pins[i].here != pins[i].pinned) {
            print_error("%s: %zu, pinned %zu\n", pins[i].what, pins[i].here, pins[i].pinned);
            wrong++;
        }
    }
    assert_int_equal(wrong, 0);
}

/* A size-first struct begins with its size, whatever the machine. */
static void size_comes_first(void **state)
{
    (void)state;
    assert_int_equal(offsetof(fmla_context_config, struct_size), 0);
    assert_int_equal(offsetof(fmla_format_info, struct_size), 0);
    assert_int_equal(offsetof(fmla_support_query, struct_size), 0);
    assert_int_equal(offsetof(fmla_device_info, struct_size), 0);
    assert_int_equal(offsetof(fmla_schedule_args, struct_size), 0);
    const fmla_decode_args decode = FMLA_DECODE_ARGS_INIT;
    const fmla_merge_args merge = FMLA_MERGE_ARGS_INIT;
    assert_int_equal(decode.struct_size, sizeof decode);
    assert_true(decode.softmax_scale == FMLA_SCALE_DEFAULT);
    assert_int_equal(decode.q.rank, 0);
    assert_int_equal(merge.struct_size, sizeof merge);
    assert_null(merge.outs);
}

static void version_of_header_and_library_agree(void **state)
{
    (void)state;
    assert_int_equal(fmla_version(), FMLA_VERSION);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout_is_pinned),
        cmocka_unit_test(size_comes_first),
        cmocka_unit_test(version_of_header_and_library_agree),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
