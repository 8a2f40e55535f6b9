/* SPDX-License-Identifier: MIT */
/* support_calls.c: see support_calls.h. */
#include <stdbool.h>
#include <stdlib.h>

#include "support_calls.h"

#define GUARD     64
#define UNTOUCHED 0xA5
#define INPUT     0x38

void *calls_input(calls *c, size_t size)
{
    void *memory = c->inputs + c->input_used;
    c->input_used += (size + 63) / 64 * 64;
    assert_true(c->input_used <= sizeof c->inputs);
    return memory;
}

void *calls_output(calls *c, size_t size)
{
    size_t at = c->output_used + GUARD;
    assert_true(c->output_count < CALLS_OUTPUTS);
    c->output[c->output_count].at = at;
    c->output[c->output_count++].size = size;
    c->output_used = at + (size + 63) / 64 * 64;
    assert_true(c->output_used + GUARD <= sizeof c->outputs);
    return c->outputs + at;
}

static size_t bytes_of(fmla_dtype dtype, int32_t rank, const int64_t *shape)
{
    size_t size = fmla_dtype_size(dtype);
    for (int32_t i = 0; i < rank; i++) {
        size *= (size_t)shape[i];
    }
    return size;
}

#define SHAPE(...)                                                                                                     \
    (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[])                                   \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }

static fmla_tensor in(calls *c, fmla_dtype dtype, int32_t rank, const int64_t *shape)
{
    return fmla_tensor_nd(calls_input(c, bytes_of(dtype, rank, shape)), dtype, rank, shape);
}

static fmla_tensor out(calls *c, fmla_dtype dtype, int32_t rank, const int64_t *shape)
{
    return fmla_tensor_nd(calls_output(c, bytes_of(dtype, rank, shape)), dtype, rank, shape);
}

/* Scale words [rows, words], columns `column` apart; [groups, rows, words] with groups > 0. */
static fmla_tensor words(void *data, int64_t groups, int64_t rows, int64_t count, int64_t column)
{
    fmla_tensor t =
        groups > 0 ? fmla_tensor_3d(data, FMLA_I32, groups, rows, count) : fmla_tensor_2d(data, FMLA_I32, rows, count);
    int64_t *stride = t.stride;
    if (groups > 0) {
        *stride++ = column * count;
    }
    stride[0] = 1;
    stride[1] = column;
    return t;
}

fmla_tensor calls_ints(calls *c, const int32_t *values, int64_t count)
{
    int32_t *data = calls_input(c, (size_t)count * sizeof *data);
    memcpy(data, values, (size_t)count * sizeof *data);
    return fmla_tensor_1d(data, FMLA_I32, count);
}

static fmla_tensor ints(calls *c, int32_t rank, const int64_t *shape, const int32_t *values)
{
    fmla_tensor t = in(c, FMLA_I32, rank, shape);
    memcpy(t.data, values, bytes_of(FMLA_I32, rank, shape));
    return t;
}

static fmla_kv_cache cache(calls *c, fmla_kv_format format, int64_t pages, int64_t page_size, int64_t token_bytes)
{
    fmla_kv_cache kv = {.format = (int32_t)format, .num_pages = pages, .page_size = page_size};
    kv.data = calls_input(c, (size_t)(pages * page_size * token_bytes));
    return kv;
}

static const int32_t some_slots[24] = {0, 3, 7, 2, -1, 5, 1, 1, 6, 4, 9999, 0, 2, 3, -7, 5, 6, 7, 0, 1, 2, 3, 4, 5};

