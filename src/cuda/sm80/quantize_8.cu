/* SPDX-License-Identifier: MIT */
/*
 * quantize_8.cu: tokens into and out of caches, and between caches, eight elements at a time: one warp per token and KV
 * head, a lane has elements 8 * lane .. of every 256. A group of 16..256 elements belongs to 2..32 neighbouring lanes,
 * which find its largest magnitude among themselves, so every element is read once. For caches whose parts 16-byte
 * accesses may reach (host/small.c decides); the bits are those of quantize.cu.
 */
#include "quantize.cuh"
#include "eight.cuh"

/* Elements j .. j + 7 of a token: exact products, not yet rounded. */
static __device__ __forceinline__ void load_token_8(const fmlac_pool &pool, const place &from, int32_t head, int32_t j,
                                                    float x[8])
{
    if (pool.layout == FMLAC_LAYOUT_PLAIN) {
        unpack_8(*(const uint4 *)(from.row + head * pool.head_stride + 2 * j), pool.element == FMLAC_F16, x);
        return;
    }
    if (j >= pool.quant_dims) {
        unpack_8(*(const uint4 *)(from.row + pool.rope_offset + 2 * (j - pool.quant_dims)), false, x);
        return;
    }
    int32_t group = j >> pool.group_shift;
    float scale = pool.scale == FMLAC_F32 ? *(const float *)(from.scales + 4 * group)
                                          : scale_value(from.scales, pool.scale, group);
    if (pool.element == FMLAC_F4_E2M1) {
        uint32_t codes = *(const uint32_t *)(from.row + j / 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = float_of_e2m1(codes >> (4 * i)) * scale * pool.outer_scale;
        }
        return;
    }
    uint2 codes = *(const uint2 *)(from.row + j);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = float_of_e4m3((i < 4 ? codes.x : codes.y) >> (8 * (i & 3)) & 0xFF) * scale * pool.outer_scale;
    }
}

/* e2m1 code of x, saturating; of NaN 0: what e2m1_of_float gives. */
static __device__ __forceinline__ uint32_t e2m1_fast(float x)
{
    float magnitude = fminf(fabsf(x), 6.0f);
    uint32_t bits = __float_as_uint(magnitude);
    uint32_t small = __float_as_uint(magnitude + 4194304.0f) - 0x4A800000u; /* halves */
    uint32_t large = ((bits + 0x1FFFFFu + (bits >> 22 & 1)) >> 22) - (126u << 1);
    uint32_t code = (magnitude < 1.0f ? small : large) | (__float_as_uint(x) >> 28 & 8u);
    return is_nan(x) ? 0 : code;
}

/* x / divisor, rounded once. Where the divisor and its inverse are powers of two in range, one product gives it. */
static __device__ __forceinline__ void divide_8(float x[8], float divisor)
{
    uint32_t bits = __float_as_uint(divisor);
    if (divisor == 1.0f) {
        return;
    }
    if ((bits & 0x807FFFFFu) == 0 && bits - (1u << 23) < (253u << 23)) {
        float inverse = __uint_as_float((254u << 23) - bits);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] *= inverse;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = __fdiv_rn(x[i], divisor);
    }
}

/* Largest magnitude of a group; NaN if one is NaN: as bits, NaN is above all. All lanes of the warp take part. */
static __device__ __forceinline__ float group_top_8(const float x[8], int32_t group_shift)
{
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t bits = __float_as_uint(x[i]) & 0x7FFFFFFFu;
        top = bits > top ? bits : top;
    }
    for (int step = 1; step < 1 << (group_shift - 3); step *= 2) {
        uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, top, step);
        top = other > top ? other : top;
    }
    return __uint_as_float(top);
}

static __device__ __forceinline__ void store_codes_8(const fmlac_pool &pool, uint8_t *to, const float x[8])
{
    uint32_t codes[2] = {0, 0};
    if (pool.element == FMLAC_F4_E2M1) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            codes[0] |= e2m1_fast(x[i]) << (4 * i);
        }
        *(uint32_t *)to = codes[0];
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        codes[i / 4] |= e4m3_fast(x[i]) << (8 * (i & 3));
    }
    *(uint2 *)to = {codes[0], codes[1]};
}

/* Elements j .. j + 7 of a token, j < d_qk or not: all lanes of the warp come here together. */
static __device__ __forceinline__ void write_token_8(const fmlac_pool &pool, const place &to, int32_t head, int32_t j,
                                                     float x[8], int32_t dtype, bool historic)
{
    if (pool.layout == FMLAC_LAYOUT_PLAIN) {
        if (j < pool.d_qk) {
            *(uint4 *)(to.row + head * pool.head_stride + 2 * j) = pack_8(x, pool.element == FMLAC_F16);
        }
        return;
    }
    bool coded = j < pool.quant_dims;
    if (coded) {
        divide_8(x, pool.outer_scale);
    } else if (j < pool.d_qk) {
        *(uint4 *)(to.row + pool.rope_offset + 2 * (j - pool.quant_dims)) = pack_8(x, false);
    }
    float scale = group_scale(pool, group_top_8(x, pool.group_shift), dtype, historic);
    if (!coded) {
        return;
    }
    if ((j & ((1 << pool.group_shift) - 1)) == 0) {
        store_scale(to.scales, pool.scale, j >> pool.group_shift, scale);
    }
    divide_8(x, scale);
    store_codes_8(pool, to.row + (pool.element == FMLAC_F4_E2M1 ? j / 2 : j), x);
}

