/* SPDX-License-Identifier: MIT */
/* emulate_number.cpp: instructions on numbers as bits. */
#include "emulate.h"

#include "ptx/math.cuh"

static uint32_t permute(uint32_t x, uint32_t y, uint32_t select)
{
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t s = select >> (4 * i) & 15;
        uint32_t byte = (uint32_t)(both >> (8 * (s & 7))) & 0xFF;
        result |= (s & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
    }
    return result;
}

/* Looks at three bits of every nibble only. */
uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t select)
{
    return permute(x, y, select & 0x7777);
}

uint32_t ptx_permute_bytes(uint32_t x, uint32_t select)
{
    return permute(x, 0, select);
}

uint32_t ptx_permute_two(uint32_t x, uint32_t y, uint32_t select)
{
    return permute(x, y, select);
}

float ptx_float_of_f16(uint32_t x)
{
    uint32_t exponent = x >> 10 & 31, fraction = x & 0x3FF, sign = (x & 0x8000) << 16;
    if (exponent == 31) {
        return __uint_as_float(sign | 0x7F800000u | fraction << 13);
    }
    float magnitude =
        exponent == 0 ? ldexpf((float)fraction, -24) : ldexpf((float)(fraction + 1024), (int)exponent - 25);
    return sign ? -magnitude : magnitude;
}

float ptx_exp2(float x)
{
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

/* Nearest even, to fraction_bits bits, subnormals from 2^min_exponent down, infinity from 2^(max_exponent + 1). */
static uint32_t narrow(double x, int min_exponent, int max_exponent, int fraction_bits)
{
    uint32_t sign = signbit(x) ? 0x8000u : 0, top = (uint32_t)(max_exponent - min_exponent + 2) << fraction_bits;
    if (x != x) {
        return sign | top | 1u << (fraction_bits - 1);
    }
    int e;
    double magnitude = fabs(x);
    if (magnitude == 0.0) {
        return sign;
    }
    if (magnitude > 1e300) {
        return sign | top;
    }
    frexp(magnitude, &e);
    e = e - 1 < min_exponent ? min_exponent : e - 1;
    double units = nearbyint(ldexp(magnitude, fraction_bits - e)); /* default rounding: nearest even */
    uint32_t code = (uint32_t)units + ((uint32_t)(e - min_exponent) << fraction_bits);
    return sign | (code < top ? code : top);
}

uint32_t ptx_pack_bf16(float low, float high)
{
    return narrow(low, -126, 127, 7) | narrow(high, -126, 127, 7) << 16;
}

uint32_t ptx_pack_f16(float low, float high)
{
    return narrow(low, -14, 15, 10) | narrow(high, -14, 15, 10) << 16;
}

uint32_t ptx_multiply_f16x2(uint32_t a, uint32_t b)
{
    return ptx_pack_f16(ptx_float_of_f16(a) * ptx_float_of_f16(b),
                        ptx_float_of_f16(a >> 16) * ptx_float_of_f16(b >> 16));
}

static float e4m3(uint32_t code)
{
    int exponent = code >> 3 & 15, fraction = code & 7;
    float x = exponent == 0 ? ldexpf((float)fraction, -9) : ldexpf((float)(8 + fraction), exponent - 10);
    x = (code & 0x7F) == 0x7F ? __uint_as_float(0x7FC00000u) : x;
    return code & 0x80 ? -x : x;
}

uint32_t ptx_f16_of_e4m3(uint32_t x)
{
    return ptx_pack_f16(e4m3(x & 0xFF), e4m3(x >> 8 & 0xFF));
}

uint32_t ptx_multiply_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t x = 0;
    for (int i = 0; i < 32; i += 16) {
        double first = __uint_as_float((a >> i & 0xFFFF) << 16), second = __uint_as_float((b >> i & 0xFFFF) << 16);
        x |= narrow(first * second, -126, 127, 7) << i;
    }
    return x;
}
