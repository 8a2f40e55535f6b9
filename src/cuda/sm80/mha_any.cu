/* SPDX-License-Identifier: MIT */
/*
 * mha_any.cu: dense attention, forward and backward, for widths that the tiled kernels do not take (d_qk beyond 192,
 * d_v beyond 128). One block per row, fp32 throughout, written to be right.
 */
#include "mha.cuh"

#define THREADS 128
#define CHUNK   128

static __device__ __forceinline__ float reduce(float x, bool sum, float *scratch)
{
    for (int step = 16; step > 0; step /= 2) {
        float other = __shfl_xor_sync(0xFFFFFFFFu, x, step);
        x = sum ? x + other : fmaxf(x, other);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        scratch[threadIdx.x / 32] = x;
    }
    __syncthreads();
    x = scratch[0];
    for (int i = 1; i < THREADS / 32; i++) {
        x = sum ? x + scratch[i] : fmaxf(x, scratch[i]);
    }
    return x;
}

static __device__ __forceinline__ float element_at(const fmlac_packed &x, int64_t token, int32_t head, int32_t d)
{
    return load_element(x.data, x.dtype, token * x.stride[0] + head * x.stride[1] + d);
}

/* One warp: a row in shared memory times a token's vector; every lane gets the sum. */
static __device__ __forceinline__ float row_dot(const float *row, const fmlac_packed &x, int64_t token, int32_t head,
                                                int32_t d)
{
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < d; i += 32) {
        sum += row[i] * element_at(x, token, head, i);
    }
    for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    }
    return sum;
}

static __device__ __forceinline__ void load_row(float *row, const fmlac_packed &x, int64_t token, int32_t head,
                                                int32_t d)
{
    for (int i = threadIdx.x; i < d; i += THREADS) {
        row[i] = element_at(x, token, head, i);
    }
}

