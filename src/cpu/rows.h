/* SPDX-License-Identifier: MIT */
/*
 * rows.h: runs of tensor elements as floats and back, with the type decided once a run instead of once an
 * element.
 */
#ifndef FLASHMLA_CPU_ROWS_H
#define FLASHMLA_CPU_ROWS_H

#include "cpu.h"

/* Elements first..first+n-1 of a BF16, F16 or F32 tensor. */
void fmlai_row_load(float *dst, const void *data, fmla_dtype dtype, int64_t first, int64_t n);
/* The same, rounded to nearest even. */
void fmlai_row_store(void *data, fmla_dtype dtype, int64_t first, const float *src, int64_t n);

/* The slot that a caller names for token i. */
static inline int64_t fmlai_slot_at(const fmlai_slots *slots, int64_t i)
{
    if (!slots->data) {
        return i;
    }
    return slots->dtype == FMLA_I64 ? ((const int64_t *)slots->data)[i * slots->stride]
                                    : ((const int32_t *)slots->data)[i * slots->stride];
}

static inline bool fmlai_slot_valid(const fmlai_pool *pool, int64_t slot)
{
    return slot >= 0 && slot / pool->page_size < pool->num_pages;
}

#endif
