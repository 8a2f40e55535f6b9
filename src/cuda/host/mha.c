/* SPDX-License-Identifier: MIT */
/* mha.c: launches of dense multi-head attention, forward and backward. */
#include <string.h>

#include "cuda_host.h"

extern void fmlak_mha_forward_bf16_sm80(void);
extern void fmlak_mha_forward_f16_sm80(void);
extern void fmlak_mha_forward_any_sm80(void);
extern void fmlak_mha_delta_sm80(void);
extern void fmlak_mha_keys_bf16_sm80(void);
extern void fmlak_mha_keys_f16_sm80(void);
extern void fmlak_mha_keys_any_sm80(void);
extern void fmlak_mha_queries_bf16_sm80(void);
extern void fmlak_mha_queries_f16_sm80(void);
extern void fmlak_mha_queries_any_sm80(void);

#define FORWARD_ROWS  128
#define FORWARD_KEYS  64
#define BACKWARD_ROWS 64
#define BACKWARD_STEP 32

static void describe(fmlac_mha *to, const fmlai_mha *from)
{
    memset(to, 0, sizeof *to);
    to->batch = from->cu_seqlens_q || from->cu_seqlens_kv ? from->batch : 1;
    to->total_q = from->total_q;
    to->total_kv = from->total_kv;
    to->cu_seqlens_q = from->cu_seqlens_q;
    to->cu_seqlens_kv = from->cu_seqlens_kv;
    to->h_q = from->h_q;
    to->h_kv = from->h_kv;
    to->d_qk = from->d_qk;
    to->d_v = from->d_v;
    to->causal = from->causal;
    to->scale = from->scale;
    to->empty_lse = from->empty_lse;
    fmlac_describe_packed(&to->q, &from->q, from->d_qk);
    fmlac_describe_packed(&to->k, &from->k, from->d_qk);
    fmlac_describe_packed(&to->v, &from->v, from->d_v);
    fmlac_describe_packed(&to->out, &from->out, from->d_v);
    fmlac_describe_packed(&to->lse, &from->lse, 1);
    fmlac_describe_packed(&to->dout, &from->dout, from->d_v);
    fmlac_describe_packed(&to->dq, &from->dq, from->d_qk);
    fmlac_describe_packed(&to->dk, &from->dk, from->d_qk);
    fmlac_describe_packed(&to->dv, &from->dv, from->d_v);
}

/* Bytes of a padded row of d elements in a tile. */
static size_t row_bytes(int32_t d)
{
    return (size_t)(d + 63) / 64 * 128;
}

static bool has_tiles(const fmlac_mha *p)
{
    return p->d_qk <= 192 && p->d_v <= 128;
}

/* Slots for tiles of `rows` tokens of every request. */
static int64_t slots_of(int64_t total, int64_t rows, const int32_t *cu_seqlens, int64_t batch)
{
    return cu_seqlens ? total / rows + batch : fmlac_ceil(total, rows);
}

static fmla_status enqueue_sides(const fmlac_state *state, const fmlai_call *call, const fmlac_launch *launches,
                                 int count, const fmlac_mha *params)
{
    int before;
    fmla_status status = fmlac_enter(state->device, &before, call->error);
    if (status != FMLA_OK) {
        return status;
    }
    for (int i = 0; i < count && status == FMLA_OK; i++) {
        status = launches[i].blocks > 0 ? fmlac_enqueue(state, call, &launches[i], &params[i]) : FMLA_OK;
    }
    fmlac_leave(before);
    return status;
}

size_t fmlac_mha_forward_workspace(const void *state, const fmlai_mha *p)
{
    (void)state;
    (void)p;
    return 0;
}

