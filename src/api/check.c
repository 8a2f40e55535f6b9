/* SPDX-License-Identifier: MIT */
/* check.c: tensors against patterns, numbers against ranges. See check.h. */
#include "check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void fmlai_reject(fmlai_checker *c, fmla_status status, const char *format, ...)
{
    if (fmlai_failed(c)) {
        return;
    }
    c->status = status;
    va_list list;
    va_start(list, format);
    fmlai_fail_list(c->error, status, format, list);
    va_end(list);
}

/* ---- words ----------------------------------------------------------------------------------------------------- */

const char *fmlai_shape_text(char *text, size_t size, const fmla_tensor *t)
{
    size_t used = 0;
    int32_t rank = t->rank < FMLA_MAX_RANK ? t->rank : FMLA_MAX_RANK;
    used += (size_t)snprintf(text, size, "[");
    for (int32_t i = 0; i < rank && used < size; i++) {
        used += (size_t)snprintf(text + used, size - used, "%s%lld", i == 0 ? "" : ", ", (long long)t->shape[i]);
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
    return text;
}

/* "[b, s_q, topk] = [2, 1, topk]": the letters, then the sizes that are known. */
static const char *pattern_text(char *text, size_t size, const fmlai_pattern *p)
{
    const char *prefix = p->prefix == NULL ? "" : p->prefix;
    const char *comma = p->prefix == NULL || p->letters[0] == '\0' ? "" : ", ";
    char letters[96];
    snprintf(letters, sizeof letters, "%s%s%s", prefix, comma, p->letters);
    size_t used = (size_t)snprintf(text, size, "[%s] = [", letters);
    const char *letter = letters;
    for (int32_t i = 0; i < p->rank && used < size; i++) {
        const char *end = strchr(letter, ',');
        int length = (int)(end == NULL ? strlen(letter) : (size_t)(end - letter));
        const char *separator = i == 0 ? "" : ", ";
        if (p->shape[i] == FMLAI_ANY) {
            used += (size_t)snprintf(text + used, size - used, "%s%.*s", separator, length, letter);
        } else {
            used += (size_t)snprintf(text + used, size - used, "%s%lld", separator, (long long)p->shape[i]);
        }
        letter = end == NULL ? letter + length : end + 2;
    }
    if (used < size) {
        snprintf(text + used, size - used, "]");
    }
    return text;
}

static const char *dtypes_text(char *text, size_t size, uint32_t dtypes)
{
    size_t used = 0;
    text[0] = '\0';
    for (int32_t d = FMLA_BF16; d <= FMLA_F4_E2M1 && used < size; d++) {
        if (dtypes & FMLAI_BIT(d)) {
            used += (size_t)snprintf(text + used, size - used, "%s%s", used == 0 ? "" : ", ",
                                     fmla_dtype_name((fmla_dtype)d));
        }
    }
    return text;
}

/* ---- tensors --------------------------------------------------------------------------------------------------- */

static void check_dtype(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *p)
{
    bool known = t->dtype > FMLA_DTYPE_NONE && t->dtype <= FMLA_F4_E2M1;
    if (known && (p->dtypes & FMLAI_BIT(t->dtype))) {
        return;
    }
    char allowed[96];
    dtypes_text(allowed, sizeof allowed, p->dtypes);
    fmlai_invalid(c, "%s: dtype is %s (%d); allowed: %s%s%s%s", p->name, fmla_dtype_name((fmla_dtype)t->dtype),
                  (int)t->dtype, allowed, p->note == NULL ? "" : " (", p->note == NULL ? "" : p->note,
                  p->note == NULL ? "" : ")");
}

static void check_shape(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *p)
{
    bool right = t->rank == p->rank;
    for (int32_t i = 0; right && i < p->rank; i++) {
        right = t->shape[i] >= 0 && (p->shape[i] == FMLAI_ANY || t->shape[i] == p->shape[i]);
    }
    if (!right) {
        char shape[128], allowed[224];
        fmlai_invalid(c, "%s: shape is %s; allowed: %s", p->name, fmlai_shape_text(shape, sizeof shape, t),
                      pattern_text(allowed, sizeof allowed, p));
    }
}

/* Elements, and bytes from the first to the last, fit in 63 bits. */
static void check_extent(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *p)
{
    int64_t count = 1, low = 0, high = 0, step, bytes;
    bool fits = true;
    for (int32_t i = 0; fits && i < t->rank; i++) {
        if (t->shape[i] == 0) {
            return;
        }
        fits = fmlai_mul(count, t->shape[i], &count) && fmlai_mul(t->shape[i] - 1, t->stride[i], &step) &&
               fmlai_add(step < 0 ? low : high, step, step < 0 ? &low : &high);
    }
    int64_t size = (int64_t)fmla_dtype_size((fmla_dtype)t->dtype);
    fits = fits && fmlai_mul(count, size, &bytes) && fmlai_mul(low, size, &low) && fmlai_mul(high, size, &high) &&
           fmlai_add(high, size, &high) && !__builtin_sub_overflow(high, low, &bytes);
    if (!fits) {
        char shape[128];
        fmlai_invalid(c, "%s: shape %s with these strides spans more bytes than 63 bits count; allowed: less", p->name,
                      fmlai_shape_text(shape, sizeof shape, t));
    }
}

static void check_contiguous(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *p)
{
    int32_t first = p->flags & FMLAI_DENSE ? 0 : t->rank - 1;
    int64_t want = 1;
    for (int32_t i = t->rank - 1; i >= first; i--) {
        if (t->shape[i] > 1 && t->stride[i] != want) {
            fmlai_invalid(c, "%s: stride[%d] is %lld; allowed: %lld (%s)", p->name, (int)i, (long long)t->stride[i],
                          (long long)want,
                          first == 0 && t->rank > 1 ? "contiguous" : "its last dimension is contiguous");
            return;
        }
        want *= t->shape[i];
    }
}

/* Dimensions from the smallest stride up: each must step over all that the smaller ones span. */
static void check_distinct(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *p)
{
    bool done[FMLA_MAX_RANK] = {false};
    int64_t span = 0;
    for (int32_t round = 0; round < t->rank; round++) {
        int32_t best = -1;
        for (int32_t i = 0; i < t->rank; i++) {
            if (!done[i] && t->shape[i] > 1 && (best < 0 || llabs(t->stride[i]) < llabs(t->stride[best]))) {
                best = i;
            }
        }
        if (best < 0) {
            return;
        }
        if (llabs(t->stride[best]) <= span) {
            fmlai_invalid(c,
                          "%s: stride[%d] is %lld, so that elements of an output share memory; allowed: at least %lld",
                          p->name, (int)best, (long long)t->stride[best], (long long)span + 1);
            return;
        }
        span += (t->shape[best] - 1) * llabs(t->stride[best]);
        done[best] = true;
    }
}

static bool is_empty(const fmla_tensor *t)
{
    for (int32_t i = 0; i < t->rank; i++) {
        if (t->shape[i] == 0) {
            return true;
        }
    }
    return false;
}

static void check_data(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *p)
{
    size_t size = fmla_dtype_size((fmla_dtype)t->dtype);
    char shape[128];
    if (c->shapes_only || is_empty(t)) {
        return;
    }
    if (t->data == NULL) {
        fmlai_invalid(c, "%s: data is NULL; allowed: NULL only without elements (shape is %s)", p->name,
                      fmlai_shape_text(shape, sizeof shape, t));
    } else if ((uintptr_t)t->data % size != 0) {
        fmlai_invalid(c, "%s: data is %p; allowed: a multiple of %zu bytes (%s)", p->name, t->data, size,
                      fmla_dtype_name((fmla_dtype)t->dtype));
    }
}

void fmlai_check_tensor(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *p)
{
    if (fmlai_failed(c)) {
        return;
    }
    if (!fmlai_present(t)) {
        if (t->data != NULL) {
            fmlai_invalid(c, "%s: rank is 0, which means absent, but data is set; allowed: rank %d", p->name,
                          (int)p->rank);
        } else if (!(p->flags & FMLAI_OPTIONAL)) {
            char allowed[224];
            fmlai_invalid(c, "%s: is absent; allowed: %s", p->name, pattern_text(allowed, sizeof allowed, p));
        }
        return;
    }
    check_shape(c, t, p);
    check_dtype(c, t, p);
    if (fmlai_failed(c)) {
        return;
    }
    check_extent(c, t, p);
    if (!fmlai_failed(c) && !is_empty(t)) {
        if (p->flags & (FMLAI_LAST | FMLAI_DENSE)) {
            check_contiguous(c, t, p);
        }
        if (p->flags & FMLAI_OUTPUT) {
            check_distinct(c, t, p);
        }
    }
    check_data(c, t, p);
}

void fmlai_check_absent(fmlai_checker *c, const fmla_tensor *t, const char *name, const char *why)
{
    if (fmlai_present(t) || t->data != NULL) {
        fmlai_invalid(c, "%s: is given; allowed: absent, %s", name, why);
    }
}

void fmlai_check_oracle_only(fmlai_checker *c, const fmla_tensor *t, const char *name)
{
    if (!c->oracle && (fmlai_present(t) || t->data != NULL)) {
        fmlai_reject(c, FMLA_ERROR_UNSUPPORTED, "%s: is given; allowed: absent, only the oracle device has it", name);
    }
}

void *fmlai_data(const fmlai_checker *c, const fmla_tensor *t)
{
    static char somewhere[16] __attribute__((aligned(16)));
    return c->shapes_only && fmlai_present(t) && t->data == NULL ? somewhere : t->data;
}

/* ---- numbers --------------------------------------------------------------------------------------------------- */

void fmlai_check_range(fmlai_checker *c, const char *name, int64_t value, int64_t low, int64_t high)
{
    if (value < low || value > high) {
        fmlai_invalid(c, "%s: %lld; allowed: %lld..%lld", name, (long long)value, (long long)low, (long long)high);
    }
}

void fmlai_check_zero(fmlai_checker *c, const char *name, int64_t value)
{
    if (value != 0) {
        fmlai_invalid(c, "%s: %lld; allowed: 0", name, (long long)value);
    }
}

float fmlai_check_scale(fmlai_checker *c, float value, int32_t d_qk)
{
    if (value == FMLA_SCALE_DEFAULT) {
        return d_qk > 0 ? (float)(1.0 / sqrt((double)d_qk)) : 1.0f;
    }
    if (!isfinite(value)) {
        fmlai_invalid(c, "softmax_scale: %g; allowed: any finite number, or FMLA_SCALE_DEFAULT", (double)value);
    }
    return value;
}

float fmlai_check_empty_lse(fmlai_checker *c, int32_t value)
{
    fmlai_check_range(c, "empty_lse", value, FMLA_EMPTY_LSE_NEG_INF, FMLA_EMPTY_LSE_POS_INF);
    return value == FMLA_EMPTY_LSE_POS_INF ? INFINITY : -INFINITY;
}

int32_t fmlai_check_width(fmlai_checker *c, const char *name, int64_t value)
{
    fmlai_check_range(c, name, value, 1, INT32_MAX);
    return fmlai_failed(c) ? 1 : (int32_t)value;
}
