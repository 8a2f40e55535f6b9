/* SPDX-License-Identifier: MIT */
/*
 * gather.cuh: the warp that brings raw rows of quantised tokens, by one bulk copy each;
 * source_codes.cuh says for whom. It may be what limits, since shared memory takes hundreds of cycles to answer
 * (docs/hopper.md).
 */
#ifndef FLASHMLA_CUDA_SM90A_GATHER_CUH
#define FLASHMLA_CUDA_SM90A_GATHER_CUH

#include "find.cuh"
#include "ptx/tma.cuh"

/* Raw rows in shared memory: a warp has `places` batches, one behind the other, and uses them in turn. */
typedef struct raw_ring {
    uint32_t pitch, places; /* of a row; batches of a warp */
    uint32_t at, parity;    /* the next batch's place; of its raw_full */
} raw_ring;

template <int BLOCKS> static __device__ __forceinline__ raw_ring ring_begin(const fmlac_mqa &p)
{
    int32_t main = p.main.pool.data_row_bytes, extra = p.extra.pool.data_row_bytes; /* 0: none */
    raw_ring r = {(uint32_t)FMLAC_RAW_PITCH(main > extra ? main : extra), BATCHES_MAX, 0, 0};
    while (r.places > 1 && r.places * CODE_WARPS * BATCH_ROWS * r.pitch > RAW_BYTES(BLOCKS)) {
        r.places--;
    }
    return r;
}

static __device__ __forceinline__ void ring_next(raw_ring &r)
{
    r.at++;
    if (r.at == r.places) {
        r.at = 0;
        r.parity ^= 1;
    }
}

/* Shared address of a batch's place. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t raw_batch(plan<BLOCKS> *m, const raw_ring &r, uint32_t warp)
{
    return ptx_shared_address(m->raw) + (warp * r.places + r.at) * BATCH_ROWS * r.pitch;
}

/* Rows at any address: the warp copies one after another. */
static __device__ __forceinline__ void fetch_bytes(const fmlac_pool &pool, const uint8_t *const *places, uint32_t there,
                                                   uint32_t to, uint32_t pitch)
{
#pragma unroll 1
    for (int row = 0; row < BATCH_ROWS; row++) {
        int bytes = there >> row & 1 ? pool.data_row_bytes : 0;
#pragma unroll 1
        for (int at = threadIdx.x % 32; at < bytes; at += 32) {
            ptx_store_shared_u8(to + row * pitch + at, places[row][at]);
        }
    }
    ptx_fence_async_proxy(); /* the next copy to here may be a bulk copy */
    __syncwarp();
}

/* A batch of which rows may be missing, or which bulk copies cannot read. `there`: a bit for each row. */
static __device__ __forceinline__ void fetch_batch(const fmlac_pool &pool, const uint8_t *const *places, uint32_t there,
                                                   uint32_t to, uint32_t pitch, uint32_t full)
{
    if (!pool.aligned) {
        fetch_bytes(pool, places, there, to, pitch);
        there = 0;
    }
    if (ptx_elect()) {
        ptx_mbarrier_arrive_expect(full, __popc(there) * pool.data_row_bytes);
#pragma unroll 1
        for (int row = 0; there >> row; row++) {
            if (there >> row & 1) {
                ptx_bulk_load(to + row * pitch, places[row], pool.data_row_bytes, full);
            }
        }
    } else {
        arrive_others(full);
    }
    __syncwarp();
}

/* Where a batch's rows lie, read ahead of the time when they are needed. */
typedef struct batch_places {
    uint32_t row[BATCH_ROWS / 2][4]; /* two addresses each */
} batch_places;

static __device__ __forceinline__ void read_places(batch_places *b, const uint8_t *const *places)
{
#pragma unroll
    for (int i = 0; i < BATCH_ROWS / 2; i++) {
        ptx_load_shared_128(b->row[i], ptx_shared_address(places + 2 * i));
    }
}

/* Whole batches of two warps: nothing but copies, and no branches: a condition for each of them, uniform as it may be,
 * takes the gatherer three times as long. */
static __device__ __forceinline__ void fetch_whole(uint32_t row_bytes, const batch_places b[2], uint32_t to,
                                                   uint32_t apart, uint32_t pitch, uint32_t full)
{
    if (ptx_elect()) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ptx_mbarrier_arrive_expect(full + i * BATCHES_MAX * 8, BATCH_ROWS * row_bytes);
#pragma unroll
            for (int row = 0; row < BATCH_ROWS; row++) {
                const uint32_t *half = b[i].row[row / 2] + row % 2 * 2;
                ptx_bulk_load(to + i * apart + row * pitch, (const void *)(half[0] | (uint64_t)half[1] << 32),
                              row_bytes, full + i * BATCHES_MAX * 8);
            }
        }
    } else {
        arrive_others(full);
        arrive_others(full + BATCHES_MAX * 8);
    }
    __syncwarp();
}

/* Pairs of expanding warps. */
#define GATHER_PAIRS (CODE_WARPS / 2)

