/* SPDX-License-Identifier: MIT */
/*
 * Addresses of token lists: which slots of a pool a query token attends. Only lengths, bounds, indices and
 * needed block table entries are read here, never the pool; what they say is treated as untrusted, and all
 * arithmetic is 64-bit.
 */
#include "format.h"

int64_t fmlai_mqa_request(const fmlai_mqa *p, int64_t token)
{
    if (!p->cu_seqlens_q) {
        return token / p->s_q;
    }
    /* The last request that starts at or before the token: empty requests start where the next one does. */
    int64_t low = 0, high = p->batch;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (p->cu_seqlens_q[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

int64_t fmlai_lengths_at(const fmlai_lengths *lengths, const fmlai_mqa *p, int64_t token, int64_t request)
{
    if (lengths->per_request) {
        return lengths->data[request * lengths->outer_stride];
    }
    return lengths->data[token / p->s_q * lengths->outer_stride + token % p->s_q * lengths->inner_stride];
}

static int64_t clamp(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

static int64_t paged_count(const fmlai_token_list *list, const fmlai_mqa *p, int64_t token)
{
    int64_t request = fmlai_mqa_request(p, token);
    int64_t length = clamp(list->seqlens[request], 0, INT32_MAX);
    int64_t visible = length;
    if (list->bound.data) {
        visible = fmlai_lengths_at(&list->bound, p, token, request);
    } else if (list->causal) {
        int64_t first = p->cu_seqlens_q ? p->cu_seqlens_q[request] : request * p->s_q;
        int64_t queries = p->cu_seqlens_q ? p->cu_seqlens_q[request + 1] - first : p->s_q;
        visible = length - queries + (token - first) + 1;
    }
    visible = clamp(visible, 0, length);
    /* Divided, not multiplied: max_pages * page_size may exceed 64 bits. */
    int64_t page_size = list->pool.page_size;
    return visible / page_size >= list->max_pages ? list->max_pages * page_size : visible;
}

int64_t fmlai_list_count(const fmlai_token_list *list, const fmlai_mqa *p, int64_t token)
{
    switch (list->kind) {
    case FMLAI_LIST_PAGED:
        return paged_count(list, p, token);
    case FMLAI_LIST_INDEXED:
        if (!list->length.data) {
            return list->topk;
        }
        return clamp(fmlai_lengths_at(&list->length, p, token, fmlai_mqa_request(p, token)), 0, list->topk);
    default:
        return 0;
    }
}

int64_t fmlai_list_slot(const fmlai_token_list *list, const fmlai_mqa *p, int64_t token, int32_t kv_head, int64_t i)
{
    int64_t page_size = list->pool.page_size;
    if (list->kind == FMLAI_LIST_PAGED) {
        int64_t request = fmlai_mqa_request(p, token);
        int64_t page = list->block_table ? list->block_table[request * list->table_stride + i / page_size]
                                         : request * list->max_pages + i / page_size;
        return page >= 0 && page < list->pool.num_pages ? page * page_size + i % page_size : -1;
    }
    if (list->kind == FMLAI_LIST_INDEXED) {
        int64_t slot = list->indices[token / p->s_q * list->index_outer + token % p->s_q * list->index_inner +
                                     kv_head * list->index_head + i];
        return fmlai_slot_valid(&list->pool, slot) ? slot : -1;
    }
    return -1;
}
