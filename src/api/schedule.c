/* SPDX-License-Identifier: MIT */
/* schedule.c: fmla_schedule. */
#include "describe.h"
#include "read.h"

static const int32_t *optional_lengths(fmlai_checker *c, const char *name, const fmla_tensor *t, int64_t batch)
{
    FMLAI_EXPECT(c, t, .name = name, .dtypes = FMLAI_BIT(FMLA_I32), .flags = FMLAI_OPTIONAL | FMLAI_LAST,
                 .letters = "b", .rank = 1, .shape = {batch});
    return fmlai_failed(c) ? NULL : fmlai_data(c, t);
}

static void describe_dense(fmlai_checker *c, const fmla_schedule_args *a, fmlai_schedule *p)
{
    static const char *const why = "with cache_seqlens";
    p->batch = a->cache_seqlens.shape[0];
    p->seqlens = optional_lengths(c, "cache_seqlens", &a->cache_seqlens, FMLAI_ANY);
    p->topk = -1;
    if (a->batch != 0 && a->batch != p->batch) {
        fmlai_invalid(c, "batch: %lld; allowed with cache_seqlens: 0 or %lld", (long long)a->batch,
                      (long long)p->batch);
    }
    if (a->topk > 0) {
        fmlai_invalid(c, "topk: %lld; allowed with cache_seqlens: -1 or 0", (long long)a->topk);
    }
    fmlai_check_zero(c, "extra_topk", a->extra_topk);
    fmlai_check_absent(c, &a->topk_length, "topk_length", why);
    fmlai_check_absent(c, &a->extra_topk_length, "extra_topk_length", why);
    fmlai_check_not_negative(c, "cache_seqlens", p->seqlens, p->batch);
}

static void describe_sparse(fmlai_checker *c, const fmla_schedule_args *a, fmlai_schedule *p)
{
    fmlai_check_range(c, "batch", a->batch, 0, INT32_MAX - 1);
    fmlai_check_range(c, "topk", a->topk, 0, INT32_MAX);
    fmlai_check_range(c, "extra_topk", a->extra_topk, 0, INT32_MAX);
    p->batch = a->batch;
    p->topk = a->topk;
    p->extra_topk = a->extra_topk;
    p->topk_length = optional_lengths(c, "topk_length", &a->topk_length, a->batch);
    if (a->extra_topk == 0) {
        fmlai_check_absent(c, &a->extra_topk_length, "extra_topk_length", "with extra_topk 0");
    }
    p->extra_topk_length = optional_lengths(c, "extra_topk_length", &a->extra_topk_length, a->batch);
}

static fmla_status run(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_schedule_args a;
    fmlai_schedule p = {0};
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    if (fmlai_present(&a.cache_seqlens) || a.cache_seqlens.data != NULL) {
        describe_dense(&c, &a, &p);
    } else {
        describe_sparse(&c, &a, &p);
    }
    if (a.form != FMLA_SCHEDULE_2025_02 && a.form != FMLA_SCHEDULE_2025_09 && a.form != FMLA_SCHEDULE_2026_01) {
        fmlai_invalid(&c, "form: %d; allowed: 1, 4, 5 (fmla_schedule_form)", (int)a.form);
    }
    fmlai_check_range(&c, "overhead_blocks", a.overhead_blocks, 0, INT16_MAX);
    FMLAI_EXPECT(&c, &a.metadata, .name = "metadata", .dtypes = FMLAI_BIT(FMLA_I32), .flags = FMLAI_LAST | FMLAI_OUTPUT,
                 .letters = "parts, 8", .rank = 2, .shape = {FMLAI_ANY, 8});
    const int64_t splits = fmlai_failed(&c) ? 0 : p.batch + 1;
    FMLAI_EXPECT(&c, &a.num_splits, .name = "num_splits", .dtypes = FMLAI_BIT(FMLA_I32),
                 .flags = FMLAI_LAST | FMLAI_OUTPUT, .letters = "b + 1", .rank = 1, .shape = {splits});
    if (!fmlai_failed(&c) && a.metadata.shape[0] < 1) {
        fmlai_invalid(&c, "metadata: 0 parts; allowed: at least 1");
    }
    if (!fmlai_failed(&c)) {
        const fmla_support_query query = {.struct_size = sizeof query, .operation = FMLA_OP_SCHEDULE};
        c.status = fmlai_context_supports(context, &query, c.error);
    }
    if (fmlai_failed(&c)) {
        return c.status;
    }
    p.form = (fmla_schedule_form)a.form;
    p.overhead_blocks = a.overhead_blocks;
    p.parts = a.metadata.shape[0];
    p.metadata = a.metadata.data;
    p.metadata_stride = a.metadata.stride[0];
    p.num_splits = a.num_splits.data;
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->schedule(context->state, &p, &call);
}

fmla_status fmla_schedule(fmla_context *context, const fmla_schedule_args *args, void *stream)
{
    return fmlai_guarded(context, run, args, stream);
}
