/* SPDX-License-Identifier: MIT */
/*
 * matrix.cuh: warp matrix instructions. Fragments of m16n8k16, lane l, g = l / 4, q = l % 4:
 *   A  a[0] (row g, k 2q..2q+1)  a[1] (row g+8)  a[2] (row g, k 8+2q..)  a[3] (row g+8, k 8+2q..)
 *   B  b[0] (k 2q..2q+1, col g)  b[1] (k 8+2q.., col g)
 *   D  d[0..1] (row g, cols 2q, 2q+1)  d[2..3] (row g+8)
 */
#ifndef FLASHMLA_PTX_MATRIX_CUH
#define FLASHMLA_PTX_MATRIX_CUH

#include "memory.cuh"

/* Four 8x8 matrices of 16-bit elements; lane l names row l % 8 (16 bytes) of matrix l / 8. */
PTX_INLINE void ptx_ldmatrix_x4(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

PTX_INLINE void ptx_ldmatrix_x4_trans(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* d += a * b */
PTX_INLINE void ptx_mma_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

PTX_INLINE void ptx_mma_f16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
