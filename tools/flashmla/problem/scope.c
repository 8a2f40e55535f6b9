/* SPDX-License-Identifier: MIT */
/* scope.c: pools of tokens, their block tables and index lists. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "problem/problem.h"
#include "problem/numbers.h"

#define RECORDS_MAX 768 /* different tokens in a pool; longer ones repeat them */

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Tokens of each request: fixed; 1: bell-shaped around s_kv; 2: s_kv / 4 to 2 s_kv; half of them none if asked. */
static void draw_seqlens(const problem *p, scope *s, rng *r, int64_t s_kv)
{
    s->seqlen = xcalloc((size_t)p->batch + 1, sizeof *s->seqlen);
    for (int64_t i = 0; i < p->batch; i++) {
        int64_t n = s_kv;
        if (p->c.varlen == 2) {
            n = s_kv / 4 + rng_below(r, 2 * s_kv - s_kv / 4 + 1);
        } else if (p->c.varlen) {
            n = (int64_t)((double)s_kv * (1 + 0.5 * rng_normal(r)));
            n = n < p->c.s_q ? p->c.s_q : n;
            n = n > 2 * s_kv ? 2 * s_kv : n;
        }
        if (p->c.zero_len && rng_uniform(r) < 0.5) {
            n = 0;
        }
        s->seqlen[i] = n;
    }
}

/* Which page holds tokens j * P .. of request i: all pages of the pool in random order, or in plain order. */
static int64_t lay_pages(const problem *p, scope *s, rng *r, int64_t page, bool in_order)
{
    int64_t pages = 0;
    s->pages_max = 1;
    for (int64_t i = 0; i < p->batch; i++) {
        int64_t n = ceil_div(s->seqlen[i], page);
        pages += n;
        s->pages_max = n > s->pages_max ? n : s->pages_max;
    }
    if (in_order) {
        pages = p->batch * s->pages_max;
    } else {
        pages += 3; /* three that nobody owns */
    }
    int64_t *order = xmalloc((size_t)pages * sizeof *order);
    s->page_at = xcalloc((size_t)(p->batch * s->pages_max) + 1, sizeof *s->page_at);
    rng_permutation(r, order, pages);
    for (int64_t i = 0, next = 0; i < p->batch; i++) {
        for (int64_t j = 0; j < s->pages_max; j++) {
            bool owned = j < ceil_div(s->seqlen[i], page);
            s->page_at[i * s->pages_max + j] = in_order ? i * s->pages_max + j : owned ? order[next++] : -1;
        }
    }
    free(order);
    return pages;
}

static int64_t token_slot(const scope *s, int64_t request, int64_t j)
{
    return s->page_at[request * s->pages_max + j / s->cache.page_size] * s->cache.page_size + j % s->cache.page_size;
}

static void make_table(problem *p, scope *s)
{
    int64_t width = s->pages_max + 3;
    s->block_table = memory_tensor_4(&p->mem, FMLA_I32, 2, p->batch, width, 0, 0, (int)p->c.pad, 0);
    for (int64_t i = 0; i < p->batch; i++) {
        for (int64_t j = 0; j < width; j++) {
            int64_t page = j < s->pages_max ? s->page_at[i * s->pages_max + j] : -1;
            tensor_set(&s->block_table, i, j, 0, 0, page >= 0 ? (double)page : TABLE_RUBBISH);
        }
    }
}

/* A tensor with one number for each query token, in the operation's shape. */
static fmla_tensor per_token(problem *p, int64_t width, int pad)
{
    if (p->c.op == FMLA_OP_DENSE_DECODE || p->c.op == FMLA_OP_SPARSE_DECODE) {
        return p->c.ragged ? memory_tensor_4(&p->mem, FMLA_I32, width ? 2 : 1, p->tokens, width, 0, 0, pad, 0)
                           : memory_tensor_4(&p->mem, FMLA_I32, width ? 3 : 2, p->batch, p->c.s_q, width, 0, pad, 0);
    }
    return memory_tensor_4(&p->mem, FMLA_I32, width ? 2 : 1, p->tokens, width, 0, 0, pad, 0);
}

/* Element offset of query token t in such a tensor. */
static int64_t token_offset(const problem *p, const fmla_tensor *t, int64_t token, bool two_dims)
{
    return two_dims ? p->request[token] * t->stride[0] + p->inner[token] * t->stride[1] : token * t->stride[0];
}

static bool is_decode(const problem *p)
{
    return p->c.op == FMLA_OP_DENSE_DECODE || p->c.op == FMLA_OP_SPARSE_DECODE;
}

