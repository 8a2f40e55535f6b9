/* SPDX-License-Identifier: MIT */
/*
 * output.cuh: the epilogue: row sums, lse, maximum, sink, and the output straight from registers, or a partial result
 * for the combine kernel or for another block (join.cuh).
 */
#ifndef FLASHMLA_CUDA_SM90A_OUTPUT_CUH
#define FLASHMLA_CUDA_SM90A_OUTPUT_CUH

#include "join.cuh"

/* 1: partial results go out through shared memory; 0: from registers. */
#ifndef FMLAC_STAGED
#define FMLAC_STAGED 1
#endif
#define STAGE_BYTES 8192 /* of a warp: 16 rows of 128 floats */
#define NO_STAGE    0xFFFFFFFFu

static __device__ __forceinline__ void rescale(float o[128], const float factor[2])
{
#pragma unroll
    for (int i = 0; i < 128; i++) {
        o[i] *= factor[i / 2 % 2];
    }
}

/* A row's sink in base 2; none: -infinity. Asked for ahead of time: it may be far away. */
static __device__ __forceinline__ float row_sink(const fmlac_mqa &p, const piece &c, int row)
{
    if (!p.sink || c.place >= 0 || row >= c.work.rows) {
        return -FMLAC_INFINITY;
    }
    int64_t token;
    int32_t head = c.work.kv_head * c.work.group + (int32_t)c.work.row0 + row;
    if (c.work.queries != 1) {
        row_token_head(c.work, row, &token, &head);
    }
    return p.sink[head] * LOG2_E;
}

/* What a row of the output is multiplied by; sink: -infinity in partial results. */
static __device__ __forceinline__ float row_factor(float reference, float sum, float sink)
{
    return sum == 0.0f ? 0.0f : 1.0f / (sum + exp2f(sink - reference));
}

/* lse and maximum of a row go out. */
static __device__ __forceinline__ void store_scalars(const fmlac_mqa &p, const piece &c, int row, float reference,
                                                     float max, float sum)
{
    bool lonely = sum == 0.0f;
    float base2 = reference + log2f(sum);
    max = is_nan(sum) ? sum : max;
    if (row >= c.work.rows) {
        return;
    }
    if (c.place >= 0) {
        float *scalar = p.cut.partial_scalar + (c.place * p.tile_rows + row) * 2;
        scalar[0] = lonely ? -FMLAC_INFINITY : base2;
        scalar[1] = max;
        return;
    }
    if (p.lse.data) {
        ((float *)p.lse.data)[piece_row(p, p.lse, c, row)] = lonely ? p.empty_lse : base2 * LN_2 * p.lse_factor;
    }
    if (p.max_logits.data) {
        ((float *)p.max_logits.data)[piece_row(p, p.max_logits, c, row)] = max * LN_2 * p.lse_factor;
    }
}

/* Two rows of a thread as 16-bit numbers: neighbouring lanes swap pairs, so that four lanes write 32 bytes on end. */
static __device__ __forceinline__ void store_16(const float o[128], const float factor[2], uint16_t *const to[2],
                                                bool f16)
{
    int q = threadIdx.x % 4;
    bool odd = q & 1;
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[4] = {o[4 * j + 2 * h] * factor[h], o[4 * j + 2 * h + 1] * factor[h],
                          o[4 * j + 4 + 2 * h] * factor[h], o[4 * j + 4 + 2 * h + 1] * factor[h]};
            uint32_t low = f16 ? ptx_pack_f16(x[0], x[1]) : ptx_pack_bf16(x[0], x[1]);
            uint32_t high = f16 ? ptx_pack_f16(x[2], x[3]) : ptx_pack_bf16(x[2], x[3]);
            uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, odd ? low : high, 1);
            uint2 pairs = {odd ? other : low, odd ? high : other};
            if (to[h]) {
                *(uint2 *)(to[h] + j * 8 + (odd ? 8 + (q - 1) * 2 : q * 2)) = pairs;
            }
        }
    }
}

