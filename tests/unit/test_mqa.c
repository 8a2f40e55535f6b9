/* SPDX-License-Identifier: MIT */
/*
 * The CPU's multi-query attention, every usable tier, against the oracle; and what its bits must not depend
 * on.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cpu/mqa/mqa.h"
#include "support_cpu.h"
#include "support_mqa.h"
#include "support_numbers.h"
#include "support_pool.h"

/* True if the tier's results for the problem may show softmax weights rounded to bf16. */
static bool rounds_weights(const fmlai_cpu *cpu, const fmlai_mqa *p)
{
    return p->q.dtype == FMLA_BF16 && cpu->tile_bf16.dtype == FMLA_BF16;
}

static void check_shape(const mqa_shape *shape)
{
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        mqa_problem problem;
        fmlai_cpu *cpu = cpu_open(*isa, 2);
        mqa_make(&problem, shape);
        mqa_redirect(&problem, &problem.p);
        cpu_mqa(cpu, &problem.p);
        mqa_check(&problem, rounds_weights(cpu, &problem.p));
        mqa_free(&problem);
        cpu_close(cpu);
    }
}

static const mqa_shape dense = {.kind = FMLAI_LIST_PAGED,
                                .format = FMLA_KV_BF16,
                                .batch = 3,
                                .s_q = 2,
                                .h_q = 16,
                                .h_kv = 1,
                                .d_qk = 96,
                                .d_v = 64,
                                .page_size = 16,
                                .tokens = 300,
                                .causal = true,
                                .seed = 1};
static const mqa_shape sparse = {.kind = FMLAI_LIST_INDEXED,
                                 .format = FMLA_KV_V41,
                                 .extra = FMLA_KV_V41_FP4,
                                 .batch = 2,
                                 .s_q = 2,
                                 .h_q = 20,
                                 .h_kv = 1,
                                 .d_qk = 512,
                                 .d_v = 512,
                                 .page_size = 5,
                                 .tokens = 70,
                                 .extra_topk = 50,
                                 .sink = true,
                                 .lengths = true,
                                 .invalid_percent = 20,
                                 .seed = 2};
static const mqa_shape fused = {.kind = FMLAI_LIST_INDEXED,
                                .format = FMLA_KV_V4,
                                .extra = FMLA_KV_V4,
                                .batch = 1,
                                .s_q = 6,
                                .h_q = 16,
                                .h_kv = 1,
                                .d_qk = 512,
                                .d_v = 512,
                                .page_size = 8,
                                .tokens = 60,
                                .extra_topk = 40,
                                .sink = true,
                                .lengths = true,
                                .fused = true,
                                .q_norm = true,
                                .invalid_percent = 10,
                                .seed = 3};

static void dense_heads(void **state)
{
    static const int32_t heads[][2] = {{1, 1}, {3, 1}, {16, 1}, {17, 1}, {130, 1}, {6, 3}, {64, 8}, {8, 8}};
    (void)state;
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        for (int64_t s_q = 1; s_q <= 5; s_q += 2) {
            mqa_shape s = dense;
            s.h_q = heads[i][0];
            s.h_kv = heads[i][1];
            s.s_q = s_q;
            s.seed = 10 + i;
            check_shape(&s);
        }
    }
}

static void dense_dims(void **state)
{
    static const int32_t dims[][2] = {{576, 512}, {512, 512}, {1, 1},     {33, 7},
                                      {65, 65},   {96, 80},   {192, 128}, {577, 511}};
    (void)state;
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        for (int32_t f16 = 0; f16 < 2; f16++) {
            mqa_shape s = dense;
            s.d_qk = dims[i][0];
            s.d_v = dims[i][1];
            s.tokens = 150;
            s.format = f16 ? FMLA_KV_F16 : FMLA_KV_BF16;
            s.seed = 30 + i;
            check_shape(&s);
        }
    }
}

static void dense_lists(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 24; seed++) {
        mqa_shape s = dense;
        s.seed = 50 + seed;
        s.page_size = (int64_t[]){1, 7, 64, 400}[seed % 4];
        s.causal = seed % 3 != 0;
        s.bound = seed % 5 == 1;
        s.ragged = seed % 2 == 1;
        s.sink = seed % 7 < 3;
        s.no_table = seed % 6 == 5;
        s.out_f32 = seed % 4 == 2;
        s.s_q = 1 + (int64_t)seed % 9;
        s.h_q = (int32_t[]){4, 16, 30}[seed % 3];
        s.batch = 1 + (int64_t)seed % 4;
        check_shape(&s);
    }
}

