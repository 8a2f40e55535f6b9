/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/mbarrier.cuh. */
#ifndef FLASHMLA_PTX_MBARRIER_CUH
#define FLASHMLA_PTX_MBARRIER_CUH

#include "memory.cuh"

void ptx_mbarrier_init(uint32_t barrier, uint32_t count);
void ptx_mbarrier_arrive(uint32_t barrier);
void ptx_mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes);
void ptx_mbarrier_arrive_copies(uint32_t barrier);
void ptx_mbarrier_arrive_remote(uint32_t remote);
bool ptx_mbarrier_try(uint32_t barrier, uint32_t parity);
PTX_INLINE void ptx_mbarrier_init_fence(void)
{
}
PTX_INLINE bool ptx_mbarrier_test(uint32_t barrier, uint32_t parity)
{
    return ptx_mbarrier_try(barrier, parity);
}
PTX_INLINE void ptx_mbarrier_wait(uint32_t barrier, uint32_t parity)
{
    while (!ptx_mbarrier_try(barrier, parity)) {
    }
}

#endif
