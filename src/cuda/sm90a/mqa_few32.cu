/* SPDX-License-Identifier: MIT */
/* mqa_few32.cu: the Hopper attention kernels on quantised tokens for at most 32 rows of queries; names: rows, dims of a
 * token in shared memory. */
#define FMLAC_CODES
#define FMLAC_NO_CLUSTERS
#define FMLAC_FEW 32
#include "sm90a/few.cuh"

FEW_KERNEL(fmlak_mqa_few32_bf16_512_sm90a, 8)
FEW_KERNEL(fmlak_mqa_few32_bf16_576_sm90a, 9)