/* Zeroes what is padding of a token's bytes, so that all are defined. */
static __device__ __forceinline__ void clear_padding(const fmlac_pool &pool, const place &to)
{
    bool page = pool.layout == FMLAC_LAYOUT_PAGE;
    int32_t inside = page ? 0 : pool.scale_bytes; /* scales in the data row */
    if (pool.layout == FMLAC_LAYOUT_PLAIN) {
        return;
    }
    for (int32_t i = threadIdx.x % 32; i < pool.scale_row_bytes; i += 32) {
        if (i < pool.scale_offset || i >= pool.scale_offset + pool.scale_bytes) {
            (to.scales - pool.scale_offset)[i] = 0;
        }
    }
    if (pool.code_bytes + 2 * pool.rope_dims + inside == pool.data_row_bytes) {
        return;
    }
    for (int32_t i = pool.code_bytes + threadIdx.x % 32; i < pool.data_row_bytes; i += 32) {
        bool rope = i >= pool.rope_offset && i < pool.rope_offset + 2 * pool.rope_dims;
        if (!rope && (i < pool.scale_offset || i >= pool.scale_offset + inside)) {
            to.row[i] = 0;
        }
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    fmlak_quantize_8_sm80(const __grid_constant__ fmlac_transcode p)
{
    int64_t token;
    int32_t head;
    if (!own_token(p.count, p.heads, &token, &head)) {
        return;
    }
    place to = place_of(p.slots, p.pool, token);
    int64_t at = token * p.rows.stride[0] + head * p.rows.stride[1];
    if (!to.row) {
        return;
    }
    clear_padding(p.pool, to);
    for (int32_t base = 0; base < p.pool.d_qk; base += 256) {
        int32_t j = base + threadIdx.x % 32 * 8;
        float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        if (j < p.pool.d_qk) {
            load_rows_8(p.rows.data, p.rows.dtype, at + j, x);
        }
        write_token_8(p.pool, to, head, j, x, p.rows.dtype, p.historic);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    fmlak_dequantize_8_sm80(const __grid_constant__ fmlac_transcode p)
{
    int64_t token;
    int32_t head;
    if (!own_token(p.count, p.heads, &token, &head)) {
        return;
    }
    place from = place_of(p.slots, p.pool, token);
    int64_t at = token * p.rows.stride[0] + head * p.rows.stride[1];
    for (int32_t j = threadIdx.x % 32 * 8; j < p.pool.d_qk; j += 256) {
        float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        if (from.row) {
            load_token_8(p.pool, from, head, j, x);
        }
        store_rows_8(p.rows, at + j, x);
    }
}

/* The same codes at other places: bytes move. */
static __device__ __forceinline__ void copy_codes_8(const fmlac_pool &dst, const place &to, const fmlac_pool &src,
                                                    const place &from, int32_t head)
{
    int lane = threadIdx.x % 32;
    bool plain = dst.layout == FMLAC_LAYOUT_PLAIN;
    int32_t codes = plain ? 2 * dst.d_qk : dst.code_bytes;
    uint4 *row = (uint4 *)(to.row + (plain ? head * dst.head_stride : 0));
    const uint4 *source = (const uint4 *)(from.row + (plain ? head * src.head_stride : 0));
    clear_padding(dst, to);
    for (int32_t i = lane; i < codes / 16; i += 32) {
        row[i] = source[i];
    }
    for (int32_t i = lane; i < dst.rope_dims / 8; i += 32) {
        ((uint4 *)(to.row + dst.rope_offset))[i] = ((const uint4 *)(from.row + src.rope_offset))[i];
    }
    for (int32_t i = lane; i < dst.scale_bytes; i += 32) {
        to.scales[i] = from.scales[i];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) fmlak_convert_8_sm80(const __grid_constant__ fmlac_convert p)
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
        copy_codes_8(p.dst, to, p.src, from, head);
        return;
    }
    clear_padding(p.dst, to);
    for (int32_t base = 0; base < p.dst.d_qk; base += 256) {
        int32_t j = base + threadIdx.x % 32 * 8;
        float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        if (j < p.dst.d_qk) {
            load_token_8(p.src, from, head, j, x);
            if (p.src.element != FMLAC_F16) { /* as attention sees it */
                unpack_8(pack_8(x, false), false, x);
            }
        }
        write_token_8(p.dst, to, head, j, x, FMLAC_BF16, false);
    }
}
