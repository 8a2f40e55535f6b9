/* SPDX-License-Identifier: MIT */
/* mqa_codes.cu: the Hopper attention kernels on quantised tokens; names: token source, dims of a token in shared
 * memory. */
#define FMLAC_CODES
#include "sm90a/relay.cuh"

#define CODES_KERNEL(blocks, dims)                                                                                     \
    extern "C" __global__ void __launch_bounds__(512, 1)                                                               \
        fmlak_mqa_codes_bf16_##dims##_sm90a(const __grid_constant__ fmlac_mqa_sm90a all)                               \
    {                                                                                                                  \
        relay<blocks, 0, SOURCE_CODES, 0>(all);                                                                        \
    }

CODES_KERNEL(8, 512)
CODES_KERNEL(9, 576)
