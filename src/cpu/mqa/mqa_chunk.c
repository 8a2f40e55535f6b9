/* SPDX-License-Identifier: MIT */
/*
 * mqa_chunk.c: one chunk of tokens through the tile kernels: expand, scores, softmax, accumulate, tile after
 * tile. A tile is expanded into scratch->tile, or left in a bf16 cache (place); what comes next is fetched beside the
 * sums (look_ahead).
 */
#include <string.h>

#include "../../format/format.h"
#include "mqa.h"

#define AHEAD_ROWS  32 /* with fewer, fetching takes longer than a step's products */
#define AHEAD_LINES 11 /* longer rows (of bf16) come in two pieces where steps are many: loads wait for many fetches */

/* Tokens begin..begin+count-1 of the chunk, all of list `which`, into the tile, from its token `at` on. */
static void expand(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch, int32_t which,
                   int32_t begin, int32_t count, int32_t at)
{
    const fmlai_token_list *list = which == 0 ? &plan->p->main : &plan->p->extra;
    size_t element = plan->kernels->dtype == FMLA_BF16 ? sizeof(uint16_t) : sizeof(float);
    uint8_t *to = (uint8_t *)scratch->tile + (size_t)(at * plan->tile_stride) * element;
    plan->expand[which](&list->pool, scratch->tokens.slots + begin, count, block->kv_head, to, plan->tile_stride);
}

/* Whether tokens follow each other in a page. */
static bool together(const fmlai_pool *pool, const int64_t *slots, int32_t count)
{
    bool next = fmlai_pool_place(pool, slots[0]).offset + count <= pool->page_size;
    for (int32_t i = 1; next && i < count; i++) {
        next = slots[i] == slots[0] + i;
    }
    return next;
}

/* As expand(), where the cache holds what kernels multiply: parts of a tile that lie together there stay there. last:
 * no other list's tokens follow in the tile, so that its last part may be a short one. */
static void place(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch, int32_t which,
                  int32_t begin, int32_t count, int32_t at, bool last, fmlai_tile_parts *tile)
{
    const fmlai_pool *pool = which == 0 ? &plan->p->main.pool : &plan->p->extra.pool;
    for (int32_t i = 0, n; i < count; i += n) {
        const int64_t *slots = scratch->tokens.slots + begin + i;
        int32_t room = FMLAI_TILE_PART - (at + i) % FMLAI_TILE_PART;
        n = count - i < room ? count - i : room;
        bool whole = room == FMLAI_TILE_PART && (n == room || last);
        if (whole && together(pool, slots, n)) {
            tile->at[(at + i) / FMLAI_TILE_PART] =
                fmlai_pool_row(pool, slots[0]) + block->kv_head * pool->head_stride;
        } else {
            expand(plan, block, scratch, which, begin + i, n, at + i);
        }
    }
}

/* Tokens begin..begin+count-1 of the chunk as a tile; its parts are those of scratch->tile, but for what stays in
 * place. */
static void make_tile(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch,
                      int32_t begin, int32_t count, fmlai_tile_parts *tile)
{
    int32_t main = scratch->tokens.main_count - begin;
    main = main < 0 ? 0 : main > count ? count : main;
    for (int32_t which = 0; which < 2; which++) {
        int32_t at = which == 0 ? 0 : main, n = which == 0 ? main : count - main;
        if (n > 0 && plan->in_place[which]) {
            place(plan, block, scratch, which, begin + at, n, at, at + n == count, tile);
        } else if (n > 0) {
            expand(plan, block, scratch, which, begin + at, n, at);
        }
    }
}

