/* SPDX-License-Identifier: MIT */
/*
 * The CPU backend's small operations against the oracle's: caches in and out, conversions, positions, casts,
 * permutations, the schedule. All must agree bit for bit, with any number of threads.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support_cpu.h"
#include "support_numbers.h"
#include "support_oracle.h"
#include "support_pool.h"

static const int32_t thread_counts[] = {1, 2, 3, 8};
#define THREAD_COUNTS 4

static void *filled(size_t size, uint64_t seed)
{
    uint8_t *data = malloc(size + 1);
    assert_non_null(data);
    for (size_t i = 0; i < size; i++) {
        data[i] = (uint8_t)test_random(&seed);
    }
    return data;
}

static void *copied(const void *data, size_t size)
{
    void *copy = malloc(size + 1);
    assert_non_null(copy);
    memcpy(copy, data, size);
    return copy;
}

static void fill_values(void *data, fmla_dtype dtype, int64_t n, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        fmlai_store_f32(data, dtype, i, test_random_bf16(&seed, -6, 4));
    }
}

static size_t size_of(fmla_dtype dtype)
{
    return dtype == FMLA_F32 || dtype == FMLA_I32 ? 4 : dtype == FMLA_I64 ? 8 : 2;
}

/* Pages enough for `tokens`, with gaps between pages. */
static fmlai_pool make_pool(fmla_kv_format format, int64_t tokens, int64_t page_size, int32_t d,
                            int32_t heads, size_t *size)
{
    const fmla_format_info *row = fmlai_format_row(format);
    heads = row->layout == FMLA_LAYOUT_PLAIN ? heads : 1;
    int64_t page_bytes = page_size * fmlai_format_token_bytes(row, d) * heads;
    fmlai_pool pool =
        pool_over(NULL, row, (tokens + page_size - 1) / page_size, page_size, page_bytes + 16, d, heads);
    *size = pool_bytes(&pool, heads);
    return pool;
}

/* ---- caches ------------------------------------------------------------------------------------------ */

#define TOKENS 200

/* Slots in 0..n-1 with repetitions and, here and there, none (-1). */
static void *make_slots(fmla_dtype dtype, int64_t n, bool repeat, uint64_t seed)
{
    int64_t *wide = malloc(TOKENS * sizeof *wide);
    int32_t *narrow = malloc(TOKENS * sizeof *narrow);
    assert_true(wide && narrow);
    for (int64_t i = 0; i < TOKENS; i++) {
        int64_t slot = repeat ? (int64_t)(test_random(&seed) % (uint64_t)n) : (i * 7) % n;
        wide[i] = test_random(&seed) % 9 == 0 ? -1 - i : slot;
        narrow[i] = (int32_t)wide[i];
    }
    free(dtype == FMLA_I64 ? (void *)narrow : (void *)wide);
    return dtype == FMLA_I64 ? (void *)wide : (void *)narrow;
}

static void check_quantize(fmla_kv_format format, fmla_dtype dtype, fmla_dtype slot_dtype, bool repeat)
{
    int32_t heads = format <= FMLA_KV_F16 ? 2 : 1;
    size_t size;
    fmlai_pool pool = make_pool(format, 64, 5, 72, heads, &size);
    int32_t d = pool.format.d_qk;
    int64_t row = (int64_t)heads * (d + 3);
    void *values = filled((size_t)(TOKENS * row) * size_of(dtype), 1);
    void *before = filled(size, 2), *expected = copied(before, size);
    void *slots = slot_dtype == FMLA_DTYPE_NONE ? NULL : make_slots(slot_dtype, 64, repeat, 5);
    fmlai_transcode t = {.count = slots ? TOKENS : 64,
                         .heads = heads,
                         .pool = pool,
                         .rows = {.data = values, .dtype = dtype, .stride = {row, d + 3}},
                         .slots = {.data = slots, .dtype = slot_dtype, .stride = 1}};
    fill_values(values, dtype, TOKENS * row, 3);
    t.pool.data = expected;
    oracle_quantize(&t);
    for (int32_t n = 0; n < THREAD_COUNTS; n++) {
        for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
            fmlai_cpu *cpu = cpu_open(*isa, thread_counts[n]);
            fmlai_call call = cpu_call();
            void *got = copied(before, size);
            t.pool.data = got;
            assert_int_equal(fmlai_cpu_backend.quantize(cpu, &t, &call), FMLA_OK);
            assert_memory_equal(got, expected, size);
            free(got);
            cpu_close(cpu);
        }
    }
    free(values);
    free(before);
    free(expected);
    free(slots);
}

