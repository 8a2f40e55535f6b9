/* SPDX-License-Identifier: MIT */
/*
 * pair.cuh: attention of up to 128 query rows over a list of quantised tokens by two blocks of a cluster, which split
 * the token's dims (sm_90a). Each block expands and multiplies its own half: no code is expanded twice. What they
 * exchange are partial scores, in float.
 *
 * ROLES          warps     registers   work
 *   warpgroup 0    0..3      208       rows 0..63: scores of the block's dims, weights, the block's 256 output dims
 *   warpgroup 1    4..7      208       rows 64..127: the same
 *   gather         8..10     48        raw rows into the ring (bulk copies), RoPE dims into the tile
 *   expand         11..13    48        codes to bf16, a group of 16 rows at a time
 *   finder         14        48        walks the list: where the tokens of a tile lie
 *   scout          15        48        finds the pieces
 * Both blocks do the same in step; of all that depends on scores they compute the same bits. Block 0 has dims 0..255 of
 * K, Q and output, block 1 dims 256..511; of RoPE dims on top (d_qk 576) each has 32. Accumulators of a warpgroup:
 * output 64 x 256 (128 registers per thread), scores 64 x 64 (32), weights as an A operand (16).
 *
 * SHARED MEMORY  struct pair_plan (pair_plan.cuh): Q | three half tiles | partial scores of the peer | raw ring | ...
 *
 * BARRIERS           arrivals                made by                       waited for by    protects
 *   full[3]            4 groups (and copies    expand (and gather)           warpgroups       a half tile, its count
 *                      of RoPE dims)
 *   empty[3]           8 warps                 warpgroups, after the values  expand, gather   the same
 *   rope_empty[2]      8 warps                 warpgroups, after the scores  gather           RoPE dims on top of 512
 *   exchange_full[2]   1 and 16384 bytes       the peer's warpgroup          warpgroup        exchange[w]
 *   exchange_empty[2]  4 warps of the peer     the peer's warpgroup, once    warpgroup        the peer's exchange[w]
 *                                              it has read what we sent
 *   places_full[2]     1                       finder                        gather           places[], notes[]
 *   places_empty[2]    3 warps                 gather                        finder           the same
 *   raw_full[]         33 and the bytes        gather: 32 copies of scales,  an expand warp   a group of raw rows
 *                                              1 for codes and header
 *   raw_empty[]        1                       an expand warp                a gather warp    the same
 *   piece_full[2]      1                       scout                         everybody        pieces[]
 *   piece_free[2]      15 warps                everybody                     scout            the same
 *   named 3 + w        128                     warpgroup w                   itself           Q of the warpgroup
 *
 * ORDER of a warpgroup, tile t of a piece:
 *   scores of t on the block's dims        waits full[t]
 *   += weights of t - 1 * values of t - 1  weights from registers, behind the scores
 *   send the partial scores                waits for the scores and exchange_empty; while the product with t - 1 runs
 *   release t - 1
 *   add the peer's partial scores          waits exchange_full
 *   weights of t                           moves the output to new references, seldom
 * The product with the last tile follows at the end. The first one overwrites the output; before it, in tile 0, a
 * product with whatever lies there is issued and lost, since products must not be conditional.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_CUH

#include "output.cuh"
#include "pair_source.cuh"
#include "ptx/cluster.cuh"
#include "ptx/grid.cuh"
#include "ptx/wgmma.cuh"
#include "softmax.cuh"

#include <stddef.h>

/* What a thread of a warpgroup keeps. Registers are full while tiles are multiplied: what is needed only before and
 * after is read anew there (ptx_thread, ptx_cluster_rank), and the compiler must not know that it is the same. */
typedef struct pair_view {
    uint32_t at; /* of the thread's scores in an exchange */
    int group;   /* warpgroup */
} pair_view;

#define BARRIER_PAIR 3 /* + warpgroup: its 128 threads; a named barrier */

#define PAIR_AT(member) (ptx_shared_address(ptx_shared()) + (uint32_t)offsetof(pair_plan<BLOCKS>, member))

