/* SPDX-License-Identifier: MIT */
/* session.h: a run of `flashmla check`: cases and named faults with the choices asked for, and what is told of them. */
#ifndef FLASHMLA_TOOL_CHECK_SESSION_H
#define FLASHMLA_TOOL_CHECK_SESSION_H

#include "check/jobs.h"

typedef struct check_options {
    cli_options shared;
    int operations[FMLA_OP_COUNT];
    int operation_count; /* 0: all */
    int64_t format;
    int64_t seed;
    int64_t share, shares;
    int64_t jobs, memory, skip;
    const char *sets;
    cli_options choices[CHECK_CHOICES]; /* as --sets says, or the one of --kernels and --profile */
    int choice_count;
    case_set set;
    const char *one;
    const char *ids; /* NULL: none */
    bool only_ids;
    const char *json;
    bool list, may_skip;
} check_options;

/* Runs the cases, then the named faults, prints how it went and writes the JSON. The command's status. */
int run_checks(const check_options *o, const case_list *list);
/* Multiplications of one reference. */
double budget_of(const check_options *o);

#endif
