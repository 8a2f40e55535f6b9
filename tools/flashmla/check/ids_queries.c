/* SPDX-License-Identifier: MIT */
/*
 * ids_queries.c: faults about several query tokens of a request, ragged batches, chunked prompts, keys
 * that are spread over machines, and batches with padding.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/ids.h"
#include "problem/numbers.h"

/* ---- every query token is its own call ---- */

/* Query token t of a decode problem as a call of one token at its own length. */
static verdict one_row(checker *k, trial *t, int64_t token)
{
    problem *p = &t->p;
    int64_t r = p->request[token], j = p->inner[token];
    any_args a = t->args;
    fmla_decode_args *d = &a.decode;
    fmla_tensor *per_token[] = {&d->q, &d->indices, &d->extra_indices, &d->topk_length,
                                &d->extra_topk_length};
    for (int i = 0; i < 5; i++) {
        *per_token[i] = ids_rows(per_token[i], 0, r, 1);
        *per_token[i] = ids_rows(per_token[i], 1, j, 1); /* lengths of one dimension stay as they are */
    }
    d->causal = 0;
    if (case_is_dense(&p->c)) {
        int32_t length = (int32_t)scope_count(p, &p->main, token);
        d->block_table = ids_rows(&d->block_table, 0, r, 1);
        d->cache_seqlens = memory_tensor_4(&p->mem, FMLA_I32, 1, 1, 0, 0, 0, 0, 0);
        memcpy(d->cache_seqlens.data, &length, sizeof length);
    }
    fmla_tensor out = ids_rows(&p->out, 0, r, 1), lse = ids_rows(&p->lse, 0, r, 1);
    out = ids_rows(&out, 1, j, 1);
    lse = ids_rows(&lse, 2, j, 1);
    d->out = ids_copy(&p->mem, &out);
    d->lse = ids_copy(&p->mem, &lse);
    d->max_logits = (fmla_tensor){0};
    verdict v = ids_call(k, &p->mem, (fmla_operation)p->c.op, &a, "one query token");
    v = v == VERDICT_PASSED ? ids_near_out(k, &out, &d->out, "out of several tokens against one token") : v;
    return v == VERDICT_PASSED ? ids_near_lse(k, &lse, &d->lse, "lse of several tokens against one token")
                               : v;
}

/* Runs, against the reference and against calls of one token; and no two tokens of a request may be given one
 * vector.
 */
static verdict rows_alone(checker *k, trial *t)
{
    verdict v = trial_run_and_judge(k, t);
    for (int64_t i = 0; i < t->p.tokens && v == VERDICT_PASSED; i++) {
        v = one_row(k, t, i);
        fmla_tensor mine = ids_rows(&t->p.out, 0, t->p.request[i], 1), last = mine;
        if (v == VERDICT_PASSED && t->p.inner[i] > 0 && problem_attended(&t->p, i, 0) > 0) {
            mine = ids_rows(&mine, 1, t->p.inner[i], 1);
            last = ids_rows(&last, 1, t->p.inner[i] - 1, 1);
            v = ids_same_bits(&mine, &last) ? check_fail(k, "query tokens %lld and %lld have one result",
                                                         (long long)i - 1, (long long)i)
                                            : v;
        }
    }
    return v;
}

verdict c036_query_lengths(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 9 * IDS_DENSE_FORMATS; i++) {
        trial t;
        if (i / 9 > 0 && i % 9 % 3 != 2) {
            continue; /* all lengths in bf16, 3, 6 and 9 elsewhere */
        }
        verdict v =
            trial_make(k, &t, "op=dense_decode,b=2,varlen=1,causal=1,h_q=4,s_kv=70,page=16,data=1,s_q=%d,%s",
                       i % 9 + 1, ids_dense_format(i / 9));
        v = v == VERDICT_PASSED ? rows_alone(k, &t) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

verdict c037_two_token_verification(checker *k)
{
    static const char *const texts[] = {"format=v32,d_qk=576,topk=300,s_kv=400",
                                        "format=v4,extra=v4,topk=64,e_topk=100,e_kv=200",
                                        "format=v41,extra=v41-fp4,topk=64,e_topk=100,e_kv=200,lengths=2"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 3; i++) {
        trial t;
        verdict v = trial_make(k, &t, "op=sparse_decode,b=3,s_q=2,h_q=8,data=1,%s", texts[i]);
        v = v == VERDICT_PASSED ? rows_alone(k, &t) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            return sum;
        }
    }
    trial t;
    verdict v = trial_make(k, &t, "op=dense_decode,b=3,s_q=2,causal=1,h_q=8,data=1,s_kv=1100,varlen=1");
    v = v == VERDICT_PASSED ? rows_alone(k, &t) : v;
    trial_free(&t);
    ids_bad(&sum, v);
    return sum;
}

