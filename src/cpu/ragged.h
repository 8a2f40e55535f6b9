/* SPDX-License-Identifier: MIT */
/*
 * ragged.h: requests of different lengths, cut into blocks of `size` tokens. Request r's blocks have the
 * numbers from cu_seqlens[r] / size + r on: that leaves at least ceil(length / size) numbers before the next
 * request's, so a block is found by binary search, without a table of block counts, and some numbers are no
 * block. Without cu_seqlens there is one request.
 */
#ifndef FLASHMLA_CPU_RAGGED_H
#define FLASHMLA_CPU_RAGGED_H

#include <stdint.h>

typedef struct fmlai_ragged_block {
    int64_t request;
    int64_t first; /* token, counted within the request; none if that is its length or more */
} fmlai_ragged_block;

/* An upper bound for the numbers, from shapes alone. */
static inline int64_t fmlai_ragged_blocks(int64_t batch, int64_t total, int64_t size)
{
    return total / size + batch;
}

static inline fmlai_ragged_block fmlai_ragged_block_at(const int32_t *cu_seqlens, int64_t batch, int64_t size,
                                                       int64_t number)
{
    int64_t low = 0, high = batch;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (cu_seqlens[middle] / size + middle <= number) {
            low = middle;
        } else {
            high = middle;
        }
    }
    int64_t begin = cu_seqlens ? cu_seqlens[low] : 0;
    return (fmlai_ragged_block){.request = low, .first = (number - begin / size - low) * size};
}

#endif
