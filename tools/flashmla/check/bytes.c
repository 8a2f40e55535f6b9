/* SPDX-License-Identifier: MIT */
/*
 * bytes.c: caches in and out of their formats, conversion between them and the e4m3 cast: no tolerance. The
 * oracle and the backend write into equal memory, and all of it is compared, unwritten slots and padding included. NaN
 * is NaN, whatever its bits.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/check.h"
#include "problem/numbers.h"

/* Numbers next to every decision of the quantisers, as magnitudes of a group's largest element. */
static const float corners[] = {
    0.0f,     448.0f, 449.0f, 464.0f,  896.0f,  3.5f,  3.5000002f,    0.0546875f, 0.0546876f, 0.0448f,
    1e-4f,    6.0f,   7.0f,   2688.0f, 2700.0f, 1e30f, 3.3895314e38f, 0x1p-126f,  0x1p-133f,  0x1p-140f,
    65504.0f, 1.0f,   0.25f,  0.75f,   1.25f,   5.0f,  INFINITY,      NAN,
};
#define CORNERS (sizeof corners / sizeof corners[0])

/* A token whose groups of 16 elements each have a corner value among random multiples and ties of e2m1. */
static void corner_token(rng *r, int64_t number, int64_t d, double *x)
{
    static const double steps[] = {0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0, 6.0, 1.0};
    for (int64_t j = 0; j < d; j++) {
        double top = (double)corners[(size_t)(number * 7 + j / 128 + (j / 16 % 8) * (number % 3)) % CORNERS];
        double sign = rng_below(r, 2) ? 1 : -1;
        if (j % 16 == number % 16) {
            x[j] = sign * top;
        } else {
            double y = isfinite(top) ? top : 1;
            x[j] = sign * (rng_below(r, 2) ? steps[rng_below(r, 10)] / 6 * y : rng_uniform(r) * y);
        }
    }
}

static fmla_tensor source_rows(memory *m, rng *r, const test_case *c, int64_t d)
{
    bool heads = c->h_kv > 1;
    fmla_tensor t = heads ? memory_tensor_4(m, (fmla_dtype)c->dtype, 3, c->count, c->h_kv, d, 0, (int)c->pad, 0xFF)
                          : memory_tensor_4(m, (fmla_dtype)c->dtype, 2, c->count, d, 0, 0, (int)c->pad, 0xFF);
    double *x = xmalloc((size_t)d * sizeof *x);
    for (int64_t i = 0; i < c->count; i++) {
        for (int64_t h = 0; h < c->h_kv; h++) {
            double factor = ldexp(1.0, (int)rng_below(r, 12) - 6);
            for (int64_t j = 0; j < d; j++) {
                x[j] = rng_normal(r) * factor;
            }
            if (c->data != DATA_PLAIN) {
                corner_token(r, i, d, x);
            }
            int64_t at = heads ? tensor_offset(&t, i, h, 0, 0) : tensor_offset(&t, i, 0, 0, 0);
            for (int64_t j = 0; j < d; j++) {
                number_set(t.data, t.dtype, at + j, x[j]);
            }
        }
    }
    free(x);
    return t;
}

/* c->lengths 0: none; 1: int64, 2: int32; different slots in random order; one in eight negative where that is legal.
 */
static fmla_tensor make_slots(memory *m, rng *r, const test_case *c, int64_t slots, bool skip)
{
    fmla_tensor t = {0};
    if (c->lengths == 0) {
        return t;
    }
    t = memory_tensor_4(m, c->lengths == 1 ? FMLA_I64 : FMLA_I32, 1, c->count, 0, 0, 0, 0, 0);
    int64_t *order = xmalloc((size_t)slots * sizeof *order);
    rng_permutation(r, order, slots);
    for (int64_t i = 0; i < c->count; i++) {
        number_set(t.data, t.dtype, i, skip && rng_below(r, 8) == 0 ? -1 - (double)rng_below(r, 3) : (double)order[i]);
    }
    free(order);
    return t;
}

static int64_t pool_pages(const test_case *c, int64_t page)
{
    return (c->count + page - 1) / page + (c->lengths ? 2 : 0);
}

