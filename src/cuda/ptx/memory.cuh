/* SPDX-License-Identifier: MIT */
/* memory.cuh: shared memory by 32-bit address, and asynchronous copies into it. One function per instruction. */
#ifndef FLASHMLA_PTX_MEMORY_CUH
#define FLASHMLA_PTX_MEMORY_CUH

#include <stdint.h>

#define PTX_INLINE static __device__ __forceinline__

/* The block's dynamic shared memory: its address, and the same as a pointer. */
PTX_INLINE unsigned char *ptx_shared(void)
{
    extern __shared__ __align__(1024) unsigned char ptx_shared_bytes[];
    return ptx_shared_bytes;
}

PTX_INLINE uint32_t ptx_shared_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/*
 * threadIdx.x, read anew at every call: an address made from it is made where it is used, instead of holding a register
 * throughout a loop.
 */
PTX_INLINE uint32_t ptx_thread(void)
{
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* Cycles of this multiprocessor, from any time on. */
PTX_INLINE uint32_t ptx_clock(void)
{
    uint32_t cycles;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
    return cycles;
}

PTX_INLINE void ptx_store_shared_u32(uint32_t address, uint32_t x)
{
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

PTX_INLINE void ptx_store_shared_u16(uint32_t address, uint16_t x)
{
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

PTX_INLINE void ptx_store_shared_u8(uint32_t address, uint32_t x)
{
    asm volatile("st.shared.b8 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

PTX_INLINE void ptx_store_shared_128(uint32_t address, const uint32_t x[4])
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

PTX_INLINE void ptx_store_shared_128_if(bool there, uint32_t address, const uint32_t x[4])
{
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.shared.v4.b32 [%1], {%2, %3, %4, %5};}" ::"r"((uint32_t)there),
        "r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
        : "memory");
}

PTX_INLINE void ptx_store_shared_f32x2(uint32_t address, const float x[2])
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x[0]), "f"(x[1]) : "memory");
}

PTX_INLINE void ptx_load_shared_64(uint32_t x[2], uint32_t address)
{
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address) : "memory");
}

PTX_INLINE void ptx_load_shared_128(uint32_t x[4], uint32_t address)
{
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address)
                 : "memory");
}

PTX_INLINE uint32_t ptx_load_shared_u32(uint32_t address)
{
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

PTX_INLINE uint32_t ptx_load_shared_u16(uint32_t address)
{
    uint16_t x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(address) : "memory");
    return x;
}

PTX_INLINE uint32_t ptx_load_shared_u8(uint32_t address)
{
    uint32_t x;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
    return x;
}

/* The line of an address that may be read comes into L2. */
PTX_INLINE void ptx_prefetch_l2(const void *global)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/* The line of an address is brought near; nothing waits for it. */
PTX_INLINE void ptx_prefetch(const void *global)
{
    asm volatile("prefetch.global.L1 [%0];" ::"l"(global));
}

/* 16 bytes, through L2 only; bytes = 0 reads nothing and writes zeros. Both addresses 16-byte aligned. */
PTX_INLINE void ptx_copy_async_16(uint32_t shared, const void *global, uint32_t bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

/* 16 bytes if they are there, else zeros, from an address that need not be readable. */
PTX_INLINE void ptx_copy_async_16_if(uint32_t shared, const void *global, bool there)
{
    asm volatile("{.reg .pred p; setp.eq.u32 p, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, p;}" ::"r"(shared),
                 "l"(global), "r"((uint32_t)there)
                 : "memory");
}

/* 4 bytes. */
PTX_INLINE void ptx_copy_async_4(uint32_t shared, const void *global)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

/* 8 bytes. */
PTX_INLINE void ptx_copy_async_8(uint32_t shared, const void *global, uint32_t bytes)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

PTX_INLINE void ptx_copy_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most PENDING of this thread's newest groups are unfinished. */
template <int PENDING> PTX_INLINE void ptx_copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#endif
