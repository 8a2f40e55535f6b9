/* SPDX-License-Identifier: MIT */
/*
 * source_codes.cuh: quantised tokens, expanded to bf16 on their way into a tile. Eight warps, which keep step with the
 * tiles and not with the pieces, so that the next piece's rows are under way before the last one is done:
 *
 *   expand 0..5  rows 8w .. 8w + 7 of every tile, four at a time (a batch). A warp has its own places for raw rows: as
 *                soon as a batch is in registers, the warp has the batch that takes its place fetched, by one bulk copy
 *                per row, which needs neither registers nor the path of loads and stores. Only then it expands.
 *   finder       walks the list: where the tokens of the next tiles lie. Scales at the end of a page it fetches itself.
 *   scout        finds the pieces
 *
 * A batch is four times sixteen codes per lane: rows (0, 1) and (2, 3) of dims 0..255, the same of dims 256..511. Lane
 * l has row l >> 2 & 1 of two and segment (l & 3) | (l >> 3) << 2 of 16 dims, so that neither the loads from raw rows
 * nor the two 16-byte stores meet a bank twice. RoPE dims are bf16 already: a load and a store per batch.
 *
 * BARRIERS                arrivals           made by         waited for by   protects
 *   places_full[4]        33                 finder: 32 for  expand          places[], notes[], scales[] of a tile
 *                                            copies
 *   places_empty[4]       6 warps            expand          finder          the same
 *   raw_full[w][3]        1 and the bytes    expand warp w   itself          its raw rows of a batch
 *
 * Fetching never waits for places as long as a batch is under way: a piece may end with the tile at hand, and the next
 * one is found only when the one before the last is done.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH

#include "expand.cuh"
#include "ptx/tma.cuh"
#include "source.cuh"

#define WARP_ROWS 8 /* of a tile, NOTE_THERE */

#ifdef FMLAC_CODES
static_assert(CODE_WARPS * WARP_ROWS == TOKENS && CODE_BATCHES * BATCH_ROWS == WARP_ROWS, "every row has a warp");
static_assert(CODE_WARPS * BATCH_ROWS * FMLAC_RAW_PITCH_MAX <= RAW_BYTES(9), "a batch of any format fits");
#endif

static __device__ __forceinline__ const fmlac_pool &pool_of(const fmlac_mqa &p, bool extra)
{
    return extra ? p.extra.pool : p.main.pool;
}

template <int BLOCKS> static __device__ __forceinline__ void init_codes(plan<BLOCKS> *m)
{
    for (int i = 0; i < PLACES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->places_full[i]), 33);
        ptx_mbarrier_init(ptx_shared_address(&m->places_empty[i]), CODE_WARPS);
    }
    for (int i = 0; i < CODE_WARPS * BATCHES_MAX; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->raw_full[0][i]), 1);
    }
    m->mask[0][1] = m->mask[1][1] = 0xFFFFFFFFu; /* bits beyond the tile stay so */
}

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* Everything about a tile is written, or on its way. */
template <int BLOCKS> static __device__ __forceinline__ void note_done(plan<BLOCKS> *m, uint32_t at)
{
    uint32_t full = ptx_shared_address(&m->places_full[at]);
    ptx_mbarrier_arrive_copies(full);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx_mbarrier_arrive(full);
    }
}

/* Scales that do not lie in the row; a token per lane. */
static __device__ __forceinline__ void fetch_scales(const fmlac_pool &pool, const token_place &place, uint32_t to)
{
    const uint8_t *from = place.row + place.scales - pool.scale_offset;
    int32_t unit = !pool.aligned ? 1 : pool.scale_row_bytes % 16 == 0 ? 16 : 8;
#pragma unroll 1
    for (int32_t at = 0; at < pool.scale_row_bytes; at += unit) {
        if (unit == 16) {
            ptx_copy_async_16(to + at, from + at, 16);
        } else if (unit == 8) {
            ptx_copy_async_8(to + at, from + at, 8);
        } else {
            ptx_store_shared_u8(to + at, from[at]);
        }
    }
}

