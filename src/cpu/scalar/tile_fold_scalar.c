/* SPDX-License-Identifier: MIT */
/* tile_fold_scalar.c: rows of partial results summed up in float64; results as bf16. */
#include "../../format/format.h"
#include "tile_scalar.h"

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

void fmlak_tile_narrow_scalar(void *dst, const float *x, float factor, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        fmlai_store_f32(dst, FMLA_BF16, i, x[i] * factor);
    }
}
