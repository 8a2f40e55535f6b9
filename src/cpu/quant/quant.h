/* SPDX-License-Identifier: MIT */
/*
 * quant.h: tokens between bytes and tiles on a CPU: the format-specific part of every kernel. One expand
 * function per format and tile element; all are exact as docs/formats.md says, for every (code, scale) pair.
 */
#ifndef FLASHMLA_QUANT_H
#define FLASHMLA_QUANT_H

#include "../../problem.h"

#define FMLAI_EXPAND_MOST 128 /* as many as a tile has */

/*
 * Expands `count` tokens of a pool, FMLAI_EXPAND_MOST at most, into tile rows: dst row i (dst_stride elements apart) =
 * slot slots[i], KV head `head`, as attention sees it (rounded to bf16; fp16 pools: the fp16 value, F32 tiles only).
 * Slots are valid.
 */
typedef void (*fmlai_expand)(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head,
                             void *dst, int64_t dst_stride);

typedef struct fmlai_quant_kernels {
    fmlai_expand
        expand_f32[FMLA_KV_COUNT + 1]; /* by fmla_kv_format; [FMLA_KV_COUNT]: CUSTOM, by description */
    fmlai_expand expand_bf16[FMLA_KV_COUNT + 1];
    fmlai_expand exact_f32[FMLA_KV_COUNT + 1]; /* to floats without the rounding to bf16: as fmlai_token_read_f32 */
    /* Quantises one token of d_qk floats into a slot; as fmlai_token_write. */
    void (*write)(const fmlai_pool *pool, int64_t slot, int32_t head, const float *src, fmla_dtype src_dtype,
                  fmla_quantizer quantizer);
    /* Quantiser D: n values (32 or 128) to e4m3 codes; returns the scale byte. As fmlai_fp8_cast_group, to the bit. */
    uint8_t (*cast)(const float *x, int32_t n, uint8_t *codes);
    /* The same of `groups` groups of 32, one after the other in x; their codes are code_stride bytes apart. */
    void (*cast_row)(const float *x, int32_t groups, uint8_t *codes, int64_t code_stride, uint8_t *scales);
} fmlai_quant_kernels;

void fmlai_quant_init_scalar(fmlai_quant_kernels *k);
void fmlai_quant_init_avx2(fmlai_quant_kernels *k);
void fmlai_quant_init_avx512bf16(fmlai_quant_kernels *k);
void fmlai_quant_init_neon(fmlai_quant_kernels *k);

/* cast_group.c: quantiser D in loops that compilers turn into vectors. */
uint8_t fmlai_cpu_cast_group(const float *x, int32_t n, uint8_t *codes);
void fmlai_cpu_cast_row(const float *x, int32_t groups, uint8_t *codes, int64_t code_stride, uint8_t *scales);

/* The expand function for a pool. */
static inline fmlai_expand fmlai_expand_for(const fmlai_expand *table, const fmlai_pool *pool)
{
    int32_t f = pool->format.format;
    bool built_in = f > 0 && f < FMLA_KV_COUNT && pool->outer_scale == 1.0f;
    const fmlai_expand *entry = &table[built_in ? f : FMLA_KV_COUNT];
    return *entry;
}

#endif
