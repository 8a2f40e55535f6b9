/* SPDX-License-Identifier: MIT */
/*
 * wgmma.cuh: matrix products of a warpgroup (sm_90a). D is 64 rows x N columns of float in registers: thread t
 * (0..127), w = t / 32, g = t % 32 / 4, q = t % 4:
 *   d[4j], d[4j+1]    row 16w + g,     columns 8j + 2q, 8j + 2q + 1
 *   d[4j+2], d[4j+3]  row 16w + g + 8, the same columns
 * A is 64 x 16: in shared memory (ss), rows of 128 bytes, or in registers (rs): a[0] row g, k 2q..2q+1; a[1] row g + 8;
 * a[2] row g, k 8+2q..; a[3] row g + 8. So d[8k+2i], d[8k+2i+1] packed is a[i] of the k-th 16 columns. B is in shared
 * memory: n64 and below take rows of N that hold 16 k each (K-major), n128 and n256 rows of k that hold N columns
 * (MN-major, 64 columns per block).
 *
 * Products are asynchronous: ptx_wgmma_fence before the first one that touches registers anything else wrote; then
 * commit, wait. ptx_wgmma_hold on the accumulators after the wait keeps the compiler from reading them earlier.
 * Registers of A stay untouched until the wait. wait is each warp's own: it says nothing about other warps' reads.
 */
#ifndef FLASHMLA_PTX_WGMMA_CUH
#define FLASHMLA_PTX_WGMMA_CUH

#include "memory.cuh"

/*
 * Operands in shared memory are tiles of blocks [rows][128 bytes], 16-byte chunk c of row r at c ^ (r & 7), every block
 * at a multiple of 1024 bytes: K-major, rows of 8 are 1024 bytes apart; as MN-major, 8 k are 1024 bytes apart and 64
 * columns `block_bytes`. This is the lower half of the descriptor; the upper half is the same for all of them.
 */
PTX_INLINE uint32_t ptx_wgmma_tile(uint32_t address, uint32_t block_bytes)
{
    return (address & 0x3FFFF) >> 4 | block_bytes >> 4 << 16;
}

/* The same tile, some bytes further on: K-major 32 per 16 k inside a block, MN-major 2048 per 16 k. */
PTX_INLINE uint32_t ptx_wgmma_advance(uint32_t tile, uint32_t bytes)
{
    return tile + (bytes >> 4);
}

/* Upper half: 8 rows are 1024 bytes apart, swizzled by 128 bytes. */
#define PTX_WGMMA_UPPER ((1024 >> 4) | 1 << 30)
/* The same of rows of 64 bytes, K-major: chunk c of row r at c ^ (r / 2 & 3). */
#define PTX_WGMMA_UPPER_64 ((512 >> 4) | 2u << 30)

PTX_INLINE void ptx_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

PTX_INLINE void ptx_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> PTX_INLINE void ptx_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int N> PTX_INLINE void ptx_wgmma_hold(float *d)
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}

#define PTX_F32x8(d, i)                                                                                                \
    "+f"((d)[i]), "+f"((d)[(i) + 1]), "+f"((d)[(i) + 2]), "+f"((d)[(i) + 3]), "+f"((d)[(i) + 4]), "+f"((d)[(i) + 5]),  \
        "+f"((d)[(i) + 6]), "+f"((d)[(i) + 7])
#define PTX_F32x32(d, i) PTX_F32x8(d, i), PTX_F32x8(d, (i) + 8), PTX_F32x8(d, (i) + 16), PTX_F32x8(d, (i) + 24)

#define PTX_WGMMA_N48_SS(type, d, a, b, p)                                                                             \
    asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %26, 0; "                                              \
                 "mov.b64 a, {%24, %27}; mov.b64 b, {%25, %27}; "                                                      \
                 "wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type " "                                       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "                   \
                 "%18, %19, %20, %21, %22, %23}, "                                                                     \
                 "a, b, p, 1, 1, 0, 0;}"                                                                               \
                 : PTX_F32x8(d, 0), PTX_F32x8(d, 8), PTX_F32x8(d, 16)                                                  \
                 : "r"(a), "r"(b), "r"(p), "n"(PTX_WGMMA_UPPER))

#define PTX_WGMMA_N16_SS(d, a, b, p, ta)                                                                               \
    asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %10, 0; "                                              \
                 "mov.b64 a, {%8, %11}; mov.b64 b, {%9, %11}; "                                                        \
                 "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "                                               \
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, a, b, p, 1, 1, " ta ", 0;}"                                        \
                 : PTX_F32x8(d, 0)                                                                                     \
                 : "r"(a), "r"(b), "r"(p), "n"(PTX_WGMMA_UPPER))

#define PTX_WGMMA_N64_SS(type, d, a, b, upper, p)                                                                      \
    asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %34, 0; "                                              \
                 "mov.b64 a, {%32, %35}; mov.b64 b, {%33, %35}; "                                                      \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                                       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "                   \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                             \
                 "a, b, p, 1, 1, 0, 0;}"                                                                               \
                 : PTX_F32x32(d, 0)                                                                                    \
                 : "r"(a), "r"(b), "r"(p), "n"(upper))

#define PTX_WGMMA_N64_RS(type, d, a, b, p)                                                                             \
    asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %37, 0; mov.b64 b, {%36, %38}; "                          \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " "                                       \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "                   \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                             \
                 "{%32, %33, %34, %35}, b, p, 1, 1, 0;}"                                                               \
                 : PTX_F32x32(d, 0)                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(p), "n"(PTX_WGMMA_UPPER))

