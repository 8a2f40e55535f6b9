/* SPDX-License-Identifier: MIT */
/*
 * pair_source.cuh: quantised tokens on their way into the tiles of a pair (pair.cuh): each block brings its half of a
 * token's dims. The finder walks the list and says where the tokens of a tile lie. Gather warps copy raw rows, a group
 * at a time, into a ring by bulk copies: they use neither registers nor the path of loads and stores. Expanding warps
 * take a group after another from there and write bf16 numbers into the tile. RoPE dims are bf16 already and are copied
 * straight into the tile.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_SOURCE_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_SOURCE_CUH

#include "expand.cuh"
#include "pair_plan.cuh"
#include "ptx/cluster.cuh"
#include "ptx/tma.cuh"
#include "source.cuh"

/* Whether there is a piece i. */
template <int BLOCKS> static __device__ __forceinline__ bool await_piece(const pair_plan<BLOCKS> *m, uint32_t i)
{
    ring_place at = ring_at<PIECES>(i);
    ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[at.at]), at.use);
    return uniform(m->pieces[at.at].there) != 0;
}

/* ---- gather ------------------------------------------------------------------------------------------------------ */

/* What this block takes of a pool's rows. */
typedef struct raw_part {
    uint32_t codes_at, code_bytes;   /* of a row */
    uint32_t scales_at, scale_bytes; /* of its scales: all of them where they fit into 16 bytes */
} raw_part;

static __device__ __forceinline__ raw_part part_of(const fmlac_pool &pool, uint32_t rank)
{
    raw_part part;
    uint32_t half = pool.element == FMLAC_F4_E2M1 ? PAIR_DIMS / 2 : PAIR_DIMS;
    uint32_t all = pool.code_bytes;
    part.codes_at = rank * half;
    part.code_bytes = rank * half + half <= all ? half : all - rank * half;
    bool both = pool.scale_bytes <= 16;
    part.scales_at = both ? 0 : rank * 16;
    part.scale_bytes = pool.scale_bytes == 0 ? 0 : both && pool.scale_bytes <= 8 ? 8 : 16;
    return part;
}

/* RoPE dims of a block: 16-byte chunks per row; none: 0. On top of 512 dims each block has half of them. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t rope_chunks(const fmlac_mqa &p, uint32_t rank)
{
    return BLOCKS == 9 ? 4 : p.main.pool.rope_dims > 0 && rank == 1 ? 8 : 0;
}

/* RoPE dims of the rows of a tile, whose places are known, to `to`; columns from chunk `first` on. */
template <int CHUNKS>
static __device__ __forceinline__ void copy_rope(const fmlac_pool &pool, const token_place *places, uint32_t to,
                                                 int first, int32_t at)
{
    int lane = threadIdx.x % 32, chunk = lane % CHUNKS, row0 = lane / CHUNKS;
    if (pool.aligned) {
#pragma unroll 8
        for (int row = row0; row < TOKENS; row += 32 / CHUNKS) {
            const uint8_t *from = places[row].row;
            ptx_copy_async_16(to + chunk_offset(row, first + chunk), from ? from + at + chunk * 16 : pool.data,
                              from ? 16 : 0);
        }
        return;
    }
#pragma unroll 1
    for (int row = row0; row < TOKENS; row += 32 / CHUNKS) {
        const uint8_t *from = places[row].row;
        copy_bytes(to + chunk_offset(row, first + chunk), from ? from + at + chunk * 16 : pool.data, from ? 8 : 0);
    }
}

/* While the tile is not free yet, its RoPE dims come into L2: there is little time for them afterwards. */
#ifndef PAIR_ROPE_AHEAD
#define PAIR_ROPE_AHEAD 0
#endif

/* The warp that copies RoPE dims into the tiles, where the block has some. */
template <int BLOCKS>
static __device__ __forceinline__ void gather_rope(const fmlac_mqa &p, pair_plan<BLOCKS> *m, uint32_t rank)
{
    int lane = threadIdx.x % 32;
    uint32_t tile = 0; /* in all pieces */
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        if (!await_piece(m, i)) {
            return;
        }
        bool there = true;
#pragma unroll 1
        for (; there; tile++) {
            ptx_mbarrier_wait(ptx_shared_address(&m->places_full[tile & 1]), use_parity(tile));
            uint32_t note = __shfl_sync(0xFFFFFFFFu, m->notes[tile & 1], 0);
            const fmlac_pool &pool = note & NOTE_EXTRA ? p.extra.pool : p.main.pool;
            const token_place *places = m->places[tile & 1];
            ring_place stage = ring_at<STAGES>(tile);
            int32_t at = pool.rope_offset + (BLOCKS == 9 ? rank * 64 : 0);
            for (int row = lane; PAIR_ROPE_AHEAD && row < (int)(note & NOTE_COUNT); row += 32) {
                ptx_prefetch_l2(places[row].row + at);
            }
            if (BLOCKS == 9) {
                ptx_mbarrier_wait(ptx_shared_address(&m->rope_empty[tile & 1]), use_parity(tile) ^ 1);
                copy_rope<4>(pool, places, ptx_shared_address(m->k_rope), (tile & 1) * 4, at);
            } else {
                ptx_mbarrier_wait(ptx_shared_address(&m->empty[stage.at]), stage.use ^ 1);
                copy_rope<8>(pool, places, ptx_shared_address(m->k[stage.at][HALF_BLOCKS - 1]), 0, at);
            }
            if (pool.aligned) {
                ptx_mbarrier_arrive_copies(ptx_shared_address(&m->full[stage.at]));
            } else {
                ptx_fence_async_proxy();
                ptx_mbarrier_arrive(ptx_shared_address(&m->full[stage.at]));
            }
            __syncwarp();
            if (lane == 0) {
                ptx_mbarrier_arrive(ptx_shared_address(&m->places_empty[tile & 1]));
            }
            there = (note & NOTE_MORE) != 0;
        }
        __syncwarp();
        if (lane == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i % PIECES]));
        }
    }
}

