/* SPDX-License-Identifier: MIT */
/*
 * support_mqa.h: random problems of multi-query attention for backends, and comparison with the oracle. Slots
 * of the pools that no query token attends hold NaN, and so does whatever lies between pages.
 */
#ifndef FLASHMLA_TEST_SUPPORT_MQA_H
#define FLASHMLA_TEST_SUPPORT_MQA_H

#include "backend.h"

typedef struct mqa_shape {
    fmlai_list_kind kind;  /* of the main list */
    fmla_kv_format format; /* of the main pool */
    fmla_kv_format extra;  /* FMLA_KV_NONE: no extra list */
    int64_t batch, s_q;    /* s_q: at most, if ragged */
    int32_t h_q, h_kv, d_qk, d_v;
    int64_t page_size;
    int64_t tokens; /* paged: longest length; indexed: topk */
    int64_t extra_topk;
    bool causal, bound, ragged, sink, lengths, no_table;
    bool out_f32;
    bool fused, q_plain, q_norm, neox;
    int32_t invalid_percent; /* of index entries */
    bool huge_logits;
    float scale; /* 0: d_qk^-0.5 */
    float size;  /* of the elements of q and tokens; 0: 1 */
    uint64_t seed;
} mqa_shape;

typedef struct mqa_problem {
    fmlai_mqa p;      /* results of the backend under test: q's dtype or codes, F32 */
    fmlai_mqa oracle; /* the same with F64 results */
    void *memory[32];
    int32_t memory_count;
    bool huge_logits; /* so large that fp32 logits differ by more than softmax forgives: `out` is checked to
                         that extent */
} mqa_problem;

void mqa_make(mqa_problem *problem, const mqa_shape *shape);
void mqa_free(mqa_problem *problem);
/* Memory that mqa_free returns. */
void *mqa_memory(mqa_problem *problem, size_t size);
/* Redirects the results of p to memory of their own, filled with 0xA5; bytes of all of them. */
typedef struct mqa_results {
    uint8_t *data;
    size_t size;
} mqa_results;
mqa_results mqa_redirect(mqa_problem *problem, fmlai_mqa *p);

/* Fails unless results of p agree with the oracle's as docs/numerics.md demands of a tier that rounds softmax
 * weights to bf16 (rounded_weights) or keeps them. */
void mqa_check(const mqa_problem *problem, bool rounded_weights);

#endif