#define PTX_WGMMA_N128_SS(type, d, a, b, p)                                                                            \
    asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %66, 0; "                                              \
                 "mov.b64 a, {%64, %67}; mov.b64 b, {%65, %67}; "                                                      \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "                   \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "                    \
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "                    \
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                             \
                 "a, b, p, 1, 1, 0, 1;}"                                                                               \
                 : PTX_F32x32(d, 0), PTX_F32x32(d, 32)                                                                 \
                 : "r"(a), "r"(b), "r"(p), "n"(PTX_WGMMA_UPPER))

#define PTX_WGMMA_N128_RS(type, d, a, b, p)                                                                            \
    asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %69, 0; mov.b64 b, {%68, %70}; "                          \
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "                   \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "                    \
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "                    \
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "                             \
                 "{%64, %65, %66, %67}, b, p, 1, 1, 1;}"                                                               \
                 : PTX_F32x32(d, 0), PTX_F32x32(d, 32)                                                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(p), "n"(PTX_WGMMA_UPPER))

#define PTX_WGMMA_N256_SS(type, d, a, b, p)                                                                            \
    asm volatile("{.reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %130, 0; "                                             \
                 "mov.b64 a, {%128, %131}; mov.b64 b, {%129, %131}; "                                                  \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "                   \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "                    \
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "                    \
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "                    \
                 "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "                    \
                 "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "                    \
                 "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                  \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "                      \
                 "%125, %126, %127}, "                                                                                 \
                 "a, b, p, 1, 1, 0, 1;}"                                                                               \
                 : PTX_F32x32(d, 0), PTX_F32x32(d, 32), PTX_F32x32(d, 64), PTX_F32x32(d, 96)                           \
                 : "r"(a), "r"(b), "r"(p), "n"(PTX_WGMMA_UPPER))

#define PTX_WGMMA_N256_RS(type, d, a, b, p)                                                                            \
    asm volatile("{.reg .pred p; .reg .b64 b; setp.ne.b32 p, %133, 0; mov.b64 b, {%132, %134}; "                       \
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " "                                      \
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "                   \
                 "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "                    \
                 "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "                    \
                 "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "                    \
                 "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "                    \
                 "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "                    \
                 "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                  \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "                      \
                 "%125, %126, %127}, "                                                                                 \
                 "{%128, %129, %130, %131}, b, p, 1, 1, 1;}"                                                           \
                 : PTX_F32x32(d, 0), PTX_F32x32(d, 32), PTX_F32x32(d, 64), PTX_F32x32(d, 96)                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(p), "n"(PTX_WGMMA_UPPER))

/* d (64 x 48) = or += A * B^T; accumulate 0: =. */
template <int F16> PTX_INLINE void ptx_wgmma_n48_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    if (F16) {
        PTX_WGMMA_N48_SS("f16", d, a, b, accumulate);
    } else {
        PTX_WGMMA_N48_SS("bf16", d, a, b, accumulate);
    }
}

/* d (64 x 16), bf16. MN: A is MN-major: rows of k that hold 64 rows of A. */
template <int MN> PTX_INLINE void ptx_wgmma_n16_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    if (MN) {
        PTX_WGMMA_N16_SS(d, a, b, accumulate, "1");
    } else {
        PTX_WGMMA_N16_SS(d, a, b, accumulate, "0");
    }
}

/* d (64 x 64). */
template <int F16> PTX_INLINE void ptx_wgmma_n64_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    if (F16) {
        PTX_WGMMA_N64_SS("f16", d, a, b, PTX_WGMMA_UPPER, accumulate);
    } else {
        PTX_WGMMA_N64_SS("bf16", d, a, b, PTX_WGMMA_UPPER, accumulate);
    }
}

/* The same, A in registers. */
template <int F16> PTX_INLINE void ptx_wgmma_n64_rs(float *d, const uint32_t a[4], uint32_t b, int accumulate)
{
    if (F16) {
        PTX_WGMMA_N64_RS("f16", d, a, b, accumulate);
    } else {
        PTX_WGMMA_N64_RS("bf16", d, a, b, accumulate);
    }
}

/* d (64 x 64), A in shared memory; rows of both are 64 bytes. */
PTX_INLINE void ptx_wgmma_n64_ss_narrow(float *d, uint32_t a, uint32_t b, int accumulate)
{
    PTX_WGMMA_N64_SS("bf16", d, a, b, PTX_WGMMA_UPPER_64, accumulate);
}

/* d (64 x 128), A in shared memory. */
template <int F16> PTX_INLINE void ptx_wgmma_n128_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    if (F16) {
        PTX_WGMMA_N128_SS("f16", d, a, b, accumulate);
    } else {
        PTX_WGMMA_N128_SS("bf16", d, a, b, accumulate);
    }
}

/* d (64 x 128), A in registers. */
template <int F16> PTX_INLINE void ptx_wgmma_n128_rs(float *d, const uint32_t a[4], uint32_t b, int accumulate)
{
    if (F16) {
        PTX_WGMMA_N128_RS("f16", d, a, b, accumulate);
    } else {
        PTX_WGMMA_N128_RS("bf16", d, a, b, accumulate);
    }
}

/* d (64 x 256). */
template <int F16> PTX_INLINE void ptx_wgmma_n256_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    if (F16) {
        PTX_WGMMA_N256_SS("f16", d, a, b, accumulate);
    } else {
        PTX_WGMMA_N256_SS("bf16", d, a, b, accumulate);
    }
}

template <int F16> PTX_INLINE void ptx_wgmma_n256_rs(float *d, const uint32_t a[4], uint32_t b, int accumulate)
{
    if (F16) {
        PTX_WGMMA_N256_RS("f16", d, a, b, accumulate);
    } else {
        PTX_WGMMA_N256_RS("bf16", d, a, b, accumulate);
    }
}

#endif
