/* SPDX-License-Identifier: MIT */
/*
 * The cast of fused outputs (and of weights prepared for them): e4m3 codes with one power-of-two scale per
 * group, 2^ceil(log2(max(amax, 1e-4) / 448)). Unlike the cache quantisers it limits amax itself, not the
 * quotient. A NaN element becomes a NaN code and leaves the scale alone; with an infinite one the whole group
 * is NaN.
 */
#include <math.h>
#include <string.h>

#include "format.h"

#define CODE_NAN  0x7F
#define SCALE_NAN 0xFF
#define E8M0_BIAS 127

static uint8_t cast_nan(int32_t n, uint8_t *codes)
{
    memset(codes, CODE_NAN, (size_t)n);
    return SCALE_NAN;
}

uint8_t fmlai_fp8_cast_group(const float *x, int32_t n, uint8_t *codes)
{
    float amax = 1e-4f;
    for (int32_t i = 0; i < n; i++) {
        amax = fmaxf(amax, fabsf(x[i]));
    }
    if (isinf(amax)) {
        return cast_nan(n, codes);
    }
    int e = fmlai_ceil_log2_f32(amax / 448.0f);
    float inverse = ldexpf(1.0f, -e);
    for (int32_t i = 0; i < n; i++) {
        codes[i] = isnan(x[i]) ? CODE_NAN : fmlai_e4m3_from_f32_saturating(x[i] * inverse);
    }
    return (uint8_t)(e + E8M0_BIAS);
}

uint8_t fmlai_fp8_cast_group_f64(const double *x, int32_t n, uint8_t *codes)
{
    double amax = (double)1e-4f;
    for (int32_t i = 0; i < n; i++) {
        amax = fmax(amax, fabs(x[i]));
    }
    if (amax > (double)3.40282347e38f) { /* infinite, or infinite as a float */
        return cast_nan(n, codes);
    }
    int e = 0;
    double fraction = frexp(amax / 448.0, &e); /* 0.5 <= fraction < 1 */
    e -= fraction == 0.5;
    for (int32_t i = 0; i < n; i++) {
        codes[i] = isnan(x[i]) ? CODE_NAN : fmlai_e4m3_from_f64_saturating(ldexp(x[i], -e));
    }
    return (uint8_t)(e + E8M0_BIAS);
}