/* From an address of this block to the same one of the other. */
static __device__ __forceinline__ uint32_t to_peer(void)
{
    uint32_t base = ptx_shared_address(ptx_shared());
    return ptx_cluster_address(base, ptx_cluster_rank() ^ 1) - base;
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* s = Q * tile^T over the block's dims; ends with the commit. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_scores(float s[32], const pair_view &v, uint32_t slot, uint32_t tile)
{
    uint32_t q = ptx_wgmma_tile(PAIR_AT(q) + v.group * HALF_BLOCKS * BLOCK_BYTES, BLOCK_BYTES);
    uint32_t k = ptx_wgmma_tile(PAIR_AT(k) + slot * HALF_BLOCKS * BLOCK_BYTES, BLOCK_BYTES);
    ptx_wgmma_hold<32>(s);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < HALF_BLOCKS * 4; i++) {
        uint32_t offset = i / 4 * BLOCK_BYTES + i % 4 * 32;
        ptx_wgmma_n64_ss<0>(s, ptx_wgmma_advance(q, offset), ptx_wgmma_advance(k, offset), i > 0);
    }
    if (BLOCKS == 9) {
        uint32_t q_rope = ptx_wgmma_tile(PAIR_AT(q_rope) + v.group * 64, BLOCK_BYTES);
        uint32_t k_rope = ptx_wgmma_tile(PAIR_AT(k_rope) + (tile & 1) * 64, BLOCK_BYTES);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ptx_wgmma_n64_ss<0>(s, ptx_wgmma_advance(q_rope, i * 32), ptx_wgmma_advance(k_rope, i * 32), 1);
        }
    }
    ptx_wgmma_commit();
}

/* o = or += weights * values of the block's dims; ends with the commit. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_values(float o[128], const uint32_t a[16], const pair_view &v,
                                                   uint32_t slot, int accumulate)
{
    uint32_t values = ptx_wgmma_tile(PAIR_AT(k) + slot * HALF_BLOCKS * BLOCK_BYTES, BLOCK_BYTES);
    ptx_wgmma_hold<128>(o);
    ptx_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        ptx_wgmma_n128_rs<0>(o, a + 4 * k, ptx_wgmma_advance(values, k * 2048), k > 0 || accumulate);
        ptx_wgmma_n128_rs<0>(o + 64, a + 4 * k, ptx_wgmma_advance(values, 2 * BLOCK_BYTES + k * 2048),
                             k > 0 || accumulate);
    }
    ptx_wgmma_commit();
}

/* ---- the exchange: a thread's scores lie in eight pieces of 16 bytes, 2048 bytes apart -----------------------------
 */

template <int BLOCKS>
static __device__ __forceinline__ void send_scores(const float s[32], const pair_view &v, uint32_t turn)
{
    uint32_t peer = to_peer();
    ptx_mbarrier_wait(PAIR_AT(exchange_empty) + v.group * 8, (turn & 1) ^ 1);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        ptx_store_remote_128(PAIR_AT(exchange) + peer + v.at + j * 2048, s + 4 * j,
                             PAIR_AT(exchange_full) + peer + v.group * 8);
    }
}

template <int BLOCKS> static __device__ __forceinline__ void add_scores(float s[32], const pair_view &v, uint32_t turn)
{
    uint32_t full = PAIR_AT(exchange_full) + v.group * 8;
    ptx_mbarrier_wait(full, turn & 1);
    if (threadIdx.x % 128 == 0) { /* before this warp lets the peer send again */
        ptx_mbarrier_arrive_expect(full, EXCHANGE_BYTES);
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint32_t x[4];
        ptx_load_shared_128(x, PAIR_AT(exchange) + v.at + j * 2048);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[4 * j + i] += __uint_as_float(x[i]);
        }
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        ptx_mbarrier_arrive_remote(PAIR_AT(exchange_empty) + to_peer() + v.group * 8);
    }
}

/* ---- a warpgroup ------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void arrive_warp(uint32_t barrier)
{
    if (threadIdx.x % 32 == 0) {
        ptx_mbarrier_arrive(barrier);
    }
}

/* One piece; `there`: it has tiles; *tiles: so far, in all pieces. Leaves sums, references and the output unnormalised.
 */
