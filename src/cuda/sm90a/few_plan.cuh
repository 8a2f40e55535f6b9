/* SPDX-License-Identifier: MIT */
/*
 * few_plan.cuh: shared memory of the attention kernel for few rows (few.cuh), its barriers and rings.
 *
 * A STRIP is half a tile: 32 tokens of one pool, as they are stored. Strips are numbered over all pieces; strip number
 * n is team n % TEAMS's. Behind the last strip of a piece there is one for each team that says so and has no tokens.
 * A strip has an entry in strips[], and, if it has tokens, a place in the ring.
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_PLAN_CUH
#define FLASHMLA_CUDA_SM90A_FEW_PLAN_CUH

#include "plan.cuh"

#define TEAMS        3
#define TEAM_WARPS   4
#define TEAM_THREADS (TEAM_WARPS * 32)
#define STRIP_TOKENS 32
#define STRIP_EIGHTS (STRIP_TOKENS / 8)
#define TILE_STRIPS  (TOKENS / STRIP_TOKENS)
#define GATHERERS    2
#define ENTRIES      12                    /* strips that are known: an entry is one team's and one gatherer's */
#define RING_PLACES  12                    /* strips that have room at most: a place is one gatherer's */
#define WARP_BLOCKS  2                     /* 64-dim blocks of a token that a warp has: of 8; all warps share a ninth */
#define FEW_OUTPUT   (WARP_BLOCKS * 8 * 4) /* accumulators of a thread */

#define LEFT_FLOATS (FEW_OUTPUT / 2) /* of a thread, that are left at a time */
#define LEFT_STEPS  (2 * (TEAMS - 1))

/* Parts of scores that a warp leaves: of the eights of others, or of all; with 576 dims the ring wants the room. */
#define KEEPS_OWN(blocks) ((blocks) == 9)
#define PARTS(blocks)     (KEEPS_OWN(blocks) ? STRIP_EIGHTS - 1 : STRIP_EIGHTS)

/* Raw rows and, where they do not lie in the rows, their scales. */
#define FEW_RING(blocks) ((blocks) == 9 ? 133120 : 142336)

/* Named barriers, in place of the relay's (plan.cuh). */
#define BARRIER_TEAM 1 /* + team */
#define BARRIER_VOTE 4 /* + team */

/* A strip: a bit for each of its tokens that is attended; its place in the ring and where its rows begin; STRIP_... .
 */
typedef struct strip {
    uint32_t there, place, rows, flags; /* rows: shared address */
    int32_t position;                   /* of its first token behind the piece's; used in paged lists */
} strip;
#define STRIP_EXTRA 1u /* of the extra pool: pools[1] */
#define STRIP_LAST  2u /* no strip: the piece has no more; which team learns that first, above: */
#define STRIP_TEAM  256u

/* What must be known of a pool to read its strips, found once. */
typedef struct pool_view {
    uint32_t kind;                /* few_tokens.cuh */
    uint32_t scales, scale_pitch; /* from a strip's begin to its scales; from a token's to the next one's */
    uint32_t plain;               /* from a row's begin to where 16-bit numbers of dim 0 would be */
} pool_view;

/* What the finder notes of a tile. */
typedef struct tile_note {
    uint32_t there[TILE_STRIPS], flags; /* NOTE_EXTRA_POOL, NOTE_NEXT, NOTE_END */
} tile_note;

/* What a team knows of a row when a piece ends. */
typedef struct row_ends {
    float reference[ROWS], sum[ROWS], max[ROWS];
} row_ends;

