/* SPDX-License-Identifier: MIT */
/*
 * support_numbers.h: number formats a second time, by arithmetic on doubles instead of bits, and a generator
 * of inputs. What the library computes is compared with this.
 */
#ifndef FLASHMLA_TEST_SUPPORT_NUMBERS_H
#define FLASHMLA_TEST_SUPPORT_NUMBERS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct reference_format {
    int fraction_bits;
    int min_exponent;
    double largest; /* finite */
} reference_format;

extern const reference_format reference_bf16, reference_f16, reference_e4m3, reference_e2m1;

/* x rounded to the format, ties to even; beyond the largest number infinity. */
double reference_round(const reference_format *format, double x);
/* Values of codes, by their definition. */
double reference_e4m3_value(int code); /* NaN for 0x7F and 0xFF */
double reference_e8m0_value(int code); /* NaN for 0xFF */
double reference_e2m1_value(int code);
/* Smallest e with 2^e >= x, by search; x > 0. */
int reference_ceil_log2(double x);

/* The same number bit for bit, or both NaN. */
bool same_f32(float a, float b);

/* xorshift: the same sequence everywhere. */
uint64_t test_random(uint64_t *state);
float test_random_unit(uint64_t *state);                                     /* -1..1 */
float test_random_bf16(uint64_t *state, int min_exponent, int max_exponent); /* any sign, a bf16 value */

#endif
