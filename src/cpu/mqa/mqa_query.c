/* SPDX-License-Identifier: MIT */
/*
 * mqa_query.c: the rows of a block as floats. Plain operations just widen q. Fused ones undo the storage
 * order, take the RMS factor from the stored values (it goes into the logits, q itself is not scaled), rotate
 * the last rope_dim dims in fp32 and round those to bf16, as docs/numerics.md defines.
 */
#include <math.h>
#include <string.h>

#include "../rows.h"
#include "mqa.h"

#define PERMUTED_RUN 16 /* dims of a head that lie together in permuted storage, which is bf16 */
#define HEADS_AHEAD  8
#define ROWS_AT_ONCE 8 /* fused: they stay in L1 while they are normalised */

static const uint8_t *bf16_row(const fmlai_mqa *p, int64_t token, int32_t head)
{
    return (const uint8_t *)p->q.data + 2 * fmlai_row_offset(&p->q, p, token, head);
}

/* Runs of two heads share a line; those of the next dims are pages away, so that lines are fetched ahead, to L2: in L1
 * they would be in each other's way. */
static void load_permuted(const fmlai_mqa_plan *plan, int64_t token, int32_t head, float *dst)
{
    const fmlai_mqa *p = plan->p;
    const uint8_t *base = bf16_row(p, token, 0);
    if (head % 2 == 0 && head + HEADS_AHEAD < p->h_q) {
        for (int32_t d = 0; d < p->d_qk; d += PERMUTED_RUN) {
            __builtin_prefetch(base + 2 * fmlai_q_permuted(p->h_q, head + HEADS_AHEAD, d), 0, 2);
        }
    }
    plan->kernels->widen(dst, PERMUTED_RUN, base + 2 * fmlai_q_permuted(p->h_q, head, 0),
                         (int64_t)p->h_q * PERMUTED_RUN, p->d_qk / PERMUTED_RUN, PERMUTED_RUN);
}

static void load_row(const fmlai_mqa_plan *plan, int64_t token, int32_t head, float *dst)
{
    const fmlai_mqa *p = plan->p;
    if (p->fused.enabled && p->fused.q_permuted) {
        load_permuted(plan, token, head, dst);
    } else if (p->q.dtype == FMLA_BF16) {
        plan->kernels->widen(dst, 0, bf16_row(p, token, head), 0, 1, p->d_qk);
    } else {
        fmlai_row_load(dst, p->q.data, p->q.dtype, fmlai_row_offset(&p->q, p, token, head), p->d_qk);
    }
}

/* Rotates rows first..first+rows-1 of the block, and puts the RMS factors into what their logits are multiplied by. */
static void normalise(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch,
                      int32_t first, int32_t rows)
{
    const fmlai_mqa *p = plan->p;
    const fmlai_fused *f = &p->fused;
    float *q = scratch->query + (int64_t)first * p->d_qk;
    double squares[ROWS_AT_ONCE];
    if (f->q_norm) {
        plan->kernels->squares(squares, q, p->d_qk, rows, p->d_qk);
    }
    for (int32_t r = 0; r < rows; r++) {
        const float *angles = fmlai_mqa_angles(f, block->token + (first + r) / block->heads);
        double rho = f->q_norm ? 1.0 / sqrt(squares[r] / p->d_qk + (double)f->eps) : 1.0;
        scratch->scale2[first + r] = (float)((double)p->scale * rho * M_LOG2E);
        plan->kernels->rotate(q + (int64_t)(r + 1) * p->d_qk - f->rope_dim, angles, f->rope_dim / 2, f->rope_neox);
    }
}

void fmlai_cpu_mqa_load_query(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block, fmlai_mqa_scratch *scratch)
{
    const fmlai_mqa *p = plan->p;
    int32_t rows = block->tokens * block->heads;
    for (int32_t r = 0; r < rows; r++) {
        load_row(plan, block->token + r / block->heads, block->head + r % block->heads,
                 scratch->query + (int64_t)r * p->d_qk);
        scratch->scale2[r] = (float)((double)p->scale * M_LOG2E);
        if (p->fused.enabled && (r % ROWS_AT_ONCE == ROWS_AT_ONCE - 1 || r == rows - 1)) {
            int32_t first = r / ROWS_AT_ONCE * ROWS_AT_ONCE;
            normalise(plan, block, scratch, first, r - first + 1);
        }
    }
}
