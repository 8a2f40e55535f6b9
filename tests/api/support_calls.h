/* SPDX-License-Identifier: MIT */
/*
 * support_calls.h: one small valid call of every operation, to be broken or stretched by the tests. Outputs lie in one
 * arena full of a known byte, with guard bytes around each, so that a test sees any byte that was written or spared.
 */
#ifndef SUPPORT_CALLS_H
#define SUPPORT_CALLS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <flashmla/flashmla.h>

#define CALLS_ARENA   (1 << 18)
#define CALLS_OUTPUTS 64

typedef struct calls {
    fmla_context *context;
    fmla_decode_args dense;                /* b 2, s_q 2, h_q 4, bf16 576/512, pages of 4, lengths 5 and 12 */
    fmla_decode_args sparse;               /* b 2, s_q 2, h_q 4, v41 + v41-fp4, topk 6 + 4 */
    fmla_prefill_args prefill;             /* s_q 3, h_q 4, d 64/32, s_kv 7, topk 5 */
    fmla_fused_prefill_args fused_prefill; /* s_q 3, h_q 8, 2 groups, s_kv 5, topk 4 */
    fmla_fused_decode_args fused_decode;   /* the same over v4 */
    fmla_mha_forward_args forward;         /* lengths 2, 3 and 4, 3; h 4/2, d 24/16 */
    fmla_mha_backward_args backward;
    fmla_quantize_args quantize; /* 3 tokens into v32 */
    fmla_dequantize_args dequantize;
    fmla_convert_args convert; /* v41 to v41-page */
    fmla_indices_convert_args indices_convert;
    fmla_fp8_cast_args fp8_cast;
    fmla_merge_args merge; /* two states */
    fmla_permute_q_b_args permute_q_b;
    fmla_permute_wv_args permute_wv;
    fmla_schedule_args schedule;

    fmla_tensor merge_outs[2], merge_lses[2];
    fmla_format_info custom; /* for tests of custom formats */
    size_t input_used, output_used;
    struct {
        size_t at, size;
    } output[CALLS_OUTPUTS];
    int32_t output_count;
    _Alignas(64) unsigned char inputs[CALLS_ARENA];
    _Alignas(64) unsigned char outputs[CALLS_ARENA];
} calls;

/* Makes every call valid and every output byte known again; the context stays. */
void calls_reset(calls *c);
fmla_status calls_run(calls *c, fmla_operation operation);
/* The size question of an operation; operations without one give OK and 0. */
fmla_status calls_measure(calls *c, fmla_operation operation, size_t *size);
bool calls_outputs_untouched(const calls *c);
bool calls_guards_intact(const calls *c);

/* Memory in the arenas, 64-byte aligned; inputs are bytes 0x38, which are small finite numbers in every format. */
void *calls_input(calls *c, size_t size);
void *calls_output(calls *c, size_t size);
/* A tensor of int32 values as an input. */
fmla_tensor calls_ints(calls *c, const int32_t *values, int64_t count);

/* A context on a device with `threads` threads; the test fails if there is none. */
fmla_context *make_context(fmla_device device, int32_t threads);

/* Calls for a context, which may be NULL, not valid until calls_reset; memory is free's. A group's set_up leaves them
 * in *state, and calls_tear_down ends them and their context. */
calls *calls_new(fmla_context *context);
int calls_tear_down(void **state);

#endif
