/* SPDX-License-Identifier: MIT */
/*
 * mqa_gather.c: the attended tokens of a block, as slots, in the order of its lists: main, then extra.
 * Entries that are not attended leave no trace. Block table entries beyond the counted tokens are never read.
 */
#include "mqa.h"

static const fmlai_token_list *list_of(const fmlai_mqa *p, int32_t which)
{
    return which == 0 ? &p->main : &p->extra;
}

void fmlai_cpu_mqa_measure(const fmlai_mqa_plan *plan, fmlai_mqa_block *block, int64_t *bound)
{
    const fmlai_mqa *p = plan->p;
    block->count[0] = 0;
    block->count[1] = p->extra.kind == FMLAI_LIST_NONE ? 0 : fmlai_list_count(&p->extra, p, block->token);
    for (int32_t t = 0; t < block->tokens; t++) {
        int64_t count = fmlai_list_count(&p->main, p, block->token + t);
        block->count[0] = count > block->count[0] ? count : block->count[0];
        for (int32_t h = 0; bound && h < block->heads; h++) {
            bound[t * block->heads + h] = count;
        }
    }
}

/* A walk collects tokens up to `limit`; without slots it only counts them. */
typedef struct walk {
    int64_t found;
    int64_t limit;
    int64_t *slots;
    int64_t *entries;
} walk;

/* Page by page: all tokens of a page are attended, or (a table entry that names no page) none. */
static int64_t walk_paged(const fmlai_token_list *list, const fmlai_mqa_block *block, int64_t next, walk *w)
{
    int64_t page_size = list->pool.page_size;
    while (next < block->count[0] && w->found < w->limit) {
        int64_t i = next / page_size, offset = next % page_size;
        int64_t page = list->block_table ? list->block_table[block->request * list->table_stride + i]
                                         : block->request * list->max_pages + i;
        int64_t run = page_size - offset;
        run = run < block->count[0] - next ? run : block->count[0] - next;
        if (page < 0 || page >= list->pool.num_pages) {
            next += run;
            continue;
        }
        run = run < w->limit - w->found ? run : w->limit - w->found;
        for (int64_t j = 0; w->slots && j < run; j++) {
            w->slots[w->found + j] = page * page_size + offset + j;
            w->entries[w->found + j] = next + j;
        }
        w->found += run;
        next += run;
    }
    return next;
}

#define RUN 64 /* entries that are looked at together */

/* How many of RUN entries are attended: loops that compilers turn into vectors. */
static int64_t attended_in_run(const int32_t *row, uint32_t pool)
{
    int32_t n = 0;
    for (int32_t i = 0; i < RUN; i++) {
        n += (uint32_t)row[i] < pool;
    }
    return n;
}

/* Goes over whole runs of entries, as far as they need no second look: those that are only counted, and those that are
 * all attended. */
static int64_t walk_runs(const int32_t *row, uint32_t pool, int64_t count, int64_t next, walk *w)
{
    for (; next + RUN <= count && w->found + RUN <= w->limit; next += RUN) {
        int64_t n = attended_in_run(row + next, pool);
        if (w->slots && n < RUN) {
            return next;
        }
        for (int32_t i = 0; w->slots && i < RUN; i++) {
            w->slots[w->found + i] = row[next + i];
            w->entries[w->found + i] = next + i;
        }
        w->found += n;
    }
    return next;
}

static int64_t walk_indexed(const fmlai_mqa *p, const fmlai_token_list *list, const fmlai_mqa_block *block,
                            int64_t count, int64_t next, walk *w)
{
    const int32_t *row = list->indices + block->token / p->s_q * list->index_outer +
                         block->token % p->s_q * list->index_inner + block->kv_head * list->index_head;
    /* Slots below num_pages * page_size exist; entries are int32, so a product beyond them may be cut to
     * 2^31. A negative entry is none of them either, without its sign. */
    uint32_t pool = list->pool.num_pages > INT32_MAX / list->pool.page_size
                        ? (uint32_t)1 << 31
                        : (uint32_t)(list->pool.num_pages * list->pool.page_size);
    while (next < count && w->found < w->limit) {
        next = walk_runs(row, pool, count, next, w);
        for (int64_t end = next + RUN; next < end && next < count && w->found < w->limit; next++) {
            if (w->slots) {
                w->slots[w->found] = row[next]; /* overwritten by the next if not attended */
                w->entries[w->found] = next;
            }
            w->found += (uint32_t)row[next] < pool;
        }
    }
    return next;
}

/* Goes on in the cursor's list; at its end, to the next list that has entries. list == 2: there is none. */
static void walk_on(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_cursor *cursor,
                    walk *w)
{
    const fmlai_token_list *list = list_of(plan->p, cursor->list);
    int64_t count = block->count[cursor->list];
    if (count > 0 && list->kind == FMLAI_LIST_PAGED) {
        cursor->next = walk_paged(list, block, cursor->next, w);
    } else if (count > 0) {
        cursor->next = walk_indexed(plan->p, list, block, count, cursor->next, w);
    }
    while (cursor->list < 2 && cursor->next >= block->count[cursor->list]) {
        cursor->list++;
        cursor->next = 0;
    }
}

void fmlai_cpu_mqa_skip(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_cursor *cursor,
                        int64_t count)
{
    walk w = {.limit = count};
    while (cursor->list < 2 && w.found < w.limit) {
        walk_on(plan, block, cursor, &w);
    }
}

/* Until the walk is at its limit; counts those of main. */
static void collect(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_cursor *cursor, walk *w,
                    fmlai_mqa_tokens *tokens)
{
    while (cursor->list < 2 && w->found < w->limit) {
        bool main = cursor->list == 0;
        walk_on(plan, block, cursor, w);
        tokens->main_count = main ? (int32_t)w->found : tokens->main_count;
    }
}

void fmlai_cpu_mqa_gather(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_cursor *cursor,
                          int64_t limit, int64_t ahead, fmlai_mqa_tokens *tokens)
{
    walk w = {.limit = limit, .slots = tokens->slots, .entries = tokens->entries};
    tokens->main_count = 0;
    collect(plan, block, cursor, &w, tokens);
    tokens->count = (int32_t)w.found;
    fmlai_mqa_cursor next = *cursor;
    w.limit = limit + ahead;
    collect(plan, block, &next, &w, tokens);
    tokens->known = (int32_t)w.found;
}
