/* SPDX-License-Identifier: MIT */
/*
 * cpu.h: the CPU backend's frame: its state, its threads, its table of kernels. Kernels live in one folder
 * per tier (scalar, avx2, avx512bf16, amx, neon); each family of kernels (tile, quant) has a header that says what
 * a kernel must do, and each tier has an init function per family that overwrites the entries it does better:
 * scalar first, then upwards.
 */
#ifndef FLASHMLA_CPU_H
#define FLASHMLA_CPU_H

#include "../backend.h"
#include "../format/format.h"
#include "quant/quant.h"
#include "tile.h"

typedef struct fmlai_workers fmlai_workers; /* the library's own threads, workers.c */

typedef struct fmlai_cpu {
    fmlai_allocator allocator;
    fmla_isa isa;           /* the tier in use */
    int32_t threads;        /* workers, the caller included */
    fmlai_workers *workers; /* NULL when the caller gave a parallel_for or there is one thread */
    fmla_parallel_for parallel_for;
    void *parallel_for_pool;
    fmlai_tile_kernels tile_f32;  /* fp16 and f32 data always, bf16 data where no bf16 product pays */
    fmlai_tile_kernels tile_bf16; /* bf16 data: equal to tile_f32 where no bf16 product pays, and in strict contexts */
    fmlai_quant_kernels quant;
} fmlai_cpu;

/*
 * Runs body(user, i, worker) for i in 0..count-1 and returns when all are done. Tasks are handed out in order
 * from a counter to at most cpu->threads workers, numbered 0..threads-1: a worker number is never in use
 * twice at a time, so it may choose scratch memory. Results must not depend on which worker ran what.
 */
void fmlai_cpu_run(const fmlai_cpu *cpu, int64_t count, void (*body)(void *user, int64_t i, int32_t worker),
                   void *user);

/* features.c: what processor and operating system offer (cpuid, xgetbv), and what was built. */
bool fmlai_isa_offered(fmla_isa isa); /* by the processor and its operating system */
bool fmlai_isa_built(fmla_isa isa);
fmla_isa fmlai_isa_best(void);
/* Asks the operating system for the AMX registers, for all threads of the process; false: it refuses. */
bool fmlai_amx_request(void);
/* Whether VDPBF16PS does more than fp32 multiply-adds of the same width: twice as much on AMD, half as much on
 * Intel. */
bool fmlai_dot_bf16_pays(void);
size_t fmlai_l2_bytes(void);
int32_t fmlai_processors(void); /* that this process may use: affinity and cgroup quota */

/* workers.c */
fmla_status fmlai_workers_create(const fmlai_allocator *allocator, int32_t threads, int32_t spin_us,
                                 fmlai_workers **workers, fmlai_error *error);
void fmlai_workers_destroy(fmlai_workers *workers);
void fmlai_workers_run(fmlai_workers *workers, void (*job)(void *user, int32_t worker), void *user);

/* mqa/, mha/, quant/, small operations: the entries of fmlai_cpu_backend (backend.c holds the table). */
size_t fmlai_cpu_mqa_workspace(const void *state, const fmlai_mqa *p);
fmla_status fmlai_cpu_mqa(void *state, const fmlai_mqa *p, const fmlai_call *call);
size_t fmlai_cpu_mha_forward_workspace(const void *state, const fmlai_mha *p);
fmla_status fmlai_cpu_mha_forward(void *state, const fmlai_mha *p, const fmlai_call *call);
size_t fmlai_cpu_mha_backward_workspace(const void *state, const fmlai_mha *p);
fmla_status fmlai_cpu_mha_backward(void *state, const fmlai_mha *p, const fmlai_call *call);
fmla_status fmlai_cpu_quantize(void *state, const fmlai_transcode *p, const fmlai_call *call);
fmla_status fmlai_cpu_dequantize(void *state, const fmlai_transcode *p, const fmlai_call *call);
fmla_status fmlai_cpu_convert(void *state, const fmlai_convert *p, const fmlai_call *call);
fmla_status fmlai_cpu_indices_convert(void *state, const fmlai_indices_convert *p, const fmlai_call *call);
fmla_status fmlai_cpu_fp8_cast(void *state, const fmlai_fp8_cast *p, const fmlai_call *call);
fmla_status fmlai_cpu_merge(void *state, const fmlai_merge *p, const fmlai_call *call);
fmla_status fmlai_cpu_permute(void *state, const fmlai_permute *p, const fmlai_call *call);
fmla_status fmlai_cpu_schedule(void *state, const fmlai_schedule *p, const fmlai_call *call);

#endif
