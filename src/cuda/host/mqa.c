/* SPDX-License-Identifier: MIT */
/*
 * mqa.c: how attention over token lists is launched: which kernel, how many token tiles in flight, how the lists are
 * cut. Everything is decided from shapes; lengths are met on the device (common/work.cuh).
 */
#include <stddef.h>

#include "cuda_host.h"

#define UNITS_MAX       16384           /* the plan kernel's: beyond it every unit is a block's own */
#define PIECE_TOKENS    256             /* least length of a piece of a cut list */
#define MANY_PIECES     8               /* of a unit on average: the combine kernel for many pieces */
#define ROWS_LEAST      16              /* of a block */
#define ROWS_ALONE      64              /* of Hopper's kernels but pairs, at most */
#define OVERHEAD_TOKENS 256             /* what beginning and ending a piece costs, in tokens */
#define COST_MAX        (INT32_MAX / 2) /* of all units together: the kernels count in 32 bits */
#define COMBINE_TIME    12000           /* what cutting costs beside the pieces: the combine kernel, nanoseconds */
/* Of small calls, in nanoseconds: a row that is exchanged within a cluster, a row of a partial result, and what the
 * combine kernel costs there beside the shorter way to the pieces that clusters have. */
#define CLUSTER_ROW_TIME   80
#define PARTIAL_ROW_TIME   36
#define SMALL_COMBINE_TIME 9000
/* What cutting and joining follow from (common/work.cuh); may be set for experiments. */
#ifndef FMLAC_JOIN_PS
#define FMLAC_JOIN_PS 800 /* writing and reading a row of a partial result, in all multiprocessors, picoseconds */
#endif
#ifndef FMLAC_JOIN_LISTS
#define FMLAC_JOIN_LISTS 2 /* parts for a list, at most, where blocks join the pieces of lists by themselves */
#endif
#ifndef FMLAC_WHOLE_TOKENS
#define FMLAC_WHOLE_TOKENS 192 /* lists no longer than that are not cut */
#endif

extern void fmlak_mqa_bf16_16x32_sm80(void);
extern void fmlak_mqa_bf16_32x16_sm80(void);
extern void fmlak_mqa_bf16_32x32_sm80(void);
extern void fmlak_mqa_bf16_64x32_sm80(void);
extern void fmlak_mqa_bf16_64x64_sm80(void);
extern void fmlak_mqa_f16_16x32_sm80(void);
extern void fmlak_mqa_f16_32x16_sm80(void);
extern void fmlak_mqa_f16_32x32_sm80(void);
extern void fmlak_mqa_f16_64x32_sm80(void);
extern void fmlak_mqa_f16_64x64_sm80(void);
extern void fmlak_mqa_codes_16x16_sm80(void);
extern void fmlak_mqa_codes_32x16_sm80(void);
extern void fmlak_mqa_codes_32x32_sm80(void);
extern void fmlak_mqa_codes_64x16_sm80(void);
extern void fmlak_mqa_codes_64x32_sm80(void);
extern void fmlak_mqa_any_sm80(void);
extern void fmlak_mqa_plan_sm80(void);
extern void fmlak_mqa_combine_sm80(void);
extern void fmlak_mqa_combine_many_sm80(void);

#define KERNEL(name, dtype, rows, tokens, warps, kib)                                                                  \
    {                                                                                                                  \
        fmlak_mqa_##name##_##rows##x##tokens##_sm80, "fmlak_mqa_" #name "_" #rows "x" #tokens "_sm80", dtype, rows,    \
            tokens, warps, kib, 0                                                                                      \
    }

