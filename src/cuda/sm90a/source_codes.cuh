/* SPDX-License-Identifier: MIT */
/*
 * source_codes.cuh: quantised tokens, expanded to bf16 on their way into a tile. Eight warps; warp i owns tokens 8i ..
 * 8i + 7 of every tile. A pass is 16 segments (16 dims each, half a token) of two tokens: lane l has token l >> 2 & 1
 * and segment (l & 3) | (l >> 3) << 2, so that the two 16-byte stores of a pass meet no bank twice. Codes travel
 * through registers: while the four passes of a half are expanded, those of the next half are on their way.
 *
 * Values are code * scale, rounded to bf16 once, for every (code, scale) pair: exactly by a bf16 product where the
 * scale is an easy power of two (every current writer's are) or an e4m3 number, else by the product in float.
 */
#ifndef FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH
#define FLASHMLA_CUDA_SM90A_SOURCE_CODES_CUH

#include "source.cuh"

#define CODE_WARPS  8
#define WARP_TOKENS (TOKENS / CODE_WARPS)
#define PASSES      (WARP_TOKENS / 2)

/* What a lane holds of the half that is on its way. */
typedef struct raw_half {
    uint32_t codes[PASSES][4];
    uint32_t scale[PASSES]; /* its bits or its code */
    uint32_t extra;         /* bit i: pass i's token is of the extra pool */
} raw_half;

static __device__ __forceinline__ const fmlac_pool &pool_of(const fmlac_mqa &p, uint32_t extra)
{
    return extra & 1 ? p.extra.pool : p.main.pool;
}

/* Lanes 0..7 stand for the warp's tokens of the tile that begins the buffer. */
static __device__ __forceinline__ void place_tokens(const fmlac_mqa &p, const fmlac_work &w, const uint32_t *buffer,
                                                    int32_t have, int32_t tile, token_place *places, int warp)
{
    int lane = threadIdx.x % 32;
    token_place place = find_token(p, w, buffer, have, tile, warp * WARP_TOKENS + lane % WARP_TOKENS);
    __syncwarp();
    if (lane < WARP_TOKENS) {
        places[lane] = place;
    }
    __syncwarp();
}

/* First dim of the lane's segment in half `half`. */
static __device__ __forceinline__ int segment_dim(int half)
{
    int lane = threadIdx.x % 32;
    return half * 256 + ((lane & 3) | lane >> 3 << 2) * 16;
}

/* Starts the loads of pass i of a half. */
static __device__ __forceinline__ void load_pass(const fmlac_mqa &p, const token_place *places, int i, int half,
                                                 raw_half *raw)
{
    const token_place place = places[2 * i + (threadIdx.x >> 2 & 1)];
    const fmlac_pool &pool = pool_of(p, place.extra);
    int dim = segment_dim(half);
    const uint8_t *row = place.row;
    raw->codes[i][0] = raw->codes[i][1] = raw->codes[i][2] = raw->codes[i][3] = 0;
    raw->scale[i] = pool.scale == FMLAC_F32 ? 0x3F800000u : pool.scale == FMLAC_F8_E8M0 ? 127 : 0x38; /* 1 */
    raw->extra = (raw->extra & ~(1u << i)) | place.extra << i;
    if (!row || dim >= pool.quant_dims) {
        return;
    }
    if (!pool.aligned) {
        bool fp4 = pool.element == FMLAC_F4_E2M1;
        const uint8_t *from = row + (fp4 ? dim / 2 : dim);
        uint32_t *x = raw->codes[i];
#pragma unroll 1
        for (int j = fp4 ? 7 : 15; j >= 0; j--) {
            x[3] = x[3] << 8 | x[2] >> 24;
            x[2] = x[2] << 8 | x[1] >> 24;
            x[1] = x[1] << 8 | x[0] >> 24;
            x[0] = x[0] << 8 | from[j];
        }
    } else if (pool.element == FMLAC_F4_E2M1) {
        uint2 x = *(const uint2 *)(row + dim / 2);
        raw->codes[i][0] = x.x;
        raw->codes[i][1] = x.y;
    } else {
        uint4 x = *(const uint4 *)(row + dim);
        raw->codes[i][0] = x.x;
        raw->codes[i][1] = x.y;
        raw->codes[i][2] = x.z;
        raw->codes[i][3] = x.w;
    }
    int group = dim >> pool.group_shift;
    if (pool.scale == FMLAC_F32) {
        const uint8_t *scale = row + place.scales + group * 4;
        raw->scale[i] = pool.aligned ? *(const uint32_t *)scale : bytes_u32(scale);
    } else if (pool.scale != FMLAC_NONE) {
        raw->scale[i] = row[place.scales + group];
    }
}

