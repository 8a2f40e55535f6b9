/* SPDX-License-Identifier: MIT */
/*
 * backward.c: gradients of dense multi-head attention, in two passes of independent tasks:
 *
 *   1. by query rows: D = rowsum(dO * O), kept in the workspace, then dQ = scale * sum over keys of dS k
 *   2. by key rows:   dV = sum over queries of P dO, dK = scale * sum of dS q, all heads of the group in
 * order
 *
 * with P = exp(scale q.k - lse), dS = P (dO.v - D). Scores are computed twice, but every result is summed in
 * one place, in one order. In pass 2 rows are keys and tile tokens are queries, the last query first: then
 * causality is once more "row r sees the first visible[r] tokens". Query rows without keys, or with an
 * infinite lse, are left out of both.
 */
#include <math.h>
#include <string.h>

#include "mha.h"

typedef struct backward {
    const fmlai_cpu *cpu;
    const fmlai_mha *p;
    const fmlai_tile_kernels *k;
    fmlai_pool queries, keys, values, dout;
    float scale2; /* scale * log2(e) */
    float *delta; /* D [h_q][total_q] */
    uint8_t *workspace;
    size_t worker_bytes;
    int64_t blocks;
} backward;

/* One worker's memory; "a" goes with d_qk, "b" with d_v. */
typedef struct scratch {
    float *rows, *others; /* [ROWS][max(d_qk, d_v)] */
    void *packed_a, *packed_b;
    float *s, *ds; /* [block_tokens][ROWS]: scores, then P; dO.v, then dS */
    void *weights;
    void *sums_a, *sums_b;
    void *tile_a, *tile_b;
} scratch;

static size_t scratch_layout(const fmlai_tile_kernels *k, const fmlai_mha *p, uint8_t *base, scratch *s)
{
    fmlai_mha_arena arena = {.base = base};
    size_t tokens = (size_t)k->block_tokens, element = k->dtype == FMLA_BF16 ? 2 : 4;
    size_t widest = (size_t)(p->d_qk > p->d_v ? p->d_qk : p->d_v);
    s->rows = fmlai_mha_take(&arena, FMLAI_MHA_ROWS * widest * sizeof(float));
    s->others = fmlai_mha_take(&arena, FMLAI_MHA_ROWS * widest * sizeof(float));
    s->packed_a = fmlai_mha_take(&arena, k->packed_rows_bytes(FMLAI_MHA_ROWS, p->d_qk));
    s->packed_b = fmlai_mha_take(&arena, k->packed_rows_bytes(FMLAI_MHA_ROWS, p->d_v));
    s->s = fmlai_mha_take(&arena, tokens * FMLAI_MHA_ROWS * sizeof(float));
    s->ds = fmlai_mha_take(&arena, tokens * FMLAI_MHA_ROWS * sizeof(float));
    s->weights = fmlai_mha_take(&arena, k->packed_weights_bytes(FMLAI_MHA_ROWS, k->block_tokens));
    s->sums_a = fmlai_mha_take(&arena, k->packed_sums_bytes(FMLAI_MHA_ROWS, p->d_qk));
    s->sums_b = fmlai_mha_take(&arena, k->packed_sums_bytes(FMLAI_MHA_ROWS, p->d_v));
    s->tile_a = fmlai_mha_take(&arena, tokens * (size_t)fmlai_tile_stride(k->dtype, p->d_qk) * element);
    s->tile_b = fmlai_mha_take(&arena, tokens * (size_t)fmlai_tile_stride(k->dtype, p->d_v) * element);
    return arena.used;
}

static size_t delta_bytes(const fmlai_mha *p)
{
    return ((size_t)p->total_q * (size_t)p->h_q * sizeof(float) + 63) / 64 * 64;
}

size_t fmlai_cpu_mha_backward_workspace(const void *state, const fmlai_mha *p)
{
    const fmlai_cpu *cpu = state;
    scratch s;
    return delta_bytes(p) + scratch_layout(fmlai_mha_kernels(cpu, p), p, NULL, &s) * (size_t)cpu->threads;
}

