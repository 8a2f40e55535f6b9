/* SPDX-License-Identifier: MIT */
/*
 * expand.cuh: sixteen codes of one group to bf16 numbers in a tile. Values are code * scale, rounded to bf16 once, for
 * every (code, scale) pair: exactly by a bf16 product where the scale is an easy power of two (as most writers make
 * them) or an e4m3 number, else by the product in float; all at once for float scales of the usual size, one after
 * another for what is left.
 */
#ifndef FLASHMLA_CUDA_SM90A_EXPAND_CUH
#define FLASHMLA_CUDA_SM90A_EXPAND_CUH

#include "plan.cuh"

/* What must be known of a pool's codes, in one register. */
#define KIND_FP4   1u
#define KIND_F32   2u /* scales: f32, e8m0, e4m3 or none */
#define KIND_E8M0  4u
#define KIND_E4M3  8u
#define KIND_FLOAT 16u  /* only products in float, one after another, are right */
#define KIND_MIXED 32u  /* for callers: f32 scales that need be no powers of two */
#define KIND_USED  128u /* for callers: not 0 */
#define KIND_ANY   255u /* as a template argument: of codes that have no straight run */

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
 * Any scale, any outer scale, NaN codes: products in float, one after another. The codes lie where the first eight
 * numbers go and are read from there; the last eight numbers go elsewhere, the first eight are written from the last
 * one down.
 */
static __device__ __forceinline__ void expand_16_stored(const fmlac_pool &pool, float scale, uint32_t to)
{
    bool fp4 = pool.element == FMLAC_F4_E2M1;
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
        nan |= e4m3_nans(codes[j]);
    }
    return (nan & E4M3_NANS) != 0 || !scale_is_easy(scale);
}

/* Codes (fp4: the first two words) that are not hard, times their scale as a pair of bf16 numbers (mixed: as a float),
 * e4m3 codes' 2^120 times as large. */
static __device__ __forceinline__ void multiply_16_easy(bool fp4, bool mixed, const uint32_t codes[4], uint32_t factor,
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
        out[j] = mixed ? multiply_pair(out[j], __uint_as_float(factor)) : ptx_multiply_bf16x2(out[j], factor);
    }
}

/* The same into a tile; the second eight numbers go to `to` ^ 16. */
static __device__ __forceinline__ void expand_16_easy(bool fp4, const uint32_t codes[4], uint32_t factor, uint32_t to)
{
    uint32_t out[8];
    multiply_16_easy(fp4, false, codes, factor, out);
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
        ptx_store_shared_128(to, codes);
        expand_16_stored(pool, scale, to);
    } else {
        uint32_t factor = (__float_as_uint(scale) >> 16) + (fp4 ? 0 : 120u << 7);
        expand_16_easy(fp4, codes, factor | factor << 16, to);
    }
}

/* What a lane holds of four rows or halves of rows: sixteen codes of a group of each (fp4: the first two words), and
 * the bits or the codes of their scales. */
typedef struct four_codes {
    uint32_t codes[4][4];
    uint32_t scale[4];
} four_codes;

/* From raw rows: where the codes and the scales lie. */
static __device__ __forceinline__ void load_four(four_codes *x, uint32_t kind, const uint32_t codes_at[4],
                                                 const uint32_t scale_at[4])
{
    if (kind & KIND_FP4) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ptx_load_shared_64(x->codes[i], codes_at[i]);
            x->codes[i][2] = x->codes[i][3] = 0; /* what is never set lives everywhere, as ptxas sees it */
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ptx_load_shared_128(x->codes[i], codes_at[i]);
        }
    }
    if (kind & KIND_F32) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x->scale[i] = ptx_load_shared_u32(scale_at[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x->scale[i] = ptx_load_shared_u8(scale_at[i]);
        }
    }
}

/* Whether a scale of the lane's is none for the straight run of a kind; `last`: as below. */
template <int KIND> static __device__ __forceinline__ bool scales_are_hard(const four_codes &x, bool last)
{
    constexpr bool FP4 = KIND & KIND_FP4, F32 = KIND & KIND_F32, MIXED = KIND & KIND_MIXED;
    bool far[2] = {false, false}; /* of the first, of the last two */
    uint32_t fraction[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t bits = x.scale[i];
        if (FP4) {
            far[i / 2] |= (bits & 0x7F) == 0x7F;
        } else if (F32) {
            far[i / 2] |= bits - (3u << 23) > (131u << 23) + 0x7FFFFFu;
            fraction[i / 2] |= MIXED ? 0 : bits;
        } else {
            far[i / 2] |= exponent_is_hard(bits);
        }
    }
    bool hard = false;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        hard |= (i == 0 || last) & (far[i] | ((fraction[i] & 0x7FFFFFu) != 0));
    }
    return hard;
}

/*
 * The straight run: checks, products and stores of four times sixteen codes whose scales are not hard, in one piece
 * without a branch, so that they can be mixed; `last`: whether the lane has anything to do in the last two. Says yes if
 * a code of this lane needs the product in float: what was stored is then wrong.
 */
template <int KIND>
static __device__ __forceinline__ bool expand_four(const four_codes &x, const uint32_t to[4], bool last)
{
    constexpr bool FP4 = KIND & KIND_FP4, F32 = KIND & KIND_F32, MIXED = KIND & KIND_MIXED;
    uint32_t nan[2] = {0, 0}; /* of the first, of the last two */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t bits = x.scale[i], factor, out[8];
        if (FP4) {
            factor = factor_of_e4m3(bits);
        } else if (MIXED) {
            factor = factor_of_float(bits);
        } else if (F32) {
            factor = __byte_perm(bits, 0, 0x3232) + 120 * 0x00800080u;
        } else {
            factor = factor_of_exponent(bits);
        }
#pragma unroll
        for (int j = 0; j < 4 && !FP4; j++) {
            nan[i / 2] |= e4m3_nans(x.codes[i][j]);
        }
        multiply_16_easy(FP4, MIXED, x.codes[i], factor, out);
        ptx_store_shared_128_if(i < 2 || last, to[i], out);
        ptx_store_shared_128_if(i < 2 || last, to[i] ^ 16, out + 4);
    }
    return (nan[0] & E4M3_NANS) != 0 || (last & ((nan[1] & E4M3_NANS) != 0));
}

/* Any codes and scales, the long way. Bit i of `used`: the lane has something to do in the i-th; of `there`: and its
 * row is attended, else it gets zeros. */
static __device__ __forceinline__ void expand_four_hard(const fmlac_pool &pool, uint32_t kind, const four_codes &x,
                                                        const uint32_t to[4], uint32_t used, uint32_t there)
{
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t mask = there >> i & 1 ? 0xFFFFFFFFu : 0, codes[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            codes[j] = x.codes[i][j] & mask;
        }
        if (used >> i & 1) {
            ptx_store_shared_128(to[i], codes);
            ptx_store_shared_128(to[i] ^ 16, zeros);
            ptx_store_shared_u32(to[i] ^ 16, x.scale[i] & mask);
        }
    }
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        uint32_t at = i == 0 ? to[0] : i == 1 ? to[1] : i == 2 ? to[2] : to[3];
        if ((used & there) >> i & 1) {
            expand_16_stored(pool, scale_of(kind, ptx_load_shared_u32(at ^ 16)), at);
        }
    }
}

#endif
