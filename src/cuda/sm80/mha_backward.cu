/* SPDX-License-Identifier: MIT */
/*
 * mha_backward.cu: gradients of dense attention. Three kernels, no atomics, so the same bits every time:
 *   delta   rowsum(dout * out)
 *   keys    block: 64 keys of one KV head; over all heads of the group, 64 queries a step:
 *           S' = K Q', P' = 2^(S' - lse), dP' = V dO', dS' = P' (dP' - delta), dK += dS' Q, dV += P' dO
 *   queries block: 64 queries of one head; 64 keys a step: dP = dO V', S = Q K', dS = P (dP - delta), dQ += dS K
 * Blocks have 4 warps, two by two: a warp makes weights of 32 rows x 32 columns, and, when all weights of the step lie
 * in shared memory, 32 rows x half the columns of a gradient. A pair that does not attend has P = dS = 0 by selection,
 * never by a product. Rows with an infinite lse have no pairs.
 *
 * Shared memory: the block's own two tiles, one tile of each of the other side's, which loads while the products that
 * do not need it run, and the weights.
 */
#include "mha.cuh"

#define ROWS    64 /* of the block's own side */
#define STEP    64 /* of the other side */
#define WARPS   4
#define THREADS (WARPS * 32)
#define NT      4 /* 8-column tiles of a warp's weights */

/* Steps of 16 columns of dP' in one stretch of code: all where registers suffice, else four at a time. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
#define STRETCH(kb, vb) 4
#else
#define STRETCH(kb, vb) ((kb) < 3 ? (vb)*4 : 4)
#endif

/* Four neighbouring elements of a vector from a multiple of four on. */
static __device__ __forceinline__ void load_four(float x[4], const fmlac_packed &from, int64_t at, int d, int width)
{
    if (from.aligned && from.dtype != FMLAC_F32) {
        uint2 words = *(const uint2 *)((const uint16_t *)from.data + at + d);
        bool f16 = from.dtype == FMLAC_F16;
        x[0] = f16 ? ptx_float_of_f16(words.x & 0xFFFF) : float_of_bf16(words.x & 0xFFFF);
        x[1] = f16 ? ptx_float_of_f16(words.x >> 16) : float_of_bf16(words.x >> 16);
        x[2] = f16 ? ptx_float_of_f16(words.y & 0xFFFF) : float_of_bf16(words.y & 0xFFFF);
        x[3] = f16 ? ptx_float_of_f16(words.y >> 16) : float_of_bf16(words.y >> 16);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = d + i < width ? load_element(from.data, from.dtype, at + d + i) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(256) fmlak_mha_delta_sm80(const __grid_constant__ fmlac_mha p)
{
    int64_t row = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    int64_t token = quotient(row, p.h_q);
    int32_t head = (int32_t)(row - token * p.h_q);
    float sum = 0.0f;
    if (token >= p.total_q) {
        return;
    }
    for (int d = threadIdx.x % 32 * 4; d < p.d_v; d += 128) {
        float x[4], y[4];
        load_four(x, p.dout, token * p.dout.stride[0] + head * p.dout.stride[1], d, p.d_v);
        load_four(y, p.out, token * p.out.stride[0] + head * p.out.stride[1], d, p.d_v);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum += x[i] * y[i];
        }
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

/* A warp's weights into the block's tile of them. */
template <int F16> static __device__ __forceinline__ void store_weights(uint32_t tile, const float s[2][NT][4])
{
    int thread = ptx_thread(), lane = thread % 32, row = thread / 64 * 32 + lane / 4, column = thread / 32 % 2 * NT;
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            uint32_t at = tile + swizzled(row + 16 * m, column + n, 128) + lane % 4 * 4;
            ptx_store_shared_u32(at, pack<F16>(s[m][n][0], s[m][n][1]));
            ptx_store_shared_u32(at + 8 * 128, pack<F16>(s[m][n][2], s[m][n][3]));
        }
    }
}

/*
 * out += weights (32 rows of their tile) x a tile of STEP rows, every other 16 of its BLOCKS * 64 columns: 16-column
 * units 2j + half; out[m][2j + i] is the unit's 8-column tile i.
 */
template <int F16, int BLOCKS>
static __device__ __forceinline__ void add_gradients(float out[2][BLOCKS * 4][4], uint32_t weights, uint32_t tile)
{
    int thread = ptx_thread(), lane = thread % 32, half = thread / 32 % 2;
    uint32_t a_at = weights + (thread / 64 * 32 + lane % 16) * 128, a_chunk = ((lane / 16) ^ (lane & 7)) << 4;
    uint32_t b_at = tile + lane % 16 * BLOCKS * 128, b_chunk = ((lane / 16 + 2 * half) ^ (lane & 7)) << 4;
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        uint32_t a[2][4];
        ptx_ldmatrix_x4(a[0], a_at + (a_chunk ^ (k * 32)));
        ptx_ldmatrix_x4(a[1], a_at + 16 * 128 + (a_chunk ^ (k * 32)));
#pragma unroll
        for (int j = 0; j < BLOCKS * 2; j++) {
            uint32_t b[4];
            ptx_ldmatrix_x4_trans(b, b_at + k * 16 * BLOCKS * 128 + j / 2 * 128 + (b_chunk ^ (j % 2 * 64)));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply<F16>(out[m][2 * j], a[m], b[0], b[1]);
                multiply<F16>(out[m][2 * j + 1], a[m], b[2], b[3]);
            }
        }
    }
}

