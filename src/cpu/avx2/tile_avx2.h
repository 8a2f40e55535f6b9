/* SPDX-License-Identifier: MIT */
/*
 * tile_avx2.h: what the AVX2 tile kernels share: their layouts and their 2^x.
 *
 * Packed rows     [group of 16 rows][d][16]            rows beyond the last are zero
 * Packed weights  [tokens][lanes + 16]                 the 16 keep tokens apart in the cache
 * Packed sums     [strip of 16 dims][lanes][16]
 *
 * All of float. lanes = fmlai_tile_lanes(rows).
 */
#ifndef FLASHMLA_TILE_AVX2_H
#define FLASHMLA_TILE_AVX2_H

#include <immintrin.h>
#include <stdbool.h>

#include "../tile.h"

#define LANES         8  /* floats of a vector */
#define STRIP         16 /* dims of sums, and rows of scores, that a kernel holds: two vectors */
#define STRIP_VECTORS 2

static inline int64_t weights_stride(int32_t rows)
{
    return fmlai_tile_lanes(rows) + 16;
}

/*
 * 2^x for x <= 126 to about 1e-7 relative, exactly 1 for 0; subnormal results included, 0 below them; NaN
 * stays. The polynomial (degree 6 on -0.5..0.5) interpolates at Chebyshev nodes with the constant fixed at 1.
 */
static inline __m256 exp2_avx2(__m256 x)
{
    x = _mm256_max_ps(_mm256_set1_ps(-160.0f), x); /* in this order NaN passes */
    __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_sub_ps(x, n);
    __m256 p = _mm256_set1_ps(0.00015453163f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.0013390863f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.009618083f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.05550357f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.2402265f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0.6931472f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    /* 2^n in two factors, each a normal number. */
    __m256i whole = _mm256_cvtps_epi32(n);
    __m256i half = _mm256_srai_epi32(whole, 1);
    __m256i bias = _mm256_set1_epi32(127);
    __m256i a = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(a)), _mm256_castsi256_ps(b));
}

void fmlak_tile_scores_avx2(float *s, const void *packed_rows, const void *tile, int64_t tile_stride,
                            int32_t rows, int32_t tokens, int32_t d);
void fmlak_tile_softmax_avx2(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                             const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens);
void fmlak_tile_accumulate_avx2(void *packed_sums, const void *packed_weights, const void *tile,
                                int64_t tile_stride, const float *alpha, const int32_t *visible, int32_t rows,
                                int32_t tokens, int32_t d);
void fmlak_tile_begin_avx2(double *sums, const float *x, int32_t n);
void fmlak_tile_fold_avx2(double *sums, const float *x, double keep, double join, int32_t n);
void fmlak_tile_finish_avx2(float *dst, const double *sums, double factor, int32_t n);
void fmlak_tile_widen_avx2(float *dst, int64_t dst_stride, const void *src, int64_t src_stride, int32_t rows,
                           int32_t n);
void fmlak_tile_narrow_avx2(void *dst, const float *x, float factor, int32_t n);
void fmlak_tile_gradients_avx2(float *s, float *ds, float scale2, const float *lse2, const float *delta,
                               bool by_token, const int32_t *visible, int32_t rows, int32_t tokens);
void fmlak_tile_squares_avx2(double *sums, const float *x, int64_t stride, int32_t rows, int32_t n);
void fmlak_tile_rotate_avx2(float *x, const float *cos_sin, int32_t pairs, bool neox);
void fmlak_tile_unrotate_avx2(float *x, const float *cos_sin, int32_t pairs, bool neox);

#endif
