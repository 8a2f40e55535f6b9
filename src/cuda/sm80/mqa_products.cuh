/* SPDX-License-Identifier: MIT */
/*
 * mqa_products.cuh: the two matrix products of the portable attention core. Rows of shared memory are PITCH bytes
 * apart, an odd number of 16-byte chunks, so eight rows of a matrix never meet in a bank, and every address in a loop
 * is a constant away from one that the warp computes once.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_PRODUCTS_CUH
#define FLASHMLA_CUDA_SM80_MQA_PRODUCTS_CUH

#include "mqa_shared.cuh"

/* Operands of 32 dims. */
template <class S> struct score_operands {
    uint32_t q[S::QM][2][4], k[S::NT][4];
};

/* A warp's rows of Q in the last S::HELD blocks of 64 dims: in registers for a whole piece, where there are some to
 * spare, instead of being read for every tile. */
template <class S> struct held_rows {
    uint32_t q[S::HELD > 0 ? 2 * S::HELD : 1][S::QM][2][4];
};

/* Products of few tiles would wait for each other: their sums are kept in several parts. */
template <class S> struct score_sums {
    static constexpr int PARTS = S::QM * S::NT >= 4 ? 1 : S::QM * S::NT == 2 ? 2 : 4;
    float x[PARTS][S::QM][S::NT][4];
};

template <class S> static __device__ __forceinline__ void load_rows(uint32_t rows[S::QM][2][4], uint32_t q, int byte)
{
#pragma unroll
    for (int m = 0; m < S::QM; m++) {
        ptx_ldmatrix_x4(rows[m][0], q + m * 16 * PITCH + byte);
        ptx_ldmatrix_x4(rows[m][1], q + m * 16 * PITCH + byte + 32);
    }
}

template <class S> static __device__ __forceinline__ void load_tokens(uint32_t tokens[S::NT][4], uint32_t k, int byte)
{
#pragma unroll
    for (int n = 0; n < S::NT; n++) {
        ptx_ldmatrix_x4(tokens[n], k + n * 8 * PITCH + byte);
    }
}

template <class S>
static __device__ __forceinline__ void load_operands(score_operands<S> &o, uint32_t q, uint32_t k, int byte)
{
    load_rows<S>(o.q, q, byte);
    load_tokens<S>(o.k, k, byte);
}

template <class S, int HALF>
static __device__ __forceinline__ void multiply_operands(score_sums<S> &sums, const uint32_t q[S::QM][2][4],
                                                         const uint32_t k[S::NT][4])
{
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
        for (int n = 0; n < S::NT; n++) {
#pragma unroll
            for (int m = 0; m < S::QM; m++) {
                multiply<S::F16>(sums.x[(2 * HALF + step) % sums.PARTS][m][n], q[m][step], k[n][2 * step],
                                 k[n][2 * step + 1]);
            }
        }
    }
}

/* Where a lane reads QM * 16 rows of Q from row0 on. */
static __device__ __forceinline__ uint32_t rows_at(uint32_t q, int row0)
{
    int lane = threadIdx.x % 32;
    return q + (row0 + lane % 16) * PITCH + lane / 16 * 16;
}

template <class S>
static __device__ __forceinline__ void hold_rows(held_rows<S> &held, uint32_t q, int blocks, int row0)
{
#pragma unroll
    for (int i = 0; i < 2 * S::HELD; i++) {
        load_rows<S>(held.q[i], rows_at(q, row0) + (blocks - S::HELD) * 128, i * 64);
    }
}

/* acc = QM * 16 rows of Q from row0 on x NT * 8 tokens from token0 on; `blocks` of 64 dims. Operands are loaded one
 * half block ahead. */
