/* SPDX-License-Identifier: MIT */
/* pool.c: a caller's KV cache, checked, as a pool with every stride filled in. */
#include <float.h>
#include <string.h>

#include "../format/format.h"
#include "describe.h"
#include "read.h"

#define invalid(c, ...) fmlai_invalid(c, __VA_ARGS__)

static long long ll(int64_t x)
{
    return (long long)x;
}

/* The format's row, or the caller's own. */
static void describe_format(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, fmla_format_info *info)
{
    const fmla_format_info *row = fmlai_format_row((fmla_kv_format)cache->format);
    const char *why = "";
    if (cache->format != FMLA_KV_CUSTOM) {
        if (row == NULL) {
            invalid(c, "%s: format is %d; allowed: 1..%d, %d (custom)", name, (int)cache->format, FMLA_KV_COUNT - 1,
                    FMLA_KV_CUSTOM);
        } else if (cache->custom != NULL) {
            invalid(c, "%s.custom: is given; allowed: NULL with format %s", name, row->name);
        } else {
            *info = *row;
        }
        return;
    }
    fmla_status status = fmlai_args_read(info, sizeof *info, cache->custom, "custom", c->error);
    if (status != FMLA_OK) {
        c->status = status;
        return;
    }
    info->format = FMLA_KV_CUSTOM;
    info->name[sizeof info->name - 1] = '\0';
    if (!fmlai_format_valid(info, &why)) {
        invalid(c, "%s.custom: %s", name, why);
    }
}

static void check_outer_scale(fmlai_checker *c, const char *name, double scale, bool plain)
{
    if (scale == 0.0 || (plain && scale == 1.0)) {
        return;
    }
    if (plain) {
        invalid(c, "%s.outer_scale: %g; allowed in a plain format: 0 or 1", name, scale);
    } else if (!(scale >= (double)FLT_MIN && scale <= (double)FLT_MAX)) {
        invalid(c, "%s.outer_scale: %g; allowed: 0 (none), or a normal positive float, %g..%g", name, scale,
                (double)FLT_MIN, (double)FLT_MAX);
    }
}

static void check_width(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, int64_t d_qk,
                        fmla_format_info *info)
{
    bool plain = info->layout == FMLA_LAYOUT_PLAIN;
    int64_t own = plain ? (cache->d_qk != 0 ? cache->d_qk : d_qk) : info->d_qk;
    if (!plain && cache->d_qk != 0 && cache->d_qk != info->d_qk) {
        invalid(c, "%s.d_qk: %d; allowed: 0 or %d, the width of format %s", name, (int)cache->d_qk, (int)info->d_qk,
                info->name);
    } else if (own < 1 || own > INT32_MAX) {
        invalid(c, "%s.d_qk: %lld; allowed: at least 1", name, ll(own));
    } else if (d_qk != 0 && own != d_qk) {
        invalid(c, "%s: d_qk is %lld (format %s); allowed: %lld, the width of this call", name, ll(own), info->name,
                ll(d_qk));
    }
    if (plain && !fmlai_failed(c)) {
        info->d_qk = (int32_t)own;
    }
}

/* Token and head strides of a plain cache; returns the bytes from a page's first to its last. */
static int64_t plain_strides(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, int64_t heads,
                             fmlai_pool *pool)
{
    int64_t width = 2 * (int64_t)pool->format.d_qk, tokens = pool->page_size, token_span, head_span, span = 0;
    pool->head_stride = cache->head_stride_bytes != 0 ? cache->head_stride_bytes : width;
    bool fits = cache->token_stride_bytes != 0 || fmlai_mul(heads, pool->head_stride, &pool->token_stride);
    if (cache->token_stride_bytes != 0) {
        pool->token_stride = cache->token_stride_bytes;
    }
    if (pool->head_stride < 0 || pool->token_stride < 0) {
        invalid(c, "%s: token_stride_bytes %lld, head_stride_bytes %lld; allowed: not negative", name,
                ll(pool->token_stride), ll(pool->head_stride));
        return 0;
    }
    fits = fits && fmlai_mul(tokens - 1, pool->token_stride, &token_span) &&
           fmlai_mul(heads - 1, pool->head_stride, &head_span) && fmlai_add(token_span, head_span, &span) &&
           fmlai_add(span, width, &span);
    if (!fits) {
        invalid(c, "%s: a page of %lld tokens spans more bytes than 63 bits count; allowed: less", name, ll(tokens));
        return 0;
    }
    bool token_major =
        (heads == 1 || pool->head_stride >= width) && (tokens == 1 || pool->token_stride >= head_span + width);
    bool head_major =
        (tokens == 1 || pool->token_stride >= width) && (heads == 1 || pool->head_stride >= token_span + width);
    if (!token_major && !head_major) {
        invalid(c,
                "%s: token_stride_bytes %lld, head_stride_bytes %lld make tokens overlap; allowed: 0, or room for "
                "%lld heads of %lld bytes",
                name, ll(pool->token_stride), ll(pool->head_stride), ll(heads), ll(width));
    }
    return span;
}

