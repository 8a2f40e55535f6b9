/* SPDX-License-Identifier: MIT */
/*
 * list.cuh: which tokens a query token attends, read from device tensors. Nothing in them is trusted: a length out of
 * range is clamped, an index or a table entry outside the pool means "not attended", and no table entry beyond the
 * needed pages is read.
 */
#ifndef FLASHMLA_CUDA_LIST_CUH
#define FLASHMLA_CUDA_LIST_CUH

#include "token.cuh"

static __device__ __forceinline__ int64_t clamped(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Files of kernels for index lists alone define FMLAC_INDEXED_ONLY, for paged lists alone FMLAC_PAGED_ONLY: what only
 * the others need is not compiled. */
static __device__ __forceinline__ bool is_paged(const fmlac_mqa *p)
{
#ifdef FMLAC_INDEXED_ONLY
    (void)p;
    return false;
#elif defined FMLAC_PAGED_ONLY
    (void)p;
    return true;
#else
    return p->main.kind == FMLAC_LIST_PAGED;
#endif
}

/* Query tokens of a request: first and number, inside the tensor whatever cu_seqlens say. */
static __device__ __forceinline__ void request_tokens(const int32_t *cu_seqlens, int64_t request, int64_t per_request,
                                                      int64_t total, int64_t *first, int64_t *count)
{
    if (!cu_seqlens) {
        *first = request * per_request;
        *count = per_request;
        return;
    }
    int64_t begin = clamped(cu_seqlens[request], 0, total);
    *first = begin;
    *count = clamped(cu_seqlens[request + 1], begin, total) - begin;
}

/* The last request that starts at or before the token. */
static __device__ __forceinline__ int64_t request_of_token(const int32_t *cu_seqlens, int64_t batch, int64_t token)
{
    int64_t low = 0, high = batch;
#pragma unroll 1
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (cu_seqlens[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static __device__ __forceinline__ int64_t mqa_request(const fmlac_mqa *p, int64_t token)
{
    return p->cu_seqlens_q ? request_of_token(p->cu_seqlens_q, p->batch, token) : quotient(token, p->s_q);
}

static __device__ __forceinline__ int64_t length_at(const fmlac_mqa *p, const fmlac_lengths *lengths, int64_t token,
                                                    int64_t request)
{
    if (lengths->per_request) {
        return lengths->data[request * lengths->outer_stride];
    }
    int64_t outer = quotient(token, p->s_q);
    return lengths->data[outer * lengths->outer_stride + (token - outer * p->s_q) * lengths->inner_stride];
}

/* PAGED: tokens that query token number `at` of a request with `queries` of them sees. */
static __device__ __forceinline__ int64_t paged_count(const fmlac_mqa *p, int64_t request, int64_t token, int64_t at,
                                                      int64_t queries)
{
    const fmlac_list *list = &p->main;
    int64_t length = clamped(list->seqlens[request], 0, INT32_MAX);
    int64_t visible = length;
    if (list->bound.data) {
        visible = length_at(p, &list->bound, token, request);
    } else if (list->causal) {
        visible = length - queries + at + 1;
    }
    return clamped(visible, 0, length < list->capacity ? length : list->capacity);
}

/* INDEXED: entries of a query token's row that count. */
static __device__ __forceinline__ int64_t indexed_count(const fmlac_mqa *p, const fmlac_list *list, int64_t token)
{
    if (list->kind != FMLAC_LIST_INDEXED) {
        return 0;
    }
    if (!list->length.data) {
        return list->topk;
    }
    int64_t request = list->length.per_request ? mqa_request(p, token) : 0;
    return clamped(length_at(p, &list->length, token, request), 0, list->topk);
}

/* PAGED: the slot of a request's token j, -1 if its page is none. */
static __device__ __forceinline__ int64_t paged_slot(const fmlac_list *list, int64_t request, int64_t j)
{
    int64_t at = quotient(j, list->pool.page_size);
    int64_t page =
        list->block_table ? list->block_table[request * list->table_stride + at] : request * list->max_pages + at;
    bool valid = page >= 0 && page < list->pool.num_pages;
    return valid ? page * list->pool.page_size + (j - at * list->pool.page_size) : -1;
}

/* INDEXED: the slot that an entry names, -1 if it is outside the pool. */
static __device__ __forceinline__ int64_t indexed_slot(const fmlac_list *list, int64_t entry)
{
    return entry >= 0 && quotient(entry, list->pool.page_size) < list->pool.num_pages ? entry : -1;
}

/* INDEXED: the index row of a query token. */
static __device__ __forceinline__ const int32_t *index_row(const fmlac_mqa *p, const fmlac_list *list, int64_t token,
                                                           int32_t kv_head)
{
    int64_t outer = quotient(token, p->s_q);
    return list->indices + outer * list->index_outer + (token - outer * p->s_q) * list->index_inner +
           kv_head * list->index_head;
}

/* Element offset of (token, head) in a row tensor. */
static __device__ __forceinline__ int64_t row_offset(const fmlac_rows *rows, const fmlac_mqa *p, int64_t token,
                                                     int32_t head)
{
    int64_t outer = quotient(token, p->s_q);
    return outer * rows->stride[0] + (token - outer * p->s_q) * rows->stride[1] + head * rows->stride[2];
}

#endif
