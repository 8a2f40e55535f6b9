/* SPDX-License-Identifier: MIT */
/*
 * random.h: seeded random numbers, the same on every machine (integers and exact floating point only), so that a seed
 * printed here replays anywhere.
 */
#ifndef FLASHMLA_TOOL_RANDOM_H
#define FLASHMLA_TOOL_RANDOM_H

#include <stdint.h>

typedef struct rng {
    uint64_t state[4];
} rng;

void rng_seed(rng *r, uint64_t seed);

static inline uint64_t rng_rotate(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

/* xoshiro256** */
static inline uint64_t rng_next(rng *r)
{
    uint64_t *s = r->state;
    uint64_t result = rng_rotate(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rng_rotate(s[3], 45);
    return result;
}

/* [0, 1) */
static inline double rng_uniform(rng *r)
{
    return (double)(rng_next(r) >> 11) * 0x1p-53;
}

/* 0..n-1; n >= 1 */
static inline int64_t rng_below(rng *r, int64_t n)
{
    return (int64_t)(((rng_next(r) >> 32) * (uint64_t)n) >> 32);
}

/* Bell-shaped, mean 0, variance 1, never beyond 3.47: the sum of four uniform numbers. */
static inline double rng_normal(rng *r)
{
    uint64_t bits = rng_next(r);
    int64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (int64_t)((bits >> (16 * i)) & 0xFFFF);
    }
    /* Four numbers of 0..65535: mean 131070, standard deviation 65536 / sqrt(3). */
    return (double)(sum - 131070) * (1.7320508075688772 / 65536.0);
}

/* A random order of 0..n-1. */
void rng_permutation(rng *r, int64_t *order, int64_t n);
/* k different numbers of 0..n-1 in random order; k <= n. */
void rng_subset(rng *r, int64_t *chosen, int64_t k, int64_t n);

#endif
