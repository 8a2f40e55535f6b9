/* SPDX-License-Identifier: MIT */
/*
 * few_weights.cuh: scores of a strip to weights, by the four warps of a team (few.cuh). Each has taken scores of its
 * dims; of these sums warp w makes the weights of the w-th eight tokens. A thread has rows g and g + 8, columns 2q and
 * 2q + 1 of them (strip_token), and the weights are where first operands of the products with values want them.
 *
 * Weights are made against the references as they are. All threads of a team hold the references of their rows, so only
 * if a weight exceeds 2^LAZY (or before the first strip) maxima are exchanged and references move; whether one does is
 * asked in the barrier behind which all have the weights. A row's reference moves if its own maximum asks for it: a
 * row's bits depend on its own scores alone.
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_WEIGHTS_CUH
#define FLASHMLA_CUDA_SM90A_FEW_WEIGHTS_CUH

#include "few_plan.cuh"
#include "query.cuh"
#include "softmax.cuh"

/* What a thread keeps of its two rows, g and g + 8. Maxima are kept in shared memory: few ask for them. */
typedef struct few_rows {
    float reference[2]; /* -infinity before the first attended token */
    float sum[2];       /* of this thread's tokens */
} few_rows;

/* Of base-2 logits, of a thread's row. Never 0, so that infinite scores stay what they are. */
template <int BLOCKS>
static __device__ __forceinline__ float row_scale(const fmlac_mqa &p, const few_plan<BLOCKS> *m, uint32_t own, int h)
{
    return fmaxf(scale_of(p) * m->q_scale[own][ptx_thread() % 32 / 4 + 8 * h], 0x1p-126f);
}

template <int BLOCKS> static __device__ __forceinline__ void few_begin(few_rows &r, few_plan<BLOCKS> *m)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.reference[h] = m->max[h][ptx_thread()] = -FMLAC_INFINITY;
        r.sum[h] = 0.0f;
    }
}

/* A logit less its reference. */
static __device__ __forceinline__ float few_relative(float score, float scale, float base)
{
    return fmlac_is_far(base) ? __fmul_rn(score, scale) - base : fmaf(score, scale, -base);
}

/* Scores of the warp's eight tokens: the sum of all parts, of which s may be its own. */
template <int BLOCKS>
static __device__ __forceinline__ void sum_parts(float s[4], const few_plan<BLOCKS> *m, uint32_t team, uint32_t warp)
{
    const uint32_t lane = ptx_thread() % 32;
#pragma unroll
    for (uint32_t i = KEEPS_OWN(BLOCKS); i < TEAM_WARPS; i++) {
        uint32_t x[4];
        const uint32_t from = (warp + i) % TEAM_WARPS, at = !KEEPS_OWN(BLOCKS) || warp < from ? warp : warp - 1;
        ptx_load_shared_128(x, ptx_shared_address(&m->parts[team][from][at][lane]));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            s[j] = i == 0 ? __uint_as_float(x[j]) : s[j] + __uint_as_float(x[j]);
        }
    }
}

/* Scores of tokens that a row does not attend become -infinity. `first`: position of the strip's first token. */
static __device__ __forceinline__ void few_hide(float s[4], uint32_t there, const piece &c, int32_t first,
                                                uint32_t warp)
{
    const uint32_t lane = ptx_thread() % 32;
    const volatile int32_t *seen = c.seen;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t token = 8 * warp + strip_token(lane % 4 * 2 + i % 2);
        const bool attended = (there >> token & 1) != 0 && (int32_t)token < seen[lane / 4 + i / 2 * 8] - first;
        s[i] = attended ? s[i] : -FMLAC_INFINITY;
    }
}

/* References of rows whose maxima ask for it move. base: what weights are made against then; factor: what was summed so
 * far must be multiplied by. */
template <int BLOCKS>
static __device__ __forceinline__ void few_raise(const float s[4], const float scale[2], few_rows &r,
                                                 few_plan<BLOCKS> *m, uint32_t team, uint32_t warp, float base[2],
                                                 float factor[2])
{
    const uint32_t lane = ptx_thread() % 32;
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        float top = fmaxf(s[2 * h], s[2 * h + 1]);
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
        if (lane % 4 == 0) {
            m->tops[team][warp][lane / 4 + 8 * h] = top;
        }
    }
    team_sync(team);
#pragma unroll
    for (uint32_t h = 0; h < 2; h++) {
        const uint32_t row = lane / 4 + 8 * h;
        const float(*tops)[ROWS] = m->tops[team], old = r.reference[h];
        const float top = fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
        const bool moves = !(few_relative(top, scale[h], old) <= LAZY);
        const float to = moves ? fmaxf(top * scale[h], old) : old;
        factor[h] = shrink(old, to);
        r.reference[h] = to;
        r.sum[h] *= factor[h];
        base[h] = to == -FMLAC_INFINITY ? 0.0f : to;
    }
}

/* Scores to weights, which all of the team have in the end. Returns whether factor[] is to be used. */
template <int BLOCKS>
static __device__ __forceinline__ bool few_weigh(const float s[4], const float scale[2], few_rows &r,
                                                 few_plan<BLOCKS> *m, uint32_t team, uint32_t warp, float factor[2])
{
    const uint32_t to = ptx_shared_address(&m->weights[team][warp / 2][ptx_thread() % 32][warp % 2 * 2]);
    float sum[2], base[2] = {r.reference[0], r.reference[1]};
    bool moves = false;
#pragma unroll 1
    for (bool raise = false;; raise = true) {
        if (raise) {
            few_raise(s, scale, r, m, team, warp, base, factor);
            moves = true;
        }
        bool fine = true;
        float a[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float x[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float relative = few_relative(s[2 * h + i], scale[h], base[h]);
                fine &= relative <= LAZY;
                x[i] = ptx_exp2(relative);
            }
            sum[h] = x[0] + x[1];
            a[h] = __uint_as_float(ptx_pack_bf16(x[0], x[1]));
        }
        ptx_store_shared_f32x2(to, a);
        if (!ptx_barrier_any(BARRIER_VOTE + team, TEAM_THREADS, !fine && !moves)) {
            break;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.sum[h] += sum[h];
    }
    return moves;
}

#endif
