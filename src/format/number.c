/* SPDX-License-Identifier: MIT */
/*
 * Number formats as bits. Every narrowing goes through one function that rounds a double's significand to a
 * narrower one with integer arithmetic: float is a subset of double, so the same rule serves both sources
 * with one rounding. docs/formats.md lists the formats (bias, subnormals, infinities, NaN).
 */
#include <string.h>

#include "format.h"

static uint64_t bits_of_f64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/*
 * |x| as a code of a format whose smallest normal number is 2^min_exponent and whose fractions have
 * fraction_bits bits: exponent field and fraction side by side, as in IEEE 754, rounded to nearest, ties to
 * even. The exponent field is not bounded above: the caller compares with its format's largest code. x is not
 * NaN; infinity gives a huge code.
 */
static uint32_t round_magnitude(double x, int min_exponent, int fraction_bits)
{
    uint64_t bits = bits_of_f64(x) & 0x7FFFFFFFFFFFFFFFu;
    int exponent = (int)(bits >> 52) - 1023;
    if (exponent == -1023) { /* zero and subnormal doubles: below half of every format's smallest number */
        return 0;
    }
    uint64_t significand = (bits & 0xFFFFFFFFFFFFFu) | 0x10000000000000u;
    int below = exponent < min_exponent ? min_exponent - exponent : 0;
    int shift = 52 - fraction_bits + below;
    if (shift > 53) {
        return 0;
    }
    uint64_t kept = significand >> shift;
    uint64_t rest = significand & (((uint64_t)1 << shift) - 1);
    uint64_t half = (uint64_t)1 << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    return (uint32_t)kept + (below ? 0 : (uint32_t)(exponent - min_exponent) << fraction_bits);
}

static bool is_nan(double x)
{
    return x != x;
}

static uint32_t sign_of(double x)
{
    return (uint32_t)(bits_of_f64(x) >> 63);
}

/* ---- narrowing ----------------------------------------------------------------------------------------- */

uint16_t fmlai_bf16_from_f64(double x)
{
    uint32_t sign = sign_of(x) << 15;
    if (is_nan(x)) {
        return (uint16_t)(sign | 0x7FC0);
    }
    uint32_t code = round_magnitude(x, -126, 7);
    return (uint16_t)(sign | (code < 0x7F80 ? code : 0x7F80));
}

uint16_t fmlai_f16_from_f64(double x)
{
    uint32_t sign = sign_of(x) << 15;
    if (is_nan(x)) {
        return (uint16_t)(sign | 0x7E00);
    }
    uint32_t code = round_magnitude(x, -14, 10);
    return (uint16_t)(sign | (code < 0x7C00 ? code : 0x7C00));
}

/* bf16 is the upper half of a float, so here adding just under half of the lower one rounds, overflow to
 * infinity included. */
uint16_t fmlai_bf16_from_f32(float x)
{
    uint32_t bits = fmlai_bits_of_f32(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return (uint16_t)(bits >> 16 | 0x40);
    }
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint16_t fmlai_f16_from_f32(float x)
{
    return fmlai_f16_from_f64((double)x);
}

uint8_t fmlai_e4m3_from_f32(float x)
{
    uint32_t sign = sign_of((double)x) << 7;
    if (is_nan((double)x)) {
        return (uint8_t)(sign | 0x7F);
    }
    uint32_t code = round_magnitude((double)x, -6, 3);
    return (uint8_t)(sign | (code < 0x7F ? code : 0x7F));
}

uint8_t fmlai_e4m3_from_f64_saturating(double x)
{
    uint32_t sign = sign_of(x) << 7;
    if (is_nan(x)) {
        return (uint8_t)(sign | 0x7F);
    }
    uint32_t code = round_magnitude(x, -6, 3);
    return (uint8_t)(sign | (code < 0x7E ? code : 0x7E));
}

uint8_t fmlai_e4m3_from_f32_saturating(float x)
{
    return fmlai_e4m3_from_f64_saturating((double)x);
}

uint8_t fmlai_e2m1_from_f32(float x)
{
    uint32_t sign = sign_of((double)x) << 3;
    if (is_nan((double)x)) {
        return (uint8_t)sign;
    }
    uint32_t code = round_magnitude((double)x, 0, 1);
    return (uint8_t)(sign | (code < 7 ? code : 7));
}

/* Of a positive power of two only the exponent field is left; 2^-127 is a subnormal float with exponent field
 * 0. */
uint8_t fmlai_e8m0_from_f32(float x)
{
    return (uint8_t)(fmlai_bits_of_f32(x) >> 23);
}

int fmlai_ceil_log2_f32(float x)
{
    uint32_t bits = fmlai_bits_of_f32(x);
    if (bits >= 0x00800000u) {
        return (int)((bits - 1) >> 23) - 126;
    }
    int e = -149;
    while (((uint32_t)1 << (e + 149)) < bits) {
        e++;
    }
    return e;
}

/* ---- widening: always exact ---------------------------------------------------------------------------- */

float fmlai_f32_from_bf16(uint16_t bits)
{
    return fmlai_f32_of_bits((uint32_t)bits << 16);
}

float fmlai_f32_from_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t exponent = bits >> 10 & 31;
    uint32_t fraction = bits & 0x3FF;
    if (exponent == 31) {
        return fmlai_f32_of_bits(sign | 0x7F800000u | fraction << 13);
    }
    if (exponent == 0) {
        float magnitude = (float)fraction * 0x1p-24f;
        return sign ? -magnitude : magnitude;
    }
    return fmlai_f32_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

float fmlai_f32_from_e4m3(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80) << 24;
    uint32_t magnitude = code & 0x7F;
    if (magnitude == 0x7F) {
        return fmlai_f32_of_bits(sign | 0x7FC00000u);
    }
    if (magnitude < 8) {
        return sign ? -(float)magnitude * 0x1p-9f : (float)magnitude * 0x1p-9f;
    }
    return fmlai_f32_of_bits(sign | ((magnitude << 20) + (120u << 23)));
}

