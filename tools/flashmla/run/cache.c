/* SPDX-License-Identifier: MIT */
/*
 * cache.c: KV caches from tensors and to tensors. A plain cache is [pages, P, heads, d] (or [pages, P, d]); a
 * quantised one is [pages, P, 1, bytes per token], [pages, P, bytes per token], or [pages, page stride] bytes with the
 * setting page_size. Its format is always said, never guessed.
 */
#include "run/run.h"

#include <string.h>

/* Other names under which files carry a cache. */
static const char *const main_names[] = {"kv", "kv_cache", "k_cache", "kv_page_bytes", "page_bytes", "bytes", NULL};
static const char *const extra_names[] = {"extra_kv", "extra_kv_cache", "extra_k_cache", "extra_kv_page_bytes", NULL};

/* Page size of a cache given as raw pages: the setting, or the file's `meta` = [d_qk, page size, extra page size]. */
static int page_size_of(run_case *c, bool extra, int64_t *page_size)
{
    const char *key = extra ? "extra_page_size" : "page_size";
    const fmla_tensor *meta = run_peek(c, "meta");

    if (meta != NULL && meta->dtype == FMLA_I32 && run_elements(meta) >= 3) {
        *page_size = ((const int32_t *)meta->data)[extra ? 2 : 1];
    }
    if (run_integer(c, key, 1, INT32_MAX, page_size) != CLI_OK) {
        return CLI_ERROR;
    }
    return *page_size >= 1 ? CLI_OK : cli_error("%s needs the setting '%s'", c->operation->name, key);
}

static int plain_cache(const run_case *c, const char *name, const fmla_tensor *tensor, fmla_kv_cache *cache)
{
    if (tensor->rank != 4 && tensor->rank != 3) {
        return cli_error("tensor '%s%s': a plain cache is [pages, page size, heads, d]", c->prefix, name);
    }
    cache->page_size = tensor->shape[1];
    cache->num_heads = tensor->rank == 4 ? (int32_t)tensor->shape[2] : 1;
    cache->d_qk = (int32_t)tensor->shape[tensor->rank - 1];
    if (tensor->shape[1] < 1 || (tensor->rank == 4 && (tensor->shape[2] < 1 || tensor->shape[2] > INT32_MAX)) ||
        tensor->shape[tensor->rank - 1] < 1 || tensor->shape[tensor->rank - 1] > INT32_MAX) {
        return cli_error("tensor '%s%s': page size, heads and d must be at least 1", c->prefix, name);
    }
    return CLI_OK;
}

static int quantised_cache(run_case *c, const char *name, bool extra, const fmla_tensor *tensor,
                           const fmla_format_info *info, fmla_kv_cache *cache)
{
    int64_t bytes = info->bytes_per_token;

    if (tensor->dtype != FMLA_U8 && tensor->dtype != FMLA_F8_E4M3 && tensor->dtype != FMLA_F8_E8M0) {
        return cli_error("tensor '%s%s' is %s; a %s cache is bytes", c->prefix, name,
                         fmla_dtype_name((fmla_dtype)tensor->dtype), info->name);
    }
    if (tensor->rank == 2) {
        if (page_size_of(c, extra, &cache->page_size) != CLI_OK) {
            return CLI_ERROR;
        }
        cache->page_stride_bytes = tensor->shape[1];
        if (tensor->shape[1] / bytes < cache->page_size) {
            return cli_error("tensor '%s%s': a page of %lld bytes does not hold %lld tokens of %lld (%s)", c->prefix,
                             name, (long long)tensor->shape[1], (long long)cache->page_size, (long long)bytes,
                             info->name);
        }
        return CLI_OK;
    }
    if ((tensor->rank != 4 && tensor->rank != 3) || (tensor->rank == 4 && tensor->shape[2] != 1) ||
        tensor->shape[tensor->rank - 1] != bytes || tensor->shape[1] < 1) {
        return cli_error("tensor '%s%s': a %s cache is [pages, page size, 1, %lld] or [pages, page stride]",
                         c->prefix, name, info->name, (long long)bytes);
    }
    cache->page_size = tensor->shape[1];
    return CLI_OK;
}

int run_cache(run_case *c, const char *name, bool required, fmla_kv_cache *cache)
{
    bool extra = strncmp(name, "extra", 5) == 0;
    const char *found = run_first_name(c, extra ? extra_names : main_names);
    int32_t format = FMLA_KV_NONE;
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    fmla_tensor tensor;

    memset(cache, 0, sizeof *cache);
    if (found == NULL && !required) {
        return CLI_OK;
    }
    if (run_input(c, found == NULL ? name : found, true, &tensor) != CLI_OK ||
        run_format(c, "kv_format", &format) != CLI_OK ||
        (extra && run_format(c, "extra_kv_format", &format) != CLI_OK)) {
        return CLI_ERROR;
    }
    bool plain = tensor.dtype == FMLA_BF16 || tensor.dtype == FMLA_F16;
    if (format == FMLA_KV_NONE && plain) {
        format = tensor.dtype == FMLA_BF16 ? FMLA_KV_BF16 : FMLA_KV_F16;
    }
    if (format == FMLA_KV_NONE) {
        return cli_error("%s needs the setting '%skv_format': the bytes of '%s%s' do not say", c->operation->name,
                         extra ? "extra_" : "", c->prefix, found);
    }
    if (fmla_format_get((fmla_kv_format)format, &info) != FMLA_OK) {
        return cli_error("format %d is not known to the library", (int)format);
    }
    cache->data = tensor.data;
    cache->format = format;
    cache->num_pages = tensor.shape[0];
    if (info.layout != FMLA_LAYOUT_PLAIN) {
        return quantised_cache(c, found, extra, &tensor, &info, cache);
    }
    if (tensor.dtype != info.element) {
        return cli_error("tensor '%s%s' is %s; a %s cache is not", c->prefix, found,
                         fmla_dtype_name((fmla_dtype)tensor.dtype), info.name);
    }
    return plain_cache(c, found, &tensor, cache);
}

int run_output_cache(run_case *c, const char *name, const fmla_format_info *info, fmla_kv_cache *cache)
{
    fmla_tensor tensor;
    int64_t packed = 0;
    int result;

    if (info->layout == FMLA_LAYOUT_PLAIN) {
        int64_t shape[4] = {cache->num_pages, cache->page_size, cache->num_heads, cache->d_qk};
        result = run_output_new(c, name, info->element, 4, shape, &tensor);
    } else if (__builtin_mul_overflow(cache->page_size, (int64_t)info->bytes_per_token, &packed)) {
        return cli_error("page_size: %lld tokens do not fit memory", (long long)cache->page_size);
    } else if (cache->page_stride_bytes == 0 || cache->page_stride_bytes == packed) {
        int64_t shape[4] = {cache->num_pages, cache->page_size, 1, info->bytes_per_token};
        result = run_output_new(c, name, FMLA_U8, 4, shape, &tensor);
    } else if (cache->page_stride_bytes < packed) {
        return cli_error("page_stride_bytes: %lld is less than the %lld bytes of a page",
                         (long long)cache->page_stride_bytes, (long long)packed);
    } else {
        int64_t shape[2] = {cache->num_pages, cache->page_stride_bytes};
        result = run_output_new(c, name, FMLA_U8, 2, shape, &tensor);
    }
    cache->data = tensor.data;
    return result;
}
