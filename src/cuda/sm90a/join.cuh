/* SPDX-License-Identifier: MIT */
/*
 * join.cuh: the results of a list that was cut, joined by the blocks that have them, so that no kernel need follow.
 *
 * Pieces 0 .. n - 1 of a list meet in rounds, as in a tournament: in round r, what holds pieces a .. a + 2^r - 1 meets
 * what holds the next 2^r, if there are any. Who comes first leaves its result in the workspace and is done with the
 * list; who comes second adds it to its own and goes on to the next round; who has them all stores the output. So
 * nobody waits for another block, whatever the order in which blocks run and however many of them fit the device. A
 * row's bits do not depend on who came first: of u x + v y both products are rounded, and rounds follow from the list's
 * cut alone.
 *
 * A list's first piece is the last of its part, its other pieces are the first of theirs: where lists have few pieces,
 * the others have been there for long when the first is done, and each result is written and read at most once.
 *
 * A meeting has a flag, that of the block with the first piece of its latter half: 0, and 1 once somebody was there.
 * The plan kernel clears all flags in each call, whatever the workspace holds; who raises or reads one waits for it
 * first, which is over by then. A result lies as registers have it, not divided by its sum, so that whole lines go out
 * and come in; with it lie each row's reference, sum and maximum.
 */
#ifndef FLASHMLA_CUDA_SM90A_JOIN_CUH
#define FLASHMLA_CUDA_SM90A_JOIN_CUH

#include "ptx/grid.cuh"
#include "ptx/tma.cuh"
#include "softmax.cuh"

#define RESULT_FLOATS (ROWS * OUT_COLUMNS)
#define WARP_FLOATS   (RESULT_FLOATS / 8)   /* of a warp */
#define AHEAD         (TOKENS < 64 ? 4 : 8) /* loads of a thread that are under way together: registers */

/* Where the result that begins with a piece is left: block's first piece at 2 block, its last one behind it. */
static __device__ __forceinline__ int64_t place_of(const fmlac_cut &cut, const piece &c, int32_t index)
{
    return ((int64_t)c.head + index * (int32_t)cut.columns) * 2 + (index == 0);
}

/* A thread's share of a result: 16 bytes in each of 32 runs of its warp. */
static __device__ __forceinline__ float *share_of(const fmlac_cut &cut, int64_t place, int half)
{
    return cut.partial + place * RESULT_FLOATS + half * (RESULT_FLOATS / 2) + ptx_thread() % 128 / 32 * WARP_FLOATS +
           ptx_thread() % 32 * 4;
}

static __device__ __forceinline__ float4 *scalars_of(const fmlac_cut &cut, int64_t place)
{
    return (float4 *)cut.partial_scalar + place * ROWS;
}

/* What a list's first piece will most likely meet, since it is the last of its block: by one thread to L2, ahead of
 * time. If nobody has left it yet, nothing is wrong. */
static __device__ __forceinline__ void prefetch_result(const fmlac_cut &cut, const piece &c)
{
    if (c.pieces > 1 && c.index == 0) {
        const int64_t place = place_of(cut, c, 1);
        const float *from = cut.partial + place * RESULT_FLOATS;
        const uint32_t bytes = (uint32_t)(c.work.rows + 15) / 16 * WARP_FLOATS * 4;
        ptx_bulk_prefetch_l2(from, bytes);
        ptx_bulk_prefetch_l2(from + RESULT_FLOATS / 2, bytes);
        ptx_bulk_prefetch_l2(scalars_of(cut, place), ROWS * 16);
    }
}

/* Whether a warp has rows of a piece: the others leave and add nothing. */
static __device__ __forceinline__ bool has_rows(const piece &c)
{
    return !MAPPED_Q || uniform(ptx_thread() / 32 % 4) * 16 < uniform((uint32_t)c.work.rows);
}

