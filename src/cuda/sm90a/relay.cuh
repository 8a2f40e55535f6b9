/* SPDX-License-Identifier: MIT */
/*
 * relay.cuh: attention of 64 query rows over a list of tokens, on wgmma (sm_90a). One core behind dense decode, sparse
 * decode and sparse prefill; the token source (pages by TMA, rows by cp.async, codes expanded on the way) is a
 * parameter.
 *
 * ROLES          warps                 registers: PAGES, ROWS, CODES  work
 *   warpgroup 0    0..3                  216, 208, 200                  scores and weights of even tiles; dims 0..255
 *   warpgroup 1    4..7                  216, 208, 200                  scores and weights of odd tiles; dims 256..511
 *   producers      8..11 (CODES 8..15)   72, 88, 56                     token tiles into shared memory
 *
 * Dims of the output, of all tiles. Warp 7 is also the scout: it finds the next piece of work while the first tile of
 * the one before is multiplied by others. Accumulators of a warpgroup: output 64 x 256 (128 registers per thread),
 * scores 64 x 64 (32), weights as an A operand (16).
 *
 * SHARED MEMORY  struct plan (plan.cuh): Q | two slots of one tile | weights, references, row sums | barriers | pieces.
 *
 * BARRIERS       arrivals                       made by                       waited for by    protects
 *   full[s][4]     PAGES 1 and the bytes,         producers: a portion (two     both warpgroups  the portion; with the
 *                  ROWS 128 threads (and 1 for    blocks, the last one three)                    last one mask and
 *                  the mask), CODES 8 warps       of a tile is there                             more[] of the slot
 *   free[s][2]     4 (one per warp)               warpgroup h, done with half h producers        half h of slot s
 *   piece_full[2]  1                              scout                         everybody        pieces[]
 *   piece_free[2]  8 + PAGES 1, ROWS 4, CODES 8   warps that read pieces        scout            pieces[]
 *   named 1 + s    256                            warpgroup s                   warpgroup 1 - s  weights, references
 *   named 3 + w    128                            warpgroup w                   itself           its writes into a tile
 *   named 5        256                            both warpgroups               both             Q, row sums
 * Block 8 (the rope dims) of slot s goes with half 1 - s: it holds the weights of slot s, which warpgroup 1 - s reads.
 *
 * ORDER of a warpgroup w, for its own tiles t of a piece (t & 1 == w; the other warpgroup is half a step ahead or
 * behind):
 *   scores of t                           waits full[w]; 4 products per block, in the order of arrival
 *   += weights of t - 1 * values of t - 1 waits named 1 + (1 - w), follows the references; behind the scores
 *   weights of t                          while the product with t - 1 runs; then frees t - 1's half w
 *   publish the weights of t              to shared memory, with their references; arrives at named 1 + w
 *   += weights of t * values of t         weights from registers; frees t's half w
 * If the last tile is the other's, its product follows at the end. The first product overwrites the output. How many
 * tiles a piece has is known only as they come: producers leave out entries that name no token, more[] says if a tile
 * follows.
 *
 * MASKS A token that is not there has a zero row and, by mask, the score -infinity. Where rows of Q see different
 * numbers of tokens, values that are not finite are set to 0, once the scores are taken, in tokens that some row does
 * not see: a row that does see them has a score that is not finite.
 */
#ifndef FLASHMLA_CUDA_SM90A_RELAY_CUH
#define FLASHMLA_CUDA_SM90A_RELAY_CUH

#include "output.cuh"
#include "ptx/grid.cuh"
#include "ptx/wgmma.cuh"
#include "query.cuh"
#include "softmax.cuh"
#include "source_codes.cuh"
#include "source_pages.cuh"
#include "source_rows.cuh"

#include <stddef.h>

