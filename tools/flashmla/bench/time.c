/* SPDX-License-Identifier: MIT */
/* time.c: how long a call takes. */
#include "bench/bench.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RUNS_MAX 1000

double bench_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Seconds per call of `calls` calls in a row. */
static fmla_status sample(engine *e, memory *m, fmla_operation op, const any_args *bound, int32_t calls,
                          double *seconds)
{
    fmla_status status = FMLA_OK;
    double start = bench_now();
    for (int32_t i = 0; i < calls && status == FMLA_OK; i++) {
        status = engine_call(e, op, bound);
    }
    if (status == FMLA_OK) {
        status = engine_wait(e, m);
    }
    *seconds = (bench_now() - start) / calls;
    return status;
}

fmla_status bench_measure(engine *e, memory *m, fmla_operation op, const any_args *args, int32_t runs, bench_time *time)
{
    any_args bound;
    double samples[RUNS_MAX], once = 0;
    memset(time, 0, sizeof *time);
    fmla_status status = engine_bind(e, m, op, args, &bound);
    /* The first call makes room, the second is warm; a long one is warm enough. */
    for (int i = 0; i < 2 && status == FMLA_OK && once < 0.1; i++) {
        status = sample(e, m, op, &bound, 1, &once);
    }
    if (status != FMLA_OK) {
        return status;
    }
    /* On a device a call may be shorter than the wait for it: several to a sample. */
    int32_t calls = 1;
    if (!e->host && once < 2e-3) {
        calls = once > 4e-5 ? (int32_t)(2e-3 / once) + 1 : 50;
    }
    int32_t wanted = runs > 0 ? runs : (int32_t)(0.5 / (once * calls));
    if (runs == 0) {
        wanted = wanted < 5 ? 5 : wanted > 50 ? 50 : wanted;
    }
    wanted = wanted > RUNS_MAX ? RUNS_MAX : wanted;
    for (int32_t i = 0; i < wanted && status == FMLA_OK; i++) {
        status = sample(e, m, op, &bound, calls, &samples[i]);
    }
    if (status == FMLA_OK) {
        qsort(samples, (size_t)wanted, sizeof *samples, compare_doubles);
        time->median = wanted % 2 ? samples[wanted / 2] : (samples[wanted / 2 - 1] + samples[wanted / 2]) / 2;
        time->least = samples[0];
        time->most = samples[wanted - 1];
        time->runs = wanted;
    }
    return status;
}
