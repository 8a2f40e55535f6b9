/* SPDX-License-Identifier: MIT */
/*
 * source_codes.cuh: quantised tokens, expanded to bf16 on their way into a tile. Eight warps; warp i owns tokens 8i ..
 * 8i + 7 of every tile. A pass is 16 segments (16 dims each, half a token) of two tokens: lane l has token l >> 2 & 1
 * and segment (l & 3) | (l >> 3) << 2, so that the two 16-byte stores of a pass meet no bank twice. Codes travel
 * through registers: as soon as a pass of a half is expanded, its registers take the same pass of the next half. Dims
 * that are stored as bf16 go by cp.async, straight to where they belong.
 *
 * Values are code * scale, rounded to bf16 once, for every (code, scale) pair: exactly by a bf16 product where the
 * scale is an easy power of two (every current writer's are) or an e4m3 number, else by the product in float.
 *
 * A tile is of one pool, so what must be known of a format is the same for the whole warp (struct codes_format) and the
 * instructions per pass are few: 256 threads have about 40 cycles per token for everything.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH

#include "source.cuh"

#define CODE_WARPS  8
#define WARP_TOKENS (TOKENS / CODE_WARPS)
#define PASSES      (WARP_TOKENS / 2)

enum { CODES_FP8_F32, CODES_FP8_E8M0, CODES_FP4_E4M3, CODES_ANY };

/* Of a tile: how its tokens are coded. */
typedef struct codes_format {
    int32_t kind;
    int32_t group_shift;
    bool extra;
} codes_format;

/* What a lane holds of the half that is on its way. */
typedef struct raw_half {
    uint32_t codes[PASSES][4];
    uint32_t scale[PASSES]; /* its bits or its code */
    codes_format format;
} raw_half;

static __device__ __forceinline__ codes_format format_of(const fmlac_pool &pool, bool extra)
{
    codes_format f = {CODES_ANY, pool.group_shift, extra};
    if (pool.aligned && pool.outer_scale == 1.0f && pool.element == FMLAC_F8_E4M3 && pool.scale != FMLAC_F8_E4M3) {
        f.kind = pool.scale == FMLAC_F32 ? CODES_FP8_F32 : pool.scale == FMLAC_F8_E8M0 ? CODES_FP8_E8M0 : CODES_ANY;
    } else if (pool.aligned && pool.outer_scale == 1.0f && pool.element == FMLAC_F4_E2M1) {
        f.kind = pool.scale == FMLAC_F8_E4M3 ? CODES_FP4_E4M3 : CODES_ANY;
    }
    return f;
}

static __device__ __forceinline__ const fmlac_pool &pool_of(const fmlac_mqa &p, bool extra)
{
    return extra ? p.extra.pool : p.main.pool;
}

/* First dim of the lane's segment in half `half`. */
static __device__ __forceinline__ int segment_dim(int half)
{
    int lane = threadIdx.x % 32;
    return half * 256 + ((lane & 3) | lane >> 3 << 2) * 16;
}

/* ---- loads ------------------------------------------------------------------------------------------------------- */

/* Pools at any address, with any scale. */
static __device__ __forceinline__ void load_pass_any(const fmlac_pool &pool, const token_place &place, int dim,
                                                     uint32_t x[4], uint32_t *scale)
{
    bool fp4 = pool.element == FMLAC_F4_E2M1;
    const uint8_t *from = place.row + (fp4 ? dim / 2 : dim);
    const uint8_t *group = place.row + place.scales + (dim >> pool.group_shift) * (pool.scale == FMLAC_F32 ? 4 : 1);
#pragma unroll 1
    for (int j = fp4 ? 7 : 15; j >= 0; j--) {
        x[3] = x[3] << 8 | x[2] >> 24;
        x[2] = x[2] << 8 | x[1] >> 24;
        x[1] = x[1] << 8 | x[0] >> 24;
        x[0] = x[0] << 8 | from[j];
    }
    if (pool.scale == FMLAC_F32) {
        *scale = bytes_u32(group);
    } else if (pool.scale != FMLAC_NONE) {
        *scale = group[0];
    }
}

