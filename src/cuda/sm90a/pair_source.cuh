/* SPDX-License-Identifier: MIT */
/*
 * pair_source.cuh: quantised tokens on their way into the tiles of a pair (pair.cuh): each block brings its half of a
 * token's dims. The finder walks the list and says where the tokens of a tile lie. Gather warps copy raw rows, a group
 * at a time, into a ring by bulk copies: they use neither registers nor the path of loads and stores. From there
 * expanding warps take them (pair_expand.cuh). RoPE dims are bf16 already and are copied straight into the tile.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_SOURCE_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_SOURCE_CUH

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

/* Waits for the places of a tile; returns its note. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t await_places(const pair_plan<BLOCKS> *m, uint32_t tile)
{
    ptx_mbarrier_wait(ptx_shared_address(&m->places_full[tile & 1]), use_parity(tile));
    return uniform(m->notes[tile & 1]);
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

#define ROPE_AHEAD 8 /* rows of a lane whose places are read before the wait; sixteen would not fit the registers */

/* Where a chunk of RoPE dims of a row goes: of 64 dims into a block of the tile, of 32 into rows of 64 bytes. */
template <int CHUNKS> static __device__ __forceinline__ uint32_t rope_chunk(uint32_t row, uint32_t chunk)
{
    return CHUNKS == 8 ? chunk_offset(row, chunk) : row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

/* RoPE dims of the rows of a tile, whose places are known, to `to`, once use `use` of `barrier` is over. What comes
 * after the wait everybody waits for: so where rows lie is read before. */
template <int CHUNKS>
static __device__ __forceinline__ void copy_rope(const fmlac_pool &pool, const token_place *places, uint32_t to,
                                                 int32_t at, uint32_t barrier, uint32_t use)
{
    const int step = 32 / CHUNKS;
    int lane = threadIdx.x % 32, chunk = lane % CHUNKS, row0 = lane / CHUNKS;
    const uint8_t *from[ROPE_AHEAD];
#pragma unroll
    for (int i = 0; i < ROPE_AHEAD; i++) {
        from[i] = places[row0 + i * step].row;
    }
    ptx_mbarrier_wait(barrier, use);
    if (pool.aligned) {
#pragma unroll
        for (int i = 0; i < TOKENS / step; i++) {
            const uint8_t *place = i < ROPE_AHEAD ? from[i % ROPE_AHEAD] : places[row0 + i * step].row;
            ptx_copy_async_16(to + rope_chunk<CHUNKS>(row0 + i * step, chunk),
                              place ? place + at + chunk * 16 : pool.data, place ? 16 : 0);
        }
        return;
    }
#pragma unroll 1
    for (int row = row0; row < TOKENS; row += step) {
        const uint8_t *place = places[row].row;
        copy_bytes(to + rope_chunk<CHUNKS>(row, chunk), place ? place + at + chunk * 16 : pool.data, place ? 8 : 0);
    }
}

/*
 * The warp that copies RoPE dims into the tiles, where the block has some. With d_qk 512 a tile's last block is where
 * that of the fourth tile before was, which must be free; of the first four tiles, whose places nobody need free, the
 * fourth waits until the first is full: its dims arrive at that one's stage (pair.cuh, FULL).
 */
template <int BLOCKS>
static __device__ __forceinline__ void gather_rope(const fmlac_mqa &p, pair_plan<BLOCKS> *m, uint32_t rank)
{
    uint32_t tile = 0; /* in all pieces */
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        if (!await_piece(m, i)) {
            return;
        }
        bool there = true;
#pragma unroll 1
        for (; there; tile++) {
            uint32_t note = await_places(m, tile);
            const fmlac_pool &pool = note & NOTE_EXTRA ? p.extra.pool : p.main.pool;
            const token_place *places = m->places[tile & 1];
            ring_place stage = ring_at<STAGES>(tile);
            int32_t at = pool.rope_offset + (BLOCKS == 9 ? rank * 64 : 0);
            if (BLOCKS == 9) {
                copy_rope<4>(pool, places, ptx_shared_address(m->k_last[stage.at]), at,
                             ptx_shared_address(&m->rope_empty[stage.at]), stage.use ^ 1);
            } else {
                ring_place before = ring_at<STAGES>(tile - LASTS);
                bool early = tile < LASTS;
                copy_rope<8>(pool, places, ptx_shared_address(m->k_last[tile % LASTS]), at,
                             ptx_shared_address(early ? &m->full[stage.at] : &m->empty[before.at]),
                             early ? stage.use ^ 1 : before.use);
            }
            if (pool.aligned) {
                ptx_mbarrier_arrive_copies(ptx_shared_address(&m->full[stage.at]));
            } else {
                ptx_fence_async_proxy();
                ptx_mbarrier_arrive(ptx_shared_address(&m->full[stage.at]));
            }
            arrive_together(ptx_shared_address(&m->places_empty[tile & 1]));
            there = (note & NOTE_MORE) != 0;
        }
        arrive_together(ptx_shared_address(&m->piece_free[i % PIECES]));
    }
}