/*
 * Any scale, any outer scale, NaN codes: products in float, one after another. The codes are put where the first eight
 * numbers go and read from there; the last eight numbers go elsewhere, the first eight are written from the last one
 * down.
 */
static __device__ __forceinline__ void expand_pass_hard(const fmlac_pool &pool, const uint32_t codes[4], float scale,
                                                        uint32_t to)
{
    bool fp4 = pool.element == FMLAC_F4_E2M1;
    ptx_store_shared_128(to, codes);
#pragma unroll 1
    for (int at = 15; at >= 0; at--) {
        uint32_t code = ptx_load_shared_u8(to + (fp4 ? at / 2 : at));
        float x = fp4 ? float_of_e2m1(code >> (at % 2 * 4)) : float_of_e4m3(code);
        x = x * scale * pool.outer_scale;
        ptx_store_shared_u16((at < 8 ? to : to ^ 16) + at % 8 * 2, (uint16_t)ptx_pack_bf16(x, x));
    }
}

/* Pass i of what has arrived, as 16 bf16 numbers to the tile. */
static __device__ __forceinline__ void expand_pass(const fmlac_mqa &p, const raw_half &raw, int i, int half,
                                                   uint32_t tile, int warp)
{
    const fmlac_pool &pool = pool_of(p, raw.extra >> i);
    int lane = threadIdx.x % 32, dim = segment_dim(half);
    if (dim >= pool.quant_dims) {
        return;
    }
    float scale = pool.scale == FMLAC_F32       ? __uint_as_float(raw.scale[i])
                  : pool.scale == FMLAC_NONE    ? 1.0f
                  : pool.scale == FMLAC_F8_E8M0 ? float_of_e8m0(raw.scale[i])
                                                : float_of_e4m3(raw.scale[i]);
    const uint32_t *codes = raw.codes[i];
    bool hard = pool.outer_scale != 1.0f, fp4 = pool.element == FMLAC_F4_E2M1;
    if (fp4) {
        hard = hard || pool.scale != FMLAC_F8_E4M3;
    } else {
        uint32_t nan = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            nan |= (codes[j] & 0x7F7F7F7Fu) + 0x01010101u;
        }
        hard = hard || (nan & 0x80808080u) != 0 || !scale_is_easy(scale);
    }
    int token = warp * WARP_TOKENS + 2 * i + (lane >> 2 & 1);
    uint32_t to = tile + chunk_offset(token, dim / 8);
    if (hard) {
        expand_pass_hard(pool, codes, scale, to);
        return;
    }
    uint32_t factor = (__float_as_uint(scale) >> 16) + (fp4 ? 0 : 120u << 7); /* e4m3 is spread to 2^-120 */
    factor |= factor << 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t out[4];
        if (fp4) {
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
        ptx_store_shared_128(to ^ (h * 16), out);
    }
}

/* The bf16 part of the warp's tokens; lane: chunk lane % 8 of tokens lane / 8 and lane / 8 + 4. */
static __device__ __forceinline__ void copy_rope(const fmlac_mqa &p, const token_place *places, uint32_t tile, int warp)
{
    int lane = threadIdx.x % 32, chunk = lane % 8;
#pragma unroll 1
    for (int token = lane / 8; token < WARP_TOKENS; token += 4) {
        const token_place place = places[token];
        const fmlac_pool &pool = pool_of(p, place.extra);
        if (chunk * 8 < pool.rope_dims) {
            uint32_t to = tile + chunk_offset(warp * WARP_TOKENS + token, pool.quant_dims / 8 + chunk);
            const uint8_t *from = place.row ? place.row + pool.rope_offset + chunk * 16 : pool.data;
            if (pool.aligned) {
                ptx_copy_async_16(to, from, place.row ? 16 : 0);
            } else {
                copy_bytes(to, from, place.row ? 8 : 0);
            }
        }
    }
    ptx_copy_async_commit();
}

