/* SPDX-License-Identifier: MIT */
/*
 * token.cuh: tokens between bytes and numbers, one element or eight at a time. Exact for every (code, scale) pair: the
 * fp32 product code * scale, rounded to bf16 once.
 */
#ifndef FLASHMLA_CUDA_TOKEN_CUH
#define FLASHMLA_CUDA_TOKEN_CUH

#include "number.cuh"

/* Pools may lie at any byte. */
static __device__ __forceinline__ uint32_t bytes_u16(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8;
}

static __device__ __forceinline__ uint32_t bytes_u32(const uint8_t *p)
{
    return bytes_u16(p) | bytes_u16(p + 2) << 16;
}

#ifdef FMLAC_QUOTIENT_32
/* a / b of numbers that are not negative, for kernels that may not call (a call keeps wgmma and setmaxnreg from
 * working): a and b are below 2^32. */
static __device__ __forceinline__ int64_t quotient(int64_t a, int64_t b)
{
    return (int64_t)((uint32_t)a / (uint32_t)b);
}
#else
/* a / b of numbers that are not negative. A 64-bit division is long and large kernels need many, so there is one
 * copy; files of small kernels, where a call costs more registers than it saves, define FMLAC_INLINE_DIVISION. */
#ifdef FMLAC_INLINE_DIVISION
#define FMLAC_DIVISION __forceinline__
#else
#define FMLAC_DIVISION __noinline__
#endif
static __device__ FMLAC_DIVISION int64_t quotient(int64_t a, int64_t b)
{
    return (uint64_t)(a | b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}
#endif

/* A slot's data row and scales. */
static __device__ __forceinline__ uint8_t *pool_row(const fmlac_pool *pool, int64_t slot)
{
    int64_t page = quotient(slot, pool->page_size);
    return pool->data + page * pool->page_stride + (slot - page * pool->page_size) * pool->token_stride;
}

static __device__ __forceinline__ uint8_t *pool_scales(const fmlac_pool *pool, int64_t slot)
{
    int64_t page = quotient(slot, pool->page_size);
    int64_t at = slot - page * pool->page_size;
    uint8_t *begin = pool->data + page * pool->page_stride;
    if (pool->layout == FMLAC_LAYOUT_PAGE) {
        return begin + pool->page_size * pool->token_stride + at * pool->scale_row_bytes + pool->scale_offset;
    }
    return begin + at * pool->token_stride + pool->scale_offset;
}

static __device__ __forceinline__ float code_value(const uint8_t *row, int32_t element, int32_t j)
{
    if (element == FMLAC_F4_E2M1) {
        return float_of_e2m1((uint32_t)row[j >> 1] >> ((j & 1) * 4));
    }
    return float_of_e4m3(row[j]);
}

static __device__ __forceinline__ float scale_value(const uint8_t *scales, int32_t scale, int32_t group)
{
    if (scale == FMLAC_F32) {
        return __uint_as_float(bytes_u32(scales + group * 4));
    }
    if (scale == FMLAC_F8_E8M0) {
        return float_of_e8m0(scales[group]);
    }
    return scale == FMLAC_F8_E4M3 ? float_of_e4m3(scales[group]) : 1.0f;
}

/* Element j of a token given by its data row and scales: the exact product, not yet rounded. */
static __device__ __forceinline__ float token_element(const fmlac_pool *pool, const uint8_t *row, const uint8_t *scales,
                                                      int32_t head, int32_t j)
{
    if (pool->layout == FMLAC_LAYOUT_PLAIN) {
        uint32_t bits = bytes_u16(row + head * pool->head_stride + 2 * (int64_t)j);
        return pool->element == FMLAC_F16 ? ptx_float_of_f16(bits) : float_of_bf16(bits);
    }
    if (j >= pool->quant_dims) {
        return float_of_bf16(bytes_u16(row + pool->rope_offset + 2 * (j - pool->quant_dims)));
    }
    return code_value(row, pool->element, j) * scale_value(scales, pool->scale, j / pool->group) * pool->outer_scale;
}

/* As attention sees it. */
static __device__ __forceinline__ float token_element_seen(const fmlac_pool *pool, const uint8_t *row,
                                                           const uint8_t *scales, int32_t head, int32_t j)
{
    float x = token_element(pool, row, scales, head, j);
    return pool->element == FMLAC_F16 ? x : round_to_bf16(x);
}

/* Whether a scale is 2^k with -124 <= k <= 7: then code * scale is a bf16 number, and one bf16 product gives it. */
static __device__ __forceinline__ bool scale_is_easy(float scale)
{
    uint32_t bits = __float_as_uint(scale);
    return (bits & 0x807FFFFFu) == 0 && bits - (3u << 23) <= (131u << 23);
}

/* Bit 7 of each byte: the e4m3 code there is NaN. Other bits say nothing. */
#define E4M3_NANS 0x80808080u
static __device__ __forceinline__ uint32_t e4m3_nans(uint32_t codes)
{
    return (codes & 0x7F7F7F7Fu) + 0x01010101u;
}

/* Whether a scale with this exponent, signs of floats included, is out of the range of scale_is_easy. */
static __device__ __forceinline__ bool exponent_is_hard(uint32_t exponent)
{
    return exponent - 3 > 131;
}

/* Scales as factors of spread codes, which are 2^120 too small: a power of two by its exponent, as a pair of bf16
 * numbers; any float that is not hard, as its bits. */
static __device__ __forceinline__ uint32_t factor_of_exponent(uint32_t exponent)
{
    return exponent * 0x00800080u + 120 * 0x00800080u;
}

static __device__ __forceinline__ uint32_t factor_of_float(uint32_t bits)
{
    return bits + (120u << 23);
}

/* An e4m3 scale, not NaN, as a pair of bf16 numbers: codes of e2m1 are spread as they are. */
static __device__ __forceinline__ uint32_t factor_of_e4m3(uint32_t code)
{
    code = (code & 0x80) << 8 | (code & 0x7F) << 4;
    return ptx_multiply_bf16x2(code | code << 16, 0x7B807B80u); /* 2^120 */
}

/* Four e4m3 codes, none of them NaN, as bf16 * 2^-120: sign to bit 15, the seven bits to bits 10..4. Codes are widened
 * to 16 bits with their sign first, so that one shift and one mask do both halves. */
static __device__ __forceinline__ void spread_e4m3(uint32_t codes, uint32_t out[2])
{
    out[0] = ptx_permute_bytes(codes, 0x9180) << 4 & 0x87F087F0u;
    out[1] = ptx_permute_bytes(codes, 0xB3A2) << 4 & 0x87F087F0u;
}

/* A pair of bf16 numbers times a float, each rounded to bf16 in the end. */
static __device__ __forceinline__ uint32_t multiply_pair(uint32_t pair, float factor)
{
    float low = __uint_as_float(pair << 16) * factor, high = __uint_as_float(pair & 0xFFFF0000u) * factor;
    return ptx_pack_bf16(low, high);
}

/* Four e2m1 codes (16 bits) as bf16. */
static __device__ __forceinline__ void spread_e2m1(uint32_t codes, uint32_t out[2])
{
    uint32_t select = codes & 0x7777u, signs = codes & 0x8888u;
    uint32_t high = __byte_perm(0x3F3F3F00u, 0x40404040u, select);
    uint32_t low = __byte_perm(0xC0800000u, 0xC0804000u, select);
    /* signs to bits 15 and 31 by one product each: what else they make is masked out, and carries stay between */
    out[0] = __byte_perm(low, high, 0x5140) | (signs * 0x01001000u & 0x80008000u);
    out[1] = __byte_perm(low, high, 0x7362) | (signs * 0x00010010u & 0x80008000u);
}

/* Sixteen elements of one group to shared memory, the long way: any scale, any outer scale, NaN codes. Codes of e2m1:
 * all in `low`. */
static __device__ __noinline__ void expand_hard(int32_t element, float outer_scale, uint64_t low, uint64_t high,
                                                float scale, uint32_t to)
{
    bool fp4 = element == FMLAC_F4_E2M1;
#pragma unroll 1
    for (int i = 0; i < 16; i++, to += 2) {
        float x = fp4 ? float_of_e2m1((uint32_t)low) : float_of_e4m3((uint32_t)low & 0xFF);
        low = fp4 || i != 7 ? low >> (fp4 ? 4 : 8) : high;
        ptx_store_shared_u16(to, (uint16_t)bf16_of_float(x * scale * outer_scale));
    }
}

/* The scale of a group, from a raw row in shared memory. */
static __device__ __forceinline__ float shared_scale(int32_t type, uint32_t scales, int32_t group)
{
    if (type == FMLAC_F32) {
        return __uint_as_float(ptx_load_shared_u32(scales + group * 4));
    }
    if (type == FMLAC_NONE) {
        return 1.0f;
    }
    uint32_t code = ptx_load_shared_u8(scales + group);
    return type == FMLAC_F8_E8M0 ? float_of_e8m0(code) : float_of_e4m3(code);
}

#endif
