/* SPDX-License-Identifier: MIT */
/*
 * mqa_tokens.cuh: a tile's tokens on their way into shared memory, by the summing warps. Each brings tokens of its own:
 * from warp * OWN on. Where a device has bulk copies (p.bulk), a lane sets out for a whole row with one of them, and
 * neither registers nor the path of loads and stores see it; elsewhere 16 bytes are copied at a time.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_TOKENS_CUH
#define FLASHMLA_CUDA_SM80_MQA_TOKENS_CUH

#include "common/arrive.cuh"
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

/* Addresses of several tokens, so that they are waited for together. */
template <int EACH>
static __device__ __forceinline__ void load_addresses(unsigned long long to[EACH], const unsigned long long *address)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        to[i] = address[i];
    }
}

/* OWN rows that are there, by bulk copies of one lane. */
template <int OWN>
static __device__ __forceinline__ void load_rows_bulk(const unsigned long long *address, uint32_t to, uint32_t bytes,
                                                      uint32_t full)
{
    constexpr int EACH = OWN < 4 ? OWN : 4; /* addresses that are read together */
#pragma unroll
    for (int t = 0; t < OWN; t += EACH) {
        unsigned long long from[EACH];
        load_addresses<EACH>(from, address + t);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            ptx_bulk_load(to + (t + i) * PITCH, (const uint8_t *)(from[i] & ~EXTRA_BIT), bytes, full);
        }
    }
}

/* Whole rows of p.row_bytes by bulk copies; a row that is not there is zeros. */
template <class S>
static __device__ __forceinline__ void copy_plain_bulk(const fmlac_mqa &p, const unsigned long long *address,
                                                       uint32_t tile, uint32_t full)
{
    constexpr int OWN = S::TOKENS / S::PW;
    int lane = (int)ptx_thread() % 32, first = ((int)ptx_thread() / 32 - S::QW) * OWN;
    unsigned long long from = lane < OWN ? address[first + lane] : 0;
    uint32_t there = __ballot_sync(0xFFFFFFFFu, from != 0), to = tile + first * PITCH;
    bool all = there == (1u << OWN) - 1;
#pragma unroll 1
    for (int c = 0; !all && from == 0 && lane < OWN && c < p.row_bytes; c += 16) {
        const uint32_t zeros[4] = {0, 0, 0, 0};
        ptx_store_shared_128(to + lane * PITCH + c, zeros);
    }
    ptx_fence_async_proxy(); /* weights were there */
    __syncwarp();
    if (ptx_elect()) {
        ptx_mbarrier_arrive_expect(full, __popc(there) * p.row_bytes);
        if (all) {
            load_rows_bulk<OWN>(address + first, to, p.row_bytes, full);
        }
    } else {
        arrive_others(full);
    }
    if (!all && from != 0) {
        ptx_bulk_load(to + lane * PITCH, (const uint8_t *)(from & ~EXTRA_BIT), p.row_bytes, full);
    }
}

/* Tokens of the ring's place `at` into a tile; `full` learns when they are there. Addresses of several tokens are read
 * together: copies set out one after another. */
