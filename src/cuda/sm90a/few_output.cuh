/* SPDX-License-Identifier: MIT */
/*
 * few_output.cuh: what happens where a piece of few rows ends (few.cuh). The team that had its last strip joins what
 * the others leave in shared memory, one after another, and stores the result; the others go on with the next piece, of
 * which it has the third strip.
 *
 * A thread has rows g and g + 8 and dims 8q .. 8q + 7 of each of its warp's half blocks: o[half block][n][4] are, of
 * row g, dims 8q + n and 8q + 4 + n, then those of row g + 8. Results that are joined with other blocks' (join.cuh) lie
 * as registers have them.
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_OUTPUT_CUH
#define FLASHMLA_CUDA_SM90A_FEW_OUTPUT_CUH

#include "few_tokens.cuh"
#include "few_weights.cuh"
#include "output.cuh"

/* A team, in a piece: `own` of the places for two pieces' ends. */
typedef struct team_place {
    uint32_t team, own;
} team_place;

/* A thread's two rows' factors. */
static __device__ __forceinline__ void few_rescale(float o[FEW_OUTPUT], const float factor[2])
{
#pragma unroll
    for (int i = 0; i < FEW_OUTPUT; i++) {
        o[i] *= factor[i / 2 % 2];
    }
}

/* References, sums and maxima of a team's strips. */
template <int BLOCKS>
static __device__ __forceinline__ void write_ends(const few_rows &r, const float scale[2], few_plan<BLOCKS> *m,
                                                  uint32_t team, row_ends *to)
{
    const uint32_t thread = ptx_thread() % TEAM_THREADS, warp = thread / 32, lane = thread % 32;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t row = lane / 4 + 8 * h;
        float sum = r.sum[h], max = m->max[h][ptx_thread()];
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
            max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, step));
        }
        if (lane % 4 == 0) {
            m->sums[team][warp][row] = sum;
            m->maxima[team][warp][row] = max * scale[h];
            if (warp == 0) {
                to->reference[row] = r.reference[h];
            }
        }
    }
    team_sync(team);
    if (thread < ROWS) {
        const float(*sums)[ROWS] = m->sums[team], (*maxima)[ROWS] = m->maxima[team];
        to->sum[thread] = (sums[0][thread] + sums[1][thread]) + (sums[2][thread] + sums[3][thread]);
        to->max[thread] =
            fmaxf(fmaxf(maxima[0][thread], maxima[1][thread]), fmaxf(maxima[2][thread], maxima[3][thread]));
    }
    team_sync(team); /* a piece without tokens may follow at once */
}

/* A team that does not join leaves what it has. turn: of the piece's teams; i: the piece's number, modulo 4. */
template <int BLOCKS>
static __device__ __forceinline__ void leave_strips(const float o[FEW_OUTPUT], const few_rows &r, const float scale[2],
                                                    few_plan<BLOCKS> *m, uint32_t team, uint32_t turn, uint32_t i)
{
#pragma unroll
    for (uint32_t half = 0; half < 2; half++) {
        const uint32_t step = 2 * turn + half;
        if (step > 0) { /* what was left there before has been read */
            ptx_mbarrier_wait(ptx_shared_address(&m->left_free[i & 1][step - 1]), use_parity(i));
        } else { /* before the first piece as if somebody had */
            ptx_mbarrier_wait(ptx_shared_address(&m->left_free[(i & 1) ^ 1][LEFT_STEPS - 1]), use_parity(i - 1));
        }
        if (half == 0) {
            write_ends(r, scale, m, team, &m->left_ends);
        }
#pragma unroll
        for (int j = 0; j < LEFT_FLOATS / 4; j++) {
            const float *x = o + half * LEFT_FLOATS + 4 * j;
            float4 four = {x[0], x[1], x[2], x[3]};
            m->left[j][ptx_thread() % TEAM_THREADS] = four;
        }
        arrive_together(ptx_shared_address(&m->left_full[i & 1][step]));
    }
}

/* Own ends become those of both; factors of both. By as many threads as there are rows. */
static __device__ __forceinline__ void join_ends(row_ends *own, float *own_factor, float *other_factor, float reference,
                                                 float sum, float max)
{
    const uint32_t row = ptx_thread() % TEAM_THREADS;
    const float old = own->reference[row], top = fmaxf(old, reference), u = shrink(old, top),
                v = shrink(reference, top);
    own->reference[row] = top;
    own->sum[row] = weighted(u, own->sum[row], v, sum);
    own->max[row] = fmaxf(own->max[row], max);
    own_factor[row] = u;
    other_factor[row] = v;
}

/* Elements 4j .. 4j + 3 of both. */
static __device__ __forceinline__ void add_four(float o[4], const float4 &x, const float u[2], const float v[2])
{
    o[0] = weighted(u[0], o[0], v[0], x.x);
    o[1] = weighted(u[0], o[1], v[0], x.y);
    o[2] = weighted(u[1], o[2], v[1], x.z);
    o[3] = weighted(u[1], o[3], v[1], x.w);
}

