/* SPDX-License-Identifier: MIT */
/*
 * source_codes.cuh: quantised tokens, expanded to bf16 on their way into a tile. Eight warps, which keep step with the
 * tiles and not with the pieces, so that the next piece's rows are under way before the last one is done:
 *
 *   expand 0..5  rows 8w .. 8w + 7 of every tile, four at a time (a batch). A warp has its own places for raw rows; as
 *                soon as a batch is in registers, its place is free for the next one. Only then the warp expands.
 *   finder       finds the pieces and walks the list: where the tokens of the next tiles lie. Scales at the end of a
 *                page it fetches itself.
 *   gatherer     brings raw rows, by one bulk copy each, eight at a time: whole runs of copies with operands that are
 *                uniform from the start
 *
 * A batch is four times sixteen codes per lane: rows (0, 1) and (2, 3) of dims 0..255, the same of dims 256..511. Lane
 * l has row l >> 2 & 1 of two and segment (l & 3) | (l >> 3) << 2 of 16 dims, so that neither the loads from raw rows
 * nor the two 16-byte stores meet a bank twice. RoPE dims are bf16 already: a load and a store per batch.
 *
 * BARRIERS                arrivals           made by         waited for by   protects
 *   places_full[4]        1                  finder          gatherer        places[], notes[] of a tile
 *   scales_full[4]        33                 finder: 32 for  expand          notes[], scales[] of a tile
 *                                            copies
 *   places_empty[4]       6 warps, 1         expand,         finder          the same
 *                                            gatherer
 *   raw_full[w][3]        1 and the bytes    gatherer        expand warp w   its raw rows of a batch
 *   raw_empty[w][3]       1                  expand warp w   gatherer        the same
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH

#include "border.cuh"
#include "expand.cuh"
#include "find.cuh"
#include "gather.cuh"
#include "source.cuh"

#ifdef FMLAC_CODES
static_assert(CODE_WARPS * WARP_ROWS == TOKENS && CODE_BATCHES * BATCH_ROWS == WARP_ROWS, "every row has a warp");
static_assert(CODE_WARPS * BATCH_ROWS * RAW_PITCH_MAX <= RAW_BYTES(9), "a batch of any format fits");
#endif

template <int BLOCKS> static __device__ __forceinline__ void init_codes(plan<BLOCKS> *m)
{
    for (int i = 0; i < PLACES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->places_full[i]), WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->scales_full[i]), 32 + WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->places_empty[i]), (CODE_WARPS + 1) * WARP_ARRIVALS);
    }
    for (int i = 0; i < CODE_WARPS * BATCHES_MAX; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->raw_full[0][i]), WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->raw_empty[0][i]), WARP_ARRIVALS);
    }
    for (uint32_t i = TOKENS / (4 * WARP_ROWS); i < 16 / WARP_ROWS; i++) { /* bits beyond the tile stay so */
        m->mask[0][i] = m->mask[1][i] = 0xFFFFFFFFu;
    }
}

/* ---- finding ----------------------------------------------------------------------------------------------------- */

