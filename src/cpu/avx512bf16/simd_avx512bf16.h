/* SPDX-License-Identifier: MIT */
/*
 * simd_avx512bf16.h: the intrinsics of this folder. FLASHMLA_EMULATE_AVX512 takes them from SIMDe instead, so
 * that the same kernels run, slowly, on processors without AVX-512: for tests only. What SIMDe lacks is added
 * here.
 */
#ifndef FLASHMLA_SIMD_AVX512BF16_H
#define FLASHMLA_SIMD_AVX512BF16_H

#if defined(FLASHMLA_EMULATE_AVX512)
#pragma GCC diagnostic ignored "-Wpsabi"
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

static inline __m512i emulated_cvtepu8_epi32(__m128i bytes)
{
    __m256i low = _mm256_cvtepu8_epi32(bytes), high = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(bytes, bytes));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#define _mm512_cvtepu8_epi32(bytes) emulated_cvtepu8_epi32(bytes)

static inline __m512i emulated_cvtepu16_epi32(__m256i halves)
{
    __m256i low = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(halves));
    __m256i high = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(halves, 1));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#define _mm512_cvtepu16_epi32(halves) emulated_cvtepu16_epi32(halves)

static inline __m512i emulated_cvtepu16_epi64(__m128i words)
{
    __m256i low = _mm256_cvtepu16_epi64(words), high = _mm256_cvtepu16_epi64(_mm_unpackhi_epi64(words, words));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
#define _mm512_cvtepu16_epi64(words) emulated_cvtepu16_epi64(words)

static inline __m128i emulated_maskz_loadu_epi8(uint32_t mask, const void *from)
{
    uint8_t bytes[16] = {0};
    for (int i = 0; i < 16; i++) {
        bytes[i] = (uint8_t)(mask >> i & 1 ? ((const uint8_t *)from)[i] : 0);
    }
    return _mm_loadu_si128((const __m128i *)bytes);
}
#define _mm_maskz_loadu_epi8(mask, from) emulated_maskz_loadu_epi8(mask, from)

static inline __m512d emulated_cvtps_pd(__m256 x)
{
    __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
    return _mm512_insertf64x4(_mm512_castpd256_pd512(low), high, 1);
}
#define _mm512_cvtps_pd(x) emulated_cvtps_pd(x)

static inline __m256 emulated_cvtpd_ps(__m512d x)
{
    __m128 low = _mm256_cvtpd_ps(_mm512_castpd512_pd256(x)), high = _mm256_cvtpd_ps(_mm512_extractf64x4_pd(x, 1));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low), high, 1);
}
#define _mm512_cvtpd_ps(x) emulated_cvtpd_ps(x)

/* The lower half, and the lowest byte, of every lane. */
static inline __m256i emulated_cvtepi32_epi16(__m512i x)
{
    __m512i words = _mm512_and_si512(x, _mm512_set1_epi32(0xFFFF));
    __m256i low = _mm512_castsi512_si256(words), high = _mm512_extracti64x4_epi64(words, 1);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
}
#define _mm512_cvtepi32_epi16(x) emulated_cvtepi32_epi16(x)

static inline __m128i emulated_cvtepi32_epi8(__m512i x)
{
    __m256i halves = emulated_cvtepi32_epi16(_mm512_and_si512(x, _mm512_set1_epi32(0xFF)));
    return _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}
#define _mm512_cvtepi32_epi8(x) emulated_cvtepi32_epi8(x)
#else
#include <immintrin.h>
#endif

#endif
