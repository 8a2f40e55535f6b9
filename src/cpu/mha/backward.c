/* SPDX-License-Identifier: MIT */
/*
 * backward.c: gradients of dense multi-head attention, with P = exp(scale q.k - lse), D = rowsum(dO * O),
 * dS = P (dO.v - D):
 *
 *   dV = sum over queries of P dO, dK = scale * sum over queries of dS q, dQ = scale * sum over keys of dS k
 *
 * P and dS of a block of keys and a tile of queries have keys as rows and queries as tile tokens, the last query first:
 * so causality is once more "row r sees the first visible[r] tokens". There are two ways through them:
 *
 *   one pass    a task is a head of a request: it walks the blocks of keys in ascending order, each with all tiles of
 *               queries, and keeps dQ of all queries until the last block
 *   two passes  where heads are too few for the workers, or sequences too long for their memory. First tasks are blocks
 *               of queries: D, and dQ from P and dS with queries as rows; then blocks of keys: dK and dV. Five products
 *               become seven
 *
 * Every result is summed in one place and in the same order either way: dQ over tiles of keys that begin anew at every
 * block, in ascending order, dK and dV over tiles of queries from the last one down, and P and dS have the same bits
 * with keys or queries as rows. So the bits do not depend on the number of threads. Query rows with an infinite lse are
 * left out.
 */
#include <math.h>
#include <string.h>

#include "mha.h"

#define ONE_PASS_QUERIES 16384 /* of a request, at most: a worker keeps about 1.5 KB a query */

typedef struct backward {
    const fmlai_cpu *cpu;
    const fmlai_mha *p;
    const fmlai_tile_kernels *k;
    fmlai_pool queries, keys, values, dout;
    float scale2; /* scale * log2(e) */
    float *delta; /* D [h_q][total_q] */
    float ones[FMLAI_TILE_ROWS];
    uint8_t *workspace;
    size_t worker_bytes;
    int64_t blocks;
} backward;

/* Queries of a head that meet a block of keys together, the last first. */
typedef struct query_tile {
    int64_t tokens[FMLAI_TILE_TOKENS_MAX];
    float lse2[FMLAI_TILE_TOKENS_MAX], delta[FMLAI_TILE_TOKENS_MAX];
    int32_t count;
    fmlai_mha_tile q, dout;
    void *dq; /* packed sums of dS k; NULL: two passes */
    bool met; /* dq holds something */
} query_tile;

/* One worker's memory; "qk": what is as wide as d_qk, "v": as d_v. */
typedef struct scratch {
    float *rows, *others; /* [ROWS][max(d_qk, d_v)] */
    void *packed_qk, *packed_v;
    float *s, *ds; /* [tile_tokens][ROWS]: scores, then P; dO.v, then dS */
    void *weights;
    void *sums_qk, *sums_v;
    void *tile_qk, *tile_v;
    void *keys;        /* one pass: the block of keys as a tile of ROWS tokens */
    query_tile *tiles; /* one pass: of a head */
} scratch;

/* Whether heads may be tasks, by shapes: there is memory for that. */
static bool heads_suffice(const fmlai_cpu *cpu, const fmlai_mha *p)
{
    return p->batch * p->h_q * 4 > (int64_t)cpu->threads * 3;
}

/* Tiles of queries that a worker keeps. */
static int64_t most_tiles(const fmlai_cpu *cpu, const fmlai_tile_kernels *k, const fmlai_mha *p)
{
    int64_t queries = p->max_seqlen_q < ONE_PASS_QUERIES ? p->max_seqlen_q : ONE_PASS_QUERIES;
    return heads_suffice(cpu, p) ? (queries + k->tile_tokens - 1) / k->tile_tokens : 0;
}

