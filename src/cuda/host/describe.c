/* SPDX-License-Identifier: MIT */
/* describe.c: internal descriptions (src/problem.h) as the kernels' parameter structs. */
#include <string.h>

#include "cuda_host.h"

_Static_assert((int)FMLAC_BF16 == (int)FMLA_BF16 && (int)FMLAC_F16 == (int)FMLA_F16 &&
                   (int)FMLAC_F32 == (int)FMLA_F32 && (int)FMLAC_I64 == (int)FMLA_I64 &&
                   (int)FMLAC_F8_E4M3 == (int)FMLA_F8_E4M3 && (int)FMLAC_F8_E8M0 == (int)FMLA_F8_E8M0 &&
                   (int)FMLAC_F4_E2M1 == (int)FMLA_F4_E2M1,
               "kernels and the API number dtypes alike");
_Static_assert((int)FMLAC_LAYOUT_RECORD == (int)FMLA_LAYOUT_RECORD && (int)FMLAC_LAYOUT_PAGE == (int)FMLA_LAYOUT_PAGE &&
                   (int)FMLAC_LIST_PAGED == (int)FMLAI_LIST_PAGED && (int)FMLAC_LIST_INDEXED == (int)FMLAI_LIST_INDEXED,
               "and layouts and lists");

static bool aligned(const void *data, int64_t bytes)
{
    return (uintptr_t)data % (uintptr_t)bytes == 0;
}

static int32_t round_up(int32_t x, int32_t unit)
{
    return (x + unit - 1) / unit * unit;
}

static int32_t bytes_of_scale(int32_t scale)
{
    return scale == FMLA_F32 ? 4 : scale == FMLA_DTYPE_NONE ? 0 : 1;
}

/* log2 of a power of two, else -1. */
static int32_t shift_of(int64_t x)
{
    int32_t shift = 0;
    while (shift < 30 && (int64_t)1 << shift < x) {
        shift++;
    }
    return (int64_t)1 << shift == x ? shift : -1;
}

void fmlac_describe_pool(fmlac_pool *to, const fmlai_pool *from)
{
    const fmla_format_info *f = &from->format;
    memset(to, 0, sizeof *to);
    to->data = from->data;
    to->num_pages = from->num_pages;
    to->page_size = from->page_size;
    to->page_shift = shift_of(from->page_size);
    to->page_stride = from->page_stride;
    to->token_stride = from->token_stride;
    to->head_stride = from->head_stride;
    to->outer_scale = from->outer_scale;
    to->layout = f->layout;
    to->d_qk = f->d_qk;
    to->element = f->element;
    to->aligned = aligned(from->data, 16) && from->page_stride % 16 == 0 && from->token_stride % 16 == 0;
    if (f->layout == FMLA_LAYOUT_PLAIN) {
        to->aligned = to->aligned && from->head_stride % 16 == 0 && f->d_qk % 8 == 0;
        return;
    }
    to->quant_dims = f->quant_dims;
    to->rope_dims = f->rope_dims;
    to->group = f->group > 0 ? f->group : f->quant_dims;
    to->group_shift = f->group > 0 ? shift_of(f->group) : 30;
    to->scale = f->group > 0 ? f->scale : FMLA_DTYPE_NONE;
    to->code_bytes = f->element == FMLA_F4_E2M1 ? f->quant_dims / 2 : f->quant_dims;
    to->scale_bytes = f->group > 0 ? f->quant_dims / f->group * bytes_of_scale(f->scale) : 0;
    to->data_row_bytes = f->data_row_bytes;
    to->scale_row_bytes = f->layout == FMLA_LAYOUT_PAGE ? f->scale_row_bytes : 0;
    to->scale_offset = f->scale_offset;
    to->rope_offset = f->rope_offset;
    to->raw_at = f->rope_dims > 0 ? 2 * f->quant_dims - f->rope_offset : 0; /* dims that are bf16 lie where they stay */
    to->raw_scales = f->scale_offset + (f->layout == FMLA_LAYOUT_PAGE ? round_up(f->data_row_bytes, 16) : 0);
    to->aligned = to->aligned && f->data_row_bytes % 16 == 0 && to->scale_row_bytes % 8 == 0;
}

