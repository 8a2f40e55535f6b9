/* SPDX-License-Identifier: MIT */
/*
 * check.cu: FLASHMLA_CHECK=1: looks at lengths, tables and indices, and keeps the first that the attention kernels
 * would clamp or leave out. An index of -1 is padding, not a fault. Kinds number as in host/check.c.
 */
#include "common/list.cuh"

enum { SEQLENS, TABLE, BOUND, INDICES, EXTRA_INDICES, LENGTH, EXTRA_LENGTH, CU_SEQLENS, POSITIONS };

typedef struct checked {
    fmlac_mqa mqa;
    fmlac_report *report;
} checked;

/* Keeps the smallest place. The value is written by whoever was smallest at some time and read together with the place
 * only to be shown, so a rare mismatch is harmless. */
static __device__ __forceinline__ void report(const checked &c, int kind, int64_t index, int32_t value)
{
    unsigned long long place = (unsigned long long)kind << 56 | (unsigned long long)index;
    if (atomicMin(&c.report->place, place) > place) {
        c.report->value = value;
    }
}

static __device__ __forceinline__ void check_length(const checked &c, const fmlac_list &list, int kind, int64_t token)
{
    if (list.kind == FMLAC_LIST_INDEXED && list.length.data) {
        int64_t n = length_at(&c.mqa, &list.length, token, mqa_request(&c.mqa, token));
        if (n < 0 || n > list.topk) {
            report(c, kind, token, (int32_t)n);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) fmlak_check_lengths_sm80(const __grid_constant__ checked c)
{
    const fmlac_mqa &p = c.mqa;
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (p.main.kind == FMLAC_LIST_PAGED && i < p.batch) {
        int32_t n = p.main.seqlens[i];
        if (n < 0 || (n > 0 && quotient(n - 1, p.main.pool.page_size) >= p.main.max_pages)) {
            report(c, SEQLENS, i, n);
        }
    }
    if (p.cu_seqlens_q && i < p.batch) {
        int32_t begin = p.cu_seqlens_q[i], end = p.cu_seqlens_q[i + 1];
        if (begin < 0 || end < begin || end > p.num_tokens) {
            report(c, CU_SEQLENS, i, begin);
        }
    }
    if (i < p.num_tokens) {
        check_length(c, p.main, LENGTH, i);
        check_length(c, p.extra, EXTRA_LENGTH, i);
        if (p.main.bound.data && length_at(&p, &p.main.bound, i, mqa_request(&p, i)) < 0) {
            report(c, BOUND, i, (int32_t)length_at(&p, &p.main.bound, i, mqa_request(&p, i)));
        }
        if (p.fused.enabled) {
            int32_t position = p.fused.positions[i * p.fused.position_stride];
            if (position < 0 || position >= p.fused.cos_sin_rows) {
                report(c, POSITIONS, i, position);
            }
        }
    }
}

static __device__ __forceinline__ void check_indices(const checked &c, const fmlac_list &list, int kind, int64_t token,
                                                     int32_t kv_head)
{
    int64_t count = indexed_count(&c.mqa, &list, token);
    for (int64_t i = threadIdx.x; i < count; i += 256) {
        int32_t entry = index_row(&c.mqa, &list, token, kv_head)[i];
        if (entry != -1 && indexed_slot(&list, entry) < 0) {
            report(c, kind, (token * c.mqa.h_kv + kv_head) * list.topk + i, entry);
        }
    }
}

/* One block per (request or query token, KV head). */
extern "C" __global__ void __launch_bounds__(256, 1) fmlak_check_entries_sm80(const __grid_constant__ checked c)
{
    const fmlac_mqa &p = c.mqa;
    int64_t row = quotient(blockIdx.x, p.h_kv);
    int32_t kv_head = (int32_t)(blockIdx.x - row * p.h_kv);
    if (p.main.kind == FMLAC_LIST_INDEXED && row < p.num_tokens) {
        check_indices(c, p.main, INDICES, row, kv_head);
        check_indices(c, p.extra, EXTRA_INDICES, row, kv_head);
    }
    if (p.main.kind == FMLAC_LIST_PAGED && p.main.block_table && kv_head == 0 && row < p.batch) {
        int64_t length = clamped(p.main.seqlens[row], 0, INT32_MAX), page_size = p.main.pool.page_size;
        int64_t pages = clamped(quotient(length + page_size - 1, page_size), 0, p.main.max_pages);
        for (int64_t i = threadIdx.x; i < pages; i += 256) {
            int32_t page = p.main.block_table[row * p.main.table_stride + i];
            if (page < 0 || page >= p.main.pool.num_pages) {
                report(c, TABLE, row * p.main.max_pages + i, page);
            }
        }
    }
}
