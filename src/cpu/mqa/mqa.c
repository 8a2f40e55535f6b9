/* SPDX-License-Identifier: MIT */
/*
 * mqa.c: carries out fmlai_mqa on a CPU: by blocks, or by chunks in waves (see mqa_plan.c).
 */
#include <string.h>

#include "mqa.h"


#define JOIN_PARTS (FMLAI_TILE_ROWS / FMLAI_MQA_FOLD_ROWS) /* tasks of a join, FMLAI_MQA_FOLD_ROWS rows each */

static int32_t rows_from(int32_t row, int32_t rows)
{
    return rows - row < FMLAI_MQA_FOLD_ROWS ? rows - row : FMLAI_MQA_FOLD_ROWS;
}

/* Chunk number `chunk` of a block, from the cursor on, into `partial`. all: the worker goes through all chunks of the
 * block. */
static void run_chunk(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_cursor *cursor,
                      int64_t chunk, bool all, fmlai_mqa_scratch *scratch, fmlai_mqa_partial *partial)
{
    int64_t limit = fmlai_plan_chunk_begin(chunk + 1) - fmlai_plan_chunk_begin(chunk);
    bool fetched = all && chunk > 0 && scratch->tokens.known > scratch->tokens.count;
    fmlai_cpu_mqa_gather(plan, block, cursor, limit, all ? plan->kernels->tile_tokens : 0, &scratch->tokens);
    if (scratch->tokens.count > 0 && scratch->packed_block != block->index) {
        int32_t rows = block->tokens * block->heads;
        fmlai_cpu_mqa_load_query(plan, block, scratch);
        plan->kernels->pack_rows(scratch->packed_rows, scratch->query, plan->p->d_qk, rows, plan->p->d_qk);
        scratch->packed_block = block->index;
    }
    fmlai_cpu_mqa_chunk(plan, block, scratch, partial, fetched);
}

/* All of a block. One of one chunk is finished out of a few rows of total; a longer one keeps all rows. */
static void run_block(const fmlai_mqa_plan *plan, int64_t index, fmlai_mqa_scratch *scratch)
{
    fmlai_mqa_total *total = scratch->total;
    fmlai_mqa_cursor cursor = {0, 0};
    fmlai_mqa_block block;
    bool first = true, last = false;

    fmlai_cpu_mqa_block_at(plan, index, &block);
    if (block.tokens == 0) {
        return;
    }
    fmlai_cpu_mqa_measure(plan, &block, scratch->bound);
    int32_t rows = block.tokens * block.heads;
    for (int64_t chunk = 0; !last; chunk++) {
        run_chunk(plan, &block, &cursor, chunk, true, scratch, scratch->partial);
        last = cursor.list == 2;
        for (int32_t r = 0, n; r < rows; r += n) {
            int32_t at = first && last ? 0 : r;
            n = rows_from(r, rows);
            if (first) {
                memset(total->l + at, 0, (size_t)n * sizeof *total->l);
            }
            fmlai_cpu_mqa_fold(plan, total, at, scratch->partial, NULL, rows, r, n, scratch->out);
            for (int32_t i = 0; last && i < n; i++) {
                fmlai_cpu_mqa_finish(plan, &block, r + i, total, at + i, scratch->out);
            }
        }
        first = false;
    }
}

static void block_task(void *user, int64_t i, int32_t worker)
{
    const fmlai_mqa_plan *plan = user;
    run_block(plan, i, fmlai_cpu_mqa_scratch_of(plan, worker));
}

typedef struct wave {
    const fmlai_mqa_plan *plan;
    fmlai_mqa_task *tasks;
    fmlai_mqa_join *joins;
    int64_t task_count;
    int64_t join_count;
    int64_t block; /* the next block and chunk to hand out */
    int64_t chunk;
    int32_t carry; /* holds the block of which chunks 0..chunk-1 are done */
} wave;

static void chunk_task(void *user, int64_t i, int32_t worker)
{
    const wave *w = user;
    const fmlai_mqa_plan *plan = w->plan;
    const fmlai_mqa_task *task = &w->tasks[i];
    fmlai_mqa_scratch *scratch = fmlai_cpu_mqa_scratch_of(plan, worker);
    fmlai_mqa_cursor cursor = {0, 0};
    fmlai_mqa_block block;

    if (task->slot < 0) {
        run_block(plan, task->block, scratch);
        return;
    }
    fmlai_cpu_mqa_block_at(plan, task->block, &block);
    fmlai_cpu_mqa_measure(plan, &block, scratch->bound);
    fmlai_cpu_mqa_skip(plan, &block, &cursor, fmlai_plan_chunk_begin(task->chunk));
    run_chunk(plan, &block, &cursor, task->chunk, false, scratch, fmlai_cpu_mqa_slot(plan, task->slot));
}

static void move_row(fmlai_mqa_total *dst, int32_t dst_row, const fmlai_mqa_total *src, int32_t src_row,
                     int32_t d_v)
{
    dst->m[dst_row] = src->m[src_row];
    dst->l[dst_row] = src->l[src_row];
    memcpy(dst->o + (int64_t)dst_row * d_v, src->o + (int64_t)src_row * d_v, (size_t)d_v * sizeof(double));
}

