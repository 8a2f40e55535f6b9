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

/* Starts the loads of pass i of a half in a format of kind KIND. Absent tokens are zeros with scale 1. */
template <int KIND>
static __device__ __forceinline__ void load_pass(const fmlac_mqa &p, const codes_format &f, const token_place *places,
                                                 int i, int half, raw_half *raw)
{
    const token_place place = places[2 * i + (threadIdx.x >> 2 & 1)];
    int dim = segment_dim(half);
    uint32_t *x = raw->codes[i];
    bool there = place.row && dim < p.main.pool.quant_dims;
    const uint8_t *scales = place.row + place.scales;
    x[0] = x[1] = x[2] = x[3] = 0;
    raw->scale[i] = KIND == CODES_FP8_F32 ? 0x3F800000u : KIND == CODES_FP8_E8M0 ? 127 : 0x38;
    if (!there) {
        return;
    }
    if (KIND == CODES_ANY) {
        load_pass_any(pool_of(p, f.extra), place, dim, x, &raw->scale[i]);
        return;
    }
    if (KIND == CODES_FP4_E4M3) {
        const uint2 codes = *(const uint2 *)(place.row + dim / 2);
        x[0] = codes.x, x[1] = codes.y;
    } else {
        const uint4 codes = *(const uint4 *)(place.row + dim);
        x[0] = codes.x, x[1] = codes.y, x[2] = codes.z, x[3] = codes.w;
    }
    int group = dim >> f.group_shift;
    raw->scale[i] = KIND == CODES_FP8_F32 ? *(const uint32_t *)(scales + group * 4) : scales[group];
}

template <int KIND>
static __device__ __forceinline__ void load_passes(const fmlac_mqa &p, const codes_format &f, const token_place *places,
                                                   int half, raw_half *raw)
{
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        load_pass<KIND>(p, f, places, i, half, raw);
    }
}

static __device__ __forceinline__ void load_half(const fmlac_mqa &p, const codes_format &f, const token_place *places,
                                                 int half, raw_half *raw)
{
    if (f.kind == CODES_FP8_E8M0) {
        load_passes<CODES_FP8_E8M0>(p, f, places, half, raw);
    } else if (f.kind == CODES_FP8_F32) {
        load_passes<CODES_FP8_F32>(p, f, places, half, raw);
    } else if (f.kind == CODES_FP4_E4M3) {
        load_passes<CODES_FP4_E4M3>(p, f, places, half, raw);
    } else {
        load_passes<CODES_ANY>(p, f, places, half, raw);
    }
    raw->format = f;
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

/* Where pass i goes if pass 0 goes to `to`: two rows on per pass, another place of the swizzle. */
static __device__ __forceinline__ uint32_t pass_place(uint32_t to, int i)
{
    return (to ^ i * 2 << 4) + i * 2 * 128;
}

/* The long way, for all passes of a half. */
static __device__ __forceinline__ void expand_half_hard(const fmlac_pool &pool, const raw_half &raw, uint32_t to)
{
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        uint32_t bits = raw.scale[i];
        float scale = pool.scale == FMLAC_F32       ? __uint_as_float(bits)
                      : pool.scale == FMLAC_NONE    ? 1.0f
                      : pool.scale == FMLAC_F8_E8M0 ? float_of_e8m0(bits)
                                                    : float_of_e4m3(bits);
        expand_pass_hard(pool.element == FMLAC_F4_E2M1, raw.codes[i], scale, pool.outer_scale, pass_place(to, i));
    }
}

/* Whether all codes and scales of the lane may go the short way. */
static __device__ __forceinline__ bool half_is_easy(const raw_half &raw)
{
    uint32_t nan = 0;
    bool easy = true;
    if (raw.format.kind == CODES_FP4_E4M3) {
        return true;
    }
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            nan |= (raw.codes[i][j] & 0x7F7F7F7Fu) + 0x01010101u;
        }
        easy = easy && (raw.format.kind == CODES_FP8_E8M0 ? raw.scale[i] - 3 <= 131
                                                          : scale_is_easy(__uint_as_float(raw.scale[i])));
    }
    return easy && (nan & 0x80808080u) == 0 && raw.format.kind != CODES_ANY;
}

/* Pass i of what has arrived, as 16 bf16 numbers: codes times a number that is a bf16 pair. e4m3 codes are spread to
 * 2^-120 times their value, so their factor is 2^120 times the scale. */
template <int KIND>
static __device__ __forceinline__ void expand_pass(const raw_half &raw, int i, uint32_t to, bool inside)
{
    const uint32_t *codes = raw.codes[i];
    uint32_t bits = raw.scale[i], factor;
    if (KIND == CODES_FP8_E8M0) {
        factor = (bits + 120) * 0x00800080u;
    } else if (KIND == CODES_FP8_F32) {
        factor = ((bits >> 16) + (120u << 7)) * 0x00010001u;
    } else {
        factor = (__float_as_uint(float_of_e4m3(bits)) >> 16) * 0x00010001u;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t out[4];
        if (KIND == CODES_FP4_E4M3) {
            spread_e2m1(codes[h] & 0xFFFFu, out);
            spread_e2m1(codes[h] >> 16, out + 2);
        } else {
            spread_e4m3(codes[2 * h], out);
            spread_e4m3(codes[2 * h + 1], out + 2);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            out[j] = ptx_multiply_bf16x2(out[j], factor);
        }
        if (inside) {
            ptx_store_shared_128(pass_place(to, i) ^ (h * 16), out);
        }
    }
}

