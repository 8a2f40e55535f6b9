/* SPDX-License-Identifier: MIT */
/*
 * tile_scores_f32_avx512bf16.c: s[t][row] = rows . tokens of f32 tiles. Rows are the lanes: four vectors of rows times
 * six tokens make 24 accumulators; per dim, four loads of rows and a broadcast per token feed 24 multiply-adds. With
 * fewer vectors of rows there are more tokens, to keep the loads below the products.
 *
 * Dims are walked in blocks of BLOCK_DIMS: a group's block of rows (24 KB) stays in L1 while the tokens pass, and a sum
 * is made of short chains, so that its rounding error stays small even when all products have one sign.
 */
#include "tile_avx512bf16.h"

#define BLOCK_DIMS 96
#define MOST       24 /* tokens of a step */

/* What one call of multiply works on: a block of dims of one group of rows and of some tokens. */
typedef struct operands {
    float *s;
    const float *rows;
    const float *tile;
    int64_t s_stride;
    int64_t tile_stride;
    int32_t dims;
    bool first; /* sets s; otherwise adds */
} operands;

/* vectors and tokens are constants in each caller: the loops unroll, the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(const operands *o, int32_t vectors, int32_t tokens)
{
    __m512 acc[MOST][GROUP_VECTORS];
    const float *rows = o->rows, *tile = o->tile;
    int64_t tile_stride = o->tile_stride, s_stride = o->s_stride;
    int32_t dims = o->dims;
    bool first = o->first;
    float *s = o->s;
#pragma GCC unroll 24
    for (int32_t t = 0; t < tokens; t++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            acc[t][v] = _mm512_setzero_ps();
        }
    }
    for (int32_t k = 0; k < dims; k++) {
        __m512 q[GROUP_VECTORS];
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            q[v] = _mm512_load_ps(rows + (k * vectors + v) * LANES);
        }
#pragma GCC unroll 24
        for (int32_t t = 0; t < tokens; t++) {
            __m512 x = _mm512_set1_ps(tile[t * tile_stride + k]);
#pragma GCC unroll 4
            for (int32_t v = 0; v < vectors; v++) {
                acc[t][v] = _mm512_fmadd_ps(q[v], x, acc[t][v]);
            }
        }
    }
#pragma GCC unroll 24
    for (int32_t t = 0; t < tokens; t++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            float *at = s + t * s_stride + v * LANES;
            _mm512_store_ps(at, first ? acc[t][v] : _mm512_add_ps(acc[t][v], _mm512_load_ps(at)));
        }
    }
}

/* Four vectors: 6, 3 or 1 tokens at a time; and so on. Returns how many tokens were taken, of `left`. */
static int32_t multiply_4(const operands *o, int32_t left)
{
    if (left >= 6) {
        multiply(o, 4, 6);
        return 6;
    }
    if (left >= 3) {
        multiply(o, 4, 3);
        return 3;
    }
    multiply(o, 4, 1);
    return 1;
}

static int32_t multiply_3(const operands *o, int32_t left)
{
    if (left >= 8) {
        multiply(o, 3, 8);
        return 8;
    }
    if (left >= 3) {
        multiply(o, 3, 3);
        return 3;
    }
    multiply(o, 3, 1);
    return 1;
}

static int32_t multiply_2(const operands *o, int32_t left)
{
    if (left >= 12) {
        multiply(o, 2, 12);
        return 12;
    }
    if (left >= 4) {
        multiply(o, 2, 4);
        return 4;
    }
    multiply(o, 2, 1);
    return 1;
}

static int32_t multiply_1(const operands *o, int32_t left)
{
    if (left >= 24) {
        multiply(o, 1, 24);
        return 24;
    }
    if (left >= 8) {
        multiply(o, 1, 8);
        return 8;
    }
    multiply(o, 1, 1);
    return 1;
}

void fmlak_tile_scores_f32_avx512bf16(float *s, const void *packed_rows, const void *tile, int64_t tile_stride,
                                      int32_t rows, int32_t tokens, int32_t d)
{
    static int32_t (*const kernels[])(const operands *, int32_t) = {multiply_1, multiply_2, multiply_3, multiply_4};
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t k = 0; k < d; k += BLOCK_DIMS) {
        for (int32_t r = 0; r < lanes; r += GROUP_VECTORS * LANES) {
            int32_t vectors = (lanes - r) / LANES < GROUP_VECTORS ? (lanes - r) / LANES : GROUP_VECTORS;
            operands o = {
                .s = s + r,
                .rows = (const float *)packed_rows + (int64_t)r * d + (int64_t)k * vectors * LANES,
                .tile = (const float *)tile + k,
                .s_stride = lanes,
                .tile_stride = tile_stride,
                .dims = d - k < BLOCK_DIMS ? d - k : BLOCK_DIMS,
                .first = k == 0,
            };
            for (int32_t left = tokens; left > 0;) {
                int32_t n = kernels[vectors - 1](&o, left);
                o.s += n * o.s_stride;
                o.tile += n * o.tile_stride;
                left -= n;
            }
        }
    }
}