static int64_t quantised_strides(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, fmlai_pool *pool)
{
    const fmla_format_info *f = &pool->format;
    int64_t span = 0;
    pool->token_stride = f->data_row_bytes;
    pool->head_stride = 0;
    if (cache->token_stride_bytes != 0 && cache->token_stride_bytes != f->bytes_per_token && pool->page_size != 1) {
        invalid(c, "%s.token_stride_bytes: %lld; allowed: 0 or %d (format %s takes %d bytes per token)", name,
                ll(cache->token_stride_bytes), (int)f->bytes_per_token, f->name, (int)f->bytes_per_token);
    }
    if (cache->head_stride_bytes != 0) {
        invalid(c, "%s.head_stride_bytes: %lld; allowed: 0 with format %s", name, ll(cache->head_stride_bytes),
                f->name);
    }
    if (!fmlai_mul(pool->page_size, f->bytes_per_token, &span)) {
        invalid(c, "%s: a page of %lld tokens spans more bytes than 63 bits count; allowed: less", name,
                ll(pool->page_size));
    }
    return span;
}

static void check_pages(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, int64_t page_bytes,
                        fmlai_pool *pool)
{
    int64_t span, tokens;
    if (fmlai_failed(c)) {
        return;
    }
    pool->page_stride = cache->page_stride_bytes != 0 ? cache->page_stride_bytes : page_bytes;
    if (pool->page_stride < 0 || (pool->num_pages > 1 && pool->page_stride < page_bytes)) {
        invalid(c, "%s.page_stride_bytes: %lld; allowed: 0 or at least %lld (%lld tokens of %lld bytes, format %s)",
                name, ll(pool->page_stride), ll(page_bytes), ll(pool->page_size),
                ll(fmlai_format_token_bytes(&pool->format, pool->format.d_qk)), pool->format.name);
        return;
    }
    if (!fmlai_mul(pool->num_pages, pool->page_size, &tokens) ||
        !fmlai_mul(pool->num_pages, pool->page_stride, &span) || !fmlai_add(span, page_bytes, &span)) {
        invalid(c, "%s: %lld pages of %lld bytes span more bytes than 63 bits count; allowed: less", name,
                ll(pool->num_pages), ll(pool->page_stride));
    } else if (cache->data == NULL && pool->num_pages > 0 && !c->shapes_only) {
        invalid(c, "%s.data: is NULL; allowed: NULL only with num_pages 0 (it is %lld)", name, ll(pool->num_pages));
    }
}

void fmlai_describe_pool(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, int64_t d_qk, fmlai_pool *pool,
                         int32_t *heads)
{
    memset(pool, 0, sizeof *pool);
    *heads = 1;
    if (fmlai_failed(c)) {
        return;
    }
    if (!fmlai_cache_present(cache)) {
        invalid(c, "%s: format is 0 (absent); allowed: 1..%d, %d (custom)", name, FMLA_KV_COUNT - 1, FMLA_KV_CUSTOM);
        return;
    }
    describe_format(c, name, cache, &pool->format);
    if (fmlai_failed(c)) {
        return;
    }
    bool plain = pool->format.layout == FMLA_LAYOUT_PLAIN;
    check_outer_scale(c, name, cache->outer_scale, plain);
    check_width(c, name, cache, d_qk, &pool->format);
    if (cache->num_heads < 0 || (!plain && cache->num_heads > 1)) {
        invalid(c, "%s.num_heads: %d; allowed: %s (format %s)", name, (int)cache->num_heads, plain ? "at least 1" : "1",
                pool->format.name);
    }
    if (cache->num_pages < 0) {
        invalid(c, "%s.num_pages: %lld; allowed: at least 0", name, ll(cache->num_pages));
    }
    if (cache->page_size < 1) {
        invalid(c, "%s.page_size: %lld; allowed: at least 1", name, ll(cache->page_size));
    }
    if ((cache->reserved0 | cache->reserved1[0] | cache->reserved1[1]) != 0) {
        invalid(c, "%s: a reserved field is set; allowed: 0", name);
    }
    if (fmlai_failed(c)) {
        return;
    }
    *heads = cache->num_heads == 0 ? 1 : cache->num_heads;
    pool->data = cache->data;
    pool->num_pages = cache->num_pages;
    pool->page_size = cache->page_size;
    pool->outer_scale = plain || cache->outer_scale == 0.0 ? 1.0f : (float)cache->outer_scale;
    int64_t page_bytes = plain ? plain_strides(c, name, cache, *heads, pool) : quantised_strides(c, name, cache, pool);
    check_pages(c, name, cache, page_bytes, pool);
}

void fmlai_check_no_cache(fmlai_checker *c, const char *name, const fmla_kv_cache *cache, const char *why)
{
    static const fmla_kv_cache none;
    if (memcmp(cache, &none, sizeof none) != 0) {
        invalid(c, "%s: is given (format %d); allowed: all zero, %s", name, (int)cache->format, why);
    }
}

void fmlai_describe_tensor_pool(const fmlai_checker *c, const fmla_tensor *kv, fmlai_pool *pool)
{
    memset(pool, 0, sizeof *pool);
    pool->outer_scale = 1.0f;
    pool->page_size = 1;
    if (fmlai_failed(c)) {
        return;
    }
    pool->format = *fmlai_format_row(kv->dtype == FMLA_F16 ? FMLA_KV_F16 : FMLA_KV_BF16);
    pool->format.d_qk = (int32_t)kv->shape[2];
    pool->data = fmlai_data(c, kv);
    pool->num_pages = kv->shape[0] > 0;
    pool->page_size = kv->shape[0] > 0 ? kv->shape[0] : 1;
    pool->token_stride = kv->shape[0] > 1 ? 2 * kv->stride[0] : 0;
    pool->head_stride = kv->shape[1] > 1 ? 2 * kv->stride[1] : 0;
    pool->page_stride = 0; /* there is no second page */
}