static int32_t *index_row(const problem *p, const scope *s, int64_t token, int64_t kv_head)
{
    bool two_dims = is_decode(p) && !p->c.ragged;
    int64_t offset = token_offset(p, &s->indices, token, two_dims);
    if (p->c.op == FMLA_OP_SPARSE_PREFILL && s->indices.rank == 3) {
        offset += kv_head * s->indices.stride[1];
    }
    return (int32_t *)s->indices.data + offset;
}

int64_t scope_count(const problem *p, const scope *s, int64_t token)
{
    int64_t request = p->request[token];
    if (s->cache.format == FMLA_KV_NONE) {
        return 0;
    }
    if (case_is_dense(&p->c)) {
        int64_t n = s->seqlen[request];
        if (p->c.bound) {
            int32_t bound = ((const int32_t *)s->bound.data)[token_offset(p, &s->bound, token, !p->c.ragged)];
            n = min64(n, bound);
        } else if (p->c.causal) {
            n = n - p->n_q[request] + p->inner[token] + 1;
        }
        return n < 0 ? 0 : n;
    }
    int64_t n = s->topk;
    if (s->length.rank != 0) {
        const int32_t *lengths = s->length.data;
        bool per_request = is_decode(p) && (s == &p->main ? p->c.lengths : p->c.e_lengths) == 1;
        bool two_dims = is_decode(p) && !per_request && !p->c.ragged;
        int64_t given = per_request ? lengths[request] : lengths[token_offset(p, &s->length, token, two_dims)];
        n = given < 0 ? 0 : min64(n, given);
    }
    return n;
}

int64_t scope_slot(const problem *p, const scope *s, int64_t token, int64_t kv_head, int64_t i)
{
    if (case_is_dense(&p->c)) {
        return token_slot(s, p->request[token], i);
    }
    int64_t entry = index_row(p, s, token, kv_head)[i];
    return entry >= 0 && entry < cache_slots(&s->cache) ? entry : -1;
}

int64_t scope_attended(const problem *p, const scope *s, int64_t token, int64_t kv_head)
{
    int64_t count = scope_count(p, s, token), slots = cache_slots(&s->cache), attended = 0;
    if (case_is_dense(&p->c) || count == 0) {
        return count;
    }
    const int32_t *row = index_row(p, s, token, kv_head);
    for (int64_t i = 0; i < count; i++) {
        attended += row[i] >= 0 && row[i] < slots;
    }
    return attended;
}

/* Numbers that are not slots of this pool. */
static int32_t invalid_index(rng *r, int64_t slots)
{
    const int64_t candidates[] = {-1, -1, -1, -2, INT_MIN, -123456, slots, slots + 1, 2147480000, INT_MAX};
    return (int32_t)candidates[rng_below(r, 10)];
}

/* One index row: valid entries, invalid ones between or behind them, and slots nobody may read beyond the length. */
static void draw_row(problem *p, scope *s, rng *r, int64_t token, int64_t kv_head, int64_t length, bool none)
{
    int64_t n = s->seqlen[p->request[token]];
    int64_t slots = cache_slots(&s->cache);
    int64_t valid = none ? 0 : p->c.repeated && n > 0 ? s->topk - s->topk / 32 : min64(s->topk, n);
    int64_t *chosen = xmalloc((size_t)(s->topk + 1) * sizeof *chosen);
    int32_t *row = index_row(p, s, token, kv_head);
    if (p->c.repeated && n > 0) {
        for (int64_t i = 0; i < valid; i++) {
            chosen[i] = rng_below(r, n);
        }
    } else {
        rng_subset(r, chosen, valid, n);
    }
    for (int64_t i = 0; i < s->topk; i++) {
        row[i] = i < valid ? (int32_t)token_slot(s, p->request[token], chosen[i]) : invalid_index(r, slots);
    }
    for (int64_t i = s->topk - 1; i > 0 && token % 2 == 1; i--) {
        int64_t j = rng_below(r, i + 1);
        int32_t t = row[i];
        row[i] = row[j];
        row[j] = t;
    }
    for (int64_t i = 0; i < length; i++) {
        if (row[i] >= 0 && row[i] < slots) {
            s->used[row[i]] = 1;
        }
    }
    free(chosen);
}

/* Beyond a row's length: a slot inside the pool that holds NaN. */
static void poison_tail(problem *p, scope *s, int64_t token, int64_t kv_head, int64_t length)
{
    int32_t *row = index_row(p, s, token, kv_head);
    int64_t slots = cache_slots(&s->cache);
    int64_t slot = slots - 1;
    while (slot >= 0 && s->used[slot]) {
        slot--;
    }
    for (int64_t i = length; i < s->topk && slot >= 0; i++) {
        row[i] = (int32_t)slot;
    }
}