/* The finder notes where a tile's tokens lie. `position`: of its first entry in a paged list. */
template <int BLOCKS>
static __device__ __forceinline__ void note_tile(const fmlac_mqa &p, const fmlac_work &w, plan<BLOCKS> *m,
                                                 const tile_tokens &found, int32_t position, uint32_t at)
{
    int lane = threadIdx.x % 32;
    uint32_t note = (found.extra ? NOTE_EXTRA_POOL : 0) | (found.more ? NOTE_NEXT : 0);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = 32 * h + lane;
        token_place place = find_token(p, w, m->entries[0], found, position, row);
        uint32_t there = __ballot_sync(0xFFFFFFFFu, place.row != nullptr);
        if (row < TOKENS) {
            m->places[at][row] = place;
        }
        if (BLOCKS == 8 && place.row) {
            fetch_scales(pool_of(p, found.extra), place, ptx_shared_address(m->scales[at][row]));
        }
        if (lane < 4 && 4 * h + lane < CODE_WARPS) {
            m->notes[at][4 * h + lane] = (there >> WARP_ROWS * lane & NOTE_THERE) | note;
        }
    }
    note_done(m, at);
}

/* The finder. Tiles are counted over all pieces; behind the last a note says so. */
template <int BLOCKS> static __device__ __forceinline__ void find_tiles(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    int lane = threadIdx.x % 32;
    uint32_t tile = 0;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            break;
        }
        const fmlac_work &w = c.work;
        int32_t begin = __shfl_sync(0xFFFFFFFFu, c.begin, 0), end = __shfl_sync(0xFFFFFFFFu, c.end, 0);
        int32_t position = begin * TOKENS;
        list_ahead ahead = {{-1, -1}};
        bool there = begin < end;
        if (there) {
            ahead = scan_begin(p, w, begin, end, &m->scans[0]);
        }
#pragma unroll 1
        while (there) {
            tile_tokens found = scan_next(p, w, &m->scans[0], &ahead, m->entries[0]);
            ptx_mbarrier_wait(ptx_shared_address(&m->places_empty[tile % PLACES]), (tile / PLACES & 1) ^ 1);
            note_tile(p, w, m, found, position, tile % PLACES);
            there = found.more;
            position += TOKENS;
            tile++;
        }
        __syncwarp();
        if (lane == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
        }
    }
    ptx_mbarrier_wait(ptx_shared_address(&m->places_empty[tile % PLACES]), (tile / PLACES & 1) ^ 1);
    if (lane < CODE_WARPS) {
        m->notes[tile % PLACES][lane] = NOTE_END;
    }
    note_done(m, tile % PLACES);
}

/* ---- fetching ---------------------------------------------------------------------------------------------------- */

/* An expanding warp's raw rows, and the batch that it fetches next. */
typedef struct code_fetch {
    uint32_t raw, full;          /* shared addresses: its rows, its barriers */
    uint32_t pitch, places;      /* of a row; batches that fit */
    uint32_t tile, batch, place; /* tile: of all pieces */
    uint32_t note;               /* of the tile */
    uint32_t ahead;              /* batches under way */
} code_fetch;

static __device__ __forceinline__ code_fetch fetch_begin(const fmlac_mqa &p, uint32_t raw, uint32_t raw_bytes,
                                                         uint32_t full, uint32_t warp)
{
    int32_t main = p.main.pool.data_row_bytes, extra = p.extra.pool.data_row_bytes; /* 0: none */
    uint32_t pitch = FMLAC_RAW_PITCH(main > extra ? main : extra);
    code_fetch f = {0, full + warp * BATCHES_MAX * 8, pitch, BATCHES_MAX, 0, 0, 0, 0, 0};
    while (f.places > 1 && f.places * CODE_WARPS * BATCH_ROWS * f.pitch > raw_bytes) {
        f.places--;
    }
    f.raw = raw + warp * f.places * BATCH_ROWS * f.pitch;
    return f;
}

