/* SPDX-License-Identifier: MIT */
/*
 * mqa.h: multi-query attention on a CPU: what the files of this folder share.
 *
 * The work of a call, from large to small:
 *
 *   block   up to 128 rows that share one token list: heads of one KV head, of one query token or (paged lists) of
 *           several query tokens of one request, whose causal bounds differ
 *   chunk   attended tokens of the block's list, main then extra, as fmlai_plan_chunk_begin cuts it; gives a partial
 *           result
 *   tile    tokens of a chunk, as many as suit the tile kernels, expanded or left in place once and shared by all rows
 *
 * Chunks are counted in attended tokens: entries that are not attended are dropped before cutting. So the
 * bits of a row depend on the sequence of tokens that it attends and on nothing else: not on where invalid
 * entries stand, in which of two caches a token lives, which rows share the block, how many threads there are
 * or what else is in the batch. Partial results are joined by a left fold in ascending order, in float64.
 *
 *   mqa.c         the two ways to hand out work, the entries of the backend
 *   mqa_plan.c    blocks, workspace
 *   mqa_query.c   rows of a block as floats: storage order, RMS factor, RoPE
 *   mqa_gather.c  the attended tokens of a list as slots
 *   mqa_chunk.c   one chunk through the tile kernels
 *   mqa_finish.c  fold, sink, outputs
 */
#ifndef FLASHMLA_CPU_MQA_H
#define FLASHMLA_CPU_MQA_H

#include "../../plan/plan.h"
#include "../cpu.h"

#define FMLAI_MQA_CHUNK     FMLAI_PLAN_CHUNK_TOKENS
#define FMLAI_MQA_FOLD_ROWS 8 /* rows that are folded together: neighbours in the tile kernels' layouts */

/* Rows that share a token list: query tokens token..token+tokens-1, heads head..head+heads-1. Row r is head
 * head + r % heads of query token token + r / heads. */
typedef struct fmlai_mqa_block {
    int64_t index;
    int64_t request;
    int64_t token;
    int32_t tokens; /* 0: nothing to do */
    int32_t kv_head;
    int32_t head;
    int32_t heads;
    int64_t count[2]; /* entries of main and extra that the block's rows may see */
} fmlai_mqa_block;

/* Split plans: work of one wave. A task is a chunk whose partial goes to a slot, or (slot -1) a whole block.
 * A join folds the slots of a block, and what earlier waves left of it (carry_in), into results or
 * (carry_out) into a carry; -1: none. */
typedef struct fmlai_mqa_task {
    int64_t block;
    int64_t chunk;
    int64_t slot;
} fmlai_mqa_task;

typedef struct fmlai_mqa_join {
    int64_t block;
    int64_t slot;
    int64_t chunks;
    int32_t carry_in;
    int32_t carry_out;
} fmlai_mqa_join;

/* What a chunk gives: maximum and sum of the softmax (base 2) of each row, and unnormalised outputs as the tile kernels
 * leave them. */
typedef struct fmlai_mqa_partial {
    float m[FMLAI_TILE_ROWS];
    float l[FMLAI_TILE_ROWS];
    float o[]; /* packed sums */
} fmlai_mqa_partial;

/* The fold of partials. */
typedef struct fmlai_mqa_total {
    double m[FMLAI_TILE_ROWS];
    double l[FMLAI_TILE_ROWS]; /* 0: nothing attended yet */
    double o[];                /* [rows][d_v] */
} fmlai_mqa_total;

/* Where a walk over the attended tokens of a block stands. */
typedef struct fmlai_mqa_cursor {
    int32_t list; /* 0 main, 1 extra, 2 at the end */
    int64_t next; /* entry of that list */
} fmlai_mqa_cursor;

/* Attended tokens of a chunk, and, where the same worker goes on with the next chunk, some of that one: slots of main,
 * then of extra. */
typedef struct fmlai_mqa_tokens {
    int32_t count;
    int32_t known;      /* count and those of the next chunk */
    int32_t main_count; /* of all that are known */
    int64_t slots[FMLAI_MQA_CHUNK + FMLAI_TILE_TOKENS_MAX];
    int64_t entries[FMLAI_MQA_CHUNK + FMLAI_TILE_TOKENS_MAX]; /* where in its list each was found */
} fmlai_mqa_tokens;

/* A worker's own memory. */
typedef struct fmlai_mqa_scratch {
    bool ready;           /* pointers set */
    int64_t packed_block; /* index of the block whose queries are packed, -1: none */
    float scale2[FMLAI_TILE_ROWS];
    float alpha[FMLAI_TILE_ROWS];
    int32_t visible[FMLAI_TILE_ROWS];
    int64_t bound[FMLAI_TILE_ROWS]; /* entries that each row may see */
    fmlai_softmax_state state;
    fmlai_mqa_tokens tokens;
    float *query; /* [rows][d_qk] */
    void *packed_rows;
    void *tile;
    float *scores;
    void *packed_weights;
    float *out; /* [FMLAI_MQA_FOLD_ROWS][d_v] */
    fmlai_mqa_partial *partial;
    fmlai_mqa_total *total; /* total_rows of them */
} fmlai_mqa_scratch;

