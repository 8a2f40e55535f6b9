/* SPDX-License-Identifier: MIT */
/* arrive.cuh: arrivals at a barrier behind which somebody overwrites what a warp has loaded from shared memory. */
#ifndef FLASHMLA_CUDA_ARRIVE_CUH
#define FLASHMLA_CUDA_ARRIVE_CUH

#include "ptx/mbarrier.cuh"

/*
 * The lane of a warp that arrives. An arrival does not wait for loads that have set out, and where products keep shared
 * memory busy these take longer than what is let in by it: results were wrong in one of some thousand pieces. So which
 * lane it is depends on `seen`, made from a word of the last load, or of each: loads are over before it is known.
 */
static __device__ __forceinline__ uint32_t lane_after(uint32_t seen)
{
    return __any_sync(0xFFFFFFFFu, seen == 0) ? 1 : 0;
}

/* The warp's arrival. */
static __device__ __forceinline__ void arrive_after(uint32_t barrier, uint32_t seen)
{
    if (ptx_thread() % 32 == lane_after(seen)) {
        ptx_mbarrier_arrive(barrier);
    }
}

#endif
