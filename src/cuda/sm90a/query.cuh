/* SPDX-License-Identifier: MIT */
/* query.cuh: the query prologue: rows of Q into shared memory, by threads that multiply. */
#ifndef FLASHMLA_CUDA_SM90A_QUERY_CUH
#define FLASHMLA_CUDA_SM90A_QUERY_CUH

#include "softmax.cuh"

/* Of base-2 logits, for Q as finish_q leaves it; above 0, so that infinite scores stay what they are. */
static __device__ __forceinline__ float scale_of(const fmlac_mqa &p)
{
    return fmaxf(fabsf(p.scale) * LOG2_E, 0x1p-126f);
}

/* The copies set out, by THREADS threads; zeros if the scale is 0. Rows beyond the last are zeros. */
template <int BLOCKS, int THREADS>
static __device__ __forceinline__ void start_q(const fmlac_mqa &p, const fmlac_work &w, plan<BLOCKS> *m)
{
    int thread = (int)ptx_thread() % THREADS, chunk = thread % 8;
    int rows = p.scale == 0.0f ? 0 : (int)w.rows;
    uint32_t q = ptx_shared_address(m->q);
    const bool single = w.queries == 1; /* rows differ by their heads alone */
    const uint8_t *first = (const uint8_t *)p.q.data + chunk * 16;
    if (single) {
        first += 2 * row_offset(&p.q, &p, w.first, w.kv_head * w.group + (int32_t)w.row0);
    }
#pragma unroll 1
    for (int row = thread / 8; row < ROWS; row += THREADS / 8) {
        const uint8_t *from = first + 2 * row * p.q.stride[2];
        if (!single) {
            int64_t token;
            int32_t head;
            row_token_head(w, row < w.rows ? row : 0, &token, &head);
            from = first + 2 * row_offset(&p.q, &p, token, head);
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            bool there = row < rows && block * 64 + chunk * 8 < p.d_qk;
            ptx_copy_async_16(q + query_offset(row, block * 8 + chunk), there ? from + block * 128 : p.q.data,
                              there ? 16 : 0);
        }
    }
    ptx_copy_async_commit();
}

/* Those of this thread are there, times the sign of the scale; a barrier of the THREADS threads follows. */
template <int BLOCKS, int THREADS>
static __device__ __forceinline__ void finish_q(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    int thread = (int)ptx_thread() % THREADS;
    uint32_t q = ptx_shared_address(m->q);
    ptx_copy_async_wait<0>();
    if (p.scale < 0.0f) {
#pragma unroll 1
        for (int at = thread; at < ROWS * BLOCKS * 8; at += THREADS) { /* the chunks that this thread has copied */
            uint32_t x[4], to = q + query_offset(at / 8 % ROWS, at / (ROWS * 8) * 8 + at % 8);
            ptx_load_shared_128(x, to);
            for (int i = 0; i < 4; i++) {
                x[i] ^= 0x80008000u;
            }
            ptx_store_shared_128(to, x);
        }
    }
    ptx_fence_async_proxy();
}

#endif
