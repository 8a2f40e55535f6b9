/* SPDX-License-Identifier: MIT */
/*
 * compare.h: how far a result may be from the float64 reference, in one table, and the sums that tell how far it is.
 *
 * Two bounds hold at once for every tensor: our own, derived from the roundings that a kernel may make, and the one
 * that the published kernels' tests use with data like theirs.
 */
#ifndef FLASHMLA_TOOL_COMPARE_H
#define FLASHMLA_TOOL_COMPARE_H

#include <stdbool.h>

#include <flashmla/flashmla.h>

/* How a kernel keeps its softmax weights. */
typedef enum weight_class {
    CLASS_S = 0, /* in fp32: scalar, AVX2, NEON */
    CLASS_B = 1, /* rounded to bf16 or fp16 before they meet V: CUDA */
    CLASS_M = 2  /* bf16 data as in class B, fp16 data as in class S: AVX-512 BF16, AMX */
} weight_class;

weight_class class_of(const fmla_context *context);

typedef enum quantity {
    QUANTITY_OUT = 0,
    QUANTITY_LSE,
    QUANTITY_MAX_LOGITS,
    QUANTITY_GRADIENT,
    QUANTITY_FUSED_CAST, /* fused output against the reference's own cast */
    QUANTITY_FUSED_OUT,  /* fused output against the exact one */
    QUANTITY_COUNT
} quantity;

/*
 * |error| <= relative * |x| + magnitude * A + 2 logit * L * A + logit * L + floor, for every element x of the
 * reference; A and L are the sums of absolute values that go into x and into its logits. Over the tensor, 1 - cosine
 * may exceed what rounding the reference to the output's dtype costs by `cosine`.
 */
typedef struct tolerance {
    double relative, magnitude, logit, floor, cosine;
} tolerance;

tolerance tolerance_of(quantity what, weight_class class, int32_t dtype);

/* |a - x| < absolute, or |a - x| < relative * (|x| + 1e-6); 1 - cosine <= cosine. absolute < 0: there is none. */
typedef struct published {
    double absolute, relative, cosine;
} published;

published published_of(quantity what, fmla_operation op);

typedef struct comparison {
    quantity what;
    tolerance ours;
    published theirs;
    double worst; /* largest error / allowed */
    double max_error, max_value;
    double error_squares, rounding_squares;
    int32_t dtype;
    double slack_squares; /* what compare_slack allows */
    double answer_squares, reference_squares;
    double logit_max;
    int64_t count, wrong, wrong_published;
    int64_t first[2]; /* query token and head of the first wrong element */
    double first_answer, first_reference, first_allowed;
} comparison;

/* theirs: does the published bound apply to this data? */
void compare_begin(comparison *c, quantity what, weight_class class, int32_t dtype, fmla_operation op, int theirs);
/* One element; A and L as above; token and head are for the message. Infinities and NaN must agree exactly. */
void compare_add(comparison *c, double answer, double reference, double A, double L, int64_t token, int64_t head);
/* An element, or a row, may be off by `step` with probability `chance`: codes on ties, differences near zero. */
void compare_slack(comparison *c, double step, double chance);
/* 1 - 2 sum(a x) / (sum(a a) + sum(x x)); 0 if both are next to nothing. */
double compare_cosine(const comparison *c);
/* Every element is near enough, the vector as a whole is not. */
bool compare_angle_alone(const comparison *c);
/* 0, or -1 with a line that says what is too far. */
int compare_end(const comparison *c, char *why, size_t size);
const char *quantity_name(quantity what);

#endif
