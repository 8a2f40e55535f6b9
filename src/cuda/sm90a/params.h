/* SPDX-License-Identifier: MIT */
/* params.h: what the Hopper attention kernels are given: the description of common/params.h and tensor maps. */
#ifndef FLASHMLA_CUDA_SM90A_PARAMS_H
#define FLASHMLA_CUDA_SM90A_PARAMS_H

#include "common/params.h"

#define FMLAC_HOPPER_ROWS   64  /* rows of queries of a block */
#define FMLAC_HOPPER_BOX    16  /* rows of output that leave in a box (border.cuh) */
#define FMLAC_HOPPER_TOKENS 64  /* tokens of a tile */
#define FMLAC_PAIR_ROWS     128 /* rows of queries of a pair of blocks */
#define FMLAC_CODES_TOKENS  48  /* tokens of a tile of quantised tokens: what two tiles leave holds raw rows */
#define FMLAC_FEW_ROWS      16  /* rows of queries of a block where they are few, with quantised tokens, ... */
#define FMLAC_FEW_TOKENS    64  /* ... and tokens of a tile */

/* Distance of raw rows in shared memory: 64 modulo 128, so that loads of two rows at a time meet no bank twice. */
#define FMLAC_RAW_PITCH(bytes) (((bytes) + 63) / 128 * 128 + 64)
#define FMLAC_RAW_PITCH_MAX    1344
/* The same for few rows of queries: 32 modulo 64 (sm90a/few_plan.cuh). */
#define FMLAC_STRIP_PITCH(bytes) (((bytes) + 31) / 64 * 64 + 32)
#define FMLAC_STRIP_PITCH_MAX    672
#define FMLAC_RAW_SCALES       32 /* bytes of scales of a token that lie at the end of its page, at most; 576 dims: 0 */

/* A TMA descriptor (CUtensorMap): 128 opaque bytes, aligned to 64. */
#ifdef __cplusplus
typedef struct alignas(64) fmlac_tensor_map {
    uint8_t bytes[128];
} fmlac_tensor_map;
#else
typedef struct fmlac_tensor_map {
    _Alignas(64) uint8_t bytes[128];
} fmlac_tensor_map;
#endif

/* Pairs of blocks: Q as [batch][s_q][h_q][d_qk]. */
typedef struct fmlac_pair_sm90a {
    fmlac_tensor_map q;      /* boxes of 64 heads x 64 dims */
    fmlac_tensor_map q_rope; /* of 64 heads x 32 dims */
    fmlac_mqa mqa;
} fmlac_pair_sm90a;

typedef struct fmlac_mqa_sm90a {
    fmlac_tensor_map pages; /* SOURCE_PAGES: the main pool as [h_kv][num_pages][page_size][d_qk], boxes of 64 x 64 */
    fmlac_mqa mqa;
    /* Q, and of SOURCE_ROWS and in turns the output, as [batch][s_q][h_q][dims], boxes of 64 and of 16 heads x 64 dims
     */
    fmlac_tensor_map q, out;
    int32_t has_q, has_out; /* whether they are there */
} fmlac_mqa_sm90a;

#endif