/* Tiles as operands, and shared addresses, of a warpgroup. */
typedef struct relay_view {
    uint32_t q, own_k;       /* K-major */
    uint32_t own_v, other_v; /* MN-major: this warpgroup's half of the output dims */
    uint32_t other_weights;
    uint32_t own_weights, own_tile;
    int group, thread, warp; /* warpgroup; thread and warp in it */
} relay_view;

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* s = Q * own tile^T, portion by portion as they arrive; ends with the commit. */
template <int BLOCKS, int F16>
static __device__ __forceinline__ void start_scores(float s[32], const relay_view &v, const plan<BLOCKS> *m,
                                                    uint32_t parity)
{
    ptx_wgmma_hold<32>(s);
#pragma unroll
    for (int at = 0; at < BLOCKS; at++) {
        if (at % 2 == 0 && at < 8) {
            ptx_mbarrier_wait(ptx_shared_address(&m->full[v.group][at / 2]), parity);
            ptx_fence_async_proxy();
            ptx_wgmma_fence();
        }
        uint32_t offset = at < 8 ? ((at * BLOCK_BYTES) ^ (v.group * 4 * BLOCK_BYTES)) : 8 * BLOCK_BYTES;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            ptx_wgmma_n64_ss<F16>(s, ptx_wgmma_advance(v.q, offset + k * 32),
                                  ptx_wgmma_advance(v.own_k, offset + k * 32), at + k > 0);
        }
    }
    ptx_wgmma_commit();
}

/* o = or += weights (registers) * values, ends with the commit. */
template <int F16, int WIDE>
static __device__ __forceinline__ void start_values_rs(float o[128], const uint32_t a[16], uint32_t values,
                                                       int accumulate)
{
    ptx_wgmma_hold<128>(o);
    ptx_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (WIDE) {
            ptx_wgmma_n256_rs<F16>(o, a + 4 * k, ptx_wgmma_advance(values, k * 2048), k > 0 || accumulate);
        } else {
            ptx_wgmma_n128_rs<F16>(o, a + 4 * k, ptx_wgmma_advance(values, k * 2048), k > 0 || accumulate);
            ptx_wgmma_n128_rs<F16>(o + 64, a + 4 * k, ptx_wgmma_advance(values, 2 * BLOCK_BYTES + k * 2048),
                                   k > 0 || accumulate);
        }
    }
    ptx_wgmma_commit();
}

/* The same, weights in shared memory. */
template <int F16, int WIDE>
static __device__ __forceinline__ void start_values_ss(float o[128], uint32_t weights, uint32_t values, int accumulate)
{
    ptx_wgmma_hold<128>(o);
    ptx_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t a = ptx_wgmma_advance(weights, k * 32);
        if (WIDE) {
            ptx_wgmma_n256_ss<F16>(o, a, ptx_wgmma_advance(values, k * 2048), k > 0 || accumulate);
        } else {
            ptx_wgmma_n128_ss<F16>(o, a, ptx_wgmma_advance(values, k * 2048), k > 0 || accumulate);
            ptx_wgmma_n128_ss<F16>(o + 64, a, ptx_wgmma_advance(values, 2 * BLOCK_BYTES + k * 2048),
                                   k > 0 || accumulate);
        }
    }
    ptx_wgmma_commit();
}

static __device__ __forceinline__ void rescale(float o[128], const float factor[2])
{
#pragma unroll
    for (int i = 0; i < 128; i++) {
        o[i] *= factor[i / 2 % 2];
    }
}

/* ---- tiles that rows see only in part ---------------------------------------------------------------------------- */

/* PAGES: rows from `first` on of a loaded tile hold what the page holds there: zeros instead. */
template <int BLOCKS> static __device__ __forceinline__ void clear_rows(uint32_t tile, int first, int thread)
{
    const uint32_t zeros[4] = {0, 0, 0, 0};
    for (int chunk = thread; chunk < (TOKENS - first) * BLOCKS * 8; chunk += 128) {
        int row = first + chunk / (BLOCKS * 8);
        ptx_store_shared_128(tile + chunk_offset(row, chunk % (BLOCKS * 8)), zeros);
    }
}

/* Values that are not finite become 0 in rows from `first` on; block 8 is no part of them. */
template <int F16> static __device__ __forceinline__ void clean_rows(uint32_t tile, int first, int thread)
{
    const uint32_t exponent = F16 ? 0x7C00u : 0x7F80u;
    for (int word = thread; word < (TOKENS - first) * 256; word += 128) {
        uint32_t at = tile + chunk_offset(first + word / 256, word % 256 / 4) + word % 4 * 4;
        uint32_t x = ptx_load_shared_u32(at);
        uint32_t y = (x & exponent) == exponent ? x & 0xFFFF0000u : x;
        y = (y >> 16 & exponent) == exponent ? y & 0x0000FFFFu : y;
        if (y != x) {
            ptx_store_shared_u32(at, y);
        }
    }
}