static float lse_at(const fmlai_mha *p, int64_t token, int32_t head)
{
    return fmlai_load_f32(p->lse.data, p->lse.dtype, token * p->lse.stride[0] + head * p->lse.stride[1]);
}

/* ---- pass 1: rows are queries ------------------------------------------------------------------------ */

/* D of a block's rows, from dO in s->others and O, which is loaded into s->rows. */
static void block_delta(const backward *b, const scratch *s, int64_t token, int32_t head, int32_t rows,
                        float *delta)
{
    const fmlai_mha *p = b->p;
    fmlai_mha_load(s->rows, &p->out, token, head, rows, p->d_v);
    for (int32_t r = 0; r < rows; r++) {
        double sum = 0.0;
        for (int32_t d = 0; d < p->d_v; d++) {
            sum += (double)s->rows[(int64_t)r * p->d_v + d] * (double)s->others[(int64_t)r * p->d_v + d];
        }
        delta[r] = (float)sum;
        b->delta[head * p->total_q + token + r] = (float)sum;
    }
}

static void query_block(const backward *b, const scratch *s, const fmlai_mha_block *block, int32_t head)
{
    const fmlai_mha *p = b->p;
    const fmlai_tile_kernels *k = b->k;
    fmlai_mha_span queries = fmlai_mha_span_of(p->cu_seqlens_q, block->request, p->total_q);
    fmlai_mha_span keys = fmlai_mha_span_of(p->cu_seqlens_kv, block->request, p->total_kv);
    int64_t token = queries.begin + block->first;
    int64_t seen_first = p->causal ? keys.count - queries.count + block->first + 1 : keys.count;
    int64_t seen = p->causal ? seen_first + block->rows - 1 : keys.count;
    int32_t kv_head = head / (p->h_q / p->h_kv), rows = block->rows;
    float lse2[FMLAI_TILE_ROWS] = {0}, delta[FMLAI_TILE_ROWS] = {0}, ones[FMLAI_TILE_ROWS];
    int32_t visible[FMLAI_TILE_ROWS] = {0};
    int64_t tokens[FMLAI_TILE_TOKENS_MAX];
    fmlai_mha_tile k_tile, v_tile;

    fmlai_mha_load(s->others, &p->dout, token, head, rows, p->d_v);
    block_delta(b, s, token, head, rows, delta);
    fmlai_mha_load(s->rows, &p->q, token, head, rows, p->d_qk);
    k->pack_rows(s->packed_a, s->rows, p->d_qk, rows, p->d_qk);
    k->pack_rows(s->packed_b, s->others, p->d_v, rows, p->d_v);
    fmlai_mha_tile_start(k, &k_tile, s->tile_a, p->d_qk);
    fmlai_mha_tile_start(k, &v_tile, s->tile_b, p->d_v);
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        lse2[r] = r < rows ? lse_at(p, token + r, head) * (float)M_LOG2E : 0.0f;
        ones[r] = 1.0f;
    }
    for (int64_t first = 0; first < seen; first += k->block_tokens) {
        int32_t count = (int32_t)(seen - first < k->block_tokens ? seen - first : k->block_tokens);
        for (int32_t t = 0; t < count; t++) {
            tokens[t] = keys.begin + first + t;
        }
        for (int32_t r = 0; r < rows; r++) {
            int64_t n = (p->causal ? seen_first + r : keys.count) - first;
            visible[r] = (int32_t)(n < 0 || isinf(lse2[r]) ? 0 : n < count ? n : count);
        }
        fmlai_mha_tile_fill(b->cpu, k, &k_tile, &b->keys, tokens, count, kv_head);
        fmlai_mha_tile_fill(b->cpu, k, &v_tile, &b->values, tokens, count, kv_head);
        k->scores(s->s, s->packed_a, k_tile.data, k_tile.stride, rows, count, p->d_qk);
        k->scores(s->ds, s->packed_b, v_tile.data, v_tile.stride, rows, count, p->d_v);
        k->gradients(s->s, s->ds, b->scale2, lse2, delta, false, visible, rows, count);
        k->pack_weights(s->weights, s->ds, rows, count);
        k->accumulate(s->sums_a, s->weights, k_tile.data, k_tile.stride, first == 0 ? NULL : ones, visible,
                      rows, count, p->d_qk);
    }
    if (seen > 0) {
        k->unpack(s->rows, p->d_qk, s->sums_a, rows, 0, rows, p->d_qk);
    } else {
        memset(s->rows, 0, (size_t)rows * (size_t)p->d_qk * sizeof(float));
    }
    fmlai_mha_store(&p->dq, token, head, s->rows, rows, p->d_qk, p->scale);
}