/* Everything about a tile is written, and scales are on their way. */
template <int BLOCKS> static __device__ __forceinline__ void note_done(plan<BLOCKS> *m, uint32_t at)
{
    uint32_t full = ptx_shared_address(&m->scales_full[at]);
    ptx_mbarrier_arrive_copies(full);
    arrive_together(full);
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
                                                 const tile_tokens &found, const uint32_t entries[2], bool straight,
                                                 int32_t position, uint32_t at)
{
    int lane = threadIdx.x % 32;
    uint32_t note = (found.extra ? NOTE_EXTRA_POOL : 0) | (found.more ? NOTE_NEXT : 0), there[2];
    token_place place[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = 32 * h + lane;
        place[h] = straight ? entry_place(p, w, pool_of(p, found.extra), entries[h], position + row)
                            : find_token(p, w, m->entries[0], found, position, row);
        there[h] = __ballot_sync(0xFFFFFFFFu, place[h].row != nullptr);
        if (row < TOKENS) {
            m->places[at][row] = place[h].row;
        }
    }
    note |= (there[0] & (there[1] | (uint32_t)(~0ull << (TOKENS - 32)))) == 0xFFFFFFFFu ? NOTE_WHOLE : 0;
    if (lane < CODE_WARPS) {
        const int warps = 32 / WARP_ROWS; /* of half a tile */
        m->notes[at][lane] = ((lane < warps ? there[0] : there[1]) >> WARP_ROWS * (lane % warps) & NOTE_THERE) | note;
    }
    arrive_together(ptx_shared_address(&m->places_full[at]));
#pragma unroll
    for (int h = 0; h < 2; h++) {
        if (BLOCKS == 8 && place[h].row) {
            fetch_scales(pool_of(p, found.extra), place[h], ptx_shared_address(m->scales[at][32 * h + lane]));
        }
    }
    note_done(m, at);
}

/* Entries of one of the lists come to L2; of few lists, which are cut, some block's. */
static __device__ __forceinline__ void prefetch_any_list(const fmlac_mqa &p, int lane)
{
    if (!is_paged(&p)) {
        uint32_t token = blockIdx.x % (uint32_t)p.num_tokens;
        const int32_t *list = index_row(&p, &p.main, token, 0);
#pragma unroll 1
        for (int32_t at = lane * 32; at < (int32_t)p.main.topk; at += 32 * 32) {
            ptx_prefetch_l2(list + at);
        }
    }
}

/* Q of the first piece. */
template <int BLOCKS>
static __device__ __forceinline__ void ask_first(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const piece &c, int lane)
{
    if (!MAPPED_Q) {
        return;
    }
    if (all.has_q && lane == 0) {
        ask_q(all, m, c.work, c.outer, c.inner);
    }
    __syncwarp();
}

/* Q of a piece comes to L2 while the piece before it is in hand. */
static __device__ __forceinline__ void prefetch_q(const fmlac_mqa &p, const fmlac_work &w)
{
#pragma unroll 1
    for (int row = threadIdx.x % 32; row < (int)w.rows; row += 32) {
        int64_t token;
        int32_t head;
        row_token_head(w, row, &token, &head);
        const uint8_t *from = (const uint8_t *)p.q.data + 2 * row_offset(&p.q, &p, token, head);
#pragma unroll 1
        for (int at = 0; at < 2 * p.d_qk; at += 128) {
            ptx_prefetch_l2(from + at);
        }
    }
    __syncwarp();
}

/* Hooks of the finder. */
template <int BLOCKS>
static __device__ __forceinline__ void piece_begins(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const fmlac_work &w,
                                                    uint32_t i)
{
    (void)m;
    if (i > 0 && !has_mapped_q(all)) {
        prefetch_q(all.mqa, w);
    }
}

template <int BLOCKS>
static __device__ __forceinline__ void tile_noted(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const piece &c,
                                                  bool first)
{
    if (first) { /* behind the first rows, which take longer */
        ask_first(all, m, c, (int)threadIdx.x % 32);
    }
}

template <int BLOCKS>
static __device__ __forceinline__ uint32_t note_nothing(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const piece &c,
                                                        uint32_t tile, bool first)
{
    if (first) {
        ask_first(all, m, c, (int)threadIdx.x % 32);
    }
    (void)tile;
    return 0;
}

template <int BLOCKS> static __device__ __forceinline__ void note_end(plan<BLOCKS> *m, uint32_t at)
{
    if (threadIdx.x % 32 < CODE_WARPS) {
        m->notes[at][threadIdx.x % 32] = NOTE_END;
    }
    arrive_together(ptx_shared_address(&m->places_full[at]));
    note_done(m, at);
}

/* ---- expanding --------------------------------------------------------------------------------------------------- */

