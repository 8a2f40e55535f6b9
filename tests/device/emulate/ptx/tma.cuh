/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/tma.cuh. */
#ifndef FLASHMLA_PTX_TMA_CUH
#define FLASHMLA_PTX_TMA_CUH

#include "memory.cuh"

#define PTX_L2_EVICT_NORMAL 0
#define PTX_L2_EVICT_FIRST  0
#define PTX_L2_EVICT_LAST   0

/* What runtime.c makes a tensor map of. */
struct emu_tensor_map {
    void *data;
    uint64_t dims[4], strides[3];
    uint32_t box[4];
    uint32_t row; /* bytes of a row in shared memory, by which it is swizzled: 128, 64 */
};

PTX_INLINE void ptx_tma_prefetch_map(const void *)
{
}
void ptx_tma_load_4d(uint32_t shared, const void *map, uint32_t barrier, int32_t x, int32_t y, int32_t z, int32_t w,
                     uint64_t policy);
void ptx_tma_store_4d(const void *map, uint32_t shared, int32_t x, int32_t y, int32_t z, int32_t w);
void ptx_tma_commit(void);
void emu_tma_wait_read(int pending);

template <int PENDING> PTX_INLINE void ptx_tma_wait_read(void)
{
    emu_tma_wait_read(PENDING);
}

PTX_INLINE void ptx_bulk_prefetch_l2(const void *global, uint32_t bytes)
{
    for (uint32_t at = 0; at < bytes; at += 16) {
        (void)((const volatile unsigned char *)global)[at]; /* it may be read */
    }
}
void ptx_bulk_load(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier);

#endif
