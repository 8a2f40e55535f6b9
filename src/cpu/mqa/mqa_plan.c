/* SPDX-License-Identifier: MIT */
/*
 * mqa_plan.c: how a call is cut into blocks, and where everything lies in the workspace; from shapes and the
 * number of threads alone.
 *
 * Two ways to hand out work. With many blocks, a task is a block: its chunks are folded one after the other.
 * With few (a small batch over long lists), a task is a chunk; partial results wait in slots until their
 * block is complete. A plan has a bounded number of slots (about 4 a thread), so chunks are handed out in
 * waves, and a block that a wave cuts is carried over. Both ways fold the same partials in the same order:
 * same bits.
 */
#include <string.h>

#include "../ragged.h"
#include "mqa.h"

#define SPLIT_BELOW_BLOCKS 8 /* per thread: with more blocks than this, they are tasks enough */
#define SLOTS_PER_THREAD   4
#define SLOTS_MIN          32

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static size_t lines(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static int64_t most_entries(const fmlai_token_list *list)
{
    if (list->kind == FMLAI_LIST_PAGED) {
        return list->max_pages > INT32_MAX / list->pool.page_size ? INT32_MAX
                                                                  : list->max_pages * list->pool.page_size;
    }
    return list->kind == FMLAI_LIST_INDEXED ? list->topk : 0;
}

static void cut_blocks(fmlai_mqa_plan *plan)
{
    const fmlai_mqa *p = plan->p;
    int32_t shared = p->h_q / p->h_kv;
    plan->head_blocks = (int32_t)ceil_div(shared, FMLAI_TILE_ROWS);
    plan->block_heads = (int32_t)ceil_div(shared, plan->head_blocks);
    plan->block_tokens = 1;
    plan->token_blocks = p->num_tokens;
    if (p->main.kind == FMLAI_LIST_PAGED && p->extra.kind == FMLAI_LIST_NONE && plan->head_blocks == 1) {
        plan->block_tokens = (int32_t)min64(FMLAI_TILE_ROWS / shared, p->s_q);
    }
    if (plan->block_tokens > 1) {
        plan->token_blocks = p->cu_seqlens_q
                                 ? fmlai_ragged_blocks(p->batch, p->num_tokens, plan->block_tokens)
                                 : p->num_tokens / p->s_q * ceil_div(p->s_q, plan->block_tokens);
    }
    plan->blocks = plan->token_blocks * p->h_kv * plan->head_blocks;
    plan->rows = plan->block_tokens * plan->block_heads;
}

/* Goes through a worker's memory; with base NULL it only measures. */
static size_t lay_out_scratch(const fmlai_mqa_plan *plan, uint8_t *base)
{
    const fmlai_mqa *p = plan->p;
    const fmlai_tile_kernels *k = plan->kernels;
    size_t tile_element = k->dtype == FMLA_BF16 ? sizeof(uint16_t) : sizeof(float);
    size_t rows = (size_t)plan->rows, tokens = (size_t)k->tile_tokens;
    size_t sizes[] = {
        sizeof(fmlai_mqa_scratch),
        rows * (size_t)p->d_qk * sizeof(float),
        k->packed_rows_bytes(plan->rows, p->d_qk),
        tokens * (size_t)fmlai_tile_stride(k->dtype, p->d_qk) * tile_element,
        tokens * (size_t)fmlai_tile_lanes(plan->rows) * sizeof(float),
        k->packed_weights_bytes(plan->rows, k->tile_tokens),
        FMLAI_MQA_FOLD_ROWS * (size_t)p->d_v * sizeof(float),
        plan->partial_bytes,
        sizeof(fmlai_mqa_total) + (size_t)plan->total_rows * (size_t)p->d_v * sizeof(double),
    };
    enum { COUNT = sizeof sizes / sizeof sizes[0] };
    uint8_t *at[COUNT];
    size_t offset = 0;
    for (int32_t i = 0; i < COUNT; i++) {
        at[i] = base ? base + offset : NULL;
        offset += lines(sizes[i]);
    }
    if (base) {
        fmlai_mqa_scratch *s = (fmlai_mqa_scratch *)at[0];
        s->query = (float *)at[1];
        s->packed_rows = at[2];
        s->tile = at[3];
        s->scores = (float *)at[4];
        s->packed_weights = at[5];
        s->out = (float *)at[6];
        s->partial = (fmlai_mqa_partial *)at[7];
        s->total = (fmlai_mqa_total *)at[8];
        size_t used = (size_t)p->d_qk * tile_element, stride = (size_t)plan->tile_stride * tile_element;
        /* Columns d_qk..tile_stride-1 stay zero. If there are none, the tile has perhaps never been touched, and memset
         * of nothing takes 0.15 us there: its masked stores fault silently. */
        for (size_t t = 0; used < stride && t < tokens; t++) {
            memset((uint8_t *)s->tile + t * stride + used, 0, stride - used);
        }
    }
    return offset;
}

static bool is_f16(const fmlai_token_list *list)
{
    return list->kind != FMLAI_LIST_NONE && list->pool.format.element == FMLA_F16;
}

/* Sizes that follow from the rows of a block. */
static void set_bytes(fmlai_mqa_plan *plan)
{
    size_t sums = (size_t)plan->rows * (size_t)plan->p->d_v;
    plan->partial_bytes =
        lines(sizeof(fmlai_mqa_partial) + plan->kernels->packed_sums_bytes(plan->rows, plan->p->d_v));
    plan->total_bytes = lines(sizeof(fmlai_mqa_total) + sums * sizeof(double));
    plan->scratch_bytes = lay_out_scratch(plan, NULL);
}

static int64_t most_slots(const fmlai_mqa_plan *plan, int64_t blocks)
{
    int64_t threads = plan->cpu->threads, slots = threads * SLOTS_PER_THREAD;
    slots = slots < SLOTS_MIN ? ceil_div(SLOTS_MIN, threads) * threads : slots;
    return min64(slots + 1, blocks * plan->max_chunks); /* a list's first two chunks are half as long as others */
}

static size_t table_bytes(int64_t slots, int64_t blocks)
{
    return lines((size_t)(slots + blocks) * sizeof(fmlai_mqa_task)) +
           lines((size_t)(blocks + 1) * sizeof(fmlai_mqa_join));
}

/* What calls of these shapes or smaller ones need. A plan itself may need less than that of a smaller call:
 * heads are cut evenly (129 into 65 and 64), and splitting ends when there are blocks enough; a size that is
 * asked for may not. */
static size_t most_bytes(const fmlai_mqa_plan *plan)
{
    const fmlai_mqa *p = plan->p;
    fmlai_mqa_plan most = *plan;
    bool many = p->main.kind == FMLAI_LIST_PAGED && p->extra.kind == FMLAI_LIST_NONE;
    int64_t tokens = many ? min64(p->s_q, FMLAI_TILE_ROWS) : 1, threads = plan->cpu->threads;
    most.rows = (int32_t)min64(p->h_q / p->h_kv * tokens, FMLAI_TILE_ROWS);
    most.total_rows = plan->max_chunks > 1 ? most.rows : (int32_t)min64(most.rows, FMLAI_MQA_FOLD_ROWS);
    set_bytes(&most);
    size_t bytes = most.scratch_bytes * (size_t)threads;
    if (threads > 1 && plan->max_chunks > 1) {
        int64_t blocks = min64(plan->blocks, threads * SPLIT_BELOW_BLOCKS), slots = most_slots(plan, blocks);
        bytes += (size_t)slots * most.partial_bytes + 2 * most.total_bytes + table_bytes(slots, blocks);
    }
    return bytes;
}

/* Tokens of a plain bf16 cache can be multiplied where they lie, if the tier takes tiles in parts. All parts of a tile
 * have one stride, the main cache's, which is to be none for which a tile has no room. */
static void keep_in_place(fmlai_mqa_plan *plan)
{
    const fmlai_mqa *p = plan->p;
    const fmlai_pool *main = &p->main.pool, *extra = &p->extra.pool;
    int64_t stride = main->token_stride / 2;
    plan->in_place[0] = plan->kernels->scores_of_parts && main->format.format == FMLA_KV_BF16 && p->d_qk % 32 == 0 &&
                        main->token_stride % 2 == 0 && stride >= p->d_qk && stride <= plan->tile_stride;
    if (plan->in_place[0]) {
        plan->tile_stride = stride;
        plan->in_place[1] = p->extra.kind != FMLAI_LIST_NONE && extra->format.format == FMLA_KV_BF16 &&
                            extra->token_stride == main->token_stride;
    }
}

void fmlai_cpu_mqa_plan_make(fmlai_mqa_plan *plan, const fmlai_cpu *cpu, const fmlai_mqa *p)
{
    bool f16 = p->q.dtype != FMLA_BF16 || is_f16(&p->main) || is_f16(&p->extra);
    memset(plan, 0, sizeof *plan);
    plan->cpu = cpu;
    plan->p = p;
    plan->kernels = f16 ? &cpu->tile_f32 : &cpu->tile_bf16;
    plan->tile_stride = fmlai_tile_stride(plan->kernels->dtype, p->d_qk);
    keep_in_place(plan);
    const fmlai_expand *table =
        plan->kernels->dtype == FMLA_BF16 ? cpu->quant.expand_bf16 : cpu->quant.expand_f32;
    plan->expand[0] = fmlai_expand_for(table, &p->main.pool);
    plan->expand[1] = p->extra.kind == FMLAI_LIST_NONE ? NULL : fmlai_expand_for(table, &p->extra.pool);
    cut_blocks(plan);

    plan->max_chunks = fmlai_plan_chunks(most_entries(&p->main) + most_entries(&p->extra));
    plan->split =
        cpu->threads > 1 && plan->max_chunks > 1 && plan->blocks < (int64_t)cpu->threads * SPLIT_BELOW_BLOCKS;
    bool all_rows = plan->max_chunks > 1 && !plan->split;
    plan->total_rows = all_rows ? plan->rows : (int32_t)min64(plan->rows, FMLAI_MQA_FOLD_ROWS);
    set_bytes(plan);
    if (plan->split) {
        plan->slots = most_slots(plan, plan->blocks);
    }
    plan->workspace_bytes = most_bytes(plan);
}

fmlai_mqa_scratch *fmlai_cpu_mqa_scratch_of(const fmlai_mqa_plan *plan, int32_t worker)
{
    uint8_t *base = plan->workspace + (size_t)worker * plan->scratch_bytes;
    fmlai_mqa_scratch *scratch = (fmlai_mqa_scratch *)base;
    if (!scratch->ready) {
        lay_out_scratch(plan, base);
        scratch->packed_block = -1;
        scratch->ready = true;
    }
    return scratch;
}

fmlai_mqa_partial *fmlai_cpu_mqa_slot(const fmlai_mqa_plan *plan, int64_t slot)
{
    uint8_t *base = plan->workspace + plan->scratch_bytes * (size_t)plan->cpu->threads;
    return (fmlai_mqa_partial *)(base + (size_t)slot * plan->partial_bytes);
}

fmlai_mqa_total *fmlai_cpu_mqa_carry(const fmlai_mqa_plan *plan, int32_t which)
{
    uint8_t *base = (uint8_t *)fmlai_cpu_mqa_slot(plan, plan->slots);
    return (fmlai_mqa_total *)(base + (size_t)which * plan->total_bytes);
}

void *fmlai_cpu_mqa_table(const fmlai_mqa_plan *plan)
{
    return fmlai_cpu_mqa_carry(plan, 2);
}

void fmlai_cpu_mqa_block_at(const fmlai_mqa_plan *plan, int64_t index, fmlai_mqa_block *block)
{
    const fmlai_mqa *p = plan->p;
    int64_t part = index % ((int64_t)p->h_kv * plan->head_blocks);
    int64_t along = index / ((int64_t)p->h_kv * plan->head_blocks);
    int32_t shared = p->h_q / p->h_kv;
    int32_t head = (int32_t)(part % plan->head_blocks) * plan->block_heads; /* within the KV head */

    memset(block, 0, sizeof *block);
    block->index = index;
    block->kv_head = (int32_t)(part / plan->head_blocks);
    block->head = block->kv_head * shared + head;
    block->heads = (int32_t)min64(plan->block_heads, shared - head);
    if (plan->block_tokens == 1) {
        block->token = along;
        block->tokens = 1;
        block->request = fmlai_mqa_request(p, along);
        return;
    }
    fmlai_ragged_block at;
    int64_t queries, begin;
    if (p->cu_seqlens_q) {
        at = fmlai_ragged_block_at(p->cu_seqlens_q, p->batch, plan->block_tokens, along);
        begin = p->cu_seqlens_q[at.request];
        queries = p->cu_seqlens_q[at.request + 1] - begin;
    } else {
        int64_t per_request = ceil_div(p->s_q, plan->block_tokens);
        at.request = along / per_request;
        at.first = along % per_request * plan->block_tokens;
        begin = at.request * p->s_q;
        queries = p->s_q;
    }
    block->request = at.request;
    block->token = begin + at.first;
    block->tokens = at.first < queries ? (int32_t)min64(plan->block_tokens, queries - at.first) : 0;
}
