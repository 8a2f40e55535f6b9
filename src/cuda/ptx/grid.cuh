/* SPDX-License-Identifier: MIT */
/* grid.cuh: programmatic dependent launch (nothing below sm_90, where kernels of a stream simply follow each other),
 * and how blocks of a grid tell each other that something is there. */
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

/* A flag as another block has left it: what that block wrote before it can be read after it, behind a barrier by other
 * threads, too. */
PTX_INLINE uint32_t ptx_load_acquire(const uint32_t *flag)
{
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(flag) : "memory");
    return x;
}

/* Adds 1 to a flag and returns what it was: what this block wrote before, ahead of a barrier by other threads, too, can
 * be read by whoever finds the flag raised. */
PTX_INLINE uint32_t ptx_raise(uint32_t *flag)
{
    uint32_t x;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(x) : "l"(flag) : "memory");
    return x;
}

#endif
