/* SPDX-License-Identifier: MIT */
/*
 * piece.cuh: what a block works on: one row tile against a run of the token tiles of its list, after another. One warp,
 * the scout, finds pieces ahead of time; everybody else reads them from shared memory.
 */
#ifndef FLASHMLA_CUDA_SM90A_PIECE_CUH
#define FLASHMLA_CUDA_SM90A_PIECE_CUH

#define FMLAC_QUOTIENT_32 /* the host sees to it that numbers are short */

#include "common/work.cuh"
#include "ptx/grid.cuh"
#include "sm90a/params.h"

/* clang-format off */
/* What files of kernels define before they include anything; what they do not need is not compiled (registers):
 *   FMLAC_CODES         mqa_codes*.cu, mqa_few.cu      quantised tokens: tiles of 48 (few rows: 64)
 *   FMLAC_FEW           mqa_few.cu                     with FMLAC_CODES: few rows, tiles of 64 (few.cuh)
 *   FMLAC_TOGETHER      mqa_codes_together.cu          for clusters that share a list: the first piece's Q by TMA,
 *                                                      shorter ways to it
 *   FMLAC_INDEXED_ONLY  mqa_pair.cu                    no paged lists (common/list.cuh)
 *   FMLAC_PAGED_ONLY    mqa_bf16.cu, mqa_f16.cu        no index lists
 *   FMLAC_EVEN          mqa_pair.cu                    equal pieces are joined by the combine kernel; no clusters that
 *                                                      share a list
 *   FMLAC_NO_CLUSTERS   mqa_rows_*.cu, mqa_few.cu      no clusters that share a list, so no equal pieces
 * Where none of the last two is, equal pieces are joined within clusters. */
/* clang-format on */

#define OUT_COLUMNS FMLAC_OUT_COLUMNS

/* Rows of queries of a block. */
#ifdef FMLAC_FEW
#define ROWS FMLAC_FEW_ROWS
#else
#define ROWS FMLAC_HOPPER_ROWS
#endif

/* Tokens of a tile; units whose cut a block finds itself. Files of kernels for quantised tokens define FMLAC_CODES. */
#ifdef FMLAC_FEW
#define TOKENS FMLAC_FEW_TOKENS
#elif defined FMLAC_CODES
#define TOKENS FMLAC_CODES_TOKENS
#else
#define TOKENS FMLAC_HOPPER_TOKENS
#endif
#ifdef FMLAC_CODES
#define OWN_UNITS FMLAC_OWN_UNITS_CODES
#else
#define OWN_UNITS FMLAC_OWN_UNITS
#endif

/* 1: what does not depend on lengths is fetched before they are known. */
#ifndef FMLAC_EARLY
#define FMLAC_EARLY 1
#endif

/* 1: the first Q, and without borders later ones, may come by TMA, asked for by a producer; what comes with it
 * (walk.cuh, has_rows) is for these kernels alone: the others were not faster by it. */
#if defined FMLAC_PAGED_ONLY || defined FMLAC_TOGETHER
#define MAPPED_Q 1
#else
#define MAPPED_Q 0
#endif

typedef struct piece {
    fmlac_work work;
    int64_t place;      /* of the partial result; -1: the piece is a whole list, or joined with the others */
    int32_t pieces;     /* of the list, joined by who has them (join.cuh) */
    int32_t index;      /* of this one among them */
    int32_t head;       /* block that has the first */
    int32_t begin, end; /* token tiles: positions TOKENS * begin and on of the list */
    int32_t there;      /* 0: no more pieces */
    int32_t all_see;    /* tokens that every row sees; INT32_MAX for index lists */
    int32_t early;      /* Q set out before the piece was known */
    int32_t outer;      /* request and place in it of the first query token, as tensors count them */
    int32_t inner;
#ifndef FMLAC_INDEXED_ONLY
    int32_t seen[ROWS]; /* tokens that a row sees */
#endif
} piece;

/* Where the scout is. */
typedef struct piece_walk {
    int64_t at; /* direct: number of the next piece; cut: the next unit */
    cut_view cut;
    int32_t column;
    int32_t low, high;          /* cut: costs of this part */
    int32_t worker, workers;    /* of the grid: blocks, or clusters of blocks */
    int32_t guess;              /* first query token whose Q has set out; -1: none */
    int32_t own[OWN_UNITS + 1]; /* costs that the block finds by itself */
} piece_walk;

/* Whether all lists are index lists as long as they can be, none of them cut. */
static __device__ __forceinline__ bool is_whole(const fmlac_mqa &p)
{
#ifdef FMLAC_PAGED_ONLY
    (void)p;
    return false;
#else
    return p.cut.whole;
#endif
}

/* Whether lists are paged ones of equally many query tokens whose cut a block finds by itself, of one KV head and no
 * bounds: then there is a short way to the first piece. */
