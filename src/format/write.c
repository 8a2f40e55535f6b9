/* SPDX-License-Identifier: MIT */
/*
 * Writing tokens: the quantisers, and conversion between pools. As in token.c one writer serves every format;
 * which quantiser a group gets follows from the types of its codes and its scale:
 *
 * - F32 or E8M0: the power of two 2^ceil(log2(max(amax / top, 1e-4))), top being the largest code, 448 or 6;
 * - E4M3: amax / top, kept inside 2^-9..448 and rounded to e4m3; NaN if the group holds a NaN or an infinity;
 * - none: codes of the values themselves;
 * - F32 with V32_2025: amax / top rounded to the source's dtype, which is what V32 records were first written
 * with.
 *
 * Codes saturate: with a rounded scale the quotient may exceed the largest code a little. A group whose scale
 * is not finite decodes to NaN whatever its codes are.
 */
#include <math.h>
#include <string.h>

#include "format.h"

/* Values to write, fetched in pieces: floats in memory, or another pool's token as attention sees it. */
typedef struct source {
    const float *values; /* NULL: the pool */
    const fmlai_pool *pool;
    int64_t slot;
    int32_t head;
    float divisor; /* outer scale of the destination */
} source;

#define PIECE 128

/* Dims begin..begin+count-1, at most PIECE of them, divided by `divisor`. */
static void fetch(const source *from, int32_t begin, int32_t count, float divisor, float *piece)
{
    if (from->values) {
        memcpy(piece, from->values + begin, (size_t)count * sizeof *piece);
    } else {
        fmlai_token_read_dims(from->pool, from->slot, from->head, begin, begin + count, piece);
    }
    bool round = !from->values && from->pool->format.element != FMLA_F16;
    for (int32_t i = 0; i < count; i++) {
        float x = round ? fmlai_f32_from_bf16(fmlai_bf16_from_f32(piece[i])) : piece[i];
        piece[i] = x / divisor;
    }
}

static int32_t piece_count(int32_t at, int32_t end)
{
    return end - at < PIECE ? end - at : PIECE;
}

/* Largest magnitude of dims begin..end-1; NaN if one is NaN. */
static float group_amax(const source *from, int32_t begin, int32_t end)
{
    float piece[PIECE];
    float amax = 0.0f;
    for (int32_t at = begin; at < end; at += PIECE) {
        int32_t count = piece_count(at, end);
        fetch(from, at, count, from->divisor, piece);
        for (int32_t i = 0; i < count; i++) {
            float x = fabsf(piece[i]);
            amax = x > amax || isnan(x) ? x : amax;
        }
        if (isnan(amax)) {
            break;
        }
    }
    return amax;
}

static float scale_power_of_two(float amax, float top)
{
    float u = amax / top;
    u = u < 1e-4f ? 1e-4f : u;
    return isfinite(u) ? ldexpf(1.0f, fmlai_ceil_log2_f32(u)) : u;
}

static float scale_e4m3(float amax, float top)
{
    if (!isfinite(amax)) {
        return NAN;
    }
    float u = amax / top;
    u = u < 0x1p-9f ? 0x1p-9f : u > 448.0f ? 448.0f : u;
    return fmlai_f32_from_e4m3(fmlai_e4m3_from_f32(u));
}

/* A quotient that rounds to 0 (all values 0, or subnormal in src_dtype) would give 0 / 0: such a group gets
 * scale 1. */
static float scale_v32_2025(float amax, float top, fmla_dtype src_dtype)
{
    float u = amax / top;
    if (src_dtype == FMLA_BF16) {
        u = fmlai_f32_from_bf16(fmlai_bf16_from_f32(u));
    } else if (src_dtype == FMLA_F16) {
        u = fmlai_f32_from_f16(fmlai_f16_from_f32(u));
    }
    return u == 0.0f ? 1.0f : u;
}

static float group_scale(const fmla_format_info *f, float amax, fmla_dtype src_dtype, fmla_quantizer quantizer)
{
    float top = f->element == FMLA_F4_E2M1 ? 6.0f : 448.0f;
    if (f->scale == FMLA_DTYPE_NONE) {
        return 1.0f;
    }
    if (f->scale == FMLA_F8_E4M3) {
        return scale_e4m3(amax, top);
    }
    if (quantizer == FMLA_QUANTIZER_V32_2025 && f->scale == FMLA_F32) {
        return scale_v32_2025(amax, top, src_dtype);
    }
    return scale_power_of_two(amax, top);
}

static void store_scale(uint8_t *scales, const fmla_format_info *f, int32_t g, float scale)
{
    if (f->scale == FMLA_F32) {
        memcpy(scales + (int64_t)g * 4, &scale, sizeof scale);
    } else if (f->scale == FMLA_F8_E8M0) {
        scales[g] = fmlai_e8m0_from_f32(scale);
    } else if (f->scale == FMLA_F8_E4M3) {
        scales[g] = fmlai_e4m3_from_f32(scale);
    }
}

