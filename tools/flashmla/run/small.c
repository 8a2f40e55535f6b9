/* SPDX-License-Identifier: MIT */
/* small.c: merge, the weight permutations, index conversion, the fp8 cast and schedules on a case's tensors. */
#include "run/run.h"

#include <stdlib.h>
#include <string.h>

/* Rank, or a message that names the tensor. */
static int need_rank(const run_case *c, const char *name, const fmla_tensor *tensor, int32_t rank)
{
    if (tensor->rank == rank) {
        return CLI_OK;
    }
    return cli_error("tensor '%s%s' has rank %d; %s takes rank %d", c->prefix, name, (int)tensor->rank,
                     c->operation->name, (int)rank);
}

/* Element i of the first dimension as a tensor of its own. */
static fmla_tensor slice(const fmla_tensor *stack, int64_t i)
{
    size_t step = (size_t)stack->stride[0] * fmla_dtype_size((fmla_dtype)stack->dtype);

    return fmla_tensor_nd((const char *)stack->data + (size_t)i * step, (fmla_dtype)stack->dtype, stack->rank - 1,
                          stack->shape + 1);
}

int run_merge(run_case *c)
{
    static const char *const empty_names[] = {"neg", "pos", NULL};
    fmla_merge_args a = FMLA_MERGE_ARGS_INIT;
    fmla_tensor outs;
    fmla_tensor lses;
    int32_t dtype = 0;

    if (run_input(c, "outs", true, &outs) != CLI_OK || need_rank(c, "outs", &outs, 4) != CLI_OK ||
        run_input(c, "lses", true, &lses) != CLI_OK || need_rank(c, "lses", &lses, 3) != CLI_OK ||
        run_input(c, "attn_sink", false, &a.attn_sink) != CLI_OK ||
        run_choice(c, "empty_lse", empty_names, &a.empty_lse) != CLI_OK) {
        return CLI_ERROR;
    }
    dtype = outs.dtype;
    if (lses.shape[0] != outs.shape[0] || outs.shape[0] < 1 || outs.shape[0] > 4096) {
        return cli_error("merge takes 1..4096 states, as many in outs (%lld) as in lses (%lld)",
                         (long long)outs.shape[0], (long long)lses.shape[0]);
    }
    if (run_dtype(c, "out_dtype", &dtype) != CLI_OK ||
        run_output_new(c, "out", dtype, 3, outs.shape + 1, &a.out) != CLI_OK ||
        run_output_new(c, "lse", lses.dtype, 2, outs.shape + 1, &a.lse) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    a.count = (int32_t)outs.shape[0];
    fmla_tensor *states = calloc(2 * (size_t)a.count, sizeof *states);
    if (states == NULL) {
        return cli_error("not enough memory");
    }
    for (int64_t i = 0; i < a.count; i++) {
        states[i] = slice(&outs, i);
        states[a.count + i] = slice(&lses, i);
    }
    a.outs = states;
    a.lses = states + a.count;
    int result = run_called(c, fmla_merge(c->context, &a, NULL));
    free(states);
    return result;
}

int run_permute_q_b(run_case *c)
{
    fmla_permute_q_b_args a = FMLA_PERMUTE_Q_B_ARGS_INIT;
    int64_t h_q = 0;
    int64_t d_q = 512;

    if (run_input(c, "weight", true, &a.weight) != CLI_OK || need_rank(c, "weight", &a.weight, 2) != CLI_OK ||
        run_input_columns(c, "scale", &a.scale) != CLI_OK || need_rank(c, "scale", &a.scale, 2) != CLI_OK ||
        run_integer(c, "d_q", 1, INT32_MAX, &d_q) != CLI_OK) {
        return CLI_ERROR;
    }
    h_q = a.weight.shape[0] / d_q;
    if (run_integer(c, "h_q", 1, INT32_MAX, &h_q) != CLI_OK ||
        run_output_new(c, "out_weight", a.weight.dtype, 2, a.weight.shape, &a.out_weight) != CLI_OK ||
        run_output_columns(c, "out_scale", 2, a.scale.shape, &a.out_scale) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    a.h_q = (int32_t)h_q;
    a.d_q = (int32_t)d_q;
    return run_called(c, fmla_permute_q_b(c->context, &a, NULL));
}

int run_permute_wv(run_case *c)
{
    fmla_permute_wv_args a = FMLA_PERMUTE_WV_ARGS_INIT;
    int64_t group = 0;
    int64_t d_o = 512;

    if (run_input(c, "weight", true, &a.weight) != CLI_OK || need_rank(c, "weight", &a.weight, 3) != CLI_OK ||
        run_input_columns(c, "scale", &a.scale) != CLI_OK || need_rank(c, "scale", &a.scale, 3) != CLI_OK ||
        run_integer(c, "d_o", 1, INT32_MAX, &d_o) != CLI_OK) {
        return CLI_ERROR;
    }
    group = a.weight.shape[2] / d_o;
    if (run_integer(c, "wv_group_size", 1, INT32_MAX, &group) != CLI_OK ||
        run_output_new(c, "out_weight", a.weight.dtype, 3, a.weight.shape, &a.out_weight) != CLI_OK ||
        run_output_columns(c, "out_scale", 3, a.scale.shape, &a.out_scale) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    a.wv_group_size = (int32_t)group;
    a.d_o = (int32_t)d_o;
    return run_called(c, fmla_permute_wv(c->context, &a, NULL));
}

int run_indices_convert(run_case *c)
{
    fmla_indices_convert_args a = FMLA_INDICES_CONVERT_ARGS_INIT;

    if (!run_has(c, "page_size")) {
        return cli_error("indices_convert needs the setting 'page_size'");
    }
    if (run_input(c, "positions", true, &a.positions) != CLI_OK ||
        run_input(c, "block_table", true, &a.block_table) != CLI_OK ||
        run_integer(c, "page_size", 1, INT32_MAX, &a.page_size) != CLI_OK ||
        run_output_new(c, "indices", FMLA_I32, a.positions.rank, a.positions.shape, &a.indices) != CLI_OK ||
        run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_indices_convert(c->context, &a, NULL));
}

int run_fp8_cast(run_case *c)
{
    fmla_fp8_cast_args a = FMLA_FP8_CAST_ARGS_INIT;
    int64_t group = 128;

    if (run_input(c, "src", true, &a.src) != CLI_OK || need_rank(c, "src", &a.src, 2) != CLI_OK ||
        run_integer(c, "group", 1, 4096, &group) != CLI_OK) {
        return CLI_ERROR;
    }
    int64_t scale[2] = {a.src.shape[0], a.src.shape[1] / group / 4};
    if (run_output_new(c, "codes", FMLA_F8_E4M3, 2, a.src.shape, &a.codes) != CLI_OK ||
        run_output_columns(c, "scale", 2, scale, &a.scale) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    a.group = (int32_t)group;
    return run_called(c, fmla_fp8_cast(c->context, &a, NULL));
}

int run_schedule(run_case *c)
{
    static const char *const form_names[] = {"2025-02", "2025-09", "2026-01", NULL};
    static const fmla_schedule_form forms[] = {FMLA_SCHEDULE_2025_02, FMLA_SCHEDULE_2025_09, FMLA_SCHEDULE_2026_01};
    fmla_schedule_args a = FMLA_SCHEDULE_ARGS_INIT;
    int64_t overhead = 5;
    int64_t parts = 8;
    int32_t form = 2;

    a.topk = -1;
    if (run_input(c, "cache_seqlens", false, &a.cache_seqlens) != CLI_OK ||
        run_input(c, "topk_length", false, &a.topk_length) != CLI_OK ||
        run_input(c, "extra_topk_length", false, &a.extra_topk_length) != CLI_OK ||
        run_integer(c, "topk", -1, INT32_MAX, &a.topk) != CLI_OK ||
        run_integer(c, "extra_topk", 0, INT32_MAX, &a.extra_topk) != CLI_OK ||
        run_integer(c, "batch", 0, INT32_MAX - 1, &a.batch) != CLI_OK ||
        run_integer(c, "parts", 1, 1 << 20, &parts) != CLI_OK ||
        run_integer(c, "overhead_blocks", 0, 4096, &overhead) != CLI_OK ||
        run_choice(c, "form", form_names, &form) != CLI_OK) {
        return CLI_ERROR;
    }
    int64_t batch = a.cache_seqlens.rank == 1 ? a.cache_seqlens.shape[0]
                    : a.topk_length.rank == 1 ? a.topk_length.shape[0]
                                              : a.batch;
    int64_t metadata[2] = {parts, 8};
    int64_t splits[1] = {batch + 1};
    a.form = forms[form];
    a.overhead_blocks = (int32_t)overhead;
    if (run_output_new(c, "metadata", FMLA_I32, 2, metadata, &a.metadata) != CLI_OK ||
        run_output_new(c, "num_splits", FMLA_I32, 1, splits, &a.num_splits) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_schedule(c->context, &a, NULL));
}
