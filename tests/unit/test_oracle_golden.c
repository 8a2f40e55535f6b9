/* SPDX-License-Identifier: MIT */
/*
 * The oracle against results of the published kernels: an outside truth, within the tolerances that they publish for
 * themselves. Placement of infinities must be the same.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support_golden.h"
#include "support_oracle.h"
#include "support_pool.h"

#define MAX_COPIES 16

/* A call in a file: its parts are tensors named "<name>.<part>". */
typedef struct call {
    const char *file, *name;
    fmlai_list_kind kind;
    fmla_kv_format format, extra;
    bool prefill, sink, lengths, extra_lengths;
    double out_absolute, out_relative, lse_relative;
} call;

/* The call being described: aligned copies of its tensors, and what the oracle makes of it. */
typedef struct session {
    const call *c;
    golden *g;
    void *copies[MAX_COPIES];
    int count;
    fmlai_mqa p;
    double *out, *lse, *max_logits;
} session;

static void *keep(session *s, void *memory)
{
    assert_true(memory && s->count < MAX_COPIES);
    s->copies[s->count++] = memory;
    return memory;
}

static golden_tensor part(session *s, const char *name)
{
    char full[64];
    snprintf(full, sizeof full, "%s.%s", s->c->name, name);
    golden_tensor t = golden_get(s->g, full);
    size_t bytes = (size_t)t.count * (t.dtype == FMLA_U8 ? 1 : t.dtype == FMLA_BF16 || t.dtype == FMLA_F16 ? 2 : 4);
    void *copy = keep(s, malloc(bytes));
    memcpy(copy, t.data, bytes);
    t.data = copy;
    return t;
}

static double *doubles(session *s, int64_t count)
{
    return keep(s, calloc((size_t)count, sizeof(double)));
}

/* Pages of a cache: plain [pages, P, heads, d], or bytes [pages, bytes of a page]. */
static fmlai_pool cache(session *s, const char *name, fmla_kv_format format, int64_t page_size)
{
    golden_tensor t = part(s, name);
    const fmla_format_info *info = fmlai_format_row(format);
    void *data = (void *)(uintptr_t)t.data;
    if (info->layout != FMLA_LAYOUT_PLAIN) {
        return pool_over(data, info, t.shape[0], page_size, t.shape[1], 0, 1);
    }
    int64_t p = s->c->prefill ? 1 : t.shape[1];
    int32_t heads = (int32_t)t.shape[t.rank - 2];
    s->p.h_kv = heads;
    return pool_over(data, info, t.shape[0], p, 0, (int32_t)t.shape[t.rank - 1], heads);
}

static void describe_paged(session *s)
{
    fmlai_token_list *list = &s->p.main;
    golden_tensor table = part(s, "block_table");
    list->kind = FMLAI_LIST_PAGED;
    list->pool = cache(s, "k_cache", s->c->format, 0);
    list->block_table = (const int32_t *)(const void *)table.data;
    list->table_stride = list->max_pages = table.shape[1];
    list->seqlens = (const int32_t *)(const void *)part(s, "cache_seqlens").data;
    list->causal = *(const int32_t *)(const void *)part(s, "causal").data != 0;
    s->p.scale = 1.0f / 24;
}

static void describe_indexed(session *s, fmlai_token_list *list, const char *indices, const char *lengths)
{
    golden_tensor t = part(s, indices);
    list->kind = FMLAI_LIST_INDEXED;
    list->indices = (const int32_t *)(const void *)t.data;
    list->topk = t.shape[2];
    list->index_inner = list->topk;
    list->index_outer = list->topk * s->p.s_q;
    if (lengths) {
        list->length.data = (const int32_t *)(const void *)part(s, lengths).data;
        list->length.per_request = !s->c->prefill;
        list->length.outer_stride = list->length.inner_stride = 1;
    }
}

static void describe_sparse(session *s)
{
    const call *c = s->c;
    describe_indexed(s, &s->p.main, "indices", c->lengths ? "topk_length" : NULL);
    if (c->prefill) {
        s->p.main.pool = cache(s, "kv", c->format, 1);
        s->p.scale = (float)(1 / sqrt(s->p.d_qk));
        return;
    }
    const int32_t *meta = (const int32_t *)(const void *)part(s, "meta").data;
    s->p.main.pool = cache(s, "kv_page_bytes", c->format, meta[1]);
    s->p.scale = *(const float *)(const void *)part(s, "softmax_scale").data;
    if (c->extra != FMLA_KV_NONE) {
        describe_indexed(s, &s->p.extra, "extra_indices", c->extra_lengths ? "extra_topk_length" : NULL);
        s->p.extra.pool = cache(s, "extra_kv_page_bytes", c->extra, meta[2]);
    }
}

