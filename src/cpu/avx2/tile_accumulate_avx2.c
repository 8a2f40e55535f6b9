/* SPDX-License-Identifier: MIT */
/*
 * tile_accumulate_avx2.c: sums = sums * alpha + weights^T tile. Dims are the lanes: a strip of two registers
 * of dims times up to six rows make 12 accumulators; per token, two loads of the tile and a broadcast per row
 * feed 12 multiply-adds. A tile's products are added up from zero and joined to the old sums at the end,
 * which keeps rounding chains as short as a tile.
 *
 * `visible`: weights of tokens that a row does not see are zero, so they need care only where such a token is
 * not finite.
 */
#include "tile_avx2.h"

#define GROUP_ROWS 6

/* n is a constant in each caller: the loops unroll. */
static inline __attribute__((always_inline)) void multiply(float *sums, const float *weights,
                                                           int64_t weights_stride_, const float *tile,
                                                           int64_t tile_stride, const float *alpha,
                                                           int32_t tokens, int32_t n)
{
    __m256 acc[GROUP_ROWS][2];
#pragma GCC unroll 6
    for (int32_t i = 0; i < n; i++) {
        acc[i][0] = acc[i][1] = _mm256_setzero_ps();
    }
    for (int32_t t = 0; t < tokens; t++) {
        __m256 v0 = _mm256_load_ps(tile + t * tile_stride);
        __m256 v1 = _mm256_load_ps(tile + t * tile_stride + 8);
#pragma GCC unroll 6
        for (int32_t i = 0; i < n; i++) {
            __m256 w = _mm256_broadcast_ss(weights + t * weights_stride_ + i);
            acc[i][0] = _mm256_fmadd_ps(w, v0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(w, v1, acc[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int32_t i = 0; i < n; i++) {
        float *at = sums + i * STRIP;
        if (alpha) {
            __m256 a = _mm256_broadcast_ss(alpha + i);
            acc[i][0] = _mm256_fmadd_ps(_mm256_load_ps(at), a, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(_mm256_load_ps(at + 8), a, acc[i][1]);
        }
        _mm256_store_ps(at, acc[i][0]);
        _mm256_store_ps(at + 8, acc[i][1]);
    }
}

static void multiply_n(float *sums, const float *weights, int64_t stride, const float *tile,
                       int64_t tile_stride, const float *alpha, int32_t tokens, int32_t n)
{
    switch (n) {
    case 1:
        multiply(sums, weights, stride, tile, tile_stride, alpha, tokens, 1);
        break;
    case 2:
        multiply(sums, weights, stride, tile, tile_stride, alpha, tokens, 2);
        break;
    case 3:
        multiply(sums, weights, stride, tile, tile_stride, alpha, tokens, 3);
        break;
    case 4:
        multiply(sums, weights, stride, tile, tile_stride, alpha, tokens, 4);
        break;
    case 5:
        multiply(sums, weights, stride, tile, tile_stride, alpha, tokens, 5);
        break;
    default:
        multiply(sums, weights, stride, tile, tile_stride, alpha, tokens, 6);
        break;
    }
}

/* Operands of one call. */
typedef struct operands {
    float *sums;
    const float *weights;
    const float *tile;
    const float *alpha;
    int64_t tile_stride;
    int32_t rows;
    int32_t d;
} operands;

/* Rows begin..end-1, the first `tokens` tokens. */
static void accumulate_rows(const operands *o, int32_t begin, int32_t end, int32_t tokens)
{
    int32_t count = end - begin, groups = (count + GROUP_ROWS - 1) / GROUP_ROWS;
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(o->rows) * STRIP;
    for (int32_t k = 0; k < o->d; k += STRIP) {
        float *sums = o->sums + k / STRIP * strip_stride;
        for (int32_t g = 0; g < groups; g++) {
            int32_t r = begin + g * count / groups, n = begin + (g + 1) * count / groups - r;
            multiply_n(sums + (int64_t)r * STRIP, o->weights + r, weights_stride(o->rows), o->tile + k,
                       o->tile_stride, o->alpha ? o->alpha + r : NULL, tokens, n);
        }
    }
}

static bool all_finite(const operands *o, int32_t begin, int32_t end)
{
    const __m256i exponent = _mm256_set1_epi32(0x7F800000);
    __m256i found = _mm256_setzero_si256();
    for (int32_t t = begin; t < end; t++) {
        for (int32_t k = 0; k < o->d; k += 8) { /* beyond d the tile is zero */
            __m256i x = _mm256_load_si256((const __m256i *)(o->tile + t * o->tile_stride + k));
            found = _mm256_or_si256(found, _mm256_cmpeq_epi32(_mm256_and_si256(x, exponent), exponent));
        }
    }
    return _mm256_testz_si256(found, found);
}

static int32_t clamp(int32_t x, int32_t high)
{
    return x < 0 ? 0 : x > high ? high : x;
}

void fmlak_tile_accumulate_avx2(void *packed_sums, const void *packed_weights, const void *tile,
                                int64_t tile_stride, const float *alpha, const int32_t *visible, int32_t rows,
                                int32_t tokens, int32_t d)
{
    operands o = {packed_sums, packed_weights, tile, alpha, tile_stride, rows, d};
    int32_t least = tokens, most = visible ? 0 : tokens;
    for (int32_t r = 0; visible && r < rows; r++) {
        int32_t n = clamp(visible[r], tokens);
        least = n < least ? n : least;
        most = n > most ? n : most;
    }
    if (least == most || all_finite(&o, least, most)) {
        accumulate_rows(&o, 0, rows, most);
        return;
    }
    for (int32_t begin = 0, end; begin < rows; begin = end) {
        for (end = begin + 1; end < rows && visible[end] == visible[begin]; end++) {
        }
        accumulate_rows(&o, begin, end, clamp(visible[begin], tokens));
    }
}