/* In order of preference: the first that fits the shared memory and holds the rows, else the first of the most rows. */
static const fmlac_kernel kernels[] = {
    KERNEL(bf16, FMLA_BF16, 16, 32, 8, 99),   KERNEL(bf16, FMLA_BF16, 32, 32, 12, 163),
    KERNEL(bf16, FMLA_BF16, 64, 64, 12, 227), KERNEL(bf16, FMLA_BF16, 64, 32, 12, 163),
    KERNEL(bf16, FMLA_BF16, 32, 16, 12, 99),  KERNEL(f16, FMLA_F16, 16, 32, 8, 99),
    KERNEL(f16, FMLA_F16, 32, 32, 12, 163),   KERNEL(f16, FMLA_F16, 64, 64, 12, 227),
    KERNEL(f16, FMLA_F16, 64, 32, 12, 163),   KERNEL(f16, FMLA_F16, 32, 16, 12, 99),
};

static const fmlac_kernel code_kernels[] = {
    KERNEL(codes, FMLA_BF16, 16, 16, 6, 99),   KERNEL(codes, FMLA_BF16, 32, 32, 12, 163),
    KERNEL(codes, FMLA_BF16, 64, 32, 12, 227), KERNEL(codes, FMLA_BF16, 64, 16, 12, 163),
    KERNEL(codes, FMLA_BF16, 32, 16, 12, 99),
};

static size_t round_up(size_t x, size_t unit)
{
    return (x + unit - 1) / unit * unit;
}

static bool is_quantised(const fmlac_list *list)
{
    return list->kind != FMLAC_LIST_NONE && list->pool.layout != FMLAC_LAYOUT_PLAIN;
}

/* Whether the tiled kernels can read a pool. */
static bool pool_tiles(const fmlac_list *list, int32_t q_dtype)
{
    const fmlac_pool *pool = &list->pool;
    if (list->kind == FMLAC_LIST_NONE) {
        return true;
    }
    if (pool->layout == FMLAC_LAYOUT_PLAIN) {
        return pool->element == q_dtype;
    }
    return q_dtype == FMLAC_BF16 && (pool->element == FMLAC_F8_E4M3 || pool->element == FMLAC_F4_E2M1) &&
           pool->group_shift >= 4 && pool->quant_dims % 16 == 0 && pool->quant_dims <= FMLAC_OUT_COLUMNS &&
           pool->rope_dims % 16 == 0 && pool->rope_offset % 8 == 0 &&
           pool->d_qk == pool->quant_dims + pool->rope_dims && pool->raw_at >= 0 && pool->raw_at % 8 == 0 &&
           pool->raw_at + round_up((size_t)pool->data_row_bytes, 16) + round_up((size_t)pool->scale_row_bytes, 16) <=
               FMLAC_MQA_PITCH &&
           (pool->scale != FMLAC_F32 || pool->scale_offset % 4 == 0);
}

/* Whether 16-byte copies may take a pool's tokens into tiles. */
static bool copies_align(const fmlac_list *list)
{
    return list->kind == FMLAC_LIST_NONE || (list->pool.aligned && list->pool.raw_at % 16 == 0);
}

/* Whether a pool's codes are expanded in straight code; rows of tiles have no zeros behind their dims then. */
static int32_t straight_of(const fmlac_pool *pool, int32_t row_bytes)
{
    if (pool->layout == FMLAC_LAYOUT_PLAIN || !pool->aligned || pool->outer_scale != 1.0f || pool->raw_at % 16 != 0 ||
        pool->rope_dims % 8 != 0 || 2 * pool->d_qk != row_bytes) {
        return FMLAC_STRAIGHT_NONE;
    }
    bool e4m3 = pool->element == FMLAC_F8_E4M3 && (pool->scale == FMLAC_F32 || pool->scale == FMLAC_F8_E8M0);
    bool e2m1 = pool->element == FMLAC_F4_E2M1 && pool->scale == FMLAC_F8_E4M3;
    return e4m3 ? FMLAC_STRAIGHT_E4M3 : e2m1 ? FMLAC_STRAIGHT_E2M1 : FMLAC_STRAIGHT_NONE;
}

