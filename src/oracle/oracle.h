/* SPDX-License-Identifier: MIT */
/*
 * oracle.h: the float64 reference of every operation. It is written to be read beside the definitions in
 * docs/numerics.md and docs/formats.md: one thread, plain loops, no rounding but those that an operation
 * defines (the stored formats, RoPE on q, the output cast) and one when a result is stored. Every sum runs from
 * left to right in the order of the definition; where that costs no clarity, sums run side by side.
 * Every other backend is tested against it. Temporary arrays live in the call's workspace; nothing is
 * allocated in a call, except a token's row the first time a longer one is met.
 */
#ifndef FLASHMLA_ORACLE_H
#define FLASHMLA_ORACLE_H

#include <math.h>

#include "../backend.h"
#include "../format/format.h"

typedef struct fmlai_oracle {
    fmlai_allocator allocator;
    float *row; /* one token, for the operations on caches */
    int64_t row_capacity;
} fmlai_oracle;

/* The larger of two; NaN if either is. */
static inline double fmlai_oracle_max(double a, double b)
{
    return isnan(a) || a > b ? a : b;
}

/* sum a_i b_i and sum |a_i b_i|, from left to right. */
static inline double fmlai_oracle_dot(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

static inline double fmlai_oracle_dot_abs(const double *a, const double *b, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += fabs(a[i] * b[i]);
    }
    return sum;
}

/* Element 0 of (token, head), and that vector of n elements as doubles. */
static inline int64_t fmlai_oracle_offset(const fmlai_packed *x, int64_t token, int64_t head)
{
    return token * x->stride[0] + head * x->stride[1];
}

static inline void fmlai_oracle_load(const fmlai_packed *x, int64_t token, int64_t head, int64_t n,
                                     double *dst)
{
    for (int64_t d = 0; d < n; d++) {
        dst[d] = fmlai_load_f64(x->data, x->dtype, fmlai_oracle_offset(x, token, head) + d);
    }
}

static inline void fmlai_oracle_store(const fmlai_packed *x, int64_t token, int64_t head, int64_t n,
                                      const double *src)
{
    for (int64_t d = 0; d < n; d++) {
        fmlai_store_f64(x->data, x->dtype, fmlai_oracle_offset(x, token, head) + d, src[d]);
    }
}

/* ---- fused.c: what mqa.c does more for a fused call ---------------------------------------------------- */

/* Clears the scale words, those of the padding tokens included. Once per call, before the epilogues. */
void fmlai_oracle_fused_begin(const fmlai_mqa *p);
/* Reads the row's query, RoPE applied to its last dims and rounded to bf16; returns its norm factor rho. */
double fmlai_oracle_fused_query(const fmlai_mqa *p, int64_t token, int32_t head, double *query);
/* Conjugate RoPE in place on the row's output and, widening, on its bound. */
void fmlai_oracle_fused_unrotate(const fmlai_mqa *p, int64_t token, double *out, double *magnitude);
/* Quantiser D: writes the row's codes and scale bytes. */
void fmlai_oracle_fused_cast(const fmlai_mqa *p, int64_t token, int32_t head, const double *out);

/* ---- the entries of fmlai_oracle_backend --------------------------------------------------------------- */

size_t fmlai_oracle_mqa_workspace(const void *state, const fmlai_mqa *p);
fmla_status fmlai_oracle_mqa(void *state, const fmlai_mqa *p, const fmlai_call *call);
size_t fmlai_oracle_mha_workspace(const void *state, const fmlai_mha *p);
fmla_status fmlai_oracle_mha_forward(void *state, const fmlai_mha *p, const fmlai_call *call);
fmla_status fmlai_oracle_mha_backward(void *state, const fmlai_mha *p, const fmlai_call *call);
fmla_status fmlai_oracle_quantize(void *state, const fmlai_transcode *p, const fmlai_call *call);
fmla_status fmlai_oracle_dequantize(void *state, const fmlai_transcode *p, const fmlai_call *call);
fmla_status fmlai_oracle_convert(void *state, const fmlai_convert *p, const fmlai_call *call);
fmla_status fmlai_oracle_indices_convert(void *state, const fmlai_indices_convert *p, const fmlai_call *call);
fmla_status fmlai_oracle_fp8_cast(void *state, const fmlai_fp8_cast *p, const fmlai_call *call);
fmla_status fmlai_oracle_merge(void *state, const fmlai_merge *p, const fmlai_call *call);
fmla_status fmlai_oracle_permute(void *state, const fmlai_permute *p, const fmlai_call *call);

#endif
