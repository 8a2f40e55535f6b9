/* SPDX-License-Identifier: MIT */
/*
 * tile_scalar.c: the tile kernels in portable C, written to be read; the other tiers must agree with it to
 * rounding.
 *
 * Layouts: packed rows [d][lanes], packed weights [tokens][lanes], packed sums [rows][d], all float; lanes
 * are the rows rounded up to whole vectors. Sums over many terms are made of short blocks, so that rounding
 * errors do not pile up in one long chain: dot products of BLOCK_DIMS, weighted sums of one tile.
 */
#include <math.h>
#include <string.h>

#include "tile_scalar.h"

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
    return (size_t)rows * (size_t)d * sizeof(float);
}

static void pack_rows(void *packed, const float *src, int64_t src_stride, int32_t rows, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    float *dst = packed;
    for (int32_t k = 0; k < d; k++) {
        for (int32_t r = 0; r < lanes; r++) {
            dst[k * lanes + r] = r < rows ? src[r * src_stride + k] : 0.0f;
        }
    }
}

static void scores(float *s, const void *packed_rows, const void *tile, int64_t tile_stride, int32_t rows,
                   int32_t tokens, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    const float *q = packed_rows;
    memset(s, 0, (size_t)lanes * (size_t)tokens * sizeof(float));
    for (int32_t t = 0; t < tokens; t++) {
        const float *token = (const float *)tile + t * tile_stride;
        for (int32_t begin = 0; begin < d; begin += BLOCK_DIMS) {
            int32_t end = d - begin < BLOCK_DIMS ? d : begin + BLOCK_DIMS;
            float block[FMLAI_TILE_ROWS] = {0.0f};
            for (int32_t k = begin; k < end; k++) {
                for (int32_t r = 0; r < lanes; r++) {
                    block[r] += q[k * lanes + r] * token[k];
                }
            }
            for (int32_t r = 0; r < lanes; r++) {
                s[t * lanes + r] += block[r];
            }
        }
    }
}

static void softmax(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                    const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    float *weights = packed_weights;
    for (int32_t r = 0; r < rows; r++) {
        int32_t n = fmlai_tile_seen(visible, r, tokens);
        float old = state->m[r], m = old;
        for (int32_t t = 0; t < n; t++) {
            float x = s[t * lanes + r] * scale2[r];
            m = x > m || isnan(x) ? x : m; /* once NaN, no comparison is true, and NaN stays */
        }
        double sum = 0.0;
        for (int32_t t = 0; t < tokens; t++) {
            float w = t < n ? exp2f(s[t * lanes + r] * scale2[r] - m) : 0.0f;
            weights[t * lanes + r] = w;
            sum += w;
        }
        alpha[r] = old == m ? 1.0f : exp2f(old - m);
        state->m[r] = m;
        state->l[r] = (float)((double)state->l[r] * alpha[r] + sum);
    }
}

static void pack_weights(void *packed_weights, const float *w, int32_t rows, int32_t tokens)
{
    memcpy(packed_weights, w, packed_weights_bytes(rows, tokens));
}

static void accumulate(void *packed_sums, const void *packed_weights, const void *tile, int64_t tile_stride,
                       const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    const float *weights = packed_weights;
    for (int32_t r = 0; r < rows; r++) {
        int32_t n = fmlai_tile_seen(visible, r, tokens);
        for (int32_t begin = 0; begin < d; begin += BLOCK_DIMS) {
            int32_t width = d - begin < BLOCK_DIMS ? d - begin : BLOCK_DIMS;
            float *sums = (float *)packed_sums + (int64_t)r * d + begin;
            float block[BLOCK_DIMS] = {0.0f};
            for (int32_t t = 0; t < n; t++) {
                const float *v = (const float *)tile + t * tile_stride + begin;
                for (int32_t k = 0; k < width; k++) {
                    block[k] += weights[t * lanes + r] * v[k];
                }
            }
            for (int32_t k = 0; k < width; k++) {
                sums[k] = (alpha ? sums[k] * alpha[r] : 0.0f) + block[k];
            }
        }
    }
}

static void unpack(float *dst, int64_t dst_stride, const void *packed_sums, const void *next, int32_t rows,
                   int32_t first, int32_t count, int32_t d)
{
    (void)next;
    (void)rows;
    for (int32_t r = 0; r < count; r++) {
        memcpy(dst + r * dst_stride, (const float *)packed_sums + (int64_t)(first + r) * d, (size_t)d * sizeof(float));
    }
}

void fmlai_tile_init_scalar(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16)
{
    *f32 = (fmlai_tile_kernels){
        .name = "scalar",
        .dtype = FMLA_F32,
        .tile_tokens = 64,
        .packed_rows_bytes = packed_rows_bytes,
        .packed_weights_bytes = packed_weights_bytes,
        .packed_sums_bytes = packed_sums_bytes,
        .pack_rows = pack_rows,
        .scores = scores,
        .softmax = softmax,
        .pack_weights = pack_weights,
        .pack_turned = pack_rows, /* the layouts are the same */
        .accumulate = accumulate,
        .unpack = unpack,
        .begin = fmlak_tile_begin_scalar,
        .fold = fmlak_tile_fold_scalar,
        .finish = fmlak_tile_finish_scalar,
        .widen = fmlak_tile_widen_scalar,
        .narrow = fmlak_tile_narrow_scalar,
        .gradients = fmlak_tile_gradients_scalar,
        .squares = fmlak_tile_squares_scalar,
        .rotate = fmlak_tile_rotate_scalar,
        .unrotate = fmlak_tile_unrotate_scalar,
    };
    *bf16 = *f32;
}
