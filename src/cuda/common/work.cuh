/* SPDX-License-Identifier: MIT */
/*
 * work.cuh: how attention is cut into pieces of work, from lengths that only the device knows.
 *
 * Unit u has starts[u + 1] - starts[u] = tiles + overhead cost. Part p owns cost [p * per, (p + 1) * per); where a
 * border falls into a unit, its list is cut there, rounded so that no piece is shorter than `least` tiles. A part has
 * at most two cut pieces, its first and its last, so block b's partial results go to places 2b (the unit began in an
 * earlier part) and 2b + 1 (it begins here). Everything follows from starts[], per and least (cut_view): no list of
 * pieces is written, and the combine kernel, or who joins pieces (sm90a/join.cuh), finds each by the same functions.
 *
 * Of few units every block, of the combine kernels too, finds costs and sums by itself, which is sooner done than
 * waited for; for many the plan kernel does it once.
 *
 * More parts are not always better: each writes a partial result, which is read again. With T tiles in parts of k, time
 * is about k * tile + T / k * join; so k grows until k (k + 1) >= T * join / tile.
 *
 * Much of this is run once, by kernels that were not run before: loops are not unrolled, so that there is less of it to
 * fetch.
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
#pragma unroll 1
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
        int64_t last = w->row0 + w->rows;
        int64_t end = last == w->queries * w->group ? w->queries : quotient(last - 1, w->group) + 1;
        int64_t at = p->main.bound.data ? quotient(w->row0, w->group) : end - 1; /* causal bounds grow */
#pragma unroll 1
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

/* Tokens of a request's list, which its last query token sees if there are no bounds, and tiles of it. */
static __device__ __forceinline__ int32_t request_length(const fmlac_mqa *p, int32_t request)
{
    int32_t length = p->main.seqlens[request], most = (int32_t)p->main.capacity;
    return length < 0 ? 0 : length < most ? length : most;
}

static __device__ __forceinline__ int32_t request_tiles(const fmlac_mqa *p, int32_t request)
{
    uint32_t tokens = (uint32_t)p->tile_tokens;
    return (int32_t)(((uint32_t)request_length(p, request) + tokens - 1) / tokens);
}

/*
 * Where all lists are equal, or there is but one, each has as many pieces of the same length (p->pieces), and a part,
 * or a block of a cluster, has one of them: the last ones may be of nothing. Nothing of other lists need be looked up
 * then. Tiles of such a list.
 */
static __device__ __forceinline__ int32_t even_tiles(const fmlac_mqa *p)
{
    return p->cut.longest - p->cut.overhead;
}

/* Tiles of a piece. */
static __device__ __forceinline__ int32_t even_share(const fmlac_mqa *p, int32_t tiles)
{
    return tiles > p->pieces ? (int32_t)((uint32_t)(tiles + p->pieces - 1) / (uint32_t)p->pieces) : 1;
}

/* Tiles and overhead; all row tiles of a unit have the cost of its longest. */
static __device__ __forceinline__ int32_t unit_cost(const fmlac_mqa *p, int32_t unit)
{
    fmlac_work w;
    if (is_paged(p) && !p->cu_seqlens_q && !p->main.bound.data) { /* the short way */
        return request_tiles(p, unit) + p->cut.overhead;
    }
    work_rows(p, unit, 0, &w);
    if (is_paged(p) && !p->cu_seqlens_q) {
        w.row0 = 0;
        w.rows = w.queries * w.group;
    }
    work_count(p, &w);
    return (int32_t)w.tiles + p->cut.overhead;
}

/* The cut of all units. The host has seen to it that no sum of costs is beyond 30 bits. */
typedef struct cut_view {
    const int32_t *starts; /* units + 1 costs before each unit */
    int32_t per;           /* cost of a part */
    int32_t least;         /* tiles that a piece has at least, unless the whole list is shorter */
} cut_view;

/* Costs of all units to the cost of a part. */
static __device__ __forceinline__ void cut_share(const fmlac_cut *cut, int32_t total, cut_view *view)
{
    int32_t parts = (int32_t)cut->parts, tiles = total - (int32_t)cut->units * cut->overhead;
    int32_t per = (int32_t)((uint32_t)(total + parts - 1) / (uint32_t)parts);
    int64_t enough = (int64_t)tiles * cut->join;
    per = per < 1 ? 1 : per;
#pragma unroll 1
    while ((int64_t)per * (per + 1) * 256 < enough) {
        per++;
    }
    view->per = per;
    view->least = per < cut->least ? per : cut->least;
}

/* What the plan kernel has left in the workspace. */
static __device__ __forceinline__ cut_view cut_read(const fmlac_cut *cut)
{
    cut_view view = {cut->starts, cut->starts[cut->units + 1], cut->starts[cut->units + 2]};
    return view;
}

/* Where a cost border cuts a unit: 0 .. tiles. */
static __device__ __forceinline__ int32_t cut_at(const fmlac_cut *cut, const cut_view &view, int32_t start,
                                                 int32_t tiles, int32_t border)
{
    int32_t at = border - start - cut->overhead;
    if (at >= tiles || (at >= view.least && tiles - at < view.least)) {
        return tiles;
    }
    return at < view.least ? 0 : at;
}

/* A warp turns the costs of units into the costs before each unit, and the sum of all. */
static __device__ __forceinline__ void sum_costs(int32_t *starts, int32_t units, int lane)
{
    int32_t before = 0;
#pragma unroll 1
    for (int32_t base = 0; base < units; base += 32) {
        bool there = base + lane < units;
        int32_t own = there ? starts[base + lane] : 0, sum = own;
        for (int step = 1; step < 32; step *= 2) {
            int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (there) {
            starts[base + lane] = before + sum - own;
        }
        before += __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
    if (lane == 0) {
        starts[units] = before;
    }
    __syncwarp();
}

/* Of few units: `starts`, of one more than units, is the block's own and holds the units' costs; a warp calls. */
static __device__ __forceinline__ cut_view cut_find(const fmlac_cut *cut, int32_t *starts, int lane)
{
    cut_view view = {starts, 0, 0};
    sum_costs(starts, (int32_t)cut->units, lane);
    cut_share(cut, starts[cut->units], &view);
    return view;
}

/* Their costs, by `threads` threads, this one of them; a barrier of these follows. */
static __device__ __forceinline__ void own_costs(const fmlac_mqa *p, int32_t *starts, int thread, int threads)
{
#pragma unroll 1
    for (int32_t unit = thread; unit < (int32_t)p->cut.units; unit += threads) {
        starts[unit] = unit_cost(p, unit);
    }
}

/* The last unit that starts at or before a cost; all lanes of a warp ask together. */
static __device__ __forceinline__ int32_t unit_at(const fmlac_cut *cut, const int32_t *starts, int32_t cost, int lane)
{
    int32_t low = 0, width = (int32_t)cut->units;
#pragma unroll 1
    while (width > 1) {
        int32_t step = (width + 31) / 32;
        int32_t probe = low + (lane + 1) * step;
        bool below = (lane + 1) * step < width && starts[probe] <= cost;
        int count = __popc(__ballot_sync(0xFFFFFFFFu, below));
        low += count * step;
        width = width - count * step < step ? width - count * step : step;
    }
    return low;
}

#endif
