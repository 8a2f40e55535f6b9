/* SPDX-License-Identifier: MIT */
/*
 * few_output.cuh: the summer's epilogue (few.cuh): 128 threads that hold all output dims of few rows, transposed:
 * o[8][..] are blocks of 64 dims, of which warp w has dims 16w + g and 16w + g + 8, and heads as the scorer's threads
 * have them.
 * Output and partial results go out through shared memory, 128 dims of all rows at a time. Results that are joined
 * (join.cuh) lie as registers have them.
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_OUTPUT_CUH
#define FLASHMLA_CUDA_SM90A_FEW_OUTPUT_CUH

#include "few_weights.cuh"
#include "output.cuh"

#define FEW_OUTPUT  (8 * FEW_SCORES) /* accumulators of a thread */
#define FEW_BARRIER (BARRIER_GROUP + 1)
#define FEW_AHEAD   32 /* floats of a thread whose loads are under way together */

/* Heads' factors. */
static __device__ __forceinline__ void few_rescale(float o[FEW_OUTPUT], const float factor[FEW_COLUMNS])
{
#pragma unroll
    for (int i = 0; i < FEW_OUTPUT; i++) {
        o[i] *= factor[i % FEW_SCORES / 4 * 2 + i % 2];
    }
}

/* A thread's share of a result that is joined. */
static __device__ __forceinline__ float *few_share(const fmlac_cut &cut, int64_t place)
{
    return cut.partial + place * RESULT_FLOATS + ptx_thread() % 128 * 4;
}

/* Whether the other side of a meeting has been there; if not, the own result is left for it. */
template <int BLOCKS>
static __device__ __forceinline__ bool few_second(const fmlac_cut &cut, plan<BLOCKS> *m, uint32_t *flag, int64_t place,
                                                  const float o[FEW_OUTPUT])
{
    const volatile uint32_t *met = &m->met;
    const int thread = (int)ptx_thread() % 128;
    if (thread == 0) {
        ptx_grid_wait(); /* the flags have been cleared */
        m->met = ptx_load_acquire(flag);
    }
    ptx_barrier_sync(FEW_BARRIER, 128);
    if (uniform(*met)) {
        return true;
    }
    float *to = few_share(cut, place);
#pragma unroll
    for (int j = 0; j < FEW_OUTPUT / 4; j++) {
        float4 four = {o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
        *(float4 *)(to + j * 512) = four;
    }
    if (thread < ROWS) {
        float4 scalars = {m->last[thread], m->sum[thread], m->max[thread], 0.0f};
        scalars_of(cut, place)[thread] = scalars;
    }
    ptx_barrier_sync(FEW_BARRIER, 128);
    if (thread == 0) {
        m->met = ptx_raise(flag);
    }
    ptx_barrier_sync(FEW_BARRIER, 128);
    return uniform(*met) != 0;
}

/* Of the next loads of a thread. */
static __device__ __forceinline__ void few_add_some(float o[FEW_AHEAD], const float *from, const float u[FEW_COLUMNS],
                                                    const float v[FEW_COLUMNS])
{
    float4 x[FEW_AHEAD / 4];
#pragma unroll
    for (int j = 0; j < FEW_AHEAD / 4; j++) {
        x[j] = *(const float4 *)(from + j * 512);
    }
#pragma unroll
    for (int j = 0; j < FEW_AHEAD / 4; j++) {
        const int c = j % (FEW_SCORES / 4) * 2;
        o[4 * j] = weighted(u[c], o[4 * j], v[c], x[j].x);
        o[4 * j + 1] = weighted(u[c + 1], o[4 * j + 1], v[c + 1], x[j].y);
        o[4 * j + 2] = weighted(u[c], o[4 * j + 2], v[c], x[j].z);
        o[4 * j + 3] = weighted(u[c + 1], o[4 * j + 3], v[c + 1], x[j].w);
    }
}

/* Adds what lies at a place. */
template <int BLOCKS>
static __device__ __forceinline__ void few_add(const fmlac_cut &cut, plan<BLOCKS> *m, int64_t place,
                                               float o[FEW_OUTPUT])
{
    float *own_factor = (float *)m->stage, *other_factor = own_factor + ROWS;
    const int thread = (int)ptx_thread() % 128;
    if (thread < ROWS) {
        float4 other = scalars_of(cut, place)[thread];
        float own = m->last[thread], top = fmaxf(own, other.x), u = shrink(own, top), v = shrink(other.x, top);
        m->last[thread] = top;
        m->sum[thread] = weighted(u, m->sum[thread], v, other.y);
        m->max[thread] = fmaxf(m->max[thread], other.z);
        own_factor[thread] = u;
        other_factor[thread] = v;
    }
    ptx_barrier_sync(FEW_BARRIER, 128);
    float u[FEW_COLUMNS], v[FEW_COLUMNS];
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        u[c] = own_factor[few_head(c)];
        v[c] = other_factor[few_head(c)];
    }
    const float *from = few_share(cut, place);
#pragma unroll 1
    for (uint32_t i = 0; i < FEW_OUTPUT; i += FEW_AHEAD) {
        uint32_t at = uniform(i); /* not known to compilers, as in add_result */
#pragma unroll
        for (uint32_t k = 0; k < FEW_OUTPUT; k += FEW_AHEAD) {
            if (at == k) {
                few_add_some(o + k, from + k * 128, u, v);
            }
        }
    }
    ptx_barrier_sync(FEW_BARRIER, 128); /* nobody reads these factors any more */
}

