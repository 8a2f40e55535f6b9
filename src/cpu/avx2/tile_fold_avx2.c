/* SPDX-License-Identifier: MIT */
/* tile_fold_avx2.c: rows of partial results summed up in float64; rows of bf16 as floats and back. */
#include <string.h>

#include "../../format/format.h"
#include "tile_avx2.h"

void fmlak_tile_begin_avx2(double *sums, const float *x, int32_t n)
{
    int32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        _mm256_storeu_pd(sums + i, _mm256_cvtps_pd(_mm_loadu_ps(x + i)));
    }
    for (; i < n; i++) {
        sums[i] = x[i];
    }
}

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

/* Nearest bf16, ties to even, in the low halves. */
static inline __m256i halves(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x), high = _mm256_srli_epi32(bits, 16);
    __m256i up = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), _mm256_and_si256(high, _mm256_set1_epi32(1)));
    __m256i half = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
    __m256i nan = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi32(0x8000)), _mm256_set1_epi32(0x7FC0));
    return _mm256_blendv_epi8(half, nan, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

void fmlak_tile_narrow_avx2(void *dst, const float *x, float factor, int32_t n)
{
    const __m256 f = _mm256_set1_ps(factor);
    uint16_t *to = dst;
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        __m256i first = halves(_mm256_mul_ps(_mm256_loadu_ps(x + i), f));
        __m256i second = halves(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), f));
        __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
        _mm256_storeu_si256((__m256i *)(to + i), packed);
    }
    for (; i < n; i++) {
        fmlai_store_f32(dst, FMLA_BF16, i, x[i] * factor);
    }
}

void fmlak_tile_widen_avx2(float *dst, int64_t dst_stride, const void *src, int64_t src_stride, int32_t rows, int32_t n)
{
    int32_t whole = n / 8 * 8;
    for (int32_t r = 0; r < rows; r++) {
        const uint8_t *from = (const uint8_t *)src + 2 * r * src_stride;
        float *to = dst + r * dst_stride;
        for (int32_t i = 0; i < whole; i += 8) {
            __m256i half = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + 2 * i)));
            _mm256_storeu_si256((__m256i *)(to + i), _mm256_slli_epi32(half, 16));
        }
    }
    for (int32_t r = 0; whole < n && r < rows; r++) {
        for (int32_t i = whole; i < n; i++) {
            uint16_t half;
            memcpy(&half, (const uint8_t *)src + 2 * (r * src_stride + i), sizeof half);
            dst[r * dst_stride + i] = fmlai_f32_from_bf16(half);
        }
    }
}
