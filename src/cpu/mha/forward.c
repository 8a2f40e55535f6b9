/* SPDX-License-Identifier: MIT */
/*
 * forward.c: dense multi-head attention. A task is a block of query rows of one head, or up to MOST_BLOCKS of them,
 * which share the tiles: keys and values of a head lie on pages of their own, and fetching them is what costs most
 * beside the products. A task walks the keys that its last row sees, each block with its own running softmax.
 */
#include <math.h>
#include <string.h>

#include "mha.h"

#define MOST_BLOCKS      4 /* of a task; what they keep fits an L2 cache of 1 MB */
#define TASKS_PER_THREAD 8 /* at least, or tasks have fewer blocks */

typedef struct forward {
    const fmlai_cpu *cpu;
    const fmlai_mha *p;
    const fmlai_tile_kernels *k;
    fmlai_pool keys, values;
    uint8_t *workspace;
    size_t worker_bytes;
    int64_t tasks;     /* of a head */
    int32_t task_rows; /* query rows of a task, at most */
} forward;

/* A block of query rows on its way over the keys. */
typedef struct query_block {
    fmlai_softmax_state state;
    int64_t token, seen_first, seen; /* keys that the first and the last row see */
    int32_t rows;
    void *packed_q, *sums;
} query_block;

/* One worker's memory. */
typedef struct scratch {
    float *rows; /* [ROWS][max(d_qk, d_v)] q as floats, then the result */
    void *weights;
    float *s; /* [tile_tokens][ROWS] */
    void *k_tile, *v_tile;
    query_block *blocks; /* MOST_BLOCKS, or as many as there are rows for */
} scratch;

static int32_t most_blocks(const fmlai_mha *p)
{
    int64_t blocks = (p->total_q + FMLAI_MHA_ROWS - 1) / FMLAI_MHA_ROWS;
    return (int32_t)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
}

static size_t scratch_layout(const fmlai_tile_kernels *k, const fmlai_mha *p, uint8_t *base, scratch *s)
{
    fmlai_mha_arena arena = {.base = base};
    size_t tokens = (size_t)k->tile_tokens, element = k->dtype == FMLA_BF16 ? 2 : 4;
    size_t widest = (size_t)(p->d_qk > p->d_v ? p->d_qk : p->d_v);
    int32_t blocks = most_blocks(p);
    s->rows = fmlai_mha_take(&arena, FMLAI_MHA_ROWS * widest * sizeof(float));
    s->weights = fmlai_mha_take(&arena, k->packed_weights_bytes(FMLAI_MHA_ROWS, k->tile_tokens));
    s->s = fmlai_mha_take(&arena, tokens * FMLAI_MHA_ROWS * sizeof(float));
    s->k_tile = fmlai_mha_take(&arena, tokens * (size_t)fmlai_tile_stride(k->dtype, p->d_qk) * element);
    s->v_tile = fmlai_mha_take(&arena, tokens * (size_t)fmlai_tile_stride(k->dtype, p->d_v) * element);
    s->blocks = fmlai_mha_take(&arena, (size_t)blocks * sizeof(query_block));
    for (int32_t i = 0; i < blocks; i++) {
        void *packed_q = fmlai_mha_take(&arena, k->packed_rows_bytes(FMLAI_MHA_ROWS, p->d_qk));
        void *sums = fmlai_mha_take(&arena, k->packed_sums_bytes(FMLAI_MHA_ROWS, p->d_v));
        if (base) {
            s->blocks[i].packed_q = packed_q;
            s->blocks[i].sums = sums;
        }
    }
    return arena.used;
}

size_t fmlai_cpu_mha_forward_workspace(const void *state, const fmlai_mha *p)
{
    const fmlai_cpu *cpu = state;
    scratch s;
    return scratch_layout(fmlai_mha_kernels(cpu, p), p, NULL, &s) * (size_t)cpu->threads;
}

