/* SPDX-License-Identifier: MIT */
/* tile_rotate_avx2.c: RMS sums and RoPE of the fused operations' queries, conjugate RoPE of their results. */
#include <math.h>

#include "../../format/format.h"
#include "tile_avx2.h"

static double squares_of_row(const float *x, int32_t n)
{
    __m256d sum[4] = {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()};
    double lanes[4];
    for (int32_t i = 0; i < n; i += 16) {
        for (int32_t j = 0; j < 4; j++) {
            __m256d y = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4 * j));
            sum[j] = _mm256_fmadd_pd(y, y, sum[j]);
        }
    }
    _mm256_storeu_pd(lanes, _mm256_add_pd(_mm256_add_pd(sum[0], sum[1]), _mm256_add_pd(sum[2], sum[3])));
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

void fmlak_tile_squares_avx2(double *sums, const float *x, int64_t stride, int32_t rows, int32_t n)
{
    for (int32_t r = 0; r < rows; r++) {
        sums[r] = squares_of_row(x + r * stride, n);
    }
}

/* Nearest bf16, ties to even, as float; NaN stays NaN. */
static inline __m256 through_bf16(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 y = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    return _mm256_and_ps(y, _mm256_castsi256_ps(_mm256_set1_epi32((int)0xFFFF0000u)));
}

void fmlak_tile_rotate_avx2(float *x, const float *cos_sin, int32_t pairs, bool neox)
{
    const __m256 minus = _mm256_set1_ps(-0.0f);
    int32_t i = 0;
    for (; i + 8 <= pairs; i += 8) {
        __m256 c = _mm256_loadu_ps(cos_sin + i), s = _mm256_loadu_ps(cos_sin + pairs + i);
        float *at = neox ? x + i : x + 2 * i, *next = neox ? at + pairs : at + 8;
        __m256 a = _mm256_loadu_ps(at), b = _mm256_loadu_ps(next), x0 = a, x1 = b;
        if (!neox) { /* lanes of pairs 0 1 4 5 2 3 6 7 */
            x0 = _mm256_shuffle_ps(a, b, 0x88);
            x1 = _mm256_shuffle_ps(a, b, 0xDD);
            c = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(c), 0xD8));
            s = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(s), 0xD8));
        }
        __m256 first = through_bf16(_mm256_fmadd_ps(x0, c, _mm256_xor_ps(_mm256_mul_ps(x1, s), minus)));
        __m256 second = through_bf16(_mm256_fmadd_ps(x0, s, _mm256_mul_ps(x1, c)));
        _mm256_storeu_ps(at, neox ? first : _mm256_unpacklo_ps(first, second));
        _mm256_storeu_ps(next, neox ? second : _mm256_unpackhi_ps(first, second));
    }
    for (; i < pairs; i++) {
        float *at = neox ? x + i : x + 2 * i, *next = neox ? at + pairs : at + 1;
        float x0 = *at, x1 = *next, c = cos_sin[i], s = cos_sin[pairs + i];
        *at = fmlai_f32_from_bf16(fmlai_bf16_from_f32(fmaf(x0, c, -(x1 * s))));
        *next = fmlai_f32_from_bf16(fmlai_bf16_from_f32(fmaf(x0, s, x1 * c)));
    }
}

/* Products of floats are exact in float64, so it does not matter how they are added. */
void fmlak_tile_unrotate_avx2(float *x, const float *cos_sin, int32_t pairs, bool neox)
{
    int32_t i = 0;
    for (; i + 4 <= pairs; i += 4) {
        __m256d c = _mm256_cvtps_pd(_mm_loadu_ps(cos_sin + i)), s = _mm256_cvtps_pd(_mm_loadu_ps(cos_sin + pairs + i));
        float *at = neox ? x + i : x + 2 * i, *next = neox ? at + pairs : at + 4;
        __m128 a = _mm_loadu_ps(at), b = _mm_loadu_ps(next);
        __m256d o0 = _mm256_cvtps_pd(neox ? a : _mm_shuffle_ps(a, b, 0x88));
        __m256d o1 = _mm256_cvtps_pd(neox ? b : _mm_shuffle_ps(a, b, 0xDD));
        __m128 first = _mm256_cvtpd_ps(_mm256_fmadd_pd(o0, c, _mm256_mul_pd(o1, s)));
        __m128 second = _mm256_cvtpd_ps(_mm256_fmsub_pd(o1, c, _mm256_mul_pd(o0, s)));
        _mm_storeu_ps(at, neox ? first : _mm_unpacklo_ps(first, second));
        _mm_storeu_ps(next, neox ? second : _mm_unpackhi_ps(first, second));
    }
    for (; i < pairs; i++) {
        float *at = neox ? x + i : x + 2 * i, *next = neox ? at + pairs : at + 1;
        double c = cos_sin[i], s = cos_sin[pairs + i], o0 = *at, o1 = *next;
        *at = (float)(o0 * c + o1 * s);
        *next = (float)(o1 * c - o0 * s);
    }
}
