/* SPDX-License-Identifier: MIT */
/*
 * few.cuh: attention of few query rows (ROWS, 16) over a list of quantised tokens. Tokens come as the relay's do
 * (source_codes.cuh); the products have their roles swapped, so that the 64 rows a product has are tokens or output
 * dims, and the few rows of queries are its columns: scores^T = K Q^T and output^T = V^T weights^T. The tile is the
 * first operand of both, K-major and MN-major.
 *
 * ROLES       warps    registers   work
 *   scorer    0..3     72          Q, scores, weights
 *   summer    4..7     136         all output dims, output
 *   producers 8..23    56          expand four rows of a tile each
 *             24..27   72          finder, two gatherers, fetcher (source_codes.cuh)
 *
 * SHARED MEMORY and BARRIERS as the relay's (plan.cuh, relay.cuh), but:
 *   free[s][2]     4 warps     scorer: has the scores; summer: has the sums    producers    slot s
 *   named 1 + s    256         both                                           both         weights[s], state[s],
 *                                                                                          reference[s]: factors
 *   named 3        128         scorer                                         itself       Q; tops[]
 *   named 7        256         scorer                                         summer       sums[], maxima[], ends[]
 *   named 4        128         summer                                         itself       its epilogue
 * Weights of tile t + 2 lie where those of tile t did: the scorer has waited for tile t + 2, which came once the summer
 * was done with tile t. What a piece ends with (sums, maxima, ends) has two places: the piece after the next is not
 * found before the summer is done with it.
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_CUH
#define FLASHMLA_CUDA_SM90A_FEW_CUH

#include "few_output.cuh"
#include "relay.cuh"

#define SCORER       0
#define BARRIER_SUMS BARRIER_SINKS /* what a piece ends with is there */

struct few_of {
    static constexpr int PRODUCER_WARPS = (CODE_WARPS + 1 + GATHERERS + FETCHERS + 3) / 4 * 4;
    static constexpr int THREADS = (MMA_WARPS + PRODUCER_WARPS) * 32;
    static constexpr int SCORER_REGISTERS = 72;
    static constexpr int SUMMER_REGISTERS = 136;
    static constexpr int EXPAND_REGISTERS = 56;
    static constexpr int OTHER_REGISTERS = 72; /* of the finder, above all */
};

/* The tile of a slot, and its weights: rows of heads. */
template <int BLOCKS> static __device__ __forceinline__ tile_view few_view(uint32_t slot)
{
    tile_view v = {};
    const uint32_t base = ptx_shared_address(ptx_shared());
    v.at = base + offsetof(plan<BLOCKS>, k) + slot * (BLOCKS * TILE_BYTES);
    v.weights_at = base + offsetof(plan<BLOCKS>, weights) + slot * BLOCK_BYTES;
    v.k = ptx_wgmma_tile(v.at, TILE_BYTES);
    v.weights = ptx_wgmma_tile(v.weights_at, BLOCK_BYTES);
    return v;
}

/* ---- the scorer -------------------------------------------------------------------------------------------------- */

/* s + other = tile * Q^T: two chains, as each of these products alone is shorter than its latency. */
template <int BLOCKS>
static __device__ __forceinline__ void few_scores(float s[FEW_SCORES], float other[FEW_SCORES], uint32_t q, uint32_t k)
{
    ptx_wgmma_hold<FEW_SCORES>(s);
    ptx_wgmma_hold<FEW_SCORES>(other);
    ptx_wgmma_fence();
#pragma unroll
    for (int at = 0; at < BLOCKS; at++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t of_q = ptx_wgmma_advance(q, at * BLOCK_BYTES + i * 32);
            uint32_t of_k = ptx_wgmma_advance(k, at * TILE_BYTES + i * 32);
            ptx_wgmma_n16_ss<0>(i % 2 == 0 ? s : other, of_k, of_q, at + i / 2 > 0);
        }
    }
    ptx_wgmma_commit();
}

