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

/*
 * Tiles of `rows` tokens of every request, slot by slot (work.cuh, ragged_slot); false: nothing in this slot. Blocks
 * come in sections of p.section heads, whose tokens the L2 cache holds while all slots of the section are done. In a
 * section the slots with most work come first: of a causal request the last queries and the first keys.
 */
static __device__ __forceinline__ bool mha_locate(const fmlac_mha &p, bool by_query, int64_t rows, int32_t heads,
                                                  mha_work *w)
{
    const int32_t *cu = by_query ? p.cu_seqlens_q : p.cu_seqlens_kv;
    int64_t total = by_query ? p.total_q : p.total_kv;
    int64_t section = quotient(blockIdx.x, p.slots * p.section);
    int64_t at = blockIdx.x - section * p.slots * p.section;
    int64_t left = heads - section * p.section, wide = left < p.section ? left : p.section;
    int64_t slot = quotient(at, wide);
    w->head = (int32_t)(section * p.section + at - slot * wide);
    slot = by_query ? p.slots - 1 - slot : slot;
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

/* copy_tile for rows that no 16-byte copy may read. */
static __device__ __noinline__ void copy_tile_hard(uint32_t tile, const uint8_t *from, int64_t row_stride, int rows,
                                                   int left, int blocks, int d)
{
    for (int i = threadIdx.x; i < rows * blocks * 8; i += blockDim.x) {
        int row = i / (blocks * 8), chunk = i - row * blocks * 8;
        int count = row < left ? d - chunk * 8 : 0;
        uint32_t x[4] = {0, 0, 0, 0};
        for (int e = 0; e < 8; e++) {
            if (e < count) {
                x[e / 2] |= bytes_u16(from + row * row_stride + chunk * 16 + 2 * e) << (16 * (e & 1));
            }
        }
        ptx_store_shared_128(tile + swizzled(row, chunk, blocks * 128), x);
    }
}

/*
 * Starts copying ROWS rows of one head into a tile of BLOCKS * 64 columns: `left` of them from token `first` on, the
 * rest and the columns from d on zero.
 */
template <int ROWS, int THREADS, int BLOCKS>
static __device__ __forceinline__ void copy_tile(uint32_t tile, const fmlac_packed &x, int32_t head, int64_t first,
                                                 int32_t left, int32_t d)
{
    const uint8_t *from = (const uint8_t *)x.data + 2 * (first * x.stride[0] + head * x.stride[1]);
    if (!x.aligned) {
        copy_tile_hard(tile, from, 2 * x.stride[0], ROWS, left, BLOCKS, d);
        return;
    }
    int thread = ptx_thread(), row = thread / 8, column = thread % 8 * 8;
    uint32_t to = tile + swizzled(row, thread % 8, BLOCKS * 128);
    from += 2 * (row * x.stride[0] + column);
#pragma unroll
    for (int pass = 0; pass < ROWS; pass += THREADS / 8) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            bool there = row + pass < left && block * 64 + column < d;
            ptx_copy_async_16(to + pass * BLOCKS * 128 + block * 128, from + block * 128, there ? 16 : 0);
        }
        from += THREADS / 8 * 2 * x.stride[0];
    }
}

/*
 * s = 32 rows of one tile x NT * 8 rows of another, both of BLOCKS * 64 columns: a warp's share, so that every fragment
 * feeds at least two products. Both addresses are of the warp's first row, a multiple of 8. UNROLL: steps of 16 columns
 * in one stretch of code; where registers are short, fewer keep the compiler from fetching too far ahead.
 */
template <int F16, int BLOCKS, int NT, int UNROLL = BLOCKS * 4>
static __device__ __forceinline__ void scores_32(float s[2][NT][4], uint32_t a_rows, uint32_t b_rows)
{
    int lane = ptx_thread() % 32;
    uint32_t a_at = a_rows + lane % 16 * BLOCKS * 128, a_chunk = ((lane / 16) ^ (lane & 7)) << 4;
    uint32_t b_at = b_rows + (lane % 8 + lane / 16 * 8) * BLOCKS * 128, b_chunk = ((lane / 8 & 1) ^ (lane & 7)) << 4;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[0][n][e] = s[1][n][e] = 0.0f;
        }
    }
#pragma unroll UNROLL
    for (int k = 0; k < BLOCKS * 4; k++) { /* 16 columns */
        uint32_t a[2][4];
        ptx_ldmatrix_x4(a[0], a_at + k / 4 * 128 + (a_chunk ^ (k % 4 * 32)));
        ptx_ldmatrix_x4(a[1], a_at + 16 * BLOCKS * 128 + k / 4 * 128 + (a_chunk ^ (k % 4 * 32)));
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4(b, b_at + n * 8 * BLOCKS * 128 + k / 4 * 128 + (b_chunk ^ (k % 4 * 32)));
#pragma unroll
            for (int m = 0; m < 2; m++) {
                multiply<F16>(s[m][n], a[m], b[0], b[1]);
                multiply<F16>(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/*
 * Results leave through shared memory: rows of `pitch` floats from its start on, 16-byte chunks swizzled like tiles',
 * so that global stores are whole rows. The caller has a barrier between staging and store_tile.
 */
static __device__ __forceinline__ float *staged(int row, int column, int pitch)
{
    return (float *)ptx_shared() + row * pitch + (column ^ (row & 7) * 4);
}

static __device__ __forceinline__ void stage_two(int row, int column, int pitch, float low, float high)
{
    *(float2 *)staged(row, column, pitch) = {low, high};
}

/* Staged rows 0 .. rows - 1, d columns wide, to tokens from `first` on of one head. */
static __device__ __noinline__ void store_tile(const fmlac_packed &to, int pitch, int64_t first, int32_t head, int rows,
                                               int d)
{
    int chunks = (d + 7) / 8;
    for (int i = threadIdx.x; i < rows * chunks; i += blockDim.x) {
        int row = i / chunks, column = (i - row * chunks) * 8;
        int64_t at = (first + row) * to.stride[0] + head * to.stride[1] + column;
        if (to.aligned && to.dtype != FMLAC_F32) {
            float4 x = *(const float4 *)staged(row, column, pitch), y = *(const float4 *)staged(row, column + 4, pitch);
            bool f16 = to.dtype == FMLAC_F16;
            *(uint4 *)((uint16_t *)to.data + at) = {f16 ? ptx_pack_f16(x.x, x.y) : ptx_pack_bf16(x.x, x.y),
                                                    f16 ? ptx_pack_f16(x.z, x.w) : ptx_pack_bf16(x.z, x.w),
                                                    f16 ? ptx_pack_f16(y.x, y.y) : ptx_pack_bf16(y.x, y.y),
                                                    f16 ? ptx_pack_f16(y.z, y.w) : ptx_pack_bf16(y.z, y.w)};
            continue;
        }
        for (int e = 0; e < 8 && column + e < d; e++) {
            store_element(to.data, to.dtype, at + e, *staged(row, column + e, pitch));
        }
    }
}

#endif
