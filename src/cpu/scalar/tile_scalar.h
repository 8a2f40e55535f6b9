/* SPDX-License-Identifier: MIT */
/*
 * tile_scalar.h: tile kernels in portable C that work row by row, and so suit any tier without its own.
 */
#ifndef FLASHMLA_TILE_SCALAR_H
#define FLASHMLA_TILE_SCALAR_H

#include "../tile.h"

void fmlak_tile_begin_scalar(double *sums, const float *x, int32_t n);
void fmlak_tile_fold_scalar(double *sums, const float *x, double keep, double join, int32_t n);
void fmlak_tile_finish_scalar(float *dst, const double *sums, double factor, int32_t n);
void fmlak_tile_widen_scalar(float *dst, int64_t dst_stride, const void *src, int64_t src_stride, int32_t rows,
                             int32_t n);
void fmlak_tile_narrow_scalar(void *dst, const float *x, float factor, int32_t n);
void fmlak_tile_gradients_scalar(float *s, float *ds, float scale2, const float *lse2, const float *delta,
                                 bool by_token, const int32_t *visible, int32_t rows, int32_t tokens);
void fmlak_tile_squares_scalar(double *sums, const float *x, int64_t stride, int32_t rows, int32_t n);
void fmlak_tile_rotate_scalar(float *x, const float *cos_sin, int32_t pairs, bool neox);
void fmlak_tile_unrotate_scalar(float *x, const float *cos_sin, int32_t pairs, bool neox);

#endif
