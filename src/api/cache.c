/* SPDX-License-Identifier: MIT */
/* cache.c: what moves tokens in and out of caches, and the casts beside it. */
#include <string.h>

#include "describe.h"
#include "read.h"

static void check_offered(fmlai_checker *c, const fmla_context *context, fmla_operation operation, int32_t dtype,
                          const fmlai_pool *pool, const fmlai_pool *second, int32_t heads)
{
    if (!fmlai_failed(c)) {
        const fmla_support_query query = {
            .struct_size = sizeof query,
            .operation = (int32_t)operation,
            .kv_format = pool == NULL ? FMLA_KV_NONE : pool->format.format,
            .extra_format = second == NULL ? FMLA_KV_NONE : second->format.format,
            .q_dtype = dtype,
            .h_kv = heads,
            .d_qk = pool == NULL ? 0 : pool->format.d_qk,
        };
        c->status = fmlai_context_supports(context, &query, c->error);
    }
}

/* [n, d_qk] for one head, or [n, h_kv, d_qk]; the pool takes its width from it. */
static void describe_transcode(fmlai_checker *c, const char *rows_name, const fmla_tensor *rows, uint32_t flags,
                               const char *pool_name, const fmla_kv_cache *cache, const fmla_tensor *slots,
                               fmlai_transcode *p)
{
    const bool flat = rows->rank == 2;
    memset(p, 0, sizeof *p);
    FMLAI_EXPECT(c, rows, .name = rows_name, .dtypes = FMLAI_FLOATS, .flags = FMLAI_LAST | flags,
                 .letters = flat ? "n, d_qk" : "n, h_kv, d_qk", .rank = flat ? 2 : 3,
                 .shape = {FMLAI_ANY, FMLAI_ANY, FMLAI_ANY});
    if (fmlai_failed(c)) {
        return;
    }
    const int64_t width = rows->shape[flat ? 1 : 2];
    fmlai_check_width(c, "d_qk", width);
    fmlai_describe_pool(c, pool_name, cache, width, &p->pool, &p->heads);
    if (!fmlai_failed(c) && p->heads != (flat ? 1 : rows->shape[1])) {
        fmlai_invalid(c, "%s: has %lld heads; allowed: %d, %s's num_heads", rows_name,
                      (long long)(flat ? 1 : rows->shape[1]), (int)p->heads, pool_name);
    }
    p->count = rows->shape[0];
    p->rows = fmlai_packed_of(c, rows);
    p->rows.stride[1] = flat ? 0 : rows->stride[1];
    p->slots = fmlai_describe_slots(c, "slots", slots, p->count);
    if (!fmlai_failed(c) && p->slots.data == NULL && p->count > fmlai_pool_tokens(&p->pool)) {
        fmlai_invalid(c, "%s: %lld tokens; allowed without slots: at most %lld, those of %s", rows_name,
                      (long long)p->count, (long long)fmlai_pool_tokens(&p->pool), pool_name);
    }
}

static fmla_status run_quantize(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_quantize_args a;
    fmlai_transcode p;
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    fmlai_check_zero(&c, "reserved0", a.reserved0);
    fmlai_check_range(&c, "quantizer", a.quantizer, FMLA_QUANTIZER_DEFAULT, FMLA_QUANTIZER_V32_2025);
    describe_transcode(&c, "src", &a.src, 0, "dst", &a.dst, &a.slots, &p);
    if (a.quantizer == FMLA_QUANTIZER_V32_2025 && a.dst.format != FMLA_KV_V32) {
        fmlai_invalid(&c, "quantizer: 1 (V32_2025); allowed with format %d: 0", (int)a.dst.format);
    }
    check_offered(&c, context, FMLA_OP_QUANTIZE, a.src.dtype, &p.pool, NULL, p.heads);
    if (fmlai_failed(&c)) {
        return c.status;
    }
    fmlai_check_slots(&c, "slots", &p.slots, p.count, fmlai_pool_tokens(&p.pool));
    if (fmlai_failed(&c) || p.count == 0) {
        return c.status;
    }
    p.quantizer = (fmla_quantizer)a.quantizer;
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->quantize(context->state, &p, &call);
}

static fmla_status run_dequantize(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_dequantize_args a;
    fmlai_transcode p;
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    describe_transcode(&c, "dst", &a.dst, FMLAI_OUTPUT, "src", &a.src, &a.slots, &p);
    check_offered(&c, context, FMLA_OP_DEQUANTIZE, a.dst.dtype, &p.pool, NULL, p.heads);
    if (fmlai_failed(&c) || p.count == 0) {
        return c.status;
    }
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->dequantize(context->state, &p, &call);
}

