/* SPDX-License-Identifier: MIT */
/*
 * mha.cuh: what the dense multi-head kernels share: spans of requests in packed tensors, causal limits, tiles by
 * cp.async. d_qk is padded to a multiple of 64, at most 192, d_v to 64 or 128.
 */
#ifndef FLASHMLA_CUDA_SM80_MHA_CUH
#define FLASHMLA_CUDA_SM80_MHA_CUH

#include "common/work.cuh"
#include "tile.cuh"

/* A block's request, its tokens and the first row of its tile there. */
typedef struct mha_work {
    int64_t request;
    int64_t first_q, count_q;
    int64_t first_k, count_k;
    int64_t row0; /* of the tiled side */
    int32_t head;
} mha_work;

/* Tiles of `rows` tokens of every request, slot by slot (work.cuh, ragged_slot); false: nothing in this slot. */
static __device__ __forceinline__ bool mha_locate(const fmlac_mha &p, bool by_query, int64_t rows, int32_t heads,
                                                  mha_work *w)
{
    const int32_t *cu = by_query ? p.cu_seqlens_q : p.cu_seqlens_kv;
    int64_t total = by_query ? p.total_q : p.total_kv;
    int64_t slot = quotient(blockIdx.x, heads);
    w->head = (int32_t)(blockIdx.x - slot * heads);
    slot = p.slots - 1 - slot; /* the last rows of a causal request see most keys: they start first */
    w->request = 0;
    if (cu) {
        w->request = ragged_request(cu, p.batch, total, 1, rows, slot);
        slot -= ragged_slot(cu, w->request, total, 1, rows);
    }
    request_tokens(p.cu_seqlens_q, w->request, p.total_q, p.total_q, &w->first_q, &w->count_q);
    request_tokens(p.cu_seqlens_kv, w->request, p.total_kv, p.total_kv, &w->first_k, &w->count_k);
    w->row0 = slot * rows;
    return w->row0 < (by_query ? w->count_q : w->count_k);
}

/* Keys that query number i of the request sees. */
static __device__ __forceinline__ int64_t keys_seen(const fmlac_mha &p, const mha_work &w, int64_t i)
{
    return p.causal ? clamped(w.count_k - w.count_q + i + 1, 0, w.count_k) : w.count_k;
}

/* Starts copying rows first .. first + ROWS - 1 (those from `end` on zero) of one head into a tile. */
template <int ROWS, int WARPS>
static __device__ __forceinline__ void copy_rows(uint32_t tile, uint32_t row_bytes, const fmlac_packed &x, int32_t head,
                                                 int64_t first, int64_t end, int32_t d)
{
    int chunks = row_bytes / 16;
    for (int i = threadIdx.x; i < ROWS * chunks; i += WARPS * 32) {
        int r = i / chunks, c = i - r * chunks;
        const uint8_t *row = (const uint8_t *)x.data + 2 * ((first + r) * x.stride[0] + head * x.stride[1]);
        uint32_t to = tile + swizzled(r, c, row_bytes);
        bool there = first + r < end && c * 8 < d;
        if (x.aligned) {
            ptx_copy_async_16(to, there ? row + c * 16 : (const uint8_t *)x.data, there ? 16 : 0);
        } else {
            copy_plain_hard(to, row + c * 16, there ? d - c * 8 : 0);
        }
    }
}

/* Two neighbouring elements of a packed row. */
static __device__ __forceinline__ void store_two(const fmlac_packed &x, int64_t at, int column, int end, float low,
                                                 float high)
{
    if (x.aligned && x.dtype != FMLAC_F32 && column + 1 < end) {
        *(uint32_t *)((uint16_t *)x.data + at + column) =
            x.dtype == FMLAC_F16 ? ptx_pack_f16(low, high) : ptx_pack_bf16(low, high);
        return;
    }
    if (column < end) {
        store_element(x.data, x.dtype, at + column, low);
    }
    if (column + 1 < end) {
        store_element(x.data, x.dtype, at + column + 1, high);
    }
}

#endif