/* Adds to half of a thread's output its share of another result: sixteen bytes in each of a run of TEAM_THREADS.
 * Returns a word of what was loaded last. */
static __device__ __forceinline__ uint32_t add_half(float o[FEW_OUTPUT], uint32_t half, const float *from,
                                                    const float u[2], const float v[2])
{
    const uint32_t at = uniform(half); /* not known to compilers, as in add_result */
    float4 x[LEFT_FLOATS / 4];
#pragma unroll
    for (int j = 0; j < LEFT_FLOATS / 4; j++) {
        x[j] = *(const float4 *)(from + 4 * j * TEAM_THREADS);
    }
#pragma unroll
    for (uint32_t k = 0; k < 2; k++) {
        if (at == k) {
#pragma unroll
            for (int j = 0; j < LEFT_FLOATS / 4; j++) {
                add_four(o + k * LEFT_FLOATS + 4 * j, x[j], u, v);
            }
        }
    }
    return __float_as_uint(x[LEFT_FLOATS / 4 - 1].w);
}

template <int BLOCKS>
static __device__ __forceinline__ void read_factors(const few_plan<BLOCKS> *m, uint32_t own, float u[2], float v[2])
{
    const uint32_t row = ptx_thread() % 32 / 4;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        u[h] = m->factor[own][0][row + 8 * h];
        v[h] = m->factor[own][1][row + 8 * h];
    }
}

/* What the other teams leave is added to one's own. */
template <int BLOCKS>
static __device__ __forceinline__ void join_strips(float o[FEW_OUTPUT], const few_rows &r, const float scale[2],
                                                   few_plan<BLOCKS> *m, const team_place &t, uint32_t i)
{
    row_ends *own = &m->ends[t.own];
    write_ends(r, scale, m, t.team, own);
#pragma unroll 1
    for (uint32_t step = 0; step < LEFT_STEPS; step++) {
        float u[2], v[2];
        const uint32_t thread = ptx_thread() % TEAM_THREADS;
        ptx_mbarrier_wait(ptx_shared_address(&m->left_full[i & 1][step]), use_parity(i));
        if (step % 2 == 0) {
            team_sync(t.team); /* nobody reads the last factors any more */
            if (thread < ROWS) {
                const row_ends *other = &m->left_ends;
                join_ends(own, m->factor[t.own][0], m->factor[t.own][1], other->reference[thread], other->sum[thread],
                          other->max[thread]);
            }
            team_sync(t.team);
        }
        read_factors(m, t.own, u, v);
        const uint32_t seen = add_half(o, step % 2, (const float *)&m->left[0][thread], u, v);
        arrive_after(ptx_shared_address(&m->left_free[i & 1][step]), seen);
    }
    team_sync(t.team); /* nor these */
}

/* A thread's share of a result that is joined with other blocks'. */
static __device__ __forceinline__ float *few_share(const fmlac_cut &cut, int64_t place)
{
    return cut.partial + place * RESULT_FLOATS + ptx_thread() % TEAM_THREADS * 4;
}

/* Whether the other side of a meeting has been there; if not, the own result is left for it. */
template <int BLOCKS>
static __device__ __forceinline__ bool few_second(const fmlac_cut &cut, few_plan<BLOCKS> *m, const team_place &t,
                                                  uint32_t *flag, int64_t place, const float o[FEW_OUTPUT])
{
    const volatile uint32_t *met = &m->met[t.own];
    const row_ends *own = &m->ends[t.own];
    const int thread = (int)ptx_thread() % TEAM_THREADS;
    if (thread == 0) {
        ptx_grid_wait(); /* the flags have been cleared */
        m->met[t.own] = ptx_load_acquire(flag);
    }
    team_sync(t.team);
    if (uniform(*met)) {
        return true;
    }
    float *to = few_share(cut, place);
#pragma unroll
    for (int j = 0; j < FEW_OUTPUT / 4; j++) {
        float4 four = {o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]};
        *(float4 *)(to + j * 4 * TEAM_THREADS) = four;
    }
    if (thread < ROWS) {
        float4 scalars = {own->reference[thread], own->sum[thread], own->max[thread], 0.0f};
        scalars_of(cut, place)[thread] = scalars;
    }
    team_sync(t.team);
    if (thread == 0) {
        m->met[t.own] = ptx_raise(flag);
    }
    team_sync(t.team);
    return uniform(*met) != 0;
}

