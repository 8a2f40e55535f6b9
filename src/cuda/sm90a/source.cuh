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
 * tiles are full and a row's bits do not depend on what lies between; entries of paged lists keep their positions.
 * Every warp walks by itself, 64 entries at a time, the next ones fetched ahead.
 */
typedef struct list_scan {
    int32_t at, end;  /* positions */
    int32_t have;     /* entries in the warp's buffer */
    int32_t entry[2]; /* of positions at + lane, at + 32 + lane */
} list_scan;

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
    scan->have = 0;
    scan_fetch(p, w, scan);
}

#define ENTRY_EXTRA 0x80000000u /* of an index list: the entry is of the extra one */

/* Fills the buffer with more than a tile, if the list has them. */
static __device__ __forceinline__ void scan_fill(const fmlac_mqa &p, const fmlac_work &w, list_scan *scan,
                                                 uint32_t *buffer)
{
    int lane = threadIdx.x % 32;
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
#pragma unroll 1
    while (scan->have <= TOKENS && scan->at < scan->end) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int32_t position = scan->at + 32 * h + lane, entry = scan->entry[h];
            bool extra = !paged && position >= (int32_t)w.main_count && position < scan->end;
            const fmlac_pool &pool = extra ? p.extra.pool : p.main.pool;
            bool kept = position < scan->end && (paged || (entry >= 0 && entry < pool.num_pages * pool.page_size));
            uint32_t all = __ballot_sync(0xFFFFFFFFu, kept);
            if (kept) {
                int at = scan->have + __popc(all & ((1u << lane) - 1));
                buffer[at] = (uint32_t)entry | (extra ? ENTRY_EXTRA : 0);
            }
            scan->have += __popc(all);
        }
        scan->at += TOKENS;
        scan_fetch(p, w, scan);
    }
    __syncwarp();
}

/* Drops a tile from the buffer. */
static __device__ __forceinline__ void scan_drop(list_scan *scan, uint32_t *buffer)
{
    int lane = threadIdx.x % 32;
    __syncwarp();
    uint32_t low = buffer[TOKENS + lane], high = buffer[TOKENS + 32 + lane];
    __syncwarp();
    buffer[lane] = low;
    buffer[32 + lane] = high;
    scan->have = scan->have > TOKENS ? scan->have - TOKENS : 0;
    __syncwarp();
}

/* Where token `row` of the tile lies whose list begins the buffer; `tile` counts positions of paged lists. */
static __device__ __forceinline__ token_place find_token(const fmlac_mqa &p, const fmlac_work &w,
                                                         const uint32_t *buffer, int32_t have, int32_t tile, int row)
{
    token_place place;
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
    uint32_t found = row < have ? buffer[row] : ~0u;
    int32_t position = tile * TOKENS + row;
    place.extra = !paged && row < have ? found >> 31 : 0;
    int32_t entry = (int32_t)(paged || row >= have ? found : found & ~ENTRY_EXTRA);
    const fmlac_pool &pool = place.extra ? p.extra.pool : p.main.pool;
    uint32_t size = (uint32_t)pool.page_size;
    uint32_t dividend = paged ? (uint32_t)position : (uint32_t)entry;
    uint32_t quot = dividend / size;
    uint32_t at = dividend - quot * size;
    int64_t page = paged ? (int64_t)entry : (int64_t)quot;
    uint8_t *begin = pool.data + page * pool.page_stride;
    bool there = entry >= 0 && page < pool.num_pages;
    place.row = there ? begin + at * pool.token_stride + w.kv_head * pool.head_stride : nullptr;
    /* pages are shorter than 2^31 bytes */
    place.scales = pool.scale_offset;
    if (pool.layout == FMLAC_LAYOUT_PAGE) {
        place.scales += (int32_t)((size - at) * (uint32_t)pool.token_stride + at * (uint32_t)pool.scale_row_bytes);
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
