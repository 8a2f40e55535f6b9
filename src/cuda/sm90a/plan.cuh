/* SPDX-License-Identifier: MIT */
/*
 * plan.cuh: shared memory of the attention kernel, its barriers, and the one place where stage and phase are computed.
 *
 * Blocks are [64 rows][128 bytes], swizzled by 128 bytes: 64 dims of 64 tokens (or rows of Q, or 64 tokens of weights).
 */
#ifndef FLASHMLA_CUDA_SM90A_PLAN_CUH
#define FLASHMLA_CUDA_SM90A_PLAN_CUH

#include "piece.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"

#define BLOCK_BYTES 8192
#define MMA_WARPS   8
#define RING        128 /* entries of a list that a producer warp holds */
#define PORTIONS    4   /* of a tile: two blocks each, the last also holds block 8 */

/* Token sources. */
#define SOURCE_PAGES 0 /* 16-bit numbers, pages of a multiple of 64 tokens, by TMA */
#define SOURCE_ROWS  1 /* 16-bit numbers, any list, by cp.async */
#define SOURCE_CODES 2 /* quantised tokens, any list, expanded by the producer warps */
#define SOURCE_TWINS 3 /* as PAGES, two blocks of a cluster share tokens: each brings half of them to both */

/* Named barriers; 0 is __syncthreads. */
#define BARRIER_WEIGHTS                                                                                                \
    1                    /* + slot: weights of the tile in that slot are published (leader arrives, follower waits)    \
                          */
#define BARRIER_LEADER 3 /* the 128 threads of the leader */
#define BARRIER_MMA    5 /* both MMA warpgroups */

/* Where a token lies. */
typedef struct token_place {
    const uint8_t *row; /* data row of the KV head; nullptr: not attended */
    int32_t scales;     /* bytes from the row to its scales */
} token_place;

/* Where a producer warp is in its piece's list (source.cuh). */
typedef struct list_scan {
    const int32_t *main, *extra;      /* index lists, by position: the extra list's entries follow the main one's */
    int32_t main_end, at, end;        /* positions */
    uint32_t main_slots, extra_slots; /* entries below name a token */
    int32_t first;                    /* place in the ring of the next tile's first entry */
    int32_t have_main, have;          /* entries in the ring: of the main list, which come first; all */
} list_scan;

/* BLOCKS: 8 (d_qk <= 512) or 9 (<= 576). Weights of slot s lie in its rope block, which V does not use; without one
 * they have their own block. */
template <int BLOCKS> struct plan {
    unsigned char q[BLOCKS][BLOCK_BYTES];
    unsigned char k[2][BLOCKS][BLOCK_BYTES];
    unsigned char weights[BLOCKS == 8 ? 2 * BLOCK_BYTES : 1024];
    float reference[2][ROWS]; /* of the weights in a slot, base 2 */
    float factor[ROWS];       /* what the output is multiplied by in the end */
    uint32_t mask[2][2];      /* tokens of a slot that are there */
    uint32_t more[2];         /* another tile of the piece follows */
    uint64_t full[2][PORTIONS];
    uint64_t free[2][2]; /* per slot: dims 0..255, 256..511; block 8 goes with the latter */
    uint64_t piece_full[2], piece_free[2];
    piece pieces[2];
    uint32_t entries[8][RING]; /* of a producer warp: what it found in the list and has not copied yet */
    list_scan scans[8];
    token_place places[2][TOKENS]; /* CODES: of the tokens of a slot */
    piece_walk walk;               /* the scout's own */
};

static_assert(sizeof(plan<8>) <= 232448 && sizeof(plan<9>) <= 232448, "a block of sm_90 has 227 KiB");

/* Parity of use number n of a barrier or buffer that comes twice. */
static __device__ __forceinline__ uint32_t use_parity(uint32_t n)
{
    return n >> 1 & 1;
}

/* Tile t of a piece lies in slot t & 1, whatever came before: a row's bits depend on its own piece only. */
typedef uint32_t slot_uses; /* bit s: parity of the uses of slot s before this piece */

static __device__ __forceinline__ uint32_t tile_parity(slot_uses uses, uint32_t t)
{
    return ((uses >> (t & 1)) + (t >> 1)) & 1;
}

static __device__ __forceinline__ slot_uses uses_after(slot_uses uses, uint32_t tiles)
{
    return uses ^ ((tiles + 1) >> 1 & 1) ^ (tiles & 2);
}

/* Bytes from a tile's begin: 16-byte chunk `chunk` of a row, all blocks counted. */
static __device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk)
{
    return (chunk >> 3) * BLOCK_BYTES + row * 128 + (((chunk ^ row) & 7) << 4);
}

/* The scout (a warp) finds piece number i once everybody has left the piece before the last. Where it is done matters:
 * in a warp that multiplies, ptxas keeps the operands' addresses out of uniform registers, and four moves stand before
 * every product. */
template <typename PLAN> static __device__ __forceinline__ void scout_piece(const fmlac_mqa &p, PLAN *m, uint32_t i)
{
    int lane = threadIdx.x % 32;
    ptx_mbarrier_wait(ptx_shared_address(&m->piece_free[i & 1]), use_parity(i) ^ 1);
    walk_next(p, &m->walk, &m->pieces[i & 1], lane);
    if (lane == 0) {
        ptx_mbarrier_arrive(ptx_shared_address(&m->piece_full[i & 1]));
    }
}

#endif
