/* SPDX-License-Identifier: MIT */
/*
 * walk.cuh: how the scout goes from piece to piece (piece.cuh), by the shortest way that a call allows: equal whole
 * lists (walk_whole; where clusters share a list walk_cluster), equal pieces (walk_even), paged lists whose cut the
 * scout has found itself (paged_begin, walk_paged), anything (walk_next).
 */
#ifndef FLASHMLA_CUDA_SM90A_WALK_CUH
#define FLASHMLA_CUDA_SM90A_WALK_CUH

#include "piece.cuh"

/* The pieces of a unit that is cut, of which this block's is one. */
static __device__ __forceinline__ void find_pieces(const fmlac_cut &cut, const piece_walk *walk, int64_t unit,
                                                   piece *to)
{
    int32_t start = walk->cut.starts[unit], tiles = walk->cut.starts[unit + 1] - start - cut.overhead;
    int32_t index = 0, pieces;
#pragma unroll 1
    for (int32_t at = walk->low; cut_at(&cut, walk->cut, start, tiles, at) > 0; at -= walk->cut.per) {
        index++;
    }
    pieces = index + 1;
#pragma unroll 1
    for (int32_t at = walk->high; cut_at(&cut, walk->cut, start, tiles, at) < tiles; at += walk->cut.per) {
        pieces++;
    }
    to->index = index;
    to->pieces = pieces;
    to->head = walk->worker - index * (int32_t)cut.columns;
}

#if MAPPED_Q
/* The next piece of a call that is `whole`, or of which each cluster has a list of single query tokens. */
static __device__ __forceinline__ void walk_cluster(const fmlac_mqa &p, piece_walk *walk, piece *to, int lane)
{
    const int32_t at = (int32_t)walk->at, pieces = is_together(p) ? p.pieces : 1;
    const int32_t list = pieces > 1 ? at >> (__ffs(pieces) - 1) : at;
    fmlac_work w = whole_work(p, list);
    int32_t begin = 0, end = (int32_t)w.tiles, all_see = INT32_MAX;
    if (is_paged(&p)) { /* of the only request */
        all_see = request_length(&p, 0);
        w.main_count = all_see;
        w.tiles = end = (int32_t)((uint32_t)(all_see + TOKENS - 1) / TOKENS);
    }
    if (pieces > 1) {
        const int32_t each = (end + pieces - 1) >> (__ffs(pieces) - 1), tiles = end;
        begin = (at & (pieces - 1)) * each;
        begin = begin < tiles ? begin : tiles;
        end = begin + each < tiles ? begin + each : tiles;
    }
#ifndef FMLAC_INDEXED_ONLY
    to->seen[lane] = lane < w.rows ? all_see : INT32_MAX;
    to->seen[lane + 32] = lane + 32 < w.rows ? all_see : INT32_MAX;
#endif
    __syncwarp(); /* all lanes have read where the walk is */
    if (lane == 0) {
        to->work = w;
        to->place = -1;
        to->pieces = 1;
        to->begin = begin;
        to->end = end;
        to->all_see = all_see;
        place_token(p, to, w.first);
        to->early = walk->guess == (int32_t)w.first;
        to->there = list < whole_pieces(p);
        walk->guess = -1;
        walk->at = at + walk->workers;
    }
    __syncwarp();
}

#else
/* The next piece of a call that is `whole`: much less to do, and so to fetch, before the first tokens set out. */
static __device__ __forceinline__ void walk_whole(const fmlac_mqa &p, piece_walk *walk, piece *to, int lane)
{
    int32_t at = (int32_t)walk->at;
#ifndef FMLAC_INDEXED_ONLY
    if (ROWS > 32) {
        to->seen[lane] = to->seen[(lane + 32) % ROWS] = INT32_MAX;
    } else if (lane < ROWS) {
        to->seen[lane] = INT32_MAX;
    }
#endif
    __syncwarp();
    if (lane == 0) {
        fmlac_work w = whole_work(p, at);
        to->work = w;
        to->place = -1;
        to->pieces = 1;
        to->begin = 0;
        to->end = (int32_t)w.tiles;
        to->all_see = INT32_MAX;
        place_token(p, to, w.first);
        to->early = walk->guess == (int32_t)w.first;
        to->there = at < whole_pieces(p);
        walk->guess = -1;
        walk->at = at + walk->workers;
    }
    __syncwarp();
}

#endif

#ifdef FMLAC_PAGED_ONLY
#define PAGED_EACH (OWN_UNITS / 32) /* units of a lane */

