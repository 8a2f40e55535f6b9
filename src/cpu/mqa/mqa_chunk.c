/* SPDX-License-Identifier: MIT */
/*
 * mqa_chunk.c: one chunk of tokens through the tile kernels: expand, scores, softmax, accumulate, tile after
 * tile.
 */
#include <string.h>

#include "mqa.h"

static void expand(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch,
                   int32_t begin, int32_t count)
{
    const fmlai_mqa *p = plan->p;
    const fmlai_mqa_tokens *tokens = &scratch->tokens;
    int32_t main = tokens->main_count - begin;
    main = main < 0 ? 0 : main > count ? count : main;
    if (main > 0) {
        plan->expand[0](&p->main.pool, tokens->slots + begin, main, block->kv_head, scratch->tile,
                        plan->tile_stride);
    }
    if (main < count) {
        size_t element = plan->kernels->dtype == FMLA_BF16 ? sizeof(uint16_t) : sizeof(float);
        plan->expand[1](&p->extra.pool, tokens->slots + begin + main, count - main, block->kv_head,
                        (uint8_t *)scratch->tile + (size_t)(main * plan->tile_stride) * element,
                        plan->tile_stride);
    }
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

void fmlai_cpu_mqa_chunk(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch,
                         fmlai_mqa_partial *partial)
{
    const fmlai_tile_kernels *k = plan->kernels;
    int32_t rows = block->tokens * block->heads;
    int32_t d_qk = plan->p->d_qk, d_v = plan->p->d_v;

    fmlai_softmax_start(&scratch->state);
    for (int32_t begin = 0; begin < scratch->tokens.count; begin += k->block_tokens) {
        int32_t left = scratch->tokens.count - begin;
        int32_t count = left < k->block_tokens ? left : k->block_tokens;
        const int32_t *seen = visible(block, scratch, begin, count);
        expand(plan, block, scratch, begin, count);
        k->scores(scratch->scores, scratch->packed_rows, scratch->tile, plan->tile_stride, rows, count, d_qk);
        k->softmax(&scratch->state, scratch->alpha, scratch->packed_weights, scratch->scores, scratch->scale2,
                   seen, rows, count);
        k->accumulate(scratch->packed_sums, scratch->packed_weights, scratch->tile, plan->tile_stride,
                      begin == 0 ? NULL : scratch->alpha, seen, rows, count, d_v);
    }
    memcpy(partial->m, scratch->state.m, sizeof partial->m);
    memcpy(partial->l, scratch->state.l, sizeof partial->l);
    if (scratch->tokens.count > 0) {
        k->unpack(partial->o, d_v, scratch->packed_sums, rows, d_v);
    }
}