template <int BLOCKS>
static __device__ __forceinline__ void pair_attend(float o[128], softmax_rows &rows, const pair_view &v,
                                                   pair_plan<BLOCKS> *m, uint32_t *tiles, bool there)
{
    const uint32_t mask[2] = {0xFFFFFFFFu, 0xFFFFFFFFu};
    float s[32], factor[2];
    uint32_t a[16] = {0};
    int t = 0; /* in the piece */
#pragma unroll 1
    while (there) {
        uint32_t turn = *tiles, slot = ring_at<STAGES>(turn).at, before = ring_at<STAGES>(turn + STAGES - 1).at;
        ptx_mbarrier_wait(PAIR_AT(full) + slot * 8, ring_at<STAGES>(turn).use);
        ptx_fence_async_proxy();
        pair_scores<BLOCKS>(s, v, slot, turn);
        pair_values<BLOCKS>(o, a, v, before, t > 1);
        ptx_wgmma_wait<1>();
        ptx_wgmma_hold<32>(s);
        if (BLOCKS == 9) {
            arrive_warp(PAIR_AT(rope_empty) + (turn & 1) * 8);
        }
        send_scores<BLOCKS>(s, v, turn);
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        if (t > 0) {
            arrive_warp(PAIR_AT(empty) + before * 8);
        }
        add_scores<BLOCKS>(s, v, turn);
        uint32_t note = *(const volatile uint32_t *)&m->stage_notes[slot];
        int32_t count = note & NOTE_COUNT;
        there = (note & NOTE_MORE) != 0;
        const int32_t limit[2] = {count, count};
        scale_scores(s, rows.scale, mask, limit);
        if (weigh(s, rows, factor)) {
#pragma unroll
            for (int i = 0; i < 128; i++) {
                o[i] *= factor[i / 2 % 2];
            }
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            a[i] = ptx_pack_bf16(s[2 * i], s[2 * i + 1]);
        }
        *tiles = turn + 1;
        t++;
    }
    if (t > 0) {
        uint32_t slot = ring_at<STAGES>(*tiles + STAGES - 1).at;
        pair_values<BLOCKS>(o, a, v, slot, t > 1);
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        arrive_warp(PAIR_AT(empty) + slot * 8);
    }
}

/* The warpgroup's 64 rows of Q, the block's dims, set out. Rows beyond the last are zeros. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_start_query(const fmlac_mqa &p, const fmlac_work &w, int group)
{
    int thread = (int)ptx_thread() % 128, chunk = thread % 8;
    uint32_t rank = ptx_cluster_rank();
    uint32_t to = PAIR_AT(q) + group * HALF_BLOCKS * BLOCK_BYTES, to_rope = PAIR_AT(q_rope);
#pragma unroll 1
    for (int at = thread / 8; at < 64; at += 16) {
        int row = group * 64 + at;
        bool there = row < w.rows;
        int64_t token;
        int32_t head;
        row_token_head(w, there ? row : 0, &token, &head);
        const uint8_t *from = (const uint8_t *)p.q.data + 2 * row_offset(&p.q, &p, token, head) + chunk * 16;
#pragma unroll
        for (int block = 0; block < HALF_BLOCKS; block++) {
            ptx_copy_async_16(to + chunk_offset(at, block * 8 + chunk), from + rank * PAIR_DIMS * 2 + block * 128,
                              there ? 16 : 0);
        }
        if (BLOCKS == 9 && chunk < 4) {
            ptx_copy_async_16(to_rope + chunk_offset(at, group * 4 + chunk), from + 1024 + rank * 64, there ? 16 : 0);
        }
    }
    ptx_copy_async_commit();
}

/* Q of a piece is there; it may have set out early. */
template <int BLOCKS> static __device__ __forceinline__ void pair_query(const fmlac_mqa &p, const piece &c, int group)
{
    if (!__shfl_sync(0xFFFFFFFFu, c.early, 0)) {
        ptx_copy_async_wait<0>(); /* a wrong guess */
        ptx_barrier_sync(BARRIER_PAIR + group, 128); /* the last piece's scores are done in all warps */
        pair_start_query<BLOCKS>(p, c.work, group);
    }
    ptx_copy_async_wait<0>();
    ptx_fence_async_proxy();
    ptx_barrier_sync(BARRIER_PAIR + group, 128);
}

/* Everything that a warpgroup does. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_consume(const fmlac_mqa &p, pair_plan<BLOCKS> *m, const pair_view &v)
{
    uint32_t tiles = 0;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            ptx_copy_async_wait<0>();
            return;
        }
        pair_query<BLOCKS>(p, c, v.group);
        float o[128], factor[2];
        softmax_rows rows = {
            p.scale * LOG2_E, {-FMLAC_INFINITY, -FMLAC_INFINITY}, {-FMLAC_INFINITY, -FMLAC_INFINITY}, {0, 0}};
        bool there = c.begin < c.end;
        if (!there) {
#pragma unroll
            for (int j = 0; j < 128; j++) {
                o[j] = 0.0f;
            }
        }
        pair_attend<BLOCKS>(o, rows, v, m, &tiles, there);
        int thread = (int)ptx_thread(), row = thread / 32 * 16 + thread % 32 / 4;
        uint32_t rank = ptx_cluster_rank();
        join_sums(rows);
        for (int h = 0; h < 2; h++) {
            factor[h] = finish_row(p, c, PAIR_ROWS, row + 8 * h, rows.reference[h], rows.max[h], rows.sum[h],
                                   rank == 0 && thread % 4 == 0);
        }
        if (c.place >= 0) {
            ptx_barrier_sync(BARRIER_PAIR + v.group, 128); /* Q's place is free */
        }
        store_output(p, c, PAIR_ROWS, row, o, factor, rank * PAIR_DIMS, PAIR_AT(q));
        __syncwarp();
        arrive_warp(ptx_shared_address(&m->piece_free[i & 1]));
    }
}

