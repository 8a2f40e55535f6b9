/* SPDX-License-Identifier: MIT */
/*
 * quant_avx512bf16.c: tokens to bf16 tiles.
 *
 * e4m3 codes are looked up: two 128-byte tables (vpermi2b) give the low and the high byte of the bf16 value,
 * subnormals included. A power-of-two scale is then an addition to the exponent field, left out for zero: exact while
 * no product leaves bf16's normal range, that is for biased scale exponents 10..246. A token with another scale or a
 * NaN code is made of float products and one rounding.
 *
 * e2m1 codes index a table of the 16 products code * scale, two groups a register; every product fits bf16.
 *
 * VDPBF16PS and the bf16 conversions take subnormal numbers for zero, so neither is used here.
 */
#include "../quant/walk.h"
#include "cast_avx512bf16.h"
#include "simd_avx512bf16.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* ---- e4m3 -------------------------------------------------------------------------------------------- */

/* Bytes of the bf16 values of codes 0..63 and 64..127. */
typedef struct e4m3_tables {
    __m512i low[2], high[2];
} e4m3_tables;

#define E4M3_NAN 0x7FCF /* the only value with any of the low bits */
#define E4M3_LOW 0x0F

/* bf16 values of codes first..first+31 in 16-bit lanes. Normal ones keep their bits, moved, and change bias;
 * subnormals are m * 2^-9, from a list. */
ALWAYS_INLINE __m512i e4m3_values(int32_t first)
{
    static const uint16_t subnormal[32] = {0, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60};
    static const uint16_t count[32] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                       16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};
    __m512i code = _mm512_add_epi16(_mm512_loadu_si512(count), _mm512_set1_epi16((short)first));
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(code, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 is_subnormal = _mm512_cmple_epu16_mask(code, _mm512_set1_epi16(7));
    __mmask32 is_nan = _mm512_cmple_epu16_mask(_mm512_set1_epi16(127), code);
    value = _mm512_mask_mov_epi16(value, is_subnormal, _mm512_loadu_si512(subnormal));
    return _mm512_mask_mov_epi16(value, is_nan, _mm512_set1_epi16(E4M3_NAN));
}

ALWAYS_INLINE __m512i join(__m256i low, __m256i high)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

ALWAYS_INLINE e4m3_tables e4m3_make_tables(void)
{
    e4m3_tables t;
    for (int32_t h = 0; h < 2; h++) {
        __m512i a = e4m3_values(64 * h), b = e4m3_values(64 * h + 32);
        t.low[h] = join(_mm512_cvtepi16_epi8(a), _mm512_cvtepi16_epi8(b));
        t.high[h] = join(_mm512_cvtepi16_epi8(_mm512_srli_epi16(a, 8)),
                         _mm512_cvtepi16_epi8(_mm512_srli_epi16(b, 8)));
    }
    return t;
}

/* 64 codes times powers of two, whose exponents are added to those of the values: addends of the first and the second
 * 32. Zero stays. NaN comes out wrong; then the returned bytes have one of the bits of E4M3_LOW. */
ALWAYS_INLINE __m512i e4m3_shifted(uint16_t *dst, const uint8_t *codes, const e4m3_tables *t, __m512i first,
                                   __m512i second, __m512i bytes)
{
    /* So that unpacking within 128-bit lanes leaves codes in order. */
    const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), sign = _mm512_set1_epi8((char)0x80);
    __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    __m512i low = _mm512_permutex2var_epi8(t->low[0], code, t->low[1]);
    __m512i high = _mm512_permutex2var_epi8(t->high[0], code, t->high[1]);
    high = _mm512_ternarylogic_epi32(high, code, sign, 0xF8); /* high | (code & sign) */
    __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
    const __m512i size = _mm512_set1_epi16(0x7FFF);
    _mm512_storeu_si512(dst, _mm512_mask_add_epi16(a, _mm512_test_epi16_mask(a, size), a, first));
    _mm512_storeu_si512(dst + 32, _mm512_mask_add_epi16(b, _mm512_test_epi16_mask(b, size), b, second));
    return _mm512_or_si512(bytes, low);
}

/* Scales as biased exponents, up to 16 of them: what is added to the values of their groups, twice in 32 bits. */
typedef struct shifts {
    _Alignas(64) uint32_t addend[16];
} shifts;

/* Returns whether all n scales are powers of two by which no product leaves the normal range of bf16. */
ALWAYS_INLINE bool make_shifts(shifts *s, __m512i exponents, int32_t n)
{
    const __m512i least = _mm512_set1_epi32(10), most = _mm512_set1_epi32(246), bias = _mm512_set1_epi32(127);
    int32_t beyond = _mm512_cmpgt_epi32_mask(least, exponents) | _mm512_cmpgt_epi32_mask(exponents, most);
    __m512i addend = _mm512_slli_epi32(_mm512_sub_epi32(exponents, bias), 7);
    addend = _mm512_and_si512(addend, _mm512_set1_epi32(0xFFFF));
    _mm512_store_si512(s->addend, _mm512_or_si512(addend, _mm512_slli_epi32(addend, 16)));
    return (beyond & ((1 << n) - 1)) == 0;
}

