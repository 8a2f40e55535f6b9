/* SPDX-License-Identifier: MIT */
/*
 * quant_avx2.c: tokens to floats and bf16 with AVX2 and F16C, and the quantisers.
 *
 * e4m3 goes through fp16: its exponent and fraction moved to fp16's places make the value times 2^-8,
 * subnormals included, and the conversion to float ignores denormals-are-zero. NaN codes get fp16's NaN
 * exponent. The product with the scale is one float product, rounded to bf16 only where it can have more than
 * bf16's bits.
 */
#include <immintrin.h>
#include <math.h>

#include "../quant/walk.h"
#include "../rows.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* ---- codes ------------------------------------------------------------------------------------------- */

/* Nearest bf16, ties to even, as float; NaN stays NaN. */
ALWAYS_INLINE __m256 round_to_bf16(__m256 x)
{
    const __m256i upper = _mm256_set1_epi32((int)0xFFFF0000u);
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    return _mm256_blendv_ps(_mm256_castsi256_ps(_mm256_and_si256(rounded, upper)),
                            _mm256_castsi256_ps(_mm256_and_si256(quiet, upper)), nan);
}

/* Where 16 values go: floats as they are, floats rounded to bf16, bf16. A constant in each caller. */
typedef enum target { TARGET_EXACT, TARGET_F32, TARGET_BF16 } target;

/* round: the values may have more bits than bf16. */
ALWAYS_INLINE void put_16(void *dst, int32_t at, __m256 low, __m256 high, bool round, target to)
{
    if (round && to != TARGET_EXACT) {
        low = round_to_bf16(low);
        high = round_to_bf16(high);
    }
    if (to == TARGET_BF16) {
        __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(_mm256_castps_si256(low), 16),
                                             _mm256_srli_epi32(_mm256_castps_si256(high), 16));
        _mm256_storeu_si256((__m256i *)((uint16_t *)dst + at), _mm256_permute4x64_epi64(packed, 0xD8));
    } else {
        _mm256_storeu_ps((float *)dst + at, low);
        _mm256_storeu_ps((float *)dst + at + 8, high);
    }
}

/* n codes (a multiple of 16) of one group, to dst[at..]. */
ALWAYS_INLINE void e4m3_group(void *dst, int32_t at, const uint8_t *codes, int32_t n, float scale, bool round,
                              target to)
{
    const __m256i no_bit14 = _mm256_set1_epi16((short)0xBFFF), magnitude = _mm256_set1_epi16(0x7FFF);
    const __m256i nan_code = _mm256_set1_epi16(0x3F80), nan_bits = _mm256_set1_epi16(0x7E00);
    const __m256 unit = _mm256_set1_ps(256.0f), factor = _mm256_set1_ps(scale);
    for (int32_t j = 0; j < n; j += 16) {
        __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(codes + j)));
        __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), no_bit14);
        __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, magnitude), nan_code);
        half = _mm256_or_si256(half, _mm256_and_si256(nan, nan_bits));
        __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
        __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
        low = _mm256_mul_ps(_mm256_mul_ps(low, unit), factor);
        high = _mm256_mul_ps(_mm256_mul_ps(high, unit), factor);
        put_16(dst, at + j, low, high, round, to);
    }
}

/* 16 codes of one group: the eight magnitudes times the scale are a table; every product fits bf16. */
ALWAYS_INLINE void e2m1_group(void *dst, int32_t at, const uint8_t *codes, float scale, target to)
{
    const __m256 magnitudes = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    const __m128i low4 = _mm_set1_epi8(15);
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u);
    __m256 table = _mm256_mul_ps(magnitudes, _mm256_set1_ps(scale)), value[2];
    __m128i bytes = _mm_loadl_epi64((const __m128i *)codes);
    __m128i both =
        _mm_unpacklo_epi8(_mm_and_si128(bytes, low4), _mm_and_si128(_mm_srli_epi16(bytes, 4), low4));
    for (int32_t half = 0; half < 2; half++) {
        __m256i code = _mm256_cvtepu8_epi32(both);
        __m256i negative = _mm256_and_si256(_mm256_slli_epi32(code, 28), sign);
        value[half] = _mm256_xor_ps(_mm256_permutevar8x32_ps(table, code), _mm256_castsi256_ps(negative));
        both = _mm_unpackhi_epi64(both, both);
    }
    put_16(dst, at, value[0], value[1], false, to);
}

