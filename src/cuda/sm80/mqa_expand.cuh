/* SPDX-License-Identifier: MIT */
/*
 * mqa_expand.cuh: raw bytes of quantised tokens to bf16 rows of a tile, in place: a token's raw bytes lie in its row,
 * so that the dims that are bf16 already are where they belong, and codes are in registers before anything is written.
 * A warp takes its own tokens in straight code, two or four together: lane l has dims 16 l .. 16 l + 15 of each. Codes,
 * scales or tokens for which that would not be right go the long way, a token at a time.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_EXPAND_CUH
#define FLASHMLA_CUDA_SM80_MQA_EXPAND_CUH

#include "mqa_tokens.cuh"

/* ---- any token -------------------------------------------------------------------------------------------------- */

/* One token, whatever it is; address 0: zeros. */
static __device__ __noinline__ void expand_token(const fmlac_mqa &p, unsigned long long token, uint32_t row)
{
    const fmlac_pool &pool = token & EXTRA_BIT ? p.extra.pool : p.main.pool;
    int quant = token != 0 ? pool.quant_dims : 0, end = token != 0 ? quant + pool.rope_dims : 0;
    int lane = (int)ptx_thread() % 32, j = lane * 16;
    uint32_t raw = row + pool.raw_at, low[2] = {0, 0}, high[2] = {0, 0};
    float scale = 0.0f;
    if (j < quant) {
        scale = shared_scale(pool.scale, raw + pool.raw_scales, j >> pool.group_shift);
        ptx_load_shared_64(low, raw + (pool.element == FMLAC_F4_E2M1 ? j / 2 : j));
        if (pool.element != FMLAC_F4_E2M1) {
            ptx_load_shared_64(high, raw + j + 8);
        }
    }
    __syncwarp();
    if (j < quant) {
        expand_hard(pool.element, pool.outer_scale, low[0] | (uint64_t)low[1] << 32, high[0] | (uint64_t)high[1] << 32,
                    scale, row + j * 2);
    }
#pragma unroll 1
    for (int byte = end * 2 + lane * 4; byte < p.row_bytes; byte += 128) {
        ptx_store_shared_u32(row + byte, 0);
    }
}

/* ---- tokens of one pool ---------------------------------------------------------------------------------------- */

/* Codes and scales that have straight code: e4m3 codes with powers of two, or with any float scale of the usual size;
 * e2m1 codes with e4m3 scales. */
#define STRAIGHT_POWERS 0
#define STRAIGHT_FLOATS 1
#define STRAIGHT_E2M1   2

/* Sixteen codes (fp4: the first two words) times a pair of equal bf16 factors (FLOATS: times a float). Every other four
 * lanes write their second half first, so that eight neighbouring ones never meet in a bank. */
template <int KIND>
static __device__ __forceinline__ void expand_sixteen(const uint32_t codes[4], uint32_t factor, uint32_t to)
{
    bool turned = (ptx_thread() & 4) != 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t out[4];
        if (KIND == STRAIGHT_E2M1) {
            uint32_t half = turned ? codes[1 - h] : codes[h];
            spread_e2m1(half & 0xFFFFu, out);
            spread_e2m1(half >> 16, out + 2);
        } else {
            spread_e4m3(turned ? codes[2 - 2 * h] : codes[2 * h], out);
            spread_e4m3(turned ? codes[3 - 2 * h] : codes[2 * h + 1], out + 2);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = KIND == STRAIGHT_FLOATS ? multiply_pair(out[i], __uint_as_float(factor))
                                             : ptx_multiply_bf16x2(out[i], factor);
        }
        ptx_store_shared_128(turned ? to + 16 - h * 16 : to + h * 16, out);
    }
}

/* The codes of EACH tokens of a pool, in rows of a tile from `row` on. The first bits of `there` say which of them are
 * there; the others' are zeros. Says no, having done nothing, if a code or a scale asks for another way. */
