/* SPDX-License-Identifier: MIT */
/*
 * The oracle's smaller operations: caches in and out of their formats, positions to slots, the e4m3 cast, the
 * weight permutations, and merge.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "support_numbers.h"
#include "support_oracle.h"
#include "support_pool.h"

static fmlai_packed packed(void *data, fmla_dtype dtype, int64_t token_stride, int64_t head_stride)
{
    return (fmlai_packed){.data = data, .dtype = dtype, .stride = {token_stride, head_stride}};
}

/* ---- caches -----------------------------------------------------------------------------------------------
 */

/* The documented example of the 656-byte record: 1, 0.5, -3, zeros, and 1 as first RoPE element. */
static void quantize_writes_the_documented_record(void **state)
{
    float x[2][576] = {{0}};
    uint8_t cache[4 * 656], untouched[656], expected[656] = {0x70, 0x68, 0xFC};
    int32_t slots[2] = {2, -1};
    (void)state;
    x[0][0] = 1;
    x[0][1] = 0.5f;
    x[0][2] = -3;
    x[0][512] = 1;
    memcpy(expected + 512, (uint8_t[16]){0, 0, 0, 0x3C, 0, 0, 0, 0x39, 0, 0, 0, 0x39, 0, 0, 0, 0x39}, 16);
    expected[528] = 0x80;
    expected[529] = 0x3F;
    memset(cache, 0xA5, sizeof cache);
    memset(untouched, 0xA5, sizeof untouched);
    fmlai_transcode p = {.count = 2,
                         .heads = 1,
                         .rows = packed(x, FMLA_F32, 576, 576),
                         .pool = pool_over(cache, fmlai_format_row(FMLA_KV_V32), 2, 2, 0, 576, 1),
                         .slots = {.data = slots, .dtype = FMLA_I32, .stride = 1}};
    oracle_quantize(&p);
    assert_memory_equal(cache + 2 * 656, expected, 656);
    for (int i = 0; i < 4; i++) {
        if (i != 2) { /* the negative slot wrote nothing */
            assert_memory_equal(cache + i * 656, untouched, 656);
        }
    }
    float back[576];
    int64_t slot = 2;
    p.count = 1;
    p.rows = packed(back, FMLA_F32, 576, 576);
    p.slots = (fmlai_slots){.data = &slot, .dtype = FMLA_I64, .stride = 1};
    oracle_dequantize(&p);
    assert_memory_equal(back, x[0], sizeof back);
}

static void dequantize_gives_zero_for_slots_outside_the_pool(void **state)
{
    uint16_t cache[2][2][4], rows[4][2][4];
    int32_t slots[4] = {1, -1, 2, 0};
    (void)state;
    for (int i = 0; i < 16; i++) {
        (&cache[0][0][0])[i] = (uint16_t)(0x3F80 + i);
    }
    fmlai_transcode p = {.count = 4,
                         .heads = 2,
                         .rows = packed(rows, FMLA_BF16, 8, 4),
                         .pool = pool_over(cache, fmlai_format_row(FMLA_KV_BF16), 1, 2, 0, 4, 2),
                         .slots = {.data = slots, .dtype = FMLA_I32, .stride = 1}};
    uint16_t zeros[2][4] = {{0}};
    memset(rows, 0xA5, sizeof rows);
    oracle_dequantize(&p);
    assert_memory_equal(rows[0], cache[1], sizeof cache[1]);
    assert_memory_equal(rows[1], zeros, sizeof zeros);
    assert_memory_equal(rows[2], zeros, sizeof zeros);
    assert_memory_equal(rows[3], cache[0], sizeof cache[0]);
    p.slots.data = NULL;
    p.count = 2;
    oracle_dequantize(&p);
    assert_memory_equal(rows, cache, sizeof cache);
}

