/* SPDX-License-Identifier: MIT */
/* mqa_bf16.cu: the Hopper attention kernels on pages of bf16 numbers; names: order, dims of a token in shared memory.
 */
#define FMLAC_PAGED_ONLY
#include "sm90a/relay.cuh"

RELAY_KERNEL(fmlak_mqa_pages_bf16_512_sm90a, 8, 0, SOURCE_PAGES, 0)
RELAY_KERNEL(fmlak_mqa_pages_bf16_576_sm90a, 9, 0, SOURCE_PAGES, 0)
RELAY_KERNEL(fmlak_mqa_turns_bf16_512_sm90a, 8, 0, SOURCE_PAGES, 1)
RELAY_KERNEL(fmlak_mqa_turns_bf16_576_sm90a, 9, 0, SOURCE_PAGES, 1)
