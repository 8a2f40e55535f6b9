/* SPDX-License-Identifier: MIT */
/*
 * Number formats by arithmetic: a value is a multiple of its binade's quantum, and rint() rounds ties to
 * even.
 */
#include "support_numbers.h"

#include <math.h>
#include <string.h>

const reference_format reference_bf16 = {7, -126, 0x1.FEp127};
const reference_format reference_f16 = {10, -14, 65504.0};
const reference_format reference_e4m3 = {3, -6, 448.0};
const reference_format reference_e2m1 = {1, 0, 6.0};

double reference_round(const reference_format *format, double x)
{
    if (x == 0.0 || !isfinite(x)) {
        return x;
    }
    int exponent = ilogb(x);
    exponent = exponent < format->min_exponent ? format->min_exponent : exponent;
    double quantum = ldexp(1.0, exponent - format->fraction_bits);
    double rounded = copysign(rint(fabs(x) / quantum) * quantum, x);
    return fabs(rounded) > format->largest ? copysign(INFINITY, x) : rounded;
}

double reference_e4m3_value(int code)
{
    double sign = code & 0x80 ? -1.0 : 1.0;
    int e = code >> 3 & 15, m = code & 7;
    if (e == 15 && m == 7) {
        return NAN;
    }
    return sign * (e > 0 ? ldexp(1.0 + m / 8.0, e - 7) : ldexp(m, -9));
}

double reference_e8m0_value(int code)
{
    return code == 255 ? NAN : ldexp(1.0, code - 127);
}

double reference_e2m1_value(int code)
{
    double sign = code & 8 ? -1.0 : 1.0;
    int e = code >> 1 & 3, m = code & 1;
    return sign * (e > 0 ? ldexp(1.0 + m / 2.0, e - 1) : m / 2.0);
}

int reference_ceil_log2(double x)
{
    int e = -1100;
    while (ldexp(1.0, e) < x) {
        e++;
    }
    return e;
}

bool same_f32(float a, float b)
{
    return (isnan(a) && isnan(b)) || memcmp(&a, &b, sizeof a) == 0;
}

uint64_t test_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state * 0x2545F4914F6CDD1Du;
}

float test_random_unit(uint64_t *state)
{
    return (float)(test_random(state) >> 40) / 8388608.0f - 1.0f;
}

float test_random_bf16(uint64_t *state, int min_exponent, int max_exponent)
{
    uint64_t r = test_random(state);
    int e = min_exponent + (int)((r >> 32) % (uint64_t)(max_exponent - min_exponent + 1));
    float magnitude = ldexpf(1.0f + (float)(r >> 16 & 127) / 128.0f, e);
    return r & 1 ? -magnitude : magnitude;
}
