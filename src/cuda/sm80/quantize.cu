/* SPDX-License-Identifier: MIT */
/*
 * quantize.cu: tokens into and out of caches, and between caches, for any format at any address: one warp per token and
 * KV head, an element at a time. Caches of the usual formats and alignment go through quantize_8.cu.
 */
#include "quantize.cuh"

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
