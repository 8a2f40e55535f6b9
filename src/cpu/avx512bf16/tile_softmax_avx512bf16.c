/* SPDX-License-Identifier: MIT */
/*
 * tile_softmax_avx512bf16.c: running softmax. Rows are the lanes, so maximum and sum go down the tokens, lane
 * by lane. Weights are stored as floats, or rounded to bf16 and stored in pairs of tokens; their sum is taken
 * before rounding, in chains of SUM_CHAIN weights.
 */
#include "tile_avx512bf16.h"

#define SUM_CHAIN 16

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Some vectors of rows of a tile, which are walked together: so scores are read in the order in which they lie. */
typedef struct lane_group {
    const float *s;
    int64_t stride;
    __m512 scale[GROUP_VECTORS];
    __m512i visible[GROUP_VECTORS]; /* tokens that each lane sees */
} lane_group;

ALWAYS_INLINE __mmask16 seen(const lane_group *g, int32_t t, int32_t v)
{
    return _mm512_cmpgt_epi32_mask(g->visible[v], _mm512_set1_epi32(t));
}

ALWAYS_INLINE __m512 logit(const lane_group *g, int32_t t, int32_t v, bool masked)
{
    __m512 x = _mm512_mul_ps(_mm512_load_ps(g->s + t * g->stride + v * LANES), g->scale[v]);
    return masked ? _mm512_mask_mov_ps(_mm512_set1_ps(-FLT_MAX), seen(g, t, v), x) : x;
}

/* The largest of m and all logits that are numbers. */
ALWAYS_INLINE void maximum(const lane_group *g, __m512 m[GROUP_VECTORS], int32_t vectors, int32_t tokens, bool masked)
{
    __m512 part[4] = {m[0], m[0], m[0], m[0]}; /* of a single vector: each maximum waits for the one before */
    int32_t t = 0;
    for (; vectors == 1 && t + 4 <= tokens; t += 4) {
#pragma GCC unroll 4
        for (int32_t i = 0; i < 4; i++) {
            part[i] = _mm512_max_ps(logit(g, t + i, 0, masked), part[i]);
        }
    }
    for (; t < tokens; t++) {
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            m[v] = _mm512_max_ps(logit(g, t, v, masked), m[v]); /* in this order NaN does not count, but in m */
        }
    }
    if (vectors == 1) {
        m[0] = _mm512_max_ps(_mm512_max_ps(_mm512_max_ps(part[0], part[1]), _mm512_max_ps(part[2], part[3])), m[0]);
    }
}

/* Lanes that have a logit that is no number. */
static __mmask16 nan_lanes(const lane_group *g, int32_t v, int32_t tokens, bool masked)
{
    __mmask16 nan = 0;
    for (int32_t t = 0; t < tokens; t++) {
        __m512 x = logit(g, t, v, masked);
        nan = (__mmask16)(nan | _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q));
    }
    return nan;
}

ALWAYS_INLINE __m512 weight(const lane_group *g, int32_t t, int32_t v, __m512 m, bool masked)
{
    __m512 w = exp2_avx512(_mm512_sub_ps(logit(g, t, v, masked), m));
    return masked ? _mm512_maskz_mov_ps(seen(g, t, v), w) : w;
}

