/* SPDX-License-Identifier: MIT */
/*
 * describe.h: from the caller's words to problem.h's: caches to pools, tensors to rows, lengths and slots, with the
 * checks that belong to each. Shared by the entries.
 */
#ifndef FLASHMLA_API_DESCRIBE_H
#define FLASHMLA_API_DESCRIBE_H

#include "check.h"
#include "context.h"

/* ---- caches (pool.c) ------------------------------------------------------------------------------------------ */

static inline bool fmlai_cache_present(const fmla_kv_cache *cache)
{
    return cache->format != FMLA_KV_NONE;
}

/* A required cache. d_qk: the width that the call needs; 0: the cache says (plain formats then need d_qk). Strides are
 * defaulted, *heads is the cache's h_kv. */
void fmlai_describe_pool(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, int64_t d_qk, fmlai_pool *pool,
                         int32_t *heads);
/* An optional cache that is absent must be zero all over. */
void fmlai_check_no_cache(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, const char *why);
/* An unpaged tensor [s_kv, h_kv, d_qk], checked before, as a pool of one page. */
void fmlai_describe_tensor_pool(const fmlai_checker *c, const fmla_tensor *kv, fmlai_pool *pool);

static inline int64_t fmlai_pool_tokens(const fmlai_pool *pool)
{
    return pool->num_pages * pool->page_size;
}

/* ---- query tokens (rows.c) ------------------------------------------------------------------------------------- */

/* How the query tokens of a call are laid out: [b, s_q] or, flat, [tokens]. */
typedef struct fmlai_frame {
    bool flat;
    const char *letters; /* "b, s_q", "total_q" or "s_q" */
    int64_t batch;       /* requests */
    int64_t s_q;         /* flat: tokens */
    int64_t tokens;
} fmlai_frame;

/* What a tensor with one vector or scalar per query token must be: the frame's dimensions, then up to two more. */
fmlai_pattern fmlai_token_pattern(const fmlai_frame *f, const char *name, uint32_t dtypes, uint32_t flags,
                                  const char *letters, int32_t rank, int64_t n0, int64_t n1);

/* Dtypes of a result: as given, on the oracle F64 too. */
static inline uint32_t fmlai_result_dtypes(const fmlai_checker *c, uint32_t dtypes)
{
    return dtypes | (c->oracle ? FMLAI_BIT(FMLA_F64) : 0u);
}

/* Strides of per-token vectors [.., h, d] and scalars [.., h]. */
fmlai_rows fmlai_rows_of(const fmlai_checker *c, const fmlai_frame *f, const fmla_tensor *t);
/* Scalars in decode's order: [b, h_q, s_q], flat [h_q, tokens]. */
fmlai_rows fmlai_head_first_rows_of(const fmlai_checker *c, const fmlai_frame *f, const fmla_tensor *t);

/* Lengths [b] or one per query token; absent: data NULL. Flat frames with as many tokens as requests: per token. */
fmlai_lengths fmlai_describe_lengths(fmlai_checker *c, const fmlai_frame *f, const char *name, const fmla_tensor *t,
                                     bool per_request_allowed);
/* An optional [h_q] F32 sink. */
const float *fmlai_describe_sink(fmlai_checker *c, const fmla_tensor *t, int32_t h_q);
/* The index rows of a list: [tokens.., topk]. */
void fmlai_describe_indices(fmlai_checker *c, const fmlai_frame *f, const char *name, const fmla_tensor *t,
                            fmlai_token_list *list);

/* ---- packed tensors and slots (rows.c) -------------------------------------------------------------------------- */

/* [tokens, heads, d] or [tokens, heads]. */
fmlai_packed fmlai_packed_of(const fmlai_checker *c, const fmla_tensor *t);
/* Optional [n] I32 or I64; count FMLAI_ANY takes any n. */
fmlai_slots fmlai_describe_slots(fmlai_checker *c, const char *name, const fmla_tensor *t, int64_t count);

/* Scale words, I32: [rows, words], with rank 3 [groups, rows, words]; rows contiguous. padded: an output, whose columns
 * are A = 4 * k >= rows words apart and whose groups follow each other. Gives the distance of two columns. */
int64_t fmlai_describe_scale_words(fmlai_checker *c, const char *name, const fmla_tensor *t, int32_t rank,
                                   int64_t groups, int64_t rows, int64_t words, bool padded);

/* ---- carrying out (mqa.c) ---------------------------------------------------------------------------------------- */

/* Whether the operation is offered with these numbers: failure goes into the checker. */
void fmlai_check_supported(fmlai_checker *c, const fmla_context *context, fmla_operation operation, const fmlai_mqa *p);

/* What differs between the operations that are attention over token lists: args is the struct, already copied; p is
 * zero. workspace_at: where the struct has workspace and, after it, workspace_size. */
typedef struct fmlai_mqa_family {
    size_t args_size;
    size_t workspace_at;
    void (*describe)(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mqa *p);
} fmlai_mqa_family;

fmla_status fmlai_api_mqa_run(fmla_context *context, const fmlai_mqa_family *family, const void *args, void *stream);
fmla_status fmlai_api_mqa_size(fmla_context *context, const fmlai_mqa_family *family, const void *args, void *size);
/* The end of a workspace_size entry. */
fmla_status fmlai_answer_size(fmlai_checker *c, size_t need, void *size);

#endif
