/* SPDX-License-Identifier: MIT */
/*
 * few_tokens.cuh: a warp's share of the products of few rows (few.cuh), from codes in shared memory straight to second
 * operands in registers: no tile is written. A warp has the same dims, WARP_BLOCKS blocks of 64, as dims of scores and
 * as columns of the output. Rows of queries are rows of both products:
 *
 *   scores   rows x tokens   columns are eight tokens; lane 4g + q has token g's dims 8q .. 8q + 7 of each half block
 *   values   rows x dims     of 16 tokens at a time; lane 4g + q has dims 4g .. 4g + 3 of each half block, of tokens 2q
 *                            and 2q + 1 of two eights, and pairs tokens
 *
 * Scales of at least 32 dims that are powers of two are not multiplied into the numbers. Scores are taken of codes as
 * they are, in fp16, which holds every code, with Q in fp16 (few_source.cuh), and scaled as float sums of half a block;
 * of the values the weights are scaled. Both are exact. e2m1 codes, whose scales are of 16 dims, are scaled: exactly,
 * in both types; and so are those whose float scales are no powers of two (MIXED), since then numbers are rounded to
 * bf16. NaN codes make NaN scores, so a row that attends one is NaN whatever its values are.
 *
 * Scales at the low end are off by up to 2^-127: the e8m0 code 0 (2^-127) counts as 0 in scores, a float scale of 0 as
 * 2^-127 in values.
 *
 * All outputs are 2^VALUES_DOWN too small: so weights times scales of up to 2^14 have room.
 *
 * What instructions cost is their way to the warps: loops are short, and rare things (numbers of other kinds, scales
 * beyond 2^14) go the long way, one number after another.
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_TOKENS_CUH
#define FLASHMLA_CUDA_SM90A_FEW_TOKENS_CUH

#include "expand.cuh"
#include "few_plan.cuh"
#include "ptx/matrix.cuh"

#define KIND_PLAIN  64u  /* 16-bit numbers: no pool's codes are, so it may stand beside the kinds of expand.cuh */
#define KIND_WIDE   256u /* with KIND_E8M0: scales are of 64 dims, not 32 */
#define VALUES_DOWN 16
#define E2M1_DOWN   6
#define HALVES      (2 * WARP_BLOCKS) /* half blocks of a warp */
#define WARP_DIMS   (64 * WARP_BLOCKS)

/* Where a strip's numbers lie: shared addresses, and distances from token to token. */
typedef struct strip_view {
    uint32_t rows, pitch;
    uint32_t scales, scale_pitch;
    uint32_t plain; /* as in pool_view */
} strip_view;