template <int BLOCKS> struct few_plan {
    /* Q of two pieces, as first operands of products: [block][16 dims][lane] (few_source.cuh) */
    alignas(16) uint32_t q[2][BLOCKS][4][32][4];
    alignas(128) unsigned char ring[FEW_RING(BLOCKS)];
    float4 left[LEFT_FLOATS / 4][TEAM_THREADS];         /* half of a team's output, for the one that joins them */
    float4 parts[TEAMS][TEAM_WARPS][PARTS(BLOCKS)][32]; /* scores of a warp's dims: [warp][8 tokens][lane] */
    alignas(16) uint32_t weights[TEAMS][STRIP_TOKENS / 16][32][4]; /* as first operands */
    float tops[TEAMS][TEAM_WARPS][ROWS];                           /* maxima of a strip */
    float max[2][TEAMS * TEAM_THREADS];                            /* of a thread's scores of its rows */
    float sums[TEAMS][TEAM_WARPS][ROWS], maxima[TEAMS][TEAM_WARPS][ROWS];
    row_ends left_ends;                    /* of what is left */
    row_ends ends[2];                      /* of a piece: who joins has them */
    float factor[2][2][ROWS];              /* [piece][own, other] */
    float sink[2][ROWS], q_scale[2][ROWS]; /* of a piece: sinks in base 2; what scores must be multiplied by */
    uint32_t met[2];                       /* another result is there to be joined (join.cuh) */
    alignas(16) pool_view pools[2];        /* main, extra */
    uint32_t pitch;                        /* from row to row in the ring */
    uint32_t mixed[TEAMS][TEAM_WARPS];     /* KIND_MIXED: a warp has met float scales that are no powers of two */
    strip strips[ENTRIES];
    piece pieces[2];
    piece_walk walk;
    list_scan scans[1];
    uint32_t entries[1][RING];
    alignas(16) const uint8_t *places[PLACES][TOKENS]; /* of rows; nullptr: not attended */
    const uint8_t *scales[PLACES][TOKENS];             /* of their scales, where these lie elsewhere */
    tile_note notes[PLACES];
    uint64_t piece_full[2], piece_free[2], q_full[2];
    uint64_t places_full[PLACES], places_empty[PLACES];
    uint64_t strip_full[ENTRIES], strip_free[ENTRIES];
    uint64_t place_free[RING_PLACES];
    uint64_t left_full[2][LEFT_STEPS], left_free[2][LEFT_STEPS]; /* of two pieces: halves of each team but the last */
};

static_assert(sizeof(few_plan<8>) + FMLAC_NAMED_BYTES <= 232448 && sizeof(few_plan<9>) + FMLAC_NAMED_BYTES <= 232448,
              "a block of sm_90 has 227 KiB");
static_assert(ENTRIES % (TEAMS * GATHERERS) == 0 && RING_PLACES % GATHERERS == 0, "each has its own");
static_assert(FEW_OUTPUT * TEAM_THREADS == ROWS * OUT_COLUMNS && ROWS == 16, "a team has all of the output");

/* Where strips lie in the ring: their rows, then their scales. */
typedef struct strip_ring {
    uint32_t pitch, bytes, places; /* of a row; of a strip; strips that have room */
} strip_ring;

template <int BLOCKS> static __device__ __forceinline__ strip_ring ring_of(const fmlac_mqa &p)
{
    const int32_t main = p.main.pool.data_row_bytes, extra = p.extra.pool.data_row_bytes; /* 0: none */
    const uint32_t pitch = (uint32_t)FMLAC_STRIP_PITCH(main > extra ? main : extra);
    const uint32_t bytes = STRIP_TOKENS * (pitch + (BLOCKS == 8 ? FMLAC_RAW_SCALES : 0));
    const uint32_t places = (uint32_t)FEW_RING(BLOCKS) / bytes / GATHERERS * GATHERERS;
    strip_ring r = {pitch, bytes, places < RING_PLACES ? places : RING_PLACES};
    return r;
}

static __device__ __forceinline__ void team_sync(uint32_t team)
{
    ptx_barrier_sync(BARRIER_TEAM + team, TEAM_THREADS);
}

/* Token of a strip that is column, or row, n of the k-th eight in products: so that neither the loads of eight rows'
 * four segments (scores) nor of four rows' eight (values) meet a bank twice, as rows' distance is 32 modulo 64. */
static __device__ __forceinline__ uint32_t strip_token(uint32_t n)
{
    return 0x57463120u >> (4 * n) & 7;
}

#endif
