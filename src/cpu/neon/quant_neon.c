/* SPDX-License-Identifier: MIT */
/*
 * quant_neon.c: tokens to float tiles with Advanced SIMD, for plain and e4m3 formats; e2m1 formats and
 * writing stay with the scalar tier. As in quant_avx2.c, e4m3 goes through fp16: exponent and fraction moved
 * to fp16's places make the value times 2^-8; NaN codes get fp16's NaN exponent.
 */
#include <arm_neon.h>

#include "../quant/walk.h"

/* Nearest bf16, ties to even, as float; NaN stays NaN. */
static inline float32x4_t round_to_bf16(float32x4_t x)
{
    uint32x4_t bits = vreinterpretq_u32_f32(x), upper = vdupq_n_u32(0xFFFF0000u);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
    uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    uint32x4_t number = vceqq_f32(x, x);
    return vreinterpretq_f32_u32(vandq_u32(vbslq_u32(number, rounded, quiet), upper));
}

/* n codes (a multiple of 8) of one group. */
static inline void e4m3_group(float *dst, const uint8_t *codes, int32_t n, float scale)
{
    for (int32_t j = 0; j < n; j += 8) {
        uint16x8_t code = vmovl_u8(vld1_u8(codes + j));
        uint16x8_t magnitude = vandq_u16(code, vdupq_n_u16(0x7F));
        uint16x8_t half = vshlq_n_u16(magnitude, 7);
        half = vorrq_u16(half, vandq_u16(vceqq_u16(magnitude, vdupq_n_u16(0x7F)), vdupq_n_u16(0x7E00)));
        half = vorrq_u16(half, vshlq_n_u16(vandq_u16(code, vdupq_n_u16(0x80)), 8));
        float32x4_t low = vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half)));
        float32x4_t high = vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(half)));
        low = vmulq_n_f32(vmulq_n_f32(low, 256.0f), scale);
        high = vmulq_n_f32(vmulq_n_f32(high, 256.0f), scale);
        vst1q_f32(dst + j, round_to_bf16(low));
        vst1q_f32(dst + j + 4, round_to_bf16(high));
    }
}

static void plain_row(float *dst, const uint8_t *src, int32_t n, bool f16)
{
    for (int32_t j = 0; j < n; j += 4) {
        uint16_t raw[4] = {0};
        float wide[4];
        int32_t count = n - j < 4 ? n - j : 4;
        memcpy(raw, src + 2 * (int64_t)j, 2 * (size_t)count);
        uint16x4_t half = vld1_u16(raw);
        float32x4_t value =
            f16 ? vcvt_f32_f16(vreinterpret_f16_u16(half)) : vreinterpretq_f32_u32(vshll_n_u16(half, 16));
        vst1q_f32(wide, value);
        memcpy(dst + j, wide, (size_t)count * sizeof *wide);
    }
}

static void expand_plain(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                         int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    int32_t d_qk = pool->format.d_qk;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, head * pool->head_stride, 2 * d_qk);
        plain_row((float *)dst + i * dst_stride, at.row + head * pool->head_stride, d_qk,
                  pool->format.element == FMLA_F16);
    }
}

static void expand_e4m3(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                        int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    const fmla_format_info *f = &pool->format;
    (void)head;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, 0, f->data_row_bytes);
        float *out = (float *)dst + i * dst_stride;
        for (int32_t g = 0; g < f->quant_dims / f->group; g++) {
            float scale;
            if (f->scale == FMLA_F32) {
                memcpy(&scale, at.scales + 4 * g, sizeof scale);
            } else {
                scale = fmlai_f32_from_e8m0(at.scales[g]);
            }
            e4m3_group(out + g * f->group, at.row + g * f->group, f->group, scale);
        }
        plain_row(out + f->quant_dims, at.row + f->rope_offset, f->rope_dims, false);
    }
}

void fmlai_quant_init_neon(fmlai_quant_kernels *k)
{
    k->expand_f32[FMLA_KV_BF16] = expand_plain;
    k->expand_f32[FMLA_KV_F16] = expand_plain;
    k->expand_f32[FMLA_KV_V32] = expand_e4m3;
    k->expand_f32[FMLA_KV_V4] = expand_e4m3;
    k->expand_f32[FMLA_KV_V41] = expand_e4m3;
    k->expand_f32[FMLA_KV_V41_PAGE] = expand_e4m3;
}
