/* SPDX-License-Identifier: MIT */
/*
 * mqa_tokens.cuh: a tile's tokens on their way into shared memory, by the summing warps. Each brings tokens of its own:
 * from warp * OWN on. Where a device has bulk copies (p.bulk), a lane sets out for a whole row with one of them, and
 * neither registers nor the path of loads and stores see it; elsewhere 16 bytes are copied at a time.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_TOKENS_CUH
#define FLASHMLA_CUDA_SM80_MQA_TOKENS_CUH

#include "mqa_shared.cuh"
#include "ptx/tma.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define BULK(p) ((p).bulk != 0)
#else
#define BULK(p) false
#endif

/* ---- plain tokens ---------------------------------------------------------------------------------------------- */

/* Sixteen bytes of a token's row at any address, of which `count` elements exist. */
static __device__ __forceinline__ void copy_any(uint32_t to, const uint8_t *from, int count)
{
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        ptx_store_shared_u16(to + 2 * i, i < count ? (uint16_t)bytes_u16(from + 2 * i) : 0);
    }
}

/* Tokens that 16-byte copies cannot take; address 0: zeros. */
template <class S>
static __device__ __forceinline__ void copy_plain_any(const fmlac_mqa &p, const unsigned long long *address,
                                                      uint32_t tile)
{
    int chunks = p.row_bytes / 16;
#pragma unroll 1
    for (int i = threadIdx.x - S::QW * 32; i < S::TOKENS * 128; i += S::PW * 32) {
        unsigned long long from = address[i / 128];
        int chunk = i % 128;
        if (chunk < chunks) {
            copy_any(tile + i / 128 * PITCH + chunk * 16, (const uint8_t *)(from & ~EXTRA_BIT) + chunk * 16,
                     from != 0 ? p.d_qk - chunk * 8 : 0);
        }
    }
}

/* What a warp brings of a tile in one step: tokens first .. first + OWN - 1, at once or in halves. A slot's first half
 * is free before its second, but for what lies behind the values: that is weights until all values are summed. */
template <class S> struct plain_step {
    static constexpr int OWN = S::TOKENS / S::PW / S::HALVES;
    static constexpr int BEFORE = S::TOKENS / 2; /* from a token of the second half back to one of the first */
};

/* Whole rows of p.row_bytes by bulk copies; a row that is not there is zeros. Of two halves the last step also brings
 * the first one's rows from TAIL on. */
template <class S>
static __device__ __forceinline__ void copy_plain_bulk(const fmlac_mqa &p, const unsigned long long *address,
                                                       uint32_t tile, uint32_t full, int half)
{
    constexpr int OWN = plain_step<S>::OWN, ROWS = S::HALVES * OWN;
    int lane = (int)ptx_thread() % 32, warp = (int)ptx_thread() / 32 - S::QW;
    bool last = half == S::HALVES - 1, tail = lane >= OWN;
    int t = warp * OWN + lane % OWN + (half == 1 && !tail ? plain_step<S>::BEFORE : 0);
    int begin = tail ? TAIL : 0, end = last ? p.row_bytes : TAIL;
    unsigned long long from = lane < (last ? ROWS : OWN) ? address[t] : 0;
    uint32_t there = __ballot_sync(0xFFFFFFFFu, from != 0);
    uint32_t to = tile + t * PITCH + begin;
    if (__any_sync(0xFFFFFFFFu, lane < (last ? ROWS : OWN) && from == 0)) {
#pragma unroll 1
        for (int c = begin; from == 0 && lane < (last ? ROWS : OWN) && c < end; c += 16) {
            const uint32_t zeros[4] = {0, 0, 0, 0};
            ptx_store_shared_128(to + c - begin, zeros);
        }
    }
    ptx_fence_async_proxy(); /* weights were there */
    __syncwarp();
    if (last && lane == 0) {
        ptx_mbarrier_arrive_expect(full, __popc(there) * p.row_bytes);
    }
    if (from != 0 && begin < end) {
        ptx_bulk_load(to, (const uint8_t *)(from & ~EXTRA_BIT) + begin, end - begin, full);
    }
}

