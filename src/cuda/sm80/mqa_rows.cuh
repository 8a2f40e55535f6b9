/* SPDX-License-Identifier: MIT */
/* mqa_rows.cuh: what happens to a row before and after attention: query prologue and output epilogue. */
#ifndef FLASHMLA_CUDA_SM80_MQA_ROWS_CUH
#define FLASHMLA_CUDA_SM80_MQA_ROWS_CUH

#include "mqa_shared.cuh"

/* ---- query prologue -------------------------------------------------------------------------------------------- */

/* Offsets of rows first, first + step, ... in a tensor, one per lane: divisions are slow. */
static __device__ __forceinline__ int64_t offsets_of_rows(const fmlac_mqa &p, const fmlac_rows &rows,
                                                          const fmlac_work &w, int first, int step)
{
    int row = first + (int)(ptx_thread() % 32) * step;
    int64_t token;
    int32_t head;
    row_token_head(w, row < w.rows ? row : 0, &token, &head);
    return row_offset(&rows, &p, token, head);
}

/* By the scoring warps, while the others bring the first tiles. */
template <class S>
static __device__ __forceinline__ void load_q(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int chunks = p.row_bytes / 16;
    int64_t offsets = offsets_of_rows(p, p.q, w, warp, S::QW);
    int rows = (int)w.rows;
#pragma unroll 1
    for (int r = warp, i = 0; r < S::ROWS; r += S::QW, i++) {
        const uint8_t *row = (const uint8_t *)p.q.data + 2 * __shfl_sync(0xFFFFFFFFu, offsets, i) + lane * 16;
        uint32_t to = s.q + r * PITCH + lane * 16;
#pragma unroll
        for (int c = lane, k = 0; k < 3; c += 32, k++) {
            if (c < chunks && p.q.aligned) {
                ptx_copy_async_16_if(to + k * 512, row + k * 512, r < rows && c * 8 < p.d_qk);
            } else if (c < chunks) {
                copy_plain_hard(to + k * 512, row + k * 512, r < rows ? p.d_qk - c * 8 : 0);
            }
        }
    }
}

/* Fused: element d of the stored query. */
static __device__ __forceinline__ float fused_q(const fmlac_mqa &p, int64_t token, int32_t head, int d)
{
    int64_t at = p.fused.q_permuted
                     ? row_offset(&p.q, &p, token, 0) + (int64_t)(d / 16) * p.h_q * 16 + head * 16 + d % 16
                     : row_offset(&p.q, &p, token, head) + d;
    return float_of_bf16(((const uint16_t *)p.q.data)[at]);
}

/* Fused: RoPE on the last rope_dim dims, rounded to bf16; factor[row] receives the norm factor. */
template <class S>
static __device__ __forceinline__ void load_q_fused(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const fmlac_fused &f = p.fused;
    int plain = p.d_qk - f.rope_dim, half = f.rope_dim / 2;
    for (int r = warp; r < S::ROWS; r += S::QW) {
        float squares = 0;
        int64_t token;
        int32_t head;
        row_token_head(w, r < w.rows ? r : 0, &token, &head);
        const float *angle = f.cos_sin + f.positions[token * f.position_stride] * f.cos_sin_stride;
        for (int d = lane; d < p.row_bytes / 2; d += 32) {
            float x = r < w.rows && d < p.d_qk ? fused_q(p, token, head, d) : 0.0f;
            squares += x * x;
            if (d >= plain && d < p.d_qk) {
                int at = d - plain;
                int pair = f.rope_neox ? at % half : at / 2;
                bool second = f.rope_neox ? at >= half : at & 1;
                int other = f.rope_neox ? (second ? d - half : d + half) : d ^ 1;
                float y = fused_q(p, token, head, other);
                float c = angle[pair], sine = angle[half + pair];
                x = second ? __fmaf_rn(y, sine, __fmul_rn(x, c)) : __fmaf_rn(x, c, -__fmul_rn(y, sine));
            }
            ptx_store_shared_u16(s.q + r * PITCH + d * 2, (uint16_t)bf16_of_float(x));
        }
        for (int step = 16; step > 0; step /= 2) {
            squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
        }
        if (lane == 0) {
            s.factor[r] = f.q_norm ? 1.0f / sqrtf(squares / p.d_qk + f.eps) : 1.0f;
        }
    }
}

/* ---- output epilogue ------------------------------------------------------------------------------------------- */

/* lse, maximum and the factor 1 / sum of one row, whose weights are relative to 2^base; `partial`: of a piece. Returns
 * the factor. */
