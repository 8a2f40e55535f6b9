/* SPDX-License-Identifier: MIT */
/*
 * tile_scores_amx.c: s[t][row] = rows . tokens. Tokens are the first operand as they lie, 16 of them by 32 dims; packed
 * rows are the second, 16 pairs of dims by 16 rows; the result has the layout of s. Two by two registers, or four
 * registers of tokens by one of rows, make four sums in flight.
 *
 * The last tokens, if they do not fill a register, take registers of fewer rows. Dims beyond the last are zero in both
 * operands.
 */
#include "tile_amx.h"

/* What a product works on; strides in bytes. */
typedef struct operands {
    const uint8_t *tile;
    uint8_t *s;
    const uint8_t *rows; /* of the first vector */
    int64_t tile_stride;
    int64_t s_stride;
    int64_t vector_bytes; /* from a vector of packed rows to the next */
    int32_t steps;
} operands;

#define STEP_BYTES      (STEP_PAIRS * AMX_LINE) /* of packed rows */
#define TOKENS_AT(o, i) ((o)->tile + (i)*AMX_ROWS * (o)->tile_stride)
#define S_AT(o, i, v)   ((o)->s + (i)*AMX_ROWS * (o)->s_stride + (v)*AMX_LINE)

/* 32 tokens, two vectors of rows. */
static void multiply_2x2(const operands *o)
{
    const uint8_t *a0 = TOKENS_AT(o, 0), *a1 = TOKENS_AT(o, 1), *b0 = o->rows, *b1 = b0 + o->vector_bytes;
    int64_t stride = o->tile_stride;
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int32_t k = 0; k < o->steps; k++) {
        amx_load(4, a0 + k * AMX_LINE, stride);
        amx_load(6, b0 + k * STEP_BYTES, AMX_LINE);
        amx_load(7, b1 + k * STEP_BYTES, AMX_LINE);
        amx_load(5, a1 + k * AMX_LINE, stride);
        amx_dot(0, 4, 6);
        amx_dot(1, 4, 7);
        amx_dot(2, 5, 6);
        amx_dot(3, 5, 7);
    }
    amx_store(0, S_AT(o, 0, 0), o->s_stride);
    amx_store(1, S_AT(o, 0, 1), o->s_stride);
    amx_store(2, S_AT(o, 1, 0), o->s_stride);
    amx_store(3, S_AT(o, 1, 1), o->s_stride);
}

/* 64 tokens, one vector of rows. */
static void multiply_4x1(const operands *o)
{
    const uint8_t *a0 = TOKENS_AT(o, 0), *a1 = TOKENS_AT(o, 1), *a2 = TOKENS_AT(o, 2), *a3 = TOKENS_AT(o, 3);
    int64_t stride = o->tile_stride;
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
    for (int32_t k = 0; k < o->steps; k++) {
        amx_load(7, o->rows + k * STEP_BYTES, AMX_LINE);
        amx_load(4, a0 + k * AMX_LINE, stride);
        amx_load(5, a1 + k * AMX_LINE, stride);
        amx_load(6, a2 + k * AMX_LINE, stride);
        amx_dot(0, 4, 7);
        amx_load(4, a3 + k * AMX_LINE, stride);
        amx_dot(1, 5, 7);
        amx_dot(2, 6, 7);
        amx_dot(3, 4, 7);
    }
    amx_store(0, S_AT(o, 0, 0), o->s_stride);
    amx_store(1, S_AT(o, 1, 0), o->s_stride);
    amx_store(2, S_AT(o, 2, 0), o->s_stride);
    amx_store(3, S_AT(o, 3, 0), o->s_stride);
}

/* 16 tokens or fewer, one vector of rows. */
static void multiply_1x1(const operands *o)
{
    const uint8_t *a = TOKENS_AT(o, 0);
    amx_zero(0);
    for (int32_t k = 0; k < o->steps; k++) {
        amx_load(4, a + k * AMX_LINE, o->tile_stride);
        amx_load(6, o->rows + k * STEP_BYTES, AMX_LINE);
        amx_dot(0, 4, 6);
    }
    amx_store(0, S_AT(o, 0, 0), o->s_stride);
}

/* One or two vectors of rows. */
static void multiply(operands o, int32_t vectors, int32_t tokens)
{
    int32_t wide = vectors == 2 ? 2 * AMX_ROWS : 4 * AMX_ROWS;
    for (int32_t n; tokens > 0; tokens -= n, o.tile += n * o.tile_stride, o.s += n * o.s_stride) {
        n = tokens >= wide ? wide : AMX_ROWS;
        if (n == wide && vectors == 2) {
            multiply_2x2(&o);
        } else if (n == wide) {
            multiply_4x1(&o);
        } else {
            operands second = o;
            second.rows += o.vector_bytes;
            second.s += AMX_LINE;
            multiply_1x1(&o);
            if (vectors == 2) {
                multiply_1x1(&second);
            }
        }
    }
}

static void multiply_all(operands o, int32_t lanes, int32_t tokens)
{
    for (int32_t r = 0, n; r < lanes; r += n * LANES, o.rows += n * o.vector_bytes, o.s += n * AMX_LINE) {
        n = r + 2 * LANES <= lanes ? 2 : 1;
        multiply(o, n, tokens);
    }
}

void fmlak_tile_scores_amx(float *s, const void *packed_rows, const void *tile, int64_t tile_stride, int32_t rows,
                           int32_t tokens, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows), whole = tokens / AMX_ROWS * AMX_ROWS, steps = step_pairs_of(d) / STEP_PAIRS;
    operands o = {
        .tile = tile,
        .s = (uint8_t *)s,
        .rows = packed_rows,
        .tile_stride = tile_stride * (int64_t)sizeof(uint16_t),
        .s_stride = lanes * (int64_t)sizeof(float),
        .vector_bytes = steps * STEP_BYTES,
        .steps = steps,
    };
    amx_begin(AMX_ROWS);
    multiply_all(o, lanes, whole);
    if (whole < tokens) {
        o.tile += whole * o.tile_stride;
        o.s += whole * o.s_stride;
        amx_begin(tokens - whole);
        multiply_all(o, lanes, tokens - whole);
    }
    amx_end();
}