static void promise_8_quantize_gives_the_same_bytes_on_any_threads(void **state)
{
    (void)state;
    for (int32_t f = FMLA_KV_BF16; f < FMLA_KV_COUNT; f++) {
        check_quantize((fmla_kv_format)f, FMLA_BF16, FMLA_I64, true);
        check_quantize((fmla_kv_format)f, FMLA_F32, FMLA_I32, true);
        check_quantize((fmla_kv_format)f, FMLA_F16, FMLA_DTYPE_NONE, false);
    }
}

static void check_dequantize(fmla_kv_format format, fmla_dtype dtype, fmla_dtype slot_dtype)
{
    int32_t heads = format <= FMLA_KV_F16 ? 2 : 1;
    size_t size;
    fmlai_pool pool = make_pool(format, 65, 5, 72, heads, &size);
    int32_t d = pool.format.d_qk;
    int64_t row = (int64_t)heads * (d + 3);
    size_t row_bytes = (size_t)(TOKENS * row) * size_of(dtype);
    void *values = malloc((size_t)(65 * heads * d) * 4), *before = filled(row_bytes, 2);
    void *expected = copied(before, row_bytes);
    void *slots =
        slot_dtype == FMLA_DTYPE_NONE ? NULL : make_slots(slot_dtype, 70, true, 5); /* 65..69: beyond */
    fmlai_transcode t = {.count = 65,
                         .heads = heads,
                         .pool = pool,
                         .rows = {.data = values, .dtype = FMLA_F32, .stride = {heads * d, d}}};
    t.pool.data = filled(size, 9);
    fill_values(values, FMLA_F32, 65 * heads * d, 3);
    oracle_quantize(&t);
    t.count = slots ? TOKENS : 65;
    t.slots = (fmlai_slots){.data = slots, .dtype = slot_dtype, .stride = 1};
    t.rows = (fmlai_packed){.data = expected, .dtype = dtype, .stride = {row, d + 3}};
    oracle_dequantize(&t);
    for (int32_t n = 0; n < THREAD_COUNTS; n++) {
        for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
            fmlai_cpu *cpu = cpu_open(*isa, thread_counts[n]);
            fmlai_call call = cpu_call();
            t.rows.data = copied(before, row_bytes);
            assert_int_equal(fmlai_cpu_backend.dequantize(cpu, &t, &call), FMLA_OK);
            assert_memory_equal(t.rows.data, expected, row_bytes);
            free(t.rows.data);
            cpu_close(cpu);
        }
    }
    free(t.pool.data);
    free(values);
    free(before);
    free(expected);
    free(slots);
}

static void dequantize_equals_the_oracle_and_zeroes_invalid_slots(void **state)
{
    (void)state;
    for (int32_t f = FMLA_KV_BF16; f < FMLA_KV_COUNT; f++) {
        check_dequantize((fmla_kv_format)f, FMLA_BF16, FMLA_I64);
        check_dequantize((fmla_kv_format)f, FMLA_F32, FMLA_I32);
        check_dequantize((fmla_kv_format)f, FMLA_F16, FMLA_DTYPE_NONE);
    }
}

