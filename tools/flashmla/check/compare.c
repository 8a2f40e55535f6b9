/* SPDX-License-Identifier: MIT */
/* compare.c: the tolerance table. */
#include "check/compare.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "problem/numbers.h"

/*
 * Our bounds. u is the unit roundoff of the output dtype: 2^-9 relative error for a number rounded to nearest bf16 (8
 * bits of significand), 2^-12 for fp16, 2^-24 for fp32.
 *
 *  relative   One rounding to the output dtype. A kernel works in fp32 before, so that a value within rounding of a tie
 *             may go to either side: one whole step, 2u, and 1 % for the steps' unevenness.
 *  magnitude  Class S: sums in fp32 over n tokens, n 2^-24 A at worst, far less in blocks; exp2 to 2e-7: 2^-18 A covers
 *             4k tokens. Class B: each weight is rounded to bf16 (fp16), 2^-9 (2^-12) of each term, so at most that of
 *             A; twice that, because the denominator may be summed from rounded or from unrounded weights.
 *  logit      fp32 dot products of 576 terms, 2^-24 each, in blocks: 2^-19 L. A logit off by e changes a weight by a
 *             factor of exp(e), in numerator and denominator: 2 e A in out.
 *  floor      2^-23: lse near 0. 2^-25: half of fp16's smallest step.
 *  cosine     Above the cost of rounding the reference itself (bf16: 0.6e-6..2.5e-6, by how the values lie in their
 *             binades): class S a quarter of that, class B as much again and half.
 *
 * Gradients have no bound per element of our own (they are differences of large sums); cosine and the published bound
 * hold; what rounding leaves of a difference near zero is allowed (mha.c). Fused output: the cast's own error is 3e-4
 * (3 bits of fraction). Against the reference's own cast, an output that is off by e comes out one step away with a
 * chance of 2 e / step; the sum of what that costs is added to the cosine's bound.
 */
tolerance tolerance_of(quantity what, weight_class class, int32_t dtype)
{
    const double logit = 0x1p-19;
    tolerance t = {0, 0, logit, 0, 0};
    if (class == CLASS_M) {
        class = dtype == FMLA_F16 ? CLASS_S : CLASS_B;
    }
    switch (what) {
    case QUANTITY_OUT:
        if (dtype == FMLA_BF16) {
            t.relative = 1.01 * 0x1p-8;
            t.magnitude = class == CLASS_S ? 0x1p-18 : 0x1p-8;
            t.cosine = class == CLASS_S ? 0.3e-6 : 1.8e-6;
        } else if (dtype == FMLA_F16) {
            t.relative = 1.01 * 0x1p-11;
            t.magnitude = class == CLASS_S ? 0x1p-18 : 0x1p-11;
            t.floor = 0x1p-25;
            t.cosine = class == CLASS_S ? 1e-8 : 8e-8;
        } else {
            t.relative = 0x1p-22;
            t.magnitude = class == CLASS_S ? 0x1p-18 : 0x1p-8;
            t.cosine = class == CLASS_S ? 1e-9 : 2e-6;
        }
        break;
    case QUANTITY_LSE:
    case QUANTITY_MAX_LOGITS:
        t.relative = 0x1p-22;
        t.floor = 0x1p-23;
        t.cosine = 1e-9;
        break;
    case QUANTITY_GRADIENT:
        t.relative = INFINITY;
        t.cosine = class == CLASS_S ? 0.8e-6 : 3.8e-6;
        break;
    case QUANTITY_FUSED_CAST:
        t.relative = INFINITY;
        t.cosine = class == CLASS_S ? 1e-6 : 1e-4;
        break;
    default:
        t.relative = INFINITY;
        t.cosine = 5e-4;
        break;
    }
    return t;
}

/* The published tests' bounds: absolute, relative, cosine. */
published published_of(quantity what, fmla_operation op)
{
    const published none = {-1, 0, INFINITY};
    switch (what) {
    case QUANTITY_OUT:
        switch (op) {
        case FMLA_OP_DENSE_DECODE:
            return (published){8e-4, 2.01 / 128, 5e-6};
        case FMLA_OP_SPARSE_DECODE:
            return (published){1e-3, 2.01 / 128, 5e-6};
        case FMLA_OP_SPARSE_PREFILL:
            return (published){8e-4, 3.01 / 128, 7e-6};
        case FMLA_OP_MHA_FORWARD:
            return (published){1e-3, 8.01 / 128, 7e-6};
        default:
            return none;
        }
    case QUANTITY_LSE:
    case QUANTITY_MAX_LOGITS:
        switch (op) {
        case FMLA_OP_DENSE_DECODE:
        case FMLA_OP_SPARSE_DECODE:
            return (published){1e-6, 8.01 / 65536, 1e-7};
        case FMLA_OP_FUSED_PREFILL:
        case FMLA_OP_FUSED_DECODE:
            return (published){1e-5, 4.01 / 65536, 1e-7};
        default:
            return (published){1e-6, 2.01 / 65536, 1e-7};
        }
    case QUANTITY_GRADIENT:
        return (published){1e-3, 8.01 / 128, 7e-6};
    case QUANTITY_FUSED_OUT:
        return (published){1.1e-3, 1.01 / 8, 1e-3};
    default:
        return none;
    }
}