static __device__ __forceinline__ void store_32(const float o[128], const float factor[2], float *const to[2])
{
    int q = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 32; j++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 pair = {o[4 * j + 2 * h] * factor[h], o[4 * j + 2 * h + 1] * factor[h]};
            if (to[h]) {
                *(float2 *)(to[h] + j * 8 + q * 2) = pair;
            }
        }
    }
}

/*
 * A warp's 16 rows, 256 columns, as floats through its own piece of shared memory: whole lines go out, and the loop is
 * short, where stores from registers are a long way of instructions that nobody has run before. 16-byte chunk c of row
 * r lies at c ^ 2 (r & 3): neither side meets a bank twice. rows: that are there.
 */
static __device__ __forceinline__ void store_staged(const float o[128], const float factor[2], float *to, int rows,
                                                    uint32_t stage)
{
    int lane = (int)ptx_thread() % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        __syncwarp(); /* what lay there has been read */
#pragma unroll
        for (int j = 0; j < 16; j++) {
            uint32_t at = stage + g * 512 + (((2 * j + q / 2) ^ (g % 4 * 2)) * 16 + q % 2 * 8);
            ptx_store_shared_f32x2(at, o + half * 64 + j * 4);
            ptx_store_shared_f32x2(at + 8 * 512, o + half * 64 + j * 4 + 2);
        }
        __syncwarp();
#pragma unroll 4
        for (int row = 0; row < 16; row++) {
            uint32_t x[4];
            float f = __shfl_sync(0xFFFFFFFFu, row < 8 ? factor[0] : factor[1], row % 8 * 4);
            ptx_load_shared_128(x, stage + row * 512 + (lane ^ (row % 4 * 2)) * 16);
            float4 four = {__uint_as_float(x[0]) * f, __uint_as_float(x[1]) * f, __uint_as_float(x[2]) * f,
                           __uint_as_float(x[3]) * f};
            if (row < rows) {
                *(float4 *)(to + row * OUT_COLUMNS + half * 128 + lane * 4) = four;
            }
        }
    }
}

/* Any dtype, width and alignment. */
static __device__ __forceinline__ void store_any(const fmlac_mqa &p, const float o[128], const float factor[2],
                                                 const int64_t at[2], const bool there[2], int column0)
{
    int q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 128; i++) {
        int h = i / 2 % 2, column = column0 + i / 4 * 8 + q * 2 + i % 2;
        if (there[h] && column < p.d_v) {
            float x = o[i] * factor[h];
            if (p.out.dtype == FMLAC_F32) {
                ((float *)p.out.data)[at[h] + column] = x;
            } else {
                uint32_t bits = p.out.dtype == FMLAC_F16 ? ptx_pack_f16(x, x) : ptx_pack_bf16(x, x);
                ((uint16_t *)p.out.data)[at[h] + column] = (uint16_t)bits;
            }
        }
    }
}

/* Two rows of a thread, `row` and `row` + 8 of a tile: 256 output dims from `column0` on. stage: shared
 * memory, STAGE_BYTES for each warp, that nobody uses any more, or NO_STAGE. */
static __device__ __forceinline__ void store_output(const fmlac_mqa &p, const piece &c, int row, const float o[128],
                                                    const float factor[2], int column0, uint32_t stage)
{
    if (FMLAC_STAGED && stage != NO_STAGE && c.place >= 0) {
        int first = row / 16 * 16;
        store_staged(o, factor, p.cut.partial + (c.place * p.tile_rows + first) * OUT_COLUMNS + column0,
                     (int)c.work.rows - first, stage + ptx_thread() / 32 * STAGE_BYTES);
        return;
    }
    int64_t at[2];
    bool there[2];
    for (int h = 0; h < 2; h++) {
        there[h] = row + 8 * h < c.work.rows;
        at[h] = piece_row(p, p.out, c, there[h] ? row + 8 * h : 0);
    }
    if (c.place >= 0) {
        float *first = p.cut.partial + (c.place * p.tile_rows + row) * OUT_COLUMNS + column0;
        float *const to[2] = {there[0] ? first : nullptr, there[1] ? first + 8 * OUT_COLUMNS : nullptr};
        store_32(o, factor, to);
    } else if (!p.out.aligned || p.d_v != OUT_COLUMNS) {
        store_any(p, o, factor, at, there, column0);
    } else if (p.out.dtype == FMLAC_F32) {
        float *first = (float *)p.out.data + column0;
        float *const to[2] = {there[0] ? first + at[0] : nullptr, there[1] ? first + at[1] : nullptr};
        store_32(o, factor, to);
    } else {
        uint16_t *first = (uint16_t *)p.out.data + column0;
        uint16_t *const to[2] = {there[0] ? first + at[0] : nullptr, there[1] ? first + at[1] : nullptr};
        store_16(o, factor, to, p.out.dtype == FMLAC_F16);
    }
}