/* Where a block's shared memory goes; see sm80/mqa_shared.cuh. Tiles come first, output rows take their place. */
static fmlac_places places_of(const fmlac_kernel *k, const fmlac_mqa *p, int stages)
{
    const int ring = 2 * stages, row = FMLAC_MQA_PITCH, staged = k->rows * (FMLAC_OUT_COLUMNS + 8) * 4;
    fmlac_places at = {.tiles = k->rows * row};
    at.top = at.tiles + stages * k->tokens * row;
    at.top = at.top < staged ? staged : at.top;
    at.shrink = at.top + 2 * FMLAC_TOKEN_GROUPS * k->rows * 4;
    at.factor = at.shrink + stages * k->rows * 4;
    at.seen = at.factor + k->rows * 4;
    at.address = at.seen + k->rows * 4;
    at.scale = at.address + ring * k->tokens * 8;
    at.mask = at.scale + (p->quantised ? ring * k->tokens * 8 : 0);
    at.barriers = at.mask + ring * 8;
    at.work = at.barriers + (3 * stages + 1 + (p->quantised ? FMLAC_SUMMING_WARPS : 0)) * 8;
    at.bytes = at.work + FMLAC_WORK_BYTES + (FMLAC_OWN_UNITS + 1 + FMLAC_SCORING_WARPS * 32) * 4 + FMLAC_NAMED_BYTES;
    return at;
}

/* Slots of tiles that a kernel was made for (sm80/mqa_*.cu); 0: as many as there is room for. */
static int slots_of(const fmlac_kernel *k, bool quantised)
{
    return k->rows != 64 || k->shared_kib != 227 ? 0 : quantised ? 3 : 2;
}

/* The kernels for quantised tokens, or for others. */
static const fmlac_kernel *table_of(bool quantised, size_t *count)
{
    *count = quantised ? sizeof code_kernels / sizeof *code_kernels : sizeof kernels / sizeof *kernels;
    return quantised ? code_kernels : kernels;
}

/* Whether the other table has a kernel with the same tiles: then both give the same bits for the same numbers. */
static bool has_twin(const fmlac_state *state, const fmlac_kernel *k, bool quantised)
{
    size_t count;
    const fmlac_kernel *table = table_of(!quantised, &count);
    for (const fmlac_kernel *other = table; other < table + count; other++) {
        if (other->dtype == k->dtype && other->rows == k->rows && other->tokens == k->tokens &&
            other->shared_kib * 1024 <= state->shared_block) {
            return true;
        }
    }
    return false;
}

/* The fused operations: decode on quantised tokens equals prefill on those tokens in bf16. */
static const fmlac_kernel *choose(const fmlac_state *state, const fmlac_mqa *p, int64_t rows)
{
    const fmlac_kernel *best = NULL;
    size_t count;
    const fmlac_kernel *table = table_of(p->quantised, &count);
    for (const fmlac_kernel *k = table; k < table + count; k++) {
        if ((int)k->dtype != p->q.dtype || k->shared_kib * 1024 > state->shared_block ||
            places_of(k, p, 2).bytes > state->shared_block || (p->fused.enabled && !has_twin(state, k, p->quantised))) {
            continue;
        }
        if (!best || (best->rows < rows && k->rows > best->rows)) {
            best = k;
        }
    }
    return best;
}

/* Rows that share a list, at most. Ragged batches: the average; batch-invariant ones: those of one query token. */
static int64_t rows_of_unit(const fmlai_mqa *p)
{
    int64_t group = p->h_q / p->h_kv;
    if (p->main.kind != FMLAI_LIST_PAGED) {
        return group;
    }
    int64_t average = p->batch_invariant ? 1 : fmlac_ceil(p->num_tokens, p->batch > 0 ? p->batch : 1);
    int64_t queries = p->cu_seqlens_q ? average : p->s_q;
    return group * (queries > 0 ? queries : 1);
}

typedef struct decision {
    const fmlac_kernel *kernel; /* NULL: the kernel for anything */
    size_t shared;
    int64_t slots; /* blocks that run at a time */
    bool may_cut;
    bool hopper;
} decision;