static void query_task(void *user, int64_t i, int32_t worker)
{
    const backward *b = user;
    const fmlai_mha *p = b->p;
    fmlai_mha_block block;
    scratch s;
    if (fmlai_mha_block_at(p->cu_seqlens_q, p->batch, p->total_q, b->blocks - 1 - i % b->blocks, &block)) {
        scratch_layout(b->k, p, b->workspace + (size_t)worker * b->worker_bytes, &s);
        query_block(b, &s, &block, (int32_t)(i / b->blocks));
    }
}

/* ---- pass 2: rows are keys --------------------------------------------------------------------------- */

/* A tile's queries, the last first, with their lse and D. */
typedef struct query_tile {
    int64_t tokens[FMLAI_TILE_TOKENS_MAX];
    float lse2[FMLAI_TILE_TOKENS_MAX], delta[FMLAI_TILE_TOKENS_MAX];
    int32_t count;
} query_tile;

/*
 * Collects the next queries below *end (and not below `first`) that have a finite lse, and says how many of
 * them each key row sees. Query i sees key j if i >= j - shift.
 */
static void collect_queries(const backward *b, fmlai_mha_span queries, int64_t first, int64_t *end,
                            int32_t head, int64_t key, int64_t shift, int32_t rows, query_tile *tile,
                            int32_t *visible)
{
    const fmlai_mha *p = b->p;
    tile->count = 0;
    while (*end > first && tile->count < b->k->block_tokens) {
        int64_t token = queries.begin + --*end;
        float lse2 = lse_at(p, token, head) * (float)M_LOG2E;
        if (!isinf(lse2)) {
            tile->tokens[tile->count] = token;
            tile->lse2[tile->count] = lse2;
            tile->delta[tile->count] = b->delta[head * p->total_q + token];
            tile->count++;
        }
    }
    int32_t n = tile->count;
    for (int32_t r = 0; r < rows; r++) {
        while (p->causal && n > 0 && tile->tokens[n - 1] - queries.begin < key + r - shift) {
            n--;
        }
        visible[r] = n;
    }
}

static void add_queries(const backward *b, const scratch *s, const query_tile *tile, const int32_t *visible,
                        fmlai_mha_tile *q_tile, fmlai_mha_tile *do_tile, int32_t head, int32_t rows,
                        bool start)
{
    const fmlai_mha *p = b->p;
    const fmlai_tile_kernels *k = b->k;
    float ones[FMLAI_TILE_ROWS];

    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        ones[r] = 1.0f;
    }
    fmlai_mha_tile_fill(b->cpu, k, q_tile, &b->queries, tile->tokens, tile->count, head);
    fmlai_mha_tile_fill(b->cpu, k, do_tile, &b->dout, tile->tokens, tile->count, head);
    k->scores(s->s, s->packed_a, q_tile->data, q_tile->stride, rows, tile->count, p->d_qk);
    k->scores(s->ds, s->packed_b, do_tile->data, do_tile->stride, rows, tile->count, p->d_v);
    k->gradients(s->s, s->ds, b->scale2, tile->lse2, tile->delta, true, visible, rows, tile->count);
    k->pack_weights(s->weights, s->s, rows, tile->count);
    k->accumulate(s->sums_b, s->weights, do_tile->data, do_tile->stride, start ? NULL : ones, visible, rows,
                  tile->count, p->d_v);
    k->pack_weights(s->weights, s->ds, rows, tile->count);
    k->accumulate(s->sums_a, s->weights, q_tile->data, q_tile->stride, start ? NULL : ones, visible, rows,
                  tile->count, p->d_qk);
}

