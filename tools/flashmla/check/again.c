/* SPDX-License-Identifier: MIT */
/*
 * again.c: the same problem in other clothes must give the same bits: other numbers of threads, every request
 * alone, requests in another order, more invalid slots, other pages. Each way builds args from the problem's own, runs
 * them with every choice that has passed so far, and looks at the problem's outputs, which are where they were.
 */

#include <stdlib.h>
#include <string.h>

#include "check/check.h"
#include "problem/numbers.h"

verdict check_again_threads(checker *k, problem *p, const uint8_t *results)
{
    any_args args;
    problem_args(p, &args);
    verdict v = check_run_same(k, &k->engine, p, &args, results, "a second run");
    if (!k->engine.host || v != VERDICT_PASSED) {
        return v;
    }
    if (check_open_others(k) != CLI_OK) {
        return VERDICT_BROKEN;
    }
    for (int i = 0; i < CHECK_OTHERS && v == VERDICT_PASSED; i++) {
        char how[40];
        snprintf(how, sizeof how, "%d threads", (int)fmla_context_threads(k->others[i].context));
        v = check_run_same(k, &k->others[i], p, &args, results, how);
    }
    return v;
}

static void all_same(checker *k, problem *p, const any_args *args, const char *how)
{
    for (int i = -1; check_next(k, &i);) {
        check_note(k, check_run_same(k, &k->engine, p, args, k->choice->results, how));
    }
}

/* rows first..first+n-1 of dimension d. */
static void slice(fmla_tensor *t, int32_t d, int64_t first, int64_t n)
{
    if (t->rank > d) {
        t->data = (char *)t->data + first * t->stride[d] * (int64_t)fmla_dtype_size((fmla_dtype)t->dtype);
        t->shape[d] = n;
    }
}

/* Decode: request i alone. Ragged batches become plain ones of one request. */
static void slice_decode(problem *p, fmla_decode_args *a, int64_t i, int64_t first_token, int64_t n)
{
    bool ragged = p->c.ragged != 0;
    int64_t first = ragged ? first_token : i, rows = ragged ? n : 1;
    fmla_tensor *per_token[] = {&a->q, &a->out, &a->kv_bound, &a->indices, &a->extra_indices};
    fmla_tensor *per_request[] = {&a->block_table, &a->cache_seqlens};
    fmla_tensor *lengths[] = {&a->topk_length, &a->extra_topk_length};
    const int64_t kinds[] = {p->c.lengths, p->c.e_lengths};
    for (int j = 0; j < 5; j++) {
        slice(per_token[j], 0, first, rows);
    }
    for (int j = 0; j < 2; j++) {
        slice(per_request[j], 0, i, 1);
        slice(lengths[j], 0, kinds[j] == 1 ? i : first, kinds[j] == 1 ? 1 : rows);
    }
    slice(&a->lse, ragged ? 1 : 0, first, rows);
    slice(&a->max_logits, ragged ? 1 : 0, first, rows);
    if (p->c.no_table && case_is_dense(&p->c)) {
        int64_t pages = a->kv.num_pages / p->batch;
        a->kv.data = (char *)a->kv.data + i * pages * a->kv.page_stride_bytes;
        a->kv.num_pages = pages;
    }
    if (ragged) {
        a->cu_seqlens_q = memory_tensor_4(&p->mem, FMLA_I32, 1, 2, 0, 0, 0, 0, 0);
        ((int32_t *)a->cu_seqlens_q.data)[1] = (int32_t)n;
    }
}

static void slice_fused(fmla_tensor *q, fmla_tensor *indices, fmla_tensor *extra, fmla_tensor *length,
                        fmla_tensor *extra_length, fmla_fused_params *f, int64_t first, int64_t n)
{
    fmla_tensor none = {0};
    fmla_tensor *all[] = {
        q,           indices, extra ? extra : &none, length, extra_length ? extra_length : &none, &f->token_positions,
        &f->out_fp8, &f->lse, &f->max_logits};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        slice(all[i], 0, first, n);
    }
}

