/* SPDX-License-Identifier: MIT */
/*
 * source_pages.cuh: tokens of a paged list whose pages hold a multiple of 64 tokens, by TMA. One lane copies, in turns
 * one for each half: a tile is 8 or 9 boxes of 64 tokens x 64 dims. A page that is none is a box outside the pool:
 * zeros.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_PAGES_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_PAGES_CUH

#include "border.cuh"
#include "ptx/tma.cuh"
#include "source.cuh"

/* Where a tile of the list lies; a page that is none is outside the pool. */
typedef struct tile_place {
    int32_t page, row;
    bool there;
} tile_place;

static __device__ __forceinline__ tile_place place_tile(const fmlac_mqa &p, int32_t position, int32_t page)
{
    bool there = page >= 0 && page < p.main.pool.num_pages;
    tile_place place = {there ? page : (int32_t)p.main.pool.num_pages,
                        (int32_t)((uint32_t)position % (uint32_t)p.main.pool.page_size), there};
    return place;
}

static __device__ __forceinline__ tile_place find_tile(const fmlac_mqa &p, const fmlac_work &w, int32_t tile)
{
    int32_t position = tile * TOKENS, page = fetch_page(p, w, position);
    return place_tile(p, position, page);
}

/* A portion of a tile. */
template <int BLOCKS>
static __device__ __forceinline__ void copy_portion(const fmlac_mqa_sm90a &all, const fmlac_work &w, plan<BLOCKS> *m,
                                                    int slot, int portion, const tile_place &place)
{
    const uint32_t full = ptx_shared_address(&m->full[slot][portion]);
    const int first = 2 * portion, last = portion == PORTIONS - 1 ? BLOCKS : first + 2;
    ptx_mbarrier_arrive_expect(full, (last - first) * BLOCK_BYTES);
    for (int block = first; block < last; block++) {
        ptx_tma_load_4d(ptx_shared_address(m->k[slot][block]), &all.pages, full, block * 64, place.row, place.page,
                        w.kv_head, PTX_L2_EVICT_NORMAL);
    }
}

/* Which tokens of tile `tile` of the list are there, and what follows: with the tile's last portion. */
template <int BLOCKS>
static __device__ __forceinline__ void set_mask(const fmlac_work &w, plan<BLOCKS> *m, int slot, int32_t tile,
                                                const tile_place &place, bool more)
{
    int64_t left = w.main_count - tile * TOKENS;
    uint64_t mask = !place.there ? 0 : left >= 64 ? ~0ull : (1ull << left) - 1;
    m->mask[slot][0] = (uint32_t)mask;
    m->mask[slot][1] = (uint32_t)(mask >> 32);
    m->more[slot] = more;
}

/* Tile `tile` of the list, which lies at `place`, into a slot; one lane calls. */
template <int BLOCKS>
static __device__ __forceinline__ void copy_tile(const fmlac_mqa_sm90a &all, const fmlac_work &w, plan<BLOCKS> *m,
                                                 int slot, uint32_t parity, int32_t tile, const tile_place &place,
                                                 bool more)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][half]), parity ^ 1);
        if (half == 1) {
            set_mask(w, m, slot, tile, place, more);
        }
        copy_portion<BLOCKS>(all, w, m, slot, 2 * half, place);
        copy_portion<BLOCKS>(all, w, m, slot, 2 * half + 1, place);
    }
}

/* all_see: tokens that every row sees. */
template <int BLOCKS>
static __device__ __forceinline__ void set_state(const fmlac_work &w, plan<BLOCKS> *m, int slot, int32_t tile,
                                                 const tile_place &place, bool more, int32_t all_see)
{
    int32_t end = tile * TOKENS + TOKENS;
    bool whole = place.there && end <= w.main_count && end <= all_see;
    bool unclean = all_see < end && all_see < w.main_count;
    m->more[slot] = (more ? STATE_MORE : 0) | (whole ? 0 : STATE_MASKED) | (unclean ? STATE_UNCLEAN : 0);
}

