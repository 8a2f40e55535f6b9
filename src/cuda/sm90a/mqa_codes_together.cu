/* SPDX-License-Identifier: MIT */
/* mqa_codes_together.cu: the Hopper attention kernels on quantised tokens for calls so small that clusters share a list
 * (together.cuh); names as in mqa_codes.cu. */
#define FMLAC_CODES
#define FMLAC_TOGETHER
#include "sm90a/relay.cuh"

RELAY_KERNEL(fmlak_mqa_codes_together_bf16_512_sm90a, 8, 0, SOURCE_CODES, 0)
RELAY_KERNEL(fmlak_mqa_codes_together_bf16_576_sm90a, 9, 0, SOURCE_CODES, 0)