/* Rows of a pool at any address: the warp copies one after another. */
template <int BLOCKS>
static __device__ __forceinline__ void gather_bytes(const fmlac_pool &pool, const token_place &place, int32_t rows,
                                                    uint32_t group, uint32_t rank)
{
    raw_part part = part_of(pool, rank);
#pragma unroll 1
    for (int row = 0; row < rows; row++) {
        const uint8_t *from = (const uint8_t *)__shfl_sync(0xFFFFFFFFu, (unsigned long long)place.row, row);
        const uint8_t *scales = from + __shfl_sync(0xFFFFFFFFu, place.scales, row) + part.scales_at;
        uint32_t two = group + (row >> 1) * raw_ring<BLOCKS>::TWO, at = threadIdx.x % 32;
        if (at < part.scale_bytes) {
            ptx_store_shared_u8(two + raw_ring<BLOCKS>::SCALES + (row & 1) * 16 + at, scales[at]);
        }
#pragma unroll 1
        for (; at < part.code_bytes; at += 32) {
            ptx_store_shared_u8(two + (row & 1) * raw_ring<BLOCKS>::SECOND + at, from[part.codes_at + at]);
        }
    }
    ptx_fence_async_proxy(); /* the next rows in this place may be bulk copies */
    __syncwarp();
}

/* Codes of a group's attended rows, which come first. Where rows lie is read at addresses that all lanes share: so the
 * copies' operands are uniform, and a copy takes a few instructions instead of a turn of a loop over the lanes. */
template <int BLOCKS>
static __device__ __forceinline__ void gather_codes(const token_place *places, int32_t rows, const raw_part &part,
                                                    uint32_t group, uint32_t full)
{
    typedef raw_ring<BLOCKS> ring;
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
                ptx_bulk_load(group + r / 2 * ring::TWO + i / 2 * ring::TWO + i % 2 * ring::SECOND, from[i],
                              part.code_bytes, full);
            }
        }
#pragma unroll 1
        for (; r < rows; r++) {
            ptx_bulk_load(group + r / 2 * ring::TWO + r % 2 * ring::SECOND, places[r].row + part.codes_at,
                          part.code_bytes, full);
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
        uint32_t to = group + (lane >> 1) * raw_ring<BLOCKS>::TWO + raw_ring<BLOCKS>::SCALES + (lane & 1) * 16;
        const uint8_t *from = place.row + place.scales + part.scales_at;
        if (part.scale_bytes == 16) {
            ptx_copy_async_16(to, from, 16);
        } else if (part.scale_bytes == 8) {
            ptx_copy_async_8(to, from, 8);
        }
    }
    ptx_mbarrier_arrive_copies(full);
    if (!pool.aligned) {
        gather_bytes<BLOCKS>(pool, place, rows, group, rank);
    }
    if (lane == 0) {
        m->raw_notes[ring.at] = note;
        ptx_mbarrier_arrive_expect(full, pool.aligned ? rows * part.code_bytes : 0);
    } else {
        arrive_others(full);
    }
    __syncwarp();
    if (pool.aligned) {
        gather_codes<BLOCKS>(places, rows, part, group, full);
    }
}

/* Q of a piece comes into L2 before its place is free. */
template <int BLOCKS>
static __device__ __forceinline__ void prefetch_query(const fmlac_mqa &p, const piece &c, int lane)
{
    uint32_t rank = ptx_cluster_rank();
#pragma unroll 1
    for (int row = lane; row < c.work.rows; row += 32) {
        const uint8_t *from = (const uint8_t *)p.q.data + 2 * piece_row(p, p.q, c, row);
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
            arrive_together(ptx_shared_address(&m->places_full[tile & 1]));
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
    int group = warp;  /* of the tile; beyond the last: of later ones */
    uint32_t tile = 0; /* in all pieces */
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        if (!await_piece(m, i)) {
            return;
        }
        bool there = true;
#pragma unroll 1
        while (there) {
            uint32_t note = await_places(m, tile);
            const fmlac_pool &pool = note & NOTE_EXTRA ? p.extra.pool : p.main.pool;
#pragma unroll 1
            for (; group < TILE_GROUPS; group += warps) {
                gather_group(pool, m, m->places[tile & 1] + group * GROUP_ROWS, group * GROUP_ROWS, note,
                             ring_at<raw_ring<BLOCKS>::GROUPS>(tile * TILE_GROUPS + group), rank);
            }
            group -= TILE_GROUPS;
            arrive_together(ptx_shared_address(&m->places_empty[tile & 1]));
            there = (note & NOTE_MORE) != 0;
            tile++;
        }
        arrive_together(ptx_shared_address(&m->piece_free[i % PIECES]));
    }
}

#endif
