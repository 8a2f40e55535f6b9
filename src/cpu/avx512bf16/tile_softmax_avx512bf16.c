/* SPDX-License-Identifier: MIT */
/*
 * tile_softmax_avx512bf16.c: running softmax. Rows are the lanes, so maximum and sum go down the tokens, lane
 * by lane. Weights are stored as floats, or rounded to bf16 and stored in pairs of tokens; their sum is taken
 * before rounding, in chains of SUM_CHAIN weights.
 */
#include "tile_avx512bf16.h"

#define SUM_CHAIN 16

/* Sixteen rows of a tile. */
typedef struct lane_group {
    const float *s;
    int64_t stride;
    __m512 scale;
    __m512i visible; /* tokens that each lane sees */
} lane_group;

static inline __mmask16 seen(const lane_group *g, int32_t t)
{
    return _mm512_cmpgt_epi32_mask(g->visible, _mm512_set1_epi32(t));
}

static inline __m512 logit(const lane_group *g, int32_t t)
{
    return _mm512_mul_ps(_mm512_load_ps(g->s + t * g->stride), g->scale);
}

/* The larger of m and all logits, NaN if any of them is. */
static inline __attribute__((always_inline)) __m512 maximum(const lane_group *g, __m512 m, int32_t tokens,
                                                            bool masked)
{
    __mmask16 nan = _mm512_cmp_ps_mask(m, m, _CMP_UNORD_Q);
    for (int32_t t = 0; t < tokens; t++) {
        __m512 x = logit(g, t);
        if (masked) {
            x = _mm512_mask_mov_ps(_mm512_set1_ps(-FLT_MAX), seen(g, t), x);
        }
        nan = (__mmask16)(nan | _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q));
        m = _mm512_max_ps(x, m);
    }
    return _mm512_mask_mov_ps(m, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
}

static inline __attribute__((always_inline)) __m512 weight(const lane_group *g, int32_t t, __m512 m,
                                                           bool masked)
{
    __m512 w = exp2_avx512(_mm512_sub_ps(logit(g, t), m));
    return masked ? _mm512_maskz_mov_ps(seen(g, t), w) : w;
}

/* Stores 2^(x - m), in pairs rounded, and returns the sum of what was not rounded. */
static inline __attribute__((always_inline)) __m512 weigh(const lane_group *g, int32_t *weights,
                                                          int64_t stride, __m512 m, int32_t tokens,
                                                          bool masked, bool pairs)
{
    __m512 sum = _mm512_setzero_ps(), chain = _mm512_setzero_ps();
    for (int32_t t = 0; t < tokens; t += 2) {
        __m512 low = weight(g, t, m, masked), high = _mm512_setzero_ps();
        if (t + 1 < tokens) {
            high = weight(g, t + 1, m, masked);
        }
        if (pairs) {
            _mm512_store_si512(weights + t / 2 * stride, pair_up(low, high));
        } else {
            _mm512_store_ps(weights + t * stride, low);
            if (t + 1 < tokens) {
                _mm512_store_ps(weights + (t + 1) * stride, high);
            }
        }
        chain = _mm512_add_ps(chain, _mm512_add_ps(low, high));
        if (t % SUM_CHAIN == SUM_CHAIN - 2) {
            sum = _mm512_add_ps(sum, chain);
            chain = _mm512_setzero_ps();
        }
    }
    return _mm512_add_ps(sum, chain);
}

static inline __attribute__((always_inline)) void softmax(fmlai_softmax_state *state, float *alpha,
                                                          void *packed_weights, const float *s,
                                                          const float *scale2, const int32_t *visible,
                                                          int32_t rows, int32_t tokens, bool pairs)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += LANES) {
        lane_group g = {.s = s + r, .stride = lanes, .scale = _mm512_loadu_ps(scale2 + r)};
        int32_t *weights = (int32_t *)packed_weights + r;
        __m512 old = _mm512_loadu_ps(state->m + r), m, sum;
        if (visible) {
            g.visible = _mm512_loadu_si512(visible + r);
            m = maximum(&g, old, tokens, true);
            sum = weigh(&g, weights, weights_stride(rows), m, tokens, true, pairs);
        } else {
            g.visible = _mm512_setzero_si512();
            m = maximum(&g, old, tokens, false);
            sum = weigh(&g, weights, weights_stride(rows), m, tokens, false, pairs);
        }
        __m512 shrink = exp2_avx512(_mm512_sub_ps(old, m));
        _mm512_storeu_ps(alpha + r, shrink);
        _mm512_storeu_ps(state->m + r, m);
        _mm512_storeu_ps(state->l + r, _mm512_fmadd_ps(_mm512_loadu_ps(state->l + r), shrink, sum));
    }
}

void fmlak_tile_softmax_avx512bf16(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                                   const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens)
{
    softmax(state, alpha, packed_weights, s, scale2, visible, rows, tokens, true);
}

void fmlak_tile_softmax_f32_avx512bf16(fmlai_softmax_state *state, float *alpha, void *packed_weights,
                                       float *s, const float *scale2, const int32_t *visible, int32_t rows,
                                       int32_t tokens)
{
    softmax(state, alpha, packed_weights, s, scale2, visible, rows, tokens, false);
}
