/* SPDX-License-Identifier: MIT */
/* Any bytes as a .safetensors file: read or refused with a sentence; every tensor that is accepted is readable. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "file/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static volatile uint8_t sink;

static void touch(const fmla_tensor *t)
{
    size_t n = fmla_dtype_size((fmla_dtype)t->dtype);
    for (int32_t i = 0; i < t->rank; i++) {
        n *= (size_t)t->shape[i];
    }
    for (size_t i = 0; i < n; i++) {
        sink ^= ((const uint8_t *)t->data)[i];
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char path[64], error[512] = "";
    st_file file = {0};
    int fd = memfd_create("fuzz", 0);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size) {
        abort();
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (st_read(&file, path, error, sizeof error) == 0) {
        for (size_t i = 0; i < file.count; i++) {
            touch(&file.entries[i].tensor);
        }
        st_free(&file);
    } else if (error[0] == '\0' || strchr(error, '\n') != NULL) {
        abort(); /* refused without a sentence */
    }
    close(fd);
    return 0;
}