template <int N> static __device__ __forceinline__ void clear(float x[2][N][4])
{
#pragma unroll
    for (int n = 0; n < 8 * N; n++) {
        x[n / (4 * N)][n / 4 % N][n % 4] = 0.0f;
    }
}

/* A gradient of the block's rows to its tensor. */
template <int BLOCKS>
static __device__ __forceinline__ void store_gradient(const fmlac_packed &to, const float x[2][BLOCKS * 4][4],
                                                      int64_t first, int32_t head, int64_t left, int32_t d,
                                                      float factor)
{
    int thread = ptx_thread(), lane = thread % 32, row = thread / 64 * 32 + lane / 4, half = thread / 32 % 2;
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int n = 0; n < BLOCKS * 4; n++) {
            int column = (n / 2 * 4 + 2 * half + n % 2) * 8 + lane % 4 * 2;
            stage_two(row + 8 * r, column, BLOCKS * 64, x[r / 2][n][r % 2 * 2] * factor,
                      x[r / 2][n][r % 2 * 2 + 1] * factor);
        }
    }
    __syncthreads();
    store_tile(to, BLOCKS * 64, first, head, left < ROWS ? (int)left : ROWS, d);
}

/* ---- keys ----------------------------------------------------------------------------------------------------------
 */

typedef struct step_place {
    int32_t head, query;
} step_place;

/* What a block is about: in shared memory, for registers are short. */
typedef struct keys_work {
    mha_work w;
    int32_t count_q;
    int32_t query; /* the first that sees the block's first key, rounded down to a step */
    int32_t steps;
    step_place at[2];
} keys_work;

/* A step's head and first query. Two places: a step notes the next one's beside its own. */
static __device__ __forceinline__ void locate_step(const keys_work &work, int step, int32_t *head, int32_t *query)
{
    *head = work.at[step & 1].head;
    *query = work.at[step & 1].query;
}

static __device__ __forceinline__ void note_next(keys_work &work, int step)
{
    if (threadIdx.x == 0) {
        int32_t head, query;
        locate_step(work, step, &head, &query);
        query += STEP;
        bool last = query >= work.count_q;
        work.at[~step & 1] = {last ? head + 1 : head, last ? work.query : query};
    }
}

/* Starts copying a step's queries, and reads their lse and delta: two rows of STEP floats. */
template <int KB>
static __device__ __forceinline__ void copy_queries(const fmlac_mha &p, const keys_work &work, uint32_t tile,
                                                    uint32_t floats, int step)
{
    int32_t head, query;
    locate_step(work, step, &head, &query);
    int64_t token = work.w.first_q + query + threadIdx.x;
    bool there = query + (int)threadIdx.x < work.count_q;
    copy_tile<STEP, THREADS, KB>(tile, p.q, head, work.w.first_q + query, work.count_q - query, p.d_qk);
    if (threadIdx.x < STEP) {
        float lse = there ? row_lse(p, token, head) : FMLAC_INFINITY;
        float delta = there ? p.delta[head * p.total_q + token] : 0.0f;
        ptx_store_shared_u32(floats + threadIdx.x * 4, __float_as_uint(lse));
        ptx_store_shared_u32(floats + (STEP + threadIdx.x) * 4, __float_as_uint(delta));
    }
}

