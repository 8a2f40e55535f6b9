/* SPDX-License-Identifier: MIT */
/*
 * turns.cuh: the relay's second order (relay.cuh has the frame), for paged lists that more than two blocks attend and
 * for index lists of pools that stay in L2, where tiles come soon enough: both warpgroups own tiles, group 0 even ones,
 * group 1 odd ones. A tile's owner takes its scores and makes its weights, the other group is its fellow; each sums its
 * half of the output dims for all tiles.
 *
 * ORDER  Tile t lies in slot t & 1. t is even; time goes down:
 *   group 0                                        group 1
 *   scores of t, set out behind                    += weights * values of t - 1
 *     += weights * values of t - 1                 frees half 1 of t - 1
 *   frees half 0 of t - 1
 *   weights of t, handed over                      scores of t + 1
 *   += weights * values of t, once scores of       += weights * values of t, and between these products the
 *     t + 1 have been set out                        weights of t + 1, handed over; frees half 1 of t
 *   frees half 0 of t                              += weights * values of t + 1
 *   += weights * values of t + 1
 * Whoever makes weights has the other's products beside. Values of t do not compete with scores of t + 1, for which
 * weights wait. A warpgroup's products are issued no faster than they are carried out, one ahead: what shall happen
 * beside them stands between them.
 *
 * BARRIERS       arrivals   made by                       waited for by     protects
 *   full, free, piece_full, piece_free, q_free: as in relay.cuh; half g of a slot is freed by group g, whoever owns
 *                the tile (of a piece's last slot: border.cuh)
 *   named 1 + s  256        owner                         fellow            weights and heads[] of slot s
 *   named 3 + g  128        group g                       itself            its writes into a tile
 *   named 6      256        group 1: scores of t + 1      group 0           nothing: its values' turn
 *                           have been set out
 * Block 8, where the weights are once the scores are taken, mask and more[] are written again when both halves are
 * free.
 *
 * WEIGHTS go through shared memory by ordinary stores and loads, from registers to registers: a fence for products that
 * read them there took 400 to 800 cycles beside scores, which keep shared memory busy. For the same reason all
 * that is asked about a plain tile is one word, more[].
 *
 * BITS   Weights are made against references that those of the tile before have raised, and sums go from owner to owner
 * with them: what comes out is what leader and follower give, to the bit.
 */
#ifndef FLASHMLA_CUDA_SM90A_TURNS_CUH
#define FLASHMLA_CUDA_SM90A_TURNS_CUH

#include "output.cuh"
#include "ptx/matrix.cuh"
#include "source_pages.cuh"
#include "tile.cuh"

/* PAGES: Q's first 16 HELD_Q dims stay in registers, so that scores read less shared memory, which limits them. */
#define HELD_Q         3
#define HELD_OF(pages) ((pages) ? HELD_Q : 0)

/* Weights of a tile go to the fellow, with what it must know to make its own. Both are ordinary loads and stores: a
 * fence for products that read shared memory takes hundreds of cycles here. */
template <int BLOCKS>
static __device__ __forceinline__ void hand_over(const uint32_t a[SCORES / 2], const softmax_rows &rows,
                                                 plan<BLOCKS> *m, uint32_t slot)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if (BLOCKS == 9) {
        ptx_barrier_sync(BARRIER_GROUP + slot, 128); /* all four warps have read the rope dims */
    }
    const float2 head = {rows.reference[0], rows.reference[1]}, sums = {rows.sum[0], rows.sum[1]};
    m->heads[slot][0][threadIdx.x % 128] = head;
    m->heads[slot][1][threadIdx.x % 128] = sums;
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        ptx_stmatrix_x4(view_of<BLOCKS>(slot).weights_at + chunk_offset(warp * 16 + lane % 16, 2 * k + lane / 16),
                        a + 4 * k);
    }
    ptx_barrier_arrive(BARRIER_WEIGHTS + slot, 256);
}

/* The fellow takes those of 16 tokens, the k-th, once it has taken the head. */
template <int BLOCKS> static __device__ __forceinline__ void take_weights(uint32_t a[4], uint32_t slot, int k)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    ptx_ldmatrix_x4(a, view_of<BLOCKS>(slot).weights_at + chunk_offset(warp * 16 + lane % 16, 2 * k + lane / 16));
}

