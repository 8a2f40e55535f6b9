/* SPDX-License-Identifier: MIT */
/* mqa_codes.cu: the Hopper attention kernels on quantised tokens; names: token source, dims of a token in shared
 * memory. */
#define FMLAC_CODES
#include "sm90a/relay.cuh"

RELAY_KERNEL(fmlak_mqa_codes_bf16_512_sm90a, 8, 0, SOURCE_CODES, 0)
RELAY_KERNEL(fmlak_mqa_codes_bf16_576_sm90a, 9, 0, SOURCE_CODES, 0)
