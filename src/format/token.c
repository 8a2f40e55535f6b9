/* SPDX-License-Identifier: MIT */
/*
 * Reading tokens. One reader for every format, built-in or described by the caller: the description says
 * where codes, scales and the RoPE part lie and how they are coded. Nothing here knows a format by name.
 */
#include <string.h>

#include "format.h"

static float code_at(const uint8_t *row, int32_t element, int32_t j)
{
    if (element == FMLA_F4_E2M1) {
        return fmlai_f32_from_e2m1((uint8_t)(row[j / 2] >> (j % 2 * 4)));
    }
    return fmlai_f32_from_e4m3(row[j]);
}

static float scale_at(const uint8_t *scales, int32_t scale, int32_t group)
{
    float x = 1.0f;
    switch (scale) {
    case FMLA_F32:
        memcpy(&x, scales + (int64_t)group * 4, sizeof x);
        return x;
    case FMLA_F8_E8M0:
        return fmlai_f32_from_e8m0(scales[group]);
    case FMLA_F8_E4M3:
        return fmlai_f32_from_e4m3(scales[group]);
    default:
        return x;
    }
}

/*
 * A product of a code and an e8m0 or e4m3 scale is exact in fp32 unless it overflows (which overflows bf16,
 * too), so rounding the result to bf16 is the only rounding. Multiplying by an outer scale of 1 changes
 * nothing.
 */
static void read_codes(const fmlai_pool *pool, int64_t slot, int32_t begin, int32_t end, float *dst)
{
    const fmla_format_info *f = &pool->format;
    const uint8_t *row = fmlai_pool_row(pool, slot);
    const uint8_t *scales = fmlai_pool_scales(pool, slot);
    int32_t group = f->group > 0 ? f->group : f->quant_dims;
    int32_t j = begin;
    while (j < end) {
        int32_t g = j / group;
        int32_t stop = group * g + group < end ? group * g + group : end;
        float scale = scale_at(scales, f->scale, g);
        for (; j < stop; j++) {
            dst[j - begin] = code_at(row, f->element, j) * scale * pool->outer_scale;
        }
    }
}

void fmlai_token_read_dims(const fmlai_pool *pool, int64_t slot, int32_t head, int32_t begin, int32_t end, float *dst)
{
    const fmla_format_info *f = &pool->format;
    const uint8_t *row = fmlai_pool_row(pool, slot);
    if (f->layout == FMLA_LAYOUT_PLAIN) {
        fmlai_load_row(row + head * pool->head_stride, (fmla_dtype)f->element, begin, end, dst);
        return;
    }
    int32_t codes_end = end < f->quant_dims ? end : f->quant_dims;
    if (begin < codes_end) {
        read_codes(pool, slot, begin, codes_end, dst);
    }
    int32_t rope = begin > f->quant_dims ? begin : f->quant_dims;
    fmlai_load_row(row + f->rope_offset, FMLA_BF16, rope - f->quant_dims, end - f->quant_dims, dst + (rope - begin));
}

void fmlai_token_read_f32(const fmlai_pool *pool, int64_t slot, int32_t head, float *dst)
{
    fmlai_token_read_dims(pool, slot, head, 0, pool->format.d_qk, dst);
}

void fmlai_token_read(const fmlai_pool *pool, int64_t slot, int32_t head, float *dst)
{
    fmlai_token_read_f32(pool, slot, head, dst);
    if (pool->format.element == FMLA_F16) {
        return;
    }
    fmlai_round_row(dst, pool->format.d_qk);
}
