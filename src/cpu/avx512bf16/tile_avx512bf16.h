/* SPDX-License-Identifier: MIT */
/*
 * tile_avx512bf16.h: what the AVX-512 BF16 tile kernels share: their layouts, their product and their 2^x.
 *
 * Of bf16 tiles. VDPBF16PS multiplies 16 pairs of bf16 by 16 pairs and adds each pair of products to an fp32
 * lane, so everything that is summed over is stored in pairs: dims of rows and tokens in scores, tokens in
 * weighted sums.
 *
 *   packed rows     [group of 64 rows][quad of dims][vector of 16 rows][2][8][4] the last group may have fewer vectors
 *   packed weights  [pair of tokens][lanes + 16][2]                              the 16 keep pairs apart in the cache
 *   packed sums     [strip of 64 dims][lanes][64] float                          dims in the order of a strip, below
 *
 * A row's quad of dims is two pairs in neighbouring lanes, so that 16 rows are two vectors: rows 0 1 4 5 8 9 12 13 and
 * the others, as unpacking two vectors of pairs leaves them.
 *
 * A strip holds units of 32 dims. Pairing two tokens by unpacking 16-bit elements leaves the dims of a unit
 * in two vectors: 0-3 8-11 16-19 24-27 and 4-7 12-15 20-23 28-31. Sums keep that order; unpack() restores it.
 *
 * f32 tiles have the same layouts with single floats in place of pairs, and sums with dims in order:
 *
 *   packed rows     [group of 64 rows][d][vector of 16 rows][16]
 *   packed weights  [tokens][lanes + 16]
 *   packed sums     [strip of 64 dims][lanes][64]
 *
 * VDPBF16PS takes subnormal bf16 (below 2^-126) for zero, and flushes subnormal sums. In scores that is an
 * absolute error of at most 2^-126 a term, far below anything that a logit shows; weighted sums take care
 * (tile_accumulate_avx512bf16.c).
 */
#ifndef FLASHMLA_TILE_AVX512BF16_H
#define FLASHMLA_TILE_AVX512BF16_H

#include <stdbool.h>

#include "../tile.h"
#include "simd_avx512bf16.h"

#define LANES         FMLAI_TILE_LANES
#define GROUP_VECTORS 4 /* of rows */
#define STRIP_DIMS    64
#define UNIT_DIMS     32
#define STRIP_VECTORS (STRIP_DIMS / LANES)

static inline int64_t weights_stride(int32_t rows) /* in pairs, or floats */
{
    return fmlai_tile_lanes(rows) + LANES;
}

static inline int32_t pairs_of(int32_t n)
{
    return (n + 1) / 2;
}

static inline int32_t quads_of(int32_t n)
{
    return (n + 3) / 4;
}

#if defined(FLASHMLA_EMULATE_AVX512)

static inline __m512 emulated_flush(__m512 x)
{
    __m512i exponent = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7F800000));
    return _mm512_maskz_mov_ps((__mmask16)~_mm512_cmpeq_epi32_mask(exponent, _mm512_setzero_si512()), x);
}

static inline __m512 dot(__m512 sum, __m512i a, __m512i b)
{
    const __m512i odd = _mm512_set1_epi32((int32_t)0xFFFF0000u);
    __m512 a1 = emulated_flush(_mm512_castsi512_ps(_mm512_and_si512(a, odd)));
    __m512 b1 = emulated_flush(_mm512_castsi512_ps(_mm512_and_si512(b, odd)));
    __m512 a0 = emulated_flush(_mm512_castsi512_ps(_mm512_slli_epi32(a, 16)));
    __m512 b0 = emulated_flush(_mm512_castsi512_ps(_mm512_slli_epi32(b, 16)));
    sum = emulated_flush(_mm512_fmadd_ps(a1, b1, emulated_flush(sum)));
    return emulated_flush(_mm512_fmadd_ps(a0, b0, sum));
}

