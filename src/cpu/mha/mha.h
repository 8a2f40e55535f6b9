/* SPDX-License-Identifier: MIT */
/*
 * mha.h: what forward and backward of dense multi-head attention share. Both work on blocks of tokens of
 * one request and one head, of which the tile kernels take up to FMLAI_TILE_ROWS as rows, against tiles of the other
 * side's tokens. Every result is summed by one task in a fixed order, so the bits do not depend on
 * threads.
 */
#ifndef FLASHMLA_CPU_MHA_H
#define FLASHMLA_CPU_MHA_H

#include "../cpu.h"

#define FMLAI_MHA_ROWS FMLAI_TILE_ROWS

/* Tokens begin..begin+count-1 of a packed tensor: those of one request. */
typedef struct fmlai_mha_span {
    int64_t begin, count;
} fmlai_mha_span;

/* A task's tokens of request `request`: first..first+rows-1, counted within the request. */
typedef struct fmlai_mha_block {
    int64_t request, first;
    int32_t rows;
} fmlai_mha_block;

static inline fmlai_mha_span fmlai_mha_span_of(const int32_t *cu_seqlens, int64_t request, int64_t total)
{
    fmlai_mha_span span = {0, total};
    if (cu_seqlens) {
        span.begin = cu_seqlens[request];
        span.count = (int64_t)cu_seqlens[request + 1] - cu_seqlens[request];
    }
    return span;
}

/* An upper bound for the number of blocks of `size` tokens of all requests, from shapes alone: some numbers below it
 * are no block. */
int64_t fmlai_mha_blocks(int64_t batch, int64_t total, int32_t size);
/* Block number `id`; false: none. */
bool fmlai_mha_block_at(const int32_t *cu_seqlens, int64_t batch, int64_t total, int32_t size, int64_t id,
                        fmlai_mha_block *block);

/* Kernels for a call's data, and its tensors as pools that the expand functions read. */
const fmlai_tile_kernels *fmlai_mha_kernels(const fmlai_cpu *cpu, const fmlai_mha *p);
fmlai_pool fmlai_mha_pool(const fmlai_packed *tensor, int64_t tokens, int32_t d);

/* A matrix of tokens for the tile kernels. */
typedef struct fmlai_mha_tile {
    void *data;
    int64_t stride;
    int32_t d;
} fmlai_mha_tile;

/* Clears the columns between d and the stride, which kernels may read. Once a task. */
void fmlai_mha_tile_start(const fmlai_tile_kernels *k, fmlai_mha_tile *tile, void *data, int32_t tokens, int32_t d);
void fmlai_mha_tile_fill(const fmlai_cpu *cpu, const fmlai_tile_kernels *k, const fmlai_mha_tile *tile,
                         const fmlai_pool *pool, const int64_t *tokens, int32_t count, int32_t head);

/* Rows of a packed tensor as floats [rows][d], and back, times a factor. */
void fmlai_mha_load(const fmlai_tile_kernels *k, float *dst, const fmlai_packed *tensor, int64_t token, int32_t head,
                    int32_t rows, int32_t d);
void fmlai_mha_store(const fmlai_tile_kernels *k, const fmlai_packed *tensor, int64_t token, int32_t head,
                     const float *src, int32_t rows, int32_t d, float factor);
void fmlai_mha_store_row(const fmlai_tile_kernels *k, const fmlai_packed *tensor, int64_t token, int32_t head,
                         const float *src, int32_t d, float factor);
/* Rows of a head lie far apart, each on pages of its own: callers fetch them FMLAI_MHA_AHEAD rows before their turn. */
#define FMLAI_MHA_AHEAD 8
void fmlai_mha_fetch(const fmlai_packed *tensor, int64_t token, int32_t head, int32_t d);

/* Hands out 64-byte aligned pieces of a workspace; with base NULL it only counts. */
typedef struct fmlai_mha_arena {
    uint8_t *base;
    size_t used;
} fmlai_mha_arena;

void *fmlai_mha_take(fmlai_mha_arena *arena, size_t size);

#endif
