/* SPDX-License-Identifier: MIT */
/* driver.h: what device.c calls of the driver and of cuBLASLt, by their documented signatures. */
#ifndef FLASHMLA_TOOL_BENCH_DRIVER_H
#define FLASHMLA_TOOL_BENCH_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A function of a library, and where its pointer goes in a table of such. */
typedef struct bench_symbol {
    const char *name;
    size_t offset;
} bench_symbol;

/* Fills a table. NULL, or the name of the function that the library lacks. */
const char *bench_symbols_find(void *library, const bench_symbol *symbols, size_t count, void *table);

/* CUresult, CUdevice and enumerations are ints, addresses are uintptr_t, handles are pointers. */
typedef struct bench_driver {
    void *library;
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*set_current)(void *context);
    int (*memory_info)(size_t *available, size_t *total);
    int (*alloc)(uintptr_t *pointer, size_t size);
    int (*release)(uintptr_t pointer);
    int (*to_device)(uintptr_t target, const void *source, size_t size);
    int (*copy)(uintptr_t target, uintptr_t source, size_t size, void *stream);
    int (*fill)(uintptr_t target, unsigned char value, size_t size, void *stream);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*stream_wait)(void *stream);
    int (*capture_begin)(void *stream, int mode);
    int (*capture_end)(void *stream, void **graph);
    int (*graph_instantiate)(void **executable, void *graph, unsigned long long flags);
    int (*graph_launch)(void *executable, void *stream);
    int (*graph_destroy)(void *graph);
    int (*executable_destroy)(void *executable);
    int (*event_create)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_elapsed)(float *milliseconds, void *from, void *to);
    int (*event_destroy)(void *event);
} bench_driver;

/* cublasLtMatmulHeuristicResult_t. */
typedef struct bench_algorithm {
    uint64_t algorithm[8];
    size_t workspace_size;
    int state;
    float waves;
    int reserved[4];
} bench_algorithm;

/* Status, types and operations are ints; descriptors are pointers. */
typedef struct bench_blas {
    void *library;
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*operation_create)(void **operation, int compute, int scale);
    int (*operation_set)(void *operation, int attribute, const void *value, size_t size);
    int (*operation_destroy)(void *operation);
    int (*layout_create)(void **layout, int type, uint64_t rows, uint64_t columns, int64_t pitch);
    int (*layout_destroy)(void *layout);
    int (*preference_create)(void **preference);
    int (*preference_set)(void *preference, int attribute, const void *value, size_t size);
    int (*preference_destroy)(void *preference);
    int (*heuristic)(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
                     bench_algorithm *found, int *count);
    int (*product)(void *handle, void *operation, const void *alpha, const void *a, void *a_layout, const void *b,
                   void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,
                   const uint64_t *algorithm, void *workspace, size_t workspace_size, void *stream);
} bench_blas;

/* CLI_OK, or CLI_ERROR with the message printed and nothing open. */
int bench_driver_open(bench_driver *driver);
/* False, and nothing open, where it is not installed. */
bool bench_blas_open(bench_blas *blas);

#endif
