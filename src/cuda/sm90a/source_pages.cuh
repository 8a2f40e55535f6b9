/* SPDX-License-Identifier: MIT */
/*
 * source_pages.cuh: tokens of a paged list whose pages hold a multiple of 64 tokens, by TMA. One lane copies: a tile is
 * 8 or 9 boxes of 64 tokens x 64 dims. A page that is none is a box outside the pool: zeros.
 * TWINS: two blocks of a cluster have the same tokens for other rows. Each brings every other box, to both, once the
 * place is free in both; a block's barrier waits for the bytes of all its boxes, whoever brings them.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_PAGES_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_PAGES_CUH

#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "source.cuh"

/* 1: the copying warp asks for the next tile's lines in L2, by ordinary prefetches, while it copies one. */
#ifndef RELAY_PREFETCH
#define RELAY_PREFETCH 0
#endif

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

/* Half of a tile's tokens, whole rows, to L2; a warp calls. */
template <int BLOCKS>
static __device__ __forceinline__ void prefetch_half(const fmlac_mqa &p, const fmlac_work &w, const tile_place &place,
                                                     int half)
{
    const fmlac_pool &pool = p.main.pool;
    if (place.there) {
        const uint8_t *row = pool.data + place.page * pool.page_stride + w.kv_head * pool.head_stride +
                             (place.row + half * 32 + threadIdx.x % 32) * pool.token_stride;
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            ptx_prefetch_l2(row + block * 128);
        }
    }
}

/* A portion of a tile; one lane calls. */
template <int BLOCKS, int TWINS>
static __device__ __forceinline__ void copy_portion(const fmlac_mqa_sm90a &all, const fmlac_work &w, plan<BLOCKS> *m,
                                                    int slot, int portion, int32_t tile, const tile_place &place)
{
    const uint32_t rank = TWINS == 2 ? ptx_cluster_rank() : 0, full = ptx_shared_address(&m->full[slot][portion]);
    const int first = 2 * portion, last = portion == PORTIONS - 1 ? BLOCKS : first + 2;
    ptx_mbarrier_arrive_expect(full, (last - first) * BLOCK_BYTES);
    for (int block = first; block < last; block++) {
        uint32_t to = ptx_shared_address(m->k[slot][block]);
        if (TWINS == 1) {
            ptx_tma_load_4d(to, &all.pages, full, block * 64, place.row, place.page, w.kv_head, PTX_L2_EVICT_NORMAL);
        } else if ((uint32_t)(block + tile) % TWINS == rank) {
            ptx_tma_load_4d_to_all(to, &all.pages, full, block * 64, place.row, place.page, w.kv_head, 3,
                                   PTX_L2_EVICT_NORMAL);
        }
    }
}

/* Tile `tile` of the list, which lies at `place`, into a slot. `next`: where the next one lies, if there is one. */
template <int BLOCKS, int TWINS>
static __device__ __forceinline__ void copy_tile(const fmlac_mqa_sm90a &all, const fmlac_work &w, plan<BLOCKS> *m,
                                                 int slot, uint32_t parity, int32_t tile, const tile_place &place,
                                                 const tile_place &next, bool more)
{
    const bool copies = !RELAY_PREFETCH || threadIdx.x % 32 == 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][half]), parity ^ 1);
        if (copies && half == 1) {
            int64_t left = w.main_count - tile * TOKENS;
            uint64_t mask = !place.there ? 0 : left >= 64 ? ~0ull : (1ull << left) - 1;
            m->mask[slot][0] = (uint32_t)mask;
            m->mask[slot][1] = (uint32_t)(mask >> 32);
            m->more[slot] = more;
        }
        if (copies) {
            copy_portion<BLOCKS, TWINS>(all, w, m, slot, 2 * half, tile, place);
            copy_portion<BLOCKS, TWINS>(all, w, m, slot, 2 * half + 1, tile, place);
        }
        if (RELAY_PREFETCH && more && w.row0 == 0) {
            prefetch_half<BLOCKS>(all.mqa, w, next, half);
        }
    }
}

template <int BLOCKS, int TWINS>
static __device__ __forceinline__ void produce_pages(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
    const fmlac_mqa &p = all.mqa;
    if (threadIdx.x / 32 == MMA_WARPS + 1) { /* the scout */
        walk_begin(p, &m->walk, blockIdx.x / TWINS, gridDim.x / TWINS, threadIdx.x % 32);
        if (TWINS == 2) {
            walk_share(&m->walk, ptx_cluster_rank(), threadIdx.x % 32);
        }
        for (uint32_t i = 0; i == 0 || m->pieces[(i - 1) & 1].there; i++) {
            scout_piece(p, m, i);
        }
        return;
    }
    if (RELAY_PREFETCH ? threadIdx.x / 32 != MMA_WARPS : threadIdx.x != MMA_WARPS * 32) {
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
            copy_tile<BLOCKS, TWINS>(all, w, m, (t - begin) & 1, tile_parity(uses, t - begin), t, place, next,
                                     t + 1 < end);
        }
        uses = uses_after(uses, end - begin);
        if (RELAY_PREFETCH) {
            __syncwarp();
        }
        if (threadIdx.x % 32 == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
        }
    }
}

#endif
