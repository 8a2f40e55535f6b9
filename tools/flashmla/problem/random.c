/* SPDX-License-Identifier: MIT */
/* random.c: xoshiro256** seeded by splitmix64, and what is drawn from it. */
#include "problem/random.h"

#include <stdlib.h>

#include "problem/memory.h"

static uint64_t rotate(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

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

uint64_t rng_next(rng *r)
{
    uint64_t *s = r->state;
    uint64_t result = rotate(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate(s[3], 45);
    return result;
}

double rng_uniform(rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

int64_t rng_below(rng *r, int64_t n)
{
    return (int64_t)(((rng_next(r) >> 32) * (uint64_t)n) >> 32);
}

double rng_normal(rng *r)
{
    uint64_t bits = rng_next(r);
    int64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (int64_t)((bits >> (16 * i)) & 0xFFFF);
    }
    /* Four numbers of 0..65535: mean 131070, standard deviation 65536 / sqrt(3). */
    return (double)(sum - 131070) * (1.7320508075688772 / 65536.0);
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
