/* SPDX-License-Identifier: MIT */
/* tile_fold_scalar.c: rows of partial results summed up in float64; rows of bf16 as floats and back. */
#include "../rows.h"
#include "tile_scalar.h"

#define PIECE 256

void fmlak_tile_begin_scalar(double *sums, const float *x, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        sums[i] = x[i];
    }
}

void fmlak_tile_fold_scalar(double *sums, const float *x, double keep, double join, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        sums[i] = sums[i] * keep + (double)x[i] * join;
    }
}

void fmlak_tile_finish_scalar(float *dst, const double *sums, double factor, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        dst[i] = (float)(sums[i] * factor);
    }
}

void fmlak_tile_widen_scalar(float *dst, int64_t dst_stride, const void *src, int64_t src_stride, int32_t rows,
                             int32_t n)
{
    for (int32_t r = 0; r < rows; r++) {
        fmlai_row_load(dst + r * dst_stride, src, FMLA_BF16, r * src_stride, n);
    }
}

void fmlak_tile_narrow_scalar(void *dst, const float *x, float factor, int32_t n)
{
    float scaled[PIECE];
    for (int32_t at = 0; at < n; at += PIECE) {
        int32_t count = n - at < PIECE ? n - at : PIECE;
        for (int32_t i = 0; i < count; i++) {
            scaled[i] = x[at + i] * factor;
        }
        fmlai_row_store(dst, FMLA_BF16, at, scaled, count);
    }
}