/* The kind of codes. KIND_ANY: only the long way is right, or there; so it is for what no published format has. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t few_kind(const fmlac_pool &pool)
{
    const uint32_t kind = code_kind(pool);
    const bool all = pool.quant_dims == 512;
    if (BLOCKS == 9) {
        return kind == KIND_F32 && pool.group_shift >= 7 && all ? KIND_F32 : KIND_ANY;
    }
    if (kind == (KIND_FP4 | KIND_E4M3)) {
        return pool.group_shift == 4 && all ? KIND_FP4 : KIND_ANY;
    }
    if (kind != KIND_E8M0 || pool.scale_offset % 4 != 0 || (!all && pool.quant_dims != 448)) {
        return KIND_ANY;
    }
    return pool.group_shift == 6 ? KIND_E8M0 | KIND_WIDE : pool.group_shift == 5 && all ? KIND_E8M0 : KIND_ANY;
}

template <int BLOCKS>
static __device__ __forceinline__ void view_pool(pool_view *to, const fmlac_pool &pool, const strip_ring &r)
{
    const bool apart = pool.scale_row_bytes > 0;
    to->kind = few_kind<BLOCKS>(pool);
    to->scales = (apart ? STRIP_TOKENS * r.pitch : 0) + pool.scale_offset;
    to->scale_pitch = apart ? FMLAC_RAW_SCALES : r.pitch;
    to->plain = pool.rope_offset - 2 * (uint32_t)pool.quant_dims;
}

static __device__ __forceinline__ bool is_plain_block(const fmlac_pool &pool, uint32_t block)
{
    return block * 64 >= (uint32_t)pool.quant_dims;
}

/* One number, any way. */
static __device__ __forceinline__ float number_at(const fmlac_pool &pool, const strip_view &v, uint32_t token,
                                                  uint32_t dim)
{
    const uint32_t row = v.rows + token * v.pitch, kind = code_kind(pool);
    if (dim >= (uint32_t)pool.quant_dims) {
        const uint32_t at = row + v.plain + dim * 2;
        return __uint_as_float(ptx_load_shared_u8(at) << 16 | ptx_load_shared_u8(at + 1) << 24);
    }
    const bool fp4 = (kind & KIND_FP4) != 0;
    const uint32_t code = ptx_load_shared_u8(row + (fp4 ? dim / 2 : dim)), group = dim >> pool.group_shift;
    const uint32_t at = v.scales + token * v.scale_pitch;
    const uint32_t bits = kind & KIND_F32                  ? ptx_load_shared_u32(at + group * 4)
                          : kind & (KIND_E8M0 | KIND_E4M3) ? ptx_load_shared_u8(at + group)
                                                           : 0;
    const float x = fp4 ? float_of_e2m1(code >> (dim % 2 * 4)) : float_of_e4m3(code);
    return x * scale_of(kind, bits) * pool.outer_scale;
}

/* ---- scales ------------------------------------------------------------------------------------------------------ */

/* From a token's scales: where those of the warp's dims begin. */
template <int KIND> static __device__ __forceinline__ uint32_t scales_begin(const fmlac_pool &pool, uint32_t warp)
{
    if (KIND & KIND_F32) {
        return (warp * WARP_DIMS >> pool.group_shift) * 4;
    }
    return warp * WARP_DIMS >> (KIND & KIND_FP4 ? 4 : KIND & KIND_WIDE ? 6 : 5);
}

/* F32 the bits of one, E8M0 a byte for each half block, or each block. LAST: the kind of the last block. */
template <int KIND, int LAST> static __device__ __forceinline__ uint32_t load_scales(uint32_t at)
{
    if (KIND & KIND_WIDE) {
        return LAST & KIND_PLAIN ? ptx_load_shared_u8(at) : ptx_load_shared_u16(at);
    }
    return ptx_load_shared_u32(at);
}

/* Scales beyond 2^14, and what is no number, have no room: floats above this one, e8m0 codes above 141. Tokens that are
 * not there have 0. */
#define LARGE_SCALE 0x46800000u

/* Bit 7 of each byte: it is above 141. Other bits say nothing. */
static __device__ __forceinline__ uint32_t bytes_above_141(uint32_t x)
{
    return ((x & 0x7F7F7F7Fu) + 0x72727272u) & x;
}

/* Whether a float is out of the range of factor_of_float. */
static __device__ __forceinline__ bool factor_is_hard(uint32_t bits)
{
    return bits - (3u << 23) > (131u << 23) + 0x7FFFFFu && bits != 0;
}

/* The scale of half block `half`. */
template <int KIND> static __device__ __forceinline__ float float_scale(uint32_t scales, int half)
{
    if (KIND & KIND_F32) {
        return KIND & KIND_MIXED ? 1.0f : __uint_as_float(scales);
    }
    const int byte = KIND & KIND_WIDE ? half / 2 : half;
    return __uint_as_float((byte == 3 ? scales >> 1 : scales << (23 - 8 * byte)) & 0x7F800000u);
}

/* ---- scores ------------------------------------------------------------------------------------------------------ */

/* Q of a warp's blocks, as first operands; of its part of a ninth. */
typedef struct few_query {
    uint32_t a[WARP_BLOCKS][4][4];
    uint32_t ninth[4];
} few_query;

