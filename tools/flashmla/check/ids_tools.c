/* SPDX-License-Identifier: MIT */
/* ids_tools.c: what the checks of named faults share: problems to bend, runs to compare. */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "check/ids.h"
#include "problem/numbers.h"

bool ids_bad(verdict *sum, verdict part)
{
    if (part == VERDICT_PASSED || part == VERDICT_FAILED || part == VERDICT_BROKEN) {
        *sum = part;
    }
    return part == VERDICT_FAILED || part == VERDICT_BROKEN;
}

const char *ids_dense_format(int number)
{
    static const char *const texts[IDS_DENSE_FORMATS] = {
        "format=bf16,d_qk=576", "dtype=f16,format=f16,d_qk=576", "format=v32,d_qk=576", "format=v4,d_qk=512",
        "format=v41,d_qk=512"};
    return texts[number];
}

static int parse(test_case *c, const char *format, va_list arguments)
{
    char text[512], error[256];
    vsnprintf(text, sizeof text, format, arguments);
    return case_parse(c, text, error, sizeof error) == 0 ? CLI_OK : cli_error("%s", error);
}

verdict ids_case(checker *k, const char *format, ...)
{
    test_case c;
    char text[512], why[512];
    va_list arguments;
    va_start(arguments, format);
    int status = parse(&c, format, arguments);
    va_end(arguments);
    if (status != CLI_OK) {
        return VERDICT_BROKEN;
    }
    check_case(k, &c);
    verdict v = k->choices[0].verdict; /* a named fault is for one choice */
    if (v == VERDICT_FAILED) {
        case_print(&c, text, sizeof text);
        snprintf(why, sizeof why, "%.500s", k->why);
        check_fail(k, "%s: %s", text, why);
    }
    return v;
}

verdict trial_make(checker *k, trial *t, const char *format, ...)
{
    test_case c;
    va_list arguments;
    memset(t, 0, sizeof *t);
    va_start(arguments, format);
    int status = parse(&c, format, arguments);
    va_end(arguments);
    if (status != CLI_OK || problem_build(&t->p, &c, &k->oracle) != CLI_OK) {
        return VERDICT_BROKEN;
    }
    problem_args(&t->p, &t->args);
    return VERDICT_PASSED;
}

void trial_free(trial *t)
{
    free(t->bits);
    problem_free(&t->p);
    memset(t, 0, sizeof *t);
}

verdict trial_run(checker *k, trial *t)
{
    free(t->bits);
    t->bits = NULL;
    return check_run(k, &k->engine, &t->p, &t->args, &t->bits, &t->size);
}

verdict trial_same(checker *k, trial *t, const char *how)
{
    uint8_t *bits = NULL;
    size_t size = 0;
    char why[512];
    verdict v = check_run(k, &k->engine, &t->p, &t->args, &bits, &size);
    if (v == VERDICT_PASSED) {
        v = check_same(k, &t->p, bits, t->bits, size, how);
    } else if (v == VERDICT_FAILED) {
        snprintf(why, sizeof why, "%.500s", k->why);
        check_fail(k, "%s: %s", how, why);
    }
    free(bits);
    return v;
}

verdict trial_compare(checker *k, trial *t, const char *how)
{
    const fmla_tensor *outputs[4];
    int n = problem_outputs(&t->p, outputs);
    size_t at = 0;
    uint8_t *bits = xmalloc(t->size);
    for (int i = 0; i < n; i++) {
        at += tensor_pack(outputs[i], bits + at);
    }
    verdict v = check_same(k, &t->p, bits, t->bits, t->size, how);
    free(bits);
    return v;
}

verdict trial_judge(checker *k, trial *t)
{
    return case_is_mqa(&t->p.c) ? check_attention_outputs(k, &t->p, NULL) : check_mha_outputs(k, &t->p);
}

verdict trial_run_and_judge(checker *k, trial *t)
{
    verdict v = trial_run(k, t);
    return v == VERDICT_PASSED ? trial_judge(k, t) : v;
}

verdict ids_call(checker *k, memory *m, fmla_operation op, const any_args *a, const char *how)
{
    fmla_status status = engine_run(&k->engine, m, op, a);
    if (status != FMLA_OK) {
        return check_status(k, &k->engine, status, how);
    }
    return memory_intact(m) ? VERDICT_PASSED
                            : check_fail(k, "%s: guard bytes around a tensor were overwritten", how);
}

fmla_tensor ids_rows(const fmla_tensor *t, int32_t dim, int64_t first, int64_t n)
{
    fmla_tensor rows = *t;
    if (t->rank > dim) {
        rows.data = (char *)t->data + first * t->stride[dim] * (int64_t)fmla_dtype_size((fmla_dtype)t->dtype);
        rows.shape[dim] = n;
    }
    return rows;
}