/* The request of a token, and the spans of both sides. */
static __device__ __forceinline__ void locate(const fmlac_mha &p, bool by_query, int64_t token, mha_work *w)
{
    const int32_t *cu = by_query ? p.cu_seqlens_q : p.cu_seqlens_kv;
    w->request = cu ? request_of_token(cu, p.batch, token) : 0;
    request_tokens(p.cu_seqlens_q, w->request, p.total_q, p.total_q, &w->first_q, &w->count_q);
    request_tokens(p.cu_seqlens_kv, w->request, p.total_kv, p.total_kv, &w->first_k, &w->count_k);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mha_forward_any_sm80(const __grid_constant__ fmlac_mha p)
{
    __shared__ float weights[CHUNK], scratch[THREADS / 32];
    float *query = (float *)ptx_shared(), *acc = query + p.d_qk;
    int64_t token = blockIdx.x / (uint32_t)p.h_q;
    int32_t head = (int32_t)(blockIdx.x - token * p.h_q), kv_head = head / (p.h_q / p.h_kv);
    float max = -FMLAC_INFINITY, sum = 0.0f;
    mha_work w;
    locate(p, true, token, &w);
    int64_t seen = keys_seen(p, w, token - w.first_q);
    load_row(query, p.q, token, head, p.d_qk);
    for (int d = threadIdx.x; d < p.d_v; d += THREADS) {
        acc[d] = 0.0f;
    }
    for (int64_t base = 0; base < seen; base += CHUNK) {
        int n = (int)(seen - base < CHUNK ? seen - base : CHUNK);
        __syncthreads();
        for (int t = threadIdx.x / 32; t < CHUNK; t += THREADS / 32) {
            float dot = t < n ? row_dot(query, p.k, w.first_k + base + t, kv_head, p.d_qk) : 0.0f;
            if (threadIdx.x % 32 == 0) {
                weights[t] = t < n ? dot * p.scale : -FMLAC_INFINITY;
            }
        }
        __syncthreads();
        float logit = weights[threadIdx.x];
        float top = fmaxf(max, reduce(logit, false, scratch));
        float reference = top == -FMLAC_INFINITY ? 0.0f : top;
        float shrink = expf(max - reference), weight = expf(logit - reference);
        sum = sum * shrink + reduce(weight, true, scratch);
        max = top;
        weights[threadIdx.x] = weight;
        __syncthreads();
        for (int d = threadIdx.x; d < p.d_v; d += THREADS) {
            float x = acc[d] * shrink;
            for (int t = 0; t < n; t++) {
                x += weights[t] * element_at(p.v, w.first_k + base + t, kv_head, d);
            }
            acc[d] = x;
        }
    }
    bool lonely = sum == 0.0f;
    if (threadIdx.x == 0 && p.lse.data) {
        ((float *)p.lse.data)[token * p.lse.stride[0] + head * p.lse.stride[1]] =
            lonely ? p.empty_lse : max + logf(sum);
    }
    for (int d = threadIdx.x; d < p.d_v; d += THREADS) {
        store_element(p.out.data, p.out.dtype, token * p.out.stride[0] + head * p.out.stride[1] + d,
                      lonely ? 0.0f : acc[d] / sum);
    }
}

static __device__ __forceinline__ float row_lse(const fmlac_mha &p, int64_t token, int32_t head)
{
    return ((const float *)p.lse.data)[token * p.lse.stride[0] + head * p.lse.stride[1]];
}

/* dQ of one row. */
extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mha_queries_any_sm80(const __grid_constant__ fmlac_mha p)
{
    __shared__ float weights[CHUNK];
    float *query = (float *)ptx_shared(), *gradient = query + p.d_qk, *acc = gradient + p.d_v;
    int64_t token = blockIdx.x / (uint32_t)p.h_q;
    int32_t head = (int32_t)(blockIdx.x - token * p.h_q), kv_head = head / (p.h_q / p.h_kv);
    mha_work w;
    locate(p, true, token, &w);
    float lse = row_lse(p, token, head), delta = p.delta[head * p.total_q + token];
    int64_t seen = is_infinite(lse) ? 0 : keys_seen(p, w, token - w.first_q);
    load_row(query, p.q, token, head, p.d_qk);
    load_row(gradient, p.dout, token, head, p.d_v);
    for (int d = threadIdx.x; d < p.d_qk; d += THREADS) {
        acc[d] = 0.0f;
    }
    for (int64_t base = 0; base < seen; base += CHUNK) {
        int n = (int)(seen - base < CHUNK ? seen - base : CHUNK);
        __syncthreads();
        for (int t = threadIdx.x / 32; t < n; t += THREADS / 32) {
            float weight = expf(row_dot(query, p.k, w.first_k + base + t, kv_head, p.d_qk) * p.scale - lse);
            float dp = row_dot(gradient, p.v, w.first_k + base + t, kv_head, p.d_v);
            if (threadIdx.x % 32 == 0) {
                weights[t] = weight * (dp - delta);
            }
        }
        __syncthreads();
        for (int d = threadIdx.x; d < p.d_qk; d += THREADS) {
            float x = acc[d];
            for (int t = 0; t < n; t++) {
                x += weights[t] * element_at(p.k, w.first_k + base + t, kv_head, d);
            }
            acc[d] = x;
        }
    }
    for (int d = threadIdx.x; d < p.d_qk; d += THREADS) {
        store_element(p.dq.data, p.dq.dtype, token * p.dq.stride[0] + head * p.dq.stride[1] + d, acc[d] * p.scale);
    }
}

/* dK and dV of one key: adds what n queries of one head, from `first` on, give; both in dk, one after the other. */
static __device__ void add_queries(const fmlac_mha &p, int64_t first, int n, int32_t head, const float *key,
                                   const float *value, float *dk)
{
    __shared__ float weights[CHUNK], slopes[CHUNK];
    __syncthreads();
    for (int t = threadIdx.x / 32; t < n; t += THREADS / 32) {
        float lse = row_lse(p, first + t, head);
        float weight = expf(row_dot(key, p.q, first + t, head, p.d_qk) * p.scale - lse);
        float dp = row_dot(value, p.dout, first + t, head, p.d_v);
        if (threadIdx.x % 32 == 0) {
            bool there = !is_infinite(lse);
            weights[t] = there ? weight : 0.0f;
            slopes[t] = there ? weight * (dp - p.delta[head * p.total_q + first + t]) : 0.0f;
        }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < p.d_qk + p.d_v; d += THREADS) {
        bool of_key = d < p.d_qk;
        float x = dk[d];
        for (int t = 0; t < n; t++) {
            float weight = of_key ? slopes[t] : weights[t];
            float y = of_key ? element_at(p.q, first + t, head, d) : element_at(p.dout, first + t, head, d - p.d_qk);
            x = weight == 0.0f ? x : x + weight * y;
        }
        dk[d] = x;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mha_keys_any_sm80(const __grid_constant__ fmlac_mha p)
{
    float *key = (float *)ptx_shared(), *value = key + p.d_qk, *dk = value + p.d_v, *dv = dk + p.d_qk;
    int64_t token = blockIdx.x / (uint32_t)p.h_kv;
    int32_t kv_head = (int32_t)(blockIdx.x - token * p.h_kv), group = p.h_q / p.h_kv;
    mha_work w;
    locate(p, false, token, &w);
    int64_t from = p.causal ? clamped(token - w.first_k - (w.count_k - w.count_q), 0, w.count_q) : 0;
    load_row(key, p.k, token, kv_head, p.d_qk);
    load_row(value, p.v, token, kv_head, p.d_v);
    for (int d = threadIdx.x; d < p.d_qk + p.d_v; d += THREADS) {
        dk[d] = 0.0f;
    }
    for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t base = from; base < w.count_q; base += CHUNK) {
            int n = (int)(w.count_q - base < CHUNK ? w.count_q - base : CHUNK);
            add_queries(p, w.first_q + base, n, head, key, value, dk);
        }
    }
    __syncthreads();
    for (int d = threadIdx.x; d < p.d_qk; d += THREADS) {
        store_element(p.dk.data, p.dk.dtype, token * p.dk.stride[0] + kv_head * p.dk.stride[1] + d, dk[d] * p.scale);
    }
    for (int d = threadIdx.x; d < p.d_v; d += THREADS) {
        store_element(p.dv.data, p.dv.dtype, token * p.dv.stride[0] + kv_head * p.dv.stride[1] + d, dv[d]);
    }
}
