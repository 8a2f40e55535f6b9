/* SPDX-License-Identifier: MIT */
/* rows.c: per-token tensors, packed tensors, lengths and slots, from tensor views to descriptions. */
#include <string.h>

#include "describe.h"

fmlai_pattern fmlai_token_pattern(const fmlai_frame *f, const char *name, uint32_t dtypes, uint32_t flags,
                                  const char *letters, int32_t rank, int64_t n0, int64_t n1)
{
    fmlai_pattern p = {.name = name, .dtypes = dtypes, .flags = flags, .prefix = f->letters, .letters = letters};
    const int64_t tail[2] = {n0, n1};
    if (f->flat) {
        p.shape[p.rank++] = f->tokens;
    } else {
        p.shape[p.rank++] = f->batch;
        p.shape[p.rank++] = f->s_q;
    }
    for (int32_t i = 0; i < rank; i++) {
        p.shape[p.rank++] = tail[i];
    }
    return p;
}

static fmlai_rows make_rows(const fmlai_checker *c, const fmla_tensor *t, int64_t outer, int64_t inner, int64_t head)
{
    fmlai_rows rows = {0};
    if (fmlai_present(t)) {
        rows = (fmlai_rows){.data = fmlai_data(c, t), .dtype = (fmla_dtype)t->dtype, .stride = {outer, inner, head}};
    }
    return rows;
}

fmlai_rows fmlai_rows_of(const fmlai_checker *c, const fmlai_frame *f, const fmla_tensor *t)
{
    const int64_t *s = t->stride;
    return f->flat ? make_rows(c, t, 0, s[0], s[1]) : make_rows(c, t, s[0], s[1], s[2]);
}

fmlai_rows fmlai_head_first_rows_of(const fmlai_checker *c, const fmlai_frame *f, const fmla_tensor *t)
{
    const int64_t *s = t->stride;
    return f->flat ? make_rows(c, t, 0, s[1], s[0]) : make_rows(c, t, s[0], s[2], s[1]);
}

fmlai_lengths fmlai_describe_lengths(fmlai_checker *c, const fmlai_frame *f, const char *name, const fmla_tensor *t,
                                     bool per_request_allowed)
{
    fmlai_pattern each = fmlai_token_pattern(f, name, FMLAI_BIT(FMLA_I32), FMLAI_OPTIONAL, "", 0, 0, 0);
    fmlai_lengths lengths = {0};
    bool per_request = per_request_allowed && t->rank == 1 && (!f->flat || t->shape[0] != f->tokens);
    if (per_request) {
        FMLAI_EXPECT(c, t, .name = name, .dtypes = FMLAI_BIT(FMLA_I32), .flags = FMLAI_OPTIONAL, .letters = "b",
                     .rank = 1, .shape = {f->batch});
    } else {
        fmlai_check_tensor(c, t, &each);
    }
    if (!fmlai_present(t) || fmlai_failed(c)) {
        return lengths;
    }
    lengths.data = fmlai_data(c, t);
    lengths.per_request = per_request;
    lengths.outer_stride = f->flat && !per_request ? 0 : t->stride[0];
    lengths.inner_stride = per_request ? 0 : t->stride[f->flat ? 0 : 1];
    return lengths;
}

const float *fmlai_describe_sink(fmlai_checker *c, const fmla_tensor *t, int32_t h_q)
{
    FMLAI_EXPECT(c, t, .name = "attn_sink", .dtypes = FMLAI_BIT(FMLA_F32), .flags = FMLAI_OPTIONAL | FMLAI_LAST,
                 .letters = "h_q", .rank = 1, .shape = {h_q});
    return fmlai_failed(c) ? NULL : fmlai_data(c, t);
}

