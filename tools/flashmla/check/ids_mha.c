/* SPDX-License-Identifier: MIT */
/* ids_mha.c: faults of multi-head attention, forward and backward, and of the fused operations. */
#include <math.h>
#include <string.h>

#include "check/ids.h"
#include "problem/numbers.h"

/* ---- packed sequences ---- */

static fmla_tensor starts_of(memory *m, const int64_t *lengths, int64_t n)
{
    fmla_tensor t = memory_tensor_4(m, FMLA_I32, 1, n + 1, 0, 0, 0, 0, 0);
    for (int64_t i = 0; i < n; i++) {
        ((int32_t *)t.data)[i + 1] = ((int32_t *)t.data)[i] + (int32_t)lengths[i];
    }
    return t;
}

static int64_t total(const int64_t *lengths, int64_t n)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        sum += lengths[i];
    }
    return sum;
}

/* A problem of n sequences of the given lengths; for backward, with the reference's forward results. */
static verdict make_packed(checker *k, trial *t, const char *text, const int64_t *q, const int64_t *kv,
                           int64_t n)
{
    verdict v = trial_make(k, t, "%s,b=1,s_q=%d,s_kv=%d", text, (int)total(q, n), (int)total(kv, n));
    if (v == VERDICT_PASSED) {
        problem *p = &t->p;
        p->batch = n;
        p->cu_seqlens_q = starts_of(&p->mem, q, n);
        p->cu_seqlens_kv = starts_of(&p->mem, kv, n);
        if (p->c.op == FMLA_OP_MHA_BACKWARD) {
            p->c.op = FMLA_OP_MHA_FORWARD;
            problem_args(p, &t->args);
            p->c.op = FMLA_OP_MHA_BACKWARD;
            v = engine_run(&k->oracle, &p->mem, FMLA_OP_MHA_FORWARD, &t->args) == FMLA_OK ? v
                                                                                          : VERDICT_BROKEN;
        }
        problem_args(p, &t->args);
    }
    return v;
}

static verdict run_packed(checker *k, const char *text, const int64_t *q, const int64_t *kv, int64_t n)
{
    trial t;
    verdict v = make_packed(k, &t, text, q, kv, n);
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    trial_free(&t);
    return v;
}

