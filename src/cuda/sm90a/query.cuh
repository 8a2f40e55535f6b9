/* SPDX-License-Identifier: MIT */
/* query.cuh: the query prologue: 64 rows into shared memory, by the 256 threads that multiply. */
#ifndef FLASHMLA_CUDA_SM90A_QUERY_CUH
#define FLASHMLA_CUDA_SM90A_QUERY_CUH

#include "plan.cuh"

/* Rows beyond the last are zeros. A barrier of both warpgroups follows. */
template <int BLOCKS>
static __device__ __forceinline__ void load_q(const fmlac_mqa &p, const fmlac_work &w, plan<BLOCKS> *m)
{
    int chunk = threadIdx.x % 8;
    uint32_t q = ptx_shared_address(m->q);
#pragma unroll 1
    for (int row = threadIdx.x / 8; row < ROWS; row += 32) {
        int64_t token;
        int32_t head;
        row_token_head(w, row < w.rows ? row : 0, &token, &head);
        const uint8_t *from = (const uint8_t *)p.q.data + 2 * row_offset(&p.q, &p, token, head) + chunk * 16;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            bool there = row < w.rows && block * 64 + chunk * 8 < p.d_qk;
            ptx_copy_async_16(q + query_offset(row, block * 8 + chunk), there ? from + block * 128 : p.q.data,
                              there ? 16 : 0);
        }
    }
    ptx_copy_async_commit();
    ptx_copy_async_wait<0>();
    ptx_fence_async_proxy();
}

#endif
