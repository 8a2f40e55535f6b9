/* SPDX-License-Identifier: MIT */
/* mqa_shared.cuh: shapes, shared memory and barriers of the portable attention core; see mqa.cuh. */
#ifndef FLASHMLA_CUDA_SM80_MQA_SHARED_CUH
#define FLASHMLA_CUDA_SM80_MQA_SHARED_CUH

#include "common/work.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/warpgroup.cuh"
#include "tile.cuh"

#define OUT_COLUMNS  FMLAC_OUT_COLUMNS
#define STAGED_PITCH (OUT_COLUMNS + 8) /* floats */
#define PITCH        FMLAC_MQA_PITCH   /* bytes of a row of Q or of a token: an odd number of 16-byte chunks */
#define TAIL         (OUT_COLUMNS * 2) /* where a token row's dims from 512 on lie, and weights later */

/* Blocks of 64 dims of Q that scoring warps of 32 rows hold in registers: as many as do not spill. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
#define HELD_32 4
#else
#define HELD_32 6
#endif

/* What a kernel is made of. QM: 16-row tiles of a scoring warp, QW: scoring warps; MV: 16-row tiles of a summing warp,
 * PW: summing warps; SLOTS: of tiles, or 0 if the host says how many; CODES: tokens are quantised. */
template <int ROWS_, int TOKENS_, int QM_, int QW_, int MV_, int PW_, int SLOTS_, int F16_, int CODES_>
struct mqa_shape {
    static constexpr int ROWS = ROWS_, TOKENS = TOKENS_, QM = QM_, QW = QW_, MV = MV_, PW = PW_, F16 = F16_;
    static constexpr int SLOTS = SLOTS_;
    static constexpr bool CODES = CODES_ != 0;
    static constexpr int THREADS = (QW + PW) * 32;
    static constexpr int TG = QW * QM * 16 / ROWS;          /* token groups of scoring warps */
    static constexpr int NT = TOKENS / TG / 8;              /* 8-token tiles of a scoring warp */
    static constexpr int CG = PW * MV * 16 / ROWS;          /* column groups of summing warps */
    static constexpr int NV = OUT_COLUMNS / CG / 8;         /* 8-column tiles of a summing warp */
    static constexpr int LINE = FMLAC_TILE_TOKENS / TOKENS; /* rows whose weights share a token row */
    static constexpr int HELD = QM > 1       ? 0
                                : ROWS == 64 ? 4
                                : ROWS == 32 ? HELD_32
                                             : 2; /* blocks of 64 dims of Q in registers */
    static_assert((NT == 1 || NT == 2 || NT == 4) && TG <= FMLAC_TOKEN_GROUPS && NV % 8 == 0 &&
                      ROWS <= FMLAC_TILE_TOKENS && PW <= FMLAC_SUMMING_WARPS && QW <= FMLAC_SCORING_WARPS,
                  "shape");
};

/* Named barriers. */
enum { BARRIER_SCORES = 1, BARRIER_SUMS, BARRIER_LIST, BARRIER_END };

/* Marks an address of the extra pool. */
#define EXTRA_BIT (1ull << 63)

/* One row tile against tiles begin, ..., begin + count - 1 of its list. */
typedef struct mqa_piece {
    int64_t unit, begin;
    int64_t place;             /* -1, or where the partial result goes */
    int count;                 /* of tiles; lists of indices may end before; -1: there are no more pieces */
    int at;                    /* place of its first tile in the ring, which goes on from piece to piece */
    uint32_t parity;           /* of q_full */
    int64_t scan_at, scan_end; /* next position of the list, and where the piece ends */
    const int32_t *entries, *extra_entries; /* the request's page table, or the lists of indices */
    int64_t first_page;                     /* of the request where there is no table */
    int32_t outer, inner, head; /* of the first row: its query token in tensors, its head among those of the KV head */
    uint8_t straight[FMLAC_STAGES_MAX + 1]; /* whether a first tile ended where the next was thought to begin */
    cut_view cut;
} mqa_piece;

static_assert(sizeof(fmlac_work) + sizeof(mqa_piece) <= FMLAC_WORK_BYTES, "work and piece");

