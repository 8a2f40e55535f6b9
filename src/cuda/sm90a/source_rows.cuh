/* SPDX-License-Identifier: MIT */
/*
 * source_rows.cuh: tokens of 16-bit numbers from anywhere, by cp.async. 128 threads: thread i copies 16-byte chunk i %
 * 8 of every block of rows i / 8, i / 8 + 16, ...: eight lanes make one swizzled row of a block. The copies are a
 * straight run of instructions with constant distances: one warp per scheduler has to issue 36 of them per tile, so
 * whatever else stands between them is paid for.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_ROWS_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_ROWS_CUH

#include "source.cuh"

#define ROW_COPIES 4 /* rows of a tile that a thread takes part in */

/* A thread's share of a tile. */
typedef struct row_share {
    const uint8_t *from[ROW_COPIES]; /* its chunk of block 0 */
    uint32_t there;                  /* bit i: the token of row i is not absent */
    uint32_t to;                     /* its chunk of block 0 of the first row, in shared memory */
} row_share;

/* Lanes 0..15 find the warp's sixteen tokens: lane 4i + j the one of row 16i + 4 warp + j. */
static __device__ __forceinline__ void share_tile(const fmlac_mqa &p, const fmlac_work &w, const uint32_t *ring,
                                                  const tile_tokens &tile, int32_t position, row_share *share)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    token_place place = find_token(p, w, ring, tile, position, lane / 4 % 4 * 16 + warp * 4 + lane % 4);
    share->there = 0;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        const uint8_t *row = (const uint8_t *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)place.row, i * 4 + lane / 8);
        share->there |= row ? 1u << i : 0;
        share->from[i] = (row ? row : p.main.pool.data) + lane % 8 * 16;
    }
}

/* Portion `portion` of a tile whose tokens are all there: blocks `first` to `first` + COUNT - 1. */
template <int COUNT>
static __device__ __forceinline__ void copy_portion_rows(const row_share &share, int first, uint32_t full)
{
#pragma unroll
    for (int block = first; block < first + COUNT; block++) {
#pragma unroll
        for (int i = 0; i < ROW_COPIES; i++) {
            ptx_copy_async_16(share.to + block * BLOCK_BYTES + i * 2048, share.from[i] + block * 128, 16);
        }
    }
    ptx_mbarrier_arrive_copies(full);
}

/* A tile into a slot, half by half in the order in which they become free. */
template <int BLOCKS>
static __device__ __forceinline__ void copy_rows(const row_share &share, uint32_t full, uint32_t free, uint32_t parity)
{
    ptx_mbarrier_wait(free, parity ^ 1);
    copy_portion_rows<2>(share, 0, full);
    copy_portion_rows<2>(share, 2, full + 8);
    ptx_mbarrier_wait(free + 8, parity ^ 1);
    copy_portion_rows<2>(share, 4, full + 16);
    copy_portion_rows<BLOCKS - 6>(share, 6, full + 24);
}

/* The same of any rows: absent ones, of any width, at any address. Seldom, and so in a loop. */
template <int BLOCKS>
static __device__ __forceinline__ void copy_any_rows(const fmlac_mqa &p, const row_share &share, uint32_t full,
                                                     uint32_t free, uint32_t parity)
{
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
        if (block == 0 || block == 4) {
            ptx_mbarrier_wait(free + block / 4 * 8, parity ^ 1);
        }
        int32_t left = p.d_qk - block * 64 - (int32_t)(ptx_thread() % 8) * 8;
#pragma unroll
        for (int i = 0; i < ROW_COPIES; i++) {
            const uint8_t *from = share.from[i] + block * 128;
            uint32_t to = share.to + block * BLOCK_BYTES + i * 2048;
            int32_t dims = (share.there >> i & 1) != 0 ? left : 0;
            if (p.aligned) {
                ptx_copy_async_16_if(to, from, dims > 0);
            } else {
                copy_bytes(to, from, dims);
            }
        }
        if (block == BLOCKS - 1 || (block % 2 == 1 && block < 7)) {
            uint32_t portion = full + (block < 7 ? block / 2 : PORTIONS - 1) * 8;
            if (p.aligned) {
                ptx_mbarrier_arrive_copies(portion);
            } else {
                ptx_fence_async_proxy();
                ptx_mbarrier_arrive(portion);
            }
        }
    }
}

