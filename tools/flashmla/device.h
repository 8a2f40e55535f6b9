/* SPDX-License-Identifier: MIT */
/* device.h: the CUDA driver as the program's memory uses it. */
#ifndef FLASHMLA_TOOL_DEVICE_H
#define FLASHMLA_TOOL_DEVICE_H

#include "program.h"

/* The driver functions that are needed, by their documented signatures (CUresult and CUdevice are ints). */
typedef struct cuda_driver {
    void *library;
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*primary_retain)(void **context, int device);
    int (*primary_release)(int device);
    int (*set_current)(void *context);
    int (*synchronize)(void);
    int (*alloc)(uintptr_t *pointer, size_t size);
    int (*release)(uintptr_t pointer);
    int (*to_device)(uintptr_t target, const void *source, size_t size);
    int (*to_host)(void *target, uintptr_t source, size_t size);
    int (*fill)(uintptr_t target, unsigned char byte, size_t size);
    int (*module_load)(void **module, const void *text); /* NULL: this and the next two are not there */
    int (*module_function)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared, void *stream, void **arguments, void **extra);
    int device;
    void *context;    /* the device's primary one */
    uintptr_t hashes; /* see hash.c; 0: not there yet */
} cuda_driver;

/* NULL: host memory. */
cuda_driver *cli_memory_cuda(cli_memory *memory);

#endif
