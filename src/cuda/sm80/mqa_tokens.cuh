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

static __device__ __forceinline__ int64_t page_of(const fmlac_pool *pool, int64_t place)
{
    return pool->page_shift >= 0 ? place >> pool->page_shift : quotient(place, pool->page_size);
}

/* What the list says at a position; -1: nothing is attended there. */
static __device__ __forceinline__ int32_t fetch_entry(const fmlac_mqa &p, const fmlac_work &w, int64_t position)
{
    if (p.main.kind == FMLAC_LIST_PAGED) {
        int64_t at = page_of(&p.main.pool, position);
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
    int64_t page = page_of(pool, place);
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

/* Sixteen bytes of a token's row at any address, of which `count` elements exist. */
static __device__ __forceinline__ void copy_any(uint32_t to, const uint8_t *from, int count)
{
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        ptx_store_shared_u16(to + 2 * i, i < count ? (uint16_t)bytes_u16(from + 2 * i) : 0);
    }
}

/* One 16-byte chunk of a token that 16-byte copies cannot take; address 0: zeros. */
static __device__ __forceinline__ void copy_chunk(const fmlac_mqa &p, uint32_t to, unsigned long long address,
                                                  int chunk)
{
    copy_any(to, (const uint8_t *)(address & ~EXTRA_BIT) + chunk * 16, address != 0 ? p.d_qk - chunk * 8 : 0);
}

template <class S>
static __device__ __forceinline__ void copy_plain_any(const fmlac_mqa &p, const unsigned long long *address,
                                                      uint32_t tile)
{
#pragma unroll 1
    for (int i = threadIdx.x - S::QW * 32; i < S::TOKENS * 64; i += S::PW * 32) {
        copy_chunk(p, tile + i / 64 * PITCH + i % 64 * 16, address[i / 64], i % 64);
    }
#pragma unroll 1
    for (int i = threadIdx.x - S::QW * 32; p.row_bytes > TAIL && i < S::TOKENS * 8; i += S::PW * 32) {
        copy_chunk(p, tile + i / 8 * PITCH + TAIL + i % 8 * 16, address[i / 8], TAIL / 16 + i % 8);
    }
}

/* Tokens of the ring's place `at` into a tile, by the summing warps; `full` learns when they are there. Addresses of
 * several tokens are read together: copies set out one after another. */
template <class S>
static __device__ __forceinline__ void copy_plain(const fmlac_mqa &p, const mqa_shared &s, int at, uint32_t tile,
                                                  uint32_t full)
{
    constexpr int OWN = S::TOKENS / S::PW, EACH = OWN < 4 ? OWN : 4; /* tokens of a warp, and of one round */
    int warp = threadIdx.x / 32 - S::QW, lane = threadIdx.x % 32;
    const unsigned long long *address = s.address + at * S::TOKENS;
    if (!p.aligned) {
        copy_plain_any<S>(p, address, tile);
        ptx_mbarrier_arrive(full);
        return;
    }
#pragma unroll 1
    for (int t = warp * OWN; t < (warp + 1) * OWN; t += EACH) {
        unsigned long long from[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            from[i] = address[t + i];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const uint8_t *row = (const uint8_t *)(from[i] & ~EXTRA_BIT) + lane * 16;
            uint32_t to = tile + (t + i) * PITCH + lane * 16;
            ptx_copy_async_16(to, row, from[i] != 0 && lane * 8 < p.d_qk ? 16 : 0);
            ptx_copy_async_16(to + 512, row + 512, from[i] != 0 && 256 + lane * 8 < p.d_qk ? 16 : 0);
        }
    }
    if (p.row_bytes > TAIL) { /* 8 chunks more of each, four tokens at a time */
#pragma unroll 1
        for (int t = warp * 4 + lane / 8; t < S::TOKENS; t += S::PW * 4) {
            const uint8_t *row = (const uint8_t *)(address[t] & ~EXTRA_BIT) + TAIL + lane % 8 * 16;
            bool there = address[t] != 0 && OUT_COLUMNS + lane % 8 * 8 < p.d_qk;
            ptx_copy_async_16(tile + t * PITCH + TAIL + lane % 8 * 16, row, there ? 16 : 0);
        }
    }
    ptx_mbarrier_arrive_copies(full);
}

/* ---- quantised tokens: a scoring warp copies, and later expands, its own ------------------------------------------
 */

/* Copies of a token's bytes that 16-byte copies cannot take. */
static __device__ __noinline__ void copy_raw_any(uint32_t to, const uint8_t *from, int bytes)
{
    for (int c = threadIdx.x % 32; c < bytes; c += 32) {
        ptx_store_shared_u8(to + c, from[c]);
    }
}

/* The raw bytes of the ring's place `at`: data row, and the scale row where it lies elsewhere. */
template <class S> static __device__ __forceinline__ void copy_raw(const fmlac_mqa &p, const mqa_shared &s, int at)
{
    constexpr int OWN = S::TOKENS / S::QW, EACH = 4;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    bool apart = p.main.pool.scale_row_bytes > 0 || (p.extra.kind != 0 && p.extra.pool.scale_row_bytes > 0);
    const unsigned long long *address = s.address + at * S::TOKENS, *scale = s.scale + at * S::TOKENS;
#pragma unroll 1
    for (int t = warp * OWN; t < (warp + 1) * OWN; t += EACH) {
        unsigned long long token[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            token[i] = address[t + i];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            bool extra = (token[i] & EXTRA_BIT) != 0;
            const uint8_t *row = (const uint8_t *)(token[i] & ~EXTRA_BIT);
            int bytes = token[i] == 0 ? 0 : extra ? p.extra.pool.data_row_bytes : p.main.pool.data_row_bytes;
            uint32_t to = s.raw + (t + i) * p.raw_pitch;
            if (!p.aligned) {
                copy_raw_any(to, row, bytes);
                continue;
            }
            if (lane * 16 < bytes) {
                ptx_copy_async_16(to + lane * 16, row + lane * 16, 16);
            }
            for (int c = lane * 16 + 512; c < bytes; c += 512) {
                ptx_copy_async_16(to + c, row + c, 16);
            }
        }
#pragma unroll 1
        for (int i = 0; apart && i < EACH; i++) {
            unsigned long long from = address[t + i];
            bool extra = (from & EXTRA_BIT) != 0;
            const uint8_t *row = (const uint8_t *)scale[t + i];
            int bytes = extra ? p.extra.pool.scale_row_bytes : p.main.pool.scale_row_bytes;
            uint32_t to = s.raw + (t + i) * p.raw_pitch;
            to += extra ? p.extra.pool.raw_scales - p.extra.pool.scale_offset
                        : p.main.pool.raw_scales - p.main.pool.scale_offset;
            if (from == 0 || !row) {
                continue;
            }
            if (!p.aligned) {
                copy_raw_any(to, row, bytes);
            } else if (lane * 8 < bytes) {
                ptx_copy_async_8(to + lane * 8, row + lane * 8, 8);
            }
        }
    }
    ptx_copy_async_commit();
}

/* A lane's sixteen dims of a token: codes and scale, then numbers. */
typedef struct sixteen {
    uint32_t codes[4];
    float scale;
} sixteen;

static __device__ __forceinline__ void load_sixteen(const fmlac_pool &pool, uint32_t raw, sixteen &x)
{
    int j = threadIdx.x % 32 * 16;
    if (j >= pool.quant_dims) {
        return;
    }
    if (pool.element == FMLAC_F4_E2M1) {
        ptx_load_shared_64(x.codes, raw + j / 2);
    } else {
        ptx_load_shared_128(x.codes, raw + j);
    }
    x.scale = shared_scale(pool.scale, raw + pool.raw_scales, j >> pool.group_shift);
}

/* Sixteen dims to shared memory: `to` is the token's row. In two stores of 16 bytes, in an order in which eight
 * neighbouring lanes do not meet in a bank. */
static __device__ __forceinline__ void store_sixteen(uint32_t to, const uint32_t x[8])
{
    int lane = threadIdx.x % 32;
    bool swap = (lane & 4) != 0;
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        first[i] = swap ? x[4 + i] : x[i];
        second[i] = swap ? x[i] : x[4 + i];
    }
    ptx_store_shared_128(to + lane * 32 + (swap ? 16 : 0), first);
    ptx_store_shared_128(to + lane * 32 + (swap ? 0 : 16), second);
}