static __device__ __forceinline__ bool is_plain_paged(const fmlac_mqa &p)
{
#ifdef FMLAC_PAGED_ONLY
    return p.cut.own == FMLAC_OWN_PAGED;
#else
    (void)p;
    return false;
#endif
}

/* Of a call that is `whole`: how many pieces there are, and the work of one. */
static __device__ __forceinline__ int32_t whole_pieces(const fmlac_mqa &p)
{
    return (int32_t)p.cut.units * (int32_t)p.cut.columns;
}

static __device__ __forceinline__ fmlac_work whole_work(const fmlac_mqa &p, int32_t at)
{
    int32_t extra = p.extra.kind == FMLAC_LIST_INDEXED ? (int32_t)p.extra.topk : 0;
    int32_t columns = (int32_t)p.cut.columns, unit = (int32_t)((uint32_t)at / (uint32_t)columns);
    int32_t most = (int32_t)p.tile_rows, row0 = (at - unit * columns) * most, left = p.h_q - row0;
    fmlac_work w = {0,           unit, 1, row0, left < most ? left : most, 0, p.h_q, p.cut.longest - p.cut.overhead,
                    p.main.topk, extra};
    return w;
}

/* Whether index lists have equal pieces that the combine kernel joins. */
static __device__ __forceinline__ bool is_even(const fmlac_mqa &p)
{
#ifdef FMLAC_EVEN
    return p.pieces > 0;
#else
    (void)p;
    return false;
#endif
}

/* Whether each block of a cluster has a piece of one list (together.cuh). */
static __device__ __forceinline__ bool is_together(const fmlac_mqa &p)
{
#if defined FMLAC_EVEN || defined FMLAC_NO_CLUSTERS
    (void)p;
    return false;
#else
    return p.pieces > 0;
#endif
}

#ifdef FMLAC_EVEN
/* Which piece of which list a worker has. */
typedef struct even_name {
    int32_t unit, column, index;
} even_name;

static __device__ __forceinline__ even_name name_even(const fmlac_mqa &p, int32_t worker)
{
    uint32_t columns = (uint32_t)p.cut.columns, part = (uint32_t)worker / columns, unit = part / (uint32_t)p.pieces;
    even_name name = {(int32_t)unit, worker - (int32_t)(part * columns), (int32_t)part - (int32_t)unit * p.pieces};
    return name;
}

/* All of it. */
static __device__ __forceinline__ void even_work(const fmlac_mqa &p, const even_name &name, fmlac_work *w)
{
    *w = whole_work(p, name.unit * (int32_t)p.cut.columns + name.column);
    if (p.h_kv > 1) {
        int32_t row_tiles = (int32_t)p.cut.row_tiles;
        w->group = (int32_t)((uint32_t)p.h_q / (uint32_t)p.h_kv);
        w->kv_head = (int32_t)((uint32_t)name.column / (uint32_t)row_tiles);
        int32_t row0 = (name.column - w->kv_head * row_tiles) * p.tile_rows, left = w->group - row0;
        w->row0 = row0;
        w->rows = left < p.tile_rows ? left : p.tile_rows;
    }
}
#endif

/*
 * What the block's first piece is most likely part of, known without lengths: as if all lists were as long as they can
 * be. If it is so (piece.early), Q need not wait for the scout. begin: the piece's first tile, of index lists.
 */
static __device__ __forceinline__ bool walk_guess(const fmlac_mqa &p, int32_t worker, fmlac_work *w, int32_t *begin)
{
    const fmlac_cut &cut = p.cut;
    if (FMLAC_EARLY && is_whole(p)) {
        *begin = 0;
        *w = whole_work(p, worker);
        return worker < whole_pieces(p);
    }
#ifdef FMLAC_EVEN
    if (FMLAC_EARLY && p.pieces > 0) {
        even_name name = name_even(p, worker);
        *begin = name.index * even_share(&p, cut.longest - cut.overhead);
        even_work(p, name, w);
        return name.unit < (int32_t)cut.units;
    }
#endif
    int32_t index = 0;
    if (is_together(p)) {
        int32_t list = (int32_t)((uint32_t)worker / (uint32_t)p.pieces);
        index = worker - list * p.pieces;
        worker = list;
    }
    int32_t columns = (int32_t)cut.columns, part = (int32_t)((uint32_t)worker / (uint32_t)columns), unit = part;
    *begin = index > 0 ? index * even_share(&p, cut.longest - cut.overhead) : 0;
    if (FMLAC_EARLY == 0 || is_plain_paged(p) || (is_paged(&p) && p.cu_seqlens_q)) {
        return false;
    }
    if (cut.parts > 0) {
        cut_view view;
        cut_share(&cut, cut.longest * (int32_t)cut.units, &view);
        int32_t low = part * view.per, tiles = cut.longest - cut.overhead;
        unit = (int32_t)((uint32_t)low / (uint32_t)cut.longest);
        *begin = cut_at(&cut, view, unit * cut.longest, tiles, low);
        if (*begin == tiles) {
            *begin = 0;
            unit++;
        }
    }
    if (unit >= (int32_t)cut.units) {
        return false;
    }
    work_rows(&p, unit, worker - part * columns, w);
    return true;
}

