/* SPDX-License-Identifier: MIT */
/*
 * rows.c: runs of elements as floats. bf16 is the upper half of a float, so its loops are left to the
 * compiler to vectorise; fp16 goes through the format's functions.
 */
#include <string.h>

#include "rows.h"

/* Through memcpy: a cache may begin at any byte. */
static void load_bf16(float *restrict dst, const uint8_t *restrict src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, src + 2 * i, sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(&dst[i], &bits, sizeof bits);
    }
}

static void store_bf16(uint8_t *restrict dst, const float *restrict src, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &src[i], sizeof bits);
        uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        uint32_t quiet = (bits >> 16 & 0x8000) | 0x7FC0; /* the one NaN that the formats write */
        uint16_t half = (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
        memcpy(dst + 2 * i, &half, sizeof half);
    }
}

void fmlai_row_load(float *dst, const void *data, fmla_dtype dtype, int64_t first, int64_t n)
{
    if (dtype == FMLA_BF16) {
        load_bf16(dst, (const uint8_t *)data + 2 * first, n);
    } else if (dtype == FMLA_F32) {
        memcpy(dst, (const uint8_t *)data + 4 * first, (size_t)n * sizeof *dst);
    } else {
        for (int64_t i = 0; i < n; i++) {
            dst[i] = fmlai_load_f32(data, dtype, first + i);
        }
    }
}

void fmlai_row_store(void *data, fmla_dtype dtype, int64_t first, const float *src, int64_t n)
{
    if (dtype == FMLA_BF16) {
        store_bf16((uint8_t *)data + 2 * first, src, n);
    } else if (dtype == FMLA_F32) {
        memcpy((uint8_t *)data + 4 * first, src, (size_t)n * sizeof *src);
    } else {
        for (int64_t i = 0; i < n; i++) {
            fmlai_store_f32(data, dtype, first + i, src[i]);
        }
    }
}
