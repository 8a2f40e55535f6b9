/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/grid.cuh: kernels follow each other, and so do their blocks. */
#ifndef FLASHMLA_PTX_GRID_CUH
#define FLASHMLA_PTX_GRID_CUH

#include "memory.cuh"

PTX_INLINE void ptx_grid_wait(void)
{
}
PTX_INLINE void ptx_grid_launch_dependents(void)
{
}
PTX_INLINE uint32_t ptx_load_acquire(const uint32_t *flag)
{
    return *flag;
}
PTX_INLINE uint32_t ptx_raise(uint32_t *flag)
{
    return (*flag)++;
}

#endif