/* Which tokens of the tile are there, and what follows; by one warp, once the slot's last reader has left. */
template <int BLOCKS, int TURNS>
static __device__ __forceinline__ void publish_mask(plan<BLOCKS> *m, int slot, const tile_tokens &tile,
                                                    const uint32_t there[2])
{
    if (threadIdx.x % 32 == 0) {
        m->mask[slot][0] = there[0];
        m->mask[slot][1] = there[1];
        bool masked = TURNS && (there[0] & there[1]) != 0xFFFFFFFFu;
        m->more[slot] = (tile.more ? STATE_MORE : 0) | (masked ? STATE_MASKED : 0);
        ptx_mbarrier_arrive(ptx_shared_address(&m->full[slot][PORTIONS - 1]));
    }
}

/*
 * A plain list: indices into a pool without gaps between pages, and no extra list. As long as its entries all name
 * tokens, a tile is the next 64 of them and nothing need be searched; from the first that does not, the list goes on by
 * scan_next, with the same tiles. What a plain tile needs is in registers: beside products, each load from shared
 * memory takes hundreds of cycles.
 */
typedef struct row_list {
    list_ahead now, ahead;  /* plain: entries lane, lane + 32 of the next tile and the one after it; else ahead for the
                               scan */
    const int32_t *entries; /* plain: this lane's of the tile after that */
    int32_t left;           /* entries of the list from there on */
    const uint8_t *rows;    /* this thread's chunk of slot 0 */
    bool plain;
} row_list;

/* The entries of a tile, and on to the next one. */
static __device__ __forceinline__ list_ahead fetch_plain(row_list *list)
{
    list_ahead to = {{-1, -1}};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (32 * h < list->left) {
            to.entry[h] = list->entries[32 * h];
        }
    }
    list->entries += TOKENS;
    list->left -= TOKENS;
    return to;
}

/* A list from tile `begin` to tile `end`, which has tiles. */
static __device__ __forceinline__ void begin_list(const fmlac_mqa &p, const fmlac_work &w, int32_t begin, int32_t end,
                                                  list_scan *scan, row_list *list)
{
    const fmlac_pool &pool = p.main.pool;
    int lane = (int)ptx_thread() % 32;
    list->ahead = scan_begin(p, w, begin, end, scan);
    list->plain = !is_paged(&p) && p.extra.kind == FMLAC_LIST_NONE &&
                  (pool.num_pages == 1 || pool.page_stride == pool.page_size * pool.token_stride);
    if (list->plain) {
        list->now = list->ahead;
        list->entries = scan->main + (begin + 1) * TOKENS + lane;
        list->left = scan->end - (begin + 1) * TOKENS - lane;
        list->rows = pool.data + w.kv_head * pool.head_stride + lane % 8 * 16;
        list->ahead = fetch_plain(list);
    }
}

/* Whether a plain list's next tile is 64 entries that all name tokens, and `more`, if another tile follows, can be
 * told. */
static __device__ __forceinline__ bool plain_next(const fmlac_mqa &p, const row_list *list, bool *more)
{
    const uint32_t slots = slots_of(p.main.pool);
    const int32_t *now = list->now.entry, *ahead = list->ahead.entry;
    bool last = list->left + (int32_t)(ptx_thread() % 32) <= -TOKENS; /* the list ends with this tile */
    *more = __any_sync(0xFFFFFFFFu, (uint32_t)ahead[0] < slots || (uint32_t)ahead[1] < slots);
    bool all = __all_sync(0xFFFFFFFFu, (uint32_t)now[0] < slots && (uint32_t)now[1] < slots);
    return all && (*more || last);
}

