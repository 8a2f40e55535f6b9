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

const char *verdict_name(verdict v);
/* Failed, or broken. */
bool verdict_is_bad(verdict v);
/* Seconds of a clock that only grows. */
double check_now(void);

#define CHECK_OTHERS 4 /* contexts of 1, 2, 3 and 8 threads */

#define CHECK_CHOICES 8

/* One set of kernels of those that run each case, and what became of the case with it. */
typedef struct choice {
    engine engine;
    verdict verdict;
    uint8_t *results;                            /* of the first run, while a case runs */
    double worst[FMLA_OP_COUNT][QUANTITY_COUNT]; /* largest error / allowed seen */
    char why[1024];
} choice;

typedef struct checker {
    engine oracle;
    choice *choices;
    int choice_count;
    choice *choice; /* the one that runs now: see check_use */
    engine engine;  /* its engine */
    engine others[CHECK_OTHERS]; /* opened when first needed, on the CPU only */
    weight_class class;
    double budget;                               /* multiplications of one reference */
    double (*worst)[QUANTITY_COUNT];             /* the choice's */
    comparison last;                             /* of the last output (not lse) that was compared */
    char why[1024];
} checker;

/* Opens contexts for all of the sets. CLI_OK, or CLI_ERROR (printed). */
int checker_open(checker **k, const cli_options *sets, int count, double budget);
void checker_close(checker *k);
/* The other contexts. CLI_OK or CLI_ERROR (printed). */
int check_open_others(checker *k);
/* Sets k->why and returns VERDICT_FAILED. */
verdict check_fail(checker *k, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Runs a case with every choice; verdicts and reasons are in k->choices. */
void check_case(checker *k, const test_case *c);
/* Makes choice i the one that runs. */
void check_use(checker *k, int i);
/* Keeps the verdict of the choice that runs, and k->why. */
void check_note(checker *k, verdict v);
/* Goes on to the next choice whose verdict so far is VERDICT_PASSED, if there is one. Begin with *i = -1. */
bool check_next(checker *k, int *i);

/* Leaves the share-th (from 1) of so many parts of the list, which should take equally long; budget as the checker's.
 */
void share_deal(case_list *list, int64_t share, int64_t shares, double budget);
/* What a case may cost in all, in bytes that are made, moved and looked at. */
double share_cost(const test_case *c, double budget);
/* What it may hold at one time, here or on a device, run with so many choices. */
double share_memory(const test_case *c, int choices);
/* Indices of all cases, the dearest first; the caller's to free. */
size_t *share_order(const case_list *list, double budget);

/* The outputs of a problem that was run, against the reference on rows that the budget allows. kept: NULL, or a
 * reference for each KV head, zeroed at first, to be used for other choices, then freed by the caller. */
verdict check_attention_outputs(checker *k, const problem *p, reference *kept);
verdict check_mha_outputs(checker *k, const problem *p);

/* By operation. */
/* All choices at once. */
void check_attention(checker *k, const test_case *c);
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
/* The same for a problem that every choice has run. */
void check_end_all(checker *k, problem *p);
/* Runs again, on the CPU with other numbers of threads too; for the choice that runs. */
verdict check_again_threads(checker *k, problem *p, const uint8_t *results);
/* Runs all over again in the ways that c->again names, every choice whose verdict is VERDICT_PASSED, and notes what
 * came out; results of the first run are in k->choices. */
void check_again(checker *k, problem *p);
/* Compares; `how` says in what way the run differed. */
verdict check_same(checker *k, const problem *p, const uint8_t *a, const uint8_t *b, size_t size, const char *how);
/* A status that is not OK as a verdict. */
verdict check_status(checker *k, const engine *e, fmla_status status, const char *how);

#endif
