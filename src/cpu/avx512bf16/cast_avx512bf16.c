/* SPDX-License-Identifier: MIT */
/*
 * cast_avx512bf16.c: quantiser D, sixteen groups of 32 at a time: their largest magnitudes become one vector, so that
 * division and logarithm are done once. format/cast.c is the rule; groups with NaN or infinity go there.
 */
#include "cast_avx512bf16.h"

#include "../../format/format.h"
#include "simd_avx512bf16.h"

#define GROUP  32
#define GROUPS 16 /* at a time */

static inline __m512i magnitude(__m512i bits)
{
    return _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
}

/* Lane i of the result: the largest lane of x[i]. */
static inline __m512i largest_of_each(const __m512i x[GROUPS])
{
    __m512i pairs[8], fours[4], halves[2];
#pragma GCC unroll 8
    for (int32_t i = 0; i < 8; i++) {
        __m512i a = x[2 * i], b = x[2 * i + 1];
        pairs[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
#pragma GCC unroll 4
    for (int32_t i = 0; i < 4; i++) {
        __m512i a = pairs[2 * i], b = pairs[2 * i + 1];
        fours[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
#pragma GCC unroll 2
    for (int32_t i = 0; i < 2; i++) {
        __m512i a = fours[2 * i], b = fours[2 * i + 1];
        halves[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
    }
    return _mm512_max_epi32(_mm512_shuffle_i32x4(halves[0], halves[1], 0x88),
                            _mm512_shuffle_i32x4(halves[0], halves[1], 0xDD));
}

/* Sixteen values of magnitude below 464 to e4m3 codes. Only the lowest byte of a lane counts. */
static inline __m128i e4m3_codes(__m512 y)
{
    __m512i bits = _mm512_castps_si512(y), size = magnitude(bits);
    /* Numbers of 2^-6 and more: 3 fraction bits, exponent bias 7 instead of 127. */
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
    __m512i normal = _mm512_add_epi32(size, _mm512_set1_epi32(0x7FFFF - (120 << 23)));
    normal = _mm512_srli_epi32(_mm512_add_epi32(normal, odd), 20);
    /* Below: multiples of 2^-9, which is the last bit of numbers from 2^14 on. */
    __m512i small = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(size), _mm512_set1_ps(16384.0f)));
    __mmask16 is_small = _mm512_cmpgt_epi32_mask(_mm512_set1_epi32(121 << 23), size);
    __m512i code = _mm512_mask_mov_epi32(normal, is_small, small);
    /* Bit 7 is the sign. */
    return _mm512_cvtepi32_epi8(
        _mm512_ternarylogic_epi32(_mm512_set1_epi32(0x80), _mm512_srli_epi32(bits, 24), code, 0xCA));
}

/* The first `count` of sixteen groups. */
static void cast_groups(const float *x, int32_t count, uint8_t *codes, int64_t code_stride, uint8_t *scales)
{
    const __m512i least = _mm512_castps_si512(_mm512_set1_ps(1e-4f)), one = _mm512_set1_epi32(1);
    __m512i sizes[GROUPS];
    uint8_t bytes[GROUPS];
    float inverse[GROUPS];
#pragma GCC unroll 16
    for (int32_t g = 0; g < GROUPS; g++) {
        const float *from = x + (g < count ? g : 0) * GROUP;
        sizes[g] = _mm512_max_epi32(magnitude(_mm512_loadu_si512(from)), magnitude(_mm512_loadu_si512(from + 16)));
    }
    __m512i largest = largest_of_each(sizes);
    uint32_t odd = _mm512_cmpgt_epi32_mask(largest, _mm512_set1_epi32(0x7F7FFFFF)); /* not finite */
    __m512 u = _mm512_div_ps(_mm512_castsi512_ps(_mm512_max_epi32(largest, least)), _mm512_set1_ps(448.0f));
    /* 127 + e, 2^e being the smallest power of two that is not below u, a normal number. */
    __m512i scale = _mm512_add_epi32(_mm512_srli_epi32(_mm512_sub_epi32(_mm512_castps_si512(u), one), 23), one);
    _mm_storeu_si128((__m128i *)bytes, _mm512_cvtepi32_epi8(scale));
    _mm512_storeu_si512(inverse, _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(254), scale), 23));
    for (int32_t g = 0; g < count; g++) {
        const float *from = x + g * GROUP;
        uint8_t *to = codes + g * code_stride;
        __m512 factor = _mm512_set1_ps(inverse[g]);
        scales[g] = bytes[g];
        _mm_storeu_si128((__m128i *)to, e4m3_codes(_mm512_mul_ps(_mm512_loadu_ps(from), factor)));
        _mm_storeu_si128((__m128i *)(to + 16), e4m3_codes(_mm512_mul_ps(_mm512_loadu_ps(from + 16), factor)));
    }
    for (int32_t g = 0; odd != 0 && g < count; g++) {
        if (odd >> g & 1) {
            scales[g] = fmlai_fp8_cast_group(x + g * GROUP, GROUP, codes + g * code_stride);
        }
    }
}

void fmlak_cast_row_avx512bf16(const float *x, int32_t groups, uint8_t *codes, int64_t code_stride, uint8_t *scales)
{
    for (int32_t g = 0; g < groups; g += GROUPS) {
        int32_t count = groups - g < GROUPS ? groups - g : GROUPS;
        cast_groups(x + g * GROUP, count, codes + g * code_stride, code_stride, scales + g);
    }
}