/* Returns whether what was summed so far must be multiplied by factor[]. */
template <int BLOCKS>
static __device__ __forceinline__ bool take_head(softmax_rows &rows, const plan<BLOCKS> *m, uint32_t slot,
                                                 float factor[2])
{
    ptx_barrier_sync(BARRIER_WEIGHTS + slot, 256);
    const float2 head = m->heads[slot][0][threadIdx.x % 128], sums = m->heads[slot][1][threadIdx.x % 128];
    rows.sum[0] = sums.x;
    rows.sum[1] = sums.y;
    if (!__any_sync(0xFFFFFFFFu, rows.reference[0] != head.x || rows.reference[1] != head.y)) {
        return false;
    }
    factor[0] = shrink(rows.reference[0], head.x);
    factor[1] = shrink(rows.reference[1], head.y);
    rows.reference[0] = head.x;
    rows.reference[1] = head.y;
    return true;
}

/* Everything about the fellow's part in a tile, but for the wait. */
template <int BLOCKS, int F16>
static __device__ __forceinline__ void start_fellows(float o[128], uint32_t a[SCORES / 2], softmax_rows &rows,
                                                     const plan<BLOCKS> *m, uint32_t slot, uint32_t values)
{
    float factor[2];
    bool moved = take_head(rows, m, slot, factor);
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        take_weights<BLOCKS>(a + 4 * k, slot, k);
    }
    if (moved) {
        rescale(o, factor); /* seldom */
    }
    start_values_rs<F16, 1>(o, a, values);
}

/* A group's half of the other's tile is there, and more[]. */
template <int BLOCKS>
static __device__ __forceinline__ void await_half(const plan<BLOCKS> *m, uint32_t slot, uint32_t parity, int half)
{
    const uint32_t full = ptx_shared_address(m->full[slot]);
    ptx_mbarrier_wait(full + 2 * half * 8, parity);
    if (half == 0) {
        ptx_mbarrier_wait(full + 8, parity);
    }
    ptx_mbarrier_wait(full + (PORTIONS - 1) * 8, parity);
}

/* Values that were set out have been summed; half `half` of the slot is given back. seen: loaded from what
 * belongs to the slot, last. */
template <int BLOCKS>
static __device__ __forceinline__ void finish_values(float o[128], plan<BLOCKS> *m, uint32_t slot, int half,
                                                     uint32_t seen)
{
    ptx_wgmma_wait<0>();
    ptx_wgmma_hold<128>(o);
    free_half<1>(ptx_shared_address(&m->free[slot][half]), seen);
}

/* Scores of a tile set out. Returns its state, which is asked for ahead of the last products. BEGUN: the first portion
 * has been. */
template <int BLOCKS, int F16, int HELD, int BEGUN>
static __device__ __forceinline__ uint32_t start_tile(float s[SCORES], uint32_t q, const uint32_t *held,
                                                      const tile_view &v, plan<BLOCKS> *m, uint32_t slot,
                                                      uint32_t parity)
{
    const uint32_t full = ptx_shared_address(m->full[slot]);
    start_scores<BLOCKS, F16, BEGUN, PORTIONS - 1, HELD>(s, q, v.k, full, parity, held);
    ptx_mbarrier_wait(full + (PORTIONS - 1) * 8, parity);
    uint32_t state = *(const volatile uint32_t *)&m->more[slot];
    start_scores<BLOCKS, F16, PORTIONS - 1, PORTIONS>(s, q, v.k, full, parity);
    return state;
}

static __device__ __forceinline__ bool all_say(uint32_t state, uint32_t flag)
{
    return __any_sync(0xFFFFFFFFu, (state & flag) != 0);
}

/* Its scores have arrived. */
template <int BLOCKS, int F16>
static __device__ __forceinline__ void finish_scores(float s[SCORES], const plan<BLOCKS> *m, const piece &c,
                                                     uint32_t slot, const tile_view &v, int32_t first, uint32_t state)
{
    ptx_wgmma_wait<0>();
    ptx_wgmma_hold<SCORES>(s);
    if (all_say(state, STATE_MASKED | STATE_UNCLEAN)) {
        uint32_t flags =
            (all_say(state, STATE_MASKED) ? TILE_MASKED : 0) | (all_say(state, STATE_UNCLEAN) ? TILE_UNCLEAN : 0);
        mend_scores<BLOCKS, F16>(s, m, c, slot, v.at, first, flags, slot);
    }
}

/* Group 0's own tile, which begins at `first` of the list, to its values. BEHIND: those of the tile before are on their
 * way. Returns whether another tile follows. */