static decision decide_kernel(const fmlac_state *state, const fmlai_mqa *from, fmlac_mqa *p)
{
    decision d = {.kernel = NULL};
    fmlac_describe_mqa(p, from);
    p->quantised = is_quantised(&p->main) || is_quantised(&p->extra);
    p->aligned = copies_align(&p->main) && copies_align(&p->extra);
    p->row_bytes = p->d_qk <= 512 ? 1024 : 1152;
    p->bulk = FMLAC_BULK_ROWS && state->capability >= 90 && p->aligned && (p->quantised || 2 * p->d_qk == p->row_bytes);
    bool extra = p->extra.kind != FMLAC_LIST_NONE;
    p->scales_elsewhere = p->main.pool.scale_row_bytes > 0 || (extra && p->extra.pool.scale_row_bytes > 0);
    p->straight_extra = extra ? straight_of(&p->extra.pool, p->row_bytes) : FMLAC_STRAIGHT_NONE;
    p->straight = extra && !p->straight_extra ? FMLAC_STRAIGHT_NONE : straight_of(&p->main.pool, p->row_bytes);
    p->straight_extra = p->straight ? p->straight_extra : FMLAC_STRAIGHT_NONE;
    bool mixed = extra && is_quantised(&p->main) != is_quantised(&p->extra);
    if (p->d_qk > 576 || p->d_v > FMLAC_OUT_COLUMNS || mixed || !pool_tiles(&p->main, p->q.dtype) ||
        !pool_tiles(&p->extra, p->q.dtype)) {
        return d;
    }
    const fmlac_kernel *hopper = fmlac_hopper_choose(state, p);
    hopper = from->batch_invariant && fmlac_hopper_few(hopper) ? fmlac_hopper_unpaired(p) : hopper;
    if (hopper) {
        d = (decision){.kernel = hopper,
                       .shared = fmlac_hopper_shared(),
                       .slots = hopper->cluster > 0 ? state->processors / hopper->cluster : state->processors,
                       .may_cut = !from->batch_invariant,
                       .hopper = true};
        p->tile_rows = hopper->rows;
        p->tile_tokens = hopper->tokens;
        return d;
    }
    d.kernel = choose(state, p, rows_of_unit(from));
    if (!d.kernel) {
        return d;
    }
    p->tile_rows = d.kernel->rows;
    p->tile_tokens = d.kernel->tokens;
    /* Two small blocks on a multiprocessor hide each other's beginnings and ends. */
    int limit = state->shared_block, half = state->shared_processor / 2 - 1024;
    bool two = d.kernel->rows == 16 && places_of(d.kernel, p, 2).bytes <= half;
    limit = two && half < limit ? half : limit;
    p->stages = FMLAC_STAGES_MAX;
    while (p->stages > 2 && places_of(d.kernel, p, p->stages).bytes > limit) {
        p->stages--;
    }
    int made_for = slots_of(d.kernel, p->quantised);
    p->stages = made_for > 0 ? made_for : p->stages;
    p->places = places_of(d.kernel, p, p->stages);
    d.shared = (size_t)p->places.bytes;
    d.slots = state->processors * (two ? 2 : 1);
    d.may_cut = !from->batch_invariant && !from->fused.enabled;
    return d;
}

/* A tile's time in nanoseconds, roughly: 64 rows and 64 tokens by each kind of kernel, from rates on an H200. */
static int64_t tile_time(const decision *d, const fmlac_mqa *p)
{
    int64_t codes = fmlac_hopper_few(d->kernel) ? 1900 : d->hopper && d->kernel->cluster > 0 ? 2600 : 3500;
    int64_t whole = d->hopper && p->quantised ? codes : d->hopper ? 1500 : p->quantised ? 7000 : 3300;
    int64_t rows = d->hopper ? 64 : p->tile_rows;
    return whole * rows * p->tile_tokens / 4096;
}

/* Tokens of the longest list that the tensors have room for. */
static int64_t longest_list(const fmlac_mqa *p)
{
    return p->main.kind == FMLAC_LIST_PAGED ? p->main.capacity : p->main.topk + p->extra.topk;
}

