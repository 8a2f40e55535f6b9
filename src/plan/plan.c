/* SPDX-License-Identifier: MIT */
/*
 * plan.c: the published split-KV schedule in its three tensor forms. The rule is told in plan.h.
 */
#include "plan.h"

/* Where the walk stands: the next block to hand out, and how many splits of its request came before it. */
typedef struct cursor {
    int64_t request;
    int64_t block;
    int64_t split;
} cursor;

static int64_t clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

static int64_t blocks_of(int64_t tokens)
{
    return tokens / FMLAI_PLAN_BLOCK_TOKENS + (tokens % FMLAI_PLAN_BLOCK_TOKENS != 0);
}

/* Effective length of a request, in tokens. Lengths outside 0..topk are clamped, as the operations do. */
static int64_t length_of(const fmlai_schedule *p, int64_t request)
{
    if (p->seqlens) {
        return clamp(p->seqlens[request], 0, INT32_MAX);
    }
    int64_t length = p->topk_length ? clamp(p->topk_length[request], 0, p->topk) : p->topk;
    length = length < 1 ? 1 : length;
    if (p->extra_topk > 0) {
        int64_t extra = p->extra_topk;
        if (p->extra_topk_length) {
            extra = clamp(p->extra_topk_length[request], 0, p->extra_topk);
        }
        length = blocks_of(length) * FMLAI_PLAN_BLOCK_TOKENS + extra;
    }
    return length;
}

static int64_t blocks_at(const fmlai_schedule *p, int64_t request)
{
    int64_t blocks = blocks_of(length_of(p, request));
    return blocks < 1 && p->form != FMLA_SCHEDULE_2025_02 ? 1 : blocks;
}

static int64_t payload_of(const fmlai_schedule *p)
{
    int64_t total = 0;
    for (int64_t i = 0; i < p->batch; i++) {
        total += blocks_at(p, i) + p->overhead_blocks;
    }
    return total / p->parts + (total % p->parts != 0) + p->overhead_blocks;
}

/* One part's share: moves the cursor on and writes the prefix sums of the requests that it finishes. */
static void take(const fmlai_schedule *p, int64_t budget, cursor *at)
{
    int64_t overhead = p->overhead_blocks;
    while (at->request < p->batch) {
        int64_t rest = blocks_at(p, at->request) - at->block;
        if (budget < rest + overhead) {
            if (budget > overhead) {
                at->block += budget - overhead;
                at->split++;
            }
            return;
        }
        budget -= rest + overhead;
        p->num_splits[at->request + 1] = (int32_t)(p->num_splits[at->request] + at->split + 1);
        *at = (cursor){.request = at->request + 1};
    }
}

/* The row of a part that worked from `begin` to `end`. */
static void write_row(const fmlai_schedule *p, int32_t *row, const cursor *begin, const cursor *end)
{
    bool in_tokens = p->form == FMLA_SCHEDULE_2025_02;
    bool cut = end->block > 0; /* the last request goes on in the next part */
    int64_t unit = in_tokens ? FMLAI_PLAN_BLOCK_TOKENS : 1;
    int64_t last = cut ? end->request : end->request - 1;
    int64_t last_end = end->block * unit;

    if (!cut && last >= 0) {
        int64_t length = length_of(p, last);
        last_end = in_tokens || length == 0 ? length : blocks_at(p, last);
    }
    memset(row, 0, FMLAI_PLAN_COLUMNS * sizeof *row);
    row[0] = (int32_t)begin->request;
    row[4] = (int32_t)begin->split;
    row[3] = (int32_t)last_end;
    if (p->form == FMLA_SCHEDULE_2026_01) {
        bool same = begin->request == last;
        row[1] = (int32_t)last;
        row[2] = (int32_t)begin->block;
        row[5] = begin->block > 0 || (same && cut);
        row[6] = cut || (same && begin->block > 0);
    } else {
        row[1] = (int32_t)(begin->block * unit);
        row[2] = (int32_t)last;
    }
}

fmla_status fmlai_plan_schedule(const fmlai_schedule *p, fmlai_error *error)
{
    int64_t padded = p->extra_topk > 0 ? FMLAI_PLAN_BLOCK_TOKENS : 0;
    if (!p->seqlens && (p->topk > INT32_MAX || p->extra_topk > INT32_MAX - padded - p->topk)) {
        return fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT,
                          "topk %lld and extra_topk %lld together must be below 2^31", (long long)p->topk,
                          (long long)p->extra_topk);
    }
    int64_t payload = payload_of(p);
    cursor at = {0};

    p->num_splits[0] = 0;
    for (int64_t part = 0; part < p->parts; part++) {
        cursor begin = at;
        take(p, payload, &at);
        write_row(p, p->metadata + part * p->metadata_stride, &begin, &at);
    }
    return FMLA_OK;
}