/* Stores 2^(x - m), in pairs rounded, and sums up what was not rounded. */
ALWAYS_INLINE void weigh(const lane_group *g, int32_t *weights, int64_t stride, const __m512 m[GROUP_VECTORS],
                         __m512 sum[GROUP_VECTORS], int32_t vectors, int32_t tokens, bool masked, bool pairs)
{
    __m512 chain[GROUP_VECTORS];
#pragma GCC unroll 4
    for (int32_t v = 0; v < vectors; v++) {
        sum[v] = chain[v] = _mm512_setzero_ps();
    }
    for (int32_t t = 0; t < tokens; t += 2) {
        bool both = t + 1 < tokens;
#pragma GCC unroll 4
        for (int32_t v = 0; v < vectors; v++) {
            __m512 low = weight(g, t, v, m[v], masked);
            __m512 high = both ? weight(g, t + 1, v, m[v], masked) : _mm512_setzero_ps();
            if (pairs) {
                _mm512_store_si512(weights + t / 2 * stride + v * LANES, pair_up(low, high));
            } else {
                _mm512_store_ps(weights + t * stride + v * LANES, low);
                if (both) {
                    _mm512_store_ps(weights + (t + 1) * stride + v * LANES, high);
                }
            }
            chain[v] = _mm512_add_ps(chain[v], _mm512_add_ps(low, high));
        }
        if (t % SUM_CHAIN == SUM_CHAIN - 2) {
#pragma GCC unroll 4
            for (int32_t v = 0; v < vectors; v++) {
                sum[v] = _mm512_add_ps(sum[v], chain[v]);
                chain[v] = _mm512_setzero_ps();
            }
        }
    }
#pragma GCC unroll 4
    for (int32_t v = 0; v < vectors; v++) {
        sum[v] = _mm512_add_ps(sum[v], chain[v]);
    }
}

/* What a call works on, from row r on; state, alpha, scale2 and visible of that row. */
typedef struct softmax_operands {
    const float *s;
    int32_t *weights;
    float *m, *l, *alpha;
    const float *scale2;
    const int32_t *visible;
    int64_t s_stride, weights_stride;
    int32_t tokens;
} softmax_operands;

/* vectors, masked and pairs are constants in each caller. */
ALWAYS_INLINE void softmax_group(const softmax_operands *o, int32_t vectors, bool masked, bool pairs)
{
    lane_group g = {.s = o->s, .stride = o->s_stride};
    __m512 m[GROUP_VECTORS], sum[GROUP_VECTORS];
#pragma GCC unroll 4
    for (int32_t v = 0; v < vectors; v++) {
        g.scale[v] = _mm512_loadu_ps(o->scale2 + v * LANES);
        g.visible[v] = masked ? _mm512_loadu_si512(o->visible + v * LANES) : _mm512_setzero_si512();
        m[v] = _mm512_loadu_ps(o->m + v * LANES);
    }
    maximum(&g, m, vectors, o->tokens, masked);
    weigh(&g, o->weights, o->weights_stride, m, sum, vectors, o->tokens, masked, pairs);
    for (int32_t v = 0; v < vectors; v++) {
        float *at = o->m + v * LANES, *l = o->l + v * LANES;
        if (_mm512_cmp_ps_mask(sum[v], sum[v], _CMP_UNORD_Q)) {
            __mmask16 nan = nan_lanes(&g, v, o->tokens, masked);
            m[v] = _mm512_mask_mov_ps(m[v], nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
        }
        __m512 shrink = exp2_avx512(_mm512_sub_ps(_mm512_loadu_ps(at), m[v]));
        _mm512_storeu_ps(o->alpha + v * LANES, shrink);
        _mm512_storeu_ps(at, m[v]);
        _mm512_storeu_ps(l, _mm512_fmadd_ps(_mm512_loadu_ps(l), shrink, sum[v]));
    }
}

ALWAYS_INLINE void softmax(fmlai_softmax_state *state, float *alpha, void *packed_weights, const float *s,
                           const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens, bool pairs)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0, n; r < lanes; r += n * LANES) {
        softmax_operands o = {s + r,      (int32_t *)packed_weights + r, state->m + r,         state->l + r, alpha + r,
                              scale2 + r, visible ? visible + r : NULL,  lanes, weights_stride(rows), tokens};
        n = lanes - r >= GROUP_VECTORS * LANES ? GROUP_VECTORS : 1;
        if (n == GROUP_VECTORS && visible) {
            softmax_group(&o, GROUP_VECTORS, true, pairs);
        } else if (n == GROUP_VECTORS) {
            softmax_group(&o, GROUP_VECTORS, false, pairs);
        } else if (visible) {
            softmax_group(&o, 1, true, pairs);
        } else {
            softmax_group(&o, 1, false, pairs);
        }
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