/* Rows at any address: the warp copies one after another. */
static __device__ __forceinline__ void fetch_bytes(const fmlac_pool &pool, const uint8_t *const rows[BATCH_ROWS],
                                                   uint32_t there, uint32_t to, uint32_t pitch)
{
#pragma unroll
    for (int row = 0; row < BATCH_ROWS; row++) {
        int bytes = there >> row & 1 ? pool.data_row_bytes : 0;
#pragma unroll 1
        for (int at = threadIdx.x % 32; at < bytes; at += 32) {
            ptx_store_shared_u8(to + row * pitch + at, rows[row][at]);
        }
    }
    ptx_fence_async_proxy(); /* the next copy to here may be a bulk copy */
    __syncwarp();
}

/* Starts the copies of four rows; `there`: a bit for each that is attended. */
static __device__ __forceinline__ void fetch_rows(const fmlac_pool &pool, const token_place *places, uint32_t there,
                                                  uint32_t to, uint32_t pitch, uint32_t full)
{
    uint32_t row_bytes = pool.data_row_bytes;
    const uint8_t *rows[BATCH_ROWS];
#pragma unroll
    for (int row = 0; row < BATCH_ROWS; row++) {
        rows[row] = *(const uint8_t *const volatile *)&places[row].row;
    }
    if (!pool.aligned) {
        fetch_bytes(pool, rows, there, to, pitch);
        there = 0;
    }
    if (ptx_elect()) {
        ptx_mbarrier_arrive_expect(full, __popc(there) * row_bytes);
        if (there == 15) { /* by far the most: no branches */
#pragma unroll
            for (int row = 0; row < BATCH_ROWS; row++) {
                ptx_bulk_load(to + row * pitch, rows[row], row_bytes, full);
            }
        } else {
#pragma unroll
            for (int row = 0; row < BATCH_ROWS; row++) {
                if (there >> row & 1) {
                    ptx_bulk_load(to + row * pitch, rows[row], row_bytes, full);
                }
            }
        }
    }
    __syncwarp();
}

/* Fetches the next batch; `wait`: for its places, if they are not yet known. Returns whether there was one. */
template <int BLOCKS>
static __device__ __forceinline__ bool fetch_next(const fmlac_mqa &p, plan<BLOCKS> *m, code_fetch &f, uint32_t warp,
                                                  bool wait)
{
    uint32_t at = f.tile % PLACES;
    if (f.batch == 0) {
        uint32_t barrier = ptx_shared_address(&m->places_full[at]), parity = f.tile / PLACES & 1;
        if (wait) {
            ptx_mbarrier_wait(barrier, parity);
        } else if (!__all_sync(0xFFFFFFFFu, ptx_mbarrier_try(barrier, parity))) {
            return false;
        }
        f.note = uniform(m->notes[at][warp]);
        if (f.note & NOTE_END) {
            return false;
        }
    }
    uint32_t first = f.batch * BATCH_ROWS;
    fetch_rows(pool_of(p, (f.note & NOTE_EXTRA_POOL) != 0), m->places[at] + warp * WARP_ROWS + first,
               f.note >> first & 15, f.raw + f.place * BATCH_ROWS * f.pitch, f.pitch, f.full + f.place * 8);
    f.ahead++;
    f.place = f.place + 1 == f.places ? 0 : f.place + 1;
    f.batch = f.batch + 1 == CODE_BATCHES ? 0 : f.batch + 1;
    f.tile += f.batch == 0;
    return true;
}

/* ---- expanding --------------------------------------------------------------------------------------------------- */

/* First dim of the lane's segment in each half of a token. */
static __device__ __forceinline__ uint32_t segment_dim(void)
{
    uint32_t lane = threadIdx.x % 32;
    return ((lane & 3) | lane >> 3 << 2) * 16;
}

/* What must be known of a pool to load its codes. */
typedef struct code_pool {
    uint32_t kind;         /* of its codes and scales (expand.cuh) */
    uint32_t apart;        /* scales do not lie in the row */
    uint32_t scale, pitch; /* of the lane's segment of dims 0..255, from the first row's; from row to row */
    uint32_t half;         /* the same of dims 256..511 lies so much further */
} code_pool;

