/* SPDX-License-Identifier: MIT */
/*
 * CPU contexts for tests.
 */
#include "support_cpu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support_pool.h"

static void *allocate(void *user, size_t size)
{
    void *memory = NULL;
    (void)user;
    return posix_memalign(&memory, 64, size) == 0 ? memory : NULL;
}

static void release(void *user, void *memory)
{
    (void)user;
    free(memory);
}

const fmlai_allocator cpu_allocator = {.alloc = allocate, .release = release};

const fmla_isa *cpu_isas(void)
{
    static fmla_isa usable[FMLA_ISA_COUNT + 1];
    int32_t n = 0;
    for (int32_t isa = FMLA_ISA_SCALAR; isa < FMLA_ISA_COUNT; isa++) {
        if (fmlai_isa_usable((fmla_isa)isa)) {
            usable[n++] = (fmla_isa)isa;
        }
    }
    usable[n] = FMLA_ISA_AUTO;
    return usable;
}

fmlai_cpu *cpu_open(fmla_isa isa, int32_t threads)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmlai_error error = {0};
    void *state = NULL;
    config.isa = isa;
    config.threads = threads;
    assert_int_equal(fmlai_cpu_backend.open(&config, &cpu_allocator, &state, &error), FMLA_OK);
    return state;
}

void cpu_close(fmlai_cpu *cpu)
{
    fmlai_cpu_backend.close(cpu);
}

fmlai_call cpu_call(void)
{
    static fmlai_error error;
    return (fmlai_call){.error = &error};
}

static fmlai_call call_in(guarded *workspace, size_t size)
{
    fmlai_call call = cpu_call();
    *workspace = guarded_make((size + 63) / 64 * 64);
    call.workspace = workspace->data;
    call.workspace_size = size;
    return call;
}

void cpu_mqa(fmlai_cpu *cpu, const fmlai_mqa *p)
{
    guarded workspace;
    fmlai_call call = call_in(&workspace, fmlai_cpu_backend.mqa_workspace(cpu, p));
    assert_int_equal(fmlai_cpu_backend.mqa(cpu, p, &call), FMLA_OK);
    guarded_free(&workspace);
}

void cpu_mha_forward(fmlai_cpu *cpu, const fmlai_mha *p)
{
    guarded workspace;
    fmlai_call call = call_in(&workspace, fmlai_cpu_backend.mha_forward_workspace(cpu, p));
    assert_int_equal(fmlai_cpu_backend.mha_forward(cpu, p, &call), FMLA_OK);
    guarded_free(&workspace);
}

void cpu_mha_backward(fmlai_cpu *cpu, const fmlai_mha *p)
{
    guarded workspace;
    fmlai_call call = call_in(&workspace, fmlai_cpu_backend.mha_backward_workspace(cpu, p));
    assert_int_equal(fmlai_cpu_backend.mha_backward(cpu, p, &call), FMLA_OK);
    guarded_free(&workspace);
}
