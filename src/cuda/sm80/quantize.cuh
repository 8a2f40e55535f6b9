/* SPDX-License-Identifier: MIT */
/*
 * quantize.cuh: what the kernels that write and read caches share: a token's place, and the quantisers, bit for bit
 * what src/format does. Which quantiser a group gets follows from the types of its codes and its scale.
 */
#ifndef FLASHMLA_CUDA_SM80_QUANTIZE_CUH
#define FLASHMLA_CUDA_SM80_QUANTIZE_CUH

#define FMLAC_INLINE_DIVISION
#include "common/token.cuh"

#define WARPS 8

/* A token's place in a pool. */
typedef struct place {
    uint8_t *row, *scales; /* NULL: not in the pool */
} place;

/* Token number i of a call: slots[i], or i itself. */
static __device__ __forceinline__ place place_of(const fmlac_slots &slots, const fmlac_pool &pool, int64_t i)
{
    place at = {nullptr, nullptr};
    int64_t slot = i;
    if (slots.data) {
        slot = slots.dtype == FMLAC_I64 ? ((const int64_t *)slots.data)[i * slots.stride]
                                        : (int64_t)((const int32_t *)slots.data)[i * slots.stride];
    }
    int64_t page = slot < 0 ? pool.num_pages : quotient(slot, pool.page_size);
    if (page < pool.num_pages) {
        uint8_t *begin = pool.data + page * pool.page_stride;
        int64_t offset = slot - page * pool.page_size;
        at.row = begin + offset * pool.token_stride;
        at.scales = pool.layout == FMLAC_LAYOUT_PAGE
                        ? begin + pool.page_size * pool.token_stride + offset * pool.scale_row_bytes + pool.scale_offset
                        : at.row + pool.scale_offset;
    }
    return at;
}

static __device__ __forceinline__ bool is_finite(float x)
{
    return !is_nan(x) && !is_infinite(x);
}

static __device__ __forceinline__ float scale_power_of_two(float top, float largest)
{
    float u = __fdiv_rn(top, largest);
    u = u < 1e-4f ? 1e-4f : u;
    return is_finite(u) ? power_of_two(ceil_log2(u)) : u;
}

static __device__ __forceinline__ float scale_e4m3(float top, float largest)
{
    float u = __fdiv_rn(top, largest);
    if (!is_finite(top)) {
        return FMLAC_NAN;
    }
    u = u < 0.001953125f ? 0.001953125f : u > 448.0f ? 448.0f : u;
    return float_of_e4m3(e4m3_of_float(u, false));
}

/* V32 as first published: the quotient rounded to the source's dtype; a scale of 0 becomes 1. */
static __device__ __forceinline__ float scale_historic(float top, float largest, int32_t dtype)
{
    float u = __fdiv_rn(top, largest);
    if (dtype == FMLAC_BF16) {
        u = round_to_bf16(u);
    } else if (dtype == FMLAC_F16) {
        u = ptx_float_of_f16(f16_of_float(u));
    }
    return u == 0.0f ? 1.0f : u;
}

static __device__ __forceinline__ float group_scale(const fmlac_pool &pool, float top, int32_t dtype, bool historic)
{
    float largest = pool.element == FMLAC_F4_E2M1 ? 6.0f : 448.0f;
    if (pool.scale == FMLAC_NONE) {
        return 1.0f;
    }
    if (pool.scale == FMLAC_F8_E4M3) {
        return scale_e4m3(top, largest);
    }
    return historic && pool.scale == FMLAC_F32 ? scale_historic(top, largest, dtype) : scale_power_of_two(top, largest);
}

static __device__ __forceinline__ void store_scale(uint8_t *scales, int32_t kind, int32_t group, float scale)
{
    uint32_t bits = __float_as_uint(scale);
    if (kind == FMLAC_F32) {
        for (int i = 0; i < 4; i++) {
            scales[group * 4 + i] = (uint8_t)(bits >> (8 * i));
        }
    } else if (kind == FMLAC_F8_E8M0) {
        scales[group] = (uint8_t)(bits >> 23); /* a power of two; infinity and NaN give 0xFF */
    } else if (kind == FMLAC_F8_E4M3) {
        scales[group] = (uint8_t)(is_nan(scale) ? 0x7F : e4m3_of_float(scale, false));
    }
}

/* Zeroes a token's own bytes, so that padding in its record is defined. */
static __device__ __forceinline__ void clear_token(const fmlac_pool &pool, uint8_t *row, uint8_t *scales)
{
    for (int32_t i = threadIdx.x % 32; i < pool.data_row_bytes; i += 32) {
        row[i] = 0;
    }
    for (int32_t i = threadIdx.x % 32; i < pool.scale_row_bytes; i += 32) {
        (scales - pool.scale_offset)[i] = 0;
    }
    __syncwarp();
}

/* Warp number `at` of the launch: token at / heads, head at % heads. */
static __device__ __forceinline__ bool own_token(int64_t count, int32_t heads, int64_t *token, int32_t *head)
{
    int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    *token = quotient(at, heads);
    *head = (int32_t)(at - *token * heads);
    return *token < count;
}

#endif
