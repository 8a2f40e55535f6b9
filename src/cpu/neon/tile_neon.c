/* SPDX-License-Identifier: MIT */
/*
 * tile_neon.c: the tile kernels with Advanced SIMD, float tiles only.
 *
 * Packed rows     [group of 16 rows][d][16]    rows beyond the last are zero
 * Packed weights  [tokens][lanes]
 * Packed sums     [strip of 16 dims][lanes][16]
 *
 * lanes = fmlai_tile_lanes(rows). Both products keep 4 x 16 sums in registers: 4 tokens by 16 rows, or 4 rows
 * by 16 dims. Long dot products are made of blocks of 64 dims, weighted sums of one tile, so that rounding
 * errors do not pile up.
 */
#include <arm_neon.h>
#include <string.h>

#include "../tile.h"

#define STRIP      16
#define BLOCK_DIMS 64

static size_t packed_rows_bytes(int32_t rows, int32_t d)
{
    return (size_t)fmlai_tile_lanes(rows) * (size_t)d * sizeof(float);
}

static size_t packed_weights_bytes(int32_t rows, int32_t tokens)
{
    return (size_t)fmlai_tile_lanes(rows) * (size_t)tokens * sizeof(float);
}

static size_t packed_sums_bytes(int32_t rows, int32_t d)
{
    return (size_t)((d + STRIP - 1) / STRIP) * (size_t)fmlai_tile_lanes(rows) * STRIP * sizeof(float);
}

static void pack_rows(void *packed, const float *src, int64_t src_stride, int32_t rows, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r++) {
        float *dst = (float *)packed + (int64_t)(r / STRIP) * d * STRIP + r % STRIP;
        for (int32_t k = 0; k < d; k++) {
            dst[k * STRIP] = r < rows ? src[r * src_stride + k] : 0.0f;
        }
    }
}

static void pack_weights(void *packed_weights, const float *w, int32_t rows, int32_t tokens)
{
    memcpy(packed_weights, w, packed_weights_bytes(rows, tokens));
}

static void unpack(float *dst, int64_t dst_stride, const void *packed_sums, const void *next, int32_t rows,
                   int32_t first, int32_t count, int32_t d)
{
    (void)next;
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(rows) * STRIP;
    for (int32_t r = 0; r < count; r++) {
        for (int32_t begin = 0; begin < d; begin += STRIP) {
            const float *sums = (const float *)packed_sums + begin / STRIP * strip_stride + (first + r) * STRIP;
            memcpy(dst + r * dst_stride + begin, sums,
                   (size_t)(d - begin < STRIP ? d - begin : STRIP) * sizeof(float));
        }
    }
}

/* ---- scores ------------------------------------------------------------------------------------------ */

/* Adds the dot products over dims begin..end-1 of `count` (1..4) tokens with 16 rows to s. */
static inline void add_scores(float *s, int32_t lanes, const float *q, const float *tile, int64_t tile_stride,
                              int32_t count, int32_t begin, int32_t end)
{
    float32x4_t sum[4][4];
    for (int32_t t = 0; t < 4; t++) {
        for (int32_t v = 0; v < 4; v++) {
            sum[t][v] = vdupq_n_f32(0.0f);
        }
    }
    for (int32_t k = begin; k < end; k++) {
        float32x4_t a = vld1q_f32(q + k * STRIP), b = vld1q_f32(q + k * STRIP + 4);
        float32x4_t c = vld1q_f32(q + k * STRIP + 8), d = vld1q_f32(q + k * STRIP + 12);
        for (int32_t t = 0; t < count; t++) {
            float x = tile[t * tile_stride + k];
            sum[t][0] = vfmaq_n_f32(sum[t][0], a, x);
            sum[t][1] = vfmaq_n_f32(sum[t][1], b, x);
            sum[t][2] = vfmaq_n_f32(sum[t][2], c, x);
            sum[t][3] = vfmaq_n_f32(sum[t][3], d, x);
        }
    }
    for (int32_t t = 0; t < count; t++) {
        for (int32_t v = 0; v < 4; v++) {
            float *at = s + t * lanes + 4 * v;
            vst1q_f32(at, vaddq_f32(vld1q_f32(at), sum[t][v]));
        }
    }
}