template <int KIND, int EACH>
static __device__ __forceinline__ bool expand_some(const fmlac_pool &pool, uint32_t row, uint32_t there)
{
    int j = (int)ptx_thread() % 32 * 16, group = j >> pool.group_shift;
    bool floats = KIND == STRAIGHT_FLOATS || (KIND == STRAIGHT_POWERS && pool.scale == FMLAC_F32);
    uint32_t codes[EACH][4], factor[EACH], hard = 0, at = row + pool.raw_at;
#pragma unroll
    for (int t = 0; t < EACH; t++, at += PITCH) {
        uint32_t scale = at + pool.raw_scales + (floats ? group * 4 : group);
        if (KIND == STRAIGHT_E2M1) {
            ptx_load_shared_64(codes[t], at + j / 2);
            factor[t] = ptx_load_shared_u8(scale);
        } else {
            ptx_load_shared_128(codes[t], at + j);
            factor[t] = ptx_load_shared_u32(scale & ~3u) >> (scale % 4 * 8);
        }
    }
#pragma unroll
    for (int t = 0; t < EACH; t++) {
        bool mine = (there >> t & 1) != 0 && j < pool.quant_dims;
        uint32_t bad; /* not 0: asks for another way */
        if (KIND == STRAIGHT_E2M1) {
            bad = (factor[t] & 0x7F) == 0x7F;
            factor[t] = factor_of_e4m3(factor[t]);
        } else { /* a power of two by its exponent; see scale_is_easy */
            uint32_t exponent = floats ? factor[t] >> 23 : factor[t] & 0xFF, nan = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                nan |= e4m3_nans(codes[t][i]);
            }
            bad = (nan & E4M3_NANS) | (exponent_is_hard(exponent) ? 1u : 0u);
            if (KIND == STRAIGHT_FLOATS) {
                factor[t] = factor_of_float(factor[t]);
            } else {
                bad |= factor[t] & (floats ? 0x7FFFFFu : 0u);
                factor[t] = factor_of_exponent(exponent);
            }
        }
        hard |= mine ? bad : 0;
        factor[t] = mine ? factor[t] : 0;
    }
    if (__any_sync(0xFFFFFFFFu, hard != 0)) {
        return false;
    }
    __syncwarp(); /* all codes have been read */
    if (j < pool.quant_dims) {
#pragma unroll
        for (int t = 0; t < EACH; t++) {
            expand_sixteen<KIND>(codes[t], factor[t], row + t * PITCH + j * 2);
        }
    }
    return true;
}

/* Dims that are bf16 already, of those of a warp's tokens that are not there. */
template <int OWN>
static __device__ __forceinline__ void clear_absent(const fmlac_mqa &p, const fmlac_pool &pool, uint32_t there,
                                                    uint32_t row)
{
#pragma unroll 1
    for (int t = 0; t < OWN; t++, row += PITCH) {
#pragma unroll 1
        for (int byte = pool.quant_dims * 2 + ptx_thread() % 32 * 4; !(there >> t & 1) && byte < p.row_bytes;
             byte += 128) {
            ptx_store_shared_u32(row + byte, 0);
        }
    }
}

template <int KIND, int OWN>
static __device__ __forceinline__ void expand_all(const fmlac_mqa &p, const fmlac_pool &pool,
                                                  const unsigned long long *address, uint32_t there, uint32_t row)
{
    constexpr int EACH = KIND == STRAIGHT_E2M1 ? 2 : OWN; /* as many as there are registers for */
#pragma unroll 1
    for (int t = 0; t < OWN; t += EACH, row += EACH * PITCH) {
        bool done = expand_some<KIND, EACH>(pool, row, there >> t);
#pragma unroll 1
        for (int i = 0; !done && i < EACH; i++) {
            if (KIND != STRAIGHT_POWERS || pool.scale != FMLAC_F32 ||
                !expand_some<STRAIGHT_FLOATS, 1>(pool, row + i * PITCH, there >> (t + i))) {
                expand_token(p, address[t + i], row + i * PITCH);
            }
        }
    }
}

/* A warp's own tokens of one pool. Those that are not there are zeros. */
template <int OWN>
static __device__ __forceinline__ void expand_own(const fmlac_mqa &p, const fmlac_pool &pool, int straight,
                                                  const unsigned long long *address, uint32_t there, uint32_t row)
{
    if (straight == FMLAC_STRAIGHT_E4M3) {
        expand_all<STRAIGHT_POWERS, OWN>(p, pool, address, there, row);
    } else if (straight == FMLAC_STRAIGHT_E2M1) {
        expand_all<STRAIGHT_E2M1, OWN>(p, pool, address, there, row);
    } else {
#pragma unroll 1
        for (int t = 0; t < OWN; t++) {
            expand_token(p, address[t], row + t * PITCH);
        }
    }
    if (there != (1u << OWN) - 1) {
        clear_absent<OWN>(p, pool, there, row);
    }
}

/* A warp's own tokens of the ring's place `at`, whose raw bytes are there. Where the extra list begins tokens of both
 * pools meet in a tile. */
template <class S>
static __device__ __forceinline__ void expand(const fmlac_mqa &p, const mqa_shared &s, int warp, int at, uint32_t tile,
                                              uint32_t own)
{
    constexpr int OWN = S::TOKENS / S::PW;
    static_assert(OWN % 2 == 0, "tokens go two by two");
    int first = warp * OWN;
    const unsigned long long *address = s.address + at * S::TOKENS + first;
    uint32_t row = tile + first * PITCH;
    uint32_t there = own & ((1u << OWN) - 1), extra = own >> 16 & ((1u << OWN) - 1);
    if (extra == 0) {
        expand_own<OWN>(p, p.main.pool, p.straight, address, there, row);
    } else {
        expand_own<OWN>(p, p.extra.pool, extra == there ? p.straight_extra : FMLAC_STRAIGHT_NONE, address, there, row);
    }
}

#endif