/* One token's first 512 dims: codes, then dims that are bf16 already, then zeros. */
static __device__ __forceinline__ void expand_row(const fmlac_pool &pool, uint32_t raw, uint32_t to, const sixteen &x)
{
    int j = threadIdx.x % 32 * 16;
    uint32_t out[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (j < pool.quant_dims) {
        if (!expand_sixteen(pool.element, pool.scale, pool.outer_scale, x.codes, x.scale, out)) {
            expand_hard(pool.element, pool.outer_scale, raw, x.scale, j, to + j * 2);
            return;
        }
    } else if (j < pool.quant_dims + pool.rope_dims) {
        uint32_t from = raw + pool.rope_offset + 2 * (j - pool.quant_dims);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            ptx_load_shared_64(out + i, from + 4 * i);
        }
    }
    store_sixteen(to, out);
}

/* One token, whatever it is. */
static __device__ __noinline__ void expand_any(const fmlac_mqa &p, unsigned long long token, uint32_t raw, uint32_t to)
{
    const uint32_t zeros[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    sixteen x = {};
    if (token & EXTRA_BIT) {
        load_sixteen(p.extra.pool, raw, x);
        expand_row(p.extra.pool, raw, to, x);
    } else if (token != 0) {
        load_sixteen(p.main.pool, raw, x);
        expand_row(p.main.pool, raw, to, x);
    } else {
        store_sixteen(to, zeros);
    }
}

/* EACH tokens of one pool with e4m3 codes, none of them hard: as one straight piece of code. False: not so. */
template <int EACH>
static __device__ __forceinline__ bool expand_e4m3(const fmlac_pool &pool, uint32_t raw, uint32_t raw_pitch,
                                                   uint32_t to)
{
    int j = threadIdx.x % 32 * 16;
    bool codes = j < pool.quant_dims, easy = true;
    uint32_t x[EACH][4], factor[EACH];
    float scale[EACH];
    uint32_t from = raw + (codes ? j : 0), scales = raw + pool.raw_scales;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        ptx_load_shared_128(x[i], from + i * raw_pitch);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        scale[i] = shared_scale(pool.scale, scales + i * raw_pitch, codes ? j >> pool.group_shift : 0);
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        uint32_t nan = 0;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            nan |= (x[i][c] & 0x7F7F7F7Fu) + 0x01010101u;
        }
        easy = easy && (nan & 0x80808080u) == 0 && scale_is_easy(scale[i]);
        factor[i] = (__float_as_uint(scale[i]) >> 16) + (120u << 7);
        factor[i] |= factor[i] << 16;
    }
    if (!__all_sync(0xFFFFFFFFu, easy || !codes)) {
        return false;
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        uint32_t out[8];
#pragma unroll
        for (int c = 0; c < 4; c++) {
            spread_e4m3(x[i][c], out + 2 * c);
        }
#pragma unroll
        for (int c = 0; c < 8; c++) {
            out[c] = ptx_multiply_bf16x2(out[c], factor[i]);
        }
        if (!codes) { /* dims that are bf16 already, or none */
            uint32_t rope = raw + i * raw_pitch + pool.rope_offset + 2 * (j - pool.quant_dims);
            bool there = j < pool.quant_dims + pool.rope_dims;
#pragma unroll
            for (int c = 0; c < 8; c += 2) {
                out[c] = out[c + 1] = 0;
                if (there) {
                    ptx_load_shared_64(out + c, rope + 4 * c);
                }
            }
        }
        store_sixteen(to + i * PITCH, out);
    }
    return true;
}

