/* SPDX-License-Identifier: MIT */
/* tile_amx.c: what the AMX tier does otherwise than AVX-512 BF16, whose tables it is given. */
#include "tile_amx.h"

static size_t packed_rows_bytes(int32_t rows, int32_t d)
{
    return (size_t)fmlai_tile_lanes(rows) * (size_t)step_pairs_of(d) * 2 * sizeof(uint16_t);
}

static void pack_rows(void *packed, const float *src, int64_t src_stride, int32_t rows, int32_t d)
{
    int32_t *to = packed; /* a pair each */
    for (int32_t r = 0; r < fmlai_tile_lanes(rows); r += LANES) {
        for (int32_t pair = 0; pair < step_pairs_of(d); pair += LANES) {
            __m512i x[LANES];
            fmlak_pairs_of_rows_avx512bf16(x, src + r * src_stride, src_stride, rows - r, 2 * pair, d);
            for (int32_t i = 0; i < LANES; i++, to += LANES) {
                _mm512_store_si512(to, x[i]);
            }
        }
    }
}

void fmlai_tile_init_amx(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16)
{
    (void)f32;
    bf16->name = "amx";
    bf16->packed_rows_bytes = packed_rows_bytes;
    bf16->pack_rows = pack_rows;
    bf16->scores = fmlak_tile_scores_amx;
    bf16->accumulate = fmlak_tile_accumulate_amx;
    bf16->scores_of_parts = NULL;
    bf16->accumulate_parts = NULL;
}