static size_t scratch_layout(const fmlai_cpu *cpu, const fmlai_tile_kernels *k, const fmlai_mha *p, uint8_t *base,
                             scratch *s)
{
    fmlai_mha_arena arena = {.base = base};
    size_t tokens = (size_t)k->tile_tokens, element = k->dtype == FMLA_BF16 ? 2 : 4;
    size_t widest = (size_t)(p->d_qk > p->d_v ? p->d_qk : p->d_v);
    size_t token_qk = (size_t)fmlai_tile_stride(k->dtype, p->d_qk) * element;
    size_t token_v = (size_t)fmlai_tile_stride(k->dtype, p->d_v) * element;
    int64_t tiles = most_tiles(cpu, k, p);
    s->rows = fmlai_mha_take(&arena, FMLAI_MHA_ROWS * widest * sizeof(float));
    s->others = fmlai_mha_take(&arena, FMLAI_MHA_ROWS * widest * sizeof(float));
    s->packed_qk = fmlai_mha_take(&arena, k->packed_rows_bytes(FMLAI_MHA_ROWS, p->d_qk));
    s->packed_v = fmlai_mha_take(&arena, k->packed_rows_bytes(FMLAI_MHA_ROWS, p->d_v));
    s->s = fmlai_mha_take(&arena, tokens * FMLAI_MHA_ROWS * sizeof(float));
    s->ds = fmlai_mha_take(&arena, tokens * FMLAI_MHA_ROWS * sizeof(float));
    s->weights = fmlai_mha_take(&arena, k->packed_weights_bytes(FMLAI_MHA_ROWS, k->tile_tokens));
    s->sums_qk = fmlai_mha_take(&arena, k->packed_sums_bytes(FMLAI_MHA_ROWS, p->d_qk));
    s->sums_v = fmlai_mha_take(&arena, k->packed_sums_bytes(FMLAI_MHA_ROWS, p->d_v));
    s->tile_qk = fmlai_mha_take(&arena, tokens * token_qk);
    s->tile_v = fmlai_mha_take(&arena, tokens * token_v);
    s->keys = fmlai_mha_take(&arena, FMLAI_MHA_ROWS * token_qk);
    s->tiles = fmlai_mha_take(&arena, (size_t)tiles * sizeof(query_tile));
    for (int64_t i = 0; i < tiles; i++) {
        void *q = fmlai_mha_take(&arena, tokens * token_qk), *dout = fmlai_mha_take(&arena, tokens * token_v);
        void *dq = fmlai_mha_take(&arena, k->packed_sums_bytes(k->tile_tokens, p->d_qk));
        if (base) {
            s->tiles[i].q.data = q;
            s->tiles[i].dout.data = dout;
            s->tiles[i].dq = dq;
        }
    }
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
    return delta_bytes(p) + scratch_layout(cpu, fmlai_mha_kernels(cpu, p), p, NULL, &s) * (size_t)cpu->threads;
}

static float lse2_at(const fmlai_mha *p, int64_t token, int32_t head)
{
    return fmlai_load_f32(p->lse.data, p->lse.dtype, token * p->lse.stride[0] + head * p->lse.stride[1]) *
           (float)M_LOG2E;
}

/* In eight sums, so that additions need not wait for each other. */
static double dot_product(const float *a, const float *b, int32_t n)
{
    double part[8] = {0.0};
    int32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int32_t j = 0; j < 8; j++) {
            part[j] += (double)a[i + j] * (double)b[i + j];
        }
    }
    for (; i < n; i++) {
        part[i % 8] += (double)a[i] * (double)b[i];
    }
    return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

/* D of queries token..token+rows-1; leaves dO in s->others. */
static void find_delta(const backward *b, const scratch *s, int64_t token, int32_t head, int32_t rows)
{
    const fmlai_mha *p = b->p;
    fmlai_mha_load(b->k, s->others, &p->dout, token, head, rows, p->d_v);
    fmlai_mha_load(b->k, s->rows, &p->out, token, head, rows, p->d_v);
    for (int32_t r = 0; r < rows; r++) {
        int64_t at = (int64_t)r * p->d_v;
        b->delta[head * p->total_q + token + r] = (float)dot_product(s->rows + at, s->others + at, p->d_v);
    }
}

/* ---- two passes: rows are queries -------------------------------------------------------------------- */