static void dense_long(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 3; seed++) {
        mqa_shape s = dense;
        s.tokens = 1024 * (1 + (int64_t)seed * 2) + 100;
        s.s_q = 3;
        s.batch = 2;
        s.h_q = 5;
        s.d_qk = 48;
        s.d_v = 40;
        s.seed = 90 + seed;
        check_shape(&s);
    }
}

static void sparse_formats(void **state)
{
    static const fmla_kv_format pairs[][2] = {
        {FMLA_KV_V32, FMLA_KV_NONE},    {FMLA_KV_V4, FMLA_KV_V4},
        {FMLA_KV_V41, FMLA_KV_NONE},    {FMLA_KV_V41, FMLA_KV_V41},
        {FMLA_KV_V41, FMLA_KV_V41_FP4}, {FMLA_KV_V41_PAGE, FMLA_KV_V41_FP4_PAGE},
        {FMLA_KV_BF16, FMLA_KV_BF16},   {FMLA_KV_F16, FMLA_KV_F16},
        {FMLA_KV_V32, FMLA_KV_V32}};
    (void)state;
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        mqa_shape s = sparse;
        s.format = pairs[i][0];
        s.extra = pairs[i][1];
        s.d_qk = s.format == FMLA_KV_V32 ? 576 : 512;
        s.seed = 100 + i;
        check_shape(&s);
    }
}

static void sparse_lists(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 12; seed++) {
        mqa_shape s = sparse;
        s.format = FMLA_KV_BF16;
        s.extra = seed % 3 == 1 ? FMLA_KV_NONE : FMLA_KV_BF16;
        s.d_qk = 40;
        s.d_v = 24;
        s.h_q = 12;
        s.h_kv = seed % 2 ? 3 : 1;
        s.tokens = seed % 4 == 3 ? 2300 : 200;
        s.extra_topk = seed % 4 == 2 ? 1500 : 90;
        s.invalid_percent = (int32_t[]){0, 30, 100, 90}[seed % 4];
        s.lengths = seed % 5 < 3;
        s.sink = seed % 3 == 0;
        s.seed = 120 + seed;
        check_shape(&s);
    }
}

static void scales_of_either_sign(void **state)
{
    static const float scales[] = {-0.2f, 1e-30f, 1.0f, 1e-45f};
    (void)state;
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        mqa_shape s = dense;
        s.scale = scales[i];
        s.seed = 140 + i;
        check_shape(&s);
    }
}

/* All logits far below any fixed floor, and sizes up to 1e12: maximum subtraction without a magic number. */
static void c090_logits_below_any_floor(void **state)
{
    static const float scales[] = {-1e3f, -1e9f, -1e30f, 1e9f};
    (void)state;
    for (size_t i = 0; i < sizeof scales / sizeof scales[0]; i++) {
        mqa_shape s = dense;
        s.scale = scales[i];
        s.huge_logits = true;
        s.causal = false;
        s.seed = 150 + i;
        check_shape(&s);
    }
}

static void fused_operations(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 8; seed++) {
        mqa_shape s = fused;
        s.q_plain = seed % 2;
        s.q_norm = seed % 3 != 0;
        s.neox = seed % 4 == 3;
        s.format = seed % 4 == 1 ? FMLA_KV_BF16 : seed % 4 == 2 ? FMLA_KV_V41 : FMLA_KV_V4;
        s.extra = seed % 4 == 1 ? FMLA_KV_NONE : seed % 4 == 2 ? FMLA_KV_V41_FP4 : FMLA_KV_V4;
        s.h_q = seed == 6 ? 136 : 16;
        s.s_q = 1 + (int64_t)seed;
        s.seed = 160 + seed;
        check_shape(&s);
    }
}

/* Runs p on `threads` threads of a tier into fresh memory. */
static mqa_results results_of(mqa_problem *problem, fmlai_mqa p, fmla_isa isa, int32_t threads)
{
    fmlai_cpu *cpu = cpu_open(isa, threads);
    mqa_results r = mqa_redirect(problem, &p);
    cpu_mqa(cpu, &p);
    cpu_close(cpu);
    return r;
}

static void promise_8_bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        for (uint64_t seed = 0; seed < 4; seed++) {
            mqa_problem problem;
            mqa_shape s = seed % 2 ? sparse : dense;
            s.tokens = seed < 2 ? 5000 : 40000; /* of which some plans hold only a part at a time */
            s.format = FMLA_KV_BF16;
            s.extra = FMLA_KV_NONE;
            s.d_qk = s.d_v = 16;
            s.h_q = 3;
            s.batch = 1 + (int64_t)seed % 3;
            s.s_q = 1;
            s.seed = 200 + seed;
            mqa_make(&problem, &s);
            mqa_results one = results_of(&problem, problem.p, *isa, 1);
            for (int32_t threads = 2; threads <= 5; threads++) {
                mqa_results many = results_of(&problem, problem.p, *isa, threads);
                assert_memory_equal(one.data, many.data, one.size);
            }
            mqa_free(&problem);
        }
    }
}

