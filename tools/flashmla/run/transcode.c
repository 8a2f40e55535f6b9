/* SPDX-License-Identifier: MIT */
/* transcode.c: quantise, dequantise and convert on a case's tensors, and the report of what the numbers lost. */
#include "problem/numbers.h"
#include "run/run.h"

#include <stdlib.h>
#include <string.h>

static const char *const source_names[] = {"src", "k", "kv", NULL};

/* [pages, P, h, d] as [tokens, h, d], and one head as [tokens, d]. */
static int flatten(const run_case *c, const char *name, const fmla_tensor *tensor, fmla_tensor *flat)
{
    const int64_t *s = tensor->shape;

    switch (tensor->rank) {
    case 2:
        *flat = fmla_tensor_2d(tensor->data, (fmla_dtype)tensor->dtype, s[0], s[1]);
        return CLI_OK;
    case 3:
        *flat = fmla_tensor_3d(tensor->data, (fmla_dtype)tensor->dtype, s[0], s[1], s[2]);
        return CLI_OK;
    case 4:
        *flat = fmla_tensor_3d(tensor->data, (fmla_dtype)tensor->dtype, s[0] * s[1], s[2], s[3]);
        return CLI_OK;
    default:
        return cli_error("tensor '%s%s' has rank %d; [tokens, d], [tokens, heads, d] or [pages, page size, heads, d]"
                         " is needed", c->prefix, name, (int)tensor->rank);
    }
}

/* One more than the largest slot, at least n without slots. */
static int64_t slots_needed(run_case *c, const char *name, int64_t n)
{
    const fmla_tensor *slots = run_peek(c, name);
    int64_t most = 0;

    if (slots == NULL || (slots->dtype != FMLA_I32 && slots->dtype != FMLA_I64)) {
        return n;
    }
    for (int64_t i = 0; i < run_elements(slots); i++) {
        int64_t slot = slots->dtype == FMLA_I32 ? ((const int32_t *)slots->data)[i]
                                                : ((const int64_t *)slots->data)[i];
        most = slot >= most && slot < INT64_MAX ? slot + 1 : most;
    }
    return most;
}

/* Page size, stride and count of a new cache; `prefix` is "" or "to_". */
static int new_cache(run_case *c, const char *prefix, int64_t tokens, int64_t page_size, int32_t format,
                     fmla_format_info *info, fmla_kv_cache *cache)
{
    char key[48];

    if (fmla_format_get((fmla_kv_format)format, info) != FMLA_OK) {
        return cli_error("format %d is not known to the library", (int)format);
    }
    cache->format = format;
    cache->page_size = page_size;
    snprintf(key, sizeof key, "%spage_size", prefix);
    if (run_integer(c, key, 1, INT32_MAX, &cache->page_size) != CLI_OK) {
        return CLI_ERROR;
    }
    snprintf(key, sizeof key, "%spage_stride_bytes", prefix);
    if (run_integer(c, key, 1, INT64_MAX, &cache->page_stride_bytes) != CLI_OK) {
        return CLI_ERROR;
    }
    cache->num_pages = tokens / cache->page_size + (tokens % cache->page_size != 0);
    snprintf(key, sizeof key, "%snum_pages", prefix);
    return run_integer(c, key, 0, INT32_MAX, &cache->num_pages);
}

