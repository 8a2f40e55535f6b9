/* SPDX-License-Identifier: MIT */
/*
 * device.c: time and limits of a CUDA device. Work is timed by events on a stream of our own; before each run a
 * fill of several gigabytes empties the caches, lets the host enqueue ahead of the device, and gives every measured
 * call the same rest, so that calls and limits meet the same clocks.
 */
#include "bench/device.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "bench/driver.h"
#include "problem/memory.h"
#include "problem/numbers.h"
#include "problem/random.h"

#define FILL_BYTES   ((size_t)8 << 30) /* at most; a quarter of the free memory at most */
#define COPY_BYTES   ((size_t)1 << 30)
#define GEMM_SIZE    8192
#define GEMM_BYTES   ((size_t)GEMM_SIZE * GEMM_SIZE * 2)
#define GEMM_SPACE   ((size_t)32 << 20)
#define ALGORITHMS   4
#define STEADY_CALLS 20
#define RUNS_MAX     1000

/* Values of cuda.h, library_types.h, cublas_api.h and cublasLt.h. */
enum {
    STREAM_NON_BLOCKING = 1,
    CAPTURE_THREAD_LOCAL = 1,
    REAL_F32 = 0,
    REAL_BF16 = 14,
    COMPUTE_F32 = 68,
    OPERATION_TRANSPOSE_A = 3,
    TRANSPOSED = 1,
    PREFERENCE_WORKSPACE_BYTES = 1
};

typedef struct matrix_product {
    bool ready;
    void *handle, *operation, *preference;
    void *layout; /* all three matrices: square, column-major */
    uintptr_t a, b, d, workspace;
    uint64_t algorithm[8];
} matrix_product;

struct bench_device {
    bench_driver driver;
    bench_blas blas;
    int device;
    void *context, *stream, *start, *end;
    uintptr_t fill;
    size_t fill_size;
    matrix_product gemm;
    bench_trace *trace; /* NULL: no CUPTI */
};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int32_t count)
{
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static fmla_status fault(const char *what, int code)
{
    cli_error("%s failed (CUDA error %d)", what, code);
    return FMLA_ERROR_DEVICE;
}

/* ---- matrix products ----------------------------------------------------------------------------------------- */

static fmla_status enqueue_gemm(void *user, void *stream)
{
    bench_device *d = user;
    const matrix_product *g = &d->gemm;
    const float one = 1, zero = 0;
    int code = d->blas.product(g->handle, g->operation, &one, (void *)g->a, g->layout, (void *)g->b, g->layout, &zero,
                               (void *)g->d, g->layout, (void *)g->d, g->layout, g->algorithm, (void *)g->workspace,
                               GEMM_SPACE, stream);
    return code == 0 ? FMLA_OK : FMLA_ERROR_DEVICE;
}

/* Bell-shaped numbers: equal ones would cost less power, and the clock would be higher than attention's. */
static bool make_operands(bench_device *d)
{
    const size_t piece = GEMM_BYTES / 16;
    uint16_t *numbers = xmalloc(piece);
    rng r;
    rng_seed(&r, 1);
    for (size_t i = 0; i < piece / 2; i++) {
        number_set(numbers, FMLA_BF16, (int64_t)i, rng_normal(&r));
    }
    bool good = true;
    for (size_t at = 0; at < GEMM_BYTES && good; at += piece) {
        good = d->driver.to_device(d->gemm.a + at, numbers, piece) == 0 &&
               d->driver.to_device(d->gemm.b + at, numbers, piece) == 0;
    }
    free(numbers);
    return good;
}

/* The fastest of what the library proposes. */
static bool choose_algorithm(bench_device *d)
{
    matrix_product *g = &d->gemm;
    bench_algorithm found[ALGORITHMS];
    double best = 0, seconds[3];
    int count = 0;
    if (d->blas.heuristic(g->handle, g->operation, g->layout, g->layout, g->layout, g->layout, g->preference,
                          ALGORITHMS, found, &count) != 0) {
        return false;
    }
    for (int i = 0; i < count; i++) {
        uint64_t before[8];
        memcpy(before, g->algorithm, sizeof before);
        memcpy(g->algorithm, found[i].algorithm, sizeof g->algorithm);
        bool good = found[i].state == 0 && bench_device_time(d, enqueue_gemm, d, 3, seconds) == FMLA_OK;
        double time = good ? median(seconds, 3) : 0;
        if (good && (best == 0 || time < best)) {
            best = time;
        } else {
            memcpy(g->algorithm, before, sizeof before);
        }
    }
    return best > 0;
}

static bool open_gemm(bench_device *d)
{
    matrix_product *g = &d->gemm;
    const bench_blas *b = &d->blas;
    const int transposed = TRANSPOSED;
    const size_t space = GEMM_SPACE;
    return b->create(&g->handle) == 0 && b->operation_create(&g->operation, COMPUTE_F32, REAL_F32) == 0 &&
           b->operation_set(g->operation, OPERATION_TRANSPOSE_A, &transposed, sizeof transposed) == 0 &&
           b->layout_create(&g->layout, REAL_BF16, GEMM_SIZE, GEMM_SIZE, GEMM_SIZE) == 0 &&
           b->preference_create(&g->preference) == 0 &&
           b->preference_set(g->preference, PREFERENCE_WORKSPACE_BYTES, &space, sizeof space) == 0 &&
           d->driver.alloc(&g->a, GEMM_BYTES) == 0 && d->driver.alloc(&g->b, GEMM_BYTES) == 0 &&
           d->driver.alloc(&g->d, GEMM_BYTES) == 0 && d->driver.alloc(&g->workspace, GEMM_SPACE) == 0 &&
           make_operands(d) && choose_algorithm(d);
}

static void close_gemm(bench_device *d)
{
    matrix_product *g = &d->gemm;
    const uintptr_t blocks[] = {g->a, g->b, g->d, g->workspace};
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        if (blocks[i] != 0) {
            d->driver.release(blocks[i]);
        }
    }
    if (g->preference != NULL) {
        d->blas.preference_destroy(g->preference);
    }
    if (g->layout != NULL) {
        d->blas.layout_destroy(g->layout);
    }
    if (g->operation != NULL) {
        d->blas.operation_destroy(g->operation);
    }
    if (g->handle != NULL) {
        d->blas.destroy(g->handle);
    }
    if (d->blas.library != NULL) {
        dlclose(d->blas.library);
    }
}

