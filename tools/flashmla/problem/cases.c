/* SPDX-License-Identifier: MIT */
/* cases.c: test cases as text, and the list of them. */
#include "problem/cases.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "problem/memory.h"
#include "problem/random.h"

typedef enum field_kind { FIELD_NUMBER, FIELD_OPERATION, FIELD_FORMAT, FIELD_DTYPE, FIELD_REAL } field_kind;

typedef struct field {
    const char *name;
    size_t offset;
    field_kind kind;
} field;

#define NUMBER(member)                                                                                                 \
    {                                                                                                                  \
#member, offsetof(test_case, member), FIELD_NUMBER                                                             \
    }

static const field fields[] = {
    {"op", offsetof(test_case, op), FIELD_OPERATION},
    {"format", offsetof(test_case, format), FIELD_FORMAT},
    {"extra", offsetof(test_case, extra), FIELD_FORMAT},
    {"dtype", offsetof(test_case, dtype), FIELD_DTYPE},
    {"out", offsetof(test_case, out), FIELD_DTYPE},
    NUMBER(b),
    NUMBER(s_q),
    NUMBER(s_kv),
    NUMBER(e_kv),
    NUMBER(h_q),
    NUMBER(h_kv),
    NUMBER(d_qk),
    NUMBER(d_v),
    NUMBER(topk),
    NUMBER(e_topk),
    NUMBER(page),
    NUMBER(e_page),
    NUMBER(causal),
    NUMBER(varlen),
    NUMBER(zero_len),
    NUMBER(lengths),
    NUMBER(e_lengths),
    NUMBER(ragged),
    NUMBER(bound),
    NUMBER(no_table),
    NUMBER(sink),
    NUMBER(invalid),
    NUMBER(repeated),
    NUMBER(nan),
    NUMBER(data),
    NUMBER(scales),
    NUMBER(pad),
    NUMBER(misalign),
    NUMBER(pos_inf),
    NUMBER(base2),
    NUMBER(norm),
    NUMBER(plain_q),
    NUMBER(neox),
    NUMBER(group),
    NUMBER(count),
    NUMBER(again),
    NUMBER(seed),
    {"scale", offsetof(test_case, scale), FIELD_REAL},
};

#define FIELD_COUNT (sizeof fields / sizeof fields[0])

test_case case_default(fmla_operation op)
{
    test_case c;
    memset(&c, 0, sizeof c);
    c.op = op;
    c.dtype = FMLA_BF16;
    c.b = 1;
    c.s_q = 1;
    c.s_kv = 64;
    c.e_kv = 64;
    c.h_q = 16;
    c.h_kv = 1;
    c.d_qk = 512;
    c.d_v = 512;
    c.page = 64;
    c.e_page = 64;
    c.count = 64;
    c.format = FMLA_KV_BF16;
    switch (op) {
    case FMLA_OP_DENSE_DECODE:
    case FMLA_OP_SPARSE_PREFILL:
        c.d_qk = 576;
        break;
    case FMLA_OP_MHA_FORWARD:
    case FMLA_OP_MHA_BACKWARD:
        c.d_qk = 192;
        c.d_v = 128;
        break;
    default:
        break;
    }
    return c;
}

int operation_by_name(const char *name)
{
    for (int op = 0; op < FMLA_OP_COUNT; op++) {
        const char *a = fmla_operation_name((fmla_operation)op);
        const char *b = name;
        while (*a != 0 && (*a == *b || ((*a == '_' || *a == '-') && (*b == '_' || *b == '-')))) {
            a++;
            b++;
        }
        if (*a == 0 && *b == 0) {
            return op;
        }
    }
    return -1;
}

static const char *format_name(int64_t format)
{
    static fmla_format_info info[FMLA_KV_COUNT];
    if (format <= FMLA_KV_NONE || format >= FMLA_KV_COUNT) {
        return "none";
    }
    info[format].struct_size = sizeof info[format];
    fmla_format_get((fmla_kv_format)format, &info[format]);
    return info[format].name;
}