/* Sums and maxima of a row over the four lanes that share it. */
static __device__ __forceinline__ void join_sums(softmax_rows &rows)
{
    for (int h = 0; h < 2; h++) {
        rows.sum[h] += __shfl_xor_sync(0xFFFFFFFFu, rows.sum[h], 1);
        rows.sum[h] += __shfl_xor_sync(0xFFFFFFFFu, rows.sum[h], 2);
        rows.max[h] = fmaxf(rows.max[h], __shfl_xor_sync(0xFFFFFFFFu, rows.max[h], 1));
        rows.max[h] = fmaxf(rows.max[h], __shfl_xor_sync(0xFFFFFFFFu, rows.max[h], 2));
    }
}

/* Sinks of a piece's rows come ahead of time, by a thread each. */
template <int BLOCKS>
static __device__ __forceinline__ void fetch_sinks(const fmlac_mqa &p, const piece &c, plan<BLOCKS> *m)
{
    int row = (int)ptx_thread() % 128;
    if (row < ROWS) {
        m->sink[row] = row_sink(p, c, row);
    }
}

/* The leader's sums, references and maxima for everybody. */
template <int BLOCKS> static __device__ __forceinline__ void share_sums(softmax_rows &rows, plan<BLOCKS> *m)
{
    int thread = (int)ptx_thread(), row = thread % 128 / 32 * 16 + thread % 32 / 4; /* read anew */
    join_sums(rows);
    if (thread % 4 == 0) {
        for (int h = 0; h < 2; h++) {
            m->sum[row + 8 * h] = rows.sum[h];
            m->last[row + 8 * h] = rows.reference[h];
            m->max[row + 8 * h] = rows.max[h];
        }
    }
}

/* Group 0, the leader, has sums and references; after the barrier in here all know them, and nobody uses Q or tiles any
 * more. */
template <int BLOCKS> static __device__ __forceinline__ void note_rows(softmax_rows &rows, plan<BLOCKS> *m, int group)
{
    if (group == 0) {
        share_sums(rows, m);
    }
    ptx_barrier_sync(BARRIER_MMA, 256);
}

/* A group has half of the output dims. Ends a piece. stage: as store_output wants it. */
template <int BLOCKS>
static __device__ __forceinline__ void store_rows(const fmlac_mqa &p, const piece &c, float o[128], plan<BLOCKS> *m,
                                                  int half, uint32_t stage)
{
    int thread = (int)ptx_thread(), row = thread % 128 / 32 * 16 + thread % 32 / 4; /* read anew */
    if (uniform(c.pieces) > 1 && !join_pieces(p.cut, c, o, m, half)) {
        return;
    }
    if (thread < ROWS) {
        store_scalars(p, c, thread, m->last[thread], m->max[thread], m->sum[thread]);
    }
    float factor[2];
    for (int h = 0; h < 2; h++) {
        factor[h] = row_factor(m->last[row + 8 * h], m->sum[row + 8 * h], m->sink[row + 8 * h]);
    }
    if (has_rows(c)) {
        store_output(p, c, row, o, factor, half * (OUT_COLUMNS / 2), stage);
    }
    if (c.place >= 0) {
        if (MAPPED_Q) {
            ptx_fence_async_proxy();
        }
        ptx_barrier_sync(BARRIER_MMA, 256); /* nobody reads the stage any more: Q may come there */
    }
}

#endif
