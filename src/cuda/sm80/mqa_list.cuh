/* SPDX-License-Identifier: MIT */
/*
 * mqa_list.cuh: from a token list to the addresses of a tile's tokens. The scoring warps take turns in walking the
 * list, a tile each, ahead of everybody; what they find lies in a ring of s.ring tiles. A piece's first tiles are
 * listed by the summing warps.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_LIST_CUH
#define FLASHMLA_CUDA_SM80_MQA_LIST_CUH

#include "mqa_shared.cuh"

static __device__ __forceinline__ int64_t page_of(const fmlac_pool &pool, int64_t place)
{
    return pool.page_shift >= 0 ? place >> pool.page_shift : quotient(place, pool.page_size);
}

/* Where token number `at` of a page lies, and its scales if they lie elsewhere. */
static __device__ __forceinline__ void put_token(const fmlac_mqa &p, const mqa_shared &s, int place, bool there,
                                                 const fmlac_pool &pool, int64_t page, int64_t at,
                                                 unsigned long long bit)
{
    const uint8_t *row = pool.data + page * pool.page_stride + s.work->kv_head * pool.head_stride;
    s.address[place] = there ? (unsigned long long)(row + at * pool.token_stride) | bit : 0;
    if (p.quantised && pool.layout == FMLAC_LAYOUT_PAGE) {
        const uint8_t *scale = pool.data + page * pool.page_stride + pool.page_size * pool.token_stride;
        s.scale[place] = there ? (unsigned long long)(scale + at * pool.scale_row_bytes) : 0;
    } else if (p.quantised) {
        s.scale[place] = 0;
    }
}

/* The first `count` of 32 bits. */
static __device__ __forceinline__ uint32_t first_bits(int count)
{
    return count <= 0 ? 0 : count < 32 ? (1u << count) - 1 : 0xFFFFFFFFu;
}

/* The first `count` tokens of a tile are there, the first `main` of them of the main pool. */
template <class S> static __device__ __forceinline__ void put_mask(const mqa_shared &s, int ring, int count, int main)
{
    if (ptx_thread() % 32 == 0) {
        s.mask[ring * 2] = first_bits(count);
        s.mask[ring * 2 + 1] = S::CODES ? first_bits(count) & ~first_bits(main) : first_bits(count - 32);
    }
}

/* ---- entries ---------------------------------------------------------------------------------------------------- */

/* Where the list's entry for a position lies: an index, or a page of the table; nullptr: pages follow one another. */
static __device__ __forceinline__ const int32_t *entry_at(const fmlac_mqa &p, const mqa_shared &s, int64_t position)
{
    const int32_t *entries = s.piece->entries;
    if (p.main.kind == FMLAC_LIST_PAGED) {
        return entries ? entries + page_of(p.main.pool, position) : nullptr;
    }
    int64_t main = s.work->main_count;
    return position < main ? entries + position : s.piece->extra_entries + (position - main);
}

/* A warp: entries of 32 positions, which it will want at its next turn, are asked for. Returns the first, modulo 2^32.
 */
static __device__ __forceinline__ uint32_t ask_for_entries(const fmlac_mqa &p, const mqa_shared &s, int64_t begin)
{
    int64_t position = begin + ptx_thread() % 32;
    if (position < s.piece->scan_end && (p.main.kind != FMLAC_LIST_PAGED || s.piece->entries)) {
        ptx_copy_async_4(ptx_shared_address(s.entries + ptx_thread()), entry_at(p, s, position));
    }
    ptx_copy_async_commit();
    return (uint32_t)begin;
}

#define NOT_ASKED 0xFFFFFFFFu /* no tile begins there */

/* A lane's entry of those from `begin` on, where it is one of the list's. */
static __device__ __forceinline__ int32_t entry_of(const fmlac_mqa &p, const mqa_shared &s, int64_t begin,
                                                   uint32_t asked)
{
    if (asked == (uint32_t)begin) {
        ptx_copy_async_wait<0>();
        return s.entries[ptx_thread()];
    }
    return *entry_at(p, s, begin + ptx_thread() % 32);
}

/* ---- pages ------------------------------------------------------------------------------------------------------ */

/* The page of a lane's position; -1 behind the end. */
static __device__ __forceinline__ int64_t page_at(const fmlac_mqa &p, const mqa_shared &s, int64_t begin,
                                                  uint32_t asked)
{
    int64_t position = begin + ptx_thread() % 32;
    if (position >= s.piece->scan_end) {
        return -1;
    }
    return s.piece->entries ? entry_of(p, s, begin, asked) : s.piece->first_page + page_of(p.main.pool, position);
}

