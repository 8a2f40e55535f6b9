/* SPDX-License-Identifier: MIT */
/* mqa_few.cu: the Hopper attention kernels on quantised tokens for few rows of queries; names: dims of a token in
 * shared memory. */
#define FMLAC_CODES
#define FMLAC_NO_CLUSTERS
#define FMLAC_FEW
#include "sm90a/few.cuh"

FEW_KERNEL(fmlak_mqa_few_bf16_512_sm90a, 8)
FEW_KERNEL(fmlak_mqa_few_bf16_576_sm90a, 9)
