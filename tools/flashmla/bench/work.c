/* SPDX-License-Identifier: MIT */
/* work.c: FLOP and bytes of a call, by the formulas of the published benchmarks (docs/benchmarks.md). */
#include "bench/bench.h"

#include <stdlib.h>
#include <string.h>

#include "problem/numbers.h"

/* Tokens that all query tokens together attend: index slots below the lengths, valid or not; dense: no causal discount.
 */
static double attended(const problem *p, const scope *s)
{
    double n = 0;
    for (int64_t t = 0; t < p->tokens; t++) {
        n += case_is_dense(&p->c) ? (double)s->seqlen[p->request[t]] : (double)scope_count(p, s, t);
    }
    return n;
}

static double attended_valid(const problem *p, const scope *s)
{
    double n = 0;
    for (int64_t t = 0; t < p->tokens; t++) {
        int64_t count = scope_count(p, s, t);
        for (int64_t i = 0; i < count; i++) {
            n += scope_slot(p, s, t, 0, i) >= 0;
        }
    }
    return n;
}

/* Different slots that are attended, times bytes per token. */
static double pool_bytes(const scope *s, bool published)
{
    double n = 0;
    if (s->cache.format == FMLA_KV_NONE) {
        return 0;
    }
    for (int64_t i = 0; i < cache_slots(&s->cache); i++) {
        n += s->used[i] != 0;
    }
    double each = (double)cache_record_bytes(&s->cache);
    return n * (published && s->cache.format == FMLA_KV_V4 ? 576 : each);
}

/* Unmasked pairs of query and key tokens. */
static double mha_pairs(const problem *p)
{
    const int32_t *q = p->cu_seqlens_q.data, *kv = p->cu_seqlens_kv.data;
    double pairs = 0;
    for (int64_t i = 0; i < p->batch; i++) {
        double s_q = q[i + 1] - q[i], s_kv = kv[i + 1] - kv[i];
        if (!p->c.causal) {
            pairs += s_q * s_kv;
        } else {
            double full = s_kv - s_q + 1; /* keys of the first query token */
            double first = full > 0 ? full : 1, rows = full > 0 ? s_q : s_kv;
            pairs += rows > 0 ? rows * (first + s_kv) / 2 : 0;
        }
    }
    return pairs;
}

static bench_work mha_work(const problem *p)
{
    const test_case *c = &p->c;
    double d = (double)c->d_qk, v = (double)c->d_v, kv = (double)p->k.shape[0];
    bool backward = c->op == FMLA_OP_MHA_BACKWARD;
    bench_work w = {0};
    w.flop = mha_pairs(p) * (double)c->h_q * 2 * (backward ? 3 * d + 2 * v : d + v);
    w.bytes = 2 * ((double)p->tokens * (double)c->h_q * (d + v) + kv * (double)c->h_kv * (d + v)) * (backward ? 2 : 1);
    w.bytes_published = w.bytes;
    return w;
}

bench_work bench_work_of(const problem *p)
{
    const test_case *c = &p->c;
    bench_work w = {0};
    double rows = (double)p->tokens * (double)c->h_q, d = (double)c->d_qk, v = (double)c->d_v;
    if (!case_is_mqa(c)) {
        return mha_work(p);
    }
    double tokens = attended(p, &p->main) + (p->extra.cache.format ? attended(p, &p->extra) : 0);
    w.flop = 2 * (double)c->h_q * tokens * (d + v);
    if (case_is_prefill(c)) {
        w.bytes = attended_valid(p, &p->main) * d * 2 + rows * (d + v) * 2;
        w.bytes_published = w.bytes;
    } else {
        double ends = 2 * rows * (d + v);
        w.bytes = ends + pool_bytes(&p->main, false) + pool_bytes(&p->extra, false);
        w.bytes_published = ends + pool_bytes(&p->main, true) + pool_bytes(&p->extra, true);
    }
    if (case_is_fused(c)) {
        w.bytes -= rows * v; /* one byte per element of out */
        w.bytes_published = w.bytes;
    }
    return w;
}

/* ---- operations that are no attention ------------------------------------------------------------------------ */