/* q: shared address of a piece's Q. */
template <int BLOCKS> static __device__ __forceinline__ void load_query(few_query *x, uint32_t q, uint32_t warp)
{
    const uint32_t lane = ptx_thread() % 32;
#pragma unroll
    for (uint32_t i = 0; i < WARP_BLOCKS; i++) {
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            ptx_load_shared_128(x->a[i][j], q + (((warp * WARP_BLOCKS + i) * 4 + j) * 32 + lane) * 16);
        }
    }
    if (BLOCKS == 9) {
        ptx_load_shared_128(x->ninth, q + ((8 * 4 + warp) * 32 + lane) * 16);
    }
}

/* fp16 pairs as bf16: Q is a bf16 number times a power of two, so exact but for numbers that fp16 has lost. */
static __device__ __forceinline__ uint32_t bf16_of_f16(uint32_t x)
{
    return ptx_pack_bf16(ptx_float_of_f16(x), ptx_float_of_f16(x >> 16));
}

static __device__ __forceinline__ void q_as_bf16(few_query *x)
{
#pragma unroll
    for (int i = 0; i < WARP_BLOCKS * 16; i++) {
        x->a[i / 16][i / 4 % 4][i % 4] = bf16_of_f16(x->a[i / 16][i / 4 % 4][i % 4]);
    }
}

/* Scores of eight tokens by half a block's dims, added to s; where the lane's eight numbers of its token lie, and, FP4
 * and MIXED, their scale. MIXED: Q is bf16. */
template <int KIND>
static __device__ __forceinline__ void half_scores(float s[4], uint32_t at, uint32_t scale_at, const uint32_t (*a)[4])
{
    if (KIND & KIND_PLAIN) {
        uint32_t b[4];
        ptx_load_shared_128(b, at);
        ptx_mma_bf16(s, a[0], b[0], b[1]);
        ptx_mma_bf16(s, a[1], b[2], b[3]);
    } else if (KIND & KIND_FP4) {
        const uint32_t codes = ptx_load_shared_u32(at);
        const uint32_t factor = ptx_f16_of_e4m3(ptx_load_shared_u8(scale_at) * 0x101u);
        const uint32_t even = (codes << 4 & 0x80808080u) | (codes << 2 & 0x1C1C1C1Cu);
        const uint32_t odd = (codes & 0x80808080u) | (codes >> 2 & 0x1C1C1C1Cu);
#pragma unroll
        for (int j = 0; j < 2; j++) { /* as e4m3 codes of numbers 2^E2M1_DOWN times smaller */
            const uint32_t four = __byte_perm(even, odd, j == 0 ? 0x5140 : 0x7362);
            ptx_mma_f16(s, a[j], ptx_multiply_f16x2(ptx_f16_of_e4m3(four), factor),
                        ptx_multiply_f16x2(ptx_f16_of_e4m3(four >> 16), factor));
        }
    } else if (KIND & KIND_MIXED) {
        uint32_t codes[2];
        const float factor = __uint_as_float(factor_of_float(ptx_load_shared_u32(scale_at)));
        ptx_load_shared_64(codes, at);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t b[2];
            spread_e4m3(codes[j], b);
            ptx_mma_bf16(s, a[j], multiply_pair(b[0], factor), multiply_pair(b[1], factor));
        }
    } else {
        uint32_t codes[2];
        ptx_load_shared_64(codes, at);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            ptx_mma_f16(s, a[j], ptx_f16_of_e4m3(codes[j]), ptx_f16_of_e4m3(codes[j] >> 16));
        }
    }
}

/* A part to shared memory, or to `own` if it is the warp's and KEPT. Returns where the next one goes. */
template <int KEPT>
static __device__ __forceinline__ uint32_t store_part(uint32_t to, const float s[4], bool mine, float own[4])
{
    const uint32_t x[4] = {__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]), __float_as_uint(s[3])};
    const bool kept = KEPT && mine;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        own[n] = kept ? s[n] : own[n];
    }
    ptx_store_shared_128_if(!kept, to, x);
    return kept ? to : to + 512;
}