/* Raw bytes to a bf16 tile: several tokens at a time, so that they wait for shared memory together. */
template <class S>
static __device__ __forceinline__ void expand_raw(const fmlac_mqa &p, const mqa_shared &s, int at, uint32_t tile)
{
    constexpr int OWN = S::TOKENS / S::QW, EACH = 4;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const unsigned long long *address = s.address + at * S::TOKENS;
    const bool main_easy = p.main.pool.element == FMLAC_F8_E4M3 && p.main.pool.outer_scale == 1.0f;
    const bool extra_easy = p.extra.pool.element == FMLAC_F8_E4M3 && p.extra.pool.outer_scale == 1.0f;
    static_assert(OWN % EACH == 0, "tokens of a warp");
#pragma unroll 1
    for (int t = warp * OWN; t < (warp + 1) * OWN; t += EACH) {
        uint32_t raw = s.raw + t * p.raw_pitch, to = tile + t * PITCH;
        bool all_main = true, all_extra = true, done = false;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            unsigned long long token = address[t + i];
            all_main = all_main && token != 0 && !(token & EXTRA_BIT);
            all_extra = all_extra && (token & EXTRA_BIT) != 0;
        }
        if (all_main && main_easy) {
            done = expand_e4m3<EACH>(p.main.pool, raw, p.raw_pitch, to);
        } else if (all_extra && extra_easy) {
            done = expand_e4m3<EACH>(p.extra.pool, raw, p.raw_pitch, to);
        }
#pragma unroll 1
        for (int i = 0; !done && i < EACH; i++) {
            expand_any(p, address[t + i], raw + i * p.raw_pitch, to + i * PITCH);
        }
    }
    /* Dims from 512 on are bf16, or none: of four tokens at a time. */
#pragma unroll 1
    for (int t = warp * OWN + lane / 8; p.row_bytes > TAIL && t < (warp + 1) * OWN; t += 4) {
        bool extra = (address[t] & EXTRA_BIT) != 0;
        int quant_dims = extra ? p.extra.pool.quant_dims : p.main.pool.quant_dims;
        int rope_dims = extra ? p.extra.pool.rope_dims : p.main.pool.rope_dims;
        int rope_offset = extra ? p.extra.pool.rope_offset : p.main.pool.rope_offset;
        int j = OUT_COLUMNS + lane % 8 * 8;
        uint32_t x[4] = {0, 0, 0, 0}, from = s.raw + t * p.raw_pitch + rope_offset + 2 * (j - quant_dims);
        if (address[t] != 0 && j < quant_dims + rope_dims) {
            ptx_load_shared_64(x, from);
            ptx_load_shared_64(x + 2, from + 8);
        }
        ptx_store_shared_128(tile + t * PITCH + j * 2, x);
    }
}

#endif
