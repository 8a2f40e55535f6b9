/* SPDX-License-Identifier: MIT */
/*
 * relay.cuh: attention of 64 query rows over a list of tokens, on wgmma (sm_90a). One core behind dense decode, sparse
 * decode and sparse prefill; the token source (pages by TMA, rows by cp.async, codes expanded on the way) is a
 * parameter.
 *
 * ROLES          warps                 registers: PAGES, ROWS, CODES  work (ROWS in turns: as PAGES)
 *   leader         0..3                  216, 208, 192                  scores, weights; half of the output dims
 *   follower       4..7                  216, 208, 192                  the other half
 *   producers      8..11 (CODES 8..15)   72, 88, 64                     token tiles into shared memory
 *
 * The scout, a warp, finds the next piece of work while the one before is in hand: with PAGES warp 9, which does
 * nothing else, with ROWS warp 8, with CODES warp 14, which also finds tokens. Accumulators: output 64 x 256 (128
 * registers per thread); the leader's scores 64 x 64 (32) and weights as an A operand (16), with CODES, whose tiles
 * have 48 tokens, 24 and 12.
 *
 * SHARED MEMORY  struct plan (plan.cuh): Q | two slots of one tile | weights, references, row sums | barriers | pieces.
 * CODES: weights have one block for both slots; the rest is raw rows (source_codes.cuh).
 *
 * BARRIERS       arrivals                       made by                       waited for by    protects
 *   full[s][4]     PAGES 1 and the bytes,         producers: a portion (two     leader, follower the portion; with the
 *                  ROWS 128 threads (and 1 for    blocks, the last one three)   (of its half)    last one mask and
 *                  the mask), CODES 6 warps       of a tile is there                             more[] of the slot
 *   free[s][2]     4 (one per warp)               leader, follower: each its    producers        half of slot s
 *                                                 half; of a piece's last slot
 *                                                 with ROWS or in turns the
 *                                                 follower both
 *   piece_full[2]  1                              scout                         everybody        pieces[]
 *   piece_free[2]  8 + PAGES 1 (in turns 3),      warps that read pieces        scout            pieces[]
 *                  ROWS 4, CODES 1
 *   named 1 + s    256                            leader                        follower         weights, references
 *   named 3        128                            leader                        itself           its writes into a tile
 *   named 4        128                            ROWS: follower                itself           sinks; Q's last use
 *   named 5        256                            both                          both             Q, row sums
 *   q_full         1 and the bytes                ROWS: the follower; PAGES,     leader (in       Q by TMA
 *                                                 in turns: producers           turns: both)
 *   q_free         8                              PAGES in turns: both          producer         Q
 *   named 7        256                            ROWS, in turns: follower      leader           sinks; ends of the
 *                                                                                                last piece are read
 *   named 8        256                            ROWS, in turns: leader        follower         output's half 0, ends
 * Block 8 (the rope dims) goes with half 1: once the scores are taken it holds the weights, which both read.
 * CODES: the leader waits for the follower's half of the tile before, too, since its weights lay where the next go.
 *
 * ORDER, for tile t in slot t & 1. With PAGES and ROWS there are kernels with another: tiles in turn (turns.cuh), where
 * of PAGES two lanes copy, of warps 8 and 10, half a tile each, and one of warp 11 asks for Q.
 *   leader: scores of t                   waits full[s]; 4 products per block, half 0 first
 *           weights of t                  once the scores are there; to shared memory, with their references; arrives
 *                                         at named 1 + s
 *           += weights * values of t      its half is 0, weights from registers; then frees half 0
 *   follower: += weights * values of t    its half is 1; waits named 1 + s; then frees half 1
 * The follower's values run on beside the leader's next scores. Nothing runs beside the weights.
 *
 * How many tiles a piece has is known only as they come: producers leave out entries that name no token, more[] says if
 * a tile follows.
 *
 * FENCES Whoever writes a tile by ordinary stores fences before it arrives; weights are fenced by who reads them. TMA
 * and cp.async need none.
 *
 * MASKS A token that is not there has a zero row and, by mask, the score -infinity. Where rows of Q see different
 * numbers of tokens, values that are not finite are set to 0, once the scores are taken, in tokens that some row does
 * not see: a row that does see them has a score that is not finite.
 */
#ifndef FLASHMLA_CUDA_SM90A_RELAY_CUH
#define FLASHMLA_CUDA_SM90A_RELAY_CUH

#include "border.cuh"
#include "ptx/grid.cuh"
#include "products.cuh"
#include "query.cuh"
#include "softmax.cuh"
#include "source_codes.cuh"
#include "source_pages.cuh"
#include "source_rows.cuh"
#include "together.cuh"
#include "turns.cuh"