/* Record to page layout and back: data rows first, then scale rows; the bytes are the same. */
static void convert_moves_bytes_between_layouts(void **state)
{
    uint8_t record[4][528], page[4 * 528], back[4][528];
    uint64_t seed = 5;
    (void)state;
    for (int i = 0; i < 4 * 528; i++) {
        (&record[0][0])[i] = (uint8_t)test_random(&seed);
    }
    fmlai_convert p = {.count = 4,
                       .heads = 1,
                       .src = pool_over(record, fmlai_format_row(FMLA_KV_V41), 4, 1, 0, 512, 1),
                       .dst = pool_over(page, fmlai_format_row(FMLA_KV_V41_PAGE), 2, 2, 0, 512, 1)};
    oracle_convert(&p);
    for (int t = 0; t < 4; t++) {
        const uint8_t *start = page + t / 2 * 1056;
        assert_memory_equal(start + t % 2 * 512, record[t], 512);
        assert_memory_equal(start + 1024 + t % 2 * 16, record[t] + 512, 16);
    }
    int32_t from[4] = {3, 2, 1, 0}, to[4] = {0, 1, 2, -1};
    memset(back, 0xA5, sizeof back);
    fmlai_convert reverse = {.count = 4,
                             .heads = 1,
                             .src = p.dst,
                             .dst = pool_over(back, fmlai_format_row(FMLA_KV_V41), 4, 1, 0, 512, 1),
                             .src_slots = {.data = from, .dtype = FMLA_I32, .stride = 1},
                             .dst_slots = {.data = to, .dtype = FMLA_I32, .stride = 1}};
    oracle_convert(&reverse);
    for (int t = 0; t < 3; t++) {
        assert_memory_equal(back[t], record[3 - t], 528);
    }
    assert_int_equal(back[3][0], 0xA5);
}

static void positions_become_slots(void **state)
{
    int32_t positions[2][1][5] = {{{0, 63, 64, -7, 130}}, {{65, -1, 1, 127, 0}}};
    int32_t table[2][3] = {{9, 4, -1}, {2, 0, 2147480000}}, indices[2][1][6];
    (void)state;
    memset(indices, 0xA5, sizeof indices);
    fmlai_indices_convert p = {.batch = 2,
                               .s_q = 1,
                               .topk = 5,
                               .page_size = 64,
                               .max_pages = 3,
                               .positions = &positions[0][0][0],
                               .position_stride = {5, 5},
                               .block_table = &table[0][0],
                               .table_stride = 3,
                               .indices = &indices[0][0][0],
                               .index_stride = {6, 6}};
    oracle_indices_convert(&p);
    static const int32_t expected[2][5] = {{576, 639, 256, -1, -1}, {1, -1, 129, 63, 128}};
    assert_memory_equal(indices[0][0], expected[0], sizeof expected[0]);
    assert_memory_equal(indices[1][0], expected[1], sizeof expected[1]);
    assert_int_equal(indices[0][0][5], (int32_t)0xA5A5A5A5); /* padding of the row */
    positions[0][0][0] = 64 * 3;                             /* beyond the table */
    positions[1][0][0] = 64 * 2;                             /* a page whose slots int32 cannot name */
    oracle_indices_convert(&p);
    assert_int_equal(indices[0][0][0], -1);
    assert_int_equal(indices[1][0][0], -1);
}

/* ---- matrices ---------------------------------------------------------------------------------------------
 */

static void fp8_cast_packs_scales_by_column_blocks(void **state)
{
    float x[3][256] = {{0}};
    uint8_t codes[3][256];
    int32_t scale[2][4];
    (void)state;
    x[0][0] = 448;      /* group 0: scale 1 */
    x[0][32] = -3;      /* group 1: 2^-7 */
    x[1][255] = 448.5f; /* group 7: 2 */
    x[2][64] = NAN;
    memset(scale, 0xA5, sizeof scale);
    fmlai_fp8_cast p = {.rows = 3,
                        .cols = 256,
                        .group = 32,
                        .src = x,
                        .dtype = FMLA_F32,
                        .src_stride = 256,
                        .codes = &codes[0][0],
                        .code_stride = 256,
                        .scale = &scale[0][0],
                        .scale_rows = 4};
    oracle_fp8_cast(&p);
    assert_int_equal(codes[0][0], 0x7E);
    assert_int_equal(codes[0][32], 0xFC);  /* -384 */
    assert_int_equal(codes[1][255], 0x76); /* 224.25 gives 224 */
    assert_int_equal(codes[2][64] & 0x7F, 0x7F);
    assert_int_equal(codes[2][65], 0);
    assert_int_equal(scale[0][0], 0x6969787F);
    assert_int_equal(scale[1][0], 0x69696969);
    assert_int_equal(scale[1][1], (int32_t)0x80696969);
    assert_int_equal(scale[0][2], 0x69696969);
    p.group = 64;
    p.cols = 256;
    oracle_fp8_cast(&p);
    assert_int_equal(scale[0][1], (int32_t)0x80696969);
}