static void check_convert(fmla_kv_format from, fmla_kv_format to)
{
    size_t src_size, dst_size;
    fmlai_pool src =
        make_pool(from, 64, 5, fmlai_format_row(to)->d_qk ? fmlai_format_row(to)->d_qk : 72, 2, &src_size);
    fmlai_pool dst = make_pool(to, 64, 7, src.format.d_qk, 2, &dst_size);
    int32_t heads = from <= FMLA_KV_F16 && to <= FMLA_KV_F16 ? 2 : 1;
    void *before = filled(dst_size, 4), *expected = copied(before, dst_size);
    void *src_slots = make_slots(FMLA_I32, 64, true, 8), *dst_slots = make_slots(FMLA_I64, 64, true, 6);
    fmlai_convert c = {.count = TOKENS,
                       .heads = heads,
                       .src = src,
                       .dst = dst,
                       .src_slots = {.data = src_slots, .dtype = FMLA_I32, .stride = 1},
                       .dst_slots = {.data = dst_slots, .dtype = FMLA_I64, .stride = 1}};
    if (src.format.d_qk != dst.format.d_qk) {
        fail_msg("%s and %s have different widths", src.format.name, dst.format.name);
    }
    c.src.data = filled(src_size, 9);
    c.dst.data = expected;
    oracle_convert(&c);
    for (int32_t n = 0; n < THREAD_COUNTS; n++) {
        for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
            fmlai_cpu *cpu = cpu_open(*isa, thread_counts[n]);
            fmlai_call call = cpu_call();
            c.dst.data = copied(before, dst_size);
            assert_int_equal(fmlai_cpu_backend.convert(cpu, &c, &call), FMLA_OK);
            assert_memory_equal(c.dst.data, expected, dst_size);
            free(c.dst.data);
            cpu_close(cpu);
        }
    }
    free(c.src.data);
    free(before);
    free(expected);
    free(src_slots);
    free(dst_slots);
}

static void convert_equals_the_oracle(void **state)
{
    (void)state;
    check_convert(FMLA_KV_V41, FMLA_KV_V41_PAGE);
    check_convert(FMLA_KV_V41_FP4_PAGE, FMLA_KV_V41_FP4);
    check_convert(FMLA_KV_V41, FMLA_KV_V4);
    check_convert(FMLA_KV_V4, FMLA_KV_V41_FP4);
    check_convert(FMLA_KV_BF16, FMLA_KV_V32);
    check_convert(FMLA_KV_V32, FMLA_KV_V32);
    check_convert(FMLA_KV_F16, FMLA_KV_BF16);
    check_convert(FMLA_KV_F16, FMLA_KV_F16);
}

static void wide_custom_formats_are_refused_by_quantize(void **state)
{
    fmla_format_info wide = {.struct_size = sizeof wide,
                             .format = FMLA_KV_CUSTOM,
                             .layout = FMLA_LAYOUT_RECORD,
                             .name = "wide",
                             .d_qk = 5000,
                             .quant_dims = 5000,
                             .element = FMLA_F8_E4M3,
                             .bytes_per_token = 5000,
                             .data_row_bytes = 5000};
    uint8_t *memory = filled(5000, 1);
    float *rows = calloc(5000, sizeof *rows);
    fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, 1);
    fmlai_call call = cpu_call();
    fmlai_transcode t = {.count = 1,
                         .heads = 1,
                         .pool = pool_over(memory, &wide, 1, 1, 0, 0, 1),
                         .rows = {.data = rows, .dtype = FMLA_F32, .stride = {5000, 5000}}};
    (void)state;
    assert_int_equal(fmlai_cpu_backend.quantize(cpu, &t, &call), FMLA_ERROR_UNSUPPORTED);
    assert_non_null(strstr(call.error->text, "5000"));
    assert_int_equal(fmlai_cpu_backend.dequantize(cpu, &t, &call), FMLA_OK);
    for (int32_t d = 0; d < 5000; d++) {
        assert_true(same_f32(rows[d], fmlai_f32_from_e4m3(memory[d])));
    }
    cpu_close(cpu);
    free(rows);
    free(memory);
}

/* ---- positions and casts ----------------------------------------------------------------------------- */