static void make_decode(calls *c)
{
    fmla_decode_args *d = &c->dense, *s = &c->sparse;
    *d = (fmla_decode_args)FMLA_DECODE_ARGS_INIT;
    d->q = in(c, FMLA_BF16, SHAPE(2, 2, 4, 576));
    d->kv = cache(c, FMLA_KV_BF16, 6, 4, 1152);
    d->block_table = ints(c, SHAPE(2, 3), (const int32_t[]){5, 0, 1234567, 1, 3, 2});
    d->cache_seqlens = calls_ints(c, (const int32_t[]){5, 12}, 2);
    d->attn_sink = in(c, FMLA_F32, SHAPE(4));
    d->out = out(c, FMLA_BF16, SHAPE(2, 2, 4, 512));
    d->lse = out(c, FMLA_F32, SHAPE(2, 4, 2));
    d->max_logits = out(c, FMLA_F32, SHAPE(2, 4, 2));

    *s = (fmla_decode_args)FMLA_DECODE_ARGS_INIT;
    s->q = in(c, FMLA_BF16, SHAPE(2, 2, 4, 512));
    s->kv = cache(c, FMLA_KV_V41, 2, 4, 528);
    s->extra_kv = cache(c, FMLA_KV_V41_FP4, 4, 2, 288);
    s->indices = ints(c, SHAPE(2, 2, 6), some_slots);
    s->extra_indices = ints(c, SHAPE(2, 2, 4), some_slots);
    s->topk_length = calls_ints(c, (const int32_t[]){6, 3}, 2);
    s->extra_topk_length = calls_ints(c, (const int32_t[]){0, 4}, 2);
    s->attn_sink = d->attn_sink;
    s->out = out(c, FMLA_BF16, SHAPE(2, 2, 4, 512));
    s->lse = out(c, FMLA_F32, SHAPE(2, 4, 2));
    s->max_logits = out(c, FMLA_F32, SHAPE(2, 4, 2));
}

static void make_prefill(calls *c)
{
    fmla_prefill_args *a = &c->prefill;
    *a = (fmla_prefill_args)FMLA_PREFILL_ARGS_INIT;
    a->q = in(c, FMLA_BF16, SHAPE(3, 4, 64));
    a->kv = in(c, FMLA_BF16, SHAPE(7, 1, 64));
    a->indices = ints(c, SHAPE(3, 1, 5), some_slots);
    a->topk_length = calls_ints(c, (const int32_t[]){5, 2, 0}, 3);
    a->attn_sink = in(c, FMLA_F32, SHAPE(4));
    a->out = out(c, FMLA_BF16, SHAPE(3, 4, 32));
    a->lse = out(c, FMLA_F32, SHAPE(3, 4));
    a->max_logits = out(c, FMLA_F32, SHAPE(3, 4));
}

static void make_fused_params(calls *c, fmla_fused_params *f)
{
    f->q_norm = 1;
    f->rms_norm_eps = 1e-4f;
    f->n_wv_group = 2;
    f->token_positions = calls_ints(c, (const int32_t[]){0, 9, 4}, 3);
    f->cos_sin_cache = in(c, FMLA_F32, SHAPE(10, 64));
    f->attn_sink = in(c, FMLA_F32, SHAPE(8));
    f->out_fp8 = out(c, FMLA_U8, SHAPE(3, 2, 4 * 512));
    f->out_scale = words(calls_output(c, 2 * 16 * 4 * 4), 2, 3, 16, 4);
    /* Groups are the middle dimension here: [s_q, n_wv_group, words]. */
    f->out_scale.shape[0] = 3;
    f->out_scale.shape[1] = 2;
    f->out_scale.stride[0] = 1;
    f->out_scale.stride[1] = 4 * 16;
    f->lse = out(c, FMLA_F32, SHAPE(3, 8));
    f->max_logits = out(c, FMLA_F32, SHAPE(3, 8));
}

static void make_fused(calls *c)
{
    fmla_fused_prefill_args *p = &c->fused_prefill;
    fmla_fused_decode_args *d = &c->fused_decode;
    *p = (fmla_fused_prefill_args)FMLA_FUSED_PREFILL_ARGS_INIT;
    p->q = in(c, FMLA_BF16, SHAPE(3, 8, 512));
    p->kv = in(c, FMLA_BF16, SHAPE(5, 1, 512));
    p->indices = ints(c, SHAPE(3, 4), some_slots);
    p->topk_length = calls_ints(c, (const int32_t[]){4, 0, 2}, 3);
    make_fused_params(c, &p->fused);

    *d = (fmla_fused_decode_args)FMLA_FUSED_DECODE_ARGS_INIT;
    d->q = p->q;
    d->kv = cache(c, FMLA_KV_V4, 2, 4, 584);
    d->indices = p->indices;
    d->topk_length = p->topk_length;
    make_fused_params(c, &d->fused);
}

