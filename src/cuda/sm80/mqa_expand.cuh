/* SPDX-License-Identifier: MIT */
/*
 * mqa_expand.cuh: raw bytes of quantised tokens to bf16 rows of a tile. A warp takes its own tokens two at a time, in
 * straight code: lane l has 16 dims of token l / 4 % 2, twice, so that neither loads (rows of raw bytes are 64 bytes
 * apart, modulo 128) nor stores (rows of a tile: 16) of eight neighbouring lanes meet in a bank. Codes, scales or
 * tokens for which that would not be right go the long way, a token at a time.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_EXPAND_CUH
#define FLASHMLA_CUDA_SM80_MQA_EXPAND_CUH

#include "mqa_tokens.cuh"

/* ---- any token -------------------------------------------------------------------------------------------------- */

/* One token, whatever it is; address 0: zeros. */
static __device__ __noinline__ void expand_token(const fmlac_mqa &p, unsigned long long token, uint32_t raw,
                                                 uint32_t to)
{
    const fmlac_pool &pool = token & EXTRA_BIT ? p.extra.pool : p.main.pool;
    int quant = token != 0 ? pool.quant_dims : 0, end = token != 0 ? quant + pool.rope_dims : 0;
#pragma unroll 1
    for (int j = threadIdx.x % 32 * 16; j < p.row_bytes / 2; j += 512) {
        if (j < quant) {
            uint32_t codes = raw;
            float scale = shared_scale(pool.scale, raw + pool.raw_scales, j >> pool.group_shift);
            expand_hard(pool.element, pool.outer_scale, codes, scale, j, to + j * 2);
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < 16; i += 4) {
            uint32_t x[2] = {0, 0};
            if (j + i < end) {
                ptx_load_shared_64(x, raw + pool.rope_offset + 2 * (j + i - quant));
            }
            ptx_store_shared_u32(to + (j + i) * 2, x[0]);
            ptx_store_shared_u32(to + (j + i) * 2 + 4, x[1]);
        }
    }
}

/* ---- two tokens of one pool ------------------------------------------------------------------------------------- */

/* Sixteen codes (fp4: the first two words) times a pair of equal bf16 factors. */
template <bool FP4>
static __device__ __forceinline__ void expand_sixteen(const uint32_t codes[4], uint32_t factor, uint32_t to)
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t out[4];
        if (FP4) {
            spread_e2m1(codes[h] & 0xFFFFu, out);
            spread_e2m1(codes[h] >> 16, out + 2);
        } else {
            spread_e4m3(codes[2 * h], out);
            spread_e4m3(codes[2 * h + 1], out + 2);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out[i] = ptx_multiply_bf16x2(out[i], factor);
        }
        ptx_store_shared_128(to + h * 16, out);
    }
}

/* The codes of two tokens of a pool, from raw rows at `raw` to tile rows at `to`. Bits 0 and 1 of `there` say which of
 * them is there; the other's are zeros. Says no, having done nothing, if a code or a scale asks for the long way.
 * Scales: of e4m3 codes f32 or e8m0, of e2m1 codes e4m3. */
template <bool FP4>
static __device__ __forceinline__ bool expand_two(const fmlac_pool &pool, uint32_t raw, uint32_t raw_pitch, uint32_t to,
                                                  uint32_t there)
{
    int lane = ptx_thread() % 32, token = lane >> 2 & 1, part = (lane & 3) | lane >> 3 << 2;
    int dims = there >> token & 1 ? pool.quant_dims : 0; /* of this lane's token */
    bool floats = !FP4 && pool.scale == FMLAC_F32;
    uint32_t row = raw + token * raw_pitch, codes[2][4], factor[2], hard = 0;
    to += token * PITCH + part * 32;
#pragma unroll
    for (int q = 0; q < 2; q++) {
        int j = part * 16 + q * 256, group = j >> pool.group_shift;
        uint32_t at = row + pool.raw_scales + (floats ? group * 4 : group);
        if (FP4) {
            ptx_load_shared_64(codes[q], row + j / 2);
            factor[q] = ptx_load_shared_u8(at);
        } else {
            ptx_load_shared_128(codes[q], row + j);
            factor[q] = ptx_load_shared_u32(at & ~3u) >> (at % 4 * 8);
        }
    }
#pragma unroll
    for (int q = 0; q < 2; q++) {
        bool mine = part * 16 + q * 256 < dims;
        uint32_t bad; /* not 0: asks for the long way */
        if (FP4) {    /* an e4m3 number as bf16, by 2^120 */
            bad = (factor[q] & 0x7F) == 0x7F;
            factor[q] = (factor[q] & 0x80) << 8 | (factor[q] & 0x7F) << 4;
            factor[q] = ptx_multiply_bf16x2(factor[q] | factor[q] << 16, 0x7B807B80u);
        } else { /* a power of two by its exponent; see scale_is_easy */
            uint32_t exponent = floats ? factor[q] >> 23 : factor[q] & 0xFF, nan = 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                nan |= (codes[q][i] & 0x7F7F7F7Fu) + 0x01010101u;
            }
            bad = (nan & 0x80808080u) | (factor[q] & (floats ? 0x7FFFFFu : 0u)) | (exponent - 3 > 131 ? 1u : 0u);
            factor[q] = (exponent + 120) * 0x00800080u; /* codes are 2^120 too small */
        }
        hard |= mine ? bad : 0;
        factor[q] = dims > 0 ? factor[q] : 0;
    }
    if (__any_sync(0xFFFFFFFFu, hard != 0)) {
        return false;
    }