verdict c034_table_of_multi_token_decode(checker *k)
{
    trial t;
    verdict v = trial_make(k, &t, "op=dense_decode,b=256,s_q=3,causal=1,h_q=8,varlen=2,s_kv=16,page=4");
    if (v == VERDICT_PASSED) {
        /* Exactly as wide as the longest request; what follows is a guard. */
        fmla_tensor whole = t.p.main.block_table;
        whole.shape[1] = t.p.main.pages_max;
        t.args.decode.block_table = ids_copy(&t.p.mem, &whole);
        v = trial_run_and_judge(k, &t);
    }
    trial_free(&t);
    return v;
}

/* ---- ragged batches ---- */

/* A seed whose ragged problem of up to 5 tokens for each of 4 requests has 1, 3, 0 and 5. */
static int seed_of_1_3_0_5(void)
{
    static const int64_t wanted[] = {1, 3, 0, 5};
    for (int seed = 1;; seed++) {
        rng r;
        int alike = 0;
        rng_seed(&r, (uint64_t)seed);
        while (alike < 4 && rng_below(&r, 6) == wanted[alike]) {
            alike++;
        }
        if (alike == 4) {
            return seed;
        }
    }
}

verdict c039_ragged_queries(checker *k)
{
    static const char *const texts[] = {"op=dense_decode,causal=1,s_kv=70,page=16",
                                        "op=dense_decode,bound=1,s_kv=70,page=16",
                                        "op=dense_decode,format=v32,causal=1,s_kv=70",
                                        "op=sparse_decode,format=v4,extra=v4,topk=40,e_topk=20,lengths=1",
                                        "op=sparse_decode,format=v32,d_qk=576,topk=40,lengths=2,sink=1"};
    int seed = seed_of_1_3_0_5();
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 10; i++) {
        /* Against the reference; and request by request with the same bits, where those are promised. */
        if (ids_bad(&sum, ids_case(k, "%s,b=4,s_q=5,ragged=1,h_q=8,seed=%d,again=%d", texts[i / 2], seed,
                                   i % 2 ? AGAIN_SLICES : 0))) {
            break;
        }
    }
    return sum;
}

verdict c040_too_small_a_maximum(checker *k)
{
    trial t;
    verdict v = trial_make(k, &t, "op=mha_forward,b=3,s_q=4,s_kv=9,h_q=2,h_kv=2,causal=1");
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    if (v == VERDICT_PASSED) {
        t.args.mha_forward.max_seqlen_q = 2;
        problem_poison(&t.p);
        fmla_status status = engine_run(&k->engine, &t.p.mem, FMLA_OP_MHA_FORWARD, &t.args);
        if (status == FMLA_OK) {
            v = trial_compare(k, &t, "max_seqlen_q 2 of 4");
        } else if (status != FMLA_ERROR_INVALID_ARGUMENT) {
            v = check_status(k, &k->engine, status, "max_seqlen_q 2 of 4");
        }
    }
    trial_free(&t);
    /* Ragged decode has no maximum to get wrong: all rows of 0..4 tokens. */
    return v == VERDICT_PASSED ? ids_case(k, "op=dense_decode,b=7,s_q=4,ragged=1,causal=1,s_kv=40,h_q=4") : v;
}

/* ---- keys spread over machines ---- */