template <class S>
static __device__ __forceinline__ void scores(float acc[S::QM][S::NT][4], const held_rows<S> &held, uint32_t q,
                                              uint32_t tile, int blocks, int row0, int token0)
{
    int lane = threadIdx.x % 32;
    uint32_t q_at = rows_at(q, row0);
    uint32_t k_at = tile + (token0 + lane % 8) * PITCH + lane / 8 * 16;
    score_sums<S> sums;
    score_operands<S> even, odd;
#pragma unroll
    for (int i = 0; i < sums.PARTS * S::QM * S::NT * 4; i++) {
        (&sums.x[0][0][0][0])[i] = 0.0f;
    }
    load_operands(even, q_at, k_at, 0);
#pragma unroll 1
    for (int block = 1; block < blocks - S::HELD; block++) {
        load_operands(odd, q_at, k_at, 64);
        multiply_operands<S, 0>(sums, even.q, even.k);
        q_at += 128;
        k_at += 128;
        load_operands(even, q_at, k_at, 0);
        multiply_operands<S, 1>(sums, odd.q, odd.k);
    }
    load_operands(odd, q_at, k_at, 64);
    multiply_operands<S, 0>(sums, even.q, even.k);
    if (S::HELD > 0) {
        load_tokens<S>(even.k, k_at, 128);
    }
    multiply_operands<S, 1>(sums, odd.q, odd.k);
#pragma unroll
    for (int i = 0; i < S::HELD; i++) {
        load_tokens<S>(odd.k, k_at, 128 + i * 128 + 64);
        multiply_operands<S, 0>(sums, held.q[2 * i], even.k);
        if (i + 1 < S::HELD) {
            load_tokens<S>(even.k, k_at, 128 + i * 128 + 128);
        }
        multiply_operands<S, 1>(sums, held.q[2 * i + 1], odd.k);
    }
#pragma unroll
    for (int m = 0; m < S::QM; m++) {
#pragma unroll
        for (int n = 0; n < S::NT; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x = sums.x[0][m][n][i];
#pragma unroll
                for (int part = 1; part < sums.PARTS; part++) {
                    x += sums.x[part][m][n][i];
                }
                acc[m][n][i] = x;
            }
        }
    }
}

/* Where the weights of a row lie: in the tile, behind the dims that are values. 2 * TOKENS bytes. */
template <class S> static __device__ __forceinline__ uint32_t weights_of(uint32_t tile, int row)
{
    return tile + row / S::LINE * PITCH + TAIL + row % S::LINE * (S::TOKENS * 2);
}

/* out += weights of MV * 16 rows from row0 on x the tile's columns from column0 on. */
template <class S>
static __device__ __forceinline__ void values(float out[S::MV][S::NV][4], uint32_t tile, int row0, int column0)
{
    int lane = ptx_thread() % 32;
    uint32_t w_at = weights_of<S>(tile, row0 + lane % 16) + lane / 16 * 16;
    uint32_t v_at = tile + lane % 16 * PITCH + column0 * 2 + lane / 16 * 16;
#pragma unroll 1
    for (int k = 0; k < S::TOKENS / 16; k++) {
        uint32_t a[S::MV][4];
#pragma unroll
        for (int m = 0; m < S::MV; m++) {
            ptx_ldmatrix_x4(a[m], w_at + m * 16 / S::LINE * PITCH);
        }
#pragma unroll
        for (int n = 0; n < S::NV; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4_trans(b, v_at + n * 16);
#pragma unroll
            for (int m = 0; m < S::MV; m++) {
                multiply<S::F16>(out[m][n], a[m], b[0], b[1]);
                multiply<S::F16>(out[m][n + 1], a[m], b[2], b[3]);
            }
        }
        w_at += 32;
        v_at += 16 * PITCH;
    }
}

/* Values that are not finite become 0 in a tile's tokens from `first` on; by the scoring warps. */
template <class S> static __device__ __noinline__ void clean_values(uint32_t tile, int first)
{
    const uint32_t exponent = S::F16 ? 0x7C00u : 0x7F80u;
    for (int t = first; t < S::TOKENS; t++) {
        for (uint32_t word = threadIdx.x; word < OUT_COLUMNS / 2; word += S::QW * 32) {
            uint32_t at = tile + t * PITCH + word * 4;
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
