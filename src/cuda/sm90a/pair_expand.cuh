/* SPDX-License-Identifier: MIT */
/*
 * pair_expand.cuh: the expanding warps of a pair (pair.cuh): they take a unit of raw rows after another from the ring
 * and write bf16 numbers into the tile. They are what limits a pair.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_EXPAND_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_EXPAND_CUH

#include "expand.cuh"
#include "pair_source.cuh"

/* A lane's part of a row: 16 dims, from `dim` of the block's half on. */
typedef struct expand_lane {
    uint32_t dim;              /* in the half */
    uint32_t token;            /* 0, 1: which row of two */
    uint32_t kind, extra_kind; /* of the pools' codes: kind, place of the lane's scale << 8; 0: nothing to do */
} expand_lane;

static __device__ __forceinline__ uint32_t lane_kind(const fmlac_pool &pool, uint32_t dim, uint32_t rank)
{
    raw_part part = part_of(pool, rank);
    uint32_t size = pool.scale == FMLAC_F32 ? 4 : 1, all = rank * PAIR_DIMS + dim;
    uint32_t at = (all >> pool.group_shift) * size - part.scales_at;
    return all < (uint32_t)pool.quant_dims ? code_kind(pool) | KIND_USED | at << 8 : 0;
}

/* The lane's codes and scale, from rows at `two`. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t load_codes(uint32_t kind, const expand_lane &l, uint32_t two,
                                                      uint32_t codes[4])
{
    typedef raw_ring<BLOCKS> ring;
    uint32_t row = two + l.token * ring::SECOND, scale = two + ring::SCALES + l.token * 16 + (kind >> 8);
    if (kind & KIND_FP4) {
        ptx_load_shared_64(codes, row + l.dim / 2);
    } else {
        ptx_load_shared_128(codes, row + l.dim);
    }
    return kind & KIND_F32 ? ptx_load_shared_u32(scale) : ptx_load_shared_u8(scale);
}

/* Passes of a unit, of four, whose products are ready before the tile is free; all four would not fit the registers. */
#define READY_PASSES 3

/* Where a unit goes. */
typedef struct expand_to {
    uint32_t tile, last; /* addresses: of the tile; of one all of which is contiguous with its last block */
    uint32_t first;      /* row of the unit's first one */
    uint32_t empty, use; /* of the tile: barrier, parity; waited for before the first store */
    uint32_t raw_empty;  /* barrier of the raw rows */
} expand_to;

/* Where a lane's tile begins. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t lane_tile(const expand_lane &l, const expand_to &to)
{
    return l.dim < tile_blocks<BLOCKS>::OWN * 64 ? to.tile : to.last;
}

/*
 * Eight attended rows of one pool, four passes of two: nothing but loads, products and stores. The raw rows are
 * released once they are in registers, and products are ready when the tile becomes free: the time from there until it
 * is full again is what everybody else waits for. Says no, having done nothing, if a code or a scale of any lane is
 * none for it. MIXED: float scales need be no powers of two.
 */
template <int FP4, int F32, int MIXED, int BLOCKS>
static __device__ __forceinline__ bool expand_easy(uint32_t kind, const expand_lane &l, uint32_t raw,
                                                   const expand_to &to)
{
    typedef raw_ring<BLOCKS> ring;
    uint32_t codes[4][4], factor[4], out[4][8], nan = 0;
    bool hard = false;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t two = raw + i * ring::TWO, row = two + l.token * ring::SECOND;
        uint32_t at = two + ring::SCALES + l.token * 16 + (kind >> 8);
        if (FP4) {
            ptx_load_shared_64(codes[i], row + l.dim / 2);
        } else {
            ptx_load_shared_128(codes[i], row + l.dim);
        }
        factor[i] = F32 ? ptx_load_shared_u32(at) : ptx_load_shared_u8(at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (FP4) {
            hard = hard || (factor[i] & 0x7F) == 0x7F;
            factor[i] = factor_of_e4m3(factor[i]);
            nan |= codes[i][0] | codes[i][1];
        } else {
            uint32_t exponent = F32 ? factor[i] >> 23 : factor[i];
            hard = hard || exponent_is_hard(exponent) || (F32 && !MIXED && (factor[i] & 0x7FFFFF) != 0);
            factor[i] = MIXED ? factor_of_float(factor[i]) : factor_of_exponent(exponent);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                nan |= e4m3_nans(codes[i][j]);
            }
        }
    }
    /* The vote is over everything that was loaded, so that rows are not released before; a kind has no bit 31. */
    hard = kind != 0 && (hard || (nan & (FP4 ? kind & 0x80000000u : E4M3_NANS)) != 0);
    if (__any_sync(0xFFFFFFFFu, hard)) {
        return false;
    }
    arrive_together(to.raw_empty);
#pragma unroll
    for (int i = 0; i < READY_PASSES; i++) {
        multiply_16_easy(FP4, MIXED, codes[i], factor[i], out[i]);
    }
    ptx_mbarrier_wait(to.empty, to.use);
    if (kind != 0) { /* two rows further on: 256 bytes, and one bit of the place in the row is another */
        uint32_t at = lane_tile<BLOCKS>(l, to) + chunk_offset(to.first + l.token, l.dim / 8);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= READY_PASSES) {
                multiply_16_easy(FP4, MIXED, codes[i], factor[i], out[i]);
            }
            ptx_store_shared_128((at ^ (i * 32)) + i * 256, out[i]);
            ptx_store_shared_128((at ^ (i * 32 + 16)) + i * 256, out[i] + 4);
        }
    }
    return true;
}

