/* SPDX-License-Identifier: MIT */
/*
 * border.cuh: Q by TMA, for all sources, and from one piece to the next where tokens come as rows, or as pages in
 * turns, whose output is moved by TMA, too: the next Q sets out when the follower has the last weights (in turns: its
 * last values), since nobody reads Q then, and the output goes through the slot of the last tile, whose halves are free
 * when it has left. The follower sees to all of that, so that the leader can begin with the next scores as soon as it
 * has laid its half down; but Q of pages in turns is asked for by a producer (ask_queries in source_pages.cuh).
 *
 * What no tensor map can describe (encode_border in host/mqa_sm90a.c decides) goes the way of the other sources, in the
 * same places.
 */
#ifndef FLASHMLA_CUDA_SM90A_BORDER_CUH
#define FLASHMLA_CUDA_SM90A_BORDER_CUH

#include "output.cuh"
#include "ptx/tma.cuh"
#include "query.cuh"

#define OUT_ROWS FMLAC_HOPPER_BOX /* of a warp */

/* Whether Q comes by TMA where tokens come as pages or codes. */
static __device__ __forceinline__ bool has_mapped_q(const fmlac_mqa_sm90a &all)
{
    return MAPPED_Q && all.has_q;
}

/* Where row `row` of a piece is in maps: its head; its query token adds to `inner`. */
static __device__ __forceinline__ int32_t mapped_head(const fmlac_work &w, int32_t row, int32_t *inner)
{
    int32_t head = w.kv_head * w.group + (int32_t)w.row0 + row;
    if (MAPPED_Q && w.queries > 1) { /* one KV head, and all rows are of one query token */
        const int32_t token = (int32_t)((uint32_t)head / (uint32_t)w.group);
        *inner += token;
        head -= token * w.group;
    }
    return head;
}

/* One thread asks for the Q of a piece; `outer`, `inner`: its query token, as tensors count them. */
template <int BLOCKS>
static __device__ __forceinline__ void ask_q(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const fmlac_work &w,
                                             int32_t outer, int32_t inner)
{
    const uint32_t full = ptx_shared_address(&m->q_full);
    const int32_t head = mapped_head(w, 0, &inner);
    ptx_mbarrier_arrive_expect(full, BLOCKS * BLOCK_BYTES);
#pragma unroll 1
    for (int block = 0; block < BLOCKS; block++) {
        ptx_tma_load_4d(ptx_shared_address(m->q[block]), &all.q, full, block * 64, head, inner, outer,
                        PTX_L2_EVICT_FIRST);
    }
}

/* That of the first piece, as guessed, by thread 128. */
template <int BLOCKS>
static __device__ __forceinline__ void ask_first_q(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const fmlac_work &w)
{
    if (ptx_thread() == 128) {
        int64_t outer = quotient(w.first, all.mqa.s_q);
        ask_q(all, m, w, (int32_t)outer, (int32_t)(w.first - outer * all.mqa.s_q));
    }
}

/*
 * Q of piece i is there for who waits. The follower's first thread asks, for piece 0 if nothing was guessed, or once
 * more if the guess was wrong; later pieces have been asked for by ask_next_q. parity: of q_full in this piece.
 */
template <int BLOCKS>
static __device__ __forceinline__ void take_q(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const piece &c, uint32_t i,
                                              int32_t guess, bool waits, uint32_t &parity)
{
    const uint32_t full = ptx_shared_address(&m->q_full);
    const bool wrong = i == 0 && guess != (int32_t)c.work.first;
    if (wrong && guess >= 0) {
        ptx_mbarrier_wait(full, parity);
        parity ^= 1;
    }
    if (wrong && ptx_thread() == 128) {
        ask_q(all, m, c.work, c.outer, c.inner);
    }
    if (waits) {
        ptx_mbarrier_wait(full, parity);
    }
    parity ^= 1;
}

/* The same for the other sources: a producer has asked for the first piece's, start_next_q or, in turns, a producer
 * for later ones, or else the follower's first thread does. But in turns, where end_piece sees to it, sums of the piece
 * before have been read behind it. */
template <int BLOCKS, int TURNS>
static __device__ __forceinline__ void take_mapped_q(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, const piece &c,
                                                     uint32_t i, bool waits)
{
    if (!TURNS && ptx_thread() == 128 && i > 0 && !c.early) {
        ask_q(all, m, c.work, c.outer, c.inner);
    }
    __syncwarp();
    if (waits) {
        ptx_mbarrier_wait(ptx_shared_address(&m->q_full), i & 1);
    }
    if (!TURNS) {
        ptx_barrier_sync(BARRIER_MMA, 256);
    }
}

/* The follower has the last weights of a piece: Q of piece i, which the scout has found or is about to find. parity: of
 * the Q that is there. */
template <int BLOCKS>
static __device__ __forceinline__ void ask_next_q(const fmlac_mqa_sm90a &all, plan<BLOCKS> *m, uint32_t i,
                                                  uint32_t parity)
{
    if (ptx_thread() == 128) {
        const piece &next = m->pieces[i & 1];
        ptx_mbarrier_wait(ptx_shared_address(&m->q_full), parity); /* a piece without tiles does not wait for it */
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        if (next.there) {
            ask_q(all, m, next.work, next.outer, next.inner);
        }
    }
    __syncwarp();
}

