/* SPDX-License-Identifier: MIT */
/*
 * cast_group.c: quantiser D, floats to e4m3 codes and a power-of-two scale. With few tokens a row, this is a
 * good part of a fused operation, so it is done on bits, without branches. format/cast.c is the rule; groups
 * with NaN or infinity go there.
 */
#include <math.h>

#include "../../format/format.h"
#include "quant.h"

/* e4m3 of |x| <= 448, to nearest even. */
static inline uint32_t e4m3(float x)
{
    uint32_t bits = fmlai_bits_of_f32(x), sign = bits >> 24 & 0x80;
    float size = fmlai_f32_of_bits(bits & 0x7FFFFFFF);
    /* Numbers of 2^-6 and more: 3 fraction bits, exponent bias 7 instead of 127. */
    bits &= 0x7FFFFFFF;
    uint32_t normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120u << 3);
    /* Below: multiples of 2^-9, which is the last bit of numbers from 2^14 on. */
    uint32_t subnormal = fmlai_bits_of_f32(size + 16384.0f) - fmlai_bits_of_f32(16384.0f);
    return sign | (size < 0x1p-6f ? subnormal : normal);
}

uint8_t fmlai_cpu_cast_group(const float *x, int32_t n, uint8_t *codes)
{
    uint32_t largest = 0; /* of |x|, as bits: floats without sign are ordered like integers */
    for (int32_t i = 0; i < n; i++) {
        uint32_t size = fmlai_bits_of_f32(x[i]) & 0x7FFFFFFF;
        largest = size > largest ? size : largest;
    }
    if (largest >= 0x7F800000) {
        return fmlai_fp8_cast_group(x, n, codes);
    }
    int e = fmlai_ceil_log2_f32(fmaxf(fmlai_f32_of_bits(largest), 1e-4f) / 448.0f);
    float inverse = fmlai_f32_of_bits((uint32_t)(127 - e) << 23);
    for (int32_t i = 0; i < n; i++) {
        codes[i] = (uint8_t)e4m3(x[i] * inverse);
    }
    return (uint8_t)(127 + e);
}

void fmlai_cpu_cast_row(const float *x, int32_t groups, uint8_t *codes, int64_t code_stride, uint8_t *scales)
{
    for (int32_t g = 0; g < groups; g++) {
        scales[g] = fmlai_cpu_cast_group(x + g * 32, 32, codes + g * code_stride);
    }
}
