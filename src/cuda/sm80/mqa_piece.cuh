/* SPDX-License-Identifier: MIT */
/* mqa_piece.cuh: a block's pieces of work, one after another: what is known of a piece before its first token comes. */
#ifndef FLASHMLA_CUDA_SM80_MQA_PIECE_CUH
#define FLASHMLA_CUDA_SM80_MQA_PIECE_CUH

#include "mqa_list.cuh"
#include "ptx/grid.cuh"

/* Where a piece's first row is in tensors: its query token's two numbers, its head among those of the KV head. Rows
 * that share a list share the outer number. */
static __device__ __forceinline__ void place_rows(const fmlac_mqa &p, const fmlac_work &w, mqa_piece *piece)
{
    int64_t j = w.row0 < w.group ? 0 : quotient(w.row0, w.group);
    int64_t token = w.first + j, outer = quotient(token, p.s_q);
    piece->outer = (int32_t)outer;
    piece->inner = (int32_t)(token - outer * p.s_q);
    piece->head = (int32_t)(w.row0 - j * w.group);
}

/* The index row of a piece's query token. */
static __device__ __forceinline__ const int32_t *index_row_at(const fmlac_list &list, const mqa_piece &piece,
                                                              int32_t kv_head)
{
    return list.indices + piece.outer * list.index_outer + piece.inner * list.index_inner + kv_head * list.index_head;
}

/* One thread: what the tiles of a piece are listed from. */
template <class S> static __device__ __forceinline__ void begin_list(const fmlac_mqa &p, const mqa_shared &s)
{
    const fmlac_work &w = *s.work;
    mqa_piece *piece = s.piece;
    int64_t count = w.main_count + w.extra_count;
    int64_t end = (piece->begin + piece->count) * S::TOKENS;
    piece->scan_end = end < count ? end : count;
    if (p.main.kind != FMLAC_LIST_PAGED) {
        piece->entries = index_row_at(p.main, *piece, w.kv_head);
        piece->extra_entries = w.extra_count > 0 ? index_row_at(p.extra, *piece, w.kv_head) : nullptr;
    } else if (p.main.block_table) {
        piece->entries = p.main.block_table + w.request * p.main.table_stride;
    } else {
        piece->entries = nullptr;
        piece->first_page = w.request * p.main.max_pages;
    }
}

/* Whether every block has one list of indices, as long as all others: nothing but its number need be known. */
static __device__ __forceinline__ bool lists_alike(const fmlac_mqa &p)
{
    return p.main.kind == FMLAC_LIST_INDEXED && p.cut.parts == 0 && !p.main.length.data && !p.extra.length.data &&
           !p.fused.enabled;
}

/* One thread: the piece of such a block. What has not run for long comes slowly, a line of code at a time, so a block
 * begins sooner with little code than with all that find_piece has to ask. */
template <class S> static __device__ __forceinline__ void find_alike(const fmlac_mqa &p, const mqa_shared &s)
{
    fmlac_work *w = s.work;
    mqa_piece *piece = s.piece;
    uint32_t columns = (uint32_t)p.cut.columns, unit = blockIdx.x / columns, tile = blockIdx.x - unit * columns;
    uint32_t group = (uint32_t)p.h_q, kv_head = 0, outer = unit / (uint32_t)p.s_q;
    if (p.h_kv > 1) {
        group /= (uint32_t)p.h_kv;
        kv_head = tile / (uint32_t)p.cut.row_tiles;
        tile -= kv_head * (uint32_t)p.cut.row_tiles;
    }
    int64_t count = p.main.topk + p.extra.topk;
    w->rows = group - tile * S::ROWS < S::ROWS ? group - tile * S::ROWS : S::ROWS;
    w->kv_head = (int32_t)kv_head;
    w->group = (int32_t)group;
    w->main_count = p.main.topk;
    w->extra_count = p.extra.topk;
    piece->begin = 0;
    piece->place = -1;
    piece->count = (int)((uint64_t)(count + S::TOKENS - 1) / S::TOKENS);
    piece->outer = (int32_t)outer;
    piece->inner = (int32_t)(unit - outer * (uint32_t)p.s_q);
    piece->head = (int32_t)(tile * S::ROWS);
    begin_list<S>(p, s);
}

/* One thread: the next piece of this block. Its state lies in shared memory: registers are dear. */
template <class S> static __device__ __forceinline__ void find_piece(const fmlac_mqa &p, const mqa_shared &s)
{
    int64_t part = blockIdx.x / (uint32_t)p.cut.columns, column = blockIdx.x - part * p.cut.columns;
    bool direct = p.cut.parts == 0;
    const cut_view cut = s.piece->cut;
    int32_t low = (int32_t)part * cut.per, high = low + cut.per;
    int64_t unit = direct ? part : s.piece->unit + 1;
    s.piece->count = -1;
#pragma unroll 1
    for (; direct || (unit < p.cut.units && cut.starts[unit] < high); unit++) {
        int32_t start = direct ? 0 : cut.starts[unit];
        int32_t all = direct ? INT32_MAX : cut.starts[unit + 1] - start - p.cut.overhead;
        int32_t begin = direct ? 0 : cut_at(&p.cut, cut, start, all, low);
        int32_t end = direct ? all : cut_at(&p.cut, cut, start, all, high);
        if (all == 0 ? start < low : begin == end) {
            continue;
        }
        work_rows(&p, unit, column, s.work);
        work_count(&p, s.work);
        if (s.work->rows > 0) {
            int32_t tiles = (int32_t)s.work->tiles; /* a row tile may need fewer than its unit's longest */
            s.piece->place = begin == 0 && end == all ? -1 : (int64_t)blockIdx.x * 2 + (begin == 0);
            begin = begin < tiles ? begin : tiles;
            s.piece->begin = begin;
            s.piece->count = (end < tiles ? end : tiles) - begin;
            s.piece->unit = unit;
            place_rows(p, *s.work, s.piece);
            begin_list<S>(p, s);
            return;
        }
        if (direct) {
            return;
        }
    }
}

/* A warp: the cut of all units. */
static __device__ __forceinline__ cut_view begin_cut(const fmlac_mqa &p, const mqa_shared &s, int lane)
{
    if (!p.cut.own) {
        return cut_read(&p.cut);
    }
    own_costs(&p, s.own, lane, 32);
    __syncwarp();
    return cut_find(&p.cut, s.own, lane);
}

/* A warp sets out for the block's first piece. */
static __device__ __forceinline__ void begin_pieces(const fmlac_mqa &p, const mqa_shared &s, int lane)
{
    cut_view cut = {nullptr, 0, 0};
    int32_t unit = 0;
    if (p.cut.parts != 0) {
        ptx_grid_wait();
        ptx_grid_launch_dependents();
        cut = begin_cut(p, s, lane);
        unit = unit_at(&p.cut, cut.starts, (int32_t)quotient(blockIdx.x, p.cut.columns) * cut.per, lane);
    }
    if (lane == 0) {
        s.piece->cut = cut;
        s.piece->at = 0;
        s.piece->parity = 0;
        s.piece->unit = unit - 1;
    }
}

#endif
