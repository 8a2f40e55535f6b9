/* SPDX-License-Identifier: MIT */
/*
 * mqa_kernel.cuh: how a kernel of the portable attention core is written down: fmlak_mqa_<name>_<rows>x<tokens>_sm80.
 * host/mqa.c chooses among them by the rows that share a list and by the shared memory there is. A kernel has no body
 * for processors whose shared memory (KiB per block) is too small for it.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_KERNEL_CUH
#define FLASHMLA_CUDA_SM80_MQA_KERNEL_CUH

#include "mqa.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900 || (__CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200)
#define SHARED_KIB 227
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
#define SHARED_KIB 163
#else
#define SHARED_KIB 99
#endif

/* See mqa_shape for qm, qw, mv, pw, slots; blocks: that one multiprocessor holds. */
#define MQA_KERNEL(name, rows, tokens, qm, qw, mv, pw, slots, f16, codes, kib, blocks)                                 \
    extern "C" __global__ void __launch_bounds__((qw + pw) * 32, blocks)                                               \
        fmlak_mqa_##name##_##rows##x##tokens##_sm80(const __grid_constant__ fmlac_mqa p)                               \
    {                                                                                                                  \
        if constexpr (kib <= SHARED_KIB) {                                                                             \
            mqa_block<mqa_shape<rows, tokens, qm, qw, mv, pw, slots, f16, codes>>(p);                                  \
        }                                                                                                              \
    }

#endif