/* All tokens of a cache as floats, by the oracle. */
static float *decode_all(checker *k, memory *m, const fmla_kv_cache *cache, int64_t d)
{
    int64_t n = cache_slots(cache);
    any_args a;
    memset(&a, 0, sizeof a);
    a.dequantize = (fmla_dequantize_args)FMLA_DEQUANTIZE_ARGS_INIT;
    a.dequantize.src = *cache;
    a.dequantize.dst = memory_tensor_4(m, FMLA_F32, cache->num_heads > 1 ? 3 : 2, n,
                                       cache->num_heads > 1 ? cache->num_heads : d, d, 0, 0, 0);
    return engine_run(&k->oracle, m, FMLA_OP_DEQUANTIZE, &a) == FMLA_OK ? a.dequantize.dst.data : NULL;
}

/* Equal bytes; in tokens that hold NaN, equal numbers are enough. */
static verdict same_cache(checker *k, memory *m, const fmla_kv_cache *ours, const fmla_kv_cache *truth)
{
    if (memcmp(ours->data, truth->data, cache_bytes(ours)) == 0) {
        return VERDICT_PASSED;
    }
    int64_t d = cache_format(ours->format, ours->d_qk).d_qk, size = cache_record_bytes(ours);
    int64_t row = d * ours->num_heads;
    float *a = decode_all(k, m, ours, d), *b = decode_all(k, m, truth, d);
    uint8_t *x = xmalloc((size_t)size), *y = xmalloc((size_t)size);
    verdict v = VERDICT_PASSED;
    bool differ = false;
    for (int64_t i = 0; i < cache_slots(ours) && v == VERDICT_PASSED && a && b; i++) {
        bool nan = false, equal = true;
        cache_get(ours, i, x);
        cache_get(truth, i, y);
        if (memcmp(x, y, (size_t)size) == 0) {
            continue;
        }
        differ = true;
        for (int64_t j = 0; j < row; j++) {
            float p = a[i * row + j], q = b[i * row + j];
            nan = nan || isnan(q);
            equal = equal && (memcmp(&p, &q, sizeof p) == 0 || (isnan(p) && isnan(q)));
        }
        int64_t at = 0;
        while (x[at] == y[at]) {
            at++;
        }
        if (!nan || !equal) {
            v = check_fail(k, "slot %lld: byte %lld is 0x%02X, not 0x%02X", (long long)i, (long long)at, x[at], y[at]);
        }
    }
    free(x);
    free(y);
    if (v == VERDICT_PASSED && !differ) {
        v = check_fail(k, "bytes between the tokens (page padding) were written");
    }
    return v;
}

/* Runs on the oracle and on the engine; a and b differ in their destination only. */
static verdict run_both(checker *k, memory *m, fmla_operation op, const any_args *a, const any_args *b)
{
    fmla_status status = engine_run(&k->oracle, m, op, b);
    if (status != FMLA_OK) {
        cli_status(k->oracle.context, status, "reference");
        return VERDICT_BROKEN;
    }
    status = engine_run(&k->engine, m, op, a);
    if (status != FMLA_OK) {
        return check_status(k, &k->engine, status, "");
    }
    return memory_intact(m) ? VERDICT_PASSED : check_fail(k, "guard bytes around a tensor were overwritten");
}

verdict check_quantize(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    any_args a, b;
    rng_seed(&r, (uint64_t)c->seed);
    fmla_format_info info = cache_format(c->format, c->d_qk);
    int64_t pages = pool_pages(c, c->page);
    memset(&a, 0, sizeof a);
    a.quantize = (fmla_quantize_args)FMLA_QUANTIZE_ARGS_INIT;
    a.quantize.src = source_rows(&m, &r, c, info.d_qk);
    a.quantize.slots = make_slots(&m, &r, c, pages * c->page, true);
    a.quantize.quantizer = c->scales == 1 ? FMLA_QUANTIZER_V32_2025 : FMLA_QUANTIZER_DEFAULT;
    b = a;
    a.quantize.dst = cache_make(&m, c->format, c->d_qk, c->h_kv, pages, c->page, (int)c->pad, c->misalign, 0x3B);
    b.quantize.dst = cache_make(&m, c->format, c->d_qk, c->h_kv, pages, c->page, (int)c->pad, c->misalign, 0x3B);
    verdict v = run_both(k, &m, FMLA_OP_QUANTIZE, &a, &b);
    if (v == VERDICT_PASSED) {
        v = same_cache(k, &m, &a.quantize.dst, &b.quantize.dst);
    }
    memory_free(&m);
    return v;
}