/* Eight rows with anything in them; those from `count` on are not attended. */
template <int BLOCKS>
static __device__ __forceinline__ void expand_any(const fmlac_pool &pool, uint32_t kind, const expand_lane &l,
                                                  uint32_t raw, const expand_to &to, uint32_t count)
{
    ptx_mbarrier_wait(to.empty, to.use);
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
        uint32_t token = to.first + 2 * i + l.token;
        uint32_t at = lane_tile<BLOCKS>(l, to) + chunk_offset(token, l.dim / 8), codes[4] = {0, 0, 0, 0};
        if (kind != 0 && token < count) {
            uint32_t bits = load_codes<BLOCKS>(kind, l, raw + i * raw_ring<BLOCKS>::TWO, codes);
            expand_16(pool, kind, codes, bits, at);
        } else if (kind != 0) {
            ptx_store_shared_128(at, codes);
            ptx_store_shared_128(at ^ 16, codes);
        }
    }
    arrive_together(to.raw_empty);
}

/*
 * A unit; `common`: of the pool's kind what is the same in all lanes; `kind`: the lane's. The likeliest kind last: its
 * instructions follow at once, and only kinds that are in use have a straight run: each slows the others down. Tokens
 * with RoPE dims on top have float scales; mixed: some were no powers of two.
 */
template <int BLOCKS>
static __device__ __forceinline__ void expand_unit(const fmlac_pool &pool, const expand_lane &l, uint32_t common,
                                                   uint32_t kind, uint32_t raw, const expand_to &to, uint32_t count,
                                                   bool *mixed)
{
    bool done = false;
    if (to.first + UNIT_ROWS <= count) {
        if (common == (KIND_F32 | KIND_USED) && (BLOCKS == 8 || *mixed)) {
            done = expand_easy<0, 1, 1, BLOCKS>(kind, l, raw, to);
        } else if (BLOCKS == 8 && common == (KIND_FP4 | KIND_E4M3 | KIND_USED)) {
            done = expand_easy<1, 0, 0, BLOCKS>(kind, l, raw, to);
        } else if (common == ((BLOCKS == 9 ? KIND_F32 : KIND_E8M0) | KIND_USED)) {
            done = expand_easy<0, BLOCKS == 9, 0, BLOCKS>(kind, l, raw, to);
        }
        *mixed |= BLOCKS == 9 && common == (KIND_F32 | KIND_USED) && !done;
    }
    if (!done) {
        expand_any<BLOCKS>(pool, kind, l, raw, to, count);
    }
}

/* An expanding warp: every EXPAND_WARPS-th unit, counted over all pieces. */
template <int BLOCKS>
static __device__ __forceinline__ void expand(const fmlac_mqa &p, pair_plan<BLOCKS> *m, int warp, uint32_t rank)
{
    int lane = threadIdx.x % 32, unit = warp; /* of the tile; beyond the last: of later ones */
    uint32_t number = 0;                      /* of the tile, in all pieces */
    bool mixed = false;
    expand_lane l;
    l.token = lane >> 2 & 1;
    l.dim = ((lane & 3) | lane >> 3 << 2) * 16 ^ l.token * raw_ring<BLOCKS>::TURN;
    l.kind = lane_kind(p.main.pool, l.dim, rank);
    l.extra_kind = p.extra.kind == FMLAC_LIST_NONE ? 0 : lane_kind(p.extra.pool, l.dim, rank);
    uint32_t kind = __shfl_sync(0xFFFFFFFFu, l.kind, 0) & 255,
             extra_kind = __shfl_sync(0xFFFFFFFFu, l.extra_kind, 0) & 255;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        if (!await_piece(m, i)) {
            return;
        }
        bool there = true;
#pragma unroll 1
        while (there) {
            ring_place stage = ring_at<STAGES>(number);
#pragma unroll 1
            for (; unit < TILE_UNITS; unit += EXPAND_WARPS) {
                ring_place raw = ring_at<raw_ring<BLOCKS>::GROUPS>(number * TILE_GROUPS + unit / GROUP_UNITS);
                ptx_mbarrier_wait(ptx_shared_address(&m->raw_full[raw.at]), raw.use);
                uint32_t note = __shfl_sync(0xFFFFFFFFu, m->raw_notes[raw.at], 0);
                bool extra = (note & NOTE_EXTRA) != 0;
                uint32_t last = BLOCKS == 9 ? 0
                                            : ptx_shared_address(m->k_last[number % LASTS]) -
                                                  tile_blocks<BLOCKS>::OWN * BLOCK_BYTES;
                expand_to to = {
                    ptx_shared_address(m->k[stage.at]),      last,          (uint32_t)unit * UNIT_ROWS,
                    ptx_shared_address(&m->empty[stage.at]), stage.use ^ 1, ptx_shared_address(&m->raw_empty[raw.at])};
                expand_unit<BLOCKS>(
                    extra ? p.extra.pool : p.main.pool, l, extra ? extra_kind : kind, extra ? l.extra_kind : l.kind,
                    ptx_shared_address(m->raw[raw.at]) + unit % GROUP_UNITS * (UNIT_ROWS / 2 * raw_ring<BLOCKS>::TWO),
                    to, note & NOTE_COUNT, &mixed);
                if (unit == 0 && lane == 0) {
                    m->stage_notes[stage.at] = note;
                }
                there = (note & NOTE_MORE) != 0;
                arrive_together(ptx_shared_address(&m->full[stage.at]));
            }
            unit -= TILE_UNITS;
            number++;
        }
        arrive_together(ptx_shared_address(&m->piece_free[i % PIECES]));
    }
}

#endif
