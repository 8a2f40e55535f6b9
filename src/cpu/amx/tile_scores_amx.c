/* SPDX-License-Identifier: MIT */
/*
 * tile_scores_amx.c: s[t][row] = rows . tokens. Tokens are the first operand as they lie, 16 of them by 32 dims; packed
 * rows are the second, 16 pairs of dims by 16 rows; the result has the layout of s. Two by two registers, or four
 * vectors of tokens by one of rows, make four sums in flight.
 *
 * The last tokens, if they do not fill a register, take registers of fewer rows. Dims that do not fill a step take a
 * zero-filled copy of the packed rows; the tile is zero there.
 */
#include <string.h>

#include "tile_amx.h"

/* What a product works on. */
typedef struct operands {
    const uint16_t *tile;
    float *s;
    const int32_t *rows; /* the first vector of rows, pair 0 */
    int64_t tile_bytes;  /* strides, all in bytes */
    int64_t s_bytes;
    int64_t rows_bytes;
    int32_t steps;       /* whole steps of 16 pairs */
    const uint8_t *rest; /* the last, zero-filled step of each vector of rows, or NULL */
} operands;

#define TOKENS_AT(o, i) ((const uint8_t *)(o)->tile + (i)*AMX_ROWS * (o)->tile_bytes)
#define S_AT(o, i, v)   ((uint8_t *)(o)->s + (i)*AMX_ROWS * (o)->s_bytes + (v)*AMX_LINE)

/* 32 tokens, two vectors of rows. */
static void multiply_2x2(const operands *o)
{
    const uint8_t *a0 = TOKENS_AT(o, 0), *a1 = TOKENS_AT(o, 1), *b = (const uint8_t *)o->rows;
    int64_t a_stride = o->tile_bytes, b_stride = o->rows_bytes;
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int32_t k = 0; k < o->steps; k++, b += STEP_PAIRS * b_stride) {
        amx_load(4, a0 + k * AMX_LINE, a_stride);
        amx_load(6, b, b_stride);
        amx_load(7, b + AMX_LINE, b_stride);
        amx_load(5, a1 + k * AMX_LINE, a_stride);
        amx_dot(0, 4, 6);
        amx_dot(1, 4, 7);
        amx_dot(2, 5, 6);
        amx_dot(3, 5, 7);
    }
    if (o->rest) {
        amx_load(4, a0 + o->steps * AMX_LINE, a_stride);
        amx_load(5, a1 + o->steps * AMX_LINE, a_stride);
        amx_load(6, o->rest, AMX_LINE);
        amx_load(7, o->rest + AMX_ROWS * AMX_LINE, AMX_LINE);
        amx_dot(0, 4, 6);
        amx_dot(1, 4, 7);
        amx_dot(2, 5, 6);
        amx_dot(3, 5, 7);
    }
    amx_store(0, S_AT(o, 0, 0), o->s_bytes);
    amx_store(1, S_AT(o, 0, 1), o->s_bytes);
    amx_store(2, S_AT(o, 1, 0), o->s_bytes);
    amx_store(3, S_AT(o, 1, 1), o->s_bytes);
}

/* 64 tokens, one vector of rows. */
static void multiply_4x1(const operands *o)
{
    const uint8_t *a0 = TOKENS_AT(o, 0), *a1 = TOKENS_AT(o, 1), *a2 = TOKENS_AT(o, 2), *a3 = TOKENS_AT(o, 3);
    const uint8_t *b = (const uint8_t *)o->rows;
    int64_t a_stride = o->tile_bytes, b_stride = o->rows_bytes;
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int32_t k = 0; k < o->steps + (o->rest != NULL); k++, b += STEP_PAIRS * b_stride) {
        if (k < o->steps) {
            amx_load(7, b, b_stride);
        } else {
            amx_load(7, o->rest, AMX_LINE);
        }
        amx_load(4, a0 + k * AMX_LINE, a_stride);
        amx_load(5, a1 + k * AMX_LINE, a_stride);
        amx_load(6, a2 + k * AMX_LINE, a_stride);
        amx_dot(0, 4, 7);
        amx_load(4, a3 + k * AMX_LINE, a_stride);
        amx_dot(1, 5, 7);
        amx_dot(2, 6, 7);
        amx_dot(3, 4, 7);
    }
    amx_store(0, S_AT(o, 0, 0), o->s_bytes);
    amx_store(1, S_AT(o, 1, 0), o->s_bytes);
    amx_store(2, S_AT(o, 2, 0), o->s_bytes);
    amx_store(3, S_AT(o, 3, 0), o->s_bytes);
}

