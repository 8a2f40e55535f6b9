/* SPDX-License-Identifier: MIT */
/*
 * cases.h: a test case as plain data and as one word of text, "op=sparse_decode,format=v41,b=4,...", which is what a
 * failure prints and `flashmla check --case` takes; and the matrices of cases.
 */
#ifndef FLASHMLA_TOOL_CASES_H
#define FLASHMLA_TOOL_CASES_H

#include "program.h"

/* What is run again, and must give the same bits (test_case.again). */
enum {
    AGAIN_THREADS = 1, /* 1, 2, 3 and 8 threads, and once more with the same number */
    AGAIN_SLICES = 2,  /* every request alone */
    AGAIN_ORDER = 4,   /* requests in another order */
    AGAIN_TAIL = 8,    /* more invalid slots behind every index row */
    AGAIN_PAGES = 16,  /* another page size, page order, page stride, other bytes in all that is not to be read */
    AGAIN_PREFILL = 32 /* fused decode: fused prefill over the dequantised tokens */
};

typedef enum data_kind {
    DATA_PLAIN = 0,     /* bell-shaped, small: flat softmax */
    DATA_SHARP = 1,     /* queries 40 times larger: few tokens take all */
    DATA_AMPLIFIED = 2, /* 2 % of the keys multiplied by 1..256 */
    DATA_SHIFTED = 3    /* a common offset on queries and keys: large logits, all of one sign */
} data_kind;

typedef enum sink_kind {
    SINK_NONE = 0,
    SINK_MIXED = 1, /* bell-shaped, a third -inf, a third +inf */
    SINK_FINITE = 2,
    SINK_EXTREME = 3 /* 0, +-1e4, +-1e38, +-inf */
} sink_kind;

/* Every field an int64_t (but scale), so that one table reads, prints and compares them. 0 is "no" or "default". */
typedef struct test_case {
    int64_t op;                 /* fmla_operation */
    int64_t format;             /* fmla_kv_format; convert: the source */
    int64_t extra;              /* fmla_kv_format; convert: the destination */
    int64_t dtype;              /* fmla_dtype of q, and of plain caches */
    int64_t out;                /* fmla_dtype of out; 0: dtype */
    int64_t b, s_q, s_kv, e_kv; /* e_kv: tokens per request in the extra cache */
    int64_t h_q, h_kv, d_qk, d_v;
    int64_t topk, e_topk;
    int64_t page, e_page;
    int64_t causal, varlen, zero_len; /* zero_len: about half of the requests are empty */
    int64_t lengths, e_lengths;       /* topk_length: 1 per request, 2 per query token */
    int64_t ragged, bound, no_table;
    int64_t sink;     /* sink_kind */
    int64_t invalid;  /* 1: no valid index at all; 2: some query tokens have none */
    int64_t repeated; /* indices drawn with repetition */
    int64_t nan;      /* some attended tokens are NaN: dense: the last one of each request */
    int64_t data;     /* data_kind */
    int64_t scales;   /* quantised caches: 1: V32's first quantiser; 2: random scales */
    int64_t pad;      /* over-allocated strides, padded pages */
    int64_t misalign; /* bytes by which the caches are off a 64-byte boundary */
    int64_t pos_inf, base2;
    int64_t norm, plain_q, neox, group; /* fused; group: heads per output group, 0: all */
    int64_t count;                      /* merge: states; bytes: tokens */
    int64_t again;
    int64_t seed;
    double scale; /* 0: the default of the operation's cases */
} test_case;

/* All default values of an operation's cases. */
test_case case_default(fmla_operation op);
/* One word; size should be 512. */
void case_print(const test_case *c, char *text, size_t size);
/* 0, or -1 with a line in error. */
int case_parse(test_case *c, const char *text, char *error, size_t error_size);
/* Operation by name, '-' and '_' alike; -1 if unknown. */
int operation_by_name(const char *name);

typedef struct case_list {
    test_case *cases;
    size_t count, capacity;
} case_list;

typedef enum case_set { CASES_QUICK = 0, CASES_ALL = 1, CASES_FULL = 2 } case_set;

/* Appends; operation -1: all. The seeds are drawn from `seed`. */
void cases_make(case_list *list, case_set set, int operation, uint64_t seed);
void cases_free(case_list *list);

/* For the files that make the matrices: appends, scaled down to the set's work. */
void cases_add(case_list *list, case_set set, test_case c);
/* The same from the text that follows "op=NAME,". */
void cases_add_text(case_list *list, fmla_operation op, const char *text);
/* Keeps one of so many: a thinning that does not depend on what was kept before. FULL keeps all. */
int cases_keep(case_set set, uint64_t number, int quick_one_of, int all_one_of);
void cases_attention(case_list *list, case_set set, int operation);
void cases_bytes(case_list *list, case_set set, int operation);

#endif
