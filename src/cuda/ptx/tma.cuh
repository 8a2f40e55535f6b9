/* SPDX-License-Identifier: MIT */
/* tma.cuh: bulk copies by the tensor memory accelerator (sm_90). They complete bytes on a barrier in shared memory. */
#ifndef FLASHMLA_PTX_TMA_CUH
#define FLASHMLA_PTX_TMA_CUH

#include "memory.cuh"

/* L2 eviction priorities, as the policies that createpolicy makes. */
#define PTX_L2_EVICT_NORMAL 0x1000000000000000ull
#define PTX_L2_EVICT_FIRST  0x12F0000000000000ull
#define PTX_L2_EVICT_LAST   0x14F0000000000000ull

PTX_INLINE void ptx_tma_prefetch_map(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* The box of a rank-4 map at (x, y, z, w), innermost first; elements outside the tensor arrive as zeros and count as
 * bytes. */
PTX_INLINE void ptx_tma_load_4d(uint32_t shared, const void *map, uint32_t barrier, int32_t x, int32_t y, int32_t z,
                                int32_t w, uint64_t policy)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(policy)
                 : "memory");
}

/* A box of shared memory, laid out as loads leave it, to (x, y, z, w); elements outside the tensor are left out. Shared
 * memory written by ordinary stores wants ptx_fence_async_proxy before. */
PTX_INLINE void ptx_tma_store_4d(const void *map, uint32_t shared, int32_t x, int32_t y, int32_t z, int32_t w)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

/* This thread's stores so far become a group. */
PTX_INLINE void ptx_tma_commit(void)
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* All but PENDING of its newest groups have read shared memory. */
template <int PENDING> PTX_INLINE void ptx_tma_wait_read(void)
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

/* Brings a run of bytes to L2; address and size are multiples of 16. */
PTX_INLINE void ptx_bulk_prefetch_l2(const void *global, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

/* A run of bytes; both addresses and the size are multiples of 16. */
PTX_INLINE void ptx_bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

#endif