static __device__ __forceinline__ code_pool code_pool_of(const fmlac_pool &pool, uint32_t pitch)
{
    code_pool c;
    uint32_t size = pool.scale == FMLAC_F32 ? 4 : 1;
    c.kind = code_kind(pool);
    c.apart = pool.scale_row_bytes > 0;
    c.pitch = c.apart ? FMLAC_RAW_SCALES : pitch;
    c.scale = (threadIdx.x >> 2 & 1) * c.pitch + pool.scale_offset + (segment_dim() >> pool.group_shift) * size;
    c.half = pool.group_shift < 8 ? (256u >> pool.group_shift) * size : 0;
    return c;
}

static __device__ __forceinline__ code_pool pick(bool second, const code_pool &a, const code_pool &b)
{
    code_pool c = {second ? b.kind : a.kind, second ? b.apart : a.apart, second ? b.scale : a.scale,
                   second ? b.pitch : a.pitch, second ? b.half : a.half};
    return c;
}

/* What a lane holds of a batch. */
typedef struct code_batch {
    four_codes x;
    uint32_t rope[4]; /* chunk lane % 8 of row lane / 8 */
} code_batch;

/* raw, scales: shared addresses of the batch's rows; rope: of the lane's chunk in the first raw row, if there are any.
 */
static __device__ __forceinline__ void load_batch(code_batch *b, const code_pool &c, uint32_t raw, uint32_t pitch,
                                                  uint32_t scales, uint32_t rope)
{
    uint32_t codes_at[4], scale_at[4], dim = segment_dim();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes_at[i] = raw + (threadIdx.x >> 2 & 1) * pitch + i % 2 * 2 * pitch +
                      (c.kind & KIND_FP4 ? (dim + i / 2 * 256) / 2 : dim + i / 2 * 256);
        scale_at[i] = (c.apart ? scales : raw) + c.scale + i % 2 * 2 * c.pitch + i / 2 * c.half;
    }
    load_four(&b->x, c.kind, codes_at, scale_at);
    if (rope) {
        ptx_load_shared_128(b->rope, rope);
    }
}

/* Rows of a batch that are not attended become zeros, with a scale that is not hard. `there`: a bit for each row. */
static __device__ __forceinline__ void clear_absent(code_batch *b, uint32_t kind, uint32_t there)
{
    uint32_t lane = threadIdx.x % 32;
    uint32_t one = kind & KIND_F32 ? 0x3F800000u : kind & KIND_E8M0 ? 127 : 0x38;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bool absent = (there >> (i % 2 * 2 + (lane >> 2 & 1)) & 1) == 0;
        b->x.scale[i] = absent ? one : b->x.scale[i];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            b->x.codes[i][j] = absent ? 0 : b->x.codes[i][j];
        }
        b->rope[i] = there >> (lane / 8) & 1 ? b->rope[i] : 0;
    }
}

/* A batch into rows 4 * `batch` of the warp's; `first_row`: where row 0 of the warp's begins, in block 0. */
static __device__ __forceinline__ void store_batch(const fmlac_pool &pool, const code_batch &b, uint32_t kind,
                                                   uint32_t first_row, uint32_t batch, uint32_t there)
{
    uint32_t lane = threadIdx.x % 32, token = lane >> 2 & 1, dim = segment_dim(), to[4], attended = 0;
    uint32_t place = first_row + chunk_offset(token, dim / 8);
    bool last = dim + 256 < (uint32_t)pool.quant_dims;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t row = batch * BATCH_ROWS + i % 2 * 2;
        to[i] = (place ^ row << 4) + row * 128 + i / 2 * 4 * TILE_BYTES;
        attended |= (there >> (i % 2 * 2 + token) & 1) << i;
    }
    if (pool.rope_dims > 0) {
        uint32_t row = batch * BATCH_ROWS + lane / 8;
        ptx_store_shared_128(first_row + chunk_offset(row, ((uint32_t)pool.quant_dims >> 3) + lane % 8), b.rope);
    }
    if (!expand_four_of(kind, b.x, to, true, last)) {
        expand_four_hard(pool, kind, b.x, to, last ? 15 : 3, attended);
    }
}