/* Merges `count` partial results into out and lse, shaped [n, h, d] and [n, h]. */
static verdict merge(checker *k, memory *m, const fmla_tensor *outs, const fmla_tensor *lses, int32_t count,
                     fmla_tensor *out, fmla_tensor *lse)
{
    any_args a;
    memset(&a, 0, sizeof a);
    a.merge = (fmla_merge_args)FMLA_MERGE_ARGS_INIT;
    a.merge.outs = outs;
    a.merge.lses = lses;
    a.merge.count = count;
    a.merge.out = *out = memory_tensor(m, FMLA_F32, 3, outs[0].shape, 0, POISON_BYTE);
    a.merge.lse = *lse = memory_tensor(m, FMLA_F32, 2, lses[0].shape, 0, POISON_BYTE);
    return ids_call(k, m, FMLA_OP_MERGE, &a, "merge");
}

#define RANKS_MAX 4

/* Partial results of a decode problem: out [b * s_q, h, d_v] and lse [b * s_q, h], as views that a call can
 * fill. */
typedef struct partial {
    fmla_tensor out, lse, call_out, call_lse;
} partial;

static partial partial_make(problem *p)
{
    int64_t s_q = p->c.s_q, h = p->c.h_q, d = p->c.d_v;
    partial x;
    x.out = memory_tensor_4(&p->mem, FMLA_F32, 3, p->tokens, h, d, 0, 0, POISON_BYTE);
    x.lse = memory_tensor_4(&p->mem, FMLA_F32, 2, p->tokens, h, 0, 0, 0, POISON_BYTE);
    x.call_out = fmla_tensor_4d(x.out.data, FMLA_F32, p->batch, s_q, h, d);
    x.call_lse =
        fmla_tensor_3d(x.lse.data, FMLA_F32, p->batch, h, s_q); /* [b, h, s_q], written as [b, s_q, h] */
    x.call_lse.stride[0] = s_q * h;
    x.call_lse.stride[1] = 1;
    x.call_lse.stride[2] = h;
    return x;
}

/* The merged result against the unsharded run, which was checked against the reference. */
static verdict compare_merged(checker *k, problem *p, const partial *parts, int32_t world)
{
    fmla_tensor outs[RANKS_MAX], lses[RANKS_MAX], out, lse;
    for (int32_t i = 0; i < world; i++) {
        outs[i] = parts[i].out;
        lses[i] = parts[i].lse;
    }
    verdict v = merge(k, &p->mem, outs, lses, world, &out, &lse);
    for (int64_t t = 0; t < p->tokens && v == VERDICT_PASSED; t++) {
        fmla_tensor a = ids_rows(&out, 0, t, 1), b = ids_rows(&p->out, 0, p->request[t], 1);
        b = ids_rows(&b, 1, p->inner[t], 1);
        fmla_tensor whole = fmla_tensor_3d(b.data, (fmla_dtype)b.dtype, 1, p->c.h_q, p->c.d_v);
        whole.stride[1] = b.stride[2];
        fmla_tensor c = ids_rows(&lse, 0, t, 1), d = ids_rows(&p->lse, 0, p->request[t], 1);
        d = ids_rows(&d, 2, p->inner[t], 1);
        fmla_tensor whole_lse = fmla_tensor_2d(d.data, FMLA_F32, 1, p->c.h_q);
        whole_lse.stride[1] = d.stride[1];
        v = ids_near_out(k, &a, &whole, "merged out against the whole");
        v = v == VERDICT_PASSED ? ids_near_lse(k, &c, &whole_lse, "merged lse against the whole") : v;
    }
    return v;
}

/* Rank `rank` owns tokens rank, rank + world, ...: its cache, its lengths, and for each query token how many
 * it sees.
 */
