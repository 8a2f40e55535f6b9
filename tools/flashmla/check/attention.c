/* SPDX-License-Identifier: MIT */
/* attention.c: decode, prefill and the fused operations against the reference. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/check.h"
#include "problem/numbers.h"

/* Does the published bound speak of data like this? */
static int published_applies(const test_case *c)
{
    return c->data == DATA_PLAIN && c->scales == 0 && c->sink != SINK_EXTREME && c->scale == 0 && c->out != FMLA_F32;
}

static double lonely_lse(const test_case *c)
{
    return c->pos_inf ? (double)INFINITY : -(double)INFINITY;
}

/* Every row, chosen or not: lonely rows are empty, those that attend a NaN say so in lse, others are finite. */
static verdict check_rows(checker *k, const problem *p)
{
    int64_t group = p->c.h_q / p->c.h_kv;
    for (int64_t t = 0; t < p->tokens; t++) {
        int64_t attended = 0;
        bool nan = false;
        for (int64_t h = 0; h < p->c.h_q; h++) {
            if (h % group == 0) {
                attended = problem_attended(p, t, h / group);
                nan = problem_attends_nan(p, t, h / group);
            }
            double lse = number_get(p->lse.data, FMLA_F32, problem_lse_offset(p, &p->lse, t, h));
            if (attended == 0 ? lse != lonely_lse(&p->c) : nan ? !isnan(lse) : !isfinite(lse)) {
                return check_fail(k, "lse of query token %lld, head %lld is %g, but it attends %lld tokens",
                                  (long long)t, (long long)h, lse, (long long)attended);
            }
            int64_t at = problem_out_offset(p, t, case_is_fused(&p->c) ? 0 : h);
            const char *row = (const char *)p->out.data + at * (int64_t)fmla_dtype_size((fmla_dtype)p->out.dtype);
            if (case_is_fused(&p->c) || nan || (attended > 0 && numbers_finite(row, p->out.dtype, p->c.d_v))) {
                continue;
            }
            for (int64_t d = 0; d < p->c.d_v; d++) {
                double x = number_get(p->out.data, p->out.dtype, at + d);
                if (attended == 0 ? x != 0 : !isfinite(x)) {
                    return check_fail(k,
                                      "out of query token %lld, head %lld, dim %lld is %g, but it attends %lld tokens",
                                      (long long)t, (long long)h, (long long)d, x, (long long)attended);
                }
            }
        }
    }
    return VERDICT_PASSED;
}

static verdict finish(checker *k, const problem *p, const comparison *c)
{
    char why[512];
    double *worst = &k->worst[p->c.op][c->what];
    if (c->what != QUANTITY_LSE && c->what != QUANTITY_MAX_LOGITS) {
        k->last = *c;
    }
    if (c->worst > *worst) {
        *worst = c->worst;
    }
    return compare_end(c, why, sizeof why) == 0 ? VERDICT_PASSED : check_fail(k, "%s", why);
}

/* lse and max_logits. */
static verdict compare_scalars(checker *k, const problem *p, const reference *r)
{
    const test_case *c = &p->c;
    const fmla_tensor *tensors[2] = {&p->lse, &p->max_logits};
    const double *truths[2] = {r->lse, r->max_logits};
    double factor = c->base2 ? 1.4426950408889634 : 1;
    for (int i = 0; i < 2; i++) {
        comparison m;
        compare_begin(&m, i == 0 ? QUANTITY_LSE : QUANTITY_MAX_LOGITS, k->class, FMLA_F32, (fmla_operation)c->op,
                      published_applies(c));
        for (int64_t t = 0; t < r->tokens; t++) {
            for (int64_t h = 0; h < r->heads; h++) {
                int64_t row = t * r->heads + h;
                double truth = truths[i][row] * factor;
                if (isinf(truth)) {
                    truth = i == 0 ? lonely_lse(c) : truth;
                }
                int64_t at = problem_lse_offset(p, tensors[i], r->token[t], r->head[h]);
                compare_add(&m, number_get(tensors[i]->data, FMLA_F32, at), truth, 0, r->abs_logit[row] * factor,
                            r->token[t], r->head[h]);
            }
        }
        if (finish(k, p, &m) != VERDICT_PASSED) {
            return VERDICT_FAILED;
        }
    }
    return VERDICT_PASSED;
}