int run_quantize(run_case *c)
{
    static const char *const quantizer_names[] = {"default", "v32-2025", NULL};
    fmla_quantize_args a = FMLA_QUANTIZE_ARGS_INIT;
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    const char *name = run_first_name(c, source_names);
    int32_t format = FMLA_KV_NONE;
    fmla_tensor source;

    if (run_input(c, name == NULL ? "src" : name, true, &source) != CLI_OK ||
        flatten(c, name, &source, &a.src) != CLI_OK || run_input(c, "slots", false, &a.slots) != CLI_OK ||
        run_format(c, "kv_format", &format) != CLI_OK) {
        return CLI_ERROR;
    }
    if (format == FMLA_KV_NONE) {
        return cli_error("quantize needs the setting 'kv_format'");
    }
    a.dst.num_heads = a.src.rank == 3 ? (int32_t)a.src.shape[1] : 1;
    a.dst.d_qk = (int32_t)a.src.shape[a.src.rank - 1];
    if (new_cache(c, "", slots_needed(c, "slots", a.src.shape[0]), source.rank == 4 ? source.shape[1] : 64, format,
                  &info, &a.dst) != CLI_OK ||
        run_choice(c, "quantizer", quantizer_names, &a.quantizer) != CLI_OK ||
        run_output_cache(c, "kv", &info, &a.dst) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    c->source = run_peek(c, name);
    c->cache_out = a.dst;
    c->slots_out = a.slots;
    return run_called(c, fmla_quantize(c->context, &a, NULL));
}

/* Key width of a cache: a plain one's own, else the format's. */
static int64_t width_of(const fmla_kv_cache *cache)
{
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;

    fmla_format_get((fmla_kv_format)cache->format, &info);
    return info.d_qk == 0 ? cache->d_qk : info.d_qk;
}

static int64_t heads_of(const fmla_kv_cache *cache)
{
    return cache->num_heads == 0 ? 1 : cache->num_heads;
}

int run_dequantize(run_case *c)
{
    fmla_dequantize_args a = FMLA_DEQUANTIZE_ARGS_INIT;
    int32_t dtype = FMLA_BF16;
    fmla_tensor dst;

    if (run_cache(c, "kv", true, &a.src) != CLI_OK || run_input(c, "slots", false, &a.slots) != CLI_OK ||
        run_dtype(c, "out_dtype", &dtype) != CLI_OK) {
        return CLI_ERROR;
    }
    int64_t heads = heads_of(&a.src);
    int64_t paged[4] = {a.src.num_pages, a.src.page_size, heads, width_of(&a.src)};
    int64_t listed[3] = {a.slots.rank == 1 ? a.slots.shape[0] : 0, heads, paged[3]};
    if (run_output_new(c, "dst", dtype, a.slots.rank == 0 ? 4 : 3, a.slots.rank == 0 ? paged : listed, &dst) !=
            CLI_OK ||
        flatten(c, "dst", &dst, &a.dst) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    const char *reference = run_first_name(c, (const char *const[]){"src", "k", NULL});
    c->source = reference == NULL ? NULL : run_peek(c, reference);
    c->cache_in = a.src;
    c->slots_in = a.slots;
    return run_called(c, fmla_dequantize(c->context, &a, NULL));
}

int run_convert(run_case *c)
{
    fmla_convert_args a = FMLA_CONVERT_ARGS_INIT;
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    int32_t format = FMLA_KV_NONE;

    if (run_cache(c, "kv", true, &a.src) != CLI_OK || run_input(c, "src_slots", false, &a.src_slots) != CLI_OK ||
        run_input(c, "dst_slots", false, &a.dst_slots) != CLI_OK || run_format(c, "to_format", &format) != CLI_OK) {
        return CLI_ERROR;
    }
    if (format == FMLA_KV_NONE) {
        return cli_error("convert needs the setting 'to_format'");
    }
    int64_t tokens = a.src_slots.rank == 1 ? a.src_slots.shape[0] : a.src.num_pages * a.src.page_size;
    a.dst.num_heads = a.src.num_heads;
    a.dst.d_qk = (int32_t)width_of(&a.src);
    if (new_cache(c, "to_", slots_needed(c, "dst_slots", tokens), a.src.page_size, format, &info, &a.dst) != CLI_OK ||
        run_output_cache(c, "kv", &info, &a.dst) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    c->cache_in = a.src;
    c->cache_out = a.dst;
    c->slots_in = a.src_slots;
    c->slots_out = a.dst_slots;
    return run_called(c, fmla_convert(c->context, &a, NULL));
}

/* n tokens of a cache in fp32, in host memory of the caller. */
static int read_back(run_case *c, const fmla_kv_cache *cache, const fmla_tensor *slots, int64_t n, fmla_tensor *host)
{
    fmla_dequantize_args a = FMLA_DEQUANTIZE_ARGS_INIT;
    int64_t heads = heads_of(cache);
    int64_t width = width_of(cache);
    size_t size = (size_t)(n * heads * width) * sizeof(float);

    *host = fmla_tensor_3d(malloc(size + 1), FMLA_F32, n, heads, width);
    a.src = *cache;
    a.slots = *slots;
    a.dst = *host;
    a.dst.data = cli_memory_new(c->memory, size);
    if (host->data == NULL || a.dst.data == NULL) {
        return CLI_ERROR;
    }
    fmla_status status = fmla_dequantize(c->context, &a, NULL);
    if (status != FMLA_OK) {
        return cli_status(c->context, status, "reading the result back");
    }
    return cli_memory_download(c->memory, host->data, a.dst.data, size);
}

static void print_report(const run_difference *d, int64_t elements, cJSON *tree)
{
    if (tree == NULL) {
        printf("  error of %lld numbers: max abs %.6g, max rel %.6g, rms %.6g (numbers' rms %.6g), cosine %.9f\n",
               (long long)elements, d->max_abs, d->max_rel, d->rms, d->rms_reference, d->cosine);
        return;
    }
    cJSON *item = cJSON_AddObjectToObject(tree, "error");
    cli_json_number(item, "elements", (double)elements);
    cli_json_number(item, "max_abs", d->max_abs);
    cli_json_number(item, "max_rel", d->max_rel);
    cli_json_number(item, "rms", d->rms);
    cli_json_number(item, "rms_reference", d->rms_reference);
    cli_json_number(item, "cosine", d->cosine);
    cli_json_number(item, "cos_diff", d->cos_diff);
}

/* Rows whose slot is negative were never written: they do not count. */
static void clear_skipped(run_case *c, const char *name, fmla_tensor *numbers)
{
    const fmla_tensor *slots = run_peek(c, name);
    int64_t row = numbers->shape[1] * numbers->shape[2];

    for (int64_t i = 0; slots != NULL && i < numbers->shape[0]; i++) {
        if (number_get(slots->data, slots->dtype, i) < 0) {
            memset((float *)numbers->data + i * row, 0, (size_t)row * sizeof(float));
        }
    }
}

/* The source's numbers as fp32 in memory of the caller. */
static int widen(const fmla_tensor *source, const fmla_tensor *like, fmla_tensor *host)
{
    int64_t n = run_elements(source);

    *host = *like;
    host->data = malloc((size_t)n * sizeof(float) + 1);
    if (host->data == NULL) {
        return cli_error("not enough memory");
    }
    for (int64_t i = 0; i < n; i++) {
        ((float *)host->data)[i] = (float)number_get(source->data, source->dtype, i);
    }
    return CLI_OK;
}

int run_transcode_report(run_case *c, cJSON *tree)
{
    fmla_tensor before = {0};
    fmla_tensor after = {0};
    bool written = c->cache_out.format != FMLA_KV_NONE;
    const fmla_kv_cache *cache = written ? &c->cache_out : &c->cache_in;
    const fmla_tensor *slots = written ? &c->slots_out : &c->slots_in;
    int64_t row = heads_of(cache) * width_of(cache);
    int64_t n = slots->rank == 1 ? slots->shape[0] : cache->num_pages * cache->page_size;
    int result = CLI_OK;

    if (c->cache_in.format != FMLA_KV_NONE && written) { /* convert: the smaller pool's tokens */
        int64_t pool = c->slots_in.rank == 1 ? c->slots_in.shape[0] : c->cache_in.num_pages * c->cache_in.page_size;
        n = pool < n ? pool : n;
        result = read_back(c, &c->cache_in, &c->slots_in, n, &before);
    } else if (c->source == NULL) {
        return CLI_OK;
    } else {
        n = run_elements(c->source) / row;
    }
    if (result == CLI_OK) {
        result = read_back(c, cache, slots, n, &after);
    }
    if (result == CLI_OK && before.data == NULL && run_elements(c->source) == run_elements(&after)) {
        result = widen(c->source, &after, &before);
        if (result == CLI_OK && written) {
            clear_skipped(c, "slots", &before);
            clear_skipped(c, "slots", &after);
        }
    }
    if (result == CLI_OK && before.data != NULL) {
        run_difference d = run_measure(&after, &before, 0, 0);
        print_report(&d, run_elements(&before), tree);
    }
    free(before.data);
    free(after.data);
    return result;
}