/* Starts the loads of pass i of a half. Absent tokens are zeros with scale 1. */
static __device__ __forceinline__ void load_pass(const fmlac_mqa &p, const codes_format &f, const token_place *places,
                                                 int i, int half, raw_half *raw)
{
    const token_place place = places[2 * i + (threadIdx.x >> 2 & 1)];
    int dim = segment_dim(half);
    uint32_t *x = raw->codes[i];
    bool there = place.row && dim < p.main.pool.quant_dims;
    const uint8_t *scales = place.row + place.scales;
    x[0] = x[1] = x[2] = x[3] = 0;
    if (f.kind == CODES_FP8_E8M0) {
        raw->scale[i] = 127;
        if (there) {
            const uint4 codes = *(const uint4 *)(place.row + dim);
            raw->scale[i] = scales[dim >> f.group_shift];
            x[0] = codes.x, x[1] = codes.y, x[2] = codes.z, x[3] = codes.w;
        }
    } else if (f.kind == CODES_FP8_F32) {
        raw->scale[i] = 0x3F800000u;
        if (there) {
            const uint4 codes = *(const uint4 *)(place.row + dim);
            raw->scale[i] = *(const uint32_t *)(scales + (dim >> f.group_shift) * 4);
            x[0] = codes.x, x[1] = codes.y, x[2] = codes.z, x[3] = codes.w;
        }
    } else if (f.kind == CODES_FP4_E4M3) {
        raw->scale[i] = 0x38;
        if (there) {
            const uint2 codes = *(const uint2 *)(place.row + dim / 2);
            raw->scale[i] = scales[dim >> f.group_shift];
            x[0] = codes.x, x[1] = codes.y;
        }
    } else {
        raw->scale[i] = 0;
        if (there) {
            load_pass_any(pool_of(p, f.extra), place, dim, x, &raw->scale[i]);
        }
    }
}

/* ---- expanding --------------------------------------------------------------------------------------------------- */

/*
 * Any scale, any outer scale, NaN codes: products in float, one after another. The codes are put where the first eight
 * numbers go and read from there; the last eight numbers go elsewhere, the first eight are written from the last one
 * down.
 */
static __device__ __forceinline__ void expand_pass_hard(bool fp4, const uint32_t codes[4], float scale,
                                                        float outer_scale, uint32_t to)
{
    ptx_store_shared_128(to, codes);
#pragma unroll 1
    for (int at = 15; at >= 0; at--) {
        uint32_t code = ptx_load_shared_u8(to + (fp4 ? at / 2 : at));
        float x = fp4 ? float_of_e2m1(code >> (at % 2 * 4)) : float_of_e4m3(code);
        x = x * scale * outer_scale;
        ptx_store_shared_u16((at < 8 ? to : to ^ 16) + at % 8 * 2, (uint16_t)ptx_pack_bf16(x, x));
    }
}

static __device__ __forceinline__ void expand_pass_any(const fmlac_pool &pool, const uint32_t codes[4], uint32_t bits,
                                                       uint32_t to)
{
    float scale = pool.scale == FMLAC_F32       ? __uint_as_float(bits)
                  : pool.scale == FMLAC_NONE    ? 1.0f
                  : pool.scale == FMLAC_F8_E8M0 ? float_of_e8m0(bits)
                                                : float_of_e4m3(bits);
    expand_pass_hard(pool.element == FMLAC_F4_E2M1, codes, scale, pool.outer_scale, to);
}

/* Sixteen e4m3 codes times a power of two. `factor`: 2^120 times the scale as two bf16 numbers. */
static __device__ __forceinline__ void expand_pass_fp8(const uint32_t codes[4], uint32_t factor, bool easy, float scale,
                                                       uint32_t to)
{
    uint32_t nan = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        nan |= (codes[j] & 0x7F7F7F7Fu) + 0x01010101u;
    }
    if (!easy || (nan & 0x80808080u) != 0) {
        expand_pass_hard(false, codes, scale, 1.0f, to);
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t out[4];
        spread_e4m3(codes[2 * h], out);
        spread_e4m3(codes[2 * h + 1], out + 2);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out[j] = ptx_multiply_bf16x2(out[j], factor);
        }
        ptx_store_shared_128(to ^ (h * 16), out);
    }
}

