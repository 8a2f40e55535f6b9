/* SPDX-License-Identifier: MIT */
/*
 * walk.h: how expand functions walk over slots: addresses, and rows fetched ahead, because gathered tokens
 * lie anywhere in a cache of gigabytes. Static inline, for the ISA folders.
 */
#ifndef FLASHMLA_QUANT_WALK_H
#define FLASHMLA_QUANT_WALK_H

#include <string.h>

#include "../../format/format.h"
#include "quant.h"

#define FMLAI_ROWS_AHEAD 10

/* Where a token's data row and scales are. */
typedef struct fmlai_token_at {
    const uint8_t *row, *scales;
} fmlai_token_at;

static inline fmlai_token_at fmlai_token_locate(const fmlai_pool *pool, int64_t slot)
{
    return (fmlai_token_at){fmlai_pool_row(pool, slot), fmlai_pool_scales(pool, slot)};
}

/* Locates all tokens of a walk, before it begins: then no row waits for its address. walk.c. */
void fmlai_cpu_walk_locate(fmlai_token_at *at, const fmlai_pool *pool, const int64_t *slots, int32_t count);

/* Token i of a walk over `count`; fetches the lines of a later one: row_bytes from `first` on are what is read of a
 * row. Rows that lie one after the other are the processor's to fetch. */
static inline fmlai_token_at fmlai_walk_token(const fmlai_token_at *at, int32_t count, int32_t i, int64_t first,
                                              int32_t row_bytes)
{
    const fmlai_token_at *next = at + i + FMLAI_ROWS_AHEAD;
    if (i + FMLAI_ROWS_AHEAD < count &&
        (uintptr_t)next->row - (uintptr_t)at[i].row >= 2 * FMLAI_ROWS_AHEAD * (uintptr_t)row_bytes) {
        for (int32_t b = 0; b < row_bytes; b += 64) {
            __builtin_prefetch(next->row + first + b);
        }
        __builtin_prefetch(next->row + first + row_bytes - 1);
        __builtin_prefetch(next->scales);
    }
    return at[i];
}

#endif
