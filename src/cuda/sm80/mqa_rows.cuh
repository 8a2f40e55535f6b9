/* SPDX-License-Identifier: MIT */
/* mqa_rows.cuh: what happens to a row before and after attention: query prologue and output epilogue. */
#ifndef FLASHMLA_CUDA_SM80_MQA_ROWS_CUH
#define FLASHMLA_CUDA_SM80_MQA_ROWS_CUH

#include "mqa_tokens.cuh"

/* ---- where rows are ------------------------------------------------------------------------------------------ */

/* A row's query token, its number among those of the same outer number, and its head. */
typedef struct row_place {
    int32_t inner, head;
} row_place;

static __device__ __forceinline__ row_place place_of_row(const mqa_shared &s, int row)
{
    uint32_t group = (uint32_t)s.work->group, head = (uint32_t)(s.piece->head + row), j = 0;
    if (head >= group) {
        j = head / group;
        head -= j * group;
    }
    return {s.piece->inner + (int32_t)j, s.work->kv_head * (int32_t)group + (int32_t)head};
}

/* Element offset of a row in a tensor. */
static __device__ __forceinline__ int64_t offset_of_row(const fmlac_rows &rows, const mqa_shared &s,
                                                        const row_place &at)
{
    return s.piece->outer * rows.stride[0] + at.inner * rows.stride[1] + at.head * rows.stride[2];
}

/* Of rows first, first + step, ..., one per lane. */
static __device__ __forceinline__ int64_t offsets_of_rows(const fmlac_rows &rows, const mqa_shared &s, int first,
                                                          int step)
{
    int row = first + (int)(ptx_thread() % 32) * step;
    return offset_of_row(rows, s, place_of_row(s, row < s.work->rows ? row : 0));
}

/* ---- query prologue -------------------------------------------------------------------------------------------- */

/* Whole rows of one query token by bulk copies, a warp's by one lane in a short loop; all its lanes arrive. */
template <class S> static __device__ __forceinline__ void load_q_bulk(const fmlac_mqa &p, const mqa_shared &s)
{
    constexpr int EACH = S::ROWS / S::QW;
    int first = (int)threadIdx.x / 32 * EACH;
    if (!ptx_elect()) {
        ptx_mbarrier_arrive(s.q_full);
        return;
    }
    uint32_t to = s.q + first * PITCH, bytes = p.row_bytes;
    const uint16_t *from = (const uint16_t *)p.q.data + offset_of_row(p.q, s, place_of_row(s, first));
    ptx_fence_async_proxy(); /* staged rows were there */
    ptx_mbarrier_arrive_expect(s.q_full, EACH * bytes);
#pragma unroll 4
    for (int i = 0; i < EACH; i++) {
        ptx_bulk_load(to, from, bytes, s.q_full);
        to += PITCH;
        from += p.q.stride[2];
    }
}

/* Rows 16 bytes at a time, or as they can be read; those that do not exist are zeros. */
template <class S> static __device__ __forceinline__ void load_q_copies(const fmlac_mqa &p, const mqa_shared &s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int chunks = p.row_bytes / 16;
    int64_t offsets = offsets_of_rows(p.q, s, warp, S::QW);
    int rows = (int)s.work->rows;
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
    if (p.q.aligned) {
        ptx_mbarrier_arrive_copies(s.q_full);
    } else {
        ptx_mbarrier_arrive(s.q_full);
    }
}