/* Tokens of the ring's place `at` into a tile, a half if it comes in halves; `full` learns when they are there.
 * Addresses of several tokens are read together: copies set out one after another. */
template <class S>
static __device__ __forceinline__ void copy_plain(const fmlac_mqa &p, const mqa_shared &s, int at, uint32_t tile,
                                                  uint32_t full, int half)
{
    constexpr int OWN = plain_step<S>::OWN, EACH = OWN < 4 ? OWN : 4; /* tokens of a warp, and of one round */
    const unsigned long long *address = s.address + at * S::TOKENS;
    if (BULK(p)) {
        copy_plain_bulk<S>(p, address, tile, full, half);
        return;
    }
    if (!p.aligned) {
        if (half == S::HALVES - 1) {
            copy_plain_any<S>(p, address, tile);
            ptx_mbarrier_arrive(full);
        }
        return;
    }
    int lane = (int)ptx_thread() % 32, warp = (int)ptx_thread() / 32 - S::QW, first = half * plain_step<S>::BEFORE;
#pragma unroll 1
    for (int t = first + warp * OWN; t < first + (warp + 1) * OWN; t += EACH) {
        unsigned long long from[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            from[i] = address[t + i];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const uint8_t *row = (const uint8_t *)(from[i] & ~EXTRA_BIT) + lane * 16;
            uint32_t to = tile + (t + i) * PITCH + lane * 16;
            ptx_copy_async_16_if(to, row, from[i] != 0 && lane * 8 < p.d_qk);
            ptx_copy_async_16_if(to + 512, row + 512, from[i] != 0 && 256 + lane * 8 < p.d_qk);
        }
    }
    if (half != S::HALVES - 1) {
        return;
    }
    if (p.row_bytes > TAIL) { /* 8 chunks more of each, four tokens at a time */
#pragma unroll 1
        for (int t = warp * 4 + lane / 8; t < S::TOKENS; t += S::PW * 4) {
            const uint8_t *row = (const uint8_t *)(address[t] & ~EXTRA_BIT) + TAIL + lane % 8 * 16;
            bool there = address[t] != 0 && OUT_COLUMNS + lane % 8 * 8 < p.d_qk;
            ptx_copy_async_16_if(tile + t * PITCH + TAIL + lane % 8 * 16, row, there);
        }
    }
    ptx_mbarrier_arrive_copies(full);
}

/* ---- quantised tokens: raw bytes first -------------------------------------------------------------------------- */

/* Bytes that 16-byte copies cannot take. */
static __device__ __forceinline__ void copy_raw_any(uint32_t to, const uint8_t *from, int bytes)
{
#pragma unroll 1
    for (int c = ptx_thread() % 32; c < bytes; c += 32) {
        ptx_store_shared_u8(to + c, from[c]);
    }
}

/* Where scale rows that lie elsewhere go, from a raw row on. */
static __device__ __forceinline__ int raw_scale_row(const fmlac_pool &pool)
{
    return pool.raw_scales - pool.scale_offset;
}

/* A warp's tokens, whatever their address. */
template <int OWN>
static __device__ __forceinline__ void copy_raw_bytes(const fmlac_mqa &p, const unsigned long long *address,
                                                      const unsigned long long *scale, uint32_t raw)
{
#pragma unroll 1
    for (int t = 0; t < OWN; t++, raw += p.raw_pitch) {
        const fmlac_pool &pool = address[t] & EXTRA_BIT ? p.extra.pool : p.main.pool;
        if (address[t] != 0) {
            copy_raw_any(raw, (const uint8_t *)(address[t] & ~EXTRA_BIT), pool.data_row_bytes);
            copy_raw_any(raw + raw_scale_row(pool), (const uint8_t *)scale[t], scale[t] ? pool.scale_row_bytes : 0);
        }
    }
}

