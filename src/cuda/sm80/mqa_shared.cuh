/* SPDX-License-Identifier: MIT */
/* mqa_shared.cuh: sizes and shared memory of the portable attention core; see mqa.cuh. */
#ifndef FLASHMLA_CUDA_SM80_MQA_SHARED_CUH
#define FLASHMLA_CUDA_SM80_MQA_SHARED_CUH

#include "common/work.cuh"
#include "tile.cuh"

#define OUT_COLUMNS  512               /* of an output tile; wider d_v goes another way */
#define STAGED_PITCH (OUT_COLUMNS + 8) /* floats */

/* Shapes that follow from the four template parameters. */
#define MQA_SHAPE                                                                                                      \
    constexpr int THREADS = WARPS * 32;                                                                                \
    constexpr int TG = WARPS / (ROWS / 16);        /* token groups of scores */                                        \
    constexpr int NT = TOKENS / TG / 8;            /* 8-token tiles of a warp */                                       \
    constexpr int MV = ROWS >= 32 ? 2 : 1;         /* 16-row tiles of a warp in values */                              \
    constexpr int CG = WARPS / (ROWS / (16 * MV)); /* column groups of values */                                       \
    constexpr int NV = OUT_COLUMNS / CG / 8;       /* 8-column tiles of a warp in values */                            \
    constexpr int WEIGHT_PITCH = TOKENS * 2 + 16;  /* bytes */                                                         \
    (void)THREADS, (void)TG, (void)NT, (void)MV, (void)CG, (void)NV, (void)WEIGHT_PITCH

/* Marks an address of the extra pool. */
#define EXTRA_BIT (1ull << 63)

typedef struct mqa_shared {
    uint32_t q, tiles, raw, weights; /* 32-bit shared addresses */
    float *red, *alpha;
    unsigned long long *address; /* data rows */
    unsigned long long *scale;   /* scale rows, quantised formats */
    uint32_t *mask;              /* two words per tile */
    fmlac_work *work;
    uint32_t tile_bytes;
    int ring;
} mqa_shared;

template <int ROWS, int TOKENS, int WARPS>
static __device__ __forceinline__ mqa_shared mqa_shared_plan(const fmlac_mqa &p)
{
    MQA_SHAPE;
    mqa_shared s;
    unsigned char *base = ptx_shared();
    uint32_t at = 0;
    s.tile_bytes = TOKENS * p.row_bytes;
    s.ring = p.quantised ? 2 : p.stages;
    uint32_t origin = ptx_shared_address(base);
    s.q = origin;
    at += ROWS * p.row_bytes;
    s.tiles = origin + at;
    at += (p.quantised ? 1 : p.stages) * s.tile_bytes;
    s.raw = origin + at;
    at += p.quantised ? TOKENS * p.raw_pitch : 0;
    s.weights = origin + at;
    at += ROWS * WEIGHT_PITCH;
    s.red = (float *)(base + at);
    at += TG * ROWS * 4;
    s.alpha = (float *)(base + at);
    at += ROWS * 4;
    s.address = (unsigned long long *)(base + at);
    at += s.ring * TOKENS * 8;
    s.scale = (unsigned long long *)(base + at);
    at += p.quantised ? s.ring * TOKENS * 8 : 0;
    s.mask = (uint32_t *)(base + at);
    at += s.ring * 8;
    s.work = (fmlac_work *)(base + at);
    return s;
}

static __device__ __forceinline__ void row_token_head(const fmlac_work &w, int row, int64_t *token, int32_t *head)
{
    int64_t at = w.row0 + row;
    int64_t j = quotient(at, w.group);
    *token = w.first + j;
    *head = w.kv_head * w.group + (int32_t)(at - j * w.group);
}

#endif