/* As join_pieces (join.cuh). */
template <int BLOCKS>
static __device__ __forceinline__ bool few_join(const fmlac_cut &cut, const piece &c, float o[FEW_OUTPUT],
                                                plan<BLOCKS> *m)
{
#pragma unroll 1
    for (int32_t width = 1; width < c.pieces; width *= 2) {
        int32_t own = c.index & -width, latter = own | width;
        if (latter >= c.pieces) {
            continue; /* nobody there */
        }
        uint32_t *flag = cut.flags + c.head + latter * (int32_t)cut.columns;
        if (!few_second(cut, m, flag, place_of(cut, c, own), o)) {
            return false;
        }
        few_add(cut, m, place_of(cut, c, own ^ width), o);
    }
    return true;
}

/* Sums, references and maxima of a piece; none of an empty one. parity: of its number. */
template <int BLOCKS>
static __device__ __forceinline__ void few_ends(plan<BLOCKS> *m, uint32_t parity, bool empty)
{
    const int row = (int)ptx_thread() % 128;
    if (row < ROWS) {
        const float(*sums)[ROWS] = m->sums[parity], (*maxima)[ROWS] = m->maxima[parity];
        float sum = (sums[0][row] + sums[1][row]) + (sums[2][row] + sums[3][row]);
        float max = fmaxf(fmaxf(maxima[0][row], maxima[1][row]), fmaxf(maxima[2][row], maxima[3][row]));
        m->sum[row] = empty ? 0.0f : sum;
        m->last[row] = empty ? -FMLAC_INFINITY : m->ends[parity][row];
        m->max[row] = empty ? -FMLAC_INFINITY : max;
    }
    ptx_barrier_sync(FEW_BARRIER, 128);
}

/* Where a head's dims lie in the stage: neither who stores nor who loads meets a bank twice. */
static __device__ __forceinline__ uint32_t stage_offset(uint32_t head, uint32_t dim)
{
    return head * 512 + ((dim * 4) ^ (head / 2 % 4 * 32));
}

/* 128 dims of all heads into the stage. */
static __device__ __forceinline__ void few_stage(const float o[2 * FEW_SCORES], uint32_t stage)
{
    const uint32_t thread = ptx_thread() % 128, dim = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * FEW_SCORES; i++) {
        const uint32_t head = (uint32_t)few_head(i % FEW_SCORES / 4 * 2 + i % 2);
        ptx_store_shared_u32(stage + stage_offset(head, i / FEW_SCORES * 64 + i / 2 % 2 * 8 + dim),
                             __float_as_uint(o[i]));
    }
}

/* Ends a piece. */
template <int BLOCKS>
static __device__ __forceinline__ void few_store(const fmlac_mqa &p, const piece &c, float o[FEW_OUTPUT],
                                                 plan<BLOCKS> *m)
{
    const int thread = (int)ptx_thread() % 128, warp = thread / 32, lane = thread % 32;
    if (uniform(c.pieces) > 1 && !few_join(p.cut, c, o, m)) {
        return;
    }
    if (thread < ROWS) {
        store_scalars(p, c, thread, m->last[thread], m->max[thread], m->sum[thread]);
        m->sink[thread] = row_factor(m->last[thread], m->sum[thread], m->sink[thread]);
    }
    const uint32_t stage = ptx_shared_address(m->stage);
    const int rows = (int)uniform((uint32_t)c.work.rows);
    const bool partial = uniform((uint32_t)(c.place >> 32)) == 0; /* -1: none */
#pragma unroll 1
    for (uint32_t step = 0; step < 4; step++) {
        const uint32_t i = uniform(step); /* not known to compilers: the way out is there once */
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            if (i == k) {
                few_stage(o + k * 2 * FEW_SCORES, stage);
            }
        }
        ptx_barrier_sync(FEW_BARRIER, 128);
#pragma unroll 1
        for (int row = warp; row < rows; row += 4) {
            uint32_t x[4];
            const float f = m->sink[row];
            ptx_load_shared_128(x, stage + stage_offset((uint32_t)row, (uint32_t)lane * 4));
            float4 four = {__uint_as_float(x[0]) * f, __uint_as_float(x[1]) * f, __uint_as_float(x[2]) * f,
                           __uint_as_float(x[3]) * f};
            const int column = (int)i * 128 + lane * 4;
            if (partial) {
                *(float4 *)(p.cut.partial + (c.place * p.tile_rows + row) * OUT_COLUMNS + column) = four;
            } else {
                store_four(p.out, piece_row(p, p.out, c, row), column, p.d_v, four);
            }
        }
        ptx_barrier_sync(FEW_BARRIER, 128);
    }
}

#endif
