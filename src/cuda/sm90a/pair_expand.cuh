/* SPDX-License-Identifier: MIT */
/*
 * pair_expand.cuh: the expanding warps of a pair (pair.cuh): they take a unit of raw rows after another from the ring
 * and write bf16 numbers into the tile. They are what limits a pair, so the way that nearly every unit takes is one
 * straight run.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_EXPAND_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_EXPAND_CUH

#include "expand.cuh"
#include "pair_source.cuh"

/* A lane's part of a row: 16 dims, from `dim` of the block's half on. */
typedef struct expand_lane {
    uint32_t dim;   /* in the half */
    uint32_t token; /* 0, 1: which row of two */
} expand_lane;

/* Kind of the pool's codes, and place of the lane's scale << 8; 0: nothing to do. */
static __device__ __forceinline__ uint32_t lane_kind(const fmlac_pool &pool, uint32_t dim, uint32_t rank)
{
    raw_part part = part_of(pool, rank);
    uint32_t size = pool.scale == FMLAC_F32 ? 4 : 1, all = rank * PAIR_DIMS + dim;
    uint32_t at = (all >> pool.group_shift) * size - part.scales_at;
    return all < (uint32_t)pool.quant_dims ? code_kind(pool) | KIND_USED | at << 8 : 0;
}

/* The lane's codes and scale, from rows at `two`. */
static __device__ __forceinline__ uint32_t load_codes(uint32_t kind, const expand_lane &l, uint32_t two,
                                                      uint32_t codes[4])
{
    uint32_t row = two + l.token * RAW_SECOND, scale = two + RAW_SCALES + l.token * 16 + (kind >> 8);
    if (kind & KIND_FP4) {
        ptx_load_shared_64(codes, row + l.dim / 2);
    } else {
        ptx_load_shared_128(codes, row + l.dim);
    }
    return kind & KIND_F32 ? ptx_load_shared_u32(scale) : ptx_load_shared_u8(scale);
}

/* The warp has read a unit of raw rows. */
static __device__ __forceinline__ void release_raw(uint32_t empty)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx_mbarrier_arrive(empty);
    }
}

/* Passes of a unit, of four, whose products are ready before the tile is free; more would not fit the registers. */
#define READY_PASSES 2

/* Where a unit goes. */
typedef struct expand_to {
    uint32_t tile, first; /* address; row of the unit's first one */
    uint32_t empty, use;  /* of the tile: barrier, parity; waited for before the first store */
    uint32_t raw_empty;   /* barrier of the raw rows */
} expand_to;

/*
 * Eight attended rows of one pool, four passes of two: nothing but loads, products and stores. The raw rows are
 * released once they are in registers, and products are ready when the tile becomes free: the time from there until it
 * is full again is what everybody else waits for. Says no, having done nothing, if a code or a scale of any lane needs
 * the product in float.
 */
template <int FP4, int F32>
static __device__ __forceinline__ bool expand_easy(uint32_t kind, const expand_lane &l, uint32_t raw,
                                                   const expand_to &to)
{
    uint32_t codes[4][4], factor[4], out[4][8], nan = 0;
    bool hard = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t two = raw + i * RAW_TWO, row = two + l.token * RAW_SECOND;
        uint32_t at = two + RAW_SCALES + l.token * 16 + (kind >> 8);
        if (FP4) {
            ptx_load_shared_64(codes[i], row + l.dim / 2);
        } else {
            ptx_load_shared_128(codes[i], row + l.dim);
        }
        factor[i] = F32 ? ptx_load_shared_u32(at) : ptx_load_shared_u8(at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (FP4) { /* an e4m3 number as bf16, by 2^120 */
            hard = hard || (factor[i] & 0x7F) == 0x7F;
            factor[i] = (factor[i] & 0x80) << 8 | (factor[i] & 0x7F) << 4;
            factor[i] = ptx_multiply_bf16x2(factor[i] | factor[i] << 16, 0x7B807B80u);
        } else {
            uint32_t exponent = F32 ? factor[i] >> 23 : factor[i];
            hard = hard || exponent - 3 > 131 || (F32 && (factor[i] & 0x7FFFFF) != 0);
            factor[i] = (exponent + 120) * 0x00800080u;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                nan |= (codes[i][j] & 0x7F7F7F7Fu) + 0x01010101u;
            }
        }
    }
    hard = kind != 0 && (hard || (nan & 0x80808080u) != 0);
    if (__any_sync(0xFFFFFFFFu, hard)) {
        return false;
    }
    release_raw(to.raw_empty);
