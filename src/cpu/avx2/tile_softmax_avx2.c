/* SPDX-License-Identifier: MIT */
/*
 * tile_softmax_avx2.c: running softmax. Rows are the lanes, so maximum and sum go down the tokens, lane by
 * lane. The sum is made of chains of SUM_CHAIN weights.
 */
#include "tile_avx2.h"

#define SUM_CHAIN 16

/* Eight rows of a tile. */
typedef struct lane_group {
    const float *s;
    int64_t stride;
    __m256 scale;
    __m256i visible;
} lane_group;

static inline __m256 seen(const lane_group *g, int32_t t)
{
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(g->visible, _mm256_set1_epi32(t)));
}

static inline __m256 logit(const lane_group *g, int32_t t)
{
    return _mm256_mul_ps(_mm256_load_ps(g->s + t * g->stride), g->scale);
}

/* The larger of m and all logits, NaN if any of them is. */
static inline __attribute__((always_inline)) __m256 maximum(const lane_group *g, __m256 m, int32_t tokens,
                                                            bool masked)
{
    __m256 nan = _mm256_cmp_ps(m, m, _CMP_UNORD_Q);
    for (int32_t t = 0; t < tokens; t++) {
        __m256 x = logit(g, t);
        if (masked) {
            x = _mm256_blendv_ps(_mm256_set1_ps(-FLT_MAX), x, seen(g, t));
        }
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        m = _mm256_max_ps(x, m);
    }
    return _mm256_or_ps(m, nan); /* all ones is a NaN */
}

/* Stores 2^(x - m) and returns the sum. */
static inline __attribute__((always_inline)) __m256 weigh(const lane_group *g, float *weights, int64_t stride,
                                                          __m256 m, int32_t tokens, bool masked)
{
    __m256 sum = _mm256_setzero_ps();
    for (int32_t begin = 0; begin < tokens; begin += SUM_CHAIN) {
        int32_t end = tokens - begin < SUM_CHAIN ? tokens : begin + SUM_CHAIN;
        __m256 chain = _mm256_setzero_ps();
        for (int32_t t = begin; t < end; t++) {
            __m256 w = exp2_avx2(_mm256_sub_ps(logit(g, t), m));
            if (masked) {
                w = _mm256_and_ps(w, seen(g, t));
            }
            _mm256_store_ps(weights + t * stride, w);
            chain = _mm256_add_ps(chain, w);
        }
        sum = _mm256_add_ps(sum, chain);
    }
    return sum;
}

void fmlak_tile_softmax_avx2(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                             const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += 8) {
        lane_group g = {.s = s + r, .stride = lanes, .scale = _mm256_loadu_ps(scale2 + r)};
        float *weights = (float *)packed_weights + r;
        __m256 old = _mm256_loadu_ps(state->m + r), m, sum;
        if (visible) {
            g.visible = _mm256_loadu_si256((const __m256i *)(visible + r));
            m = maximum(&g, old, tokens, true);
            sum = weigh(&g, weights, weights_stride(rows), m, tokens, true);
        } else {
            g.visible = _mm256_setzero_si256();
            m = maximum(&g, old, tokens, false);
            sum = weigh(&g, weights, weights_stride(rows), m, tokens, false);
        }
        __m256 shrink = exp2_avx2(_mm256_sub_ps(old, m));
        _mm256_storeu_ps(alpha + r, shrink);
        _mm256_storeu_ps(state->m + r, m);
        _mm256_storeu_ps(state->l + r, _mm256_fmadd_ps(_mm256_loadu_ps(state->l + r), shrink, sum));
    }
}
