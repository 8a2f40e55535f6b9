/* SPDX-License-Identifier: MIT */
/*
 * Each attention operation once, small, in the best tier of the machine: short enough to run under emulators
 * of other processors, where an instruction that they lack would end it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "support_mha.h"
#include "support_mqa.h"

static void run_mqa(const mqa_shape *shape)
{
    fmlai_cpu *cpu = cpu_open(fmlai_isa_best(), 2);
    mqa_problem problem;
    mqa_make(&problem, shape);
    cpu_mqa(cpu, &problem.p);
    mqa_check(&problem, fmlai_isa_best() == FMLA_ISA_AVX512BF16);
    mqa_free(&problem);
    cpu_close(cpu);
}

static void promise_12_dense_decode(void **state)
{
    mqa_shape s = {.kind = FMLAI_LIST_PAGED,
                   .format = FMLA_KV_BF16,
                   .batch = 2,
                   .s_q = 2,
                   .h_q = 5,
                   .h_kv = 1,
                   .d_qk = 576,
                   .d_v = 512,
                   .page_size = 16,
                   .tokens = 70,
                   .causal = true,
                   .seed = 1};
    (void)state;
    run_mqa(&s);
    s.format = FMLA_KV_F16;
    run_mqa(&s);
}

static void promise_12_sparse_decode(void **state)
{
    mqa_shape s = {.kind = FMLAI_LIST_INDEXED,
                   .format = FMLA_KV_V41,
                   .extra = FMLA_KV_V41_FP4,
                   .batch = 2,
                   .s_q = 1,
                   .h_q = 6,
                   .h_kv = 1,
                   .d_qk = 512,
                   .d_v = 512,
                   .page_size = 8,
                   .tokens = 50,
                   .extra_topk = 40,
                   .sink = true,
                   .lengths = true,
                   .invalid_percent = 20,
                   .seed = 2};
    (void)state;
    run_mqa(&s);
    s.format = FMLA_KV_V4;
    s.extra = FMLA_KV_NONE;
    s.extra_topk = 0;
    run_mqa(&s);
}

static void promise_12_multi_head_attention(void **state)
{
    mha_shape s = {.batch = 2,
                   .q_lens = {20, 3},
                   .kv_lens = {17, 30},
                   .h_q = 4,
                   .h_kv = 2,
                   .d_qk = 48,
                   .d_v = 32,
                   .causal = true,
                   .dtype = FMLA_BF16,
                   .seed = 3};
    fmlai_cpu *cpu = cpu_open(fmlai_isa_best(), 2);
    mha_problem m;
    (void)state;
    mha_make(&m, &s);
    mha_check_forward(&m, cpu);
    mha_check_backward(&m, cpu);
    mha_free(&m);
    cpu_close(cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_12_dense_decode),
        cmocka_unit_test(promise_12_sparse_decode),
        cmocka_unit_test(promise_12_multi_head_attention),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
