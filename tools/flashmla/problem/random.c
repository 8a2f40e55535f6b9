/* SPDX-License-Identifier: MIT */
/* random.c: seeds by splitmix64; orders and subsets. */
#include "problem/random.h"

#include <stdlib.h>

#include "problem/memory.h"

void rng_seed(rng *r, uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        seed += 0x9E3779B97F4A7C15u;
        uint64_t z = seed;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        r->state[i] = z ^ (z >> 31);
    }
}

void rng_permutation(rng *r, int64_t *order, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        order[i] = i;
    }
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = rng_below(r, i + 1);
        int64_t t = order[i];
        order[i] = order[j];
        order[j] = t;
    }
}

void rng_subset(rng *r, int64_t *chosen, int64_t k, int64_t n)
{
    /* Floyd's method, with a bitmap for membership, then a shuffle. */
    uint8_t *taken = xcalloc((size_t)(n / 8 + 1), 1);
    for (int64_t i = 0; i < k; i++) {
        int64_t top = n - k + i;
        int64_t pick = rng_below(r, top + 1);
        if (taken[pick / 8] & (1u << (pick % 8))) {
            pick = top;
        }
        taken[pick / 8] = (uint8_t)(taken[pick / 8] | (1u << (pick % 8)));
        chosen[i] = pick;
    }
    for (int64_t i = k - 1; i > 0; i--) {
        int64_t j = rng_below(r, i + 1);
        int64_t t = chosen[i];
        chosen[i] = chosen[j];
        chosen[j] = t;
    }
    free(taken);
}
