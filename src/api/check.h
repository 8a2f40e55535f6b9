/* SPDX-License-Identifier: MIT */
/*
 * check.h: validation. A checker keeps the first failure of a call; every check after it does nothing, so entries list
 * their checks in a row and ask once. Each failure is one sentence: the argument, its value, what is allowed.
 */
#ifndef FLASHMLA_API_CHECK_H
#define FLASHMLA_API_CHECK_H

#include <stdarg.h>

#include "../backend.h"

typedef struct fmlai_checker {
    fmlai_error *error;
    fmla_status status;
    bool shapes_only; /* a question about sizes: data may be NULL, values are not looked at */
    bool values;      /* tensors lie in host memory: lengths, tables and slots are checked too */
    bool oracle;      /* F64 results and the oracle's extra outputs are allowed */
} fmlai_checker;

void fmlai_fail_list(fmlai_error *error, fmla_status status, const char *format, va_list list);

/* Records a failure unless there is one already. */
void fmlai_reject(fmlai_checker *c, fmla_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;
#define fmlai_invalid(c, ...) fmlai_reject(c, FMLA_ERROR_INVALID_ARGUMENT, __VA_ARGS__)

static inline bool fmlai_failed(const fmlai_checker *c)
{
    return c->status != FMLA_OK;
}

/* ---- tensors (check.c) --------------------------------------------------------------------------------------- */

#define FMLAI_ANY (-1) /* a dimension of any size */

/* Sets of dtypes. */
#define FMLAI_BIT(dtype) (1u << (dtype))
#define FMLAI_HALF       (FMLAI_BIT(FMLA_BF16) | FMLAI_BIT(FMLA_F16))
#define FMLAI_FLOATS     (FMLAI_HALF | FMLAI_BIT(FMLA_F32))
#define FMLAI_CODES      (FMLAI_BIT(FMLA_F8_E4M3) | FMLAI_BIT(FMLA_U8))
#define FMLAI_SLOT_TYPES (FMLAI_BIT(FMLA_I32) | FMLAI_BIT(FMLA_I64))

enum {
    FMLAI_OPTIONAL = 1, /* rank 0: absent */
    FMLAI_LAST = 2,     /* the last dimension is contiguous */
    FMLAI_DENSE = 4,    /* the whole tensor is contiguous */
    FMLAI_OUTPUT = 8    /* no two elements share memory */
};

/* What a tensor must be. letters names the dimensions ("b, s_q, h_q, d_qk"), first those of prefix if there is one. */
typedef struct fmlai_pattern {
    const char *name;
    uint32_t dtypes;
    const char *note; /* why these dtypes ("q's dtype"), or NULL */
    uint32_t flags;
    const char *prefix;
    const char *letters;
    int32_t rank;
    int64_t shape[FMLA_MAX_RANK];
} fmlai_pattern;

void fmlai_check_tensor(fmlai_checker *c, const fmla_tensor *t, const fmlai_pattern *pattern);
#define FMLAI_EXPECT(c, t, ...) fmlai_check_tensor(c, t, &(const fmlai_pattern){__VA_ARGS__})

/* An argument that this call may not have: why says so. */
void fmlai_check_absent(fmlai_checker *c, const fmla_tensor *t, const char *name, const char *why);
/* An output of the oracle device. */
void fmlai_check_oracle_only(fmlai_checker *c, const fmla_tensor *t, const char *name);

static inline bool fmlai_present(const fmla_tensor *t)
{
    return t->rank != 0;
}

/* The tensor's memory; for questions about sizes any address, so that presence stays visible. */
void *fmlai_data(const fmlai_checker *c, const fmla_tensor *t);

/* "[2, 16, 3]" into text. */
const char *fmlai_shape_text(char *text, size_t size, const fmla_tensor *t);

/* ---- numbers (check.c) ---------------------------------------------------------------------------------------- */

void fmlai_check_range(fmlai_checker *c, const char *name, int64_t value, int64_t low, int64_t high);
void fmlai_check_zero(fmlai_checker *c, const char *name, int64_t value);
/* The caller's scale, or d_qk^-0.5. */
float fmlai_check_scale(fmlai_checker *c, float value, int32_t d_qk);
/* -inf or +inf. */
float fmlai_check_empty_lse(fmlai_checker *c, int32_t value);
/* a dimension as int32, 1..INT32_MAX */
int32_t fmlai_check_width(fmlai_checker *c, const char *name, int64_t value);

/* Products and sums that must fit; false on overflow. */
static inline bool fmlai_mul(int64_t a, int64_t b, int64_t *result)
{
    return !__builtin_mul_overflow(a, b, result);
}

static inline bool fmlai_add(int64_t a, int64_t b, int64_t *result)
{
    return !__builtin_add_overflow(a, b, result);
}

/* ---- values inside tensors (values.c); all do nothing unless c->values ----------------------------------------- */

/* Starts at 0, never falls, ends at total; no sequence longer than max (0: no limit). */
void fmlai_check_cu_seqlens(fmlai_checker *c, const char *name, const int32_t *cu, int64_t batch, int64_t total,
                            const char *max_name, int64_t max);
/* Lengths within what the table's pages hold, and the table's needed entries within the pool. */
void fmlai_check_paged(fmlai_checker *c, const char *name, const fmlai_token_list *list, int64_t batch);
/* Slots below the pool's tokens; negative ones are padding. */
void fmlai_check_slots(fmlai_checker *c, const char *name, const fmlai_slots *slots, int64_t count, int64_t tokens);
void fmlai_check_positions(fmlai_checker *c, const char *name, const int32_t *positions, int64_t stride, int64_t count,
                           int64_t rows);
void fmlai_check_page_positions(fmlai_checker *c, const fmlai_indices_convert *p);
/* A [count] tensor of lengths, none negative. */
void fmlai_check_not_negative(fmlai_checker *c, const char *name, const int32_t *lengths, int64_t count);

#endif
