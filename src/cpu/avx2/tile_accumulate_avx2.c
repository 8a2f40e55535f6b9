/* SPDX-License-Identifier: MIT */
/*
 * tile_accumulate_avx2.c: sums = sums * alpha + weights^T tile. Dims are the lanes: a strip of two vectors of dims
 * times up to six rows make 12 accumulators; per token, two loads of the tile and a broadcast per row feed 12
 * multiply-adds. The weights of BLOCK_ROWS rows (12 KB of 48 tokens) stay in L1 while the strips pass. The products of
 * a tile are added up from zero and joined to the old sums at the end: rounding chains are as short as a tile.
 *
 * `visible`: weights of tokens that a row does not see are zero, so they need care only where such a token is
 * not finite.
 */
#include "tile_avx2.h"

#define BLOCK_ROWS 64
#define STEP_ROWS  6

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

static inline __attribute__((always_inline)) void add_token(__m256 acc[][STRIP_VECTORS], const float *tile,
                                                            const float *weights, int32_t n)
{
    __m256 x0 = _mm256_load_ps(tile);
    __m256 x1 = _mm256_load_ps(tile + LANES);
#pragma GCC unroll 6
    for (int32_t i = 0; i < n; i++) {
        __m256 w = _mm256_broadcast_ss(weights + i);
        acc[i][0] = _mm256_fmadd_ps(w, x0, acc[i][0]);
        acc[i][1] = _mm256_fmadd_ps(w, x1, acc[i][1]);
    }
}

/* Rows r..r+n-1 and the strip from dim k on. n is a constant in each caller: the loops unroll, the sums stay in
 * registers. */
static inline __attribute__((always_inline)) void multiply(const operands *o, int32_t r, int32_t k, int32_t n)
{
    __m256 acc[STEP_ROWS][STRIP_VECTORS];
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(o->rows) * STRIP;
    float *sums = o->sums + k / STRIP * strip_stride + (int64_t)r * STRIP;
    const float *weights = o->weights + r, *tile = o->tile + k, *alpha = o->alpha ? o->alpha + r : NULL;
    int64_t tile_stride = o->tile_stride, stride = o->weights_stride;
    int32_t tokens = o->tokens;
#pragma GCC unroll 6
    for (int32_t i = 0; i < n; i++) {
        acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        __builtin_prefetch(sums + (i + n) * STRIP, 1);
    }
    for (int32_t t = 0; t < tokens / 2; t++, tile += 2 * tile_stride, weights += 2 * stride) {
        add_token(acc, tile, weights, n);
        add_token(acc, tile + tile_stride, weights + stride, n);
    }
    if (tokens % 2) {
        add_token(acc, tile, weights, n);
    }
#pragma GCC unroll 6
    for (int32_t i = 0; i < n; i++) {
        float *at = sums + i * STRIP;
        if (alpha) {
            __m256 a = _mm256_broadcast_ss(alpha + i);
            acc[i][0] = _mm256_fmadd_ps(_mm256_load_ps(at), a, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(_mm256_load_ps(at + LANES), a, acc[i][1]);
        }
        _mm256_store_ps(at, acc[i][0]);
        _mm256_store_ps(at + LANES, acc[i][1]);
    }
}

static void multiply_rows(const operands *o, int32_t r, int32_t k, int32_t n)
{
    switch (n) {
    case 1:
        multiply(o, r, k, 1);
        break;
    case 2:
        multiply(o, r, k, 2);
        break;
    case 3:
        multiply(o, r, k, 3);
        break;
    case 4:
        multiply(o, r, k, 4);
        break;
    case 5:
        multiply(o, r, k, 5);
        break;
    default:
        multiply(o, r, k, 6);
        break;
    }
}

/* Rows begin..end-1: a block. */
static void accumulate_block(const operands *o, int32_t begin, int32_t end)
{
    int32_t count = end - begin, groups = (count + STEP_ROWS - 1) / STEP_ROWS; /* of equal size, or one less */
    for (int32_t k = 0; k < o->d; k += STRIP) { /* beyond d the tile is zero */
        for (int32_t g = 0; g < groups; g++) {
            int32_t r = begin + g * count / groups;
            multiply_rows(o, r, k, begin + (g + 1) * count / groups - r);
        }
    }
}

static void accumulate_rows(const operands *o, int32_t begin, int32_t end)
{
    for (int32_t r = begin; r < end; r += BLOCK_ROWS) {
        accumulate_block(o, r, r + BLOCK_ROWS < end ? r + BLOCK_ROWS : end);
    }
}

static bool all_finite(const operands *o, int32_t begin, int32_t end)
{
    const __m256i exponent = _mm256_set1_epi32(0x7F800000);
    __m256i found = _mm256_setzero_si256();
    for (int32_t t = begin; t < end; t++) {
        for (int32_t k = 0; k < o->d; k += LANES) { /* beyond d the tile is zero */
            __m256i x = _mm256_load_si256((const __m256i *)(o->tile + t * o->tile_stride + k));
            found = _mm256_or_si256(found, _mm256_cmpeq_epi32(_mm256_and_si256(x, exponent), exponent));
        }
    }
    return _mm256_testz_si256(found, found);
}

void fmlak_tile_accumulate_avx2(void *packed_sums, const void *packed_weights, const void *tile,
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