/* The row was zeroed before, so that a half byte can be or-ed in. */
static void store_codes(uint8_t *row, const fmla_format_info *f, const source *from, int32_t begin, int32_t end,
                        float scale)
{
    float piece[PIECE];
    for (int32_t at = begin; at < end; at += PIECE) {
        int32_t count = piece_count(at, end);
        fetch(from, at, count, from->divisor, piece);
        for (int32_t i = 0; i < count; i++) {
            int32_t j = at + i;
            float y = piece[i] / scale;
            if (f->element == FMLA_F4_E2M1) {
                row[j / 2] |= (uint8_t)((isnan(y) ? 0 : fmlai_e2m1_from_f32(y)) << (j % 2 * 4));
            } else {
                row[j] = fmlai_e4m3_from_f32_saturating(y);
            }
        }
    }
}

/* Elements that are stored as they are, rounded to dtype: plain tokens, RoPE parts. */
static void store_plain(uint8_t *row, fmla_dtype dtype, const source *from, int32_t begin, int32_t end)
{
    float piece[PIECE];
    for (int32_t at = begin; at < end; at += PIECE) {
        int32_t count = piece_count(at, end);
        fetch(from, at, count, 1.0f, piece);
        for (int32_t i = 0; i < count; i++) {
            fmlai_store_f32(row, dtype, at - begin + i, piece[i]);
        }
    }
}

/* The pool's memory is the caller's and writable; fmlai_pool_row returns it read-only for the readers' sake.
 */
static uint8_t *writable(const uint8_t *p)
{
    return (uint8_t *)(uintptr_t)p;
}

static void write_token(const fmlai_pool *pool, int64_t slot, int32_t head, const source *from, fmla_dtype src_dtype,
                        fmla_quantizer quantizer)
{
    const fmla_format_info *f = &pool->format;
    uint8_t *row = writable(fmlai_pool_row(pool, slot));
    if (f->layout == FMLA_LAYOUT_PLAIN) {
        store_plain(row + head * pool->head_stride, (fmla_dtype)f->element, from, 0, f->d_qk);
        return;
    }
    uint8_t *scales = writable(fmlai_pool_scales(pool, slot));
    memset(row, 0, (size_t)f->data_row_bytes);
    if (f->layout == FMLA_LAYOUT_PAGE) {
        memset(scales - f->scale_offset, 0, (size_t)f->scale_row_bytes);
    }
    int32_t group = f->group > 0 ? f->group : f->quant_dims;
    for (int32_t g = 0; g < f->quant_dims / group; g++) {
        float amax = group_amax(from, g * group, g * group + group);
        float scale = group_scale(f, amax, src_dtype, quantizer);
        store_scale(scales, f, g, scale);
        store_codes(row, f, from, g * group, g * group + group, scale);
    }
    store_plain(row + f->rope_offset, FMLA_BF16, from, f->quant_dims, f->d_qk);
}

void fmlai_token_write(const fmlai_pool *pool, int64_t slot, int32_t head, const float *src, fmla_dtype src_dtype,
                       fmla_quantizer quantizer)
{
    source from = {.values = src, .divisor = pool->outer_scale};
    write_token(pool, slot, head, &from, src_dtype, quantizer);
}

/* Whether two pools keep the same codes, scales and RoPE part, though perhaps at other places. */
static bool same_codes(const fmlai_pool *a, const fmlai_pool *b)
{
    const fmla_format_info *f = &a->format, *g = &b->format;
    return f->element == g->element && f->d_qk == g->d_qk && f->quant_dims == g->quant_dims && f->group == g->group &&
           f->scale == g->scale && (f->layout == FMLA_LAYOUT_PLAIN || a->outer_scale == b->outer_scale);
}

static void copy_codes(const fmlai_pool *dst, int64_t dst_slot, const fmlai_pool *src, int64_t src_slot, int32_t head)
{
    const fmla_format_info *f = &dst->format, *g = &src->format;
    uint8_t *to = writable(fmlai_pool_row(dst, dst_slot));
    const uint8_t *from = fmlai_pool_row(src, src_slot);
    if (f->layout == FMLA_LAYOUT_PLAIN) {
        memcpy(to + head * dst->head_stride, from + head * src->head_stride, (size_t)f->d_qk * 2);
        return;
    }
    uint8_t *scales = writable(fmlai_pool_scales(dst, dst_slot));
    memset(to, 0, (size_t)f->data_row_bytes);
    if (f->layout == FMLA_LAYOUT_PAGE) {
        memset(scales - f->scale_offset, 0, (size_t)f->scale_row_bytes);
    }
    memcpy(to, from, (size_t)(f->element == FMLA_F4_E2M1 ? f->quant_dims / 2 : f->quant_dims));
    memcpy(to + f->rope_offset, from + g->rope_offset, (size_t)f->rope_dims * 2);
    if (f->group > 0) {
        memcpy(scales, fmlai_pool_scales(src, src_slot), (size_t)(f->quant_dims / f->group * fmlai_scale_bytes(f)));
    }
}

void fmlai_token_convert(const fmlai_pool *dst, int64_t dst_slot, const fmlai_pool *src, int64_t src_slot, int32_t head)
{
    if (same_codes(dst, src)) {
        copy_codes(dst, dst_slot, src, src_slot, head);
        return;
    }
    source from = {.pool = src, .slot = src_slot, .head = head, .divisor = dst->outer_scale};
    write_token(dst, dst_slot, head, &from, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
}
