/* SPDX-License-Identifier: MIT */
/*
 * tile_scores_avx512bf16.c: s[t][row] = rows . tokens. Rows are the lanes, eight to a vector: two lanes hold two pairs
 * of dims of a row. Those of a token are 64 contiguous bits, so they are broadcast as they lie: tokens need no
 * transposition, and a broadcast serves two products even where there are only 16 rows. At the end the sums of the two
 * lanes are added. Up to four times 16 rows by three tokens make 24 accumulators; with fewer rows there are more
 * tokens, to keep enough chains in flight (VDPBF16PS: 6 cycles).
 *
 * Dims are walked in blocks of BLOCK_QUADS quads: a group's block (36 KB) stays in L1 while the tokens pass, and a sum
 * is made of short chains: 144 equal products of bf16 numbers add up without any rounding.
 */
#include "tile_avx512bf16.h"

#define BLOCK_QUADS 72 /* d 576 in two blocks */
#define HALVES      2  /* vectors of 8 rows in 16 */
#define MOST_TOKENS 8  /* of a step */

/* What one call of multiply works on: a block of dims of one group of rows and of some tokens. */
typedef struct operands {
    float *s;
    const int32_t *rows;
    const uint16_t *tile;
    int64_t s_stride;
    int64_t tile_stride;
    int32_t quads;
    bool first; /* sets s; otherwise adds */
} operands;

/* Four bf16 in all lane pairs. */
static inline __m512i broadcast_quad(const void *quad)
{
    int64_t bits;
    __builtin_memcpy(&bits, quad, sizeof bits);
    return _mm512_set1_epi64(bits);
}

/* vectors and tokens are constants in each caller: the loops unroll, the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(const operands *o, int32_t vectors, int32_t tokens)
{
    __m512 acc[MOST_TOKENS][HALVES * GROUP_VECTORS];
    const int32_t *rows = o->rows, halves = HALVES * vectors;
    const uint16_t *tile = o->tile;
    int64_t tile_stride = o->tile_stride, s_stride = o->s_stride;
    int32_t quads = o->quads;
    bool first = o->first;
    float *s = o->s;
#pragma GCC unroll 8
    for (int32_t t = 0; t < tokens; t++) {
#pragma GCC unroll 8
        for (int32_t h = 0; h < halves; h++) {
            acc[t][h] = _mm512_setzero_ps();
        }
    }
    const uint16_t *four[2] = {tile, tile + 4 * tile_stride};
    for (int32_t p = 0; p < quads; p++, rows += halves * LANES) {
        __m512i x[MOST_TOKENS];
        /* Addresses of tokens are sums of two pointers and multiples of the stride: an own pointer for each of them is
         * more than there are registers. Compilers are kept from finding out that these belong together. */
        __asm__("" : "+r"(four[0]), "+r"(four[1]));
#pragma GCC unroll 8
        for (int32_t t = 0; t < tokens; t++) {
            x[t] = broadcast_quad(four[t / 4] + t % 4 * tile_stride + 4 * p);
        }
#pragma GCC unroll 8
        for (int32_t h = 0; h < halves; h++) {
            __m512i q = _mm512_load_si512(rows + h * LANES);
#pragma GCC unroll 8
            for (int32_t t = 0; t < tokens; t++) {
                acc[t][h] = dot(acc[t][h], q, x[t]);
            }
        }
    }
#pragma GCC unroll 8
    for (int32_t t = 0; t < tokens; t++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            __m512 a = acc[t][HALVES * v], b = acc[t][HALVES * v + 1];
            __m512 sum = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xDD));
            float *at = s + t * s_stride + v * LANES;
            _mm512_store_ps(at, first ? sum : _mm512_add_ps(sum, _mm512_load_ps(at)));
        }
    }
}

/* Four vectors: 3, 2 or 1 tokens at a time; and so on. Returns how many tokens were taken, of `left`. */
static int32_t multiply_4(const operands *o, int32_t left)
{
    if (left == 3 || left > 4) { /* 16: four times 3, twice 2 */
        multiply(o, 4, 3);
        return 3;
    }
    if (left >= 2) {
        multiply(o, 4, 2);
        return 2;
    }
    multiply(o, 4, 1);
    return 1;
}

static int32_t multiply_3(const operands *o, int32_t left)
{
    if (left >= 4) {
        multiply(o, 3, 4);
        return 4;
    }
    if (left >= 2) {
        multiply(o, 3, 2);
        return 2;
    }
    multiply(o, 3, 1);
    return 1;
}

static int32_t multiply_2(const operands *o, int32_t left)
{
    if (left >= 4) {
        multiply(o, 2, 4);
        return 4;
    }
    if (left >= 2) {
        multiply(o, 2, 2);
        return 2;
    }
    multiply(o, 2, 1);
    return 1;
}

static int32_t multiply_1(const operands *o, int32_t left)
{
    if (left >= 8) {
        multiply(o, 1, 8);
        return 8;
    }
    if (left >= 4) {
        multiply(o, 1, 4);
        return 4;
    }
    multiply(o, 1, 1);
    return 1;
}

void fmlak_tile_scores_of_parts_avx512bf16(float *s, const void *packed_rows, const fmlai_tile_parts *tile,
                                           int32_t rows, int32_t tokens, int32_t d)
{
    static int32_t (*const kernels[])(const operands *, int32_t) = {multiply_1, multiply_2, multiply_3,
                                                                    multiply_4};
    int32_t lanes = fmlai_tile_lanes(rows), quads = quads_of(d);
    for (int32_t p = 0; p < quads; p += BLOCK_QUADS) {
        for (int32_t r = 0; r < lanes; r += GROUP_VECTORS * LANES) {
            int32_t vectors = (lanes - r) / LANES < GROUP_VECTORS ? (lanes - r) / LANES : GROUP_VECTORS;
            operands o = {
                .s = s + r,
                .rows = (const int32_t *)packed_rows + 2 * ((int64_t)r * quads + (int64_t)p * vectors * LANES),
                .s_stride = lanes,
                .tile_stride = tile->stride,
                .quads = quads - p < BLOCK_QUADS ? quads - p : BLOCK_QUADS,
                .first = p == 0,
            };
            for (int32_t t = 0; t < tokens; t += FMLAI_TILE_PART) {
                o.tile = token_of(tile, t) + 4 * p;
                for (int32_t left = tokens - t < FMLAI_TILE_PART ? tokens - t : FMLAI_TILE_PART; left > 0;) {
                    int32_t n = kernels[vectors - 1](&o, left);
                    o.s += n * o.s_stride;
                    o.tile += n * o.tile_stride;
                    left -= n;
                }
            }
        }
    }
}

void fmlak_tile_scores_avx512bf16(float *s, const void *packed_rows, const void *tile, int64_t tile_stride,
                                  int32_t rows, int32_t tokens, int32_t d)
{
    fmlai_tile_parts parts = fmlai_tile_parts_of(tile, tile_stride, FMLA_BF16);
    fmlak_tile_scores_of_parts_avx512bf16(s, packed_rows, &parts, rows, tokens, d);
}