verdict c016_causal_rows_without_keys(checker *k)
{
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 2; i++) {
        static const int64_t q[] = {8}, kv[] = {3};
        trial t;
        verdict v = make_packed(k, &t,
                                i ? "op=mha_forward,causal=1,h_q=4,h_kv=2,d_qk=128"
                                  : "op=mha_forward,causal=1,h_q=4,h_kv=2",
                                q, kv, 1);
        v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
        if (v == VERDICT_PASSED) {
            fmla_tensor out = ids_rows(&t.p.out, 0, 0, 5), lse = ids_rows(&t.p.lse, 0, 0, 5);
            v = ids_all(k, &out, 0, "out of rows that see no key");
            v = v == VERDICT_PASSED ? ids_all(k, &lse, -(double)INFINITY, "lse of rows that see no key") : v;
        }
        trial_free(&t);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

#define CHUNKS 3

/* A context in workspace chunks: a request may have no tokens in one of them. Merged in order, one after the
 * other. */
verdict c018_context_in_chunks(checker *k)
{
    static const int64_t q[] = {4, 9, 3}, kv[] = {70, 33, 130};
    static const int64_t lengths[CHUNKS][3] = {{32, 33, 64}, {32, 0, 64}, {6, 0, 2}};
    trial t;
    verdict v = make_packed(k, &t, "op=mha_forward,h_q=4,h_kv=4,data=2", q, kv, 3);
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    problem *p = &t.p;
    fmla_tensor outs[2], lses[2];
    for (int c = 0; c < CHUNKS && v == VERDICT_PASSED; c++) {
        any_args a = t.args;
        fmla_mha_forward_args *f = &a.mha_forward;
        int64_t n = total(lengths[c], 3), to = 0;
        f->k = memory_tensor_4(&p->mem, FMLA_BF16, 3, n, 4, 192, 0, 0, 0);
        f->v = memory_tensor_4(&p->mem, FMLA_BF16, 3, n, 4, 128, 0, 0, 0);
        for (int64_t r = 0, base = 0; r < 3; base += kv[r], r++) {
            int64_t first = base;
            for (int b = 0; b < c; b++) {
                first += lengths[b][r];
            }
            fmla_tensor from_k = ids_rows(&p->k, 0, first, lengths[c][r]),
                        to_k = ids_rows(&f->k, 0, to, lengths[c][r]);
            fmla_tensor from_v = ids_rows(&p->v, 0, first, lengths[c][r]),
                        to_v = ids_rows(&f->v, 0, to, lengths[c][r]);
            tensor_copy(&to_k, &from_k);
            tensor_copy(&to_v, &from_v);
            to += lengths[c][r];
        }
        f->cu_seqlens_kv = starts_of(&p->mem, lengths[c], 3);
        f->out = memory_tensor(&p->mem, FMLA_BF16, 3, p->out.shape, 0, POISON_BYTE);
        f->lse = memory_tensor(&p->mem, FMLA_F32, 2, p->lse.shape, 0, POISON_BYTE);
        v = ids_call(k, &p->mem, FMLA_OP_MHA_FORWARD, &a, "a chunk");
        outs[c > 0] = f->out;
        lses[c > 0] = f->lse;
        if (c > 0 && v == VERDICT_PASSED) {
            any_args b;
            memset(&b, 0, sizeof b);
            b.merge = (fmla_merge_args)FMLA_MERGE_ARGS_INIT;
            b.merge.outs = outs;
            b.merge.lses = lses;
            b.merge.count = 2;
            b.merge.out = memory_tensor(&p->mem, FMLA_F32, 3, p->out.shape, 0, POISON_BYTE);
            b.merge.lse = memory_tensor(&p->mem, FMLA_F32, 2, p->lse.shape, 0, POISON_BYTE);
            v = ids_call(k, &p->mem, FMLA_OP_MERGE, &b, "merge");
            outs[0] = b.merge.out;
            lses[0] = b.merge.lse;
        }
    }
    /* Values are about 1; weights of class B are rounded in the chunks and in the whole. */
    double absolute = k->class == CLASS_S ? 1e-3 : 0x1p-8;
    v = v == VERDICT_PASSED ? ids_near(k, &outs[0], &p->out, absolute, 0.01, "chunks against the whole") : v;
    v = v == VERDICT_PASSED ? ids_near(k, &lses[0], &p->lse, 1e-3, 0, "lse in chunks against the whole") : v;
    trial_free(&t);
    return v;
}

verdict c052_head_counts(checker *k)
{
    static const int h_q[] = {1, 3, 16, 64, 127};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5 * 2; i++) {
        if (ids_bad(&sum, ids_case(k, "op=sparse_prefill,s_q=7,s_kv=90,topk=70,h_q=%d,d_qk=%d,seed=%d",
                                   h_q[i % 5], i / 5 ? 512 : 576, i))) {
            break;
        }
    }
    return sum;
}

verdict c135_more_queries_than_keys(checker *k)
{
    static const int64_t q[] = {76, 34, 146}, kv[] = {1, 1, 1};
    verdict v = run_packed(k, "op=mha_backward,causal=1,h_q=2,h_kv=2,data=1", q, kv, 3);
    return v == VERDICT_PASSED ? run_packed(k, "op=mha_forward,causal=1,h_q=2,h_kv=2,data=1", q, kv, 3) : v;
}

verdict c136_rows_without_keys_backward(checker *k)
{
    static const int64_t q[] = {8, 0, 5, 40}, kv[] = {3, 4, 0, 33};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4; i++) {
        static const char *const texts[] = {"causal=1,scale=0.6", "scale=0.6", "causal=1,scale=-0.6,d_qk=128",
                                            "causal=1,pos_inf=1"};
        char text[128];
        snprintf(text, sizeof text, "op=mha_backward,h_q=2,h_kv=1,data=1,%s", texts[i]);
        if (ids_bad(&sum, run_packed(k, text, q, kv, 4))) {
            break;
        }
    }
    return sum;
}