/* Pair (scale, code) number n of all pairs, in order, through all groups of all tokens. */
static void every_code(const fmla_kv_cache *cache, const fmla_format_info *info, rng *r, int64_t slot)
{
    uint8_t *record = xmalloc((size_t)info->bytes_per_token);
    for (int32_t i = 0; i < info->bytes_per_token; i++) {
        record[i] = (uint8_t)rng_below(r, 256);
    }
    uint8_t *scales = record + (info->layout == FMLA_LAYOUT_PAGE ? info->data_row_bytes : 0) + info->scale_offset;
    int32_t groups = info->group ? info->quant_dims / info->group : 0;
    int32_t codes = info->element == FMLA_F4_E2M1 ? 16 : 256;
    int32_t pieces = info->group ? (codes + info->group - 1) / info->group : 1;
    for (int32_t g = 0; g < groups; g++) {
        int64_t number = slot * groups + g;
        if (info->scale == FMLA_F32) {
            float scale = (float)ldexp(0.5 + rng_uniform(r), (int)rng_below(r, 40) - 30);
            memcpy(scales + 4 * g, &scale, sizeof scale);
        } else {
            scales[g] = (uint8_t)(number / pieces);
        }
        for (int32_t e = 0; e < info->group; e++) {
            int32_t code = (int32_t)(number % pieces) * info->group + e;
            int32_t at = g * info->group + e;
            if (info->element == FMLA_F4_E2M1) {
                int shift = at % 2 * 4;
                record[at / 2] = (uint8_t)((record[at / 2] & (0xF0 >> shift)) | ((code & 15) << shift));
            } else {
                record[at] = (uint8_t)code;
            }
        }
    }
    cache_put(cache, slot, record);
    free(record);
}

static int fill_cache(checker *k, rng *r, const fmla_kv_cache *cache, const test_case *c)
{
    fmla_format_info info = cache_format(cache->format, cache->d_qk);
    int64_t slots = cache_slots(cache);
    if (c->data != DATA_PLAIN && info.layout != FMLA_LAYOUT_PLAIN) {
        for (int64_t i = 0; i < slots; i++) {
            every_code(cache, &info, r, i);
        }
        return CLI_OK;
    }
    uint8_t *records;
    if (cache_records(&k->oracle, r, cache, c, slots, &records) != CLI_OK) {
        return CLI_ERROR;
    }
    for (int64_t i = 0; i < slots; i++) {
        cache_put(cache, i, records + i * cache_record_bytes(cache));
    }
    free(records);
    return CLI_OK;
}

static verdict same_numbers(checker *k, const fmla_tensor *a, const fmla_tensor *b)
{
    int64_t n = tensor_elements(a);
    size_t element = fmla_dtype_size((fmla_dtype)a->dtype);
    uint8_t *x = xmalloc((size_t)n * element), *y = xmalloc((size_t)n * element);
    tensor_pack(a, x);
    tensor_pack(b, y);
    verdict v = VERDICT_PASSED;
    for (int64_t i = 0; i < n && v == VERDICT_PASSED; i++) {
        double p = number_get(x, a->dtype, i), q = number_get(y, a->dtype, i);
        if (memcmp(x + (size_t)i * element, y + (size_t)i * element, element) != 0 && !(isnan(p) && isnan(q))) {
            v = check_fail(k, "element %lld is %.9g, not %.9g", (long long)i, p, q);
        }
    }
    free(x);
    free(y);
    return v;
}

