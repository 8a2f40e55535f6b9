/* SPDX-License-Identifier: MIT */
/* check.h: what the parts of `flashmla check` share. A check returns a verdict and, if bad, one line that says why. */
#ifndef FLASHMLA_TOOL_CHECK_H
#define FLASHMLA_TOOL_CHECK_H

#include "problem/cases.h"
#include "check/reference.h"
#include "check/compare.h"
#include "problem/problem.h"

typedef enum verdict {
    VERDICT_PASSED = 0,
    VERDICT_FAILED = 1,
    VERDICT_NOT_OFFERED = 2, /* the backend says UNSUPPORTED (not on the CPU, which must offer everything) */
    VERDICT_BROKEN = 3       /* no verdict: the reference could not be made; printed */
} verdict;

#define CHECK_OTHERS 4 /* contexts of 1, 2, 3 and 8 threads */

typedef struct checker {
    engine oracle;
    engine engine;
    engine others[CHECK_OTHERS]; /* opened when first needed, on the CPU only */
    weight_class class;
    double budget;                               /* multiplications of one reference */
    double worst[FMLA_OP_COUNT][QUANTITY_COUNT]; /* largest error / allowed seen */
    comparison last;                             /* of the last output (not lse) that was compared */
    char why[1024];
} checker;

/* The other contexts. CLI_OK or CLI_ERROR (printed). */
int check_open_others(checker *k);
/* Sets k->why and returns VERDICT_FAILED. */
verdict check_fail(checker *k, const char *format, ...) __attribute__((format(printf, 2, 3)));

verdict check_case(checker *k, const test_case *c);

/* Leaves the share-th (from 1) of so many parts of the list, which should take equally long; budget as the checker's.
 */
void share_deal(case_list *list, int64_t share, int64_t shares, double budget);
/* What a case may cost in all, in bytes that are made, moved and looked at. */
double share_cost(const test_case *c, double budget);

/* The outputs of a problem that was run, against the reference on rows that the budget allows. */
verdict check_attention_outputs(checker *k, const problem *p);
verdict check_mha_outputs(checker *k, const problem *p);

/* By operation. */
verdict check_attention(checker *k, const test_case *c);
verdict check_mha(checker *k, const test_case *c);
verdict check_quantize(checker *k, const test_case *c);
verdict check_dequantize(checker *k, const test_case *c);
verdict check_convert(checker *k, const test_case *c);
verdict check_fp8_cast(checker *k, const test_case *c);
verdict check_merge(checker *k, const test_case *c);
verdict check_permute(checker *k, const test_case *c);
verdict check_indices_convert(checker *k, const test_case *c);
verdict check_schedule(checker *k, const test_case *c);

/*
 * Poisons the outputs, runs, and looks at what may not have changed: guards, inputs, and the gaps between the rows of
 * outputs. results gets the outputs' elements in a canonical order (the caller's to free); NULL if not passed.
 */
verdict check_run(checker *k, engine *e, problem *p, const any_args *args, uint8_t **results, size_t *size);
/* The same, but the results must be those of the first run, to the bit; `how` says in what way the runs differ. */
verdict check_run_same(checker *k, engine *e, problem *p, const any_args *args, const uint8_t *results,
                       const char *how);
/* The outputs as they are now against the results of check_run. */
verdict check_outputs(checker *k, const problem *p, const uint8_t *results, const char *how);
/* What became of v, the verdict on the last run of a problem whose inputs last: nobody may have written to them. */
verdict check_end(checker *k, engine *e, problem *p, verdict v);
/* Runs all over again in the ways that c->again names; results are the first run's. */
verdict check_again(checker *k, problem *p, const uint8_t *results);
/* Compares; `how` says in what way the run differed. */
verdict check_same(checker *k, const problem *p, const uint8_t *a, const uint8_t *b, size_t size, const char *how);
/* A status that is not OK as a verdict. */
verdict check_status(checker *k, const engine *e, fmla_status status, const char *how);

#endif