static void scores(float *s, const void *packed_rows, const void *tile, int64_t tile_stride, int32_t rows,
                   int32_t tokens, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    memset(s, 0, (size_t)lanes * (size_t)tokens * sizeof(float));
    for (int32_t r = 0; r < lanes; r += STRIP) {
        const float *q = (const float *)packed_rows + (int64_t)r * d;
        for (int32_t begin = 0; begin < d; begin += BLOCK_DIMS) {
            int32_t end = d - begin < BLOCK_DIMS ? d : begin + BLOCK_DIMS;
            int32_t t = 0;
            for (; t + 4 <= tokens; t += 4) {
                add_scores(s + t * lanes + r, lanes, q, (const float *)tile + t * tile_stride, tile_stride, 4,
                           begin, end);
            }
            for (; t < tokens; t++) {
                add_scores(s + t * lanes + r, lanes, q, (const float *)tile + t * tile_stride, tile_stride, 1,
                           begin, end);
            }
        }
    }
}

/* ---- softmax ----------------------------------------------------------------------------------------- */

/* 2^x for x <= 0, about 2^-22 relative, exactly 1 for 0, 0 far below the smallest number; NaN stays. */
static inline float32x4_t exp2_neon(float32x4_t x)
{
    x = vmaxq_f32(x, vdupq_n_f32(-160.0f));
    float32x4_t n = vrndnq_f32(x);
    float32x4_t f = vsubq_f32(x, n);
    float32x4_t p = vdupq_n_f32(1.5252734e-5f);
    p = vfmaq_f32(vdupq_n_f32(1.5403530e-4f), p, f);
    p = vfmaq_f32(vdupq_n_f32(1.3333558e-3f), p, f);
    p = vfmaq_f32(vdupq_n_f32(9.6181291e-3f), p, f);
    p = vfmaq_f32(vdupq_n_f32(5.5504109e-2f), p, f);
    p = vfmaq_f32(vdupq_n_f32(2.4022651e-1f), p, f);
    p = vfmaq_f32(vdupq_n_f32(6.9314718e-1f), p, f);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, f);
    /* 2^n in two factors, each a normal number. */
    int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1), bias = vdupq_n_s32(127);
    float32x4_t a = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23));
    float32x4_t b = vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vsubq_s32(whole, half), bias), 23));
    return vmulq_f32(vmulq_f32(p, a), b);
}

static void softmax(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                    const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens)
{
    const float32x4_t zero = vdupq_n_f32(0.0f);
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += 4) {
        float32x4_t scale = vld1q_f32(scale2 + r), old = vld1q_f32(state->m + r), m = old, sum = zero;
        int32x4_t n = visible ? vld1q_s32(visible + r) : vdupq_n_s32(tokens);
        for (int32_t t = 0; t < tokens; t++) {
            uint32x4_t seen = vcgtq_s32(n, vdupq_n_s32(t));
            float32x4_t x = vmulq_f32(vld1q_f32(s + t * lanes + r), scale);
            m = vbslq_f32(seen, vmaxq_f32(m, x), m); /* NaN wins */
        }
        for (int32_t t = 0; t < tokens; t++) {
            uint32x4_t seen = vcgtq_s32(n, vdupq_n_s32(t));
            float32x4_t x = vmulq_f32(vld1q_f32(s + t * lanes + r), scale);
            float32x4_t w = vbslq_f32(seen, exp2_neon(vsubq_f32(x, m)), zero);
            vst1q_f32((float *)packed_weights + t * lanes + r, w);
            sum = vaddq_f32(sum, w);
        }
        float32x4_t shrink = vbslq_f32(vceqq_f32(old, m), vdupq_n_f32(1.0f), exp2_neon(vsubq_f32(old, m)));
        vst1q_f32(alpha + r, shrink);
        vst1q_f32(state->m + r, m);
        vst1q_f32(state->l + r, vfmaq_f32(sum, vld1q_f32(state->l + r), shrink));
    }
}