static verdict run_strided_rank(checker *k, trial *t, int32_t world, int32_t rank, partial *x)
{
    problem *p = &t->p;
    const scope *s = &p->main;
    int64_t page = 8, pages = s->pages_max * s->cache.page_size / page + 1,
            record = cache_record_bytes(&s->cache);
    any_args a = t->args;
    fmla_decode_args *d = &a.decode;
    uint8_t *bytes = xmalloc((size_t)record);
    d->kv = cache_make(&p->mem, s->cache.format, p->c.d_qk, 1, p->batch * pages, page, 0, 0, 0xFF);
    d->block_table = memory_tensor_4(&p->mem, FMLA_I32, 2, p->batch, pages, 0, 0, 0, 0);
    d->cache_seqlens = memory_tensor_4(&p->mem, FMLA_I32, 1, p->batch, 0, 0, 0, 0, 0);
    d->kv_bound = memory_tensor_4(&p->mem, FMLA_I32, 2, p->batch, p->c.s_q, 0, 0, 0, 0);
    d->causal = 0;
    for (int64_t i = 0; i < p->batch * pages; i++) {
        ((int32_t *)d->block_table.data)[i] = (int32_t)i;
    }
    for (int64_t i = 0; i < p->tokens; i++) {
        int64_t r = p->request[i], bound = scope_count(p, s, i), last = p->inner[i] == p->c.s_q - 1;
        ((int32_t *)d->kv_bound.data)[i] = (int32_t)((bound - rank + world - 1) / world);
        ((int32_t *)d->cache_seqlens.data)[r] = (int32_t)((s->seqlen[r] - rank + world - 1) / world);
        for (int64_t j = rank, n = 0; last && j < bound; j += world, n++) {
            cache_get(&s->cache, scope_slot(p, s, i, 0, j), bytes);
            cache_put(&d->kv, r * pages * page + n, bytes);
        }
    }
    free(bytes);
    *x = partial_make(p);
    d->out = x->call_out;
    d->lse = x->call_lse;
    d->max_logits = (fmla_tensor){0};
    return ids_call(k, &p->mem, FMLA_OP_DENSE_DECODE, &a, "a rank's share");
}