static void make_mha(calls *c)
{
    fmla_mha_forward_args *f = &c->forward;
    fmla_mha_backward_args *b = &c->backward;
    *f = (fmla_mha_forward_args)FMLA_MHA_FORWARD_ARGS_INIT;
    f->causal = 1;
    f->q = in(c, FMLA_BF16, SHAPE(5, 4, 24));
    f->k = in(c, FMLA_BF16, SHAPE(7, 2, 24));
    f->v = in(c, FMLA_BF16, SHAPE(7, 2, 16));
    f->cu_seqlens_q = calls_ints(c, (const int32_t[]){0, 2, 5}, 3);
    f->cu_seqlens_kv = calls_ints(c, (const int32_t[]){0, 4, 7}, 3);
    f->max_seqlen_q = 3;
    f->max_seqlen_kv = 4;
    f->out = out(c, FMLA_BF16, SHAPE(5, 4, 16));
    f->lse = out(c, FMLA_F32, SHAPE(5, 4));

    *b = (fmla_mha_backward_args)FMLA_MHA_BACKWARD_ARGS_INIT;
    b->causal = 1;
    b->q = f->q;
    b->k = f->k;
    b->v = f->v;
    b->cu_seqlens_q = f->cu_seqlens_q;
    b->cu_seqlens_kv = f->cu_seqlens_kv;
    b->out = in(c, FMLA_BF16, SHAPE(5, 4, 16));
    b->lse = in(c, FMLA_F32, SHAPE(5, 4));
    b->dout = in(c, FMLA_BF16, SHAPE(5, 4, 16));
    b->dq = out(c, FMLA_BF16, SHAPE(5, 4, 24));
    b->dk = out(c, FMLA_BF16, SHAPE(7, 2, 24));
    b->dv = out(c, FMLA_BF16, SHAPE(7, 2, 16));
}

static void make_caches(calls *c)
{
    static const int64_t slots[3] = {6, -1, 2};
    fmla_tensor slot_tensor = in(c, FMLA_I64, SHAPE(3));
    memcpy(slot_tensor.data, slots, sizeof slots);

    c->quantize = (fmla_quantize_args)FMLA_QUANTIZE_ARGS_INIT;
    c->quantize.src = in(c, FMLA_BF16, SHAPE(3, 576));
    c->quantize.slots = slot_tensor;
    c->quantize.dst =
        (fmla_kv_cache){.data = calls_output(c, 8 * 656), .format = FMLA_KV_V32, .num_pages = 2, .page_size = 4};

    c->dequantize = (fmla_dequantize_args)FMLA_DEQUANTIZE_ARGS_INIT;
    c->dequantize.src = cache(c, FMLA_KV_V32, 2, 4, 656);
    c->dequantize.slots = slot_tensor;
    c->dequantize.dst = out(c, FMLA_F32, SHAPE(3, 576));

    c->convert = (fmla_convert_args)FMLA_CONVERT_ARGS_INIT;
    c->convert.src = cache(c, FMLA_KV_V41, 2, 4, 528);
    c->convert.dst =
        (fmla_kv_cache){.data = calls_output(c, 8 * 528), .format = FMLA_KV_V41_PAGE, .num_pages = 4, .page_size = 2};
    c->convert.src_slots = slot_tensor;
    c->convert.dst_slots = calls_ints(c, (const int32_t[]){1, 0, 7}, 3);
}

