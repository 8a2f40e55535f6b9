/* SPDX-License-Identifier: MIT */
/*
 * mqa_finish.c: from partial results to outputs: the fold over chunks, the sink, the division, conjugate RoPE
 * and fp8 cast of the fused operations, lse and max_logits.
 */
#include <math.h>
#include <string.h>

#include "../rows.h"
#include "mqa.h"

#define CAST_GROUP  32
#define CAST_CHUNKS 16 /* groups at a time */

/*
 * Empty partials leave the total untouched, and the first one that is not becomes it unchanged: a row whose
 * tokens fit in one chunk has the bits of that chunk, however many empty ones follow. x: the row's sums.
 */
static void fold_row(const fmlai_mqa_plan *plan, fmlai_mqa_total *total, int32_t total_row,
                     const fmlai_mqa_partial *partial, int32_t row, const float *x)
{
    int32_t d_v = plan->p->d_v;
    double *o = total->o + (int64_t)total_row * d_v;
    double m_total = total->m[total_row], m = partial->m[row];

    if (partial->l[row] == 0.0f) {
        return;
    }
    if (total->l[total_row] == 0.0) {
        total->m[total_row] = m;
        total->l[total_row] = partial->l[row];
        plan->kernels->begin(o, x, d_v);
        return;
    }
    double m_new = isnan(m_total) || m_total > m ? m_total : m;
    double keep = m_total == m_new ? 1.0 : exp2(m_total - m_new);
    double join = m == m_new ? 1.0 : exp2(m - m_new);
    total->m[total_row] = m_new;
    total->l[total_row] = total->l[total_row] * keep + partial->l[row] * join;
    plan->kernels->fold(o, x, keep, join, d_v);
}

void fmlai_cpu_mqa_fold(const fmlai_mqa_plan *plan, fmlai_mqa_total *total, int32_t total_row,
                        const fmlai_mqa_partial *partial, const fmlai_mqa_partial *next, int32_t rows, int32_t row,
                        int32_t count, float *out)
{
    int32_t d_v = plan->p->d_v;
    bool empty = true;
    for (int32_t i = 0; i < count; i++) {
        empty = empty && partial->l[row + i] == 0.0f;
    }
    if (empty) { /* its sums may never have been written */
        return;
    }
    plan->kernels->unpack(out, d_v, partial->o, next ? next->o : NULL, rows, row, count, d_v);
    for (int32_t i = 0; i < count; i++) {
        fold_row(plan, total, total_row + i, partial, row + i, out + (int64_t)i * d_v);
    }
}

/* Codes and scale bytes of one row; chunks of 32 dims are transposed against the heads of the group. A scale
 * byte is byte chunk % 4 of a word, counted from the lowest address: rows that share words run at the same
 * time, so bytes are written, not words. Bytes alias everything, hence the copies of what the loop needs. */
static void cast(const fmlai_mqa_plan *plan, int64_t token, int32_t head, const float *out)
{
    const fmlai_mqa *p = plan->p;
    const fmlai_fused *f = &p->fused;
    const int64_t heads = f->group_heads, group = head / heads, word_bytes = f->scale_rows * 4;
    const int32_t d_v = p->d_v, chunks = d_v / CAST_GROUP;
    uint8_t *codes = f->codes + (token * f->groups + group) * heads * d_v;
    uint8_t *scale = (uint8_t *)(f->scale + token + group * (heads * chunks / 4) * f->scale_rows);
    uint8_t bytes[CAST_CHUNKS];
    uint32_t chunk = (uint32_t)(head % heads);
    if (group + 1 < f->groups) { /* this row's part of the lines that the next group's rows share */
        for (int32_t at = 0; at < d_v; at += 64) {
            __builtin_prefetch(codes + (heads + chunk) * d_v + at, 1);
        }
    }
    for (int32_t c = 0; c < chunks; c += CAST_CHUNKS) {
        int32_t count = chunks - c < CAST_CHUNKS ? chunks - c : CAST_CHUNKS;
        plan->cpu->quant.cast_row(out + c * CAST_GROUP, count, codes + (int64_t)chunk * CAST_GROUP, heads * CAST_GROUP,
                                  bytes);
        for (int32_t i = 0; i < count; i++, chunk += (uint32_t)heads) {
            scale[chunk / 4 * word_bytes + chunk % 4] = bytes[i];
        }
    }
}

void fmlai_cpu_mqa_clear_padding(const fmlai_mqa *p)
{
    const fmlai_fused *f = &p->fused;
    int64_t words = (int64_t)f->groups * f->group_heads * p->d_v / (4 * CAST_GROUP);
    size_t padding = (size_t)(f->scale_rows - p->num_tokens) * sizeof(int32_t);
    for (int64_t w = 0; w < words; w++) {
        memset(f->scale + w * f->scale_rows + p->num_tokens, 0, padding);
    }
}

static void store_scalar(const fmlai_mqa *p, const fmlai_rows *rows, int64_t token, int32_t head, double x)
{
    if (rows->data) {
        fmlai_store_f32(rows->data, rows->dtype, fmlai_row_offset(rows, p, token, head), (float)x);
    }
}

void fmlai_cpu_mqa_finish(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, int32_t row,
                          const fmlai_mqa_total *total, int32_t total_row, float *out)
{
    const fmlai_mqa *p = plan->p;
    int64_t token = block->token + row / block->heads;
    int32_t head = block->head + row % block->heads;
    double m = total->m[total_row], l = total->l[total_row];
    const double *o = total->o + (int64_t)total_row * p->d_v;

    if (l == 0.0) {
        memset(out, 0, (size_t)p->d_v * sizeof(float));
        store_scalar(p, &p->lse, token, head, p->empty_lse);
        store_scalar(p, &p->max_logits, token, head, -INFINITY);
    } else {
        double sum = l + (p->sink ? exp2(p->sink[head] * M_LOG2E - m) : 0.0);
        plan->kernels->finish(out, o, 1.0 / sum, p->d_v);
        store_scalar(p, &p->lse, token, head, (m + log2(l)) * M_LN2 * (double)p->lse_factor);
        store_scalar(p, &p->max_logits, token, head, m * M_LN2 * (double)p->lse_factor);
    }
    if (p->fused.enabled) {
        int32_t rope = p->fused.rope_dim;
        plan->kernels->unrotate(out + p->d_v - rope, fmlai_mqa_angles(&p->fused, token), rope / 2, p->fused.rope_neox);
        cast(plan, token, head, out);
    }
    if (p->out.data) {
        int64_t first = fmlai_row_offset(&p->out, p, token, head);
        if (p->out.dtype == FMLA_BF16) {
            plan->kernels->narrow((uint16_t *)p->out.data + first, out, 1.0f, p->d_v);
        } else {
            fmlai_row_store(p->out.data, p->out.dtype, first, out, p->d_v);
        }
    }
}
