/* SPDX-License-Identifier: MIT */
/*
 * transcode.c: caches in and out: quantize, dequantize, convert. Tokens are independent, so they are shared
 * out among the workers in blocks. Where the caller names the slots to write, a slot may be named twice: then
 * one task owns all tokens of a slot and takes them in order, so the last one stands, whatever the number of
 * threads.
 */
#include <string.h>

#include "../rows.h"

#define BLOCK_TOKENS 64
#define OWNED_RUN    16   /* neighbouring slots with one owner: they share cache lines */
#define DIMS_MAX     4096 /* of a token to be quantised: its floats lie on the stack */
#define PIECE        256

/* ---- quantize and convert: tokens by the owner of their destination ---------------------------------- */

typedef struct scatter {
    int64_t count;
    int64_t tasks;
    const fmlai_slots *slots; /* destinations */
    const fmlai_pool *pool;
    void (*write)(const void *job, int64_t token, int64_t slot);
    const void *job;
} scatter;

static void scatter_task(void *user, int64_t task, int32_t worker)
{
    const scatter *s = user;
    (void)worker;
    if (!s->slots->data) {
        int64_t end = (task + 1) * BLOCK_TOKENS < s->count ? (task + 1) * BLOCK_TOKENS : s->count;
        for (int64_t i = task * BLOCK_TOKENS; i < end; i++) {
            if (fmlai_slot_valid(s->pool, i)) {
                s->write(s->job, i, i);
            }
        }
        return;
    }
    for (int64_t i = 0; i < s->count; i++) {
        int64_t slot = fmlai_slot_at(s->slots, i);
        if (slot >= 0 && slot / OWNED_RUN % s->tasks == task && fmlai_slot_valid(s->pool, slot)) {
            s->write(s->job, i, slot);
        }
    }
}

