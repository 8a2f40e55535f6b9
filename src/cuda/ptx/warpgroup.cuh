/* SPDX-License-Identifier: MIT */
/* warpgroup.cuh: what warps with different roles share: registers, named barriers, the order between proxies
 * (sm_90a). */
#ifndef FLASHMLA_PTX_WARPGROUP_CUH
#define FLASHMLA_PTX_WARPGROUP_CUH

#include "memory.cuh"

/* All warps of a warpgroup: take or give back registers, to COUNT per thread. */
template <int COUNT> PTX_INLINE void ptx_registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> PTX_INLINE void ptx_registers_give(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* Barriers 0..15; 0 is __syncthreads. `threads`: all that arrive and all that wait, a multiple of 32. */
PTX_INLINE void ptx_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

PTX_INLINE void ptx_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Shared memory written by ordinary stores (or cp.async) before is seen by wgmma and bulk copies after. */
PTX_INLINE void ptx_fence_async_proxy(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Four 8x8 matrices of 16-bit elements; lane l names the 16 bytes of row l % 8 of matrix l / 8. */
PTX_INLINE void ptx_stmatrix_x4(uint32_t address, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

/* One lane of the warp, always the same. */
PTX_INLINE bool ptx_elect(void)
{
    uint32_t chosen;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.b32 %0, 1, 0, p;}" : "=r"(chosen)::"memory");
    return chosen != 0;
}

#endif