/* The raw bytes of a warp's tokens of the ring's place `at` set out: data rows, and scale rows that lie elsewhere. */
template <class S> static __device__ __forceinline__ void copy_raw(const fmlac_mqa &p, const mqa_shared &s, int at)
{
    constexpr int OWN = S::TOKENS / S::PW;
    static_assert(OWN <= 4, "eight lanes for the scales of a token");
    int warp = (int)ptx_thread() / 32 - S::QW, lane = ptx_thread() % 32;
    const unsigned long long *address = s.address + at * S::TOKENS + warp * OWN;
    const unsigned long long *scale = s.scale + at * S::TOKENS + warp * OWN;
    uint32_t raw = s.raw + warp * OWN * p.raw_pitch;
    if (!p.aligned) {
        copy_raw_bytes<OWN>(p, address, scale, raw);
        return;
    }
    if (p.main.pool.scale_row_bytes + p.extra.pool.scale_row_bytes > 0) {
        unsigned long long token = lane / 8 < OWN ? address[lane / 8] : 0;
        const fmlac_pool &pool = token & EXTRA_BIT ? p.extra.pool : p.main.pool;
        uint32_t to = raw + lane / 8 * p.raw_pitch + raw_scale_row(pool);
#pragma unroll 1
        for (int c = lane % 8 * 8; token != 0 && c < pool.scale_row_bytes; c += 64) {
            ptx_copy_async_8(to + c, (const uint8_t *)scale[lane / 8] + c, 8);
        }
    }
    if (BULK(p)) {
        unsigned long long token = lane < OWN ? address[lane] : 0;
        int bytes = token & EXTRA_BIT ? p.extra.pool.data_row_bytes : p.main.pool.data_row_bytes;
        uint32_t there = __ballot_sync(0xFFFFFFFFu, token != 0);
        uint32_t extra = __ballot_sync(0xFFFFFFFFu, (token & EXTRA_BIT) != 0);
        uint32_t full = s.raw_full + warp * 8;
        if (lane == 0) {
            ptx_mbarrier_arrive_expect(full, __popc(there & ~extra) * p.main.pool.data_row_bytes +
                                                 __popc(extra) * p.extra.pool.data_row_bytes);
        }
        __syncwarp();
        if (token != 0) {
            ptx_bulk_load(raw + lane * p.raw_pitch, (const uint8_t *)(token & ~EXTRA_BIT), bytes, full);
        }
    } else {
        unsigned long long token[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            token[i] = address[i];
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const uint8_t *row = (const uint8_t *)(token[i] & ~EXTRA_BIT) + lane * 16;
            int bytes = token[i] & EXTRA_BIT ? p.extra.pool.data_row_bytes : p.main.pool.data_row_bytes;
            bytes = token[i] != 0 ? bytes : 0;
            uint32_t to = raw + i * p.raw_pitch + lane * 16;
            if (lane * 16 < bytes) {
                ptx_copy_async_16(to, row, 16);
            }
            if (lane * 16 + 512 < bytes) {
                ptx_copy_async_16(to + 512, row + 512, 16);
            }
#pragma unroll 1
            for (int c = lane * 16 + 1024; c < bytes; c += 512) {
                ptx_copy_async_16(to - lane * 16 + c, row - lane * 16 + c, 16);
            }
        }
    }
    ptx_copy_async_commit();
}

/* A warp waits for its raw bytes. */
template <class S>
static __device__ __forceinline__ void wait_raw(const fmlac_mqa &p, const mqa_shared &s, uint32_t parity)
{
    ptx_copy_async_wait<0>();
    if (BULK(p)) {
        ptx_mbarrier_wait(s.raw_full + ((int)ptx_thread() / 32 - S::QW) * 8, parity);
    }
    __syncwarp();
}

#endif
