/* SPDX-License-Identifier: MIT */
/*
 * softmax.cuh: scores to weights, online. A thread holds two rows (g and g + 8 of its warp's 16), 16 columns of each
 * (12 where a tile has 48 tokens); four neighbouring lanes share a row. Few rows have few_weights.cuh.
 *
 * Weights are 2^(z - reference), z = score * scale in base 2. The reference is a row's maximum or less: it moves, and
 * what was summed so far is rescaled, only when weights would become large. The final division by the sum makes that
 * exact. Pairs compare maxima (by LAZY, find_bases), the relay sums of weights (SUM_MOST, weigh_scores).
 */
#ifndef FLASHMLA_CUDA_SM90A_SOFTMAX_CUH
#define FLASHMLA_CUDA_SM90A_SOFTMAX_CUH

#include "plan.cuh"

typedef struct softmax_rows {
    float scale;        /* logits in base 2 = score * scale; any sign */
    float reference[2]; /* -infinity before the first attended token */
    float max[2];       /* of logits */
    float sum[2];       /* of this thread's columns */
} softmax_rows;

/* 2^(from - to), 1 where nothing moved (also from -infinity to -infinity). */
static __device__ __forceinline__ float shrink(float from, float to)
{
    return from == to ? 1.0f : ptx_exp2(from - to);
}

/*
 * The relay's way, which has no maximum in the chain from scores to weights: weights against the references as they
 * are, and only if a sum shows that one is too low (every row's first tile, and seldom after) maxima, new references
 * and weights once more. Scores stay as they are; the scale is above 0 (query.cuh). Four lanes share a row: it moves if
 * one of them asks for it, so that a row's bits depend on its own scores alone.
 */

/* Of a thread's sixteen weights of a row, before its reference moves. Where one weight is nearly all of a row's sum,
 * its rounding to 16 bits is an error of the whole row, but not if it is 1, as it is once the reference has moved to
 * it: so the bound is as low as references that seldom move allow. Sixteen weights of 1 are common. */
#define SUM_MOST 128.0f

/* Scores of tokens that a row does not attend become -infinity. */
static __device__ __forceinline__ void hide_scores(float s[TOKENS / 2], const uint32_t mask[2], const int32_t limit[2])
{
    int q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
        int column = i / 4 * 8 + 2 * q + i % 2;
        bool attended = (mask[i / 16] >> (column % 32) & 1) != 0 && column < limit[i / 2 % 2];
        s[i] = attended ? s[i] : -FMLAC_INFINITY;
    }
}

/* 2^(s * scale - base) in 16 bits, as A fragments, for 16 tokens, the k-th; their sums before rounding are added to
 * sum. FAR: a reference of the warp may be far away: that row's scores are scaled and rounded as their maximum was. */
template <int F16, int FAR>
static __device__ __forceinline__ void weights_part(const float s[TOKENS / 2], float scale, const float base[2],
                                                    uint32_t a[TOKENS / 4], float sum[2], int k)
{
#pragma unroll
    for (int i = 4 * k; i < 4 * k + 4; i++) {
        float x[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float score = s[2 * i + j], relative = fmaf(score, scale, -base[i % 2]);
            if (FAR && fmlac_is_far(base[i % 2])) {
                relative = __fmul_rn(score, scale) - base[i % 2];
            }
            x[j] = ptx_exp2(relative);
        }
        sum[i % 2] += x[0] + x[1];
        a[i] = F16 ? ptx_pack_f16(x[0], x[1]) : ptx_pack_bf16(x[0], x[1]);
    }
}

/* The whole tile. */
template <int F16, int FAR>
static __device__ __forceinline__ void weights_against(const float s[TOKENS / 2], float scale, const float base[2],
                                                       uint32_t a[TOKENS / 4], float sum[2])
{
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int k = 0; k < TOKENS / 16; k++) {
        weights_part<F16, FAR>(s, scale, base, a, sum, k);
    }
}

/* Maxima of a thread's scores. */
static __device__ __forceinline__ void raise_max(const float s[TOKENS / 2], float max[2])
{
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
        max[i / 2 % 2] = fmaxf(max[i / 2 % 2], s[i]);
    }
}

/* Whether sums of weights show that references of this thread's rows are too low; so do NaN and, before the first,
 * infinity. */
static __device__ __forceinline__ void find_high(const float sum[2], const float base[2], bool high[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        high[h] = !(sum[h] <= SUM_MOST) || fmlac_is_far(base[h]);
    }
}

/* Those rows' references move to their maxima; weights are to be made once more, against base[]. factor[]: what was
 * summed so far must be multiplied by. */
static __device__ __forceinline__ void raise_references(const float s[TOKENS / 2], softmax_rows &rows,
                                                        const bool high[2], float base[2], float factor[2])
{
    float top[2] = {-FMLAC_INFINITY, -FMLAC_INFINITY};
    raise_max(s, top);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 2));
        top[h] = fmaxf(top[h] * rows.scale, rows.reference[h]);
        bool row = (__ballot_sync(0xFFFFFFFFu, high[h]) >> (threadIdx.x % 32 & ~3u) & 15) != 0;
        factor[h] = row ? shrink(rows.reference[h], top[h]) : 1.0f;
        rows.reference[h] = row ? top[h] : rows.reference[h];
        base[h] = rows.reference[h] == -FMLAC_INFINITY ? 0.0f : rows.reference[h];
        rows.sum[h] *= factor[h];
    }
}

