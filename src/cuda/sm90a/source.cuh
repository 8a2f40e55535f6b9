/* SPDX-License-Identifier: MIT */
/* source.cuh: what the token sources share: list entries and where they point. */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_CUH

#include "plan.cuh"

/* In turns, all that is asked about a plain tile. */
#define STATE_MORE    1 /* another tile of the piece follows */
#define STATE_MASKED  2 /* some rows do not attend all tokens */
#define STATE_UNCLEAN 4 /* some rows do not see all tokens: values may be numbers that they must not meet */
#define STATE_NEVER   8 /* of no tile, which ptxas does not know */

/* PAGED: the page of a position below main_count. */
static __device__ __forceinline__ int32_t fetch_page(const fmlac_mqa &p, const fmlac_work &w, int32_t position)
{
    uint32_t at = (uint32_t)position / (uint32_t)p.main.pool.page_size;
    return p.main.block_table ? p.main.block_table[w.request * p.main.table_stride + at]
                              : (int32_t)(w.request * p.main.max_pages + at);
}

/*
 * A producer warp's way through its piece of a list. Entries of index lists that name no token are left out, so that
 * tiles are full and a row's bits do not depend on what lies between; entries of paged lists keep their positions. A
 * tile holds tokens of one pool: the extra list's begin a new one. Every warp walks by itself, 64 positions at a time,
 * through a ring of its own; the next entries are fetched while a tile is loaded.
 */
/* Tokens of the next tile: they begin at `first` of the ring. */
typedef struct tile_tokens {
    int32_t first, count;
    bool extra, more; /* of the extra pool; another tile of the piece follows */
} tile_tokens;

/* The entries of positions at + lane, at + 32 + lane. */
typedef struct list_ahead {
    int32_t entry[2];
} list_ahead;

static __device__ __forceinline__ list_ahead scan_fetch(const fmlac_mqa &p, const fmlac_work &w, const list_scan *scan,
                                                        int32_t at)
{
    bool paged = is_paged(&p);
    list_ahead ahead = {{-1, -1}};
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int32_t position = at + 32 * h + (int32_t)(threadIdx.x % 32);
        if (position < scan->end) {
            const int32_t *list = position < scan->main_end ? scan->main : scan->extra;
            ahead.entry[h] = paged ? fetch_page(p, w, position) : list[position];
        }
    }
    return ahead;
}

static __device__ __forceinline__ uint32_t slots_of(const fmlac_pool &pool)
{
    int64_t slots = pool.num_pages * pool.page_size;
    return slots < INT32_MAX ? (uint32_t)slots : INT32_MAX;
}

static __device__ __forceinline__ list_ahead scan_begin(const fmlac_mqa &p, const fmlac_work &w, int32_t begin,
                                                        int32_t end, list_scan *scan)
{
    bool indexed = !is_paged(&p), extra = p.extra.kind == FMLAC_LIST_INDEXED;
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        scan->main = indexed ? index_row(&p, &p.main, w.first, w.kv_head) : nullptr;
        scan->extra = extra ? index_row(&p, &p.extra, w.first, w.kv_head) - w.main_count : nullptr;
        scan->main_slots = indexed ? slots_of(p.main.pool) : 0xFFFFFFFFu; /* a page that is none keeps its place */
        scan->extra_slots = slots_of(p.extra.pool);
        scan->main_end = (int32_t)w.main_count;
        scan->at = begin * TOKENS;
        scan->end = (int32_t)clamped(w.main_count + w.extra_count, 0, end * TOKENS);
        scan->first = scan->have_main = scan->have = 0;
    }
    __syncwarp();
    return scan_fetch(p, w, scan, begin * TOKENS);
}

