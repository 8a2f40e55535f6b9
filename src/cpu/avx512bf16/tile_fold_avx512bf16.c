/* SPDX-License-Identifier: MIT */
/* tile_fold_avx512bf16.c: rows of partial results summed up in float64; rows of bf16 as floats and back. */
#include <string.h>

#include "../../format/format.h"
#include "tile_avx512bf16.h"

void fmlak_tile_begin_avx512bf16(double *sums, const float *x, int32_t n)
{
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm512_storeu_pd(sums + i, _mm512_cvtps_pd(_mm256_loadu_ps(x + i)));
    }
    for (; i < n; i++) {
        sums[i] = x[i];
    }
}

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

/* VCVTNEPS2BF16 takes subnormal numbers for zero, so rounding is done on bits. */
void fmlak_tile_narrow_avx512bf16(void *dst, const float *x, float factor, int32_t n)
{
    const __m512i below_half = _mm512_set1_epi32(0x7FFF), one = _mm512_set1_epi32(1);
    const __m512i sign = _mm512_set1_epi32(0x8000), nan = _mm512_set1_epi32(0x7FC0);
    const __m512 f = _mm512_set1_ps(factor);
    uint16_t *to = dst;
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m512 y = _mm512_mul_ps(_mm512_loadu_ps(x + i), f);
        __m512i bits = _mm512_castps_si512(y), high = _mm512_srli_epi32(bits, 16);
        __m512i up = _mm512_add_epi32(below_half, _mm512_and_si512(high, one));
        __m512i half = _mm512_srli_epi32(_mm512_add_epi32(bits, up), 16);
        half = _mm512_mask_mov_epi32(half, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q),
                                     _mm512_or_si512(_mm512_and_si512(high, sign), nan));
        _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtepi32_epi16(half));
    }
    for (; i < n; i++) {
        fmlai_store_f32(dst, FMLA_BF16, i, x[i] * factor);
    }
}

void fmlak_tile_widen_avx512bf16(float *dst, int64_t dst_stride, const void *src, int64_t src_stride, int32_t rows,
                                 int32_t n)
{
    int32_t whole = n / LANES * LANES;
    for (int32_t r = 0; r < rows; r++) {
        const uint8_t *from = (const uint8_t *)src + 2 * r * src_stride;
        float *to = dst + r * dst_stride;
        for (int32_t i = 0; i < whole; i += LANES) {
            __m512i half = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from + 2 * i)));
            _mm512_storeu_si512(to + i, _mm512_slli_epi32(half, 16));
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