#pragma unroll
    for (int i = 0; i < READY_PASSES; i++) {
        multiply_16_easy(FP4, codes[i], factor[i], out[i]);
    }
    ptx_mbarrier_wait(to.empty, to.use);
    if (kind != 0) { /* two rows further on: 256 bytes, and one bit of the place in the row is another */
        uint32_t at = to.tile + chunk_offset(to.first + l.token, l.dim / 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= READY_PASSES) {
                multiply_16_easy(FP4, codes[i], factor[i], out[i]);
            }
            ptx_store_shared_128((at ^ (i * 32)) + i * 256, out[i]);
            ptx_store_shared_128((at ^ (i * 32 + 16)) + i * 256, out[i] + 4);
        }
    }
    return true;
}

/* Eight rows with anything in them; those from `count` on are not attended. */
static __device__ __forceinline__ void expand_any(const fmlac_pool &pool, uint32_t kind, const expand_lane &l,
                                                  uint32_t raw, const expand_to &to, uint32_t count)
{
    ptx_mbarrier_wait(to.empty, to.use);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        uint32_t token = to.first + 2 * i + l.token;
        uint32_t at = to.tile + chunk_offset(token, l.dim / 8), codes[4] = {0, 0, 0, 0};
        if (kind != 0 && token < count) {
            uint32_t bits = load_codes(kind, l, raw + i * RAW_TWO, codes);
            expand_16(pool, kind, codes, bits, at);
        } else if (kind != 0) {
            ptx_store_shared_128(at, codes);
            ptx_store_shared_128(at ^ 16, codes);
        }
    }
    release_raw(to.raw_empty);
}

/* What an expanding warp knows of a pool's codes: what is the same in all lanes, and the lane's own. */
typedef struct unit_kinds {
    uint32_t common[2], own[2]; /* of the main pool, of the extra one */
} unit_kinds;

/* The kind of codes that all pools of a call most likely have: tokens with RoPE dims on top have float scales. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t likely_kind(void)
{
    return (BLOCKS == 9 ? KIND_F32 : KIND_E8M0) | KIND_USED;
}

/* The straight runs. ALIKE: all pools are of the likely kind. */
template <int BLOCKS, int ALIKE>
static __device__ __forceinline__ bool expand_straight(uint32_t common, uint32_t kind, const expand_lane &l,
                                                       uint32_t raw, const expand_to &to, uint32_t count)
{
    bool done = false;
    if (to.first + UNIT_ROWS <= count) {
        if (ALIKE) {
            done = expand_easy<0, BLOCKS == 9>(kind, l, raw, to);
        } else if (common == (KIND_E8M0 | KIND_USED)) {
            done = expand_easy<0, 0>(kind, l, raw, to);
        } else if (common == (KIND_F32 | KIND_USED)) {
            done = expand_easy<0, 1>(kind, l, raw, to);
        } else if (common == (KIND_FP4 | KIND_E4M3 | KIND_USED)) {
            done = expand_easy<1, 0>(kind, l, raw, to);
        }
    }
    return done;
}

/* A unit is in its tile, as far as this warp is concerned. */
template <int BLOCKS>
static __device__ __forceinline__ void hand_over(pair_plan<BLOCKS> *m, uint32_t stage, uint32_t unit, uint32_t note)
{
    bool first = ptx_thread() % 32 == 0;
    if (unit == 0 && first) {
        m->stage_notes[stage] = note;
    }
    if (!PAIR_READER_FENCE) {
        ptx_fence_async_proxy();
    }
    __syncwarp();
    if (first) {
        ptx_mbarrier_arrive(ptx_shared_address(&m->full[stage]));
    }
}

/* Where an expanding warp is. */
typedef struct unit_turn {
    uint32_t unit, number; /* of the tile; of the tile itself, in all pieces */
    bool more;             /* of the piece */
} unit_turn;

template <int BLOCKS> static __device__ __forceinline__ ring_place raw_place(const unit_turn &at)
{
    return ring_at<raw_ring<BLOCKS>::GROUPS>(at.number * TILE_GROUPS + at.unit / GROUP_UNITS);
}

template <int BLOCKS>
static __device__ __forceinline__ uint32_t raw_address(const pair_plan<BLOCKS> *m, const unit_turn &at, uint32_t place)
{
    return ptx_shared_address(m->raw[place]) + at.unit % GROUP_UNITS * (UNIT_ROWS / 2 * RAW_TWO);
}

