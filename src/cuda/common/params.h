/* SPDX-License-Identifier: MIT */
/*
 * params.h: what kernels are given, as plain data: the internal descriptions (src/problem.h) with fixed-width fields,
 * and what the host decided about tiles and grids. Included by the host's C and by the kernels; includes nothing of
 * ours. Enum values are those of flashmla_types.h and problem.h (host/describe.c asserts that).
 */
#ifndef FLASHMLA_CUDA_PARAMS_H
#define FLASHMLA_CUDA_PARAMS_H

#include <stdint.h>

enum {
    FMLAC_NONE = 0,
    FMLAC_BF16 = 1,
    FMLAC_F16 = 2,
    FMLAC_F32 = 3,
    FMLAC_I64 = 6,
    FMLAC_F8_E4M3 = 8,
    FMLAC_F8_E8M0 = 9,
    FMLAC_F4_E2M1 = 10
};

enum { FMLAC_LAYOUT_PLAIN = 0, FMLAC_LAYOUT_RECORD = 1, FMLAC_LAYOUT_PAGE = 2 };

enum { FMLAC_LIST_NONE = 0, FMLAC_LIST_PAGED = 1, FMLAC_LIST_INDEXED = 2 };

typedef struct fmlac_pool {
    uint8_t *data;
    int64_t num_pages;
    int64_t page_size;
    int32_t page_shift; /* page_size = 1 << page_shift, or -1 */
    int64_t page_stride;
    int64_t token_stride;
    int64_t head_stride;
    float outer_scale;
    int32_t layout;
    int32_t d_qk;
    int32_t quant_dims;
    int32_t rope_dims;
    int32_t element;
    int32_t group;       /* never 0 where quant_dims is not */
    int32_t group_shift; /* group = 1 << group_shift, or -1 */
    int32_t scale;
    int32_t code_bytes;  /* of a token */
    int32_t scale_bytes; /* of a token */
    int32_t data_row_bytes;
    int32_t scale_row_bytes;
    int32_t scale_offset;
    int32_t rope_offset;
    /* Where a token's bytes lie in a row of a tile before they are expanded there: data row, scales from there on; and
     * whether 16-byte copies may take them there. */
    int32_t raw_at;
    int32_t raw_scales;
    int32_t aligned;
} fmlac_pool;

typedef struct fmlac_lengths {
    const int32_t *data;
    int64_t outer_stride;
    int64_t inner_stride;
    int32_t per_request;
} fmlac_lengths;

typedef struct fmlac_list {
    fmlac_pool pool;
    const int32_t *block_table;
    int64_t table_stride;
    int64_t max_pages;
    int64_t capacity; /* tokens in max_pages pages, at most INT32_MAX */
    const int32_t *seqlens;
    fmlac_lengths bound;
    const int32_t *indices;
    int64_t index_outer, index_inner, index_head;
    int64_t topk;
    fmlac_lengths length;
    int32_t kind;
    int32_t causal;
} fmlac_list;

typedef struct fmlac_fused {
    const int32_t *positions;
    int64_t position_stride;
    const float *cos_sin;
    int64_t cos_sin_rows;
    int64_t cos_sin_stride;
    uint8_t *codes;
    uint8_t *scale;
    int64_t scale_rows;
    float eps;
    int32_t enabled, q_norm, q_permuted, rope_neox, rope_dim;
    int32_t groups, group_heads;
} fmlac_fused;

typedef struct fmlac_rows {
    void *data;
    int64_t stride[3];
    int32_t dtype;
    int32_t aligned; /* vectors may be moved 16 bytes (inputs) or one pair (outputs) at a time */
} fmlac_rows;

/*
 * How attention is cut (common/work.cuh). A unit is what the schedule counts: all row tiles of a request (paged lists),
 * of a query token (index lists), or, for ragged batches, one row tile. Columns are the row tiles and KV heads of a
 * unit: they read the same tokens, so their blocks run side by side. Block = part * columns + column.
 */