/*
 * Of plain paged lists (FMLAC_OWN_PAGED) a warp finds the cut in one run of instructions, since what counts is how
 * many of them there are before the first tokens set out: lane l has units PAGED_EACH * l and on.
 */
static __device__ __forceinline__ void paged_begin(const fmlac_mqa &p, piece_walk *walk, int32_t worker,
                                                   int32_t workers, int lane)
{
    const fmlac_cut &cut = p.cut;
    const int32_t units = (int32_t)cut.units, columns = (int32_t)cut.columns;
    int32_t start[PAGED_EACH], sum = 0, first = lane * PAGED_EACH;
#pragma unroll
    for (int j = 0; j < PAGED_EACH; j++) {
        start[j] = first + j < units ? request_length(&p, first + j) : -TOKENS * cut.overhead;
    }
#pragma unroll
    for (int j = 0; j < PAGED_EACH; j++) {
        int32_t cost = (int32_t)((uint32_t)(start[j] + TOKENS - 1 + TOKENS * cut.overhead) / TOKENS);
        start[j] = sum;
        sum += cost;
    }
    int32_t before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int32_t other = __shfl_up_sync(0xFFFFFFFFu, before, step);
        before += lane >= step ? other : 0;
    }
    const int32_t total = __shfl_sync(0xFFFFFFFFu, before, 31);
    before -= sum;
    cut_view view = {walk->own, 0, 0};
    cut_share(&cut, total, &view);
    const int32_t part = (int32_t)((uint32_t)worker / (uint32_t)columns), low = part * view.per;
    int32_t below = -1;
#pragma unroll
    for (int j = 0; j < PAGED_EACH; j++) {
        start[j] += before;
        walk->own[first + j] = start[j]; /* of units that are not: the sum of all */
        below += first + j < units && start[j] <= low;
    }
    const uint32_t lanes = __ballot_sync(0xFFFFFFFFu, first < units && before <= low);
    const int32_t at = __shfl_sync(0xFFFFFFFFu, first + below, __popc(lanes) - 1);
    if (lane == 0) {
        walk->own[OWN_UNITS] = total;
        walk->at = at;
        walk->cut = view;
        walk->column = worker - part * columns;
        walk->low = low;
        walk->high = low + view.per;
        walk->worker = worker;
        walk->workers = workers;
    }
    __syncwarp();
}

/* Block tables come to L2, those of all lists by all blocks, before anybody knows which he needs. */
static __device__ __forceinline__ void prefetch_tables(const fmlac_mqa &p, int32_t worker, int32_t workers, int lane)
{
#pragma unroll 1
    for (int32_t unit = worker; p.main.block_table && unit < (int32_t)p.cut.units; unit += workers) {
#pragma unroll 1
        for (int32_t at = lane * 32; at < (int32_t)p.main.max_pages; at += 32 * 32) {
            ptx_prefetch_l2(p.main.block_table + unit * p.main.table_stride + at);
        }
    }
}

/* The next piece of such lists. */
static __device__ __forceinline__ void walk_paged(const fmlac_mqa &p, piece_walk *walk, piece *to, int lane)
{
    const fmlac_cut &cut = p.cut;
    const cut_view &view = walk->cut;
    const int32_t units = (int32_t)cut.units, low = walk->low, high = walk->high;
    int32_t at = (int32_t)walk->at, begin, end, all;
    bool there = false;
#pragma unroll 1
    for (; !there && at < units && walk->own[at] < high; at++) {
        const int32_t start = walk->own[at];
        all = walk->own[at + 1] - start - cut.overhead;
        begin = cut_at(&cut, view, start, all, low);
        end = cut_at(&cut, view, start, all, high);
        there = all == 0 ? start >= low : begin != end;
    }
    __syncwarp();
    if (there) {
        const int32_t unit = at - 1, queries = (int32_t)p.s_q, group = p.h_q, seen = request_length(&p, unit);
        const int32_t row0 = walk->column * p.tile_rows, left = queries * group - row0;
        const int32_t rows = left < p.tile_rows ? left : p.tile_rows;
        const bool whole = begin == 0 && end == all;
        const int32_t place = whole || cut.flags ? -1 : walk->worker * 2 + (begin == 0);
        fmlac_work w = {unit, unit * queries, queries, row0, rows, 0, group, all, seen, 0};
        if (queries > 1) {
            const int32_t last = (int32_t)((uint32_t)(row0 + rows - 1) / (uint32_t)group);
            w.main_count = paged_count(&p, unit, w.first + last, last, queries);
            w.tiles = (int32_t)((uint32_t)w.main_count + TOKENS - 1) / TOKENS;
            piece_write(p, w, begin, end, place, to, lane);
        } else {
            to->seen[lane] = lane < rows ? seen : INT32_MAX;
            to->seen[lane + 32] = lane + 32 < rows ? seen : INT32_MAX;
            if (lane == 0) {
                to->work = w;
                to->place = place;
                to->pieces = 1;
                to->begin = begin;
                to->end = end;
                to->all_see = seen;
                to->outer = unit;
                to->inner = 0;
            }
        }
        if (lane == 0) {
            to->early = 0;
            if (!whole && cut.flags) {
                find_pieces(cut, walk, unit, to);
            }
        }
    }
    if (lane == 0) {
        walk->at = at;
        to->there = there;
    }
    __syncwarp();
}