template <int BLOCKS>
static __device__ __forceinline__ expand_to unit_to(const pair_plan<BLOCKS> *m, const unit_turn &at, uint32_t place)
{
    ring_place stage = ring_at<STAGES>(at.number);
    expand_to to = {ptx_shared_address(m->k[stage.at]), at.unit * UNIT_ROWS, ptx_shared_address(&m->empty[stage.at]),
                    stage.use ^ 1, ptx_shared_address(&m->raw_empty[place])};
    return to;
}

/* The unit is in its tile; goes on to the next one. */
template <int BLOCKS>
static __device__ __forceinline__ void hand_over(pair_plan<BLOCKS> *m, unit_turn *at, uint32_t note)
{
    bool first = ptx_thread() % 32 == 0;
    uint32_t stage = ring_at<STAGES>(at->number).at;
    if (at->unit == 0 && first) {
        m->stage_notes[stage] = note;
    }
    if (!PAIR_READER_FENCE) {
        ptx_fence_async_proxy();
    }
    __syncwarp();
    if (first) {
        ptx_mbarrier_arrive(ptx_shared_address(&m->full[stage]));
    }
    at->unit += EXPAND_WARPS;
    if (at->unit >= TILE_UNITS) {
        at->unit -= TILE_UNITS;
        at->number++;
        at->more = (note & NOTE_MORE) != 0;
    }
}

/* An expanding warp: every EXPAND_WARPS-th unit, counted over all pieces. The straight runs are a loop of their own:
 * fetching instructions elsewhere costs 50 cycles a jump. */
template <int BLOCKS, int ALIKE>
static __device__ __forceinline__ void expand_units(const fmlac_mqa &p, pair_plan<BLOCKS> *m, uint32_t warp,
                                                    const expand_lane &l, const unit_kinds &kinds)
{
    unit_turn at = {warp, 0, false};
#pragma unroll 1
    for (uint32_t i = 0; await_piece(m, i); i++) {
        at.more = true;
#pragma unroll 1
        while (at.more) {
            bool done;
#pragma unroll 1
            do {
                ring_place place = raw_place<BLOCKS>(at);
                ptx_mbarrier_wait(ptx_shared_address(&m->raw_full[place.at]), place.use);
                uint32_t note = uniform(m->raw_notes[place.at]);
                bool extra = (note & NOTE_EXTRA) != 0;
                done = expand_straight<BLOCKS, ALIKE>(
                    extra ? kinds.common[1] : kinds.common[0], extra ? kinds.own[1] : kinds.own[0], l,
                    raw_address(m, at, place.at), unit_to(m, at, place.at), note & NOTE_COUNT);
                if (done) {
                    hand_over(m, &at, note);
                }
            } while (done && at.more);
            if (!done) {
                uint32_t place = raw_place<BLOCKS>(at).at, note = uniform(m->raw_notes[place]);
                bool extra = (note & NOTE_EXTRA) != 0;
                expand_any(extra ? p.extra.pool : p.main.pool, extra ? kinds.own[1] : kinds.own[0], l,
                           raw_address(m, at, place), unit_to(m, at, place), note & NOTE_COUNT);
                hand_over(m, &at, note);
            }
        }
        __syncwarp();
        if (ptx_thread() % 32 == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i % PIECES]));
        }
    }
}

template <int BLOCKS>
static __device__ __forceinline__ void expand(const fmlac_mqa &p, pair_plan<BLOCKS> *m, int warp, uint32_t rank)
{
    int lane = threadIdx.x % 32;
    expand_lane l;
    l.dim = ((lane & 3) | lane >> 3 << 2) * 16;
    l.token = lane >> 2 & 1;
    bool extra = p.extra.kind != FMLAC_LIST_NONE;
    unit_kinds kinds;
    kinds.own[0] = lane_kind(p.main.pool, l.dim, rank);
    kinds.own[1] = extra ? lane_kind(p.extra.pool, l.dim, rank) : 0;
    kinds.common[0] = uniform(kinds.own[0]) & 255;
    kinds.common[1] = uniform(kinds.own[1]) & 255;
    if (kinds.common[0] == likely_kind<BLOCKS>() && (!extra || kinds.common[1] == likely_kind<BLOCKS>())) {
        expand_units<BLOCKS, 1>(p, m, warp, l, kinds);
    } else {
        expand_units<BLOCKS, 0>(p, m, warp, l, kinds);
    }
}

#endif
