/* SPDX-License-Identifier: MIT */
/*
 * tile_avx2.c: the AVX2 tile kernels' table, packing and unpacking. Layouts: tile_avx2.h.
 */
#include <string.h>

#include "tile_avx2.h"

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
    int32_t strips = (d + STRIP - 1) / STRIP;
    return (size_t)strips * (size_t)fmlai_tile_lanes(rows) * STRIP * sizeof(float);
}

/* 8 rows x 8 dims, transposed. */
static void transpose(float *dst, int64_t dst_stride, const float *src, int64_t src_stride)
{
    __m256 r[8], t[8];
    for (int32_t i = 0; i < 8; i++) {
        r[i] = _mm256_loadu_ps(src + i * src_stride);
    }
    for (int32_t i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int32_t i = 0; i < 2; i++) {
        r[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        r[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xEE);
        r[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        r[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xEE);
    }
    for (int32_t i = 0; i < 4; i++) {
        _mm256_storeu_ps(dst + i * dst_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(dst + (i + 4) * dst_stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

/* LANES rows of n floats, turned: dst[k * dst_stride + row]; zeros for those beyond `rows`. */
static void turn_lanes(float *dst, int64_t dst_stride, const float *src, int64_t src_stride, int32_t rows, int32_t n)
{
    int32_t k = 0;
    for (; rows >= LANES && k + LANES <= n; k += LANES) {
        transpose(dst + k * dst_stride, dst_stride, src + k, src_stride);
    }
    for (; k < n; k++) {
        for (int32_t i = 0; i < LANES; i++) {
            dst[k * dst_stride + i] = i < rows ? src[i * src_stride + k] : 0.0f;
        }
    }
}

static void pack_rows(void *packed, const float *src, int64_t src_stride, int32_t rows, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += LANES) {
        float *dst = (float *)packed + (int64_t)(r / STRIP) * d * STRIP + r % STRIP;
        turn_lanes(dst, STRIP, src + r * src_stride, src_stride, rows - r, d);
    }
}

static void pack_weights(void *packed_weights, const float *w, int32_t rows, int32_t tokens)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t t = 0; t < tokens; t++) {
        memcpy((float *)packed_weights + t * weights_stride(rows), w + t * lanes,
               (size_t)lanes * sizeof(float));
    }
}

static void pack_turned(void *packed_weights, const float *w, int64_t w_stride, int32_t rows, int32_t tokens)
{
    int32_t lanes = fmlai_tile_lanes(rows);
    for (int32_t r = 0; r < lanes; r += LANES) {
        turn_lanes((float *)packed_weights + r, weights_stride(rows), w + r * w_stride, w_stride, rows - r, tokens);
    }
}

static void unpack(float *dst, int64_t dst_stride, const void *packed_sums, const void *next, int32_t rows,
                   int32_t first, int32_t count, int32_t d)
{
    (void)next;
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(rows) * STRIP;
    for (int32_t r = 0; r < count; r++) {
        const float *sums = (const float *)packed_sums + (int64_t)(first + r) * STRIP;
        float *to = dst + r * dst_stride;
        int32_t k = 0;
        for (; k + STRIP <= d; k += STRIP, sums += strip_stride) {
            memcpy(to + k, sums, STRIP * sizeof(float)); /* of constant size: a few moves, no call */
        }
        memcpy(to + k, sums, (size_t)(d - k) * sizeof(float));
    }
}

void fmlai_tile_init_avx2(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16)
{
    *f32 = (fmlai_tile_kernels){
        .name = "avx2",
        .dtype = FMLA_F32,
        .tile_tokens = 48,
        .packed_rows_bytes = packed_rows_bytes,
        .packed_weights_bytes = packed_weights_bytes,
        .packed_sums_bytes = packed_sums_bytes,
        .pack_rows = pack_rows,
        .scores = fmlak_tile_scores_avx2,
        .softmax = fmlak_tile_softmax_avx2,
        .pack_weights = pack_weights,
        .pack_turned = pack_turned,
        .accumulate = fmlak_tile_accumulate_avx2,
        .unpack = unpack,
        .begin = fmlak_tile_begin_avx2,
        .fold = fmlak_tile_fold_avx2,
        .finish = fmlak_tile_finish_avx2,
        .widen = fmlak_tile_widen_avx2,
        .narrow = fmlak_tile_narrow_avx2,
        .gradients = fmlak_tile_gradients_avx2,
        .squares = fmlak_tile_squares_avx2,
        .rotate = fmlak_tile_rotate_avx2,
        .unrotate = fmlak_tile_unrotate_avx2,
    };
    *bf16 = *f32;
}
