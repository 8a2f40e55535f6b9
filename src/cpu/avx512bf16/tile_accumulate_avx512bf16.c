/* SPDX-License-Identifier: MIT */
/*
 * tile_accumulate_avx512bf16.c: sums = sums * alpha + weights^T tile. Dims are the lanes. Strip by strip of
 * 64 dims, tokens are interleaved in pairs into a buffer (16 KB of 128 tokens: it stays in L1); then for
 * every four rows, four vectors of dims make 16 accumulators, and a pair of tokens takes four loads and four
 * broadcasts of a pair of weights for 16 VDPBF16PS. The first four rows are multiplied while tokens are interleaved,
 * and what comes after the tile is fetched on the way. A tile's products are added up from zero and joined to
 * the old sums at the end, which keeps rounding chains as short as a tile.
 *
 * VDPBF16PS takes subnormal numbers for zero and flushes sums below 2^-126. So that tiny values keep their
 * accuracy, a strip with values below 2^-64 is taken apart: those are multiplied separately, larger by a
 * power of two.
 *
 * `visible`: weights of tokens that a row does not see are zero, so they need care only where such a token is
 * not finite.
 */
#include <string.h>

#include "tile_avx512bf16.h"

#define GROUP_ROWS   4
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define SMALL_BITS   (63 << 7) /* bf16 below 2^-64 */

/* Smallest 2 |x| - 1 of bf16 as integers without sign, zero being the largest. */
static inline __m512i least_of(__m512i least, __m512i x)
{
    return _mm512_min_epu16(least, _mm512_sub_epi16(_mm512_add_epi16(x, x), _mm512_set1_epi16(1)));
}

static inline bool has_small_values(__m512i least)
{
    __m512i below = _mm512_subs_epu16(_mm512_set1_epi16(2 * SMALL_BITS - 2), least);
    return _mm512_cmpeq_epi32_mask(below, _mm512_setzero_si512()) != 0xFFFF;
}

/* Two tokens, `units` (1 or 2) units of dims; b NULL: zero. */
ALWAYS_INLINE __m512i interleave(__m512i *strip, const uint16_t *a, const uint16_t *b, int32_t units, __m512i least)
{
#pragma GCC unroll 2
    for (int32_t u = 0; u < STRIP_DIMS / UNIT_DIMS; u++) {
        __m512i x = _mm512_setzero_si512(), y = x;
        if (u < units) {
            x = _mm512_loadu_si512(a + u * UNIT_DIMS);
            y = b ? _mm512_loadu_si512(b + u * UNIT_DIMS) : y;
            least = least_of(least_of(least, x), y);
        }
        strip[2 * u] = _mm512_unpacklo_epi16(x, y);
        strip[2 * u + 1] = _mm512_unpackhi_epi16(x, y);
    }
    return least;
}

bool fmlak_strip_interleave_avx512bf16(__m512i *strip, const strip_operands *o, int32_t k, int32_t units,
                                       int32_t tokens)
{
    int64_t stride = o->tile->stride;
    __m512i least = _mm512_set1_epi16(-1);
    for (int32_t t = 0; t < tokens; t += FMLAI_TILE_PART) {
        const uint16_t *row = token_of(o->tile, t) + k;
        int32_t n = tokens - t < FMLAI_TILE_PART ? tokens - t : FMLAI_TILE_PART;
        if (units == 2) {
            for (int32_t i = 0; i + 2 <= n; i += 2, row += 2 * stride, strip += STRIP_VECTORS) {
                least = interleave(strip, row, row + stride, 2, least);
            }
        } else {
            for (int32_t i = 0; i + 2 <= n; i += 2, row += 2 * stride, strip += STRIP_VECTORS) {
                least = interleave(strip, row, row + stride, 1, least);
            }
        }
        if (n % 2 == 1) {
            least = interleave(strip, row, NULL, units, least);
        }
    }
    return has_small_values(least);
}

void fmlak_strip_separate_avx512bf16(__m512i *strip, __m512i *small, int32_t pairs)
{
    uint16_t *from = (uint16_t *)strip, *to = (uint16_t *)small;
    for (int32_t i = 0; i < pairs * STRIP_VECTORS * UNIT_DIMS; i++) {
        uint32_t bits = (uint32_t)from[i] << 16;
        float x;
        to[i] = 0;
        if ((from[i] & 0x7FFF) < SMALL_BITS) {
            memcpy(&x, &bits, sizeof x);
            x *= SMALL_FACTOR;
            memcpy(&bits, &x, sizeof bits);
            to[i] = (uint16_t)(bits >> 16);
            from[i] = 0;
        }
    }
}

