/* SPDX-License-Identifier: MIT */
/*
 * device.h: a CUDA device as the bench sees it: what it can do at most, and how long work takes there. Driver and
 * cuBLASLt are found at run time; neither the library nor the program is built against them.
 */
#ifndef FLASHMLA_TOOL_BENCH_DEVICE_H
#define FLASHMLA_TOOL_BENCH_DEVICE_H

#include "bench/trace.h"
#include "program.h"

typedef struct bench_device bench_device;

/* Enqueues one call on the device's stream. */
typedef fmla_status (*bench_enqueue)(void *user, void *stream);

/* CLI_OK, or CLI_ERROR with the message printed. Without cuBLASLt or CUPTI a line says so, and what needs it is 0. */
int bench_device_open(bench_device **device, int32_t index);
void bench_device_close(bench_device *d);

/* bf16 matrix product of 8192 rows, columns and depth, GFLOP/s; a copy in device memory, GB/s read and written. Medians
 * of `runs`; 0 where it cannot be measured. */
double bench_device_gemm(bench_device *d, int32_t runs);
double bench_device_copy(bench_device *d, int32_t runs);

/*
 * Seconds of single calls, each after a fill of memory that no cache survives: what the published measurements do. A
 * failure of the call itself is its status, of the device DEVICE (printed).
 */
fmla_status bench_device_time(bench_device *d, bench_enqueue enqueue, void *user, int32_t runs, double *seconds);
/* The same of a graph that holds one call, and (steady) seconds per call of a graph of many, run again at once. */
fmla_status bench_device_graph(bench_device *d, bench_enqueue enqueue, void *user, int32_t runs, double *seconds,
                               double *steady);

/* One kernel of a call: when it began after the call's first one, and how long it ran. Seconds, medians of the runs. */
typedef struct bench_part {
    char name[64];
    double begin, length;
} bench_part;

/* From the beginning of a call's first kernel to the end of its last; runs 0: not measured. */
typedef struct bench_span {
    double median, least, most; /* seconds */
    int32_t runs;
    int parts; /* 0: not the same kernels in every run */
    bench_part part[BENCH_KERNELS_MAX];
} bench_span;

/* The same calls again, now recorded by CUPTI. Where that is not installed runs is 0, and the status OK. */
fmla_status bench_device_span(bench_device *d, bench_enqueue enqueue, void *user, int32_t runs, bench_span *span);

#endif
