/* SPDX-License-Identifier: MIT */
/* read.c: see read.h. */
#include "read.h"

#include <string.h>

/* Every public struct begins with a size_t and has at least one more word. */
static const size_t size_min = 2 * sizeof(size_t);

static fmla_status caller_size(size_t *size, size_t known, const void *args, const char *name, fmlai_error *error)
{
    if (args == NULL) {
        return fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT,
                          "%s: is NULL; allowed: a struct that begins with its size", name);
    }
    memcpy(size, args, sizeof *size);
    if (*size < size_min || *size > known + FMLAI_ARGS_EXCESS_MAX) {
        return fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT,
                          "%s.struct_size: %zu; allowed: %zu..%zu (begin with the struct's _INIT)", name, *size,
                          size_min, known + FMLAI_ARGS_EXCESS_MAX);
    }
    return FMLA_OK;
}

fmla_status fmlai_args_read(void *dst, size_t dst_size, const void *src, const char *name, fmlai_error *error)
{
    size_t size = 0;
    fmla_status status = caller_size(&size, dst_size, src, name, error);
    if (status != FMLA_OK) {
        return status;
    }
    for (size_t i = dst_size; i < size; i++) {
        if (((const unsigned char *)src)[i] != 0) {
            return fmlai_fail(
                error, FMLA_ERROR_INVALID_ARGUMENT,
                "%s: byte %zu of a newer struct of %zu is set; allowed: zeros beyond the %zu this library "
                "knows",
                name, i, size, dst_size);
        }
    }
    memset(dst, 0, dst_size);
    memcpy(dst, src, size < dst_size ? size : dst_size);
    memcpy(dst, &dst_size, sizeof dst_size);
    return FMLA_OK;
}

fmla_status fmlai_args_write(void *dst, const void *src, size_t src_size, const char *name, fmlai_error *error)
{
    size_t size = 0;
    fmla_status status = caller_size(&size, src_size, dst, name, error);
    if (status != FMLA_OK) {
        return status;
    }
    memset(dst, 0, size);
    memcpy(dst, src, size < src_size ? size : src_size);
    memcpy(dst, &size, sizeof size);
    return FMLA_OK;
}
