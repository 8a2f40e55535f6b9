/* SPDX-License-Identifier: MIT */
/*
 * plan.cuh: shared memory of the attention kernel, its barriers, and the one place where stage and phase are computed.
 *
 * Blocks are [64 rows][128 bytes], swizzled by 128 bytes: 64 dims of 64 tokens (or rows of Q, or 64 tokens of weights).
 */
#ifndef FLASHMLA_CUDA_SM90A_PLAN_CUH
#define FLASHMLA_CUDA_SM90A_PLAN_CUH

#include "common/arrive.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "walk.cuh"

#define BLOCK_BYTES (ROWS * 128)   /* of Q and of weights */
#define TILE_BYTES  (TOKENS * 128) /* of a block of a tile */
#define MMA_WARPS   8
#define RING        128                                 /* entries of a list that a producer warp holds */
#define GUESSES     (WARP_ARRIVALS > 1 ? MMA_WARPS : 1) /* own_guess */

/* Portions in which a tile arrives: two blocks each, the last also holds block 8. A wait between products costs 100
 * cycles: quantised tokens, whose rows are complete at about the same time, arrive as one. */
#ifdef FMLAC_CODES
#define PORTIONS 1
#else
#define PORTIONS 4
#endif

/* Token sources. */
#define SOURCE_PAGES 0 /* 16-bit numbers, pages of a multiple of 64 tokens, by TMA */
#define SOURCE_ROWS  1 /* 16-bit numbers, any list, by cp.async */
#define SOURCE_CODES 2 /* quantised tokens, any list, expanded by the producer warps */

/* Named barriers; 0 is __syncthreads. */
#define BARRIER_WEIGHTS 1 /* + slot: weights of the tile in that slot are published */
#define BARRIER_GROUP   3 /* + group: the 128 threads of a warpgroup that multiplies */
#define BARRIER_MMA     5 /* both of these */
#define BARRIER_SCORES  6 /* in turns: scores of an odd tile have been set out */
#define BARRIER_SINKS   7 /* ROWS, in turns: sinks of the piece are there; ends of the one before have been read */
#define BARRIER_ENDS    8 /* ROWS, in turns: rows' ends and half 0 of the output are in shared memory */

static __device__ __forceinline__ void begin_named_barriers(void)
{
    for (int i = 0; i < 2; i++) {
        ptx_barrier_begin(BARRIER_WEIGHTS + i, 256);
        ptx_barrier_begin(BARRIER_GROUP + i, 128);
    }
    ptx_barrier_begin(BARRIER_MMA, 256);
    ptx_barrier_begin(BARRIER_SCORES, 256);
    ptx_barrier_begin(BARRIER_SINKS, 256);
    ptx_barrier_begin(BARRIER_ENDS, 256);
}

/* CODES: warps that expand, each its own rows of every tile, BATCH_ROWS at a time, from raw rows in shared memory;
 * batches of a warp that are under way, at most; tiles whose places are known. */
#define WARP_ROWS     8
#define CODE_WARPS    6
#define BATCH_ROWS    4
#define BATCHES_MAX   3
#define CODE_BATCHES  (TOKENS / CODE_WARPS / BATCH_ROWS) /* of a warp in a tile */
#define RAW_PITCH_MAX FMLAC_RAW_PITCH_MAX

#ifdef FMLAC_CODES
#define RAW_BYTES(blocks)  ((blocks) == 9 ? 33792 : 41472)
#define WEIGHTS(blocks)    BLOCK_BYTES /* one for both slots */
#define SCAN_WARPS         1
#define SUMS               1 /* no turns */
#define PLACES             4
#define PLACED             TOKENS
#define SCALE_ROWS(blocks) ((blocks) == 8 ? TOKENS : 1)
#else
#define RAW_BYTES(blocks)  16
#define WEIGHTS(blocks)    ((blocks) == 8 ? 2 * BLOCK_BYTES : 16)
#define SCAN_WARPS         4
#define SUMS               128
#define PLACES             1
#define PLACED             1
#define SCALE_ROWS(blocks) 1
#endif

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

/* CODES: what an expanding warp must know of a tile: which of its rows are attended, a bit for each; of the extra pool;
 * what follows. NOTE_END: no tile at all, and none follows. */
#define NOTE_THERE      ((1u << WARP_ROWS) - 1)
#define NOTE_EXTRA_POOL 0x100u
#define NOTE_NEXT       0x200u /* another tile of the piece */
#define NOTE_END        0x400u
#define NOTE_WHOLE      0x800u /* all rows of the tile are attended */

