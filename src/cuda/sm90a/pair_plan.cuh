/* SPDX-License-Identifier: MIT */
/*
 * pair_plan.cuh: shared memory of the attention kernel whose blocks work in pairs (pair.cuh), its barriers and rings.
 * Both blocks of a pair have the same plan, so that an address in one is an address in the other.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_PLAN_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_PLAN_CUH

#include "plan.cuh"

#define PAIR_ROWS    FMLAC_PAIR_ROWS /* rows of queries of a pair */
#define PAIR_DIMS    256             /* of a token, without RoPE dims that come on top: a block's half */
#define HALF_BLOCKS  (PAIR_DIMS / 64)
#define NARROW_BYTES 4096 /* 64 rows of 32 dims, swizzled by 64 bytes */
#define STAGES       3
#define LASTS        4 /* with d_qk 512: of the tiles' last blocks, which RoPE dims may be */
#define PIECES       4 /* a helper that waits for Q of a piece may owe the output of the third before */
#define GATHER_WARPS 2 /* and a third one where it has no RoPE dims to copy */
#define EXPAND_WARPS 4
#define LOAD_WARPS   (GATHER_WARPS + 1 + EXPAND_WARPS)
#define GROUP_ROWS   16 /* raw rows that are fetched at a time */
#define TILE_GROUPS  (TOKENS / GROUP_ROWS)
#define UNIT_ROWS    8 /* that are expanded at a time */
#define TILE_UNITS   (TOKENS / UNIT_ROWS)
#define GROUP_UNITS  (GROUP_ROWS / UNIT_ROWS)
#define SCORE_BYTES  (64 * TOKENS * 4)               /* a tile's partial scores of 64 rows */
#define WEIGHT_BYTES (64 * TOKENS * 2 + 64 / 2 * 16) /* its weights, and 16 bytes for two rows' factors */

/*
 * GROUPS in the ring. A place of the ring belongs to one gather warp, and each of its units to one expanding warp: so
 * each of them meets all phases of its barriers, one after another.
 * Raw rows lie in TWOs: the first row, the SECOND one, SCALES of both. A warp reads two rows at a time, and its loads
 * meet no bank twice: the distance of the rows is 64 modulo 128, or, where there is no room for that, four lanes read
 * of the second row what is TURN bytes from what four others read of the first.
 */
template <int BLOCKS> struct raw_ring {
    enum {
        GROUPS = BLOCKS == 9 ? 4 : 6,
        SECOND = BLOCKS == 9 ? 256 : 320,
        SCALES = BLOCKS == 9 ? 512 : 256,
        TWO = BLOCKS == 9 ? 544 : 576,
        TURN = BLOCKS == 9 ? 64 : 0
    };
};

static_assert(raw_ring<8>::GROUPS % GATHER_WARPS == 0 && raw_ring<8>::GROUPS % (GATHER_WARPS + 1) == 0 &&
                  raw_ring<9>::GROUPS % GATHER_WARPS == 0 && raw_ring<8>::GROUPS * GROUP_UNITS % EXPAND_WARPS == 0 &&
                  raw_ring<9>::GROUPS * GROUP_UNITS % EXPAND_WARPS == 0 && TILE_GROUPS > GATHER_WARPS &&
                  TILE_UNITS >= EXPAND_WARPS,
              "places belong to warps, and every warp has a part of every tile");

/* Of a tile: attended tokens; another tile of the piece follows; it is of the extra pool; it is the piece's first. */
#define NOTE_COUNT 127u
#define NOTE_MORE  128u
#define NOTE_EXTRA 256u
#define NOTE_FIRST 512u

/*
 * Blocks of a tile that are a stage's OWN. With d_qk 512 the last one is in a ring of its own, of one more: RoPE dims,
 * which come from far and straight into the tile, need not wait until the tile before last but one is free.
 */
template <int BLOCKS> struct tile_blocks {
    enum { OWN = BLOCKS == 9 ? HALF_BLOCKS : HALF_BLOCKS - 1 };
};

template <int BLOCKS> struct pair_plan {
    typedef raw_ring<BLOCKS> ring;
    unsigned char q[2][HALF_BLOCKS][BLOCK_BYTES]; /* 64 rows per warpgroup */
    unsigned char k[STAGES][tile_blocks<BLOCKS>::OWN][BLOCK_BYTES];
    /* Last blocks of tiles, or their 32 RoPE dims on top; the same of Q of the warpgroups. */
    unsigned char k_last[BLOCKS == 9 ? STAGES : LASTS][BLOCKS == 9 ? NARROW_BYTES : BLOCK_BYTES];
    unsigned char q_rope[2][BLOCKS == 9 ? NARROW_BYTES : 16];
    unsigned char scores[SCORE_BYTES];   /* by the peer's helper, of the rows that this block owns */
    unsigned char weights[WEIGHT_BYTES]; /* by the peer's owner, of the rows that it owns */
    unsigned char raw[ring::GROUPS][GROUP_ROWS / 2 * ring::TWO];
    token_place places[2][TOKENS];    /* of two tiles */
    uint32_t notes[2];                /* of the same tiles */
    uint32_t raw_notes[ring::GROUPS]; /* of the groups' tiles */
    uint32_t stage_notes[STAGES];
    uint64_t full[STAGES], empty[STAGES], rope_empty[STAGES];
    uint64_t q_full[2];
    uint64_t scores_full, scores_empty, weights_full, weights_empty;
    uint64_t places_full[2], places_empty[2];
    uint64_t raw_full[ring::GROUPS], raw_empty[ring::GROUPS];
    uint64_t piece_full[PIECES], piece_free[PIECES];
    piece pieces[PIECES];
    float last[2][64];      /* what rows are multiplied by in the end; of two pieces */
    uint32_t entries[RING]; /* what the finder found in the list and has not handed on */
    list_scan scan;         /* the finder's own */
    piece_walk walk;
};

static_assert(sizeof(pair_plan<8>) <= 232448 && sizeof(pair_plan<9>) <= 232448, "a block of sm_90 has 227 KiB");

/* Where use number n of a ring of N places is; use: parity of the uses of that place. */
typedef struct ring_place {
    uint32_t at, use;
} ring_place;

template <int N> static __device__ __forceinline__ ring_place ring_at(uint32_t n)
{
    ring_place to = {n % N, n / N & 1};
    return to;
}

/* Where tile n, counted over all pieces, lies: its stage and its last block. */
typedef struct tile_place {
    uint32_t slot, last;
} tile_place;

static __device__ __forceinline__ tile_place place_of(uint32_t n)
{
    tile_place to = {n % STAGES, n % LASTS};
    return to;
}

#endif