static void bf16_row(float *dst, const uint8_t *src, int32_t n)
{
    int32_t j = 0;
    for (; j + 8 <= n; j += 8) {
        __m128i half = _mm_loadu_si128((const __m128i *)(src + 2 * (int64_t)j));
        __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
        _mm256_storeu_ps(dst + j, _mm256_castsi256_ps(bits));
    }
    fmlai_row_load(dst + j, src, FMLA_BF16, j, n - j);
}

/* n bf16 values to dst[at..]. */
ALWAYS_INLINE void bf16_values(void *dst, int32_t at, const uint8_t *src, int32_t n, target to)
{
    if (to == TARGET_BF16) {
        memcpy((uint16_t *)dst + at, src, 2 * (size_t)n);
    } else {
        bf16_row((float *)dst + at, src, n);
    }
}

static void f16_row(float *dst, const uint8_t *src, int32_t n)
{
    int32_t j = 0;
    for (; j + 8 <= n; j += 8) {
        _mm256_storeu_ps(dst + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(src + 2 * (int64_t)j))));
    }
    if (j < n) {
        uint16_t half[8] = {0};
        float last[8];
        memcpy(half, src + 2 * (int64_t)j, 2 * (size_t)(n - j));
        _mm256_storeu_ps(last, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half)));
        memcpy(dst + j, last, (size_t)(n - j) * sizeof *last);
    }
}

/* ---- formats ----------------------------------------------------------------------------------------- */

/* Products of e4m3 codes with a power of two of at least 2^-124 need no rounding: they fit bf16, or overflow
 * floats, too. */
ALWAYS_INLINE bool products_fit(int32_t biased_exponent)
{
    return biased_exponent >= 3;
}

ALWAYS_INLINE void e8m0_groups(void *dst, const uint8_t *codes, const uint8_t *scales, int32_t dims,
                               int32_t group, target to)
{
    for (int32_t g = 0; g < dims / group; g++) {
        float scale = fmlai_f32_from_e8m0(scales[g]);
        if (products_fit(scales[g])) {
            e4m3_group(dst, g * group, codes + g * group, group, scale, false, to);
        } else {
            e4m3_group(dst, g * group, codes + g * group, group, scale, true, to);
        }
    }
}

/* One token each. */
ALWAYS_INLINE void read_v32(void *dst, fmlai_token_at at, target to)
{
    for (int32_t g = 0; g < 4; g++) {
        uint32_t bits;
        float scale;
        memcpy(&bits, at.scales + 4 * g, sizeof bits);
        memcpy(&scale, &bits, sizeof scale);
        if ((bits & 0x7FFFFF) == 0 && products_fit((int32_t)(bits >> 23 & 255))) {
            e4m3_group(dst, 128 * g, at.row + 128 * g, 128, scale, false, to);
        } else {
            e4m3_group(dst, 128 * g, at.row + 128 * g, 128, scale, true, to);
        }
    }
    bf16_values(dst, 512, at.row + 528, 64, to);
}

ALWAYS_INLINE void read_v4(void *dst, fmlai_token_at at, target to)
{
    e8m0_groups(dst, at.row, at.scales, 448, 64, to);
    bf16_values(dst, 448, at.row + 448, 64, to);
}

ALWAYS_INLINE void read_v41(void *dst, fmlai_token_at at, target to)
{
    e8m0_groups(dst, at.row, at.scales, 512, 32, to);
}

ALWAYS_INLINE void read_v41_fp4(void *dst, fmlai_token_at at, target to)
{
    float scales[32];
    e4m3_group(scales, 0, at.scales, 32, 1.0f, false, TARGET_EXACT);
    for (int32_t g = 0; g < 32; g++) {
        e2m1_group(dst, 16 * g, at.row + 8 * g, scales[g], to);
    }
}

typedef void (*token_reader)(void *dst, fmlai_token_at at, target to);

