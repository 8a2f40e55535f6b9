/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/memory.cuh: shared addresses are offsets from the emulated block's memory. */
#ifndef FLASHMLA_PTX_MEMORY_CUH
#define FLASHMLA_PTX_MEMORY_CUH

#include "emulate.h"

#define PTX_INLINE static inline __attribute__((unused))

PTX_INLINE unsigned char *ptx_shared(void)
{
    return emu_shared();
}
PTX_INLINE uint32_t ptx_shared_address(const void *p)
{
    return (uint32_t)((const unsigned char *)p - emu_shared());
}
PTX_INLINE uint32_t ptx_thread(void)
{
    return threadIdx.x;
}
PTX_INLINE uint32_t ptx_clock(void)
{
    static uint32_t cycles;
    return cycles += 64;
}
PTX_INLINE void ptx_store_shared_u32(uint32_t a, uint32_t x)
{
    memcpy(emu_shared() + a, &x, 4);
}
PTX_INLINE void ptx_store_shared_u16(uint32_t a, uint16_t x)
{
    memcpy(emu_shared() + a, &x, 2);
}
PTX_INLINE void ptx_store_shared_u8(uint32_t a, uint32_t x)
{
    emu_shared()[a] = (unsigned char)x;
}
PTX_INLINE void ptx_store_shared_128(uint32_t a, const uint32_t x[4])
{
    memcpy(emu_shared() + a, x, 16);
}
PTX_INLINE void ptx_store_shared_128_if(bool there, uint32_t a, const uint32_t x[4])
{
    if (there) {
        ptx_store_shared_128(a, x);
    }
}
PTX_INLINE void ptx_store_shared_f32x2(uint32_t a, const float x[2])
{
    memcpy(emu_shared() + a, x, 8);
}
PTX_INLINE void ptx_load_shared_64(uint32_t x[2], uint32_t a)
{
    memcpy(x, emu_shared() + a, 8);
}
PTX_INLINE void ptx_load_shared_128(uint32_t x[4], uint32_t a)
{
    memcpy(x, emu_shared() + a, 16);
}
PTX_INLINE uint32_t ptx_load_shared_u32(uint32_t a)
{
    uint32_t x;
    memcpy(&x, emu_shared() + a, 4);
    return x;
}
PTX_INLINE uint32_t ptx_load_shared_u16(uint32_t a)
{
    uint16_t x;
    memcpy(&x, emu_shared() + a, 2);
    return x;
}
PTX_INLINE uint32_t ptx_load_shared_u8(uint32_t a)
{
    return emu_shared()[a];
}
PTX_INLINE void ptx_prefetch_l2(const void *p)
{
    (void)*(const volatile unsigned char *)p; /* it may be read */
}
PTX_INLINE void ptx_prefetch(const void *)
{
}
PTX_INLINE void ptx_copy_async_16(uint32_t to, const void *from, uint32_t bytes)
{
    emu_copy_async(to, from, 16, (int)bytes);
}
PTX_INLINE void ptx_copy_async_16_if(uint32_t to, const void *from, bool there)
{
    emu_copy_async(to, from, 16, there ? 16 : 0);
}
PTX_INLINE void ptx_copy_async_4(uint32_t to, const void *from)
{
    emu_copy_async(to, from, 4, 4);
}
PTX_INLINE void ptx_copy_async_8(uint32_t to, const void *from, uint32_t bytes)
{
    emu_copy_async(to, from, 8, (int)bytes);
}
PTX_INLINE void ptx_copy_async_commit(void)
{
    emu_copy_commit();
}
template <int PENDING> PTX_INLINE void ptx_copy_async_wait(void)
{
    emu_copy_wait(PENDING);
}

#endif
