/* SPDX-License-Identifier: MIT */
/* mha.c: fmla_mha_forward and fmla_mha_backward. */
#include <string.h>

#include "describe.h"
#include "read.h"

/* What forward and backward share: q, k, v, the sequences, scale. */
typedef struct inputs {
    const fmla_tensor *q, *k, *v, *cu_q, *cu_kv;
    int64_t max_q, max_kv;
    float scale;
    int32_t causal;
} inputs;

static fmlai_pattern pattern3(const char *name, uint32_t dtypes, const char *note, uint32_t flags, const char *letters,
                              int64_t n0, int64_t n1, int64_t n2)
{
    return (fmlai_pattern){.name = name,
                           .dtypes = dtypes,
                           .note = note,
                           .flags = flags,
                           .letters = letters,
                           .rank = 3,
                           .shape = {n0, n1, n2}};
}

static void expect3(fmlai_checker *c, const fmla_tensor *t, fmlai_pattern pattern)
{
    fmlai_check_tensor(c, t, &pattern);
}

static int64_t describe_max(fmlai_checker *c, const char *name, int64_t max, int64_t total)
{
    fmlai_check_range(c, name, max, 0, INT64_MAX);
    return max > 0 ? max : total > 0 ? total : 1;
}

static void describe_sequences(fmlai_checker *c, const inputs *in, fmlai_mha *p)
{
    const bool given = fmlai_present(in->cu_q);
    p->batch = 1;
    p->max_seqlen_q = describe_max(c, "max_seqlen_q", in->max_q, p->total_q);
    p->max_seqlen_kv = describe_max(c, "max_seqlen_kv", in->max_kv, p->total_kv);
    if (given != fmlai_present(in->cu_kv)) {
        fmlai_invalid(c, "%s: is absent; allowed: both cu_seqlens_q and cu_seqlens_kv, or neither",
                      given ? "cu_seqlens_kv" : "cu_seqlens_q");
    }
    FMLAI_EXPECT(c, in->cu_q, .name = "cu_seqlens_q", .dtypes = FMLAI_BIT(FMLA_I32),
                 .flags = FMLAI_OPTIONAL | FMLAI_LAST, .letters = "b + 1", .rank = 1, .shape = {FMLAI_ANY});
    FMLAI_EXPECT(c, in->cu_kv, .name = "cu_seqlens_kv", .dtypes = FMLAI_BIT(FMLA_I32),
                 .flags = FMLAI_OPTIONAL | FMLAI_LAST, .letters = "b + 1", .rank = 1, .shape = {in->cu_q->shape[0]});
    if (given && in->cu_q->shape[0] < 1) {
        fmlai_invalid(c, "cu_seqlens_q: has no entries; allowed: b + 1 of them");
    }
    if (fmlai_failed(c)) {
        return;
    }
    if (given) {
        p->batch = in->cu_q->shape[0] - 1;
        p->cu_seqlens_q = fmlai_data(c, in->cu_q);
        p->cu_seqlens_kv = fmlai_data(c, in->cu_kv);
        if (p->batch == 0 && (p->total_q > 0 || p->total_kv > 0)) {
            fmlai_invalid(c, "cu_seqlens_q: names no sequences; allowed: at least one, there are tokens");
        }
        fmlai_check_cu_seqlens(c, "cu_seqlens_q", p->cu_seqlens_q, p->batch, p->total_q, "max_seqlen_q", in->max_q);
        fmlai_check_cu_seqlens(c, "cu_seqlens_kv", p->cu_seqlens_kv, p->batch, p->total_kv, "max_seqlen_kv",
                               in->max_kv);
    } else if (in->max_q > 0 && in->max_q < p->total_q) {
        fmlai_invalid(c, "max_seqlen_q: %lld; there are %lld tokens, allowed: at least that, or 0",
                      (long long)in->max_q, (long long)p->total_q);
    } else if (in->max_kv > 0 && in->max_kv < p->total_kv) {
        fmlai_invalid(c, "max_seqlen_kv: %lld; there are %lld tokens, allowed: at least that, or 0",
                      (long long)in->max_kv, (long long)p->total_kv);
    }
}

