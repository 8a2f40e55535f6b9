/* SPDX-License-Identifier: MIT */
/* tile_rotate_avx512bf16.c: RMS sums and conjugate RoPE of the fused operations, in float64. RoPE itself is AVX2's. */
#include "tile_avx512bf16.h"

#define SUM_ROWS 4 /* at a time: eight chains of additions */

/* Lanes and their order are those of tile_rotate_avx2.c. */
static inline __attribute__((always_inline)) void squares_of_rows(double *sums, const float *x, int64_t stride,
                                                                  int32_t rows, int32_t n)
{
    __m512d sum[SUM_ROWS][2];
    double lanes[16];
#pragma GCC unroll 4
    for (int32_t r = 0; r < rows; r++) {
        sum[r][0] = sum[r][1] = _mm512_setzero_pd();
    }
    for (int32_t i = 0; i < n; i += 16) {
#pragma GCC unroll 4
        for (int32_t r = 0; r < rows; r++) {
            const float *at = x + r * stride + i;
            __m512d a = _mm512_cvtps_pd(_mm256_loadu_ps(at)), b = _mm512_cvtps_pd(_mm256_loadu_ps(at + 8));
            sum[r][0] = _mm512_fmadd_pd(a, a, sum[r][0]);
            sum[r][1] = _mm512_fmadd_pd(b, b, sum[r][1]);
        }
    }
#pragma GCC unroll 4
    for (int32_t r = 0; r < rows; r++) {
        _mm512_storeu_pd(lanes, sum[r][0]);
        _mm512_storeu_pd(lanes + 8, sum[r][1]);
        for (int32_t i = 0; i < 4; i++) {
            lanes[i] = (lanes[i] + lanes[4 + i]) + (lanes[8 + i] + lanes[12 + i]);
        }
        sums[r] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    }
}

void fmlak_tile_squares_avx512bf16(double *sums, const float *x, int64_t stride, int32_t rows, int32_t n)
{
    int32_t r = 0;
    for (; r + SUM_ROWS <= rows; r += SUM_ROWS) {
        squares_of_rows(sums + r, x + r * stride, stride, SUM_ROWS, n);
    }
    for (; r < rows; r++) {
        squares_of_rows(sums + r, x + r * stride, stride, 1, n);
    }
}

/* Products of floats are exact in float64, so it does not matter how they are added. */
void fmlak_tile_unrotate_avx512bf16(float *x, const float *cos_sin, int32_t pairs, bool neox)
{
    const __m512i apart = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i together = _mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    int32_t i = 0;
    for (; i + 8 <= pairs; i += 8) {
        __m512d c = _mm512_cvtps_pd(_mm256_loadu_ps(cos_sin + i)),
                s = _mm512_cvtps_pd(_mm256_loadu_ps(cos_sin + pairs + i));
        float *at = neox ? x + i : x + 2 * i, *next = neox ? at + pairs : at + 8;
        __m256 a = _mm256_loadu_ps(at), b = _mm256_loadu_ps(next);
        __m512 both =
            _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(a)), _mm256_castps_pd(b), 1));
        if (!neox) {
            both = _mm512_permutexvar_ps(apart, both);
        }
        __m512d o0 = _mm512_cvtps_pd(_mm512_castps512_ps256(both));
        __m512d o1 = _mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(both), 1)));
        __m256 first = _mm512_cvtpd_ps(_mm512_fmadd_pd(o0, c, _mm512_mul_pd(o1, s)));
        __m256 second = _mm512_cvtpd_ps(_mm512_fmsub_pd(o1, c, _mm512_mul_pd(o0, s)));
        both = _mm512_castpd_ps(
            _mm512_insertf64x4(_mm512_castpd256_pd512(_mm256_castps_pd(first)), _mm256_castps_pd(second), 1));
        if (!neox) {
            both = _mm512_permutexvar_ps(together, both);
        }
        _mm256_storeu_ps(at, _mm512_castps512_ps256(both));
        _mm256_storeu_ps(next, _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(both), 1)));
    }
    for (; i < pairs; i++) {
        float *at = neox ? x + i : x + 2 * i, *next = neox ? at + pairs : at + 1;
        double c = cos_sin[i], s = cos_sin[pairs + i], o0 = *at, o1 = *next;
        *at = (float)(o0 * c + o1 * s);
        *next = (float)(o1 * c - o0 * s);
    }
}
