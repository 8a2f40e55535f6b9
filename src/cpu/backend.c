/* SPDX-License-Identifier: MIT */
/*
 * backend.c: the CPU backend's table, and opening it: which tier, how many threads, which kernels.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "cpu.h"

#define DEFAULT_SPIN_US 100

/* Best first. */
static const fmla_isa tiers[] = {FMLA_ISA_AMX, FMLA_ISA_AVX512BF16, FMLA_ISA_AVX2, FMLA_ISA_NEON,
                                 FMLA_ISA_SCALAR};

static void usable_tiers(char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < sizeof tiers / sizeof tiers[0] && used < size; i++) {
        if (fmlai_isa_usable(tiers[i])) {
            used +=
                (size_t)snprintf(text + used, size - used, "%s%s", used ? " " : "", fmla_isa_name(tiers[i]));
        }
    }
}

/* Scalar first, then each tier up to the wanted one overwrites what it does better. */
static void choose_kernels(fmlai_cpu *cpu)
{
    fmlai_tile_init_scalar(&cpu->tile_f32, &cpu->tile_bf16);
    fmlai_quant_init_scalar(&cpu->quant);
    if (cpu->isa == FMLA_ISA_SCALAR) {
        return;
    }
#if defined(FLASHMLA_HAVE_NEON)
    if (cpu->isa == FMLA_ISA_NEON) {
        fmlai_tile_init_neon(&cpu->tile_f32, &cpu->tile_bf16);
        fmlai_quant_init_neon(&cpu->quant);
        return;
    }
#endif
#if defined(FLASHMLA_HAVE_AVX2)
    fmlai_tile_init_avx2(&cpu->tile_f32, &cpu->tile_bf16);
    fmlai_quant_init_avx2(&cpu->quant);
    if (cpu->isa == FMLA_ISA_AVX2) {
        return;
    }
#endif
#if defined(FLASHMLA_HAVE_AVX512BF16)
    fmlai_tile_init_avx512bf16(&cpu->tile_f32, &cpu->tile_bf16);
    fmlai_quant_init_avx512bf16(&cpu->quant);
#if defined(FLASHMLA_HAVE_AMX)
    if (cpu->isa == FMLA_ISA_AMX) {
        fmlai_tile_init_amx(&cpu->tile_f32, &cpu->tile_bf16);
    }
#endif
    if (cpu->isa == FMLA_ISA_AVX512BF16 && !fmlai_dot_bf16_pays()) {
        cpu->tile_bf16 = cpu->tile_f32;
    }
#endif
}

static void cpu_close(void *state)
{
    fmlai_cpu *cpu = state;
    fmlai_workers_destroy(cpu->workers);
    cpu->allocator.release(cpu->allocator.user, cpu);
}

static fmla_status check_tier(fmla_isa isa, fmlai_error *error)
{
    char usable[128];
    if (fmlai_isa_usable(isa)) {
        return FMLA_OK;
    }
    usable_tiers(usable, sizeof usable);
    return fmlai_fail(error, FMLA_ERROR_UNSUPPORTED, "isa %s: %s; usable here: %s", fmla_isa_name(isa),
                      fmlai_isa_offered(isa) ? "this library was built without it"
                                             : "this processor or its operating system does not offer it",
                      usable);
}

