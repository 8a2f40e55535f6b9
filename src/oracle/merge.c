/* SPDX-License-Identifier: MIT */
/*
 * merge.c: joins attention results over disjoint token sets.
 *
 *   lse = ln sum exp(lse_s)      out = sum exp(lse_s) out_s / (sum exp(lse_s) + exp(sink))
 *
 * over the states whose lse is not infinite; the others are empty and their out is not read. The sink is no
 * part of lse.
 */
#include "oracle.h"

static void merge_row(const fmlai_merge *p, int64_t token, int32_t head)
{
    double max = -INFINITY, sum = 0;

    for (int32_t i = 0; i < p->count; i++) {
        double lse;
        fmlai_oracle_load(&p->states[i].lse, token, head, 1, &lse);
        max = isinf(lse) ? max : fmlai_oracle_max(max, lse);
    }
    bool empty = max == -INFINITY;
    for (int32_t i = 0; i < p->count; i++) {
        double lse;
        fmlai_oracle_load(&p->states[i].lse, token, head, 1, &lse);
        sum += isinf(lse) ? 0 : exp(lse - max);
    }
    double total = sum + (p->sink ? exp((double)p->sink[head] - max) : 0);
    for (int32_t d = 0; d < p->d; d++) {
        double out = 0;
        for (int32_t i = 0; i < p->count; i++) {
            const fmlai_packed *x = &p->states[i].out;
            double lse;
            fmlai_oracle_load(&p->states[i].lse, token, head, 1, &lse);
            if (!isinf(lse)) {
                out += exp(lse - max) / total *
                       fmlai_load_f64(x->data, x->dtype, fmlai_oracle_offset(x, token, head) + d);
            }
        }
        fmlai_store_f64(p->result.out.data, p->result.out.dtype,
                        fmlai_oracle_offset(&p->result.out, token, head) + d, out);
    }
    if (p->result.lse.data) {
        double lse = empty ? (double)p->empty_lse : max + log(sum);
        fmlai_oracle_store(&p->result.lse, token, head, 1, &lse);
    }
}

fmla_status fmlai_oracle_merge(void *state, const fmlai_merge *p, const fmlai_call *call)
{
    (void)state;
    (void)call;
    for (int64_t token = 0; token < p->tokens; token++) {
        for (int32_t head = 0; head < p->heads; head++) {
            merge_row(p, token, head);
        }
    }
    return FMLA_OK;
}
