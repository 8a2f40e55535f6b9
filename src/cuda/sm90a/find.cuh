/* SPDX-License-Identifier: MIT */
/*
 * find.cuh: the finder, a warp that finds pieces and walks lists of quantised tokens, for the relay (source_codes.cuh)
 * and for few rows (few_source.cuh). What it writes down of a tile, and when, is each plan's own: piece_begins,
 * note_tile, tile_noted, note_nothing (of a piece without tiles; says how many were noted), note_end.
 */
#ifndef FLASHMLA_CUDA_SM90A_FIND_CUH
#define FLASHMLA_CUDA_SM90A_FIND_CUH

#include "source.cuh"

static __device__ __forceinline__ const fmlac_pool &pool_of(const fmlac_mqa &p, bool extra)
{
    return extra ? p.extra.pool : p.main.pool;
}

/* Tiles that are as long as the list is fetched: a list without gaps needs no search. */
#define STRAIGHT (TOKENS == 64)

/* Whether the entries of positions `at` to `at` + 63 are a tile, as scan_next would find it with an empty ring. next:
 * the 64 behind them. */
static __device__ __forceinline__ bool scan_straight(const list_scan *scan, const list_ahead &ahead,
                                                     const list_ahead &next, int32_t at, tile_tokens *found)
{
    const int32_t lane = (int32_t)(threadIdx.x % 32), behind = at + 64;
    const bool extra = at >= scan->main_end;
    const uint32_t slots = extra ? scan->extra_slots : scan->main_slots;
    bool whole = behind <= (extra ? scan->end : scan->main_end < scan->end ? scan->main_end : scan->end), more = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int32_t position = behind + 32 * h + lane;
        const uint32_t limit = position < scan->main_end ? scan->main_slots : scan->extra_slots;
        whole &= (uint32_t)ahead.entry[h] < slots;
        more |= position < scan->end && (uint32_t)next.entry[h] < limit;
    }
    *found = {0, 64, extra, __any_sync(0xFFFFFFFFu, more) != 0};
    return __all_sync(0xFFFFFFFFu, whole) && (found->more || behind >= scan->end);
}

/* The finder. Tiles are counted over all pieces; behind the last a note says so. */
template <typename PLAN> static __device__ __forceinline__ void find_tiles(const fmlac_mqa_sm90a &all, PLAN *m)
{
    const fmlac_mqa &p = all.mqa;
    int lane = threadIdx.x % 32;
    uint32_t tile = 0;
    walk_begin(p, &m->walk, blockIdx.x, gridDim.x, lane);
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        scout_piece(p, m, i);
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            break;
        }
        const fmlac_work &w = c.work;
        int32_t begin = __shfl_sync(0xFFFFFFFFu, c.begin, 0), end = __shfl_sync(0xFFFFFFFFu, c.end, 0);
        int32_t position = begin * TOKENS;
        list_ahead ahead = {{-1, -1}}, next = ahead;
        bool there = begin < end, straight = STRAIGHT && !is_paged(&p);
        if (there) {
            ahead = scan_begin(p, w, begin, end, &m->scans[0]);
            if (STRAIGHT) {
                next = scan_fetch(p, w, &m->scans[0], position + 64);
            }
            piece_begins(all, m, w, i);
        }
#pragma unroll 1
        while (there) {
            tile_tokens found;
            uint32_t entries[2] = {(uint32_t)ahead.entry[0], (uint32_t)ahead.entry[1]};
            if (straight && !scan_straight(&m->scans[0], ahead, next, position, &found)) {
                straight = false; /* the search goes on from here */
                if (lane == 0) {
                    m->scans[0].at = position;
                }
            }
            if (straight) {
                ahead = next;
                next = scan_fetch(p, w, &m->scans[0], position + 128);
            } else {
                found = scan_next(p, w, &m->scans[0], &ahead, m->entries[0]);
            }
            ptx_mbarrier_wait(ptx_shared_address(&m->places_empty[tile % PLACES]), (tile / PLACES & 1) ^ 1);
            note_tile(p, w, m, found, entries, straight, position, tile % PLACES);
            there = found.more;
            position += TOKENS;
            tile++;
            tile_noted(all, m, c, i == 0 && tile == 1);
        }
        if (begin >= end) {
            tile += note_nothing(all, m, c, tile, i == 0);
        }
        arrive_together(ptx_shared_address(&m->piece_free[i & 1]));
    }
    ptx_mbarrier_wait(ptx_shared_address(&m->places_empty[tile % PLACES]), (tile / PLACES & 1) ^ 1);
    note_end(m, tile % PLACES);
}

#endif