/* Adds what lies at a place. */
template <int BLOCKS>
static __device__ __forceinline__ void few_add(const fmlac_cut &cut, few_plan<BLOCKS> *m, const team_place &t,
                                               int64_t place, float o[FEW_OUTPUT])
{
    const uint32_t thread = ptx_thread() % TEAM_THREADS;
    float u[2], v[2];
    if (thread < ROWS) {
        const float4 other = scalars_of(cut, place)[thread];
        join_ends(&m->ends[t.own], m->factor[t.own][0], m->factor[t.own][1], other.x, other.y, other.z);
    }
    team_sync(t.team);
    read_factors(m, t.own, u, v);
#pragma unroll 1
    for (uint32_t half = 0; half < 2; half++) {
        (void)add_half(o, half, few_share(cut, place) + half * LEFT_FLOATS * TEAM_THREADS, u, v);
    }
    team_sync(t.team); /* nobody reads these factors any more */
}

/* As join_pieces (join.cuh). */
template <int BLOCKS>
static __device__ __forceinline__ bool few_join(const fmlac_cut &cut, const piece &c, float o[FEW_OUTPUT],
                                                few_plan<BLOCKS> *m, const team_place &t)
{
#pragma unroll 1
    for (int32_t width = 1; width < c.pieces; width *= 2) {
        int32_t own = c.index & -width, latter = own | width;
        if (latter >= c.pieces) {
            continue; /* nobody there */
        }
        uint32_t *flag = cut.flags + c.head + latter * (int32_t)cut.columns;
        if (!few_second(cut, m, t, flag, place_of(cut, c, own), o)) {
            return false;
        }
        few_add(cut, m, t, place_of(cut, c, own ^ width), o);
    }
    return true;
}

/* Dims 4n .. 4n + 3 of a thread's in a half block, of row g + 8h. */
static __device__ __forceinline__ float4 four_dims(const float *o, int half, int h, int n, float factor)
{
    const float *x = o + half * 16 + 2 * h + n;
    float4 four = {x[0] * factor, x[4] * factor, x[8] * factor, x[12] * factor};
    return four;
}

/* A thread's part of row g + 8h: `column`, its first dim. */
static __device__ __forceinline__ void few_store_row(const fmlac_mqa &p, const piece &c, const float o[FEW_OUTPUT],
                                                     int h, float factor, int row, int column)
{
    if (c.place >= 0) {
        float *to = p.cut.partial + (c.place * p.tile_rows + row) * OUT_COLUMNS + column;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            *(float4 *)(to + i / 2 * 32 + i % 2 * 4) = four_dims(o, i / 2, h, i % 2, factor);
        }
        return;
    }
    const int64_t at = piece_row(p, p.out, c, row) + column;
    if (p.out.aligned && p.out.dtype != FMLAC_F32 && p.d_v == OUT_COLUMNS) {
        const bool f16 = p.out.dtype == FMLAC_F16;
#pragma unroll
        for (int i = 0; i < 2 * HALVES; i++) {
            const float4 x = four_dims(o, i / 2, h, i % 2, factor);
            uint2 pairs = {f16 ? ptx_pack_f16(x.x, x.y) : ptx_pack_bf16(x.x, x.y),
                           f16 ? ptx_pack_f16(x.z, x.w) : ptx_pack_bf16(x.z, x.w)};
            *(uint2 *)((uint16_t *)p.out.data + at + i / 2 * 32 + i % 2 * 4) = pairs;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < HALVES * 8; i++) {
        const int dim = i / 8 * 32 + i % 8;
        const float x = o[i / 8 * 16 + i % 4 * 4 + 2 * h + i / 4 % 2] * factor;
        if (column + dim < p.d_v) {
            if (p.out.dtype == FMLAC_F32) {
                ((float *)p.out.data)[at + dim] = x;
            } else {
                const uint32_t bits = p.out.dtype == FMLAC_F16 ? ptx_pack_f16(x, x) : ptx_pack_bf16(x, x);
                ((uint16_t *)p.out.data)[at + dim] = (uint16_t)bits;
            }
        }
    }
}

/* Ends a piece, by the team that has all of it. */
template <int BLOCKS>
static __device__ __forceinline__ void few_store(const fmlac_mqa &p, const piece &c, float o[FEW_OUTPUT],
                                                 few_plan<BLOCKS> *m, const team_place &t)
{
    const int thread = (int)ptx_thread() % TEAM_THREADS, warp = thread / 32, lane = thread % 32;
    const row_ends *ends = &m->ends[t.own];
    if (uniform(c.pieces) > 1 && !few_join(p.cut, c, o, m, t)) {
        return;
    }
    team_sync(t.team);
    if (thread < ROWS) {
        store_scalars(p, c, thread, ends->reference[thread], ends->max[thread], ends->sum[thread]);
    }
    const int rows = (int)uniform((uint32_t)c.work.rows);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = lane / 4 + 8 * h;
        if (row < rows) {
            const float factor = row_factor(ends->reference[row], ends->sum[row], m->sink[t.own][row]);
            few_store_row(p, c, o, h, factor * (float)(1 << VALUES_DOWN), row, warp * WARP_DIMS + lane % 4 * 8);
        }
    }
}

#endif
