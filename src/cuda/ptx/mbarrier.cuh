/* SPDX-License-Identifier: MIT */
/*
 * mbarrier.cuh: barriers in shared memory that count arrivals (sm_80) and bytes of asynchronous copies (sm_90). A
 * barrier's phases are numbered 0, 1, ...; waiting for parity x returns when the phase of that parity is complete: on a
 * fresh barrier parity 1 is already so.
 */
#ifndef FLASHMLA_PTX_MBARRIER_CUH
#define FLASHMLA_PTX_MBARRIER_CUH

#include "memory.cuh"

PTX_INLINE void ptx_mbarrier_init(uint32_t barrier, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* After the inits, before anybody else (other blocks of the cluster, copies) uses them; a block or cluster barrier
 * follows. */
PTX_INLINE void ptx_mbarrier_init_fence(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

PTX_INLINE void ptx_mbarrier_arrive(uint32_t barrier)
{
    asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" ::"r"(barrier) : "memory");
}

/* One arrival, which also makes the phase wait for `bytes` more. */
PTX_INLINE void ptx_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;}" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* An arrival of this thread that happens when its earlier cp.asyncs are done; it counts as one of the phase's
 * arrivals. */
PTX_INLINE void ptx_mbarrier_arrive_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

PTX_INLINE bool ptx_mbarrier_try(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return done != 0;
}

/* Looks once and at once. */
PTX_INLINE bool ptx_mbarrier_test(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done != 0;
}

/* What a waiting thread does when it has looked in vain; tests count there. */
#ifndef PTX_WAIT_HOOK
#define PTX_WAIT_HOOK(barrier, parity, looks)
#endif

PTX_INLINE void ptx_mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    for (uint32_t looks = 0; !ptx_mbarrier_try(barrier, parity); looks++) {
        PTX_WAIT_HOOK(barrier, parity, looks);
    }
}

/* Arrives at the same barrier of another block of the cluster; `remote`: ptx_cluster_address of it. It says that this
 * block has read something and publishes nothing: a release in the cluster would wait for all loads and stores under
 * way, and is not needed. */
PTX_INLINE void ptx_mbarrier_arrive_remote(uint32_t remote)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

#endif