/* Each request alone gives the bits that it has in the batch. */
static void promise_8_bits_do_not_depend_on_the_batch(void **state)
{
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        mqa_problem problem;
        mqa_shape s = dense;
        s.tokens = 3000;
        s.d_qk = s.d_v = 32;
        s.h_q = 3;
        s.batch = 4;
        s.seed = 220;
        mqa_make(&problem, &s);
        fmlai_mqa all = problem.p;
        mqa_redirect(&problem, &all);
        fmlai_cpu *cpu = cpu_open(*isa, 2);
        cpu_mqa(cpu, &all);
        for (int64_t r = 0; r < s.batch; r++) {
            fmlai_mqa one = problem.p;
            size_t values = (size_t)(s.s_q * s.h_q * s.d_v);
            one.batch = 1;
            one.num_tokens = s.s_q;
            one.q.data = (uint16_t *)one.q.data + r * one.q.stride[0];
            one.main.block_table += r * one.main.table_stride;
            one.main.seqlens += r;
            mqa_redirect(&problem, &one);
            cpu_mqa(cpu, &one);
            assert_memory_equal(one.out.data, (uint16_t *)all.out.data + r * all.out.stride[0],
                                values * sizeof(uint16_t));
            assert_memory_equal(one.lse.data, (float *)all.lse.data + r * all.lse.stride[0],
                                (size_t)(s.s_q * s.h_q) * sizeof(float));
        }
        cpu_close(cpu);
        mqa_free(&problem);
    }
}

/* Invalid entries, wherever they stand, change no bits: the same tokens without them are the same row. */
static void invalid_entries_change_no_bits(void **state)
{
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        mqa_problem problem;
        mqa_shape s = sparse;
        s.format = s.extra = FMLA_KV_BF16;
        s.d_qk = s.d_v = 32;
        s.tokens = 2500;
        s.extra_topk = 1300;
        s.lengths = s.sink = false;
        s.seed = 240;
        mqa_make(&problem, &s);
        mqa_results with = results_of(&problem, problem.p, *isa, 2);
        fmlai_mqa p = problem.p;
        int32_t *indices = mqa_memory(&problem, (size_t)(p.num_tokens * s.tokens) * sizeof(int32_t));
        int32_t *lengths = mqa_memory(&problem, (size_t)p.num_tokens * sizeof(int32_t));
        for (int64_t t = 0; t < p.num_tokens; t++) {
            lengths[t] = 0;
            for (int64_t e = 0; e < s.tokens; e++) {
                int32_t slot = p.main.indices[t * s.tokens + e];
                if (slot >= 0 && slot < p.main.pool.num_pages * p.main.pool.page_size) {
                    indices[t * s.tokens + lengths[t]++] = slot;
                }
            }
        }
        p.main.indices = indices;
        p.main.length = (fmlai_lengths){.data = lengths, .outer_stride = p.s_q, .inner_stride = 1};
        mqa_results without = results_of(&problem, p, *isa, 3);
        assert_memory_equal(with.data, without.data, with.size);
        mqa_free(&problem);
    }
}

/* Fused decode over two caches has the bits of fused prefill over one tensor of the same tokens and the
 * concatenated list, in which the main row keeps its full width. */
