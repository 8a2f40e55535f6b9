/* SPDX-License-Identifier: MIT */
/* mha.c: launches of dense multi-head attention, forward and backward. */
#include <string.h>

#include "cuda_host.h"

#define DECLARE(suffix)                                                                                                \
    extern void fmlak_mha_forward_##suffix##_sm80(void);                                                               \
    extern void fmlak_mha_keys_##suffix##_sm80(void);                                                                  \
    extern void fmlak_mha_queries_##suffix##_sm80(void)

DECLARE(any);
DECLARE(bf16_64);
DECLARE(bf16_128);
DECLARE(bf16_192);
DECLARE(f16_64);
DECLARE(f16_128);
DECLARE(f16_192);
extern void fmlak_mha_delta_sm80(void);

#define FORWARD_ROWS   128
#define FORWARD_KEYS   64
#define BACKWARD_ROWS  64
#define BACKWARD_STEP  64
#define STATIC_SHARED  1024 /* at most, of any of the tiled kernels */
#define BLOCKS_OF_HEAD 4    /* that run at the same time, so that keys from memory serve several */

typedef struct mha_kernel {
    void (*function)(void);
    const char *name;
} mha_kernel;

/* Kernels for rows of at most d_qk and d_v elements. */
typedef struct mha_kernels {
    fmla_dtype dtype;
    int32_t d_qk, d_v;
    mha_kernel forward, keys, queries;
} mha_kernels;

#define KERNEL(side, suffix)                                                                                           \
    {                                                                                                                  \
        fmlak_mha_##side##_##suffix##_sm80, "fmlak_mha_" #side "_" #suffix "_sm80"                                     \
    }
#define KERNELS(suffix) KERNEL(forward, suffix), KERNEL(keys, suffix), KERNEL(queries, suffix)

/* Narrowest first. */
static const mha_kernels TILED[] = {
    {FMLA_BF16, 64, 64, KERNELS(bf16_64)},    {FMLA_BF16, 128, 128, KERNELS(bf16_128)},
    {FMLA_BF16, 192, 128, KERNELS(bf16_192)}, {FMLA_F16, 64, 64, KERNELS(f16_64)},
    {FMLA_F16, 128, 128, KERNELS(f16_128)},   {FMLA_F16, 192, 128, KERNELS(f16_192)},
};

/* For any width; shared memory is their own affair. */
static const mha_kernels ANY = {FMLA_DTYPE_NONE, 0, 0, KERNELS(any)};

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

/* The narrowest tiled kernels that take the call, else ANY. Their shared memory: rows of Q and K, rows of V and dO, and
 * `weights` bytes. */
static const mha_kernels *choose(const fmlac_state *state, const fmlac_mha *p, fmla_dtype dtype, size_t rows_qk,
                                 size_t rows_v, size_t weights, size_t *shared)
{
    for (size_t i = 0; i < sizeof TILED / sizeof *TILED; i++) {
        const mha_kernels *k = &TILED[i];
        *shared = rows_qk * row_bytes(k->d_qk) + rows_v * row_bytes(k->d_v) + weights;
        if (k->dtype == dtype && p->d_qk <= k->d_qk && p->d_v <= k->d_v &&
            *shared + STATIC_SHARED <= (size_t)state->shared_block) {
            return k;
        }
    }
    return &ANY;
}

/*
 * Heads whose blocks run together. Work is spread best where all do, longest first; but the heads' keys and values
 * should be shared: in the L2 cache, or, where they are too long for it, by the blocks that run at the same time.
 */
static int64_t section_of(const fmlac_state *state, const fmlac_mha *p, bool by_query)
{
    int64_t group = by_query ? p->h_q / p->h_kv : 1;
    int64_t tokens = fmlac_ceil(p->total_kv, p->batch > 0 ? p->batch : 1) + 1;
    int64_t heads = state->l2_bytes / 2 / (tokens * 2 * (p->d_qk + p->d_v));
    int64_t shared = 2 * (int64_t)state->processors / (BLOCKS_OF_HEAD * group);
    heads = heads > shared ? heads : shared;
    heads = heads < 1 ? 1 : heads > p->h_kv ? p->h_kv : heads;
    return fmlac_ceil(p->h_kv, fmlac_ceil(p->h_kv, heads)) * group; /* sections alike */
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

static fmlac_launch launch_of(const mha_kernel *kernel, int64_t blocks, size_t shared)
{
    return (fmlac_launch){.kernel = (const void *)kernel->function,
                          .name = kernel->name,
                          .blocks = blocks,
                          .threads = 128,
                          .shared = shared};
}

fmla_status fmlac_mha_forward(void *opaque, const fmlai_mha *from, const fmlai_call *call)
{
    const fmlac_state *state = opaque;
    fmlac_mha p;
    size_t shared;
    describe(&p, from);
    p.slots = slots_of(p.total_q, FORWARD_ROWS, p.cu_seqlens_q, p.batch);
    p.section = section_of(state, &p, true);
    const mha_kernels *k = choose(state, &p, from->q.dtype, FORWARD_ROWS + FORWARD_KEYS, FORWARD_KEYS, 0, &shared);
    fmlac_launch launch = k != &ANY
                              ? launch_of(&k->forward, p.slots * p.h_q, shared)
                              : launch_of(&k->forward, p.total_q * p.h_q, (size_t)(p.d_qk + p.d_v) * sizeof(float));
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
    p[1].section = section_of(state, p, false);
    p[2].section = section_of(state, p, true);
    p[1].slots = slots_of(p->total_kv, BACKWARD_ROWS, p->cu_seqlens_kv, p->batch);
    p[2].slots = slots_of(p->total_q, BACKWARD_ROWS, p->cu_seqlens_q, p->batch);
    size_t shared, weights = BACKWARD_ROWS * BACKWARD_STEP * 2, floats = (size_t)(p->d_qk + p->d_v);
    size_t of_keys = 2 * weights + 2 * BACKWARD_STEP * sizeof(float); /* two kinds of weights; lse and delta */
    const mha_kernels *k =
        choose(state, p, from->q.dtype, BACKWARD_ROWS + BACKWARD_STEP, BACKWARD_ROWS + BACKWARD_STEP, of_keys, &shared);
    fmlac_launch launches[3] = {
        {.kernel = (const void *)fmlak_mha_delta_sm80,
         .name = "fmlak_mha_delta_sm80",
         .blocks = fmlac_ceil(p->total_q * p->h_q, 8),
         .threads = 256},
        launch_of(&k->keys, p[1].slots * p->h_kv, shared),
        launch_of(&k->queries, p[2].slots * p->h_q, shared - of_keys + weights),
    };
    if (k == &ANY) {
        launches[1] = launch_of(&k->keys, p->total_kv * p->h_kv, 2 * floats * sizeof(float));
        launches[2] = launch_of(&k->queries, p->total_q * p->h_q, (floats + (size_t)p->d_qk) * sizeof(float));
    }
    return enqueue_sides(state, call, launches, 3, p);
}