/* read and to are constants in each caller. */
ALWAYS_INLINE void walk_tokens(token_reader read, target to, int32_t row_bytes, const fmlai_pool *pool,
                               const int64_t *slots, int32_t count, void *dst, int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    int64_t size = to == TARGET_BF16 ? (int64_t)sizeof(uint16_t) : (int64_t)sizeof(float);
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        read((uint8_t *)dst + i * dst_stride * size, fmlai_walk_token(tokens, count, i, 0, row_bytes), to);
    }
}

/* The three functions of a format whose rows have so many bytes. */
#define READERS(format, row_bytes)                                                                                  \
    static void exact_##format(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head,           \
                               void *dst, int64_t dst_stride)                                                       \
    {                                                                                                               \
        (void)head;                                                                                                 \
        walk_tokens(read_##format, TARGET_EXACT, row_bytes, pool, slots, count, dst, dst_stride);                   \
    }                                                                                                               \
    static void f32_##format(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,  \
                             int64_t dst_stride)                                                                    \
    {                                                                                                               \
        (void)head;                                                                                                 \
        walk_tokens(read_##format, TARGET_F32, row_bytes, pool, slots, count, dst, dst_stride);                     \
    }                                                                                                               \
    static void bf16_##format(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst, \
                              int64_t dst_stride)                                                                   \
    {                                                                                                               \
        (void)head;                                                                                                 \
        walk_tokens(read_##format, TARGET_BF16, row_bytes, pool, slots, count, dst, dst_stride);                    \
    }

READERS(v32, 656)
READERS(v4, 576)
READERS(v41, 512)
READERS(v41_fp4, 256)

static void f32_plain_bf16(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                           int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    int32_t d_qk = pool->format.d_qk;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, head * pool->head_stride, 2 * d_qk);
        bf16_row((float *)dst + i * dst_stride, at.row + head * pool->head_stride, d_qk);
    }
}

static void f32_plain_f16(const fmlai_pool *pool, const int64_t *slots, int32_t count, int32_t head, void *dst,
                          int64_t dst_stride)
{
    fmlai_token_at tokens[FMLAI_EXPAND_MOST];
    int32_t d_qk = pool->format.d_qk;
    fmlai_cpu_walk_locate(tokens, pool, slots, count);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_at at = fmlai_walk_token(tokens, count, i, head * pool->head_stride, 2 * d_qk);
        f16_row((float *)dst + i * dst_stride, at.row + head * pool->head_stride, d_qk);
    }
}

/* ---- quantising -------------------------------------------------------------------------------------- */

/* Largest magnitude of n values (a multiple of 8); NaN or infinity if one of them is either. */
static float amax_of(const float *x, int32_t n)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i most = _mm256_setzero_si256();
    for (int32_t j = 0; j < n; j += 8) {
        /* Bits of magnitudes order like the magnitudes, NaN above all. */
        __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + j));
        most = _mm256_max_epu32(most, _mm256_and_si256(bits, magnitude));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1));
    return _mm_cvtss_f32(_mm_castsi128_ps(four));
}

/* Eight values of magnitude below 464 to e4m3 codes in 32-bit lanes. */
ALWAYS_INLINE __m256i e4m3_codes(__m256 y)
{
    const __m256 shift = _mm256_set1_ps(16384.0f); /* its last bit is worth 2^-9, e4m3's smallest step */
    __m256i bits = _mm256_castps_si256(y);
    __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
    __m256i normal = _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x7FFFF)), odd);
    normal = _mm256_sub_epi32(_mm256_srli_epi32(normal, 20), _mm256_set1_epi32(120 << 3));
    __m256i small = _mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), shift));
    small = _mm256_sub_epi32(small, _mm256_castps_si256(shift));
    __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(121 << 23), magnitude); /* below 2^-6 */
    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    return _mm256_or_si256(_mm256_blendv_epi8(normal, small, is_small), sign);
}