/* Divides by the sums and writes out and lse of a block. */
static void write_rows(const forward *f, float *sums, const fmlai_softmax_state *state, int64_t token, int32_t head,
                       int32_t rows)
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
        if (r + FMLAI_MHA_AHEAD < rows) {
            fmlai_mha_fetch(&p->out, token + r + FMLAI_MHA_AHEAD, head, p->d_v);
        }
        fmlai_mha_store_row(f->k, &p->out, token + r, head, row, p->d_v, factor);
        if (p->lse.data) {
            double lse = ((double)state->m[r] + log2((double)state->l[r])) * M_LN2;
            fmlai_store_f64(p->lse.data, p->lse.dtype, (token + r) * p->lse.stride[0] + head * p->lse.stride[1],
                            lonely ? (double)p->empty_lse : lse);
        }
    }
}

static void start_block(const forward *f, const scratch *s, query_block *b, int32_t head)
{
    const fmlai_mha *p = f->p;
    fmlai_softmax_start(&b->state);
    fmlai_mha_load(f->k, s->rows, &p->q, b->token, head, b->rows, p->d_qk);
    f->k->pack_rows(b->packed_q, s->rows, p->d_qk, b->rows, p->d_qk);
}

/* Rows of `count` tokens from `token` on, to be fetched beside the weighted sums of one block. */
static void look_ahead(const fmlai_pool *pool, int64_t token, int32_t count, int32_t kv_head, fmlai_ahead *ahead)
{
    ahead->next = 0;
    ahead->count = count;
    ahead->bytes = 2 * pool->format.d_qk;
    for (int32_t i = 0; i < count; i++) {
        ahead->rows[i] = pool->data + (token + i) * pool->token_stride + kv_head * pool->head_stride;
    }
}

/* Keys first..first+count-1, which are in the tiles, as far as the block sees them. */
static void add_keys(const forward *f, const scratch *s, query_block *b, const fmlai_mha_tile *k_tile,
                     const fmlai_mha_tile *v_tile, int64_t first, int32_t count, fmlai_ahead *ahead)
{
    const fmlai_mha *p = f->p;
    const fmlai_tile_kernels *k = f->k;
    float alpha[FMLAI_TILE_ROWS], scale2[FMLAI_TILE_ROWS];
    int32_t visible[FMLAI_TILE_ROWS] = {0}, rows = b->rows;

    count = (int32_t)(b->seen - first < count ? b->seen - first : count);
    if (count <= 0) {
        return;
    }
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        int64_t n = p->causal ? b->seen_first + r - first : count;
        visible[r] = (int32_t)(n < 0 ? 0 : n < count ? n : count);
        scale2[r] = (float)((double)p->scale * M_LOG2E);
    }
    const int32_t *seen = visible[0] == count ? NULL : visible; /* the first row sees the fewest */
    k->scores(s->s, b->packed_q, k_tile->data, k_tile->stride, rows, count, p->d_qk);
    k->softmax(&b->state, alpha, s->weights, s->s, scale2, seen, rows, count);
    if (k->accumulate_parts) {
        fmlai_tile_parts parts = fmlai_tile_parts_of(v_tile->data, v_tile->stride, k->dtype);
        parts.ahead = ahead;
        k->accumulate_parts(b->sums, s->weights, &parts, first == 0 ? NULL : alpha, seen, rows, count, p->d_v);
    } else {
        k->accumulate(b->sums, s->weights, v_tile->data, v_tile->stride, first == 0 ? NULL : alpha, seen, rows, count,
                      p->d_v);
    }
}