void case_print(const test_case *c, char *text, size_t size)
{
    test_case d = case_default((fmla_operation)c->op);
    size_t used = 0;
    text[0] = 0;
    for (size_t i = 0; i < FIELD_COUNT; i++) {
        const char *p = (const char *)c + fields[i].offset;
        if (i > 0 && memcmp(p, (const char *)&d + fields[i].offset, 8) == 0) {
            continue;
        }
        int64_t value;
        memcpy(&value, p, sizeof value);
        char number[40];
        const char *word = number;
        snprintf(number, sizeof number, "%lld", (long long)value);
        if (fields[i].kind == FIELD_OPERATION) {
            word = fmla_operation_name((fmla_operation)value);
        } else if (fields[i].kind == FIELD_FORMAT) {
            word = format_name(value);
        } else if (fields[i].kind == FIELD_DTYPE) {
            word = fmla_dtype_name((fmla_dtype)value);
        } else if (fields[i].kind == FIELD_REAL) {
            double real;
            memcpy(&real, p, sizeof real);
            snprintf(number, sizeof number, "%.9g", real);
        }
        int n = snprintf(text + used, size - used, "%s%s=%s", used ? "," : "", fields[i].name, word);
        used += n > 0 && (size_t)n < size - used ? (size_t)n : 0;
    }
}

static int parse_value(void *member, field_kind kind, const char *word)
{
    char *end = NULL;
    int64_t value = -1;
    errno = 0;
    if (kind == FIELD_REAL) {
        double real = strtod(word, &end);
        memcpy(member, &real, sizeof real);
        return end == word || *end != 0 ? -1 : 0;
    }
    if (kind == FIELD_OPERATION) {
        value = operation_by_name(word);
    } else if (kind == FIELD_FORMAT) {
        value = strcmp(word, "none") == 0 ? 0 : fmla_format_by_name(word);
        value = value == FMLA_KV_NONE && strcmp(word, "none") != 0 ? -1 : value;
    } else if (kind == FIELD_DTYPE) {
        value = cli_dtype_by_name(word);
    } else {
        value = strtoll(word, &end, 10);
        if (end == word || *end != 0 || errno != 0) {
            return -1;
        }
        memcpy(member, &value, sizeof value);
        return 0;
    }
    memcpy(member, &value, sizeof value);
    return value < 0 ? -1 : 0;
}

/* What no problem can be built from; NULL: it can. What the library refuses is left to the library. */
static const char *case_fault(const test_case *c)
{
    const int64_t counts[] = {c->b, c->s_q, c->s_kv, c->e_kv, c->topk, c->e_topk, c->count, c->misalign, c->seed};
    const int64_t sizes[] = {c->h_q, c->h_kv, c->d_qk, c->d_v, c->page, c->e_page};
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        if (counts[i] < 0 || counts[i] > INT32_MAX) {
            return "b, s_q, s_kv, e_kv, topk, e_topk, count, misalign and seed are 0 to 2^31 - 1";
        }
    }
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (sizes[i] < 1 || sizes[i] > INT32_MAX) {
            return "h_q, h_kv, d_qk, d_v, page and e_page are 1 to 2^31 - 1";
        }
    }
    if (c->h_q % c->h_kv != 0 || c->group < 0 ||
        (c->group > 0 && c->op <= FMLA_OP_FUSED_DECODE && c->h_q % c->group != 0)) {
        return "h_kv and group divide h_q";
    }
    if (c->dtype < FMLA_BF16 || c->dtype > FMLA_F32 || c->out < 0 || c->out > FMLA_F32) {
        return "dtype and out are bf16, f16 or f32";
    }
    for (int i = 0; i < 2; i++) {
        int64_t format = i == 0 ? c->format : c->extra;
        if (format == FMLA_KV_NONE && i == 1 && c->op != FMLA_OP_CONVERT) {
            continue;
        }
        if (fmla_format_get((fmla_kv_format)format, &info) != FMLA_OK ||
            (c->op <= FMLA_OP_CONVERT && !(c->op >= FMLA_OP_MHA_FORWARD && c->op <= FMLA_OP_MHA_BACKWARD) &&
             info.d_qk != 0 && info.d_qk != c->d_qk)) {
            return "format and extra have the width d_qk";
        }
    }
    if (c->op == FMLA_OP_FP8_CAST && (c->group < 1 || c->d_qk % (4 * c->group) != 0)) {
        return "4 * group divides d_qk";
    }
    if (c->op == FMLA_OP_PERMUTE_Q_B && (c->group < 1 || c->count % (4 * c->group) != 0)) {
        return "4 * group divides count";
    }
    if (c->op == FMLA_OP_PERMUTE_WV && (c->group < 1 || c->h_q % c->group != 0 || c->group * c->d_v % 128 != 0)) {
        return "group divides h_q, and 128 divides group * d_v";
    }
    return NULL;
}