ALWAYS_INLINE __m512i shift_at(const shifts *s, int32_t group)
{
    return _mm512_set1_epi32((int32_t)s->addend[group]);
}

/* 16 codes as floats, through fp16: see quant_avx2.c. */
ALWAYS_INLINE void e4m3_floats(const uint8_t *codes, __m256 *first, __m256 *second)
{
    const __m256i no_bit14 = _mm256_set1_epi16((short)0xBFFF), magnitude = _mm256_set1_epi16(0x7FFF);
    const __m256i nan_code = _mm256_set1_epi16(0x3F80), nan_bits = _mm256_set1_epi16(0x7E00);
    const __m256 unit = _mm256_set1_ps(256.0f);
    __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes));
    __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), no_bit14);
    __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, magnitude), nan_code);
    half = _mm256_or_si256(half, _mm256_and_si256(nan, nan_bits));
    *first = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), unit);
    *second = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), unit);
}

/* Nearest bf16, ties to even, in the low halves; NaN stays NaN. */
ALWAYS_INLINE __m256i round_to_bf16(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}

/* n codes (a multiple of 16) times any scale. */
static void e4m3_products(uint16_t *dst, const uint8_t *codes, int32_t n, float scale)
{
    const __m256 factor = _mm256_set1_ps(scale);
    for (int32_t j = 0; j < n; j += 16) {
        __m256 first, second;
        e4m3_floats(codes + j, &first, &second);
        __m256i packed = _mm256_packus_epi32(round_to_bf16(_mm256_mul_ps(first, factor)),
                                             round_to_bf16(_mm256_mul_ps(second, factor)));
        _mm256_storeu_si256((__m256i *)(dst + j), _mm256_permute4x64_epi64(packed, 0xD8));
    }
}

/* ---- e2m1 -------------------------------------------------------------------------------------------- */

/* The 16 products of codes with each scale that is not negative: bf16. */
typedef struct e2m1_tables {
    _Alignas(64) uint16_t of_scale[128][16];
} e2m1_tables;

static void e2m1_make_tables(e2m1_tables *t)
{
    const __m512 values = _mm512_set_ps(-6.0f, -4.0f, -3.0f, -2.0f, -1.5f, -1.0f, -0.5f, -0.0f, 6.0f, 4.0f,
                                        3.0f, 2.0f, 1.5f, 1.0f, 0.5f, 0.0f);
    const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                           25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    static const uint8_t count[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int32_t first = 0; first < 128; first += 16) {
        float scales[16];
        uint8_t codes[16];
        __m256 low, high;
        _mm_storeu_si128((__m128i *)codes,
                         _mm_add_epi8(_mm_loadu_si128((const __m128i *)count), _mm_set1_epi8((char)first)));
        e4m3_floats(codes, &low, &high);
        _mm256_storeu_ps(scales, low);
        _mm256_storeu_ps(scales + 8, high);
        for (int32_t i = 0; i < 16; i += 2) {
            __m512i one = _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(scales[i])));
            __m512i next = _mm512_castps_si512(_mm512_mul_ps(values, _mm512_set1_ps(scales[i + 1])));
            _mm512_store_si512(t->of_scale[first + i], _mm512_permutex2var_epi16(one, upper, next));
        }
    }
}

/* 32 codes: two groups of 16, and the tables of their scales. */
ALWAYS_INLINE void e2m1_pair(uint16_t *dst, const uint8_t *codes, const uint16_t *first, const uint16_t *second)
{
    const __m512i group = join(_mm256_setzero_si256(), _mm256_set1_epi16(16));
    /* Bits 4 j and on of two bytes, for each of their codes j; vpermw looks at the low five bits only. */
    const __m512i from = _mm512_set1_epi64(0x0C0C080804040000);
    __m512i table = join(_mm256_load_si256((const __m256i *)first), _mm256_load_si256((const __m256i *)second));
    __m512i index = _mm512_multishift_epi64_epi8(from, _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i *)codes)));
    index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15), group, 0xEA); /* (index & 15) | group */
    _mm512_storeu_si512(dst, _mm512_permutexvar_epi16(index, table));
}

/* Groups whose bits are set. */
static void e2m1_negate(uint16_t *dst, uint32_t groups)
{
    const __m256i sign = _mm256_set1_epi16((short)0x8000);
    for (int32_t g = 0; g < 32; g++) {
        if (groups >> g & 1) {
            __m256i *at = (__m256i *)(dst + 16 * g);
            _mm256_storeu_si256(at, _mm256_xor_si256(_mm256_loadu_si256(at), sign));
        }
    }
}

/* ---- formats ----------------------------------------------------------------------------------------- */

/* Any scales and codes. */
static void e4m3_groups(uint16_t *dst, const uint8_t *codes, int32_t groups, int32_t group, const float *scales)
{
    for (int32_t g = 0; g < groups; g++) {
        e4m3_products(dst + g * group, codes + g * group, group, scales[g]);
    }
}

