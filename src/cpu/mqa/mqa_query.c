/* SPDX-License-Identifier: MIT */
/*
 * mqa_query.c: the rows of a block as floats. Plain operations just widen q. Fused ones undo the storage
 * order, take the RMS factor from the stored values (it goes into the logits, q itself is not scaled), rotate
 * the last rope_dim dims in fp32 and round those to bf16, as docs/numerics.md defines.
 */
#include <math.h>

#include "../rows.h"
#include "mqa.h"

#define PERMUTED_RUN 16 /* dims of a head that lie together in permuted storage */
#define CHAINS       16 /* sums of squares side by side, so that no addition waits for the last; d_qk is 512 */

static void load_row(const fmlai_mqa *p, int64_t token, int32_t head, float *dst)
{
    if (!p->fused.enabled || !p->fused.q_permuted) {
        fmlai_row_load(dst, p->q.data, p->q.dtype, fmlai_row_offset(&p->q, p, token, head), p->d_qk);
        return;
    }
    int64_t base = fmlai_row_offset(&p->q, p, token, 0);
    for (int32_t d = 0; d < p->d_qk; d += PERMUTED_RUN) {
        int32_t n = p->d_qk - d < PERMUTED_RUN ? p->d_qk - d : PERMUTED_RUN;
        fmlai_row_load(dst + d, p->q.data, p->q.dtype, base + fmlai_q_permuted(p->h_q, head, d), n);
    }
}

static double rms_factor(const fmlai_mqa *p, const float *q)
{
    double sum[CHAINS] = {0.0}, all = 0.0;
    if (!p->fused.q_norm) {
        return 1.0;
    }
    for (int32_t d = 0; d < p->d_qk; d += CHAINS) {
        for (int32_t i = 0; i < CHAINS; i++) {
            sum[i] += (double)q[d + i] * q[d + i];
        }
    }
    for (int32_t i = 0; i < CHAINS; i++) {
        all += sum[i];
    }
    return 1.0 / sqrt(all / p->d_qk + (double)p->fused.eps);
}

static float through_bf16(float x)
{
    return fmlai_f32_from_bf16(fmlai_bf16_from_f32(x));
}

static void rotate(const fmlai_mqa *p, int64_t token, float *q)
{
    float *x = q + p->d_qk - p->fused.rope_dim;
    for (int32_t i = 0; i < p->fused.rope_dim / 2; i++) {
        fmlai_mqa_pair pair = fmlai_mqa_pair_at(&p->fused, token, i);
        float x0 = x[pair.first], x1 = x[pair.second];
        x[pair.first] = through_bf16(fmaf(x0, pair.c, -(x1 * pair.s)));
        x[pair.second] = through_bf16(fmaf(x0, pair.s, x1 * pair.c));
    }
}

void fmlai_cpu_mqa_load_query(const fmlai_mqa_plan *plan, const fmlai_mqa_block *block,
                              fmlai_mqa_scratch *scratch)
{
    const fmlai_mqa *p = plan->p;
    for (int32_t r = 0; r < block->tokens * block->heads; r++) {
        int64_t token = block->token + r / block->heads;
        float *q = scratch->query + (int64_t)r * p->d_qk;
        double rho = 1.0;
        load_row(p, token, block->head + r % block->heads, q);
        if (p->fused.enabled) {
            rho = rms_factor(p, q);
            rotate(p, token, q);
        }
        scratch->scale2[r] = (float)((double)p->scale * rho * M_LOG2E);
    }
}
