/* SPDX-License-Identifier: MIT */
/*
 * quantize.cu: tokens into and out of caches, and between caches: one warp per token and KV head. Bit for bit what
 * src/format does; which quantiser a group gets follows from the types of its codes and its scale.
 */
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

/* Where values to be written come from: rows of a tensor, or a token of another pool as attention sees it. */
typedef struct source {
    const fmlac_packed *rows;
    int64_t at;
    const fmlac_pool *pool;
    const uint8_t *row, *scales;
    int32_t head;
} source;

static __device__ __forceinline__ float value_at(const source &from, int32_t j)
{
    return from.rows ? load_element(from.rows->data, from.rows->dtype, from.at + j)
                     : token_element_seen(from.pool, from.row, from.scales, from.head, j);
}

/* Largest magnitude in a group over the warp; NaN if one is NaN. */
static __device__ __forceinline__ float group_top(const source &from, int32_t begin, int32_t end, float divisor)
{
    float top = 0.0f;
    for (int32_t j = begin + threadIdx.x % 32; j < end; j += 32) {
        float x = fabsf(__fdiv_rn(value_at(from, j), divisor));
        top = x > top || is_nan(x) ? x : top;
    }
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(0xFFFFFFFFu, top, step);
        top = is_nan(top) ? top : other > top || is_nan(other) ? other : top;
    }
    return top;
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

static __device__ __forceinline__ void store_u16(uint8_t *to, uint32_t x)
{
    to[0] = (uint8_t)x;
    to[1] = (uint8_t)(x >> 8);
}

static __device__ __forceinline__ void store_codes(const fmlac_pool &pool, uint8_t *row, const source &from,
                                                   int32_t begin, int32_t end, float scale)
{
    bool half = pool.element == FMLAC_F4_E2M1;
    int32_t step = half ? 2 : 1;
    for (int32_t j = begin + threadIdx.x % 32 * step; j < end; j += 32 * step) {
        float x = __fdiv_rn(__fdiv_rn(value_at(from, j), pool.outer_scale), scale);
        if (!half) {
            row[j] = (uint8_t)e4m3_of_float(x, true);
            continue;
        }
        float y = j + 1 < end ? __fdiv_rn(__fdiv_rn(value_at(from, j + 1), pool.outer_scale), scale) : 0.0f;
        row[j / 2] = (uint8_t)(e2m1_of_float(x) | e2m1_of_float(y) << 4);
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

static __device__ __forceinline__ void write_token(const fmlac_pool &pool, const place &to, int32_t head,
                                                   const source &from, int32_t dtype, bool historic)
{
    uint8_t *row = to.row, *scales = to.scales;
    if (pool.layout == FMLAC_LAYOUT_PLAIN) {
        row += head * pool.head_stride;
        for (int32_t j = threadIdx.x % 32; j < pool.d_qk; j += 32) {
            float x = value_at(from, j);
            store_u16(row + 2 * (int64_t)j, pool.element == FMLAC_F16 ? f16_of_float(x) : bf16_of_float(x));
        }
        return;
    }
    clear_token(pool, row, scales);
    for (int32_t g = 0; g < pool.quant_dims / pool.group; g++) {
        float scale =
            group_scale(pool, group_top(from, g * pool.group, (g + 1) * pool.group, pool.outer_scale), dtype, historic);
        if (threadIdx.x % 32 == 0) {
            store_scale(scales, pool.scale, g, scale);
        }
        store_codes(pool, row, from, g * pool.group, (g + 1) * pool.group, scale);
    }
    for (int32_t j = pool.quant_dims + threadIdx.x % 32; j < pool.d_qk; j += 32) {
        store_u16(row + pool.rope_offset + 2 * (j - pool.quant_dims), bf16_of_float(value_at(from, j)));
    }
}

/* Warp number `at` of the launch: token at / heads, head at % heads. */
static __device__ __forceinline__ bool own_token(int64_t count, int32_t heads, int64_t *token, int32_t *head)
{
    int64_t at = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    *token = quotient(at, heads);
    *head = (int32_t)(at - *token * heads);
    return *token < count;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) fmlak_quantize_sm80(const __grid_constant__ fmlac_transcode p)
{
    int64_t token;
    int32_t head;
    if (!own_token(p.count, p.heads, &token, &head)) {
        return;
    }
    place to = place_of(p.slots, p.pool, token);
    if (to.row) {
        source from = {&p.rows, token * p.rows.stride[0] + head * p.rows.stride[1], nullptr, nullptr, nullptr, 0};
        write_token(p.pool, to, head, from, p.rows.dtype, p.historic);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    fmlak_dequantize_sm80(const __grid_constant__ fmlac_transcode p)
{
    int64_t token;
    int32_t head;
    if (!own_token(p.count, p.heads, &token, &head)) {
        return;
    }
    place from = place_of(p.slots, p.pool, token);
    int64_t at = token * p.rows.stride[0] + head * p.rows.stride[1];
    for (int32_t j = threadIdx.x % 32; j < p.pool.d_qk; j += 32) {
        store_element(p.rows.data, p.rows.dtype, at + j,
                      from.row ? token_element(&p.pool, from.row, from.scales, head, j) : 0.0f);
    }
}

/* The same codes at other places: bytes move. */
static __device__ __forceinline__ void copy_codes(const fmlac_pool &dst, const place &to_place, const fmlac_pool &src,
                                                  const place &from_place, int32_t head)
{
    uint8_t *to = to_place.row;
    const uint8_t *from = from_place.row;
    int lane = threadIdx.x % 32;
    if (dst.layout == FMLAC_LAYOUT_PLAIN) {
        for (int64_t i = lane; i < 2 * (int64_t)dst.d_qk; i += 32) {
            to[head * dst.head_stride + i] = from[head * src.head_stride + i];
        }
        return;
    }
    clear_token(dst, to, to_place.scales);
    for (int32_t i = lane; i < dst.code_bytes; i += 32) {
        to[i] = from[i];
    }
    for (int32_t i = lane; i < dst.rope_dims * 2; i += 32) {
        to[dst.rope_offset + i] = from[src.rope_offset + i];
    }
    for (int32_t i = lane; i < dst.scale_bytes; i += 32) {
        to_place.scales[i] = from_place.scales[i];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) fmlak_convert_sm80(const __grid_constant__ fmlac_convert p)
{
    int64_t token;
    int32_t head;
    if (!own_token(p.count, p.heads, &token, &head)) {
        return;
    }
    place from = place_of(p.src_slots, p.src, token), to = place_of(p.dst_slots, p.dst, token);
    if (!from.row || !to.row) {
        return;
    }
    if (p.same_codes) {
        copy_codes(p.dst, to, p.src, from, head);
        return;
    }
    source values = {nullptr, 0, &p.src, from.row, from.scales, head};
    write_token(p.dst, to, head, values, FMLAC_BF16, false);
}