/* A plain cache that does not say its width has the other's. */
static void describe_two_pools(fmlai_checker *c, const fmla_convert_args *a, fmlai_convert *p)
{
    int32_t dst_heads;
    const bool open = a->src.d_qk == 0 && (a->src.format == FMLA_KV_BF16 || a->src.format == FMLA_KV_F16);
    if (open) {
        fmlai_describe_pool(c, "dst", &a->dst, 0, &p->dst, &dst_heads);
        fmlai_describe_pool(c, "src", &a->src, p->dst.format.d_qk, &p->src, &p->heads);
    } else {
        fmlai_describe_pool(c, "src", &a->src, 0, &p->src, &p->heads);
        fmlai_describe_pool(c, "dst", &a->dst, p->src.format.d_qk, &p->dst, &dst_heads);
    }
    if (!fmlai_failed(c) && p->heads != dst_heads) {
        fmlai_invalid(c, "dst.num_heads: %d; allowed: %d, src's", (int)dst_heads, (int)p->heads);
    }
}

/* How many tokens: as many as there are slots, or as the smaller pool holds. */
static void describe_convert_slots(fmlai_checker *c, const fmla_convert_args *a, fmlai_convert *p)
{
    if (fmlai_failed(c)) {
        return;
    }
    const bool src = fmlai_present(&a->src_slots), dst = fmlai_present(&a->dst_slots);
    const int64_t src_tokens = fmlai_pool_tokens(&p->src), dst_tokens = fmlai_pool_tokens(&p->dst);
    p->src_slots = fmlai_describe_slots(c, "src_slots", &a->src_slots, FMLAI_ANY);
    p->dst_slots = fmlai_describe_slots(c, "dst_slots", &a->dst_slots, src ? a->src_slots.shape[0] : FMLAI_ANY);
    if (!src && !dst) {
        p->count = src_tokens < dst_tokens ? src_tokens : dst_tokens;
        return;
    }
    p->count = src ? a->src_slots.shape[0] : a->dst_slots.shape[0];
    if (!src && p->count > src_tokens) {
        fmlai_invalid(c, "dst_slots: %lld of them; allowed without src_slots: at most %lld, the tokens of src",
                      (long long)p->count, (long long)src_tokens);
    }
    if (!dst && p->count > dst_tokens) {
        fmlai_invalid(c, "src_slots: %lld of them; allowed without dst_slots: at most %lld, the tokens of dst",
                      (long long)p->count, (long long)dst_tokens);
    }
}

static fmla_status run_convert(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_convert_args a;
    fmlai_convert p = {0};
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    describe_two_pools(&c, &a, &p);
    describe_convert_slots(&c, &a, &p);
    check_offered(&c, context, FMLA_OP_CONVERT, 0, &p.src, &p.dst, p.heads);
    if (fmlai_failed(&c)) {
        return c.status;
    }
    fmlai_check_slots(&c, "src_slots", &p.src_slots, p.count, fmlai_pool_tokens(&p.src));
    fmlai_check_slots(&c, "dst_slots", &p.dst_slots, p.count, fmlai_pool_tokens(&p.dst));
    if (fmlai_failed(&c) || p.count == 0) {
        return c.status;
    }
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->convert(context->state, &p, &call);
}

static fmla_status run_indices_convert(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_indices_convert_args a;
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    const uint32_t i32 = FMLAI_BIT(FMLA_I32);
    fmlai_check_range(&c, "page_size", a.page_size, 1, INT32_MAX);
    FMLAI_EXPECT(&c, &a.positions, .name = "positions", .dtypes = i32, .flags = FMLAI_LAST, .letters = "b, s_q, topk",
                 .rank = 3, .shape = {FMLAI_ANY, FMLAI_ANY, FMLAI_ANY});
    FMLAI_EXPECT(&c, &a.block_table, .name = "block_table", .dtypes = i32, .flags = FMLAI_LAST,
                 .letters = "b, max_pages", .rank = 2, .shape = {a.positions.shape[0], FMLAI_ANY});
    FMLAI_EXPECT(&c, &a.indices, .name = "indices", .dtypes = i32, .flags = FMLAI_LAST | FMLAI_OUTPUT,
                 .letters = "b, s_q, topk", .rank = 3,
                 .shape = {a.positions.shape[0], a.positions.shape[1], a.positions.shape[2]});
    check_offered(&c, context, FMLA_OP_INDICES_CONVERT, 0, NULL, NULL, 0);
    if (fmlai_failed(&c)) {
        return c.status;
    }
    const fmlai_indices_convert p = {
        .batch = a.positions.shape[0],
        .s_q = a.positions.shape[1],
        .topk = a.positions.shape[2],
        .page_size = a.page_size,
        .max_pages = a.block_table.shape[1],
        .positions = a.positions.data,
        .position_stride = {a.positions.stride[0], a.positions.stride[1]},
        .block_table = a.block_table.data,
        .table_stride = a.block_table.stride[0],
        .indices = a.indices.data,
        .index_stride = {a.indices.stride[0], a.indices.stride[1]},
    };
    if (p.batch == 0 || p.s_q == 0 || p.topk == 0) {
        return FMLA_OK;
    }
    fmlai_check_page_positions(&c, &p);
    if (fmlai_failed(&c)) {
        return c.status;
    }
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->indices_convert(context->state, &p, &call);
}

