/* SPDX-License-Identifier: MIT */
/*
 * work.cuh: how attention is cut into pieces of work, from lengths that only the device knows.
 *
 * Unit u has starts[u + 1] - starts[u] = tiles + overhead cost. Part p owns cost [p * per, (p + 1) * per); where a
 * border falls into a unit, its list is cut there, rounded so that no piece is shorter than `least` tiles. A part has
 * at most two cut pieces, its first and its last, so block b's partial results go to places 2b (the unit began in an
 * earlier part) and 2b + 1 (it begins here). Everything follows from starts[]: no list of pieces is written, and the
 * combine kernel finds each piece by the same functions.
 */
#ifndef FLASHMLA_CUDA_WORK_CUH
#define FLASHMLA_CUDA_WORK_CUH

#include "list.cuh"

/* One row tile of one unit: rows row0 .. row0 + rows - 1 of the (query token, head of the group) pairs of a KV head. */
typedef struct fmlac_work {
    int64_t request;
    int64_t first;   /* query token of row 0 of the unit */
    int64_t queries; /* query tokens that share the unit */
    int64_t row0;
    int64_t rows; /* at least 0 */
    int32_t kv_head;
    int32_t group;      /* heads per KV head */
    int64_t tiles;      /* of list positions, the extra list's after the main one's */
    int64_t main_count; /* entries that some row may attend */
    int64_t extra_count;
} fmlac_work;

static __device__ __forceinline__ int64_t ceil_quotient(int64_t a, int64_t b)
{
    return quotient(a + b - 1, b);
}

/* Ragged batches: slot at which the row tiles of a request start; its tiles fit before the next one's start. */
static __device__ __forceinline__ int64_t ragged_slot(const int32_t *cu_seqlens, int64_t request, int64_t total,
                                                      int64_t group, int64_t tile_rows)
{
    return quotient(clamped(cu_seqlens[request], 0, total) * group, tile_rows) + request;
}

/* The request whose row tiles cover a slot. */
static __device__ __forceinline__ int64_t ragged_request(const int32_t *cu_seqlens, int64_t batch, int64_t total,
                                                         int64_t group, int64_t tile_rows, int64_t slot)
{
    int64_t low = 0, high = batch;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (ragged_slot(cu_seqlens, middle, total, group, tile_rows) <= slot) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Fused operations: whether the query token's position is a row of the table of angles. */
static __device__ __forceinline__ bool position_valid(const fmlac_fused *f, int64_t token)
{
    int64_t position = f->positions[token * f->position_stride];
    return position >= 0 && position < f->cos_sin_rows;
}

/* Longest list of any row of the tile. */
static __device__ __forceinline__ void work_count(const fmlac_mqa *p, fmlac_work *w)
{
    int64_t tokens = p->tile_tokens;
    w->main_count = w->extra_count = 0;
    if (w->rows > 0 && is_paged(p)) {
        int64_t at = quotient(w->row0, w->group);
        int64_t end = quotient(w->row0 + w->rows - 1, w->group) + 1;
        at = p->main.bound.data ? at : end - 1; /* causal bounds grow with the query token */
        for (; at < end; at++) {
            int64_t seen = paged_count(p, w->request, w->first + at, at, w->queries);
            w->main_count = seen > w->main_count ? seen : w->main_count;
        }
    } else if (w->rows > 0 && (!p->fused.enabled || position_valid(&p->fused, w->first))) {
        w->main_count = indexed_count(p, &p->main, w->first);
        w->extra_count = indexed_count(p, &p->extra, w->first);
    }
    w->tiles = ceil_quotient(w->main_count + w->extra_count, tokens);
}

/* Unit and column to rows, without counting tokens. */
static __device__ __forceinline__ void work_rows(const fmlac_mqa *p, int64_t unit, int64_t column, fmlac_work *w)
{
    int64_t tile;
    w->group = p->h_q / p->h_kv;
    if (is_paged(p) && p->cu_seqlens_q) {
        int64_t kv_head = quotient(unit, p->cut.row_tiles);
        int64_t slot = unit - kv_head * p->cut.row_tiles;
        w->kv_head = (int32_t)kv_head;
        w->request = ragged_request(p->cu_seqlens_q, p->batch, p->num_tokens, w->group, p->tile_rows, slot);
        tile = slot - ragged_slot(p->cu_seqlens_q, w->request, p->num_tokens, w->group, p->tile_rows);
    } else {
        int64_t kv_head = quotient(column, p->cut.row_tiles);
        w->kv_head = (int32_t)kv_head;
        tile = column - kv_head * p->cut.row_tiles;
        w->request = unit;
    }
    if (is_paged(p)) {
        request_tokens(p->cu_seqlens_q, w->request, p->s_q, p->num_tokens, &w->first, &w->queries);
    } else {
        w->first = unit;
        w->queries = 1;
        w->request = 0; /* found when a length asks for it */
    }
    w->row0 = tile * p->tile_rows;
    int64_t left = w->queries * w->group - w->row0;
    w->rows = clamped(left, 0, p->tile_rows);
}

/* A row's query token and head. */
static __device__ __forceinline__ void row_token_head(const fmlac_work &w, int row, int64_t *token, int32_t *head)
{
    int64_t at = w.row0 + row;
    int64_t j = quotient(at, w.group);
    *token = w.first + j;
    *head = w.kv_head * w.group + (int32_t)(at - j * w.group);
}

/* All row tiles of a unit have the cost of its longest. */
static __device__ __forceinline__ int64_t unit_tiles(const fmlac_mqa *p, int64_t unit)
{
    fmlac_work w;
    work_rows(p, unit, 0, &w);
    if (is_paged(p) && !p->cu_seqlens_q) {
        w.row0 = 0;
        w.rows = w.queries * w.group;
    }
    work_count(p, &w);
    return w.tiles;
}

/* Where a cost border cuts a unit: 0 .. tiles. */
static __device__ __forceinline__ int64_t cut_at(const fmlac_cut *cut, int64_t start, int64_t tiles, int64_t border)
{
    int64_t at = border - start - cut->overhead;
    if (at >= tiles || (at >= cut->least && tiles - at < cut->least)) {
        return tiles;
    }
    return at < cut->least ? 0 : at;
}

/* The last unit that starts at or before a cost; all lanes of a warp ask together. */
static __device__ __forceinline__ int64_t unit_at(const fmlac_cut *cut, int64_t cost, int lane)
{
    int64_t low = 0, width = cut->units;
    while (width > 1) {
        int64_t step = (width + 31) / 32;
        int64_t probe = low + (lane + 1) * step;
        bool below = (lane + 1) * step < width && cut->starts[probe] <= cost;
        int count = __popc(__ballot_sync(0xFFFFFFFFu, below));
        low += count * step;
        width = width - count * step < step ? width - count * step : step;
    }
    return low;
}

#endif
