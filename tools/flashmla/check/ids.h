/* SPDX-License-Identifier: MIT */
/*
 * ids.h: faults that users of such libraries met, each reproduced by a check that carries the fault's
 * number (tests/cases.md lists all of them). A check builds a problem from a case's text, bends it, runs it
 * on the checker's engine and looks at the results; all addresses are host addresses, so that it runs on
 * every tier and device.
 */
#ifndef FLASHMLA_TOOL_CHECK_IDS_H
#define FLASHMLA_TOOL_CHECK_IDS_H

#include "check/check.h"

/* check/ids.def: FAULT(id, function, in the quick set, what is right) */
#define FAULT(id, run, quick, right) verdict run(checker *k);
#include "check/ids.def"
#undef FAULT

typedef struct ids_tally {
    int64_t passed, failed, not_offered;
    double seconds;
} ids_tally;

/* selection: "all", "quick", or numbers as in "C001,C003". CLI_OK, or CLI_ERROR (printed) if a number is
 * unknown. */
int ids_valid(const char *selection);
void ids_print(const char *selection);
/* Runs them with the one choice. replay: the options that a repetition needs. set: "", or the choice's name in records.
 * records: NULL, or where to add a record of each. */
void ids_run(checker *k, const char *selection, const char *replay, const char *set, cJSON *records, ids_tally *tally);

/* ---- what the checks share ---- */

/* A check of many parts, not offered only if no part is. Begin with VERDICT_NOT_OFFERED. */
bool ids_bad(verdict *sum, verdict part);

/* The whole engine on one case: run, reference, everything that c->again names. */
verdict ids_case(checker *k, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* One of the formats of a dense cache as words of a case: "format=v32,d_qk=576". */
const char *ids_dense_format(int number);
#define IDS_DENSE_FORMATS 5

typedef struct trial {
    problem p;
    any_args args; /* p's, to be bent */
    uint8_t *bits; /* results of the last trial_run, in canonical order */
    size_t size;
} trial;

/* Builds the problem of a case's text. VERDICT_PASSED or VERDICT_BROKEN; trial_free is safe after both. */
verdict trial_make(checker *k, trial *t, const char *format, ...) __attribute__((format(printf, 3, 4)));
void trial_free(trial *t);
/* Runs args with check_run's looks at guards, inputs and gaps, and keeps the results' bits. */
verdict trial_run(checker *k, trial *t);
/* Runs again: the same bits as the last trial_run's. */
verdict trial_same(checker *k, trial *t, const char *how);
/* What the outputs hold now has the bits of the last trial_run. */
verdict trial_compare(checker *k, trial *t, const char *how);
/* The outputs against the reference. */
verdict trial_judge(checker *k, trial *t);
/* trial_run, then trial_judge. */
verdict trial_run_and_judge(checker *k, trial *t);
/* Runs a call that is not the problem's whole one: no poison, guards looked at. */
verdict ids_call(checker *k, memory *m, fmla_operation op, const any_args *a, const char *how);

/* Rows first..first+n-1 of a dimension; an absent tensor stays absent. */
fmla_tensor ids_rows(const fmla_tensor *t, int32_t dim, int64_t first, int64_t n);
/* A contiguous copy in memory of its own. */
fmla_tensor ids_copy(memory *m, const fmla_tensor *t);
/* Elements of two tensors of one shape: NaN and infinities alike, finite ones within absolute + relative *
 * |b|. */
verdict ids_near(checker *k, const fmla_tensor *a, const fmla_tensor *b, double absolute, double relative,
                 const char *how);
/* The same with the bounds for two runs of one computation that cut it differently: out of dtype, and lse. */
verdict ids_near_out(checker *k, const fmla_tensor *a, const fmla_tensor *b, const char *how);
verdict ids_near_lse(checker *k, const fmla_tensor *a, const fmla_tensor *b, const char *how);
/* Every element is x. */
verdict ids_all(checker *k, const fmla_tensor *t, double x, const char *how);
bool ids_same_bits(const fmla_tensor *a, const fmla_tensor *b);

/* The index row of a query token (its first KV head's). */
int32_t *ids_index_row(const problem *p, const scope *s, int64_t token);
/* Writes a record of 16-bit words `pattern` into every slot that nobody attends. */
void ids_fill_unread(const scope *s, uint16_t pattern);
/* Writes such a record into one slot. */
void ids_fill_slot(const fmla_kv_cache *cache, int64_t slot, uint16_t pattern);

#define PATTERN_BF16_NAN 0x7FC0 /* e4m3: 448 * 2^-1.. and -2 in turn */
#define PATTERN_BF16_INF 0x7F80
#define PATTERN_NAN      0x7F7F /* e4m3 NaN everywhere; bf16: 3.4e38 */
#define PATTERN_HUGE     0x7E7E /* e4m3 448, bf16 8.4e37 */

#endif
