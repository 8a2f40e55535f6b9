/* SPDX-License-Identifier: MIT */
/*
 * mha_backward.cu: gradients of dense attention. Three kernels, no atomics, so the same bits every time:
 *   delta   rowsum(dout * out)
 *   keys    block: 64 keys of one KV head, 4 warps of 16; over all heads of the group and 32 queries a step:
 *           S' = K Q', dP' = V dO' (keys are rows), P' = 2^(S' - lse), dS' = P' (dP' - delta);
 *           dV += P' dO, dK += dS' Q, the weights straight from accumulators to A fragments
 *   queries block: 64 queries of one head, 4 warps of 16; 32 keys a step: S = Q K', dP = dO V', dQ += dS K
 * A pair that does not attend has P = dS = 0 by selection, never by a product. Rows with an infinite lse have no pairs.
 */
#include "mha.cuh"

#define ROWS    64
#define STEP    32
#define WARPS   4
#define THREADS (WARPS * 32)
#define NT      (STEP / 8)
#define NK      24 /* 192 columns */
#define NV      16 /* 128 columns */

extern "C" __global__ void __launch_bounds__(256) fmlak_mha_delta_sm80(const __grid_constant__ fmlac_mha p)
{
    int64_t at = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    int64_t token = quotient(at, p.h_q);
    int32_t head = (int32_t)(at - token * p.h_q);
    float sum = 0.0f;
    if (token >= p.total_q) {
        return;
    }
    for (int d = threadIdx.x % 32; d < p.d_v; d += 32) {
        sum += load_element(p.dout.data, p.dout.dtype, token * p.dout.stride[0] + head * p.dout.stride[1] + d) *
               load_element(p.out.data, p.out.dtype, token * p.out.stride[0] + head * p.out.stride[1] + d);
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    }
    if (threadIdx.x % 32 == 0) {
        p.delta[head * p.total_q + token] = sum;
    }
}

/* lse of a row in base 2; +infinity where the row has no pairs, so that every weight is 0. */
static __device__ __forceinline__ float row_lse(const fmlac_mha &p, int64_t token, int32_t head)
{
    float lse = ((const float *)p.lse.data)[token * p.lse.stride[0] + head * p.lse.stride[1]];
    return is_infinite(lse) ? FMLAC_INFINITY : lse * LOG2_E;
}

/* Weight and its gradient from a score and dP. */
static __device__ __forceinline__ void pair(bool attended, float scale, float lse, float delta, float *score, float *dp)
{
    bool there = attended && lse != FMLAC_INFINITY;
    float weight = ptx_exp2(*score * scale - lse);
    *dp = there ? weight * (*dp - delta) : 0.0f;
    *score = there ? weight : 0.0f;
}

template <int N> static __device__ __forceinline__ void clear(float x[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0.0f;
    }
}

/* 16 rows of accumulators to a packed tensor. */
template <int N>
static __device__ __forceinline__ void store_rows(const fmlac_packed &to, const float x[N][4], int64_t first,
                                                  int64_t row0, int64_t count, int32_t head, int32_t d, float factor)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int64_t row = row0 + lane / 4 + 8 * h;
        int64_t at = (first + row) * to.stride[0] + head * to.stride[1];
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (row < count && n * 8 < d) {
                store_two(to, at, n * 8 + lane % 4 * 2, d, x[n][2 * h] * factor, x[n][2 * h + 1] * factor);
            }
        }
    }
}

/* ---- keys ----------------------------------------------------------------------------------------------------------
 */

typedef struct keys_shared {
    uint32_t k, v, stages, stage_bytes;
    float *lse, *delta; /* [2][STEP] */
} keys_shared;

/* Starts copying queries first .. of one head, with their lse and delta, into a stage. */
static __device__ __forceinline__ void copy_queries(const fmlac_mha &p, const mha_work &w, const keys_shared &s,
                                                    int slot, int32_t head, int64_t first, uint32_t k_bytes,
                                                    uint32_t v_bytes)
{
    int64_t end = w.first_q + w.count_q, token = w.first_q + first + threadIdx.x;
    uint32_t stage = s.stages + slot * s.stage_bytes;
    copy_rows<STEP, WARPS>(stage, k_bytes, p.q, head, w.first_q + first, end, p.d_qk);
    copy_rows<STEP, WARPS>(stage + STEP * k_bytes, v_bytes, p.dout, head, w.first_q + first, end, p.d_v);
    if (threadIdx.x < STEP) {
        s.lse[slot * STEP + threadIdx.x] = token < end ? row_lse(p, token, head) : FMLAC_INFINITY;
        s.delta[slot * STEP + threadIdx.x] = token < end ? p.delta[head * p.total_q + token] : 0.0f;
    }
}