/* Tiles of keys begin anew with every block: as in one pass. */
static int32_t keys_of_tile(const backward *b, int64_t first, int64_t seen)
{
    int64_t block = FMLAI_MHA_ROWS - first % FMLAI_MHA_ROWS, count = b->k->tile_tokens;
    count = count < block ? count : block;
    return (int32_t)(count < seen - first ? count : seen - first);
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
    int32_t kv_head = head / (p->h_q / p->h_kv), rows = block->rows, count;
    float lse2[FMLAI_TILE_ROWS] = {0}, delta[FMLAI_TILE_ROWS] = {0};
    int32_t visible[FMLAI_TILE_ROWS] = {0};
    int64_t tokens[FMLAI_TILE_TOKENS_MAX];
    fmlai_mha_tile k_tile, v_tile;

    find_delta(b, s, token, head, rows);
    fmlai_mha_load(k, s->rows, &p->q, token, head, rows, p->d_qk);
    k->pack_rows(s->packed_qk, s->rows, p->d_qk, rows, p->d_qk);
    k->pack_rows(s->packed_v, s->others, p->d_v, rows, p->d_v);
    fmlai_mha_tile_start(k, &k_tile, s->tile_qk, k->tile_tokens, p->d_qk);
    fmlai_mha_tile_start(k, &v_tile, s->tile_v, k->tile_tokens, p->d_v);
    for (int32_t r = 0; r < rows; r++) {
        lse2[r] = lse2_at(p, token + r, head);
        delta[r] = b->delta[head * p->total_q + token + r];
    }
    for (int64_t first = 0; first < seen; first += count) {
        count = keys_of_tile(b, first, seen);
        for (int32_t t = 0; t < count; t++) {
            tokens[t] = keys.begin + first + t;
        }
        for (int32_t r = 0; r < rows; r++) {
            int64_t n = (p->causal ? seen_first + r : keys.count) - first;
            visible[r] = (int32_t)(n < 0 || isinf(lse2[r]) ? 0 : n < count ? n : count);
        }
        fmlai_mha_tile_fill(b->cpu, k, &k_tile, &b->keys, tokens, count, kv_head);
        fmlai_mha_tile_fill(b->cpu, k, &v_tile, &b->values, tokens, count, kv_head);
        k->scores(s->s, s->packed_qk, k_tile.data, k_tile.stride, rows, count, p->d_qk);
        k->scores(s->ds, s->packed_v, v_tile.data, v_tile.stride, rows, count, p->d_v);
        k->gradients(s->s, s->ds, b->scale2, lse2, delta, false, visible, rows, count);
        k->pack_weights(s->weights, s->ds, rows, count);
        k->accumulate(s->sums_qk, s->weights, k_tile.data, k_tile.stride, first == 0 ? NULL : b->ones, visible, rows,
                      count, p->d_qk);
    }
    if (seen > 0) {
        k->unpack(s->rows, p->d_qk, s->sums_qk, NULL, rows, 0, rows, p->d_qk);
    } else {
        memset(s->rows, 0, (size_t)rows * (size_t)p->d_qk * sizeof(float));
    }
    fmlai_mha_store(k, &p->dq, token, head, s->rows, rows, p->d_qk, p->scale);
}

static void query_task(void *user, int64_t i, int32_t worker)
{
    const backward *b = user;
    const fmlai_mha *p = b->p;
    fmlai_mha_block block;
    scratch s;
    if (fmlai_mha_block_at(p->cu_seqlens_q, p->batch, p->total_q, FMLAI_MHA_ROWS, b->blocks - 1 - i % b->blocks,
                           &block)) {
        scratch_layout(b->cpu, b->k, p, b->workspace + (size_t)worker * b->worker_bytes, &s);
        query_block(b, &s, &block, (int32_t)(i / b->blocks));
    }
}

/* ---- rows are keys ----------------------------------------------------------------------------------- */

/* Collects the next queries below *end (and not below `first`) that have a finite lse. */
static void collect_queries(const backward *b, fmlai_mha_span queries, int64_t first, int64_t *end, int32_t head,
                            query_tile *tile)
{
    const fmlai_mha *p = b->p;
    tile->count = 0;
    while (*end > first && tile->count < b->k->tile_tokens) {
        int64_t token = queries.begin + --*end;
        float lse2 = lse2_at(p, token, head);
        if (!isinf(lse2)) {
            tile->tokens[tile->count] = token;
            tile->lse2[tile->count] = lse2;
            tile->delta[tile->count] = b->delta[head * p->total_q + token];
            tile->count++;
        }
    }
    fmlai_mha_tile_fill(b->cpu, b->k, &tile->q, &b->queries, tile->tokens, tile->count, head);
    fmlai_mha_tile_fill(b->cpu, b->k, &tile->dout, &b->dout, tile->tokens, tile->count, head);
}