#endif

#ifdef FMLAC_EVEN
/* The worker's only piece where lists have equal ones. */
static __device__ __forceinline__ void walk_even(const fmlac_mqa &p, piece_walk *walk, piece *to, int lane)
{
    fmlac_work w;
    even_name name = name_even(p, walk->worker);
    int32_t tiles = even_tiles(&p), each = even_share(&p, tiles), begin = name.index * each;
    bool there = walk->at >= 0 && (begin < tiles || name.index == 0);
    even_work(p, name, &w);
    if (there) {
        piece_write(p, w, begin, begin + each, tiles > each ? walk->worker * 2 + (begin == 0) : -1, to, lane);
    }
    __syncwarp();
    if (lane == 0) {
        to->early = walk->guess == (int32_t)w.first;
        to->there = there;
        walk->guess = -1;
        walk->at = -1;
    }
    __syncwarp();
}

#endif

/* The next piece that has rows. */
static __device__ __forceinline__ void walk_next(const fmlac_mqa &p, piece_walk *walk, piece *to, int lane)
{
    fmlac_work w;
    const fmlac_cut &cut = p.cut;
    const cut_view &view = walk->cut; /* read anew: registers are dear where this runs */
#if MAPPED_Q
    if (is_whole(p) || (is_together(p) && p.h_kv == 1 && (!is_paged(&p) || p.s_q == 1))) {
        walk_cluster(p, walk, to, lane);
        return;
    }
#else
    if (is_whole(p)) {
        walk_whole(p, walk, to, lane);
        return;
    }
#endif
#ifdef FMLAC_EVEN
    if (p.pieces > 0) {
        walk_even(p, walk, to, lane);
        return;
    }
#endif
#ifdef FMLAC_PAGED_ONLY
    if (is_plain_paged(p)) {
        walk_paged(p, walk, to, lane);
        return;
    }
#endif
    bool there = false;
    int64_t at = walk->at;
    const int32_t pieces = is_together(p) ? p.pieces : 1;
    for (; !there &&
           (cut.parts == 0 ? at < cut.units * cut.columns * pieces : at < cut.units && view.starts[at] < walk->high);
         at += cut.parts == 0 ? walk->workers : 1) {
        int64_t unit = at, column = walk->column;
        int32_t begin = 0, end = INT32_MAX;
        bool whole = true, empty = false;
        if (cut.parts == 0) {
            int64_t list = pieces > 1 ? quotient(at, pieces) : at;
            unit = quotient(list, cut.columns);
            column = list - unit * cut.columns;
            begin = (int32_t)(at - list * pieces); /* number of the piece; tiles below */
        } else {
            int32_t start = view.starts[at], all = view.starts[at + 1] - start - cut.overhead;
            begin = cut_at(&cut, view, start, all, walk->low);
            end = cut_at(&cut, view, start, all, walk->high);
            whole = begin == 0 && end == all;
            empty = all == 0 ? start < walk->low : begin == end;
        }
        work_rows(&p, unit, column, &w);
        there = !empty && w.rows > 0;
        if (there) {
            work_count(&p, &w);
            if (pieces > 1) {
                int32_t each = (int32_t)quotient(w.tiles + pieces - 1, pieces);
                begin *= each;
                end = begin + each;
            }
            bool partial = !whole && !cut.flags;
            piece_write(p, w, begin, end, partial ? walk->worker * 2 + (begin == 0) : -1, to, lane);
            if (lane == 0) {
                if (!whole && cut.flags) {
                    find_pieces(cut, walk, at, to);
                }
                to->early = walk->guess == (int32_t)w.first;
                walk->guess = -1;
            }
        }
    }
    __syncwarp();
    if (lane == 0) {
        walk->at = at;
        to->there = there;
    }
    __syncwarp();
}

#endif