template <int VB>
static __device__ __forceinline__ void copy_gradients(const fmlac_mha &p, const keys_work &work, uint32_t tile,
                                                      int step)
{
    int32_t head, query;
    locate_step(work, step, &head, &query);
    copy_tile<STEP, THREADS, VB>(tile, p.dout, head, work.w.first_q + query, work.count_q - query, p.d_v);
}

/* Weights from scores (keys are rows); those of pairs that do not attend are 0. */
static __device__ __forceinline__ void weigh_keys(float s[2][NT][4], const keys_work &work, uint32_t floats,
                                                  bool causal, float scale, int step)
{
    int32_t head, query;
    locate_step(work, step, &head, &query);
    int thread = ptx_thread(), lane = thread % 32, column = thread / 32 % 2 * NT * 8 + lane % 4 * 2;
    int key = (int)work.w.row0 + thread / 64 * 32 + lane / 4;
    /* Columns, the thread's first being 0, from which on the first key is seen. Keys beyond the last one may have any
     * weights: rows of their own, which nobody stores. */
    int from = causal ? key - ((int)work.w.count_k - work.count_q) - query - column : -STEP;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float lse = __uint_as_float(ptx_load_shared_u32(floats + (column + n * 8 + e) * 4));
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float *x = &s[r / 2][n][r % 2 * 2 + e];
                float weight = ptx_exp2(fmaf(*x, scale, -lse)); /* ahead of the choice, which would be a branch else */
                *x = (lse != FMLAC_INFINITY) & (n * 8 + e - 8 * r >= from) ? weight : 0.0f;
            }
        }
    }
}

/* s = P' (dP' - delta) of 16 queries at a time: registers are short. */
template <int F16, int VB, int UNROLL>
static __device__ __forceinline__ void slope_keys(float s[2][NT][4], uint32_t floats, uint32_t values,
                                                  uint32_t gradients)
{
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        int thread = ptx_thread(), row = thread / 64 * 32, column = thread / 32 % 2 * NT * 8;
        float dp[2][2][4];
        __syncwarp(); /* nothing of one half is fetched during the other: registers would not suffice */
        scores_32<F16, VB, 2, UNROLL>(dp, values + row * VB * 128, gradients + (column + n * 8) * VB * 128);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t at = floats + (STEP + column + (n + i / 2) * 8 + thread % 4 * 2 + i % 2) * 4;
            float delta = __uint_as_float(ptx_load_shared_u32(at));
#pragma unroll
            for (int r = 0; r < 4; r++) {
                float *x = &s[r / 2][n + i / 2][r % 2 * 2 + i % 2];
                *x = *x != 0.0f ? *x * (dp[r / 2][i / 2][r % 2 * 2 + i % 2] - delta) : 0.0f;
            }
        }
    }
}