/* Lists, and rows that attend each of a KV head, but of ragged batches. */
static int64_t lists_of(const fmlac_mqa *p)
{
    return p->main.kind == FMLAC_LIST_PAGED ? p->batch : p->num_tokens;
}

static int64_t rows_of_list(const fmlac_mqa *p)
{
    return p->h_q / p->h_kv * (p->main.kind == FMLAC_LIST_PAGED ? p->s_q : 1);
}

/* Whether all lists are as long as they can be, whatever the device's tensors hold. */
static bool lists_equal(const fmlac_mqa *p)
{
    return p->main.kind == FMLAC_LIST_INDEXED && !p->main.length.data &&
           (p->extra.kind == FMLAC_LIST_NONE || !p->extra.length.data) && !p->fused.enabled;
}

/* Whether equal lists are done sooner if they are cut into equal parts: else a worker takes one whole list after
 * another, and some take one more than others. */
static bool cutting_pays(const decision *d, const fmlac_mqa *p)
{
    const fmlac_cut *cut = &p->cut;
    int64_t whole = fmlac_ceil(cut->units, cut->parts) * cut->longest;
    int64_t parts = cut->units * cut->longest / cut->parts + cut->overhead + COMBINE_TIME / tile_time(d, p);
    return parts < whole;
}

/* Rows of a block: half of the kernel's and less, if there are no more, so that none are joined that are not there. A
 * row's bits are the same. */
static int32_t rows_of_tile(const decision *d, int64_t rows)
{
    int32_t best = d->kernel->rows;
    if (!d->hopper || d->kernel->cluster > 0 || !d->may_cut) {
        return best;
    }
    while (best > ROWS_LEAST && rows <= best / 2) {
        best /= 2;
    }
    return best;
}

/* Whether the pieces of a list are joined by the blocks that have them (sm90a/join.cuh): kernels that can, and so many
 * lists that few have more than two or three pieces. */
static bool blocks_join(const decision *d, const fmlac_mqa *p)
{
    return d->hopper && d->kernel->cluster == 0 && p->pieces == 0 && p->cut.units * FMLAC_JOIN_LISTS >= p->cut.parts;
}

/* Whether lists may have equal pieces (even_tiles in common/work.cuh): there is but one, or they are equal, and the
 * pieces are not joined by blocks that have some of two lists. */
static bool lists_even(const decision *d, const fmlac_mqa *p)
{
    bool one = p->main.kind == FMLAC_LIST_PAGED && p->batch == 1 && !p->cu_seqlens_q && !p->main.bound.data;
    return d->hopper && d->may_cut && (one || lists_equal(p)) && !blocks_join(d, p);
}

/*
 * The best clusters for lists that are so short, and so few, that a combine kernel would take as long as they: each of
 * the blocks that a cluster has (0: none fits) has a piece of one list for *rows rows. Nanoseconds beyond what any call
 * takes.
 */
static int64_t best_clusters(const fmlac_state *state, const decision *d, const fmlac_mqa *p, int *blocks, int *rows)
{
    int64_t all = rows_of_list(p), lists = lists_of(p) * p->h_kv, best = INT64_MAX;
    int64_t tiles = fmlac_ceil(longest_list(p), p->tile_tokens);
    *blocks = 0;
    for (int i = 0; i < FMLAC_CLUSTERS && fmlac_hopper_together(d->kernel, p) && lists > 0; i++) {
        int64_t columns = state->clusters[i] / lists, most = columns > 0 ? fmlac_ceil(all, columns) : 0;
        int64_t time = fmlac_ceil(tiles, 2 << i) * tile_time(d, p) + most * CLUSTER_ROW_TIME;
        if (most > 0 && most <= d->kernel->rows && time < best) {
            best = time;
            *blocks = 2 << i;
            *rows = (int)most;
        }
    }
    return best;
}