verdict c042_context_parallel_bounds(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 6; i++) {
        int32_t world = i % 2 ? 4 : 2;
        partial parts[RANKS_MAX];
        trial t;
        verdict v = trial_make(k, &t, "op=dense_decode,b=2,s_q=3,causal=1,h_q=8,varlen=1,s_kv=%d,page=16,%s",
                               i == 1 ? 4 : 101, ids_dense_format(i / 2 * 2));
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        for (int32_t r = 0; r < world && v == VERDICT_PASSED; r++) {
            v = run_strided_rank(k, &t, world, r, &parts[r]);
        }
        v = v == VERDICT_PASSED ? compare_merged(k, &t.p, parts, world) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

/* Rank `rank` owns the slots whose number is rank modulo the ranks that own any (the last one owns none). */
static verdict run_sparse_rank(checker *k, trial *t, int32_t world, int32_t rank, partial *x)
{
    problem *p = &t->p;
    any_args a = t->args;
    fmla_decode_args *d = &a.decode;
    d->indices = ids_copy(&p->mem, &d->indices);
    int32_t *index = d->indices.data;
    for (int64_t i = 0; i < tensor_elements(&d->indices); i++) {
        index[i] = index[i] >= 0 && index[i] % (world - 1) == rank ? index[i] : -1;
    }
    *x = partial_make(p);
    d->out = x->call_out;
    d->lse = x->call_lse;
    d->max_logits = (fmla_tensor){0};
    return ids_call(k, &p->mem, FMLA_OP_SPARSE_DECODE, &a, "a rank's share");
}

verdict c083_context_parallel_selection(checker *k)
{
    static const char *const texts[] = {"format=v32,d_qk=576", "format=v41"};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4; i++) {
        int32_t world = i % 2 ? 4 : 2;
        partial parts[RANKS_MAX];
        trial t;
        verdict v = trial_make(k, &t, "op=sparse_decode,b=3,s_q=2,h_q=16,topk=200,s_kv=300,%s", texts[i / 2]);
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        for (int32_t r = 0; r < world && v == VERDICT_PASSED; r++) {
            v = run_sparse_rank(k, &t, world, r, &parts[r]);
        }
        if (v == VERDICT_PASSED) {
            v = ids_all(k, &parts[world - 1].lse, -(double)INFINITY, "lse of a rank without tokens");
        }
        v = v == VERDICT_PASSED ? ids_all(k, &parts[world - 1].out, 0, "out of a rank without tokens") : v;
        v = v == VERDICT_PASSED ? compare_merged(k, &t.p, parts, world) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

verdict c019_merge_of_empty_states(checker *k)
{
    const int64_t n = 3, h = 2, d = 64; /* rows: both empty; only the first has tokens; only the second */
    verdict v = VERDICT_PASSED;
    for (int sign = 0; sign < 2 && v == VERDICT_PASSED; sign++) {
        memory m = {0};
        fmla_tensor outs[2], lses[2], out, lse;
        for (int s = 0; s < 2; s++) {
            outs[s] = memory_tensor_4(&m, FMLA_F32, 3, n, h, d, 0, 0, 0xFF); /* NaN */
            lses[s] = memory_tensor_4(&m, FMLA_F32, 2, n, h, 0, 0, 0, 0);
            for (int64_t i = 0; i < n * h; i++) {
                bool full = i / h == s + 1;
                ((float *)lses[s].data)[i] = full ? 3.5f - 4.0f * (float)i : sign ? INFINITY : -INFINITY;
                for (int64_t j = 0; j < d && full; j++) {
                    ((float *)outs[s].data)[i * d + j] = (float)(j - 20) / 64;
                }
            }
        }
        v = merge(k, &m, outs, lses, 2, &out, &lse);
        for (int64_t i = 0; i < n && v == VERDICT_PASSED; i++) {
            fmla_tensor row = ids_rows(&out, 0, i, 1), row_lse = ids_rows(&lse, 0, i, 1);
            fmla_tensor want = ids_rows(&outs[i == 2], 0, i, 1), want_lse = ids_rows(&lses[i == 2], 0, i, 1);
            v = i == 0 ? ids_all(k, &row, 0, "out of two empty states")
                       : ids_near(k, &row, &want, 0, 0x1p-22, "out");
            if (v == VERDICT_PASSED) {
                v = i == 0 ? ids_all(k, &row_lse, -(double)INFINITY, "lse of two empty states")
                           : ids_near(k, &row_lse, &want_lse, 0, 0x1p-21, "lse");
            }
        }
        memory_free(&m);
    }
    return v;
}

/* ---- prompts in chunks ---- */

/* Causal attention of a prompt over its own cache, in chunks; tokens that are not there yet are NaN. */
static verdict prompt_in_chunks(checker *k, trial *t, const int64_t *chunks)
{
    problem *p = &t->p;
    scope *s = &p->main;
    int64_t record = cache_record_bytes(&s->cache), n = p->c.s_q;
    uint8_t *records = xmalloc((size_t)(n * record));
    for (int64_t i = 0; i < n; i++) {
        cache_get(&s->cache, scope_slot(p, s, n - 1, 0, i), records + i * record);
        ids_fill_slot(&s->cache, scope_slot(p, s, n - 1, 0, i),
                      p->c.format == FMLA_KV_BF16 ? PATTERN_BF16_NAN : PATTERN_NAN);
    }
    fmla_tensor out = ids_copy(&p->mem, &p->out), lse = ids_copy(&p->mem, &p->lse);
    problem_poison(p);
    verdict v = VERDICT_PASSED;
    for (int64_t first = 0; *chunks > 0 && v == VERDICT_PASSED; first += *chunks++) {
        any_args a = t->args;
        fmla_decode_args *d = &a.decode;
        for (int64_t i = first; i < first + *chunks; i++) {
            cache_put(&s->cache, scope_slot(p, s, n - 1, 0, i), records + i * record);
        }
        d->q = ids_rows(&d->q, 1, first, *chunks);
        d->out = ids_rows(&d->out, 1, first, *chunks);
        d->lse = ids_rows(&d->lse, 2, first, *chunks);
        d->max_logits = ids_rows(&d->max_logits, 2, first, *chunks);
        d->cache_seqlens = memory_tensor_4(&p->mem, FMLA_I32, 1, 1, 0, 0, 0, 0, 0);
        *(int32_t *)d->cache_seqlens.data = (int32_t)(first + *chunks);
        v = ids_call(k, &p->mem, FMLA_OP_DENSE_DECODE, &a, "a chunk");
    }
    free(records);
    v = v == VERDICT_PASSED ? ids_near_out(k, &p->out, &out, "out in chunks against the whole") : v;
    return v == VERDICT_PASSED ? ids_near_lse(k, &p->lse, &lse, "lse in chunks against the whole") : v;
}

/* The same with sparse prefill: row i attends some of tokens 0..i; the KV tensor grows with the chunks. */
static verdict sparse_in_chunks(checker *k, trial *t, const int64_t *chunks)
{
    problem *p = &t->p;
    problem_poison(p);
    verdict v = VERDICT_PASSED;
    for (int64_t first = 0; *chunks > 0 && v == VERDICT_PASSED; first += *chunks++) {
        any_args a = t->args;
        fmla_tensor *rows[] = {&a.prefill.q, &a.prefill.indices, &a.prefill.out, &a.prefill.lse,
                               &a.prefill.max_logits};
        for (int i = 0; i < 5; i++) {
            *rows[i] = ids_rows(rows[i], 0, first, *chunks);
        }
        a.prefill.kv.shape[0] = first + *chunks;
        v = ids_call(k, &p->mem, FMLA_OP_SPARSE_PREFILL, &a, "a chunk");
    }
    return v == VERDICT_PASSED ? trial_compare(k, t, "sparse prefill in chunks") : v;
}

static verdict sparse_prompt(checker *k, const int64_t *chunks)
{
    trial t;
    verdict v = trial_make(k, &t, "op=sparse_prefill,s_q=140,s_kv=140,topk=64,h_q=4,d_qk=512");
    if (v == VERDICT_PASSED) {
        for (int64_t i = 0; i < 140; i++) {
            int32_t *row = ids_index_row(&t.p, &t.p.main, i);
            for (int64_t j = 0; j < 64; j++) {
                row[j] = row[j] <= i ? row[j] : -1;
            }
        }
        v = trial_run_and_judge(k, &t);
    }
    v = v == VERDICT_PASSED ? sparse_in_chunks(k, &t, chunks) : v;
    trial_free(&t);
    return v;
}

verdict c043_chunked_prompts(checker *k)
{
    static const int64_t chunks[4][8] = {{140}, {70, 70}, {103, 37}, {1, 9, 64, 2, 63, 1}};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4 * 3; i++) {
        trial t;
        verdict v = trial_make(k, &t, "op=dense_decode,b=1,s_q=140,s_kv=140,causal=1,h_q=4,page=16,%s",
                               ids_dense_format(i / 4 * 2));
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        v = v == VERDICT_PASSED ? prompt_in_chunks(k, &t, chunks[i % 4]) : v;
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            return sum;
        }
    }
    for (int i = 0; i < 4 && !ids_bad(&sum, sparse_prompt(k, chunks[i])); i++) {
    }
    return sum;
}