void fmlai_describe_indices(fmlai_checker *c, const fmlai_frame *f, const char *name, const fmla_tensor *t,
                            fmlai_token_list *list)
{
    fmlai_pattern p = fmlai_token_pattern(f, name, FMLAI_BIT(FMLA_I32), FMLAI_LAST, "topk", 1, FMLAI_ANY, 0);
    fmlai_check_tensor(c, t, &p);
    list->kind = FMLAI_LIST_INDEXED;
    if (fmlai_failed(c)) {
        return;
    }
    list->indices = fmlai_data(c, t);
    list->index_outer = f->flat ? 0 : t->stride[0];
    list->index_inner = t->stride[f->flat ? 0 : 1];
    list->topk = t->shape[t->rank - 1];
}

/* A stride as kernels may have it, who scale it. Anything is legal in a dimension in which nobody takes a step. */
static int64_t scalable_stride(const fmla_tensor *t, int32_t dimension)
{
    const int64_t stride = t->stride[dimension], most = INT64_MAX / 16;
    bool steps = t->shape[dimension] > 1;
    for (int32_t i = 0; i < t->rank; i++) {
        steps = steps && t->shape[i] > 0;
    }
    return steps || (stride >= -most && stride <= most) ? stride : 0;
}

fmlai_packed fmlai_packed_of(const fmlai_checker *c, const fmla_tensor *t)
{
    fmlai_packed packed = {0};
    if (fmlai_present(t)) {
        packed.data = fmlai_data(c, t);
        packed.dtype = (fmla_dtype)t->dtype;
        packed.stride[0] = scalable_stride(t, 0);
        packed.stride[1] = scalable_stride(t, 1);
    }
    return packed;
}

fmlai_slots fmlai_describe_slots(fmlai_checker *c, const char *name, const fmla_tensor *t, int64_t count)
{
    fmlai_slots slots = {0};
    FMLAI_EXPECT(c, t, .name = name, .dtypes = FMLAI_SLOT_TYPES, .flags = FMLAI_OPTIONAL, .letters = "n", .rank = 1,
                 .shape = {count});
    if (fmlai_present(t) && !fmlai_failed(c)) {
        slots = (fmlai_slots){.data = fmlai_data(c, t), .dtype = (fmla_dtype)t->dtype, .stride = t->stride[0]};
    }
    return slots;
}

int64_t fmlai_describe_scale_words(fmlai_checker *c, const char *name, const fmla_tensor *t, int32_t rank,
                                   int64_t groups, int64_t rows, int64_t words, bool padded)
{
    const bool flat = rank == 2;
    const int64_t *stride = t->stride + (flat ? 0 : 1);
    int64_t group_stride;
    FMLAI_EXPECT(c, t, .name = name, .dtypes = FMLAI_BIT(FMLA_I32), .flags = padded ? FMLAI_OUTPUT : 0,
                 .letters = flat ? "rows, words" : "n_group, rows, words", .rank = rank,
                 .shape = {flat ? rows : groups, flat ? words : rows, words});
    if (fmlai_failed(c) || groups == 0 || rows == 0 || words == 0) {
        return 0;
    }
    if (rows > 1 && stride[0] != 1) {
        fmlai_invalid(c, "%s: stride[%d] is %lld; allowed: 1, rows are contiguous", name, flat ? 0 : 1,
                      (long long)stride[0]);
        return 0;
    }
    /* With one column its distance to the next is free to choose. */
    const int64_t least = (rows + 3) / 4 * 4, column = words > 1 ? stride[1] : groups > 1 ? t->stride[0] : least;
    if (padded && (column < rows || column % 4 != 0)) {
        fmlai_invalid(c, "%s: columns are %lld words apart; allowed: a multiple of 4, at least %lld", name,
                      (long long)column, (long long)rows);
    }
    if (padded && groups > 1 && (!fmlai_mul(column, words, &group_stride) || t->stride[0] != group_stride)) {
        fmlai_invalid(c, "%s: stride[0] is %lld; allowed: stride[2] * words", name, (long long)t->stride[0]);
    }
    return column;
}
