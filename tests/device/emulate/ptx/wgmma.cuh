/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/wgmma.cuh. */
#ifndef FLASHMLA_PTX_WGMMA_CUH
#define FLASHMLA_PTX_WGMMA_CUH

#include "memory.cuh"

void emu_product(float *d, const uint32_t *a, uint64_t a_descriptor, uint64_t b_descriptor, int columns, int accumulate,
                 bool f16);
void emu_product_wait(int pending);

PTX_INLINE uint32_t ptx_wgmma_tile(uint32_t address, uint32_t block_bytes)
{
    return (address & 0x3FFFF) >> 4 | block_bytes >> 4 << 16;
}
PTX_INLINE uint32_t ptx_wgmma_advance(uint32_t tile, uint32_t bytes)
{
    return tile + (bytes >> 4);
}
PTX_INLINE void ptx_wgmma_fence(void)
{
}
void ptx_wgmma_commit(void);
template <int PENDING> PTX_INLINE void ptx_wgmma_wait(void)
{
    emu_product_wait(PENDING);
}
/* Whatever the registers held before is not known to the compiler. */
template <int N> PTX_INLINE void ptx_wgmma_hold(float *d)
{
    asm volatile("" : : "r"(d) : "memory");
}
template <int F16> PTX_INLINE void ptx_wgmma_n48_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    emu_product(d, NULL, a, b, 48, accumulate, F16);
}
template <int F16> PTX_INLINE void ptx_wgmma_n64_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    emu_product(d, NULL, a, b, 64, accumulate, F16);
}
template <int F16> PTX_INLINE void ptx_wgmma_n64_rs(float *d, const uint32_t a[4], uint32_t b, int accumulate)
{
    emu_product(d, a, 0, b, 64, accumulate, F16);
}
/* Bit 62 of A's descriptor: it is MN-major. */
template <int MN> PTX_INLINE void ptx_wgmma_n16_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    emu_product(d, NULL, a | (uint64_t)MN << 62, b, 16, accumulate, false);
}
/* Bit 63 of a descriptor: rows of 64 bytes. */
PTX_INLINE void ptx_wgmma_n64_ss_narrow(float *d, uint32_t a, uint32_t b, int accumulate)
{
    emu_product(d, NULL, a | 1ull << 63, b | 1ull << 63, 64, accumulate, false);
}
template <int F16> PTX_INLINE void ptx_wgmma_n128_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    emu_product(d, NULL, a, b, 128, accumulate, F16);
}
template <int F16> PTX_INLINE void ptx_wgmma_n128_rs(float *d, const uint32_t a[4], uint32_t b, int accumulate)
{
    emu_product(d, a, 0, b, 128, accumulate, F16);
}
template <int F16> PTX_INLINE void ptx_wgmma_n256_ss(float *d, uint32_t a, uint32_t b, int accumulate)
{
    emu_product(d, NULL, a, b, 256, accumulate, F16);
}
template <int F16> PTX_INLINE void ptx_wgmma_n256_rs(float *d, const uint32_t a[4], uint32_t b, int accumulate)
{
    emu_product(d, a, 0, b, 256, accumulate, F16);
}

#endif