/* Sums of half blocks h - 1 and h, of which one scale may be that of all before, are scaled and added; they begin
 * anew. */
template <int KIND, int LAST>
static __device__ __forceinline__ void add_halves(float sum[4], float half[2][4], const uint32_t scales[2], int h)
{
    const bool plain = (LAST & KIND_PLAIN) != 0 && h == HALVES - 1;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (plain) {
            sum[n] += half[0][n] + half[1][n];
        } else if (KIND & KIND_FP4) {
            sum[n] = fmaf(half[0][n] + half[1][n], (float)(1 << E2M1_DOWN), sum[n]);
        } else if (KIND & (KIND_F32 | KIND_WIDE)) {
            sum[n] = fmaf(half[0][n] + half[1][n], float_scale<KIND>(scales[n % 2], h), sum[n]);
        } else {
            sum[n] = fmaf(half[0][n], float_scale<KIND>(scales[n % 2], h - 1), sum[n]);
            sum[n] = fmaf(half[1][n], float_scale<KIND>(scales[n % 2], h), sum[n]);
        }
        half[0][n] = half[1][n] = 0.0f;
    }
}

/* Scores of a strip by the warp's dims, to parts, in order: [8 tokens][lane]; own_part: if it KEEPS_OWN, of the eight
 * tokens whose weights it makes. KIND: of its blocks, LAST: of its last one. Says what kind it was:
 * KIND, KIND_ANY if a scale is hard, MIXED if float scales are no powers of two. */
template <int BLOCKS, int KIND, int LAST>
static __device__ __forceinline__ uint32_t strip_scores(const fmlac_pool &pool, const strip_view &v, const few_query &x,
                                                        uint32_t warp, uint32_t parts, float own_part[4])
{
    constexpr bool SCALED = (KIND & (KIND_F32 | KIND_E8M0)) != 0;
    const uint32_t lane = ptx_thread() % 32, q = lane % 4, token = strip_token(lane / 4);
    const uint32_t begin = v.scales + scales_begin<KIND>(pool, warp), row = v.rows + token * v.pitch;
    const uint32_t dim = warp * WARP_DIMS + q * 8, plain = row + v.plain;
    /* of the first eight tokens: the lane's codes, their scale, 16-bit numbers of the last or the ninth block; scales
     * of its columns */
    uint32_t at = row + (KIND & KIND_FP4 ? dim / 2 : dim),
             own = begin + token * v.scale_pitch + (KIND & KIND_FP4 ? q / 2 : 0);
    uint32_t plain_at = BLOCKS == 9 ? plain + 1024 + warp / 2 * 64 + q * 16 + warp % 2 * 8 : plain + dim * 2;
    uint32_t columns[2] = {begin + strip_token(2 * q) * v.scale_pitch, begin + strip_token(2 * q + 1) * v.scale_pitch};
    uint32_t most = 0, fraction = 0, hard = 0;
    parts += lane * 16;
#pragma unroll(BLOCKS == 9 ? 2 : 1)
    for (uint32_t i = 0; i < STRIP_EIGHTS; i++) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, half[2][4] = {};
        uint32_t scales[2] = {0, 0};
#pragma unroll
        for (uint32_t n = 0; n < 2 && SCALED; n++) {
            scales[n] = load_scales<KIND, LAST>(columns[n]);
            columns[n] += 8 * v.scale_pitch;
            if (KIND & KIND_F32) {
                most = (scales[n] & 0x7FFFFFFFu) > most ? scales[n] & 0x7FFFFFFFu : most;
                hard |= (KIND & KIND_MIXED) && factor_is_hard(scales[n]) ? 0x80u : 0;
            } else {
                hard |= bytes_above_141(scales[n]);
            }
        }
        fraction |= scales[0] | scales[1];
        if (BLOCKS == 9) {
            uint32_t b[2];
            ptx_load_shared_64(b, plain_at);
            ptx_mma_bf16(sum, x.ninth, b[0], b[1]);
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++) { /* two chains of products */
            const uint32_t(*a)[4] = &x.a[h / 2][h % 2 * 2];
            if ((LAST & KIND_PLAIN) && h / 2 == WARP_BLOCKS - 1) {
                half_scores<KIND_PLAIN>(half[h % 2], plain_at + h * 64, 0, a);
            } else {
                half_scores<KIND>(half[h % 2], at + (KIND & KIND_FP4 ? 16 : 32) * h,
                                  own + (KIND & KIND_FP4 ? 2 * h : 0), a);
            }
            if (h % 2 == 1 && (h == HALVES - 1 || (KIND & KIND_E8M0))) {
                add_halves<KIND, LAST>(sum, half, scales, h);
            }
        }
        at += 8 * v.pitch;
        own += 8 * v.scale_pitch;
        plain_at += 8 * v.pitch;
        parts = store_part<KEEPS_OWN(BLOCKS)>(parts, sum, i == warp, own_part);
    }
    if (!SCALED) {
        return KIND;
    }
    if (__any_sync(0xFFFFFFFFu, (hard & 0x80808080u) != 0 || most > LARGE_SCALE)) {
        return KIND_ANY;
    }
    return KIND == KIND_F32 && __any_sync(0xFFFFFFFFu, (fraction & 0x7FFFFFu) != 0) ? KIND_F32 | KIND_MIXED : KIND;
}