/* Some rows are different, and come again: making numbers takes longer than what is measured. */
static fmla_tensor random_rows(problem *p, rng *r, fmla_dtype dtype, int64_t n, int64_t d)
{
    fmla_tensor t = memory_tensor_4(&p->mem, dtype, 2, n, d, 0, 0, 0, 0);
    int64_t distinct = n < 256 ? n : 256;
    size_t size = (size_t)d * fmla_dtype_size(dtype);
    for (int64_t i = 0; i < distinct * d; i++) {
        number_set(t.data, dtype, i, rng_normal(r));
    }
    for (int64_t row = distinct; row < n; row++) {
        memcpy((uint8_t *)t.data + (size_t)row * size, (uint8_t *)t.data + (size_t)(row % distinct) * size, size);
    }
    return t;
}

static int full_cache(problem *p, rng *r, engine *maker, int64_t format, int64_t n, fmla_kv_cache *cache)
{
    uint8_t *records;
    int64_t pages = (n + p->c.page - 1) / p->c.page, distinct = n < 256 ? n : 256;
    *cache = cache_make(&p->mem, format, p->c.d_qk, 1, pages, p->c.page, 0, 0, 0);
    if (cache_records(maker, r, cache, &p->c, distinct, &records) != CLI_OK) {
        return CLI_ERROR;
    }
    for (int64_t i = 0; i < n; i++) {
        cache_put(cache, i, records + i % distinct * cache_record_bytes(cache));
    }
    free(records);
    return CLI_OK;
}

static void merge_problem(problem *p, rng *r, any_args *args)
{
    const test_case *c = &p->c;
    int32_t count = (int32_t)c->topk;
    fmla_tensor *outs = memory_take(&p->mem, (size_t)count * sizeof *outs, 0);
    fmla_tensor *lses = memory_take(&p->mem, (size_t)count * sizeof *lses, 0);
    for (int32_t i = 0; i < count; i++) {
        fmla_tensor out = random_rows(p, r, (fmla_dtype)c->dtype, c->count, c->h_q * c->d_v);
        fmla_tensor lse = random_rows(p, r, FMLA_F32, c->count, c->h_q);
        outs[i] = fmla_tensor_3d(out.data, (fmla_dtype)c->dtype, c->count, c->h_q, c->d_v);
        lses[i] = lse;
    }
    args->merge = (fmla_merge_args)FMLA_MERGE_ARGS_INIT;
    args->merge.outs = outs;
    args->merge.lses = lses;
    args->merge.count = count;
    args->merge.out = memory_tensor_4(&p->mem, (fmla_dtype)c->dtype, 3, c->count, c->h_q, c->d_v, 0, 0, 0);
    args->merge.lse = memory_tensor_4(&p->mem, FMLA_F32, 2, c->count, c->h_q, 0, 0, 0, 0);
}

int bench_bytes_problem(problem *p, const test_case *c, engine *maker, any_args *args)
{
    rng r;
    fmla_kv_cache cache;
    int status = CLI_OK;
    memset(p, 0, sizeof *p);
    memset(args, 0, sizeof *args);
    p->c = *c;
    rng_seed(&r, (uint64_t)c->seed);
    switch (c->op) {
    case FMLA_OP_QUANTIZE:
        args->quantize = (fmla_quantize_args)FMLA_QUANTIZE_ARGS_INIT;
        args->quantize.src = random_rows(p, &r, (fmla_dtype)c->dtype, c->count, c->d_qk);
        args->quantize.dst =
            cache_make(&p->mem, c->format, c->d_qk, 1, (c->count + c->page - 1) / c->page, c->page, 0, 0, 0);
        break;
    case FMLA_OP_DEQUANTIZE:
        status = full_cache(p, &r, maker, c->format, c->count, &cache);
        args->dequantize = (fmla_dequantize_args)FMLA_DEQUANTIZE_ARGS_INIT;
        args->dequantize.src = cache;
        args->dequantize.dst = memory_tensor_4(&p->mem, (fmla_dtype)c->dtype, 2, c->count, c->d_qk, 0, 0, 0, 0);
        break;
    case FMLA_OP_CONVERT:
        status = full_cache(p, &r, maker, c->format, c->count, &cache);
        args->convert = (fmla_convert_args)FMLA_CONVERT_ARGS_INIT;
        args->convert.src = cache;
        args->convert.dst = cache_make(&p->mem, c->extra, c->d_qk, 1, cache.num_pages, c->page, 0, 0, 0);
        break;
    case FMLA_OP_MERGE:
        merge_problem(p, &r, args);
        break;
    default:
        if (!bench_small_problem(&p->mem, c, args)) {
            status = cli_error("bench: %s has no benchmark", fmla_operation_name((fmla_operation)c->op));
        }
        break;
    }
    if (status != CLI_OK) {
        memory_free(&p->mem);
    }
    return status;
}
