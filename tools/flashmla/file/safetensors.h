/* SPDX-License-Identifier: MIT */
/*
 * safetensors.h: reads and writes .safetensors files; trusts nothing in them. The header's JSON is parsed by
 * cJSON. Reading maps the file; writing goes to a temporary file beside the target and renames it when all is
 * on disk.
 */
#ifndef FLASHMLA_TOOL_SAFETENSORS_H
#define FLASHMLA_TOOL_SAFETENSORS_H

#include <flashmla/flashmla.h>

/*
 * A scalar (rank 0 in the file) is read as shape [1]. I8 and BOOL are read as U8. Types that fmla_dtype lacks
 * (I16, U64, F8_E5M2, ...) are read with dtype NONE, so that such a tensor can be there without being used.
 */
typedef struct st_entry {
    char *name;
    fmla_tensor tensor; /* contiguous; data points into the file (reading) or to the caller's (writing) */
} st_entry;

typedef struct st_file {
    st_entry *entries;
    size_t count;
    char **meta; /* __metadata__: key, value, key, value, ... */
    size_t meta_count; /* pairs */
    void *mapping;
    size_t mapping_size;
    void *copies; /* reading: aligned copies of tensors that lie misaligned in the file */
} st_file;

/* 0, or -1 with one line in error. On failure nothing is left open. */
int st_read(st_file *file, const char *path, char *error, size_t error_size);
void st_free(st_file *file);
/* The entry's tensor, or NULL. */
const fmla_tensor *st_find(const st_file *file, const char *name);
const char *st_meta(const st_file *file, const char *key);

/* For writing: start from a zeroed st_file. Names and metadata are copied, tensor data is not. */
int st_add(st_file *file, const char *name, fmla_tensor tensor, char *error, size_t error_size);
int st_add_meta(st_file *file, const char *key, const char *value, char *error, size_t error_size);
/* Writes all or nothing: see file/output_file.h. */
int st_write(const st_file *file, const char *path, char *error, size_t error_size);

#endif