/* By the scoring warps, while the others bring the first tiles. */
template <class S> static __device__ __forceinline__ void load_q(const fmlac_mqa &p, const mqa_shared &s)
{
    bool whole = (s.work->rows == S::ROWS) & (s.piece->head + S::ROWS <= s.work->group);
    if (BULK(p) && whole && p.q.aligned && 2 * p.d_qk == p.row_bytes) {
        load_q_bulk<S>(p, s);
    } else {
        load_q_copies<S>(p, s);
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

/* What a row's output is multiplied with; its weights are relative to 2^base. `partial`: of a piece. */
static __device__ __forceinline__ float factor_of_row(const fmlac_mqa &p, const mqa_shared &s, int row, float base,
                                                      float sum, float taken, bool partial)
{
    if (sum == 0.0f || row >= s.work->rows) {
        return 0.0f;
    }
    bool sinks = p.sink && !partial;
    float sink = sinks ? exp2f(p.sink[place_of_row(s, row).head] * LOG2_E - base) : 0.0f;
    return 1.0f / (taken + taken / sum * sink);
}

/* lse and maximum of one row. */
static __device__ __forceinline__ void finish_row(const fmlac_mqa &p, const mqa_shared &s, int row, float base,
                                                  float max, float sum, float *partial)
{
    bool lonely = sum == 0.0f;
    float base2 = base + log2f(sum);
    max = is_nan(sum) ? sum : max;
    if (partial) {
        partial[0] = lonely ? -FMLAC_INFINITY : base2;
        partial[1] = max;
        return;
    }
    if (row >= s.work->rows) {
        return;
    }
    row_place at = place_of_row(s, row);
    if (p.lse.data) {
        float lse = lonely ? p.empty_lse : base2 * LN_2 * p.lse_factor;
        ((float *)p.lse.data)[offset_of_row(p.lse, s, at)] = lse;
    }
    if (p.max_logits.data) {
        ((float *)p.max_logits.data)[offset_of_row(p.max_logits, s, at)] = max * LN_2 * p.lse_factor;
    }
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

/* Whole staged rows, of which lanes know where they go, two at a time in straight code: first, first + step, ... */
template <int DTYPE>
static __device__ __forceinline__ void store_whole(void *data, int64_t offsets, int first, int step, int rows,
                                                   const float *staged)
{
    const int lane = (int)ptx_thread() % 32;
    const float *from = staged + first * STAGED_PITCH + lane * 4;
#pragma unroll 2
    for (int row = first, i = 0; row < rows; row += step, i++, from += step * STAGED_PITCH) {
        int64_t at = __shfl_sync(0xFFFFFFFFu, offsets, i) + lane * 4;
        float4 x[OUT_COLUMNS / 128];
#pragma unroll
        for (int c = 0; c < OUT_COLUMNS / 128; c++) {
            x[c] = *(const float4 *)(from + c * 128);
        }
#pragma unroll
        for (int c = 0; c < OUT_COLUMNS / 128; c++) {
            if (DTYPE == FMLAC_F32) {
                *(float4 *)((float *)data + at + c * 128) = x[c];
            } else {
                uint2 pairs = {pack<DTYPE == FMLAC_F16>(x[c].x, x[c].y), pack<DTYPE == FMLAC_F16>(x[c].z, x[c].w)};
                *(uint2 *)((uint16_t *)data + at + c * 128) = pairs;
            }
        }
    }
}

/* A warp takes staged rows first, first + step, ... where they belong; `partial`: of a piece. */
template <class S>
static __device__ __forceinline__ void store_rows(const fmlac_mqa &p, const mqa_shared &s, int first, int step,
                                                  const float *staged, float *partial)
{
    constexpr int DTYPE = S::F16 ? FMLAC_F16 : FMLAC_BF16; /* the usual one */
    int rows = (int)s.work->rows;
    if (p.fused.enabled) {
#pragma unroll 1
        for (int row = first; row < rows; row += step) {
            store_row_fused(p, *s.work, row, staged + row * STAGED_PITCH);
        }
        return;
    }
    if (partial) {
        int64_t offsets = (first + (int64_t)(ptx_thread() % 32) * step) * OUT_COLUMNS;
        store_whole<FMLAC_F32>(partial, offsets, first, step, rows, staged);
        return;
    }
    int64_t offsets = offsets_of_rows(p.out, s, first, step);
    if (p.out.aligned && p.d_v == OUT_COLUMNS && p.out.dtype == DTYPE) {
        store_whole<DTYPE>(p.out.data, offsets, first, step, rows, staged);
        return;
    }
#pragma unroll 1
    for (int row = first, i = 0; row < rows; row += step, i++) {
        int64_t at = __shfl_sync(0xFFFFFFFFu, offsets, i);
#pragma unroll 1
        for (int column = (int)(ptx_thread() % 32) * 4; column < OUT_COLUMNS; column += 128) {
            store_four(p.out, at, column, p.d_v, *(const float4 *)(staged + row * STAGED_PITCH + column));
        }
    }
}

#endif
