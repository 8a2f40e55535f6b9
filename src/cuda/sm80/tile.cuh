/* SPDX-License-Identifier: MIT */
/*
 * tile.cuh: tiles of 16-bit numbers in shared memory, rows of 128-byte blocks (64 elements), and the warp products that
 * read them. Rows are swizzled: 16-byte chunk c of row r lies at c ^ (r & 7) within its 128 bytes, so that neither
 * ldmatrix nor row-wise stores meet bank conflicts.
 */
#ifndef FLASHMLA_CUDA_SM80_TILE_CUH
#define FLASHMLA_CUDA_SM80_TILE_CUH

#include "common/list.cuh"
#include "ptx/matrix.cuh"

/* Byte offset of 16-byte chunk `chunk` of row `row`. */
static __device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t chunk, uint32_t row_bytes)
{
    return row * row_bytes + (chunk >> 3) * 128 + (((chunk & 7) ^ (row & 7)) << 4);
}

/* Eight plain elements at any address, those from `count` on zero. */
static __device__ __noinline__ void copy_plain_hard(uint32_t shared, const uint8_t *from, int count)
{
    uint32_t x[4] = {0, 0, 0, 0};
    for (int i = 0; i < 8; i++) {
        if (i < count) {
            x[i / 2] |= bytes_u16(from + 2 * i) << (16 * (i & 1));
        }
    }
    ptx_store_shared_128(shared, x);
}

template <int F16>
static __device__ __forceinline__ void multiply(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    if (F16) {
        ptx_mma_f16(d, a, b0, b1);
    } else {
        ptx_mma_bf16(d, a, b0, b1);
    }
}

template <int F16> static __device__ __forceinline__ uint32_t pack(float low, float high)
{
    return F16 ? ptx_pack_f16(low, high) : ptx_pack_bf16(low, high);
}

/* Values that are not finite become 0 in rows from `first` of a tile on. */
template <int ROWS, int THREADS>
static __device__ __noinline__ void clean_rows(uint32_t tile, uint32_t row_bytes, int first, uint32_t exponent)
{
    for (int t = first; t < ROWS; t++) {
        for (uint32_t word = threadIdx.x; word < row_bytes / 4; word += THREADS) {
            uint32_t at = tile + t * row_bytes + word * 4;
            uint32_t x = ptx_load_shared_u32(at);
            uint32_t y = x;
            y = (y & exponent) == exponent ? y & 0xFFFF0000u : y;
            y = (y >> 16 & exponent) == exponent ? y & 0x0000FFFFu : y;
            if (y != x) {
                ptx_store_shared_u32(at, y);
            }
        }
    }
}

#endif
