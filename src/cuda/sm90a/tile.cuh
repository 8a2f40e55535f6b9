/* SPDX-License-Identifier: MIT */
/*
 * tile.cuh: what a warpgroup that owns a tile does with it beside products, whatever the order of tiles: tails and
 * tokens that not all rows see, scores to weights, and the weights' way to the other warpgroup.
 */
#ifndef FLASHMLA_CUDA_SM90A_TILE_CUH
#define FLASHMLA_CUDA_SM90A_TILE_CUH

#include "products.cuh"
#include "softmax.cuh"

/* Weights, A fragments, to shared memory, with the references. Who reads them waits for the owner; one of the two
 * fences. group: the owner. */
template <int BLOCKS>
static __device__ __forceinline__ void publish(const uint32_t a[SCORES / 2], const softmax_rows &rows,
                                               uint32_t weights_at, plan<BLOCKS> *m, uint32_t slot, uint32_t group)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (BLOCKS == 9 && !ONE_WEIGHTS) {
        ptx_barrier_sync(BARRIER_GROUP + group, 128); /* all four warps have read the rope dims */
    }
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        ptx_stmatrix_x4(weights_at + chunk_offset(warp * 16 + lane % 16, 2 * k + lane / 16), a + 4 * k);
    }
    if (lane % 4 == 0) {
        m->reference[slot][warp * 16 + lane / 4] = rows.reference[0];
        m->reference[slot][warp * 16 + lane / 4 + 8] = rows.reference[1];
    }
}

/* PAGES: the last tile of a list holds what the page holds behind it: zeros instead, once it is there. */
template <int BLOCKS>
static __device__ __forceinline__ void clear_tail(uint32_t tile, int first, uint32_t full, uint32_t parity,
                                                  uint32_t group)
{
    for (int i = 0; i < PORTIONS; i++) {
        ptx_mbarrier_wait(full + i * 8, parity);
    }
    clear_rows<BLOCKS>(tile, first, (int)ptx_thread() % 128); /* read anew: no register holds it in the loop */
    ptx_fence_async_proxy();
    ptx_barrier_sync(BARRIER_GROUP + group, 128);
}

/* The same for a tile that may be the list's last; `first`: its first position. */
template <int BLOCKS>
static __device__ __forceinline__ void mend_tail(const tile_view &v, const piece &c, uint32_t full, uint32_t parity,
                                                 int32_t first, uint32_t group)
{
    if (first + TOKENS > c.work.main_count) {
        clear_tail<BLOCKS>(v.at, (int)(c.work.main_count - first), full, parity, group);
    }
}

/*
 * What is not plain about a tile that is there, for the warp; its owner asks before it waits for the scores. MASKED:
 * some of the warp's rows do not attend all tokens. UNCLEAN: some row of the block does not see all tokens: values
 * may be numbers that it must not meet.
 */
#define TILE_MASKED  1
#define TILE_UNCLEAN 2

static __device__ __forceinline__ int32_t tokens_seen(const piece &c, int row, int32_t first)
{
    int32_t seen = *(const volatile int32_t *)&c.seen[row] - first;
    return seen < TOKENS ? seen : TOKENS;
}

template <int BLOCKS>
static __device__ __forceinline__ uint32_t tile_flags(const plan<BLOCKS> *m, const piece &c, uint32_t slot,
                                                      int32_t first)
{
    int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const volatile uint32_t *mask = m->mask[slot];
    int32_t all_see = *(const volatile int32_t *)&c.all_see;
    bool whole = (mask[0] & mask[1]) == 0xFFFFFFFFu && tokens_seen(c, row, first) == TOKENS &&
                 tokens_seen(c, row + 8, first) == TOKENS;
    bool unclean = all_see < first + TOKENS && all_see < c.work.main_count;
    return (__all_sync(0xFFFFFFFFu, whole) ? 0 : TILE_MASKED) | (unclean ? TILE_UNCLEAN : 0);
}

/* Values of a tile that some row does not see, once all four warps have their scores. */
template <int F16>
static __device__ __forceinline__ void clean_tile(const piece &c, uint32_t tile, int32_t first, uint32_t group)
{
    ptx_barrier_sync(BARRIER_GROUP + group, 128);
    clean_rows<F16>(tile, (int)clamped(c.all_see - first, 0, TOKENS), threadIdx.x % 128);
    ptx_fence_async_proxy();
    ptx_barrier_sync(BARRIER_GROUP + group, 128);
}

/* Scores that have arrived are made ready for weights. */
template <int BLOCKS, int F16>
static __device__ __forceinline__ void mend_scores(float s[SCORES], const plan<BLOCKS> *m, const piece &c,
                                                   uint32_t slot, uint32_t tile, int32_t first, uint32_t flags,
                                                   uint32_t group)
{
    if (flags & TILE_UNCLEAN) {
        clean_tile<F16>(c, tile, first, group);
    }
    if (flags & TILE_MASKED) {
        int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        const volatile uint32_t *there = m->mask[slot];
        const uint32_t mask[2] = {there[0], there[1]};
        const int32_t limit[2] = {tokens_seen(c, row, first), tokens_seen(c, row + 8, first)};
        hide_scores(s, mask, limit);
    }
}

/* Another tile of the piece follows the one in a slot, which is there. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t more_after(const plan<BLOCKS> *m, uint32_t slot)
{
    return uniform(*(const volatile uint32_t *)&m->more[slot]);
}

/* What stands before this is carried out before what follows: ptxas moves nothing over a branch, and does not know that
 * no tile has this bit. state: more[] of the slot. */
template <int BLOCKS>
static __device__ __forceinline__ void keep_order(const plan<BLOCKS> *m, uint32_t slot, uint32_t state)
{
    for (uint32_t never = state & STATE_NEVER; never; never = more_after(m, slot)) {
    }
}

/* A group is done with its half of a tile; KEPT: of the last one it still makes use. more: of that tile. */
template <int KEPT> static __device__ __forceinline__ void free_half(uint32_t free, uint32_t more)
{
    if (arrives(ptx_thread() % 32, lane_after(more)) && (!KEPT || more != 0)) {
        ptx_mbarrier_arrive(free);
    }
}

#endif