#define RELAY_REGISTERS_PAGES 216 /* and of rows in turns */
#define RELAY_REGISTERS_TURNS 224
#define RELAY_REGISTERS_ROWS  208
#define RELAY_REGISTERS_CODES 192

#define LEADER      0 /* the warpgroup */
#define LEADER_HALF 0 /* of a slot and of the output: dims 0..255 */

template <int SOURCE, int TURNS = 0> struct relay_of {
    static constexpr int PAGES = SOURCE == SOURCE_PAGES;
    static constexpr int PRODUCER_WARPS = SOURCE == SOURCE_CODES ? 8 : 4;
    static constexpr int THREADS = (MMA_WARPS + PRODUCER_WARPS) * 32;
    static constexpr int REGISTERS = PAGES && TURNS          ? RELAY_REGISTERS_TURNS
                                     : PAGES || TURNS        ? RELAY_REGISTERS_PAGES
                                     : SOURCE == SOURCE_ROWS ? RELAY_REGISTERS_ROWS
                                                             : RELAY_REGISTERS_CODES; /* of leader and follower */
    static constexpr int WIDE = SOURCE != SOURCE_CODES;                               /* products of 256 columns */
    static constexpr int NEXT_Q = SOURCE == SOURCE_CODES;         /* the next Q sets out before an output does */
    static constexpr int BORDER = SOURCE == SOURCE_ROWS || TURNS; /* output by TMA (border.cuh) */
    static constexpr int ASKS = SOURCE == SOURCE_ROWS;            /* who multiplies asks for Q by TMA */
};

/* ---- the leader -------------------------------------------------------------------------------------------------- */

/* One piece that has tiles. Leaves sums, references and the output unnormalised. Returns the number of tiles. BORDER:
 * the last tile's half is kept. */
template <int BLOCKS, int F16, int SOURCE>
static __device__ __forceinline__ uint32_t lead(float o[128], softmax_rows &rows, uint32_t q, plan<BLOCKS> *m,
                                                const fmlac_mqa &p, const piece &c, slot_uses uses)
{
    typedef relay_of<SOURCE> the;
    float s[SCORES], factor[2], top[2] = {-FMLAC_INFINITY, -FMLAC_INFINITY};
    uint32_t a[SCORES / 2], t = 0, more;
#pragma unroll 1
    do {
        const uint32_t slot = t & 1;
        const tile_view v = view_of<BLOCKS>(slot);
        int32_t first = (c.begin + (int32_t)t) * TOKENS;
        const uint32_t parity = tile_parity(uses, t), full = ptx_shared_address(m->full[slot]);
        if (the::PAGES) {
            mend_tail<BLOCKS>(v, c, full, parity, first, LEADER);
        }
        start_scores<BLOCKS, F16, 0, PORTIONS>(s, q, v.k, full, parity);
        uint32_t flags = tile_flags(m, c, slot, first);
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<SCORES>(s);
        more = more_after(m, slot);
        mend_scores<BLOCKS, F16>(s, m, c, slot, v.at, first, flags, LEADER);
        if (weigh_scores<F16>(s, rows, a, factor, t == 0) && t > 0) {
            rescale(o, factor); /* seldom */
        }
        if (ONE_WEIGHTS) { /* the follower is done with the last ones */
            ptx_mbarrier_wait(ptx_shared_address(&m->free[slot ^ 1][!LEADER_HALF]), tile_parity(uses, t + 1) ^ 1);
        }
        publish<BLOCKS>(a, rows, v.weights_at, m, slot, LEADER);
        ptx_barrier_arrive(BARRIER_WEIGHTS + slot, 256);
        start_values_rs<F16, the::WIDE>(o, a, v.values[LEADER_HALF]);
        if (p.max_logits.data) {
            raise_max(s, top);
        }
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        free_half<the::BORDER>(ptx_shared_address(&m->free[slot][LEADER_HALF]), more);
        t++;
    } while (more);
    rows.max[0] = top[0] * rows.scale;
    rows.max[1] = top[1] * rows.scale;
    return t;
}

/* ---- the follower ------------------------------------------------------------------------------------------------ */

