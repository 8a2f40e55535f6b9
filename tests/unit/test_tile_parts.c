/* SPDX-License-Identifier: MIT */
/*
 * test_tile_parts.c: tiles in parts that lie anywhere, unaligned, with NaN around each token, as tokens in a cache do:
 * scores and weighted sums have the bits of the same tile in one piece. Rows that are to be fetched ahead have been
 * asked for at the end.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support_cpu.h"
#include "support_numbers.h"

static const int32_t row_counts[] = {1, 15, 16, 17, 33, 48, 65, 128};
static const int32_t token_counts[] = {1, 2, 7, 16, 31, 48, 127, 128};
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof(array)[0]))

typedef struct shape {
    int32_t rows, tokens, d;
    bool masked, ahead;
} shape;

static void *memory(size_t size)
{
    void *m = NULL;
    assert_int_equal(posix_memalign(&m, 64, size + 64), 0);
    memset(m, 0xFF, size + 64); /* NaN: nothing may rely on what was there */
    return m;
}

/* The tile's tokens again, part by part, the first part last. */
static uint16_t *scatter(fmlai_tile_parts *parts, const uint16_t *tile, int64_t tile_stride, const shape *c)
{
    int32_t count = (c->tokens + FMLAI_TILE_PART - 1) / FMLAI_TILE_PART;
    size_t size = (size_t)(FMLAI_TILE_PART * parts->stride + 7);
    uint16_t *all = memory(size * (size_t)count * sizeof *all);
    for (int32_t t = 0; t < c->tokens; t++) {
        uint16_t *part = all + size * (size_t)(count - 1 - t / FMLAI_TILE_PART) + 5;
        parts->at[t / FMLAI_TILE_PART] = part;
        memcpy(part + t % FMLAI_TILE_PART * parts->stride, tile + t * tile_stride, (size_t)c->d * sizeof *part);
    }
    return all;
}

static void check(const fmlai_tile_kernels *k, const shape *c, uint64_t *seed)
{
    int32_t rows = c->rows, tokens = c->tokens, d = c->d, lanes = fmlai_tile_lanes(rows);
    int64_t stride = fmlai_tile_stride(k->dtype, d);
    size_t s_bytes = (size_t)(tokens * lanes) * sizeof(float);
    float *q = memory((size_t)(rows * d) * sizeof *q), scale2[FMLAI_TILE_ROWS], alpha[FMLAI_TILE_ROWS];
    float *expected = memory((size_t)(rows * d) * sizeof(float)), *row = memory((size_t)d * sizeof(float));
    float *s = memory(s_bytes), *s_parts = memory(s_bytes);
    uint16_t *tile = memory((size_t)(tokens * stride) * sizeof *tile);
    void *packed_rows = memory(k->packed_rows_bytes(rows, d)), *weights = memory(k->packed_weights_bytes(rows, tokens));
    void *sums = memory(k->packed_sums_bytes(rows, d));
    int32_t visible[FMLAI_TILE_ROWS] = {0};
    const int32_t *seen = c->masked ? visible : NULL;
    fmlai_ahead ahead = {.count = 5, .bytes = 64};
    fmlai_tile_parts parts = {.stride = d + 3, .ahead = c->ahead ? &ahead : NULL};
    fmlai_softmax_state state;

    memset(tile, 0, (size_t)(tokens * stride) * sizeof *tile);
    for (int32_t i = 0; i < rows * d; i++) {
        q[i] = test_random_unit(seed);
    }
    for (int32_t i = 0; i < tokens * d; i++) {
        tile[i / d * stride + i % d] = fmlai_bf16_from_f32(test_random_unit(seed));
    }
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        scale2[r] = 1.0f;
        visible[r] = 1 + r * 37 % tokens;
    }
    for (int32_t i = 0; i < ahead.count; i++) {
        ahead.rows[i] = (const uint8_t *)tile;
    }
    uint16_t *scattered = scatter(&parts, tile, stride, c);
    k->pack_rows(packed_rows, q, d, rows, d);
    k->scores(s, packed_rows, tile, stride, rows, tokens, d);
    k->scores_of_parts(s_parts, packed_rows, &parts, rows, tokens, d);
    for (int32_t t = 0; t < tokens; t++) {
        assert_memory_equal(s_parts + t * lanes, s + t * lanes, (size_t)rows * sizeof(float));
    }
    fmlai_softmax_start(&state);
    k->softmax(&state, alpha, weights, s, scale2, seen, rows, tokens);
    k->accumulate(sums, weights, tile, stride, NULL, seen, rows, tokens, d);
    k->unpack(expected, d, sums, NULL, rows, 0, rows, d);
    k->accumulate_parts(sums, weights, &parts, NULL, seen, rows, tokens, d);
    for (int32_t r = 0; r < rows; r++) {
        k->unpack(row, d, sums, NULL, rows, r, 1, d);
        assert_memory_equal(row, expected + r * d, (size_t)d * sizeof(float));
    }
    assert_int_equal(ahead.next, c->ahead ? ahead.count : 0);
    void *all[] = {q, expected, row, s, s_parts, tile, packed_rows, weights, sums, scattered};
    for (int32_t i = 0; i < COUNT(all); i++) {
        free(all[i]);
    }
}

static void parts_of_a_tile_may_lie_anywhere(void **state)
{
    uint64_t seed = 11;
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_cpu *cpu = cpu_open(*isa, 1);
        const fmlai_tile_kernels *k = &cpu->tile_bf16;
        for (int32_t i = 0; k->scores_of_parts && i < COUNT(row_counts) * COUNT(token_counts); i++) {
            int32_t r = i / COUNT(token_counts), t = i % COUNT(token_counts);
            shape c = {row_counts[r], token_counts[t], 32 * (1 + (r + t) % 6), t % 2 == 1, r % 2 == 1};
            check(k, &c, &seed);
        }
        cpu_close(cpu);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_of_a_tile_may_lie_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