/* BLOCKS: 8 (d_qk <= 512) or 9 (<= 576). Weights of slot s lie in its rope block, which V does not use; without one
 * they have their own block. CODES: both slots share one block for weights. */
template <int BLOCKS> struct plan {
    unsigned char q[BLOCKS][BLOCK_BYTES];
    unsigned char k[2][BLOCKS][TILE_BYTES];
    unsigned char weights[WEIGHTS(BLOCKS)];
    unsigned char raw[RAW_BYTES(BLOCKS)]; /* CODES: rows as they are stored; scales that lie at the end of a page */
    unsigned char scales[PLACES][SCALE_ROWS(BLOCKS)][FMLAC_RAW_SCALES];
    float reference[2][ROWS]; /* of the weights in a slot, base 2; factors of joined results (join.cuh) */
    float sum[ROWS], last[ROWS], max[ROWS]; /* of a piece that ends: sums of weights, their references, maxima */
    float sink[ROWS];                       /* of the piece in hand, base 2 */
    uint32_t met;                           /* another result is there to be joined (join.cuh) */
    uint32_t mask[2][16 / WARP_ROWS];       /* tokens of a slot that are there; CODES: a byte for a warp's */
    uint32_t more[2];                       /* another tile of the piece follows; in turns STATE_... of it */
    uint64_t full[2][PORTIONS];
    uint64_t free[2][2]; /* per slot: dims 0..255, 256..511; block 8 goes with the latter */
    uint64_t piece_full[2], piece_free[2];
    uint64_t q_full; /* Q has come by TMA */
    piece pieces[2];
    uint32_t entries[SCAN_WARPS][RING]; /* of a producer warp: what it found in the list and has not copied yet */
    float2 heads[2][2][SUMS]; /* in turns, by thread: references of the weights in a slot, sums up to that tile */
    list_scan scans[SCAN_WARPS];
    int32_t guess[GUESSES]; /* first query token whose Q has set out before the scout found anything; -1: none */
    piece_walk walk;        /* the scout's own */
#ifdef FMLAC_PAGED_ONLY
    uint64_t q_free; /* in turns: the piece's last scores are there */
#endif
    /* CODES: places of the tokens of tiles, and when they are known and used up; raw rows of a batch are there. */
    alignas(16) const uint8_t *places[PLACES][PLACED]; /* nullptr: not attended */
    uint32_t notes[PLACES][CODE_WARPS];
    uint64_t places_full[PLACES], scales_full[PLACES], places_empty[PLACES];
    uint64_t raw_full[CODE_WARPS][BATCHES_MAX], raw_empty[CODE_WARPS][BATCHES_MAX];
};

static_assert(sizeof(plan<8>) + FMLAC_NAMED_BYTES <= 232448 && sizeof(plan<9>) + FMLAC_NAMED_BYTES <= 232448,
              "a block of sm_90 has 227 KiB");

/* What all lanes have read. Said like this, it and what depends on it live in uniform registers, from where products
 * take their operands' addresses; otherwise four moves stand before every product. */
static __device__ __forceinline__ uint32_t uniform(uint32_t x)
{
    return __shfl_sync(0xFFFFFFFFu, x, 0);
}

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
    return (chunk >> 3) * TILE_BYTES + row * 128 + (((chunk ^ row) & 7) << 4);
}

/* The same in Q. */
static __device__ __forceinline__ uint32_t query_offset(uint32_t row, uint32_t chunk)
{
    return (chunk >> 3) * BLOCK_BYTES + row * 128 + (((chunk ^ row) & 7) << 4);
}

/* The scout (a warp) finds piece number i once everybody has left the piece before the last. Where it is done matters:
 * in a warp that multiplies, ptxas keeps the operands' addresses out of uniform registers, and four moves stand before
 * every product. */
template <typename PLAN> static __device__ __forceinline__ void scout_piece(const fmlac_mqa &p, PLAN *m, uint32_t i)
{
    const uint32_t places = sizeof m->pieces / sizeof m->pieces[0];
    int lane = threadIdx.x % 32;
    uint32_t at = i % places;
    ptx_mbarrier_wait(ptx_shared_address(&m->piece_free[at]), (i / places & 1) ^ 1);
    walk_next(p, &m->walk, &m->pieces[at], lane);
    arrive_warp(ptx_shared_address(&m->piece_full[at]));
}

#endif