static void make_small(calls *c)
{
    c->indices_convert = (fmla_indices_convert_args)FMLA_INDICES_CONVERT_ARGS_INIT;
    c->indices_convert.page_size = 4;
    c->indices_convert.positions = ints(c, SHAPE(2, 2, 3), (const int32_t[]){0, 7, -1, 3, 4, 5, 6, 2, 1, -5, 0, 7});
    c->indices_convert.block_table = ints(c, SHAPE(2, 2), (const int32_t[]){5, 1, 0, 9});
    c->indices_convert.indices = out(c, FMLA_I32, SHAPE(2, 2, 3));

    c->fp8_cast = (fmla_fp8_cast_args)FMLA_FP8_CAST_ARGS_INIT;
    c->fp8_cast.src = in(c, FMLA_BF16, SHAPE(3, 256));
    c->fp8_cast.codes = out(c, FMLA_F8_E4M3, SHAPE(3, 256));
    c->fp8_cast.scale = words(calls_output(c, 2 * 4 * 4), 0, 3, 2, 4);
    c->fp8_cast.group = 32;

    for (int32_t i = 0; i < 2; i++) {
        c->merge_outs[i] = in(c, FMLA_F32, SHAPE(3, 2, 8));
        c->merge_lses[i] = in(c, FMLA_F32, SHAPE(3, 2));
    }
    c->merge = (fmla_merge_args)FMLA_MERGE_ARGS_INIT;
    c->merge.outs = c->merge_outs;
    c->merge.lses = c->merge_lses;
    c->merge.count = 2;
    c->merge.attn_sink = in(c, FMLA_F32, SHAPE(2));
    c->merge.out = out(c, FMLA_F32, SHAPE(3, 2, 8));
    c->merge.lse = out(c, FMLA_F32, SHAPE(3, 2));

    c->permute_q_b = (fmla_permute_q_b_args)FMLA_PERMUTE_Q_B_ARGS_INIT;
    c->permute_q_b.h_q = 2;
    c->permute_q_b.d_q = 32;
    c->permute_q_b.weight = in(c, FMLA_U8, SHAPE(64, 256));
    c->permute_q_b.scale = words(calls_input(c, 2 * 64 * 4), 0, 64, 2, 64);
    c->permute_q_b.out_weight = out(c, FMLA_U8, SHAPE(64, 256));
    c->permute_q_b.out_scale = words(calls_output(c, 2 * 64 * 4), 0, 64, 2, 64);

    c->permute_wv = (fmla_permute_wv_args)FMLA_PERMUTE_WV_ARGS_INIT;
    c->permute_wv.wv_group_size = 4;
    c->permute_wv.d_o = 64;
    c->permute_wv.weight = in(c, FMLA_U8, SHAPE(2, 3, 256));
    c->permute_wv.scale = words(calls_input(c, 2 * 2 * 4 * 4), 2, 3, 2, 4);
    c->permute_wv.out_weight = out(c, FMLA_U8, SHAPE(2, 3, 256));
    c->permute_wv.out_scale = words(calls_output(c, 2 * 2 * 4 * 4), 2, 3, 2, 4);

    c->schedule = (fmla_schedule_args)FMLA_SCHEDULE_ARGS_INIT;
    c->schedule.cache_seqlens = calls_ints(c, (const int32_t[]){130, 64}, 2);
    c->schedule.topk = -1;
    c->schedule.form = FMLA_SCHEDULE_2026_01;
    c->schedule.overhead_blocks = 5;
    c->schedule.metadata = out(c, FMLA_I32, SHAPE(4, 8));
    c->schedule.num_splits = out(c, FMLA_I32, SHAPE(3));
}

void calls_reset(calls *c)
{
    memset(c->inputs, INPUT, sizeof c->inputs);
    memset(c->outputs, UNTOUCHED, sizeof c->outputs);
    c->input_used = c->output_used = 0;
    c->output_count = 0;
    make_decode(c);
    make_prefill(c);
    make_fused(c);
    make_mha(c);
    make_caches(c);
    make_small(c);
}

