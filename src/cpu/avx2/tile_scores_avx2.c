/* SPDX-License-Identifier: MIT */
/*
 * tile_scores_avx2.c: s[t][row] = rows . tokens. Rows are the lanes: two vectors of rows times up to six tokens make 12
 * accumulators; per dim, two loads of rows and a broadcast per token feed 12 multiply-adds.
 *
 * Dims are walked in blocks of BLOCK_DIMS: a block of the tile (18 KB of 48 tokens) stays in L1 while all rows pass,
 * and a sum is made of short chains, so that its rounding error stays small even when all products have one sign.
 *
 * Where two threads share a core, the instructions are what limits, 21 a dim: hence STEP dims between branches.
 */
#include "tile_avx2.h"

#define BLOCK_DIMS   96
#define GROUP_TOKENS 6
#define STEP         2 /* dims */

/* Adds (or, first, sets) the products of one block of dims, a multiple of `step`. n and step are constants in each
 * caller: the loops unroll, the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(float *s, int64_t s_stride, const float *rows,
                                                           const float *tile, int64_t tile_stride,
                                                           int32_t dims, bool first, int32_t n, int32_t step)
{
    __m256 acc[GROUP_TOKENS][STRIP_VECTORS];
    const float *low = tile, *high = tile + 3 * tile_stride; /* one stride and twice it are what an address can hold */
#pragma GCC unroll 6
    for (int32_t j = 0; j < n; j++) {
        acc[j][0] = acc[j][1] = _mm256_setzero_ps();
    }
    for (int32_t k = 0; k < dims; k += step, rows += step * STRIP, low += step, high += step) {
#pragma GCC unroll 2
        for (int32_t i = 0; i < step; i++) {
            __m256 r0 = _mm256_load_ps(rows + i * STRIP);
            __m256 r1 = _mm256_load_ps(rows + i * STRIP + LANES);
#pragma GCC unroll 6
            for (int32_t j = 0; j < n; j++) {
                __m256 x = _mm256_broadcast_ss((j < 3 ? low + j * tile_stride : high + (j - 3) * tile_stride) + i);
                acc[j][0] = _mm256_fmadd_ps(x, r0, acc[j][0]);
                acc[j][1] = _mm256_fmadd_ps(x, r1, acc[j][1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int32_t j = 0; j < n; j++) {
        float *at = s + j * s_stride;
        if (!first) {
            acc[j][0] = _mm256_add_ps(acc[j][0], _mm256_load_ps(at));
            acc[j][1] = _mm256_add_ps(acc[j][1], _mm256_load_ps(at + LANES));
        }
        _mm256_store_ps(at, acc[j][0]);
        _mm256_store_ps(at + LANES, acc[j][1]);
    }
}

static void multiply_n(float *s, int64_t s_stride, const float *rows, const float *tile, int64_t tile_stride,
                       int32_t dims, bool first, int32_t n)
{
    int32_t whole = dims / STEP * STEP;
    switch (n) {
    case 1:
        multiply(s, s_stride, rows, tile, tile_stride, whole, first, 1, STEP);
        break;
    case 2:
        multiply(s, s_stride, rows, tile, tile_stride, whole, first, 2, STEP);
        break;
    case 3:
        multiply(s, s_stride, rows, tile, tile_stride, whole, first, 3, STEP);
        break;
    case 4:
        multiply(s, s_stride, rows, tile, tile_stride, whole, first, 4, STEP);
        break;
    case 5:
        multiply(s, s_stride, rows, tile, tile_stride, whole, first, 5, STEP);
        break;
    default:
        multiply(s, s_stride, rows, tile, tile_stride, whole, first, 6, STEP);
        break;
    }
    for (int32_t j = 0; j < n && whole < dims; j++) {
        multiply(s + j * s_stride, s_stride, rows + whole * STRIP, tile + j * tile_stride + whole, tile_stride,
                 dims - whole, first && whole == 0, 1, 1);
    }
}

void fmlak_tile_scores_avx2(float *s, const void *packed_rows, const void *tile, int64_t tile_stride,
                            int32_t rows, int32_t tokens, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    int32_t groups = (tokens + GROUP_TOKENS - 1) / GROUP_TOKENS; /* of equal size, or one less */
    for (int32_t k = 0; k < d; k += BLOCK_DIMS) {
        int32_t dims = d - k < BLOCK_DIMS ? d - k : BLOCK_DIMS;
        for (int32_t r = 0; r < lanes; r += STRIP) {
            const float *q = (const float *)packed_rows + (int64_t)r * d + (int64_t)k * STRIP;
            for (int32_t g = 0; g < groups; g++) {
                int32_t t = g * tokens / groups, n = (g + 1) * tokens / groups - t;
                multiply_n(s + (int64_t)t * lanes + r, lanes, q, (const float *)tile + t * tile_stride + k,
                           tile_stride, dims, k == 0, n);
            }
        }
    }
}
