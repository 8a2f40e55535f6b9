/* SPDX-License-Identifier: MIT */
/* grid.cuh: programmatic dependent launch. Nothing below sm_90, where kernels of a stream simply follow each other. */
#ifndef FLASHMLA_PTX_GRID_CUH
#define FLASHMLA_PTX_GRID_CUH

#include "memory.cuh"

/* Blocks until the kernels that this one depends on are complete and their writes visible. */
PTX_INLINE void ptx_grid_wait(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The dependent kernel may start; its ptx_grid_wait still waits for the end of this one. */
PTX_INLINE void ptx_grid_launch_dependents(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