fmla_status calls_run(calls *c, fmla_operation operation)
{
    switch (operation) {
    case FMLA_OP_DENSE_DECODE:
        return fmla_decode(c->context, &c->dense, NULL);
    case FMLA_OP_SPARSE_DECODE:
        return fmla_decode(c->context, &c->sparse, NULL);
    case FMLA_OP_SPARSE_PREFILL:
        return fmla_prefill(c->context, &c->prefill, NULL);
    case FMLA_OP_FUSED_PREFILL:
        return fmla_fused_prefill(c->context, &c->fused_prefill, NULL);
    case FMLA_OP_FUSED_DECODE:
        return fmla_fused_decode(c->context, &c->fused_decode, NULL);
    case FMLA_OP_MHA_FORWARD:
        return fmla_mha_forward(c->context, &c->forward, NULL);
    case FMLA_OP_MHA_BACKWARD:
        return fmla_mha_backward(c->context, &c->backward, NULL);
    case FMLA_OP_QUANTIZE:
        return fmla_quantize(c->context, &c->quantize, NULL);
    case FMLA_OP_DEQUANTIZE:
        return fmla_dequantize(c->context, &c->dequantize, NULL);
    case FMLA_OP_CONVERT:
        return fmla_convert(c->context, &c->convert, NULL);
    case FMLA_OP_MERGE:
        return fmla_merge(c->context, &c->merge, NULL);
    case FMLA_OP_PERMUTE_Q_B:
        return fmla_permute_q_b(c->context, &c->permute_q_b, NULL);
    case FMLA_OP_PERMUTE_WV:
        return fmla_permute_wv(c->context, &c->permute_wv, NULL);
    case FMLA_OP_INDICES_CONVERT:
        return fmla_indices_convert(c->context, &c->indices_convert, NULL);
    case FMLA_OP_FP8_CAST:
        return fmla_fp8_cast(c->context, &c->fp8_cast, NULL);
    case FMLA_OP_SCHEDULE:
        return fmla_schedule(c->context, &c->schedule, NULL);
    case FMLA_OP_COUNT:
        break;
    }
    return FMLA_ERROR_UNSUPPORTED;
}

fmla_status calls_measure(calls *c, fmla_operation operation, size_t *size)
{
    *size = 0;
    switch (operation) {
    case FMLA_OP_DENSE_DECODE:
        return fmla_decode_workspace_size(c->context, &c->dense, size);
    case FMLA_OP_SPARSE_DECODE:
        return fmla_decode_workspace_size(c->context, &c->sparse, size);
    case FMLA_OP_SPARSE_PREFILL:
        return fmla_prefill_workspace_size(c->context, &c->prefill, size);
    case FMLA_OP_FUSED_PREFILL:
        return fmla_fused_prefill_workspace_size(c->context, &c->fused_prefill, size);
    case FMLA_OP_FUSED_DECODE:
        return fmla_fused_decode_workspace_size(c->context, &c->fused_decode, size);
    case FMLA_OP_MHA_FORWARD:
        return fmla_mha_forward_workspace_size(c->context, &c->forward, size);
    case FMLA_OP_MHA_BACKWARD:
        return fmla_mha_backward_workspace_size(c->context, &c->backward, size);
    default:
        return FMLA_OK;
    }
}

bool calls_outputs_untouched(const calls *c)
{
    for (size_t i = 0; i < sizeof c->outputs; i++) {
        if (c->outputs[i] != UNTOUCHED) {
            return false;
        }
    }
    return true;
}

bool calls_guards_intact(const calls *c)
{
    size_t at = 0;
    for (int32_t o = 0; o <= c->output_count; o++) {
        size_t end = o < c->output_count ? c->output[o].at : sizeof c->outputs;
        for (; at < end; at++) {
            if (c->outputs[at] != UNTOUCHED) {
                print_error("byte %zu before output %d was written\n", at, (int)o);
                return false;
            }
        }
        at = o < c->output_count ? c->output[o].at + c->output[o].size : at;
    }
    return true;
}

fmla_context *make_context(fmla_device device, int32_t threads)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *context = NULL;
    config.device = (int32_t)device;
    config.threads = threads;
    if (fmla_context_create(&config, &context) != FMLA_OK) {
        fail_msg("no context: %s", fmla_last_create_error());
    }
    return context;
}

calls *calls_new(fmla_context *context)
{
    calls *c = aligned_alloc(64, (sizeof *c + 63) / 64 * 64);
    assert_non_null(c);
    memset(c, 0, sizeof *c);
    c->context = context;
    return c;
}

int calls_tear_down(void **state)
{
    calls *c = *state;
    fmla_context_destroy(c->context);
    free(c);
    return 0;
}