/* A block of keys, packed as rows. Query i of the request, if causal, sees key j if i >= j - shift. */
typedef struct key_rows {
    int64_t first, shift;
    int64_t queries; /* where the request's begin */
    int32_t rows;
    bool start; /* there is nothing in the sums of dK and dV yet */
    fmlai_mha_tile tile;
} key_rows;

/* dS of the first n queries of a tile joins their dQ. */
static void add_dq(const backward *b, const scratch *s, const key_rows *keys, query_tile *tile, int32_t n)
{
    const fmlai_mha *p = b->p;
    const fmlai_tile_kernels *k = b->k;
    int32_t lanes = fmlai_tile_lanes(keys->rows), visible[FMLAI_TILE_ROWS] = {0};
    int64_t token_bytes = keys->tile.stride * (k->dtype == FMLA_BF16 ? 2 : 4);

    memset(s->ds + n * lanes, 0, (size_t)(tile->count - n) * (size_t)lanes * sizeof(float));
    for (int32_t at = 0, count; at < keys->rows; at += count) {
        count = keys->rows - at < k->tile_tokens ? keys->rows - at : k->tile_tokens;
        for (int32_t t = 0; t < tile->count; t++) {
            int64_t seen = tile->tokens[t] - keys->queries + keys->shift + 1 - keys->first - at;
            visible[t] = (int32_t)(!p->causal || seen > count ? count : seen < 0 ? 0 : seen);
        }
        k->pack_turned(s->weights, s->ds + at, lanes, tile->count, count);
        k->accumulate(tile->dq, s->weights, (const uint8_t *)keys->tile.data + at * token_bytes, keys->tile.stride,
                      tile->met ? b->ones : NULL, visible, tile->count, count, p->d_qk);
        tile->met = true;
    }
}

static void add_queries(const backward *b, const scratch *s, key_rows *keys, query_tile *tile)
{
    const fmlai_mha *p = b->p;
    const fmlai_tile_kernels *k = b->k;
    const float *alpha = keys->start ? NULL : b->ones;
    int32_t visible[FMLAI_TILE_ROWS] = {0}, rows = keys->rows, n = tile->count;

    for (int32_t r = 0; r < rows; r++) {
        while (p->causal && n > 0 && tile->tokens[n - 1] - keys->queries < keys->first + r - keys->shift) {
            n--;
        }
        visible[r] = n;
    }
    n = visible[0];
    if (n == 0) {
        return;
    }
    k->scores(s->s, s->packed_qk, tile->q.data, tile->q.stride, rows, n, p->d_qk);
    k->scores(s->ds, s->packed_v, tile->dout.data, tile->dout.stride, rows, n, p->d_v);
    k->gradients(s->s, s->ds, b->scale2, tile->lse2, tile->delta, true, visible, rows, n);
    k->pack_weights(s->weights, s->s, rows, n);
    k->accumulate(s->sums_v, s->weights, tile->dout.data, tile->dout.stride, alpha, visible, rows, n, p->d_v);
    k->pack_weights(s->weights, s->ds, rows, n);
    k->accumulate(s->sums_qk, s->weights, tile->q.data, tile->q.stride, alpha, visible, rows, n, p->d_qk);
    keys->start = false;
    if (tile->dq) {
        add_dq(b, s, keys, tile, n);
    }
}

static void start_query_tile(const backward *b, query_tile *tile)
{
    fmlai_mha_tile_start(b->k, &tile->q, tile->q.data, b->k->tile_tokens, b->p->d_qk);
    fmlai_mha_tile_start(b->k, &tile->dout, tile->dout.data, b->k->tile_tokens, b->p->d_v);
}

