/* SPDX-License-Identifier: MIT */
/*
 * problem.h: a test case made real: all tensors of one call, with everything that may not be read filled with NaN,
 * tables ending in rubbish, pages in random order. One struct serves all attention operations; fields that an operation
 * lacks stay empty. All addresses are host addresses.
 */
#ifndef FLASHMLA_TOOL_PROBLEM_H
#define FLASHMLA_TOOL_PROBLEM_H

#include "problem/cases.h"
#include "problem/cache.h"
#include "problem/engine.h"

#define POISON_BYTE   0xCB /* what outputs hold before a call */
#define TABLE_RUBBISH 2147480000

/* One pool of tokens and who attends what in it. */
typedef struct scope {
    fmla_kv_cache cache;     /* format NONE: no such scope */
    int64_t topk;            /* index slots per query token */
    fmla_tensor block_table; /* dense */
    fmla_tensor seqlens;
    fmla_tensor bound;
    fmla_tensor indices; /* sparse */
    fmla_tensor length;
    int64_t *used;    /* used[slot]: 1 + number of the record there, negative: NaN instead; 0: never to be read */
    int64_t *page_at; /* page of (request, j / P), row length pages_max */
    int64_t pages_max;
    uint8_t *records;
    int64_t *seqlen; /* [batch] tokens of each request in this pool */
} scope;

typedef struct problem {
    test_case c;
    memory mem;
    bool lasting; /* the inputs stay as they are between runs: they go to a device once and are looked at in the end */
    int64_t batch;
    int64_t tokens;           /* query tokens in all */
    int64_t *request, *inner; /* of each query token: its request and its number there */
    int64_t *n_q;             /* [batch] query tokens of each request */
    float scale;
    fmla_tensor q, cu_seqlens_q, sink;
    fmla_tensor kv; /* prefill: the pool of `main` as a tensor */
    scope main, extra;
    fmla_tensor positions, cos_sin; /* fused */
    fmla_tensor out, lse, max_logits, out_scale;
    fmla_tensor k, v, cu_seqlens_kv, dout, dq, dk, dv; /* mha; in backward out and lse are inputs */
} problem;

/*
 * maker quantises caches, and runs the forward pass that a backward pass needs: the oracle where results are judged.
 * CLI_OK, or CLI_ERROR with the message printed; then there is nothing to free.
 */
int problem_build(problem *p, const test_case *c, engine *maker);
void problem_free(problem *p);

/* Fills the outputs with POISON_BYTE. */
void problem_poison(problem *p);
/* The outputs, absent ones left out; at most 4. */
int problem_outputs(const problem *p, const fmla_tensor **outputs);
/* The whole call. */
void problem_args(const problem *p, any_args *a);

/* Is the operation rows of queries over token lists, and is it one of the fused ones? */
bool case_is_mqa(const test_case *c);
bool case_is_fused(const test_case *c);
bool case_is_prefill(const test_case *c);
bool case_is_dense(const test_case *c);

/* What query token t attends, derived here and not by the library: entry i is a slot or -1. */
int64_t scope_count(const problem *p, const scope *s, int64_t token);
int64_t scope_slot(const problem *p, const scope *s, int64_t token, int64_t kv_head, int64_t i);
/* Number of valid entries, those that occur twice twice. */
int64_t scope_attended(const problem *p, const scope *s, int64_t token, int64_t kv_head);
/* Attended tokens in all scopes. */
int64_t problem_attended(const problem *p, int64_t token, int64_t kv_head);
/* Is one of them NaN (test_case.nan)? */
bool problem_attends_nan(const problem *p, int64_t token, int64_t kv_head);

/* Results of query token t, head h: the element offset of its vector in out, and of its number in lse, max_logits. */
int64_t problem_out_offset(const problem *p, int64_t token, int64_t head);
int64_t problem_lse_offset(const problem *p, const fmla_tensor *t, int64_t token, int64_t head);

/*
 * The same tokens, attended in the same order, in another pool: page size, page order, page stride, and `fill` instead
 * of NaN in all that is not to be read. *s is filled in memory of p; scope_free is for its host arrays.
 */
void scope_repage(problem *p, const scope *from, int64_t page, uint8_t fill, uint64_t seed, scope *s);
void scope_free(scope *s);

/* Large tensors: rows are cut from a million random numbers of 16 bits, each at an offset of its own. numbers is NULL
 * (and the caller's rows are drawn one by one) where the tensor is small; the caller frees it. */
typedef struct row_bank {
    uint16_t *numbers;
} row_bank;
row_bank bank_make(rng *r, fmla_dtype dtype, int64_t rows, int64_t width, double factor, double limit);
void bank_take(const row_bank *bank, rng *r, uint16_t *row, int64_t width);

/* Parts of problem_build in other files. */
int scope_build(problem *p, scope *s, rng *r, engine *maker, bool is_extra);
void problem_build_fused(problem *p, rng *r);
int problem_build_mha(problem *p, rng *r, engine *maker);
void problem_mha_args(const problem *p, any_args *a);

#endif
