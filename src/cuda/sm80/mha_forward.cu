/* SPDX-License-Identifier: MIT */
/*
 * mha_forward.cu: dense attention over packed sequences. Block: 128 queries of one head, 4 warps of 32 rows, so that
 * every fragment of K and V that comes from shared memory feeds two products; 64 keys a step; two blocks share a
 * multiprocessor, one's softmax runs beside the other's products.
 *
 * Shared memory: Q [128][KB * 64], K [64][KB * 64], V [64][VB * 64]. One step:
 *   wait for K i, barrier (V is free) · start V i · scores = Q K'
 *   wait for V i, barrier (K is free) · start K i + 1 · maxima, weights, out += weights V
 * Scores are scaled inside the exponent: 2^(scale * score - reference). A row's reference follows its maximum only when
 * that has grown by more than SLACK, so weights reach 2^SLACK and out is seldom rescaled; what a row gets never depends
 * on other rows. A negative scale turns Q's signs instead: maxima are taken before scaling.
 */
#include "mha.cuh"

#define ROWS    128
#define KEYS    64
#define WARPS   4
#define THREADS (WARPS * 32)
#define NT      (KEYS / 8)
#define SLACK   6.0f
#define LEAST   -3e38f /* a reference before the first key: finite, so that nothing is infinity - infinity */

/* Turns the signs of a tile's numbers. */
static __device__ __noinline__ void negate_tile(uint32_t tile, uint32_t bytes)
{
    for (uint32_t at = threadIdx.x * 4; at < bytes; at += THREADS * 4) {
        ptx_store_shared_u32(tile + at, ptx_load_shared_u32(tile + at) ^ 0x80008000u);
    }
}

/* Whether a tile has a value that is not finite in rows from `first` on: the same answer for all threads. */
static __device__ __noinline__ bool has_odd_values(uint32_t tile, uint32_t row_bytes, int first, uint32_t exponent)
{
    bool odd = false;
    for (uint32_t at = first * row_bytes + threadIdx.x * 8; at < KEYS * row_bytes; at += THREADS * 8) {
        uint32_t x[2];
        ptx_load_shared_64(x, tile + at);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            odd = odd || (x[i] & exponent) == exponent || (x[i] >> 16 & exponent) == exponent;
        }
    }
    return __syncthreads_count(odd) > 0;
}

/* Adds the values that are not finite, of rows from `first` on, to the queries that see them: limit[] keys. */
template <int F16, int VB>
static __device__ __forceinline__ void add_odd_values(float out[2][VB * 8][4], uint32_t tile, int first,
                                                      const int limit[4])
{
    const uint32_t exponent = F16 ? 0x7C00u : 0x7F80u;
#pragma unroll 1
    for (int t = first; t < KEYS; t++) {
#pragma unroll
        for (int n = 0; n < VB * 8; n++) {
            uint32_t pair = ptx_load_shared_u32(tile + swizzled(t, n, VB * 128) + threadIdx.x % 4 * 4);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                uint32_t bits = pair >> (16 * e) & 0xFFFF;
                float x = F16 ? ptx_float_of_f16(bits) : float_of_bf16(bits);
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    float *to = &out[r / 2][n][r % 2 * 2 + e];
                    *to = (bits & exponent) == exponent && t < limit[r] ? *to + x : *to;
                }
            }
        }
    }
}

/* New references of a thread's four rows from a tile's scores; what is there already follows them. */
template <int VB>
static __device__ __forceinline__ void follow_maxima(const float s[2][NT][4], float scale, float reference[4],
                                                     float sum[4], float out[2][VB * 8][4])
{
    float shrink[4];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 4; r++) {
        float top = -FMLAC_INFINITY;
#pragma unroll
        for (int n = 0; n < NT; n++) {
            top = fmaxf(top, fmaxf(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2)) * scale;
        bool grows = top > reference[r] + SLACK;
        /* Never 0: out may be infinite already. */
        shrink[r] = grows ? fmaxf(ptx_exp2(reference[r] - top), 1e-37f) : 1.0f;
        reference[r] = grows ? top : reference[r];
        grown = grown || grows;
    }
    if (__any_sync(0xFFFFFFFFu, grown)) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            sum[r] *= shrink[r];
#pragma unroll
            for (int n = 0; n < VB * 8; n++) {
                out[r / 2][n][r % 2 * 2] *= shrink[r];
                out[r / 2][n][r % 2 * 2 + 1] *= shrink[r];
            }
        }
    }
}