/* The warp's rows of a tile are there. */
template <int BLOCKS>
static __device__ __forceinline__ void tile_done(plan<BLOCKS> *m, uint32_t slot, uint32_t warp, uint32_t note,
                                                 uint32_t place)
{
    uint32_t lane = threadIdx.x % 32;
    if (lane == 0) {
        ((volatile uint8_t *)m->mask[slot])[warp] = (uint8_t)note;
        m->more[slot] = note & NOTE_NEXT;
    }
    ptx_fence_async_proxy();
    __syncwarp();
    if (lane <= PORTIONS) {
        uint32_t full = ptx_shared_address(&m->full[slot][lane]);
        ptx_mbarrier_arrive(lane < PORTIONS ? full : ptx_shared_address(&m->places_empty[place]));
    }
}

/* An expanding warp. */
template <int BLOCKS>
static __device__ __forceinline__ void expand_tiles(const fmlac_mqa &p, plan<BLOCKS> *m, uint32_t warp)
{
    code_fetch f = fetch_begin(p, ptx_shared_address(m->raw), sizeof m->raw, ptx_shared_address(m->raw_full), warp);
    const bool both = p.extra.kind != FMLAC_LIST_NONE;
    const code_pool main = code_pool_of(p.main.pool, f.pitch);
    const code_pool second = both ? code_pool_of(p.extra.pool, f.pitch) : main;
    const bool rope = p.main.pool.rope_dims > 0;
    uint32_t tile = 0, batch = 0, place = 0, turn = 0, note = 0; /* of the batch at hand; turn: of the raw rows */
    uint32_t t = 0;                                              /* of the piece's tiles */
    slot_uses uses = 0;
#pragma unroll 1
    for (;;) {
        bool have = f.ahead > 0;
        code_batch b;
        if (have) {
            note = batch == 0 ? uniform(m->notes[tile % PLACES][warp]) : note;
            bool extra = (note & NOTE_EXTRA_POOL) != 0;
            uint32_t lane = threadIdx.x % 32, raw = f.raw + place * BATCH_ROWS * f.pitch;
            ptx_mbarrier_wait(f.full + place * 8, turn);
            load_batch(&b, pick(extra, main, second), raw, f.pitch,
                       ptx_shared_address(m->scales[tile % PLACES][warp * WARP_ROWS + batch * BATCH_ROWS]),
                       rope ? raw + lane / 8 * f.pitch + lane % 8 * 16 + pool_of(p, extra).rope_offset : 0);
            __syncwarp();
            f.ahead--;
            place++;
            if (place == f.places) {
                place = 0;
                turn ^= 1;
            }
        }
#pragma unroll 1
        while (fetch_next(p, m, f, warp, f.ahead == 0 && !have) && f.ahead < f.places) {
        }
        if (!have) {
            if (f.ahead == 0) {
                return;
            }
            continue;
        }
        uint32_t slot = t & 1, there = note >> batch * BATCH_ROWS & 15;
        bool extra = (note & NOTE_EXTRA_POOL) != 0;
        if (there != 15) {
            clear_absent(&b, extra ? second.kind : main.kind, there);
        }
        if (batch == 0) {
            uint32_t parity = tile_parity(uses, t) ^ 1;
            ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][0]), parity);
            ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][1]), parity);
        }
        store_batch(pool_of(p, extra), b, extra ? second.kind : main.kind,
                    ptx_shared_address(m->k[slot]) + warp * WARP_ROWS * 128, batch, there);
        batch++;
        if (batch == CODE_BATCHES) {
            tile_done(m, slot, warp, note, tile % PLACES);
            batch = 0;
            tile++;
            t++;
            if ((note & NOTE_NEXT) == 0) {
                uses = uses_after(uses, t);
                t = 0;
            }
        }
    }
}

/* The scout. */
template <int BLOCKS> static __device__ __forceinline__ void find_pieces(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    walk_begin(p, &m->walk, blockIdx.x, gridDim.x, threadIdx.x % 32);
    uint32_t i = 0;
    do {
        scout_piece(p, m, i);
    } while (m->pieces[i++ & 1].there);
}

template <int BLOCKS> static __device__ __forceinline__ void produce_codes(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) - MMA_WARPS;
    if (warp < CODE_WARPS) {
        expand_tiles(p, m, warp);
    } else if (warp == CODE_WARPS) {
        find_tiles(p, m);
    } else {
        find_pieces(p, m);
    }
}

#endif