/* ---- the weights' way to the other warpgroup --------------------------------------------------------------------- */

/* s as A fragments, to registers and to shared memory, with the references. */
template <int BLOCKS, int F16>
static __device__ __forceinline__ void publish(const float s[32], uint32_t a[16], const softmax_rows &rows,
                                               const relay_view &v, plan<BLOCKS> *m)
{
    int lane = v.thread % 32;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        a[i] = F16 ? ptx_pack_f16(s[2 * i], s[2 * i + 1]) : ptx_pack_bf16(s[2 * i], s[2 * i + 1]);
    }
    if (BLOCKS == 9) {
        ptx_barrier_sync(BARRIER_GROUP + v.group, 128); /* all four warps have read the rope dims */
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        ptx_stmatrix_x4(v.own_weights + chunk_offset(v.warp * 16 + lane % 16, 2 * k + lane / 16), a + 4 * k);
    }
    if (lane % 4 == 0) {
        m->reference[v.group][v.warp * 16 + lane / 4] = rows.reference[0];
        m->reference[v.group][v.warp * 16 + lane / 4 + 8] = rows.reference[1];
    }
    ptx_fence_async_proxy();
    ptx_barrier_arrive(BARRIER_WEIGHTS + v.group, 256);
}

/* Waits for the other's weights and tile, and moves to their references. */
template <int BLOCKS>
static __device__ __forceinline__ void meet_other(float o[128], softmax_rows &rows, const relay_view &v,
                                                  const plan<BLOCKS> *m, uint32_t parity)
{
    int other = 1 - v.group, row = v.warp * 16 + v.thread % 32 / 4;
    ptx_barrier_sync(BARRIER_WEIGHTS + other, 256);
    ptx_mbarrier_wait(ptx_shared_address(&m->full[other][2]), parity);
    ptx_mbarrier_wait(ptx_shared_address(&m->full[other][3]), parity);
    ptx_fence_async_proxy();
    float reference[2] = {m->reference[other][row], m->reference[other][row + 8]}, factor[2];
    if (follow(rows, reference, factor)) {
        rescale(o, factor);
    }
}

template <int BLOCKS> static __device__ __forceinline__ void release(const relay_view &v, plan<BLOCKS> *m, int slot)
{
    if (v.thread % 32 == 0) {
        ptx_mbarrier_arrive(ptx_shared_address(&m->free[slot][v.group]));
    }
}

/* ---- an MMA warpgroup -------------------------------------------------------------------------------------------- */

/* The tokens of tile `tile` of the list that this thread's rows see, and those that are there. */
template <int BLOCKS>
static __device__ __forceinline__ void tile_masks(const piece &c, const relay_view &v, const plan<BLOCKS> *m,
                                                  int64_t first, uint32_t mask[2], int32_t limit[2])
{
    int row = v.warp * 16 + v.thread % 32 / 4;
    for (int h = 0; h < 2; h++) {
        mask[h] = *(const volatile uint32_t *)&m->mask[v.group][h];
        limit[h] = (int32_t)clamped(c.seen[row + 8 * h] - first, 0, TOKENS);
    }
}

/* Whether a tile follows tile t, which lies in the other warpgroup's slot; waits until that is known. */
template <int BLOCKS>
static __device__ __forceinline__ bool another_after(const relay_view &v, const plan<BLOCKS> *m, uint32_t parity)
{
    ptx_mbarrier_wait(ptx_shared_address(&m->full[1 - v.group][PORTIONS - 1]), parity);
    return *(const volatile uint32_t *)&m->more[1 - v.group] != 0;
}