static void key_block(const backward *b, const scratch *s, const fmlai_mha_block *block, int32_t kv_head)
{
    const fmlai_mha *p = b->p;
    const fmlai_tile_kernels *k = b->k;
    fmlai_mha_span queries = fmlai_mha_span_of(p->cu_seqlens_q, block->request, p->total_q);
    fmlai_mha_span keys = fmlai_mha_span_of(p->cu_seqlens_kv, block->request, p->total_kv);
    int64_t token = keys.begin + block->first, shift = keys.count - queries.count;
    int64_t first = p->causal && block->first > shift ? block->first - shift : 0;
    int32_t group = p->h_q / p->h_kv, rows = block->rows;
    int32_t visible[FMLAI_TILE_ROWS] = {0};
    fmlai_mha_tile q_tile, do_tile;
    query_tile tile;
    bool start = true;

    fmlai_mha_load(s->rows, &p->k, token, kv_head, rows, p->d_qk);
    k->pack_rows(s->packed_a, s->rows, p->d_qk, rows, p->d_qk);
    fmlai_mha_load(s->rows, &p->v, token, kv_head, rows, p->d_v);
    k->pack_rows(s->packed_b, s->rows, p->d_v, rows, p->d_v);
    fmlai_mha_tile_start(k, &q_tile, s->tile_a, p->d_qk);
    fmlai_mha_tile_start(k, &do_tile, s->tile_b, p->d_v);
    for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t end = queries.count; end > first;) {
            collect_queries(b, queries, first, &end, head, block->first, shift, rows, &tile, visible);
            if (tile.count > 0) {
                add_queries(b, s, &tile, visible, &q_tile, &do_tile, head, rows, start);
                start = false;
            }
        }
    }
    if (start) {
        memset(s->rows, 0, (size_t)rows * (size_t)p->d_qk * sizeof(float));
        memset(s->others, 0, (size_t)rows * (size_t)p->d_v * sizeof(float));
    } else {
        k->unpack(s->rows, p->d_qk, s->sums_a, rows, 0, rows, p->d_qk);
        k->unpack(s->others, p->d_v, s->sums_b, rows, 0, rows, p->d_v);
    }
    fmlai_mha_store(&p->dk, token, kv_head, s->rows, rows, p->d_qk, p->scale);
    fmlai_mha_store(&p->dv, token, kv_head, s->others, rows, p->d_v, 1.0f);
}

static void key_task(void *user, int64_t i, int32_t worker)
{
    const backward *b = user;
    const fmlai_mha *p = b->p;
    fmlai_mha_block block;
    scratch s;
    /* Here the first block is the one that most queries see. */
    if (fmlai_mha_block_at(p->cu_seqlens_kv, p->batch, p->total_kv, i % b->blocks, &block)) {
        scratch_layout(b->k, p, b->workspace + (size_t)worker * b->worker_bytes, &s);
        key_block(b, &s, &block, (int32_t)(i / b->blocks));
    }
}

fmla_status fmlai_cpu_mha_backward(void *state, const fmlai_mha *p, const fmlai_call *call)
{
    const fmlai_cpu *cpu = state;
    const fmlai_tile_kernels *k = fmlai_mha_kernels(cpu, p);
    scratch s;
    backward b = {
        .cpu = cpu,
        .p = p,
        .k = k,
        .queries = fmlai_mha_pool(&p->q, p->total_q, p->d_qk),
        .keys = fmlai_mha_pool(&p->k, p->total_kv, p->d_qk),
        .values = fmlai_mha_pool(&p->v, p->total_kv, p->d_v),
        .dout = fmlai_mha_pool(&p->dout, p->total_q, p->d_v),
        .scale2 = (float)((double)p->scale * M_LOG2E),
        .delta = call->workspace,
        .workspace = (uint8_t *)call->workspace + delta_bytes(p),
        .worker_bytes = scratch_layout(k, p, NULL, &s),
    };
    b.blocks = fmlai_mha_blocks(p->batch, p->total_q);
    fmlai_cpu_run(cpu, b.blocks * p->h_q, query_task, &b);
    b.blocks = fmlai_mha_blocks(p->batch, p->total_kv);
    fmlai_cpu_run(cpu, b.blocks * p->h_kv, key_task, &b);
    return FMLA_OK;
}
