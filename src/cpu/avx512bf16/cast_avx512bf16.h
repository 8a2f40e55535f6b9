/* SPDX-License-Identifier: MIT */
/* cast_avx512bf16.h: quantiser D in 512 bits. */
#ifndef FLASHMLA_CAST_AVX512BF16_H
#define FLASHMLA_CAST_AVX512BF16_H

#include <stdint.h>

void fmlak_cast_row_avx512bf16(const float *x, int32_t groups, uint8_t *codes, int64_t code_stride, uint8_t *scales);

#endif