/* Which half of slot `slot` the bf16 part of tokens is loaded with: block 8 goes with the half that is not the
 * slot's own. */
static __device__ __forceinline__ int rope_half(const fmlac_mqa &p, int slot)
{
    return p.main.pool.quant_dims >= 512 ? 1 - slot : 1;
}

/* Finds the next tile's tokens; true: another tile follows it. */
static __device__ __forceinline__ bool find_next(const fmlac_mqa &p, const fmlac_work &w, list_scan *scan,
                                                 uint32_t *buffer, int32_t tile, token_place *places, int warp)
{
    scan_fill(p, w, scan, buffer);
    place_tokens(p, w, buffer, scan->have, tile, places, warp);
    bool more = scan->have > TOKENS;
    scan_drop(scan, buffer);
    return more;
}

/* A tile: expands what is under way, starts the loads of its second half and of the next tile's first one. `next`:
 * number of the next tile, `more`: there is one. Returns whether one follows that. */
template <int BLOCKS>
static __device__ __forceinline__ bool expand_tile(const fmlac_mqa &p, plan<BLOCKS> *m, int slot, uint32_t parity,
                                                   raw_half *raw, const fmlac_work &w, list_scan *scan, int32_t next,
                                                   bool more, int warp)
{
    int lane = threadIdx.x % 32;
    uint32_t tile = ptx_shared_address(m->k[slot]);
    token_place *places = m->places[slot] + warp * WARP_TOKENS;
#pragma unroll 1
    for (int step = 0; step < 2; step++) {
        int half = slot ^ step;
        ptx_mbarrier_wait(ptx_shared_address(&m->free[slot][half]), parity ^ 1);
        bool rope = p.main.pool.rope_dims > 0 && rope_half(p, slot) == half;
        if (rope) {
            copy_rope(p, places, tile, warp);
        }
        if (step == 1) {
            uint32_t there = __ballot_sync(0xFFFFFFFFu, places[lane % WARP_TOKENS].row != nullptr);
            if (lane == 0) {
                ((volatile uint8_t *)m->mask[slot])[warp] = (uint8_t)there;
                m->more[slot] = more;
            }
            places = m->places[1 - slot] + warp * WARP_TOKENS;
            more = find_next(p, w, scan, m->entries[warp], next, places, warp);
        }
#pragma unroll
        for (int i = 0; i < PASSES; i++) {
            expand_pass(p, *raw, i, half, tile, warp);
            load_pass(p, places, i, 1 - slot, raw); /* this tile's other half, or the next slot's own */
        }
        if (rope) {
            ptx_copy_async_wait<0>();
        }
        ptx_fence_async_proxy();
        __syncwarp();
        if (lane == 0) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->full[slot][2 * step]));
            ptx_mbarrier_arrive(ptx_shared_address(&m->full[slot][2 * step + 1]));
        }
    }
    return more;
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
        list_scan scan;
        raw.extra = 0;
        bool there = tiles > 0, more = false;
        if (there) {
            token_place *places = m->places[0] + warp * WARP_TOKENS;
            scan_begin(p, w, begin, begin + tiles, &scan);
            more = find_next(p, w, &scan, m->entries[warp], begin, places, warp);
#pragma unroll
            for (int j = 0; j < PASSES; j++) {
                load_pass(p, places, j, 0, &raw);
            }
        }
        int32_t t = 0;
#pragma unroll 1
        for (; there; t++) {
            bool next = expand_tile(p, m, t & 1, tile_parity(uses, t), &raw, w, &scan, begin + t + 1, more, warp);
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