verdict c138_irregular_lengths(checker *k)
{
    static const int64_t lengths[] = {0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    verdict sum = VERDICT_NOT_OFFERED;
    for (uint64_t seed = 1; seed <= 16; seed++) {
        rng r;
        int64_t q[5], kv[5], n = 1 + (int64_t)seed % 5;
        char text[128];
        rng_seed(&r, seed);
        for (int64_t i = 0; i < n; i++) {
            q[i] = lengths[rng_below(&r, 12)];
            kv[i] = lengths[rng_below(&r, 12)];
        }
        snprintf(text, sizeof text, "op=mha_backward,h_q=1,h_kv=1,causal=%d,seed=%d,d_qk=%d",
                 (int)(seed / 2 % 2), (int)seed, seed % 3 ? 64 : 192);
        if (ids_bad(&sum, run_packed(k, text, q, kv, n))) {
            break;
        }
    }
    return sum;
}

verdict c139_widths_and_groups(checker *k)
{
    static const int heads[][2] = {{16, 4}, {12, 3}};
    verdict sum = VERDICT_NOT_OFFERED;
    double budget = k->budget;
    k->budget = 1e9; /* all heads */
    for (int i = 0; i < 4; i++) {
        if (ids_bad(&sum, ids_case(k, "op=mha_backward,b=2,s_q=20,s_kv=30,varlen=1,causal=%d,h_q=%d,h_kv=%d",
                                   i / 2, heads[i % 2][0], heads[i % 2][1]))) {
            break;
        }
    }
    k->budget = budget;
    return sum;
}

/* ---- fused ---- */

/* A table of `rows` positions; only those that are used are written. angle 0: the identity. */
static void rope_table(problem *p, int64_t rows, double angle)
{
    p->cos_sin =
        fmla_tensor_2d(memory_take(&p->mem, (size_t)rows * 64 * sizeof(float), 0), FMLA_F32, rows, 64);
    for (int64_t t = 0; t < p->tokens; t++) {
        int64_t position = t % 2 ? rows - 1 : 0;
        ((int32_t *)p->positions.data)[t] = (int32_t)position;
        for (int64_t j = 0; j < 32; j++) {
            double x = angle * (double)position * pow(1e5, -(double)j / 32);
            tensor_set(&p->cos_sin, position, j, 0, 0, cos(x));
            tensor_set(&p->cos_sin, position, 32 + j, 0, 0, sin(x));
        }
    }
}

/* Fused out of row (i, j) of the reference against unfused out and a cast of its own. Each side may have rounded its
 * weights. */
static verdict compare_cast(checker *k, const problem *p, const fmla_tensor *unfused, const reference *r, int64_t i,
                            int64_t j)
{
    int64_t token = r->token[i], h = r->head[j];
    const double *A = r->abs_out + (i * r->heads + j) * r->d_v;
    for (int64_t d = 0; d < 512; d++) {
        int64_t number = d / 32 * p->c.h_q + h;
        int32_t word = tensor_i32(&p->out_scale, token, 0, number / 4);
        double scale = e8m0_value((uint8_t)(word >> (8 * (number % 4))));
        const uint8_t *codes = p->out.data;
        double x = tensor_get(unfused, token, h, d, 0);
        double y = scale * (double)e4m3_value(codes[tensor_offset(&p->out, token, 0, number * 32 + d % 32, 0)]);
        double weights = k->class == CLASS_S ? 0 : 2 * 0x1p-8 * A[d];
        if (!(fabs(x - y) <= 0.0645 * fabs(x) + scale * 0x1p-9 + weights)) {
            return check_fail(k, "fused out of token %lld, head %lld, dim %lld is %g, unfused %g", (long long)token,
                              (long long)h, (long long)d, y, x);
        }
    }
    return VERDICT_PASSED;
}

/* Fused with the identity table against sparse prefill. */
static verdict compare_unfused(checker *k, trial *t)
{
    problem *p = &t->p;
    any_args a;
    reference r;
    memset(&a, 0, sizeof a);
    a.prefill = (fmla_prefill_args)FMLA_PREFILL_ARGS_INIT;
    a.prefill.softmax_scale = p->scale;
    a.prefill.q = p->q;
    a.prefill.kv = p->kv;
    a.prefill.indices = p->main.indices;
    a.prefill.out = memory_tensor_4(&p->mem, FMLA_F32, 3, p->tokens, p->c.h_q, 512, 0, 0, POISON_BYTE);
    a.prefill.lse = memory_tensor(&p->mem, FMLA_F32, 2, p->lse.shape, 0, POISON_BYTE);
    verdict v = ids_call(k, &p->mem, FMLA_OP_SPARSE_PREFILL, &a, "the unfused attention");
    v = v == VERDICT_PASSED ? ids_near_lse(k, &p->lse, &a.prefill.lse, "fused lse against unfused") : v;
    if (v != VERDICT_PASSED) {
        return v;
    }
    if (reference_make(&r, p, &k->oracle, 0, 1e9) != CLI_OK) {
        return VERDICT_BROKEN;
    }
    for (int64_t i = 0; i < r.tokens * r.heads && v == VERDICT_PASSED; i++) {
        v = compare_cast(k, p, &a.prefill.out, &r, i / r.heads, i % r.heads);
    }
    reference_free(&r);
    return v;
}

verdict c141_rope_styles(checker *k)
{
    verdict v = VERDICT_PASSED;
    uint8_t *styles[2] = {NULL, NULL};
    trial t[2];
    memset(t, 0, sizeof t);
    for (int identity = 0; identity < 2 && v == VERDICT_PASSED; identity++) {
        for (int neox = 0; neox < 2 && v == VERDICT_PASSED; neox++) {
            trial_free(&t[neox]);
            v = trial_make(k, &t[neox],
                           "op=fused_prefill,s_q=6,s_kv=90,topk=40,h_q=8,plain_q=1,data=1,neox=%d", neox);
            if (v == VERDICT_PASSED) {
                rope_table(&t[neox].p, identity ? 4 : 1000001, identity ? 0 : 1);
                problem_args(&t[neox].p, &t[neox].args);
                v = trial_run_and_judge(k, &t[neox]);
                styles[neox] = t[neox].bits;
            }
        }
        if (v == VERDICT_PASSED && (memcmp(styles[0], styles[1], t[0].size) == 0) != identity) {
            v = check_fail(k, identity ? "with the identity table the styles differ"
                                       : "both styles give the same result");
        }
    }
    v = v == VERDICT_PASSED ? compare_unfused(k, &t[0]) : v;
    trial_free(&t[0]);
    trial_free(&t[1]);
    return v;
}

verdict c142_fused_against_separate(checker *k)
{
    static const int tokens[] = {1, 3, 64, 130}, h_q[] = {8, 24, 64, 128};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4 * 4; i++) {
        int few = tokens[i % 4] > 3 && h_q[i / 4] > 24;
        if (ids_bad(&sum,
                    ids_case(
                        k, "op=fused_prefill,s_q=%d,s_kv=90,topk=%d,h_q=%d,plain_q=%d,norm=1,group=8,seed=%d",
                        tokens[i % 4], few ? 16 : 70, h_q[i / 4], i % 2, i))) {
            break;
        }
    }
    return sum;
}