template <int F16> static __device__ __forceinline__ void keys_block(const fmlac_mha &p)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    uint32_t k_bytes = (p.d_qk + 63) / 64 * 128, v_bytes = (p.d_v + 63) / 64 * 128;
    __shared__ mha_work work; /* registers are short here */
    mha_work found;
    if (!mha_locate(p, false, ROWS, p.h_kv, &found)) {
        return;
    }
    if (threadIdx.x == 0) {
        work = found;
    }
    __syncthreads();
    const mha_work &w = work;
    keys_shared s;
    uint32_t base = ptx_shared_address(ptx_shared());
    s.k = base;
    s.v = base + ROWS * k_bytes;
    s.stages = s.v + ROWS * v_bytes;
    s.stage_bytes = STEP * (k_bytes + v_bytes);
    s.lse = (float *)(ptx_shared() + (ROWS + 2 * STEP) * (k_bytes + v_bytes));
    s.delta = s.lse + 2 * STEP;
    int32_t group = p.h_q / p.h_kv;
    int64_t end_k = w.first_k + w.count_k;
    /* The first query that sees the tile's first key. */
    int32_t count_q = (int32_t)w.count_q, count_k = (int32_t)w.count_k;
    int32_t first = p.causal ? (int32_t)clamped(w.row0 - (w.count_k - w.count_q), 0, w.count_q) / STEP * STEP : 0;
    int32_t per_head = (count_q - first + STEP - 1) / STEP, steps = per_head * group;
    /* The first query that sees each of this thread's two keys. */
    int32_t seen_from[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int32_t key = (int32_t)w.row0 + warp * 16 + g + 8 * h;
        seen_from[h] = key >= count_k ? INT32_MAX : p.causal ? key - (count_k - count_q) : 0;
    }

    float dk[NK][4], dv[NV][4];
    clear<NK>(dk);
    clear<NV>(dv);
    copy_rows<ROWS, WARPS>(s.k, k_bytes, p.k, w.head, w.first_k + w.row0, end_k, p.d_qk);
    copy_rows<ROWS, WARPS>(s.v, v_bytes, p.v, w.head, w.first_k + w.row0, end_k, p.d_v);
    if (steps > 0) {
        copy_queries(p, w, s, 0, w.head * group, first, k_bytes, v_bytes);
    }
    ptx_copy_async_commit();
    float scale = p.scale * LOG2_E;
#pragma unroll 1
    for (int32_t i = 0; i < steps; i++) {
        int slot = i & 1;
        int32_t query0 = first + i % per_head * STEP;
        ptx_copy_async_wait<0>();
        __syncthreads();
        if (i + 1 < steps) {
            copy_queries(p, w, s, slot ^ 1, w.head * group + (i + 1) / per_head, first + (i + 1) % per_head * STEP,
                         k_bytes, v_bytes);
        }
        ptx_copy_async_commit();
        uint32_t queries = s.stages + slot * s.stage_bytes, gradients = queries + STEP * k_bytes;
        float score[NT][4], dp[NT][4];
        scores<NT, F16>(score, s.k, queries, k_bytes, warp * 16, 0);
        scores<NT, F16>(dp, s.v, gradients, v_bytes, warp * 16, 0);
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int column = n * 8 + 2 * q + e % 2;
                bool attended = query0 + column < count_q && query0 + column >= seen_from[e / 2];
                pair(attended, scale, s.lse[slot * STEP + column], s.delta[slot * STEP + column], &score[n][e],
                     &dp[n][e]);
            }
        }
        uint32_t a[NT / 2][4];
        pack_rows<NT, F16>(a, score);
        accumulate<NT / 2, NV, F16>(dv, a, gradients, v_bytes, v_bytes / 2);
        pack_rows<NT, F16>(a, dp);
        accumulate<NT / 2, NK, F16>(dk, a, queries, k_bytes, k_bytes / 2);
    }
    ptx_copy_async_wait<0>();
    store_rows<NK>(p.dk, dk, w.first_k, w.row0 + warp * 16, w.count_k, w.head, p.d_qk, p.scale);
    store_rows<NV>(p.dv, dv, w.first_k, w.row0 + warp * 16, w.count_k, w.head, p.d_v, 1.0f);
}

/* ---- queries -------------------------------------------------------------------------------------------------------
 */

