/* SPDX-License-Identifier: MIT */
/* eight.cuh: eight neighbouring elements of a tensor at a time, in registers as fp32; a quick way to e4m3. */
#ifndef FLASHMLA_CUDA_SM80_EIGHT_CUH
#define FLASHMLA_CUDA_SM80_EIGHT_CUH

#include "common/number.cuh"

static __device__ __forceinline__ void unpack_8(const uint4 &words, bool f16, float x[8])
{
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t bits = w[i / 2] >> (16 * (i & 1)) & 0xFFFF;
        x[i] = f16 ? ptx_float_of_f16(bits) : float_of_bf16(bits);
    }
}

/* The instruction that rounds two numbers at once makes another NaN of a NaN. */
static __device__ __forceinline__ uint4 pack_8(const float x[8], bool f16)
{
    uint32_t w[4];
    float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        w[i] = f16 ? ptx_pack_f16(x[2 * i], x[2 * i + 1]) : ptx_pack_bf16(x[2 * i], x[2 * i + 1]);
    }
    if (is_nan(sum)) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t low = f16 ? f16_of_float(x[2 * i]) : bf16_of_float(x[2 * i]);
            uint32_t high = f16 ? f16_of_float(x[2 * i + 1]) : bf16_of_float(x[2 * i + 1]);
            w[i] = low | high << 16;
        }
    }
    return {w[0], w[1], w[2], w[3]};
}

/* Elements at .. at + 7 of a tensor of BF16, F16 or F32, on a 16-byte border. */
static __device__ __forceinline__ void load_rows_8(const void *data, int32_t dtype, int64_t at, float x[8])
{
    if (dtype == FMLAC_F32) {
        const float4 *from = (const float4 *)((const float *)data + at);
        float4 a = from[0], b = from[1];
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        return;
    }
    unpack_8(*(const uint4 *)((const uint16_t *)data + at), dtype == FMLAC_F16, x);
}

static __device__ __forceinline__ void store_rows_8(const fmlac_packed &rows, int64_t at, const float x[8])
{
    if (rows.dtype == FMLAC_F32) {
        float4 *to = (float4 *)((float *)rows.data + at);
        to[0] = {x[0], x[1], x[2], x[3]};
        to[1] = {x[4], x[5], x[6], x[7]};
        return;
    }
    *(uint4 *)((uint16_t *)rows.data + at) = pack_8(x, rows.dtype == FMLAC_F16);
}

/* e4m3 code of x, saturating: what e4m3_of_float(x, true) gives. Below 2^-6 codes are multiples of 2^-9, which adding
 * 2^14 rounds to; from there on the float's upper bits, rounded to three of fraction, are the code but for the bias. */
static __device__ __forceinline__ uint32_t e4m3_fast(float x)
{
    float magnitude = fminf(fabsf(x), 448.0f); /* of NaN: 448, one below its code */
    uint32_t bits = __float_as_uint(magnitude);
    uint32_t small = __float_as_uint(magnitude + 16384.0f) - 0x46800000u;
    uint32_t large = ((bits + 0x7FFFFu + (bits >> 20 & 1)) >> 20) - (120u << 3);
    return (magnitude < 0.015625f ? small : large) + is_nan(x) | (__float_as_uint(x) >> 24 & 0x80u);
}

#endif
