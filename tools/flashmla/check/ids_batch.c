/* SPDX-License-Identifier: MIT */
/*
 * ids_batch.c: faults where a request's result depends on its neighbours or on how its keys are split:
 * the same requests alone, in other company and in other order.
 */
#include <math.h>
#include <string.h>

#include "check/ids.h"
#include "problem/numbers.h"

/* Rows which[0..n-1] of the first dimension, in memory of their own. */
static fmla_tensor gather(memory *m, const fmla_tensor *t, const int64_t *which, int64_t n)
{
    fmla_tensor some = *t;
    if (t->rank == 0) {
        return some;
    }
    some.shape[0] = n;
    some = memory_tensor(m, (fmla_dtype)t->dtype, t->rank, some.shape, 0, 0);
    for (int64_t i = 0; i < n; i++) {
        fmla_tensor to = ids_rows(&some, 0, i, 1), from = ids_rows(t, 0, which[i], 1);
        tensor_copy(&to, &from);
    }
    return some;
}

/* The requests which[0..n-1] of a decode problem as a batch of their own. */
static verdict run_mix(checker *k, trial *t, const int64_t *which, int64_t n, any_args *a)
{
    memory *m = &t->p.mem;
    *a = t->args;
    fmla_decode_args *d = &a->decode;
    fmla_tensor *per_request[] = {
        &d->q,           &d->block_table,       &d->cache_seqlens, &d->indices, &d->extra_indices,
        &d->topk_length, &d->extra_topk_length, &d->out,           &d->lse,     &d->max_logits};
    for (int i = 0; i < 10; i++) {
        *per_request[i] = gather(m, per_request[i], which, n);
    }
    fmla_tensor *outputs[] = {&d->out, &d->lse, &d->max_logits};
    for (int i = 0; i < 3; i++) {
        tensor_fill(outputs[i], POISON_BYTE);
    }
    return ids_call(k, m, (fmla_operation)t->p.c.op, a, "a batch of some of the requests");
}

/* Each of the mix's results has the bits of out and lse, the results of all requests. */
static verdict same_as(checker *k, const any_args *a, const int64_t *which, int64_t n, const fmla_tensor *out,
                       const fmla_tensor *lse)
{
    for (int64_t i = 0; i < n; i++) {
        fmla_tensor x = ids_rows(&a->decode.out, 0, i, 1), y = ids_rows(out, 0, which[i], 1);
        fmla_tensor u = ids_rows(&a->decode.lse, 0, i, 1), w = ids_rows(lse, 0, which[i], 1);
        if (!ids_same_bits(&x, &y) || !ids_same_bits(&u, &w)) {
            return check_fail(k, "request %lld has other bits as number %lld of a batch of %lld",
                              (long long)which[i], (long long)i, (long long)n);
        }
    }
    return VERDICT_PASSED;
}

static verdict alone_and_in_company(checker *k, const char *text)
{
    static const int64_t sizes[] = {1, 2, 8, 63, 64, 199};
    trial t;
    verdict v = trial_make(k, &t, "%s", text);
    t.args.decode.batch_invariant = 1;
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    for (int i = 0; i < 6 && v == VERDICT_PASSED; i++) {
        int64_t which[200];
        any_args a;
        for (int64_t j = 0; j < sizes[i]; j++) {
            which[j] = (j * 37 + i) % 200; /* request i first, all different */
        }
        v = run_mix(k, &t, which, sizes[i], &a);
        v = v == VERDICT_PASSED ? same_as(k, &a, which, sizes[i], &t.p.out, &t.p.lse) : v;
    }
    trial_free(&t);
    return v;
}

verdict c072_neighbours(checker *k)
{
    verdict v = alone_and_in_company(
        k, "op=sparse_decode,format=v4,extra=v4,b=200,h_q=4,topk=64,e_topk=40,s_kv=90,e_kv=70,"
           "lengths=1,e_lengths=1,data=1");
    return v == VERDICT_PASSED
               ? alone_and_in_company(k, "op=dense_decode,b=200,h_q=2,s_kv=150,varlen=2,data=1")
               : v;
}

/* Lengths of the requests, whose tables may share pages; every request's tokens are there already. */
static void set_lengths(const problem *p, const int64_t *lengths)
{
    for (int64_t i = 0; i < p->batch; i++) {
        ((int32_t *)p->main.seqlens.data)[i] = (int32_t)lengths[i];
        p->main.seqlen[i] = lengths[i];
    }
}