/* The next tile. The ring is filled until it holds more than a tile, so that `more` is known. */
static __device__ __forceinline__ tile_tokens scan_next(const fmlac_mqa &p, const fmlac_work &w, list_scan *scan,
                                                        list_ahead *ahead, uint32_t *ring)
{
    int lane = threadIdx.x % 32;
    __syncwarp(); /* the tile before has been read */
    int32_t at = scan->at, first = scan->first, have = scan->have, have_main = scan->have_main;
#pragma unroll 1
    while (have <= TOKENS && at < scan->end) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int32_t position = at + 32 * h + lane;
            bool main = position < scan->main_end;
            uint32_t entry = (uint32_t)ahead->entry[h], slots = main ? scan->main_slots : scan->extra_slots;
            bool kept = position < scan->end && (entry < slots || slots == 0xFFFFFFFFu);
            uint32_t all = __ballot_sync(0xFFFFFFFFu, kept);
            if (kept) {
                ring[(first + have + __popc(all & ((1u << lane) - 1))) % RING] = entry;
            }
            have += __popc(all);
            have_main += __popc(__ballot_sync(0xFFFFFFFFu, kept && main));
        }
        at += 64;
        *ahead = scan_fetch(p, w, scan, at);
    }
    int32_t same = have_main > 0 ? have_main : have;
    bool extra = have_main == 0 && have > 0; /* a tile of nothing is the main pool's: there may be no other */
    tile_tokens tile = {first, same < TOKENS ? same : TOKENS, extra, have > same || have > TOKENS};
    __syncwarp();
    if (lane == 0) {
        scan->at = at;
        scan->first = (first + tile.count) % RING;
        scan->have = have - tile.count;
        scan->have_main = have_main - (tile.extra ? 0 : tile.count);
    }
    __syncwarp();
    return tile;
}

/* Whether token `row` of a tile is there. */
static __device__ __forceinline__ bool token_there(const fmlac_mqa &p, const uint32_t *ring, const tile_tokens &tile,
                                                   int row)
{
    bool paged = is_paged(&p);
    return row < tile.count && (!paged || ring[(tile.first + row) % RING] < p.main.pool.num_pages);
}

/* Where the token of an entry lies; `position`: its own, in a paged list. */
static __device__ __forceinline__ token_place entry_place(const fmlac_mqa &p, const fmlac_work &w,
                                                          const fmlac_pool &pool, uint32_t entry, int32_t position)
{
    token_place place;
    bool paged = is_paged(&p);
    uint32_t size = (uint32_t)pool.page_size, dividend = paged ? (uint32_t)position : entry;
    uint32_t page = pool.page_shift >= 0 ? dividend >> pool.page_shift : dividend / size;
    uint32_t at = dividend - page * size;
    page = paged ? entry : page;
    place.row = pool.data + page * pool.page_stride + at * pool.token_stride + w.kv_head * pool.head_stride;
    /* pages are shorter than 2^31 bytes */
    place.scales = pool.scale_offset;
    if (pool.layout == FMLAC_LAYOUT_PAGE) {
        place.scales += (int32_t)((size - at) * (uint32_t)pool.token_stride + at * (uint32_t)pool.scale_row_bytes);
    }
    return place;
}

/* Where token `row` of a tile lies; `position`: of the tile's first entry in a paged list. */
static __device__ __forceinline__ token_place find_token(const fmlac_mqa &p, const fmlac_work &w, const uint32_t *ring,
                                                         const tile_tokens &tile, int32_t position, int row)
{
    token_place place = {nullptr, 0};
    const fmlac_pool &pool = tile.extra ? p.extra.pool : p.main.pool;
    if (token_there(p, ring, tile, row)) {
        place = entry_place(p, w, pool, ring[(tile.first + row) % RING], position + row);
    }
    return place;
}

/* 0 .. 8 numbers of two bytes from any address, zeros behind them, to shared memory. */
static __device__ __forceinline__ void copy_bytes(uint32_t to, const uint8_t *from, int count)
{
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        ptx_store_shared_u16(to + 2 * i, (uint16_t)(i < count ? bytes_u16(from + 2 * i) : 0));
    }
}

#endif
