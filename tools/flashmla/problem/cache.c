/* SPDX-License-Identifier: MIT */
/* cache.c: where a token's bytes are, and random tokens. */
#include "problem/cache.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem/numbers.h"

fmla_format_info cache_format(int64_t format, int64_t d_qk)
{
    static fmla_format_info last = {.struct_size = 0}; /* of millions of calls in a row one format is asked for */
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    if (last.struct_size == 0 || last.format != format) {
        last = info;
        fmla_format_get((fmla_kv_format)format, &last);
    }
    info = last;
    if (info.layout == FMLA_LAYOUT_PLAIN) {
        info.d_qk = (int32_t)d_qk;
        info.bytes_per_token = 2 * (int32_t)d_qk;
        info.data_row_bytes = info.bytes_per_token;
    }
    return info;
}

fmla_kv_cache cache_make(memory *m, int64_t format, int64_t d_qk, int64_t heads, int64_t pages, int64_t page, int pad,
                         int64_t misalign, uint8_t fill)
{
    fmla_format_info info = cache_format(format, d_qk);
    fmla_kv_cache cache;
    memset(&cache, 0, sizeof cache);
    cache.format = (int32_t)format;
    cache.num_heads = (int32_t)heads;
    cache.d_qk = info.d_qk;
    cache.num_pages = pages;
    cache.page_size = page;
    if (info.layout == FMLA_LAYOUT_PLAIN) {
        misalign &= ~(int64_t)1;
        cache.head_stride_bytes = info.bytes_per_token + (pad ? 32 : 0);
        cache.token_stride_bytes = cache.head_stride_bytes * heads + (pad ? 256 : 0);
        cache.page_stride_bytes = cache.token_stride_bytes * (page + (pad ? 1 : 0)) + misalign;
    } else {
        cache.page_stride_bytes = info.bytes_per_token * page;
        if (pad && info.format == FMLA_KV_V4) {
            cache.page_stride_bytes = (cache.page_stride_bytes + 575) / 576 * 576;
        } else if (pad) {
            cache.page_stride_bytes += info.bytes_per_token;
        }
        cache.page_stride_bytes += misalign;
    }
    size_t size = cache_bytes(&cache);
    cache.data = memory_take(m, size, (size_t)misalign);
    memset(cache.data, fill, size);
    return cache;
}

int64_t cache_slots(const fmla_kv_cache *cache)
{
    return cache->num_pages * cache->page_size;
}

size_t cache_bytes(const fmla_kv_cache *cache)
{
    return (size_t)(cache->num_pages * cache->page_stride_bytes);
}

int64_t cache_record_bytes(const fmla_kv_cache *cache)
{
    fmla_format_info info = cache_format(cache->format, cache->d_qk);
    return (int64_t)info.bytes_per_token * cache->num_heads;
}

/* Copies a record from (put) or to (get) the cache, piece by piece. */
static void move(const fmla_kv_cache *cache, int64_t slot, uint8_t *record, int put)
{
    fmla_format_info info = cache_format(cache->format, cache->d_qk);
    int64_t offset = slot % cache->page_size;
    uint8_t *page = (uint8_t *)cache->data + (slot / cache->page_size) * cache->page_stride_bytes;
    if (info.layout == FMLA_LAYOUT_PLAIN) {
        for (int32_t h = 0; h < cache->num_heads; h++) {
            uint8_t *row = page + offset * cache->token_stride_bytes + h * cache->head_stride_bytes;
            uint8_t *piece = record + (int64_t)h * info.bytes_per_token;
            memcpy(put ? row : piece, put ? piece : row, (size_t)info.bytes_per_token);
        }
        return;
    }
    uint8_t *row = page + offset * info.data_row_bytes;
    memcpy(put ? row : record, put ? record : row, (size_t)info.data_row_bytes);
    if (info.layout == FMLA_LAYOUT_PAGE) {
        uint8_t *scales = page + cache->page_size * info.data_row_bytes + offset * info.scale_row_bytes;
        uint8_t *piece = record + info.data_row_bytes;
        memcpy(put ? scales : piece, put ? piece : scales, (size_t)info.scale_row_bytes);
    }
}

void cache_put(const fmla_kv_cache *cache, int64_t slot, const uint8_t *record)
{
    move(cache, slot, (uint8_t *)(uintptr_t)record, 1);
}

void cache_get(const fmla_kv_cache *cache, int64_t slot, uint8_t *record)
{
    move(cache, slot, record, 0);
}

fmla_kv_cache cache_head(const fmla_kv_cache *cache, int32_t head)
{
    fmla_kv_cache one = *cache;
    one.data = (uint8_t *)cache->data + head * cache->head_stride_bytes;
    one.num_heads = 1;
    return one;
}