/* A slice's scale words go to memory of their own (a call zeroes the padding behind its last token), then home. */
static fmla_tensor own_scale(problem *p, int64_t n)
{
    const fmla_tensor *t = &p->out_scale;
    int64_t rows = (n + 3) / 4 * 4;
    fmla_tensor own = memory_tensor_4(&p->mem, FMLA_I32, 3, t->shape[1], t->shape[2], rows, 0, 0, POISON_BYTE);
    own.shape[0] = n;
    own.shape[1] = t->shape[1];
    own.shape[2] = t->shape[2];
    own.stride[0] = 1;
    own.stride[1] = rows * t->shape[2];
    own.stride[2] = rows;
    return own;
}

static void scale_home(problem *p, const fmla_tensor *own, int64_t first, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        for (int64_t g = 0; g < own->shape[1]; g++) {
            for (int64_t w = 0; w < own->shape[2]; w++) {
                ((int32_t *)p->out_scale.data)[tensor_offset(&p->out_scale, first + i, g, w, 0)] =
                    tensor_i32(own, i, g, w);
            }
        }
    }
}

/* One piece: request i of a decode batch, or query tokens first..first+n-1. */
static fmla_status run_slice(checker *k, problem *p, int64_t i, int64_t first, int64_t n)
{
    any_args a;
    fmla_tensor own = {0};
    problem_args(p, &a);
    switch (p->c.op) {
    case FMLA_OP_SPARSE_PREFILL:
        slice(&a.prefill.q, 0, first, n);
        slice(&a.prefill.indices, 0, first, n);
        slice(&a.prefill.topk_length, 0, first, n);
        slice(&a.prefill.out, 0, first, n);
        slice(&a.prefill.lse, 0, first, n);
        slice(&a.prefill.max_logits, 0, first, n);
        break;
    case FMLA_OP_FUSED_PREFILL:
        slice_fused(&a.fused_prefill.q, &a.fused_prefill.indices, NULL, &a.fused_prefill.topk_length, NULL,
                    &a.fused_prefill.fused, first, n);
        a.fused_prefill.fused.out_scale = own = own_scale(p, n);
        break;
    case FMLA_OP_FUSED_DECODE:
        slice_fused(&a.fused_decode.q, &a.fused_decode.indices, &a.fused_decode.extra_indices,
                    &a.fused_decode.topk_length, &a.fused_decode.extra_topk_length, &a.fused_decode.fused, first, n);
        a.fused_decode.fused.out_scale = own = own_scale(p, n);
        break;
    default:
        slice_decode(p, &a.decode, i, first, n);
        break;
    }
    fmla_status status = engine_run(&k->engine, &p->mem, (fmla_operation)p->c.op, &a);
    if (status == FMLA_OK && own.rank != 0) {
        scale_home(p, &own, first, n);
    }
    return status;
}

/* The outputs as they are now against the first results: a run with nothing to do. */
static verdict compare_outputs(checker *k, problem *p, const uint8_t *results, const char *how)
{
    verdict v = check_outputs(k, p, results, how);
    return memory_intact(&p->mem) ? v : check_fail(k, "%s: guard bytes were overwritten", how);
}

static verdict again_slices(checker *k, problem *p, const uint8_t *results)
{
    bool decode = p->c.op <= FMLA_OP_SPARSE_DECODE;
    int64_t pieces = decode ? p->batch : 3;
    problem_poison(p);
    if (decode && engine_resident(&k->engine, &p->mem, true) != FMLA_OK) {
        return VERDICT_BROKEN;
    }
    for (int64_t i = 0, first = 0; i < pieces; i++) {
        int64_t n = decode ? p->n_q[i] : i == 2 ? p->tokens - first : p->tokens / 3;
        if (n > 0) {
            fmla_status status = run_slice(k, p, i, first, n);
            if (status != FMLA_OK) {
                return check_status(k, &k->engine, status, "a part of the batch alone");
            }
        }
        first += n;
    }
    if (decode && engine_resident(&k->engine, &p->mem, false) != FMLA_OK) {
        return VERDICT_BROKEN;
    }
    return compare_outputs(k, p, results, "a part of the batch alone");
}

