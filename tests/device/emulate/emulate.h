/* SPDX-License-Identifier: MIT */
/*
 * emulate.h: CUDA kernels as plain C++ on a processor, for tests on machines without a GPU. The kernels' sources are
 * compiled as they are, with this header included first and the folder ptx/ beside it in place of src/cuda/ptx: every
 * instruction that C has no word for is one function there, so nothing else needs a double.
 *
 * A block's threads are fibres, and so are those of the two blocks of a cluster. Warp instructions and barriers are
 * where a fibre waits for its fellows; between two of them one warp runs as far as it can, in an order that changes
 * from launch to launch, so a missing barrier shows. Copies to shared memory that are asynchronous happen when they are
 * waited for and not before. Shared memory starts as NaN.
 */
#ifndef FLASHMLA_EMULATE_H
#define FLASHMLA_EMULATE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__    __attribute__((noinline, unused))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__   static
#define __align__(n) alignas(n)
#define __restrict__

struct emu_index {
    unsigned x, y, z;
};

struct emu_thread {
    emu_index thread, block, block_dim, grid_dim;
    void *impl;
};

extern emu_thread *emu_current;

#define threadIdx (emu_current->thread)
#define blockIdx  (emu_current->block)
#define blockDim  (emu_current->block_dim)
#define gridDim   (emu_current->grid_dim)

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

/* All lanes of the warp meet; the last one runs step(inputs of the 32 lanes). */
void emu_meet(void (*step)(void **lanes), void *mine);
void emu_barrier(void);
/* Where a sequence of chances begins: another one for every FLASHMLA_EMULATE_SEED. */
uint32_t emu_seed(uint32_t which);
int emu_barrier_count(int predicate);
/* Ends the program: a block does what no block may. */
void emu_fail(const char *what);
/* Shared memory of the running thread's block, and of a block of its cluster. */
unsigned char *emu_shared(void);
unsigned char *emu_shared_of(unsigned rank);
/* Place of the running thread's block in the cluster; number of threads of the whole cluster. */
unsigned emu_rank(void);
int emu_cluster_threads(void);
void emu_copy_async(uint32_t to, const void *from, int size, int bytes);
void emu_copy_commit(void);
void emu_copy_wait(int pending);
/* Looked at something that has not happened yet: lets others run. */
void emu_yield(void);
int emu_thread_id(void);
void emu_copy_take(void (*each)(uint32_t to, const void *from, int size, int bytes));
/* emulate_hopper.cpp: a block begins; a round of all warps is over: whether something asynchronous happened since. */
void emu_hopper_begin(void);
bool emu_hopper_round(void);

static inline uint32_t __float_as_uint(float x)
{
    uint32_t y;
    memcpy(&y, &x, 4);
    return y;
}
static inline float __uint_as_float(uint32_t x)
{
    float y;
    memcpy(&y, &x, 4);
    return y;
}
static inline float __fmul_rn(float a, float b)
{
    return a * b;
}
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}
static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline int __ffs(int x)
{
    return __builtin_ffs(x);
}
static inline int __popc(uint32_t x)
{
    return __builtin_popcount(x);
}
static inline void __syncthreads(void)
{
    emu_barrier();
}
static inline int __syncthreads_count(int p)
{
    return emu_barrier_count(p);
}
uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t select);
uint32_t emu_shuffle(uint32_t x, int lane);
uint32_t __ballot_sync(uint32_t mask, int p);
static inline int __any_sync(uint32_t m, int p)
{
    return __ballot_sync(m, p) != 0;
}
static inline int __all_sync(uint32_t m, int p)
{
    return __ballot_sync(m, p) == 0xFFFFFFFFu;
}
static inline void __syncwarp(void)
{
    (void)__ballot_sync(0xFFFFFFFFu, 0);
}

template <typename T> static inline T emu_shuffle_any(T x, int lane)
{
    uint32_t words[(sizeof(T) + 3) / 4] = {0};
    memcpy(words, &x, sizeof x);
    for (uint32_t &word : words) {
        word = emu_shuffle(word, lane);
    }
    memcpy(&x, words, sizeof x);
    return x;
}
template <typename T> static inline T __shfl_xor_sync(uint32_t, T x, int step)
{
    return emu_shuffle_any(x, (int)(threadIdx.x % 32) ^ step);
}
static inline uint32_t __reduce_add_sync(uint32_t m, uint32_t x)
{
    for (int step = 1; step < 32; step *= 2) {
        x += __shfl_xor_sync(m, x, step);
    }
    return x;
}
template <typename T> static inline T __shfl_sync(uint32_t, T x, int lane)
{
    return emu_shuffle_any(x, lane);
}
template <typename T> static inline T __shfl_up_sync(uint32_t, T x, int step)
{
    int lane = (int)(threadIdx.x % 32);
    return emu_shuffle_any(x, lane >= step ? lane - step : lane);
}
template <typename T> static inline T __shfl_down_sync(uint32_t, T x, int step)
{
    int lane = (int)(threadIdx.x % 32);
    return emu_shuffle_any(x, lane + step < 32 ? lane + step : lane);
}
static inline unsigned long long atomicMin(unsigned long long *p, unsigned long long x)
{
    unsigned long long old = *p;
    *p = x < old ? x : old;
    return old;
}

#endif
