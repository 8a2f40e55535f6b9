/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/matrix.cuh. */
#ifndef FLASHMLA_PTX_MATRIX_CUH
#define FLASHMLA_PTX_MATRIX_CUH

#include "memory.cuh"

void ptx_ldmatrix_x4(uint32_t r[4], uint32_t address);
void ptx_ldmatrix_x4_trans(uint32_t r[4], uint32_t address);
void ptx_mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1);
void ptx_mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1);

#endif