/* Places are kept, since what a row sees is counted in places. */
template <class S>
static __device__ __forceinline__ void next_of_pages(const fmlac_mqa &p, const mqa_shared &s, int ring, int64_t begin,
                                                     uint32_t asked)
{
    const fmlac_pool &pool = p.main.pool;
#pragma unroll 1
    for (int base = 0; base < S::TOKENS; base += 32) {
        int i = base + ptx_thread() % 32;
        int64_t position = begin + i, page = i < S::TOKENS ? page_at(p, s, begin + base, asked) : -1;
        bool there = page >= 0 && page < pool.num_pages;
        s.mask[ring * 2 + base / 32] = __ballot_sync(0xFFFFFFFFu, there);
        if (S::CODES) {
            s.mask[ring * 2 + 1] = 0;
        }
        if (i < S::TOKENS) {
            int64_t at = position - page_of(pool, position) * pool.page_size;
            put_token(p, s, ring * S::TOKENS + i, there, pool, page, at, 0);
        }
    }
}

/* The same where a tile lies in one page. */
template <class S>
static __device__ __forceinline__ void next_of_page(const fmlac_mqa &p, const mqa_shared &s, int ring, int64_t begin,
                                                    uint32_t asked)
{
    const fmlac_pool &pool = p.main.pool;
    int64_t page = __shfl_sync(0xFFFFFFFFu, page_at(p, s, begin, asked), 0), at = begin & (pool.page_size - 1);
    int64_t left = page >= 0 && page < pool.num_pages ? s.piece->scan_end - begin : 0;
    const uint8_t *row = pool.data + page * pool.page_stride + s.work->kv_head * pool.head_stride;
    int lane = (int)ptx_thread() % 32, count = left < S::TOKENS ? (int)left : S::TOKENS;
    row += (at + lane) * pool.token_stride;
#pragma unroll
    for (int i = lane; i < S::TOKENS; i += 32) {
        s.address[ring * S::TOKENS + i] = i < count ? (unsigned long long)row : 0;
        row += 32 * pool.token_stride;
    }
    put_mask<S>(s, ring, count, count);
}

/* ---- indices ---------------------------------------------------------------------------------------------------- */

/* A warp: an entry of each lane, of lists of one pool; those that name tokens go to the tile's places from `filled` on,
 * as far as there are places. Returns which lanes' entries name tokens. */
template <class S>
static __device__ __forceinline__ uint32_t put_entries(const fmlac_mqa &p, const mqa_shared &s, int ring, int filled,
                                                       const fmlac_pool &pool, int32_t entry, unsigned long long bit)
{
    int64_t page = entry < 0 ? 0 : page_of(pool, entry);
    bool there = entry >= 0 && page < pool.num_pages;
    uint32_t mask = __ballot_sync(0xFFFFFFFFu, there);
    int place = filled + __popc(mask & ((1u << ptx_thread() % 32) - 1));
    if (there && place < S::TOKENS) {
        put_token(p, s, ring * S::TOKENS + place, true, pool, page, entry - page * pool.page_size, bit);
    }
    return mask;
}

/* Entries that name no token are left out, so tiles hold the attended tokens one after another and a row's bits do not
 * depend on what lies between them; main list first, then the extra one. Returns how many entries were looked at. */
template <class S>
static __device__ __forceinline__ int next_of_indices(const fmlac_mqa &p, const mqa_shared &s, int ring, int64_t begin,
                                                      uint32_t asked)
{
    int64_t main = s.work->main_count;
    int lane = (int)ptx_thread() % 32, filled = 0, looked = 0, of_main = 0;
    int left = (int)(s.piece->scan_end - begin);
#pragma unroll 1
    while (filled < S::TOKENS && looked < left) {
        int64_t position = begin + looked + lane;
        int32_t entry = looked + lane < left ? entry_of(p, s, begin + looked, asked) : -1;
        uint32_t mask;
        if (begin + looked + 32 <= main) {
            mask = put_entries<S>(p, s, ring, filled, p.main.pool, entry, 0);
            of_main = filled + __popc(mask);
        } else {
            bool extra = position >= main;
            mask = put_entries<S>(p, s, ring, filled, extra ? p.extra.pool : p.main.pool, entry, extra ? EXTRA_BIT : 0);
            of_main += __popc(mask & __ballot_sync(0xFFFFFFFFu, !extra));
        }
        bool last = (mask >> lane & 1) != 0 && filled + __popc(mask & ((1u << lane) - 1)) == S::TOKENS - 1;
        uint32_t end = __ballot_sync(0xFFFFFFFFu, last);
        looked += end ? __popc(end - 1) + 1 : 32;
        filled = end ? S::TOKENS : filled + __popc(mask);
    }
    for (int i = filled + lane; i < S::TOKENS; i += 32) {
        s.address[ring * S::TOKENS + i] = 0;
    }
    put_mask<S>(s, ring, filled, of_main);
    return looked;
}