/* First dim of the lane's segment in each half of a token. */
static __device__ __forceinline__ uint32_t segment_dim(uint32_t lane)
{
    return ((lane & 3) | lane >> 3 << 2) * 16;
}

/* What a lane must know of a pool to load its part of a batch, as bytes from where the batch begins. */
typedef struct code_view {
    uint32_t codes, scale, rope; /* the lane's: codes and scale of the first row; chunk of RoPE */
    uint32_t pitch, half;        /* of scales: two rows, 256 dims further */
    uint32_t apart;              /* scales do not lie in the rows */
} code_view;

template <int KIND>
static __device__ __forceinline__ code_view view_codes(const fmlac_pool &pool, uint32_t pitch, uint32_t lane)
{
    code_view v;
    uint32_t token = lane >> 2 & 1, size = pool.scale == FMLAC_F32 ? 4 : 1;
    bool fp4 = KIND == KIND_ANY ? pool.element == FMLAC_F4_E2M1 : (KIND & KIND_FP4) != 0;
    v.apart = pool.scale_row_bytes > 0;
    v.pitch = v.apart ? FMLAC_RAW_SCALES : pitch;
    v.codes = token * pitch + segment_dim(lane) / (fp4 ? 2 : 1);
    v.scale = token * v.pitch + pool.scale_offset + (segment_dim(lane) >> pool.group_shift) * size;
    v.half = (256u >> pool.group_shift) * size;
    v.rope = lane / 8 * pitch + (pool.rope_dims > 0 ? lane % 8 * 16 + pool.rope_offset : 0);
    return v;
}

/* What a lane holds of a batch. */
typedef struct code_batch {
    four_codes x;
    uint32_t rope[4]; /* chunk lane % 8 of row lane / 8 */
} code_batch;

/* raw, scales: shared addresses of the batch's rows. */
template <int KIND>
static __device__ __forceinline__ void load_batch(code_batch *b, const code_view &v, uint32_t kind, uint32_t raw,
                                                  uint32_t pitch, uint32_t scales)
{
    uint32_t codes_at[4], scale_at[4], fp4 = KIND == KIND_ANY ? kind & KIND_FP4 : KIND & KIND_FP4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        codes_at[i] = raw + v.codes + i % 2 * 2 * pitch + (fp4 ? i / 2 * 128 : i / 2 * 256);
        scale_at[i] = (v.apart ? scales : raw) + v.scale + i % 2 * 2 * v.pitch + i / 2 * v.half;
    }
    ptx_load_shared_128(b->rope, raw + v.rope); /* of any use only if there are such dims, but straight */
    load_four(&b->x, KIND == KIND_ANY ? kind : KIND, codes_at, scale_at);
}

