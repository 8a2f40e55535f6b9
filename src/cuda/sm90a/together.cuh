/* SPDX-License-Identifier: MIT */
/*
 * together.cuh: the pieces of a list, one for each block of a cluster, joined through the blocks' shared memory: for
 * calls so small that a kernel which joins them would take as long as the pieces.
 *
 * Every block leaves its piece's output, as floats that are not divided by its rows' sums, where Q and the tiles were.
 * Then block r has rows r, r + blocks and so on: it reads them from all blocks, adds them in the order r, r ^ 1, r ^ 2
 * and so on (the number of blocks is a power of two), and stores the output. Nobody leaves before all have read.
 */
#ifndef FLASHMLA_CUDA_SM90A_TOGETHER_CUH
#define FLASHMLA_CUDA_SM90A_TOGETHER_CUH

#include "output.cuh"
#include "ptx/cluster.cuh"

#define TOGETHER_AHEAD 8 /* pieces of a thread whose loads are under way together */

/* Bytes from the begin of the results: 16-byte chunk `chunk` of a row; who stores and who loads meet no bank twice. */
static __device__ __forceinline__ uint32_t result_offset(int row, int chunk)
{
    return row * (OUT_COLUMNS * 4) + (chunk ^ row % 4 * 2) * 16;
}

/* A thread's two rows, 256 output dims from half * 256 on. */
static __device__ __forceinline__ void leave_rows(const float o[128], uint32_t to, int half)
{
    int thread = (int)ptx_thread() % 128, row = thread / 32 * 16 + thread % 32 / 4, q = thread % 4;
#pragma unroll
    for (int j = 0; j < 32; j++) {
        int chunk = half * (OUT_COLUMNS / 8) + 2 * j + q / 2;
        ptx_store_shared_f32x2(to + result_offset(row, chunk) + q % 2 * 8, o + j * 4);
        ptx_store_shared_f32x2(to + result_offset(row + 8, chunk) + q % 2 * 8, o + j * 4 + 2);
    }
}

static __device__ __forceinline__ float warp_largest(float x)
{
    for (int step = 16; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    }
    return x;
}

static __device__ __forceinline__ float warp_sum(float x)
{
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
    }
    return x;
}

/* A thread's four columns of the next pieces. Every block begins with its own piece and goes on to another block than
 * all others do at that time. */
static __device__ __forceinline__ void load_pieces(float x[TOGETHER_AHEAD][4], uint32_t from, int first, int blocks,
                                                   int rank)
{
#pragma unroll
    for (int k = 0; k < TOGETHER_AHEAD; k++) {
        if (first + k < blocks) {
            ptx_load_remote_128(x[k], ptx_cluster_address(from, (first + k) ^ rank));
        }
    }
}

/* A row's pieces, by the 128 threads of a warpgroup, four columns each. results: where they lie in every block. */
template <int BLOCKS>
static __device__ __forceinline__ void join_row(const fmlac_mqa &p, const piece &c, plan<BLOCKS> *m, int row,
                                                uint32_t results)
{
    int thread = (int)ptx_thread() % 128, lane = thread % 32, blocks = p.pieces, rank = (int)ptx_cluster_rank();
    float last = -FMLAC_INFINITY, sum = 0.0f, max = -FMLAC_INFINITY; /* of piece `lane` */
    if (lane < blocks) {
        last = ptx_load_remote(ptx_cluster_address(ptx_shared_address(&m->last[row]), lane));
        sum = ptx_load_remote(ptx_cluster_address(ptx_shared_address(&m->sum[row]), lane));
        max = ptx_load_remote(ptx_cluster_address(ptx_shared_address(&m->max[row]), lane));
    }
    /* What can set out sets out before anything is waited for. */
    uint32_t from = results + result_offset(row, thread);
    float x[TOGETHER_AHEAD][4], all[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    load_pieces(x, from, 0, blocks, rank);
    float top = warp_largest(last), weight = shrink(last, top), total = warp_sum(weight * sum);
    max = warp_largest(max);
    weight *= row_factor(top, total, m->sink[row]);
#pragma unroll 1
    for (int first = 0;;) {
#pragma unroll
        for (int k = 0; k < TOGETHER_AHEAD; k++) {
            float w = __shfl_sync(0xFFFFFFFFu, weight, (first + k) ^ rank);
            for (int i = 0; i < 4 && first + k < blocks; i++) {
                all[i] += w * x[k][i];
            }
        }
        first += TOGETHER_AHEAD;
        if (first >= blocks) {
            break;
        }
        load_pieces(x, from, first, blocks, rank);
    }
    float4 four = {all[0], all[1], all[2], all[3]};
    store_four(p.out, piece_row(p, p.out, c, row), thread * 4, p.d_v, four);
    if (thread == 0) {
        store_scalars(p, c, row, top, max, total);
    }
}

/* Both warpgroups; sums, references and maxima are in shared memory, behind a barrier. The other threads of the block
 * come to the cluster's barriers, too. */
template <int BLOCKS>
static __device__ __forceinline__ void join_cluster(const fmlac_mqa &p, const piece &c, const float o[128],
                                                    plan<BLOCKS> *m, int half)
{
    static_assert(sizeof m->q + sizeof m->k >= ROWS * OUT_COLUMNS * 4, "there is room for all rows");
    uint32_t results = ptx_shared_address(m->q);
    int thread = (int)ptx_thread(), rows = (int)uniform((uint32_t)c.work.rows);
    if (thread % 128 / 32 * 16 < rows) {
        leave_rows(o, results, half);
    }
    ptx_cluster_sync();
#pragma unroll 1
    for (int row = (int)ptx_cluster_rank() + thread / 128 * p.pieces; row < rows; row += 2 * p.pieces) {
        join_row<BLOCKS>(p, c, m, row, results);
    }
    ptx_cluster_sync();
}

#endif
