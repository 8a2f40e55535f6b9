/* SPDX-License-Identifier: MIT */
/*
 * tile_accumulate_f32_avx512bf16.c: sums = sums * alpha + weights^T tile of f32 tiles. Dims are the lanes: a strip of
 * four vectors of dims times up to six rows make 24 accumulators; per token, four loads of the tile and a broadcast per
 * row feed 24 multiply-adds. A strip of the tile (24 KB of 96 tokens) stays in L1 while the rows pass. A tile's
 * products are added up from zero and joined to the old sums at the end, which keeps rounding chains as short as a
 * tile.
 *
 * `visible`: weights of tokens that a row does not see are zero, so they need care only where such a token is
 * not finite.
 */
#include "tile_avx512bf16.h"

#define GROUP_ROWS 6

/* Operands of one call. */
typedef struct operands {
    float *sums;
    const float *weights;
    const float *tile;
    const float *alpha;
    int64_t tile_stride;
    int64_t weights_stride;
    int32_t rows;
    int32_t tokens;
    int32_t d;
} operands;

/* Rows r.. and dims k..; n and vectors are constants in each caller: the loops unroll, the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(const operands *o, int32_t r, int32_t k, int32_t n,
                                                           int32_t vectors)
{
    __m512 acc[GROUP_ROWS][STRIP_VECTORS];
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(o->rows) * STRIP_DIMS;
    float *sums = o->sums + k / STRIP_DIMS * strip_stride + (int64_t)r * STRIP_DIMS + k % STRIP_DIMS;
    const float *weights = o->weights + r, *tile = o->tile + k, *alpha = o->alpha ? o->alpha + r : NULL;
    int64_t tile_stride = o->tile_stride, stride = o->weights_stride;
    int32_t tokens = o->tokens;
#pragma GCC unroll 6
    for (int32_t i = 0; i < n; i++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            acc[i][v] = _mm512_setzero_ps();
            __builtin_prefetch(sums + (i + n) * STRIP_DIMS + v * LANES, 1);
        }
    }
    for (int32_t t = 0; t < tokens; t++, tile += tile_stride, weights += stride) {
        __m512 x[STRIP_VECTORS];
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            x[v] = _mm512_load_ps(tile + v * LANES);
        }
#pragma GCC unroll 6
        for (int32_t i = 0; i < n; i++) {
            __m512 w = _mm512_set1_ps(weights[i]);
#pragma GCC unroll 4
            for (int32_t v = 0; v < vectors; v++) {
                acc[i][v] = _mm512_fmadd_ps(w, x[v], acc[i][v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int32_t i = 0; i < n; i++) {
        __m512 a = alpha ? _mm512_set1_ps(alpha[i]) : _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            float *at = sums + i * STRIP_DIMS + v * LANES;
            _mm512_store_ps(at, alpha ? _mm512_fmadd_ps(_mm512_load_ps(at), a, acc[i][v]) : acc[i][v]);
        }
    }
}

/* n rows and a whole strip. */
static void multiply_strip(const operands *o, int32_t r, int32_t k, int32_t n)
{
    switch (n) {
    case 1:
        multiply(o, r, k, 1, 4);
        break;
    case 2:
        multiply(o, r, k, 2, 4);
        break;
    case 3:
        multiply(o, r, k, 3, 4);
        break;
    case 4:
        multiply(o, r, k, 4, 4);
        break;
    case 5:
        multiply(o, r, k, 5, 4);
        break;
    default:
        multiply(o, r, k, 6, 4);
        break;
    }
}

/* Rows begin..end-1. */
static void accumulate_rows(const operands *o, int32_t begin, int32_t end)
{
    int32_t count = end - begin, groups = (count + GROUP_ROWS - 1) / GROUP_ROWS;
    int32_t whole = o->d / STRIP_DIMS * STRIP_DIMS;
    for (int32_t k = 0; k < whole; k += STRIP_DIMS) {
        for (int32_t g = 0; g < groups; g++) {
            int32_t r = begin + g * count / groups;
            /* The next strip, a part with each group: its lines are too far apart for the processor to guess. */
            for (int32_t t = g * o->tokens / groups; t < (g + 1) * o->tokens / groups; t++) {
                const float *next = o->tile + t * o->tile_stride + k + STRIP_DIMS;
                for (int32_t v = 0; v < STRIP_VECTORS; v++) {
                    __builtin_prefetch(next + v * LANES);
                }
            }
            multiply_strip(o, r, k, begin + (g + 1) * count / groups - r);
        }
    }
    for (int32_t k = whole; k < o->d; k += LANES) { /* beyond d the tile is zero */
        for (int32_t r = begin; r < end; r++) {
            multiply(o, r, k, 1, 1);
        }
    }
}

static bool all_finite(const operands *o, int32_t begin, int32_t end)
{
    const __m512i exponent = _mm512_set1_epi32(0x7F800000);
    for (int32_t t = begin; t < end; t++) {
        for (int32_t k = 0; k < o->d; k += LANES) {
            __m512i x = _mm512_load_si512(o->tile + t * o->tile_stride + k);
            if (_mm512_cmpeq_epi32_mask(_mm512_and_si512(x, exponent), exponent)) {
                return false;
            }
        }
    }
    return true;
}

void fmlak_tile_accumulate_f32_avx512bf16(void *packed_sums, const void *packed_weights, const void *tile,
                                          int64_t tile_stride, const float *alpha, const int32_t *visible, int32_t rows,
                                          int32_t tokens, int32_t d)
{
    operands o = {packed_sums, packed_weights, tile, alpha, tile_stride, weights_stride(rows), rows, tokens, d};
    const fmlai_tile_range seen = fmlai_tile_seen_range(visible, rows, tokens);
    if (seen.least == seen.most || all_finite(&o, seen.least, seen.most)) {
        o.tokens = seen.most;
        accumulate_rows(&o, 0, rows);
        return;
    }
    for (int32_t begin = 0, end; begin < rows; begin = end) {
        end = fmlai_tile_seen_alike(visible, begin, rows);
        o.tokens = fmlai_tile_seen(visible, begin, tokens);
        accumulate_rows(&o, begin, end);
    }
}
