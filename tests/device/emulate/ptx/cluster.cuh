/* SPDX-License-Identifier: MIT */
/* Double of src/cuda/ptx/cluster.cuh. */
#ifndef FLASHMLA_PTX_CLUSTER_CUH
#define FLASHMLA_PTX_CLUSTER_CUH

#include "memory.cuh"

uint32_t ptx_cluster_rank(void);
uint32_t ptx_cluster_address(uint32_t address, uint32_t rank);
void ptx_cluster_sync(void);
static inline void ptx_cluster_sync_barriers(void)
{
    ptx_cluster_sync();
}
void ptx_store_remote_128(uint32_t remote, const float x[4], uint32_t remote_barrier);
PTX_INLINE void ptx_store_remote_128_if(uint32_t remote, const float x[4], uint32_t remote_barrier, uint32_t wanted)
{
    if (wanted != 0) {
        ptx_store_remote_128(remote, x, remote_barrier);
    }
}
float ptx_load_remote(uint32_t remote);
void ptx_load_remote_128(float x[4], uint32_t remote);

#endif
