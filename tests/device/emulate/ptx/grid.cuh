/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/grid.cuh: kernels follow each other. */
#ifndef FLASHMLA_PTX_GRID_CUH
#define FLASHMLA_PTX_GRID_CUH

#include "memory.cuh"

PTX_INLINE void ptx_grid_wait(void)
{
}
PTX_INLINE void ptx_grid_launch_dependents(void)
{
}

#endif
