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

/* Where the token lies that an entry names. Slots and positions are below 2^31. */
static __device__ __forceinline__ token_place find_token(const fmlac_mqa &p, const fmlac_work &w, int32_t position,
                                                         int32_t entry)
{
    token_place place;
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
    place.extra = !paged && entry >= 0 && position >= (int32_t)w.main_count;
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
