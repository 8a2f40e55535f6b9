/* SPDX-License-Identifier: MIT */
/*
 * few_source.cuh: how strips of tokens and Q come into shared memory for few rows (few.cuh), by four warps: the finder
 * (find.cuh), two gatherers, which take turns with strips, and one that brings Q and sinks of the next piece.
 *
 * BARRIERS            arrivals         made by              waited for by    protects
 *   places_full[4]    1                finder               gatherers        places[], scales[], notes[] of a tile
 *   places_empty[4]   2                gatherers            finder           the same
 *   strip_full[12]    33 and the       a gatherer: 32 for   its team         strips[], its place in the ring
 *                     bytes            copies
 *   strip_free[12]    4                its team             its gatherer     strips[]
 *   place_free[12]    4                the team             its gatherer     the place in the ring
 *   q_full[2]         1                Q's warp             teams            q[], q_scale[], sink[]
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_SOURCE_CUH
#define FLASHMLA_CUDA_SM90A_FEW_SOURCE_CUH

#include "few_plan.cuh"
#include "find.cuh"
#include "output.cuh"
#include "ptx/tma.cuh"
#include "query.cuh"

/* ---- finding: hooks of find.cuh ---------------------------------------------------------------------------------- */

template <int BLOCKS>
static __device__ __forceinline__ void piece_begins(const fmlac_mqa_sm90a &, few_plan<BLOCKS> *, const fmlac_work &,
                                                    uint32_t)
{
}

template <int BLOCKS>
static __device__ __forceinline__ void tile_noted(const fmlac_mqa_sm90a &, few_plan<BLOCKS> *, const piece &, bool)
{
}

/* `position`: of the tile's first entry in a paged list. */
template <int BLOCKS>
static __device__ __forceinline__ void note_tile(const fmlac_mqa &p, const fmlac_work &w, few_plan<BLOCKS> *m,
                                                 const tile_tokens &found, const uint32_t entries[2], bool straight,
                                                 int32_t position, uint32_t at)
{
    const int lane = (int)threadIdx.x % 32;
    const fmlac_pool &pool = pool_of(p, found.extra);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = 32 * h + lane;
        token_place place = straight ? entry_place(p, w, pool, entries[h], position + row)
                                     : find_token(p, w, m->entries[0], found, position, row);
        const uint32_t there = __ballot_sync(0xFFFFFFFFu, place.row != nullptr);
        m->places[at][row] = place.row;
        m->scales[at][row] = place.row ? place.row + place.scales - pool.scale_offset : nullptr;
        if (lane == 0) {
            m->notes[at].there[h] = there;
        }
    }
    if (lane == 0) {
        m->notes[at].flags = (found.extra ? NOTE_EXTRA_POOL : 0) | (found.more ? NOTE_NEXT : 0);
    }
    arrive_together(ptx_shared_address(&m->places_full[at]));
}

/* A tile of nothing. */
template <int BLOCKS>
static __device__ __forceinline__ void note_flags(few_plan<BLOCKS> *m, uint32_t at, uint32_t flags)
{
    if (threadIdx.x % 32 == 0) {
        m->notes[at].there[0] = m->notes[at].there[1] = 0;
        m->notes[at].flags = flags;
    }
    arrive_together(ptx_shared_address(&m->places_full[at]));
}

template <int BLOCKS>
static __device__ __forceinline__ uint32_t note_nothing(const fmlac_mqa_sm90a &, few_plan<BLOCKS> *m, const piece &,
                                                        uint32_t tile, bool)
{
    ptx_mbarrier_wait(ptx_shared_address(&m->places_empty[tile % PLACES]), (tile / PLACES & 1) ^ 1);
    note_flags(m, tile % PLACES, 0);
    return 1;
}

template <int BLOCKS> static __device__ __forceinline__ void note_end(few_plan<BLOCKS> *m, uint32_t at)
{
    note_flags(m, at, NOTE_END);
}

/* ---- gathering --------------------------------------------------------------------------------------------------- */

/* Tokens that are not attended have zeros, and so have their scales. */
static __device__ __forceinline__ void clear_rows(uint32_t to, uint32_t pitch, uint32_t there)
{
#pragma unroll 1
    for (uint32_t row = 0; row < STRIP_TOKENS; row++) {
        if ((there >> row & 1) == 0) {
            const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
            for (uint32_t at = threadIdx.x % 32 * 16; at < pitch; at += 512) {
                ptx_store_shared_128(to + row * pitch + at, zeros);
            }
        }
    }
}