/* Rows of dimension d in another order, in contiguous memory. */
static fmla_tensor reorder(memory *m, const fmla_tensor *t, int32_t d, const int64_t *order)
{
    if (t->rank <= d) {
        return *t;
    }
    size_t element = fmla_dtype_size((fmla_dtype)t->dtype);
    fmla_tensor copy = memory_tensor(m, (fmla_dtype)t->dtype, t->rank, t->shape, 0, 0);
    fmla_tensor from = *t, to = copy;
    from.shape[d] = to.shape[d] = 1;
    for (int64_t i = 0; i < t->shape[d]; i++) {
        from.data = (char *)t->data + order[i] * t->stride[d] * (int64_t)element;
        to.data = (char *)copy.data + i * copy.stride[d] * (int64_t)element;
        tensor_copy(&to, &from);
    }
    return copy;
}

static verdict run_order(checker *k, problem *p, const any_args *a, const fmla_tensor *results_there,
                         const int64_t *order, int64_t n)
{
    const fmla_tensor *home[] = {&p->out, &p->lse, &p->max_logits};
    const fmla_tensor *outputs[] = {home[0], home[1], home[2], &results_there[0], &results_there[1], &results_there[2]};
    for (int i = 3; i < 6; i++) {
        memory_fill(&p->mem, outputs[i]->data, POISON_BYTE);
    }
    engine_keep(&k->engine, &p->mem, outputs, 6);
    fmla_status status = engine_run(&k->engine, &p->mem, (fmla_operation)p->c.op, a);
    for (int i = 0; i < 3; i++) {
        fmla_tensor from = results_there[i], to = *home[i];
        from.shape[0] = to.shape[0] = 1;
        for (int64_t j = 0; j < n; j++) {
            int64_t element = (int64_t)fmla_dtype_size((fmla_dtype)from.dtype);
            from.data = (char *)results_there[i].data + j * from.stride[0] * element;
            to.data = (char *)home[i]->data + order[j] * to.stride[0] * element;
            tensor_copy(&to, &from);
        }
    }
    const char *how = "requests in another order";
    return status == FMLA_OK ? compare_outputs(k, p, k->choice->results, how)
                             : check_status(k, &k->engine, status, how);
}

/* Decode and prefill only; requests (prefill: query tokens) backwards and interleaved. */
static void again_order(checker *k, problem *p)
{
    any_args a;
    rng r;
    problem_args(p, &a);
    int64_t n = p->c.op == FMLA_OP_SPARSE_PREFILL ? p->tokens : p->batch;
    int64_t *order = xmalloc((size_t)(n + 1) * sizeof *order);
    fmla_tensor results_there[3];
    rng_seed(&r, (uint64_t)p->c.seed + 5);
    rng_permutation(&r, order, n);
    fmla_decode_args *d = &a.decode;
    fmla_prefill_args *f = &a.prefill;
    fmla_tensor *in_decode[] = {&d->q,       &d->block_table,   &d->cache_seqlens, &d->kv_bound,
                                &d->indices, &d->extra_indices, &d->topk_length,   &d->extra_topk_length};
    fmla_tensor *in_prefill[] = {&f->q, &f->indices, &f->topk_length};
    fmla_tensor *out_decode[] = {&d->out, &d->lse, &d->max_logits};
    fmla_tensor *out_prefill[] = {&f->out, &f->lse, &f->max_logits};
    bool prefill = p->c.op == FMLA_OP_SPARSE_PREFILL;
    for (int i = 0; i < (prefill ? 3 : 8); i++) {
        fmla_tensor *t = prefill ? in_prefill[i] : in_decode[i];
        *t = reorder(&p->mem, t, 0, order);
    }
    for (int i = 0; i < 3; i++) {
        fmla_tensor *t = prefill ? out_prefill[i] : out_decode[i];
        *t = results_there[i] = memory_tensor(&p->mem, (fmla_dtype)t->dtype, t->rank, t->shape, 0, POISON_BYTE);
    }
    for (int i = -1; check_next(k, &i);) {
        check_note(k, run_order(k, p, &a, results_there, order, n));
    }
    free(order);
}

