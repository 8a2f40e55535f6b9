/* SPDX-License-Identifier: MIT */
/*
 * Random problems of multi-query attention.
 */
#include "support_mqa.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"
#include "support_numbers.h"
#include "support_oracle.h"
#include "support_pool.h"

#define ROPE_DIM  64
#define POSITIONS 50

void *mqa_memory(mqa_problem *problem, size_t size)
{
    void *memory = NULL;
    assert_true(problem->memory_count < (int32_t)(sizeof problem->memory / sizeof problem->memory[0]));
    assert_int_equal(posix_memalign(&memory, 64, size > 0 ? size : 1), 0);
    problem->memory[problem->memory_count++] = memory;
    return memory;
}

void mqa_free(mqa_problem *problem)
{
    for (int32_t i = 0; i < problem->memory_count; i++) {
        free(problem->memory[i]);
    }
}

static int64_t below(uint64_t *seed, int64_t n)
{
    return (int64_t)(test_random(seed) % (uint64_t)n);
}

/* Sum of a few uniform numbers: most are small, none is large. */
static float bell(uint64_t *seed)
{
    return test_random_unit(seed) + test_random_unit(seed) + test_random_unit(seed);
}

static fmlai_pool make_pool(mqa_problem *problem, const mqa_shape *s, fmla_kv_format format, int64_t pages,
                            int64_t page_size)
{
    const fmla_format_info *info = fmlai_format_row(format);
    int64_t token_bytes = fmlai_format_token_bytes(info, s->d_qk) * s->h_kv;
    int64_t stride = page_size * token_bytes + 48;
    void *data = mqa_memory(problem, (size_t)(pages * stride));
    memset(data, 0xFF, (size_t)(pages * stride)); /* NaN in every format */
    return pool_over(data, info, pages, page_size, stride, s->d_qk, s->h_kv);
}

/* Gives values to the slots that some query token attends. */
static void fill_attended(const fmlai_mqa *p, const fmlai_token_list *list, float size, uint64_t *seed)
{
    float token_values[1024];
    int64_t slots = list->pool.num_pages * list->pool.page_size;
    uint8_t *done = calloc((size_t)(slots * p->h_kv), 1);
    assert_non_null(done);
    for (int64_t token = 0; token < p->num_tokens; token++) {
        for (int32_t head = 0; head < p->h_kv; head++) {
            for (int64_t i = 0; i < fmlai_list_count(list, p, token); i++) {
                int64_t slot = fmlai_list_slot(list, p, token, head, i);
                if (slot < 0 || done[slot * p->h_kv + head]) {
                    continue;
                }
                done[slot * p->h_kv + head] = 1;
                for (int32_t d = 0; d < p->d_qk; d++) {
                    token_values[d] = size * bell(seed);
                }
                fmlai_token_write(&list->pool, slot, head, token_values, FMLA_F32, FMLA_QUANTIZER_DEFAULT);
            }
        }
    }
    free(done);
}

static int32_t *random_lengths(mqa_problem *problem, int64_t n, int64_t most, uint64_t *seed)
{
    int32_t *lengths = mqa_memory(problem, (size_t)n * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        lengths[i] = (int32_t)(below(seed, 6) == 0   ? 0
                               : below(seed, 5) == 0 ? most + 3
                                                     : below(seed, most + 1));
    }
    return lengths;
}

static void make_indices(mqa_problem *problem, const mqa_shape *s, fmlai_token_list *list, int64_t topk,
                         uint64_t *seed)
{
    const fmlai_mqa *p = &problem->p;
    int64_t n = p->num_tokens * s->h_kv * topk, slots = list->pool.num_pages * list->pool.page_size;
    int32_t *indices = mqa_memory(problem, (size_t)n * sizeof(int32_t));
    const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, (int32_t)slots, -12345, 2147480000};
    for (int64_t i = 0; i < n; i++) {
        bool invalid = below(seed, 100) < s->invalid_percent;
        indices[i] = invalid ? bad[below(seed, 6)] : (int32_t)below(seed, slots);
    }
    list->kind = FMLAI_LIST_INDEXED;
    list->indices = indices;
    list->index_head = topk;
    list->index_inner = topk * s->h_kv;
    list->index_outer = list->index_inner * p->s_q;
    list->topk = topk;
    if (s->lengths) {
        list->length = (fmlai_lengths){.data = random_lengths(problem, p->num_tokens, topk, seed),
                                       .outer_stride = p->s_q,
                                       .inner_stride = 1};
    }
}