/* What the tile from token `begin` on, of `count` at most, will read. */
static void look_ahead(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, const fmlai_mqa_tokens *tokens,
                       int32_t begin, int32_t count, int32_t rows, fmlai_ahead *ahead)
{
    int32_t most = plan->kernels->tile_tokens, n = rows < AHEAD_ROWS || count < 0 ? 0 : count < most ? count : most;
    int32_t pieces = 1;
    ahead->next = ahead->count = 0;
    for (int32_t i = 0; i < n; i++) {
        const fmlai_pool *pool = begin + i < tokens->main_count ? &plan->p->main.pool : &plan->p->extra.pool;
        const uint8_t *row = fmlai_pool_row(pool, tokens->slots[begin + i]) + block->kv_head * pool->head_stride;
        if (i == 0) {
            int32_t lines = (fmlai_pool_row_bytes(pool) + 63) / 64;
            pieces = lines > AHEAD_LINES && rows > FMLAI_TILE_ROWS / 2 ? 2 : 1;
            ahead->bytes = (lines + pieces - 1) / pieces * 64;
        }
        for (int32_t piece = 0; piece < pieces; piece++) {
            ahead->rows[ahead->count++] = row + piece * ahead->bytes;
        }
    }
}

/* The tile after the one that ends before token `next` of the chunk, be it of this chunk or the next. */
static void look_beyond(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, const fmlai_mqa_tokens *tokens,
                        int32_t next, int32_t rows, fmlai_ahead *ahead)
{
    int32_t end = next < tokens->count ? tokens->count : tokens->known;
    look_ahead(plan, block, tokens, next, end - next, rows, ahead);
}

/* How many tokens of the tile each row sees; NULL if every row sees all. Entries of a paged list ascend. */
static const int32_t *visible(const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch, int32_t begin,
                              int32_t count)
{
    const int64_t *entries = scratch->tokens.entries + begin;
    bool all = true;
    if (block->tokens <= 1) {
        return NULL;
    }
    for (int32_t r = 0; r < block->tokens * block->heads; r++) {
        int32_t n = count;
        while (n > 0 && entries[n - 1] >= scratch->bound[r]) {
            n--;
        }
        scratch->visible[r] = n;
        all = all && n == count;
    }
    return all ? NULL : scratch->visible;
}

/* One tile: made, scored, weighed, added to the sums. fetched: its tokens are on their way into the cache. */
static void add_tile(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch,
                     fmlai_mqa_partial *partial, int32_t begin, int32_t count, bool fetched)
{
    const fmlai_tile_kernels *k = plan->kernels;
    int32_t rows = block->tokens * block->heads, d_qk = plan->p->d_qk, d_v = plan->p->d_v;
    const int32_t *seen = visible(block, scratch, begin, count);
    const float *alpha = begin == 0 ? NULL : scratch->alpha;
    fmlai_ahead ahead;
    fmlai_tile_parts tile = fmlai_tile_parts_of(scratch->tile, plan->tile_stride, k->dtype);

    if (!fetched && k->accumulate_parts) {
        look_ahead(plan, block, &scratch->tokens, begin, count, rows, &ahead);
        fmlai_fetch_ahead(&ahead, ahead.count);
    }
    make_tile(plan, block, scratch, begin, count, &tile);
    if (k->scores_of_parts) {
        k->scores_of_parts(scratch->scores, scratch->packed_rows, &tile, rows, count, d_qk);
    } else {
        k->scores(scratch->scores, scratch->packed_rows, scratch->tile, plan->tile_stride, rows, count, d_qk);
    }
    k->softmax(&scratch->state, scratch->alpha, scratch->packed_weights, scratch->scores, scratch->scale2, seen, rows,
               count);
    if (k->accumulate_parts) {
        look_beyond(plan, block, &scratch->tokens, begin + count, rows, &ahead);
        tile.ahead = &ahead;
        k->accumulate_parts(partial->o, scratch->packed_weights, &tile, alpha, seen, rows, count, d_v);
    } else {
        k->accumulate(partial->o, scratch->packed_weights, scratch->tile, plan->tile_stride, alpha, seen, rows, count,
                      d_v);
    }
}

void fmlai_cpu_mqa_chunk(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch,
                         fmlai_mqa_partial *partial, bool fetched)
{
    int32_t left = scratch->tokens.count, most = plan->kernels->tile_tokens;
    fmlai_softmax_start(&scratch->state);
    for (int32_t begin = 0, count; left > 0; begin += count, left -= count) {
        count = left < most ? left : most;
        add_tile(plan, block, scratch, partial, begin, count, begin > 0 || fetched);
    }
    memcpy(partial->m, scratch->state.m, sizeof partial->m);
    memcpy(partial->l, scratch->state.l, sizeof partial->l);
}
