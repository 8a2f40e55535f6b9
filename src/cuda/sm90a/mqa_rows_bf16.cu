/* SPDX-License-Identifier: MIT */
/* mqa_rows_bf16.cu: the Hopper attention kernels on lists of bf16 tokens, which no clusters attend (registers). */
#define FMLAC_NO_CLUSTERS

#include "sm90a/relay.cuh"

RELAY_KERNEL(fmlak_mqa_rows_bf16_512_sm90a, 8, 0, SOURCE_ROWS, 0)
RELAY_KERNEL(fmlak_mqa_rows_bf16_576_sm90a, 9, 0, SOURCE_ROWS, 0)
RELAY_KERNEL(fmlak_mqa_rows_turns_bf16_512_sm90a, 8, 0, SOURCE_ROWS, 1)
RELAY_KERNEL(fmlak_mqa_rows_turns_bf16_576_sm90a, 9, 0, SOURCE_ROWS, 1)