static void scatter_run(const fmlai_cpu *cpu, scatter *s)
{
    int64_t blocks = (s->count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    s->tasks = s->slots->data && blocks > 2 * cpu->threads ? 2 * cpu->threads : blocks;
    fmlai_cpu_run(cpu, s->tasks, scatter_task, s);
}

typedef struct quantize_job {
    const fmlai_cpu *cpu;
    const fmlai_transcode *p;
} quantize_job;

static void quantize_token(const void *job, int64_t token, int64_t slot)
{
    const quantize_job *q = job;
    const fmlai_transcode *p = q->p;
    const fmlai_pool *pool = &p->pool;
    float row[DIMS_MAX];
    for (int32_t h = 0; h < p->heads; h++) {
        int64_t first = token * p->rows.stride[0] + h * p->rows.stride[1];
        if (pool->format.layout == FMLA_LAYOUT_PLAIN) {
            uint8_t *dst = (uint8_t *)(uintptr_t)fmlai_pool_row(pool, slot) + h * pool->head_stride;
            for (int32_t d = 0; d < pool->format.d_qk; d += PIECE) {
                int32_t n = pool->format.d_qk - d < PIECE ? pool->format.d_qk - d : PIECE;
                fmlai_row_load(row, p->rows.data, p->rows.dtype, first + d, n);
                fmlai_row_store(dst, (fmla_dtype)pool->format.element, d, row, n);
            }
            continue;
        }
        fmlai_row_load(row, p->rows.data, p->rows.dtype, first, pool->format.d_qk);
        q->cpu->quant.write(pool, slot, h, row, p->rows.dtype, p->quantizer);
    }
}

fmla_status fmlai_cpu_quantize(void *state, const fmlai_transcode *p, const fmlai_call *call)
{
    const fmlai_cpu *cpu = state;
    const fmla_format_info *f = &p->pool.format;
    if (f->layout != FMLA_LAYOUT_PLAIN && f->d_qk > DIMS_MAX) {
        return fmlai_fail(call->error, FMLA_ERROR_UNSUPPORTED,
                          "dst: d_qk of format %.24s is %d; allowed: at most %d", f->name, f->d_qk, DIMS_MAX);
    }
    quantize_job job = {cpu, p};
    scatter s = {
        .count = p->count, .slots = &p->slots, .pool = &p->pool, .write = quantize_token, .job = &job};
    scatter_run(cpu, &s);
    return FMLA_OK;
}

typedef struct convert_job {
    const fmlai_cpu *cpu;
    const fmlai_convert *p;
    bool recode; /* the codes differ: through floats, as attention sees the token */
} convert_job;

static void convert_token(const void *job, int64_t token, int64_t slot)
{
    const convert_job *c = job;
    const fmlai_convert *p = c->p;
    int64_t from = fmlai_slot_at(&p->src_slots, token);
    float row[DIMS_MAX];
    if (!fmlai_slot_valid(&p->src, from)) {
        return;
    }
    for (int32_t h = 0; h < p->heads; h++) {
        if (c->recode) {
            fmlai_expand_for(c->cpu->quant.expand_f32, &p->src)(&p->src, &from, 1, h, row, DIMS_MAX);
            c->cpu->quant.write(&p->dst, slot, h, row, FMLA_BF16, FMLA_QUANTIZER_DEFAULT);
        } else {
            fmlai_token_convert(&p->dst, slot, &p->src, from, h);
        }
    }
}

fmla_status fmlai_cpu_convert(void *state, const fmlai_convert *p, const fmlai_call *call)
{
    const fmla_format_info *from = &p->src.format, *to = &p->dst.format;
    bool alike = from->element == to->element && from->group == to->group && from->scale == to->scale;
    convert_job job = {.cpu = state, .p = p, .recode = !alike && from->d_qk <= DIMS_MAX};
    scatter s = {
        .count = p->count, .slots = &p->dst_slots, .pool = &p->dst, .write = convert_token, .job = &job};
    (void)call;
    scatter_run(state, &s);
    return FMLA_OK;
}

/* ---- dequantize -------------------------------------------------------------------------------------- */

typedef struct gather {
    const fmlai_cpu *cpu;
    const fmlai_transcode *p;
} gather;

/* One token and head through floats; `first` = the element of the result where it goes. */
static void dequantize_token(const fmlai_transcode *p, int64_t slot, int32_t head, int64_t first)
{
    float piece[PIECE];
    for (int32_t d = 0; d < p->pool.format.d_qk; d += PIECE) {
        int32_t end = p->pool.format.d_qk - d < PIECE ? p->pool.format.d_qk : d + PIECE;
        fmlai_token_read_dims(&p->pool, slot, head, d, end, piece);
        fmlai_row_store(p->rows.data, p->rows.dtype, first + d, piece, end - d);
    }
}

static void zero_row(const fmlai_transcode *p, int64_t first)
{
    size_t size = p->rows.dtype == FMLA_F32 ? 4 : 2;
    memset((uint8_t *)p->rows.data + (size_t)first * size, 0, (size_t)p->pool.format.d_qk * size);
}

/* Tokens first..first+count-1 of a head, all of which exist. */
static void dequantize_run(const gather *g, int64_t first, const int64_t *slots, int32_t count, int32_t head)
{
    const fmlai_transcode *p = g->p;
    int64_t at = first * p->rows.stride[0] + head * p->rows.stride[1];
    if (p->rows.dtype == FMLA_BF16 && p->pool.format.element != FMLA_F16) { /* what attention sees */
        fmlai_expand_for(g->cpu->quant.expand_bf16, &p->pool)(&p->pool, slots, count, head,
                                                              (uint16_t *)p->rows.data + at, p->rows.stride[0]);
    } else if (p->rows.dtype == FMLA_F32) {
        fmlai_expand_for(g->cpu->quant.exact_f32, &p->pool)(&p->pool, slots, count, head, (float *)p->rows.data + at,
                                                            p->rows.stride[0]);
    } else {
        for (int32_t i = 0; i < count; i++) {
            dequantize_token(p, slots[i], head, at + i * p->rows.stride[0]);
        }
    }
}

static void gather_task(void *user, int64_t task, int32_t worker)
{
    const gather *g = user;
    const fmlai_transcode *p = g->p;
    int64_t begin = task * BLOCK_TOKENS, slots[BLOCK_TOKENS];
    int32_t count = (int32_t)(p->count - begin < BLOCK_TOKENS ? p->count - begin : BLOCK_TOKENS);

    (void)worker;
    for (int32_t i = 0; i < count; i++) {
        slots[i] = fmlai_slot_at(&p->slots, begin + i);
    }
    for (int32_t h = 0; h < p->heads; h++) {
        for (int32_t i = 0, run; i < count; i += run) {
            for (run = 0; i + run < count && fmlai_slot_valid(&p->pool, slots[i + run]); run++) {
            }
            if (run > 0) {
                dequantize_run(g, begin + i, slots + i, run, h);
            } else {
                zero_row(p, (begin + i) * p->rows.stride[0] + h * p->rows.stride[1]);
                run = 1;
            }
        }
    }
}

fmla_status fmlai_cpu_dequantize(void *state, const fmlai_transcode *p, const fmlai_call *call)
{
    gather g = {state, p};
    (void)call;
    fmlai_cpu_run(state, (p->count + BLOCK_TOKENS - 1) / BLOCK_TOKENS, gather_task, &g);
    return FMLA_OK;
}
