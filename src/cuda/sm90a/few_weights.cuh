/* SPDX-License-Identifier: MIT */
/*
 * few_weights.cuh: scores to weights where tokens are rows and heads are columns (few.cuh), by the four warps of the
 * scorer. A thread has two tokens, g and g + 8 of its warp's 16, and FEW_COLUMNS heads: s[4j + 2h + i] is that of token
 * g + 8h and head 8j + 2q + i, which is its column 2j + i.
 *
 * Weights are made against the references as they are. All warps of the scorer hold all references, so only if a weight
 * exceeds 2^LAZY (or before the first tile) maxima are exchanged and references move; whether one does is asked in
 * the barrier behind which the summer has the weights; it then waits for others. A head's reference moves if its own
 * maximum asks for it: a row's bits depend on its own scores alone.
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_WEIGHTS_CUH
#define FLASHMLA_CUDA_SM90A_FEW_WEIGHTS_CUH

#include "products.cuh"
#include "softmax.cuh"

#define FEW_SCORES  (ROWS / 2) /* of a thread */
#define FEW_COLUMNS (ROWS / 4) /* heads of a thread */
#define FEW_MORE    1          /* state[]: another tile of the piece follows */
#define FEW_MOVED   2          /* references have moved */

/* What a scorer's thread knows of its heads. */
typedef struct few_heads {
    float scale;                  /* logits in base 2 = score * scale; above 0 */
    float reference[FEW_COLUMNS]; /* -infinity before the first attended token */
    float sum[FEW_COLUMNS];       /* of this thread's tokens */
    float max[FEW_COLUMNS];       /* of this thread's scores; kept only if somebody asks for it */
    bool far;                     /* some head's reference is far away (common/number.cuh) */
} few_heads;

static __device__ __forceinline__ void few_begin(few_heads &heads, float scale)
{
    heads.scale = scale;
    heads.far = false;
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        heads.reference[c] = heads.max[c] = -FMLAC_INFINITY;
        heads.sum[c] = 0.0f;
    }
}

/* A head of the thread. */
static __device__ __forceinline__ int few_head(int column)
{
    return column / 2 * 8 + (int)(ptx_thread() % 4) * 2 + column % 2;
}

/* A logit less its reference. */
template <int FAR> static __device__ __forceinline__ float few_relative(float score, float scale, float base)
{
    return FAR && fmlac_is_far(base) ? __fmul_rn(score, scale) - base : fmaf(score, scale, -base);
}

/* Weights against base[], as pairs of heads a[2j + h]; false: one is too large, or no number. sum[]: before
 * rounding. */
template <int FAR>
static __device__ __forceinline__ bool few_against(const float s[FEW_SCORES], float scale,
                                                   const float base[FEW_COLUMNS], uint32_t a[FEW_SCORES / 2],
                                                   float sum[FEW_COLUMNS])
{
    bool fine = true;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        float x[2][2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float relative = few_relative<FAR>(s[4 * j + 2 * h + i], scale, base[2 * j + i]);
                fine &= relative <= LAZY;
                x[h][i] = ptx_exp2(relative);
            }
            a[2 * j + h] = ptx_pack_bf16(x[h][0], x[h][1]);
        }
        sum[2 * j] = x[0][0] + x[1][0];
        sum[2 * j + 1] = x[0][1] + x[1][1];
    }
    return fine;
}

/* Maxima of a thread's scores. */
static __device__ __forceinline__ void few_raise_max(const float s[FEW_SCORES], float max[FEW_COLUMNS])
{
#pragma unroll
    for (int i = 0; i < FEW_SCORES; i++) {
        max[i / 4 * 2 + i % 2] = fmaxf(max[i / 4 * 2 + i % 2], s[i]);
    }
}

/* Of what lanes with the same heads have. */
static __device__ __forceinline__ float lanes_max(float x)
{
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    }
    return x;
}

static __device__ __forceinline__ float lanes_sum(float x)
{
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    }
    return x;
}

/*
 * References of heads whose maxima ask for it move; all four warps. Afterwards base[] is what weights are made against,
 * and factor[] of the weights' slot what was summed so far must be multiplied by. first: no head has a reference.
 */