/* The long way. q: shared address of a piece's Q. */
template <int BLOCKS>
static __device__ __forceinline__ void hard_scores(const fmlac_pool &pool, const strip_view &v, uint32_t q,
                                                   uint32_t warp, uint32_t parts, float own_part[4])
{
    const uint32_t lane = ptx_thread() % 32;
    parts += lane * 16;
#pragma unroll 1
    for (uint32_t i = 0; i < STRIP_EIGHTS; i++) {
        const uint32_t token = 8 * i + strip_token(lane / 4);
        float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (uint32_t n = 0; n < 4 * WARP_BLOCKS + (BLOCKS == 9); n++) {
            const uint32_t product = n < 4 * WARP_BLOCKS ? warp * 4 * WARP_BLOCKS + n : 32 + warp;
            const uint32_t dim = product / 2 * 32 + lane % 4 * 8 + product % 2 * 4;
            uint32_t a[4], b[2];
            ptx_load_shared_128(a, q + (product * 32 + lane) * 16);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                a[k] = is_plain_block(pool, product / 4) ? a[k] : bf16_of_f16(a[k]);
            }
#pragma unroll
            for (uint32_t k = 0; k < 2; k++) {
                b[k] =
                    ptx_pack_bf16(number_at(pool, v, token, dim + 2 * k), number_at(pool, v, token, dim + 2 * k + 1));
            }
            ptx_mma_bf16(s, a, b[0], b[1]);
        }
        parts = store_part<KEEPS_OWN(BLOCKS)>(parts, s, i == warp, own_part);
    }
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* The tokens, of 16, whose numbers a lane has: columns 2q and 2q + 1, and both 8 further on. */
static __device__ __forceinline__ uint32_t value_token(uint32_t lane, uint32_t i)
{
    return i / 2 * 8 + strip_token(lane % 4 * 2 + i % 2);
}

/* A pair of e4m3 codes, number i of x and of y, as bf16 * 2^-120. */
static __device__ __forceinline__ uint32_t pair_e4m3(uint32_t x, uint32_t y, int i)
{
    return ptx_permute_two(x, y, 0xC480u + 0x1111u * i) << 4 & 0x87F087F0u;
}

