/* SPDX-License-Identifier: MIT */
/* tile_fold_avx512bf16.c: rows of partial results summed up in float64. */
#include "tile_avx512bf16.h"

void fmlak_tile_fold_avx512bf16(double *sums, const float *x, double keep, double join, int32_t n)
{
    const __m512d k = _mm512_set1_pd(keep), j = _mm512_set1_pd(join);
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        __m512d added = _mm512_mul_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x + i)), j);
        _mm512_storeu_pd(sums + i, _mm512_fmadd_pd(_mm512_loadu_pd(sums + i), k, added));
    }
    for (; i < n; i++) {
        sums[i] = sums[i] * keep + (double)x[i] * join;
    }
}

void fmlak_tile_finish_avx512bf16(float *dst, const double *sums, double factor, int32_t n)
{
    const __m512d f = _mm512_set1_pd(factor);
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(dst + i, _mm512_cvtpd_ps(_mm512_mul_pd(_mm512_loadu_pd(sums + i), f)));
    }
    for (; i < n; i++) {
        dst[i] = (float)(sums[i] * factor);
    }
}
