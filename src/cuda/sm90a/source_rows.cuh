/* SPDX-License-Identifier: MIT */
/*
 * source_rows.cuh: tokens of 16-bit numbers from anywhere, by cp.async. 128 threads: thread i copies 16-byte chunk i %
 * 8 of every block of rows i / 8, i / 8 + 16, ...: eight lanes make one swizzled row of a block.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_ROWS_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_ROWS_CUH

#include "source.cuh"

#define ROW_COPIES 4 /* rows of a tile that a thread takes part in */

template <int BLOCKS>
static __device__ __forceinline__ void copy_rows(const fmlac_mqa &p, const fmlac_work &w, plan<BLOCKS> *m, int slot,
                                                 uint32_t parity, const uint32_t *buffer, int32_t have, int32_t tile,
                                                 int thread)
{
    int chunk = thread % 8;
    const uint8_t *from[ROW_COPIES];
    uint32_t there = 0;
#pragma unroll
    for (int i = 0; i < ROW_COPIES; i++) {
        token_place place = find_token(p, w, buffer, have, tile, thread / 8 + 16 * i);
        there |= (uint32_t)(place.row != nullptr) << i;
        from[i] = (place.row ? place.row : p.main.pool.data) + chunk * 16;
    }
#pragma unroll 1
    for (int portion = 0; portion < PORTIONS; portion++) {
        uint32_t full = ptx_shared_address(&m->full[slot][portion]);
        if (portion % 2 == 0) {
            ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][portion < 2 ? slot : 1 - slot]), parity ^ 1);
        }
        int last = portion == PORTIONS - 1 ? BLOCKS : 2 * portion + 2;
#pragma unroll 1
        for (int at = 2 * portion; at < last; at++) {
            int block = block_at(at, slot);
            uint32_t to = ptx_shared_address(m->k[slot][block]) + chunk_offset(thread / 8, chunk);
            int inside = p.d_qk - (block * 64 + chunk * 8);
#pragma unroll
            for (int i = 0; i < ROW_COPIES; i++) {
                bool copied = inside > 0 && (there >> i & 1) != 0;
                if (p.aligned) {
                    ptx_copy_async_16(to + i * 16 * 128, copied ? from[i] + block * 128 : p.main.pool.data,
                                      copied ? 16 : 0);
                } else {
                    copy_bytes(to + i * 16 * 128, from[i] + block * 128, copied ? inside : 0);
                }
            }
        }
        if (p.aligned) {
            ptx_mbarrier_arrive_copies(full);
        } else {
            ptx_fence_async_proxy();
            ptx_mbarrier_arrive(full);
        }
        if (portion == PORTIONS - 1 && thread < 32) {
            for (int h = 0; h < 2; h++) {
                const token_place place = find_token(p, w, buffer, have, tile, thread + 32 * h);
                uint32_t mask = __ballot_sync(0xFFFFFFFFu, place.row != nullptr);
                if (thread == 0) {
                    m->mask[slot][h] = mask;
                }
            }
            if (thread == 0) {
                m->more[slot] = have > TOKENS;
                ptx_mbarrier_arrive(full);
            }
        }
    }
}

template <int BLOCKS> static __device__ __forceinline__ void produce_rows(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    int thread = threadIdx.x - MMA_WARPS * 32;
    uint32_t *buffer = m->entries[thread / 32];
    slot_uses uses = 0;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            break;
        }
        const fmlac_work &w = c.work;
        int32_t begin = c.begin, end = c.end, t = 0;
        list_scan scan;
        if (begin < end) {
            scan_begin(p, w, begin, end, &scan);
        }
#pragma unroll 1
        for (bool more = begin < end; more; t++) {
            scan_fill(p, w, &scan, buffer);
            more = scan.have > TOKENS;
            copy_rows(p, w, m, t & 1, tile_parity(uses, t), buffer, scan.have, begin + t, thread);
            scan_drop(&scan, buffer);
        }
        uses = uses_after(uses, t);
        __syncwarp();
        if (thread % 32 == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
        }
    }
    ptx_copy_async_commit();
    ptx_copy_async_wait<0>();
}

#endif