/* Rows of a batch that are not attended become zeros, with a scale that is not hard. `there`: a bit for each row. */
static __device__ __forceinline__ void clear_absent(code_batch *b, uint32_t kind, uint32_t there)
{
    uint32_t lane = ptx_thread() % 32;
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

/*
 * Waits until a batch is in registers: an arrival alone would overtake the loads, which take hundreds of cycles where
 * products read shared memory, and so could the copy that comes into their place. Loads return in order, scales come
 * last. Says whether a scale of some lane is hard.
 */
template <int KIND> static __device__ __forceinline__ bool batch_there(const code_batch &b, bool last)
{
    if constexpr (KIND == KIND_ANY) {
        ptx_fence_async_proxy();
        __syncwarp();
        return true;
    }
    return __any_sync(0xFFFFFFFFu, scales_are_hard<KIND>(b.x, last));
}

/* A batch into a tile. `place`, `rope`: where the lane's first segment and its chunk of RoPE go. hard: the straight run
 * cannot do it. */
template <int KIND>
static __device__ __forceinline__ void store_batch(const fmlac_pool &pool, const code_batch &b, uint32_t kind,
                                                   uint32_t place, uint32_t rope, uint32_t there, bool last, bool hard)
{
    const uint32_t other = (place ^ 32) + 256; /* two rows on */
    const uint32_t to[4] = {place, other, place + 4 * TILE_BYTES, other + 4 * TILE_BYTES};
    ptx_store_shared_128_if(pool.rope_dims > 0, rope, b.rope);
    if constexpr (KIND != KIND_ANY) {
        hard |= expand_four<KIND>(b.x, to, last);
    }
    if (__any_sync(0xFFFFFFFFu, hard)) {
        uint32_t attended = 0, token = ptx_thread() >> 2 & 1;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            attended |= (there >> (i % 2 * 2 + token) & 1) << i;
        }
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
        ((volatile uint8_t *)m->mask[slot])[warp] = (uint8_t)(note | ~NOTE_THERE);
        m->more[slot] = note & NOTE_NEXT;
    }
    ptx_fence_async_proxy();
    __syncwarp();
    if (WARP_ARRIVALS > 1) {
        for (int i = 0; i < PORTIONS; i++) {
            arrive_warp(ptx_shared_address(&m->full[slot][i]));
        }
        arrive_warp(ptx_shared_address(&m->places_empty[place]));
    } else if (lane <= PORTIONS) {
        uint32_t full = ptx_shared_address(&m->full[slot][lane]);
        ptx_mbarrier_arrive(lane < PORTIONS ? full : ptx_shared_address(&m->places_empty[place]));
    }
}

/* Where an expanding warp is. */
typedef struct code_walk {
    raw_ring ring;
    uint32_t tile; /* of all pieces */
    uint32_t t;    /* of the piece's tiles */
    uint32_t note; /* of the tile at hand */
    bool mixed;    /* float scales were met that are no powers of two */
    slot_uses uses;
} code_walk;

/* The tile at hand is known. */
template <int BLOCKS> static __device__ __forceinline__ void read_note(plan<BLOCKS> *m, code_walk &w, uint32_t warp)
{
    const uint32_t at = w.tile % PLACES;
    ptx_mbarrier_wait(ptx_shared_address(&m->scales_full[at]), w.tile / PLACES & 1);
    w.note = uniform(m->notes[at][warp]);
}

/* The warp's rows of tiles of one pool, until one of the other pool or the end follows, or another run is the right
 * one. */