typedef struct fmlac_cut {
    int64_t units;
    int64_t columns;
    int64_t row_tiles;     /* per KV head and unit; ragged: slots for row tiles of the whole batch */
    int64_t parts;         /* 0: direct, block = unit * columns + column, split only into `pieces`, by clusters */
    int32_t overhead;      /* cost of a piece, in tiles */
    int32_t least;         /* tiles that a piece has at least, unless a part or the whole list is shorter */
    int32_t longest;       /* cost of a unit whose list is as long as it can be */
    int32_t join;          /* what one part more costs all others, in tiles / 256 */
    int32_t own;           /* blocks find the cut by themselves: units <= FMLAC_OWN_UNITS or _CODES; 0: the plan
                            * kernel does. FMLAC_OWN_PAGED: and all lists are paged, of one KV head, without bounds
                            * and of equally many query tokens */
    int32_t whole;         /* direct, one KV head, all lists as long as they can be: nothing need be looked up */
    int32_t *starts;       /* workspace: units + 1 costs before each unit, cost of a part, tiles of a piece at least */
    float *partial;        /* workspace: blocks * 2 results of rows * d_pad floats */
    float *partial_scalar; /* blocks * 2 * rows pairs (lse in base 2, maximum) */
    /* Workspace, a flag per block: who has a piece joins it with the others (sm90a/join.cuh), scalars are four a row.
     * nullptr: the combine kernel does it. */
    uint32_t *flags;
} fmlac_cut;

/* The build for racecheck: bytes at the end of a block's shared memory for named barriers (ptx/warpgroup.cuh). */
#ifdef FMLAC_RACECHECK
#define FMLAC_NAMED_BYTES (16 * 8 + 8)
#else
#define FMLAC_NAMED_BYTES 0
#endif

#define FMLAC_OWN_PAGED 2

/* Units whose cut every block finds by itself. */
#ifndef FMLAC_OWN_UNITS
#define FMLAC_OWN_UNITS 256
#endif
/* The same where shared memory is short: quantised tokens for up to 64 heads on Hopper. */
#define FMLAC_OWN_UNITS_CODES (FMLAC_OWN_UNITS < 64 ? FMLAC_OWN_UNITS : 64)

/* Columns of an output tile and of partial results; wider values go another way. */
#define FMLAC_OUT_COLUMNS 512

/* The portable core: rows of Q and of tokens in shared memory, limits of its shapes. */
#define FMLAC_MQA_PITCH     1168
#define FMLAC_TILE_TOKENS   64
#define FMLAC_TOKEN_GROUPS  4
#define FMLAC_STAGES_MAX    5
#define FMLAC_WORK_BYTES    192 /* of the work and the piece in hand */
#define FMLAC_SUMMING_WARPS 8
#define FMLAC_SCORING_WARPS 4

/* Whole rows of tokens by one bulk copy each (sm_90 and up) instead of 16 bytes at a time. */
#ifndef FMLAC_BULK_ROWS
#define FMLAC_BULK_ROWS 1
#endif

/* Pools whose codes are expanded in straight code (sm80/mqa_expand.cuh): e4m3 with f32 or e8m0 scales, e2m1 with e4m3
 * ones. */
enum { FMLAC_STRAIGHT_NONE = 0, FMLAC_STRAIGHT_E4M3 = 1, FMLAC_STRAIGHT_E2M1 = 2 };

/* Its shared memory: byte offsets, Q at 0. See sm80/mqa_shared.cuh. */
typedef struct fmlac_places {
    int32_t tiles, top, shrink, factor, seen, address, scale, mask, barriers, work, bytes;
} fmlac_places;

typedef struct fmlac_mqa {
    int64_t batch, s_q, num_tokens;
    int32_t h_q, h_kv, d_qk, d_v;
    const int32_t *cu_seqlens_q;
    fmlac_rows q;
    fmlac_fused fused;
    fmlac_list main, extra;
    float scale;
    const float *sink;
    fmlac_rows out, lse, max_logits;
    float empty_lse;
    float lse_factor;
    /* tiles */
    int32_t row_bytes; /* of a row of Q or of a token: 1024 or 1152 */
    int32_t stages;    /* token tiles in shared memory */
    fmlac_places places;
    int32_t quantised;
    int32_t aligned;                  /* 16-byte copies may read all pools */
    int32_t bulk;                     /* rows come by bulk copies */
    int32_t scales_elsewhere;         /* than in data rows, in any pool */
    int32_t straight, straight_extra; /* FMLAC_STRAIGHT_... of the pools */
    int32_t tile_tokens;
    int32_t tile_rows;
    int32_t pieces; /* of each list, all as long; 0: as costs say (common/work.cuh) */
    fmlac_cut cut;
} fmlac_mqa;

