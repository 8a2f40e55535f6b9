/* SPDX-License-Identifier: MIT */
/*
 * tile_avx512bf16.c: the AVX-512 BF16 tile kernels' table, packing and unpacking. Layouts: tile_avx512bf16.h.
 * Those of f32 tiles: tile_f32_avx512bf16.c.
 */
#include <string.h>

#include "tile_avx512bf16.h"

static size_t packed_rows_bytes(int32_t rows, int32_t d)
{
    return (size_t)fmlai_tile_lanes(rows) * (size_t)quads_of(d) * 4 * sizeof(uint16_t);
}

static size_t packed_weights_bytes(int32_t rows, int32_t tokens)
{
    return (size_t)weights_stride(rows) * (size_t)pairs_of(tokens) * 2 * sizeof(uint16_t);
}

static size_t packed_sums_bytes(int32_t rows, int32_t d)
{
    int32_t strips = (d + STRIP_DIMS - 1) / STRIP_DIMS;
    return (size_t)strips * (size_t)fmlai_tile_lanes(rows) * STRIP_DIMS * sizeof(float);
}

/* Dims k..k+31 of a row as 16 pairs; those from d on are zero. */
static __m512i load_pairs(const float *row, int32_t k, int32_t d)
{
    float tail[UNIT_DIMS] = {0.0f};
    const float *from = row + k;
    if (d - k < UNIT_DIMS) {
        memcpy(tail, from, (size_t)(d - k) * sizeof(float));
        from = tail;
    }
    return two_in_order(_mm512_loadu_ps(from), _mm512_loadu_ps(from + LANES));
}

void fmlak_pairs_of_rows_avx512bf16(__m512i x[LANES], const float *src, int64_t src_stride, int32_t rows, int32_t k,
                                    int32_t d)
{
    for (int32_t i = 0; i < LANES; i++) {
        x[i] = i < rows ? load_pairs(src + i * src_stride, k, d) : _mm512_setzero_si512();
    }
    transpose_16(x);
}

static void pack_rows(void *packed, const float *src, int64_t src_stride, int32_t rows, int32_t d)
{
    int32_t lanes = fmlai_tile_lanes(rows), quads = quads_of(d);
    for (int32_t r = 0; r < lanes; r += LANES) {
        int32_t group = r / LANES / GROUP_VECTORS, left = lanes / LANES - group * GROUP_VECTORS;
        int32_t vectors = left < GROUP_VECTORS ? left : GROUP_VECTORS, v = r / LANES % GROUP_VECTORS;
        int32_t *at = (int32_t *)packed + 2 * LANES * ((int64_t)group * GROUP_VECTORS * quads + v); /* a pair each */
        for (int32_t q = 0; q < quads; q += LANES / 2) {
            __m512i x[LANES];
            fmlak_pairs_of_rows_avx512bf16(x, src + r * src_stride, src_stride, rows - r, 4 * q, d);
            for (int32_t i = 0; i < LANES / 2 && q + i < quads; i++) {
                int32_t *to = at + (int64_t)(q + i) * vectors * 2 * LANES;
                _mm512_store_si512(to, _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]));
                _mm512_store_si512(to + LANES, _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
            }
        }
    }
}

static void pack_weights(void *packed_weights, const float *w, int32_t rows, int32_t tokens)
{
    int32_t lanes = fmlai_tile_lanes(rows), *dst = packed_weights;
    for (int32_t t = 0; t < tokens; t += 2) {
        for (int32_t r = 0; r < lanes; r += LANES) {
            __m512 low = _mm512_loadu_ps(w + t * lanes + r);
            __m512 high = t + 1 < tokens ? _mm512_loadu_ps(w + (t + 1) * lanes + r) : _mm512_setzero_ps();
            _mm512_storeu_si512(dst + t / 2 * weights_stride(rows) + r, pair_up(low, high));
        }
    }
}

/* Tokens t..t+31 of a row as 16 pairs; those from `tokens` on are zero. */
static inline __m512i turn_pairs(const float *row, int32_t t, int32_t tokens)
{
    uint32_t some = tokens - t < UNIT_DIMS ? (1u << (tokens - t)) - 1 : UINT32_MAX;
    __m512 first = _mm512_loadu_ps(row + t), second = _mm512_setzero_ps();
    if (some >> LANES) {
        second = _mm512_maskz_mov_ps((__mmask16)(some >> LANES), _mm512_loadu_ps(row + t + LANES));
    }
    return two_in_order(_mm512_maskz_mov_ps((__mmask16)some, first), second);
}

