/* SPDX-License-Identifier: MIT */
/* mqa_bf16.cu: the portable attention kernels on plain bf16 tokens. */
#include "mqa_kernel.cuh"

MQA_KERNEL(bf16, 16, 32, 1, 4, 1, 4, 0, 0, 0, 99, 2)
MQA_KERNEL(bf16, 32, 16, 1, 4, 2, 8, 0, 0, 0, 99, 1)
MQA_KERNEL(bf16, 32, 32, 1, 4, 2, 8, 0, 0, 0, 163, 1)
MQA_KERNEL(bf16, 64, 32, 1, 4, 2, 8, 0, 0, 0, 163, 1)
MQA_KERNEL(bf16, 64, 64, 2, 4, 4, 8, 2, 0, 0, 227, 1)