template <int BLOCKS>
static __device__ __forceinline__ void few_raise(const float s[FEW_SCORES], few_heads &heads, plan<BLOCKS> *m,
                                                 uint32_t slot, float base[FEW_COLUMNS], bool first)
{
    float top[FEW_COLUMNS];
    const uint32_t warp = ptx_thread() / 32 % 4, lane = ptx_thread() % 32;
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        top[c] = -FMLAC_INFINITY;
    }
    few_raise_max(s, top);
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        top[c] = lanes_max(top[c]);
        if (lane < 4) {
            m->tops[warp][few_head(c)] = top[c];
        }
    }
    ptx_barrier_sync(BARRIER_GROUP, 128);
    bool far = false;
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        const int head = few_head(c);
        const float old = heads.reference[c];
        float most = fmaxf(fmaxf(m->tops[0][head], m->tops[1][head]), fmaxf(m->tops[2][head], m->tops[3][head]));
        bool moves = first || !(few_relative<1>(most, heads.scale, old) <= LAZY);
        float to = moves ? fmaxf(most * heads.scale, old) : old, factor = shrink(old, to);
        heads.reference[c] = to;
        heads.sum[c] *= factor;
        base[c] = to == -FMLAC_INFINITY ? 0.0f : to;
        far |= fmlac_is_far(to);
        if (warp == 0 && lane < 4) {
            m->reference[slot][head] = factor;
        }
    }
    heads.far = __any_sync(0xFFFFFFFFu, far);
}

/* Weights to shared memory: rows of heads that hold 64 tokens. `warp`, whose 16 tokens they are. */
static __device__ __forceinline__ void few_publish(const uint32_t a[FEW_SCORES / 2], uint32_t weights, uint32_t warp)
{
    const uint32_t lane = ptx_thread() % 32;
#pragma unroll
    for (int i = 0; i < ROWS / 16; i++) {
        const uint32_t head = i * 16 + lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
        ptx_stmatrix_x4_trans(weights + head * 128 + ((chunk ^ head) & 7) * 16, a + 4 * i);
    }
}

/* Scores of a tile to weights that the summer has: `weights`, where they go. more: another tile follows. */
template <int BLOCKS>
static __device__ __forceinline__ void few_weigh(const float s[FEW_SCORES], few_heads &heads, plan<BLOCKS> *m,
                                                 uint32_t slot, uint32_t weights, uint32_t warp, bool first,
                                                 uint32_t more)
{
    float sum[FEW_COLUMNS], base[FEW_COLUMNS];
    uint32_t a[FEW_SCORES / 2];
    bool moves = false;
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        base[c] = heads.reference[c];
    }
#pragma unroll 1
    for (bool raise = first;; raise = true) {
        if (raise) {
            few_raise(s, heads, m, slot, base, first);
            moves = true;
        }
        bool fine = heads.far ? few_against<1>(s, heads.scale, base, a, sum)
                              : few_against<0>(s, heads.scale, base, a, sum);
        few_publish(a, weights, warp);
        if (ptx_thread() == 0) {
            m->state[slot] = (more ? FEW_MORE : 0) | (moves ? FEW_MOVED : 0);
        }
        if (!ptx_barrier_any(BARRIER_WEIGHTS + slot, 256, !fine && !moves)) {
            break;
        }
    }
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        heads.sum[c] += sum[c];
    }
}

/* Scores of tokens that a head does not attend become -infinity. `warp`: whose tokens they are. */
template <int BLOCKS>
static __device__ __forceinline__ void few_hide(float s[FEW_SCORES], const plan<BLOCKS> *m, const piece &c,
                                                uint32_t slot, int32_t first, uint32_t warp)
{
    const volatile uint8_t *mask = (const volatile uint8_t *)m->mask[slot];
    const volatile int32_t *seen = c.seen;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t token = warp * 16 + h * 8 + ptx_thread() % 32 / 4;
        const bool there = (mask[token / WARP_ROWS] >> (token % WARP_ROWS) & 1) != 0;
#pragma unroll
        for (int column = 0; column < FEW_COLUMNS; column++) {
            float &x = s[column / 2 * 4 + 2 * h + column % 2];
            x = there && (int32_t)token < seen[few_head(column)] - first ? x : -FMLAC_INFINITY;
        }
    }
}

/* Sums, maxima and references of a piece that ends. parity: of its number. */
template <int BLOCKS>
static __device__ __forceinline__ void few_end(few_heads &heads, plan<BLOCKS> *m, uint32_t parity, uint32_t warp)
{
    const uint32_t lane = ptx_thread() % 32;
#pragma unroll
    for (int c = 0; c < FEW_COLUMNS; c++) {
        float sum = lanes_sum(heads.sum[c]), max = lanes_max(heads.max[c]);
        if (lane < 4) {
            m->sums[parity][warp][few_head(c)] = sum;
            m->maxima[parity][warp][few_head(c)] = max * heads.scale;
            if (warp == 0) {
                m->ends[parity][few_head(c)] = heads.reference[c];
            }
        }
    }
}

#endif
