/* SPDX-License-Identifier: MIT */
/*
 * schedule.c: the published schedule on the CPU is the plan's own rule.
 */
#include "../plan/plan.h"
#include "cpu.h"

fmla_status fmlai_cpu_schedule(void *state, const fmlai_schedule *p, const fmlai_call *call)
{
    (void)state;
    return fmlai_plan_schedule(p, call->error);
}