template <int F16, int KB, int VB> static __device__ __forceinline__ void keys_block(const fmlac_mha &p)
{
    __shared__ keys_work work;
    uint32_t keys = ptx_shared_address(ptx_shared()), values = keys + ROWS * KB * 128;
    uint32_t queries = values + ROWS * VB * 128, gradients = queries + STEP * KB * 128;
    uint32_t weights = gradients + STEP * VB * 128, slopes = weights + ROWS * 128, floats = slopes + ROWS * 128;
    mha_work w;
    if (!mha_locate(p, false, ROWS, p.h_kv, &w)) {
        return;
    }
    if (threadIdx.x == 0) {
        int64_t before = p.causal ? clamped(w.row0 - (w.count_k - w.count_q), 0, w.count_q) / STEP * STEP : 0;
        work.w = w;
        work.count_q = (int32_t)w.count_q;
        work.query = (int32_t)before;
        work.at[0] = {(int32_t)(w.head * (p.h_q / p.h_kv)), (int32_t)before};
        work.steps = (int32_t)((w.count_q - before + STEP - 1) / STEP) * (p.h_q / p.h_kv);
    }
    __syncthreads();
    float dk[2][KB * 4][4], dv[2][VB * 4][4];
    clear<KB * 4>(dk);
    clear<VB * 4>(dv);
    copy_tile<ROWS, THREADS, KB>(keys, p.k, w.head, w.first_k + w.row0, (int32_t)(w.count_k - w.row0), p.d_qk);
    copy_tile<ROWS, THREADS, VB>(values, p.v, w.head, w.first_k + w.row0, (int32_t)(w.count_k - w.row0), p.d_v);
    if (work.steps > 0) {
        copy_queries<KB>(p, work, queries, floats, 0);
    }
    ptx_copy_async_commit();
#pragma unroll 1
    for (int step = 0; step < work.steps; step++) {
        ptx_copy_async_wait<0>();
        __syncthreads(); /* queries are there; gradients and weights are free */
        note_next(work, step);
        copy_gradients<VB>(p, work, gradients, step);
        ptx_copy_async_commit();
        float s[2][NT][4];
        scores_32<F16, KB, NT>(s, keys + ptx_thread() / 64 * 32 * KB * 128,
                               queries + ptx_thread() / 32 % 2 * NT * 8 * KB * 128);
        weigh_keys(s, work, floats, p.causal, p.scale * LOG2_E, step);
        store_weights<F16>(weights, s);
        ptx_copy_async_wait<0>();
        __syncthreads(); /* gradients are there */
        slope_keys<F16, VB, STRETCH(KB, VB)>(s, floats, values, gradients);
        store_weights<F16>(slopes, s);
        __syncthreads(); /* weights and slopes are there */
        add_gradients<F16, KB>(dk, slopes, queries);
        __syncthreads(); /* queries are free */
        if (step + 1 < work.steps) {
            copy_queries<KB>(p, work, queries, floats, step + 1);
        }
        ptx_copy_async_commit();
        add_gradients<F16, VB>(dv, weights, gradients);
    }
    ptx_copy_async_wait<0>();
    int64_t first = work.w.first_k + work.w.row0, left = work.w.count_k - work.w.row0;
    store_gradient<KB>(p.dk, dk, first, work.w.head, left, p.d_qk, p.scale);
    store_gradient<VB>(p.dv, dv, first, work.w.head, left, p.d_v, 1.0f);
}

/* ---- queries -------------------------------------------------------------------------------------------------------
 */

typedef struct queries_work {
    mha_work w;
    int32_t kv_head;
    int32_t all_see, most; /* keys that every row sees, and that some row sees */
} queries_work;

/* dp = P (dP - delta) for a step's scores; 0 where a row's limit, counted from the warp's first column, excludes it. */
static __device__ __forceinline__ void slope_queries(float dp[2][NT][4], const float s[2][NT][4], float scale,
                                                     const float lse[4], const float delta[4], const int limit[4])
{
    int column = ptx_thread() % 4 * 2;
#pragma unroll
    for (int r = 0; r < 4; r++) {
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
            float *x = &dp[r / 2][i / 2][r % 2 * 2 + i % 2];
            float weight = ptx_exp2(fmaf(s[r / 2][i / 2][r % 2 * 2 + i % 2], scale, -lse[r]));
            *x = column + i / 2 * 8 + i % 2 < limit[r] ? weight * (*x - delta[r]) : 0.0f;
        }
    }
}