weight_class class_of(const fmla_context *context)
{
    if (fmla_context_device(context) == FMLA_DEVICE_CUDA) {
        return CLASS_B;
    }
    fmla_isa isa = fmla_context_isa(context);
    return isa == FMLA_ISA_AVX512BF16 || isa == FMLA_ISA_AMX ? CLASS_M : CLASS_S;
}

const char *quantity_name(quantity what)
{
    static const char *const names[QUANTITY_COUNT] = {"out", "lse", "max_logits", "gradient", "cast", "fused out"};
    return names[what];
}

void compare_begin(comparison *c, quantity what, weight_class class, int32_t dtype, fmla_operation op, int theirs)
{
    memset(c, 0, sizeof *c);
    c->what = what;
    c->dtype = dtype;
    c->ours = tolerance_of(what, class, dtype);
    c->theirs = theirs ? published_of(what, op) : (published){-1, 0, INFINITY};
}

static void wrong(comparison *c, double answer, double reference, double allowed, int64_t token, int64_t head)
{
    if (c->wrong == 0) {
        c->first[0] = token;
        c->first[1] = head;
        c->first_answer = answer;
        c->first_reference = reference;
        c->first_allowed = allowed;
    }
    c->wrong++;
}

void compare_add(comparison *c, double answer, double reference, double A, double L, int64_t token, int64_t head)
{
    c->count++;
    if (!isfinite(answer) || !isfinite(reference)) {
        if (answer != reference && !(isnan(answer) && isnan(reference))) {
            wrong(c, answer, reference, 0, token, head);
        }
        return;
    }
    const tolerance *t = &c->ours;
    double error = fabs(answer - reference);
    double allowed = t->magnitude * A + 2 * t->logit * L * A + t->floor;
    if (c->what == QUANTITY_LSE || c->what == QUANTITY_MAX_LOGITS) {
        allowed = t->logit * L + t->floor;
    }
    allowed += isinf(t->relative) ? INFINITY : t->relative * fabs(reference);
    if (error > allowed) {
        wrong(c, answer, reference, allowed, token, head);
    }
    if (c->theirs.absolute >= 0 && !(error < c->theirs.absolute) &&
        !(error / (fabs(reference) + 1e-6) < c->theirs.relative)) {
        c->wrong_published++;
    }
    if (error > 0 && error / allowed > c->worst) {
        c->worst = error / allowed;
    }
    c->max_error = error > c->max_error ? error : c->max_error;
    c->max_value = fabs(reference) > c->max_value ? fabs(reference) : c->max_value;
    c->logit_max = L > c->logit_max ? L : c->logit_max;
    c->error_squares += error * error;
    if (c->dtype == FMLA_BF16 || c->dtype == FMLA_F16) {
        double rounded = number_round(c->dtype, reference);
        c->rounding_squares += (rounded - reference) * (rounded - reference);
    }
    c->answer_squares += answer * answer;
    c->reference_squares += reference * reference;
}

void compare_slack(comparison *c, double step, double chance)
{
    c->slack_squares += step * step * (chance < 1 ? chance : 1);
}

double compare_cosine(const comparison *c)
{
    double sum = c->answer_squares + c->reference_squares;
    return (c->reference_squares < 1e-12 && c->answer_squares < 1e-9) || sum == 0 ? 0 : c->error_squares / sum;
}

static double cosine_limit(const comparison *c)
{
    /* Logits that are off by e turn the whole vector by at most about 2 e. */
    double turn = 4 * c->ours.logit * c->logit_max;
    double sum = c->answer_squares + c->reference_squares;
    double limit = c->ours.cosine + turn * turn;
    return sum > 0 ? limit + (c->rounding_squares + c->slack_squares) / sum : limit;
}

bool compare_angle_alone(const comparison *c)
{
    return c->wrong == 0 && c->wrong_published == 0 && !(compare_cosine(c) <= cosine_limit(c));
}

int compare_end(const comparison *c, char *why, size_t size)
{
    double cosine = compare_cosine(c), limit = cosine_limit(c);
    if (c->wrong > 0) {
        snprintf(why, size,
                 "%s: %lld of %lld elements; the first (query token %lld, head %lld) is %.9g, not %.9g +- %.3g",
                 quantity_name(c->what), (long long)c->wrong, (long long)c->count, (long long)c->first[0],
                 (long long)c->first[1], c->first_answer, c->first_reference, c->first_allowed);
        return -1;
    }
    if (!(cosine <= limit)) {
        snprintf(why, size, "%s: 1 - cosine is %.3g, allowed %.3g", quantity_name(c->what), cosine, limit);
        return -1;
    }
    if (c->wrong_published > 0 || !(cosine <= c->theirs.cosine)) {
        snprintf(why, size, "%s: the published bound: %lld elements, 1 - cosine %.3g", quantity_name(c->what),
                 (long long)c->wrong_published, cosine);
        return -1;
    }
    return 0;
}
