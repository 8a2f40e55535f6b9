/* SPDX-License-Identifier: MIT */
/*
 * mqa_bf16.cu: the portable attention kernels on bf16 tiles; names: rows x tokens x warps. host/mqa.c chooses among
 * them by the rows that share a list and by the shared memory there is. A kernel has no body for processors whose
 * shared memory (KiB per block) is too small for it.
 */
#include "mqa.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900 || (__CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200)
#define SHARED_KIB 227
#elif __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
#define SHARED_KIB 163
#else
#define SHARED_KIB 99
#endif

#define MQA_KERNEL(rows, tokens, warps, kib)                                                                           \
    extern "C" __global__ void __launch_bounds__(warps * 32, 1)                                                        \
        fmlak_mqa_bf16_##rows##x##tokens##x##warps##_sm80(const __grid_constant__ fmlac_mqa p)                         \
    {                                                                                                                  \
        if constexpr (kib <= SHARED_KIB) {                                                                             \
            mqa_block<rows, tokens, warps, 0>(p);                                                                      \
        }                                                                                                              \
    }

MQA_KERNEL(16, 32, 4, 99)
MQA_KERNEL(32, 16, 4, 99)
MQA_KERNEL(32, 32, 8, 163)
MQA_KERNEL(64, 32, 8, 163)
MQA_KERNEL(64, 64, 8, 227)
