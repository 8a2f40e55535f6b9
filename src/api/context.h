/* SPDX-License-Identifier: MIT */
/*
 * context.h: what a context is, and the frame of every entry: one call at a time, the caller's struct read once,
 * workspace found, the backend called. Entries live in one file per operation family.
 */
#ifndef FLASHMLA_API_CONTEXT_H
#define FLASHMLA_API_CONTEXT_H

#include <stdatomic.h>

#include "../backend.h"
#include "arena.h"
#include "check.h"

#define FMLAI_ALIGNMENT 64

struct fmla_context {
    const fmlai_backend *backend;
    void *state;
    fmla_device device;
    fmlai_allocator allocator;
    atomic_flag running;
    fmlai_error error;
    fmlai_arena arena;               /* workspace, in the memory space of the backend */
    fmlai_merge_state *merge_states; /* host memory, grows */
    int32_t merge_capacity;
};

/* The body of an entry: args is the caller's struct, other the stream or where a size goes. */
typedef fmla_status (*fmlai_body)(fmla_context *context, const void *args, void *other);

/* Runs a body as the context's only call: INVALID_ARGUMENT without a context, BUSY when another call is running. A busy
 * context's error text is left alone: it belongs to the call that is running. */
fmla_status fmlai_guarded(fmla_context *context, fmlai_body body, const void *args, void *other);

/* A checker for a call that runs on `stream`, or (shapes_only) only asks for sizes. */
fmlai_checker fmlai_checker_for_run(fmla_context *context, const void *stream);
fmlai_checker fmlai_checker_for_size(fmla_context *context);

/* Memory for a call as a caller gave it: the last two members of args structs. */
typedef struct fmlai_workspace {
    void *memory;
    size_t size;
} fmlai_workspace;

/* What the backend gets besides the description: `need` bytes, the caller's if he gave any, else the arena's. */
fmla_status fmlai_prepare_call(fmla_context *context, fmlai_workspace own, size_t need, void *stream, fmlai_call *call);
/* The same for operations that need none. */
fmlai_call fmlai_plain_call(fmla_context *context, void *stream);

/* The common table, then the backend's own answer. */
fmla_status fmlai_context_supports(const fmla_context *context, const fmla_support_query *query, fmlai_error *error);

/* The ISA that the environment asks for (FLASHMLA_ISA), AUTO if it does not. */
fmla_status fmlai_isa_from_environment(fmla_isa *isa, fmlai_error *error);

/* The CUDA plugin, loaded once; NULL with NO_BACKEND and the loader's words. */
const fmlai_backend *fmlai_plugin_load(fmlai_error *error);

/* The thread's text of fmla_last_create_error. */
void fmlai_remember_create_error(const char *text);

#endif
