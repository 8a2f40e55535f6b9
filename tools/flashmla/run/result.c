/* SPDX-License-Identifier: MIT */
/* result.c: what a run says and writes: shapes, the output file, the backend that did it. */
#include "run/run.h"

#include <string.h>

static void shape_text(const fmla_tensor *tensor, char *text, size_t size)
{
    size_t used = 0;

    for (int32_t i = 0; i < tensor->rank && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i > 0 ? ", " : "[", (long long)tensor->shape[i]);
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
}

void run_print_outputs(const run_case *c)
{
    fmla_device device = fmla_context_device(c->context);

    printf("%s on %s", c->operation->name, fmla_device_name(device));
    if (device == FMLA_DEVICE_CPU) {
        printf(", %s, %d threads", fmla_isa_name(fmla_context_isa(c->context)), fmla_context_threads(c->context));
    }
    putchar('\n');
    for (int i = 0; i < c->output_count; i++) {
        char shape[160];
        shape_text(&c->outputs[i].host, shape, sizeof shape);
        printf("  %-12s %-8s %s\n", c->outputs[i].name, fmla_dtype_name((fmla_dtype)c->outputs[i].host.dtype), shape);
    }
}

void run_describe(const run_case *c, cJSON *tree)
{
    fmla_device device = fmla_context_device(c->context);

    cJSON_AddStringToObject(tree, "operation", c->operation->name);
    cJSON_AddStringToObject(tree, "backend", fmla_device_name(device));
    if (device == FMLA_DEVICE_CPU) {
        cJSON_AddStringToObject(tree, "isa", fmla_isa_name(fmla_context_isa(c->context)));
        cJSON_AddNumberToObject(tree, "threads", fmla_context_threads(c->context));
    }
    cJSON *outputs = cJSON_AddArrayToObject(tree, "outputs");
    for (int i = 0; i < c->output_count; i++) {
        const fmla_tensor *tensor = &c->outputs[i].host;
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "name", c->outputs[i].name);
        cJSON_AddStringToObject(item, "dtype", fmla_dtype_name((fmla_dtype)tensor->dtype));
        cJSON *shape = cJSON_AddArrayToObject(item, "shape");
        for (int32_t d = 0; d < tensor->rank; d++) {
            cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)tensor->shape[d]));
        }
        cJSON_AddItemToArray(outputs, item);
    }
}

/* What a later run must know to read the cache. */
static int add_cache_meta(st_file *out, const fmla_kv_cache *cache, char *error, size_t error_size)
{
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    char page_size[32];

    fmla_format_get((fmla_kv_format)cache->format, &info);
    snprintf(page_size, sizeof page_size, "%lld", (long long)cache->page_size);
    int result = st_add_meta(out, "kv_format", info.name, error, error_size);
    return result == 0 ? st_add_meta(out, "page_size", page_size, error, error_size) : result;
}

int run_save(const run_case *c, const char *path)
{
    st_file out;
    char error[1024];
    char name[RUN_NAME + 32];
    int result = 0;

    memset(&out, 0, sizeof out);
    for (int i = 0; i < c->output_count && result == 0; i++) {
        snprintf(name, sizeof name, "%s%s", c->prefix, c->outputs[i].name);
        result = st_add(&out, name, c->outputs[i].host, error, sizeof error);
    }
    if (result == 0) {
        result = st_add_meta(&out, "operation", c->operation->name, error, sizeof error);
    }
    if (result == 0) {
        const char *backend = fmla_device_name(fmla_context_device(c->context));
        result = st_add_meta(&out, "backend", backend, error, sizeof error);
    }
    if (result == 0) {
        result = st_add_meta(&out, "flashmla_version", FMLA_VERSION_STRING, error, sizeof error);
    }
    if (result == 0 && c->cache_out.format != FMLA_KV_NONE) {
        result = add_cache_meta(&out, &c->cache_out, error, sizeof error);
    }
    if (result == 0) {
        result = st_write(&out, path, error, sizeof error);
    }
    st_free(&out);
    return result == 0 ? CLI_OK : cli_error("%s", error);
}
