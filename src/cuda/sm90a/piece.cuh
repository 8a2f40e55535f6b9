/* SPDX-License-Identifier: MIT */
/*
 * piece.cuh: what a block works on: one row tile against a run of the token tiles of its list, after another. One warp,
 * the scout, finds pieces ahead of time; everybody else reads them from shared memory.
 */
#ifndef FLASHMLA_CUDA_SM90A_PIECE_CUH
#define FLASHMLA_CUDA_SM90A_PIECE_CUH

#define FMLAC_QUOTIENT_32 /* the host sees to it that numbers are short */

#include "common/work.cuh"
#include "sm90a/params.h"

#define ROWS FMLAC_HOPPER_ROWS

/* Tokens of a tile. Files of kernels for quantised tokens define FMLAC_CODES. */
#ifdef FMLAC_CODES
#define TOKENS FMLAC_CODES_TOKENS
#else
#define TOKENS FMLAC_HOPPER_TOKENS
#endif

typedef struct piece {
    fmlac_work work;
    int64_t place;      /* of the partial result, -1: the piece is a whole list */
    int32_t begin, end; /* token tiles: positions TOKENS * begin and on of the list */
    int32_t there;      /* 0: no more pieces */
    int32_t all_see;    /* tokens that every row sees; INT32_MAX for index lists */
    int32_t seen[ROWS]; /* tokens that a row sees */
} piece;

/* Where the scout is. */
typedef struct piece_walk {
    int64_t at; /* direct: number of the next piece; cut: the next unit */
    int64_t column;
    int64_t low, high;       /* cut: costs of this part */
    int64_t worker, workers; /* of the grid: blocks, or clusters of blocks */
    int32_t twin, twins;     /* blocks that share a row tile, ROWS rows each; 0, 1: pieces are of whole row tiles */
} piece_walk;

/* The whole warp calls, here and below. */
static __device__ __forceinline__ void walk_begin(const fmlac_mqa &p, piece_walk *walk, int64_t worker, int64_t workers,
                                                  int lane)
{
    int64_t at = worker, part = 0, column = 0, low = 0, high = 0;
    if (p.cut.parts > 0) {
        part = quotient(worker, p.cut.columns);
        column = worker - part * p.cut.columns;
        low = part * p.cut.starts[p.cut.units + 1];
        high = low + p.cut.starts[p.cut.units + 1];
        at = unit_at(&p.cut, low, lane);
    }
    if (lane == 0) {
        walk->at = at;
        walk->column = column;
        walk->low = low;
        walk->high = high;
        walk->worker = worker;
        walk->workers = workers;
        walk->twin = 0;
        walk->twins = 1;
    }
    __syncwarp();
}

/* The rest of the walk is for one of two blocks that share row tiles. */
static __device__ __forceinline__ void walk_share(piece_walk *walk, uint32_t twin, int lane)
{
    if (lane == 0) {
        walk->twin = (int32_t)twin;
        walk->twins = 2;
    }
    __syncwarp();
}

/* Tokens that a row sees: PAGED lists only; rows beyond the last see what all see. */
static __device__ __forceinline__ int32_t row_seen(const fmlac_mqa &p, const fmlac_work &w, int row)
{
    if (!is_paged(&p) || row >= w.rows) {
        return INT32_MAX;
    }
    int64_t j = quotient(w.row0 + row, w.group);
    return (int32_t)paged_count(&p, w.request, w.first + j, j, w.queries);
}

/* The warp writes the rest of a piece whose work is known. */
static __device__ __forceinline__ void piece_write(const fmlac_mqa &p, const fmlac_work &w, int64_t begin, int64_t end,
                                                   int64_t place, piece *to, int lane)
{
    int32_t all_see = INT32_MAX;
    for (int row = lane; row < ROWS; row += 32) {
        int32_t seen = row_seen(p, w, row);
        to->seen[row] = seen;
        all_see = seen < all_see ? seen : all_see;
    }
    for (int step = 16; step > 0; step /= 2) {
        int32_t other = __shfl_xor_sync(0xFFFFFFFFu, all_see, step);
        all_see = other < all_see ? other : all_see;
    }
    if (lane == 0) {
        to->work = w;
        to->place = place;
        to->begin = (int32_t)(begin < w.tiles ? begin : w.tiles);
        to->end = (int32_t)(end < w.tiles ? end : w.tiles);
        to->all_see = all_see;
    }
}

/* The next piece that has rows. */
static __device__ __forceinline__ void walk_next(const fmlac_mqa &p, piece_walk *walk, piece *to, int lane)
{
    fmlac_work w;
    const fmlac_cut &cut = p.cut;
    bool there = false;
    int64_t at = walk->at;
    for (; !there && (cut.parts == 0 ? at < cut.units * cut.columns : at < cut.units && cut.starts[at] < walk->high);
         at += cut.parts == 0 ? walk->workers : 1) {
        int64_t unit = at, column = walk->column, begin = 0, end = INT32_MAX;
        bool whole = true, empty = false;
        if (cut.parts == 0) {
            unit = quotient(at, cut.columns);
            column = at - unit * cut.columns;
        } else {
            int64_t start = cut.starts[at], all = cut.starts[at + 1] - start - cut.overhead;
            begin = cut_at(&cut, start, all, walk->low);
            end = cut_at(&cut, start, all, walk->high);
            whole = begin == 0 && end == all;
            empty = all == 0 ? start < walk->low : begin == end;
        }
        work_rows(&p, unit, column, &w);
        there = !empty && w.rows > 0;
        if (there) {
            work_count(&p, &w);
            int64_t place = walk->worker * 2 + (begin == 0);
            if (walk->twins > 1) { /* its part of the rows, which may be none, and of the partial result */
                w.row0 += walk->twin * ROWS;
                w.rows = clamped(w.rows - walk->twin * ROWS, 0, ROWS);
                place = place * walk->twins + walk->twin;
            }
            piece_write(p, w, begin, end, whole ? -1 : place, to, lane);
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