static void make_pages(mqa_problem *problem, const mqa_shape *s, fmlai_token_list *list, uint64_t *seed)
{
    fmlai_mqa *p = &problem->p;
    int64_t max_pages = (s->tokens + s->page_size - 1) / s->page_size + 1;
    int64_t pages = s->no_table ? s->batch * max_pages : s->batch * max_pages + 2;
    int32_t *table = mqa_memory(problem, (size_t)(s->batch * max_pages) * sizeof(int32_t));
    list->kind = FMLAI_LIST_PAGED;
    list->pool = make_pool(problem, s, s->format, pages, s->page_size);
    list->seqlens = random_lengths(problem, s->batch, s->tokens, seed);
    for (int64_t r = 0; r < s->batch; r++) {
        int32_t *length = (int32_t *)list->seqlens + r;
        *length = *length > s->tokens ? (int32_t)s->tokens : *length;
        for (int64_t i = 0; i < max_pages; i++) {
            bool needed = i * s->page_size < *length;
            table[r * max_pages + i] = needed ? (int32_t)((r * max_pages + i) * 7 % pages) : 2147480000;
        }
    }
    list->block_table = s->no_table ? NULL : table;
    list->table_stride = max_pages;
    list->max_pages = max_pages;
    list->causal = s->causal;
    if (s->bound) {
        list->bound = (fmlai_lengths){.data = random_lengths(problem, p->num_tokens, s->tokens, seed),
                                      .outer_stride = p->s_q,
                                      .inner_stride = 1};
    }
}

static void make_queries(mqa_problem *problem, const mqa_shape *s, fmla_dtype dtype, uint64_t *seed)
{
    fmlai_mqa *p = &problem->p;
    int64_t n = p->num_tokens * s->h_q * s->d_qk;
    uint16_t *q = mqa_memory(problem, (size_t)n * sizeof(uint16_t));
    for (int64_t i = 0; i < n; i++) {
        fmlai_store_f32(q, dtype, i, (s->size > 0 ? s->size : 1.0f) * bell(seed));
    }
    p->q = (fmlai_rows){
        .data = q, .dtype = dtype, .stride = {p->s_q * s->h_q * s->d_qk, s->h_q * s->d_qk, s->d_qk}};
}

static void make_fused(mqa_problem *problem, const mqa_shape *s, uint64_t *seed)
{
    fmlai_mqa *p = &problem->p;
    float *cos_sin = mqa_memory(problem, POSITIONS * ROPE_DIM * sizeof(float));
    int32_t *positions = mqa_memory(problem, (size_t)p->num_tokens * sizeof(int32_t));
    for (int32_t i = 0; i < POSITIONS * ROPE_DIM / 2; i++) {
        double angle = i / (ROPE_DIM / 2) * pow(10000.0, -2.0 * (i % (ROPE_DIM / 2)) / ROPE_DIM);
        cos_sin[i / (ROPE_DIM / 2) * ROPE_DIM + i % (ROPE_DIM / 2)] = (float)cos(angle);
        cos_sin[i / (ROPE_DIM / 2) * ROPE_DIM + ROPE_DIM / 2 + i % (ROPE_DIM / 2)] = (float)sin(angle);
    }
    for (int64_t t = 0; t < p->num_tokens; t++) {
        positions[t] = (int32_t)below(seed, POSITIONS);
    }
    p->fused = (fmlai_fused){
        .enabled = true,
        .q_norm = s->q_norm,
        .q_permuted = !s->q_plain,
        .rope_neox = s->neox,
        .eps = 1e-4f,
        .rope_dim = ROPE_DIM,
        .positions = positions,
        .position_stride = 1,
        .cos_sin = cos_sin,
        .cos_sin_rows = POSITIONS,
        .cos_sin_stride = ROPE_DIM,
        .scale_rows = (p->num_tokens + 3) / 4 * 4,
        .groups = s->h_q % 8 == 0 ? s->h_q / 8 : 1,
        .group_heads = s->h_q % 8 == 0 ? 8 : s->h_q,
    };
}