static verdict compare_out(checker *k, const problem *p, const reference *r)
{
    comparison m;
    compare_begin(&m, QUANTITY_OUT, k->class, p->out.dtype, (fmla_operation)p->c.op, published_applies(&p->c));
    for (int64_t t = 0; t < r->tokens; t++) {
        for (int64_t h = 0; h < r->heads; h++) {
            int64_t row = t * r->heads + h;
            int64_t at = problem_out_offset(p, r->token[t], r->head[h]);
            double L = isfinite(r->abs_logit[row]) ? r->abs_logit[row] : 0;
            for (int64_t d = 0; d < r->d_v; d++) {
                compare_add(&m, number_get(p->out.data, p->out.dtype, at + d), r->out[row * r->d_v + d],
                            r->abs_out[row * r->d_v + d], L, r->token[t], r->head[h]);
            }
        }
    }
    return finish(k, p, &m);
}

/* The scale byte and the 32 codes' values of chunk `chunk` of (token, head). */
static int fused_chunk(const problem *p, int64_t token, int64_t head, int64_t chunk, double *values)
{
    int64_t group = p->c.group ? p->c.group : p->c.h_q;
    int64_t g = head % group, block = head / group, number = chunk * group + g;
    const int32_t *word =
        (const int32_t *)p->out_scale.data + tensor_offset(&p->out_scale, token, block, number / 4, 0);
    int byte = (*word >> (8 * (number % 4))) & 0xFF;
    const uint8_t *codes = (const uint8_t *)p->out.data + tensor_offset(&p->out, token, block, number * 32, 0);
    for (int i = 0; i < 32; i++) {
        values[i] = (double)e4m3_value(codes[i]) * e8m0_value((uint8_t)byte);
    }
    return byte;
}

/* The scale byte must be that of the exact output, or its neighbour if the largest value is next to a power of two. */
static bool scale_byte_right(int byte, int truth, const double *exact, double slack)
{
    double amax = 1e-4f;
    int e;
    for (int i = 0; i < 32; i++) {
        amax = fabs(exact[i]) > amax ? fabs(exact[i]) : amax;
    }
    double m = frexp(amax / 448, &e); /* in [0.5, 1): near a power of two if near either end */
    bool near = fabs(m - 0.5) < 0.5 * slack || fabs(m - 1) < slack;
    return byte == truth || (near && abs(byte - truth) == 1);
}

/* One chunk of 32: the scale byte, then every code must lie between the casts of exact - error and exact + error. */
static verdict compare_chunk(checker *k, const problem *p, const reference *r, int64_t row, int64_t chunk,
                             comparison *cast, comparison *out)
{
    const double *exact = r->out + row * 512 + chunk * 32, *A = r->abs_out + row * 512 + chunk * 32;
    int64_t t = r->token[row / r->heads], h = r->head[row % r->heads];
    tolerance ours = tolerance_of(QUANTITY_OUT, k->class, FMLA_F32);
    double L = isfinite(r->abs_logit[row]) ? r->abs_logit[row] : 0;
    double values[32], rounded[32], error[32], largest = 0;
    int byte = fused_chunk(p, t, h, chunk, values);
    if (isnan(exact[0])) { /* and so is all of this row */
        for (int i = 0; i < 32; i++) {
            compare_add(out, values[i], exact[i], 0, L, t, h);
        }
        return VERDICT_PASSED;
    }
    int truth = cast_group(exact, 32, rounded);
    for (int i = 0; i < 32; i++) {
        /* The last rotation mixes two outputs: either's error may be in the other. */
        error[i] = (ours.magnitude + 2 * ours.logit * L) * fmax(A[i], A[i ^ 1]) + 0x1p-22 * fabs(exact[i]);
        largest = fmax(largest, error[i]);
    }
    /* The next power of two is as near as the error of the largest value: at the lower end of its binade or the upper.
     */
    double slack = (k->class == CLASS_S ? 0x1p-12 : 0x1p-6) + largest / ldexp(448, truth - 128);
    if (!scale_byte_right(byte, truth, exact, slack)) {
        return check_fail(k, "scale of query token %lld, head %lld, chunk %lld is %d, not %d", (long long)t,
                          (long long)h, (long long)chunk, byte, truth);
    }
    for (int i = 0; i < 32; i++) {
        double low = cast_round(exact[i] - error[i], byte - 127), high = cast_round(exact[i] + error[i], byte - 127);
        if (!(values[i] >= low && values[i] <= high)) {
            return check_fail(k, "fused out of query token %lld, head %lld, dim %lld is %.9g, not within %.9g..%.9g",
                              (long long)t, (long long)h, (long long)(chunk * 32 + i), values[i], low, high);
        }
        double step = cast_step(exact[i], byte - 127);
        compare_slack(cast, step, 2 * error[i] / step);
        compare_add(cast, values[i], rounded[i], 0, L, t, h);
        compare_add(out, values[i], exact[i], 0, L, t, h);
    }
    return VERDICT_PASSED;
}