static double clamp(double x, double limit)
{
    return x > limit ? limit : x < -limit ? -limit : x;
}

/* d numbers of one token's key. */
static void random_key(rng *r, const test_case *c, int64_t d, const double *offset, double *x)
{
    double factor = 0.1;
    if (c->data == DATA_AMPLIFIED && rng_uniform(r) < 0.02) {
        factor *= 1 + 255 * rng_uniform(r);
    }
    for (int64_t j = 0; j < d; j++) {
        x[j] = c->data == DATA_SHIFTED ? clamp(rng_normal(r) * factor + offset[j], 10)
                                       : clamp(rng_normal(r) * factor, c->data == DATA_AMPLIFIED ? 100 : 1);
    }
}

/* Codes and scales out of the air: every code but NaN, scales that keep values moderate and are no powers of two. */
static void random_codes(rng *r, const fmla_format_info *info, uint8_t *record)
{
    uint8_t *scales = record + (info->layout == FMLA_LAYOUT_PAGE ? info->data_row_bytes : 0) + info->scale_offset;
    int32_t bytes = info->element == FMLA_F4_E2M1 ? info->quant_dims / 2 : info->quant_dims;
    for (int32_t i = 0; i < bytes; i++) {
        uint8_t code = (uint8_t)rng_below(r, 256);
        record[i] = info->element == FMLA_F8_E4M3 && (code & 0x7F) == 0x7F ? (uint8_t)(code ^ 1) : code;
    }
    for (int32_t g = 0; g < info->quant_dims / info->group; g++) {
        if (info->scale == FMLA_F32) {
            float scale = (float)ldexp(0.5 + rng_uniform(r), -8 - (int)rng_below(r, 6));
            memcpy(scales + 4 * g, &scale, sizeof scale);
        } else if (info->scale == FMLA_F8_E8M0) {
            scales[g] = (uint8_t)(112 + rng_below(r, 8));
        } else {
            scales[g] = (uint8_t)(1 + rng_below(r, 0x30));
        }
    }
}

static int quantize_records(engine *maker, memory *m, const fmla_tensor *src, const fmla_kv_cache *dst, int first)
{
    any_args a;
    memset(&a, 0, sizeof a);
    a.quantize = (fmla_quantize_args)FMLA_QUANTIZE_ARGS_INIT;
    a.quantize.src = *src;
    a.quantize.dst = *dst;
    a.quantize.quantizer = first ? FMLA_QUANTIZER_V32_2025 : FMLA_QUANTIZER_DEFAULT;
    fmla_status status = engine_run(maker, m, FMLA_OP_QUANTIZE, &a);
    return status == FMLA_OK ? CLI_OK : cli_status(maker->context, status, "making a cache");
}

int cache_records(engine *maker, rng *r, const fmla_kv_cache *like, const test_case *c, int64_t n, uint8_t **records)
{
    fmla_format_info info = cache_format(like->format, like->d_qk);
    int64_t d = info.d_qk;
    memory m = {0};
    fmla_dtype dtype = info.layout == FMLA_LAYOUT_PLAIN ? (fmla_dtype)info.element : FMLA_BF16;
    fmla_tensor src = memory_tensor_4(&m, dtype, 2, n * like->num_heads, d, 0, 0, 0, 0);
    double *x = xmalloc((size_t)d * sizeof *x);
    double *offset = xmalloc((size_t)d * sizeof *offset);
    rng shift;
    rng_seed(&shift, (uint64_t)c->seed ^ 0x5EED);
    for (int64_t j = 0; j < d; j++) {
        offset[j] = (rng_uniform(&shift) - 0.5) * 0.6;
    }
    for (int64_t i = 0; i < n * like->num_heads; i++) {
        random_key(r, c, d, offset, x);
        for (int64_t j = 0; j < d; j++) {
            number_set(src.data, dtype, i * d + j, x[j]);
        }
    }
    int status = CLI_OK;
    size_t size = (size_t)(n * cache_record_bytes(like));
    *records = xmalloc(size);
    if (info.layout == FMLA_LAYOUT_PLAIN) {
        memcpy(*records, src.data, size);
    } else {
        /* With one token to a page, a page is a record. */
        fmla_kv_cache packed = cache_make(&m, like->format, d, 1, n, 1, 0, 0, 0);
        status = quantize_records(maker, &m, &src, &packed, c->scales == 1 && like->format == FMLA_KV_V32);
        memcpy(*records, packed.data, size);
        for (int64_t i = 0; i < n && c->scales == 2; i++) {
            random_codes(r, &info, *records + i * info.bytes_per_token);
        }
    }
    free(x);
    free(offset);
    memory_free(&m);
    return status;
}
