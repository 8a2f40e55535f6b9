/* SPDX-License-Identifier: MIT */
/* tile_rotate_scalar.c: RMS sums and RoPE of the fused operations' queries, conjugate RoPE of their results. */
#include <math.h>

#include "../../format/format.h"
#include "tile_scalar.h"

void fmlak_tile_squares_scalar(double *sums, const float *x, int64_t stride, int32_t rows, int32_t n)
{
    for (int32_t r = 0; r < rows; r++, x += stride) {
        double sum = 0.0;
        for (int32_t i = 0; i < n; i++) {
            sum += (double)x[i] * x[i];
        }
        sums[r] = sum;
    }
}

static float through_bf16(float x)
{
    return fmlai_f32_from_bf16(fmlai_bf16_from_f32(x));
}

void fmlak_tile_rotate_scalar(float *x, const float *cos_sin, int32_t pairs, bool neox)
{
    for (int32_t i = 0; i < pairs; i++) {
        float *first = neox ? x + i : x + 2 * i, *second = neox ? first + pairs : first + 1;
        float x0 = *first, x1 = *second, c = cos_sin[i], s = cos_sin[pairs + i];
        *first = through_bf16(fmaf(x0, c, -(x1 * s)));
        *second = through_bf16(fmaf(x0, s, x1 * c));
    }
}

void fmlak_tile_unrotate_scalar(float *x, const float *cos_sin, int32_t pairs, bool neox)
{
    for (int32_t i = 0; i < pairs; i++) {
        float *first = neox ? x + i : x + 2 * i, *second = neox ? first + pairs : first + 1;
        double c = cos_sin[i], s = cos_sin[pairs + i], o0 = *first, o1 = *second;
        *first = (float)(o0 * c + o1 * s);
        *second = (float)(o1 * c - o0 * s);
    }
}