double bench_device_gemm(bench_device *d, int32_t runs)
{
    double seconds[RUNS_MAX];
    runs = runs < RUNS_MAX ? runs : RUNS_MAX;
    if (!d->gemm.ready || bench_device_time(d, enqueue_gemm, d, runs, seconds) != FMLA_OK) {
        return 0;
    }
    return 2.0 * GEMM_SIZE * GEMM_SIZE * GEMM_SIZE / median(seconds, runs) * 1e-9;
}

/* ---- copies -------------------------------------------------------------------------------------------------- */

/* From one half of the fill's memory to the other. */
static fmla_status enqueue_copy(void *user, void *stream)
{
    bench_device *d = user;
    size_t half = d->fill_size / 2, size = half < COPY_BYTES ? half : COPY_BYTES;
    return d->driver.copy(d->fill + half, d->fill, size, stream) == 0 ? FMLA_OK : FMLA_ERROR_DEVICE;
}

double bench_device_copy(bench_device *d, int32_t runs)
{
    double seconds[RUNS_MAX];
    size_t half = d->fill_size / 2;
    runs = runs < RUNS_MAX ? runs : RUNS_MAX;
    if (bench_device_time(d, enqueue_copy, d, runs, seconds) != FMLA_OK) {
        return 0;
    }
    return 2.0 * (double)(half < COPY_BYTES ? half : COPY_BYTES) / median(seconds, runs) * 1e-9;
}

/* ---- time ---------------------------------------------------------------------------------------------------- */

/* Empties the caches. */
static fmla_status rest(bench_device *d)
{
    int code = d->driver.fill(d->fill, 0, d->fill_size, d->stream);
    return code == 0 ? FMLA_OK : fault("a fill of device memory", code);
}

static fmla_status elapsed(bench_device *d, double *seconds)
{
    float milliseconds = 0;
    int code = d->driver.stream_wait(d->stream);
    if (code == 0) {
        code = d->driver.event_elapsed(&milliseconds, d->start, d->end);
    }
    *seconds = (double)milliseconds * 1e-3;
    return code == 0 ? FMLA_OK : fault("the device", code);
}