template <class S>
static __device__ __forceinline__ void copy_plain(const fmlac_mqa &p, const mqa_shared &s, int at, uint32_t tile,
                                                  uint32_t full)
{
    constexpr int OWN = S::TOKENS / S::PW, EACH = OWN < 4 ? OWN : 4; /* tokens of a warp, and of one round */
    const unsigned long long *address = s.address + at * S::TOKENS;
    if (BULK(p)) {
        copy_plain_bulk<S>(p, address, tile, full);
        return;
    }
    if (!p.aligned) {
        copy_plain_any<S>(p, address, tile);
        ptx_mbarrier_arrive(full);
        return;
    }
    int lane = (int)ptx_thread() % 32, warp = (int)ptx_thread() / 32 - S::QW;
#pragma unroll 1
    for (int t = warp * OWN; t < (warp + 1) * OWN; t += EACH) {
        unsigned long long from[EACH];
        load_addresses<EACH>(from, address + t);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const uint8_t *row = (const uint8_t *)(from[i] & ~EXTRA_BIT) + lane * 16;
            uint32_t to = tile + (t + i) * PITCH + lane * 16;
            ptx_copy_async_16_if(to, row, from[i] != 0 && lane * 8 < p.d_qk);
            ptx_copy_async_16_if(to + 512, row + 512, from[i] != 0 && 256 + lane * 8 < p.d_qk);
        }
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
static __device__ __noinline__ void copy_raw_bytes(const fmlac_mqa &p, const unsigned long long *address,
                                                   const unsigned long long *scale, uint32_t row)
{
#pragma unroll 1
    for (int t = 0; t < OWN; t++, row += PITCH) {
        const fmlac_pool &pool = address[t] & EXTRA_BIT ? p.extra.pool : p.main.pool;
        uint32_t raw = row + pool.raw_at;
        if (address[t] != 0) {
            copy_raw_any(raw, (const uint8_t *)(address[t] & ~EXTRA_BIT), pool.data_row_bytes);
            copy_raw_any(raw + raw_scale_row(pool), (const uint8_t *)scale[t], scale[t] ? pool.scale_row_bytes : 0);
        }
    }
}

/* How often a warp arrives where its raw bytes of a tile are waited for: a lane that says how many come by bulk copies,
 * and all lanes if there are other copies. */
static __device__ __forceinline__ int raw_arrivals(const fmlac_mqa &p)
{
    return BULK(p) ? (p.scales_elsewhere ? 33 : 1) : 32;
}

/* Eight lanes copy a token's scale row. */
template <int OWN>
static __device__ __forceinline__ void copy_scales(const fmlac_mqa &p, const unsigned long long *address,
                                                   const unsigned long long *scale, uint32_t row)
{
    int lane = ptx_thread() % 32;
#pragma unroll 1
    for (int t = lane / 8; t < OWN; t += 4) {
        const fmlac_pool &pool = address[t] & EXTRA_BIT ? p.extra.pool : p.main.pool;
        uint32_t to = row + t * PITCH + pool.raw_at + raw_scale_row(pool);
#pragma unroll 1
        for (int c = lane % 8 * 8; address[t] != 0 && c < pool.scale_row_bytes; c += 64) {
            ptx_copy_async_8(to + c, (const uint8_t *)scale[t] + c, 8);
        }
    }
}

/* Data rows by bulk copies. */
template <int OWN>
static __device__ __forceinline__ void copy_raw_bulk(const fmlac_mqa &p, const unsigned long long *address,
                                                     uint32_t row, uint32_t full, uint32_t own)
{
    constexpr uint32_t ALL = (1u << OWN) - 1;
    int main = p.main.pool.data_row_bytes, lane = ptx_thread() % 32;
    ptx_fence_async_proxy(); /* values and weights were there */
    __syncwarp();            /* nobody waits for the phase before */
    if (own == (ALL | TILE_EXISTS)) {
        if (ptx_elect()) {
            ptx_mbarrier_arrive_expect(full, OWN * main);
            load_rows_bulk<OWN>(address, row + p.main.pool.raw_at, main, full);
        }
        __syncwarp();
        return;
    }
    if (ptx_elect()) {
        int extra = __popc(own & ALL << 16);
        ptx_mbarrier_arrive_expect(full, (__popc(own & ALL) - extra) * main + extra * p.extra.pool.data_row_bytes);
    }
    __syncwarp();
    unsigned long long token = lane < OWN ? address[lane] : 0;
    if (token != 0) {
        const fmlac_pool &pool = token & EXTRA_BIT ? p.extra.pool : p.main.pool;
        ptx_bulk_load(row + lane * PITCH + pool.raw_at, (const uint8_t *)(token & ~EXTRA_BIT), pool.data_row_bytes,
                      full);
    }
}

/* Data rows 16 bytes at a time. */
template <int OWN>
static __device__ __forceinline__ void copy_raw_rows(const fmlac_mqa &p, const unsigned long long *address,
                                                     uint32_t row)
{
    constexpr int EACH = 2; /* addresses that are read together */
    static_assert(OWN % EACH == 0, "tokens of a warp");
    int lane = ptx_thread() % 32;
#pragma unroll 1
    for (int t = 0; t < OWN; t += EACH, row += EACH * PITCH) {
        unsigned long long token[EACH];
        load_addresses<EACH>(token, address + t);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const uint8_t *from = (const uint8_t *)(token[i] & ~EXTRA_BIT) + lane * 16;
            const fmlac_pool &pool = token[i] & EXTRA_BIT ? p.extra.pool : p.main.pool;
            int bytes = token[i] != 0 ? pool.data_row_bytes : 0;
            uint32_t to = row + i * PITCH + pool.raw_at + lane * 16;
            if (lane * 16 < bytes) {
                ptx_copy_async_16(to, from, 16);
            }
            if (lane * 16 + 512 < bytes) {
                ptx_copy_async_16(to + 512, from + 512, 16);
            }
            if (lane * 16 + 1024 < bytes) {
                ptx_copy_async_16(to + 1024, from + 1024, 16);
            }
        }
    }
}

/* A warp: the raw bytes of its tokens of the ring's place `at` set out for the rows of the tile where they will be
 * expanded: data rows, and scale rows that lie elsewhere. */
template <class S>
static __device__ __forceinline__ void copy_raw(const fmlac_mqa &p, const mqa_shared &s, int warp, int at,
                                                uint32_t tile, uint32_t own)
{
    constexpr int OWN = S::TOKENS / S::PW;
    int first = warp * OWN;
    const unsigned long long *address = s.address + at * S::TOKENS + first;
    const unsigned long long *scale = s.scale + at * S::TOKENS + first;
    uint32_t row = tile + first * PITCH, full = s.raw_full + warp * 8;
    bool alone = BULK(p) && !p.scales_elsewhere; /* bulk copies are all there is */
    if (!alone && !p.aligned) {
        copy_raw_bytes<OWN>(p, address, scale, row);
        ptx_mbarrier_arrive(full);
        return;
    }
    if (!alone && p.scales_elsewhere) {
        copy_scales<OWN>(p, address, scale, row);
    }
    if (BULK(p)) {
        copy_raw_bulk<OWN>(p, address, row, full, own);
    } else {
        copy_raw_rows<OWN>(p, address, row);
    }
    if (!alone) {
        ptx_mbarrier_arrive_copies(full);
    }
}

#endif
