/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/math.cuh. */
#ifndef FLASHMLA_PTX_MATH_CUH
#define FLASHMLA_PTX_MATH_CUH

#include "memory.cuh"

float ptx_exp2(float x);
uint32_t ptx_pack_bf16(float low, float high);
uint32_t ptx_pack_f16(float low, float high);
uint32_t ptx_multiply_bf16x2(uint32_t a, uint32_t b);
float ptx_float_of_f16(uint32_t x);
uint32_t ptx_multiply_f16x2(uint32_t a, uint32_t b);
uint32_t ptx_f16_of_e4m3(uint32_t x);
uint32_t ptx_permute_bytes(uint32_t x, uint32_t select);
uint32_t ptx_permute_two(uint32_t x, uint32_t y, uint32_t select);

#endif
