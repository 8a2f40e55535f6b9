/* SPDX-License-Identifier: MIT */
/*
 * plan.h: how work is cut, as pure integers. Two rules live here.
 *
 * 1. The CPU's own rule: a token list is cut into chunks of fixed numbers of tokens, counted from the list's
 *    own beginning. The cut depends on nothing but the list's length: not on the batch, not on the number of
 *    threads. So a row's bits are the same in any company and on any number of workers. (CUDA cuts on the
 *    device, or not at all: src/cuda/common/work.cuh.)
 *
 * 2. The published schedule, for callers of older generations and for whoever wants to see one: a batch of
 *    requests is cut into `parts` pieces of about the same cost.
 *
 *    Cost. A request of n blocks (a block is 64 tokens) costs n + w, w = overhead_blocks: the fixed cost of
 *    beginning a piece. Lengths: dense, the sequence's; sparse, L = topk_length (or topk), at least 1, and
 *    with an extra scope L rounded up to whole blocks plus extra_topk_length (or extra_topk), so that no
 *    block mixes the scopes. A length of 0 counts one block, in the 2025-02 form none.
 *
 *    Cut. payload = ceil(sum(n + w) / parts) + w. Parts are served in order, each with budget = payload, at
 *    the current (request, block, split). While requests remain: if the budget covers the rest of the request
 *    and w, the part takes it, pays, and goes on with the next request; else, if budget > w, it takes
 *    budget - w blocks, which ends a split, and stops; else it stops. The +w in payload pays for the second
 *    beginning of a cut request, so the last part always reaches the end.
 *
 *    Tables. num_splits[i + 1] - num_splits[i] is the number of pieces of request i, at least 1. A row of
 *    metadata per part; columns:
 *                  2025-02                    2025-09               2026-01
 *        0         first request              first request         first request
 *        1         begin, in tokens           begin, in blocks      last request (inclusive)
 *        2         last request (inclusive)   last request          begin, in blocks
 *        3         end, in tokens             end, in blocks        end, in blocks
 *        4         number of the first request's split that this part works on (all forms)
 *        5, 6      0                          0                     1 if the first, the last request is split
 *        7         0                          0                     0
 *    The end is exclusive and belongs to the last request; of a finished request it is its length (tokens) or
 *    its number of blocks, 0 for a dense length of 0. A part without work has first request = b and last =
 *    b - 1: every row is written.
 */
#ifndef FLASHMLA_PLAN_H
#define FLASHMLA_PLAN_H

#include "../backend.h"

/* Tokens per chunk of the library's own rule, counted along main, then extra, as one list. The first chunks of a list
 * are shorter: so that two workers share a list of a thousand tokens. */
#define FMLAI_PLAN_CHUNK_TOKENS 1024
#define FMLAI_PLAN_SHORT_TOKENS 512
#define FMLAI_PLAN_SHORT_CHUNKS 2 /* together one long chunk */

/* The token at which chunk `chunk` begins. */
static inline int64_t fmlai_plan_chunk_begin(int64_t chunk)
{
    return chunk < FMLAI_PLAN_SHORT_CHUNKS ? chunk * FMLAI_PLAN_SHORT_TOKENS
                                           : (chunk - FMLAI_PLAN_SHORT_CHUNKS + 1) * FMLAI_PLAN_CHUNK_TOKENS;
}

/* Number of chunks of a list of `count` tokens; 0 for an empty list. */
static inline int64_t fmlai_plan_chunks(int64_t count)
{
    if (count <= FMLAI_PLAN_CHUNK_TOKENS) {
        return (count + FMLAI_PLAN_SHORT_TOKENS - 1) / FMLAI_PLAN_SHORT_TOKENS;
    }
    return FMLAI_PLAN_SHORT_CHUNKS - 1 + count / FMLAI_PLAN_CHUNK_TOKENS + (count % FMLAI_PLAN_CHUNK_TOKENS != 0);
}

/* Tokens in chunk `chunk` (below fmlai_plan_chunks) of a list of `count` tokens. */
static inline int64_t fmlai_plan_chunk_tokens(int64_t count, int64_t chunk)
{
    int64_t begin = fmlai_plan_chunk_begin(chunk), end = fmlai_plan_chunk_begin(chunk + 1);
    return (count < end ? count : end) - begin;
}

/* Tokens per block of the published schedule. */
#define FMLAI_PLAN_BLOCK_TOKENS 64

/* Columns of a metadata row. */
#define FMLAI_PLAN_COLUMNS 8

/* Fills p->metadata and p->num_splits; parts >= 1, batch >= 0. INVALID_ARGUMENT: a length beyond int32. */
fmla_status fmlai_plan_schedule(const fmlai_schedule *p, fmlai_error *error);

#endif