static inline __m512i emulated_round(__m512 x) /* to bf16, in the high half */
{
    __m512i bits = _mm512_castps_si512(emulated_flush(x));
    __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(up, nan, _mm512_or_si512(bits, _mm512_set1_epi32(0x400000)));
}

/* Two vectors rounded to bf16, interleaved: low half of lane i from `low`. */
static inline __m512i pair_up(__m512 low, __m512 high)
{
    __m512i upper = _mm512_and_si512(emulated_round(high), _mm512_set1_epi32((int32_t)0xFFFF0000u));
    return _mm512_or_si512(upper, _mm512_srli_epi32(emulated_round(low), 16));
}

/* Two vectors rounded to bf16, one after the other. */
static inline __m512i two_in_order(__m512 first, __m512 second)
{
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return pair_up(_mm512_permutex2var_ps(first, even, second), _mm512_permutex2var_ps(first, odd, second));
}

#else

static inline __m512 dot(__m512 sum, __m512i a, __m512i b)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

static inline __m512i pair_up(__m512 low, __m512 high)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23,
                                           7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

static inline __m512i two_in_order(__m512 first, __m512 second)
{
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

#endif

/* A pair of bf16 in all lanes. */
static inline __m512i broadcast_pair(const void *pair)
{
    int32_t bits;
    __builtin_memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
}

/* 16 x 16 transposed in place. */
static inline void transpose_16(__m512i x[16])
{
    __m512i y[16];
#pragma GCC unroll 8
    for (int32_t i = 0; i < 8; i++) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int32_t i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
#pragma GCC unroll 4
    for (int32_t i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88),
                b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xDD);
        __m512i c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
        __m512i d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xDD);
        y[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        y[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
        y[i + 8] = _mm512_shuffle_i32x4(a, c, 0xDD);
        y[i + 12] = _mm512_shuffle_i32x4(b, d, 0xDD);
    }
#pragma GCC unroll 16
    for (int32_t i = 0; i < 16; i++) {
        x[i] = y[i];
    }
}

/*
 * 2^x for x <= 126 to about 1e-7 relative, exactly 1 for 0; subnormal results included, 0 below; NaN stays. The
 * polynomial (degree 6 on -0.5..0.5) interpolates at Chebyshev nodes with the constant fixed at 1.
 */