/* Rows of a pool at any address: the warp copies one after another. */
static __device__ __forceinline__ void gather_bytes(const fmlac_pool &pool, const token_place &place, int32_t rows,
                                                    uint32_t group, uint32_t rank)
{
    raw_part part = part_of(pool, rank);
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
        const uint8_t *from = (const uint8_t *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)place.row, row);
        const uint8_t *scales = from + __shfl_sync(0xFFFFFFFFu, place.scales, row) + part.scales_at;
        uint32_t two = group + (row >> 1) * RAW_TWO, at = threadIdx.x % 32;
        if (at < part.scale_bytes) {
            ptx_store_shared_u8(two + RAW_SCALES + (row & 1) * 16 + at, scales[at]);
        }
#pragma unroll 1
        for (; at < part.code_bytes; at += 32) {
            ptx_store_shared_u8(two + (row & 1) * RAW_SECOND + at, from[part.codes_at + at]);
        }
    }
    __syncwarp();
}

/* Codes of a group's attended rows, which come first. Where rows lie is read at addresses that all lanes share: so the
 * copies' operands are uniform, and a copy takes a few instructions instead of a turn of a loop over the lanes. */
static __device__ __forceinline__ void gather_codes(const token_place *places, int32_t rows, const raw_part &part,
                                                    uint32_t group, uint32_t full)
{
    if (ptx_elect()) {
        int r = 0;
#pragma unroll 1
        for (; r + 8 <= rows; r += 8) {
            const uint8_t *from[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                from[i] = places[r + i].row + part.codes_at;
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                ptx_bulk_load(group + r / 2 * RAW_TWO + i / 2 * RAW_TWO + i % 2 * RAW_SECOND, from[i], part.code_bytes,
                              full);
            }
        }
#pragma unroll 1
        for (; r < rows; r++) {
            ptx_bulk_load(group + r / 2 * RAW_TWO + r % 2 * RAW_SECOND, places[r].row + part.codes_at, part.code_bytes,
                          full);
        }
    }
    __syncwarp();
}

/* Fetches a group of a tile, rows `first` and on of those at `places`. */
template <int BLOCKS>
static __device__ __forceinline__ void gather_group(const fmlac_pool &pool, pair_plan<BLOCKS> *m,
                                                    const token_place *places, int first, uint32_t note,
                                                    ring_place ring, uint32_t rank)
{
    int lane = threadIdx.x % 32;
    int32_t rows = (int32_t)(note & NOTE_COUNT) - first;
    rows = rows < 0 ? 0 : rows < GROUP_ROWS ? rows : GROUP_ROWS;
    ptx_mbarrier_wait(ptx_shared_address(&m->raw_empty[ring.at]), ring.use ^ 1);
    raw_part part = part_of(pool, rank);
    token_place place = places[lane % GROUP_ROWS];
    uint32_t full = ptx_shared_address(&m->raw_full[ring.at]), group = ptx_shared_address(m->raw[ring.at]);
    if (lane < rows && pool.aligned) {
        uint32_t to = group + (lane >> 1) * RAW_TWO + RAW_SCALES + (lane & 1) * 16;
        const uint8_t *from = place.row + place.scales + part.scales_at;
        if (part.scale_bytes == 16) {
            ptx_copy_async_16(to, from, 16);
        } else if (part.scale_bytes == 8) {
            ptx_copy_async_8(to, from, 8);
        }
    }
    ptx_mbarrier_arrive_copies(full);
    if (!pool.aligned) {
        gather_bytes(pool, place, rows, group, rank);
    }
    if (lane == 0) {
        m->raw_notes[ring.at] = note;
        ptx_mbarrier_arrive_expect(full, pool.aligned ? rows * part.code_bytes : 0);
    }
    __syncwarp();
    if (pool.aligned) {
        gather_codes(places, rows, part, group, full);
    }
}

