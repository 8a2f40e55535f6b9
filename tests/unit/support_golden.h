/* SPDX-License-Identifier: MIT */
/*
 * support_golden.h: reads the golden safetensors files. Test-only: what is missing or malformed fails the
 * test.
 */
#ifndef FLASHMLA_TEST_SUPPORT_GOLDEN_H
#define FLASHMLA_TEST_SUPPORT_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

#include <flashmla/flashmla.h>

typedef struct golden golden;

typedef struct golden_tensor {
    const uint8_t *data; /* inside the file's memory, of any alignment */
    fmla_dtype dtype;
    int32_t rank;
    int64_t shape[FMLA_MAX_RANK];
    int64_t count; /* elements */
} golden_tensor;

golden *golden_open(const char *file); /* a name inside the folder of golden data */
golden_tensor golden_get(const golden *g, const char *name);
void golden_close(golden *g);

#endif