static void describe_inputs(fmlai_checker *c, const fmla_context *context, fmla_operation operation, const inputs *in,
                            fmlai_mha *p)
{
    const uint32_t q_dtype = in->q->dtype == FMLA_F16 ? FMLAI_BIT(FMLA_F16) : FMLAI_BIT(FMLA_BF16);
    fmlai_check_range(c, "causal", in->causal, 0, 1);
    expect3(c, in->q,
            pattern3("q", FMLAI_HALF, NULL, FMLAI_LAST, "total_q, h_q, d_qk", FMLAI_ANY, FMLAI_ANY, FMLAI_ANY));
    expect3(
        c, in->k,
        pattern3("k", q_dtype, "q's dtype", FMLAI_LAST, "total_kv, h_kv, d_qk", FMLAI_ANY, FMLAI_ANY, in->q->shape[2]));
    expect3(c, in->v,
            pattern3("v", q_dtype, "q's dtype", FMLAI_LAST, "total_kv, h_kv, d_v", in->k->shape[0], in->k->shape[1],
                     FMLAI_ANY));
    if (fmlai_failed(c)) {
        return;
    }
    p->total_q = in->q->shape[0];
    p->total_kv = in->k->shape[0];
    p->h_q = fmlai_check_width(c, "h_q", in->q->shape[1]);
    p->h_kv = fmlai_check_width(c, "h_kv", in->k->shape[1]);
    p->d_qk = fmlai_check_width(c, "d_qk", in->q->shape[2]);
    p->d_v = fmlai_check_width(c, "d_v", in->v->shape[2]);
    p->scale = fmlai_check_scale(c, in->scale, p->d_qk);
    p->causal = in->causal != 0;
    p->q = fmlai_packed_of(c, in->q);
    p->k = fmlai_packed_of(c, in->k);
    p->v = fmlai_packed_of(c, in->v);
    describe_sequences(c, in, p);
    if (!fmlai_failed(c)) {
        const fmla_support_query query = {.struct_size = sizeof query,
                                          .operation = (int32_t)operation,
                                          .q_dtype = in->q->dtype,
                                          .h_q = p->h_q,
                                          .h_kv = p->h_kv,
                                          .d_qk = p->d_qk,
                                          .d_v = p->d_v};
        c->status = fmlai_context_supports(context, &query, c->error);
    }
}

static void expect_lse(fmlai_checker *c, const fmla_tensor *t, const char *name, uint32_t dtypes, uint32_t flags,
                       const fmlai_mha *p)
{
    FMLAI_EXPECT(c, t, .name = name, .dtypes = dtypes, .flags = flags, .letters = "total_q, h_q", .rank = 2,
                 .shape = {p->total_q, p->h_q});
}

static void describe_forward(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mha *p)
{
    const fmla_mha_forward_args *a = args;
    const inputs in = {&a->q,
                       &a->k,
                       &a->v,
                       &a->cu_seqlens_q,
                       &a->cu_seqlens_kv,
                       a->max_seqlen_q,
                       a->max_seqlen_kv,
                       a->softmax_scale,
                       a->causal};
    const uint32_t f64 = FMLAI_BIT(FMLA_F64), optional = FMLAI_OPTIONAL | FMLAI_OUTPUT;
    fmlai_check_zero(c, "reserved0", a->reserved0);
    describe_inputs(c, context, FMLA_OP_MHA_FORWARD, &in, p);
    if (fmlai_failed(c)) {
        return;
    }
    expect3(c, &a->out,
            pattern3("out", fmlai_result_dtypes(c, FMLAI_BIT(a->q.dtype)), "q's dtype", FMLAI_LAST | FMLAI_OUTPUT,
                     "total_q, h_q, d_v", p->total_q, p->h_q, p->d_v));
    expect_lse(c, &a->lse, "lse", fmlai_result_dtypes(c, FMLAI_BIT(FMLA_F32)), optional, p);
    fmlai_check_oracle_only(c, &a->abs_out, "abs_out");
    expect3(c, &a->abs_out,
            pattern3("abs_out", f64, NULL, optional | FMLAI_LAST, "total_q, h_q, d_v", p->total_q, p->h_q, p->d_v));
    fmlai_check_oracle_only(c, &a->abs_logit, "abs_logit");
    expect_lse(c, &a->abs_logit, "abs_logit", f64, optional, p);
    p->out = fmlai_packed_of(c, &a->out);
    p->lse = fmlai_packed_of(c, &a->lse);
    p->abs_out = fmlai_packed_of(c, &a->abs_out);
    p->abs_logit = fmlai_packed_of(c, &a->abs_logit);
    p->empty_lse = fmlai_check_empty_lse(c, a->empty_lse);
}

static void describe_backward(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mha *p)
{
    const fmla_mha_backward_args *a = args;
    const inputs in = {&a->q,
                       &a->k,
                       &a->v,
                       &a->cu_seqlens_q,
                       &a->cu_seqlens_kv,
                       a->max_seqlen_q,
                       a->max_seqlen_kv,
                       a->softmax_scale,
                       a->causal};
    const uint32_t flags = FMLAI_LAST | FMLAI_OUTPUT;
    describe_inputs(c, context, FMLA_OP_MHA_BACKWARD, &in, p);
    if (fmlai_failed(c)) {
        return;
    }
    const uint32_t dtypes = fmlai_result_dtypes(c, FMLAI_BIT(a->q.dtype));
    expect3(c, &a->out,
            pattern3("out", dtypes, "q's dtype", FMLAI_LAST, "total_q, h_q, d_v", p->total_q, p->h_q, p->d_v));
    expect_lse(c, &a->lse, "lse", fmlai_result_dtypes(c, FMLAI_BIT(FMLA_F32)), 0, p);
    expect3(c, &a->dout,
            pattern3("dout", dtypes, "q's dtype", FMLAI_LAST, "total_q, h_q, d_v", p->total_q, p->h_q, p->d_v));
    expect3(c, &a->dq, pattern3("dq", dtypes, "q's dtype", flags, "total_q, h_q, d_qk", p->total_q, p->h_q, p->d_qk));
    expect3(c, &a->dk,
            pattern3("dk", dtypes, "q's dtype", flags, "total_kv, h_kv, d_qk", p->total_kv, p->h_kv, p->d_qk));
    expect3(c, &a->dv, pattern3("dv", dtypes, "q's dtype", flags, "total_kv, h_kv, d_v", p->total_kv, p->h_kv, p->d_v));
    p->out = fmlai_packed_of(c, &a->out);
    p->lse = fmlai_packed_of(c, &a->lse);
    p->dout = fmlai_packed_of(c, &a->dout);
    p->dq = fmlai_packed_of(c, &a->dq);
    p->dk = fmlai_packed_of(c, &a->dk);
    p->dv = fmlai_packed_of(c, &a->dv);
}

