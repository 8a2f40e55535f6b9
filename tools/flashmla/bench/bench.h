/* SPDX-License-Identifier: MIT */
/* bench.h: shapes as data, limits of the machine, and the arithmetic between them. */
#ifndef FLASHMLA_TOOL_BENCH_H
#define FLASHMLA_TOOL_BENCH_H

#include "bench/device.h"
#include "problem/cases.h"
#include "problem/problem.h"

/* ---- shapes (bench/shapes.c) --------------------------------------------------------------------------------- */

typedef struct bench_shape {
    char name[160];      /* file/group/what varies in the group */
    double goal[2];      /* share of the limit to reach on one thread, on more; 0: none stated */
    fmla_isa isa;        /* the CPU tier that it is about; FMLA_ISA_AUTO: the one that was asked for */
    const char *kernels; /* the choice of CUDA kernels that it is about; NULL: the one that was asked for */
    test_case c;
} bench_shape;

/* The time of one shape in terms of another's. */
typedef struct bench_ratio {
    char of[160], to[160];
    double at_most; /* the goal; 0: none */
} bench_ratio;

#define BENCH_RATIOS_MAX 16

typedef struct bench_shapes {
    bench_shape *shapes;
    size_t count;
    bench_ratio ratios[BENCH_RATIOS_MAX];
    size_t ratio_count;
} bench_shapes;

/* Where shapes are by default: beside the installed program (../share/flashmla/shapes), else in the source tree. */
const char *bench_shapes_folder(char *text, size_t size);
/*
 * Reads the .json files of `directory` that are meant for `device`, or all if `filter` is given, and keeps the shapes
 * whose name contains filter. CLI_OK or CLI_ERROR (printed).
 */
int bench_shapes_read(bench_shapes *list, const char *directory, fmla_device device, const char *filter);
void bench_shapes_free(bench_shapes *list);
/* The shapes of `flashmla bench --ablate NAME` (bench/ablate.c) whose names contain filter (NULL: all), and which of
 * them are set against which. */
int bench_ablation(bench_shapes *list, const char *name, const char *filter);

/* ---- limits (bench/peak.c) ----------------------------------------------------------------------------------- */

/* What this machine can do at most, measured; 0: not known. */
typedef struct bench_limit {
    double fma;      /* fp32 multiply-adds, GFLOP/s, in the widest vectors */
    double fma_avx2; /* the same in 256-bit vectors; 0: none here */
    double dot_bf16; /* bf16 dot products into fp32, GFLOP/s; 0 where the processor has none */
    double dot_amx;  /* the same in tiles of AMX; 0: not in use */
    double read;     /* GB/s from memory */
    double fork;     /* microseconds that handing out tasks to all threads takes, and waiting for them */
    double gemm;     /* CUDA: bf16 matrix products, GFLOP/s */
    double copy;     /* CUDA: copies in device memory, GB/s read and written */
} bench_limit;

bench_limit bench_peak(int32_t threads, fmla_isa isa);
/* The compute limit of a tier. */
double bench_compute_limit(const bench_limit *limit, fmla_isa isa);

/* ---- work (bench/work.c) ------------------------------------------------------------------------------------- */

/* FLOP and bytes of one call by the published formulas; bytes_published counts V4's tokens as their tests do. */
typedef struct bench_work {
    double flop, bytes, bytes_published;
} bench_work;

bench_work bench_work_of(const problem *p);

/* ---- time (bench/time.c) ------------------------------------------------------------------------------------- */

typedef struct bench_time {
    double median, least, most; /* seconds */
    int32_t runs;
    double graph, steady; /* CUDA, short calls: in a graph, and in a graph of many; 0: not measured */
} bench_time;

/*
 * On the host (device NULL) runs 0 is at least 5, and as many as fit in half a second, at most 50; on a device 10, each
 * with cold caches.
 */
fmla_status bench_measure(engine *e, bench_device *device, memory *m, fmla_operation op, const any_args *args,
                          int32_t runs, bench_time *time);
/* The same call's span of kernels; for a device. */
fmla_status bench_measure_span(engine *e, bench_device *device, memory *m, fmla_operation op, const any_args *args,
                               int32_t runs, bench_span *span);
/* What a call with one task a thread takes longer than one with a single task, in microseconds; host only. */
fmla_status bench_fork(engine *e, double *microseconds);
double bench_now(void);
/* Tensors for operations that are no attention. args is ready to run. CLI_OK or CLI_ERROR. */
int bench_bytes_problem(problem *p, const test_case *c, engine *maker, any_args *args);
/* The same for those without a cache; false: not one of them. */
bool bench_small_problem(memory *m, const test_case *c, any_args *args);
/* Bytes that such a call reads and writes. */
double bench_bytes_of(const test_case *c);

/* ---- records (bench/record.c) -------------------------------------------------------------------------------- */

#define BENCH_ROUNDS_MAX 15

/* What is measured of one shape: rounds, each with its own limits, because clocks drift and neighbours come and go. */
typedef struct bench_rounds {
    bench_time time[BENCH_ROUNDS_MAX];
    bench_limit limit[BENCH_ROUNDS_MAX];
    int count, middle;
    bench_span span; /* CUDA: after the rounds, so that recording does not disturb them */
} bench_rounds;

/* What was measured, and of what: names of shape, operation and format, sizes, times in microseconds. */
cJSON *bench_record(const bench_shape *shape, const bench_rounds *measured);

/* ---- ratios (bench/ratios.c) --------------------------------------------------------------------------------- */

/* An array of the ratios of which both shapes were measured, one for each number of threads; prints them if `print`. */
cJSON *bench_ratios(const bench_shapes *list, const cJSON *records, bool print);

/* ---- pictures (bench/plot.c) --------------------------------------------------------------------------------- */

/* Draws GFLOP/s over tokens, a line per operation, format, heads and threads. CLI_OK or CLI_ERROR (printed). */
int bench_plot(const char *path, const cJSON *records);

#endif