static fmla_status cpu_open(const fmla_context_config *config, const fmlai_allocator *allocator, void **state,
                            fmlai_error *error)
{
    fmla_isa isa = config->isa == FMLA_ISA_AUTO ? fmlai_isa_best() : (fmla_isa)config->isa;
    fmla_status status = check_tier(isa, error);
    int32_t processors = fmlai_processors();

    *state = NULL;
    if (status == FMLA_OK && isa == FMLA_ISA_AMX && !fmlai_amx_request()) {
        if (config->isa != FMLA_ISA_AUTO) {
            return fmlai_fail(error, FMLA_ERROR_UNSUPPORTED, "isa amx: the operating system refuses its registers");
        }
        isa = FMLA_ISA_AVX512BF16;
        status = check_tier(isa, error);
    }
    if (status != FMLA_OK) {
        return status;
    }
    fmlai_cpu *cpu = allocator->alloc(allocator->user, sizeof *cpu);
    if (!cpu) {
        return fmlai_fail(error, FMLA_ERROR_OUT_OF_MEMORY, "no memory for the CPU backend (%zu bytes)",
                          sizeof *cpu);
    }
    memset(cpu, 0, sizeof *cpu);
    cpu->allocator = *allocator;
    cpu->isa = isa;
    cpu->threads = config->threads > 0 ? config->threads : processors;
    cpu->parallel_for = config->parallel_for;
    cpu->parallel_for_pool = config->parallel_for_pool;
    choose_kernels(cpu);
    if (config->strict) {
        cpu->tile_bf16 = cpu->tile_f32; /* softmax weights are not rounded to bf16 */
    }
    if (cpu->threads > 1 && !cpu->parallel_for) {
        /* More workers than processors would spin against each other. */
        int32_t usual = cpu->threads > processors ? 0 : DEFAULT_SPIN_US;
        int32_t spin_us = config->spin_us == 0 ? usual : config->spin_us < 0 ? 0 : config->spin_us;
        status = fmlai_workers_create(allocator, cpu->threads, spin_us, &cpu->workers, error);
        if (status != FMLA_OK) {
            cpu_close(cpu);
            return status;
        }
    }
    *state = cpu;
    return FMLA_OK;
}

/* "model name : ..." of the first processor, or what the architecture is called. */
static void processor_name(char *name, size_t size)
{
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "r");
    snprintf(name, size, "CPU");
    while (file && fgets(line, sizeof line, file)) {
        char *value = strchr(line, ':');
        if (strncmp(line, "model name", 10) == 0 && value) {
            value += value[1] == ' ' ? 2 : 1;
            value[strcspn(value, "\n")] = '\0';
            snprintf(name, size, "%.127s", value);
            break;
        }
    }
    if (file) {
        fclose(file);
    }
}

static fmla_status cpu_device_info(int32_t index, fmla_device_info *info, fmlai_error *error)
{
    if (index != 0) {
        return fmlai_fail(error, FMLA_ERROR_NO_DEVICE, "device_index %d: there is one CPU device, 0", index);
    }
    info->device = FMLA_DEVICE_CPU;
    info->index = 0;
    processor_name(info->name, sizeof info->name);
    usable_tiers(info->kernels, sizeof info->kernels);
    info->compute_units = fmlai_processors();
    info->capability = fmlai_isa_best();
    info->memory_bytes = (int64_t)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
    info->shared_memory_bytes = (int64_t)fmlai_l2_bytes();
    return FMLA_OK;
}

static fmla_isa cpu_isa(const void *state)
{
    return ((const fmlai_cpu *)state)->isa;
}

static int32_t cpu_threads(const void *state)
{
    return ((const fmlai_cpu *)state)->threads;
}

static void *cpu_workspace_alloc(void *state, size_t size)
{
    fmlai_cpu *cpu = state;
    return cpu->allocator.alloc(cpu->allocator.user, size);
}

static void cpu_workspace_release(void *state, void *memory)
{
    fmlai_cpu *cpu = state;
    cpu->allocator.release(cpu->allocator.user, memory);
}

const fmlai_backend fmlai_cpu_backend = {
    .abi = FMLAI_BACKEND_ABI,
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .device_info = cpu_device_info,
    .isa = cpu_isa,
    .threads = cpu_threads,
    .workspace_alloc = cpu_workspace_alloc,
    .workspace_release = cpu_workspace_release,
    .mqa_workspace = fmlai_cpu_mqa_workspace,
    .mqa = fmlai_cpu_mqa,
    .mha_forward_workspace = fmlai_cpu_mha_forward_workspace,
    .mha_forward = fmlai_cpu_mha_forward,
    .mha_backward_workspace = fmlai_cpu_mha_backward_workspace,
    .mha_backward = fmlai_cpu_mha_backward,
    .quantize = fmlai_cpu_quantize,
    .dequantize = fmlai_cpu_dequantize,
    .convert = fmlai_cpu_convert,
    .indices_convert = fmlai_cpu_indices_convert,
    .fp8_cast = fmlai_cpu_fp8_cast,
    .merge = fmlai_cpu_merge,
    .permute = fmlai_cpu_permute,
    .schedule = fmlai_cpu_schedule,
};