typedef __m512 sum_block[GROUP_ROWS][STRIP_VECTORS];

ALWAYS_INLINE void clear(sum_block acc, int32_t n, int32_t vectors)
{
#pragma GCC unroll 4
    for (int32_t i = 0; i < n; i++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            acc[i][v] = _mm512_setzero_ps();
        }
    }
}

/* A pair of tokens; weights of its n rows. */
ALWAYS_INLINE void add_pair(sum_block acc, const int32_t *weights, const __m512i x[STRIP_VECTORS], int32_t n,
                            int32_t vectors)
{
#pragma GCC unroll 4
    for (int32_t i = 0; i < n; i++) {
        __m512i w = broadcast_pair(weights + i);
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            acc[i][v] = dot(acc[i][v], x[v], w);
        }
    }
}

/* sums = sums * alpha + acc, or acc. */
ALWAYS_INLINE void join(float *sums, const float *alpha, sum_block acc, int32_t n, int32_t vectors)
{
#pragma GCC unroll 4
    for (int32_t i = 0; i < n; i++) {
        __m512 a = alpha ? _mm512_set1_ps(alpha[i]) : _mm512_setzero_ps();
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            float *at = sums + i * STRIP_DIMS + v * LANES;
            _mm512_store_ps(at, alpha ? _mm512_fmadd_ps(_mm512_load_ps(at), a, acc[i][v]) : acc[i][v]);
        }
    }
}

/* n rows, `vectors` vectors of dims: constants in each caller, so that the loops unroll and the sums stay in
 * registers. */
ALWAYS_INLINE void multiply(float *sums, const int32_t *weights, int64_t stride, const __m512i *strip,
                            const float *alpha, int32_t pairs, int32_t n, int32_t vectors)
{
    sum_block acc;
    clear(acc, n, vectors);
    for (int32_t p = 0; p < pairs; p++) {
        add_pair(acc, weights + p * stride, strip + p * STRIP_VECTORS, n, vectors);
    }
    join(sums, alpha, acc, n, vectors);
}

/*
 * The first four rows of a strip of 64 dims, all pairs of tokens complete: interleaves beside the products, which leave
 * room for it. Returns true if there are small values: then the strip is made, and nothing is added.
 */
static bool interleave_and_multiply(float *sums, const strip_operands *o, __m512i *strip, const int32_t *weights,
                                    int64_t stride, const float *alpha, int32_t k, int32_t pairs)
{
    sum_block acc;
    __m512i least = _mm512_set1_epi16(-1);
    clear(acc, GROUP_ROWS, STRIP_VECTORS);
    for (int32_t p = 0; p < pairs; p += FMLAI_TILE_PART / 2) {
        const uint16_t *row = token_of(o->tile, 2 * p) + k;
        int32_t n = pairs - p < FMLAI_TILE_PART / 2 ? pairs - p : FMLAI_TILE_PART / 2;
        for (int32_t i = 0; i < n; i++, row += 2 * o->tile->stride, strip += STRIP_VECTORS, weights += stride) {
            __m512i x[STRIP_VECTORS];
            least = interleave(x, row, row + o->tile->stride, 2, least);
#pragma GCC unroll 4
            for (int32_t v = 0; v < STRIP_VECTORS; v++) {
                strip[v] = x[v];
            }
            add_pair(acc, weights, x, GROUP_ROWS, STRIP_VECTORS);
        }
    }
    if (has_small_values(least)) {
        return true;
    }
    join(sums, alpha, acc, GROUP_ROWS, STRIP_VECTORS);
    return false;
}

static void multiply_n(float *sums, const int32_t *weights, int64_t stride, const __m512i *strip,
                       const float *alpha, int32_t pairs, int32_t n, int32_t units)
{
    if (n == GROUP_ROWS && units == 2) {
        multiply(sums, weights, stride, strip, alpha, pairs, GROUP_ROWS, 4);
    } else if (n == GROUP_ROWS) {
        multiply(sums, weights, stride, strip, alpha, pairs, GROUP_ROWS, 2);
    } else {
        for (int32_t i = 0; i < n; i++) {
            multiply(sums + i * STRIP_DIMS, weights + i, stride, strip, alpha ? alpha + i : NULL, pairs, 1,
                     4);
        }
    }
}

