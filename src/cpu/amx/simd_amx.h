/* SPDX-License-Identifier: MIT */
/*
 * simd_amx.h: the tile instructions of AMX-BF16: eight registers of 16 rows of 64 bytes. Assembly, because what GCC
 * offers does not tell the compiler that memory is read and written. FLASHMLA_EMULATE_AVX512 puts arrays in place of
 * the registers: for tests only.
 */
#ifndef FLASHMLA_SIMD_AMX_H
#define FLASHMLA_SIMD_AMX_H

#include <stdint.h>

#define AMX_ROWS 16
#define AMX_LINE 64 /* bytes of a row */

#if defined(FLASHMLA_EMULATE_AVX512)

#include <string.h>

static _Thread_local float amx_tiles[8][AMX_ROWS][AMX_LINE / 4];
static _Thread_local int32_t amx_few;

static inline int32_t amx_rows_of(int tile)
{
    return tile < 6 ? amx_few : AMX_ROWS;
}

static inline float amx_flush(float x)
{
    return x > -0x1p-126f && x < 0x1p-126f ? 0.0f : x;
}

static inline float amx_half(int tile, int32_t row, int32_t i)
{
    uint16_t half;
    memcpy(&half, (const char *)amx_tiles[tile][row] + 2 * i, sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return amx_flush(x);
}

static inline void amx_begin(int32_t rows)
{
    amx_few = rows;
}

static inline void amx_end(void)
{
}

static inline void amx_zero(int tile)
{
    memset(amx_tiles[tile], 0, sizeof amx_tiles[tile]);
}

static inline void amx_load(int tile, const void *from, int64_t stride)
{
    for (int32_t i = 0; i < amx_rows_of(tile); i++) {
        memcpy(amx_tiles[tile][i], (const char *)from + i * stride, AMX_LINE);
    }
}

static inline void amx_store(int tile, void *to, int64_t stride)
{
    for (int32_t i = 0; i < amx_rows_of(tile); i++) {
        memcpy((char *)to + i * stride, amx_tiles[tile][i], AMX_LINE);
    }
}

/* As the processor does it: even and odd products in two sums of their own, which then join the old value. */
static inline void amx_dot(int sum, int a, int b)
{
    for (int32_t m = 0; m < amx_rows_of(sum); m++) {
        for (int32_t n = 0; n < AMX_ROWS; n++) {
            float even = 0.0f, odd = 0.0f;
            for (int32_t k = 0; k < AMX_ROWS; k++) {
                even = amx_flush(even + amx_half(a, m, 2 * k) * amx_half(b, k, 2 * n));
                odd = amx_flush(odd + amx_half(a, m, 2 * k + 1) * amx_half(b, k, 2 * n + 1));
            }
            amx_tiles[sum][m][n] = amx_flush(amx_tiles[sum][m][n] + amx_flush(even + odd));
        }
    }
}

#else

/* Palette 1. Registers 0 to 5, sums and first operands, have `rows` rows, the second operands 6 and 7 all 16. */
static inline void amx_begin(int32_t rows)
{
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int32_t i = 0; i < 8; i++) {
        config.bytes[i] = AMX_LINE;
        config.rows[i] = (uint8_t)(i < 6 ? rows : AMX_ROWS);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

/* Registers that are not in use need not be saved when threads change. */
static inline void amx_end(void)
{
    __asm__ volatile("tilerelease" ::: "memory");
}

/* tile, sum, a, b: literal numbers. */
#define amx_zero(tile) __asm__ volatile("tilezero %%tmm" #tile :::)
#define amx_load(tile, from, stride)                                                                                   \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define amx_store(tile, to, stride)                                                                                    \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
#define amx_dot(sum, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #sum :::)

#endif

#endif
