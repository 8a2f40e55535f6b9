/* SPDX-License-Identifier: MIT */
/*
 * backend.h: what a backend offers. Three exist: oracle and CPU inside the library, CUDA in a plugin that is loaded at
 * run time (libflashmla_cuda.so, one exported symbol, fmlai_cuda_backend). src/api is the only caller.
 */
#ifndef FLASHMLA_BACKEND_H
#define FLASHMLA_BACKEND_H

#include "problem.h"

/* A status with its sentence. Functions that can fail take one and return its status. */
typedef struct fmlai_error {
    fmla_status status;
    char text[512];
} fmlai_error;

/* Writes status and sentence, returns status. The only way errors are made. */
fmla_status fmlai_fail(fmlai_error *error, fmla_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* Host memory of a context: the caller's functions or the C library's. 64-byte aligned. */
typedef struct fmlai_allocator {
    fmla_alloc alloc;
    fmla_release release;
    void *user;
} fmlai_allocator;

/* What a call may use besides its description. */
typedef struct fmlai_call {
    void *stream;
    void *workspace;       /* at least what the backend's workspace function asked for; 64-byte aligned */
    size_t workspace_size;
    fmlai_error *error;
} fmlai_call;

#define FMLAI_BACKEND_ABI 1u

/*
 * Every function gets the state that open() made. A function left NULL means: operation not offered (UNSUPPORTED).
 * workspace(): bytes that carrying out this description needs, from shapes alone. The other functions run (CPU) or
 * enqueue (CUDA) it. Descriptions with nothing to do (zero rows) never reach a backend.
 */
typedef struct fmlai_backend {
    uint32_t abi;  /* FMLAI_BACKEND_ABI */
    const char *name;
    fmla_status (*open)(const fmla_context_config *config, const fmlai_allocator *allocator, void **state,
                        fmlai_error *error);
    void (*close)(void *state);
    /* Fills info for device `index`; state not needed. NO_DEVICE beyond the last. */
    fmla_status (*device_info)(int32_t index, fmla_device_info *info, fmlai_error *error);
    /* What open() decided. */
    fmla_isa (*isa)(const void *state);
    int32_t (*threads)(const void *state);

    /* Workspace memory in the backend's own memory space. */
    void *(*workspace_alloc)(void *state, size_t size);
    void (*workspace_release)(void *state, void *memory);

    /* NULL: everything that the common table allows. Else 0 with a sentence in error, or 1. */
    int32_t (*supports)(const void *state, const fmla_support_query *query, fmlai_error *error);

    size_t (*mqa_workspace)(const void *state, const fmlai_mqa *p);
    fmla_status (*mqa)(void *state, const fmlai_mqa *p, const fmlai_call *call);
    size_t (*mha_forward_workspace)(const void *state, const fmlai_mha *p);
    fmla_status (*mha_forward)(void *state, const fmlai_mha *p, const fmlai_call *call);
    size_t (*mha_backward_workspace)(const void *state, const fmlai_mha *p);
    fmla_status (*mha_backward)(void *state, const fmlai_mha *p, const fmlai_call *call);
    fmla_status (*quantize)(void *state, const fmlai_transcode *p, const fmlai_call *call);
    fmla_status (*dequantize)(void *state, const fmlai_transcode *p, const fmlai_call *call);
    fmla_status (*convert)(void *state, const fmlai_convert *p, const fmlai_call *call);
    fmla_status (*indices_convert)(void *state, const fmlai_indices_convert *p, const fmlai_call *call);
    fmla_status (*fp8_cast)(void *state, const fmlai_fp8_cast *p, const fmlai_call *call);
    fmla_status (*merge)(void *state, const fmlai_merge *p, const fmlai_call *call);
    fmla_status (*permute)(void *state, const fmlai_permute *p, const fmlai_call *call);
    fmla_status (*schedule)(void *state, const fmlai_schedule *p, const fmlai_call *call);
} fmlai_backend;

extern const fmlai_backend fmlai_oracle_backend;
extern const fmlai_backend fmlai_cpu_backend;

/* Whether a CPU tier was built and this processor and its operating system can run it (AVX512BF16 built on an
 * emulation: wherever AVX2 is). cpu/features.c */
bool fmlai_isa_usable(fmla_isa isa);

#endif