/* Q of a piece comes into L2 before its place is free. */
template <int BLOCKS>
static __device__ __forceinline__ void prefetch_query(const fmlac_mqa &p, const piece &c, int lane)
{
    uint32_t rank = ptx_cluster_rank();
#pragma unroll 1
    for (int row = lane; row < c.work.rows && !c.early; row += 32) {
        int64_t token;
        int32_t head;
        row_token_head(c.work, row, &token, &head);
        const uint8_t *from = (const uint8_t *)p.q.data + 2 * row_offset(&p.q, &p, token, head);
#pragma unroll
        for (int line = 0; line < PAIR_DIMS * 2 / 128; line++) {
            ptx_prefetch_l2(from + rank * PAIR_DIMS * 2 + line * 128);
        }
        if (BLOCKS == 9) {
            ptx_prefetch_l2(from + 1024 + rank * 64);
        }
    }
}

/* The finder: finds the pieces, and where the tokens of each tile lie. */
template <int BLOCKS> static __device__ __forceinline__ void find_tokens(const fmlac_mqa &p, pair_plan<BLOCKS> *m)
{
    int lane = threadIdx.x % 32;
    uint32_t tile = 0; /* in all pieces */
    /* By more warps, before the roles part, this would cost the expanding ones registers. */
    walk_costs(p, &m->walk, lane, 32);
    __syncwarp();
    walk_begin(p, &m->walk, blockIdx.x / 2, gridDim.x / 2, lane);
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        scout_piece(p, m, i);
        const piece &c = m->pieces[i % PIECES];
        if (!c.there) {
            return;
        }
        const fmlac_work &w = c.work;
        prefetch_query<BLOCKS>(p, c, lane);
        int32_t begin = __shfl_sync(0xFFFFFFFFu, c.begin, 0), end = __shfl_sync(0xFFFFFFFFu, c.end, 0);
        list_ahead ahead = scan_begin(p, w, begin, end, &m->scan);
        bool there = true; /* an empty list is a tile of no tokens */
        uint32_t first = NOTE_FIRST;
#pragma unroll 1
        while (there) {
            tile_tokens found = scan_next(p, w, &m->scan, &ahead, m->entries);
            ptx_mbarrier_wait(ptx_shared_address(&m->places_empty[tile & 1]), use_parity(tile) ^ 1);
#pragma unroll 1
            for (int row = lane; row < TOKENS; row += 32) {
                m->places[tile & 1][row] = find_token(p, w, m->entries, found, 0, row);
            }
            if (lane == 0) {
                m->notes[tile & 1] =
                    found.count | first | (found.more ? NOTE_MORE : 0) | (found.extra ? NOTE_EXTRA : 0);
            }
            first = 0;
            __syncwarp();
            if (lane == 0) {
                ptx_mbarrier_arrive(ptx_shared_address(&m->places_full[tile & 1]));
            }
            there = found.more;
            tile++;
        }
    }
}

/* One of `warps` gather warps: every warps-th group, counted over all pieces. */
template <int BLOCKS>
static __device__ __forceinline__ void gather(const fmlac_mqa &p, pair_plan<BLOCKS> *m, int warp, int warps,
                                              uint32_t rank)
{
    int lane = threadIdx.x % 32, group = warp; /* of the tile; beyond the last: of later ones */
    uint32_t tile = 0;                         /* in all pieces */
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        if (!await_piece(m, i)) {
            return;
        }
        bool there = true;
#pragma unroll 1
        while (there) {
            ptx_mbarrier_wait(ptx_shared_address(&m->places_full[tile & 1]), use_parity(tile));
            uint32_t note = __shfl_sync(0xFFFFFFFFu, m->notes[tile & 1], 0);
            const fmlac_pool &pool = note & NOTE_EXTRA ? p.extra.pool : p.main.pool;
#pragma unroll 1
            for (; group < TILE_GROUPS; group += warps) {
                gather_group(pool, m, m->places[tile & 1] + group * GROUP_ROWS, group * GROUP_ROWS, note,
                             ring_at<raw_ring<BLOCKS>::GROUPS>(tile * TILE_GROUPS + group), rank);
            }
            group -= TILE_GROUPS;
            __syncwarp();
            if (lane == 0) {
                ptx_mbarrier_arrive(ptx_shared_address(&m->places_empty[tile & 1]));
            }
            there = (note & NOTE_MORE) != 0;
            tile++;
        }
        __syncwarp();
        if (lane == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i % PIECES]));
        }
    }
}

/* ---- expand ------------------------------------------------------------------------------------------------------ */

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

/* Passes of a unit, of four, whose products are ready before the tile is free; all four would not fit the registers. */
#ifndef READY_PASSES
#define READY_PASSES 2
#endif

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

template <int BLOCKS>
static __device__ __forceinline__ ring_place raw_place(const unit_turn &at)
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
