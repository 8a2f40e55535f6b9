/* SPDX-License-Identifier: MIT */
/* mqa_tokens.cuh: from a token list to tiles in shared memory: entries, addresses, copies, format expansion. */
#ifndef FLASHMLA_CUDA_SM80_MQA_TOKENS_CUH
#define FLASHMLA_CUDA_SM80_MQA_TOKENS_CUH

#include "mqa_shared.cuh"

/* ---- token list: entries, then addresses ----------------------------------------------------------------------- */

/* Warp 0's way through a list. Index lists: entries that name no token are left out, so tiles hold the attended tokens
 * one after another and a row's bits do not depend on what lies between them; main list first, then the extra one.
 * Paged lists keep their places, since what a row sees is counted in places. */
template <int TOKENS> struct list_scan {
    static constexpr int EACH = TOKENS > 32 ? TOKENS / 32 : 1; /* entries of a lane that are fetched ahead */
    int64_t at, end;                                           /* next position, and where the piece ends */
    int32_t entry[EACH];                                       /* PAGED: pages, INDEXED: slots */
};

/* What the list says at a position; -1: nothing is attended there. */
static __device__ __forceinline__ int32_t fetch_entry(const fmlac_mqa &p, const fmlac_work &w, int64_t position)
{
    if (p.main.kind == FMLAC_LIST_PAGED) {
        int64_t at = quotient(position, p.main.pool.page_size);
        return p.main.block_table ? p.main.block_table[w.request * p.main.table_stride + at]
                                  : (int32_t)(w.request * p.main.max_pages + at);
    }
    int64_t at = position - w.main_count;
    return at < 0 ? index_row(&p, &p.main, w.first, w.kv_head)[position]
                  : index_row(&p, &p.extra, w.first, w.kv_head)[at];
}

template <int TOKENS>
static __device__ __forceinline__ void fetch_entries(const fmlac_mqa &p, const fmlac_work &w, list_scan<TOKENS> &scan)
{
#pragma unroll
    for (int i = 0; i < scan.EACH; i++) {
        int64_t position = scan.at + i * 32 + threadIdx.x % 32;
        scan.entry[i] = position < scan.end ? fetch_entry(p, w, position) : -1;
    }
}

/* Address of the token that an entry names, 0 if none. */
static __device__ __forceinline__ unsigned long long
entry_address(const fmlac_mqa &p, const fmlac_work &w, int64_t position, int32_t entry, unsigned long long *scale)
{
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
    bool extra = !paged && position >= w.main_count;
    const fmlac_pool *pool = extra ? &p.extra.pool : &p.main.pool;
    if (entry < 0) {
        return 0;
    }
    int64_t place = paged ? position : entry;
    int64_t page = quotient(place, pool->page_size);
    int64_t at = place - page * pool->page_size;
    page = paged ? entry : page;
    if (page >= pool->num_pages) {
        return 0;
    }
    uint8_t *begin = pool->data + page * pool->page_stride;
    if (p.quantised) {
        *scale = pool->layout == FMLAC_LAYOUT_PAGE
                     ? (unsigned long long)(begin + pool->page_size * pool->token_stride + at * pool->scale_row_bytes)
                     : 0;
    }
    begin += at * pool->token_stride + w.kv_head * pool->head_stride;
    return (unsigned long long)begin | (extra ? EXTRA_BIT : 0);
}

static __device__ __forceinline__ void put_address(const fmlac_mqa &p, const mqa_shared &s, int at,
                                                   unsigned long long address, unsigned long long scale)
{
    s.address[at] = address;
    if (p.quantised) {
        s.scale[at] = scale;
    }
}

/* Warp 0: addresses and mask of the next tile, from the entries fetched before; then entries are fetched anew. */
template <int TOKENS>
static __device__ __forceinline__ void next_tile(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s, int slot,
                                                 list_scan<TOKENS> &scan)
{
    int lane = threadIdx.x % 32;
    bool compact = p.main.kind != FMLAC_LIST_PAGED;
    uint32_t words[2] = {0, 0};
    int filled = 0;
    while (scan.at < scan.end && filled < TOKENS) {
        int used = 0; /* entries that were looked at */
#pragma unroll
        for (int i = 0; i < scan.EACH; i++) {
            unsigned long long scale = 0;
            unsigned long long address = entry_address(p, w, scan.at + i * 32 + lane, scan.entry[i], &scale);
            bool there = address != 0 && (compact || i * 32 + lane < TOKENS);
            uint32_t mask = __ballot_sync(0xFFFFFFFFu, there);
            int place = compact ? filled + __popc(mask & ((1u << lane) - 1)) : i * 32 + lane;
            if (place < TOKENS && (there || !compact)) {
                put_address(p, s, slot * TOKENS + place, address, scale);
            }
            if (!compact) {
                words[i] = mask;
                continue;
            }
            uint32_t last = __ballot_sync(0xFFFFFFFFu, there && place == TOKENS - 1);
            used = filled >= TOKENS ? used : last ? i * 32 + __popc(last - 1) + 1 : i * 32 + 32;
            filled += __popc(mask);
        }
        if (!compact) {
            scan.at += TOKENS;
            break;
        }
        scan.at += used;
        if (filled < TOKENS && scan.at < scan.end) {
            fetch_entries(p, w, scan);
        }
    }
    filled = filled < TOKENS ? filled : TOKENS;
    for (int i = filled + lane; compact && i < TOKENS; i += 32) {
        put_address(p, s, slot * TOKENS + i, 0, 0);
    }
    if (compact) {
        words[0] = filled < 32 ? (1u << filled) - 1 : 0xFFFFFFFFu;
        words[1] = filled < 32 ? 0 : filled < 64 ? (1u << (filled - 32)) - 1 : 0xFFFFFFFFu;
    }
    if (lane < 2) {
        s.mask[slot * 2 + lane] = lane == 0 ? words[0] : words[1];
    }
    fetch_entries(p, w, scan);
}