static fmlai_rows rows_for(mqa_problem *problem, fmla_dtype dtype, int64_t width)
{
    const fmlai_mqa *p = &problem->p;
    return (fmlai_rows){
        .data = mqa_memory(problem, (size_t)(p->num_tokens * p->h_q * width) * fmla_dtype_size(dtype)),
        .dtype = dtype,
        .stride = {p->s_q * p->h_q * width, p->h_q * width, width}};
}

static size_t scale_words(const fmlai_mqa *p)
{
    return (size_t)(p->fused.groups * p->fused.group_heads * p->d_v / 128 * p->fused.scale_rows);
}

static void make_results(mqa_problem *problem, fmla_dtype dtype)
{
    fmlai_mqa *p = &problem->p, *o = &problem->oracle;
    size_t code_bytes = (size_t)(p->num_tokens * p->h_q * p->d_v);
    p->lse = rows_for(problem, FMLA_F32, 1);
    p->max_logits = rows_for(problem, FMLA_F32, 1);
    if (p->fused.enabled) {
        p->fused.codes = mqa_memory(problem, code_bytes);
        p->fused.scale = mqa_memory(problem, scale_words(p) * sizeof(int32_t));
    } else {
        p->out = rows_for(problem, dtype, p->d_v);
    }
    *o = *p;
    o->out = rows_for(problem, FMLA_F64, p->d_v);
    o->lse = rows_for(problem, FMLA_F64, 1);
    o->max_logits = rows_for(problem, FMLA_F64, 1);
    o->abs_out = rows_for(problem, FMLA_F64, p->d_v);
    o->abs_logit = rows_for(problem, FMLA_F64, 1);
    if (p->fused.enabled) {
        o->fused.codes = mqa_memory(problem, code_bytes);
        o->fused.scale = mqa_memory(problem, scale_words(p) * sizeof(int32_t));
    }
}

static void cut_ragged(mqa_problem *problem, const mqa_shape *s, uint64_t *seed)
{
    int32_t *cu = mqa_memory(problem, (size_t)(s->batch + 1) * sizeof(int32_t));
    cu[0] = 0;
    for (int64_t r = 0; r < s->batch; r++) {
        cu[r + 1] = cu[r] + (int32_t)(r == s->batch - 1 ? s->s_q : below(seed, s->s_q + 1));
    }
    problem->p.cu_seqlens_q = cu;
    problem->p.num_tokens = cu[s->batch];
    problem->p.s_q = cu[s->batch];
}