/* Rows that bulk copies cannot read: the warp copies one after another. */
static __device__ __forceinline__ void copy_rows(const uint8_t *const *places, uint32_t to, uint32_t pitch,
                                                 uint32_t there, int32_t bytes)
{
#pragma unroll 1
    for (uint32_t row = 0; row < STRIP_TOKENS; row++) {
#pragma unroll 1
        for (int32_t at = (int32_t)threadIdx.x % 32; (there >> row & 1) && at < bytes; at += 32) {
            ptx_store_shared_u8(to + row * pitch + at, places[row][at]);
        }
    }
}

/* Scales that do not lie in the rows, a token per lane. */
static __device__ __forceinline__ void gather_scales(const fmlac_pool &pool, const uint8_t *from, uint32_t to)
{
    const int32_t unit = !pool.aligned ? 1 : pool.scale_row_bytes % 16 == 0 ? 16 : 8;
#pragma unroll 1
    for (int32_t at = 0; at < pool.scale_row_bytes; at += unit) {
        if (from == nullptr || unit == 1) {
            for (int32_t i = 0; i < unit; i++) {
                ptx_store_shared_u8(to + at + i, from ? from[at + i] : 0);
            }
        } else if (unit == 16) {
            ptx_copy_async_16(to + at, from + at, 16);
        } else {
            ptx_copy_async_8(to + at, from + at, 8);
        }
    }
}

/* All rows of a strip, by one lane: runs of eight copies whose operands are uniform from the start. */
static __device__ __forceinline__ void copy_whole(const uint8_t *const *places, uint32_t to, uint32_t pitch,
                                                  uint32_t bytes, uint32_t full)
{
#pragma unroll 1
    for (uint32_t row = 0; row < STRIP_TOKENS; row += 8) {
        uint32_t x[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            ptx_load_shared_128(x[i], ptx_shared_address(places + row + 2 * i));
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t *half = x[i / 2] + i % 2 * 2;
            ptx_bulk_load(to + (row + i) * pitch, (const void *)(half[0] | (uint64_t)half[1] << 32), bytes, full);
        }
    }
}

static __device__ __forceinline__ void copy_some(const uint8_t *const *places, uint32_t to, uint32_t pitch,
                                                 uint32_t there, uint32_t bytes, uint32_t full)
{
#pragma unroll 1
    for (uint32_t row = 0; there >> row; row++) {
        if (there >> row & 1) {
            ptx_bulk_load(to + row * pitch, places[row], bytes, full);
        }
        if (row == STRIP_TOKENS - 1) {
            break;
        }
    }
}

/* A strip's tokens set out, and its entry is written. */
template <int BLOCKS>
static __device__ __forceinline__ void bring_strip(const fmlac_mqa &p, few_plan<BLOCKS> *m, const strip_ring &r,
                                                   const strip &s, uint32_t at, uint32_t half, uint32_t entry)
{
    const fmlac_pool &pool = pool_of(p, (s.flags & STRIP_EXTRA) != 0);
    const uint32_t lane = threadIdx.x % 32, full = ptx_shared_address(&m->strip_full[entry]);
    const uint32_t to = s.rows;
    const uint8_t *const *places = m->places[at] + half * STRIP_TOKENS;
    uint32_t bulk = s.there;
    if (pool.scale_row_bytes > 0) {
        gather_scales(pool, m->scales[at][half * STRIP_TOKENS + lane],
                      to + STRIP_TOKENS * r.pitch + lane * FMLAC_RAW_SCALES);
    }
    if (s.there != 0xFFFFFFFFu || !pool.aligned) {
        clear_rows(to, r.pitch, s.there);
        if (!pool.aligned) {
            copy_rows(places, to, r.pitch, s.there, pool.data_row_bytes);
            bulk = 0;
        }
    }
    ptx_fence_async_proxy(); /* what was read and written here comes before copies to here */
    __syncwarp();
    ptx_mbarrier_arrive_copies(full);
    if (ptx_elect()) {
        m->strips[entry] = s;
        ptx_mbarrier_arrive_expect(full, __popc(bulk) * pool.data_row_bytes);
        if (bulk == 0xFFFFFFFFu) {
            copy_whole(places, to, r.pitch, pool.data_row_bytes, full);
        } else {
            copy_some(places, to, r.pitch, bulk, pool.data_row_bytes, full);
        }
    } else {
        arrive_others(full);
    }
    __syncwarp();
}

