/* SPDX-License-Identifier: MIT */
/*
 * tile_scores_avx512bf16.c: s[t][row] = rows . tokens. Rows are the lanes. A pair of dims of a token is 32
 * contiguous bits, so it is broadcast as it lies: tokens need no transposition. Up to four vectors of rows
 * times four tokens make 16 accumulators; with fewer vectors there are more tokens, to keep enough chains in
 * flight (VDPBF16PS: 6 cycles).
 *
 * Dims are walked in blocks of BLOCK_PAIRS pairs: a group's block (24 KB) stays in L1 while the tokens pass,
 * and a sum is made of short chains: 192 equal products of bf16 numbers add up without any rounding.
 */
#include "tile_avx512bf16.h"

#define BLOCK_PAIRS 96

/* What one call of multiply works on: a block of dims of one group of rows and of some tokens. */
typedef struct operands {
    float *s;
    const int32_t *rows;
    const uint16_t *tile;
    int64_t s_stride;
    int64_t tile_stride;
    int32_t pairs;
    bool first; /* sets s; otherwise adds */
} operands;

/* vectors and tokens are constants in each caller: the loops unroll, the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply(const operands *o, int32_t vectors, int32_t tokens)
{
    __m512 acc[16][GROUP_VECTORS];
    const int32_t *rows = o->rows;
    const uint16_t *tile = o->tile;
    int64_t tile_stride = o->tile_stride, s_stride = o->s_stride;
    int32_t pairs = o->pairs;
    bool first = o->first;
    float *s = o->s;
#pragma GCC unroll 16
    for (int32_t t = 0; t < tokens; t++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            acc[t][v] = _mm512_setzero_ps();
        }
    }
    const uint16_t *four[4] = {tile, tile + 4 * tile_stride, tile + 8 * tile_stride, tile + 12 * tile_stride};
    for (int32_t p = 0; p < pairs; p++) {
        __m512i q[GROUP_VECTORS];
        /* Addresses of tokens are sums of four pointers and multiples of the stride: an own pointer for each of them is
         * more than there are registers. Compilers are kept from finding out that these belong together. */
        __asm__("" : "+r"(four[0]), "+r"(four[1]), "+r"(four[2]), "+r"(four[3]));
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            q[v] = _mm512_load_si512(rows + (p * vectors + v) * LANES);
        }
#pragma GCC unroll 16
        for (int32_t t = 0; t < tokens; t++) {
            __m512i x = broadcast_pair(four[t / 4] + t % 4 * tile_stride + 2 * p);
#pragma GCC unroll 4
            for (int32_t v = 0; v < vectors; v++) {
                acc[t][v] = dot(acc[t][v], q[v], x);
            }
        }
    }
#pragma GCC unroll 16
    for (int32_t t = 0; t < tokens; t++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            float *at = s + t * s_stride + v * LANES;
            _mm512_store_ps(at, first ? acc[t][v] : _mm512_add_ps(acc[t][v], _mm512_load_ps(at)));
        }
    }
}

/* Four vectors: 4, 2 or 1 tokens at a time; and so on. Returns how many tokens were taken, of `left`. */
static int32_t multiply_4(const operands *o, int32_t left)
{
    if (left >= 4) {
        multiply(o, 4, 4);
        return 4;
    }
    if (left >= 2) {
        multiply(o, 4, 2);
        return 2;
    }
    multiply(o, 4, 1);
    return 1;
}

static int32_t multiply_3(const operands *o, int32_t left) /* 16: 5, 5 and 6 */
{
    if (left == 6) {
        multiply(o, 3, 6);
        return 6;
    }
    if (left >= 5) {
        multiply(o, 3, 5);
        return 5;
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
    if (left >= 8) {
        multiply(o, 2, 8);
        return 8;
    }
    if (left >= 4) {
        multiply(o, 2, 4);
        return 4;
    }
    multiply(o, 2, 1);
    return 1;
}

static int32_t multiply_1(const operands *o, int32_t left)
{
    if (left >= 16) {
        multiply(o, 1, 16);
        return 16;
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
    int32_t lanes = fmlai_tile_lanes(rows), pairs = pairs_of(d);
    for (int32_t p = 0; p < pairs; p += BLOCK_PAIRS) {
        for (int32_t r = 0; r < lanes; r += GROUP_VECTORS * LANES) {
            int32_t vectors = (lanes - r) / LANES < GROUP_VECTORS ? (lanes - r) / LANES : GROUP_VECTORS;
            operands o = {
                .s = s + r,
                .rows = (const int32_t *)packed_rows + (int64_t)r * pairs + (int64_t)p * vectors * LANES,
                .s_stride = lanes,
                .tile_stride = tile->stride,
                .pairs = pairs - p < BLOCK_PAIRS ? pairs - p : BLOCK_PAIRS,
                .first = p == 0,
            };
            for (int32_t t = 0; t < tokens; t += FMLAI_TILE_PART) {
                o.tile = token_of(tile, t) + 2 * p;
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