fmla_status fmlac_mha_forward(void *opaque, const fmlai_mha *from, const fmlai_call *call)
{
    const fmlac_state *state = opaque;
    fmlac_mha p;
    describe(&p, from);
    bool f16 = from->q.dtype == FMLA_F16;
    p.slots = slots_of(p.total_q, FORWARD_ROWS, p.cu_seqlens_q, p.batch);
    size_t stages = 2 * FORWARD_KEYS * (row_bytes(p.d_qk) + row_bytes(p.d_v));
    size_t queries = FORWARD_ROWS * row_bytes(p.d_qk);
    fmlac_launch launch = {
        .kernel = (const void *)(f16 ? fmlak_mha_forward_f16_sm80 : fmlak_mha_forward_bf16_sm80),
        .name = f16 ? "fmlak_mha_forward_f16_sm80" : "fmlak_mha_forward_bf16_sm80",
        .blocks = p.slots * p.h_q,
        .threads = 256,
        .shared = stages > queries ? stages : queries,
    };
    if (!has_tiles(&p) || launch.shared > (size_t)state->shared_block) {
        launch = (fmlac_launch){.kernel = (const void *)fmlak_mha_forward_any_sm80,
                                .name = "fmlak_mha_forward_any_sm80",
                                .blocks = p.total_q * p.h_q,
                                .threads = 128,
                                .shared = (size_t)(p.d_qk + p.d_v) * sizeof(float)};
    }
    return enqueue_sides(state, call, &launch, 1, &p);
}

size_t fmlac_mha_backward_workspace(const void *state, const fmlai_mha *p)
{
    (void)state;
    return (size_t)p->total_q * (size_t)p->h_q * sizeof(float);
}

fmla_status fmlac_mha_backward(void *opaque, const fmlai_mha *from, const fmlai_call *call)
{
    const fmlac_state *state = opaque;
    fmlac_mha p[3]; /* delta, keys, queries */
    describe(&p[0], from);
    p[0].delta = call->workspace;
    p[1] = p[2] = p[0];
    p[1].slots = slots_of(p->total_kv, BACKWARD_ROWS, p->cu_seqlens_kv, p->batch);
    p[2].slots = slots_of(p->total_q, BACKWARD_ROWS, p->cu_seqlens_q, p->batch);
    bool f16 = from->q.dtype == FMLA_F16;
    size_t both = row_bytes(p->d_qk) + row_bytes(p->d_v);
    size_t shared = (BACKWARD_ROWS + 2 * BACKWARD_STEP) * both;
    fmlac_launch launches[3] = {
        {.kernel = (const void *)fmlak_mha_delta_sm80,
         .name = "fmlak_mha_delta_sm80",
         .blocks = fmlac_ceil(p->total_q * p->h_q, 8),
         .threads = 256},
        {.kernel = (const void *)(f16 ? fmlak_mha_keys_f16_sm80 : fmlak_mha_keys_bf16_sm80),
         .name = f16 ? "fmlak_mha_keys_f16_sm80" : "fmlak_mha_keys_bf16_sm80",
         .blocks = p[1].slots * p->h_kv,
         .threads = 128,
         .shared = shared + 4 * BACKWARD_STEP * sizeof(float)},
        {.kernel = (const void *)(f16 ? fmlak_mha_queries_f16_sm80 : fmlak_mha_queries_bf16_sm80),
         .name = f16 ? "fmlak_mha_queries_f16_sm80" : "fmlak_mha_queries_bf16_sm80",
         .blocks = p[2].slots * p->h_q,
         .threads = 128,
         .shared = shared},
    };
    if (!has_tiles(p) || launches[1].shared > (size_t)state->shared_block) {
        size_t floats = (size_t)(p->d_qk + p->d_v);
        launches[1] = (fmlac_launch){.kernel = (const void *)fmlak_mha_keys_any_sm80,
                                     .name = "fmlak_mha_keys_any_sm80",
                                     .blocks = p->total_kv * p->h_kv,
                                     .threads = 128,
                                     .shared = 2 * floats * sizeof(float)};
        launches[2] = (fmlac_launch){.kernel = (const void *)fmlak_mha_queries_any_sm80,
                                     .name = "fmlak_mha_queries_any_sm80",
                                     .blocks = p->total_q * p->h_q,
                                     .threads = 128,
                                     .shared = (floats + (size_t)p->d_qk) * sizeof(float)};
    }
    return enqueue_sides(state, call, launches, 3, p);
}
