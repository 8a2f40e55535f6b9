/* SPDX-License-Identifier: MIT */
/* tile_fold_avx2.c: rows of partial results summed up in float64. */
#include "tile_avx2.h"

void fmlak_tile_fold_avx2(double *sums, const float *x, double keep, double join, int32_t n)
{
    const __m256d k = _mm256_set1_pd(keep), j = _mm256_set1_pd(join);
    int32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        __m256d added = _mm256_mul_pd(_mm256_cvtps_pd(_mm_loadu_ps(x + i)), j);
        _mm256_storeu_pd(sums + i, _mm256_fmadd_pd(_mm256_loadu_pd(sums + i), k, added));
    }
    for (; i < n; i++) {
        sums[i] = sums[i] * keep + (double)x[i] * join;
    }
}

void fmlak_tile_finish_avx2(float *dst, const double *sums, double factor, int32_t n)
{
    const __m256d f = _mm256_set1_pd(factor);
    int32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        _mm_storeu_ps(dst + i, _mm256_cvtpd_ps(_mm256_mul_pd(_mm256_loadu_pd(sums + i), f)));
    }
    for (; i < n; i++) {
        dst[i] = (float)(sums[i] * factor);
    }
}
