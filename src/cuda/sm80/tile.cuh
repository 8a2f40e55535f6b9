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

#define LOG2_E 1.4426950408889634f
#define LN_2   0.6931471805599453f

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

/* acc[NT][4] = 16 rows of one tile x NT * 8 rows of another, both row_bytes long. */
template <int NT, int F16>
static __device__ __forceinline__ void scores(float acc[NT][4], uint32_t q, uint32_t tile, uint32_t row_bytes, int row0,
                                              int token0)
{
    int lane = threadIdx.x % 32;
    uint32_t q_at = q + (row0 + lane % 16) * row_bytes;
    uint32_t q_chunk = ((lane / 16) ^ (lane & 7)) << 4;
    uint32_t k_at = tile + (token0 + lane % 8) * row_bytes;
    uint32_t k_chunk = ((lane / 8) ^ (lane & 7)) << 4;
    for (int n = 0; n < NT; n++) {
        acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.0f;
    }
#pragma unroll 1
    for (uint32_t block = 0; block < row_bytes; block += 128) { /* 64 dims */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t a[2][4];
            ptx_ldmatrix_x4(a[0], q_at + block + (q_chunk ^ (half * 64)));
            ptx_ldmatrix_x4(a[1], q_at + block + (q_chunk ^ (half * 64 + 32)));
#pragma unroll
            for (int n = 0; n < NT; n++) {
                uint32_t b[4];
                ptx_ldmatrix_x4(b, k_at + n * 8 * row_bytes + block + (k_chunk ^ (half * 64)));
                multiply<F16>(acc[n], a[0], b[0], b[1]);
                multiply<F16>(acc[n], a[1], b[2], b[3]);
            }
        }
    }
}

/* out[NV][4] += A (16 rows, KT * 16 deep, in registers) x the first NV * 8 columns of a tile of KT * 16 rows; columns
 * from `width` on are left alone. */
template <int KT, int NV, int F16>
static __device__ __forceinline__ void accumulate(float out[NV][4], const uint32_t a[KT][4], uint32_t tile,
                                                  uint32_t row_bytes, int width)
{
    int lane = threadIdx.x % 32;
    uint32_t at = tile + (lane % 16) * row_bytes;
    uint32_t chunk = ((lane / 16) ^ (lane & 7)) << 4;
#pragma unroll
    for (int k = 0; k < KT; k++) {
#pragma unroll
        for (int n = 0; n < NV; n += 2) {
            if (n * 8 < width) {
                uint32_t b[4];
                ptx_ldmatrix_x4_trans(b, at + k * 16 * row_bytes + (n / 8) * 128 + (chunk ^ ((n % 8) * 16)));
                multiply<F16>(out[n], a[k], b[0], b[1]);
                multiply<F16>(out[n + 1], a[k], b[2], b[3]);
            }
        }
    }
}

/* Accumulators of 16 rows x NT * 8 columns as A fragments: column pairs of two 8-column tiles make one 16-deep step. */
template <int NT, int F16>
static __device__ __forceinline__ void pack_rows(uint32_t a[NT / 2][4], const float acc[NT][4])
{
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        a[k][0] = pack<F16>(acc[2 * k][0], acc[2 * k][1]);
        a[k][1] = pack<F16>(acc[2 * k][2], acc[2 * k][3]);
        a[k][2] = pack<F16>(acc[2 * k + 1][0], acc[2 * k + 1][1]);
        a[k][3] = pack<F16>(acc[2 * k + 1][2], acc[2 * k + 1][3]);
    }
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