/* Adds the products of a strip of small values, four rows or fewer. */
static void add_small(float *sums, const int32_t *weights, int64_t stride, const __m512i *small,
                      int32_t pairs, int32_t n)
{
    _Alignas(64) float block[GROUP_ROWS * STRIP_DIMS];
    multiply_n(block, weights, stride, small, NULL, pairs, n, 2);
    for (int32_t i = 0; i < n * STRIP_DIMS; i++) {
        sums[i] += block[i] * (1.0f / SMALL_FACTOR);
    }
}

/* Of `count` rows that are to be fetched, as many as each group of rows takes in each strip. */
static int32_t share_of(int32_t count, const strip_operands *o)
{
    int32_t steps = (o->rows + GROUP_ROWS - 1) / GROUP_ROWS * ((o->d + STRIP_DIMS - 1) / STRIP_DIMS);
    return (count + steps - 1) / steps;
}

/* Rows begin..end-1, the first `tokens` tokens. */
static void accumulate_rows(const strip_operands *o, int32_t begin, int32_t end, int32_t tokens)
{
    _Alignas(64) __m512i strip[MAX_PAIRS * STRIP_VECTORS], small[MAX_PAIRS * STRIP_VECTORS];
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(o->rows) * STRIP_DIMS, stride = weights_stride(o->rows);
    int32_t pairs = pairs_of(tokens);
    fmlai_ahead *ahead = o->tile->ahead;
    int32_t step = ahead ? share_of(ahead->count, o) : 0;
    for (int32_t k = 0; k < o->d; k += STRIP_DIMS) {
        float *first = o->sums + k / STRIP_DIMS * strip_stride;
        int32_t units = o->d - k > UNIT_DIMS ? 2 : 1, r = begin;
        bool has_small;
        if (ahead) {
            fmlai_fetch_ahead(ahead, step);
        }
        if (units == 2 && end - begin >= GROUP_ROWS && tokens % 2 == 0) {
            has_small = interleave_and_multiply(first + (int64_t)r * STRIP_DIMS, o, strip, o->weights + r, stride,
                                                o->alpha ? o->alpha + r : NULL, k, pairs);
            r += has_small ? 0 : GROUP_ROWS;
        } else {
            has_small = fmlak_strip_interleave_avx512bf16(strip, o, k, units, tokens);
        }
        if (has_small) {
            fmlak_strip_separate_avx512bf16(strip, small, pairs);
        }
        for (; r < end; r += GROUP_ROWS) {
            float *sums = first + (int64_t)r * STRIP_DIMS;
            const float *alpha = o->alpha ? o->alpha + r : NULL;
            int32_t n = end - r < GROUP_ROWS ? end - r : GROUP_ROWS;
            if (ahead && r > begin) {
                fmlai_fetch_ahead(ahead, step);
            }
            int32_t seen = pairs_of(fmlai_tile_seen_range(o->visible ? o->visible + r : NULL, n, tokens).most);
            multiply_n(sums, o->weights + r, stride, strip, alpha, seen, n, units);
            if (has_small) {
                add_small(sums, o->weights + r, stride, small, seen, n);
            }
        }
    }
}

bool fmlak_tile_finite_avx512bf16(const strip_operands *o, int32_t begin, int32_t end)
{
    const __m512i low = _mm512_set1_epi32(0x7F80), high = _mm512_set1_epi32(0x7F800000);
    for (int32_t t = begin; t < end; t++) {
        for (int32_t k = 0; k < o->d; k += UNIT_DIMS) {
            __m512i x = _mm512_loadu_si512(token_of(o->tile, t) + k);
            /* In a number that is not finite, all bits of the exponent are set. */
            if (_mm512_cmpeq_epi32_mask(_mm512_and_si512(x, low), low) |
                _mm512_cmpeq_epi32_mask(_mm512_and_si512(x, high), high)) {
                return false;
            }
        }
    }
    return true;
}

void fmlak_tile_accumulate_parts_avx512bf16(void *packed_sums, const void *packed_weights, const fmlai_tile_parts *tile,
                                            const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens,
                                            int32_t d)
{
    strip_operands o = {packed_sums, packed_weights, tile, alpha, visible, rows, d};
    accumulate_seen(&o, tokens, accumulate_rows);
}

void fmlak_tile_accumulate_avx512bf16(void *packed_sums, const void *packed_weights, const void *tile,
                                      int64_t tile_stride, const float *alpha, const int32_t *visible,
                                      int32_t rows, int32_t tokens, int32_t d)
{
    fmlai_tile_parts parts = fmlai_tile_parts_of(tile, tile_stride, FMLA_BF16);
    fmlak_tile_accumulate_parts_avx512bf16(packed_sums, packed_weights, &parts, alpha, visible, rows, tokens, d);
}