/* 16 tokens or fewer, one vector of rows. */
static void multiply_1x1(const operands *o)
{
    const uint8_t *a = TOKENS_AT(o, 0), *b = (const uint8_t *)o->rows;
    amx_zero(0);
    for (int32_t k = 0; k < o->steps; k++) {
        amx_load(4, a + k * AMX_LINE, o->tile_bytes);
        amx_load(6, b + k * STEP_PAIRS * o->rows_bytes, o->rows_bytes);
        amx_dot(0, 4, 6);
    }
    if (o->rest) {
        amx_load(4, a + o->steps * AMX_LINE, o->tile_bytes);
        amx_load(6, o->rest, AMX_LINE);
        amx_dot(0, 4, 6);
    }
    amx_store(0, S_AT(o, 0, 0), o->s_bytes);
}

/* One or two vectors of rows. */
static void multiply(operands o, int32_t vectors, int32_t tokens)
{
    const operands all = o;
    int32_t wide = vectors == 2 ? 2 * AMX_ROWS : 4 * AMX_ROWS;
    for (int32_t t = 0; t < tokens;) {
        int32_t n = tokens - t >= wide ? wide : AMX_ROWS;
        o = all;
        o.tile = (const uint16_t *)((const uint8_t *)all.tile + t * all.tile_bytes);
        o.s = (float *)((uint8_t *)all.s + t * all.s_bytes);
        if (n == wide && vectors == 2) {
            multiply_2x2(&o);
        } else if (n == wide) {
            multiply_4x1(&o);
        } else {
            multiply_1x1(&o);
            if (vectors == 2) {
                o.s += LANES;
                o.rows += LANES;
                o.rest = o.rest ? o.rest + AMX_ROWS * AMX_LINE : NULL;
                multiply_1x1(&o);
            }
        }
        t += n;
    }
}

/* The pairs beyond whole steps, of every vector of rows. */
static void copy_rest(uint8_t *rest, const int32_t *packed_rows, int32_t lanes, int32_t pairs)
{
    int32_t whole = pairs / STEP_PAIRS * STEP_PAIRS;
    memset(rest, 0, (size_t)(lanes / LANES) * AMX_ROWS * AMX_LINE);
    for (int32_t r = 0; r < lanes; r += LANES) {
        int32_t first = r / (GROUP_VECTORS * LANES) * GROUP_VECTORS * LANES;
        int32_t vectors = (lanes - first) / LANES < GROUP_VECTORS ? (lanes - first) / LANES : GROUP_VECTORS;
        for (int32_t p = whole; p < pairs; p++) {
            memcpy(rest + (r / LANES * AMX_ROWS + p - whole) * AMX_LINE,
                   packed_rows + (int64_t)first * pairs + (int64_t)p * vectors * LANES + (r - first), AMX_LINE);
        }
    }
}

static void multiply_all(const operands *o, int32_t lanes, int32_t pairs, int32_t tokens)
{
    for (int32_t r = 0; r < lanes;) {
        int32_t first = r / (GROUP_VECTORS * LANES) * GROUP_VECTORS * LANES;
        int32_t vectors = (lanes - first) / LANES < GROUP_VECTORS ? (lanes - first) / LANES : GROUP_VECTORS;
        int32_t n = first + vectors * LANES - r >= 2 * LANES ? 2 : 1;
        operands part = *o;
        part.s = o->s + r;
        part.rows = o->rows + (int64_t)first * pairs + (r - first);
        part.rows_bytes = vectors * AMX_LINE;
        part.rest = o->rest ? o->rest + r / LANES * AMX_ROWS * AMX_LINE : NULL;
        multiply(part, n, tokens);
        r += n * LANES;
    }
}

void fmlak_tile_scores_amx(float *s, const void *packed_rows, const void *tile, int64_t tile_stride, int32_t rows,
                           int32_t tokens, int32_t d)
{
    _Alignas(64) uint8_t rest[FMLAI_TILE_ROWS / LANES * AMX_ROWS * AMX_LINE];
    int32_t lanes = fmlai_tile_lanes(rows), pairs = pairs_of(d), whole = tokens / AMX_ROWS * AMX_ROWS;
    operands o = {
        .tile = tile,
        .s = s,
        .rows = packed_rows,
        .tile_bytes = tile_stride * 2,
        .s_bytes = (int64_t)lanes * 4,
        .steps = pairs / STEP_PAIRS,
    };
    if (pairs % STEP_PAIRS != 0) {
        copy_rest(rest, packed_rows, lanes, pairs);
        o.rest = rest;
    }
    amx_begin(AMX_ROWS);
    multiply_all(&o, lanes, pairs, whole);
    if (whole < tokens) {
        o.tile = (const uint16_t *)tile + whole * tile_stride;
        o.s = s + (int64_t)whole * lanes;
        amx_begin(tokens - whole);
        multiply_all(&o, lanes, pairs, tokens - whole);
    }
    amx_end();
}