/* out += 2^(scale * s - reference) x V, 16 keys at a time: the next weights are made while products run. */
template <int F16, int VB>
static __device__ __forceinline__ void add_values(float out[2][VB * 8][4], float s[2][NT][4], float scale,
                                                  const float reference[4], float sum[4], uint32_t values)
{
    int lane = ptx_thread() % 32;
    uint32_t v_at = values + lane % 16 * VB * 128;
    uint32_t v_chunk = ((lane / 16) ^ (lane & 7)) << 4;
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t a[2][4];
#pragma unroll
        for (int m = 0; m < 2; m++) {
#pragma unroll
            for (int i = 0; i < 4; i++) { /* rows i % 2, columns 2k + i / 2 */
                int r = 2 * m + i % 2;
                float *x = &s[m][2 * k + i / 2][i % 2 * 2];
                x[0] = ptx_exp2(fmaf(x[0], scale, -reference[r]));
                x[1] = ptx_exp2(fmaf(x[1], scale, -reference[r]));
                sum[r] += x[0] + x[1];
                a[m][i] = pack<F16>(x[0], x[1]);
            }
        }
#pragma unroll
        for (int n = 0; n < VB * 8; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4_trans(b, v_at + k * 16 * VB * 128 + n / 8 * 128 + (v_chunk ^ (n % 8 * 16)));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply<F16>(out[m][n], a[m], b[0], b[1]);
                multiply<F16>(out[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* What a block is about: in shared memory, for registers are short. */
typedef struct forward_work {
    mha_work w;
    int32_t kv_head;
    int32_t all_see, most; /* keys that every row sees, and that some row sees */
    int32_t more;          /* keys beyond a row's own number that it sees, the row itself among them */
} forward_work;

/* Keys that a thread's row r sees. */
static __device__ __forceinline__ int row_limit(const forward_work &work, bool causal, int r)
{
    int seen = (int)work.w.count_k;
    int last = (int)work.w.row0 + threadIdx.x / 32 * 32 + threadIdx.x % 32 / 4 + 8 * r + work.more;
    return causal && last < seen ? last : seen;
}

/* Scores that do not count become -infinity. */
static __device__ __forceinline__ void mask_scores(float s[2][NT][4], const forward_work &work, bool causal, int base)
{
#pragma unroll
    for (int r = 0; r < 4; r++) {
        int limit = row_limit(work, causal, r) - base - threadIdx.x % 4 * 2;
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float *x = &s[r / 2][n][r % 2 * 2 + e];
                *x = n * 8 + e < limit ? *x : -FMLAC_INFINITY;
            }
        }
    }
}

/*
 * Some rows do not see some of a step's keys: there 0 x value must be 0 whatever the value is. So values that are not
 * finite are added to the rows that see them, and become 0.
 */
template <int F16, int VB>
static __device__ __forceinline__ void settle_odd_values(float out[2][VB * 8][4], uint32_t values,
                                                         const forward_work &work, bool causal, int base)
{
    int limit[4], first = work.all_see > base ? work.all_see - base : 0;
    uint32_t exponent = F16 ? 0x7C00u : 0x7F80u;
    ptx_copy_async_wait<0>();
    __syncthreads();
    if (has_odd_values(values, VB * 128, first, exponent)) {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            limit[r] = row_limit(work, causal, r) - base;
        }
        add_odd_values<F16, VB>(out, values, first, limit);
        __syncthreads();
        clean_rows<KEYS, THREADS>(values, VB * 128, first, exponent);
        __syncthreads();
    }
}

template <int VB>
static __device__ __forceinline__ void store_queries(const fmlac_mha &p, const forward_work &work,
                                                     const float reference[4], float sum[4],
                                                     const float out[2][VB * 8][4])
{
    const mha_work &w = work.w;
    int lane = threadIdx.x % 32, left = (int)(w.count_q - w.row0);
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++) {
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
        sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
        int row = threadIdx.x / 32 * 32 + lane / 4 + 8 * r;
        bool lonely = sum[r] == 0.0f;
        float factor = lonely ? 0.0f : 1.0f / sum[r];
        if (lane % 4 == 0 && p.lse.data && row < left) {
            ((float *)p.lse.data)[(w.first_q + w.row0 + row) * p.lse.stride[0] + w.head * p.lse.stride[1]] =
                lonely ? p.empty_lse : (reference[r] + log2f(sum[r])) * LN_2;
        }
#pragma unroll
        for (int n = 0; n < VB * 8; n++) {
            stage_two(row, n * 8 + lane % 4 * 2, VB * 64, out[r / 2][n][r % 2 * 2] * factor,
                      out[r / 2][n][r % 2 * 2 + 1] * factor);
        }
    }
    __syncthreads();
    store_tile(p.out, VB * 64, w.first_q + w.row0, w.head, left < ROWS ? left : ROWS, p.d_v);
}

