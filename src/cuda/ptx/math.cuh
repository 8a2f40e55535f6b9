/* SPDX-License-Identifier: MIT */
/* math.cuh: arithmetic that C has no operator for. */
#ifndef FLASHMLA_PTX_MATH_CUH
#define FLASHMLA_PTX_MATH_CUH

#include "memory.cuh"

/* 2^x, relative error 2^-22; results below 2^-126 are 0, NaN stays NaN. */
PTX_INLINE float ptx_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two floats as bf16, `low` in the low half. Nearest even; NaN stays NaN. */
PTX_INLINE uint32_t ptx_pack_bf16(float low, float high)
{
    uint32_t x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

PTX_INLINE uint32_t ptx_pack_f16(float low, float high)
{
    uint32_t x;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}

/* a * b of two bf16 pairs, subnormals kept: a fused multiply-add of -0. */
PTX_INLINE uint32_t ptx_multiply_bf16x2(uint32_t a, uint32_t b)
{
    uint32_t x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(0x80008000u));
    return x;
}

/* Bytes of x by the nibbles of `select`, lowest first; a nibble with bit 3 repeats the sign of its byte (which
 * __byte_perm does not). */
PTX_INLINE uint32_t ptx_permute_bytes(uint32_t x, uint32_t select)
{
    uint32_t y;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "r"(select));
    return y;
}

/* The same of x (bytes 0 to 3) and y (4 to 7). */
PTX_INLINE uint32_t ptx_permute_two(uint32_t x, uint32_t y, uint32_t select)
{
    uint32_t z;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(select));
    return z;
}

PTX_INLINE uint32_t ptx_multiply_f16x2(uint32_t a, uint32_t b)
{
    uint32_t x;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(a), "r"(b));
    return x;
}

/* The e4m3 codes of the low two bytes of x as fp16, which holds every one of them (sm_89). */
PTX_INLINE uint32_t ptx_f16_of_e4m3(uint32_t x)
{
    uint32_t y;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h;}" : "=r"(y) : "r"(x));
    return y;
}

/* One fp16 number, low half of x. */
PTX_INLINE float ptx_float_of_f16(uint32_t x)
{
    float y;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(y) : "r"(x));
    return y;
}

#endif
