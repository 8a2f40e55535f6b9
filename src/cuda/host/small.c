/* SPDX-License-Identifier: MIT */
/* small.c: launches of everything that is not attention: caches, merge, casts, permutations, index conversion,
 * schedules. */
#include <string.h>

#include "cuda_host.h"

extern void fmlak_quantize_sm80(void);
extern void fmlak_dequantize_sm80(void);
extern void fmlak_convert_sm80(void);
extern void fmlak_quantize_8_sm80(void);
extern void fmlak_dequantize_8_sm80(void);
extern void fmlak_convert_8_sm80(void);
extern void fmlak_merge_sm80(void);
extern void fmlak_indices_convert_sm80(void);
extern void fmlak_fp8_cast_sm80(void);
extern void fmlak_permute_q_b_sm80(void);
extern void fmlak_permute_wv_sm80(void);
extern void fmlak_schedule_sm80(void);

#define THREADS 256
#define WARPS   (THREADS / 32)

static fmlac_launch launch_of(void (*function)(void), const char *name, int64_t blocks)
{
    return (fmlac_launch){.kernel = (const void *)function, .name = name, .blocks = blocks, .threads = THREADS};
}

static void describe_transcode(fmlac_transcode *to, const fmlai_transcode *from)
{
    memset(to, 0, sizeof *to);
    to->count = from->count;
    to->heads = from->heads;
    to->historic = from->quantizer == FMLA_QUANTIZER_V32_2025;
    fmlac_describe_packed(&to->rows, &from->rows, from->pool.format.d_qk);
    fmlac_describe_pool(&to->pool, &from->pool);
    fmlac_describe_slots(&to->slots, &from->slots);
}

/* Whether the kernels that move eight elements at a time take a pool: parts on 16-byte borders, groups of whole lanes.
 */
static bool takes_eight(const fmlac_pool *p)
{
    if (p->layout == FMLAC_LAYOUT_PLAIN) {
        return p->aligned;
    }
    return p->aligned && p->scale != FMLAC_NONE && p->group_shift >= 4 && p->group_shift <= 8 &&
           p->quant_dims % p->group == 0 && p->code_bytes % 16 == 0 && p->rope_dims % 8 == 0 &&
           p->rope_offset % 16 == 0 && (p->scale != FMLAC_F32 || p->scale_offset % 4 == 0);
}

fmla_status fmlac_quantize(void *state, const fmlai_transcode *from, const fmlai_call *call)
{
    fmlac_transcode p;
    describe_transcode(&p, from);
    bool eight = takes_eight(&p.pool) && p.rows.aligned;
    fmlac_launch launch =
        launch_of(eight ? fmlak_quantize_8_sm80 : fmlak_quantize_sm80,
                  eight ? "fmlak_quantize_8_sm80" : "fmlak_quantize_sm80", fmlac_ceil(p.count * p.heads, WARPS));
    return fmlac_run(state, call, &launch, &p);
}

fmla_status fmlac_dequantize(void *state, const fmlai_transcode *from, const fmlai_call *call)
{
    fmlac_transcode p;
    describe_transcode(&p, from);
    bool eight = takes_eight(&p.pool) && p.rows.aligned;
    fmlac_launch launch =
        launch_of(eight ? fmlak_dequantize_8_sm80 : fmlak_dequantize_sm80,
                  eight ? "fmlak_dequantize_8_sm80" : "fmlak_dequantize_sm80", fmlac_ceil(p.count * p.heads, WARPS));
    return fmlac_run(state, call, &launch, &p);
}

/* Whether two pools keep the same codes, scales and RoPE part, though perhaps at other places. */
static bool same_codes(const fmlai_pool *a, const fmlai_pool *b)
{
    const fmla_format_info *f = &a->format, *g = &b->format;
    return f->element == g->element && f->d_qk == g->d_qk && f->quant_dims == g->quant_dims && f->group == g->group &&
           f->scale == g->scale && (f->layout == FMLA_LAYOUT_PLAIN || a->outer_scale == b->outer_scale);
}

fmla_status fmlac_convert_run(void *state, const fmlai_convert *from, const fmlai_call *call)
{
    fmlac_convert p;
    memset(&p, 0, sizeof p);
    p.count = from->count;
    p.heads = from->heads;
    p.same_codes = same_codes(&from->dst, &from->src);
    fmlac_describe_pool(&p.src, &from->src);
    fmlac_describe_pool(&p.dst, &from->dst);
    fmlac_describe_slots(&p.src_slots, &from->src_slots);
    fmlac_describe_slots(&p.dst_slots, &from->dst_slots);
    bool eight = takes_eight(&p.src) && takes_eight(&p.dst);
    fmlac_launch launch =
        launch_of(eight ? fmlak_convert_8_sm80 : fmlak_convert_sm80,
                  eight ? "fmlak_convert_8_sm80" : "fmlak_convert_sm80", fmlac_ceil(p.count * p.heads, WARPS));
    return fmlac_run(state, call, &launch, &p);
}

