/* SPDX-License-Identifier: MIT */
/* mqa.c: the common end of decode, prefill and the fused operations. */
#include <string.h>

#include "describe.h"
#include "read.h"

void fmlai_check_supported(fmlai_checker *c, const fmla_context *context, fmla_operation operation, const fmlai_mqa *p)
{
    const bool extra = p->extra.kind != FMLAI_LIST_NONE;
    if (fmlai_failed(c)) {
        return;
    }
    if (p->main.pool.format.extra_only) {
        fmlai_invalid(c, "kv: format is %s; allowed: a main format, this one is legal as extra_kv only",
                      p->main.pool.format.name);
        return;
    }
    const fmla_support_query query = {
        .struct_size = sizeof query,
        .operation = (int32_t)operation,
        .kv_format = p->main.pool.format.format,
        .extra_format = extra ? p->extra.pool.format.format : FMLA_KV_NONE,
        .q_dtype = (int32_t)p->q.dtype,
        .h_q = p->h_q,
        .h_kv = p->h_kv,
        .d_qk = p->d_qk,
        .d_v = p->d_v,
    };
    c->status = fmlai_context_supports(context, &query, c->error);
}

static size_t need_of(const fmla_context *context, const fmlai_mqa *p)
{
    const fmlai_backend *backend = context->backend;
    return p->num_tokens == 0 || backend->mqa_workspace == NULL ? 0 : backend->mqa_workspace(context->state, p);
}

/* The caller's struct, copied, and its description. */
typedef struct job {
    union {
        fmla_decode_args decode;
        fmla_prefill_args prefill;
        fmla_fused_prefill_args fused_prefill;
        fmla_fused_decode_args fused_decode;
    } args;
    fmlai_mqa problem;
} job;

static void read_and_describe(fmlai_checker *c, const fmla_context *context, const fmlai_mqa_family *family,
                              const void *args, job *j)
{
    if (!fmlai_failed(c)) {
        c->status = fmlai_args_read(&j->args, family->args_size, args, "args", c->error);
    }
    if (!fmlai_failed(c)) {
        memset(&j->problem, 0, sizeof j->problem);
        family->describe(c, context, &j->args, &j->problem);
    }
}

fmla_status fmlai_api_mqa_run(fmla_context *context, const fmlai_mqa_family *family, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmlai_workspace own;
    fmlai_call call;
    job j;
    read_and_describe(&c, context, family, args, &j);
    if (fmlai_failed(&c) || j.problem.num_tokens == 0) {
        return c.status;
    }
    memcpy(&own, (const char *)&j.args + family->workspace_at, sizeof own);
    c.status = fmlai_prepare_call(context, own, need_of(context, &j.problem), stream, &call);
    return fmlai_failed(&c) ? c.status : context->backend->mqa(context->state, &j.problem, &call);
}

fmla_status fmlai_api_mqa_size(fmla_context *context, const fmlai_mqa_family *family, const void *args, void *size)
{
    fmlai_checker c = fmlai_checker_for_size(context);
    job j;
    read_and_describe(&c, context, family, args, &j);
    return fmlai_answer_size(&c, fmlai_failed(&c) ? 0 : need_of(context, &j.problem), size);
}

fmla_status fmlai_answer_size(fmlai_checker *c, size_t need, void *size)
{
    if (size == NULL) {
        fmlai_invalid(c, "size: is NULL; allowed: where the answer goes");
    }
    if (!fmlai_failed(c)) {
        *(size_t *)size = need;
    }
    return c->status;
}
