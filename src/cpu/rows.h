/* SPDX-License-Identifier: MIT */
/*
 * rows.h: runs of tensor elements as floats and back, with the type decided once a run instead of once an
 * element.
 */
#ifndef FLASHMLA_CPU_ROWS_H
#define FLASHMLA_CPU_ROWS_H

#include "cpu.h"

/* Elements first..first+n-1 of a BF16, F16 or F32 tensor. */
void fmlai_row_load(float *dst, const void *data, fmla_dtype dtype, int64_t first, int64_t n);
/* The same, rounded to nearest even. */
void fmlai_row_store(void *data, fmla_dtype dtype, int64_t first, const float *src, int64_t n);

#endif