/* In turns: half `half` of it. Who has read block 8, or more[], may be the one who frees the other half. */
template <int BLOCKS>
static __device__ __forceinline__ void copy_half(const fmlac_mqa_sm90a &all, const fmlac_work &w, plan<BLOCKS> *m,
                                                 int slot, int half, uint32_t parity, int32_t tile,
                                                 const tile_place &place, bool more, int32_t all_see)
{
    ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][half]), parity ^ 1);
    copy_portion<BLOCKS>(all, w, m, slot, 2 * half, place);
    if (half == 1) {
        ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][0]), parity ^ 1);
        set_mask(w, m, slot, tile, place, more);
        set_state(w, m, slot, tile, place, more, all_see);
    }
    copy_portion<BLOCKS>(all, w, m, slot, 2 * half + 1, place);
}

/* In turns: half `half` of a piece's tiles. */
template <int BLOCKS>
static __device__ __forceinline__ void copy_halves(const fmlac_mqa_sm90a &all, const fmlac_work &w, plan<BLOCKS> *m,
                                                   const piece &c, slot_uses uses, int half)
{
    const fmlac_mqa &p = all.mqa;
    const int32_t begin = c.begin, end = c.end, all_see = c.all_see;
    int32_t next = begin < end ? fetch_page(p, w, begin * TOKENS) : 0;
#pragma unroll 1
    for (int32_t t = begin; t < end; t++) {
        const tile_place place = place_tile(p, t * TOKENS, next);
        if (t + 1 < end) { /* a tile ahead, and not looked at before its turn: the table is far away */
            next = fetch_page(p, w, (t + 1) * TOKENS);
        }
        copy_half(all, w, m, (t - begin) & 1, half, tile_parity(uses, t - begin), t, place, t + 1 < end, all_see);
    }
}

/* In turns: Q of all pieces but the first sets out as soon as nobody reads the one before. */
template <int BLOCKS> static __device__ __forceinline__ void ask_queries(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            return;
        }
        if (all.has_q && i > 0) {
            ptx_mbarrier_wait(ptx_shared_address(&m->q_free), (i - 1) & 1);
            ask_q(all, m, c.work, c.outer, c.inner);
        }
        ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
    }
}

template <int BLOCKS, int TURNS>
static __device__ __forceinline__ void produce_pages(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
    const fmlac_mqa &p = all.mqa;
    if (threadIdx.x / 32 == MMA_WARPS + 1) { /* the scout */
        if (!is_plain_paged(p)) {            /* else it has in the prologue */
            walk_begin(p, &m->walk, blockIdx.x, gridDim.x, threadIdx.x % 32);
        }
        for (uint32_t i = 0; i == 0 || m->pieces[(i - 1) & 1].there; i++) {
            scout_piece(p, m, i);
        }
        return;
    }
    if constexpr (TURNS) {
        if (threadIdx.x == (MMA_WARPS + 3) * 32) {
            ask_queries(all, m);
        }
    }
    if (TURNS ? threadIdx.x % 64 != 0 : threadIdx.x != MMA_WARPS * 32) {
        return;
    }
    const int half = (int)(threadIdx.x - MMA_WARPS * 32) / 64;
    slot_uses uses = 0;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            return;
        }
        const fmlac_work w = c.work;
        int32_t begin = c.begin, end = c.end;
        if (i == 0 && all.has_q && half == 0) {
            ask_q(all, m, w, c.outer, c.inner);
        }
        if constexpr (TURNS) {
            copy_halves(all, w, m, c, uses, half);
        } else {
            tile_place place, next;
            if (begin < end) {
                next = find_tile(p, w, begin);
            }
#pragma unroll 1
            for (int32_t t = begin; t < end; t++) {
                place = next;
                if (t + 1 < end) { /* asked before the waits: the table is far away */
                    next = find_tile(p, w, t + 1);
                }
                copy_tile<BLOCKS>(all, w, m, (t - begin) & 1, tile_parity(uses, t - begin), t, place, t + 1 < end);
            }
        }
        if (!TURNS || half == 1) {
            prefetch_result(p.cut, c);
        }
        uses = uses_after(uses, end - begin);
        ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
    }
}

#endif
