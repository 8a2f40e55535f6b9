/* SPDX-License-Identifier: MIT */
/*
 * trace.h: when each kernel began and ended, as profilers see it: CUPTI's records of activity. Its header is looked for
 * when the program is built, its library when it runs; without one of them nothing is recorded.
 */
#ifndef FLASHMLA_TOOL_BENCH_TRACE_H
#define FLASHMLA_TOOL_BENCH_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#define BENCH_KERNELS_MAX 12 /* of one call */

typedef struct bench_kernel {
    char name[64];
    uint64_t begin, end; /* nanoseconds of a clock of the device's */
} bench_kernel;

typedef struct bench_trace bench_trace;

/* NULL if there is no CUPTI; a line says why. One at a time: CUPTI's callbacks know of no owner. */
bench_trace *bench_trace_open(void);
void bench_trace_close(bench_trace *t);

/* Between start and stop kernels are recorded, and calls take longer on the host. */
bool bench_trace_start(bench_trace *t);
void bench_trace_stop(bench_trace *t);
/*
 * Moves the records of finished kernels to `kernels` (BENCH_KERNELS_MAX), in the order of their beginnings. Their
 * number, which may be more than were moved, or -1 if CUPTI failed.
 */
int bench_trace_take(bench_trace *t, bench_kernel *kernels);

#endif
