/* SPDX-License-Identifier: MIT */
/*
 * reference.h: the float64 oracle on chosen rows of an attention problem. The rows are written out as a problem
 * of their own (one query token per request, its tokens listed one by one, nothing ragged, no masks), so that the
 * oracle's reading of lengths, bounds and tables does not enter, and the cost is that of the rows alone.
 */
#ifndef FLASHMLA_TOOL_CHECK_REFERENCE_H
#define FLASHMLA_TOOL_CHECK_REFERENCE_H

#include "problem/problem.h"

typedef struct reference {
    int64_t tokens; /* chosen query tokens */
    int64_t heads;  /* chosen heads */
    int64_t d_v;
    int64_t kv_head;
    int64_t *token; /* [tokens] */
    int64_t *head;  /* [heads] */
    memory mem;
    double *out;                          /* [tokens][heads][d_v] */
    double *lse, *max_logits, *abs_logit; /* [tokens][heads] */
    double *abs_out;                      /* [tokens][heads][d_v] */
} reference;

/*
 * Chooses rows whose reference costs at most `budget` multiplications (all of them if they fit; never fewer than one)
 * of one KV head, and computes them. CLI_OK or CLI_ERROR (printed).
 */
int reference_make(reference *r, const problem *p, engine *oracle, int64_t kv_head, double budget);
/* All rows of its KV head. */
bool reference_is_whole(const reference *r, const problem *p);
void reference_free(reference *r);

#endif
