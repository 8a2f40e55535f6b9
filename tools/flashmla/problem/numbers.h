/* SPDX-License-Identifier: MIT */
/*
 * numbers.h: number formats as the program knows them, written apart from the library's own, and access to
 * single elements of tensors.
 */
#ifndef FLASHMLA_TOOL_PROBLEM_NUMBERS_H
#define FLASHMLA_TOOL_PROBLEM_NUMBERS_H

#include <flashmla/flashmla.h>
#include <stdbool.h>

uint16_t bf16_bits(float x); /* nearest even */
uint16_t f16_bits(float x);
float bf16_value(uint16_t bits);
float f16_value(uint16_t bits);
float e4m3_value(uint8_t code);
double e8m0_value(uint8_t code);
/* Quantiser D on n values of one head: codes' values times the scale into back, and the scale byte. */
uint8_t cast_group(const double *x, int n, double *back);

/* Element i of a run of numbers, in elements of dtype. */
double number_get(const void *data, int32_t dtype, int64_t i);
void number_set(void *data, int32_t dtype, int64_t i, double value);

/* Are n numbers of bf16, fp16 or fp32 all finite? */
bool numbers_finite(const void *data, int32_t dtype, int64_t n);

/* x rounded to dtype. */
double number_round(int32_t dtype, double x);
/* x rounded to a multiple that e4m3 can hold at scale 2^exponent, and the step between such numbers at x. */
double cast_round(double x, int exponent);
double cast_step(double x, int exponent);

/* Elements of tensors of rank 1..4. */
int64_t tensor_offset(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3);
double tensor_get(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3);
void tensor_set(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double value);
int32_t tensor_i32(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2);
int64_t tensor_elements(const fmla_tensor *t);
/* Copies all elements to dst, row-major; returns their bytes. */
size_t tensor_pack(const fmla_tensor *t, uint8_t *dst);
/* Copies all elements between tensors of one shape and dtype. */
void tensor_copy(const fmla_tensor *to, const fmla_tensor *from);
/* Are the elements the packed ones? */
bool tensor_equals(const fmla_tensor *t, const uint8_t *packed);
/* Is every byte of a block that belongs to no element of t, which lies in it, `byte`? */
bool tensor_gaps_are(const fmla_tensor *t, const void *block, size_t size, uint8_t byte);
/* Sets every byte of every element. */
void tensor_fill(const fmla_tensor *t, uint8_t byte);
/* Bytes from the first element to behind the last; strides are not negative. */
size_t tensor_span(const fmla_tensor *t);

#endif
