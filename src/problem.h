/* SPDX-License-Identifier: MIT */
/*
 * problem.h: what is to be computed, as plain data: the one idea of the house.
 *
 * Rows of queries attend lists of tokens stored in a format. src/api reads the caller's arguments, checks them and
 * describes them here; a backend (oracle, CPU, CUDA) carries a description out. Everything in a description was checked
 * as far as it can be without reading tensors; the values inside tensors (lengths, indices, block tables, slots) were
 * checked only where src/api can read them (CPU, oracle), so a CUDA backend treats bad ones as "not attended".
 *
 * A query token t in 0..num_tokens-1 is addressed by (outer, inner): outer = t / s_q, inner = t % s_q, and every
 * per-token tensor has a stride for each. Ragged and batchless calls have outer = 0 (s_q = num_tokens). Strides count
 * elements of the tensor's dtype, except where the name says bytes.
 */
#ifndef FLASHMLA_PROBLEM_H
#define FLASHMLA_PROBLEM_H

#include <stdbool.h>

#include <flashmla/flashmla.h>

/* The pool of tokens of one cache. */
typedef struct fmlai_pool {
    uint8_t *data;
    fmla_format_info format; /* a copy of the format's row: d_qk filled in for plain formats */
    int64_t num_pages;
    int64_t page_size;
    int64_t page_stride;  /* bytes */
    int64_t token_stride; /* bytes between data rows of a page: PLAIN as given, RECORD and PAGE data_row_bytes */
    int64_t head_stride;  /* bytes; PLAIN only */
    float outer_scale;    /* 1 if none */
} fmlai_pool;

/* A small int32 tensor of lengths or bounds, per request or per query token; data NULL: absent. */
typedef struct fmlai_lengths {
    const int32_t *data;
    bool per_request;     /* true: element request * outer_stride; false: outer * outer_stride + inner * inner_stride */
    int64_t outer_stride;
    int64_t inner_stride;
} fmlai_lengths;

typedef enum fmlai_list_kind {
    FMLAI_LIST_NONE = 0,
    FMLAI_LIST_PAGED = 1,  /* tokens 0..n-1 of the request, through the block table */
    FMLAI_LIST_INDEXED = 2 /* slots of the pool named by an index row */
} fmlai_list_kind;

/* Which tokens of a pool the query tokens attend. */
typedef struct fmlai_token_list {
    fmlai_list_kind kind;
    fmlai_pool pool;
    /* PAGED: request r's token j is slot j % P of page block_table[r * table_stride + j / P]; without a table, of
     * page r * max_pages + j / P. Entries for pages at or beyond ceil(seqlens[r] / P) are never read. */
    const int32_t *block_table;
    int64_t table_stride;
    int64_t max_pages;
    const int32_t *seqlens;  /* [batch] */
    bool causal;             /* end-aligned: query token j of n_q sees seqlens - n_q + j + 1 tokens */
    fmlai_lengths bound;     /* explicit number of visible tokens, instead of causal */
    /* INDEXED: entries 0..min(topk, length)-1 of the row at outer * index_outer + inner * index_inner (+ kv head *
     * index_head); an entry e is attended iff 0 <= e < num_pages * page_size. */
    const int32_t *indices;
    int64_t index_outer;
    int64_t index_inner;
    int64_t index_head;
    int64_t topk;
    fmlai_lengths length;
} fmlai_token_list;

/* Query prologue and output epilogue of the fused operations; enabled = false: plain. */
typedef struct fmlai_fused {
    bool enabled;
    bool q_norm;
    bool q_permuted;        /* q is stored as FMLA_Q_PERMUTED */
    bool rope_neox;
    float eps;
    int32_t rope_dim;
    const int32_t *positions; /* [num_tokens] */
    int64_t position_stride;
    const float *cos_sin;   /* [rows, rope_dim] */
    int64_t cos_sin_rows;
    int64_t cos_sin_stride;
    /* Output: codes [token][group][G * d_v], contiguous; scale word (token, group, word) at token + word * scale_rows +
     * group * scale_rows * words_per_group; tokens num_tokens..scale_rows-1 are set to zero. */
    uint8_t *codes;
    int32_t *scale;
    int64_t scale_rows;     /* A: num_tokens rounded up to a multiple of 4, or more */
    int32_t groups;
    int32_t group_heads;    /* G */
} fmlai_fused;

/* A tensor with a vector or scalar per row, at outer * stride[0] + inner * stride[1] + head * stride[2]; data NULL:
 * absent. */
typedef struct fmlai_rows {
    void *data;
    fmla_dtype dtype;
    int64_t stride[3];
} fmlai_rows;