static fmla_tensor longer_rows(problem *p, const fmla_tensor *t)
{
    fmla_tensor longer = *t, head;
    int32_t last = t->rank - 1;
    longer.shape[last] += 37;
    longer = memory_tensor(&p->mem, FMLA_I32, t->rank, longer.shape, 0, 0xFF); /* -1 everywhere */
    head = longer;
    head.shape[last] = t->shape[last];
    tensor_copy(&head, t);
    return longer;
}

/* Swaps the scopes' lists and pools into a call's args. */
static void use_scopes(const problem *p, any_args *a, const scope *s, const scope *extra)
{
    const fmla_kv_cache *pool = &s->cache;
    fmla_tensor kv = p->kv;
    kv.data = pool->data;
    kv.shape[0] = cache_slots(pool);
    kv.stride[0] = pool->token_stride_bytes / 2;
    kv.stride[1] = pool->head_stride_bytes / 2;
    switch (p->c.op) {
    case FMLA_OP_SPARSE_PREFILL:
        a->prefill.kv = kv;
        a->prefill.indices = s->indices;
        break;
    case FMLA_OP_FUSED_PREFILL:
        a->fused_prefill.kv = kv;
        a->fused_prefill.indices = s->indices;
        break;
    case FMLA_OP_FUSED_DECODE:
        a->fused_decode.kv = s->cache;
        a->fused_decode.indices = s->indices;
        a->fused_decode.extra_kv = extra->cache;
        a->fused_decode.extra_indices = extra->indices;
        break;
    default:
        a->decode.kv = s->cache;
        a->decode.block_table = s->block_table;
        a->decode.indices = s->indices;
        a->decode.extra_kv = extra->cache;
        a->decode.extra_indices = extra->indices;
        break;
    }
}

static void again_tail(checker *k, problem *p)
{
    any_args a;
    scope s = p->main, extra = p->extra;
    problem_args(p, &a);
    s.indices = longer_rows(p, &s.indices);
    if (extra.indices.rank != 0) {
        extra.indices = longer_rows(p, &extra.indices);
    }
    fmla_tensor kv = p->kv;
    use_scopes(p, &a, &s, &extra);
    if (p->c.op == FMLA_OP_SPARSE_PREFILL) {
        a.prefill.kv = kv;
    } else if (p->c.op == FMLA_OP_FUSED_PREFILL) {
        a.fused_prefill.kv = kv;
    }
    all_same(k, p, &a, "more invalid slots behind the index rows");
}

static void again_pages(checker *k, problem *p)
{
    static const int64_t pages[] = {1, 3, 16, 31, 64, 67, 256};
    static const uint8_t fills[] = {0x00, 0x7F, 0xFF};
    any_args a;
    scope s, extra = p->extra;
    rng r;
    rng_seed(&r, (uint64_t)p->c.seed + 9);
    int64_t page = pages[rng_below(&r, 7)], e_page = pages[rng_below(&r, 7)];
    uint8_t fill = fills[rng_below(&r, 3)];
    problem_args(p, &a);
    scope_repage(p, &p->main, page, fill, (uint64_t)p->c.seed + 10, &s);
    if (p->extra.cache.format != FMLA_KV_NONE) {
        scope_repage(p, &p->extra, e_page, fill, (uint64_t)p->c.seed + 11, &extra);
    }
    use_scopes(p, &a, &s, &extra);
    char how[100];
    snprintf(how, sizeof how, "pages of %d tokens in another order, bytes 0x%02X where nothing may be read", (int)page,
             fill);
    all_same(k, p, &a, how);
    scope_free(&s);
    if (p->extra.cache.format != FMLA_KV_NONE) {
        scope_free(&extra);
    }
}