/* The same for lists in equal pieces, of so many tiles each, whose results a kernel joins. */
static int64_t combine_time(const decision *d, const fmlac_mqa *p, int64_t each)
{
    return each * tile_time(d, p) + d->kernel->rows * PARTIAL_ROW_TIME + SMALL_COMBINE_TIME;
}

/* Tiles of a piece of lists that have equal ones: few enough for all parts, but as many as pay (common/work.cuh). */
static int64_t tiles_of_piece(const fmlac_mqa *p)
{
    const fmlac_cut *cut = &p->cut;
    int64_t tiles = cut->longest - cut->overhead;
    if (cut->units == 0 || cut->parts < cut->units) {
        return COST_MAX;
    }
    int64_t each = fmlac_ceil(tiles, cut->parts / cut->units);
    while (each * (each + 1) * 256 < tiles * cut->units * cut->join) {
        each++;
    }
    return each;
}

/* Equal pieces: joined by clusters, or, of pairs, by the combine kernel. */
static void cut_evenly(const fmlac_state *state, const decision *d, fmlac_mqa *p)
{
    fmlac_cut *cut = &p->cut;
    int blocks, rows;
    int64_t each = tiles_of_piece(p), time = best_clusters(state, d, p, &blocks, &rows);
    if (blocks > 0 && time < combine_time(d, p, each)) {
        p->pieces = blocks;
        p->tile_rows = rows;
        cut->row_tiles = fmlac_ceil(rows_of_list(p), rows);
        cut->columns = cut->row_tiles * p->h_kv;
        cut->parts = 0;
    } else if (d->kernel->cluster > 0 && each <= cut->units * cut->longest / cut->parts + cut->overhead) {
        p->pieces = (int32_t)fmlac_ceil(cut->longest - cut->overhead, each);
        cut->parts = cut->units * p->pieces;
    }
}

/* Units, columns and parts (common/work.cuh). */
static void cut_work(const fmlac_state *state, const decision *d, fmlac_mqa *p)
{
    fmlac_cut *cut = &p->cut;
    int64_t group = p->h_q / p->h_kv;
    bool paged = p->main.kind == FMLAC_LIST_PAGED;
    p->pieces = 0;
    if (paged && p->cu_seqlens_q) {
        cut->row_tiles = p->num_tokens * group / p->tile_rows + p->batch;
        cut->units = cut->row_tiles * p->h_kv;
        cut->columns = 1;
    } else {
        cut->units = lists_of(p);
        p->tile_rows = rows_of_tile(d, rows_of_list(p));
        cut->row_tiles = fmlac_ceil(rows_of_list(p), p->tile_rows);
        cut->columns = cut->row_tiles * p->h_kv;
    }
    cut->overhead = OVERHEAD_TOKENS / p->tile_tokens;
    cut->least = PIECE_TOKENS / p->tile_tokens;
    cut->parts = d->slots / cut->columns;
    cut->join = (int32_t)(256 * cut->columns * p->tile_rows * FMLAC_JOIN_PS / 1000 / tile_time(d, p));
    bool codes = d->hopper && p->quantised && d->kernel->cluster == 0;
    cut->own = cut->units <= (codes ? FMLAC_OWN_UNITS_CODES : FMLAC_OWN_UNITS);
    int64_t blocks = cut->units * cut->columns, enough = (paged ? 64 : 8) * d->slots, list = longest_list(p);
    int64_t longest = fmlac_ceil(list, p->tile_tokens) + cut->overhead;
    bool small = list <= FMLAC_WHOLE_TOKENS;
    bool large = p->main.pool.page_size > COST_MAX || (cut->units > 0 && longest > COST_MAX / cut->units);
    cut->longest = (int32_t)longest;
    if (!d->may_cut || cut->parts <= 1 || cut->units > UNITS_MAX || blocks > enough || small || large ||
        (lists_equal(p) && !cutting_pays(d, p))) {
        cut->parts = 0;
    }
    if (cut->parts > 0 && lists_even(d, p)) {
        cut_evenly(state, d, p);
    }
    cut->whole = cut->parts == 0 && p->h_kv == 1 && lists_equal(p) && p->pieces == 0;
}

