/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/warpgroup.cuh. */
#ifndef FLASHMLA_PTX_WARPGROUP_CUH
#define FLASHMLA_PTX_WARPGROUP_CUH

#include "memory.cuh"

template <int COUNT> PTX_INLINE void ptx_registers_take(void)
{
}
template <int COUNT> PTX_INLINE void ptx_registers_give(void)
{
}
void ptx_barrier_sync(int id, int threads);
void ptx_barrier_arrive(int id, int threads);
bool ptx_barrier_any(int id, int threads, bool yes);
PTX_INLINE void ptx_barrier_begin(int, int)
{
}
PTX_INLINE void ptx_fence_async_proxy(void)
{
}
PTX_INLINE bool ptx_elect(void)
{
    return threadIdx.x % 32 == 0;
}
void ptx_stmatrix_x4(uint32_t address, const uint32_t r[4]);
void ptx_stmatrix_x4_trans(uint32_t address, const uint32_t r[4]);

#endif