static void join_task(void *user, int64_t i, int32_t worker)
{
    const wave *w = user;
    const fmlai_mqa_plan *plan = w->plan;
    const fmlai_mqa_join *join = &w->joins[i / JOIN_PARTS];
    fmlai_mqa_scratch *scratch = fmlai_cpu_mqa_scratch_of(plan, worker);
    fmlai_mqa_total *total = scratch->total;
    int32_t row = (int32_t)(i % JOIN_PARTS) * FMLAI_MQA_FOLD_ROWS, d_v = plan->p->d_v;
    fmlai_mqa_block block;

    fmlai_cpu_mqa_block_at(plan, join->block, &block);
    int32_t rows = block.tokens * block.heads, n = rows_from(row, rows);
    memset(total->l, 0, FMLAI_MQA_FOLD_ROWS * sizeof *total->l);
    for (int32_t r = 0; join->carry_in >= 0 && r < n; r++) {
        move_row(total, r, fmlai_cpu_mqa_carry(plan, join->carry_in), row + r, d_v);
    }
    for (int64_t c = 0; n > 0 && c < join->chunks; c++) {
        const fmlai_mqa_partial *partial = fmlai_cpu_mqa_slot(plan, join->slot + c), *next = NULL;
        if (c + 1 < join->chunks) {
            next = fmlai_cpu_mqa_slot(plan, join->slot + c + 1);
        }
        fmlai_cpu_mqa_fold(plan, total, 0, partial, next, rows, row, n, scratch->out);
    }
    for (int32_t r = 0; r < n; r++) {
        if (join->carry_out >= 0) {
            move_row(fmlai_cpu_mqa_carry(plan, join->carry_out), row + r, total, r, d_v);
        } else {
            fmlai_cpu_mqa_finish(plan, &block, row + r, total, r, scratch->out);
        }
    }
}

/* How many of the `left` chunks of its block a wave with `room` for them takes: where the block is cut, as many as keep
 * all threads busy to the end. The two short chunks at a list's begin count as one. */
static int64_t wave_chunks(const wave *w, int64_t left, int64_t room)
{
    int64_t threads = w->plan->cpu->threads, extra = w->chunk == 0 ? 1 : 0;
    int64_t even = (room - extra) / threads * threads + extra;
    return left <= room ? left : even > extra ? even : room;
}

/* Fills the wave's tables from where the last wave stopped. */
static void next_wave(wave *w)
{
    const fmlai_mqa_plan *plan = w->plan;
    int64_t used = 0;
    w->task_count = 0;
    w->join_count = 0;
    for (; w->block < plan->blocks; w->block++, w->chunk = 0) {
        fmlai_mqa_block block;
        fmlai_cpu_mqa_block_at(plan, w->block, &block);
        if (block.tokens == 0) {
            continue;
        }
        fmlai_cpu_mqa_measure(plan, &block, NULL);
        int64_t chunks = fmlai_plan_chunks(block.count[0] + block.count[1]);
        if (chunks <= 1) {
            w->tasks[w->task_count++] = (fmlai_mqa_task){w->block, 0, -1};
            continue;
        }
        int64_t n = wave_chunks(w, chunks - w->chunk, plan->slots - used);
        bool cut = w->chunk + n < chunks;
        if (n == 0) {
            return;
        }
        w->joins[w->join_count++] = (fmlai_mqa_join){
            .block = w->block,
            .slot = used,
            .chunks = n,
            .carry_in = w->chunk > 0 ? w->carry : -1,
            .carry_out = cut ? 1 - w->carry : -1,
        };
        for (int64_t c = n - 1; c >= 0; c--) { /* the shortest at the end: workers finish together */
            w->tasks[w->task_count++] = (fmlai_mqa_task){w->block, w->chunk + c, used + c};
        }
        used += n;
        if (cut) {
            w->carry = 1 - w->carry;
            w->chunk += n;
            return;
        }
    }
}

size_t fmlai_cpu_mqa_workspace(const void *state, const fmlai_mqa *p)
{
    fmlai_mqa_plan plan;
    fmlai_cpu_mqa_plan_make(&plan, state, p);
    return plan.workspace_bytes;
}

fmla_status fmlai_cpu_mqa(void *state, const fmlai_mqa *p, const fmlai_call *call)
{
    const fmlai_cpu *cpu = state;
    fmlai_mqa_plan plan;
    fmlai_cpu_mqa_plan_make(&plan, cpu, p);
    plan.workspace = call->workspace;
    for (int32_t i = 0; i < cpu->threads; i++) {
        ((fmlai_mqa_scratch *)(plan.workspace + (size_t)i * plan.scratch_bytes))->ready = false;
    }
    if (p->fused.enabled) {
        fmlai_cpu_mqa_clear_padding(p);
    }
    if (!plan.split) {
        fmlai_cpu_run(cpu, plan.blocks, block_task, &plan);
        return FMLA_OK;
    }
    wave w = {.plan = &plan, .tasks = fmlai_cpu_mqa_table(&plan)};
    w.joins = (fmlai_mqa_join *)(w.tasks + plan.slots + plan.blocks);
    while (w.block < plan.blocks) {
        next_wave(&w);
        fmlai_cpu_run(cpu, w.task_count, chunk_task, &w);
        fmlai_cpu_run(cpu, w.join_count * JOIN_PARTS, join_task, &w);
    }
    return FMLA_OK;
}