static void make_lengths(problem *p, scope *s, rng *r, int64_t kind)
{
    bool per_request = is_decode(p) && kind == 1;
    if (kind == 0) {
        return;
    }
    s->length = per_request ? memory_tensor_4(&p->mem, FMLA_I32, 1, p->batch, 0, 0, 0, 0, 0) : per_token(p, 0, 0);
    int64_t n = per_request ? p->batch : p->tokens;
    for (int64_t i = 0; i < n; i++) {
        double u = rng_uniform(r);
        int64_t length = u < 0.1 ? 0 : u < 0.2 ? s->topk : rng_below(r, s->topk + 1);
        if (p->c.zero_len && u < 0.4) {
            length = 0;
        }
        ((int32_t *)s->length.data)[i] = (int32_t)length;
    }
}

static void make_indices(problem *p, scope *s, rng *r, bool is_extra)
{
    int64_t heads = p->c.op == FMLA_OP_SPARSE_PREFILL ? p->c.h_kv : 1;
    if (p->c.op == FMLA_OP_SPARSE_PREFILL && (heads > 1 || p->c.seed % 2 == 0)) {
        s->indices = memory_tensor_4(&p->mem, FMLA_I32, 3, p->tokens, heads, s->topk, 0, (int)p->c.pad, 0x7F);
    } else {
        s->indices = per_token(p, s->topk == 0 ? 1 : s->topk, (int)p->c.pad);
        s->indices.shape[s->indices.rank - 1] = s->topk;
    }
    make_lengths(p, s, r, is_extra ? p->c.e_lengths : p->c.lengths);
    for (int64_t t = 0; t < p->tokens; t++) {
        bool none =
            p->c.invalid == 1 || (p->c.invalid == 2 && rng_uniform(r) < 0.25) || (p->c.invalid == 3 && is_extra);
        for (int64_t h = 0; h < heads; h++) {
            draw_row(p, s, r, t, h, scope_count(p, s, t), none);
        }
    }
    for (int64_t t = 0; t < p->tokens; t++) {
        for (int64_t h = 0; h < heads && (p->c.seed + t) % 3 != 0; h++) {
            poison_tail(p, s, t, h, scope_count(p, s, t));
        }
    }
}

static void make_dense(problem *p, scope *s, rng *r)
{
    s->seqlens = memory_tensor_4(&p->mem, FMLA_I32, 1, p->batch, 0, 0, 0, 0, 0);
    for (int64_t i = 0; i < p->batch; i++) {
        ((int32_t *)s->seqlens.data)[i] = (int32_t)s->seqlen[i];
    }
    if (!p->c.no_table) {
        make_table(p, s);
    }
    if (p->c.bound) {
        s->bound = per_token(p, 0, 0);
        for (int64_t t = 0; t < p->tokens; t++) {
            ((int32_t *)s->bound.data)[token_offset(p, &s->bound, t, !p->c.ragged)] =
                (int32_t)rng_below(r, s->seqlen[p->request[t]] + 4);
        }
    }
    for (int64_t t = 0; t < p->tokens; t++) {
        for (int64_t j = scope_count(p, s, t) - 1; j >= 0; j--) {
            int64_t slot = token_slot(s, p->request[t], j);
            if (s->used[slot]) {
                break; /* and so are all tokens before it */
            }
            s->used[slot] = 1;
        }
    }
}

/* NaN for tokens that are attended: dense: the last token of each request, which few query tokens see; else one in 50.
 */
static void plant_nan(problem *p, scope *s, rng *r)
{
    uint8_t *record = xmalloc((size_t)cache_record_bytes(&s->cache));
    memset(record, 0xFF, (size_t)cache_record_bytes(&s->cache));
    for (int64_t i = 0; i < cache_slots(&s->cache); i++) {
        bool chosen = s->used[i] > 0 && rng_below(r, 50) == 0;
        if (case_is_dense(&p->c)) {
            chosen = false;
            for (int64_t j = 0; j < p->batch && s->used[i] > 0; j++) {
                chosen = chosen || (s->seqlen[j] > 0 && token_slot(s, j, s->seqlen[j] - 1) == i);
            }
        }
        if (chosen) {
            s->used[i] = -s->used[i];
            cache_put(&s->cache, i, record);
        }
    }
    free(record);
}

