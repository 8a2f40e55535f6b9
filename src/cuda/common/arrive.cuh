/* SPDX-License-Identifier: MIT */
/* arrive.cuh: which lanes of a warp arrive at a barrier for it, and when. */
#ifndef FLASHMLA_CUDA_ARRIVE_CUH
#define FLASHMLA_CUDA_ARRIVE_CUH

#include "ptx/mbarrier.cuh"

/*
 * How often a warp arrives: once, by one lane. With FMLAC_RACECHECK, the build for compute-sanitizer's racecheck, all
 * lanes do: the tool orders what a thread has read and written by that thread's own arrivals and does not know that
 * __syncwarp() puts the other lanes' accesses before the one that arrives. Named barriers are mbarriers there, too
 * (ptx/warpgroup.cuh). Who waits for whom is the same in both builds, so a barrier that is missing, comes too early or
 * is another slot's or phase's is reported. What that build cannot show: that the other lanes are done when the one
 * lane of the ordinary build arrives (scripts/arrivals.py looks for that in machine code); that named barriers count
 * the right threads (synccheck); operands of wgmma and copies by tensor maps, which the tool does not see.
 */
#ifdef FMLAC_RACECHECK
#define WARP_ARRIVALS 32
#else
#define WARP_ARRIVALS 1
#endif

/* Whether lane `lane` arrives; `chosen`: the one that does if only one does, and nobody before it is known. */
static __device__ __forceinline__ bool arrives(uint32_t lane, uint32_t chosen)
{
    if (WARP_ARRIVALS > 1) {
        return __shfl_sync(0xFFFFFFFFu, chosen, 0) < 32; /* always, which the compiler does not know */
    }
    return lane == chosen;
}

/* The warp's arrival, by a lane for which what the others have read and written is done. */
static __device__ __forceinline__ void arrive_warp(uint32_t barrier)
{
    if (arrives(threadIdx.x % 32, 0)) {
        ptx_mbarrier_arrive(barrier);
    }
}

/* The same once all lanes are here: for what all of them have read and written. */
static __device__ __forceinline__ void arrive_together(uint32_t barrier)
{
    __syncwarp();
    arrive_warp(barrier);
}

/* The same where no register is left that could keep the lane's number. */
static __device__ __forceinline__ void arrive_together_anew(uint32_t barrier)
{
    __syncwarp();
    if (arrives(ptx_thread() % 32, 0)) {
        ptx_mbarrier_arrive(barrier);
    }
}

/* The other lanes' arrivals, where the one that does arrives with bytes of copies. */
static __device__ __forceinline__ void arrive_others(uint32_t barrier)
{
    if (WARP_ARRIVALS > 1) {
        ptx_mbarrier_arrive(barrier);
    }
}

/*
 * The lane that arrives where somebody then overwrites what the warp has loaded from shared memory. An arrival does
 * not wait for loads that have set out, and where products keep shared memory busy these take longer than what is let
 * in by it: results were wrong in one of some thousand pieces. So which lane it is depends on `seen`, made from a word
 * of the last load, or of each: loads are over before it is known.
 */
static __device__ __forceinline__ uint32_t lane_after(uint32_t seen)
{
    return __any_sync(0xFFFFFFFFu, seen == 0) ? 1 : 0;
}

/* The warp's arrival. */
static __device__ __forceinline__ void arrive_after(uint32_t barrier, uint32_t seen)
{
    if (arrives(ptx_thread() % 32, lane_after(seen))) {
        ptx_mbarrier_arrive(barrier);
    }
}

#endif
