/* SPDX-License-Identifier: MIT */
/*
 * mqa_any.cu: attention for whatever the tiled kernels do not take: d_qk beyond 576, d_v beyond 512, fp16 queries over
 * quantised caches, records with odd groups. One block per (query token, head), fp32 throughout, written to be right;
 * it reads every format element by element.
 */
#include "common/work.cuh"

#define THREADS 128
#define CHUNK   128 /* list entries at a time */

/* Slot of entry `at` of the main (which = 0) or the extra list. */
static __device__ __forceinline__ int64_t slot_of(const fmlac_mqa &p, const fmlac_list &list, const fmlac_work &w,
                                                  int64_t at)
{
    if (list.kind == FMLAC_LIST_PAGED) {
        return paged_slot(&list, w.request, at);
    }
    return indexed_slot(&list, index_row(&p, &list, w.first, w.kv_head)[at]);
}

static __device__ __forceinline__ float block_reduce(float x, bool sum, float *scratch)
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

/* Adds entries of one list to the running row: max, sum, acc[d_v]. */
static __device__ void add_list(const fmlac_mqa &p, const fmlac_list &list, const fmlac_work &w, int64_t count,
                                const float *query, float *acc, float *max, float *sum)
{
    __shared__ float weights[CHUNK];
    __shared__ int64_t slots[CHUNK];
    __shared__ float scratch[THREADS / 32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int64_t base = 0; base < count; base += CHUNK) {
        int n = (int)(count - base < CHUNK ? count - base : CHUNK);
        __syncthreads();
        slots[threadIdx.x] = (int)threadIdx.x < n ? slot_of(p, list, w, base + threadIdx.x) : -1;
        __syncthreads();
        for (int t = warp; t < CHUNK; t += THREADS / 32) {
            float dot = 0.0f;
            if (slots[t] >= 0) {
                const uint8_t *row = pool_row(&list.pool, slots[t]), *scales = pool_scales(&list.pool, slots[t]);
                for (int d = lane; d < p.d_qk; d += 32) {
                    dot += query[d] * token_element_seen(&list.pool, row, scales, w.kv_head, d);
                }
            }
            for (int step = 16; step > 0; step /= 2) {
                dot += __shfl_xor_sync(0xFFFFFFFFu, dot, step);
            }
            if (lane == 0) {
                weights[t] = slots[t] >= 0 ? dot * p.scale : -FMLAC_INFINITY;
            }
        }
        __syncthreads();
        float logit = weights[threadIdx.x];
        float top = fmaxf(*max, block_reduce(logit, false, scratch));
        float reference = top == -FMLAC_INFINITY ? 0.0f : top;
        float shrink = expf(*max - reference);
        float weight = expf(logit - reference);
        *sum = *sum * shrink + block_reduce(weight, true, scratch);
        *max = top;
        weights[threadIdx.x] = weight;
        __syncthreads();
        for (int d = threadIdx.x; d < p.d_v; d += THREADS) {
            float x = acc[d] * shrink;
            for (int t = 0; t < n; t++) {
                if (slots[t] >= 0) {
                    const uint8_t *row = pool_row(&list.pool, slots[t]), *scales = pool_scales(&list.pool, slots[t]);
                    x += weights[t] * token_element_seen(&list.pool, row, scales, w.kv_head, d);
                }
            }
            acc[d] = x;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mqa_any_sm80(const __grid_constant__ fmlac_mqa p)
{
    float *query = (float *)ptx_shared();
    float *acc = query + p.d_qk;
    int64_t token = quotient(blockIdx.x, p.h_q);
    int32_t head = (int32_t)(blockIdx.x - token * p.h_q);
    float max = -FMLAC_INFINITY, sum = 0.0f;
    fmlac_work w;
    w.group = p.h_q / p.h_kv;
    w.kv_head = head / w.group;
    w.first = token;
    w.request = mqa_request(&p, token);
    int64_t main_count, extra_count = 0;
    if (p.main.kind == FMLAC_LIST_PAGED) {
        int64_t first, queries;
        request_tokens(p.cu_seqlens_q, w.request, p.s_q, p.num_tokens, &first, &queries);
        main_count = paged_count(&p, w.request, token, token - first, queries);
    } else {
        main_count = indexed_count(&p, &p.main, token);
        extra_count = indexed_count(&p, &p.extra, token);
    }
    for (int d = threadIdx.x; d < p.d_qk; d += THREADS) {
        query[d] = load_element(p.q.data, p.q.dtype, row_offset(&p.q, &p, token, head) + d);
    }
    for (int d = threadIdx.x; d < p.d_v; d += THREADS) {
        acc[d] = 0.0f;
    }
    add_list(p, p.main, w, main_count, query, acc, &max, &sum);
    add_list(p, p.extra, w, extra_count, query, acc, &max, &sum);
    bool lonely = sum == 0.0f;
    float total = p.sink ? sum + expf(p.sink[head] - max) : sum;
    if (threadIdx.x == 0 && p.lse.data) {
        ((float *)p.lse.data)[row_offset(&p.lse, &p, token, head)] =
            lonely ? p.empty_lse : (max + logf(sum)) * p.lse_factor;
    }
    if (threadIdx.x == 0 && p.max_logits.data) {
        ((float *)p.max_logits.data)[row_offset(&p.max_logits, &p, token, head)] =
            (is_nan(sum) ? sum : max) * p.lse_factor;
    }
    for (int d = threadIdx.x; d < p.d_v; d += THREADS) {
        store_element(p.out.data, p.out.dtype, row_offset(&p.out, &p, token, head) + d, lonely ? 0.0f : acc[d] / total);
    }
}
