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
#ifdef FMLAC_RACECHECK
/*
 * For racecheck (common/arrive.cuh) they are mbarriers in the last bytes of the block's shared memory, on which the
 * same threads arrive and wait. Of named barriers racecheck 2025.3 (CUDA 13.0) makes mistakes of both kinds: where a
 * bar.sync of a part of the block came before, it reports what the next named barrier orders; and what threads access
 * after their bar.arrive it does not report. mbarriers it follows thread by thread.
 */
PTX_INLINE uint32_t ptx_barrier_place(int id)
{
    uint32_t bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return ((ptx_shared_address(ptx_shared()) + bytes) & ~7u) - (16 - id) * 8;
}

PTX_INLINE void ptx_barrier_begin(int id, int threads)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ptx_barrier_place(id)), "r"(threads) : "memory");
}

PTX_INLINE void ptx_barrier_sync(int id, int threads)
{
    uint32_t barrier = ptx_barrier_place(id), done = 0;
    uint64_t phase;
    (void)threads;
    asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(phase) : "r"(barrier) : "memory");
    while (!done) {
        asm volatile("{.reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "l"(phase)
                     : "memory");
    }
    __syncwarp();
}

PTX_INLINE bool ptx_barrier_any(int id, int threads, bool yes)
{
    uint32_t any;
    ptx_barrier_sync(id, threads); /* what the tool sees */
    asm volatile("{.reg .pred p, q; setp.ne.b32 p, %3, 0; barrier.cta.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q;}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)yes)
                 : "memory");
    return any != 0;
}

PTX_INLINE void ptx_barrier_arrive(int id, int threads)
{
    (void)threads;
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" ::"r"(ptx_barrier_place(id)) : "memory");
}
#else
PTX_INLINE void ptx_barrier_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

PTX_INLINE void ptx_barrier_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The same, and whether any of them says yes. */
PTX_INLINE bool ptx_barrier_any(int id, int threads, bool yes)
{
    uint32_t any;
    asm volatile("{.reg .pred p, q; setp.ne.b32 p, %3, 0; barrier.cta.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q;}"
                 : "=r"(any)
                 : "r"(id), "r"(threads), "r"((uint32_t)yes)
                 : "memory");
    return any != 0;
}

/* One thread, before the block meets for the first time: nothing need be done. */
PTX_INLINE void ptx_barrier_begin(int id, int threads)
{
    (void)id;
    (void)threads;
}
#endif

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

/* The same, transposed: of each matrix a column lies in those 16 bytes. */
PTX_INLINE void ptx_stmatrix_x4_trans(uint32_t address, const uint32_t r[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
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
