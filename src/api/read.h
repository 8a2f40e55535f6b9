/* SPDX-License-Identifier: MIT */
/*
 * read.h: the one reader of callers' size-first structs. A caller built against an older header passes a shorter
 * struct: what it lacks is zero. One built against a newer header passes a longer one: what this library does not know
 * must be zero, so that no request is dropped in silence.
 */
#ifndef FLASHMLA_API_READ_H
#define FLASHMLA_API_READ_H

#include "../backend.h"

/* Bytes that a caller's struct may be longer than ours. */
#define FMLAI_ARGS_EXCESS_MAX 4096

fmla_status fmlai_args_read(void *dst, size_t dst_size, const void *src, const char *name, fmlai_error *error);

/* The way back: fills the caller's *dst, whose struct_size says how much there is room for, from src. */
fmla_status fmlai_args_write(void *dst, const void *src, size_t src_size, const char *name, fmlai_error *error);

#endif