static __device__ __forceinline__ void few_scores_there(float s[FEW_SCORES], float other[FEW_SCORES])
{
    ptx_wgmma_wait<0>();
    ptx_wgmma_hold<FEW_SCORES>(s);
    ptx_wgmma_hold<FEW_SCORES>(other);
#pragma unroll
    for (int i = 0; i < FEW_SCORES; i++) {
        s[i] += other[i];
    }
}

/* All bits are 1 if all tokens of a tile are there. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t tokens_there(const plan<BLOCKS> *m, uint32_t slot)
{
    uint32_t all = 0xFFFFFFFFu;
#pragma unroll
    for (int i = 0; i < 16 / WARP_ROWS; i++) {
        all &= *(const volatile uint32_t *)&m->mask[slot][i];
    }
    return all;
}

/* Tiles of a piece that has some. Returns how many. parity: of the piece's number. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t score_tiles(few_heads &heads, uint32_t q, plan<BLOCKS> *m,
                                                       const fmlac_mqa &p, const piece &c, slot_uses uses,
                                                       uint32_t parity)
{
    const uint32_t warp = uniform(threadIdx.x / 32);
    uint32_t t = 0, more;
#pragma unroll 1
    do {
        const uint32_t slot = t & 1;
        const tile_view v = few_view<BLOCKS>(slot);
        const int32_t first = (c.begin + (int32_t)t) * TOKENS, all_see = *(const volatile int32_t *)&c.all_see;
        float s[FEW_SCORES], other[FEW_SCORES];
        ptx_mbarrier_wait(ptx_shared_address(m->full[slot]), tile_parity(uses, t));
        few_scores<BLOCKS>(s, other, q, v.k);
        const bool masked = __any_sync(0xFFFFFFFFu, tokens_there(m, slot) != 0xFFFFFFFFu || all_see < first + TOKENS);
        more = __any_sync(0xFFFFFFFFu, *(const volatile uint32_t *)&m->more[slot] != 0) ? 1 : 0;
        few_scores_there(s, other);
        if (all_see < first + TOKENS && all_see < c.work.main_count) {
            clean_tile<0>(c, v.at, first, SCORER);
        }
        if (masked) {
            few_hide(s, m, c, slot, first, warp);
        }
        few_weigh(s, heads, m, slot, v.weights_at, warp, t == 0, more);
        free_half<0>(ptx_shared_address(&m->free[slot][0]), more);
        if (p.max_logits.data) {
            few_raise_max(s, heads.max);
        }
        t++;
    } while (more);
    few_end(heads, m, parity, warp);
    ptx_barrier_arrive(BARRIER_SUMS, 256);
    return t;
}

template <int BLOCKS> static __device__ __forceinline__ void score(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m)
{
    const fmlac_mqa &p = all.mqa;
    slot_uses uses = 0;
    const uint32_t q = ptx_wgmma_tile(ptx_shared_address(m->q), BLOCK_BYTES);
    first_q<BLOCKS, 0, 128>(all, m);
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!uniform(c.there)) {
            ptx_copy_async_wait<0>();
            break;
        }
        if (has_tiles(c)) {
            if (i > 0 || uniform(own_guess(m)) != uniform((uint32_t)c.work.first)) {
                ptx_copy_async_wait<0>(); /* a wrong guess */
                start_q<BLOCKS, 128>(p, c.work, m);
            }
            finish_q<BLOCKS, 128>(p, m);
            ptx_barrier_sync(BARRIER_GROUP + SCORER, 128);
            few_heads heads;
            few_begin(heads, scale_of(p));
            uses = uses_after(uses, score_tiles<BLOCKS>(heads, q, m, p, c, uses, i & 1));
        }
        arrive_together(ptx_shared_address(&m->piece_free[i & 1]));
    }
}

/* ---- the summer -------------------------------------------------------------------------------------------------- */