template <int BLOCKS, int F16, int PAGES, int BEHIND>
static __device__ __forceinline__ bool take_own(float o[128], softmax_rows &rows, float top[2], uint32_t q,
                                                const uint32_t *held, plan<BLOCKS> *m, const fmlac_mqa &p,
                                                const piece &c, uint32_t parity, int32_t first)
{
    float s[SCORES], factor[2];
    uint32_t a[SCORES / 2];
    const tile_view own = view_of<BLOCKS>(0);
    const uint32_t full = ptx_shared_address(m->full[0]);
    if (PAGES) {
        mend_tail<BLOCKS>(own, c, full, parity, first, 0);
    }
    start_scores<BLOCKS, F16, 0, 1, HELD_OF(PAGES)>(s, q, own.k, full, parity, held);
    if (BEHIND) {
        ptx_wgmma_wait<1>();
        ptx_wgmma_hold<128>(o);
        arrive_warp(ptx_shared_address(&m->free[1][0])); /* more[] of that slot let the loop go on */
    }
    uint32_t state = start_tile<BLOCKS, F16, HELD_OF(PAGES), 1>(s, q, held, own, m, 0, parity);
    bool more = all_say(state, STATE_MORE);
    finish_scores<BLOCKS, F16>(s, m, c, 0, own, first, state);
    if (weigh_scores<F16>(s, rows, a, factor, !BEHIND) && BEHIND) {
        rescale(o, factor); /* seldom */
    }
    hand_over(a, rows, m, 0);
    if (more) {
        ptx_barrier_sync(BARRIER_SCORES, 256);
    }
    start_values_rs<F16, 1>(o, a, own.values[0]);
    if (p.max_logits.data) {
        raise_max(s, top);
    }
    finish_values<BLOCKS>(o, m, 0, 0, more);
    return more;
}

/* What a warpgroup does with one piece that has tiles, here and below: leaves references, sums and its half of the
 * output, unnormalised, and returns the uses of slots after it. */
template <int BLOCKS, int F16, int PAGES>
static __device__ __forceinline__ uint32_t take_even(float o[128], softmax_rows &rows, float top[2], uint32_t q,
                                                     const uint32_t *held, plan<BLOCKS> *m, const fmlac_mqa &p,
                                                     const piece &c, slot_uses uses)
{
    uint32_t a[SCORES / 2];
    int32_t first = c.begin * TOKENS;
    const tile_view other = view_of<BLOCKS>(1);
    bool more = take_own<BLOCKS, F16, PAGES, 0>(o, rows, top, q, held, m, p, c, uses & 1, first);
#pragma unroll 1
    while (more) {
        await_half(m, 1, uses >> 1, 0);
        start_fellows<BLOCKS, F16>(o, a, rows, m, 1, other.values[0]);
        first += 2 * TOKENS;
        uses ^= 3;
        if (!all_say(*(const volatile uint32_t *)&m->more[1], STATE_MORE)) {
            finish_values<BLOCKS>(o, m, 1, 0, 0);
            return uses;
        }
        more = take_own<BLOCKS, F16, PAGES, 1>(o, rows, top, q, held, m, p, c, uses & 1, first);
    }
    return uses ^ 1;
}