static void indices_convert_equals_the_oracle(void **state)
{
    enum { B = 3, S = 5, K = 33, PAGES = 6, P = 7 };
    int32_t positions[B * S * K], table[B * (PAGES + 2)], expected[B * S * (K + 1)], got[B * S * (K + 1)];
    uint64_t seed = 5;
    (void)state;
    for (int32_t i = 0; i < B * S * K; i++) {
        positions[i] = (int32_t)(test_random(&seed) % (PAGES * P + 20)) - 10;
    }
    positions[0] = INT32_MAX;
    positions[1] = INT32_MIN;
    for (int32_t i = 0; i < B * (PAGES + 2); i++) {
        table[i] = i % 5 == 4 ? -1 : i == 6 ? INT32_MAX : (int32_t)(test_random(&seed) % 1000);
    }
    fmlai_indices_convert p = {.batch = B,
                               .s_q = S,
                               .topk = K,
                               .page_size = P,
                               .max_pages = PAGES,
                               .positions = positions,
                               .position_stride = {S * K, K},
                               .block_table = table,
                               .table_stride = PAGES + 2,
                               .indices = expected,
                               .index_stride = {S * (K + 1), K + 1}};
    memset(expected, 0x5A, sizeof expected);
    oracle_indices_convert(&p);
    for (int32_t n = 0; n < THREAD_COUNTS; n++) {
        fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, thread_counts[n]);
        fmlai_call call = cpu_call();
        memset(got, 0x5A, sizeof got);
        p.indices = got;
        assert_int_equal(fmlai_cpu_backend.indices_convert(cpu, &p, &call), FMLA_OK);
        assert_memory_equal(got, expected, sizeof got);
        cpu_close(cpu);
    }
}

static void check_fp8_cast(int32_t group, fmla_dtype dtype)
{
    enum { ROWS = 37, COLS = 1024, A = 44, WORDS_MAX = COLS / 32 / 4 };
    static uint8_t expected[ROWS * (COLS + 5)], got[ROWS * (COLS + 5)];
    static int32_t expected_scale[A * WORDS_MAX], got_scale[A * WORDS_MAX];
    void *src = malloc((size_t)ROWS * (COLS + 3) * 4);
    fmlai_fp8_cast p = {.rows = ROWS,
                        .cols = COLS,
                        .group = group,
                        .src = src,
                        .dtype = dtype,
                        .src_stride = COLS + 3,
                        .codes = expected,
                        .code_stride = COLS + 5,
                        .scale = expected_scale,
                        .scale_rows = A};
    fill_values(src, dtype, ROWS * (COLS + 3), 7);
    memset(expected, 0x5A, sizeof expected);
    memset(expected_scale, 0x5A, sizeof expected_scale);
    oracle_fp8_cast(&p);
    for (int32_t n = 0; n < THREAD_COUNTS; n++) {
        fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, thread_counts[n]);
        fmlai_call call = cpu_call();
        memset(got, 0x5A, sizeof got);
        memset(got_scale, 0x5A, sizeof got_scale);
        p.codes = got;
        p.scale = got_scale;
        assert_int_equal(fmlai_cpu_backend.fp8_cast(cpu, &p, &call), FMLA_OK);
        assert_memory_equal(got, expected, sizeof got);
        assert_memory_equal(got_scale, expected_scale, sizeof got_scale);
        cpu_close(cpu);
    }
    free(src);
}

static void fp8_cast_equals_the_oracle(void **state)
{
    (void)state;
    check_fp8_cast(32, FMLA_BF16);
    check_fp8_cast(128, FMLA_F16);
    check_fp8_cast(32, FMLA_F32);
}

/* ---- permutations ------------------------------------------------------------------------------------ */

