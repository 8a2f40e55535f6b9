/* SPDX-License-Identifier: MIT */
/*
 * cluster.cuh: the other blocks of a cluster and their shared memory (sm_90). A remote address is a 32-bit address in
 * the cluster's window; adding to it moves inside the same block.
 */
#ifndef FLASHMLA_PTX_CLUSTER_CUH
#define FLASHMLA_PTX_CLUSTER_CUH

#include "memory.cuh"

PTX_INLINE uint32_t ptx_cluster_rank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Where this block's shared address lies in block `rank` of the cluster. */
PTX_INLINE uint32_t ptx_cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

/* All threads of all blocks of the cluster; what they wrote before is seen after. */
PTX_INLINE void ptx_cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* The same where nothing but mbarriers must be seen, whose inits ptx_mbarrier_init_fence has published: nobody waits
 * for loads and stores that are under way. */
PTX_INLINE void ptx_cluster_sync_barriers(void)
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* 16 bytes to another block, asynchronously: they complete on a barrier of that block. */
PTX_INLINE void ptx_store_remote_128(uint32_t remote, const float x[4], uint32_t remote_barrier)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(remote_barrier)
        : "memory");
}

/* The same if `wanted` is not 0, without a jump. */
PTX_INLINE void ptx_store_remote_128_if(uint32_t remote, const float x[4], uint32_t remote_barrier, uint32_t wanted)
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %6, 0;\n"
        "@p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];}" ::"r"(remote),
        "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(remote_barrier), "r"(wanted)
        : "memory");
}

/* Numbers in a block's shared memory. */
PTX_INLINE float ptx_load_remote(uint32_t remote)
{
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(remote) : "memory");
    return x;
}

PTX_INLINE void ptx_load_remote_128(float x[4], uint32_t remote)
{
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"(remote)
                 : "memory");
}

#endif