template <int F16> static __device__ __forceinline__ void queries_block(const fmlac_mha &p)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    uint32_t k_bytes = (p.d_qk + 63) / 64 * 128, v_bytes = (p.d_v + 63) / 64 * 128;
    mha_work w;
    if (!mha_locate(p, true, ROWS, p.h_q, &w)) {
        return;
    }
    uint32_t base = ptx_shared_address(ptx_shared());
    uint32_t gradients = base + ROWS * k_bytes, stages = gradients + ROWS * v_bytes;
    uint32_t stage_bytes = STEP * (k_bytes + v_bytes);
    int32_t kv_head = w.head / (p.h_q / p.h_kv);
    int64_t end_q = w.first_q + w.count_q, end_k = w.first_k + w.count_k;
    int64_t last_row = w.row0 + ROWS < w.count_q ? w.row0 + ROWS - 1 : w.count_q - 1;
    int64_t all_see = keys_seen(p, w, w.row0), most = keys_seen(p, w, last_row);
    int64_t steps = ceil_quotient(most, STEP);

    float dq[NK][4], lse[2], delta[2];
    int32_t seen[2];
    clear<NK>(dq);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int64_t row = w.row0 + warp * 16 + g + 8 * h;
        bool there = row < w.count_q;
        seen[h] = there ? (int32_t)keys_seen(p, w, row) : 0;
        lse[h] = there ? row_lse(p, w.first_q + row, w.head) : FMLAC_INFINITY;
        delta[h] = there ? p.delta[w.head * p.total_q + w.first_q + row] : 0.0f;
    }
    copy_rows<ROWS, WARPS>(base, k_bytes, p.q, w.head, w.first_q + w.row0, end_q, p.d_qk);
    copy_rows<ROWS, WARPS>(gradients, v_bytes, p.dout, w.head, w.first_q + w.row0, end_q, p.d_v);
    if (steps > 0) {
        copy_rows<STEP, WARPS>(stages, k_bytes, p.k, kv_head, w.first_k, end_k, p.d_qk);
        copy_rows<STEP, WARPS>(stages + STEP * k_bytes, v_bytes, p.v, kv_head, w.first_k, end_k, p.d_v);
    }
    ptx_copy_async_commit();
    float scale = p.scale * LOG2_E;
#pragma unroll 1
    for (int64_t i = 0; i < steps; i++) {
        uint32_t keys = stages + (i & 1) * stage_bytes, next = stages + (~i & 1) * stage_bytes;
        ptx_copy_async_wait<0>();
        __syncthreads();
        if (i + 1 < steps) {
            int64_t first = w.first_k + (i + 1) * STEP;
            copy_rows<STEP, WARPS>(next, k_bytes, p.k, kv_head, first, end_k, p.d_qk);
            copy_rows<STEP, WARPS>(next + STEP * k_bytes, v_bytes, p.v, kv_head, first, end_k, p.d_v);
        }
        ptx_copy_async_commit();
        float score[NT][4], dp[NT][4];
        scores<NT, F16>(score, base, keys, k_bytes, warp * 16, 0);
        scores<NT, F16>(dp, gradients, keys + STEP * k_bytes, v_bytes, warp * 16, 0);
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int64_t key = i * STEP + n * 8 + 2 * q + e % 2;
                pair(key < seen[e / 2], scale, lse[e / 2], delta[e / 2], &score[n][e], &dp[n][e]);
            }
        }
        if (all_see < (i + 1) * STEP && all_see < most) {
            /* Keys that some rows do not see: where they are not finite, rows that see them have dS = NaN already. */
            __syncthreads();
            clean_rows<STEP, THREADS>(keys, k_bytes, (int)clamped(all_see - i * STEP, 0, STEP),
                                      F16 ? 0x7C00u : 0x7F80u);
            __syncthreads();
        }
        uint32_t a[NT / 2][4];
        pack_rows<NT, F16>(a, dp);
        accumulate<NT / 2, NK, F16>(dq, a, keys, k_bytes, k_bytes / 2);
    }
    ptx_copy_async_wait<0>();
    store_rows<NK>(p.dq, dq, w.first_q, w.row0 + warp * 16, w.count_q, w.head, p.d_qk, p.scale);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mha_keys_bf16_sm80(const __grid_constant__ fmlac_mha p)
{
    keys_block<0>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mha_keys_f16_sm80(const __grid_constant__ fmlac_mha p)
{
    keys_block<1>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    fmlak_mha_queries_bf16_sm80(const __grid_constant__ fmlac_mha p)
{
    queries_block<0>(p);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mha_queries_f16_sm80(const __grid_constant__ fmlac_mha p)
{
    queries_block<1>(p);
}
