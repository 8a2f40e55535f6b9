/* SPDX-License-Identifier: MIT */
/* small.c: tensors and bytes of the operations around attention that have no cache: weights, indices, tables. */
#include "bench/bench.h"

#include <string.h>

static void permute_q_b(memory *m, const test_case *c, fmla_permute_q_b_args *a)
{
    int64_t rows = c->h_q * c->d_qk, words = c->count / c->group / 4;
    *a = (fmla_permute_q_b_args)FMLA_PERMUTE_Q_B_ARGS_INIT;
    a->h_q = (int32_t)c->h_q;
    a->d_q = (int32_t)c->d_qk;
    a->weight = memory_tensor_4(m, FMLA_U8, 2, rows, c->count, 0, 0, 0, 0);
    a->scale = memory_scale_words(m, 2, 1, rows, words);
    a->out_weight = memory_tensor_4(m, FMLA_U8, 2, rows, c->count, 0, 0, 0, 0);
    a->out_scale = memory_scale_words(m, 2, 1, rows, words);
}

static void permute_wv(memory *m, const test_case *c, fmla_permute_wv_args *a)
{
    int64_t groups = c->h_q / c->group, width = c->group * c->d_v;
    *a = (fmla_permute_wv_args)FMLA_PERMUTE_WV_ARGS_INIT;
    a->wv_group_size = (int32_t)c->group;
    a->d_o = (int32_t)c->d_v;
    a->weight = memory_tensor_4(m, FMLA_U8, 3, groups, c->count, width, 0, 0, 0);
    a->scale = memory_scale_words(m, 3, groups, c->count, width / 128);
    a->out_weight = memory_tensor_4(m, FMLA_U8, 3, groups, c->count, width, 0, 0, 0);
    a->out_scale = memory_scale_words(m, 3, groups, c->count, width / 128);
}

/* Every position is inside its request; pages lie in a mixed order. */
static void indices_convert(memory *m, const test_case *c, fmla_indices_convert_args *a)
{
    int64_t pages = (c->s_kv + c->page - 1) / c->page, n = c->b * c->s_q * c->topk;
    *a = (fmla_indices_convert_args)FMLA_INDICES_CONVERT_ARGS_INIT;
    a->page_size = c->page;
    a->positions = memory_tensor_4(m, FMLA_I32, 3, c->b, c->s_q, c->topk, 0, 0, 0);
    a->indices = memory_tensor_4(m, FMLA_I32, 3, c->b, c->s_q, c->topk, 0, 0, 0);
    a->block_table = memory_tensor_4(m, FMLA_I32, 2, c->b, pages, 0, 0, 0, 0);
    for (int64_t i = 0; i < n; i++) {
        ((int32_t *)a->positions.data)[i] = (int32_t)(i * 7919 % c->s_kv);
    }
    for (int64_t i = 0; i < c->b * pages; i++) {
        ((int32_t *)a->block_table.data)[i] = (int32_t)(i * 31 % (c->b * pages));
    }
}

static void fp8_cast(memory *m, const test_case *c, fmla_fp8_cast_args *a)
{
    *a = (fmla_fp8_cast_args)FMLA_FP8_CAST_ARGS_INIT;
    a->src = memory_tensor_4(m, (fmla_dtype)c->dtype, 2, c->count, c->d_qk, 0, 0, 0, 0x3E);
    a->codes = memory_tensor_4(m, FMLA_U8, 2, c->count, c->d_qk, 0, 0, 0, 0);
    a->scale = memory_scale_words(m, 2, 1, c->count, c->d_qk / c->group / 4);
    a->group = (int32_t)c->group;
}

static void schedule(memory *m, const test_case *c, fmla_schedule_args *a)
{
    *a = (fmla_schedule_args)FMLA_SCHEDULE_ARGS_INIT;
    a->cache_seqlens = memory_tensor_4(m, FMLA_I32, 1, c->b, 0, 0, 0, 0, 0);
    a->batch = c->b;
    a->topk = -1;
    a->form = FMLA_SCHEDULE_2026_01;
    a->overhead_blocks = 5;
    a->metadata = memory_tensor_4(m, FMLA_I32, 2, c->count, 8, 0, 0, 0, 0);
    a->num_splits = memory_tensor_4(m, FMLA_I32, 1, c->b + 1, 0, 0, 0, 0, 0);
    for (int64_t i = 0; i < c->b; i++) {
        ((int32_t *)a->cache_seqlens.data)[i] = (int32_t)(c->s_kv / 2 + i * 7919 % c->s_kv);
    }
}

bool bench_small_problem(memory *m, const test_case *c, any_args *args)
{
    switch (c->op) {
    case FMLA_OP_PERMUTE_Q_B:
        permute_q_b(m, c, &args->permute_q_b);
        return true;
    case FMLA_OP_PERMUTE_WV:
        permute_wv(m, c, &args->permute_wv);
        return true;
    case FMLA_OP_INDICES_CONVERT:
        indices_convert(m, c, &args->indices_convert);
        return true;
    case FMLA_OP_FP8_CAST:
        fp8_cast(m, c, &args->fp8_cast);
        return true;
    case FMLA_OP_SCHEDULE:
        schedule(m, c, &args->schedule);
        return true;
    default:
        return false;
    }
}

double bench_bytes_of(const test_case *c)
{
    fmla_format_info a = cache_format(c->format, c->d_qk), b = cache_format(c->extra ? c->extra : c->format, c->d_qk);
    double n = (double)c->count, element = (double)fmla_dtype_size((fmla_dtype)c->dtype), h = (double)c->h_q;
    double d = (double)c->d_qk, d_v = (double)c->d_v, group = (double)c->group;
    switch (c->op) {
    case FMLA_OP_MERGE:
        return (double)(c->topk + 1) * n * h * (d_v * element + 4);
    case FMLA_OP_CONVERT:
        return n * (a.bytes_per_token + b.bytes_per_token);
    case FMLA_OP_PERMUTE_Q_B:
        return 2 * h * d * n * (1 + 1 / group);
    case FMLA_OP_PERMUTE_WV:
        return 2 * h * d_v * n * (1 + 1.0 / 32);
    case FMLA_OP_INDICES_CONVERT:
        return 8 * (double)c->b * (double)c->s_q * (double)c->topk;
    case FMLA_OP_FP8_CAST:
        return n * d * (element + 1 + 1 / group);
    case FMLA_OP_SCHEDULE:
        return 8 * (double)c->b + 32 * n;
    default:
        return n * (a.bytes_per_token + d * element);
    }
}