/* ---- accumulate -------------------------------------------------------------------------------------- */

/* Four rows of weights times 16 dims of `tokens` tokens. */
static inline void weigh_four(float32x4_t sum[4][4], const float *w, int32_t lanes, const float *v,
                              int64_t tile_stride, int32_t tokens)
{
    for (int32_t t = 0; t < tokens; t++) {
        float32x4_t weight = vld1q_f32(w + t * lanes);
        for (int32_t i = 0; i < 4; i++) {
            float32x4_t value = vld1q_f32(v + t * tile_stride + 4 * i);
            sum[0][i] = vfmaq_laneq_f32(sum[0][i], value, weight, 0);
            sum[1][i] = vfmaq_laneq_f32(sum[1][i], value, weight, 1);
            sum[2][i] = vfmaq_laneq_f32(sum[2][i], value, weight, 2);
            sum[3][i] = vfmaq_laneq_f32(sum[3][i], value, weight, 3);
        }
    }
}

/* One row goes on alone with the tokens first..end-1 that not all four see, in the same order of operations.
 */
static inline void weigh_one(float32x4_t sum[4], const float *w, int32_t lanes, const float *v,
                             int64_t tile_stride, int32_t first, int32_t end)
{
    for (int32_t t = first; t < end; t++) {
        for (int32_t i = 0; i < 4; i++) {
            sum[i] = vfmaq_n_f32(sum[i], vld1q_f32(v + t * tile_stride + 4 * i), w[t * lanes]);
        }
    }
}

static void accumulate(void *packed_sums, const void *packed_weights, const void *tile, int64_t tile_stride,
                       const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t begin = 0; begin < d; begin += STRIP) {
        const float *v = (const float *)tile + begin;
        float *sums = (float *)packed_sums + (int64_t)(begin / STRIP) * lanes * STRIP;
        for (int32_t r = 0; r < rows; r += 4) {
            const float *w = (const float *)packed_weights + r;
            float32x4_t sum[4][4];
            int32_t seen[4], all = tokens;
            for (int32_t i = 0; i < 4; i++) {
                seen[i] = r + i < rows ? fmlai_tile_seen(visible, r + i, tokens) : 0;
                all = r + i < rows && seen[i] < all ? seen[i] : all;
                for (int32_t k = 0; k < 4; k++) {
                    sum[i][k] = vdupq_n_f32(0.0f);
                }
            }
            weigh_four(sum, w, lanes, v, tile_stride, all);
            for (int32_t i = 0; i < 4; i++) {
                weigh_one(sum[i], w + i, lanes, v, tile_stride, all, seen[i]);
                for (int32_t k = 0; k < 4; k++) {
                    float *at = sums + (r + i) * STRIP + 4 * k;
                    vst1q_f32(at, alpha ? vfmaq_n_f32(sum[i][k], vld1q_f32(at), alpha[r + i]) : sum[i][k]);
                }
            }
        }
    }
}

void fmlai_tile_init_neon(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16)
{
    *f32 = (fmlai_tile_kernels){
        .name = "neon",
        .dtype = FMLA_F32,
        .tile_tokens = 48,
        .packed_rows_bytes = packed_rows_bytes,
        .packed_weights_bytes = packed_weights_bytes,
        .packed_sums_bytes = packed_sums_bytes,
        .pack_rows = pack_rows,
        .scores = scores,
        .softmax = softmax,
        .pack_weights = pack_weights,
        .pack_turned = f32->pack_turned, /* the layout is the scalar one */
        .accumulate = accumulate,
        .unpack = unpack,
        .begin = f32->begin,
        .fold = f32->fold, /* row by row: as the compiler vectorises them */
        .finish = f32->finish,
        .widen = f32->widen,
        .narrow = f32->narrow,
        .gradients = f32->gradients,
        .squares = f32->squares,
        .rotate = f32->rotate,
        .unrotate = f32->unrotate,
    };
    *bf16 = *f32;
}
