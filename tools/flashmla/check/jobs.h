/* SPDX-License-Identifier: MIT */
/*
 * jobs.h: a list of cases run by several processes. One process hands out cases, the dearest first, to others that it
 * has forked, each with contexts of its own, and gets back what came out. No more cases run at one time than memory
 * holds. A process that has seen a case fail is replaced: a device's context may be of no use after it.
 */
#ifndef FLASHMLA_TOOL_CHECK_JOBS_H
#define FLASHMLA_TOOL_CHECK_JOBS_H

#include "check/check.h"

#define JOBS_MAX 256

/* What a process says: first which device it runs on, then what became of a case. */
typedef struct outcome {
    int32_t device, isa, threads;
    size_t index;
    double seconds;
    int32_t verdicts[CHECK_CHOICES];
    double worst[CHECK_CHOICES][QUANTITY_COUNT]; /* of all cases so far */
    char why[CHECK_CHOICES][1024];
} outcome;

typedef struct jobs_work {
    int (*begin)(void *user, outcome *hello);                /* there: opens contexts. CLI_OK, or CLI_ERROR (printed) */
    void (*work)(void *user, size_t index, outcome *result); /* there */
    void (*hello)(void *user, const outcome *hello);         /* here, once */
    void (*take)(void *user, const outcome *result);         /* here, of every case */
    void *user;
} jobs_work;

/* Bytes of so many GiB; 0: three quarters of this machine's memory. */
double jobs_memory(int64_t gib);

/*
 * limit: bytes that the cases may hold together, here or on a device; choices and budget as the checker's; skip: so
 * many of the dearest are left out. SIGTERM and SIGINT end it early. CLI_OK; CLI_FAILED if cases were left out that
 * should not be; CLI_ERROR if no process began (printed).
 */
int jobs_run(const jobs_work *work, const case_list *list, int64_t jobs, double limit, int choices, double budget,
             int64_t skip);

#endif
