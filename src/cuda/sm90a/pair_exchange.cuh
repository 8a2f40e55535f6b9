/* SPDX-License-Identifier: MIT */
/*
 * pair_exchange.cuh: what the blocks of a pair (pair.cuh) send each other: the helper's scores, the owner's weights.
 * What a thread sends lies in pieces of 16 bytes, 2048 bytes apart.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_EXCHANGE_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_EXCHANGE_CUH

#include "pair_plan.cuh"
#include "ptx/cluster.cuh"

#include <stddef.h>

/* What a thread of a warpgroup keeps. Registers are full while tiles are multiplied: what is needed only before and
 * after is read anew there (ptx_thread, ptx_cluster_rank), and the compiler must not know that it is the same. */
typedef struct pair_view {
    uint32_t at; /* of the thread's part in a message */
    int group;   /* warpgroup */
} pair_view;

#define WEIGHT_PARTS 5 /* of 16 bytes of a thread: what it sends of a tile's weights */

#define PAIR_AT(member) (ptx_shared_address(ptx_shared()) + (uint32_t)offsetof(pair_plan<BLOCKS>, member))

/* From an address of this block to the same one of the other. */
static __device__ __forceinline__ uint32_t to_peer(void)
{
    uint32_t base = ptx_shared_address(ptx_shared());
    return ptx_cluster_address(base, ptx_cluster_rank() ^ 1) - base;
}

/*
 * Cycles from one of a thread's stores of scores to the next: about as fast as the link takes them. V4.1 is 3 % faster
 * than with all eight at once, with anything from 60 to 120. Why is a guess: the weights that this block's owner sends,
 * which the peer waits for, are behind as few of them as can be.
 */
#define SCORES_PACE 100

/* The helper's part of the scores of tile `turn`. */
template <int BLOCKS>
static __device__ __forceinline__ void send_scores(const float s[32], const pair_view &v, uint32_t turn)
{
    uint32_t peer = to_peer();
    ptx_mbarrier_wait(PAIR_AT(scores_empty), (turn & 1) ^ 1);
    uint32_t begin = ptx_clock();
#pragma unroll
    for (int j = 0; j < 8; j++) {
        ptx_store_remote_128(PAIR_AT(scores) + peer + v.at + j * 2048, s + 4 * j, PAIR_AT(scores_full) + peer);
        while (j < 7 && ptx_clock() - begin < (uint32_t)(j + 1) * SCORES_PACE) {
        }
    }
}

/* A message has arrived in full: the barrier gets ready for the next one. Before this warp lets the peer send it. */
static __device__ __forceinline__ void await_message(uint32_t full, uint32_t number, uint32_t bytes)
{
    ptx_mbarrier_wait(full, number & 1);
    if (threadIdx.x % 128 == 0) {
        ptx_mbarrier_arrive_expect(full, bytes);
    }
}

/* The warp has read a message, of which `seen` is made. */
static __device__ __forceinline__ void release_message(uint32_t empty, uint32_t seen)
{
    if (arrives(threadIdx.x % 32, lane_after(seen))) {
        ptx_mbarrier_arrive_remote(empty + to_peer());
    }
}

/* The owner adds the peer's part. */
template <int BLOCKS> static __device__ __forceinline__ void add_scores(float s[32], const pair_view &v, uint32_t turn)
{
    uint32_t seen = 0;
    await_message(PAIR_AT(scores_full), turn, SCORE_BYTES);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint32_t x[4];
        ptx_load_shared_128(x, PAIR_AT(scores) + v.at + j * 2048);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[4 * j + i] += __uint_as_float(x[i]);
        }
        seen ^= x[3];
    }
    release_message(PAIR_AT(scores_empty), seen);
}

/* A part of a message of weights, of five, the factors the last; where `wanted`. Four lanes share two rows' factors. */
template <int BLOCKS>
static __device__ __forceinline__ void send_part(const uint32_t a[16], const float factors[4], const pair_view &v,
                                                 int part, uint32_t peer, uint32_t wanted)
{
    if (part == WEIGHT_PARTS - 1) {
        ptx_store_remote_128_if(PAIR_AT(weights) + peer + 8192 + v.at / 4, factors, PAIR_AT(weights_full) + peer,
                                threadIdx.x % 4 == 0 ? wanted : 0);
        return;
    }
    const float x[4] = {__uint_as_float(a[4 * part]), __uint_as_float(a[4 * part + 1]),
                        __uint_as_float(a[4 * part + 2]), __uint_as_float(a[4 * part + 3])};
    ptx_store_remote_128_if(PAIR_AT(weights) + peer + v.at + part * 2048, x, PAIR_AT(weights_full) + peer, wanted);
}

/* Weights of a tile, and what the output so far must be multiplied by before. Factors: four lanes share two rows. */
template <int BLOCKS>
static __device__ __forceinline__ void send_weights(const uint32_t a[16], const float factor[2], const pair_view &v,
                                                    uint32_t message)
{
    uint32_t peer = to_peer();
    ptx_mbarrier_wait(PAIR_AT(weights_empty), (message & 1) ^ 1);
    const float both[4] = {factor[0], factor[1], 0.0f, 0.0f};
    if (threadIdx.x % 4 == 0) {
        ptx_store_remote_128(PAIR_AT(weights) + peer + 8192 + v.at / 4, both, PAIR_AT(weights_full) + peer);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float x[4] = {__uint_as_float(a[4 * j]), __uint_as_float(a[4 * j + 1]), __uint_as_float(a[4 * j + 2]),
                            __uint_as_float(a[4 * j + 3])};
        ptx_store_remote_128(PAIR_AT(weights) + peer + v.at + j * 2048, x, PAIR_AT(weights_full) + peer);
    }
}

template <int BLOCKS>
static __device__ __forceinline__ void take_weights(uint32_t a[16], float factor[2], const pair_view &v,
                                                    uint32_t message)
{
    uint32_t both[4];
    await_message(PAIR_AT(weights_full), message, WEIGHT_BYTES);
    ptx_load_shared_128(both, PAIR_AT(weights) + 8192 + (v.at / 4 & ~15u));
#pragma unroll
    for (int j = 0; j < 4; j++) {
        ptx_load_shared_128(a + 4 * j, PAIR_AT(weights) + v.at + j * 2048);
    }
    factor[0] = __uint_as_float(both[0]);
    factor[1] = __uint_as_float(both[1]);
    release_message(PAIR_AT(weights_empty), both[1] ^ a[3] ^ a[7] ^ a[11] ^ a[15]);
}

#endif