verdict check_dequantize(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    any_args a, b;
    rng_seed(&r, (uint64_t)c->seed);
    fmla_format_info info = cache_format(c->format, c->d_qk);
    int64_t pages = pool_pages(c, c->page);
    memset(&a, 0, sizeof a);
    a.dequantize = (fmla_dequantize_args)FMLA_DEQUANTIZE_ARGS_INIT;
    a.dequantize.src = cache_make(&m, c->format, c->d_qk, c->h_kv, pages, c->page, (int)c->pad, c->misalign, 0xFF);
    verdict v = VERDICT_BROKEN;
    if (fill_cache(k, &r, &a.dequantize.src, c) == CLI_OK) {
        a.dequantize.slots = make_slots(&m, &r, c, pages * c->page, true);
        b = a;
        int32_t rank = c->h_kv > 1 ? 3 : 2;
        int64_t second = c->h_kv > 1 ? c->h_kv : info.d_qk;
        fmla_dtype dtype = (fmla_dtype)c->dtype;
        a.dequantize.dst = memory_tensor_4(&m, dtype, rank, c->count, second, info.d_qk, 0, (int)c->pad, POISON_BYTE);
        b.dequantize.dst = memory_tensor_4(&m, dtype, rank, c->count, second, info.d_qk, 0, (int)c->pad, POISON_BYTE);
        v = run_both(k, &m, FMLA_OP_DEQUANTIZE, &a, &b);
        if (v == VERDICT_PASSED) {
            v = same_numbers(k, &a.dequantize.dst, &b.dequantize.dst);
        }
    }
    memory_free(&m);
    return v;
}

verdict check_convert(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    any_args a, b;
    test_case plain = *c;
    rng_seed(&r, (uint64_t)c->seed);
    plain.data = DATA_PLAIN;
    memset(&a, 0, sizeof a);
    a.convert = (fmla_convert_args)FMLA_CONVERT_ARGS_INIT;
    a.convert.src =
        cache_make(&m, c->format, c->d_qk, 1, pool_pages(c, c->page), c->page, (int)c->pad, c->misalign, 0xFF);
    verdict v = VERDICT_BROKEN;
    if (fill_cache(k, &r, &a.convert.src, &plain) == CLI_OK) {
        int64_t pages = pool_pages(c, c->e_page);
        a.convert.src_slots = make_slots(&m, &r, c, cache_slots(&a.convert.src), false);
        a.convert.dst_slots = make_slots(&m, &r, c, pages * c->e_page, true);
        b = a;
        a.convert.dst = cache_make(&m, c->extra, c->d_qk, 1, pages, c->e_page, (int)c->pad, c->misalign, 0x3B);
        b.convert.dst = cache_make(&m, c->extra, c->d_qk, 1, pages, c->e_page, (int)c->pad, c->misalign, 0x3B);
        v = run_both(k, &m, FMLA_OP_CONVERT, &a, &b);
        if (v == VERDICT_PASSED) {
            v = same_cache(k, &m, &a.convert.dst, &b.convert.dst);
        }
    }
    memory_free(&m);
    return v;
}

verdict check_fp8_cast(checker *k, const test_case *c)
{
    memory m = {0};
    rng r;
    any_args a, b;
    rng_seed(&r, (uint64_t)c->seed);
    int64_t words = c->d_qk / c->group / 4, rows = (c->count + 3) / 4 * 4;
    memset(&a, 0, sizeof a);
    a.fp8_cast = (fmla_fp8_cast_args)FMLA_FP8_CAST_ARGS_INIT;
    a.fp8_cast.src = source_rows(&m, &r, c, c->d_qk);
    a.fp8_cast.group = (int32_t)c->group;
    b = a;
    any_args *both[2] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        fmla_fp8_cast_args *f = &both[i]->fp8_cast;
        f->codes = memory_tensor_4(&m, FMLA_U8, 2, c->count, c->d_qk, 0, 0, 0, POISON_BYTE);
        f->scale = memory_tensor_4(&m, FMLA_I32, 2, words, rows, 0, 0, 0, 0);
        f->scale.shape[0] = c->count;
        f->scale.shape[1] = words;
        f->scale.stride[0] = 1;
        f->scale.stride[1] = rows;
    }
    verdict v = run_both(k, &m, FMLA_OP_FP8_CAST, &a, &b);
    if (v == VERDICT_PASSED) {
        v = same_numbers(k, &a.fp8_cast.codes, &b.fp8_cast.codes);
    }
    if (v == VERDICT_PASSED) {
        v = same_numbers(k, &a.fp8_cast.scale, &b.fp8_cast.scale);
    }
    memory_free(&m);
    return v;
}