/* What a call is given to. Lists for pairs or few rows may be done sooner by clusters of blocks that work alone. */
static decision decide(const fmlac_state *state, const fmlai_mqa *from, fmlac_mqa *p)
{
    decision d = decide_kernel(state, from, p);
    const bool other_may = d.hopper && (d.kernel->cluster > 0 || fmlac_hopper_few(d.kernel));
    const fmlac_kernel *alone = other_may ? fmlac_hopper_unpaired(p) : NULL;
    if (!alone || !d.may_cut || !lists_equal(p)) {
        return d;
    }
    decision other = d;
    fmlac_mqa q = *p;
    int blocks, rows;
    other.kernel = alone;
    other.slots = state->processors;
    q.tile_rows = alone->rows;
    q.tile_tokens = alone->tokens;
    cut_work(state, &d, p);
    int64_t paired = p->cut.parts == 0 ? 0 : combine_time(&d, p, tiles_of_piece(p));
    if (best_clusters(state, &other, &q, &blocks, &rows) < paired) {
        d = other;
        *p = q;
    }
    return d;
}

/* Bytes of the schedule and of the partial results: bounds that do not shrink when a shape grows. */
static size_t schedule_bytes(const fmlac_mqa *p)
{
    int64_t units = p->cut.units < UNITS_MAX ? p->cut.units : UNITS_MAX;
    return round_up((size_t)(units + 3) * sizeof(int32_t), 256);
}

/* Of a partial result, with room for what shorter lists take. */
static size_t partial_rows(const decision *d)
{
    return fmlac_hopper_few(d->kernel) ? ROWS_ALONE : (size_t)d->kernel->rows;
}

static size_t partial_bytes(const decision *d)
{
    return (size_t)d->slots * 2 * partial_rows(d) * FMLAC_OUT_COLUMNS * sizeof(float);
}

static size_t scalar_bytes(const decision *d)
{
    return (size_t)d->slots * 2 * partial_rows(d) * (d->hopper ? 4 : 2) * sizeof(float);
}

/* As many for pairs, which need none: else a shape that grows to them would need less. */
static size_t flag_bytes(const fmlac_state *state, const decision *d)
{
    return d->hopper ? round_up((size_t)state->processors * sizeof(uint32_t), 256) : 0;
}

size_t fmlac_mqa_workspace(const void *state, const fmlai_mqa *from)
{
    fmlac_mqa p;
    decision d = decide(state, from, &p);
    if (!d.kernel || !d.may_cut) {
        return 0;
    }
    cut_work(state, &d, &p);
    return schedule_bytes(&p) + partial_bytes(&d) + scalar_bytes(&d) + flag_bytes(state, &d);
}

static fmla_status run_any(const fmlac_state *state, const fmlac_mqa *p, const fmlai_call *call)
{
    fmlac_launch launch = {.kernel = (const void *)fmlak_mqa_any_sm80,
                           .name = "fmlak_mqa_any_sm80",
                           .blocks = p->num_tokens * p->h_q,
                           .threads = 128,
                           .shared = (size_t)(p->d_qk + p->d_v) * sizeof(float)};
    if (p->fused.enabled) {
        return fmlai_fail(call->error, FMLA_ERROR_UNSUPPORTED,
                          "fused attention needs 99 KiB of shared memory per block; this device has %d bytes",
                          state->shared_block);
    }
    return fmlac_enqueue(state, call, &launch, p);
}

/* Words of scale rows that belong to no token. */
static fmla_status clear_scale_padding(const fmlac_mqa *p, const fmlai_call *call)
{
    const fmlac_fused *f = &p->fused;
    int64_t padding = f->scale_rows - p->num_tokens;
    if (padding <= 0) {
        return FMLA_OK;
    }
    size_t words = (size_t)f->groups * (size_t)f->group_heads * (size_t)p->d_v / 128;
    cudaError_t code = cudaMemset2DAsync(f->scale + p->num_tokens * 4, (size_t)f->scale_rows * 4, 0,
                                         (size_t)padding * 4, words, (cudaStream_t)call->stream);
    return code == cudaSuccess ? FMLA_OK : fmlac_cuda_fail(call->error, code, "cudaMemset2DAsync");
}