static void pack_turned(void *packed_weights, const float *w, int64_t w_stride, int32_t rows, int32_t tokens)
{
    for (int32_t r = 0; r < rows; r += LANES) {
        int32_t *dst = (int32_t *)packed_weights + r, pairs = pairs_of(tokens);
        for (int32_t p = 0; p < pairs; p += LANES) {
            __m512i x[LANES];
            for (int32_t i = 0; i < LANES; i++) {
                x[i] = r + i < rows ? turn_pairs(w + (r + i) * w_stride, 2 * p, tokens) : _mm512_setzero_si512();
            }
            transpose_16(x);
            for (int32_t i = 0; i < LANES && p + i < pairs; i++) {
                _mm512_store_si512(dst + (p + i) * weights_stride(rows), x[i]);
            }
        }
    }
}

/* The two vectors of a unit as its 32 dims in order. */
static void restore_unit(float *dst, const float *sums)
{
    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
    const __m512i second = _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8);
    __m512 a = _mm512_loadu_ps(sums), b = _mm512_loadu_ps(sums + LANES);
    _mm512_storeu_ps(dst, _mm512_permutex2var_ps(a, first, b));
    _mm512_storeu_ps(dst + LANES, _mm512_permutex2var_ps(a, second, b));
}

static void unpack(float *dst, int64_t dst_stride, const void *packed_sums, const void *next, int32_t rows,
                   int32_t first, int32_t count, int32_t d)
{
    int64_t strip_stride = (int64_t)fmlai_tile_lanes(rows) * STRIP_DIMS, at = (int64_t)first * STRIP_DIMS;
    for (int32_t strip = 0; strip < d; strip += STRIP_DIMS, at += strip_stride) {
        for (int32_t i = 0; next && i < count * STRIP_DIMS; i += LANES) {
            __builtin_prefetch((const float *)next + at + i);
        }
        for (int32_t r = 0; r < count; r++) {
            const float *sums = (const float *)packed_sums + at + (int64_t)r * STRIP_DIMS;
            float *to = dst + r * dst_stride + strip, tail[STRIP_DIMS];
            int32_t left = d - strip;
            restore_unit(left >= UNIT_DIMS ? to : tail, sums);
            restore_unit(left >= STRIP_DIMS ? to + UNIT_DIMS : tail + UNIT_DIMS, sums + UNIT_DIMS);
            if (left < STRIP_DIMS) {
                int32_t whole = left >= UNIT_DIMS ? UNIT_DIMS : 0;
                memcpy(to + whole, tail + whole, (size_t)(left - whole) * sizeof(float));
            }
        }
    }
}

void fmlai_tile_init_avx512bf16(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16)
{
    const fmlai_tile_kernels below = *f32;
    *f32 = fmlak_tile_f32_avx512bf16;
    f32->rotate = below.rotate; /* AVX2's */
    *bf16 = (fmlai_tile_kernels){
        .name = "avx512bf16",
        .dtype = FMLA_BF16,
        .tile_tokens = FMLAI_TILE_TOKENS_MAX,
        .packed_rows_bytes = packed_rows_bytes,
        .packed_weights_bytes = packed_weights_bytes,
        .packed_sums_bytes = packed_sums_bytes,
        .pack_rows = pack_rows,
        .scores = fmlak_tile_scores_avx512bf16,
        .softmax = fmlak_tile_softmax_avx512bf16,
        .pack_weights = pack_weights,
        .pack_turned = pack_turned,
        .accumulate = fmlak_tile_accumulate_avx512bf16,
        .scores_of_parts = fmlak_tile_scores_of_parts_avx512bf16,
        .accumulate_parts = fmlak_tile_accumulate_parts_avx512bf16,
        .unpack = unpack,
        .begin = fmlak_tile_begin_avx512bf16,
        .fold = fmlak_tile_fold_avx512bf16,
        .finish = fmlak_tile_finish_avx512bf16,
        .widen = fmlak_tile_widen_avx512bf16,
        .narrow = fmlak_tile_narrow_avx512bf16,
        .gradients = fmlak_tile_gradients_avx512bf16,
        .squares = fmlak_tile_squares_avx512bf16,
        .rotate = below.rotate,
        .unrotate = fmlak_tile_unrotate_avx512bf16,
    };
}