int case_parse(test_case *c, const char *text, char *error, size_t error_size)
{
    char copy[1024];
    if (strlen(text) >= sizeof copy) {
        snprintf(error, error_size, "case: longer than %zu characters", sizeof copy - 1);
        return -1;
    }
    strcpy(copy, text);
    char *rest = copy;
    for (int number = 0; rest != NULL && *rest != 0; number++) {
        char *word = strsep(&rest, ",");
        char *equals = strchr(word, '=');
        size_t i = 0;
        if (equals == NULL) {
            snprintf(error, error_size, "case: \"%s\" is not name=value", word);
            return -1;
        }
        *equals = 0;
        while (i < FIELD_COUNT && strcmp(fields[i].name, word) != 0) {
            i++;
        }
        if (i == FIELD_COUNT || (number == 0) != (i == 0)) {
            snprintf(error, error_size, number == 0 ? "case: begins with op=NAME, not \"%s\"" : "case: no field \"%s\"",
                     word);
            return -1;
        }
        if (parse_value((char *)c + fields[i].offset, fields[i].kind, equals + 1) != 0) {
            snprintf(error, error_size, "case: %s=%s: unknown value", word, equals + 1);
            return -1;
        }
        if (number == 0) {
            *c = case_default((fmla_operation)c->op);
        }
    }
    const char *fault = case_fault(c);
    if (fault != NULL) {
        snprintf(error, error_size, "case: %s", fault);
        return -1;
    }
    return 0;
}

/* Work of a case in (query token, head, attended token) triples. */
static double case_work(const test_case *c)
{
    double tokens = (double)(c->topk + c->e_topk);
    if (c->op == FMLA_OP_DENSE_DECODE || c->op == FMLA_OP_MHA_FORWARD || c->op == FMLA_OP_MHA_BACKWARD) {
        tokens = (double)c->s_kv;
    }
    return (double)(c->b * c->s_q * c->h_q) * tokens;
}

/* Shrinks what is large, one dimension at a time, until the work fits; odd sizes stay odd. */
static void scale_down(test_case *c, double limit)
{
    while (case_work(c) > limit) {
        if (c->b > 5) {
            c->b = 3 + c->b % 3;
        } else if (c->s_q > 31) {
            c->s_q = c->s_q / 3 + 1;
        } else if (c->topk + c->e_topk > 700) {
            c->topk = c->topk > 200 ? c->topk / 2 + c->topk % 2 : c->topk;
            c->e_topk = c->e_topk > 200 ? c->e_topk / 2 + c->e_topk % 2 : c->e_topk;
        } else if (c->s_kv > 300 && c->topk == 0) {
            c->s_kv = c->s_kv / 2 + 3;
        } else if (c->b > 1) {
            c->b--;
        } else if (c->s_q > 1) {
            c->s_q = c->s_q / 2 + (c->s_q > 2 ? c->s_q % 2 : 0);
        } else {
            break;
        }
    }
}

void cases_add(case_list *list, case_set set, test_case c)
{
    if (set != CASES_FULL) {
        scale_down(&c, set == CASES_QUICK ? 60e3 : 400e3);
    }
    if (list->count == list->capacity) {
        list->capacity = list->capacity ? 2 * list->capacity : 256;
        test_case *larger = xmalloc(list->capacity * sizeof *larger);
        if (list->count > 0) {
            memcpy(larger, list->cases, list->count * sizeof *larger);
        }
        free(list->cases);
        list->cases = larger;
    }
    list->cases[list->count++] = c;
}

void cases_add_text(case_list *list, fmla_operation op, const char *text)
{
    char whole[512], error[256];
    test_case c;
    snprintf(whole, sizeof whole, "op=%s%s%s", fmla_operation_name(op), text[0] ? "," : "", text);
    if (case_parse(&c, whole, error, sizeof error) == 0) {
        cases_add(list, CASES_FULL, c); /* chosen by hand: not to be scaled down */
    } else {
        cli_error("%s: %s", whole, error); /* a misspelt line of our own tables */
    }
}

int cases_keep(case_set set, uint64_t number, int quick_one_of, int all_one_of)
{
    rng r;
    rng_seed(&r, number);
    int one_of = set == CASES_QUICK ? quick_one_of : set == CASES_ALL ? all_one_of : 1;
    return rng_below(&r, one_of) == 0;
}

void cases_make(case_list *list, case_set set, int operation, uint64_t seed)
{
    size_t from = list->count;
    cases_attention(list, set, operation);
    cases_bytes(list, set, operation);
    for (size_t i = from; i < list->count; i++) {
        rng r;
        rng_seed(&r, seed + i);
        list->cases[i].seed = (int64_t)(rng_next(&r) >> 33);
    }
}

void cases_free(case_list *list)
{
    free(list->cases);
    memset(list, 0, sizeof *list);
}