static __device__ __forceinline__ float finish_row(const fmlac_mqa &p, const fmlac_work &w, int row, float base,
                                                   float max, float sum, float *partial)
{
    bool lonely = sum == 0.0f;
    float base2 = base + log2f(sum);
    max = is_nan(sum) ? sum : max;
    if (partial) {
        partial[0] = lonely ? -FMLAC_INFINITY : base2;
        partial[1] = max;
        return lonely ? 0.0f : 1.0f / sum;
    }
    int64_t token;
    int32_t head;
    if (row >= w.rows) {
        return 0.0f;
    }
    row_token_head(w, row, &token, &head);
    if (p.lse.data) {
        float lse = lonely ? p.empty_lse : base2 * LN_2 * p.lse_factor;
        ((float *)p.lse.data)[row_offset(&p.lse, &p, token, head)] = lse;
    }
    if (p.max_logits.data) {
        ((float *)p.max_logits.data)[row_offset(&p.max_logits, &p, token, head)] = max * LN_2 * p.lse_factor;
    }
    if (lonely) {
        return 0.0f;
    }
    float total = p.sink ? sum + exp2f(p.sink[head] * LOG2_E - base) : sum;
    return 1.0f / total;
}

/* Fused: conjugate RoPE of the staged row's column; its partner is read where it lies. No result is -0, so that a row
 * without tokens is the same whether it was rotated or, its list being empty, was not. */
static __device__ __forceinline__ float unrotated(const fmlac_fused &f, const float *angle, const float *row,
                                                  int column)
{
    int at = column - (OUT_COLUMNS - f.rope_dim), half = f.rope_dim / 2;
    if (at < 0) {
        return row[column];
    }
    int pair = f.rope_neox ? at % half : at / 2;
    bool second = f.rope_neox ? at >= half : at & 1;
    int other = f.rope_neox ? (second ? column - half : column + half) : column ^ 1;
    float c = angle[pair], s = angle[half + pair];
    return (second ? row[column] * c - row[other] * s : row[column] * c + row[other] * s) + 0.0f;
}

/* Fused: four columns as e4m3; eight neighbouring lanes share a power-of-two scale. */
static __device__ __forceinline__ void cast_four(const fmlac_mqa &p, int64_t token, int32_t head, int column,
                                                 const float x[4])
{
    const fmlac_fused &f = p.fused;
    int64_t heads = f.group_heads, group = head / f.group_heads, g = head % f.group_heads;
    float top = 1e-4f;
    for (int i = 0; i < 4; i++) {
        top = fmaxf(top, fabsf(x[i]));
    }
    for (int step = 1; step < 8; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
    }
    bool infinite = is_infinite(top);
    int e = infinite ? 128 : ceil_log2(__fdiv_rn(top, 448.0f));
    float inverse = power_of_two(infinite ? 0 : -e);
    uint32_t codes = 0;
#pragma unroll 1
    for (int i = 3; i >= 0; i--) {
        float y = i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
        codes = codes << 8 | (infinite || is_nan(y) ? 0x7F : e4m3_of_float(y * inverse, true));
    }
    int64_t chunk = column / 32 * heads + g;
    uint8_t *to = f.codes + (token * f.groups + group) * heads * OUT_COLUMNS + chunk * 32 + column % 32;
    for (int i = 0; i < 4; i++) {
        to[i] = (uint8_t)(codes >> (8 * i));
    }
    if (column % 32 == 0) {
        int64_t words = heads * OUT_COLUMNS / 128;
        f.scale[((group * words + chunk / 4) * f.scale_rows + token) * 4 + chunk % 4] = (uint8_t)(e + 127);
    }
}

/* Fused: a warp takes a staged row where it belongs. */
static __device__ __forceinline__ void store_row_fused(const fmlac_mqa &p, const fmlac_work &w, int row,
                                                       const float *staged)
{
    int64_t token;
    int32_t head;
    row_token_head(w, row, &token, &head);
    const float *angle = nullptr;
    if (w.tiles > 0) {
        angle = p.fused.cos_sin + p.fused.positions[token * p.fused.position_stride] * p.fused.cos_sin_stride;
    }
#pragma unroll 1
    for (int column = threadIdx.x % 32 * 4; column < OUT_COLUMNS; column += 128) {
        float4 x = *(const float4 *)(staged + column);
        float y[4] = {x.x, x.y, x.z, x.w};
        for (int i = 0; angle && i < 4; i++) {
            y[i] = unrotated(p.fused, angle, staged, column + i);
        }
        cast_four(p, token, head, column, y);
    }
}

/* A warp takes staged rows first, first + step, ... where they belong; `partial`: of a piece. */
static __device__ __forceinline__ void store_rows(const fmlac_mqa &p, const fmlac_work &w, int first, int step,
                                                  const float *staged, float *partial)
{
    int64_t offsets = p.fused.enabled || partial ? 0 : offsets_of_rows(p, p.out, w, first, step);
#pragma unroll 1
    for (int row = first, i = 0; row < w.rows; row += step, i++) {
        const float *from = staged + row * STAGED_PITCH;
        if (p.fused.enabled) {
            store_row_fused(p, w, row, from);
            continue;
        }
        int64_t at = __shfl_sync(0xFFFFFFFFu, offsets, i);
#pragma unroll 1
        for (int column = (int)(ptx_thread() % 32) * 4; column < OUT_COLUMNS; column += 128) {
            float4 x = *(const float4 *)(from + column);
            if (partial) {
                *(float4 *)(partial + (int64_t)row * OUT_COLUMNS + column) = x;
            } else {
                store_four(p.out, at, column, p.d_v, x);
            }
        }
    }
}

#endif