enum { Q_HEADS = 3, Q_DIM = 32, Q_ROWS = Q_HEADS * Q_DIM, Q_COLS = 128 };

static void permuted_q_rows_go_where_the_fused_query_reads_them(void **state)
{
    static uint8_t weight[Q_ROWS][Q_COLS + 1], out[Q_ROWS][Q_COLS];
    static int32_t scale[2][Q_ROWS + 3], out_scale[2][Q_ROWS];
    (void)state;
    for (int r = 0; r < Q_ROWS; r++) {
        memset(weight[r], r, Q_COLS);
        scale[0][r] = 1000 + r;
        scale[1][r] = 2000 + r;
    }
    fmlai_permute p = {.kind = FMLA_OP_PERMUTE_Q_B,
                       .groups = 1,
                       .rows = Q_ROWS,
                       .cols = Q_COLS,
                       .words = 2,
                       .heads = Q_HEADS,
                       .d = Q_DIM,
                       .weight = &weight[0][0],
                       .weight_stride = {0, Q_COLS + 1},
                       .scale = &scale[0][0],
                       .scale_stride = {0, 1, Q_ROWS + 3},
                       .out_weight = &out[0][0],
                       .out_scale = &out_scale[0][0],
                       .out_scale_stride = {0, 1, Q_ROWS}};
    oracle_permute(&p);
    for (int h = 0; h < Q_HEADS; h++) {
        for (int d = 0; d < Q_DIM; d++) {
            int to = d % 16 + 16 * h + d / 16 * (16 * Q_HEADS);
            assert_memory_equal(out[to], weight[h * Q_DIM + d], Q_COLS);
            assert_int_equal(out_scale[0][to], 1000 + h * Q_DIM + d);
            assert_int_equal(out_scale[1][to], 2000 + h * Q_DIM + d);
        }
    }
}

/* The permutation for (G, chunks) undone by the one for (chunks, G): a transposition and its inverse. */
static void wv_permutation_round_trip(void **state)
{
    enum { GROUPS = 2, ROWS = 5, G = 8, CHUNKS = 6, COLS = G * CHUNKS * 32, WORDS = COLS / 128 };
    static uint8_t weight[GROUPS][ROWS][COLS], there[GROUPS][ROWS][COLS], back[GROUPS][ROWS][COLS];
    static int32_t scale[GROUPS][WORDS][8], out[GROUPS][WORDS][8], back_scale[GROUPS][WORDS][8];
    uint64_t seed = 11;
    (void)state;
    for (int i = 0; i < GROUPS * ROWS * COLS; i++) {
        (&weight[0][0][0])[i] = (uint8_t)test_random(&seed);
    }
    for (int i = 0; i < GROUPS * WORDS * ROWS; i++) {
        scale[i / (WORDS * ROWS)][i / ROWS % WORDS][i % ROWS] = (int32_t)test_random(&seed);
    }
    fmlai_permute p = {.kind = FMLA_OP_PERMUTE_WV,
                       .groups = GROUPS,
                       .rows = ROWS,
                       .cols = COLS,
                       .words = WORDS,
                       .heads = G,
                       .d = CHUNKS * 32,
                       .weight = &weight[0][0][0],
                       .weight_stride = {ROWS * COLS, COLS},
                       .scale = &scale[0][0][0],
                       .scale_stride = {WORDS * 8, 1, 8},
                       .out_weight = &there[0][0][0],
                       .out_scale = &out[0][0][0],
                       .out_scale_stride = {WORDS * 8, 1, 8}};
    oracle_permute(&p);
    for (int column = 0; column < COLS; column++) { /* one row against the documented rule */
        int g = column / (CHUNKS * 32), d = column % (CHUNKS * 32);
        int to = d / 32 * (32 * G) + 32 * g + d % 32;
        assert_int_equal(there[1][2][to], weight[1][2][column]);
        uint32_t from_word = (uint32_t)scale[1][column / 128][2], to_word = (uint32_t)out[1][to / 128][2];
        uint8_t from_byte = (uint8_t)(from_word >> (8 * (column / 32 % 4)));
        assert_int_equal((uint8_t)(to_word >> (8 * (to / 32 % 4))), from_byte);
    }
    p.heads = CHUNKS;
    p.d = G * 32;
    p.weight = &there[0][0][0];
    p.scale = &out[0][0][0];
    p.out_weight = &back[0][0][0];
    p.out_scale = &back_scale[0][0][0];
    oracle_permute(&p);
    assert_memory_equal(back, weight, sizeof weight);
    assert_memory_equal(back_scale, scale, sizeof scale);
}

