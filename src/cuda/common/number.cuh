/* SPDX-License-Identifier: MIT */
/*
 * number.cuh: numbers as bits: bf16, fp16, e4m3, e8m0, e2m1. The rules of docs/formats.md in integer arithmetic: no FP8
 * instruction is needed, so sm_80 decodes what sm_89 does, bit for bit.
 */
#ifndef FLASHMLA_CUDA_NUMBER_CUH
#define FLASHMLA_CUDA_NUMBER_CUH

#include "params.h"
#include "ptx/math.cuh"

#define FMLAC_NAN      __uint_as_float(0x7FC00000u)
#define FMLAC_INFINITY __uint_as_float(0x7F800000u)

/* Softmax is taken in base 2. */
#define LOG2_E 1.4426950408889634f
#define LN_2   0.6931471805599453f
#define LAZY   8.0f /* log2 of how far a maximum may outgrow the reference that weights are relative to */

/* A softmax reference so far from 0 that the last bit of it is no small power of two any more: scores must be scaled
 * and rounded as it was, before it is taken off, or a maximum would not have the weight 1 (or any). */
static __device__ __forceinline__ bool fmlac_is_far(float reference)
{
    return fabsf(reference) > 0x1p26f && fabsf(reference) < FMLAC_INFINITY;
}

static __device__ __forceinline__ bool is_nan(float x)
{
    return x != x;
}

static __device__ __forceinline__ bool is_infinite(float x)
{
    return (__float_as_uint(x) & 0x7FFFFFFFu) == 0x7F800000u;
}

static __device__ __forceinline__ float float_of_bf16(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}

/* Nearest even; NaN becomes quiet, its sign stays. */
static __device__ __forceinline__ uint32_t bf16_of_float(float x)
{
    uint32_t bits = __float_as_uint(x);
    if (is_nan(x)) {
        return bits >> 16 | 0x40;
    }
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static __device__ __forceinline__ float round_to_bf16(float x)
{
    return float_of_bf16(bf16_of_float(x));
}

/*
 * |x| as a code of a format whose smallest normal number is 2^min_exponent, with fraction_bits bits of fraction:
 * nearest even, the exponent field not bounded above. x is not NaN; infinity gives a huge code.
 */
static __device__ __forceinline__ uint32_t round_magnitude(float x, int min_exponent, int fraction_bits)
{
    uint32_t bits = __float_as_uint(x) & 0x7FFFFFFFu;
    int exponent = (int)(bits >> 23) - 127;
    if (exponent == -127) {
        return 0; /* subnormal floats are below half of every narrower format's smallest number */
    }
    uint32_t significand = (bits & 0x7FFFFFu) | 0x800000u;
    int below = exponent < min_exponent ? min_exponent - exponent : 0;
    int shift = 23 - fraction_bits + below;
    if (shift > 24) {
        return 0;
    }
    uint32_t kept = significand >> shift;
    uint32_t rest = significand & ((1u << shift) - 1);
    uint32_t half = 1u << (shift - 1);
    kept += rest > half || (rest == half && (kept & 1));
    return kept + (below ? 0 : (uint32_t)(exponent - min_exponent) << fraction_bits);
}

static __device__ __forceinline__ uint32_t f16_of_float(float x)
{
    uint32_t sign = __float_as_uint(x) >> 16 & 0x8000u;
    if (is_nan(x)) {
        return sign | 0x7E00;
    }
    uint32_t code = round_magnitude(x, -14, 10);
    return sign | (code < 0x7C00 ? code : 0x7C00);
}

static __device__ __forceinline__ uint32_t e4m3_of_float(float x, bool saturate)
{
    uint32_t sign = __float_as_uint(x) >> 24 & 0x80u;
    uint32_t top = saturate ? 0x7E : 0x7F;
    if (is_nan(x)) {
        return sign | 0x7F;
    }
    uint32_t code = round_magnitude(x, -6, 3);
    return sign | (code < top ? code : top);
}

/* Ties to the even code, saturating to 6; NaN has magnitude 0. */
static __device__ __forceinline__ uint32_t e2m1_of_float(float x)
{
    if (is_nan(x)) {
        return 0;
    }
    uint32_t code = round_magnitude(x, 0, 1);
    return (__float_as_uint(x) >> 28 & 8u) | (code < 7 ? code : 7);
}

/* The seven bits in a float's fraction and low exponent are the value times 2^-120, subnormals included. */
static __device__ __forceinline__ float float_of_e4m3(uint32_t code)
{
    float magnitude = __uint_as_float((code & 0x7F) << 20) * __uint_as_float(0x7B800000u); /* 2^120 */
    magnitude = (code & 0x7F) == 0x7F ? FMLAC_NAN : magnitude;
    return code & 0x80 ? -magnitude : magnitude;
}

static __device__ __forceinline__ float float_of_e8m0(uint32_t code)
{
    return __uint_as_float(code == 255 ? 0x7FC00000u : code == 0 ? 0x00400000u : code << 23);
}

static __device__ __forceinline__ float float_of_e2m1(uint32_t code)
{
    /* The magnitudes 0 1 2 3 4 6 8 12, in halves, as nibbles. */
    float magnitude = 0.5f * (float)(0xC8643210u >> (4 * (code & 7)) & 15);
    return code & 8 ? -magnitude : magnitude;
}

/* Smallest e with 2^e >= x; x positive, finite and normal. */
static __device__ __forceinline__ int ceil_log2(float x)
{
    return (int)((__float_as_uint(x) - 1) >> 23) - 126;
}

/* 2^e for -127 <= e <= 127. */
static __device__ __forceinline__ float power_of_two(int e)
{
    return __uint_as_float(e > -127 ? (uint32_t)(e + 127) << 23 : 0x00400000u);
}

/* Element i of a tensor of BF16, F16 or F32. */
static __device__ __forceinline__ float load_element(const void *data, int32_t dtype, int64_t i)
{
    if (dtype == FMLAC_F32) {
        return ((const float *)data)[i];
    }
    uint32_t bits = ((const uint16_t *)data)[i];
    return dtype == FMLAC_F16 ? ptx_float_of_f16(bits) : float_of_bf16(bits);
}

static __device__ __forceinline__ void store_element(void *data, int32_t dtype, int64_t i, float x)
{
    if (dtype == FMLAC_F32) {
        ((float *)data)[i] = x;
    } else {
        ((uint16_t *)data)[i] = (uint16_t)(dtype == FMLAC_F16 ? f16_of_float(x) : bf16_of_float(x));
    }
}

/* Four elements of an output row from `column` on. */
static __device__ __forceinline__ void store_four(const fmlac_rows &out, int64_t at, int column, int end,
                                                  const float4 &x)
{
    if (out.aligned && column + 4 <= end) {
        if (out.dtype == FMLAC_F32) {
            *(float4 *)((float *)out.data + at + column) = x;
        } else {
            bool f16 = out.dtype == FMLAC_F16;
            uint2 pairs = {f16 ? ptx_pack_f16(x.x, x.y) : ptx_pack_bf16(x.x, x.y),
                           f16 ? ptx_pack_f16(x.z, x.w) : ptx_pack_bf16(x.z, x.w)};
            *(uint2 *)((uint16_t *)out.data + at + column) = pairs;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 4 && column + i < end; i++) {
        store_element(out.data, out.dtype, at + column + i, i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w);
    }
}

#endif