/* n codes (a multiple of 32) of x * factor. */
static void e4m3_encode(uint8_t *codes, const float *x, int32_t n, float factor)
{
    const __m256 f = _mm256_set1_ps(factor);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int32_t j = 0; j < n; j += 32) {
        __m256i a = e4m3_codes(_mm256_mul_ps(_mm256_loadu_ps(x + j), f));
        __m256i b = e4m3_codes(_mm256_mul_ps(_mm256_loadu_ps(x + j + 8), f));
        __m256i c = e4m3_codes(_mm256_mul_ps(_mm256_loadu_ps(x + j + 16), f));
        __m256i d = e4m3_codes(_mm256_mul_ps(_mm256_loadu_ps(x + j + 24), f));
        __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
        _mm256_storeu_si256((__m256i *)(codes + j), _mm256_permutevar8x32_epi32(bytes, order));
    }
}

/* Of a normal number's exponent. */
ALWAYS_INLINE float power_of_two(int32_t exponent)
{
    return fmlai_f32_of_bits((uint32_t)(127 + exponent) << 23);
}

/* Quantiser A: the scale is 2^e, so dividing by it is multiplying by 2^-e. False: some value is not finite.
 */
static bool write_e4m3(const fmla_format_info *f, uint8_t *row, uint8_t *scales, const float *src)
{
    int32_t exponent[16], groups = f->quant_dims / f->group;
    for (int32_t g = 0; g < groups; g++) {
        float u = amax_of(src + g * f->group, f->group) / 448.0f;
        if (!isfinite(u)) {
            return false;
        }
        exponent[g] = fmlai_ceil_log2_f32(u < 1e-4f ? 1e-4f : u);
    }
    if (f->layout == FMLA_LAYOUT_PAGE) {
        memset(scales, 0, (size_t)f->scale_row_bytes);
    }
    for (int32_t g = 0; g < groups; g++) {
        if (f->scale == FMLA_F32) {
            float scale = power_of_two(exponent[g]);
            memcpy(scales + 4 * g, &scale, sizeof scale);
        } else {
            scales[g] = (uint8_t)(exponent[g] + 127);
        }
        e4m3_encode(row + g * f->group, src + g * f->group, f->group, power_of_two(-exponent[g]));
    }
    fmlai_row_store(row + f->rope_offset, FMLA_BF16, 0, src + f->quant_dims, f->rope_dims);
    return true;
}

/* Eight codes of x / scale in 4 bytes: a code counts the ties between magnitudes that |y| passes, a tie going
 * to the even code. */
ALWAYS_INLINE void e2m1_encode8(uint8_t *codes, const float *x, __m256 scale)
{
    const __m128i low_bytes = _mm_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 y = _mm256_div_ps(_mm256_loadu_ps(x), scale);
    __m256 m = _mm256_andnot_ps(sign, y);
    __m256i count = _mm256_setzero_si256();
    count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(0.25f), _CMP_GT_OQ)));
    count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(0.75f), _CMP_GE_OQ)));
    count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(1.25f), _CMP_GT_OQ)));
    count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(1.75f), _CMP_GE_OQ)));
    count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(2.5f), _CMP_GT_OQ)));
    count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(3.5f), _CMP_GE_OQ)));
    count = _mm256_sub_epi32(count, _mm256_castps_si256(_mm256_cmp_ps(m, _mm256_set1_ps(5.0f), _CMP_GT_OQ)));
    __m256i negative = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(y), 28), _mm256_set1_epi32(8));
    __m256i code = _mm256_or_si256(count, negative);
    /* The odd code's nibble above the even one's, in byte 0 of each 64-bit lane. */
    __m256i pairs = _mm256_or_si256(code, _mm256_srli_epi64(code, 28));
    int32_t first = _mm_cvtsi128_si32(_mm_shuffle_epi8(_mm256_castsi256_si128(pairs), low_bytes));
    int32_t second = _mm_cvtsi128_si32(_mm_shuffle_epi8(_mm256_extracti128_si256(pairs, 1), low_bytes));
    uint32_t bytes = (uint32_t)first | (uint32_t)second << 16;
    memcpy(codes, &bytes, sizeof bytes);
}