/* Multi-query attention over token lists: dense decode, sparse decode, sparse prefill, fused prefill and decode. */
typedef struct fmlai_mqa {
    int64_t batch;
    int64_t s_q;         /* query tokens per outer index; ragged: num_tokens */
    int64_t num_tokens;  /* query tokens in all */
    int32_t h_q;
    int32_t h_kv;        /* query head h reads KV head h / (h_q / h_kv) */
    int32_t d_qk;
    int32_t d_v;
    const int32_t *cu_seqlens_q; /* [batch + 1] ragged; NULL: request = t / s_q */

    fmlai_rows q;        /* vectors of d_qk contiguous elements; BF16 or F16 */
    fmlai_fused fused;

    fmlai_token_list main;
    fmlai_token_list extra; /* INDEXED or NONE */

    float scale;         /* logit multiplier, natural units; any sign */
    const float *sink;   /* [h_q] or NULL */
    bool batch_invariant;

    fmlai_rows out;      /* vectors of d_v contiguous elements: BF16, F16, F32, oracle F64 */
    fmlai_rows lse;      /* scalars */
    fmlai_rows max_logits;
    float empty_lse;     /* of lonely rows: -inf or +inf */
    float lse_factor;    /* 1, or log2(e): multiplies finite lse and max_logits */

    fmlai_rows abs_out;  /* oracle only, F64 */
    fmlai_rows abs_logit;
} fmlai_mqa;

/* A packed tensor of token vectors: element (token, head, d) at token * stride[0] + head * stride[1] + d. */
typedef struct fmlai_packed {
    void *data;
    fmla_dtype dtype;
    int64_t stride[2];
} fmlai_packed;

/* Dense varlen multi-head attention, forward and backward. */
typedef struct fmlai_mha {
    int64_t batch;
    int64_t total_q;
    int64_t total_kv;
    int64_t max_seqlen_q;  /* hints, at least 1 when there are tokens */
    int64_t max_seqlen_kv;
    const int32_t *cu_seqlens_q; /* [batch + 1]; NULL: one sequence of all tokens */
    const int32_t *cu_seqlens_kv;
    int32_t h_q;
    int32_t h_kv;
    int32_t d_qk;
    int32_t d_v;
    float scale;
    bool causal;
    float empty_lse;
    fmlai_packed q, k, v, out; /* out is an input of backward */
    fmlai_packed lse;          /* scalars: token * stride[0] + head * stride[1] */
    fmlai_packed dout, dq, dk, dv; /* backward only */
    fmlai_packed abs_out, abs_logit; /* oracle only */
} fmlai_mha;

/* Slots named by a caller, int32 or int64; data NULL: slot i is i. */
typedef struct fmlai_slots {
    const void *data;
    fmla_dtype dtype;
    int64_t stride;
} fmlai_slots;


/* quantize: rows -> pool; dequantize: pool -> rows. */
typedef struct fmlai_transcode {
    int64_t count;
    int32_t heads;
    fmlai_packed rows;
    fmlai_pool pool;
    fmlai_slots slots;
    fmla_quantizer quantizer;
} fmlai_transcode;

typedef struct fmlai_convert {
    int64_t count;
    int32_t heads;
    fmlai_pool src, dst;
    fmlai_slots src_slots, dst_slots;
} fmlai_convert;

typedef struct fmlai_indices_convert {
    int64_t batch, s_q, topk, page_size, max_pages;
    const int32_t *positions;
    int64_t position_stride[2];
    const int32_t *block_table;
    int64_t table_stride;
    int32_t *indices;
    int64_t index_stride[2];
} fmlai_indices_convert;

typedef struct fmlai_fp8_cast {
    int64_t rows, cols;
    int32_t group;
    const void *src;
    fmla_dtype dtype;
    int64_t src_stride;
    uint8_t *codes;
    int64_t code_stride;
    int32_t *scale;      /* word w of row i at i + w * scale_rows */
    int64_t scale_rows;
} fmlai_fp8_cast;

typedef struct fmlai_merge_state {
    fmlai_packed out; /* element (token, head, d) */
    fmlai_packed lse;
} fmlai_merge_state;

typedef struct fmlai_merge {
    int64_t tokens;
    int32_t heads;
    int32_t d;
    int32_t count;
    const fmlai_merge_state *states; /* host memory, count of them */
    const float *sink;
    fmlai_merge_state result;        /* lse.data may be NULL */
    float empty_lse;
} fmlai_merge;

/* A byte permutation of a weight and its scale words; kind says which of the two rules holds. */
typedef struct fmlai_permute {
    fmla_operation kind; /* FMLA_OP_PERMUTE_Q_B or FMLA_OP_PERMUTE_WV */
    int64_t groups;      /* 1 for q_b */
    int64_t rows;        /* h_q * d_q, or D_out */
    int64_t cols;        /* R, or G * d_o */
    int64_t words;       /* scale words per row */
    int32_t heads;       /* h_q, or G */
    int32_t d;           /* d_q, or d_o */
    const uint8_t *weight;
    int64_t weight_stride[2]; /* group, row */
    const int32_t *scale;
    int64_t scale_stride[3];  /* group, row, word */
    uint8_t *out_weight;      /* contiguous */
    int32_t *out_scale;
    int64_t out_scale_stride[3];
} fmlai_permute;

typedef struct fmlai_schedule {
    int64_t batch;
    const int32_t *seqlens;  /* dense; NULL: sparse */
    const int32_t *topk_length, *extra_topk_length;
    int64_t topk, extra_topk;
    fmla_schedule_form form;
    int32_t overhead_blocks;
    int64_t parts;
    int32_t *metadata;       /* [parts][8], row stride metadata_stride */
    int64_t metadata_stride;
    int32_t *num_splits;     /* [batch + 1] */
} fmlai_schedule;

#endif
