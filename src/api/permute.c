/* SPDX-License-Identifier: MIT */
/* permute.c: fmla_permute_q_b and fmla_permute_wv. */
#include "describe.h"
#include "read.h"

static fmla_status carry_out(fmlai_checker *c, fmla_context *context, const fmlai_permute *p, void *stream)
{
    if (!fmlai_failed(c)) {
        const fmla_support_query query = {.struct_size = sizeof query, .operation = (int32_t)p->kind};
        c->status = fmlai_context_supports(context, &query, c->error);
    }
    if (fmlai_failed(c) || p->groups == 0 || p->rows == 0 || p->cols == 0) {
        return c->status;
    }
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->permute(context->state, p, &call);
}

static void describe_q_b(fmlai_checker *c, const fmla_permute_q_b_args *a, fmlai_permute *p)
{
    const int64_t rows = (int64_t)a->h_q * a->d_q;
    fmlai_check_range(c, "h_q", a->h_q, 1, INT32_MAX);
    if (a->d_q < 16 || a->d_q % 16 != 0) {
        fmlai_invalid(c, "d_q: %d; allowed: a multiple of 16", (int)a->d_q);
    }
    FMLAI_EXPECT(c, &a->weight, .name = "weight", .dtypes = FMLAI_CODES, .flags = FMLAI_LAST, .letters = "h_q * d_q, R",
                 .rank = 2, .shape = {rows, FMLAI_ANY});
    FMLAI_EXPECT(c, &a->scale, .name = "scale", .dtypes = FMLAI_BIT(FMLA_I32), .letters = "h_q * d_q, R / group / 4",
                 .rank = 2, .shape = {rows, FMLAI_ANY});
    if (fmlai_failed(c)) {
        return;
    }
    const int64_t cols = a->weight.shape[1], words = a->scale.shape[1];
    if (cols != 4 * 32 * words && cols != 4 * 128 * words) {
        fmlai_invalid(c, "scale: %lld words for rows of %lld codes; allowed: one per 4 groups of 32 or of 128",
                      (long long)words, (long long)cols);
    }
    const int64_t in_rows = fmlai_describe_scale_words(c, "scale", &a->scale, 2, 1, rows, words, false);
    FMLAI_EXPECT(c, &a->out_weight, .name = "out_weight", .dtypes = FMLAI_CODES, .flags = FMLAI_DENSE,
                 .letters = "h_q * d_q, R", .rank = 2, .shape = {rows, cols});
    const int64_t out_rows = fmlai_describe_scale_words(c, "out_scale", &a->out_scale, 2, 1, rows, words, true);
    *p = (fmlai_permute){
        .kind = FMLA_OP_PERMUTE_Q_B,
        .groups = 1,
        .rows = rows,
        .cols = cols,
        .words = words,
        .heads = a->h_q,
        .d = a->d_q,
        .weight = a->weight.data,
        .weight_stride = {0, a->weight.stride[0]},
        .scale = a->scale.data,
        .scale_stride = {0, 1, in_rows},
        .out_weight = a->out_weight.data,
        .out_scale = a->out_scale.data,
        .out_scale_stride = {0, 1, out_rows},
    };
}

static void describe_wv(fmlai_checker *c, const fmla_permute_wv_args *a, fmlai_permute *p)
{
    const int64_t cols = (int64_t)a->wv_group_size * a->d_o;
    fmlai_check_range(c, "wv_group_size", a->wv_group_size, 1, INT32_MAX);
    if (a->d_o < 32 || a->d_o % 32 != 0) {
        fmlai_invalid(c, "d_o: %d; allowed: a multiple of 32", (int)a->d_o);
    } else if (cols % 128 != 0) {
        fmlai_invalid(c, "d_o: %d; allowed: wv_group_size * d_o (%lld) a multiple of 128", (int)a->d_o,
                      (long long)cols);
    }
    FMLAI_EXPECT(c, &a->weight, .name = "weight", .dtypes = FMLAI_CODES, .flags = FMLAI_LAST,
                 .letters = "n_group, D_out, G * d_o", .rank = 3, .shape = {FMLAI_ANY, FMLAI_ANY, cols});
    if (fmlai_failed(c)) {
        return;
    }
    const int64_t groups = a->weight.shape[0], rows = a->weight.shape[1], words = cols / 128;
    const int64_t in_rows = fmlai_describe_scale_words(c, "scale", &a->scale, 3, groups, rows, words, false);
    FMLAI_EXPECT(c, &a->out_weight, .name = "out_weight", .dtypes = FMLAI_CODES, .flags = FMLAI_DENSE,
                 .letters = "n_group, D_out, G * d_o", .rank = 3, .shape = {groups, rows, cols});
    const int64_t out_rows = fmlai_describe_scale_words(c, "out_scale", &a->out_scale, 3, groups, rows, words, true);
    *p = (fmlai_permute){
        .kind = FMLA_OP_PERMUTE_WV,
        .groups = groups,
        .rows = rows,
        .cols = cols,
        .words = words,
        .heads = a->wv_group_size,
        .d = a->d_o,
        .weight = a->weight.data,
        .weight_stride = {a->weight.stride[0], a->weight.stride[1]},
        .scale = a->scale.data,
        .scale_stride = {a->scale.stride[0], 1, in_rows},
        .out_weight = a->out_weight.data,
        .out_scale = a->out_scale.data,
        .out_scale_stride = {a->out_scale.stride[0], 1, out_rows},
    };
}

static fmla_status run_q_b(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_permute_q_b_args a;
    fmlai_permute p = {.kind = FMLA_OP_PERMUTE_Q_B};
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    describe_q_b(&c, &a, &p);
    return carry_out(&c, context, &p, stream);
}

static fmla_status run_wv(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_permute_wv_args a;
    fmlai_permute p = {.kind = FMLA_OP_PERMUTE_WV};
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    describe_wv(&c, &a, &p);
    return carry_out(&c, context, &p, stream);
}

fmla_status fmla_permute_q_b(fmla_context *context, const fmla_permute_q_b_args *args, void *stream)
{
    return fmlai_guarded(context, run_q_b, args, stream);
}

fmla_status fmla_permute_wv(fmla_context *context, const fmla_permute_wv_args *args, void *stream)
{
    return fmlai_guarded(context, run_wv, args, stream);
}