void mqa_make(mqa_problem *problem, const mqa_shape *s)
{
    uint64_t seed = s->seed * 0x9E3779B97F4A7C15u + 1;
    fmla_dtype dtype = s->format == FMLA_KV_F16 ? FMLA_F16 : FMLA_BF16;
    fmlai_mqa *p = &problem->p;
    memset(problem, 0, sizeof *problem);
    problem->huge_logits = s->huge_logits;
    p->batch = s->batch;
    p->s_q = s->s_q;
    p->num_tokens = s->batch * s->s_q;
    p->h_q = s->h_q;
    p->h_kv = s->h_kv;
    p->d_qk = s->d_qk;
    p->d_v = s->d_v;
    p->scale = s->scale != 0 ? s->scale : 1 / sqrtf((float)s->d_qk);
    p->empty_lse = s->seed % 2 ? INFINITY : -INFINITY;
    p->lse_factor = s->seed % 3 ? 1.0f : 1.44269504f;
    if (s->ragged) {
        cut_ragged(problem, s, &seed);
    }
    if (s->kind == FMLAI_LIST_PAGED) {
        make_pages(problem, s, &p->main, &seed);
    } else {
        p->main.pool = make_pool(problem, s, s->format, s->tokens / s->page_size + 2, s->page_size);
        make_indices(problem, s, &p->main, s->tokens, &seed);
    }
    fill_attended(p, &p->main, s->size > 0 ? s->size : 1, &seed);
    if (s->extra != FMLA_KV_NONE) {
        p->extra.pool = make_pool(problem, s, s->extra, s->extra_topk / 3 + 2, 3);
        make_indices(problem, s, &p->extra, s->extra_topk, &seed);
        fill_attended(p, &p->extra, s->size > 0 ? s->size : 1, &seed);
    }
    make_queries(problem, s, dtype, &seed);
    if (s->sink) {
        const float values[] = {0.5f, -INFINITY, INFINITY, -1e4f, 1e4f, NAN, 3.0f};
        float *sink = mqa_memory(problem, (size_t)s->h_q * sizeof(float));
        for (int32_t h = 0; h < s->h_q; h++) {
            sink[h] = h % 2 ? bell(&seed) : values[below(&seed, 7)];
        }
        p->sink = sink;
    }
    if (s->fused) {
        make_fused(problem, s, &seed);
    }
    make_results(problem, s->out_f32 ? FMLA_F32 : dtype);
}

mqa_results mqa_redirect(mqa_problem *problem, fmlai_mqa *p)
{
    size_t rows = (size_t)(p->num_tokens * p->h_q);
    size_t out =
        p->fused.enabled ? rows * (size_t)p->d_v : rows * (size_t)p->d_v * fmla_dtype_size(p->out.dtype);
    size_t scale = p->fused.enabled ? scale_words(p) * sizeof(int32_t) : 0;
    size_t size = out + 64 + scale + 2 * rows * sizeof(float);
    uint8_t *data = mqa_memory(problem, size);
    memset(data, 0xA5, size);
    p->lse.data = data;
    p->max_logits.data = data + rows * sizeof(float);
    p->fused.scale = (int32_t *)(data + 2 * rows * sizeof(float));
    p->fused.codes = data + 2 * rows * sizeof(float) + scale;
    p->out.data = p->fused.enabled ? NULL : p->fused.codes;
    return (mqa_results){data, size};
}

static void check_scalar(const char *what, double x, double expected, double abs_logit, int64_t row)
{
    double bound = ldexp(fabs(expected), -22) + ldexp(abs_logit, -19) + ldexp(1, -23);
    if (isnan(expected) ? !isnan(x) : isinf(expected) ? x != expected : !(fabs(x - expected) <= bound)) {
        fail_msg("%s of row %lld: %.9g, expected %.9g within %.3g", what, (long long)row, x, expected, bound);
    }
}

static void check_out(const mqa_problem *problem, bool rounded_weights)
{
    const fmlai_mqa *p = &problem->p, *o = &problem->oracle;
    int unit = p->out.dtype == FMLA_BF16 ? -8 : p->out.dtype == FMLA_F16 ? -11 : -23;
    int weight = rounded_weights ? (unit > -11 ? unit : -8) : -18;
    double xy = 0, xx = 0, yy = 0;
    for (int64_t i = 0; i < p->num_tokens * p->h_q * p->d_v; i++) {
        double x = fmlai_load_f64(p->out.data, p->out.dtype, i);
        double y = ((double *)o->out.data)[i], a = ((double *)o->abs_out.data)[i];
        double abs_logit = ((double *)o->abs_logit.data)[i / p->d_v];
        double bound = 1.01 * ldexp(fabs(y), unit) + ldexp(a, weight);
        bound += problem->huge_logits ? fmin(ldexp(abs_logit, -19), 2) * a : 0;
        if (isnan(y) ? !isnan(x) : !(fabs(x - y) <= bound)) {
            fail_msg("out of row %lld, dim %lld: %.9g, expected %.9g within %.3g", (long long)(i / p->d_v),
                     (long long)(i % p->d_v), x, y, bound);
        }
        if (!isnan(y)) {
            xy += x * y;
            xx += x * x;
            yy += y * y;
        }
    }
    /* Rounding of `out` alone costs about 1.2e-6 on average, more in a small sample. */
    bool meaningful = yy > 1e-12 && !problem->huge_logits && p->num_tokens * p->h_q * p->d_v >= 8192;
    double difference = meaningful ? fabs(1 - 2 * xy / (xx + yy)) : 0;
    double limit = p->out.dtype == FMLA_BF16 ? 1.5e-6 : 3e-8;
    limit += rounded_weights ? 1.5e-6 : 0;
    if (!(difference <= limit)) {
        fail_msg("cosine difference of out: %.3g, at most %.3g", difference, limit);
    }
}

