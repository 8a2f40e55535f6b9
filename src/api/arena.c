/* SPDX-License-Identifier: MIT */
/* arena.c: see arena.h. */
#include "arena.h"

#define PAGE 4096

static void give_back(const fmlai_arena *arena, void *memory)
{
    arena->source.release(arena->source.user, memory);
}

fmla_status fmlai_arena_grow(fmlai_arena *arena, size_t size, fmlai_error *error)
{
    if (size <= arena->size) {
        return FMLA_OK;
    }
    size_t wanted = size > SIZE_MAX - PAGE ? size : (size + PAGE - 1) / PAGE * PAGE;
    if (arena->keep && arena->size <= SIZE_MAX / 2 && wanted < 2 * arena->size) {
        wanted = 2 * arena->size;
    }
    bool room = arena->retired_count < FMLAI_RETIRED_MAX;
    void *memory = room ? arena->source.alloc(arena->source.user, wanted) : NULL;
    if (memory == NULL) {
        return fmlai_fail(error, FMLA_ERROR_OUT_OF_MEMORY,
                          "no memory for a workspace of %zu bytes; give one with the call, or fmla_context_reserve it "
                          "before",
                          wanted);
    }
    if (arena->memory != NULL && arena->keep) {
        arena->retired[arena->retired_count++] = arena->memory;
    } else if (arena->memory != NULL) {
        give_back(arena, arena->memory);
    }
    arena->memory = memory;
    arena->size = wanted;
    return FMLA_OK;
}

void fmlai_arena_free(fmlai_arena *arena)
{
    for (int32_t i = 0; i < arena->retired_count; i++) {
        give_back(arena, arena->retired[i]);
    }
    if (arena->memory != NULL) {
        give_back(arena, arena->memory);
    }
}