/* All slots of a pool as bf16 rows first.. of kv. */
static fmla_status dequantize_pool(checker *k, problem *p, const fmla_kv_cache *pool, const fmla_tensor *kv,
                                   int64_t first)
{
    any_args a;
    memset(&a, 0, sizeof a);
    a.dequantize = (fmla_dequantize_args)FMLA_DEQUANTIZE_ARGS_INIT;
    a.dequantize.src = *pool;
    a.dequantize.dst = fmla_tensor_2d((char *)kv->data + first * 1024, FMLA_BF16, cache_slots(pool), 512);
    return engine_run(&k->engine, &p->mem, FMLA_OP_DEQUANTIZE, &a);
}

/* Fused decode is fused prefill over the dequantised tokens, main slots first, to the bit. */
static void again_prefill(checker *k, problem *p)
{
    any_args decode, a;
    const char *how = "fused prefill over the dequantised tokens";
    bool two = p->extra.cache.format != FMLA_KV_NONE;
    int64_t slots = cache_slots(&p->main.cache), more = two ? cache_slots(&p->extra.cache) : 0;
    int64_t topk = p->main.topk, width = topk + (two ? p->extra.topk : 0);
    fmla_tensor kv = memory_tensor_4(&p->mem, FMLA_BF16, 3, slots + more, 1, 512, 0, 0, 0);
    fmla_status status = dequantize_pool(k, p, &p->main.cache, &kv, 0);
    if (status == FMLA_OK && two) {
        status = dequantize_pool(k, p, &p->extra.cache, &kv, slots);
    }
    for (int i = -1; status != FMLA_OK && check_next(k, &i);) {
        check_note(k, check_status(k, &k->engine, status, how));
    }
    fmla_tensor indices = memory_tensor_4(&p->mem, FMLA_I32, 2, p->tokens, width ? width : 1, 0, 0, 0, 0xFF);
    indices.shape[1] = width;
    for (int64_t t = 0; t < p->tokens; t++) {
        int32_t *row = (int32_t *)indices.data + t * indices.stride[0];
        for (int64_t i = 0; i < scope_count(p, &p->main, t); i++) {
            row[i] = (int32_t)scope_slot(p, &p->main, t, 0, i);
        }
        for (int64_t i = 0; two && i < scope_count(p, &p->extra, t); i++) {
            int64_t slot = scope_slot(p, &p->extra, t, 0, i);
            row[topk + i] = (int32_t)(slot < 0 ? -1 : slots + slot);
        }
    }
    problem_args(p, &decode);
    memset(&a, 0, sizeof a);
    a.fused_prefill = (fmla_fused_prefill_args)FMLA_FUSED_PREFILL_ARGS_INIT;
    a.fused_prefill.softmax_scale = p->scale;
    a.fused_prefill.q = p->q;
    a.fused_prefill.kv = kv;
    a.fused_prefill.indices = indices;
    a.fused_prefill.fused = decode.fused_decode.fused;
    test_case c = p->c;
    p->c.op = FMLA_OP_FUSED_PREFILL;
    all_same(k, p, &a, how);
    p->c = c;
}

void check_again(checker *k, problem *p)
{
    const test_case *c = &p->c;
    bool sparse = case_is_mqa(c) && !case_is_dense(c);
    bool orderly = c->op <= FMLA_OP_SPARSE_PREFILL && !c->ragged && !(case_is_dense(c) && c->no_table);
    for (int i = -1; (c->again & AGAIN_THREADS) && check_next(k, &i);) {
        check_note(k, check_again_threads(k, p, k->choice->results));
    }
    for (int i = -1; (c->again & AGAIN_SLICES) && check_next(k, &i);) {
        check_note(k, again_slices(k, p, k->choice->results));
    }
    int passed = -1;
    if (!check_next(k, &passed)) {
        return;
    }
    if ((c->again & AGAIN_ORDER) && orderly) {
        again_order(k, p);
    }
    if ((c->again & AGAIN_TAIL) && sparse) {
        again_tail(k, p);
    }
    if (c->again & AGAIN_PAGES) {
        again_pages(k, p);
    }
    if ((c->again & AGAIN_PREFILL) && c->op == FMLA_OP_FUSED_DECODE) {
        again_prefill(k, p);
    }
}