/* A warp asks for the first entries of the list that is most likely its block's. */
static __device__ __forceinline__ void prefetch_list(const fmlac_mqa &p, const fmlac_work &w, int32_t begin, int lane)
{
    const int32_t *list = nullptr;
    int64_t entries = 0;
    if (is_paged(&p) && p.main.block_table) {
        list = p.main.block_table + w.request * p.main.table_stride;
        entries = p.main.max_pages;
    } else if (!is_paged(&p)) {
        list = index_row(&p, &p.main, w.first, w.kv_head) + begin * TOKENS;
        entries = p.main.topk - begin * TOKENS;
    }
    if (lane * 32 < entries) {
        ptx_prefetch_l2(list + lane * 32);
    }
}

/* By `threads` threads, this one of them; a barrier of the block follows. */
static __device__ __forceinline__ void walk_costs(const fmlac_mqa &p, piece_walk *walk, int thread, int threads)
{
    if (p.cut.parts > 0 && p.cut.own && !is_even(p) && !is_plain_paged(p)) {
        own_costs(&p, walk->own, thread, threads);
    }
}

/* The whole warp calls, here and below. */
static __device__ __forceinline__ void walk_begin(const fmlac_mqa &p, piece_walk *walk, int32_t worker, int32_t workers,
                                                  int lane)
{
    int64_t at = worker;
    int32_t column = 0, low = 0, high = 0;
    cut_view cut = {nullptr, 0, 0};
    if (p.cut.parts > 0 && !is_even(p)) {
        int32_t part = (int32_t)quotient(worker, p.cut.columns);
        column = worker - part * (int32_t)p.cut.columns;
        if (p.cut.own) {
            cut = cut_find(&p.cut, walk->own, lane);
        } else {
            ptx_grid_wait(); /* but for join.cuh, nobody else needs anything of it */
            cut = cut_read(&p.cut);
        }
        low = part * cut.per;
        high = low + cut.per;
        at = unit_at(&p.cut, cut.starts, low, lane);
    }
    if (lane == 0) {
        walk->at = at;
        walk->cut = cut;
        walk->column = column;
        walk->low = low;
        walk->high = high;
        walk->worker = worker;
        walk->workers = workers;
    }
    __syncwarp();
}

/* Tokens that a row sees: PAGED lists only; rows beyond the last see what all see. */
static __device__ __forceinline__ int32_t row_seen(const fmlac_mqa &p, const fmlac_work &w, int row)
{
    if (!is_paged(&p) || row >= w.rows) {
        return INT32_MAX;
    }
    if (!p.main.bound.data && (!p.main.causal || w.queries == 1)) {
        return (int32_t)w.main_count;
    }
    int64_t j = quotient(w.row0 + row, w.group);
    return (int32_t)paged_count(&p, w.request, w.first + j, j, w.queries);
}

/* Where the first query token is. */
static __device__ __forceinline__ void place_token(const fmlac_mqa &p, piece *to, int64_t token)
{
    to->outer = (int32_t)quotient(token, p.s_q);
    to->inner = (int32_t)(token - to->outer * p.s_q);
}

/* Element offset of a row of a piece in a tensor. Rows of one query token differ by their heads alone. */
static __device__ __forceinline__ int64_t piece_row(const fmlac_mqa &p, const fmlac_rows &rows, const piece &c, int row)
{
    int32_t head = c.work.kv_head * c.work.group + (int32_t)c.work.row0 + row;
    if (c.work.queries == 1) {
        return c.outer * rows.stride[0] + c.inner * rows.stride[1] + head * rows.stride[2];
    }
    int64_t token;
    row_token_head(c.work, row, &token, &head);
    return row_offset(&rows, &p, token, head);
}

/* The warp writes the rest of a piece whose work is known. */
static __device__ __forceinline__ void piece_write(const fmlac_mqa &p, const fmlac_work &w, int32_t begin, int32_t end,
                                                   int64_t place, piece *to, int lane)
{
    int32_t all_see = INT32_MAX;
    for (int row = lane; row < ROWS; row += 32) {
        int32_t seen = row_seen(p, w, row);
#ifndef FMLAC_INDEXED_ONLY
        to->seen[row] = seen;
#endif
        all_see = seen < all_see ? seen : all_see;
    }
    for (int step = 16; step > 0; step /= 2) {
        int32_t other = __shfl_xor_sync(0xFFFFFFFFu, all_see, step);
        all_see = other < all_see ? other : all_see;
    }
    if (lane == 0) {
        to->work = w;
        to->place = place;
        to->pieces = 1;
        to->begin = begin < (int32_t)w.tiles ? begin : (int32_t)w.tiles;
        to->end = end < (int32_t)w.tiles ? end : (int32_t)w.tiles;
        to->all_see = all_see;
        place_token(p, to, w.first);
    }
}

#endif