static void fused_decode_equals_fused_prefill(void **state)
{
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        mqa_problem problem;
        mqa_shape s = fused;
        s.format = FMLA_KV_V41;
        s.extra = FMLA_KV_V41_FP4;
        s.tokens = 1100;
        s.extra_topk = 130;
        s.seed = 250;
        mqa_make(&problem, &s);
        fmlai_mqa decode = problem.p, prefill = problem.p;
        int64_t main = decode.main.pool.num_pages * decode.main.pool.page_size;
        int64_t extra = decode.extra.pool.num_pages * decode.extra.pool.page_size,
                topk = s.tokens + s.extra_topk;
        uint16_t *kv = mqa_memory(&problem, (size_t)((main + extra) * s.d_qk) * sizeof(uint16_t));
        int32_t *indices = mqa_memory(&problem, (size_t)(decode.num_tokens * topk) * sizeof(int32_t));
        float token[512];
        for (int64_t slot = 0; slot < main + extra; slot++) {
            bool is_main = slot < main;
            fmlai_token_read(is_main ? &decode.main.pool : &decode.extra.pool, is_main ? slot : slot - main,
                             0, token);
            for (int32_t d = 0; d < s.d_qk; d++) {
                kv[slot * s.d_qk + d] = fmlai_bf16_from_f32(token[d]);
            }
        }
        for (int64_t t = 0; t < decode.num_tokens; t++) {
            for (int64_t e = 0; e < topk; e++) {
                const fmlai_token_list *list = e < s.tokens ? &decode.main : &decode.extra;
                int64_t at = e < s.tokens ? e : e - s.tokens;
                int64_t slot =
                    at < fmlai_list_count(list, &decode, t) ? fmlai_list_slot(list, &decode, t, 0, at) : -1;
                indices[t * topk + e] = (int32_t)(slot < 0 ? -1 : e < s.tokens ? slot : slot + main);
            }
        }
        prefill.main.pool = pool_over(kv, fmlai_format_row(FMLA_KV_BF16), 1, main + extra, 0, s.d_qk, 1);
        prefill.main.indices = indices;
        prefill.main.index_inner = topk;
        prefill.main.topk = topk;
        prefill.main.length.data = NULL;
        prefill.extra = (fmlai_token_list){0};
        mqa_results a = results_of(&problem, decode, *isa, 2);
        mqa_results b = results_of(&problem, prefill, *isa, 1);
        assert_memory_equal(a.data, b.data, a.size);
        mqa_free(&problem);
    }
}

/* A token that some row attends and another may not see: NaN stays with the rows that attend it. */
static void c004_nan_reaches_only_rows_that_attend_it(void **state)
{
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        mqa_problem problem;
        mqa_shape s = dense;
        s.s_q = 4;
        s.batch = 1;
        s.tokens = 200;
        s.seed = 263;
        mqa_make(&problem, &s);
        ((int32_t *)problem.p.main.seqlens)[0] = 200;
        fmlai_pool *pool = &problem.p.main.pool;
        for (int64_t j = 0; j < 200; j++) {
            float token[96];
            for (int32_t d = 0; d < s.d_qk; d++) {
                token[d] = sinf((float)(j * 97 + d));
            }
            fmlai_token_write(pool, fmlai_list_slot(&problem.p.main, &problem.p, 0, 0, j), 0, token, FMLA_F32,
                              0);
        }
        fmlai_mqa clean = problem.p, poisoned = problem.p;
        mqa_redirect(&problem, &clean);
        mqa_redirect(&problem, &poisoned);
        fmlai_cpu *cpu = cpu_open(*isa, 2);
        cpu_mqa(cpu, &clean);
        for (int64_t j = 198; j < 200; j++) { /* seen by query tokens 2 and 3, or by 3 alone */
            uint16_t *row =
                (uint16_t *)fmlai_pool_row(pool, fmlai_list_slot(&problem.p.main, &problem.p, 0, 0, j));
            row[j == 198 ? 3 : 70] = 0x7FC0;
            row[5] = 0x7F80;
        }
        cpu_mqa(cpu, &poisoned);
        size_t half = (size_t)(2 * s.h_q);
        assert_memory_equal(clean.out.data, poisoned.out.data, half * (size_t)s.d_v * sizeof(uint16_t));
        assert_memory_equal(clean.lse.data, poisoned.lse.data, half * sizeof(float));
        for (size_t r = half; r < 2 * half; r++) {
            assert_true(isnan(((float *)poisoned.lse.data)[r]) &&
                        isnan(((float *)poisoned.max_logits.data)[r]));
            for (int32_t d = 0; d < s.d_v; d++) {
                assert_true(isnan(fmlai_load_f32(poisoned.out.data, FMLA_BF16, (int64_t)r * s.d_v + d)));
            }
        }
        cpu_close(cpu);
        mqa_free(&problem);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_heads),
        cmocka_unit_test(dense_dims),
        cmocka_unit_test(dense_lists),
        cmocka_unit_test(dense_long),
        cmocka_unit_test(sparse_formats),
        cmocka_unit_test(sparse_lists),
        cmocka_unit_test(scales_of_either_sign),
        cmocka_unit_test(c090_logits_below_any_floor),
        cmocka_unit_test(fused_operations),
        cmocka_unit_test(promise_8_bits_do_not_depend_on_threads),
        cmocka_unit_test(promise_8_bits_do_not_depend_on_the_batch),
        cmocka_unit_test(invalid_entries_change_no_bits),
        cmocka_unit_test(fused_decode_equals_fused_prefill),
        cmocka_unit_test(c004_nan_reaches_only_rows_that_attend_it),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