/* ---- carrying out ------------------------------------------------------------------------------------------------ */

/* What differs between the two. workspace_at: where the struct has workspace and, after it, workspace_size. */
typedef struct family {
    bool backward;
    size_t args_size;
    size_t workspace_at;
    void (*describe)(fmlai_checker *c, const fmla_context *context, const void *args, fmlai_mha *p);
} family;

static const family forward = {false, sizeof(fmla_mha_forward_args), offsetof(fmla_mha_forward_args, workspace),
                               describe_forward};
static const family backward = {true, sizeof(fmla_mha_backward_args), offsetof(fmla_mha_backward_args, workspace),
                                describe_backward};

/* The caller's struct, copied, and its description. */
typedef struct job {
    union {
        fmla_mha_forward_args forward;
        fmla_mha_backward_args backward;
    } args;
    fmlai_mha problem;
} job;

static void read_and_describe(fmlai_checker *c, const fmla_context *context, const family *f, const void *args, job *j)
{
    if (!fmlai_failed(c)) {
        c->status = fmlai_args_read(&j->args, f->args_size, args, "args", c->error);
    }
    if (!fmlai_failed(c)) {
        memset(&j->problem, 0, sizeof j->problem);
        f->describe(c, context, &j->args, &j->problem);
    }
}

/* Backward without queries is not: dk and dv are there still, and are zero. */
static bool nothing_to_do(const family *f, const fmlai_mha *p)
{
    return p->total_q == 0 && (!f->backward || p->total_kv == 0);
}

static size_t need_of(const fmla_context *context, const family *f, const fmlai_mha *p)
{
    const fmlai_backend *b = context->backend;
    size_t (*workspace)(const void *, const fmlai_mha *) =
        f->backward ? b->mha_backward_workspace : b->mha_forward_workspace;
    return nothing_to_do(f, p) || workspace == NULL ? 0 : workspace(context->state, p);
}

static fmla_status run(fmla_context *context, const family *f, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    const fmlai_backend *b = context->backend;
    fmlai_workspace own;
    fmlai_call call;
    job j;
    read_and_describe(&c, context, f, args, &j);
    if (fmlai_failed(&c) || nothing_to_do(f, &j.problem)) {
        return c.status;
    }
    memcpy(&own, (const char *)&j.args + f->workspace_at, sizeof own);
    c.status = fmlai_prepare_call(context, own, need_of(context, f, &j.problem), stream, &call);
    if (fmlai_failed(&c)) {
        return c.status;
    }
    return (f->backward ? b->mha_backward : b->mha_forward)(context->state, &j.problem, &call);
}

static fmla_status measure(fmla_context *context, const family *f, const void *args, void *size)
{
    fmlai_checker c = fmlai_checker_for_size(context);
    job j;
    read_and_describe(&c, context, f, args, &j);
    return fmlai_answer_size(&c, fmlai_failed(&c) ? 0 : need_of(context, f, &j.problem), size);
}

static fmla_status forward_run(fmla_context *context, const void *args, void *stream)
{
    return run(context, &forward, args, stream);
}

static fmla_status forward_measure(fmla_context *context, const void *args, void *size)
{
    return measure(context, &forward, args, size);
}

static fmla_status backward_run(fmla_context *context, const void *args, void *stream)
{
    return run(context, &backward, args, stream);
}

static fmla_status backward_measure(fmla_context *context, const void *args, void *size)
{
    return measure(context, &backward, args, size);
}

fmla_status fmla_mha_forward(fmla_context *context, const fmla_mha_forward_args *args, void *stream)
{
    return fmlai_guarded(context, forward_run, args, stream);
}

fmla_status fmla_mha_forward_workspace_size(fmla_context *context, const fmla_mha_forward_args *args, size_t *size)
{
    return fmlai_guarded(context, forward_measure, args, size);
}

fmla_status fmla_mha_backward(fmla_context *context, const fmla_mha_backward_args *args, void *stream)
{
    return fmlai_guarded(context, backward_run, args, stream);
}

fmla_status fmla_mha_backward_workspace_size(fmla_context *context, const fmla_mha_backward_args *args, size_t *size)
{
    return fmlai_guarded(context, backward_measure, args, size);
}