verdict c143_heads_and_scale_padding(checker *k)
{
    static const int h_q[] = {8, 16, 32, 64, 128};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 5 * 4; i++) {
        if (ids_bad(&sum, ids_case(k, "op=%s,s_q=%d,s_kv=60,topk=24,h_q=%d,norm=1,seed=%d",
                                   i % 2 ? "fused_prefill" : "fused_decode,format=v41", 1 + i / 5 + i % 3,
                                   h_q[i % 5], i))) {
            break;
        }
    }
    return sum;
}

verdict c145_positions_outside_the_table(checker *k)
{
    static const int32_t outside[] = {4096, -1, INT32_MAX, INT32_MIN};
    trial t;
    verdict v = trial_make(
        k, &t, "op=fused_prefill,s_q=5,s_kv=60,topk=24,h_q=8"); /* token 0 has the table's last row */
    v = v == VERDICT_PASSED ? trial_run_and_judge(k, &t) : v;
    fmla_tensor lse = {0};
    if (v == VERDICT_PASSED) {
        lse = ids_copy(&t.p.mem, &t.p.lse);
    }
    for (int i = 0; i < 4 && v == VERDICT_PASSED; i++) {
        ((int32_t *)t.p.positions.data)[2] = outside[i];
        problem_poison(&t.p);
        fmla_status status = engine_run(&k->engine, &t.p.mem, FMLA_OP_FUSED_PREFILL, &t.args);
        if (k->engine.host) {
            v = status == FMLA_ERROR_INVALID_ARGUMENT
                    ? VERDICT_PASSED
                    : check_fail(k, "position %d: %s", outside[i], fmla_status_string(status));
            continue;
        }
        v = status == FMLA_OK ? VERDICT_PASSED
                              : check_status(k, &k->engine, status, "a position outside the table");
        for (int64_t row = 0; row < 5 && v == VERDICT_PASSED; row++) {
            fmla_tensor a = ids_rows(&t.p.lse, 0, row, 1), b = ids_rows(&lse, 0, row, 1);
            v = row == 2
                    ? ids_all(k, &a, -(double)INFINITY, "lse of a token whose position is outside the table")
                    : ids_near(k, &a, &b, 0, 0, "lse of the other tokens");
        }
    }
    trial_free(&t);
    return v;
}
