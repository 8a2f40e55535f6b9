/* SPDX-License-Identifier: MIT */
/* emulate_matrix.cpp: stores of matrices by a warp (sm_90a), as registers have them or transposed. */
#include "emulate.h"

#include <string.h>

#include "ptx/warpgroup.cuh"

struct matrix_store {
    const uint32_t *r;
    uint32_t address;
};

static uint32_t matrix_row(void **lanes, int matrix, int row)
{
    uint32_t at = ((matrix_store *)lanes[matrix * 8 + row])->address;
    if (at % 16) {
        emu_fail("stmatrix: bad address");
    }
    return at;
}

static void step_store(void **lanes)
{
    for (int l = 0; l < 32; l++) {
        for (int m = 0; m < 4; m++) {
            memcpy(emu_shared() + matrix_row(lanes, m, l / 4) + l % 4 * 4, &((matrix_store *)lanes[l])->r[m], 4);
        }
    }
}

static void step_store_trans(void **lanes)
{
    for (int l = 0; l < 32; l++) {
        for (int i = 0; i < 8; i++) {
            int m = i / 2, column = l % 4 * 2 + i % 2;
            uint16_t x = (uint16_t)(((matrix_store *)lanes[l])->r[m] >> (16 * (i % 2)));
            memcpy(emu_shared() + matrix_row(lanes, m, column) + l / 4 * 2, &x, 2);
        }
    }
}

void ptx_stmatrix_x4(uint32_t address, const uint32_t r[4])
{
    matrix_store m = {r, address};
    emu_meet(step_store, &m);
}

void ptx_stmatrix_x4_trans(uint32_t address, const uint32_t r[4])
{
    matrix_store m = {r, address};
    emu_meet(step_store_trans, &m);
}
