/* SPDX-License-Identifier: MIT */
/* source.cuh: what the token sources share: list entries and where they point. */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_CUH

#include "plan.cuh"

/* What the list says at a position: a page (PAGED) or a slot; -1: nothing is attended there. */
static __device__ __forceinline__ int32_t fetch_entry(const fmlac_mqa &p, const fmlac_work &w, int32_t position)
{
    if (p.main.kind == FMLAC_LIST_PAGED) {
        if (position >= w.main_count) {
            return -1;
        }
        uint32_t at = (uint32_t)position / (uint32_t)p.main.pool.page_size;
        return p.main.block_table ? p.main.block_table[w.request * p.main.table_stride + at]
                                  : (int32_t)(w.request * p.main.max_pages + at);
    }
    if (position < w.main_count) {
        return index_row(&p, &p.main, w.first, w.kv_head)[position];
    }
    int32_t at = position - (int32_t)w.main_count; /* the extra list's entries follow the main one's */
    return at < w.extra_count ? index_row(&p, &p.extra, w.first, w.kv_head)[at] : -1;
}

/*
 * A producer warp's way through its piece of a list. Entries of index lists that name no token are left out, so that
 * tiles are full and a row's bits do not depend on what lies between; entries of paged lists keep their positions. A
 * tile holds tokens of one pool: the extra list's begin a new one. Every warp walks by itself, 64 positions at a time,
 * through a ring of its own; the next entries are fetched while a tile is loaded.
 */
typedef struct list_scan {
    int32_t at, end;      /* positions */
    int32_t first;        /* place in the ring of the next tile's first entry */
    int32_t main, have;   /* entries in the ring: of the main list, which come first; all */
    int32_t entry[2];     /* of positions at + lane, at + 32 + lane */
} list_scan;

/* Tokens of the next tile: they begin at `first` of the ring. */
typedef struct tile_tokens {
    int32_t first, count;
    bool extra, more; /* of the extra pool; another tile of the piece follows */
} tile_tokens;

static __device__ __forceinline__ void scan_fetch(const fmlac_mqa &p, const fmlac_work &w, list_scan *scan)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int32_t position = scan->at + 32 * h + (int32_t)(threadIdx.x % 32);
        scan->entry[h] = position < scan->end ? fetch_entry(p, w, position) : -1;
    }
}

static __device__ __forceinline__ void scan_begin(const fmlac_mqa &p, const fmlac_work &w, int32_t begin, int32_t end,
                                                  list_scan *scan)
{
    scan->at = begin * TOKENS;
    scan->end = (int32_t)clamped(w.main_count + w.extra_count, 0, end * TOKENS);
    scan->first = scan->main = scan->have = 0;
    scan_fetch(p, w, scan);
}

/* The next tile. The ring is filled until it holds more than a tile, so that `more` is known. */
static __device__ __forceinline__ tile_tokens scan_next(const fmlac_mqa &p, const fmlac_work &w, list_scan *scan,
                                                        uint32_t *ring)
{
    int lane = threadIdx.x % 32;
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
    __syncwarp(); /* the tile before has been read */
#pragma unroll 1
    while (scan->have <= TOKENS && scan->at < scan->end) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int32_t position = scan->at + 32 * h + lane, entry = scan->entry[h];
            bool extra = position >= (int32_t)w.main_count;
            int64_t slots = extra ? p.extra.pool.num_pages * p.extra.pool.page_size
                                  : p.main.pool.num_pages * p.main.pool.page_size;
            bool kept = position < scan->end && (paged || (entry >= 0 && entry < slots));
            uint32_t all = __ballot_sync(0xFFFFFFFFu, kept), main = __ballot_sync(0xFFFFFFFFu, kept && !extra);
            if (kept) {
                ring[(scan->first + scan->have + __popc(all & ((1u << lane) - 1))) % RING] = (uint32_t)entry;
            }
            scan->have += __popc(all);
            scan->main += __popc(main);
        }
        scan->at += TOKENS;
        scan_fetch(p, w, scan);
    }
    __syncwarp();
    int32_t same = scan->main > 0 ? scan->main : scan->have;
    tile_tokens tile = {scan->first, same < TOKENS ? same : TOKENS, scan->main == 0, false};
    scan->first = (scan->first + tile.count) % RING;
    scan->have -= tile.count;
    scan->main -= tile.extra ? 0 : tile.count;
    tile.more = scan->have > 0;
    return tile;
}

/* Where token `row` of a tile lies; `position`: of the tile's first entry in a paged list. */
static __device__ __forceinline__ token_place find_token(const fmlac_mqa &p, const fmlac_work &w, const uint32_t *ring,
                                                         const tile_tokens &tile, int32_t position, int row)
{
    token_place place = {nullptr, 0};
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
    const fmlac_pool &pool = tile.extra ? p.extra.pool : p.main.pool;
    if (row < tile.count) {
        int32_t entry = (int32_t)ring[(tile.first + row) % RING];
        uint32_t size = (uint32_t)pool.page_size, dividend = paged ? (uint32_t)(position + row) : (uint32_t)entry;
        uint32_t page = dividend / size, at = dividend - page * size;
        page = paged ? (uint32_t)entry : page;
        if (entry >= 0 && page < pool.num_pages) {
            place.row = pool.data + page * pool.page_stride + at * pool.token_stride + w.kv_head * pool.head_stride;
        }
        /* pages are shorter than 2^31 bytes */
        place.scales = pool.scale_offset;
        if (pool.layout == FMLAC_LAYOUT_PAGE) {
            place.scales += (int32_t)((size - at) * (uint32_t)pool.token_stride + at * (uint32_t)pool.scale_row_bytes);
        }
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
