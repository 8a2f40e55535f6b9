/* SPDX-License-Identifier: MIT */
/*
 * source_pages.cuh: tokens of a paged list whose pages hold a multiple of 64 tokens, by TMA. One lane copies: a tile is
 * 8 or 9 boxes of 64 tokens x 64 dims. A page that is none is a box outside the pool: zeros.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_PAGES_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_PAGES_CUH

#include "ptx/tma.cuh"
#include "source.cuh"

/* Where a tile of the list lies; a page that is none is outside the pool. */
typedef struct tile_place {
    int32_t page, row;
    bool there;
} tile_place;

static __device__ __forceinline__ tile_place find_tile(const fmlac_mqa &p, const fmlac_work &w, int32_t tile)
{
    int32_t position = tile * TOKENS, page = fetch_page(p, w, position);
    bool there = page >= 0 && page < p.main.pool.num_pages;
    tile_place place = {there ? page : (int32_t)p.main.pool.num_pages,
                        (int32_t)((uint32_t)position % (uint32_t)p.main.pool.page_size), there};
    return place;
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
            int64_t left = w.main_count - tile * TOKENS;
            uint64_t mask = !place.there ? 0 : left >= 64 ? ~0ull : (1ull << left) - 1;
            m->mask[slot][0] = (uint32_t)mask;
            m->mask[slot][1] = (uint32_t)(mask >> 32);
            m->more[slot] = more;
        }
        copy_portion<BLOCKS>(all, w, m, slot, 2 * half, place);
        copy_portion<BLOCKS>(all, w, m, slot, 2 * half + 1, place);
    }
}

template <int BLOCKS> static __device__ __forceinline__ void produce_pages(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
    const fmlac_mqa &p = all.mqa;
    if (threadIdx.x / 32 == MMA_WARPS + 1) { /* the scout */
        walk_begin(p, &m->walk, blockIdx.x, gridDim.x, threadIdx.x % 32);
        for (uint32_t i = 0; i == 0 || m->pieces[(i - 1) & 1].there; i++) {
            scout_piece(p, m, i);
        }
        return;
    }
    if (threadIdx.x != MMA_WARPS * 32) {
        return;
    }
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
        uses = uses_after(uses, end - begin);
        ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
    }
}

#endif
