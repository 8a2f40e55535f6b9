/* SPDX-License-Identifier: MIT */
/* mqa_pair.cu: the Hopper attention kernels on quantised tokens by pairs of blocks; names: dims of a token. */
#define FMLAC_INDEXED_ONLY
#define FMLAC_EVEN
#include "sm90a/pair.cuh"

#define PAIR_KERNEL(blocks, dims)                                                                                      \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                               \
        fmlak_mqa_pair_bf16_##dims##_sm90a(const __grid_constant__ fmlac_pair_sm90a all)                               \
    {                                                                                                                  \
        pair<blocks>(all);                                                                                             \
    }

PAIR_KERNEL(8, 512)
PAIR_KERNEL(9, 576)
