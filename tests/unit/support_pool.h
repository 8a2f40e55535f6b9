/* SPDX-License-Identifier: MIT */
/*
 * support_pool.h: pools of tokens for tests, and memory whose end is guarded.
 */
#ifndef FLASHMLA_TEST_SUPPORT_POOL_H
#define FLASHMLA_TEST_SUPPORT_POOL_H

#include "format/format.h"

/* Memory whose last byte is followed by a page that cannot be touched. */
typedef struct guarded {
    uint8_t *data;
    size_t size;
    void *mapping;
    size_t mapping_size;
} guarded;

guarded guarded_make(size_t size); /* filled with 0xA5 */
void guarded_free(guarded *g);

/* Describes a pool over memory; d_qk and heads matter to plain formats only, page_stride 0 means contiguous.
 */
fmlai_pool pool_over(void *data, const fmla_format_info *format, int64_t num_pages, int64_t page_size,
                     int64_t page_stride, int32_t d_qk, int32_t heads);
/* Bytes that the pool's pages take: the last one without the stride's excess. */
size_t pool_bytes(const fmlai_pool *pool, int32_t heads);

#endif
