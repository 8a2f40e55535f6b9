/* SPDX-License-Identifier: MIT */
/*
 * tile_amx.h: the AMX kernels. This tier is AVX-512 BF16 with its two products of matrices replaced: softmax, expanding
 * and all layouts but one are those of ../avx512bf16. Packed rows are second operands one after the other,
 *
 *   packed rows     [vector of 16 rows][pair of dims, whole steps][16][2]
 *
 * because registers that are filled from lines far apart throw each other out of L1. TDPBF16PS multiplies 16 rows of 32
 * bf16 by 16 pairs of rows of 16 and adds to 16 x 16 floats; numbers below 2^-126 are zero to it, as they are to
 * VDPBF16PS.
 */
#ifndef FLASHMLA_TILE_AMX_H
#define FLASHMLA_TILE_AMX_H

#include "../avx512bf16/tile_avx512bf16.h"
#include "simd_amx.h"

#define STEP_PAIRS 16 /* pairs that one TDPBF16PS sums up */

/* Pairs of d dims in whole steps. */
static inline int32_t step_pairs_of(int32_t d)
{
    return (pairs_of(d) + STEP_PAIRS - 1) / STEP_PAIRS * STEP_PAIRS;
}

void fmlak_tile_scores_amx(float *s, const void *packed_rows, const void *tile, int64_t tile_stride, int32_t rows,
                           int32_t tokens, int32_t d);
void fmlak_tile_accumulate_amx(void *packed_sums, const void *packed_weights, const void *tile, int64_t tile_stride,
                               const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens, int32_t d);

#endif