/* ---- copying tokens into shared memory ------------------------------------------------------------------------- */

template <int TOKENS, int WARPS>
static __device__ __forceinline__ void copy_plain(const fmlac_mqa &p, const mqa_shared &s, int slot, uint32_t tile)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int chunks = p.row_bytes / 16;
#pragma unroll 2
    for (int t = warp; t < TOKENS; t += WARPS) {
        unsigned long long address = s.address[slot * TOKENS + t];
        const uint8_t *row = (const uint8_t *)(address & ~EXTRA_BIT);
        for (int c = lane; c < chunks; c += 32) {
            uint32_t to = tile + swizzled(t, c, p.row_bytes);
            bool there = address != 0 && c * 8 < p.d_qk;
            if (p.aligned) {
                ptx_copy_async_16(to, there ? row + c * 16 : p.main.pool.data, there ? 16 : 0);
            } else {
                copy_plain_hard(to, row + c * 16, there ? p.d_qk - c * 8 : 0);
            }
        }
    }
}

/* The pool that a token's address belongs to, member by member: parameters have no address worth taking. */
#define POOL_OF(address, member) ((address)&EXTRA_BIT ? p.extra.pool.member : p.main.pool.member)

/* The raw bytes of a tile: data row, and the scale row where it lies elsewhere. */
template <int TOKENS, int WARPS>
static __device__ __forceinline__ void copy_raw(const fmlac_mqa &p, const mqa_shared &s, int slot)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
    for (int t = warp; t < TOKENS; t += WARPS) {
        unsigned long long address = s.address[slot * TOKENS + t];
        if (address == 0) {
            continue;
        }
        const uint8_t *row = (const uint8_t *)(address & ~EXTRA_BIT);
        const uint8_t *scales = (const uint8_t *)s.scale[slot * TOKENS + t];
        int bytes = POOL_OF(address, data_row_bytes), scale_bytes = scales ? POOL_OF(address, scale_row_bytes) : 0;
        uint32_t to = s.raw + t * p.raw_pitch;
        uint32_t to_scales = to + POOL_OF(address, raw_scales) - POOL_OF(address, scale_offset);
        if (p.aligned) {
            for (int c = lane * 16; c < bytes; c += 512) {
                ptx_copy_async_16(to + c, row + c, 16);
            }
            if (lane * 8 < scale_bytes) {
                ptx_copy_async_8(to_scales + lane * 8, scales + lane * 8, 8);
            }
        } else {
            for (int c = lane; c < bytes; c += 32) {
                ptx_store_shared_u8(to + c, row[c]);
            }
            for (int c = lane; c < scale_bytes; c += 32) {
                ptx_store_shared_u8(to_scales + c, scales[c]);
            }
        }
    }
}

/* Raw bytes to a bf16 tile. */
template <int TOKENS, int WARPS>
static __device__ __forceinline__ void expand_raw(const fmlac_mqa &p, const mqa_shared &s, int slot)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int chunks = p.row_bytes / 16;
#pragma unroll 1
    for (int t = warp; t < TOKENS; t += WARPS) {
        unsigned long long address = s.address[slot * TOKENS + t];
        uint32_t raw = s.raw + t * p.raw_pitch;
        fmlac_codes codes;
        codes.element = POOL_OF(address, element);
        codes.scale = POOL_OF(address, scale);
        codes.group_shift = POOL_OF(address, group_shift);
        codes.raw_scales = POOL_OF(address, raw_scales);
        codes.outer_scale = POOL_OF(address, outer_scale);
        int quant_dims = address != 0 ? POOL_OF(address, quant_dims) : 0;
        int rope_dims = address != 0 ? POOL_OF(address, rope_dims) : 0;
        int rope_offset = POOL_OF(address, rope_offset);
        for (int c = lane; c < chunks; c += 32) {
            uint32_t to = s.tiles + swizzled(t, c, p.row_bytes);
            int j = c * 8;
            if (j < quant_dims) {
                expand_8(codes, raw, j, to);
                continue;
            }
            uint32_t x[4] = {0, 0, 0, 0};
            if (j < quant_dims + rope_dims) {
                uint32_t from = raw + rope_offset + 2 * (j - quant_dims);
                ptx_load_shared_64(x, from);
                ptx_load_shared_64(x + 2, from + 8);
            }
            ptx_store_shared_128(to, x);
        }
    }
}

#endif