static fmla_status run_fp8_cast(fmla_context *context, const void *args, void *stream)
{
    fmlai_checker c = fmlai_checker_for_run(context, stream);
    fmla_fp8_cast_args a;
    if (fmlai_failed(&c) || (c.status = fmlai_args_read(&a, sizeof a, args, "args", c.error)) != FMLA_OK) {
        return c.status;
    }
    fmlai_check_zero(&c, "reserved0", a.reserved0);
    if (a.group != 32 && a.group != 128) {
        fmlai_invalid(&c, "group: %d; allowed: 32, 128", (int)a.group);
    }
    FMLAI_EXPECT(&c, &a.src, .name = "src", .dtypes = FMLAI_FLOATS, .flags = FMLAI_LAST, .letters = "n, d", .rank = 2,
                 .shape = {FMLAI_ANY, FMLAI_ANY});
    if (!fmlai_failed(&c) && a.src.shape[1] % (4 * (int64_t)a.group) != 0) {
        fmlai_invalid(&c, "src: d is %lld; allowed: a multiple of 4 * group, %d", (long long)a.src.shape[1],
                      4 * (int)a.group);
    }
    FMLAI_EXPECT(&c, &a.codes, .name = "codes", .dtypes = FMLAI_CODES, .flags = FMLAI_LAST | FMLAI_OUTPUT,
                 .letters = "n, d", .rank = 2, .shape = {a.src.shape[0], a.src.shape[1]});
    const int64_t words = fmlai_failed(&c) ? 0 : a.src.shape[1] / a.group / 4;
    const int64_t scale_rows = fmlai_describe_scale_words(&c, "scale", &a.scale, 2, 1, a.src.shape[0], words, true);
    check_offered(&c, context, FMLA_OP_FP8_CAST, a.src.dtype, NULL, NULL, 0);
    if (fmlai_failed(&c) || a.src.shape[0] == 0 || a.src.shape[1] == 0) {
        return c.status;
    }
    const fmlai_fp8_cast p = {
        .rows = a.src.shape[0],
        .cols = a.src.shape[1],
        .group = a.group,
        .src = a.src.data,
        .dtype = (fmla_dtype)a.src.dtype,
        .src_stride = a.src.stride[0],
        .codes = a.codes.data,
        .code_stride = a.codes.stride[0],
        .scale = a.scale.data,
        .scale_rows = scale_rows,
    };
    const fmlai_call call = fmlai_plain_call(context, stream);
    return context->backend->fp8_cast(context->state, &p, &call);
}

fmla_status fmla_quantize(fmla_context *context, const fmla_quantize_args *args, void *stream)
{
    return fmlai_guarded(context, run_quantize, args, stream);
}

fmla_status fmla_dequantize(fmla_context *context, const fmla_dequantize_args *args, void *stream)
{
    return fmlai_guarded(context, run_dequantize, args, stream);
}

fmla_status fmla_convert(fmla_context *context, const fmla_convert_args *args, void *stream)
{
    return fmlai_guarded(context, run_convert, args, stream);
}

fmla_status fmla_indices_convert(fmla_context *context, const fmla_indices_convert_args *args, void *stream)
{
    return fmlai_guarded(context, run_indices_convert, args, stream);
}

fmla_status fmla_fp8_cast(fmla_context *context, const fmla_fp8_cast_args *args, void *stream)
{
    return fmlai_guarded(context, run_fp8_cast, args, stream);
}