/* Pairs of four e2m1 codes of two tokens, as bf16 * 2^-126: sign to bit 15, the three bits to bits 8..6. */
static __device__ __forceinline__ void pair_e2m1(uint32_t x, uint32_t y, uint32_t out[4])
{
    const uint32_t both = x | y << 16;
    out[0] = (both << 6 & 0x01C001C0u) | (both << 12 & 0x80008000u);
    out[1] = (both << 2 & 0x01C001C0u) | (both << 8 & 0x80008000u);
    out[2] = (both >> 2 & 0x01C001C0u) | (both << 4 & 0x80008000u);
    out[3] = (both >> 6 & 0x01C001C0u) | (both & 0x80008000u);
}

/* Weights of two tokens times their scales, 2^120 larger for codes that are so much too small. e2m1 codes have theirs
 * with the power already. */
template <int KIND>
static __device__ __forceinline__ uint32_t scale_weights(uint32_t a, uint32_t x, uint32_t y, int half)
{
    if ((KIND & KIND_F32) && !(KIND & KIND_MIXED)) {
        return ptx_multiply_bf16x2(a, __byte_perm(x, y, 0x7632) + (120 - VALUES_DOWN) * 0x00800080u);
    }
    if (KIND & KIND_E8M0) {
        const int byte = KIND & KIND_WIDE ? half / 2 : half;
        const uint32_t both = ptx_permute_two(x, y, 0x0400u + 0x0101u * byte) & 0x00FF00FFu;
        return ptx_multiply_bf16x2(a, both * 0x80u + (120 - VALUES_DOWN) * 0x00800080u);
    }
    return KIND & KIND_FP4 ? a : ptx_multiply_bf16x2(a, (127 - VALUES_DOWN) * 0x00800080u);
}

/* Where a lane's numbers of its four tokens lie. */
typedef struct value_rows {
    uint32_t codes[4], scales[4]; /* of the warp's dims */
    uint32_t plain;               /* from there to the 16-bit numbers of its dims */
} value_rows;

/* o[4 dims][4] += weights * values of half a block. a: scaled weights; scales: MIXED, of the values. */
template <int KIND>
static __device__ __forceinline__ void half_values(float *o, const value_rows &r, const uint32_t scales[4], int h,
                                                   const uint32_t a[4])
{
    uint32_t b[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const uint32_t x = r.codes[2 * n], y = r.codes[2 * n + 1];
        uint32_t of_x[2], of_y[2];
        if (KIND & KIND_PLAIN) {
            ptx_load_shared_64(of_x, x + r.plain + h * 64);
            ptx_load_shared_64(of_y, y + r.plain + h * 64);
        } else if (KIND & KIND_FP4) {
            pair_e2m1(ptx_load_shared_u16(x + h * 16), ptx_load_shared_u16(y + h * 16), b[n]);
        } else {
            of_x[0] = ptx_load_shared_u32(x + h * 32);
            of_y[0] = ptx_load_shared_u32(y + h * 32);
        }
#pragma unroll
        for (int i = 0; i < 4 && !(KIND & KIND_FP4); i++) {
            b[n][i] = KIND & KIND_PLAIN ? __byte_perm(of_x[i / 2], of_y[i / 2], i % 2 ? 0x7632 : 0x5410)
                                        : pair_e4m3(of_x[0], of_y[0], i);
        }
        if (KIND & KIND_MIXED) {
            const float one = __uint_as_float(factor_of_float(scales[2 * n]));
            const float other = __uint_as_float(factor_of_float(scales[2 * n + 1]));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                b[n][i] =
                    ptx_pack_bf16(__uint_as_float(b[n][i] << 16) * one, __uint_as_float(b[n][i] & 0xFFFF0000u) * other);
            }
        }
        if (KIND & KIND_FP4) {
            const uint32_t first = ptx_load_shared_u8(r.scales[2 * n] + 2 * h);
            const uint32_t second = ptx_load_shared_u8(r.scales[2 * n + 1] + 2 * h);
            const uint32_t scale = ptx_multiply_bf16x2(pair_e4m3(first, second, 0), 0x7B807B80u); /* 2^120 */
            const uint32_t factor = ptx_multiply_bf16x2(scale, (127 + 126 - VALUES_DOWN) * 0x00800080u);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                b[n][i] = ptx_multiply_bf16x2(b[n][i], factor);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        ptx_mma_bf16(o + 4 * i, a, b[0][i], b[1][i]);
    }
}

