/* SPDX-License-Identifier: MIT */
/* output_file.c: see the header. */
#include "file/output_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int fail(char *error, size_t error_size, const char *what, const char *path, int cause)
{
    snprintf(error, error_size, "%s: %s: %s", path, what, strerror(cause));
    return -1;
}

static void forget(output_file *file)
{
    free(file->target);
    free(file->temporary);
    memset(file, 0, sizeof *file);
    file->fd = -1;
}

static int abandon(output_file *file, char *error, size_t error_size, int cause)
{
    if (file->fd >= 0) {
        close(file->fd);
    }
    unlink(file->temporary);
    fail(error, error_size, "cannot write", file->target, cause);
    forget(file);
    return -1;
}

/* A file that did not exist before, beside the target. */
static int open_temporary(output_file *file)
{
    size_t size = strlen(file->target) + 48;

    file->temporary = malloc(size);
    for (int attempt = 0; attempt < 100 && file->temporary != NULL; attempt++) {
        snprintf(file->temporary, size, "%s.%ld-%d.tmp", file->target, (long)getpid(), attempt);
        int fd = open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd >= 0 || errno != EEXIST) {
            return fd;
        }
    }
    return -1;
}

int output_begin(output_file *file, const char *path, char *error, size_t error_size)
{
    struct stat status;

    memset(file, 0, sizeof *file);
    file->fd = -1;
    file->target = realpath(path, NULL); /* NULL: a new file */
    if (file->target == NULL) {
        file->target = strdup(path);
    }
    if (file->target == NULL) {
        return fail(error, error_size, "cannot create", path, ENOMEM);
    }
    if (stat(file->target, &status) == 0 && !S_ISREG(status.st_mode)) {
        snprintf(error, error_size, "%s: exists and is not a regular file", path);
        forget(file);
        return -1;
    }
    file->fd = open_temporary(file);
    if (file->fd < 0) {
        fail(error, error_size, "cannot create", path, errno);
        forget(file);
        return -1;
    }
    return 0;
}

int output_put(output_file *file, const void *data, size_t size, char *error, size_t error_size)
{
    const size_t most = (size_t)1 << 30; /* of one write */
    const char *at = data;

    while (size > 0) {
        ssize_t n = write(file->fd, at, size < most ? size : most);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return abandon(file, error, error_size, n == 0 ? EIO : errno);
        }
        at += n;
        size -= (size_t)n;
    }
    return 0;
}

/* The directory entry reaches the disk too. Some file systems refuse; the file itself is safe by then. */
static void sync_directory(const char *path)
{
    const char *slash = strrchr(path, '/');
    char *directory = slash == NULL ? strdup(".") : strndup(path, (size_t)(slash - path + 1));
    int fd = directory == NULL ? -1 : open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
    free(directory);
}

int output_commit(output_file *file, char *error, size_t error_size)
{
    if (fsync(file->fd) != 0) {
        return abandon(file, error, error_size, errno);
    }
    int closed = close(file->fd);
    file->fd = -1;
    if (closed != 0 || rename(file->temporary, file->target) != 0) {
        return abandon(file, error, error_size, errno);
    }
    sync_directory(file->target);
    forget(file);
    return 0;
}