/* [batch, s_q, heads, d] or, prefill, [s_q, heads, d]. lse of decode is [batch, heads, s_q]. */
static void describe(session *s)
{
    golden_tensor q = part(s, "q");
    int64_t batch = s->c->prefill ? 1 : q.shape[0];
    int64_t s_q = q.shape[q.rank - 3], h = q.shape[q.rank - 2], d = q.shape[q.rank - 1];
    int64_t rows = batch * s_q * h;
    fmlai_mqa *p = &s->p;

    *p = (fmlai_mqa){.batch = batch, .s_q = s_q, .num_tokens = batch * s_q, .h_q = (int32_t)h, .h_kv = 1};
    p->d_qk = (int32_t)d;
    p->d_v = 512;
    p->empty_lse = INFINITY;
    p->lse_factor = 1;
    p->q = (fmlai_rows){.data = (void *)(uintptr_t)q.data, .dtype = q.dtype, .stride = {s_q * h * d, h * d, d}};
    s->out = doubles(s, rows * 512);
    s->lse = doubles(s, rows);
    s->max_logits = doubles(s, rows);
    p->out = (fmlai_rows){.data = s->out, .dtype = FMLA_F64, .stride = {s_q * h * 512, h * 512, 512}};
    p->lse = (fmlai_rows){.data = s->lse, .dtype = FMLA_F64, .stride = {s_q * h, 1, s_q}};
    if (s->c->prefill) {
        p->lse.stride[1] = h;
        p->lse.stride[2] = 1;
    }
    p->max_logits = p->lse;
    p->max_logits.data = s->max_logits;
    if (s->c->sink) {
        p->sink = (const float *)(const void *)part(s, "attn_sink").data;
    }
    if (s->c->kind == FMLAI_LIST_PAGED) {
        describe_paged(s);
    } else {
        describe_sparse(s);
    }
}

static void compare(session *s, const char *name, const double *values, double absolute, double relative)
{
    golden_tensor t = part(s, name);
    for (int64_t i = 0; i < t.count; i++) {
        double published = fmlai_load_f64(t.data, t.dtype, i);
        double error = fabs(values[i] - published);
        if (values[i] != published && !(error < absolute) && !(error / (fabs(values[i]) + 1e-6) < relative)) {
            fail_msg("%s.%s[%lld] is %.9g, here %.9g", s->c->name, name, (long long)i, published, values[i]);
        }
    }
}

static void check_call(const call *c)
{
    session s = {.c = c, .g = golden_open(c->file)};
    describe(&s);
    oracle_mqa(&s.p);
    compare(&s, "out", s.out, c->out_absolute, c->out_relative);
    compare(&s, "lse", s.lse, 1e-6, c->lse_relative);
    if (c->prefill) {
        compare(&s, "max_logits", s.max_logits, 1e-6, c->lse_relative);
    }
    for (int i = 0; i < s.count; i++) {
        free(s.copies[i]);
    }
    golden_close(s.g);
}

static void dense_decode(void **state)
{
    static const call calls[2] = {{.name = "mqa_causal", .format = FMLA_KV_BF16},
                                  {.name = "gqa", .format = FMLA_KV_F16}};
    (void)state;
    for (int i = 0; i < 2; i++) {
        call c = calls[i];
        c.file = "dense_decode_a.safetensors";
        c.kind = FMLAI_LIST_PAGED;
        c.out_absolute = 8e-4;
        c.out_relative = 2.01 / 128;
        c.lse_relative = 8.01 / 65536;
        check_call(&c);
    }
}

static void sparse_decode(void **state)
{
    static const call calls[4] = {
        {.name = "v32_h64", .format = FMLA_KV_V32, .sink = true},
        {.name = "v32_h128", .format = FMLA_KV_V32},
        {.name = "v4_h128", .format = FMLA_KV_V4, .sink = true},
        {.name = "v4_h64_extra",
         .format = FMLA_KV_V4,
         .extra = FMLA_KV_V4,
         .sink = true,
         .lengths = true,
         .extra_lengths = true},
    };
    (void)state;
    for (int i = 0; i < 4; i++) {
        call c = calls[i];
        c.file = "sparse_decode_a.safetensors";
        c.kind = FMLAI_LIST_INDEXED;
        c.out_absolute = 1e-3;
        c.out_relative = 2.01 / 128;
        c.lse_relative = 8.01 / 65536;
        check_call(&c);
    }
}

static void sparse_prefill(void **state)
{
    static const char *const names[2] = {"d512_h64", "d576_h64"};
    (void)state;
    for (int i = 0; i < 2; i++) {
        call c = {.file = "sparse_prefill_a.safetensors",
                  .name = names[i],
                  .kind = FMLAI_LIST_INDEXED,
                  .format = FMLA_KV_BF16,
                  .prefill = true,
                  .sink = true,
                  .lengths = true,
                  .out_absolute = 8e-4,
                  .out_relative = 3.01 / 128,
                  .lse_relative = 2.01 / 65536};
        check_call(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dense_decode),
        cmocka_unit_test(sparse_decode),
        cmocka_unit_test(sparse_prefill),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
