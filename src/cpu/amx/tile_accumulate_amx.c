/* SPDX-License-Identifier: MIT */
/*
 * tile_accumulate_amx.c: sums = sums * alpha + weights^T tile. The first operand is 16 rows of weights of 32 tokens:
 * the packed weights transposed, once a call. The second is a strip of the tile, interleaved in pairs of tokens as the
 * tier below does it. Two by two registers make 32 rows by 32 dims; their products are added up from zero over the
 * whole tile and joined to the old sums in 512-bit vectors, which keeps rounding chains as short as a tile.
 *
 * Small values are taken apart and multiplied separately, larger by a power of two: see the tier below.
 */
#include <string.h>

#include "tile_amx.h"

#define MAX_STEPS (MAX_PAIRS / STEP_PAIRS)
#define PAIR_ROWS (2 * AMX_ROWS) /* rows of two registers */

/* Weights as first operands: [vector of rows][step][16 rows][16 pairs]. */
typedef struct first_operands {
    _Alignas(64) int32_t w[FMLAI_TILE_ROWS / LANES][MAX_STEPS][AMX_ROWS][STEP_PAIRS];
} first_operands;

static void transpose_weights(first_operands *to, const strip_operands *o, int32_t begin, int32_t end, int32_t pairs)
{
    int64_t stride = weights_stride(o->rows);
    for (int32_t r = begin / LANES * LANES; r < end; r += LANES) {
        for (int32_t p = 0; p < pairs; p += STEP_PAIRS) {
            __m512i x[STEP_PAIRS];
            for (int32_t i = 0; i < STEP_PAIRS; i++) {
                x[i] = p + i < pairs ? _mm512_load_si512(o->weights + (p + i) * stride + r) : _mm512_setzero_si512();
            }
            transpose_16(x);
            for (int32_t i = 0; i < AMX_ROWS; i++) {
                _mm512_store_si512(to->w[r / LANES][p / STEP_PAIRS][i], x[i]);
            }
        }
    }
}

/* Products of two vectors of rows and two of dims, into four blocks of 16 x 16. */
static void multiply_2x2(float *block, const first_operands *w, int32_t vector, const __m512i *strip, int32_t steps)
{
    const uint8_t *b = (const uint8_t *)strip;
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int32_t k = 0; k < steps; k++, b += STEP_PAIRS * STRIP_VECTORS * AMX_LINE) {
        amx_load(4, w->w[vector][k], AMX_LINE);
        amx_load(6, b, STRIP_VECTORS * AMX_LINE);
        amx_load(7, b + AMX_LINE, STRIP_VECTORS * AMX_LINE);
        amx_load(5, w->w[vector + 1][k], AMX_LINE);
        amx_dot(0, 4, 6);
        amx_dot(1, 4, 7);
        amx_dot(2, 5, 6);
        amx_dot(3, 5, 7);
    }
    amx_store(0, block, AMX_LINE);
    amx_store(1, block + AMX_ROWS * LANES, AMX_LINE);
    amx_store(2, block + 2 * AMX_ROWS * LANES, AMX_LINE);
    amx_store(3, block + 3 * AMX_ROWS * LANES, AMX_LINE);
}

/* The same of one vector of rows and four of dims. */
static void multiply_1x4(float *block, const first_operands *w, int32_t vector, const __m512i *strip, int32_t steps)
{
    const uint8_t *b = (const uint8_t *)strip;
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int32_t k = 0; k < steps; k++, b += STEP_PAIRS * STRIP_VECTORS * AMX_LINE) {
        amx_load(4, w->w[vector][k], AMX_LINE);
        amx_load(6, b, STRIP_VECTORS * AMX_LINE);
        amx_load(7, b + AMX_LINE, STRIP_VECTORS * AMX_LINE);
        amx_dot(0, 4, 6);
        amx_dot(1, 4, 7);
        amx_load(6, b + 2 * AMX_LINE, STRIP_VECTORS * AMX_LINE);
        amx_load(7, b + 3 * AMX_LINE, STRIP_VECTORS * AMX_LINE);
        amx_dot(2, 4, 6);
        amx_dot(3, 4, 7);
    }
    amx_store(0, block, AMX_LINE);
    amx_store(1, block + AMX_ROWS * LANES, AMX_LINE);
    amx_store(2, block + 2 * AMX_ROWS * LANES, AMX_LINE);
    amx_store(3, block + 3 * AMX_ROWS * LANES, AMX_LINE);
}

