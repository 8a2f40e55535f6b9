/* SPDX-License-Identifier: MIT */
/* tile_amx.c: what the AMX tier does otherwise than AVX-512 BF16, whose tables it is given. */
#include "tile_amx.h"

void fmlai_tile_init_amx(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16)
{
    (void)f32;
    bf16->name = "amx";
    bf16->scores = fmlak_tile_scores_amx;
    bf16->accumulate = fmlak_tile_accumulate_amx;
}