typedef struct fmlac_packed {
    void *data;
    int64_t stride[2];
    int32_t dtype;
    int32_t aligned;
} fmlac_packed;

typedef struct fmlac_mha {
    int64_t batch, total_q, total_kv;
    const int32_t *cu_seqlens_q;
    const int32_t *cu_seqlens_kv;
    int64_t slots;   /* row tiles of the whole batch, per head */
    int64_t section; /* heads whose blocks run together */
    int32_t h_q, h_kv, d_qk, d_v;
    int32_t causal;
    float scale;
    float empty_lse;
    fmlac_packed q, k, v, out, lse, dout, dq, dk, dv;
    float *delta; /* workspace: [h_q][total_q] rowsum(dout * out) */
} fmlac_mha;

typedef struct fmlac_slots {
    const void *data;
    int64_t stride;
    int32_t dtype;
} fmlac_slots;

typedef struct fmlac_transcode {
    int64_t count;
    int32_t heads;
    int32_t historic; /* V32's first quantiser */
    fmlac_packed rows;
    fmlac_pool pool;
    fmlac_slots slots;
} fmlac_transcode;

typedef struct fmlac_convert {
    int64_t count;
    int32_t heads;
    int32_t same_codes;
    fmlac_pool src, dst;
    fmlac_slots src_slots, dst_slots;
} fmlac_convert;

typedef struct fmlac_indices_convert {
    int64_t batch, s_q, topk, page_size, max_pages;
    const int32_t *positions;
    int64_t position_stride[2];
    const int32_t *block_table;
    int64_t table_stride;
    int32_t *indices;
    int64_t index_stride[2];
} fmlac_indices_convert;

typedef struct fmlac_fp8_cast {
    int64_t rows, cols;
    const void *src;
    int64_t src_stride;
    uint8_t *codes;
    int64_t code_stride;
    uint8_t *scale;
    int64_t scale_rows;
    int32_t group;
    int32_t dtype;
    int32_t aligned; /* eight elements at a time */
} fmlac_fp8_cast;

#define FMLAC_MERGE_STATES 480

typedef struct fmlac_merge_state {
    const void *out;
    const float *lse;
    int64_t out_stride[2];
    int64_t lse_stride[2];
    int32_t dtype;
    int32_t aligned; /* eight elements at a time */
} fmlac_merge_state;

typedef struct fmlac_merge {
    int64_t tokens;
    int32_t heads, d, count;
    float empty_lse;
    const float *sink;
    fmlac_packed out, lse;
    fmlac_merge_state states[FMLAC_MERGE_STATES];
} fmlac_merge;

typedef struct fmlac_permute {
    int64_t groups, rows, cols, words;
    int32_t heads, d;
    int32_t aligned; /* weights 16 bytes at a time */
    const uint8_t *weight;
    int64_t weight_stride[2];
    const int32_t *scale;
    int64_t scale_stride[3];
    uint8_t *out_weight;
    int32_t *out_scale;
    int64_t out_scale_stride[3];
} fmlac_permute;

typedef struct fmlac_schedule {
    int64_t batch;
    const int32_t *seqlens;
    const int32_t *topk_length, *extra_topk_length;
    int64_t topk, extra_topk;
    int64_t parts;
    int32_t form;
    int32_t overhead_blocks;
    int32_t *metadata;
    int64_t metadata_stride;
    int32_t *num_splits;
} fmlac_schedule;

/* What FLASHMLA_CHECK=1 found first: the smallest place of the first kind of fault. */
typedef struct fmlac_report {
    unsigned long long place; /* kind * 2^56 + linear index; all ones: nothing */
    int32_t value;
} fmlac_report;

#endif
