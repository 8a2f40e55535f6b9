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
#else
#include <immintrin.h>
#endif

#endif