/* One piece; `any`: it has tiles. Leaves sums, references and the output unnormalised. Returns the number of tiles. */
template <int BLOCKS, int F16, int SOURCE>
static __device__ __forceinline__ uint32_t attend(float o[128], softmax_rows &rows, const relay_view &v,
                                                  plan<BLOCKS> *m, const piece &c, slot_uses uses, bool any)
{
    constexpr int WIDE = SOURCE != SOURCE_CODES;
    float s[32], factor[2];
    uint32_t a[16];
    uint32_t t = any ? v.group : 0;
    bool mine = any && (v.group == 0 || another_after(v, m, tile_parity(uses, 0))), last = !any;
#pragma unroll 1
    while (mine) {
        int64_t first = (int64_t)(c.begin + (int32_t)t) * TOKENS;
        uint32_t parity = tile_parity(uses, t);
        if (SOURCE == SOURCE_PAGES && first + TOKENS > c.work.main_count) {
            for (int i = 0; i < PORTIONS; i++) {
                ptx_mbarrier_wait(ptx_shared_address(&m->full[v.group][i]), parity);
            }
            clear_rows<BLOCKS>(v.own_tile, (int)(c.work.main_count - first), v.thread);
            ptx_fence_async_proxy();
            ptx_barrier_sync(BARRIER_GROUP + v.group, 128);
        }
        start_scores<BLOCKS, F16>(s, v, m, parity);
        if (t > 0) {
            meet_other<BLOCKS>(o, rows, v, m, tile_parity(uses, t - 1));
        }
        /* Products must not be conditional, or ptxas makes all of them wait: before tile 0 there is nothing to
         * multiply, and what is multiplied then is overwritten below. */
        start_values_ss<F16, WIDE>(o, v.other_weights, v.other_v, t > 1);
        ptx_wgmma_wait<1>();
        ptx_wgmma_hold<32>(s);

        uint32_t mask[2];
        int32_t limit[2];
        tile_masks(c, v, m, first, mask, limit);
        if (c.all_see < c.work.main_count && c.all_see < first + TOKENS) {
            ptx_barrier_sync(BARRIER_GROUP + v.group, 128); /* all four warps have their scores */
            clean_rows<F16>(v.own_tile, (int)clamped(c.all_see - first, 0, TOKENS), v.thread);
            ptx_fence_async_proxy();
            ptx_barrier_sync(BARRIER_GROUP + v.group, 128);
        }
        scale_scores(s, rows.scale, mask, limit);
        bool moves = weigh(s, rows, factor);
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        if (t > 0) {
            release(v, m, 1 - v.group);
        }
        if (moves) { /* seldom; after the weights are published a register would be missing */
            rescale(o, factor);
        }
        publish<BLOCKS, F16>(s, a, rows, v, m);
        start_values_rs<F16, WIDE>(o, a, v.own_v, t > 0);
        last = *(const volatile uint32_t *)&m->more[v.group] == 0;
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        release(v, m, v.group);
        mine = !last && another_after(v, m, tile_parity(uses, t + 1));
        t += last ? 1 : 2;
    }
    if (!last) { /* tile t - 1 is the other's, and the last */
        meet_other<BLOCKS>(o, rows, v, m, tile_parity(uses, t - 1));
        start_values_ss<F16, WIDE>(o, v.other_weights, v.other_v, t > 1);
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        release(v, m, 1 - v.group);
    }
    return t;
}

template <int BLOCKS> static __device__ __forceinline__ relay_view view_of(int group)
{
    relay_view v;
    const uint32_t base = ptx_shared_address(ptx_shared()), tile_bytes = BLOCKS * BLOCK_BYTES;
    uint32_t half = group * 4 * BLOCK_BYTES;
    uint32_t own = base + offsetof(plan<BLOCKS>, k) + group * tile_bytes;
    uint32_t other = base + offsetof(plan<BLOCKS>, k) + tile_bytes - group * tile_bytes;
    uint32_t weights = base + offsetof(plan<BLOCKS>, weights);
    v.group = group;
    v.thread = threadIdx.x % 128;
    v.warp = v.thread / 32;
    v.own_tile = own;
    v.own_weights = BLOCKS == 9 ? own + 8 * BLOCK_BYTES : weights + group * BLOCK_BYTES;
    v.q = ptx_wgmma_tile(base + offsetof(plan<BLOCKS>, q), BLOCK_BYTES);
    v.own_k = ptx_wgmma_tile(own, BLOCK_BYTES);
    v.own_v = ptx_wgmma_tile(own + half, BLOCK_BYTES);
    v.other_v = ptx_wgmma_tile(other + half, BLOCK_BYTES);
    v.other_weights = ptx_wgmma_tile(
        BLOCKS == 9 ? other + 8 * BLOCK_BYTES : weights + BLOCK_BYTES - group * BLOCK_BYTES, BLOCK_BYTES);
    return v;
}

