/* SPDX-License-Identifier: MIT */
/*
 * plugin.c: finds libflashmla_cuda.so: where FLASHMLA_CUDA_PLUGIN says, else beside this library, else where the loader
 * looks. A plugin that is loaded stays; one that is not is looked for again by the next context.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"

#define PLUGIN "libflashmla_cuda.so"
#define ENTRY  "fmlai_cuda_backend"

typedef const fmlai_backend *(*plugin_entry)(uint32_t abi);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const fmlai_backend *loaded;

/* The folder of the file that holds this function, then the plugin's name; false if it cannot be told. */
static bool path_beside_us(char *path, size_t size)
{
    static const char here;
    Dl_info info;
    if (dladdr(&here, &info) == 0 || info.dli_fname == NULL) {
        return false;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    int folder = slash == NULL ? 0 : (int)(slash - info.dli_fname + 1);
    return folder > 0 && snprintf(path, size, "%.*s%s", folder, info.dli_fname, PLUGIN) < (int)size;
}

static void *open_library(fmlai_error *error)
{
    const char *wanted = secure_getenv("FLASHMLA_CUDA_PLUGIN");
    char beside[4096];
    void *library = NULL;
    if (wanted != NULL && wanted[0] != '\0') {
        library = dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
    } else {
        if (path_beside_us(beside, sizeof beside)) {
            library = dlopen(beside, RTLD_NOW | RTLD_LOCAL);
        }
        if (library == NULL) {
            library = dlopen(PLUGIN, RTLD_NOW | RTLD_LOCAL);
        }
    }
    if (library == NULL) {
        const char *why = dlerror();
        fmlai_fail(error, FMLA_ERROR_NO_BACKEND, "the CUDA plugin %s cannot be loaded: %.300s", PLUGIN,
                   why == NULL ? "no reason given" : why);
    }
    return library;
}

static const fmlai_backend *load(fmlai_error *error)
{
    plugin_entry entry = NULL;
    void *library = open_library(error);
    if (library == NULL) {
        return NULL;
    }
    void *symbol = dlsym(library, ENTRY);
    memcpy(&entry, &symbol, sizeof entry);
    const fmlai_backend *backend = entry == NULL ? NULL : entry(FMLAI_BACKEND_ABI);
    if (backend == NULL || backend->abi != FMLAI_BACKEND_ABI) {
        fmlai_fail(error, FMLA_ERROR_NO_BACKEND, "the CUDA plugin %s is of another version of this library", PLUGIN);
        dlclose(library);
        return NULL;
    }
    return backend;
}

const fmlai_backend *fmlai_plugin_load(fmlai_error *error)
{
    pthread_mutex_lock(&lock);
    if (loaded == NULL) {
        loaded = load(error);
    }
    const fmlai_backend *backend = loaded;
    pthread_mutex_unlock(&lock);
    return backend;
}