template <int BLOCKS, int F16, int SOURCE>
static __device__ __forceinline__ uint32_t follow(float o[128], plan<BLOCKS> *m, const fmlac_mqa_sm90a &all,
                                                  slot_uses uses, uint32_t next, uint32_t q_parity)
{
    typedef relay_of<SOURCE> the;
    constexpr int HALF = !LEADER_HALF;
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    float reference[2] = {-FMLAC_INFINITY, -FMLAC_INFINITY};
    uint32_t t = 0, more;
#pragma unroll 1
    do {
        const uint32_t slot = t & 1, parity = tile_parity(uses, t), full = ptx_shared_address(m->full[slot]);
        const tile_view v = view_of<BLOCKS>(slot);
        ptx_barrier_sync(BARRIER_WEIGHTS + slot, 256);
        ptx_fence_async_proxy();
        ptx_mbarrier_wait(full + PORTIONS / 2 * HALF * 8, parity);
        ptx_mbarrier_wait(full + (PORTIONS / 2 * (HALF + 1) - (PORTIONS > 1)) * 8, parity);
        float factor[2];
        if (follow_references(reference, m->reference[slot][row], m->reference[slot][row + 8], factor) && t > 0) {
            rescale(o, factor);
        }
        start_values_ss<F16, the::WIDE>(o, v.weights, v.values[HALF]);
        more = more_after(m, slot);
        if (the::ASKS && more == 0 && all.has_q) {
            ask_next_q(all, m, next, q_parity);
        }
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        free_half<the::BORDER>(ptx_shared_address(&m->free[slot][HALF]), more);
        t++;
    } while (more);
    return t;
}

/* ---- pieces ------------------------------------------------------------------------------------------------------ */

/* Read anew whenever it is asked: there is no register to keep the answer in. */
static __device__ __forceinline__ bool has_tiles(const piece &c)
{
    return uniform(*(const volatile int32_t *)&c.end - *(const volatile int32_t *)&c.begin) != 0;
}

/* Where a warp keeps what was guessed. All write the same, so one place serves all; racecheck does not look at that. */
template <int BLOCKS> static __device__ __forceinline__ int32_t &own_guess(plan<BLOCKS> *m)
{
    return m->guess[threadIdx.x / 32 % GUESSES];
}

/* What need not wait for the scout: Q and the first entries of the list that the first piece is most likely of. By the
 * block's first THREADS threads. */
template <int BLOCKS, int ASKS, int THREADS>
static __device__ __forceinline__ void first_q(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
    const fmlac_mqa &p = all.mqa;
    fmlac_work w = {};
    int32_t begin;
    bool guessed = walk_guess(p, (int32_t)blockIdx.x, &w, &begin);
    if (guessed && threadIdx.x < 32 && !is_whole(p)) {
        prefetch_list(p, w, begin, (int)threadIdx.x);
    }
    if (guessed && ASKS && all.has_q) {
        ask_first_q(all, m, w);
    } else if (guessed) {
        start_q<BLOCKS, THREADS>(p, w, m);
    }
    if (threadIdx.x % 32 == 0) {
        own_guess(m) = guessed ? (int32_t)w.first : -1; /* each warp for itself, all the same */
    }
    __syncwarp();
}

/* By both groups, Q of piece i. */
template <int BLOCKS>
static __device__ __forceinline__ void bring_q(const fmlac_mqa &p, plan<BLOCKS> *m, const piece &c, uint32_t i)
{
    if (!uniform(c.early) && (i > 0 || uniform(own_guess(m)) != uniform((uint32_t)c.work.first))) {
        ptx_copy_async_wait<0>(); /* a wrong guess */
        if (has_tiles(c)) {
            start_q<BLOCKS, 256>(p, c.work, m);
        }
    }
    finish_q<BLOCKS, 256>(p, m);
    ptx_barrier_sync(BARRIER_MMA, 256); /* Q is there; sums of the piece before have been read */
}

/*
 * The follower has the last weights of a piece that leaves no partial result, so nobody reads Q any more: that of piece
 * i, which the scout has found or is about to find, sets out before the output does. The leader learns of it behind the
 * barrier in note_rows.
 */
template <int BLOCKS>
static __device__ __forceinline__ void start_next_q(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, uint32_t i)
{
    piece &next = m->pieces[i & 1];
    ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
    if (!MAPPED_Q) {
        if (uniform(next.there) && has_tiles(next)) {
            start_q<BLOCKS, 128>(all.mqa, next.work, m);
            next.early = 1;
        }
    } else if (all.has_q ? uniform(next.there) : uniform(next.there) && has_tiles(next)) {
        if (!all.has_q) {
            start_q<BLOCKS, 128>(all.mqa, next.work, m);
        } else if (ptx_thread() == 128) {
            ask_q(all, m, next.work, next.outer, next.inner);
        }
        next.early = 1;
    }
}

/* Everything that the leader and the follower do. They share the accumulators: with arrays of their own, ptxas
 * spills. */