/* Everything that an MMA warpgroup does. */
template <int BLOCKS, int F16, int SOURCE>
static __device__ __forceinline__ void consume(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    int group = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0);
    if (threadIdx.x / 32 == SCOUT_WARP) {
        walk_begin(p, &m->walk, threadIdx.x % 32);
        scout_piece(p, m, 0);
    }
    relay_view v = view_of<BLOCKS>(group);
    slot_uses uses = 0;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            break;
        }
        uint32_t tiles = (uint32_t)(c.end - c.begin);
        if (tiles > 0) {
            load_q<BLOCKS>(p, c.work, m);
        }
        ptx_barrier_sync(BARRIER_MMA, 256); /* Q is there; sums of the piece before have been read */
        if (threadIdx.x / 32 == SCOUT_WARP) {
            scout_piece(p, m, i + 1);
        }
        float o[128];
        softmax_rows rows = {
            p.scale * LOG2_E, {-FMLAC_INFINITY, -FMLAC_INFINITY}, {-FMLAC_INFINITY, -FMLAC_INFINITY}, {0, 0}};
        if (tiles == 0) {
#pragma unroll
            for (int j = 0; j < 128; j++) {
                o[j] = 0.0f;
            }
        }
        tiles = attend<BLOCKS, F16, SOURCE>(o, rows, v, m, c, uses, tiles > 0);
        store_rows<BLOCKS>(p, c, o, rows, m, group);
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
        }
        uses = uses_after(uses, tiles);
    }
}

/* ---- the block --------------------------------------------------------------------------------------------------- */

template <int BLOCKS, int SOURCE>
static __device__ __forceinline__ void init_barriers(const fmlac_mqa &p, plan<BLOCKS> *m, int producer_warps)
{
    int readers = SOURCE == SOURCE_PAGES ? 1 : producer_warps; /* producer warps that read pieces */
    uint32_t arrivals = SOURCE == SOURCE_PAGES ? 1 : SOURCE == SOURCE_ROWS ? producer_warps * 32 : producer_warps;
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < PORTIONS; j++) {
            uint32_t more = 0;
            if (SOURCE == SOURCE_ROWS && j == PORTIONS - 1) {
                more = 1; /* the mask */
            } else if (SOURCE == SOURCE_CODES && p.main.pool.rope_dims > 0 && j == rope_portion(p, i)) {
                more = producer_warps * 32; /* every thread's copies */
            }
            ptx_mbarrier_init(ptx_shared_address(&m->full[i][j]), arrivals + more);
        }
        ptx_mbarrier_init(ptx_shared_address(&m->free[i][0]), 4);
        ptx_mbarrier_init(ptx_shared_address(&m->free[i][1]), 4);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_full[i]), 1);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_free[i]), MMA_WARPS + readers);
    }
    ptx_mbarrier_init_fence();
}

/* BLOCKS: 64-dim blocks of a token, 8 or 9. F16: numbers are fp16, not bf16. SOURCE: how tokens come. */
template <int BLOCKS, int F16, int SOURCE> static __device__ __forceinline__ void relay(const fmlac_mqa_sm90a &all)
{
    const fmlac_mqa &p = all.mqa;
    constexpr int PRODUCER_WARPS = SOURCE == SOURCE_CODES ? 8 : 4;
    constexpr int MMA_REGISTERS = SOURCE == SOURCE_PAGES ? 216 : SOURCE == SOURCE_ROWS ? 208 : 200;
    constexpr int PRODUCER_REGISTERS = SOURCE == SOURCE_PAGES ? 72 : SOURCE == SOURCE_ROWS ? 88 : 56;
    plan<BLOCKS> *m = (plan<BLOCKS> *)ptx_shared();
    if (threadIdx.x == 0) {
        init_barriers<BLOCKS, SOURCE>(p, m, PRODUCER_WARPS);
    }
    __syncthreads();
    ptx_grid_wait();
    ptx_grid_launch_dependents();
    if (__shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0) < 2) {
        ptx_registers_take<MMA_REGISTERS>();
        consume<BLOCKS, F16, SOURCE>(p, m);
    } else {
        ptx_registers_give<PRODUCER_REGISTERS>();
        if (SOURCE == SOURCE_PAGES) {
            produce_pages<BLOCKS>(all, m);
        } else if (SOURCE == SOURCE_ROWS) {
            produce_rows<BLOCKS>(p, m);
        } else {
            produce_codes<BLOCKS>(p, m);
        }
    }
}

#endif