static verdict compare_fused(checker *k, const problem *p, const reference *r)
{
    comparison cast, out;
    compare_begin(&cast, QUANTITY_FUSED_CAST, k->class, FMLA_F8_E4M3, (fmla_operation)p->c.op, 0);
    compare_begin(&out, QUANTITY_FUSED_OUT, k->class, FMLA_F8_E4M3, (fmla_operation)p->c.op, published_applies(&p->c));
    for (int64_t row = 0; row < r->tokens * r->heads; row++) {
        for (int64_t chunk = 0; chunk < 16; chunk++) {
            if (compare_chunk(k, p, r, row, chunk, &cast, &out) != VERDICT_PASSED) {
                return VERDICT_FAILED;
            }
        }
    }
    verdict v = finish(k, p, &cast);
    return v == VERDICT_PASSED ? finish(k, p, &out) : v;
}

static verdict compare_outputs(checker *k, const problem *p, const reference *r)
{
    return case_is_fused(&p->c) ? compare_fused(k, p, r) : compare_out(k, p, r);
}

/* The bound on the angle is one on whole tensors, which a few rows may exceed by chance: if that is all that is wrong
 * with some rows, so many as WIDE_BUDGET multiplications allow decide. */
#define WIDE_BUDGET 4e9

static verdict compare_wide(checker *k, const problem *p, reference *r)
{
    int64_t head = r->kv_head;
    reference_free(r);
    if (reference_make(r, p, &k->oracle, head, WIDE_BUDGET / (double)p->c.h_kv) != CLI_OK) {
        return VERDICT_BROKEN;
    }
    return compare_outputs(k, p, r);
}

verdict check_attention_outputs(checker *k, const problem *p, reference *kept)
{
    for (int64_t head = 0; head < p->c.h_kv && p->tokens > 0; head++) {
        reference own = {0}, *r = kept != NULL ? &kept[head] : &own;
        if (r->tokens == 0 && reference_make(r, p, &k->oracle, head, k->budget / (double)p->c.h_kv) != CLI_OK) {
            return VERDICT_BROKEN;
        }
        verdict v = compare_scalars(k, p, r);
        if (v == VERDICT_PASSED) {
            v = compare_outputs(k, p, r);
            if (v == VERDICT_FAILED && compare_angle_alone(&k->last) && !reference_is_whole(r, p)) {
                v = compare_wide(k, p, r);
            }
        }
        reference_free(&own);
        if (v != VERDICT_PASSED) {
            return v;
        }
    }
    return VERDICT_PASSED;
}

/* The first run of the choice that runs. */
static verdict run_first(checker *k, problem *p, const any_args *args, reference *kept)
{
    size_t size = 0;
    verdict v = check_run(k, &k->engine, p, args, &k->choice->results, &size);
    if (v == VERDICT_PASSED) {
        v = check_rows(k, p);
    }
    return v == VERDICT_PASSED ? check_attention_outputs(k, p, kept) : v;
}

void check_attention(checker *k, const test_case *c)
{
    problem p;
    any_args args;
    int status = problem_build(&p, c, &k->oracle);
    for (int i = 0; i < k->choice_count && status != CLI_OK; i++) {
        k->choices[i].verdict = VERDICT_BROKEN;
    }
    if (status != CLI_OK) {
        return;
    }
    reference *kept = xcalloc((size_t)c->h_kv, sizeof *kept);
    p.lasting = true;
    problem_args(&p, &args);
    for (int i = -1; check_next(k, &i);) {
        check_note(k, run_first(k, &p, &args, kept));
    }
    for (int64_t head = 0; head < c->h_kv; head++) {
        reference_free(&kept[head]);
    }
    free(kept);
    check_again(k, &p);
    check_end_all(k, &p);
    for (int i = 0; i < k->choice_count; i++) {
        free(k->choices[i].results);
        k->choices[i].results = NULL;
    }
    problem_free(&p);
}