static __device__ __forceinline__ void expand_pass_fp4(const uint32_t codes[4], uint32_t scale, uint32_t to)
{
    uint32_t factor = (__float_as_uint(float_of_e4m3(scale)) >> 16) * 0x00010001u;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t out[4];
        spread_e2m1(codes[h] & 0xFFFFu, out);
        spread_e2m1(codes[h] >> 16, out + 2);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out[j] = ptx_multiply_bf16x2(out[j], factor);
        }
        ptx_store_shared_128(to ^ (h * 16), out);
    }
}

/* Pass i of what has arrived, as 16 bf16 numbers to `to`, the lane's place for pass 0. */
static __device__ __forceinline__ void expand_pass(const fmlac_mqa &p, const raw_half &raw, int i, uint32_t to)
{
    uint32_t bits = raw.scale[i];
    to ^= i * 2 << 4; /* two rows on: another place of the swizzle */
    to += i * 2 * 128;
    if (raw.format.kind == CODES_FP8_E8M0) {
        expand_pass_fp8(raw.codes[i], (bits + 120) * 0x00800080u, bits - 3 <= 131, float_of_e8m0(bits), to);
    } else if (raw.format.kind == CODES_FP8_F32) {
        uint32_t factor = ((bits >> 16) + (120u << 7)) * 0x00010001u;
        expand_pass_fp8(raw.codes[i], factor, scale_is_easy(__uint_as_float(bits)), __uint_as_float(bits), to);
    } else if (raw.format.kind == CODES_FP4_E4M3) {
        expand_pass_fp4(raw.codes[i], bits, to);
    } else {
        expand_pass_any(pool_of(p, raw.format.extra), raw.codes[i], bits, to);
    }
}

/* ---- dims stored as bf16 ----------------------------------------------------------------------------------------- */

/* The warp's tokens; lane: chunk lane % 8 of tokens lane / 8 and lane / 8 + 4. Every thread arrives at `full`. */
static __device__ __forceinline__ void copy_rope(const fmlac_mqa &p, bool extra, const token_place *places,
                                                 uint32_t tile, int warp, uint32_t full)
{
    int lane = threadIdx.x % 32, chunk = lane % 8, offset = pool_of(p, extra).rope_offset + chunk * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int token = lane / 8 + 4 * i;
        const uint8_t *row = places[token].row;
        uint32_t to = tile + chunk_offset(warp * WARP_TOKENS + token, p.main.pool.quant_dims / 8 + chunk);
        const uint8_t *from = (row ? row : p.main.pool.data) + offset;
        if (p.aligned) {
            ptx_copy_async_16_if(to, from, row != nullptr);
        } else {
            copy_bytes(to, from, row ? 8 : 0);
        }
    }
    if (p.aligned) {
        ptx_mbarrier_arrive_copies(full);
    } else {
        ptx_fence_async_proxy();
        ptx_mbarrier_arrive(full);
    }
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Finds the next tile and the places of the warp's tokens in it. `position`: of its first entry in a paged list. */
template <int BLOCKS>
static __device__ __forceinline__ bool find_next(const fmlac_mqa &p, const fmlac_work &w, plan<BLOCKS> *m,
                                                 list_ahead *ahead, int32_t position, token_place *places, int warp,
                                                 codes_format *format)
{
    int lane = threadIdx.x % 32;
    const uint32_t *ring = m->entries[warp];
    tile_tokens tile = scan_next(p, w, &m->scans[warp], ahead, m->entries[warp]);
    token_place place = find_token(p, w, ring, tile, position, warp * WARP_TOKENS + lane % WARP_TOKENS);
    *format = format_of(pool_of(p, tile.extra), tile.extra);
    if (lane < WARP_TOKENS) {
        places[lane] = place;
    }
    __syncwarp();
    return tile.more;
}