/* The 32 values behind a group of codes. */
static void decode_group(const fmlai_mqa *p, int64_t token, int32_t head, int64_t c, double *x)
{
    const fmlai_fused *f = &p->fused;
    int64_t group = head / f->group_heads, words = (int64_t)f->group_heads * p->d_v / 128;
    int64_t chunk = c * f->group_heads + head % f->group_heads;
    uint32_t word = (uint32_t)f->scale[token + group * words * f->scale_rows + chunk / 4 * f->scale_rows];
    double scale = reference_e8m0_value((int)(word >> (8 * (chunk % 4)) & 0xFF));
    const uint8_t *codes = f->codes + (token * f->groups + group) * f->group_heads * p->d_v + chunk * 32;
    for (int32_t i = 0; i < 32; i++) {
        x[i] = reference_e4m3_value(codes[i]) * scale;
    }
}

static void check_codes(const mqa_problem *problem, bool rounded_weights)
{
    const fmlai_mqa *p = &problem->p, *o = &problem->oracle;
    double xy = 0, xx = 0, yy = 0;
    for (int64_t i = 0; i < p->num_tokens * p->h_q * p->d_v / 32; i++) {
        int64_t row = i / (p->d_v / 32), c = i % (p->d_v / 32);
        double x[32], y[32];
        decode_group(p, row / p->h_q, (int32_t)(row % p->h_q), c, x);
        decode_group(o, row / p->h_q, (int32_t)(row % p->h_q), c, y);
        for (int32_t j = 0; j < 32; j++) {
            if (isnan(x[j]) != isnan(y[j])) {
                fail_msg("code of row %lld, dim %lld: %g, expected %g", (long long)row,
                         (long long)(c * 32 + j), x[j], y[j]);
            }
            if (!isnan(y[j])) {
                xy += x[j] * y[j];
                xx += x[j] * x[j];
                yy += y[j] * y[j];
            }
        }
    }
    double difference = yy < 1e-12 ? 0 : fabs(1 - 2 * xy / (xx + yy));
    if (!(difference <= (rounded_weights ? 1e-4 : 1e-6))) {
        fail_msg("cosine difference of codes: %.3g", difference);
    }
    for (size_t i = 0; i < scale_words(p); i++) {
        if ((int64_t)i % p->fused.scale_rows >= p->num_tokens && p->fused.scale[i] != 0) {
            fail_msg("scale word %zu belongs to no token and is not zero", i);
        }
    }
}

void mqa_check(const mqa_problem *problem, bool rounded_weights)
{
    const fmlai_mqa *p = &problem->p, *o = &problem->oracle;
    oracle_mqa(o);
    for (int64_t row = 0; row < p->num_tokens * p->h_q; row++) {
        double abs_logit = ((double *)o->abs_logit.data)[row] * fabs((double)p->lse_factor);
        check_scalar("lse", ((float *)p->lse.data)[row], ((double *)o->lse.data)[row], abs_logit, row);
        check_scalar("max_logits", ((float *)p->max_logits.data)[row], ((double *)o->max_logits.data)[row],
                     abs_logit, row);
    }
    if (p->fused.enabled) {
        check_codes(problem, rounded_weights);
    } else {
        check_out(problem, rounded_weights);
    }
}
