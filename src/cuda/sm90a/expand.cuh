/* SPDX-License-Identifier: MIT */
/*
 * expand.cuh: sixteen codes of one group to bf16 numbers in a tile. Values are code * scale, rounded to bf16 once, for
 * every (code, scale) pair: exactly by a bf16 product where the scale is an easy power of two (every current writer's
 * are) or an e4m3 number, else by the product in float.
 */
#ifndef FLASHMLA_CUDA_SM90A_EXPAND_CUH
#define FLASHMLA_CUDA_SM90A_EXPAND_CUH

#include "plan.cuh"

/* What must be known of a pool's codes, in one register. */
#define KIND_FP4   1u
#define KIND_F32   2u /* scales: f32, e8m0, e4m3 or none */
#define KIND_E8M0  4u
#define KIND_E4M3  8u
#define KIND_FLOAT 16u  /* only products in float are right */
#define KIND_USED  128u /* for callers: not 0 */

static __device__ __forceinline__ uint32_t code_kind(const fmlac_pool &pool)
{
    bool fp4 = pool.element == FMLAC_F4_E2M1;
    uint32_t kind = pool.scale == FMLAC_F32       ? KIND_F32
                    : pool.scale == FMLAC_F8_E8M0 ? KIND_E8M0
                    : pool.scale == FMLAC_F8_E4M3 ? KIND_E4M3
                                                  : 0;
    bool hard = pool.outer_scale != 1.0f || (fp4 && kind != KIND_E4M3);
    return kind | (fp4 ? KIND_FP4 : 0) | (hard ? KIND_FLOAT : 0);
}

/*
 * Any scale, any outer scale, NaN codes: products in float, one after another. The codes are put where the first eight
 * numbers go and read from there; the last eight numbers go elsewhere, the first eight are written from the last one
 * down.
 */
static __device__ __forceinline__ void expand_16_hard(const fmlac_pool &pool, const uint32_t codes[4], float scale,
                                                      uint32_t to)
{
    bool fp4 = pool.element == FMLAC_F4_E2M1;
    ptx_store_shared_128(to, codes);
#pragma unroll 1
    for (int at = 15; at >= 0; at--) {
        uint32_t code = ptx_load_shared_u8(to + (fp4 ? at / 2 : at));
        float x = fp4 ? float_of_e2m1(code >> (at % 2 * 4)) : float_of_e4m3(code);
        x = x * scale * pool.outer_scale;
        ptx_store_shared_u16((at < 8 ? to : to ^ 16) + at % 8 * 2, (uint16_t)ptx_pack_bf16(x, x));
    }
}

/* A scale from its bits or its code. */
static __device__ __forceinline__ float scale_of(uint32_t kind, uint32_t bits)
{
    return kind & KIND_F32    ? __uint_as_float(bits)
           : kind & KIND_E8M0 ? float_of_e8m0(bits)
           : kind & KIND_E4M3 ? float_of_e4m3(bits)
                              : 1.0f;
}

/* Whether e4m3 codes need the product in float: one is NaN, or the scale is not easy. */
static __device__ __forceinline__ bool codes_are_hard(const uint32_t codes[4], float scale)
{
    uint32_t nan = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        nan |= (codes[j] & 0x7F7F7F7Fu) + 0x01010101u;
    }
    return (nan & 0x80808080u) != 0 || !scale_is_easy(scale);
}

/* Codes (fp4: the first two words) that are not hard, times their scale as a pair of bf16 numbers, e4m3 codes' 2^120
 * times as large. */
static __device__ __forceinline__ void multiply_16_easy(bool fp4, const uint32_t codes[4], uint32_t factor,
                                                        uint32_t out[8])
{
#pragma unroll
    for (int h = 0; h < 4; h++) {
        if (fp4) {
            spread_e2m1(h % 2 == 0 ? codes[h / 2] & 0xFFFFu : codes[h / 2] >> 16, out + 2 * h);
        } else {
            spread_e4m3(codes[h], out + 2 * h);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        out[j] = ptx_multiply_bf16x2(out[j], factor);
    }
}

/* The same into a tile; the second eight numbers go to `to` ^ 16. */
static __device__ __forceinline__ void expand_16_easy(bool fp4, const uint32_t codes[4], uint32_t factor, uint32_t to)
{
    uint32_t out[8];
    multiply_16_easy(fp4, codes, factor, out);
    ptx_store_shared_128(to, out);
    ptx_store_shared_128(to ^ 16, out + 4);
}

/* Any codes with the bits or the code of their scale. */
static __device__ __forceinline__ void expand_16(const fmlac_pool &pool, uint32_t kind, const uint32_t codes[4],
                                                 uint32_t scale_bits, uint32_t to)
{
    float scale = scale_of(kind, scale_bits);
    bool fp4 = (kind & KIND_FP4) != 0;
    if ((kind & KIND_FLOAT) != 0 || (!fp4 && codes_are_hard(codes, scale))) {
        expand_16_hard(pool, codes, scale, to);
    } else {
        uint32_t factor = (__float_as_uint(scale) >> 16) + (fp4 ? 0 : 120u << 7);
        expand_16_easy(fp4, codes, factor | factor << 16, to);
    }
}

#endif