template <int F16, int KB, int VB> static __device__ __forceinline__ void forward_block(const fmlac_mha &p)
{
    __shared__ forward_work work;
    uint32_t queries = ptx_shared_address(ptx_shared());
    uint32_t keys = queries + ROWS * KB * 128, values = keys + KEYS * KB * 128;
    mha_work w;
    if (!mha_locate(p, true, ROWS, p.h_q, &w)) {
        return;
    }
    if (threadIdx.x == 0) {
        int64_t last_row = w.row0 + ROWS < w.count_q ? w.row0 + ROWS - 1 : w.count_q - 1;
        work = {w, w.head / (p.h_q / p.h_kv), (int32_t)keys_seen(p, w, w.row0), (int32_t)keys_seen(p, w, last_row),
                (int32_t)(w.count_k - w.count_q) + 1};
    }
    __syncthreads();
    float scale = p.scale == 0.0f ? 1e-37f : fabsf(p.scale) * LOG2_E; /* masked scores must stay -infinity */

    float out[2][VB * 8][4], reference[4], sum[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        reference[r] = LEAST;
        sum[r] = 0.0f;
#pragma unroll
        for (int n = 0; n < VB * 8; n++) {
            out[r / 2][n][r % 2 * 2] = out[r / 2][n][r % 2 * 2 + 1] = 0.0f;
        }
    }
    copy_tile<ROWS, THREADS, KB>(queries, p.q, w.head, w.first_q + w.row0, (int32_t)(w.count_q - w.row0), p.d_qk);
    ptx_copy_async_commit();
    if (p.scale < 0.0f) {
        ptx_copy_async_wait<0>();
        __syncthreads();
        negate_tile(queries, ROWS * KB * 128);
    }
    if (work.most > 0) {
        copy_tile<KEYS, THREADS, KB>(keys, p.k, work.kv_head, work.w.first_k, (int32_t)work.w.count_k, p.d_qk);
    }
    ptx_copy_async_commit();
#pragma unroll 1
    for (int32_t base = 0; base < work.most; base += KEYS) {
        ptx_copy_async_wait<0>();
        __syncthreads();
        copy_tile<KEYS, THREADS, VB>(values, p.v, work.kv_head, work.w.first_k + base, (int32_t)work.w.count_k - base,
                                     p.d_v);
        ptx_copy_async_commit();
        if (work.all_see < base + KEYS && work.all_see < work.most) {
            settle_odd_values<F16, VB>(out, values, work, p.causal, base);
        }
        float s[2][NT][4];
        scores_32<F16, KB, NT>(s, queries + ptx_thread() / 32 * 32 * KB * 128, keys);
        ptx_copy_async_wait<0>();
        __syncthreads();
        if (base + KEYS < work.most) {
            copy_tile<KEYS, THREADS, KB>(keys, p.k, work.kv_head, work.w.first_k + base + KEYS,
                                         (int32_t)work.w.count_k - base - KEYS, p.d_qk);
        }
        ptx_copy_async_commit();
        int all_see = work.all_see - base;
        if (all_see < KEYS) {
            mask_scores(s, work, p.causal, base);
        }
        follow_maxima<VB>(s, scale, reference, sum, out);
        add_values<F16, VB>(out, s, scale, reference, sum, values);
    }
    ptx_copy_async_wait<0>();
    store_queries<VB>(p, work, reference, sum, out);
}

#define KERNEL(name, f16, kb, vb, blocks)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(const __grid_constant__ fmlac_mha p)            \
    {                                                                                                                  \
        forward_block<f16, kb, vb>(p);                                                                                 \
    }

KERNEL(fmlak_mha_forward_bf16_64_sm80, 0, 1, 1, 3)
KERNEL(fmlak_mha_forward_bf16_128_sm80, 0, 2, 2, 2)
KERNEL(fmlak_mha_forward_bf16_192_sm80, 0, 3, 2, 2)
KERNEL(fmlak_mha_forward_f16_64_sm80, 1, 1, 1, 3)
KERNEL(fmlak_mha_forward_f16_128_sm80, 1, 2, 2, 2)
KERNEL(fmlak_mha_forward_f16_192_sm80, 1, 3, 2, 2)
