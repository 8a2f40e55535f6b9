/* SPDX-License-Identifier: MIT */
/* mqa_f16.cu: the Hopper attention kernels on pages of fp16 numbers; names: order, dims of a token in shared memory. */
#define FMLAC_PAGED_ONLY
#include "sm90a/relay.cuh"

RELAY_KERNEL(fmlak_mqa_pages_f16_512_sm90a, 8, 1, SOURCE_PAGES, 0)
RELAY_KERNEL(fmlak_mqa_pages_f16_576_sm90a, 9, 1, SOURCE_PAGES, 0)
RELAY_KERNEL(fmlak_mqa_turns_f16_512_sm90a, 8, 1, SOURCE_PAGES, 1)
RELAY_KERNEL(fmlak_mqa_turns_f16_576_sm90a, 9, 1, SOURCE_PAGES, 1)