#pragma unroll
    for (int q = 0; q < 2; q++) {
        if (part * 16 + q * 256 < pool.quant_dims) {
            expand_sixteen<FP4>(codes[q], factor[q], to + q * 512);
        }
    }
    return true;
}

/* Dims of a warp's tokens that are bf16 already, eight lanes a token. */
template <int OWN>
static __device__ __forceinline__ void copy_rope(const fmlac_mqa &p, const fmlac_pool &pool, uint32_t there,
                                                 uint32_t raw, uint32_t to)
{
    int token = ptx_thread() % 32 / 8;
    raw += token * p.raw_pitch + pool.rope_offset;
    to += token * PITCH + pool.quant_dims * 2;
#pragma unroll 1
    for (int byte = ptx_thread() % 8 * 16; token < OWN && byte < pool.rope_dims * 2; byte += 128) {
        uint32_t x[4] = {0, 0, 0, 0};
        if (there >> token & 1) {
            ptx_load_shared_128(x, raw + byte);
        }
        ptx_store_shared_128(to + byte, x);
    }
}

/* A warp's own tokens of one pool. Those that are not there are zeros. */
template <int OWN>
static __device__ __forceinline__ void expand_own(const fmlac_mqa &p, const fmlac_pool &pool, int straight,
                                                  const unsigned long long *address, uint32_t there, uint32_t raw,
                                                  uint32_t to)
{
    if (straight != FMLAC_STRAIGHT_NONE) {
        copy_rope<OWN>(p, pool, there, raw, to);
    }
#pragma unroll 1
    for (int t = 0; t < OWN; t += 2, raw += 2 * p.raw_pitch, to += 2 * PITCH) {
        bool done = false;
        if (straight == FMLAC_STRAIGHT_E4M3) {
            done = expand_two<false>(pool, raw, p.raw_pitch, to, there >> t & 3);
        } else if (straight == FMLAC_STRAIGHT_E2M1) {
            done = expand_two<true>(pool, raw, p.raw_pitch, to, there >> t & 3);
        }
#pragma unroll 1
        for (int i = 0; !done && i < 2; i++) {
            expand_token(p, address[t + i], raw + i * p.raw_pitch, to + i * PITCH);
        }
    }
}

/* A warp's own tokens of the ring's place `at`, whose raw bytes are there. Where the extra list begins tokens of both
 * pools meet in a tile. */
template <class S>
static __device__ __forceinline__ void expand(const fmlac_mqa &p, const mqa_shared &s, int at, uint32_t tile)
{
    constexpr int OWN = S::TOKENS / S::PW;
    static_assert(OWN % 2 == 0 && OWN <= 4, "tokens go two by two, and eight lanes copy what is bf16 already");
    int first = ((int)ptx_thread() / 32 - S::QW) * OWN;
    int lane = ptx_thread() % 32;
    const unsigned long long *address = s.address + at * S::TOKENS + first;
    unsigned long long token = lane < OWN ? address[lane] : 0;
    uint32_t there = __ballot_sync(0xFFFFFFFFu, token != 0);
    uint32_t extra = __ballot_sync(0xFFFFFFFFu, (token & EXTRA_BIT) != 0);
    uint32_t raw = s.raw + first * p.raw_pitch, to = tile + first * PITCH;
    if (extra == 0) {
        expand_own<OWN>(p, p.main.pool, p.straight, address, there, raw, to);
    } else {
        expand_own<OWN>(p, p.extra.pool, extra == there ? p.straight_extra : FMLAC_STRAIGHT_NONE, address, there, raw,
                        to);
    }
}

#endif
