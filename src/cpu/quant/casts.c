/* SPDX-License-Identifier: MIT */
/*
 * casts.c: two small neighbours of the caches: positions to slots, and quantiser D on a matrix.
 */
#include "../rows.h"

#define ROWS_PER_TASK 16
#define GROUP_MAX     128

/* ---- indices_convert --------------------------------------------------------------------------------- */

static int32_t slot_of_position(const fmlai_indices_convert *p, int64_t request, int32_t position)
{
    int64_t page = position < 0 ? p->max_pages : position / p->page_size;
    if (page >= p->max_pages) {
        return -1;
    }
    int64_t entry = p->block_table[request * p->table_stride + page];
    int64_t slot = entry * p->page_size + position % p->page_size;
    return entry < 0 || slot > INT32_MAX ? -1 : (int32_t)slot;
}

static void indices_task(void *user, int64_t row, int32_t worker)
{
    const fmlai_indices_convert *p = user;
    int64_t request = row / p->s_q, token = row % p->s_q;
    const int32_t *from = p->positions + request * p->position_stride[0] + token * p->position_stride[1];
    int32_t *to = p->indices + request * p->index_stride[0] + token * p->index_stride[1];
    (void)worker;
    for (int64_t i = 0; i < p->topk; i++) {
        to[i] = slot_of_position(p, request, from[i]);
    }
}

fmla_status fmlai_cpu_indices_convert(void *state, const fmlai_indices_convert *p, const fmlai_call *call)
{
    (void)call;
    fmlai_cpu_run(state, p->batch * p->s_q, indices_task, (void *)(uintptr_t)p);
    return FMLA_OK;
}

/* ---- fp8_cast ---------------------------------------------------------------------------------------- */

typedef struct cast_job {
    const fmlai_cpu *cpu;
    const fmlai_fp8_cast *p;
} cast_job;

static void cast_row(const cast_job *job, int64_t row)
{
    const fmlai_fp8_cast *p = job->p;
    float x[GROUP_MAX];
    uint32_t word = 0;
    for (int64_t g = 0; g < p->cols / p->group; g++) {
        int64_t first = g * p->group;
        fmlai_row_load(x, p->src, p->dtype, row * p->src_stride + first, p->group);
        uint32_t byte = job->cpu->quant.cast(x, p->group, p->codes + row * p->code_stride + first);
        word |= byte << (8 * (g % 4));
        if (g % 4 == 3) {
            p->scale[row + g / 4 * p->scale_rows] = (int32_t)word;
            word = 0;
        }
    }
}

static void cast_task(void *user, int64_t task, int32_t worker)
{
    const cast_job *job = user;
    int64_t rows = job->p->rows, end = (task + 1) * ROWS_PER_TASK < rows ? (task + 1) * ROWS_PER_TASK : rows;
    (void)worker;
    for (int64_t row = task * ROWS_PER_TASK; row < end; row++) {
        cast_row(job, row);
    }
}

fmla_status fmlai_cpu_fp8_cast(void *state, const fmlai_fp8_cast *p, const fmlai_call *call)
{
    if (p->group > GROUP_MAX) {
        return fmlai_fail(call->error, FMLA_ERROR_UNSUPPORTED, "group %d; at most %d", p->group, GROUP_MAX);
    }
    cast_job job = {state, p};
    fmlai_cpu_run(state, (p->rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK, cast_task, &job);
    return FMLA_OK;
}