verdict c073_splits_of_a_batch(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 2; i++) {
        trial t;
        verdict v =
            trial_make(k, &t, "op=dense_decode,b=1,s_kv=8192,h_q=16,data=1,%s", ids_dense_format(i * 2));
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        t.args.decode.batch_invariant = 1;
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        fmla_tensor out = {0}, lse = {0};
        if (v == VERDICT_PASSED) {
            out = ids_copy(&t.p.mem, &t.p.out);
            lse = ids_copy(&t.p.mem, &t.p.lse);
        }
        /* 2, 8 and 32 requests: the same one first, shorter ones over the same pages behind it. */
        for (int64_t b = 2; b <= 32 && v == VERDICT_PASSED; b *= 4) {
            static const int64_t first = 0;
            int64_t which[32] = {0};
            any_args a;
            any_args all = t.args;
            t.args.decode.cache_seqlens = gather(&t.p.mem, &all.decode.cache_seqlens, which, 32);
            t.args.decode.q = gather(&t.p.mem, &all.decode.q, which, 32);
            t.args.decode.block_table = gather(&t.p.mem, &all.decode.block_table, which, 32);
            t.args.decode.out = gather(&t.p.mem, &out, which, 32);
            t.args.decode.lse = gather(&t.p.mem, &lse, which, 32);
            t.args.decode.max_logits = (fmla_tensor){0};
            for (int64_t r = 1; r < 32; r++) {
                ((int32_t *)t.args.decode.cache_seqlens.data)[r] = (int32_t)(1 + r * 97 % 700);
                which[r] = r;
            }
            v = run_mix(k, &t, which, b, &a);
            v = v == VERDICT_PASSED ? same_as(k, &a, &first, 1, &out, &lse) : v;
            t.args = all;
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

verdict c075_one_result_in_any_mix(checker *k)
{
    static const int64_t lengths[] = {1, 511, 2048, 4097};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 2; i++) {
        trial t;
        rng r;
        rng_seed(&r, 75);
        verdict v =
            trial_make(k, &t, "op=dense_decode,b=4,s_kv=4097,h_q=2,data=1,%s", ids_dense_format(i * 2));
        if (v == VERDICT_PASSED) {
            set_lengths(&t.p, lengths);
            t.args.decode.batch_invariant = 1;
            v = trial_run_and_judge(k, &t);
        }
        for (int n = 0; n < 20 && v == VERDICT_PASSED; n++) {
            int64_t which[9], size = 1 + rng_below(&r, 9);
            any_args a;
            for (int64_t j = 0; j < size; j++) {
                which[j] = rng_below(&r, 4);
            }
            v = run_mix(k, &t, which, size, &a);
            v = v == VERDICT_PASSED ? same_as(k, &a, which, size, &t.p.out, &t.p.lse) : v;
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

/* Root mean square error of row 0's output, all heads, and of its size. */
static void row_error(const reference *r, const fmla_tensor *out, double *error, double *size)
{
    *error = *size = 0;
    for (int64_t h = 0; h < r->heads; h++) {
        for (int64_t d = 0; d < r->d_v; d++) {
            double x = r->out[h * r->d_v + d], e = tensor_get(out, 0, 0, r->head[h], d) - x;
            *error += e * e;
            *size += x * x;
        }
    }
    *error = sqrt(*error);
    *size = sqrt(*size);
}

/* A request alone, which a large device cuts in many pieces, and among enough others to fill it, which leaves
 * it whole.
 */
verdict c076_error_of_splits(checker *k)
{
    static const int64_t kv[] = {64, 704, 2816};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 6; i++) {
        trial t;
        verdict v = trial_make(k, &t, "op=dense_decode,b=1,s_kv=%d,h_q=8,data=1,out=F32,%s", (int)kv[i % 3],
                               ids_dense_format(i / 3 * 2));
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        if (v == VERDICT_PASSED) {
            reference r;
            any_args a;
            int64_t which[300] = {0};
            double alone, whole, size;
            v = run_mix(k, &t, which, k->engine.host ? 3 : 300, &a);
            if (v == VERDICT_PASSED && reference_make(&r, &t.p, &k->oracle, 0, 4 * k->budget) == CLI_OK) {
                row_error(&r, &t.p.out, &alone, &size);
                row_error(&r, &a.decode.out, &whole, &size);
                reference_free(&r);
                if (!(alone <= 1.05 * whole + 0x1p-20 * size)) {
                    v = check_fail(k, "%lld tokens: error %.3g alone, %.3g in a full batch, of %.3g",
                                   (long long)kv[i % 3], alone, whole, size);
                }
            }
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}