/* Quantiser C. False: some value is not finite. */
static bool write_e2m1(uint8_t *row, uint8_t *scales, const float *src)
{
    float u[32], scale[32];
    for (int32_t g = 0; g < 32; g++) {
        float amax = amax_of(src + 16 * g, 16);
        if (!isfinite(amax)) {
            return false;
        }
        amax /= 6.0f;
        u[g] = amax < 0x1p-9f ? 0x1p-9f : amax > 448.0f ? 448.0f : amax;
    }
    e4m3_encode(scales, u, 32, 1.0f);
    e4m3_group(scale, 0, scales, 32, 1.0f, false, TARGET_EXACT);
    for (int32_t g = 0; g < 32; g++) {
        e2m1_encode8(row + 8 * g, src + 16 * g, _mm256_set1_ps(scale[g]));
        e2m1_encode8(row + 8 * g + 4, src + 16 * g + 8, _mm256_set1_ps(scale[g]));
    }
    return true;
}

/* Custom formats, other quantisers, outer scales and values that are not finite are the scalar writer's. */
static void write_token(const fmlai_pool *pool, int64_t slot, int32_t head, const float *src,
                        fmla_dtype src_dtype, fmla_quantizer quantizer)
{
    const fmla_format_info *f = &pool->format;
    fmlai_token_at at = fmlai_token_locate(pool, slot);
    uint8_t *row = (uint8_t *)(uintptr_t)at.row, *scales = (uint8_t *)(uintptr_t)at.scales;
    bool known = f->format > 0 && f->format < FMLA_KV_COUNT && quantizer == FMLA_QUANTIZER_DEFAULT;
    bool written = false;

    if (known && f->layout == FMLA_LAYOUT_PLAIN) {
        fmlai_row_store(row + head * pool->head_stride, (fmla_dtype)f->element, 0, src, f->d_qk);
        written = true;
    } else if (known && pool->outer_scale == 1.0f) {
        written = f->element == FMLA_F8_E4M3 ? write_e4m3(f, row, scales, src) : write_e2m1(row, scales, src);
    }
    if (!written) {
        fmlai_token_write(pool, slot, head, src, src_dtype, quantizer);
    }
}

/* Quantiser D. Groups that are not finite are the scalar form's. */
static uint8_t cast(const float *x, int32_t n, uint8_t *codes)
{
    float amax = amax_of(x, n);
    if (!isfinite(amax)) {
        return fmlai_fp8_cast_group(x, n, codes);
    }
    int32_t e = fmlai_ceil_log2_f32((amax < 1e-4f ? 1e-4f : amax) / 448.0f);
    e4m3_encode(codes, x, n, power_of_two(-e));
    return (uint8_t)(127 + e);
}

static void cast_row(const float *x, int32_t groups, uint8_t *codes, int64_t code_stride, uint8_t *scales)
{
    for (int32_t g = 0; g < groups; g++) {
        scales[g] = cast(x + g * 32, 32, codes + g * code_stride);
    }
}

static void set_readers(fmlai_quant_kernels *k, fmla_kv_format format, fmlai_expand exact, fmlai_expand f32,
                        fmlai_expand bf16)
{
    k->exact_f32[format] = exact;
    k->expand_f32[format] = f32;
    k->expand_bf16[format] = bf16;
}

void fmlai_quant_init_avx2(fmlai_quant_kernels *k)
{
    k->expand_f32[FMLA_KV_BF16] = k->exact_f32[FMLA_KV_BF16] = f32_plain_bf16;
    k->expand_f32[FMLA_KV_F16] = k->exact_f32[FMLA_KV_F16] = f32_plain_f16;
    set_readers(k, FMLA_KV_V32, exact_v32, f32_v32, bf16_v32);
    set_readers(k, FMLA_KV_V4, exact_v4, f32_v4, bf16_v4);
    set_readers(k, FMLA_KV_V41, exact_v41, f32_v41, bf16_v41);
    set_readers(k, FMLA_KV_V41_PAGE, exact_v41, f32_v41, bf16_v41);
    set_readers(k, FMLA_KV_V41_FP4, exact_v41_fp4, f32_v41_fp4, bf16_v41_fp4);
    set_readers(k, FMLA_KV_V41_FP4_PAGE, exact_v41_fp4, f32_v41_fp4, bf16_v41_fp4);
    k->write = write_token;
    k->cast = cast;
    k->cast_row = cast_row;
}
