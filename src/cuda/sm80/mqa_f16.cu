/* SPDX-License-Identifier: MIT */
/* mqa_f16.cu: the portable attention kernels on plain fp16 tokens. */
#include "mqa_kernel.cuh"

MQA_KERNEL(f16, 16, 32, 1, 4, 1, 4, 0, 1, 0, 99, 2)
MQA_KERNEL(f16, 32, 16, 1, 4, 2, 8, 0, 1, 0, 99, 1)
MQA_KERNEL(f16, 32, 32, 1, 4, 2, 8, 0, 1, 0, 163, 1)
MQA_KERNEL(f16, 64, 32, 1, 4, 2, 8, 0, 1, 0, 163, 1)
MQA_KERNEL(f16, 64, 64, 2, 4, 4, 8, 2, 1, 0, 227, 1)
