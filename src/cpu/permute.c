/* SPDX-License-Identifier: MIT */
/*
 * permute.c: the two weight permutations, as moves of bytes. Tasks are runs of source rows; every row has its
 * own destination.
 */
#include <string.h>

#include "cpu.h"

#define ROWS_PER_TASK 64
#define CHUNK         32 /* columns that stay together */

static void permute_q_b_row(const fmlai_permute *p, int64_t row)
{
    int64_t h = row / p->d, d = row % p->d;
    int64_t to = d % 16 + 16 * h + d / 16 * 16 * p->heads;
    memcpy(p->out_weight + to * p->cols, p->weight + row * p->weight_stride[1], (size_t)p->cols);
    for (int64_t w = 0; w < p->words; w++) {
        p->out_scale[to * p->out_scale_stride[1] + w * p->out_scale_stride[2]] =
            p->scale[row * p->scale_stride[1] + w * p->scale_stride[2]];
    }
}

/* Chunk c of head g (source number g * chunks + c) becomes number c * G + g, its scale byte with it. */
static void permute_wv_row(const fmlai_permute *p, int64_t group, int64_t row)
{
    int64_t chunks = p->d / CHUNK, heads = p->heads;
    const uint8_t *from = p->weight + group * p->weight_stride[0] + row * p->weight_stride[1];
    const int32_t *scale = p->scale + group * p->scale_stride[0] + row * p->scale_stride[1];
    uint8_t *to = p->out_weight + (group * p->rows + row) * p->cols;
    int32_t *out_scale = p->out_scale + group * p->out_scale_stride[0] + row * p->out_scale_stride[1];
    uint32_t word = 0;
    for (int64_t i = 0; i < chunks * heads; i++) {
        int64_t source = i % heads * chunks + i / heads;
        memcpy(to + i * CHUNK, from + source * CHUNK, CHUNK);
        uint32_t byte = (uint32_t)scale[source / 4 * p->scale_stride[2]] >> (8 * (source % 4)) & 0xFF;
        word |= byte << (8 * (i % 4));
        if (i % 4 == 3) {
            out_scale[i / 4 * p->out_scale_stride[2]] = (int32_t)word;
            word = 0;
        }
    }
}

static void permute_task(void *user, int64_t task, int32_t worker)
{
    const fmlai_permute *p = user;
    int64_t total = p->groups * p->rows;
    int64_t end = (task + 1) * ROWS_PER_TASK < total ? (task + 1) * ROWS_PER_TASK : total;
    (void)worker;
    for (int64_t i = task * ROWS_PER_TASK; i < end; i++) {
        if (p->kind == FMLA_OP_PERMUTE_Q_B) {
            permute_q_b_row(p, i);
        } else {
            permute_wv_row(p, i / p->rows, i % p->rows);
        }
    }
}

fmla_status fmlai_cpu_permute(void *state, const fmlai_permute *p, const fmlai_call *call)
{
    (void)call;
    fmlai_cpu_run(state, (p->groups * p->rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, permute_task,
                  (void *)(uintptr_t)p);
    return FMLA_OK;
}
