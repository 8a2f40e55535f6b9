/* SPDX-License-Identifier: MIT */
/*
 * output_file.h: files that appear whole or not at all. The bytes go to a new file beside the target, reach the disk,
 * and only then take the target's name. After a failure the target is as it was and nothing is left behind. A target
 * that exists and is not a regular file (a device, a pipe) is refused; a symbolic link is followed.
 *
 * Functions return 0, or -1 with one line in error; after -1 the file is closed and gone.
 */
#ifndef FLASHMLA_TOOL_OUTPUT_FILE_H
#define FLASHMLA_TOOL_OUTPUT_FILE_H

#include <stddef.h>

typedef struct output_file {
    char *target;
    char *temporary;
    int fd;
} output_file;

int output_begin(output_file *file, const char *path, char *error, size_t error_size);
int output_put(output_file *file, const void *data, size_t size, char *error, size_t error_size);
int output_commit(output_file *file, char *error, size_t error_size);

#endif