float fmlai_f32_from_e8m0(uint8_t code)
{
    if (code == 0) {
        return 0x1p-127f;
    }
    return fmlai_f32_of_bits(code == 255 ? 0x7FC00000u : (uint32_t)code << 23);
}

float fmlai_f32_from_e2m1(uint8_t code)
{
    static const float magnitudes[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    float magnitude = magnitudes[code & 7];
    return code & 8 ? -magnitude : magnitude;
}

/* ---- elements of tensors ------------------------------------------------------------------------------- */

/* Through memcpy, for views of any alignment. */
static uint16_t load_u16(const void *data, int64_t i)
{
    uint16_t x;
    memcpy(&x, (const uint8_t *)data + i * 2, sizeof x);
    return x;
}

static void store_u16(void *data, int64_t i, uint16_t x)
{
    memcpy((uint8_t *)data + i * 2, &x, sizeof x);
}

double fmlai_load_f64(const void *data, fmla_dtype dtype, int64_t i)
{
    double wide = 0.0;
    float x = 0.0f;
    switch (dtype) {
    case FMLA_BF16:
        return (double)fmlai_f32_from_bf16(load_u16(data, i));
    case FMLA_F16:
        return (double)fmlai_f32_from_f16(load_u16(data, i));
    case FMLA_F32:
        memcpy(&x, (const uint8_t *)data + i * 4, sizeof x);
        return (double)x;
    case FMLA_F64:
        memcpy(&wide, (const uint8_t *)data + i * 8, sizeof wide);
        return wide;
    default:
        return 0.0;
    }
}

float fmlai_load_f32(const void *data, fmla_dtype dtype, int64_t i)
{
    return (float)fmlai_load_f64(data, dtype, i);
}

void fmlai_load_row(const void *data, fmla_dtype dtype, int64_t begin, int64_t end, float *dst)
{
    switch (dtype) {
    case FMLA_BF16:
        for (int64_t i = begin; i < end; i++) {
            dst[i - begin] = fmlai_f32_from_bf16(load_u16(data, i));
        }
        break;
    case FMLA_F16:
        for (int64_t i = begin; i < end; i++) {
            dst[i - begin] = fmlai_f32_from_f16(load_u16(data, i));
        }
        break;
    default:
        for (int64_t i = begin; i < end; i++) {
            dst[i - begin] = fmlai_load_f32(data, dtype, i);
        }
    }
}

void fmlai_round_row(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = fmlai_f32_from_bf16(fmlai_bf16_from_f32(x[i]));
    }
}

void fmlai_store_f64(void *data, fmla_dtype dtype, int64_t i, double x)
{
    float narrow = (float)x;
    switch (dtype) {
    case FMLA_BF16:
        store_u16(data, i, fmlai_bf16_from_f64(x));
        break;
    case FMLA_F16:
        store_u16(data, i, fmlai_f16_from_f64(x));
        break;
    case FMLA_F32:
        memcpy((uint8_t *)data + i * 4, &narrow, sizeof narrow);
        break;
    case FMLA_F64:
        memcpy((uint8_t *)data + i * 8, &x, sizeof x);
        break;
    default:
        break;
    }
}

void fmlai_store_f32(void *data, fmla_dtype dtype, int64_t i, float x)
{
    fmlai_store_f64(data, dtype, i, (double)x);
}
