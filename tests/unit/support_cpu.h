/* SPDX-License-Identifier: MIT */
/*
 * support_cpu.h: CPU contexts for tests, and single operations of theirs. Workspaces are exactly as large as
 * the backend asks for, guarded behind, and hold garbage.
 */
#ifndef FLASHMLA_TEST_SUPPORT_CPU_H
#define FLASHMLA_TEST_SUPPORT_CPU_H

#include "cpu/cpu.h"

extern const fmlai_allocator cpu_allocator; /* the C library's */

/* The tiers that this machine can run, emulated ones included; ends with FMLA_ISA_AUTO. */
const fmla_isa *cpu_isas(void);

fmlai_cpu *cpu_open(fmla_isa isa, int32_t threads);
void cpu_close(fmlai_cpu *cpu);

/* Each call must succeed. */
void cpu_mqa(fmlai_cpu *cpu, const fmlai_mqa *p);
void cpu_mha_forward(fmlai_cpu *cpu, const fmlai_mha *p);
void cpu_mha_backward(fmlai_cpu *cpu, const fmlai_mha *p);
fmlai_call cpu_call(void); /* without workspace */

#endif