/* A warp's 16 rows x 256 columns to `at`, four blocks of a slot. */
template <int F16>
static __device__ __forceinline__ void lay_output(const float o[128], const float factor[2], uint32_t at)
{
    int lane = (int)ptx_thread() % 32, first = (int)ptx_thread() % 128 / 32 * OUT_ROWS;
#pragma unroll
    for (int j = 0; j < 4; j++) { /* addresses in one block serve all */
        uint32_t to = at + chunk_offset(first + lane % 16, 2 * j + lane / 16);
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const float *from = o + 32 * block + 8 * j;
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float x = from[2 * i] * factor[i % 2], y = from[2 * i + 1] * factor[i % 2];
                a[i] = F16 ? ptx_pack_f16(x, y) : ptx_pack_bf16(x, y);
            }
            ptx_stmatrix_x4(to + block * TILE_BYTES, a);
        }
    }
    ptx_fence_async_proxy();
}

/* What lies there sets out, by one lane of a warp each 16 rows: half `half` of the output dims. */
static __device__ __forceinline__ void send_output(const fmlac_mqa_sm90a &all, const piece &c, int half, uint32_t at)
{
    int first = (int)ptx_thread() % 128 / 32 * OUT_ROWS;
    if (ptx_thread() % 32 == 0) {
        int32_t inner = c.inner, head = mapped_head(c.work, first, &inner);
        if (first < c.work.rows) {
#pragma unroll 1
            for (int block = 0; block < 4; block++) {
                ptx_tma_store_4d(&all.out, at + block * TILE_BYTES + first * 128, half * (OUT_COLUMNS / 2) + block * 64,
                                 head, inner, c.outer);
            }
        }
        ptx_tma_commit();
    }
}

/* All but PENDING groups of boxes have left: the half of a slot where they lay is free. */
template <int PENDING> static __device__ __forceinline__ void free_sent(uint32_t free)
{
    if (ptx_thread() % 32 == 0) {
        ptx_tma_wait_read<PENDING>();
    }
    arrive_together(free);
}

/* The leader lays its half down in the slot of the last tile and goes on; the follower sends both. */
template <int BLOCKS, int F16>
static __device__ __forceinline__ void copy_output(const fmlac_mqa_sm90a &all, const piece &c, const float o[128],
                                                   softmax_rows &rows, plan<BLOCKS> *m, int group, uint32_t slot)
{
    const uint32_t at[2] = {ptx_shared_address(m->k[slot]), ptx_shared_address(m->k[slot]) + 4 * TILE_BYTES};
    const uint32_t free = ptx_shared_address(m->free[slot]);
    int thread = (int)ptx_thread() % 128, row = thread / 32 * 16 + thread % 32 / 4;
    float factor[2];
    if (group == 0) {
        share_sums(rows, m);
        for (int h = 0; h < 2; h++) {
            factor[h] = row_factor(rows.reference[h], rows.sum[h], m->sink[row + 8 * h]);
        }
        ptx_barrier_sync(BARRIER_GROUP, 128); /* all four warps have their values */
        lay_output<F16>(o, factor, at[0]);
        ptx_barrier_arrive(BARRIER_ENDS, 256);
        return;
    }
    ptx_barrier_sync(BARRIER_ENDS, 256);
    send_output(all, c, 0, at[0]);
    for (int h = 0; h < 2; h++) {
        factor[h] = row_factor(m->last[row + 8 * h], m->sum[row + 8 * h], m->sink[row + 8 * h]);
    }
    ptx_barrier_sync(BARRIER_GROUP + 1, 128); /* all have read the sinks: two warps are about to fetch the next ones */
    lay_output<F16>(o, factor, at[1]);
    __syncwarp();
    send_output(all, c, 1, at[1]);
    free_sent<1>(free);
    if (thread < ROWS) {
        store_scalars(all.mqa, c, thread, m->last[thread], m->max[thread], m->sum[thread]);
    }
    free_sent<0>(free + 8);
}

/* Ends a piece of `tiles` tiles, and frees the slot of the last one. */
template <int BLOCKS, int F16>
static __device__ __forceinline__ void end_piece(const fmlac_mqa_sm90a &all, const piece &c, float o[128],
                                                 softmax_rows &rows, plan<BLOCKS> *m, int group, int half,
                                                 uint32_t tiles)
{
    const uint32_t slot = (tiles - 1) & 1;
    if (group == 0) {
        ptx_barrier_sync(BARRIER_SINKS, 256); /* and the follower has read the sums of the piece before */
    }
    if (all.has_out && tiles > 0 && c.place < 0 && uniform(c.pieces) == 1) {
        copy_output<BLOCKS, F16>(all, c, o, rows, m, group, slot);
        return;
    }
    note_rows<BLOCKS>(rows, m, group);
    store_rows<BLOCKS>(all.mqa, c, o, m, half, tiles > 0 ? ptx_shared_address(m->k[slot]) : NO_STAGE);
    if (tiles > 0) {
        arrive_together(ptx_shared_address(&m->free[slot][half]));
    }
    ptx_barrier_sync(BARRIER_MMA, 256); /* factors of joined results have been read */
}

#endif