/* Where the gatherer's next copies go: a batch of all its warps, from the first warp on. */
typedef struct gather_place {
    uint32_t to, apart; /* the first warp's batch; from warp to warp */
    uint32_t full, empty, parity;
} gather_place;

/* Whether a pair of warps has given back the places of a batch. Both barriers are asked at once. */
static __device__ __forceinline__ bool pair_free(const gather_place &g, uint32_t pair)
{
    const uint32_t empty = g.empty + pair * 2 * BATCHES_MAX * 8;
    bool first = ptx_mbarrier_try(empty, g.parity), second = ptx_mbarrier_try(empty + BATCHES_MAX * 8, g.parity);
    return first && second;
}

static __device__ __forceinline__ void await_pair(const gather_place &g, uint32_t pair)
{
    const uint32_t empty = g.empty + pair * 2 * BATCHES_MAX * 8;
    ptx_mbarrier_wait(empty, g.parity);
    ptx_mbarrier_wait(empty + BATCHES_MAX * 8, g.parity);
}

/* A batch of all warps of a tile that is whole. Shared memory takes hundreds of cycles to answer where products read
 * it: so a pair's places and barriers are asked for before the copies of the pair before set out. */
static __device__ __forceinline__ void gather_whole(const uint8_t *const *places, const gather_place &g,
                                                    uint32_t row_bytes, uint32_t pitch)
{
    batch_places b[2][2];
    read_places(&b[0][0], places);
    read_places(&b[0][1], places + WARP_ROWS);
    bool is_free = pair_free(g, 0);
#pragma unroll
    for (uint32_t pair = 0; pair < GATHER_PAIRS; pair++) {
        const bool now = is_free;
        if (pair + 1 < GATHER_PAIRS) {
            const uint8_t *const *next = places + (pair + 1) * 2 * WARP_ROWS;
            read_places(&b[(pair + 1) % 2][0], next);
            read_places(&b[(pair + 1) % 2][1], next + WARP_ROWS);
            is_free = pair_free(g, pair + 1);
        }
        if (!now) {
            await_pair(g, pair);
        }
        fetch_whole(row_bytes, b[pair % 2], g.to + pair * 2 * g.apart, g.apart, pitch,
                    g.full + pair * 2 * BATCHES_MAX * 8);
    }
}

/* The same of any tile. notes: of the warps. */
static __device__ __forceinline__ void gather_some(const fmlac_pool &pool, const uint8_t *const *places,
                                                   const uint32_t *notes, uint32_t batch, const gather_place &g,
                                                   uint32_t pitch)
{
#pragma unroll 1
    for (uint32_t warp = 0; warp < 2 * GATHER_PAIRS; warp += 2) {
        const uint8_t *const *from = places + warp * WARP_ROWS;
        const uint32_t there = uniform((notes[warp] >> batch * BATCH_ROWS & 15) |
                                       (notes[warp + 1] >> batch * BATCH_ROWS & 15) << BATCH_ROWS);
        const uint32_t to = g.to + warp * g.apart, full = g.full + warp * BATCHES_MAX * 8;
        await_pair(g, warp / 2);
        if (there == 0xFF && pool.aligned) {
            batch_places b[2];
            read_places(&b[0], from);
            read_places(&b[1], from + WARP_ROWS);
            fetch_whole(pool.data_row_bytes, b, to, g.apart, pitch, full);
        } else {
#pragma unroll 1
            for (uint32_t i = 0; i < 2; i++) {
                fetch_batch(pool, from + i * WARP_ROWS, there >> i * BATCH_ROWS & 15, to + i * g.apart, pitch,
                            full + i * BATCHES_MAX * 8);
            }
        }
    }
}

/* The gatherer. */
template <int BLOCKS> static __device__ __forceinline__ void gather_rows(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    raw_ring r = ring_begin<BLOCKS>(p);
#pragma unroll 1
    for (uint32_t tile = 0;; tile++) {
        uint32_t at = tile % PLACES;
        ptx_mbarrier_wait(ptx_shared_address(&m->places_full[at]), tile / PLACES & 1);
        uint32_t note = uniform(m->notes[at][0]);
        if (note & NOTE_END) {
            break;
        }
        const fmlac_pool &pool = pool_of(p, (note & NOTE_EXTRA_POOL) != 0);
        const uint32_t row_bytes = pool.data_row_bytes;
        const bool whole = (note & NOTE_WHOLE) != 0 && pool.aligned;
#pragma unroll 1
        for (uint32_t batch = 0; batch < CODE_BATCHES; batch++) {
            const gather_place g = {raw_batch(m, r, 0), r.places * BATCH_ROWS * r.pitch,
                                    ptx_shared_address(&m->raw_full[0][r.at]),
                                    ptx_shared_address(&m->raw_empty[0][r.at]), r.parity ^ 1};
            const uint8_t *const *places = m->places[at] + batch * BATCH_ROWS;
            if (whole) {
                gather_whole(places, g, row_bytes, r.pitch);
            } else {
                gather_some(pool, places, m->notes[at], batch, g, r.pitch);
            }
            ring_next(r);
        }
        arrive_warp(ptx_shared_address(&m->places_empty[at]));
    }
}

#endif