template <int BLOCKS, int F16, int PAGES>
static __device__ __forceinline__ uint32_t take_odd(float o[128], softmax_rows &rows, float top[2], uint32_t q,
                                                    const uint32_t *held, plan<BLOCKS> *m, const fmlac_mqa &p,
                                                    const piece &c, slot_uses uses)
{
    float s[SCORES], factor[2];
    uint32_t a[SCORES / 2], b[2][4];
    int32_t first = c.begin * TOKENS + TOKENS;
    const tile_view own = view_of<BLOCKS>(1), other = view_of<BLOCKS>(0);
    const uint32_t full = ptx_shared_address(m->full[1]);
#pragma unroll 1
    for (;;) {
        await_half(m, 0, uses & 1, 1);
        if (!all_say(*(const volatile uint32_t *)&m->more[0], STATE_MORE)) {
            break;
        }
        const uint32_t parity = uses >> 1;
        if (PAGES) {
            mend_tail<BLOCKS>(own, c, full, parity, first, 1);
        }
        uint32_t state = start_tile<BLOCKS, F16, HELD_OF(PAGES), 0>(s, q, held, own, m, 1, parity);
        ptx_barrier_arrive(BARRIER_SCORES, 256);
        bool moved = take_head(rows, m, 0, factor);
        take_weights<BLOCKS>(b[0], 0, 0);
        take_weights<BLOCKS>(b[1], 0, 1);
        finish_scores<BLOCKS, F16>(s, m, c, 1, own, first, state);
        if (moved) {
            rescale(o, factor); /* seldom */
        }
        bool more = all_say(state, STATE_MORE), high[2];
        float sum[2] = {0.0f, 0.0f}, base[2] = {rows.reference[0], rows.reference[1]};
        begin_values(o);
#pragma unroll
        for (int k = 0; k < TOKENS / 16; k++) {
            if (k > 0) {
                keep_order(m, 1, state);
            }
            ptx_wgmma_n256_rs<F16>(o, b[k % 2], ptx_wgmma_advance(other.values[1], k * 2048), 1);
            ptx_wgmma_commit();
            keep_order(m, 0, state);
            if (k == 1 || k == 2) { /* the product before has been carried out: so are its weights' registers free */
                ptx_wgmma_wait<1>();
                take_weights<BLOCKS>(b[(k + 1) % 2], 0, k + 1);
            }
            ptx_wgmma_hold<SCORES / (TOKENS / 16)>(s + k * (SCORES / (TOKENS / 16)));
            weights_part<F16, 0>(s, rows.scale, base, a, sum, k);
        }
        find_high(sum, base, high);
        if (__any_sync(0xFFFFFFFFu, high[0] || high[1])) { /* seldom */
            raise_references(s, rows, high, base, factor);
            weights_against<F16, 1>(s, rows.scale, base, a, sum);
            ptx_wgmma_wait<0>();
            ptx_wgmma_hold<128>(o);
            rescale(o, factor);
        }
        rows.sum[0] += sum[0];
        rows.sum[1] += sum[1];
        begin_values(o);
        values_rs<F16, 1>(o, a, own.values[1], 0);
        ptx_wgmma_commit();
        hand_over(a, rows, m, 1);
        ptx_wgmma_wait<1>(); /* values of t */
        arrive_warp(ptx_shared_address(&m->free[0][1]));
#pragma unroll
        for (int k = 1; k < TOKENS / 16; k++) {
            values_rs<F16, 1>(o, a, own.values[1], k);
        }
        ptx_wgmma_commit();
        if (p.max_logits.data) {
            raise_max(s, top);
        }
        finish_values<BLOCKS>(o, m, 1, 1, more);
        first += 2 * TOKENS;
        uses ^= 3;
        if (!more) {
            return uses;
        }
    }
    start_fellows<BLOCKS, F16>(o, a, rows, m, 0, other.values[1]); /* the last tile is the other's */
    finish_values<BLOCKS>(o, m, 0, 1, 0);
    return uses ^ 1;
}

/* Q's first dims of a warp's 16 rows, as A fragments. */
template <int HELD, int BLOCKS> static __device__ __forceinline__ void hold_q(uint32_t *held, const plan<BLOCKS> *m)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        ptx_ldmatrix_x4(held + 4 * k,
                        ptx_shared_address(m->q) + query_offset(warp * 16 + lane % 16, 2 * k + lane / 16));
    }
}

/* A piece that has tiles, by both groups; returns the uses after it. */
template <int BLOCKS, int F16, int PAGES>
static __device__ __forceinline__ slot_uses take_turns(float o[128], softmax_rows &rows, uint32_t q, plan<BLOCKS> *m,
                                                       const fmlac_mqa &p, const piece &c, slot_uses uses, int group)
{
    float top[2] = {-FMLAC_INFINITY, -FMLAC_INFINITY};
    uint32_t held[4 * HELD_Q];
    hold_q<HELD_OF(PAGES)>(held, m);
    uses = group == 0 ? take_even<BLOCKS, F16, PAGES>(o, rows, top, q, held, m, p, c, uses)
                      : take_odd<BLOCKS, F16, PAGES>(o, rows, top, q, held, m, p, c, uses);
    if (p.max_logits.data) { /* group 0 has maxima of all tiles */
        float2 *others = &m->heads[0][0][threadIdx.x % 128];
        if (group == 1) {
            others->x = top[0];
            others->y = top[1];
        }
        ptx_barrier_sync(BARRIER_MMA, 256);
        rows.max[0] = fmaxf(top[0], others->x) * rows.scale;
        rows.max[1] = fmaxf(top[1], others->y) * rows.scale;
    }
    return uses;
}

#endif