static void expand_v32(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                       int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    const e4m3_tables tables = e4m3_make_tables();
    (void)head;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, 0, 656);
        uint16_t *out = (uint16_t *)dst + i * dst_stride;
        float scales[4];
        shifts s;
        memcpy(scales, at.scales, sizeof scales);
        __m128i bits = _mm_loadu_si128((const __m128i *)at.scales);
        bool powers = _mm_test_all_zeros(bits, _mm_set1_epi32((int)0x807FFFFF));
        __m512i bytes = _mm512_setzero_si512();
        if (make_shifts(&s, _mm512_castsi128_si512(_mm_srli_epi32(bits, 23)), 4) && powers) {
#pragma GCC unroll 8
            for (int32_t j = 0; j < 8; j++) {
                __m512i shift = shift_at(&s, j / 2);
                bytes = e4m3_shifted(out + 64 * j, at.row + 64 * j, &tables, shift, shift, bytes);
            }
        } else {
            bytes = _mm512_set1_epi8(-1);
        }
        if (_mm512_test_epi8_mask(bytes, _mm512_set1_epi8(E4M3_LOW))) {
            e4m3_groups(out, at.row, 4, 128, scales);
        }
        memcpy(out + 512, at.row + 528, 128);
    }
}

/* n groups of 32 or 64 codes (a constant in each caller) with scales that are exponents. */
ALWAYS_INLINE void e8m0_groups(uint16_t *dst, const uint8_t *codes, const e4m3_tables *tables, const uint8_t *scales,
                               int32_t n, int32_t group)
{
    shifts s;
    __m512i wide = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8((__mmask16)((1 << n) - 1), scales));
    __m512i bytes = _mm512_setzero_si512();
    if (make_shifts(&s, wide, n)) {
#pragma GCC unroll 8
        for (int32_t j = 0; j < n * group / 64; j++) {
            __m512i first = shift_at(&s, 64 * j / group), second = shift_at(&s, (64 * j + 32) / group);
            bytes = e4m3_shifted(dst + 64 * j, codes + 64 * j, tables, first, second, bytes);
        }
    } else {
        bytes = _mm512_set1_epi8(-1);
    }
    if (_mm512_test_epi8_mask(bytes, _mm512_set1_epi8(E4M3_LOW))) {
        float factors[16];
        for (int32_t g = 0; g < n; g++) {
            factors[g] = fmlai_f32_from_e8m0(scales[g]);
        }
        e4m3_groups(dst, codes, n, group, factors);
    }
}

static void expand_v4(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                      int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    const e4m3_tables tables = e4m3_make_tables();
    (void)head;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, 0, 576);
        uint16_t *out = (uint16_t *)dst + i * dst_stride;
        e8m0_groups(out, at.row, &tables, at.scales, 7, 64);
        memcpy(out + 448, at.row + 448, 128);
    }
}

static void expand_v41(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                       int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    const e4m3_tables tables = e4m3_make_tables();
    (void)head;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, 0, 512);
        e8m0_groups((uint16_t *)dst + i * dst_stride, at.row, &tables, at.scales, 16, 32);
    }
}

static void expand_v41_fp4(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head,
                           void *dst, int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    e2m1_tables tables;
    (void)head;
    e2m1_make_tables(&tables);
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, 0, 256);
        uint16_t *out = (uint16_t *)dst + i * dst_stride;
        const uint8_t *scales = at.scales;
        uint8_t sizes[32];
        __m256i all = _mm256_loadu_si256((const __m256i *)scales);
        uint32_t negative = (uint32_t)_mm256_movemask_epi8(all);
        if (negative) {
            _mm256_storeu_si256((__m256i *)sizes, _mm256_and_si256(all, _mm256_set1_epi8(127)));
            scales = sizes;
        }
#pragma GCC unroll 16
        for (int32_t g = 0; g < 32; g += 2) {
            e2m1_pair(out + 16 * g, at.row + 8 * g, tables.of_scale[scales[g]], tables.of_scale[scales[g + 1]]);
        }
        if (negative) {
            e2m1_negate(out, negative);
        }
    }
}

static void expand_plain(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                         int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    int32_t d_qk = pool->format.d_qk;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, head * pool->head_stride, 2 * d_qk);
        memcpy((uint16_t *)dst + i * dst_stride, at.row + head * pool->head_stride, 2 * (size_t)d_qk);
    }
}

void fmlai_quant_init_avx512bf16(fmlai_quant_kernels *k)
{
    k->expand_bf16[FMLA_KV_BF16] = expand_plain;
    k->expand_bf16[FMLA_KV_V32] = expand_v32;
    k->expand_bf16[FMLA_KV_V4] = expand_v4;
    k->expand_bf16[FMLA_KV_V41] = expand_v41;
    k->expand_bf16[FMLA_KV_V41_PAGE] = expand_v41;
    k->expand_bf16[FMLA_KV_V41_FP4] = expand_v41_fp4;
    k->expand_bf16[FMLA_KV_V41_FP4_PAGE] = expand_v41_fp4;
    k->cast_row = fmlak_cast_row_avx512bf16;
}