template <int KIND, int BLOCKS>
static __device__ __forceinline__ void expand_run(const fmlac_mqa &p, plan<BLOCKS> *m, code_walk &w, uint32_t warp,
                                                  uint32_t kind)
{
    const uint32_t of_pool = w.note & NOTE_EXTRA_POOL;
    const fmlac_pool &pool = pool_of(p, of_pool != 0);
    const uint32_t lane = ptx_thread() % 32; /* read anew: nothing of this shall be kept from run to run */
    const code_view v = view_codes<KIND>(pool, w.ring.pitch, lane);
    const uint32_t place0 = chunk_offset(lane >> 2 & 1, segment_dim(lane) / 8);
    const uint32_t rope0 = chunk_offset(lane / 8, ((uint32_t)pool.quant_dims >> 3) + lane % 8);
#pragma unroll 1
    do {
        const uint32_t slot = w.t & 1, parity = tile_parity(w.uses, w.t) ^ 1, note = w.note, at = w.tile % PLACES;
        const uint32_t first_row = ptx_shared_address(m->k[slot]) + warp * WARP_ROWS * 128;
        const uint32_t free = ptx_shared_address(m->free[slot]);
        uint32_t scales = ptx_shared_address(m->scales[at][BLOCKS == 8 ? warp * WARP_ROWS : 0]);
        const uint32_t odd = warp * WARP_ROWS % 8 * 16; /* where chunks of the first row lie */
        uint32_t place = first_row + (place0 ^ odd), rope = first_row + (rope0 ^ odd);
#pragma unroll 1
        for (uint32_t batch = 0; batch < CODE_BATCHES; batch++) {
            code_batch b;
            uint32_t there = note >> batch * BATCH_ROWS & 15;
            ptx_mbarrier_wait(ptx_shared_address(&m->raw_full[warp][w.ring.at]), w.ring.parity);
            load_batch<KIND>(&b, v, kind, raw_batch(m, w.ring, warp), w.ring.pitch, scales);
            if (there != 15) {
                clear_absent(&b, kind, there);
            }
            const bool last = segment_dim(lane) + 256 < (uint32_t)pool.quant_dims, hard = batch_there<KIND>(b, last);
            if (arrives(lane, hard ? 1 : 0)) { /* one lane, and not before it knows which */
                ptx_mbarrier_arrive(ptx_shared_address(&m->raw_empty[warp][w.ring.at]));
            }
            ring_next(w.ring);
            w.mixed |= KIND == KIND_F32 && hard;
            if (batch == 0) {
                ptx_mbarrier_wait(free, parity);
                ptx_mbarrier_wait(free + 8, parity);
            }
            store_batch<KIND>(pool, b, kind, place, rope, there, last, hard);
            place = (place ^ 64) + BATCH_ROWS * 128; /* four rows on */
            rope = (rope ^ 64) + BATCH_ROWS * 128;
            scales += BATCH_ROWS * FMLAC_RAW_SCALES;
        }
        tile_done(m, slot, warp, note, at);
        w.tile++;
        w.t++;
        if ((note & NOTE_NEXT) == 0) {
            w.uses = uses_after(w.uses, w.t);
            w.t = 0;
        }
        read_note(m, w, warp);
    } while ((w.note & (NOTE_EXTRA_POOL | NOTE_END)) == of_pool && !(KIND == KIND_F32 && w.mixed));
}

/* An expanding warp. */
template <int BLOCKS>
static __device__ __forceinline__ void expand_tiles(const fmlac_mqa &p, plan<BLOCKS> *m, uint32_t warp)
{
    const uint32_t main = code_kind(p.main.pool);
    const uint32_t extra = p.extra.kind != FMLAC_LIST_NONE ? code_kind(p.extra.pool) : main;
    code_walk w = {ring_begin<BLOCKS>(p), 0, 0, 0, false, 0};
    read_note(m, w, warp);
#pragma unroll 1
    while ((w.note & NOTE_END) == 0) {
        const uint32_t kind = w.note & NOTE_EXTRA_POOL ? extra : main;
        if (kind == KIND_E8M0) {
            expand_run<KIND_E8M0>(p, m, w, warp, kind);
        } else if (kind == KIND_F32 && !w.mixed) {
            expand_run<KIND_F32>(p, m, w, warp, kind);
        } else if (kind == KIND_F32) {
            expand_run<KIND_F32 | KIND_MIXED>(p, m, w, warp, kind);
        } else if (kind == (KIND_FP4 | KIND_E4M3)) {
            expand_run<KIND_FP4 | KIND_E4M3>(p, m, w, warp, kind);
        } else {
            expand_run<KIND_ANY>(p, m, w, warp, kind);
        }
    }
}

/* The warps behind those that expand, `warp` of them. */
template <int BLOCKS>
static __device__ __forceinline__ void bring_codes(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, uint32_t warp)
{
    const fmlac_mqa &p = all.mqa;
    if (warp == 0) {
        find_tiles(all, m);
    } else if (warp == 1) {
        if (has_mapped_q(all) && !is_whole(p)) {
            prefetch_any_list(p, (int)threadIdx.x % 32);
        }
        gather_rows(p, m);
    }
}

template <int BLOCKS> static __device__ __forceinline__ void produce_codes(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
    const fmlac_mqa &p = all.mqa;
    uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) - MMA_WARPS;
    if (warp < CODE_WARPS) {
        expand_tiles(p, m, warp);
    } else {
        bring_codes(all, m, warp - CODE_WARPS);
    }
}

#endif
