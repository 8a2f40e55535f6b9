/* SPDX-License-Identifier: MIT */
/*
 * support_mha.h: problems of dense multi-head attention over packed sequences for the CPU backend, with room
 * for the oracle's results, and their comparison.
 */
#ifndef FLASHMLA_TEST_SUPPORT_MHA_H
#define FLASHMLA_TEST_SUPPORT_MHA_H

#include "support_cpu.h"

#define MHA_BATCH_MAX 8

typedef struct mha_shape {
    int32_t batch;
    int32_t q_lens[MHA_BATCH_MAX], kv_lens[MHA_BATCH_MAX];
    int32_t h_q, h_kv, d_qk, d_v;
    bool causal;
    bool no_cu;       /* without cu_seqlens: one sequence */
    fmla_dtype dtype; /* of data and results */
    float size;       /* of the elements; 0: 1 */
    float scale;      /* 0: d_qk^-0.5 */
    uint64_t seed;
} mha_shape;

typedef struct mha_problem {
    fmlai_mha p;      /* results of the backend */
    fmlai_mha oracle; /* the same inputs, F64 results */
    int32_t cu_q[MHA_BATCH_MAX + 1], cu_kv[MHA_BATCH_MAX + 1];
    void *memory[24];
    size_t sizes[24];
    int32_t memory_count;
} mha_problem;

/* Inputs are random, what lies between heads and tokens is NaN; results are filled with 0xA5. */
void mha_make(mha_problem *m, const mha_shape *shape);
void mha_free(mha_problem *m);
float mha_get(const fmlai_packed *t, int64_t token, int32_t head, int32_t d);
void mha_set(const fmlai_packed *t, int64_t token, int32_t head, int32_t d, float x);
/* Sets all d of a token and head. */
void mha_fill(const fmlai_packed *t, int64_t token, int32_t head, int32_t d, float x);

/* Forward and its check; backward with forward's results, and its check. The kernels decide which tolerance
 * holds: softmax weights rounded to bf16, or kept. */
void mha_check_forward(mha_problem *m, fmlai_cpu *cpu);
void mha_check_backward(mha_problem *m, fmlai_cpu *cpu);

#endif