template <int BLOCKS>
static __device__ __forceinline__ void leave_result(const fmlac_cut &cut, const piece &c, const plan<BLOCKS> *m,
                                                    int64_t place, const float o[128], int half)
{
    int row = (int)ptx_thread();
    float *to = share_of(cut, place, half);
    if (has_rows(c)) {
#pragma unroll
        for (int j = 0; j < 32; j++) {
            float4 four = {o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
            *(float4 *)(to + j * 128) = four;
        }
    }
    if (row < ROWS) {
        float4 scalars = {m->last[row], m->sum[row], m->max[row], 0.0f};
        scalars_of(cut, place)[row] = scalars;
    }
}

/* u x + v y that does not depend on which of them is whose. */
static __device__ __forceinline__ float weighted(float u, float x, float v, float y)
{
    return __fadd_rn(__fmul_rn(u, x), __fmul_rn(v, y));
}

/* Of the next loads of a thread. */
static __device__ __forceinline__ void add_some(float o[4 * AHEAD], const float *from, const float u[2],
                                                const float v[2])
{
    float4 x[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        x[j] = *(const float4 *)(from + j * 128);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
        o[4 * j] = weighted(u[0], o[4 * j], v[0], x[j].x);
        o[4 * j + 1] = weighted(u[0], o[4 * j + 1], v[0], x[j].y);
        o[4 * j + 2] = weighted(u[1], o[4 * j + 2], v[1], x[j].z);
        o[4 * j + 3] = weighted(u[1], o[4 * j + 3], v[1], x[j].w);
    }
}

/* References of weights in slots are over: their place holds the factors of both results. */
template <int BLOCKS>
static __device__ __forceinline__ void add_result(const fmlac_cut &cut, const piece &c, plan<BLOCKS> *m, int64_t place,
                                                  float o[128], int half)
{
    int thread = (int)ptx_thread(), row = thread % 128 / 32 * 16 + thread % 32 / 4;
    if (thread < ROWS) {
        float4 other = scalars_of(cut, place)[thread];
        float own = m->last[thread], top = fmaxf(own, other.x), u = shrink(own, top), v = shrink(other.x, top);
        m->last[thread] = top;
        m->sum[thread] = weighted(u, m->sum[thread], v, other.y);
        m->max[thread] = fmaxf(m->max[thread], other.z);
        m->reference[0][thread] = u;
        m->reference[1][thread] = v;
    }
    ptx_barrier_sync(BARRIER_MMA, 256);
    const float u[2] = {m->reference[0][row], m->reference[0][row + 8]};
    const float v[2] = {m->reference[1][row], m->reference[1][row + 8]};
    const float *from = share_of(cut, place, half);
#pragma unroll 1
    for (uint32_t i = 0, end = has_rows(c) ? 128 : 0; i < end; i += 4 * AHEAD) {
        uint32_t at =
            uniform(i); /* not known to compilers: each step stays a block, no loads of the next are mixed in */
#pragma unroll
        for (uint32_t k = 0; k < 128; k += 4 * AHEAD) {
            if (at == k) {
                add_some(o + k, from + k * 32, u, v);
            }
        }
    }
}

/* Whether the other side of a meeting has been there; if not, the own result is left for it. */
template <int BLOCKS>
static __device__ __forceinline__ bool comes_second(const fmlac_cut &cut, const piece &c, plan<BLOCKS> *m,
                                                    uint32_t *flag, int64_t place, const float o[128], int half)
{
    const volatile uint32_t *met = &m->met;
    if (ptx_thread() == 0) {
        ptx_grid_wait(); /* the flags have been cleared */
        m->met = ptx_load_acquire(flag);
    }
    ptx_barrier_sync(BARRIER_MMA, 256);
    if (uniform(*met)) {
        return true;
    }
    leave_result(cut, c, m, place, o, half);
    ptx_barrier_sync(BARRIER_MMA, 256);
    if (ptx_thread() == 0) {
        m->met = ptx_raise(flag);
    }
    ptx_barrier_sync(BARRIER_MMA, 256);
    return uniform(*met) != 0;
}

/* A piece's result with what is there of its list; false: somebody else has got, or will get, the rest. Sums,
 * references and maxima are in shared memory. By both warpgroups, of which each has a half of the output dims. */
template <int BLOCKS>
static __device__ __forceinline__ bool join_pieces(const fmlac_cut &cut, const piece &c, float o[128], plan<BLOCKS> *m,
                                                   int half)
{
#pragma unroll 1
    for (int32_t width = 1; width < c.pieces; width *= 2) {
        int32_t own = c.index & -width, latter = own | width;
        if (latter >= c.pieces) {
            continue; /* nobody there */
        }
        uint32_t *flag = cut.flags + c.head + latter * (int32_t)cut.columns;
        if (!comes_second(cut, c, m, flag, place_of(cut, c, own), o, half)) {
            return false;
        }
        add_result(cut, c, m, place_of(cut, c, own ^ width), o, half);
    }
    return true;
}

#endif