/* ---- any list --------------------------------------------------------------------------------------------------- */

/* Where the piece's tile `number` begins, if every entry of a list of indices names a token. */
template <class S> static __device__ __forceinline__ int64_t tile_begin(const mqa_shared &s, int number)
{
    return (s.piece->begin + number) * S::TOKENS;
}

/* One warp: addresses and mask of the tile that begins at a position. Returns where the next one begins. */
template <class S>
static __device__ __forceinline__ int64_t put_tile(const fmlac_mqa &p, const mqa_shared &s, int ring, int64_t begin,
                                                   uint32_t asked)
{
    int64_t next = begin + S::TOKENS;
    if (p.main.kind != FMLAC_LIST_PAGED) {
        next = begin + next_of_indices<S>(p, s, ring, begin, asked);
    } else if (!S::CODES && p.main.pool.page_shift >= 0 && p.main.pool.page_size >= S::TOKENS) {
        next_of_page<S>(p, s, ring, begin, asked);
    } else {
        next_of_pages<S>(p, s, ring, begin, asked);
    }
    __syncwarp();
    return next;
}

/* One warp: the piece's tile `number`. Warps take turns, and a barrier lies between: a list of indices goes on where
 * the turn before has ended. Returns where the next tile begins. */
template <class S>
static __device__ __forceinline__ int64_t next_tile(const fmlac_mqa &p, const mqa_shared &s, int number, int ring,
                                                    uint32_t asked)
{
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
    int64_t next = put_tile<S>(p, s, ring, paged ? tile_begin<S>(s, number) : s.piece->scan_at, asked);
    if (!paged && ptx_thread() % 32 == 0) {
        s.piece->scan_at = next;
    }
    return next;
}

/* The same for the piece's tile `number`. Not inline: sums need the registers. */
template <class S> static __device__ __noinline__ int64_t list_tile(const fmlac_mqa &p, int number, int64_t begin)
{
    mqa_shared s = mqa_shared_plan(p, S::SLOTS > 0 ? S::SLOTS : p.stages);
    return put_tile<S>(p, s, place_after(s, s.piece->at, number), begin, NOT_ASKED);
}

/* The summing warps list a piece's first tiles, before any has been summed, each where it begins if all entries name
 * tokens. If that was not right, a warp lists them one after another. */
template <class S>
static __device__ __forceinline__ void list_first(const fmlac_mqa &p, const mqa_shared &s, int warp, int count)
{
    int last = (count < listed_first(s) ? count : listed_first(s)) - 1;
#pragma unroll 1
    for (int i = warp; i <= last; i += S::PW) {
        int64_t begin = tile_begin<S>(s, i), next = list_tile<S>(p, i, begin);
        if (ptx_thread() % 32 == 0) {
            s.piece->straight[i] = next == begin + S::TOKENS;
            if (i == last) {
                s.piece->scan_at = next;
            }
        }
    }
    ptx_barrier_sync(BARRIER_SUMS, S::PW * 32);
    bool straight = true;
#pragma unroll 1
    for (int i = 0; p.main.kind != FMLAC_LIST_PAGED && i < last; i++) {
        straight = straight && s.piece->straight[i];
    }
    if (!straight) {
        ptx_barrier_sync(BARRIER_SUMS, S::PW * 32); /* all know */
        int64_t begin = tile_begin<S>(s, 0);
#pragma unroll 1
        for (int i = 0; warp == 0 && i <= last; i++) {
            begin = list_tile<S>(p, i, begin);
            if (ptx_thread() % 32 == 0) {
                s.piece->scan_at = begin;
            }
        }
        ptx_barrier_sync(BARRIER_SUMS, S::PW * 32);
    }
}

#endif
