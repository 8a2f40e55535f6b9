/* SPDX-License-Identifier: MIT */
/*
 * forward.c: dense multi-head attention. A task is a block of query rows of one head; it walks the keys that
 * its last row sees, with the running softmax of the tile kernels.
 */
#include <math.h>
#include <string.h>

#include "mha.h"

typedef struct forward {
    const fmlai_cpu *cpu;
    const fmlai_mha *p;
    const fmlai_tile_kernels *k;
    fmlai_pool keys, values;
    uint8_t *workspace;
    size_t worker_bytes;
    int64_t blocks;
} forward;

/* One worker's memory. */
typedef struct scratch {
    float *rows; /* [ROWS][max(d_qk, d_v)] q as floats, then the result */
    void *packed_q, *weights, *sums;
    float *s; /* [block_tokens][ROWS] */
    void *k_tile, *v_tile;
} scratch;

static size_t scratch_layout(const fmlai_tile_kernels *k, const fmlai_mha *p, uint8_t *base, scratch *s)
{
    fmlai_mha_arena arena = {.base = base};
    size_t tokens = (size_t)k->block_tokens, element = k->dtype == FMLA_BF16 ? 2 : 4;
    size_t widest = (size_t)(p->d_qk > p->d_v ? p->d_qk : p->d_v);
    s->rows = fmlai_mha_take(&arena, FMLAI_MHA_ROWS * widest * sizeof(float));
    s->packed_q = fmlai_mha_take(&arena, k->packed_rows_bytes(FMLAI_MHA_ROWS, p->d_qk));
    s->weights = fmlai_mha_take(&arena, k->packed_weights_bytes(FMLAI_MHA_ROWS, k->block_tokens));
    s->sums = fmlai_mha_take(&arena, k->packed_sums_bytes(FMLAI_MHA_ROWS, p->d_v));
    s->s = fmlai_mha_take(&arena, tokens * FMLAI_MHA_ROWS * sizeof(float));
    s->k_tile = fmlai_mha_take(&arena, tokens * (size_t)fmlai_tile_stride(k->dtype, p->d_qk) * element);
    s->v_tile = fmlai_mha_take(&arena, tokens * (size_t)fmlai_tile_stride(k->dtype, p->d_v) * element);
    return arena.used;
}

size_t fmlai_cpu_mha_forward_workspace(const void *state, const fmlai_mha *p)
{
    const fmlai_cpu *cpu = state;
    scratch s;
    return scratch_layout(fmlai_mha_kernels(cpu, p), p, NULL, &s) * (size_t)cpu->threads;
}

/* Divides by the sums and writes out and lse of a block. */
static void write_rows(const forward *f, float *sums, const fmlai_softmax_state *state, int64_t token,
                       int32_t head, int32_t rows)
{
    const fmlai_mha *p = f->p;
    for (int32_t r = 0; r < rows; r++) {
        float *row = sums + (int64_t)r * p->d_v;
        /* No key, or only keys whose logit is -infinity. */
        bool lonely = state->l[r] == 0.0f;
        float factor = lonely ? 0.0f : 1.0f / state->l[r];
        if (lonely) {
            memset(row, 0, (size_t)p->d_v * sizeof *row);
        }
        fmlai_mha_store(&p->out, token + r, head, row, 1, p->d_v, factor);
        if (p->lse.data) {
            double lse = ((double)state->m[r] + log2((double)state->l[r])) * M_LN2;
            fmlai_store_f64(p->lse.data, p->lse.dtype,
                            (token + r) * p->lse.stride[0] + head * p->lse.stride[1],
                            lonely ? (double)p->empty_lse : lse);
        }
    }
}

