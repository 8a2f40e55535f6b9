/* SPDX-License-Identifier: MIT */
/* walk.c: where tokens of a walk are. */
#include "walk.h"

void fmlai_cpu_walk_locate(fmlai_token_at *at, const fmlai_pool *pool, const int64_t *slots, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        at[i] = fmlai_token_locate(pool, slots[i]);
    }
}
