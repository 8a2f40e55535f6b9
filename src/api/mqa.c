/* SPDX-License-Identifier: MIT */
/* mqa.c: the common end of decode, prefill and the fused operations. */
#include "describe.h"

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

size_t fmlai_mqa_need(const fmla_context *context, const fmlai_mqa *p)
{
    const fmlai_backend *backend = context->backend;
    return p->num_tokens == 0 || backend->mqa_workspace == NULL ? 0 : backend->mqa_workspace(context->state, p);
}

fmla_status fmlai_mqa_run(fmla_context *context, const fmlai_mqa *p, void *workspace, size_t workspace_size,
                          void *stream)
{
    fmlai_call call;
    if (p->num_tokens == 0) {
        return FMLA_OK;
    }
    fmla_status status =
        fmlai_prepare_call(context, workspace, workspace_size, fmlai_mqa_need(context, p), stream, &call);
    return status != FMLA_OK ? status : context->backend->mqa(context->state, p, &call);
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