static void forward_block(const forward *f, const scratch *s, const fmlai_mha_block *block, int32_t head)
{
    const fmlai_mha *p = f->p;
    const fmlai_tile_kernels *k = f->k;
    fmlai_mha_span queries = fmlai_mha_span_of(p->cu_seqlens_q, block->request, p->total_q);
    fmlai_mha_span keys = fmlai_mha_span_of(p->cu_seqlens_kv, block->request, p->total_kv);
    int64_t token = queries.begin + block->first;
    /* Keys that row 0 and the last row see. */
    int64_t seen_first = p->causal ? keys.count - queries.count + block->first + 1 : keys.count;
    int64_t seen = p->causal ? seen_first + block->rows - 1 : keys.count;
    int32_t kv_head = head / (p->h_q / p->h_kv), rows = block->rows;
    float alpha[FMLAI_TILE_ROWS], scale2[FMLAI_TILE_ROWS];
    int32_t visible[FMLAI_TILE_ROWS] = {0};
    int64_t tokens[FMLAI_TILE_TOKENS_MAX];
    fmlai_softmax_state state;
    fmlai_mha_tile k_tile, v_tile;

    fmlai_mha_tile_start(k, &k_tile, s->k_tile, k->block_tokens, p->d_qk);
    fmlai_mha_tile_start(k, &v_tile, s->v_tile, k->block_tokens, p->d_v);
    fmlai_softmax_start(&state);
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        scale2[r] = (float)((double)p->scale * M_LOG2E);
    }
    fmlai_mha_load(s->rows, &p->q, token, head, rows, p->d_qk);
    k->pack_rows(s->packed_q, s->rows, p->d_qk, rows, p->d_qk);
    for (int64_t first = 0; first < seen; first += k->block_tokens) {
        int32_t count = (int32_t)(seen - first < k->block_tokens ? seen - first : k->block_tokens);
        bool all = seen_first >= first + count;
        for (int32_t t = 0; t < count; t++) {
            tokens[t] = keys.begin + first + t;
        }
        for (int32_t r = 0; r < rows; r++) {
            int64_t n = seen_first + r - first;
            visible[r] = (int32_t)(n < 0 ? 0 : n < count ? n : count);
        }
        fmlai_mha_tile_fill(f->cpu, k, &k_tile, &f->keys, tokens, count, kv_head);
        fmlai_mha_tile_fill(f->cpu, k, &v_tile, &f->values, tokens, count, kv_head);
        k->scores(s->s, s->packed_q, k_tile.data, k_tile.stride, rows, count, p->d_qk);
        k->softmax(&state, alpha, s->weights, s->s, scale2, all ? NULL : visible, rows, count);
        k->accumulate(s->sums, s->weights, v_tile.data, v_tile.stride, first == 0 ? NULL : alpha,
                      all ? NULL : visible, rows, count, p->d_v);
    }
    if (seen > 0) {
        k->unpack(s->rows, p->d_v, s->sums, rows, p->d_v);
    }
    write_rows(f, s->rows, &state, token, head, rows);
}

static void forward_task(void *user, int64_t i, int32_t worker)
{
    const forward *f = user;
    const fmlai_mha *p = f->p;
    fmlai_mha_block block;
    scratch s;
    /* Blocks of a head follow each other, the last first: with causal it has most keys to see. */
    if (fmlai_mha_block_at(p->cu_seqlens_q, p->batch, p->total_q, f->blocks - 1 - i % f->blocks, &block)) {
        scratch_layout(f->k, p, f->workspace + (size_t)worker * f->worker_bytes, &s);
        forward_block(f, &s, &block, (int32_t)(i / f->blocks));
    }
}

fmla_status fmlai_cpu_mha_forward(void *state, const fmlai_mha *p, const fmlai_call *call)
{
    const fmlai_cpu *cpu = state;
    const fmlai_tile_kernels *k = fmlai_mha_kernels(cpu, p);
    scratch s;
    forward f = {
        .cpu = cpu,
        .p = p,
        .k = k,
        .keys = fmlai_mha_pool(&p->k, p->total_kv, p->d_qk),
        .values = fmlai_mha_pool(&p->v, p->total_kv, p->d_v),
        .workspace = call->workspace,
        .worker_bytes = scratch_layout(k, p, NULL, &s),
        .blocks = fmlai_mha_blocks(p->batch, p->total_q),
    };
    fmlai_cpu_run(cpu, f.blocks * p->h_q, forward_task, &f);
    return FMLA_OK;
}