/* Half `half` of a tile: expands what is under way and starts the loads of the half that follows it, in `next`. */
static __device__ __forceinline__ void expand_half(const fmlac_mqa &p, raw_half *raw, uint32_t tile, int half,
                                                   const codes_format &next, const token_place *places, int next_half,
                                                   int warp)
{
    int dim = segment_dim(half);
    uint32_t to = tile + chunk_offset(warp * WARP_TOKENS + (threadIdx.x >> 2 & 1), dim / 8);
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        if (dim < p.main.pool.quant_dims) {
            expand_pass(p, *raw, i, to);
        }
        load_pass(p, next, places, i, next_half, raw);
    }
    raw->format = next;
    ptx_fence_async_proxy();
    __syncwarp();
}

template <int BLOCKS> static __device__ __forceinline__ void arrive_half(plan<BLOCKS> *m, int slot, int step)
{
    if (threadIdx.x % 32 == 0) {
        ptx_mbarrier_arrive(ptx_shared_address(&m->full[slot][2 * step]));
        ptx_mbarrier_arrive(ptx_shared_address(&m->full[slot][2 * step + 1]));
    }
}

/* The first half of a tile's codes is under way in `raw`. Returns whether another tile follows the next; `more`: the
 * next follows (else what is found and loaded is an empty tile). `position`: of the next. The dims stored as bf16 are in
 * the second half of every format. */
template <int BLOCKS>
static __device__ __forceinline__ bool expand_tile(const fmlac_mqa &p, plan<BLOCKS> *m, int slot, uint32_t parity,
                                                   raw_half *raw, const fmlac_work &w, list_ahead *ahead,
                                                   int32_t position, bool more, int warp)
{
    int lane = threadIdx.x % 32;
    uint32_t tile = ptx_shared_address(m->k[slot]), free = ptx_shared_address(m->free[slot]);
    token_place *places = m->places[slot] + warp * WARP_TOKENS, *others = m->places[1 - slot] + warp * WARP_TOKENS;
    codes_format format = raw->format, next;
    ptx_mbarrier_wait(free, parity ^ 1);
    expand_half(p, raw, tile, 0, format, places, 1, warp);
    arrive_half(m, slot, 0);
    bool more_then = find_next(p, w, m, ahead, position, others, warp, &next);
    ptx_mbarrier_wait(free + 8, parity ^ 1);
    if (p.main.pool.rope_dims > 0) {
        copy_rope(p, format.extra, places, tile, warp, ptx_shared_address(&m->full[slot][PORTIONS - 1]));
    }
    uint32_t there = __ballot_sync(0xFFFFFFFFu, places[lane % WARP_TOKENS].row != nullptr);
    if (lane == 0) {
        ((volatile uint8_t *)m->mask[slot])[warp] = (uint8_t)there;
        m->more[slot] = more;
    }
    expand_half(p, raw, tile, 1, next, others, 0, warp);
    arrive_half(m, slot, 1);
    return more_then;
}

template <int BLOCKS> static __device__ __forceinline__ void produce_codes(const fmlac_mqa &p, plan<BLOCKS> *m)
{
    int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32 % CODE_WARPS, 0), lane = threadIdx.x % 32;
    slot_uses uses = 0;
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!c.there) {
            return;
        }
        const fmlac_work &w = c.work;
        int32_t begin = __shfl_sync(0xFFFFFFFFu, c.begin, 0), tiles = __shfl_sync(0xFFFFFFFFu, c.end, 0) - begin;
        raw_half raw;
        list_ahead ahead;
        bool there = tiles > 0, more = false;
        if (there) {
            token_place *places = m->places[0] + warp * WARP_TOKENS;
            ahead = scan_begin(p, w, begin, begin + tiles, &m->scans[warp]);
            more = find_next(p, w, m, &ahead, begin * TOKENS, places, warp, &raw.format);
#pragma unroll
            for (int j = 0; j < PASSES; j++) {
                load_pass(p, raw.format, places, j, 0, &raw);
            }
        }
        int32_t t = 0;
#pragma unroll 1
        for (; there; t++) {
            bool next = expand_tile(p, m, t & 1, tile_parity(uses, t), &raw, w, &ahead, (begin + t + 1) * TOKENS, more,
                                    warp);
            there = more;
            more = next;
        }
        uses = uses_after(uses, t);
        __syncwarp();
        if (lane == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->piece_free[i & 1]));
        }
    }
}

#endif