/* A team learns that a piece has no more strips. `team`: the first that does. */
template <int BLOCKS>
static __device__ __forceinline__ void end_strips(few_plan<BLOCKS> *m, uint32_t team, uint32_t entry)
{
    const uint32_t full = ptx_shared_address(&m->strip_full[entry]);
    if (threadIdx.x % 32 == 0) {
        m->strips[entry].flags = STRIP_LAST | team * STRIP_TEAM;
    }
    ptx_mbarrier_arrive_copies(full);
    arrive_together(full);
}

/* The entry of a strip is free. */
template <int BLOCKS> static __device__ __forceinline__ void await_entry(few_plan<BLOCKS> *m, uint32_t number)
{
    ptx_mbarrier_wait(ptx_shared_address(&m->strip_free[number % ENTRIES]), (number / ENTRIES & 1) ^ 1);
}

/*
 * Gatherer `which`, of GATHERERS. Each counts all strips and brings its own, to places of its own: so it, and each
 * team, meets all phases of the barriers that it waits for. Who skipped one could take the phase before last for it.
 */
template <int BLOCKS>
static __device__ __forceinline__ void gather_strips(const fmlac_mqa &p, few_plan<BLOCKS> *m, uint32_t which)
{
    const strip_ring r = ring_of<BLOCKS>(p);
    uint32_t number = 0, place = which, parity = 1;
    int32_t position = 0;
#pragma unroll 1
    for (uint32_t tile = 0;; tile++) {
        const uint32_t at = tile % PLACES;
        ptx_mbarrier_wait(ptx_shared_address(&m->places_full[at]), tile / PLACES & 1);
        const uint32_t flags = uniform(m->notes[at].flags);
        if (flags & NOTE_END) {
            break;
        }
#pragma unroll 1
        for (uint32_t half = 0; half < TILE_STRIPS; half++, position += STRIP_TOKENS) {
            strip s = {uniform(m->notes[at].there[half]), place, ptx_shared_address(m->ring) + place * r.bytes,
                       flags & NOTE_EXTRA_POOL ? STRIP_EXTRA : 0, position};
            if (s.there != 0 && number % GATHERERS == which) {
                await_entry(m, number);
                ptx_mbarrier_wait(ptx_shared_address(&m->place_free[place]), parity);
                bring_strip(p, m, r, s, at, half, number % ENTRIES);
                place += GATHERERS;
                if (place >= r.places) {
                    place = which;
                    parity ^= 1;
                }
            }
            number += s.there != 0;
        }
        arrive_warp(ptx_shared_address(&m->places_empty[at]));
        if ((flags & NOTE_NEXT) == 0) {
            const uint32_t team = number % TEAMS;
#pragma unroll 1
            for (uint32_t i = 0; i < TEAMS; i++, number++) {
                if (number % GATHERERS == which) {
                    await_entry(m, number);
                    end_strips(m, team, number % ENTRIES);
                }
            }
            position = 0;
        }
    }
}

/* ---- Q ----------------------------------------------------------------------------------------------------------- */

/* Eight dims of a row of Q. */
static __device__ __forceinline__ uint4 load_q(const uint8_t *row, uint32_t dim)
{
    uint4 x = {0, 0, 0, 0};
    if (row) {
        x = *(const uint4 *)(row + 2 * dim);
    }
    return x;
}

static __device__ __forceinline__ const uint8_t *q_row(const fmlac_mqa &p, const fmlac_work &w, int row)
{
    int64_t token;
    int32_t head;
    if (row >= w.rows || p.scale == 0.0f) {
        return nullptr;
    }
    row_token_head(w, row, &token, &head);
    return (const uint8_t *)p.q.data + 2 * row_offset(&p.q, &p, token, head);
}

static __device__ __forceinline__ uint32_t pair_max(uint32_t most, uint32_t x)
{
    const uint32_t low = x & 0x7FFFu, high = x >> 16 & 0x7FFFu;
    most = low > most ? low : most;
    return high > most ? high : most;
}