/* ---- batches with padding ---- */

verdict c066_padded_batch(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 2; i++) {
        int64_t real = i ? 5 : 100, padded = i ? 8 : 112;
        trial t;
        verdict v = trial_make(k, &t, "op=dense_decode,b=%d,s_q=2,causal=1,h_q=4,varlen=1,s_kv=90,page=16",
                               (int)padded);
        for (int64_t r = real; r < padded && v == VERDICT_PASSED; r++) {
            fmla_tensor q = ids_rows(&t.p.q, 0, r, 1);
            tensor_fill(&q, 0xFF);
            ((int32_t *)t.p.main.seqlens.data)[r] = 0;
            t.p.main.seqlen[r] = 0;
            for (int64_t j = 0; j < t.p.main.block_table.shape[1]; j++) {
                tensor_set(&t.p.main.block_table, r, j, 0, 0, TABLE_RUBBISH);
            }
        }
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        if (v == VERDICT_PASSED) {
            fmla_tensor out = ids_rows(&t.p.out, 0, real, padded - real),
                        lse = ids_rows(&t.p.lse, 0, real, padded - real);
            v = ids_all(k, &out, 0, "out of padding requests");
            v = v == VERDICT_PASSED ? ids_all(k, &lse, -(double)INFINITY, "lse of padding requests") : v;
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}