typedef struct mqa_shared {
    uint32_t q, tiles;           /* 32-bit shared addresses */
    uint32_t full, ready, free;  /* mbarriers of slots: the tile is there; its weights are; it has been summed */
    uint32_t q_full;             /* mbarrier: Q is there */
    uint32_t raw_full;           /* mbarriers, quantised formats: a summing warp's raw bytes are there */
    float *top;                  /* [2][token groups][ROWS] row maxima of a step; sums at the end */
    float *shrink;               /* [slots][ROWS] what an output row is multiplied with before the slot's tile */
    float *factor;               /* [ROWS] norm factors at the beginning (fused), 1 / sum at the end */
    int *seen;                   /* [ROWS] */
    unsigned long long *address; /* [ring][TOKENS] data rows */
    unsigned long long *scale;   /* [ring][TOKENS] scale rows, quantised formats */
    uint32_t *mask;              /* [ring][2] tokens that are there; quantised ones: those of the extra pool second */
    fmlac_work *work;
    mqa_piece *piece;
    int32_t *own;     /* [FMLAC_OWN_UNITS + 1] of the cut, if this block finds it */
    int32_t *entries; /* [scoring warps][32] of the list, asked for ahead */
    int slots, ring;
} mqa_shared;

static __device__ __forceinline__ mqa_shared mqa_shared_plan(const fmlac_mqa &p, int slots)
{
    unsigned char *base = ptx_shared();
    const fmlac_places &at = p.places;
    mqa_shared s;
    s.q = ptx_shared_address(base);
    s.tiles = s.q + at.tiles;
    s.full = s.q + at.barriers;
    s.ready = s.full + slots * 8;
    s.free = s.ready + slots * 8;
    s.q_full = s.free + slots * 8;
    s.raw_full = s.q_full + 8;
    s.top = (float *)(base + at.top);
    s.shrink = (float *)(base + at.shrink);
    s.factor = (float *)(base + at.factor);
    s.seen = (int *)(base + at.seen);
    s.address = (unsigned long long *)(base + at.address);
    s.scale = (unsigned long long *)(base + at.scale);
    s.mask = (uint32_t *)(base + at.mask);
    s.work = (fmlac_work *)(base + at.work);
    s.piece = (mqa_piece *)(s.work + 1);
    s.own = (int32_t *)(base + at.work + FMLAC_WORK_BYTES);
    s.entries = s.own + FMLAC_OWN_UNITS + 1;
    s.slots = slots;
    s.ring = 2 * slots;
    return s;
}

/* The next of `count` places in a ring. */
static __device__ __forceinline__ int after(int at, int count)
{
    return at + 1 == count ? 0 : at + 1;
}

/* The slot of a place in the ring of tiles. */
static __device__ __forceinline__ int slot_of(const mqa_shared &s, int at)
{
    return at < s.slots ? at : at - s.slots;
}

/* Parity of the slot's barriers for the tile at a place in the ring: a tile is a phase of each. */
static __device__ __forceinline__ uint32_t parity_of(const mqa_shared &s, int at)
{
    return at < s.slots ? 0 : 1;
}

/* The place `by` tiles, at most a ring, after another. */
static __device__ __forceinline__ int place_after(const mqa_shared &s, int at, int by)
{
    return at + by < s.ring ? at + by : at + by - s.ring;
}

/* How many tiles lie between the one that is summed in a step and the one that is brought then: copied, into the slot
 * that has become free; or expanded, when the raw bytes of the one after it set out for that slot. */
template <class S> static __device__ __forceinline__ int brought_ahead(const mqa_shared &s)
{
    return S::CODES ? s.slots - 1 : s.slots;
}

/* How many tiles are listed before the first is summed, and how far lists are ahead of the scores from then on. */
static __device__ __forceinline__ int listed_first(const mqa_shared &s)
{
    return s.slots + 1;
}

/* A summing warp's tokens of a tile: which are there, from bit 16 on which are of the extra pool, bit 31 if there is
 * such a tile. */
#define TILE_EXISTS 0x80000000u

template <class S>
static __device__ __forceinline__ uint32_t own_tokens(const mqa_shared &s, int warp, bool inside, int at)
{
    constexpr uint32_t ALL = (1u << S::TOKENS / S::PW) - 1;
    if (!inside) {
        return 0;
    }
    uint2 bits = ((const uint2 *)s.mask)[at];
    int first = warp * (S::TOKENS / S::PW);
    return (bits.x >> first & ALL) | (bits.y >> first & ALL) << 16 | (bits.x != 0 ? TILE_EXISTS : 0);
}

/* Whether a tile is one of its piece; at: its place in the ring. Lists of indices end where a tile is empty. */
static __device__ __forceinline__ bool tile_exists(const fmlac_mqa &p, const mqa_shared &s, bool inside, int at)
{
    return inside && (p.main.kind == FMLAC_LIST_PAGED || ((volatile uint32_t *)s.mask)[at * 2] != 0);
}

#endif