static fmla_status enqueue_attention(const fmlac_state *state, const decision *d, fmlac_launch *launch,
                                     const fmlac_mqa *p, const fmlai_call *call)
{
    if (d->hopper) { /* blocks take one piece after another */
        launch->blocks = launch->blocks < d->slots ? launch->blocks : d->slots;
        return fmlac_hopper_enqueue(state, call, launch, d->kernel, p);
    }
    return fmlac_enqueue(state, call, launch, p);
}

static fmla_status run_tiled(const fmlac_state *state, const decision *d, fmlac_mqa *p, const fmlai_call *call)
{
    cut_work(state, d, p);
    uint8_t *workspace = call->workspace;
    fmlac_launch plan = {
        .kernel = (const void *)fmlak_mqa_plan_sm80, .name = "fmlak_mqa_plan_sm80", .blocks = 1, .threads = 1024};
    fmlac_launch attend = {.kernel = (const void *)d->kernel->function,
                           .name = d->kernel->name,
                           .blocks = p->cut.units * p->cut.columns * (p->pieces > 0 ? p->pieces : 1),
                           .cluster = p->pieces,
                           .threads = d->kernel->warps * 32,
                           .shared = d->shared};
    if (p->cut.parts == 0) {
        return enqueue_attention(state, d, &attend, p, call);
    }
    p->cut.starts = (int32_t *)workspace;
    p->cut.partial = (float *)(workspace + schedule_bytes(p));
    p->cut.partial_scalar = (float *)(workspace + schedule_bytes(p) + partial_bytes(d));
    attend.blocks = p->cut.parts * p->cut.columns;
    attend.cluster = 0;
    if (blocks_join(d, p)) {
        p->cut.flags = (uint32_t *)((uint8_t *)p->cut.partial_scalar + scalar_bytes(d));
    }
    bool planned = !p->cut.own || p->cut.flags;
    attend.dependent = planned;
    int64_t few = p->cut.units < p->cut.parts || p->pieces > 0 ? p->cut.units : p->cut.parts;
    bool many = p->cut.units > 0 && p->cut.parts >= MANY_PIECES * p->cut.units;
    fmlac_launch combine = {.kernel =
                                many ? (const void *)fmlak_mqa_combine_many_sm80 : (const void *)fmlak_mqa_combine_sm80,
                            .name = many ? "fmlak_mqa_combine_many_sm80" : "fmlak_mqa_combine_sm80",
                            .blocks = p->cut.columns * (many ? p->cut.units * p->tile_rows : few * (p->tile_rows / 8)),
                            .threads = many ? 512 : 256,
                            .dependent = true};
    fmla_status status = planned ? fmlac_enqueue(state, call, &plan, p) : FMLA_OK;
    if (status == FMLA_OK) {
        status = enqueue_attention(state, d, &attend, p, call);
    }
    return status == FMLA_OK && !p->cut.flags ? fmlac_enqueue(state, call, &combine, p) : status;
}

fmla_status fmlac_mqa_run(void *opaque, const fmlai_mqa *from, const fmlai_call *call)
{
    const fmlac_state *state = opaque;
    fmlac_mqa p;
    decision d = decide(state, from, &p);
    int before;
    fmla_status status = fmlac_enter(state->device, &before, call->error);
    if (status != FMLA_OK) {
        return status;
    }
    if (state->check) {
        status = fmlac_check_mqa(state, &p, call);
    }
    if (status == FMLA_OK && p.fused.enabled) {
        status = clear_scale_padding(&p, call);
    }
    if (status == FMLA_OK) {
        status = d.kernel ? run_tiled(state, &d, &p, call) : run_any(state, &p, call);
    }
    fmlac_leave(before);
    return status;
}
