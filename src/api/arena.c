/* SPDX-License-Identifier: MIT */
/* arena.c: the context's own workspace. It grows and never shrinks, so that a steady caller makes it allocate nothing.
 */
#include "context.h"

#define PAGE 4096

static void *take(const fmla_context *context, size_t size)
{
    const fmlai_backend *b = context->backend;
    return b->workspace_alloc != NULL ? b->workspace_alloc(context->state, size)
                                      : context->allocator.alloc(context->allocator.user, size);
}

static void give_back(const fmla_context *context, void *memory)
{
    const fmlai_backend *b = context->backend;
    if (b->workspace_alloc != NULL) {
        b->workspace_release(context->state, memory);
    } else {
        context->allocator.release(context->allocator.user, memory);
    }
}

fmla_status fmlai_arena_grow(fmla_context *context, size_t size)
{
    fmlai_arena *arena = &context->arena;
    const bool keep = context->device == FMLA_DEVICE_CUDA;
    if (size <= arena->size) {
        return FMLA_OK;
    }
    size_t wanted = size > SIZE_MAX - PAGE ? size : (size + PAGE - 1) / PAGE * PAGE;
    if (keep && arena->size <= SIZE_MAX / 2 && wanted < 2 * arena->size) {
        wanted = 2 * arena->size;
    }
    void *memory = arena->retired_count < FMLAI_RETIRED_MAX ? take(context, wanted) : NULL;
    if (memory == NULL) {
        return fmlai_fail(&context->error, FMLA_ERROR_OUT_OF_MEMORY,
                          "no memory for a workspace of %zu bytes; give one with the call, or fmla_context_reserve it "
                          "before",
                          wanted);
    }
    if (arena->memory != NULL && keep) {
        arena->retired[arena->retired_count++] = arena->memory;
    } else if (arena->memory != NULL) {
        give_back(context, arena->memory);
    }
    arena->memory = memory;
    arena->size = wanted;
    return FMLA_OK;
}

void fmlai_arena_free(fmla_context *context)
{
    fmlai_arena *arena = &context->arena;
    for (int32_t i = 0; i < arena->retired_count; i++) {
        give_back(context, arena->retired[i]);
    }
    if (arena->memory != NULL) {
        give_back(context, arena->memory);
    }
}

static fmla_status reserve(fmla_context *context, const void *size, void *unused)
{
    (void)unused;
    return fmlai_arena_grow(context, *(const size_t *)size);
}

fmla_status fmla_context_reserve(fmla_context *context, size_t size)
{
    return fmlai_guarded(context, reserve, &size, NULL);
}
