/* SPDX-License-Identifier: MIT */
/*
 * engine.h: a context with what a call in it needs. engine_run takes args written with host addresses and, on a
 * device, moves what they name; problems thus look the same everywhere.
 */
#ifndef FLASHMLA_TOOL_PROBLEM_ENGINE_H
#define FLASHMLA_TOOL_PROBLEM_ENGINE_H

#include "problem/memory.h"

typedef struct engine {
    fmla_context *context;
    cli_options options;
    bool host;
    void *stream; /* of a device's calls; NULL: the default one */
} engine;

typedef union any_args {
    size_t struct_size;
    fmla_decode_args decode;
    fmla_prefill_args prefill;
    fmla_fused_prefill_args fused_prefill;
    fmla_fused_decode_args fused_decode;
    fmla_mha_forward_args mha_forward;
    fmla_mha_backward_args mha_backward;
    fmla_quantize_args quantize;
    fmla_dequantize_args dequantize;
    fmla_convert_args convert;
    fmla_merge_args merge;
    fmla_permute_q_b_args permute_q_b;
    fmla_permute_wv_args permute_wv;
    fmla_indices_convert_args indices_convert;
    fmla_fp8_cast_args fp8_cast;
    fmla_schedule_args schedule;
} any_args;

/* CLI_OK, or CLI_ERROR with the message printed. */
int engine_open(engine *e, const cli_options *options);
/* A context on the host of the given tier and number of threads. */
int engine_open_host(engine *e, fmla_device device, fmla_isa isa, int32_t threads);
void engine_close(engine *e);

/* Runs the operation: copies in, calls, waits, copies out. The error's sentence is engine_error. */
fmla_status engine_run(engine *e, memory *m, fmla_operation op, const any_args *args);
const char *engine_error(const engine *e);

/*
 * Many calls on one problem: between (true) and (false) buffers stay on the device as calls leave them. The first
 * copies all known ones there, the last brings back those that were named; on the host nothing happens.
 */
fmla_status engine_resident(engine *e, memory *m, bool on);

/*
 * Inputs of many calls: engine_keep says of all buffers so far, but those of the given tensors, that nobody may change
 * them from now on; a device gets each of them once, with the first call that names it, and calls do not bring them
 * back. engine_untouched looks whether they still hold what they held, on the device too, guards included.
 * engine_release ends it. Known ones stay kept when engine_keep is called again for those that have been made since.
 */
void engine_keep(engine *e, memory *m, const fmla_tensor *const *without, int count);
fmla_status engine_untouched(engine *e, memory *m, bool *untouched);
void engine_release(memory *m);

/* The parts of engine_run, for timing: bound gets device addresses; engine_call only enqueues; engine_wait waits. */
fmla_status engine_bind(engine *e, memory *m, fmla_operation op, const any_args *args, any_args *bound);
fmla_status engine_call(engine *e, fmla_operation op, const any_args *bound);
fmla_status engine_wait(engine *e, memory *m);

#endif
