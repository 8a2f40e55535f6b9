/* SPDX-License-Identifier: MIT */
/*
 * mqa_list.cuh: from a token list to the addresses of a tile's tokens. One summing warp walks the list, a few tiles
 * ahead of everybody; what it finds lies in a ring of s.ring tiles.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_LIST_CUH
#define FLASHMLA_CUDA_SM80_MQA_LIST_CUH

#include "mqa_shared.cuh"

static __device__ __forceinline__ int64_t page_of(const fmlac_pool &pool, int64_t place)
{
    return pool.page_shift >= 0 ? place >> pool.page_shift : quotient(place, pool.page_size);
}

/* The list's entry at a position, which is inside: of a paged list its page, else a slot. */
static __device__ __forceinline__ const int32_t *entry_of(const fmlac_mqa &p, const fmlac_work &w, int64_t position)
{
    if (p.main.kind == FMLAC_LIST_PAGED) {
        return p.main.block_table + w.request * p.main.table_stride + page_of(p.main.pool, position);
    }
    int64_t at = position - w.main_count;
    return at < 0 ? index_row(&p, &p.main, w.first, w.kv_head) + position
                  : index_row(&p, &p.extra, w.first, w.kv_head) + at;
}

/* -1 behind the end. */
static __device__ __forceinline__ int32_t entry_at(const fmlac_mqa &p, const mqa_shared &s, int64_t position)
{
    if (position >= s.piece->scan_end) {
        return -1;
    }
    if (p.main.kind == FMLAC_LIST_PAGED && !p.main.block_table) {
        return (int32_t)(s.work->request * p.main.max_pages + page_of(p.main.pool, position));
    }
    return *entry_of(p, *s.work, position);
}

/* Where token number `at` of a page lies, and its scales if they lie elsewhere. */
static __device__ __forceinline__ void put_token(const fmlac_mqa &p, const mqa_shared &s, int place, bool there,
                                                 const fmlac_pool &pool, int64_t page, int64_t at,
                                                 unsigned long long bit)
{
    const uint8_t *begin = pool.data + page * pool.page_stride;
    const uint8_t *row = begin + at * pool.token_stride + s.work->kv_head * pool.head_stride;
    s.address[place] = there ? (unsigned long long)row | bit : 0;
    if (p.quantised) {
        const uint8_t *scale = begin + pool.page_size * pool.token_stride + at * pool.scale_row_bytes;
        s.scale[place] = there && pool.layout == FMLAC_LAYOUT_PAGE ? (unsigned long long)scale : 0;
    }
}

/* Places are kept, since what a row sees is counted in places. */
template <class S>
static __device__ __forceinline__ void next_of_pages(const fmlac_mqa &p, const mqa_shared &s, int ring)
{
    const fmlac_pool &pool = p.main.pool;
#pragma unroll 1
    for (int base = 0; base < S::TOKENS; base += 32) {
        int i = base + ptx_thread() % 32;
        int64_t position = s.piece->scan_at + i, page = i < S::TOKENS ? entry_at(p, s, position) : -1;
        bool there = page >= 0 && page < pool.num_pages;
        s.mask[ring * 2 + base / 32] = __ballot_sync(0xFFFFFFFFu, there);
        if (i < S::TOKENS) {
            int64_t at = position - page_of(pool, position) * pool.page_size;
            put_token(p, s, ring * S::TOKENS + i, there, pool, page, at, 0);
        }
    }
    __syncwarp();
    if (ptx_thread() % 32 == 0) {
        s.piece->scan_at += S::TOKENS;
    }
    __syncwarp();
}

/* Entries that name no token are left out, so tiles hold the attended tokens one after another and a row's bits do not
 * depend on what lies between them; main list first, then the extra one. */
template <class S>
static __device__ __forceinline__ void next_of_indices(const fmlac_mqa &p, const mqa_shared &s, int ring)
{
    int lane = ptx_thread() % 32, filled = 0;
#pragma unroll 1
    while (filled < S::TOKENS && s.piece->scan_at < s.piece->scan_end) {
        int64_t position = s.piece->scan_at + lane, entry = entry_at(p, s, position);
        bool extra = position >= s.work->main_count;
        const fmlac_pool &pool = extra ? p.extra.pool : p.main.pool;
        int64_t page = entry < 0 ? 0 : page_of(pool, entry);
        bool there = entry >= 0 && page < pool.num_pages;
        uint32_t mask = __ballot_sync(0xFFFFFFFFu, there);
        int place = filled + __popc(mask & ((1u << lane) - 1));
        if (there && place < S::TOKENS) {
            put_token(p, s, ring * S::TOKENS + place, true, pool, page, entry - page * pool.page_size,
                      extra ? EXTRA_BIT : 0);
        }
        uint32_t last = __ballot_sync(0xFFFFFFFFu, there && place == S::TOKENS - 1);
        filled += __popc(mask);
        __syncwarp();
        if (lane == 0) {
            s.piece->scan_at += last ? __popc(last - 1) + 1 : 32; /* entries that were looked at */
        }
        __syncwarp();
    }
    filled = filled < S::TOKENS ? filled : S::TOKENS;
    for (int i = filled + lane; i < S::TOKENS; i += 32) {
        s.address[ring * S::TOKENS + i] = 0;
    }
    if (lane < 2) {
        int bits = filled - lane * 32;
        s.mask[ring * 2 + lane] = bits <= 0 ? 0 : bits < 32 ? (1u << bits) - 1 : 0xFFFFFFFFu;
    }
}

/* One warp: addresses and mask of the next tile; the entries after it are asked for. */
template <class S> static __device__ __forceinline__ void next_tile(const fmlac_mqa &p, const mqa_shared &s, int ring)
{
    if (p.main.kind == FMLAC_LIST_PAGED) {
        next_of_pages<S>(p, s, ring);
    } else {
        next_of_indices<S>(p, s, ring);
    }
    int64_t next = s.piece->scan_at + ptx_thread() % 32 * (S::TOKENS / 32 + 1);
    if (next < s.piece->scan_end && (p.main.kind != FMLAC_LIST_PAGED || p.main.block_table)) {
        ptx_prefetch(entry_of(p, *s.work, next));
    }
}

/* One warp: sets out for the tiles of a piece. */
template <class S> static __device__ __forceinline__ void begin_list(const mqa_shared &s)
{
    int64_t count = s.work->main_count + s.work->extra_count;
    int64_t begin = s.piece->begin * S::TOKENS, end = begin + (int64_t)s.piece->count * S::TOKENS;
    if (threadIdx.x % 32 == 0) {
        s.piece->scan_at = begin;
        s.piece->scan_end = end < count ? end : count;
    }
    __syncwarp();
}

#endif
