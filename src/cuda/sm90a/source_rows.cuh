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

/* Dims of row i from this thread's chunk on. */
static __device__ __forceinline__ int32_t share_dims(const fmlac_mqa &p, const row_share &share, int i)
{
    return (share.there >> i & 1) != 0 ? p.d_qk - (int32_t)(ptx_thread() % 8) * 8 : 0;
}

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

/* Blocks first, first + 1, .. of a tile. */
template <int COUNT>
static __device__ __forceinline__ void copy_blocks(const fmlac_mqa &p, const row_share &share, int first)
{
    uint32_t to = share.to + first * BLOCK_BYTES;
    if (!p.aligned) {
#pragma unroll 1
        for (int at = 0; at < COUNT * ROW_COPIES; at++) {
            int i = at % ROW_COPIES, dim = (first + at / ROW_COPIES) * 64;
            int32_t dims = share_dims(p, share, i);
            const uint8_t *from = i == 0   ? share.from[0]
                                  : i == 1 ? share.from[1]
                                  : i == 2 ? share.from[2]
                                           : share.from[3];
            copy_bytes(to + at / ROW_COPIES * BLOCK_BYTES + i * 2048, from + dim * 2, dims - dim);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        const uint8_t *from = share.from[i] + first * 128;
        int32_t dims = share_dims(p, share, i) - first * 64;
#pragma unroll
        for (int block = 0; block < COUNT; block++) {
            ptx_copy_async_16_if(to + block * BLOCK_BYTES + i * 2048, from + block * 128, dims > block * 64);
        }
    }
}

static __device__ __forceinline__ void portion_there(const fmlac_mqa &p, uint32_t full)
{
    if (p.aligned) {
        ptx_mbarrier_arrive_copies(full);
    } else {
        ptx_fence_async_proxy();
        ptx_mbarrier_arrive(full);
    }
}

/* A tile into a slot, half by half in the order in which they become free. */
template <int BLOCKS>
static __device__ __forceinline__ void copy_rows(const fmlac_mqa &p, const row_share &share, plan<BLOCKS> *m, int slot,
                                                 uint32_t parity)
{
    uint32_t full = ptx_shared_address(m->full[slot]), free = ptx_shared_address(m->free[slot]);
    ptx_mbarrier_wait(free, parity ^ 1);
    copy_blocks<2>(p, share, 0);
    portion_there(p, full);
    copy_blocks<2>(p, share, 2);
    portion_there(p, full + 8);
    ptx_mbarrier_wait(free + 8, parity ^ 1);
    copy_blocks<2>(p, share, 4);
    portion_there(p, full + 16);
    copy_blocks<BLOCKS - 6>(p, share, 6);
    portion_there(p, full + 24);
}

/* Which tokens of the tile are there, and what follows; by one warp, once the slot's last reader has left. */
template <int BLOCKS>
static __device__ __forceinline__ void publish_mask(plan<BLOCKS> *m, int slot, const tile_tokens &tile,
                                                    const uint32_t there[2])
{
    if (threadIdx.x % 32 == 0) {
        m->mask[slot][0] = there[0];
        m->mask[slot][1] = there[1];
        m->more[slot] = tile.more;
        ptx_mbarrier_arrive(ptx_shared_address(&m->full[slot][PORTIONS - 1]));
    }
}

/*
 * A plain list: indices into a pool without gaps between pages, and no extra list. As long as its entries all name
 * tokens, a tile is the next 64 of them and nothing need be searched; from the first that does not, the list goes on by
 * scan_next, with the same tiles.
 */
typedef struct row_list {
    list_ahead now, ahead; /* plain: entries lane, lane + 32 of the next tile and the one after it; else ahead for the
                              scan */
    bool plain;
} row_list;

/* Read anew: registers are dear here. */
static __device__ __forceinline__ list_ahead fetch_plain(const volatile list_scan *scan, int32_t tile)
{
    list_ahead to = {{-1, -1}};
    const int32_t *entries = scan->main;
    int32_t end = scan->end;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int32_t at = tile * TOKENS + 32 * h + (int32_t)(ptx_thread() % 32);
        if (at < end) {
            to.entry[h] = entries[at];
        }
    }
    return to;
}

/* A list from tile `begin` to tile `end`, which has tiles. */
static __device__ __forceinline__ void begin_list(const fmlac_mqa &p, const fmlac_work &w, int32_t begin, int32_t end,
                                                  list_scan *scan, row_list *list)
{
    const fmlac_pool &pool = p.main.pool;
    list->ahead = scan_begin(p, w, begin, end, scan);
    list->plain = !is_paged(&p) && p.extra.kind == FMLAC_LIST_NONE &&
                  (pool.num_pages == 1 || pool.page_stride == pool.page_size * pool.token_stride);
    if (list->plain) {
        list->now = list->ahead;
        list->ahead = fetch_plain(scan, begin + 1);
    }
}

/* Whether tile `tile` is 64 entries that all name tokens, and `more`, if another tile follows, can be told. */
static __device__ __forceinline__ bool plain_next(const row_list *list, const volatile list_scan *scan, int32_t tile,
                                                  bool *more)
{
    const uint32_t slots = scan->main_slots;
    const int32_t *now = list->now.entry, *ahead = list->ahead.entry;
    *more = __any_sync(0xFFFFFFFFu, (uint32_t)ahead[0] < slots || (uint32_t)ahead[1] < slots);
    bool all = __all_sync(0xFFFFFFFFu, (uint32_t)now[0] < slots && (uint32_t)now[1] < slots);
    return all && (*more || scan->end <= (tile + 1) * TOKENS);
}

static __device__ __forceinline__ void share_plain(const fmlac_mqa &p, const fmlac_work &w, const row_list *list,
                                                   row_share *share)
{
    int lane = (int)ptx_thread() % 32, warp = (int)ptx_thread() / 32 % 4;
    const uint8_t *base = p.main.pool.data + w.kv_head * p.main.pool.head_stride + lane % 8 * 16;
    share->there = 15;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        int32_t entry = __shfl_sync(0xFFFFFFFFu, list->now.entry[i / 2], i % 2 * 16 + warp * 4 + lane / 8);
        share->from[i] = base + entry * p.main.pool.token_stride;
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
template <int BLOCKS>
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
    if (list->plain && plain_next(list, scan, tile, &tokens.more)) {
        share_plain(p, w, list, &share);
        list->now = list->ahead;
        list->ahead = fetch_plain(scan, tile + 2);
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
    copy_rows(p, share, m, slot, parity);
    if (warp == 0) {
        publish_mask(m, slot, tokens, there);
    }
    return tokens.more;
}

template <int BLOCKS> static __device__ __forceinline__ void produce_rows(const fmlac_mqa &p, plan<BLOCKS> *m)
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
        int32_t t = 0;
        bool there = c.begin < c.end, more;
        row_list list;
        if (there) {
            begin_list(p, w, c.begin, c.end, &m->scans[warp], &list);
        }
#pragma unroll 1
        do {
            more = false;
            if (there) {
                int32_t tile = *(const volatile int32_t *)&c.begin + t;
                more = produce_tile(p, w, m, &list, t & 1, tile_parity(uses, t), tile);
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
