/* SPDX-License-Identifier: MIT */
/* safetensors_text.h: what file/safetensors.c (reading) and file/safetensors_write.c (writing) share. */
#ifndef FLASHMLA_TOOL_SAFETENSORS_TEXT_H
#define FLASHMLA_TOOL_SAFETENSORS_TEXT_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>

/* Largest header that the file format allows, in bytes. */
#define ST_MAX_HEADER 100000000

/* Formats the error and returns -1. */
int st_fail(char *error, size_t error_size, const char *format, ...) __attribute__((format(printf, 3, 4)));
bool st_utf8_valid(const char *text, size_t size);

#endif
