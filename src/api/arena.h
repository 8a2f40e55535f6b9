/* SPDX-License-Identifier: MIT */
/* arena.h: scratch memory that only grows, so that a steady caller makes it allocate nothing. */
#ifndef FLASHMLA_API_ARENA_H
#define FLASHMLA_API_ARENA_H

#include "../backend.h"

#define FMLAI_RETIRED_MAX 48

/* keep: blocks that a CUDA graph may still name are kept until the end; sizes at least double then, so that their sum
 * stays below the block in use. */
typedef struct fmlai_arena {
    fmlai_allocator source;
    bool keep;
    void *memory;
    size_t size;
    void *retired[FMLAI_RETIRED_MAX];
    int32_t retired_count;
} fmlai_arena;

/* Grows to at least `size` bytes; what stood in the memory is not kept. */
fmla_status fmlai_arena_grow(fmlai_arena *arena, size_t size, fmlai_error *error);
void fmlai_arena_free(fmlai_arena *arena);

#endif