fmla_tensor ids_copy(memory *m, const fmla_tensor *t)
{
    fmla_tensor copy = memory_tensor(m, (fmla_dtype)t->dtype, t->rank, t->shape, 0, 0);
    tensor_copy(&copy, t);
    return copy;
}

/* The next index of a tensor's elements in row-major order; false behind the last. */
static bool next_index(const fmla_tensor *t, int64_t *index)
{
    for (int32_t d = t->rank - 1; d >= 0; d--) {
        if (++index[d] < t->shape[d]) {
            return true;
        }
        index[d] = 0;
    }
    return false;
}

verdict ids_near(checker *k, const fmla_tensor *a, const fmla_tensor *b, double absolute, double relative,
                 const char *how)
{
    int64_t i[FMLA_MAX_RANK] = {0};
    if (tensor_elements(a) == 0) {
        return VERDICT_PASSED;
    }
    do {
        double x = tensor_get(a, i[0], i[1], i[2], i[3]), y = tensor_get(b, i[0], i[1], i[2], i[3]);
        bool alike = isfinite(x) && isfinite(y) ? fabs(x - y) <= absolute + relative * fabs(y)
                                                : x == y || (isnan(x) && isnan(y));
        if (!alike) {
            return check_fail(k, "%s: element [%lld, %lld, %lld, %lld] is %.9g, not %.9g", how,
                              (long long)i[0], (long long)i[1], (long long)i[2], (long long)i[3], x, y);
        }
    } while (next_index(a, i));
    return VERDICT_PASSED;
}

/* Keys are at most 1 (data_kind 0 and 1): weights that were rounded once in each run, and the output's own
 * rounding. */
verdict ids_near_out(checker *k, const fmla_tensor *a, const fmla_tensor *b, const char *how)
{
    double u = b->dtype == FMLA_BF16 ? 0x1p-8 : b->dtype == FMLA_F16 ? 0x1p-11 : 0x1p-22;
    return ids_near(k, a, b, k->class == CLASS_S ? 0x1p-15 : 0x1p-9, 2.02 * u, how);
}

verdict ids_near_lse(checker *k, const fmla_tensor *a, const fmla_tensor *b, const char *how)
{
    return ids_near(k, a, b, 0x1p-17, 0x1p-18, how);
}

verdict ids_all(checker *k, const fmla_tensor *t, double x, const char *how)
{
    int64_t i[FMLA_MAX_RANK] = {0};
    if (tensor_elements(t) == 0) {
        return VERDICT_PASSED;
    }
    do {
        double y = tensor_get(t, i[0], i[1], i[2], i[3]);
        if (!(x == y || (isnan(x) && isnan(y)))) {
            return check_fail(k, "%s: element [%lld, %lld, %lld, %lld] is %.9g, not %.9g", how,
                              (long long)i[0], (long long)i[1], (long long)i[2], (long long)i[3], y, x);
        }
    } while (next_index(t, i));
    return VERDICT_PASSED;
}

bool ids_same_bits(const fmla_tensor *a, const fmla_tensor *b)
{
    size_t size = (size_t)tensor_elements(a) * fmla_dtype_size((fmla_dtype)a->dtype);
    uint8_t *x = xmalloc(size), *y = xmalloc(size);
    tensor_pack(a, x);
    tensor_pack(b, y);
    bool same = memcmp(x, y, size) == 0;
    free(x);
    free(y);
    return same;
}

int32_t *ids_index_row(const problem *p, const scope *s, int64_t token)
{
    bool batched = s->indices.rank == 3 && p->c.op == FMLA_OP_SPARSE_DECODE;
    int64_t at = batched ? tensor_offset(&s->indices, p->request[token], p->inner[token], 0, 0)
                         : tensor_offset(&s->indices, token, 0, 0, 0);
    return (int32_t *)s->indices.data + at;
}

void ids_fill_slot(const fmla_kv_cache *cache, int64_t slot, uint16_t pattern)
{
    int64_t size = cache_record_bytes(cache);
    uint8_t *record = xmalloc((size_t)size);
    for (int64_t i = 0; i < size; i++) {
        record[i] = (uint8_t)(i % 2 ? pattern >> 8 : pattern);
    }
    cache_put(cache, slot, record);
    free(record);
}

void ids_fill_unread(const scope *s, uint16_t pattern)
{
    for (int64_t i = 0; i < cache_slots(&s->cache); i++) {
        if (!s->used[i]) {
            ids_fill_slot(&s->cache, i, pattern);
        }
    }
}