static void check_permute(fmlai_permute *p, size_t weights, size_t words)
{
    uint8_t *expected = filled(weights, 1), *got = filled(weights, 2);
    int32_t *expected_scale = calloc(words, 4), *got_scale = calloc(words, 4);
    p->out_weight = expected;
    p->out_scale = expected_scale;
    oracle_permute(p);
    for (int32_t n = 0; n < THREAD_COUNTS; n++) {
        fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, thread_counts[n]);
        fmlai_call call = cpu_call();
        p->out_weight = got;
        p->out_scale = got_scale;
        memset(got, 0, weights);
        memset(got_scale, 0, 4 * words);
        assert_int_equal(fmlai_cpu_backend.permute(cpu, p, &call), FMLA_OK);
        assert_memory_equal(got, expected, weights);
        assert_memory_equal(got_scale, expected_scale, 4 * words);
        cpu_close(cpu);
    }
    free(expected);
    free(got);
    free(expected_scale);
    free(got_scale);
}

static void permutations_equal_the_oracle(void **state)
{
    const int64_t rows = 5 * 48, cols = 256;
    uint8_t *weight = filled(3 * 300 * 1000, 3);
    int32_t *scale = filled(4 * 3 * 300 * 40, 4);
    fmlai_permute q = {.kind = FMLA_OP_PERMUTE_Q_B,
                       .groups = 1,
                       .rows = rows,
                       .cols = cols,
                       .words = 2,
                       .heads = 5,
                       .d = 48,
                       .weight = weight,
                       .weight_stride = {0, cols + 7},
                       .scale = scale,
                       .scale_stride = {0, 1, rows + 4},
                       .out_scale_stride = {0, 1, rows}};
    fmlai_permute wv = {.kind = FMLA_OP_PERMUTE_WV,
                        .groups = 3,
                        .rows = 70,
                        .cols = 6 * 64,
                        .words = 3,
                        .heads = 6,
                        .d = 64,
                        .weight = weight,
                        .weight_stride = {70 * 400, 400},
                        .scale = scale,
                        .scale_stride = {70 * 5, 1, 70},
                        .out_scale_stride = {72 * 3, 1, 72}};
    (void)state;
    check_permute(&q, (size_t)(rows * cols), (size_t)(2 * rows));
    check_permute(&wv, 3 * 70 * 6 * 64, 3 * 3 * 72);
    free(weight);
    free(scale);
}

/* ---- schedule ---------------------------------------------------------------------------------------- */

static void schedule_equals_the_oracle(void **state)
{
    const int32_t lengths[] = {0, 1, 64, 65, 5000, 130};
    int32_t expected[5 * 8], got[5 * 8], expected_splits[7], got_splits[7];
    fmlai_schedule p = {.batch = 6,
                        .seqlens = lengths,
                        .topk = -1,
                        .form = FMLA_SCHEDULE_2026_01,
                        .overhead_blocks = 5,
                        .parts = 5,
                        .metadata = expected,
                        .metadata_stride = 8,
                        .num_splits = expected_splits};
    fmlai_cpu *cpu = cpu_open(FMLA_ISA_SCALAR, 2);
    fmlai_call call = cpu_call();
    (void)state;
    assert_int_equal(fmlai_oracle_backend.schedule(NULL, &p, &call), FMLA_OK);
    p.metadata = got;
    p.num_splits = got_splits;
    assert_int_equal(fmlai_cpu_backend.schedule(cpu, &p, &call), FMLA_OK);
    assert_memory_equal(got, expected, sizeof got);
    assert_memory_equal(got_splits, expected_splits, sizeof got_splits);
    assert_true(got_splits[6] >= 6);
    cpu_close(cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_8_quantize_gives_the_same_bytes_on_any_threads),
        cmocka_unit_test(dequantize_equals_the_oracle_and_zeroes_invalid_slots),
        cmocka_unit_test(convert_equals_the_oracle),
        cmocka_unit_test(wide_custom_formats_are_refused_by_quantize),
        cmocka_unit_test(indices_convert_equals_the_oracle),
        cmocka_unit_test(fp8_cast_equals_the_oracle),
        cmocka_unit_test(permutations_equal_the_oracle),
        cmocka_unit_test(schedule_equals_the_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