static __device__ __forceinline__ void share_plain(const fmlac_mqa &p, const row_list *list, row_share *share)
{
    int lane = (int)ptx_thread() % 32, warp = (int)ptx_thread() / 32 % 4;
    share->there = 15;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        int32_t entry = __shfl_sync(0xFFFFFFFFu, list->now.entry[i / 2], i % 2 * 16 + warp * 4 + lane / 8);
        share->from[i] = list->rows + entry * p.main.pool.token_stride;
    }
}

/* The scan goes on from a tile, whose entries are fetched. */
static __device__ __forceinline__ void scan_from(list_scan *scan, int32_t tile)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        scan->at = tile * TOKENS;
    }
}

/* The next tile of a list, into a slot; `tile`: its number in the list, as long as all were full. Returns whether more
 * follow. */
template <int BLOCKS, int TURNS>
static __device__ __forceinline__ bool produce_tile(const fmlac_mqa &p, const fmlac_work &w, plan<BLOCKS> *m,
                                                    row_list *list, int slot, uint32_t parity, int32_t tile)
{
    int thread = (int)ptx_thread() - MMA_WARPS * 32; /* read anew: registers are dear here */
    int warp = __shfl_sync(0xFFFFFFFFu, thread / 32, 0);
    row_share share;
    share.to = ptx_shared_address(m->k[slot]) + chunk_offset(thread / 8, thread % 8);
    tile_tokens tokens = {0, TOKENS, false, false};
    uint32_t there[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
    list_scan *scan = &m->scans[warp];
    if (list->plain && plain_next(p, list, &tokens.more)) {
        share_plain(p, list, &share);
        list->now = list->ahead;
        list->ahead = fetch_plain(list);
    } else {
        uint32_t *ring = m->entries[warp];
        if (list->plain) {
            list->plain = false;
            list->ahead = list->now;
            scan_from(scan, tile);
        }
        tokens = scan_next(p, w, scan, &list->ahead, ring);
        share_tile(p, w, ring, tokens, tile * TOKENS, &share);
        if (warp == 0) {
            for (int h = 0; h < 2; h++) {
                there[h] = __ballot_sync(0xFFFFFFFFu, token_there(p, ring, tokens, 32 * h + thread % 32));
            }
        }
    }
    const uint32_t full = ptx_shared_address(m->full[slot]), free = ptx_shared_address(m->free[slot]);
    if (p.aligned && p.d_qk == BLOCKS * 64 && __all_sync(0xFFFFFFFFu, share.there == 15)) {
        copy_rows<BLOCKS>(share, full, free, parity);
    } else {
        copy_any_rows<BLOCKS>(p, share, full, free, parity);
    }
    if (warp == 0) {
        publish_mask<BLOCKS, TURNS>(m, slot, tokens, there);
    }
    return tokens.more;
}

template <int BLOCKS, int TURNS>
static __device__ __forceinline__ void produce_rows(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    int thread = threadIdx.x - MMA_WARPS * 32;
    int warp = __shfl_sync(0xFFFFFFFFu, thread / 32, 0);
    slot_uses uses = 0;
    if (warp == 0) { /* the scout */
        walk_begin(p, &m->walk, blockIdx.x, gridDim.x, thread % 32);
        scout_piece(p, m, 0);
    }
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            break;
        }
        const fmlac_work &w = c.work;
        int32_t t = 0, tile = c.begin;
        bool there = tile < c.end, more;
        row_list list;
        if (there) {
            begin_list(p, w, tile, c.end, &m->scans[warp], &list);
        }
#pragma unroll 1
        do {
            more = false;
            if (there) {
                more = produce_tile<BLOCKS, TURNS>(p, w, m, &list, t & 1, tile_parity(uses, t), tile + t);
            }
            if (warp == 0 && (t == 1 || (t == 0 && !more))) { /* both slots are full: there is time */
                scout_piece(p, m, i + 1);
            }
            t++;
        } while (more);
        uses = there ? uses_after(uses, t) : uses;
        arrive_together(ptx_shared_address(&m->piece_free[i & 1]));
    }
    ptx_copy_async_commit();
    ptx_copy_async_wait<0>();
}

#endif