fmla_status fmlac_indices_convert_run(void *state, const fmlai_indices_convert *from, const fmlai_call *call)
{
    fmlac_indices_convert p = {
        .batch = from->batch,
        .s_q = from->s_q,
        .topk = from->topk,
        .page_size = from->page_size,
        .max_pages = from->max_pages,
        .positions = from->positions,
        .position_stride = {from->position_stride[0], from->position_stride[1]},
        .block_table = from->block_table,
        .table_stride = from->table_stride,
        .indices = from->indices,
        .index_stride = {from->index_stride[0], from->index_stride[1]},
    };
    fmlac_launch launch = launch_of(fmlak_indices_convert_sm80, "fmlak_indices_convert_sm80",
                                    fmlac_ceil(p.batch * p.s_q * p.topk, THREADS));
    return fmlac_run(state, call, &launch, &p);
}

fmla_status fmlac_fp8_cast_run(void *state, const fmlai_fp8_cast *from, const fmlai_call *call)
{
    fmlac_fp8_cast p = {
        .rows = from->rows,
        .cols = from->cols,
        .src = from->src,
        .src_stride = from->src_stride,
        .codes = from->codes,
        .code_stride = from->code_stride,
        .scale = (uint8_t *)from->scale,
        .scale_rows = from->scale_rows,
        .group = from->group,
        .dtype = (int32_t)from->dtype,
        .aligned = (uintptr_t)from->src % 16 == 0 && from->src_stride % 8 == 0 && (uintptr_t)from->codes % 8 == 0 &&
                   from->code_stride % 8 == 0,
    };
    fmlac_launch launch =
        launch_of(fmlak_fp8_cast_sm80, "fmlak_fp8_cast_sm80", fmlac_ceil(p.rows * (p.cols / 8), THREADS));
    return fmlac_run(state, call, &launch, &p);
}

fmla_status fmlac_merge_run(void *state, const fmlai_merge *from, const fmlai_call *call)
{
    fmlac_merge p;
    if (from->count > FMLAC_MERGE_STATES) {
        return fmlai_fail(call->error, FMLA_ERROR_UNSUPPORTED, "count: %d; allowed on CUDA: 1..%d; merge in steps",
                          (int)from->count, FMLAC_MERGE_STATES);
    }
    memset(&p, 0, sizeof p);
    p.tokens = from->tokens;
    p.heads = from->heads;
    p.d = from->d;
    p.count = from->count;
    p.sink = from->sink;
    p.empty_lse = from->empty_lse;
    fmlac_describe_packed(&p.out, &from->result.out, from->d);
    fmlac_describe_packed(&p.lse, &from->result.lse, 1);
    for (int32_t i = 0; i < from->count; i++) {
        const fmlai_merge_state *s = &from->states[i];
        p.states[i] = (fmlac_merge_state){
            .out = s->out.data,
            .lse = s->lse.data,
            .out_stride = {s->out.stride[0], s->out.stride[1]},
            .lse_stride = {s->lse.stride[0], s->lse.stride[1]},
            .dtype = (int32_t)s->out.dtype,
            .aligned = (uintptr_t)s->out.data % 16 == 0 && s->out.stride[0] % 8 == 0 && s->out.stride[1] % 8 == 0 &&
                       from->d % 8 == 0,
        };
    }
    fmlac_launch launch = launch_of(fmlak_merge_sm80, "fmlak_merge_sm80", fmlac_ceil(p.tokens * p.heads, WARPS));
    return fmlac_run(state, call, &launch, &p);
}

fmla_status fmlac_permute_run(void *state, const fmlai_permute *from, const fmlai_call *call)
{
    fmlac_permute p = {
        .groups = from->groups,
        .rows = from->rows,
        .cols = from->cols,
        .words = from->words,
        .heads = from->heads,
        .d = from->d,
        .weight = from->weight,
        .weight_stride = {from->weight_stride[0], from->weight_stride[1]},
        .scale = from->scale,
        .scale_stride = {from->scale_stride[0], from->scale_stride[1], from->scale_stride[2]},
        .out_weight = from->out_weight,
        .out_scale = from->out_scale,
        .out_scale_stride = {from->out_scale_stride[0], from->out_scale_stride[1], from->out_scale_stride[2]},
    };
    bool q_b = from->kind == FMLA_OP_PERMUTE_Q_B;
    p.aligned = (uintptr_t)p.weight % 16 == 0 && (uintptr_t)p.out_weight % 16 == 0 && p.cols % 16 == 0 &&
                p.weight_stride[0] % 16 == 0 && p.weight_stride[1] % 16 == 0;
    fmlac_launch launch =
        launch_of(q_b ? fmlak_permute_q_b_sm80 : fmlak_permute_wv_sm80,
                  q_b ? "fmlak_permute_q_b_sm80" : "fmlak_permute_wv_sm80", fmlac_ceil(p.groups * p.rows, WARPS));
    return fmlac_run(state, call, &launch, &p);
}

fmla_status fmlac_schedule_run(void *state, const fmlai_schedule *from, const fmlai_call *call)
{
    fmlac_schedule p = {
        .batch = from->batch,
        .seqlens = from->seqlens,
        .topk_length = from->topk_length,
        .extra_topk_length = from->extra_topk_length,
        .topk = from->topk,
        .extra_topk = from->extra_topk,
        .parts = from->parts,
        .form = (int32_t)from->form,
        .overhead_blocks = from->overhead_blocks,
        .metadata = from->metadata,
        .metadata_stride = from->metadata_stride,
        .num_splits = from->num_splits,
    };
    fmlac_launch launch = launch_of(fmlak_schedule_sm80, "fmlak_schedule_sm80", 1);
    return fmlac_run(state, call, &launch, &p);
}
