/* SPDX-License-Identifier: MIT */
/* numbers.c: bf16, fp16, e4m3, e8m0 as numbers; elements of tensors. */
#include "problem/numbers.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

uint16_t bf16_bits(float x)
{
    uint32_t bits = bits_of(x);
    if (isnan(x)) {
        return (uint16_t)((bits >> 16) | 0x40);
    }
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float bf16_value(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

uint16_t f16_bits(float x)
{
    uint16_t sign = (uint16_t)((bits_of(x) >> 16) & 0x8000);
    uint32_t bits = bits_of(x) & 0x7FFFFFFF;
    if (isnan(x)) {
        return (uint16_t)(sign | 0x7E00);
    }
    if (bits >= bits_of(65520)) {
        return (uint16_t)(sign | 0x7C00);
    }
    if (bits < bits_of(0x1p-14f)) { /* floats of 0.5 to 1 are as far apart as these numbers: the sum rounds */
        return (uint16_t)(sign | (bits_of(float_of(bits) + 0.5f) - bits_of(0.5f)));
    }
    bits += 0xFFF + ((bits >> 13) & 1); /* a carry moves into the exponent */
    return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}

float f16_value(uint16_t bits)
{
    int e = (bits >> 10) & 31;
    int m = bits & 1023;
    double a;
    if (e == 31) {
        a = m ? NAN : INFINITY;
    } else {
        a = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    }
    return (float)(bits & 0x8000 ? -a : a);
}

float e4m3_value(uint8_t code)
{
    int e = (code >> 3) & 15;
    int m = code & 7;
    double a;
    if ((code & 0x7F) == 0x7F) {
        return NAN;
    }
    a = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return (float)(code & 0x80 ? -a : a);
}

double e8m0_value(uint8_t code)
{
    return code == 0xFF ? (double)NAN : ldexp(1.0, code - 127);
}

/* The e4m3 number nearest to x, |x| <= 448 and a little more: ties to even. */
static double e4m3_round(double x)
{
    double a = fabs(x);
    int e;
    if (a == 0) {
        return 0;
    }
    frexp(a, &e);
    double step = ldexp(1.0, (e - 1 < -6 ? -6 : e - 1) - 3);
    double r = nearbyint(a / step) * step;
    return copysign(r > 448 ? 448 : r, x);
}

double cast_round(double x, int exponent)
{
    return ldexp(e4m3_round(ldexp(x, -exponent)), exponent);
}

double cast_step(double x, int exponent)
{
    int e;
    frexp(x, &e);
    e -= 4; /* a code has three bits of fraction */
    return ldexp(1.0, x == 0 || e < exponent - 9 ? exponent - 9 : e);
}

double number_round(int32_t dtype, double x)
{
    double rounded;
    number_set(&rounded, dtype, 0, x);
    return number_get(&rounded, dtype, 0);
}

uint8_t cast_group(const double *x, int n, double *back)
{
    double amax = 1e-4f;
    for (int i = 0; i < n; i++) {
        if (fabs(x[i]) > amax) {
            amax = fabs(x[i]);
        }
    }
    int e;
    double m = frexp(amax / 448, &e);
    if (m == 0.5) {
        e--;
    }
    for (int i = 0; i < n; i++) {
        back[i] = e4m3_round(ldexp(x[i], -e)) * ldexp(1.0, e);
    }
    return (uint8_t)(e + 127);
}

double number_get(const void *data, int32_t dtype, int64_t i)
{
    switch (dtype) {
    case FMLA_BF16:
        return (double)bf16_value(((const uint16_t *)data)[i]);
    case FMLA_F16:
        return (double)f16_value(((const uint16_t *)data)[i]);
    case FMLA_F32:
        return (double)((const float *)data)[i];
    case FMLA_F64:
        return ((const double *)data)[i];
    case FMLA_I32:
        return ((const int32_t *)data)[i];
    case FMLA_I64:
        return (double)((const int64_t *)data)[i];
    case FMLA_F8_E4M3:
        return (double)e4m3_value(((const uint8_t *)data)[i]);
    case FMLA_F8_E8M0:
        return e8m0_value(((const uint8_t *)data)[i]);
    default:
        return ((const uint8_t *)data)[i];
    }
}

void number_set(void *data, int32_t dtype, int64_t i, double value)
{
    switch (dtype) {
    case FMLA_BF16:
        ((uint16_t *)data)[i] = bf16_bits((float)value);
        break;
    case FMLA_F16:
        ((uint16_t *)data)[i] = f16_bits((float)value);
        break;
    case FMLA_F32:
        ((float *)data)[i] = (float)value;
        break;
    case FMLA_F64:
        ((double *)data)[i] = value;
        break;
    case FMLA_I32:
        ((int32_t *)data)[i] = (int32_t)value;
        break;
    case FMLA_I64:
        ((int64_t *)data)[i] = (int64_t)value;
        break;
    default:
        ((uint8_t *)data)[i] = (uint8_t)value;
        break;
    }
}

bool numbers_finite(const void *data, int32_t dtype, int64_t n)
{
    unsigned bad = 0;
    if (dtype == FMLA_F32) {
        const uint32_t *x = data;
        for (int64_t i = 0; i < n; i++) {
            bad |= (x[i] & 0x7F800000u) == 0x7F800000u;
        }
        return !bad;
    }
    const uint16_t *x = data;
    const uint16_t exponent = dtype == FMLA_BF16 ? 0x7F80 : 0x7C00;
    for (int64_t i = 0; i < n; i++) {
        bad |= (x[i] & exponent) == exponent;
    }
    return !bad;
}

int64_t tensor_offset(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    const int64_t index[4] = {i0, i1, i2, i3};
    int64_t offset = 0;
    for (int32_t d = 0; d < t->rank && d < 4; d++) {
        offset += index[d] * t->stride[d];
    }
    return offset;
}

double tensor_get(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3)
{
    return number_get(t->data, t->dtype, tensor_offset(t, i0, i1, i2, i3));
}

void tensor_set(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2, int64_t i3, double value)
{
    number_set(t->data, t->dtype, tensor_offset(t, i0, i1, i2, i3), value);
}

int32_t tensor_i32(const fmla_tensor *t, int64_t i0, int64_t i1, int64_t i2)
{
    return ((const int32_t *)t->data)[tensor_offset(t, i0, i1, i2, 0)];
}

int64_t tensor_elements(const fmla_tensor *t)
{
    int64_t n = 1;
    for (int32_t d = 0; d < t->rank; d++) {
        n *= t->shape[d];
    }
    return t->rank ? n : 0;
}

size_t tensor_span(const fmla_tensor *t)
{
    int64_t last = 0;
    if (tensor_elements(t) == 0) {
        return 0;
    }
    for (int32_t d = 0; d < t->rank; d++) {
        last += (t->shape[d] - 1) * t->stride[d];
    }
    return (size_t)(last + 1) * fmla_dtype_size((fmla_dtype)t->dtype);
}

/* The walk that all of them share: offsets of runs of elements, row-major. A run is as many of the last dimensions as
 * lie side by side, in `also` too if it is given; else one element. */
typedef struct walk {
    int64_t index[FMLA_MAX_RANK];
    int64_t left;
    int32_t rank; /* dimensions that are walked */
    size_t run;   /* bytes */
} walk;

static walk walk_begin(const fmla_tensor *t, const fmla_tensor *also)
{
    walk w = {{0}, tensor_elements(t), t->rank, fmla_dtype_size((fmla_dtype)t->dtype)};
    int64_t together = 1; /* elements of a run */
    while (w.left > 0 && w.rank > 0 && t->stride[w.rank - 1] == together &&
           (also == NULL || also->stride[w.rank - 1] == together)) {
        w.rank--;
        w.left /= t->shape[w.rank];
        together *= t->shape[w.rank];
    }
    w.run *= (size_t)together;
    return w;
}

static int64_t walk_offset(const walk *w, const fmla_tensor *t)
{
    int64_t offset = 0;
    for (int32_t d = 0; d < w->rank; d++) {
        offset += w->index[d] * t->stride[d];
    }
    return offset * (int64_t)fmla_dtype_size((fmla_dtype)t->dtype);
}

static void walk_next(walk *w, const fmla_tensor *t)
{
    w->left--;
    for (int32_t d = w->rank - 1; d >= 0 && ++w->index[d] == t->shape[d]; d--) {
        w->index[d] = 0;
    }
}

size_t tensor_pack(const fmla_tensor *t, uint8_t *dst)
{
    size_t at = 0;
    for (walk w = walk_begin(t, NULL); w.left > 0; walk_next(&w, t), at += w.run) {
        memcpy(dst + at, (const uint8_t *)t->data + walk_offset(&w, t), w.run);
    }
    return at;
}

void tensor_copy(const fmla_tensor *to, const fmla_tensor *from)
{
    for (walk w = walk_begin(from, to); w.left > 0; walk_next(&w, from)) {
        memcpy((uint8_t *)to->data + walk_offset(&w, to), (const uint8_t *)from->data + walk_offset(&w, from), w.run);
    }
}

void tensor_fill(const fmla_tensor *t, uint8_t byte)
{
    for (walk w = walk_begin(t, NULL); w.left > 0; walk_next(&w, t)) {
        memset((uint8_t *)t->data + walk_offset(&w, t), byte, w.run);
    }
}

bool tensor_equals(const fmla_tensor *t, const uint8_t *packed)
{
    size_t at = 0;
    for (walk w = walk_begin(t, NULL); w.left > 0; walk_next(&w, t), at += w.run) {
        if (memcmp(packed + at, (const uint8_t *)t->data + walk_offset(&w, t), w.run) != 0) {
            return false;
        }
    }
    return true;
}

/* The same elements with the dimensions in the order of their strides: the runs lie one behind the other. */
static fmla_tensor in_order_of_memory(const fmla_tensor *t)
{
    fmla_tensor o = *t;
    for (int32_t i = 1; i < o.rank; i++) {
        for (int32_t d = i; d > 0; d--) {
            int64_t shape = o.shape[d], stride = o.stride[d];
            if (stride < o.stride[d - 1] || (stride == o.stride[d - 1] && shape <= o.shape[d - 1])) {
                break;
            }
            o.shape[d] = o.shape[d - 1];
            o.stride[d] = o.stride[d - 1];
            o.shape[d - 1] = shape;
            o.stride[d - 1] = stride;
        }
    }
    return o;
}

/* The first byte is, and each is like the one before it. */
static bool bytes_are(const uint8_t *p, const uint8_t *end, uint8_t byte)
{
    return p >= end || (*p == byte && memcmp(p, p + 1, (size_t)(end - p) - 1) == 0);
}

bool tensor_gaps_are(const fmla_tensor *t, const void *block, size_t size, uint8_t byte)
{
    fmla_tensor o = in_order_of_memory(t);
    const uint8_t *at = block, *end = at + size;
    for (walk w = walk_begin(&o, NULL); w.left > 0; walk_next(&w, &o)) {
        const uint8_t *run = (const uint8_t *)o.data + walk_offset(&w, &o);
        if (!bytes_are(at, run, byte)) {
            return false;
        }
        at = run + w.run;
    }
    return bytes_are(at, end, byte);
}