static inline __m512 exp2_avx512(__m512 x)
{
    x = _mm512_max_ps(_mm512_set1_ps(-160.0f), x); /* in this order NaN passes */
    __m512 n = _mm512_roundscale_ps(x, 0);
    __m512 f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(0.00015453163f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0013390863f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.009618083f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.05550357f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2402265f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931472f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

/* Dims k..k+31 of `rows` rows, 16 at most, as bf16: pair i of all rows in x[i]. Rows that are not there are zero, and
 * dims from d on. */
void fmlak_pairs_of_rows_avx512bf16(__m512i x[LANES], const float *src, int64_t src_stride, int32_t rows, int32_t k,
                                    int32_t d);

/* Weighted sums of bf16 tiles: the operands of a call. */
typedef struct strip_operands {
    float *sums;
    const int32_t *weights;
    const fmlai_tile_parts *tile;
    const float *alpha;
    const int32_t *visible; /* NULL: rows see all tokens */
    int32_t rows;
    int32_t d;
} strip_operands;

#define MAX_PAIRS    (FMLAI_TILE_TOKENS_MAX / 2)
#define SMALL_FACTOR 0x1p62f

/* Dims k..k+31 (units 1) or k..k+63 (2) of the first `tokens` tokens, in pairs; an odd last token is paired with zero.
 * Returns true if there are small values. */
bool fmlak_strip_interleave_avx512bf16(__m512i *strip, const strip_operands *o, int32_t k, int32_t units,
                                       int32_t tokens);
/* Moves small values from a strip to another, where they are larger by SMALL_FACTOR, which makes them normal
 * numbers. */
void fmlak_strip_separate_avx512bf16(__m512i *strip, __m512i *small, int32_t pairs);
/* Tokens begin..end-1 have neither infinities nor NaN. */
bool fmlak_tile_finite_avx512bf16(const strip_operands *o, int32_t begin, int32_t end);

/* Sums up what each row sees: all rows at once, unless a token that some row does not see is not finite. add() does
 * rows begin..end-1 and the first `tokens` tokens. */
static inline void accumulate_seen(const strip_operands *o, int32_t tokens,
                                   void (*add)(const strip_operands *o, int32_t begin, int32_t end, int32_t tokens))
{
    const fmlai_tile_range seen = fmlai_tile_seen_range(o->visible, o->rows, tokens);
    if (seen.least == seen.most || fmlak_tile_finite_avx512bf16(o, seen.least, seen.most)) {
        add(o, 0, o->rows, seen.most);
        return;
    }
    for (int32_t begin = 0, end; begin < o->rows; begin = end) {
        end = fmlai_tile_seen_alike(o->visible, begin, o->rows);
        add(o, begin, end, fmlai_tile_seen(o->visible, begin, tokens));
    }
}

static inline const uint16_t *token_of(const fmlai_tile_parts *tile, int32_t t)
{
    return (const uint16_t *)tile->at[t / FMLAI_TILE_PART] + t % FMLAI_TILE_PART * tile->stride;
}

void fmlak_tile_scores_of_parts_avx512bf16(float *s, const void *packed_rows, const fmlai_tile_parts *tile,
                                           int32_t rows, int32_t tokens, int32_t d);
void fmlak_tile_accumulate_parts_avx512bf16(void *packed_sums, const void *packed_weights, const fmlai_tile_parts *tile,
                                            const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens,
                                            int32_t d);
void fmlak_tile_scores_avx512bf16(float *s, const void *packed_rows, const void *tile, int64_t tile_stride,
                                  int32_t rows, int32_t tokens, int32_t d);
void fmlak_tile_softmax_avx512bf16(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                                   const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens);
void fmlak_tile_accumulate_avx512bf16(void *packed_sums, const void *packed_weights, const void *tile,
                                      int64_t tile_stride, const float *alpha, const int32_t *visible,
                                      int32_t rows, int32_t tokens, int32_t d);

/* For tiles of both kinds. */
void fmlak_tile_begin_avx512bf16(double *sums, const float *x, int32_t n);
void fmlak_tile_fold_avx512bf16(double *sums, const float *x, double keep, double join, int32_t n);
void fmlak_tile_finish_avx512bf16(float *dst, const double *sums, double factor, int32_t n);
void fmlak_tile_widen_avx512bf16(float *dst, int64_t dst_stride, const void *src, int64_t src_stride, int32_t rows,
                                 int32_t n);
void fmlak_tile_narrow_avx512bf16(void *dst, const float *x, float factor, int32_t n);
void fmlak_tile_gradients_avx512bf16(float *s, float *ds, float scale2, const float *lse2, const float *delta,
                                     bool by_token, const int32_t *visible, int32_t rows, int32_t tokens);

void fmlak_tile_squares_avx512bf16(double *sums, const float *x, int64_t stride, int32_t rows, int32_t n);
void fmlak_tile_unrotate_avx512bf16(float *x, const float *cos_sin, int32_t pairs, bool neox);

/* f32 tiles: tile_f32_avx512bf16.c and its kernels. */
extern const fmlai_tile_kernels fmlak_tile_f32_avx512bf16;
void fmlak_tile_scores_f32_avx512bf16(float *s, const void *packed_rows, const void *tile, int64_t tile_stride,
                                      int32_t rows, int32_t tokens, int32_t d);
void fmlak_tile_softmax_f32_avx512bf16(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                                       const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens);
void fmlak_tile_accumulate_f32_avx512bf16(void *packed_sums, const void *packed_weights, const void *tile,
                                          int64_t tile_stride, const float *alpha, const int32_t *visible, int32_t rows,
                                          int32_t tokens, int32_t d);

#endif