/* o += V^T weights^T: a product for 64 dims and 16 tokens. */
static __device__ __forceinline__ void few_values(float o[FEW_OUTPUT], uint32_t weights, uint32_t k)
{
    ptx_wgmma_hold<FEW_OUTPUT>(o);
    ptx_wgmma_fence();
#pragma unroll
    for (int tokens = 0; tokens < TOKENS / 16; tokens++) {
#pragma unroll
        for (int block = 0; block < 8; block++) {
            ptx_wgmma_n16_ss<1>(o + block * FEW_SCORES, ptx_wgmma_advance(k, block * TILE_BYTES + tokens * 2048),
                                ptx_wgmma_advance(weights, tokens * 32), 1);
        }
    }
    ptx_wgmma_commit();
    ptx_wgmma_wait<0>();
    ptx_wgmma_hold<FEW_OUTPUT>(o);
}

template <int BLOCKS>
static __device__ __forceinline__ uint32_t sum_tiles(float o[FEW_OUTPUT], plan<BLOCKS> *m, slot_uses uses)
{
    uint32_t t = 0, state;
#pragma unroll 1
    do {
        const uint32_t slot = t & 1;
        const tile_view v = few_view<BLOCKS>(slot);
        while (ptx_barrier_any(BARRIER_WEIGHTS + slot, 256, false)) {
        }
        ptx_fence_async_proxy();
        ptx_mbarrier_wait(ptx_shared_address(m->full[slot]), tile_parity(uses, t));
        state = uniform(*(const volatile uint32_t *)&m->state[slot]);
        if ((state & FEW_MOVED) && t > 0) {
            float factor[FEW_COLUMNS];
#pragma unroll
            for (int column = 0; column < FEW_COLUMNS; column++) {
                factor[column] = m->reference[slot][few_head(column)];
            }
            few_rescale(o, factor);
        }
        few_values(o, v.weights, v.k);
        free_half<0>(ptx_shared_address(&m->free[slot][1]), state);
        t++;
    } while (state & FEW_MORE);
    ptx_barrier_sync(BARRIER_SUMS, 256);
    return t;
}

template <int BLOCKS> static __device__ __forceinline__ void sum(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    slot_uses uses = 0;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!uniform(c.there)) {
            break;
        }
        float o[FEW_OUTPUT];
#pragma unroll
        for (int j = 0; j < FEW_OUTPUT; j++) {
            o[j] = 0.0f;
        }
        fetch_sinks(p, c, m);
        uint32_t tiles = has_tiles(c) ? sum_tiles<BLOCKS>(o, m, uses) : 0;
        few_ends(m, i & 1, tiles == 0);
        few_store(p, c, o, m);
        arrive_together(ptx_shared_address(&m->piece_free[i & 1]));
        uses = uses_after(uses, tiles);
    }
}

/* ---- the block --------------------------------------------------------------------------------------------------- */

/* BLOCKS: 64-dim blocks of a token, 8 or 9. */
template <int BLOCKS> static __device__ __forceinline__ void few(const fmlac_mqa_sm90a &all)
{
    const fmlac_mqa &p = all.mqa;
    plan<BLOCKS> *m = (plan<BLOCKS> *)ptx_shared();
    prologue<BLOCKS, SOURCE_CODES, 0>(all, m, few_of::PRODUCER_WARPS);
    __syncthreads();
    ptx_grid_launch_dependents();
    const int group = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0);
    if (group == SCORER) {
        ptx_registers_take<few_of::SCORER_REGISTERS>();
        score<BLOCKS>(all, m);
    } else if (group == 1) {
        ptx_registers_take<few_of::SUMMER_REGISTERS>();
        sum<BLOCKS>(p, m);
    } else if (group < (MMA_WARPS + CODE_WARPS) / 4) {
        ptx_registers_give<few_of::EXPAND_REGISTERS>();
        expand_tiles<BLOCKS>(p, m, uniform(threadIdx.x / 32) - MMA_WARPS);
    } else {
        ptx_registers_give<few_of::OTHER_REGISTERS>();
        bring_codes<BLOCKS>(all, m, uniform(threadIdx.x / 32) - MMA_WARPS - CODE_WARPS);
    }
}

/* A kernel of a file. */
#define FEW_KERNEL(name, blocks)                                                                                       \
    extern "C" __global__ void __launch_bounds__(few_of::THREADS, 1) name(const __grid_constant__ fmlac_mqa_sm90a all) \
    {                                                                                                                  \
        few<blocks>(all);                                                                                              \
    }

#endif