/* The exponent of the power of two that brings a row's largest number, `most`, to 2^14 .. 2^15, as bits of a float. */
static __device__ __forceinline__ uint32_t q_exponent(uint32_t most)
{
#pragma unroll
    for (int step = 1; step < 4; step *= 2) { /* lanes that share the row */
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, most, step);
        most = other > most ? other : most;
    }
    const uint32_t exponent = 268 - (most >> 7);
    return exponent < 253 ? exponent : 253;
}

static __device__ __forceinline__ uint32_t scale_q(uint32_t x, float factor, bool plain)
{
    const float low = __uint_as_float(x << 16) * factor, high = __uint_as_float(x & 0xFFFF0000u) * factor;
    return plain ? ptx_pack_bf16(low, high) : ptx_pack_f16(low, high);
}

/*
 * Q of a piece as first operands of products: lane 4g + q has rows g and g + 8, dims 8q .. 8q + 7 of each half block,
 * four of them for each product. Rows are scaled by a power of two, scales[] takes it back, and have the sign of the
 * softmax scale. Where tokens have codes they are fp16, which is exact but for numbers 2^31 times smaller than the
 * row's largest. Zeros if the scale is 0.
 */
template <int BLOCKS>
static __device__ __forceinline__ void write_q(const fmlac_mqa &p, const fmlac_work &w, uint32_t to, float *scales)
{
    const uint32_t lane = threadIdx.x % 32, q = lane % 4, sign = p.scale < 0.0f ? 0x80000000u : 0;
    const uint8_t *const rows[2] = {q_row(p, w, (int)lane / 4), q_row(p, w, (int)lane / 4 + 8)};
    uint32_t most[2] = {0, 0};
    float factor[2];
#pragma unroll 1
    for (uint32_t first = 0; first < 2 * BLOCKS; first += 6) { /* twelve loads under way */
        uint4 x[6][2];
#pragma unroll
        for (uint32_t i = 0; i < 12; i++) {
            x[i / 2][i % 2] = load_q(first + i / 2 < 2 * BLOCKS ? rows[i % 2] : nullptr, (first + i / 2) * 32 + 8 * q);
        }
#pragma unroll
        for (uint32_t i = 0; i < 12; i++) {
            const uint4 &y = x[i / 2][i % 2];
            most[i % 2] = pair_max(pair_max(pair_max(pair_max(most[i % 2], y.x), y.y), y.z), y.w);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t exponent = q_exponent(most[h]);
        factor[h] = __uint_as_float(exponent << 23 | sign);
        if (q == 0) {
            scales[lane / 4 + 8 * h] = __uint_as_float((254 - exponent) << 23);
        }
    }
#pragma unroll 3
    for (uint32_t half = 0; half < 2 * BLOCKS; half++) {
        const bool plain = half * 32 >= (uint32_t)p.main.pool.quant_dims;
        const uint4 x = load_q(rows[0], half * 32 + 8 * q), y = load_q(rows[1], half * 32 + 8 * q);
        const uint32_t first[4] = {scale_q(x.x, factor[0], plain), scale_q(y.x, factor[1], plain),
                                   scale_q(x.y, factor[0], plain), scale_q(y.y, factor[1], plain)};
        const uint32_t second[4] = {scale_q(x.z, factor[0], plain), scale_q(y.z, factor[1], plain),
                                    scale_q(x.w, factor[0], plain), scale_q(y.w, factor[1], plain)};
        ptx_store_shared_128(to + (half * 2 * 32 + lane) * 16, first);
        ptx_store_shared_128(to + ((half * 2 + 1) * 32 + lane) * 16, second);
    }
}

/* The warp that brings Q and sinks. A piece's places are free once the piece before the last is over. */
template <int BLOCKS> static __device__ __forceinline__ void bring_queries(const fmlac_mqa &p, few_plan<BLOCKS> *m)
{
    const int lane = (int)threadIdx.x % 32;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!uniform(c.there)) {
            break;
        }
        write_q<BLOCKS>(p, c.work, ptx_shared_address(m->q[i & 1]), m->q_scale[i & 1]);
        if (lane < ROWS) {
            m->sink[i & 1][lane] = row_sink(p, c, lane);
        }
        arrive_together(ptx_shared_address(&m->q_full[i & 1]));
        arrive_warp(ptx_shared_address(&m->piece_free[i & 1]));
    }
}

#endif