template <int BLOCKS, int F16, int SOURCE, int TURNS>
static __device__ __forceinline__ void consume(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
    typedef relay_of<SOURCE, TURNS> the;
    const fmlac_mqa &p = all.mqa;
    int group = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0);
    slot_uses uses = 0;
    uint32_t q = ptx_wgmma_tile(ptx_shared_address(m->q), BLOCK_BYTES);
    uint32_t q_parity = 0;
    if (!has_mapped_q(all)) {
        first_q<BLOCKS, the::ASKS, 256>(all, m);
    }
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!uniform(c.there)) {
            ptx_copy_async_wait<0>();
            break;
        }
        if (the::ASKS && all.has_q) {
            take_q(all, m, c, i, uniform(own_guess(m)), TURNS || group == 0, q_parity);
        } else if (has_mapped_q(all)) {
            take_mapped_q<BLOCKS, TURNS>(all, m, c, i, TURNS || group == 0);
        } else {
            bring_q<BLOCKS>(p, m, c, i);
        }
        float o[128];
        softmax_rows rows = {scale_of(p), {-FMLAC_INFINITY, -FMLAC_INFINITY}, {-FMLAC_INFINITY, -FMLAC_INFINITY}, {0}};
#pragma unroll
        for (int j = 0; j < 128; j++) {
            o[j] = 0.0f;
        }
        if (group == 1) {
            fetch_sinks(p, c, m);
            if (the::BORDER) {
                ptx_barrier_arrive(BARRIER_SINKS, 256);
            }
        }
        uint32_t tiles = 0, last = 0; /* last: number of the last tile, or one as odd; 0: there are none */
        if constexpr (TURNS) {
            const slot_uses before = uses;
            uses = has_tiles(c) ? take_turns<BLOCKS, F16, the::PAGES>(o, rows, q, m, p, c, uses, group) : uses;
            last = !has_tiles(c) ? 0 : (before ^ uses) == 0 || (before ^ uses) == 3 ? 2 : 1;
        } else if (has_tiles(c) && group == 0) {
            tiles = lead<BLOCKS, F16, SOURCE>(o, rows, q, m, p, c, uses);
        } else if (has_tiles(c)) {
            tiles = follow<BLOCKS, F16, SOURCE>(o, m, all, uses, i + 1, q_parity ^ 1);
        }
        last = TURNS ? last : tiles;
        if (the::NEXT_Q && group == 1 && p.scale >= 0.0f && uniform((uint32_t)(c.place >> 32)) != 0) {
            start_next_q<BLOCKS>(all, m, i + 1);
        }
        if (is_together(p)) {
            note_rows<BLOCKS>(rows, m, group);
            join_cluster<BLOCKS>(p, c, o, m, group ^ LEADER_HALF);
            break; /* there is no other piece */
        }
        if constexpr (the::PAGES && TURNS) {
            if (all.has_q) {
                arrive_together(ptx_shared_address(&m->q_free));
            }
        }
        if constexpr (the::BORDER) {
            if (the::ASKS && all.has_q && last == 0) {
                ptx_barrier_sync(BARRIER_MMA, 256); /* the leader has seen that this Q is there */
            }
            if (the::ASKS && all.has_q && group == 1 && (TURNS || tiles == 0)) {
                ptx_barrier_sync(BARRIER_GROUP + 1, 128); /* in turns, the last scores may be its own */
                ask_next_q(all, m, i + 1, q_parity ^ 1);
            }
            end_piece<BLOCKS, F16>(all, c, o, rows, m, group, group ^ LEADER_HALF, last);
        } else {
            note_rows<BLOCKS>(rows, m, group);
            store_rows<BLOCKS>(p, c, o, m, group ^ LEADER_HALF, ptx_shared_address(m->q));
        }
        arrive_together(ptx_shared_address(&m->piece_free[i & 1]));
        uses = uses_after(uses, tiles);
    }
}

/* ---- the block --------------------------------------------------------------------------------------------------- */