fmla_status bench_device_time(bench_device *d, bench_enqueue enqueue, void *user, int32_t runs, double *seconds)
{
    fmla_status status = enqueue(user, d->stream); /* makes room and warms up */
    for (int32_t i = 0; i < runs && status == FMLA_OK; i++) {
        status = rest(d);
        if (status == FMLA_OK) {
            d->driver.event_record(d->start, d->stream);
            status = enqueue(user, d->stream);
            d->driver.event_record(d->end, d->stream);
        }
        if (status == FMLA_OK) {
            status = elapsed(d, &seconds[i]);
        }
    }
    return status;
}

/* A graph of `calls` calls. */
static fmla_status capture(bench_device *d, bench_enqueue enqueue, void *user, int32_t calls, void **executable)
{
    void *graph = NULL;
    fmla_status status = FMLA_OK;
    int code = d->driver.capture_begin(d->stream, CAPTURE_THREAD_LOCAL);
    if (code != 0) {
        return fault("beginning a graph", code);
    }
    for (int32_t i = 0; i < calls && status == FMLA_OK; i++) {
        status = enqueue(user, d->stream);
    }
    code = d->driver.capture_end(d->stream, &graph);
    if (status == FMLA_OK && code == 0) {
        code = d->driver.graph_instantiate(executable, graph, 0);
    }
    if (graph != NULL) {
        d->driver.graph_destroy(graph);
    }
    return status != FMLA_OK || code == 0 ? status : fault("making a graph", code);
}

static fmla_status launch_graph(bench_device *d, void *executable, bool cold, double *seconds)
{
    fmla_status status = cold ? rest(d) : FMLA_OK;
    d->driver.event_record(d->start, d->stream);
    int code = d->driver.graph_launch(executable, d->stream);
    d->driver.event_record(d->end, d->stream);
    if (status == FMLA_OK && code != 0) {
        status = fault("a graph", code);
    }
    return status == FMLA_OK ? elapsed(d, seconds) : status;
}

fmla_status bench_device_graph(bench_device *d, bench_enqueue enqueue, void *user, int32_t runs, double *seconds,
                               double *steady)
{
    void *one = NULL, *many = NULL;
    double unused;
    fmla_status status = capture(d, enqueue, user, 1, &one);
    if (status == FMLA_OK) {
        status = capture(d, enqueue, user, STEADY_CALLS, &many);
    }
    if (status == FMLA_OK) {
        status = launch_graph(d, one, false, &unused);
    }
    for (int32_t i = 0; i < runs && status == FMLA_OK; i++) {
        status = launch_graph(d, one, true, &seconds[i]);
    }
    for (int i = 0; i < 2 && status == FMLA_OK; i++) { /* the first warms up */
        status = launch_graph(d, many, false, steady);
        *steady /= STEADY_CALLS;
    }
    for (int i = 0; i < 2; i++) {
        void *executable = i == 0 ? one : many;
        if (executable != NULL) {
            d->driver.executable_destroy(executable);
        }
    }
    return status;
}

/* ---- spans of kernels ---------------------------------------------------------------------------------------- */

/* What one run showed: kernels in the order of their beginnings, the last of them not always the last to end. */
typedef struct traced_run {
    int count; /* BENCH_KERNELS_MAX at most, else 0 */
    bench_kernel kernels[BENCH_KERNELS_MAX];
} traced_run;

static fmla_status trace_run(bench_device *d, bench_enqueue enqueue, void *user, traced_run *run)
{
    fmla_status status = rest(d);
    if (status == FMLA_OK) {
        status = enqueue(user, d->stream);
    }
    int code = d->driver.stream_wait(d->stream);
    if (status == FMLA_OK && code != 0) {
        status = fault("the device", code);
    }
    int count = bench_trace_take(d->trace, run->kernels);
    run->count = count > 0 && count <= BENCH_KERNELS_MAX ? count : 0;
    return status;
}

static double run_span(const traced_run *run)
{
    uint64_t end = 0;
    for (int k = 0; k < run->count; k++) {
        end = run->kernels[k].end > end ? run->kernels[k].end : end;
    }
    return run->count > 0 ? (double)(end - run->kernels[0].begin) * 1e-9 : 0;
}

static bool same_kernels(const traced_run *a, const traced_run *b)
{
    bool same = a->count == b->count;
    for (int k = 0; k < a->count && same; k++) {
        same = strcmp(a->kernels[k].name, b->kernels[k].name) == 0;
    }
    return same;
}