/* One pass: all tiles of the head are in s->tiles, `tiles` of them; two passes: none. */
static void key_block(const backward *b, const scratch *s, const fmlai_mha_block *block, int32_t kv_head, int64_t tiles)
{
    const fmlai_mha *p = b->p;
    const fmlai_tile_kernels *k = b->k;
    fmlai_mha_span queries = fmlai_mha_span_of(p->cu_seqlens_q, block->request, p->total_q);
    fmlai_mha_span keys = fmlai_mha_span_of(p->cu_seqlens_kv, block->request, p->total_kv);
    int64_t token = keys.begin + block->first, shift = keys.count - queries.count;
    int32_t group = p->h_q / p->h_kv, rows = block->rows;
    key_rows own = {.first = block->first, .shift = shift, .queries = queries.begin, .rows = rows, .start = true};

    fmlai_mha_load(k, s->rows, &p->k, token, kv_head, rows, p->d_qk);
    k->pack_rows(s->packed_qk, s->rows, p->d_qk, rows, p->d_qk);
    fmlai_mha_load(k, s->rows, &p->v, token, kv_head, rows, p->d_v);
    k->pack_rows(s->packed_v, s->rows, p->d_v, rows, p->d_v);
    if (tiles > 0) {
        int64_t tokens[FMLAI_MHA_ROWS];
        for (int32_t r = 0; r < rows; r++) {
            tokens[r] = token + r;
        }
        fmlai_mha_tile_start(k, &own.tile, s->keys, FMLAI_MHA_ROWS, p->d_qk);
        fmlai_mha_tile_fill(b->cpu, k, &own.tile, &b->keys, tokens, rows, kv_head);
        for (int64_t i = 0; i < tiles; i++) {
            add_queries(b, s, &own, &s->tiles[i]);
        }
    } else {
        int64_t first = p->causal && block->first > shift ? block->first - shift : 0;
        query_tile tile = {.q.data = s->tile_qk, .dout.data = s->tile_v};
        start_query_tile(b, &tile);
        for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
            for (int64_t end = queries.count; end > first;) {
                collect_queries(b, queries, first, &end, head, &tile);
                add_queries(b, s, &own, &tile);
            }
        }
    }
    if (own.start) {
        memset(s->rows, 0, (size_t)rows * (size_t)p->d_qk * sizeof(float));
        memset(s->others, 0, (size_t)rows * (size_t)p->d_v * sizeof(float));
    } else {
        k->unpack(s->rows, p->d_qk, s->sums_qk, NULL, rows, 0, rows, p->d_qk);
        k->unpack(s->others, p->d_v, s->sums_v, NULL, rows, 0, rows, p->d_v);
    }
    fmlai_mha_store(b->k, &p->dk, token, kv_head, s->rows, rows, p->d_qk, p->scale);
    fmlai_mha_store(b->k, &p->dv, token, kv_head, s->others, rows, p->d_v, 1.0f);
}

static void key_task(void *user, int64_t i, int32_t worker)
{
    const backward *b = user;
    const fmlai_mha *p = b->p;
    fmlai_mha_block block;
    scratch s;
    /* Here the first block is the one that most queries see. */
    if (fmlai_mha_block_at(p->cu_seqlens_kv, p->batch, p->total_kv, FMLAI_MHA_ROWS, i % b->blocks, &block)) {
        scratch_layout(b->cpu, b->k, p, b->workspace + (size_t)worker * b->worker_bytes, &s);
        key_block(b, &s, &block, (int32_t)(i / b->blocks), 0);
    }
}

/* ---- one pass ---------------------------------------------------------------------------------------- */

/* D and tiles of all queries of a head; returns how many tiles. */
static int64_t load_queries(const backward *b, const scratch *s, fmlai_mha_span queries, int32_t head)
{
    int64_t tiles = 0;
    for (int64_t first = 0; first < queries.count; first += FMLAI_MHA_ROWS) {
        int64_t left = queries.count - first;
        find_delta(b, s, queries.begin + first, head, (int32_t)(left < FMLAI_MHA_ROWS ? left : FMLAI_MHA_ROWS));
    }
    for (int64_t end = queries.count; end > 0; tiles++) {
        start_query_tile(b, &s->tiles[tiles]);
        collect_queries(b, queries, 0, &end, head, &s->tiles[tiles]);
        s->tiles[tiles].met = false;
    }
    return tiles;
}