/* How products join the sums of a row: sums = sums * alpha + factor * product; alpha NULL: sums = product. */
typedef struct joining {
    float *sums; /* of row 0 in the strip */
    const float *alpha;
    int32_t begin, end; /* rows that take part */
    float factor;
} joining;

/* A block of 16 rows from r on and vector v of the strip. */
static inline void join(const joining *j, const float *block, int32_t r, int32_t v)
{
    const __m512 factor = _mm512_set1_ps(j->factor);
    int32_t first = r < j->begin ? j->begin : r, last = r + AMX_ROWS < j->end ? r + AMX_ROWS : j->end;
    for (int32_t i = first; i < last; i++) {
        float *at = j->sums + (int64_t)i * STRIP_DIMS + v * LANES;
        __m512 x = _mm512_mul_ps(_mm512_load_ps(block + (i - r) * LANES), factor);
        if (j->alpha) {
            x = _mm512_fmadd_ps(_mm512_load_ps(at), _mm512_set1_ps(j->alpha[i]), x);
        }
        _mm512_store_ps(at, x);
    }
}

/* One strip of `vectors` (2 or 4) vectors of dims and all rows that take part. */
static void add_strip(const joining *j, const first_operands *w, const __m512i *strip, int32_t vectors, int32_t steps)
{
    _Alignas(64) float block[4 * AMX_ROWS * LANES];
    int32_t r = j->begin / LANES * LANES;
    for (; r + LANES < j->end; r += PAIR_ROWS) {
        for (int32_t v = 0; v < vectors; v += 2) {
            multiply_2x2(block, w, r / LANES, strip + v, steps);
            for (int32_t i = 0; i < 4; i++) {
                join(j, block + i * AMX_ROWS * LANES, r + i / 2 * LANES, v + i % 2);
            }
        }
    }
    if (r < j->end) {
        multiply_1x4(block, w, r / LANES, strip, steps);
        for (int32_t v = 0; v < vectors; v++) {
            join(j, block + v * AMX_ROWS * LANES, r, v);
        }
    }
}

/* Rows begin..end-1, the first `tokens` tokens. */
static void accumulate_rows(const strip_operands *o, int32_t begin, int32_t end, int32_t tokens)
{
    float ones[FMLAI_TILE_ROWS];
    _Alignas(64) __m512i strip[MAX_PAIRS * STRIP_VECTORS], small[MAX_PAIRS * STRIP_VECTORS];
    first_operands weights;
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(o->rows) * STRIP_DIMS;
    int32_t pairs = pairs_of(tokens), steps = (pairs + STEP_PAIRS - 1) / STEP_PAIRS;
    size_t padding = (size_t)(steps * STEP_PAIRS - pairs) * STRIP_VECTORS * sizeof strip[0];

    transpose_weights(&weights, o, begin, end, pairs);
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        ones[r] = 1.0f;
    }
    for (int32_t k = 0; k < o->d; k += STRIP_DIMS) {
        int32_t units = o->d - k > UNIT_DIMS ? 2 : 1;
        joining j = {o->sums + k / STRIP_DIMS * strip_stride, o->alpha, begin, end, 1.0f};
        bool has_small = fmlak_strip_interleave_avx512bf16(strip, o, k, units, tokens);
        memset(strip + pairs * STRIP_VECTORS, 0, padding);
        if (has_small) {
            memset(small + pairs * STRIP_VECTORS, 0, padding);
            fmlak_strip_separate_avx512bf16(strip, small, pairs);
        }
        add_strip(&j, &weights, strip, 2 * units, steps);
        if (has_small) {
            j.alpha = ones;
            j.factor = 1.0f / SMALL_FACTOR;
            add_strip(&j, &weights, small, 2 * units, steps);
        }
    }
}

void fmlak_tile_accumulate_amx(void *packed_sums, const void *packed_weights, const void *tile, int64_t tile_stride,
                               const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens, int32_t d)
{
    fmlai_tile_parts parts = fmlai_tile_parts_of(tile, tile_stride, FMLA_BF16);
    strip_operands o = {packed_sums, packed_weights, &parts, alpha, visible, rows, d};
    amx_begin(AMX_ROWS);
    accumulate_seen(&o, tokens, accumulate_rows);
    amx_end();
}
