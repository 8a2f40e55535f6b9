/* SPDX-License-Identifier: MIT */
/* mqa_codes.cu: the portable attention kernels on quantised tokens, expanded to bf16. */
#include "mqa_kernel.cuh"

MQA_KERNEL(codes, 16, 16, 1, 2, 1, 4, 0, 0, 1, 99, 2)
MQA_KERNEL(codes, 32, 16, 1, 4, 2, 8, 0, 0, 1, 99, 1)
MQA_KERNEL(codes, 32, 32, 1, 4, 2, 8, 0, 0, 1, 163, 1)
MQA_KERNEL(codes, 64, 16, 1, 4, 2, 8, 0, 0, 1, 163, 1)
MQA_KERNEL(codes, 64, 32, 1, 4, 2, 8, 3, 0, 1, 227, 1)