/* dQ of a head, zero where no key was seen. */
static void store_dq(const backward *b, const scratch *s, fmlai_mha_span queries, int32_t head, int64_t tiles)
{
    const fmlai_mha *p = b->p;
    memset(s->others, 0, (size_t)p->d_qk * sizeof(float));
    for (int64_t i = 0; i < queries.count; i++) {
        if (isinf(lse2_at(p, queries.begin + i, head))) {
            fmlai_mha_store_row(b->k, &p->dq, queries.begin + i, head, s->others, p->d_qk, p->scale);
        }
    }
    for (int64_t i = 0; i < tiles; i++) {
        const query_tile *tile = &s->tiles[i];
        if (tile->met) {
            b->k->unpack(s->rows, p->d_qk, tile->dq, NULL, tile->count, 0, tile->count, p->d_qk);
        }
        for (int32_t t = 0; t < tile->count; t++) {
            const float *row = tile->met ? s->rows + (int64_t)t * p->d_qk : s->others;
            if (t + FMLAI_MHA_AHEAD < tile->count) {
                fmlai_mha_fetch(&p->dq, tile->tokens[t + FMLAI_MHA_AHEAD], head, p->d_qk);
            }
            fmlai_mha_store_row(b->k, &p->dq, tile->tokens[t], head, row, p->d_qk, p->scale);
        }
    }
}

static void head_task(void *user, int64_t i, int32_t worker)
{
    const backward *b = user;
    const fmlai_mha *p = b->p;
    fmlai_mha_block block = {.request = i % p->batch};
    fmlai_mha_span queries = fmlai_mha_span_of(p->cu_seqlens_q, block.request, p->total_q);
    fmlai_mha_span keys = fmlai_mha_span_of(p->cu_seqlens_kv, block.request, p->total_kv);
    int32_t head = (int32_t)(i / p->batch);
    scratch s;

    scratch_layout(b->cpu, b->k, p, b->workspace + (size_t)worker * b->worker_bytes, &s);
    int64_t tiles = load_queries(b, &s, queries, head);
    for (; block.first < keys.count; block.first += FMLAI_MHA_ROWS) {
        int64_t left = keys.count - block.first;
        block.rows = (int32_t)(left < FMLAI_MHA_ROWS ? left : FMLAI_MHA_ROWS);
        key_block(b, &s, &block, head, tiles);
    }
    store_dq(b, &s, queries, head, tiles);
}

/* Whether one pass is possible, and faster: it takes three quarters of the time if workers finish together, that is, if
 * there are many heads for a worker, and of requests none that is much longer than the others. */
static bool one_pass_pays(const backward *b)
{
    const fmlai_mha *p = b->p;
    double all = 0.0, most = 0.0, threads = b->cpu->threads;
    int64_t room = most_tiles(b->cpu, b->k, p) * b->k->tile_tokens;
    if (p->h_q != p->h_kv) {
        return false;
    }
    for (int64_t r = 0; r < p->batch; r++) {
        int64_t queries = fmlai_mha_span_of(p->cu_seqlens_q, r, p->total_q).count;
        double cost = (double)queries * (double)fmlai_mha_span_of(p->cu_seqlens_kv, r, p->total_kv).count;
        if (queries > room) {
            return false;
        }
        all += cost * p->h_q;
        most = cost > most ? cost : most;
    }
    return most == 0.0 || 0.75 * most * ceil(all / (most * threads)) < all / threads;
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
        .worker_bytes = scratch_layout(cpu, k, p, NULL, &s),
    };
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        b.ones[r] = 1.0f;
    }
    if (one_pass_pays(&b)) {
        fmlai_cpu_run(cpu, p->batch * p->h_q, head_task, &b);
        return FMLA_OK;
    }
    b.blocks = fmlai_mha_blocks(p->batch, p->total_q, FMLAI_MHA_ROWS);
    fmlai_cpu_run(cpu, b.blocks * p->h_q, query_task, &b);
    b.blocks = fmlai_mha_blocks(p->batch, p->total_kv, FMLAI_MHA_ROWS);
    fmlai_cpu_run(cpu, b.blocks * p->h_kv, key_task, &b);
    return FMLA_OK;
}