template <int F16, int KB, int VB> static __device__ __forceinline__ void queries_block(const fmlac_mha &p)
{
    __shared__ queries_work work;
    uint32_t queries = ptx_shared_address(ptx_shared()), gradients = queries + ROWS * KB * 128;
    uint32_t keys = gradients + ROWS * VB * 128, values = keys + STEP * KB * 128, slopes = values + STEP * VB * 128;
    int row = threadIdx.x / 64 * 32, column = threadIdx.x / 32 % 2 * NT * 8;
    mha_work w;
    if (!mha_locate(p, true, ROWS, p.h_q, &w)) {
        return;
    }
    if (threadIdx.x == 0) {
        int64_t last_row = w.row0 + ROWS < w.count_q ? w.row0 + ROWS - 1 : w.count_q - 1;
        work = {w, w.head / (p.h_q / p.h_kv), (int32_t)keys_seen(p, w, w.row0), (int32_t)keys_seen(p, w, last_row)};
    }
    __syncthreads();
    float dq[2][KB * 4][4], lse[4], delta[4];
    int32_t seen[4];
    clear<KB * 4>(dq);
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int64_t at = w.row0 + row + threadIdx.x % 32 / 4 + 8 * r;
        bool there = at < w.count_q;
        lse[r] = there ? row_lse(p, w.first_q + at, w.head) : FMLAC_INFINITY;
        delta[r] = there ? p.delta[w.head * p.total_q + w.first_q + at] : 0.0f;
        seen[r] = lse[r] != FMLAC_INFINITY ? (int32_t)keys_seen(p, w, at) : 0;
    }
    copy_tile<ROWS, THREADS, KB>(queries, p.q, w.head, w.first_q + w.row0, (int32_t)(w.count_q - w.row0), p.d_qk);
    copy_tile<ROWS, THREADS, VB>(gradients, p.dout, w.head, w.first_q + w.row0, (int32_t)(w.count_q - w.row0), p.d_v);
    if (work.most > 0) {
        copy_tile<STEP, THREADS, VB>(values, p.v, work.kv_head, w.first_k, (int32_t)w.count_k, p.d_v);
    }
    ptx_copy_async_commit();
#pragma unroll 1
    for (int32_t base = 0; base < work.most; base += STEP) {
        ptx_copy_async_wait<0>();
        __syncthreads(); /* values are there; keys are free */
        copy_tile<STEP, THREADS, KB>(keys, p.k, work.kv_head, work.w.first_k + base, (int32_t)work.w.count_k - base,
                                     p.d_qk);
        ptx_copy_async_commit();
        float dp[2][NT][4], s[2][NT][4];
        scores_32<F16, VB, NT>(dp, gradients + row * VB * 128, values + column * VB * 128);
        ptx_copy_async_wait<0>();
        __syncthreads(); /* keys are there; values are free */
        if (base + STEP < work.most) {
            copy_tile<STEP, THREADS, VB>(values, p.v, work.kv_head, work.w.first_k + base + STEP,
                                         (int32_t)work.w.count_k - base - STEP, p.d_v);
        }
        ptx_copy_async_commit();
        scores_32<F16, KB, NT>(s, queries + row * KB * 128, keys + column * KB * 128);
        int limit[4];
#pragma unroll
        for (int r = 0; r < 4; r++) {
            limit[r] = seen[r] - base - column;
        }
        slope_queries(dp, s, p.scale * LOG2_E, lse, delta, limit);
        store_weights<F16>(slopes, dp);
        __syncthreads(); /* slopes are there */
        if (work.all_see < base + STEP && work.all_see < work.most) {
            /* Keys that some rows do not see: where they are not finite, rows that see them have dS = NaN already. */
            clean_rows<STEP, THREADS>(keys, KB * 128, work.all_see > base ? work.all_see - base : 0,
                                      F16 ? 0x7C00u : 0x7F80u);
            __syncthreads();
        }
        add_gradients<F16, KB>(dq, slopes, keys);
    }
    ptx_copy_async_wait<0>();
    store_gradient<KB>(p.dq, dq, work.w.first_q + work.w.row0, work.w.head, work.w.count_q - work.w.row0, p.d_qk,
                       p.scale);
}

#define KERNEL(side, suffix, f16, kb, vb, blocks)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks)                                                      \
        fmlak_mha_##side##_##suffix##_sm80(const __grid_constant__ fmlac_mha p)                                        \
    {                                                                                                                  \
        side##_block<f16, kb, vb>(p);                                                                                  \
    }

KERNEL(keys, bf16_64, 0, 1, 1, 2)
KERNEL(keys, bf16_128, 0, 2, 2, 2)
KERNEL(keys, bf16_192, 0, 3, 2, 2)
KERNEL(keys, f16_64, 1, 1, 1, 2)
KERNEL(keys, f16_128, 1, 2, 2, 2)
KERNEL(keys, f16_192, 1, 3, 2, 2)
KERNEL(queries, bf16_64, 0, 1, 1, 3)
KERNEL(queries, bf16_128, 0, 2, 2, 2)
KERNEL(queries, bf16_192, 0, 3, 2, 2)
KERNEL(queries, f16_64, 1, 1, 1, 3)
KERNEL(queries, f16_128, 1, 2, 2, 2)
KERNEL(queries, f16_192, 1, 3, 2, 2)
