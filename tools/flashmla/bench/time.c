/* SPDX-License-Identifier: MIT */
/* time.c: how long a call takes. */
#include "bench/bench.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RUNS_MAX    1000
#define DEVICE_RUNS 10
#define SHORT_CALL  500e-6 /* seconds; shorter ones are also timed in graphs */

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

static fmla_status sample(engine *e, memory *m, fmla_operation op, const any_args *bound, double *seconds)
{
    double start = bench_now();
    fmla_status status = engine_call(e, op, bound);
    if (status == FMLA_OK) {
        status = engine_wait(e, m);
    }
    *seconds = bench_now() - start;
    return status;
}

static void summarise(double *samples, int32_t count, bench_time *time)
{
    qsort(samples, (size_t)count, sizeof *samples, compare_doubles);
    time->median = count % 2 ? samples[count / 2] : (samples[count / 2 - 1] + samples[count / 2]) / 2;
    time->least = samples[0];
    time->most = samples[count - 1];
    time->runs = count;
}

typedef struct device_call {
    engine *engine;
    fmla_operation op;
    const any_args *bound;
} device_call;

static fmla_status enqueue(void *user, void *stream)
{
    device_call *call = user;
    call->engine->stream = stream;
    return engine_call(call->engine, call->op, call->bound);
}

/* Copies to the device are not in the order of its stream. */
static fmla_status bind_on_device(engine *e, memory *m, fmla_operation op, const any_args *args, any_args *bound)
{
    fmla_status status = engine_bind(e, m, op, args, bound);
    return status == FMLA_OK ? engine_wait(e, m) : status;
}

static fmla_status measure_on_device(bench_device *device, device_call *call, int32_t runs, bench_time *time)
{
    double samples[RUNS_MAX];
    bench_time graph = {0};
    runs = runs > 0 ? runs : DEVICE_RUNS;
    fmla_status status = bench_device_time(device, enqueue, call, runs, samples);
    if (status == FMLA_OK) {
        summarise(samples, runs, time);
    }
    if (status == FMLA_OK && time->median < SHORT_CALL) {
        status = bench_device_graph(device, enqueue, call, runs, samples, &time->steady);
        summarise(samples, runs, &graph);
        time->graph = graph.median;
    }
    call->engine->stream = NULL;
    return status;
}

fmla_status bench_measure(engine *e, bench_device *device, memory *m, fmla_operation op, const any_args *args,
                          int32_t runs, bench_time *time)
{
    any_args bound;
    double samples[RUNS_MAX], once = 0;
    memset(time, 0, sizeof *time);
    if (device != NULL) {
        device_call call = {e, op, &bound};
        fmla_status bind = bind_on_device(e, m, op, args, &bound);
        return bind == FMLA_OK ? measure_on_device(device, &call, runs, time) : bind;
    }
    fmla_status status = engine_bind(e, m, op, args, &bound);
    /* The first call makes room, the second is warm; a long one is warm enough. */
    for (int i = 0; i < 2 && status == FMLA_OK && once < 0.1; i++) {
        status = sample(e, m, op, &bound, &once);
    }
    if (status != FMLA_OK) {
        return status;
    }
    int32_t wanted = runs > 0 ? runs : (int32_t)(0.5 / once);
    if (runs == 0) {
        wanted = wanted < 5 ? 5 : wanted > 50 ? 50 : wanted;
    }
    for (int32_t i = 0; i < wanted && status == FMLA_OK; i++) {
        status = sample(e, m, op, &bound, &samples[i]);
    }
    if (status == FMLA_OK) {
        summarise(samples, wanted, time);
    }
    return status;
}

fmla_status bench_measure_span(engine *e, bench_device *device, memory *m, fmla_operation op, const any_args *args,
                               int32_t runs, bench_span *span)
{
    any_args bound;
    device_call call = {e, op, &bound};
    fmla_status status = bind_on_device(e, m, op, args, &bound);
    if (status == FMLA_OK) {
        status = bench_device_span(device, enqueue, &call, runs > 0 ? runs : DEVICE_RUNS, span);
    }
    e->stream = NULL;
    return status;
}

/* Microseconds of a call that converts `rows` rows of one index: a task each, and next to no work. */
static fmla_status small_call(engine *e, int64_t rows, double *microseconds)
{
    enum { SAMPLES = 101, CALLS = 200, ROWS = 512 };
    static int32_t positions[ROWS], indices[ROWS], table[ROWS];
    double samples[SAMPLES] = {0};
    fmla_indices_convert_args args = FMLA_INDICES_CONVERT_ARGS_INIT;
    fmla_status status = FMLA_OK;
    args.page_size = 64;
    args.positions = fmla_tensor_3d(positions, FMLA_I32, rows, 1, 1);
    args.indices = fmla_tensor_3d(indices, FMLA_I32, rows, 1, 1);
    args.block_table = fmla_tensor_2d(table, FMLA_I32, rows, 1);
    for (int s = 0; s < SAMPLES && status == FMLA_OK; s++) {
        double start = bench_now();
        for (int i = 0; i < CALLS && status == FMLA_OK; i++) {
            status = fmla_indices_convert(e->context, &args, NULL);
        }
        samples[s] = (bench_now() - start) / CALLS;
    }
    qsort(samples, SAMPLES, sizeof *samples, compare_doubles);
    *microseconds = samples[SAMPLES / 2] * 1e6;
    return status;
}

fmla_status bench_fork(engine *e, double *microseconds)
{
    double one, all;
    int32_t threads = fmla_context_threads(e->context);
    fmla_status status = small_call(e, 1, &one);
    *microseconds = 0;
    if (status == FMLA_OK && threads > 1) {
        status = small_call(e, threads < 512 ? threads : 512, &all);
        *microseconds = all - one;
    }
    return status;
}