/* Scores to weights. factor[]: what the sums of earlier tiles must be multiplied by, where it returns true. first: no
 * row has a reference yet, so that weights against it need not be tried. */
template <int F16>
static __device__ __forceinline__ bool weigh_scores(const float s[TOKENS / 2], softmax_rows &rows,
                                                    uint32_t a[TOKENS / 4], float factor[2], bool first)
{
    float sum[2], base[2] = {rows.reference[0], rows.reference[1]};
    bool moves = false, far = false;
#pragma unroll 1
    for (;; first = false) {
        bool high[2] = {true, true};
        if (!first) {
            if (far) {
                weights_against<F16, 1>(s, rows.scale, base, a, sum);
            } else {
                weights_against<F16, 0>(s, rows.scale, base, a, sum);
            }
            find_high(sum, base, high);
            if (moves || !__any_sync(0xFFFFFFFFu, high[0] || high[1])) {
                break;
            }
        }
        moves = true;
        raise_references(s, rows, high, base, factor);
        far = __any_sync(0xFFFFFFFFu, fmlac_is_far(base[0]) || fmlac_is_far(base[1]));
    }
    rows.sum[0] += sum[0];
    rows.sum[1] += sum[1];
    return moves;
}

/*
 * Where every row sees the tile's first `count` tokens: the sums of products as they come, their scale in the
 * exponent's product. A last, partial tile and a negative scale are scaled ahead.
 */
typedef struct row_bases {
    float scale[2];  /* a weight is 2^(score * scale - base) */
    float base[2];   /* references, or 0 */
    float factor[2]; /* what was summed so far must be multiplied by */
    bool moves;      /* any row of the warp has a factor other than 1 */
} row_bases;

/* Scores of rows whose reference is far away are scaled ahead, in place. */
static __device__ __forceinline__ void scale_far(float s[TOKENS / 2], float scale[2], const float base[2])
{
    const bool far[2] = {fmlac_is_far(base[0]), fmlac_is_far(base[1])};
    if (__any_sync(0xFFFFFFFFu, far[0] || far[1])) {
#pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            s[i] = far[i / 2 % 2] ? s[i] * scale[i / 2 % 2] : s[i];
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            scale[h] = far[h] ? 1.0f : scale[h];
        }
    }
}

static __device__ __forceinline__ void find_bases(float s[32], softmax_rows &rows, int32_t count, row_bases *to)
{
    float scale = rows.scale;
    if (count < TOKENS || !(rows.scale >= 0.0f)) {
        int q = threadIdx.x % 4;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[i] = i / 4 * 8 + 2 * q + i % 2 < count ? s[i] * rows.scale : -FMLAC_INFINITY;
        }
        scale = 1.0f;
    }
    float top[2] = {fmaxf(s[0], s[1]), fmaxf(s[2], s[3])}, other[2] = {fmaxf(s[4], s[5]), fmaxf(s[6], s[7])};
#pragma unroll
    for (int i = 8; i < 32; i += 8) { /* two short chains a row */
#pragma unroll
        for (int j = 0; j < 4; j++) {
            top[j / 2] = fmaxf(top[j / 2], s[i + j]);
            other[j / 2] = fmaxf(other[j / 2], s[i + 4 + j]);
        }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            top[h] = fmaxf(top[h], other[h]);
            other[h] = __shfl_xor_sync(0xFFFFFFFFu, top[h], step);
        }
    }
    bool grew[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = fmaxf(top[h], other[h]) * scale;
        rows.max[h] = fmaxf(rows.max[h], top[h]);
        grew[h] = top[h] > rows.reference[h] + LAZY;
        to->factor[h] = 1.0f;
    }
    to->moves = __any_sync(0xFFFFFFFFu, grew[0] || grew[1]);
    if (to->moves) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            to->factor[h] = grew[h] ? shrink(rows.reference[h], top[h]) : 1.0f;
            rows.reference[h] = grew[h] ? top[h] : rows.reference[h];
            rows.sum[h] *= to->factor[h];
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        to->base[h] = rows.reference[h] == -FMLAC_INFINITY ? 0.0f : rows.reference[h];
        to->scale[h] = scale;
    }
    scale_far(s, to->scale, to->base);
}

/* Scores to weights as A fragments. */
static __device__ __forceinline__ void weigh_from(const float s[32], softmax_rows &rows, const row_bases *from,
                                                  uint32_t a[16])
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float x = ptx_exp2(fmaf(s[2 * i], from->scale[i % 2], -from->base[i % 2]));
        float y = ptx_exp2(fmaf(s[2 * i + 1], from->scale[i % 2], -from->base[i % 2]));
        sum[i % 4] += x + y;
        a[i] = ptx_pack_bf16(x, y);
    }
    rows.sum[0] += sum[0] + sum[2];
    rows.sum[1] += sum[1] + sum[3];
}

/* The follower's references become the published ones. Returns whether what it summed must be multiplied. */
static __device__ __forceinline__ bool follow_references(float reference[2], float first, float second, float factor[2])
{
    factor[0] = shrink(reference[0], first);
    factor[1] = shrink(reference[1], second);
    reference[0] = first;
    reference[1] = second;
    return __any_sync(0xFFFFFFFFu, factor[0] != 1.0f || factor[1] != 1.0f);
}

#endif