static void summarise_parts(const traced_run *all, int32_t runs, bench_span *span)
{
    double begins[RUNS_MAX], lengths[RUNS_MAX];
    for (int32_t i = 1; i < runs; i++) {
        if (!same_kernels(&all[0], &all[i])) {
            return;
        }
    }
    for (int k = 0; k < all[0].count; k++) {
        bench_part *part = &span->part[k];
        for (int32_t i = 0; i < runs; i++) {
            const bench_kernel *kernel = &all[i].kernels[k];
            begins[i] = (double)(kernel->begin - all[i].kernels[0].begin) * 1e-9;
            lengths[i] = (double)(kernel->end - kernel->begin) * 1e-9;
        }
        snprintf(part->name, sizeof part->name, "%s", all[0].kernels[k].name);
        part->begin = median(begins, runs);
        part->length = median(lengths, runs);
    }
    span->parts = all[0].count;
}

fmla_status bench_device_span(bench_device *d, bench_enqueue enqueue, void *user, int32_t runs, bench_span *span)
{
    double spans[RUNS_MAX];
    memset(span, 0, sizeof *span);
    runs = runs < RUNS_MAX ? runs : RUNS_MAX;
    if (d->trace == NULL || !bench_trace_start(d->trace)) {
        return FMLA_OK;
    }
    traced_run *all = xcalloc((size_t)runs, sizeof *all);
    fmla_status status = trace_run(d, enqueue, user, &all[0]); /* CUPTI's own first steps */
    bool seen = true;
    for (int32_t i = 0; i < runs && status == FMLA_OK; i++) {
        status = trace_run(d, enqueue, user, &all[i]);
        spans[i] = run_span(&all[i]);
        seen = seen && spans[i] > 0;
    }
    bench_trace_stop(d->trace);
    if (status == FMLA_OK && seen) {
        span->runs = runs;
        span->median = median(spans, runs);
        span->least = spans[0]; /* in order now */
        span->most = spans[runs - 1];
        summarise_parts(all, runs, span);
    } else if (status == FMLA_OK) {
        fprintf(stderr, "flashmla: CUPTI has seen no kernels, or too many\n");
    }
    free(all);
    return status;
}

/* ---- opening ------------------------------------------------------------------------------------------------- */

static int open_parts(bench_device *d, int32_t index)
{
    bench_driver *v = &d->driver;
    size_t available = 0, total = 0;
    int code = v->init(0);
    code = code ? code : v->device_get(&d->device, index);
    code = code ? code : v->primary_retain(&d->context, d->device);
    code = code ? code : v->set_current(d->context);
    code = code ? code : v->stream_create(&d->stream, STREAM_NON_BLOCKING);
    code = code ? code : v->event_create(&d->start, 0);
    code = code ? code : v->event_create(&d->end, 0);
    code = code ? code : v->memory_info(&available, &total);
    d->fill_size = available / 4 < FILL_BYTES ? available / 4 / 512 * 512 : FILL_BYTES;
    code = code ? code : v->alloc(&d->fill, d->fill_size);
    return code == 0 ? CLI_OK : cli_error("the CUDA driver does not open device %d (error %d)", (int)index, code);
}

int bench_device_open(bench_device **device, int32_t index)
{
    bench_device *d = xcalloc(1, sizeof *d);
    *device = NULL;
    if (bench_driver_open(&d->driver) != CLI_OK) {
        free(d);
        return CLI_ERROR;
    }
    if (open_parts(d, index) != CLI_OK) {
        bench_device_close(d);
        return CLI_ERROR;
    }
    d->gemm.ready = bench_blas_open(&d->blas) && open_gemm(d);
    if (!d->gemm.ready) {
        fprintf(stderr, "flashmla: no cuBLASLt, or it fails: the compute limit is not measured (--limit-tflops)\n");
    }
    d->trace = bench_trace_open();
    *device = d;
    return CLI_OK;
}

void bench_device_close(bench_device *d)
{
    if (d == NULL) {
        return;
    }
    close_gemm(d);
    bench_trace_close(d->trace);
    if (d->fill != 0) {
        d->driver.release(d->fill);
    }
    void *events[] = {d->start, d->end};
    for (int i = 0; i < 2; i++) {
        if (events[i] != NULL) {
            d->driver.event_destroy(events[i]);
        }
    }
    if (d->stream != NULL) {
        d->driver.stream_destroy(d->stream);
    }
    if (d->context != NULL) {
        d->driver.primary_release(d->device);
    }
    dlclose(d->driver.library);
    free(d);
}