template <int BLOCKS, int SOURCE, int TURNS>
static __device__ __forceinline__ void init_barriers(plan<BLOCKS> *m, int producer_warps)
{
    typedef relay_of<SOURCE, TURNS> the;
    /* Of producers that read pieces: threads where a thread copies pages or asks for Q, else warps. */
    uint32_t readers = the::PAGES ? (TURNS ? 3 : 1) : (SOURCE == SOURCE_ROWS ? producer_warps : 1) * WARP_ARRIVALS;
    uint32_t arrivals = the::PAGES ? 1 : SOURCE == SOURCE_ROWS ? producer_warps * 32 : CODE_WARPS * WARP_ARRIVALS;
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < PORTIONS; j++) {
            uint32_t more = 0;
            if (SOURCE == SOURCE_ROWS && j == PORTIONS - 1) {
                more = 1; /* the mask */
            }
            ptx_mbarrier_init(ptx_shared_address(&m->full[i][j]), arrivals + more);
        }
        ptx_mbarrier_init(ptx_shared_address(&m->free[i][0]), 4 * WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->free[i][1]), 4 * WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_full[i]), WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_free[i]), MMA_WARPS * WARP_ARRIVALS + readers);
    }
    ptx_mbarrier_init(ptx_shared_address(&m->q_full), 1);
    if constexpr (the::PAGES && TURNS) {
        ptx_mbarrier_init(ptx_shared_address(&m->q_free), MMA_WARPS * WARP_ARRIVALS);
    }
    if constexpr (SOURCE == SOURCE_CODES) {
        init_codes(m);
    }
    begin_named_barriers();
    ptx_mbarrier_init_fence();
}

/* By the producers; a barrier of the block follows, for which nobody shall wait long. */
template <int BLOCKS, int SOURCE, int TURNS>
static __device__ __forceinline__ void prologue(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, int producer_warps)
{
    typedef relay_of<SOURCE, TURNS> the;
    const fmlac_mqa &p = all.mqa;
    int thread = (int)threadIdx.x - MMA_WARPS * 32, threads = producer_warps * 32;
    if (thread < 0) {
        return;
    }
    if (thread == threads - 1) {
        if (the::PAGES) {
            ptx_tma_prefetch_map(&all.pages);
        }
        if (the::ASKS || has_mapped_q(all)) {
            ptx_tma_prefetch_map(&all.q);
        }
        if (the::BORDER) {
            ptx_tma_prefetch_map(&all.out);
        }
        init_barriers<BLOCKS, SOURCE, TURNS>(m, producer_warps);
        m->walk.guess = -1;
    }
    if (is_whole(p) && thread < 32 && (int32_t)blockIdx.x < whole_pieces(p)) {
        prefetch_list(p, whole_work(p, (int32_t)blockIdx.x), 0, thread);
    }
    walk_costs(p, &m->walk, thread, threads);
#ifdef FMLAC_PAGED_ONLY
    if (is_plain_paged(p)) {
        if (thread / 32 == 1) { /* the scout */
            paged_begin(p, &m->walk, blockIdx.x, gridDim.x, thread % 32);
        } else if (thread < 32) {
            prefetch_tables(p, (int32_t)blockIdx.x, (int32_t)gridDim.x, thread);
        }
    }
#endif
}

/* BLOCKS: 64-dim blocks of a token, 8 or 9. F16: numbers are fp16, not bf16. SOURCE: how tokens come. TURNS: tiles in
 * turn (PAGES, ROWS). */
template <int BLOCKS, int F16, int SOURCE, int TURNS>
static __device__ __forceinline__ void relay(const fmlac_mqa_sm90a &all)
{
    const fmlac_mqa &p = all.mqa;
    typedef relay_of<SOURCE, TURNS> the;
    constexpr int MMA_REGISTERS = the::REGISTERS;
    constexpr int PRODUCER_REGISTERS = SOURCE == SOURCE_CODES ? 256 - MMA_REGISTERS : 504 - 2 * MMA_REGISTERS;
    plan<BLOCKS> *m = (plan<BLOCKS> *)ptx_shared();
    prologue<BLOCKS, SOURCE, TURNS>(all, m, the::PRODUCER_WARPS);
    __syncthreads();
    ptx_grid_launch_dependents();
    if (__shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0) < 2) {
        ptx_registers_take<MMA_REGISTERS>();
        consume<BLOCKS, F16, SOURCE, TURNS>(all, m);
    } else {
        ptx_registers_give<PRODUCER_REGISTERS>();
        if constexpr (the::PAGES) {
            produce_pages<BLOCKS, TURNS>(all, m);
        } else if constexpr (SOURCE == SOURCE_ROWS) {
            produce_rows<BLOCKS, TURNS>(p, m);
        } else {
            produce_codes<BLOCKS>(all, m);
        }
        if (is_together(p)) { /* where those who multiply join the pieces */
            __syncwarp();
            ptx_cluster_sync();
            ptx_cluster_sync();
        }
    }
}

/* A kernel of a file: source and order as relay's. */
#define RELAY_KERNEL(name, blocks, f16, source, turns)                                                                 \
    extern "C" __global__ void __launch_bounds__(relay_of<source>::THREADS, 1)                                         \
        name(const __grid_constant__ fmlac_mqa_sm90a all)                                                              \
    {                                                                                                                  \
        relay<blocks, f16, source, turns>(all);                                                                        \
    }

#endif