/* The rows of a task: first..first+rows-1 of a request. */
static void forward_rows(const forward *f, const scratch *s, const fmlai_mha_block *all, int32_t head)
{
    const fmlai_mha *p = f->p;
    const fmlai_tile_kernels *k = f->k;
    fmlai_mha_span queries = fmlai_mha_span_of(p->cu_seqlens_q, all->request, p->total_q);
    fmlai_mha_span keys = fmlai_mha_span_of(p->cu_seqlens_kv, all->request, p->total_kv);
    int32_t kv_head = head / (p->h_q / p->h_kv), blocks = 0;
    int64_t tokens[FMLAI_TILE_TOKENS_MAX], seen = 0;
    fmlai_ahead ahead;
    fmlai_mha_tile k_tile, v_tile;

    for (int32_t at = 0; at < all->rows; at += FMLAI_MHA_ROWS) {
        query_block *b = &s->blocks[blocks++];
        b->rows = all->rows - at < FMLAI_MHA_ROWS ? all->rows - at : FMLAI_MHA_ROWS;
        b->token = queries.begin + all->first + at;
        b->seen_first = p->causal ? keys.count - queries.count + all->first + at + 1 : keys.count;
        b->seen = p->causal ? b->seen_first + b->rows - 1 : keys.count;
        seen = b->seen;
        start_block(f, s, b, head);
    }
    fmlai_mha_tile_start(k, &k_tile, s->k_tile, k->tile_tokens, p->d_qk);
    fmlai_mha_tile_start(k, &v_tile, s->v_tile, k->tile_tokens, p->d_v);
    for (int64_t first = 0; first < seen; first += k->tile_tokens) {
        int32_t count = (int32_t)(seen - first < k->tile_tokens ? seen - first : k->tile_tokens);
        for (int32_t t = 0; t < count; t++) {
            tokens[t] = keys.begin + first + t;
        }
        fmlai_mha_tile_fill(f->cpu, k, &k_tile, &f->keys, tokens, count, kv_head);
        fmlai_mha_tile_fill(f->cpu, k, &v_tile, &f->values, tokens, count, kv_head);
        /* Blocks fetch a share each of the next tiles: half of them keys, half of them values. */
        int64_t next = first + count;
        int32_t left = (int32_t)(seen - next < k->tile_tokens ? seen - next : k->tile_tokens);
        for (int32_t i = 0; i < blocks; i++) {
            int32_t keys_share = (blocks + 1) / 2, n = i < keys_share ? keys_share : blocks - keys_share;
            int32_t at = i < keys_share ? i : i - keys_share, begin = left * at / n, end = left * (at + 1) / n;
            look_ahead(i < keys_share ? &f->keys : &f->values, keys.begin + next + begin, end - begin, kv_head,
                       &ahead);
            add_keys(f, s, &s->blocks[i], &k_tile, &v_tile, first, count, &ahead);
        }
    }
    for (int32_t i = 0; i < blocks; i++) {
        const query_block *b = &s->blocks[i];
        if (b->seen > 0) {
            k->unpack(s->rows, p->d_v, b->sums, NULL, b->rows, 0, b->rows, p->d_v);
        }
        write_rows(f, s->rows, &b->state, b->token, head, b->rows);
    }
}

static void forward_task(void *user, int64_t i, int32_t worker)
{
    const forward *f = user;
    const fmlai_mha *p = f->p;
    fmlai_mha_block rows;
    scratch s;
    /* Rows of a head follow each other, the last first: with causal they have most keys to see. */
    if (fmlai_mha_block_at(p->cu_seqlens_q, p->batch, p->total_q, f->task_rows, f->tasks - 1 - i % f->tasks, &rows)) {
        scratch_layout(f->k, p, f->workspace + (size_t)worker * f->worker_bytes, &s);
        forward_rows(f, &s, &rows, (int32_t)(i / f->tasks));
    }
}

fmla_status fmlai_cpu_mha_forward(void *state, const fmlai_mha *p, const fmlai_call *call)
{
    const fmlai_cpu *cpu = state;
    const fmlai_tile_kernels *k = fmlai_mha_kernels(cpu, p);
    int32_t blocks = most_blocks(p);
    scratch s;
    forward f = {
        .cpu = cpu,
        .p = p,
        .k = k,
        .keys = fmlai_mha_pool(&p->k, p->total_kv, p->d_qk),
        .values = fmlai_mha_pool(&p->v, p->total_kv, p->d_v),
        .workspace = call->workspace,
        .worker_bytes = scratch_layout(k, p, NULL, &s),
    };
    while (blocks > 1 && p->total_q / (blocks * FMLAI_MHA_ROWS) * p->h_q < TASKS_PER_THREAD * (int64_t)cpu->threads) {
        blocks--;
    }
    f.task_rows = blocks * FMLAI_MHA_ROWS;
    f.tasks = fmlai_mha_blocks(p->batch, p->total_q, f.task_rows);
    fmlai_cpu_run(cpu, f.tasks * p->h_q, forward_task, &f);
    return FMLA_OK;
}
