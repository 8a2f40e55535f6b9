/* SPDX-License-Identifier: MIT */
/*
 * quant_scalar.c: every format in portable C, from its description alone: what all other kernels are checked
 * against, and what serves custom formats and outer scales in every tier.
 */
#include <string.h>

#include "../../format/format.h"
#include "../quant/quant.h"

#define PIECE 128

static void expand_f32(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                       int64_t dst_stride)
{
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_read(pool, slots[i], head, (float *)dst + i * dst_stride);
    }
}

static void exact_f32(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                      int64_t dst_stride)
{
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_read_f32(pool, slots[i], head, (float *)dst + i * dst_stride);
    }
}

static void expand_bf16(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                        int64_t dst_stride)
{
    int32_t d_qk = pool->format.d_qk;
    float piece[PIECE];
    for (int32_t i = 0; i < count; i++) {
        uint16_t *out = (uint16_t *)dst + i * dst_stride;
        if (pool->format.layout == FMLA_LAYOUT_PLAIN) {
            memcpy(out, fmlai_pool_row(pool, slots[i]) + head * pool->head_stride, 2 * (size_t)d_qk);
            continue;
        }
        for (int32_t at = 0; at < d_qk; at += PIECE) {
            int32_t end = d_qk - at < PIECE ? d_qk : at + PIECE;
            fmlai_token_read_dims(pool, slots[i], head, at, end, piece);
            for (int32_t j = at; j < end; j++) {
                out[j] = fmlai_bf16_from_f32(piece[j - at]);
            }
        }
    }
}

void fmlai_quant_init_scalar(fmlai_quant_kernels *k)
{
    for (int32_t f = 0; f <= FMLA_KV_COUNT; f++) {
        k->expand_f32[f] = expand_f32;
        k->expand_bf16[f] = expand_bf16;
        k->exact_f32[f] = exact_f32;
    }
    k->write = fmlai_token_write;
    k->cast = fmlai_cpu_cast_group;
    k->cast_row = fmlai_cpu_cast_row;
}
