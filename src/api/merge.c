/* SPDX-License-Identifier: MIT */
/* merge.c: fmla_merge. */
#include <stdio.h>

#include "describe.h"
#include "read.h"

#define COUNT_MAX 4096

/* Host memory for `count` states, kept by the context. */
static fmla_status reserve_states(fmla_context *context, int32_t count)
{
    const fmlai_allocator *m = &context->allocator;
    const size_t size = (size_t)count * sizeof(fmlai_merge_state);
    if (count <= context->merge_capacity) {
        return FMLA_OK;
    }
    fmlai_merge_state *states = m->alloc(m->user, size);
    if (states == NULL) {
        return fmlai_fail(&context->error, FMLA_ERROR_OUT_OF_MEMORY, "no host memory for %d states (%zu bytes)",
                          (int)count, size);
    }
    if (context->merge_states != NULL) {
        m->release(m->user, context->merge_states);
    }
    context->merge_states = states;
    context->merge_capacity = count;
    return FMLA_OK;
}

static void describe_result(fmlai_checker *c, const fmla_merge_args *a, fmlai_merge *p)
{
    FMLAI_EXPECT(c, &a->out, .name = "out", .dtypes = fmlai_result_dtypes(c, FMLAI_FLOATS),
                 .flags = FMLAI_LAST | FMLAI_OUTPUT, .letters = "n, h, d", .rank = 3,
                 .shape = {FMLAI_ANY, FMLAI_ANY, FMLAI_ANY});
    if (fmlai_failed(c)) {
        return;
    }
    p->tokens = a->out.shape[0];
    p->heads = fmlai_check_width(c, "h", a->out.shape[1]);
    p->d = fmlai_check_width(c, "d", a->out.shape[2]);
    FMLAI_EXPECT(c, &a->lse, .name = "lse", .dtypes = fmlai_result_dtypes(c, FMLAI_BIT(FMLA_F32)),
                 .flags = FMLAI_OPTIONAL | FMLAI_OUTPUT, .letters = "n, h", .rank = 2, .shape = {p->tokens, p->heads});
    p->sink = fmlai_describe_sink(c, &a->attn_sink, p->heads);
    p->empty_lse = fmlai_check_empty_lse(c, a->empty_lse);
    p->result.out = fmlai_packed_of(c, &a->out);
    p->result.lse = fmlai_packed_of(c, &a->lse);
}

static void describe_state(fmlai_checker *c, const fmla_merge_args *a, const fmlai_merge *p, int32_t i,
                           fmlai_merge_state *state)
{
    char out_name[24], lse_name[24];
    snprintf(out_name, sizeof out_name, "outs[%d]", (int)i);
    snprintf(lse_name, sizeof lse_name, "lses[%d]", (int)i);
    FMLAI_EXPECT(c, &a->outs[i], .name = out_name, .dtypes = fmlai_result_dtypes(c, FMLAI_FLOATS), .flags = FMLAI_LAST,
                 .letters = "n, h, d", .rank = 3, .shape = {p->tokens, p->heads, p->d});
    FMLAI_EXPECT(c, &a->lses[i], .name = lse_name, .dtypes = fmlai_result_dtypes(c, FMLAI_BIT(FMLA_F32)),
                 .letters = "n, h", .rank = 2, .shape = {p->tokens, p->heads});
    if (!fmlai_failed(c)) {
        state->out = fmlai_packed_of(c, &a->outs[i]);
        state->lse = fmlai_packed_of(c, &a->lses[i]);
    }
}

static fmla_status run(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_merge_args a;
    fmlai_merge p = {0};
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    fmlai_check_range(&c, "count", a.count, 1, COUNT_MAX);
    if (a.outs == NULL || a.lses == NULL) {
        fmlai_invalid(&c, "%s: is NULL; allowed: an array of count tensors", a.outs == NULL ? "outs" : "lses");
    }
    describe_result(&c, &a, &p);
    if (!fmlai_failed(&c)) {
        c.status = reserve_states(context, a.count);
    }
    for (int32_t i = 0; i < a.count && !fmlai_failed(&c); i++) {
        describe_state(&c, &a, &p, i, &context->merge_states[i]);
    }
    p.count = a.count;
    p.states = context->merge_states;
    if (!fmlai_failed(&c)) {
        const fmla_support_query query = {.struct_size = sizeof query, .operation = FMLA_OP_MERGE};
        c.status = fmlai_context_supports(context, &query, c.error);
    }
    if (fmlai_failed(&c) || p.tokens == 0) {
        return c.status;
    }
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->merge(context->state, &p, &call);
}

fmla_status fmla_merge(fmla_context *context, const fmla_merge_args *args, void *stream)
{
    return fmlai_guarded(context, run, args, stream);
}