/* Writes a random record into every slot that is attended. */
static int fill_used(problem *p, scope *s, rng *r, engine *maker)
{
    int64_t slots = cache_slots(&s->cache);
    int64_t needed = 0;
    for (int64_t i = 0; i < slots; i++) {
        needed += s->used[i] != 0;
    }
    int64_t n = needed < RECORDS_MAX ? needed : RECORDS_MAX;
    if (n == 0) {
        return CLI_OK;
    }
    if (cache_records(maker, r, &s->cache, &p->c, n, &s->records) != CLI_OK) {
        return CLI_ERROR;
    }
    int64_t size = cache_record_bytes(&s->cache);
    int64_t next = 0;
    for (int64_t i = 0; i < slots; i++) {
        if (s->used[i]) {
            int64_t record = next < n ? next : rng_below(r, n);
            next++;
            s->used[i] = 1 + record;
            cache_put(&s->cache, i, s->records + record * size);
        }
    }
    if (p->c.nan) {
        plant_nan(p, s, r);
    }
    return CLI_OK;
}

int scope_build(problem *p, scope *s, rng *r, engine *maker, bool is_extra)
{
    const test_case *c = &p->c;
    int64_t format = is_extra ? c->extra : c->format;
    bool prefill = case_is_prefill(c);
    s->topk = case_is_dense(c) ? 0 : is_extra ? c->e_topk : c->topk;
    draw_seqlens(p, s, r, is_extra ? c->e_kv : c->s_kv);
    int64_t page = prefill ? (c->s_kv ? c->s_kv : 1) : is_extra ? c->e_page : c->page;
    int64_t pages = lay_pages(p, s, r, page, prefill || (case_is_dense(c) && c->no_table));
    s->cache =
        cache_make(&p->mem, format, c->d_qk, is_extra ? 1 : c->h_kv, pages, page, (int)c->pad, c->misalign, 0xFF);
    s->used = xcalloc((size_t)cache_slots(&s->cache) + 1, sizeof *s->used);
    if (case_is_dense(c)) {
        make_dense(p, s, r);
    } else {
        make_indices(p, s, r, is_extra);
    }
    return fill_used(p, s, r, maker);
}

void scope_free(scope *s)
{
    free(s->used);
    free(s->page_at);
    free(s->records);
    free(s->seqlen);
    memset(s, 0, sizeof *s);
}

/* The new index lists: old slots through map, invalid numbers stay invalid in the new pool. */
static void map_indices(problem *p, const scope *from, scope *s, const int64_t *map)
{
    int64_t elements = (int64_t)(tensor_span(&from->indices) / sizeof(int32_t));
    s->indices.data = memory_take(&p->mem, tensor_span(&from->indices), 0);
    for (int64_t i = 0; i < elements; i++) {
        int64_t entry = ((const int32_t *)from->indices.data)[i];
        bool valid = entry >= 0 && entry < cache_slots(&from->cache);
        ((int32_t *)s->indices.data)[i] = (int32_t)(valid ? map[entry] : entry < 0 ? entry : INT_MAX);
    }
}

void scope_repage(problem *p, const scope *from, int64_t page, uint8_t fill, uint64_t seed, scope *s)
{
    rng r;
    rng_seed(&r, seed);
    memset(s, 0, sizeof *s);
    int64_t old_slots = cache_slots(&from->cache);
    int64_t record = cache_record_bytes(&from->cache);
    *s = *from;
    s->records = NULL;
    s->seqlen = xmalloc((size_t)(p->batch + 1) * sizeof *s->seqlen);
    memcpy(s->seqlen, from->seqlen, (size_t)(p->batch + 1) * sizeof *s->seqlen);
    int64_t pages = lay_pages(p, s, &r, page, false);
    int64_t least = ceil_div(old_slots, page) + 1;
    pages = pages < least ? least : pages;
    /* Prefill sees the pool as one tensor: no room between its pages. */
    int pad = !p->c.pad && !case_is_prefill(&p->c);
    s->cache = cache_make(&p->mem, from->cache.format, p->c.d_qk, from->cache.num_heads, pages, page, pad, 0, fill);
    s->used = xcalloc((size_t)cache_slots(&s->cache) + 1, sizeof *s->used);
    uint8_t *bytes = xmalloc((size_t)record);
    int64_t *map = xmalloc((size_t)cache_slots(&s->cache) * sizeof *map);
    rng_permutation(&r, map, cache_slots(&s->cache));
    if (case_is_dense(&p->c)) {
        for (int64_t i = 0; i < p->batch; i++) {
            for (int64_t j = 0; j < s->seqlen[i]; j++) {
                map[token_slot(from, i, j)] = token_slot(s, i, j);
            }
        }
        make_table(p, s);
    } else {
        map_indices(p, from, s, map);
    }
    for (int64_t i = 0; i < old_slots; i++) {
        if (from->used[i]) {
            cache_get(&from->cache, i, bytes);
            cache_put(&s->cache, map[i], bytes);
            s->used[map[i]] = from->used[i];
        }
    }
    free(bytes);
    free(map);
}