/* A call, planned: from shapes, strides and the number of threads. */
typedef struct fmlai_mqa_plan {
    const fmlai_cpu *cpu;
    const fmlai_mqa *p;
    const fmlai_tile_kernels *kernels;
    fmlai_expand expand[2];
    int64_t tile_stride;  /* in elements; main's where its tokens stay in place */
    bool in_place[2];     /* tokens of that list are what the kernels multiply: they may stay in the cache */
    int32_t block_heads;  /* heads of a block */
    int32_t head_blocks;  /* blocks that the heads of a KV head make */
    int32_t block_tokens; /* query tokens of a block */
    int32_t rows;         /* most rows of a block */
    int64_t token_blocks; /* blocks along query tokens, some of them empty if ragged */
    int64_t blocks;
    int64_t max_chunks;
    bool split;         /* tasks are chunks; otherwise blocks */
    int64_t slots;      /* partials held at a time, if split */
    int32_t total_rows; /* rows of a worker's total */
    size_t partial_bytes;
    size_t total_bytes;
    size_t scratch_bytes;
    size_t workspace_bytes;
    uint8_t *workspace;
} fmlai_mqa_plan;

/* Cosines, then sines of a query token's RoPE. */
static inline const float *fmlai_mqa_angles(const fmlai_fused *f, int64_t token)
{
    return f->cos_sin + f->positions[token * f->position_stride] * f->cos_sin_stride;
}

/* mqa_plan.c */
void fmlai_cpu_mqa_plan_make(fmlai_mqa_plan *plan, const fmlai_cpu *cpu, const fmlai_mqa *p);
void fmlai_cpu_mqa_block_at(const fmlai_mqa_plan *plan, int64_t index, fmlai_mqa_block *block);
/* A worker's memory, set up when the worker first asks. */
fmlai_mqa_scratch *fmlai_cpu_mqa_scratch_of(const fmlai_mqa_plan *plan, int32_t worker);
/* Partial slot, and one of two totals that carry a block from wave to wave; split plans only. */
fmlai_mqa_partial *fmlai_cpu_mqa_slot(const fmlai_mqa_plan *plan, int64_t slot);
fmlai_mqa_total *fmlai_cpu_mqa_carry(const fmlai_mqa_plan *plan, int32_t which);
/* Tasks, then joins, of a wave; split plans only. */
void *fmlai_cpu_mqa_table(const fmlai_mqa_plan *plan);

/* mqa_query.c */
/* Rows of the block as floats in scratch->query, rounded as attention sees them, and scratch->scale2. */
void fmlai_cpu_mqa_load_query(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block,
                              fmlai_mqa_scratch *scratch);

/* mqa_gather.c */
/* Entries that the block may see (block->count) and each row's bound. */
void fmlai_cpu_mqa_measure(const fmlai_mqa_plan *plan, fmlai_mqa_block *block, int64_t *bound);
/* Steps over `count` attended tokens. */
void fmlai_cpu_mqa_skip(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_cursor *cursor,
                        int64_t count);
/* The next attended tokens, up to `limit` (at most FMLAI_MQA_CHUNK), and up to `ahead` (at most FMLAI_TILE_TOKENS_MAX)
 * of those behind them, for which the cursor does not move; count 0: the lists are at their end. */
void fmlai_cpu_mqa_gather(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_cursor *cursor,
                          int64_t limit, int64_t ahead, fmlai_mqa_tokens *tokens);

/* mqa_chunk.c */
/* Attention of the block's packed rows over scratch->tokens. fetched: the chunk before knew of the first of them. */
void fmlai_cpu_mqa_chunk(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch,
                         fmlai_mqa_partial *partial, bool fetched);

/* mqa_finish.c */
/* Rows total_row.. of `total` join rows row..row+count-1 of `partial`, which has `rows`; count: at most
 * FMLAI_MQA_FOLD_ROWS. next: the partial whose turn it is next, or NULL. out: [count][d_v] scratch. */
void fmlai_cpu_mqa_fold(const fmlai_mqa_plan *plan, fmlai_mqa_total *total, int32_t total_row,
                        const fmlai_mqa_partial *partial, const fmlai_mqa_partial *next, int32_t rows, int32_t row,
                        int32_t count, float *out);
/* Writes all results of row `row`, whose fold is total_row of `total`. out: [d_v] scratch. */
void fmlai_cpu_mqa_finish(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, int32_t row,
                          const fmlai_mqa_total *total, int32_t total_row, float *out);
/* Sets the scale words of tokens that do not exist to zero. */
void fmlai_cpu_mqa_clear_padding(const fmlai_mqa *p);

#endif