/* o[half block][4 dims][4] += weights * values of the warp's dims. weights: shared address of the strip's. KIND, LAST:
 * as above. */
template <int KIND, int LAST>
static __device__ __forceinline__ void strip_values(float o[FEW_OUTPUT], const fmlac_pool &pool, const strip_view &v,
                                                    uint32_t warp, uint32_t weights)
{
    const uint32_t lane = ptx_thread() % 32, dim = warp * WARP_DIMS + lane / 4 * 4;
    const uint32_t begin = KIND & KIND_FP4 ? dim / 2 : dim;
    value_rows r;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t token = value_token(lane, i);
        r.codes[i] = v.rows + token * v.pitch + begin;
        r.scales[i] =
            v.scales + token * v.scale_pitch + scales_begin<KIND>(pool, warp) + (KIND & KIND_FP4 ? lane / 16 : 0);
    }
    r.plain = v.plain + dim * 2 - begin;
    weights += lane * 16;
#pragma unroll 1
    for (uint32_t k = 0; k < STRIP_TOKENS / 16; k++) {
        uint32_t a[4], scaled[4], scales[4];
        ptx_load_shared_128(a, weights);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            scales[i] = KIND & (KIND_F32 | KIND_E8M0) ? load_scales<KIND, LAST>(r.scales[i]) : 0;
        }
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            const bool last = h / 2 == WARP_BLOCKS - 1;
            if (h == 0 || ((KIND & KIND_E8M0) && !((KIND & KIND_WIDE) && h % 2))) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const uint32_t x = scales[i / 2 * 2], y = scales[i / 2 * 2 + 1];
                    scaled[i] = last ? scale_weights<LAST>(a[i], x, y, h) : scale_weights<KIND>(a[i], x, y, h);
                }
            }
            if (last) {
                half_values<LAST>(o + 16 * h, r, scales, h, scaled);
            } else {
                half_values<KIND>(o + 16 * h, r, scales, h, scaled);
            }
        }
        weights += 512;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            r.codes[i] += 16 * v.pitch;
            r.scales[i] += 16 * v.scale_pitch;
        }
    }
}

/* The long way. Numbers of tokens from `clean` on that are not finite become 0. */
static __device__ __forceinline__ void hard_values(float o[FEW_OUTPUT], const fmlac_pool &pool, const strip_view &v,
                                                   uint32_t warp, uint32_t weights, uint32_t clean)
{
    const uint32_t lane = ptx_thread() % 32;
#pragma unroll 1
    for (uint32_t at = 0; at < STRIP_TOKENS / 16 * HALVES * 4; at++) {
        const uint32_t k = uniform(at) / (HALVES * 4), i = uniform(at) % (HALVES * 4); /* not known to compilers */
        const uint32_t dim = warp * WARP_DIMS + i / 4 * 32 + lane / 4 * 4 + i % 4;
        uint32_t a[4], b[4];
        ptx_load_shared_128(a, weights + (k * 32 + lane) * 16);
#pragma unroll
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t token = 16 * k + value_token(lane, j);
            const float x = number_at(pool, v, token, dim);
            const uint32_t bits = ptx_pack_bf16(x, x) & 0xFFFFu;
            a[j] = scale_weights<KIND_PLAIN>(a[j], 0, 0, 0);
            b[j] = token >= clean && (bits & 0x7F80u) == 0x7F80u ? 0 : bits;
        }
#pragma unroll
        for (uint32_t n = 0; n < HALVES * 4; n++) { /* without a branch, which would want o to have an address */
            const uint32_t own = n == i ? 0xFFFFFFFFu : 0;
            ptx_mma_bf16(o + 4 * n, a, (b[0] | b[1] << 16) & own, (b[2] | b[3] << 16) & own);
        }
    }
}

#endif
