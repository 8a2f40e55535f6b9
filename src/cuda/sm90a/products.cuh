/* SPDX-License-Identifier: MIT */
/*
 * products.cuh: a tile of tokens as operands of the relay's products, those products, and what is mended in tiles that
 * rows see only in part.
 */
#ifndef FLASHMLA_CUDA_SM90A_PRODUCTS_CUH
#define FLASHMLA_CUDA_SM90A_PRODUCTS_CUH

#include "plan.cuh"
#include "ptx/wgmma.cuh"

#include <stddef.h>

/* Scores of a thread. Where both slots share a block for weights, it is free when the follower has used the last. */
#define SCORES      (TOKENS / 2)
#define ONE_WEIGHTS (TOKENS < 64)

/* A tile as operands, and its shared addresses. */
typedef struct tile_view {
    uint32_t k;              /* K-major */
    uint32_t values[2];      /* MN-major: for output dims 0..255, 256..511 */
    uint32_t weights;        /* operand */
    uint32_t at, weights_at; /* addresses */
} tile_view;

template <int BLOCKS> static __device__ __forceinline__ tile_view view_of(uint32_t slot)
{
    tile_view v;
    const uint32_t base = ptx_shared_address(ptx_shared()), tile_bytes = BLOCKS * TILE_BYTES;
    v.at = base + offsetof(plan<BLOCKS>, k) + slot * tile_bytes;
    v.weights_at = base + offsetof(plan<BLOCKS>, weights);
    if (!ONE_WEIGHTS) {
        v.weights_at = BLOCKS == 9 ? v.at + 8 * BLOCK_BYTES : v.weights_at + slot * BLOCK_BYTES;
    }
    v.k = v.values[0] = ptx_wgmma_tile(v.at, TILE_BYTES);
    v.values[1] = ptx_wgmma_advance(v.k, 4 * TILE_BYTES);
    v.weights = ptx_wgmma_tile(v.weights_at, BLOCK_BYTES);
    return v;
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* s = or += Q * tile^T, 64 dims. HELD: the first 16 HELD dims of Q are in registers, held[]. */
template <int F16, int HELD = 0>
static __device__ __forceinline__ void block_scores(float s[SCORES], uint32_t q, uint32_t k, bool add,
                                                    const uint32_t *held = nullptr)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t of_q = ptx_wgmma_advance(q, i * 32), of_k = ptx_wgmma_advance(k, i * 32);
        if (i < HELD) {
            ptx_wgmma_n64_rs<F16>(s, held + 4 * i, of_k, add || i > 0);
        } else if (TOKENS == 48) {
            ptx_wgmma_n48_ss<F16>(s, of_q, of_k, add || i > 0);
        } else {
            ptx_wgmma_n64_ss<F16>(s, of_q, of_k, add || i > 0);
        }
    }
}

/*
 * s = Q * tile^T, portions FROM to END - 1 as they arrive; ends with the commit. `full`: the slot's first barrier.
 * HELD: as above, of the first block. CODES: blocks behind the first in a loop, because the code of all roles together
 * is more than what is fetched ahead of them (docs/hopper.md). The first one apart: or s would be in use from tile to
 * tile.
 */
template <int BLOCKS, int F16, int FROM, int END, int HELD = 0>
static __device__ __forceinline__ void start_scores(float s[SCORES], uint32_t q, uint32_t k, uint32_t full,
                                                    uint32_t parity, const uint32_t *held = nullptr)
{
    constexpr int BEHIND = END == PORTIONS ? BLOCKS : 2 * END, BEGUN = FROM == 0; /* the block behind; the first one */
    if (BEGUN) {
        ptx_wgmma_hold<SCORES>(s);
    }
    ptx_mbarrier_wait(full + FROM * 8, parity);
    ptx_wgmma_fence();
    if (BEGUN) {
        block_scores<F16, HELD>(s, q, k, false, held);
    }
    if constexpr (PORTIONS == 1) {
        uint32_t of_q = ptx_wgmma_advance(q, BLOCK_BYTES), of_k = ptx_wgmma_advance(k, TILE_BYTES);
#pragma unroll 1
        for (const uint32_t end = ptx_wgmma_advance(q, BEHIND * BLOCK_BYTES); of_q != end;) {
            block_scores<F16>(s, of_q, of_k, true);
            of_q = ptx_wgmma_advance(of_q, BLOCK_BYTES);
            of_k = ptx_wgmma_advance(of_k, TILE_BYTES);
        }
    } else {
#pragma unroll
        for (int at = 2 * FROM + BEGUN; at < BEHIND; at++) {
            if (at % 2 == 0 && at / 2 < PORTIONS && at > 2 * FROM) {
                ptx_mbarrier_wait(full + at / 2 * 8, parity);
                ptx_wgmma_fence();
            }
            block_scores<F16>(s, ptx_wgmma_advance(q, at * BLOCK_BYTES), ptx_wgmma_advance(k, at * TILE_BYTES), true);
        }
    }
    ptx_wgmma_commit();
}

/* Products with o begin. */
static __device__ __forceinline__ void begin_values(float o[128])
{
    ptx_wgmma_hold<128>(o);
    ptx_wgmma_fence();
}

/* o += weights (registers) * values, tokens 16 k to 16 k + 15. */
template <int F16, int WIDE>
static __device__ __forceinline__ void values_rs(float o[128], const uint32_t a[SCORES / 2], uint32_t values, int k)
{
    if (WIDE) {
        ptx_wgmma_n256_rs<F16>(o, a + 4 * k, ptx_wgmma_advance(values, k * 2048), 1);
    } else {
        ptx_wgmma_n128_rs<F16>(o, a + 4 * k, ptx_wgmma_advance(values, k * 2048), 1);
        ptx_wgmma_n128_rs<F16>(o + 64, a + 4 * k, ptx_wgmma_advance(values, 2 * TILE_BYTES + k * 2048), 1);
    }
}

/* The same, weights in shared memory. */
template <int F16, int WIDE>
static __device__ __forceinline__ void values_ss(float o[128], uint32_t weights, uint32_t values, int k)
{
    uint32_t a = ptx_wgmma_advance(weights, k * 32);
    if (WIDE) {
        ptx_wgmma_n256_ss<F16>(o, a, ptx_wgmma_advance(values, k * 2048), 1);
    } else {
        ptx_wgmma_n128_ss<F16>(o, a, ptx_wgmma_advance(values, k * 2048), 1);
        ptx_wgmma_n128_ss<F16>(o + 64, a, ptx_wgmma_advance(values, 2 * TILE_BYTES + k * 2048), 1);
    }
}

/* All of a tile's, and the commit. */
template <int F16, int WIDE>
static __device__ __forceinline__ void start_values_rs(float o[128], const uint32_t a[SCORES / 2], uint32_t values)
{
    begin_values(o);
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        values_rs<F16, WIDE>(o, a, values, k);
    }
    ptx_wgmma_commit();
}

template <int F16, int WIDE>
static __device__ __forceinline__ void start_values_ss(float o[128], uint32_t weights, uint32_t values)
{
    begin_values(o);
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        values_ss<F16, WIDE>(o, weights, values, k);
    }
    ptx_wgmma_commit();
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

#endif
