/* SPDX-License-Identifier: MIT */
/*
 * tile_f32_avx512bf16.c: packing and unpacking around the kernels of f32 tiles in 512-bit vectors: fp16 and f32 data,
 * strict contexts, and bf16 data on processors whose fp32 multiply-adds are faster than their bf16 dot products.
 */
#include <string.h>

#include "tile_avx512bf16.h"

static size_t packed_rows_bytes(int32_t rows, int32_t d)
{
    return (size_t)fmlai_tile_lanes(rows) * (size_t)d * sizeof(float);
}

static size_t packed_weights_bytes(int32_t rows, int32_t tokens)
{
    return (size_t)weights_stride(rows) * (size_t)tokens * sizeof(float);
}

static size_t packed_sums_bytes(int32_t rows, int32_t d)
{
    int32_t strips = (d + STRIP_DIMS - 1) / STRIP_DIMS;
    return (size_t)strips * (size_t)fmlai_tile_lanes(rows) * STRIP_DIMS * sizeof(float);
}

/* Dims k..k+15 of a row; those from d on are zero. */
static __m512i load_dims(const float *row, int32_t k, int32_t d)
{
    float tail[LANES] = {0.0f};
    if (d - k >= LANES) {
        return _mm512_loadu_si512(row + k);
    }
    memcpy(tail, row + k, (size_t)(d - k) * sizeof(float));
    return _mm512_loadu_si512(tail);
}

static void pack_rows(void *packed, const float *src, int64_t src_stride, int32_t rows, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += LANES) {
        int32_t group = r / LANES / GROUP_VECTORS, vectors = lanes / LANES - group * GROUP_VECTORS;
        vectors = vectors < GROUP_VECTORS ? vectors : GROUP_VECTORS;
        float *at = (float *)packed + (int64_t)group * GROUP_VECTORS * LANES * d + r / LANES % GROUP_VECTORS * LANES;
        for (int32_t k = 0; k < d; k += LANES) {
            __m512i x[LANES];
            for (int32_t i = 0; i < LANES; i++) {
                x[i] = r + i < rows ? load_dims(src + (r + i) * src_stride, k, d) : _mm512_setzero_si512();
            }
            transpose_16(x);
            for (int32_t i = 0; i < LANES && k + i < d; i++) {
                _mm512_storeu_si512(at + (int64_t)(k + i) * vectors * LANES, x[i]);
            }
        }
    }
}

static void pack_weights(void *packed_weights, const float *w, int32_t rows, int32_t tokens)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t t = 0; t < tokens; t++) {
        memcpy((float *)packed_weights + t * weights_stride(rows), w + t * lanes, (size_t)lanes * sizeof(float));
    }
}

static void pack_turned(void *packed_weights, const float *w, int64_t w_stride, int32_t rows, int32_t tokens)
{
    for (int32_t r = 0; r < rows; r += LANES) {
        float *dst = (float *)packed_weights + r;
        for (int32_t t = 0; t < tokens; t += LANES) {
            __m512i x[LANES];
            for (int32_t i = 0; i < LANES; i++) {
                x[i] = r + i < rows ? _mm512_load_si512(w + (r + i) * w_stride + t) : _mm512_setzero_si512();
            }
            transpose_16(x);
            for (int32_t i = 0; i < LANES && t + i < tokens; i++) {
                _mm512_store_si512(dst + (t + i) * weights_stride(rows), x[i]);
            }
        }
    }
}

static void unpack(float *dst, int64_t dst_stride, const void *packed_sums, const void *next, int32_t rows,
                   int32_t first, int32_t count, int32_t d)
{
    (void)next;
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(rows) * STRIP_DIMS;
    for (int32_t r = 0; r < count; r++) {
        const float *sums = (const float *)packed_sums + (int64_t)(first + r) * STRIP_DIMS;
        float *to = dst + r * dst_stride;
        int32_t k = 0;
        for (; k + STRIP_DIMS <= d; k += STRIP_DIMS, sums += strip_stride) {
            memcpy(to + k, sums, STRIP_DIMS * sizeof(float)); /* of constant size: a few moves, no call */
        }
        memcpy(to + k, sums, (size_t)(d - k) * sizeof(float));
    }
}

const fmlai_tile_kernels fmlak_tile_f32_avx512bf16 = {
    .name = "avx512",
    .dtype = FMLA_F32,
    .tile_tokens = 96,
    .packed_rows_bytes = packed_rows_bytes,
    .packed_weights_bytes = packed_weights_bytes,
    .packed_sums_bytes = packed_sums_bytes,
    .pack_rows = pack_rows,
    .scores = fmlak_tile_scores_f32_avx512bf16,
    .softmax = fmlak_tile_softmax_f32_avx512bf16,
    .pack_weights = pack_weights,
    .pack_turned = pack_turned,
    .accumulate = fmlak_tile_accumulate_f32_avx512bf16,
    .unpack = unpack,
    .begin = fmlak_tile_begin_avx512bf16,
    .fold = fmlak_tile_fold_avx512bf16,
    .finish = fmlak_tile_finish_avx512bf16,
    .widen = fmlak_tile_widen_avx512bf16,
    .narrow = fmlak_tile_narrow_avx512bf16,
    .gradients = fmlak_tile_gradients_avx512bf16,
    .squares = fmlak_tile_squares_avx512bf16,
    .unrotate = fmlak_tile_unrotate_avx512bf16,
};