/* ---- merge ------------------------------------------------------------------------------------------------
 */

typedef struct merged {
    double out[2], lse;
} merged;

/* Merges `count` states of one row of two elements. */
static merged merge_states(int32_t count, double (*outs)[2], double *lses, const float *sink, float empty_lse)
{
    merged result;
    fmlai_merge_state states[4];
    for (int32_t i = 0; i < count; i++) {
        states[i].out = packed(outs[i], FMLA_F64, 2, 2);
        states[i].lse = packed(&lses[i], FMLA_F64, 1, 1);
    }
    fmlai_merge p = {.tokens = 1, .heads = 1, .d = 2, .count = count, .states = states, .sink = sink};
    p.empty_lse = empty_lse;
    p.result.out = packed(result.out, FMLA_F64, 2, 2);
    p.result.lse = packed(&result.lse, FMLA_F64, 1, 1);
    oracle_merge(&p);
    return result;
}

static void assert_merged(merged m, double out0, double out1, double lse)
{
    assert_close(m.out[0], out0, 1e-14);
    assert_close(m.out[1], out1, 1e-14);
    assert_close(m.lse, lse, 1e-14);
}

static void c019_merge_of_empty_states(void **state)
{
    double outs[3][2] = {{NAN, NAN}, {3, -4}, {NAN, 1}};
    (void)state;
    for (int sign = 0; sign < 2; sign++) {
        double infinity = sign ? INFINITY : -INFINITY;
        float empty = sign ? INFINITY : -INFINITY;
        assert_merged(merge_states(1, outs, (double[]){infinity}, NULL, empty), 0, 0, infinity);
        assert_merged(merge_states(2, outs, (double[]){infinity, infinity}, NULL, empty), 0, 0, infinity);
        assert_merged(merge_states(2, outs, (double[]){infinity, 0.5}, NULL, empty), 3, -4, 0.5);
        assert_merged(merge_states(2, outs + 1, (double[]){0.5, -infinity}, NULL, empty), 3, -4, 0.5);
        assert_merged(merge_states(3, outs, (double[]){infinity, 0.5, infinity}, NULL, empty), 3, -4, 0.5);
    }
}

static void merge_weighs_by_lse(void **state)
{
    double outs[2][2] = {{1, 10}, {5, -2}};
    double lses[2] = {log(3), 0};
    static const float sinks[3] = {0, INFINITY, -INFINITY};
    (void)state;
    assert_merged(merge_states(2, outs, lses, NULL, 0), 2, 7, log(4));
    assert_merged(merge_states(2, outs, lses, &sinks[0], 0), 1.6, 5.6, log(4)); /* 4 / 5 of it */
    assert_merged(merge_states(2, outs, lses, &sinks[1], 0), 0, 0, log(4));
    assert_merged(merge_states(2, outs, lses, &sinks[2], 0), 2, 7, log(4));
    lses[0] = lses[1] = 1e5; /* far beyond exp's range */
    assert_merged(merge_states(2, outs, lses, NULL, 0), 3, 4, 1e5 + log(2));
}

static void merge_passes_nan_on(void **state)
{
    double outs[2][2] = {{1, NAN}, {5, -2}};
    (void)state;
    merged m = merge_states(2, outs, (double[]){0, 0}, NULL, 0);
    assert_close(m.out[0], 3, 1e-14);
    assert_true(isnan(m.out[1]));
    assert_merged(merge_states(2, outs, (double[]){NAN, 0}, NULL, 0), NAN, NAN, NAN);
    assert_merged(merge_states(2, outs, (double[]){0, NAN}, NULL, 0), NAN, NAN, NAN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(quantize_writes_the_documented_record),
        cmocka_unit_test(dequantize_gives_zero_for_slots_outside_the_pool),
        cmocka_unit_test(convert_moves_bytes_between_layouts),
        cmocka_unit_test(positions_become_slots),
        cmocka_unit_test(fp8_cast_packs_scales_by_column_blocks),
        cmocka_unit_test(permuted_q_rows_go_where_the_fused_query_reads_them),
        cmocka_unit_test(wv_permutation_round_trip),
        cmocka_unit_test(c019_merge_of_empty_states),
        cmocka_unit_test(merge_weighs_by_lse),
        cmocka_unit_test(merge_passes_nan_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