/* A half's passes; SAME: the next half is of the same kind, and its loads start as registers become free. */
template <int KIND, int SAME>
static __device__ __forceinline__ void expand_passes(const fmlac_mqa &p, raw_half *raw, uint32_t to, bool inside,
                                                     const codes_format &next, const token_place *places, int next_half)
{
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
        expand_pass<KIND>(*raw, i, to, inside);
        if (SAME) {
            load_pass<KIND>(p, next, places, i, next_half, raw);
        }
    }
    if (SAME) {
        raw->format = next;
    } else {
        load_half(p, next, places, next_half, raw);
    }
}

/* ---- dims stored as bf16 ----------------------------------------------------------------------------------------- */

/* The warp's tokens; lane: chunk lane % 8 of tokens lane / 8 and lane / 8 + 4. Every thread arrives at `full`. */
static __device__ __forceinline__ void copy_rope(const fmlac_mqa &p, bool extra, const token_place *places,
                                                 uint32_t tile, int warp, uint32_t full)
{
    int lane = threadIdx.x % 32, chunk = lane % 8, offset = pool_of(p, extra).rope_offset + chunk * 16;
#pragma unroll 1
    for (int token = lane / 8; token < WARP_TOKENS; token += 4) {
        const uint8_t *row = places[token].row;
        uint32_t to = tile + chunk_offset(warp * WARP_TOKENS + token, (p.main.pool.quant_dims >> 3) + chunk);
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
    int dim = segment_dim(half), kind = raw->format.kind;
    bool inside = dim < p.main.pool.quant_dims;
    uint32_t to = tile + chunk_offset(warp * WARP_TOKENS + (threadIdx.x >> 2 & 1), dim / 8);
    if (!__all_sync(0xFFFFFFFFu, half_is_easy(*raw))) {
        if (inside) {
            expand_half_hard(pool_of(p, raw->format.extra), *raw, to);
        }
        load_half(p, next, places, next_half, raw);
    } else if (kind != next.kind) {
        if (kind == CODES_FP8_E8M0) {
            expand_passes<CODES_FP8_E8M0, 0>(p, raw, to, inside, next, places, next_half);
        } else if (kind == CODES_FP8_F32) {
            expand_passes<CODES_FP8_F32, 0>(p, raw, to, inside, next, places, next_half);
        } else {
            expand_passes<CODES_FP4_E4M3, 0>(p, raw, to, inside, next, places, next_half);
        }
    } else if (kind == CODES_FP8_E8M0) {
        expand_passes<CODES_FP8_E8M0, 1>(p, raw, to, inside, next, places, next_half);
    } else if (kind == CODES_FP8_F32) {
        expand_passes<CODES_FP8_F32, 1>(p, raw, to, inside, next, places, next_half);
    } else {
        expand_passes<CODES_FP4_E4M3, 1>(p, raw, to, inside, next, places, next_half);
    }
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
 * next follows (else what is found and loaded is an empty tile). `position`: of the next. The dims stored as bf16 are
 * in the second half of every format. */
template <int BLOCKS>
static __device__ __forceinline__ bool expand_tile(const fmlac_mqa &p, plan<BLOCKS> *m, int slot, uint32_t parity,
                                                   raw_half *raw, const fmlac_work &w, list_ahead *ahead,
                                                   int32_t position, bool more, int warp)
{
    int lane = threadIdx.x % 32;
    uint32_t tile = ptx_shared_address(m->k[slot]), free = ptx_shared_address(m->free[slot]);
    const token_place *places = m->places[slot] + warp * WARP_TOKENS;
    codes_format format = raw->format, next = format;
    bool more_then = false;
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        if (half == 1) {
            more_then = find_next(p, w, m, ahead, position, m->places[1 - slot] + warp * WARP_TOKENS, warp, &next);
        }
        ptx_mbarrier_wait(free + half * 8, parity ^ 1);
        if (half == 1) {
            if (p.main.pool.rope_dims > 0) {
                copy_rope(p, format.extra, places, tile, warp, ptx_shared_address(&m->full[slot][PORTIONS - 1]));
            }
            uint32_t there = __ballot_sync(0xFFFFFFFFu, places[lane % WARP_TOKENS].row != nullptr);
            if (lane == 0) {
                ((volatile uint8_t *)m->mask[slot])[warp] = (uint8_t)there;
                m->more[slot] = more;
            }
            places = m->places[1 - slot] + warp * WARP_TOKENS;
        }
        expand_half(p, raw, tile, half, next, places, 1 - half, warp);
        arrive_half(m, slot, half);
    }
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
            load_half(p, raw.format, places, 0, &raw);
        }
        int32_t t = 0;
#pragma unroll 1
        for (; there; t++) {
            bool next =
                expand_tile(p, m, t & 1, tile_parity(uses, t), &raw, w, &ahead, (begin + t + 1) * TOKENS, more, warp);
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