/* ---- the block --------------------------------------------------------------------------------------------------- */

template <int BLOCKS>
static __device__ __forceinline__ void pair_barriers(const fmlac_mqa &p, pair_plan<BLOCKS> *m, uint32_t rank)
{
    typedef raw_ring<BLOCKS> ring;
    uint32_t copies = rope_chunks<BLOCKS>(p, rank) > 0 ? TILE_GROUPS * 32 : 0;
    for (int i = 0; i < STAGES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->full[i]), TILE_GROUPS + copies);
        ptx_mbarrier_init(ptx_shared_address(&m->empty[i]), MMA_WARPS);
    }
    for (int i = 0; i < ring::GROUPS; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->raw_full[i]), 33);
        ptx_mbarrier_init(ptx_shared_address(&m->raw_empty[i]), 1);
    }
    for (int i = 0; i < 2; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->rope_empty[i]), MMA_WARPS);
        ptx_mbarrier_init(ptx_shared_address(&m->exchange_full[i]), 1);
        ptx_mbarrier_init(ptx_shared_address(&m->exchange_empty[i]), 4);
        ptx_mbarrier_init(ptx_shared_address(&m->places_full[i]), 1);
        ptx_mbarrier_init(ptx_shared_address(&m->places_empty[i]), GATHER_WARPS);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_full[i]), 1);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_free[i]), MMA_WARPS + GATHER_WARPS + EXPAND_WARPS + 1);
        ptx_mbarrier_arrive_expect(ptx_shared_address(&m->exchange_full[i]), EXCHANGE_BYTES);
    }
    ptx_mbarrier_init_fence();
}

/* What need not wait for the scout; a barrier of the cluster follows. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_prologue(const fmlac_mqa &p, pair_plan<BLOCKS> *m, uint32_t rank)
{
    int warp = threadIdx.x / 32;
    fmlac_work w = {};
    int32_t begin;
    bool guessed = walk_guess(p, (int32_t)(blockIdx.x / 2), &w, &begin);
    if (threadIdx.x == MMA_WARPS * 32) {
        pair_barriers<BLOCKS>(p, m, rank);
        m->walk.guess = guessed ? (int32_t)w.first : -1;
    }
    if (guessed && warp == MMA_WARPS + 1) {
        prefetch_list(p, w, begin, (int)threadIdx.x % 32);
    }
    if (guessed && warp < MMA_WARPS) {
        pair_start_query<BLOCKS>(p, w, warp / 4);
    }
    walk_costs(p, &m->walk, (int)threadIdx.x, 512);
}

/* BLOCKS: 64-dim blocks of a token, 8 or 9. */
template <int BLOCKS> static __device__ __forceinline__ void pair(const fmlac_mqa &p)
{
    pair_plan<BLOCKS> *m = (pair_plan<BLOCKS> *)ptx_shared();
    uint32_t rank = ptx_cluster_rank();
    pair_prologue<BLOCKS>(p, m, rank);
    ptx_cluster_sync();
    ptx_grid_wait();
    ptx_grid_launch_dependents();
    int group = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0);
    int warp = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 32), 0) - MMA_WARPS;
    if (group < 2) {
        ptx_registers_take<208>();
        pair_view v = {group * EXCHANGE_BYTES + threadIdx.x % 128 * 16, group};
        pair_consume<BLOCKS>(p, m, v);
    } else {
        ptx_registers_give<48>();
        if (warp < GATHER_WARPS) {
            gather<BLOCKS>(p, m, warp, rank);
        } else if (warp < GATHER_WARPS + EXPAND_WARPS) {
            expand<BLOCKS>(p, m, warp - GATHER_WARPS, rank);
        } else if (warp == GATHER_WARPS + EXPAND_WARPS) {
            find_tokens(p, m);
        } else {
            scout(p, m);
        }
    }
    ptx_cluster_sync(); /* the peer may still write here */
}

#endif