/* unit: elements that are moved at a time; width: of a vector. */
void fmlac_describe_rows(fmlac_rows *to, const fmlai_rows *from, int32_t unit, int64_t width)
{
    int64_t size = from->dtype == FMLA_F32 ? 4 : 2;
    to->data = from->data;
    to->dtype = (int32_t)from->dtype;
    to->aligned = aligned(from->data, unit * size) && width % unit == 0;
    for (int i = 0; i < 3; i++) {
        to->stride[i] = from->stride[i];
        to->aligned = to->aligned && from->stride[i] % unit == 0;
    }
}

void fmlac_describe_packed(fmlac_packed *to, const fmlai_packed *from, int64_t width)
{
    to->data = from->data;
    to->dtype = (int32_t)from->dtype;
    to->stride[0] = from->stride[0];
    to->stride[1] = from->stride[1];
    to->aligned = aligned(from->data, 16) && from->stride[0] % 8 == 0 && from->stride[1] % 8 == 0 && width % 8 == 0;
}

void fmlac_describe_slots(fmlac_slots *to, const fmlai_slots *from)
{
    to->data = from->data;
    to->stride = from->stride;
    to->dtype = (int32_t)from->dtype;
}

static void describe_lengths(fmlac_lengths *to, const fmlai_lengths *from)
{
    to->data = from->data;
    to->outer_stride = from->outer_stride;
    to->inner_stride = from->inner_stride;
    to->per_request = from->per_request;
}

static void describe_list(fmlac_list *to, const fmlai_token_list *from)
{
    memset(to, 0, sizeof *to);
    to->kind = (int32_t)from->kind;
    if (from->kind == FMLAI_LIST_NONE) {
        return;
    }
    fmlac_describe_pool(&to->pool, &from->pool);
    to->block_table = from->block_table;
    to->table_stride = from->table_stride;
    to->max_pages = from->max_pages;
    if (from->kind == FMLAI_LIST_PAGED) {
        bool many = from->max_pages > INT32_MAX / from->pool.page_size;
        to->capacity = many ? INT32_MAX : from->max_pages * from->pool.page_size;
    }
    to->seqlens = from->seqlens;
    to->causal = from->causal;
    to->indices = from->indices;
    to->index_outer = from->index_outer;
    to->index_inner = from->index_inner;
    to->index_head = from->index_head;
    to->topk = from->kind == FMLAI_LIST_INDEXED ? from->topk : 0;
    describe_lengths(&to->bound, &from->bound);
    describe_lengths(&to->length, &from->length);
}

static void describe_fused(fmlac_fused *to, const fmlai_fused *from)
{
    to->enabled = from->enabled;
    to->q_norm = from->q_norm;
    to->q_permuted = from->q_permuted;
    to->rope_neox = from->rope_neox;
    to->eps = from->eps;
    to->rope_dim = from->rope_dim;
    to->positions = from->positions;
    to->position_stride = from->position_stride;
    to->cos_sin = from->cos_sin;
    to->cos_sin_rows = from->cos_sin_rows;
    to->cos_sin_stride = from->cos_sin_stride;
    to->codes = from->codes;
    to->scale = (uint8_t *)from->scale;
    to->scale_rows = from->scale_rows;
    to->groups = from->groups;
    to->group_heads = from->group_heads;
}

void fmlac_describe_mqa(fmlac_mqa *to, const fmlai_mqa *from)
{
    memset(to, 0, sizeof *to);
    to->batch = from->batch;
    to->s_q = from->s_q;
    to->num_tokens = from->num_tokens;
    to->h_q = from->h_q;
    to->h_kv = from->h_kv;
    to->d_qk = from->d_qk;
    to->d_v = from->d_v;
    to->cu_seqlens_q = from->cu_seqlens_q;
    fmlac_describe_rows(&to->q, &from->q, 8, from->d_qk);
    describe_fused(&to->fused, &from->fused);
    describe_list(&to->main, &from->main);
    describe_list(&to->extra, &from->extra);
    to->scale = from->scale;
    to->sink = from->sink;
    fmlac_describe_rows(&to->out, &from->out, 4, 4);
    fmlac_describe_rows(&to->lse, &from->lse, 1, 1);
    fmlac_describe_rows(&to->max_logits, &from->max_logits, 1, 1);
    to->empty_lse = from->empty_lse;
    to->lse_factor = from->lse_factor;
}
