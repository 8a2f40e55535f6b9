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
uint64_t rng_next(rng *r);
/* [0, 1) */
double rng_uniform(rng *r);
/* 0..n-1; n >= 1 */
int64_t rng_below(rng *r, int64_t n);
/* Bell-shaped, mean 0, variance 1, never beyond 3.47: the sum of four uniform numbers. */
double rng_normal(rng *r);
/* A random order of 0..n-1. */
void rng_permutation(rng *r, int64_t *order, int64_t n);
/* k different numbers of 0..n-1 in random order; k <= n. */
void rng_subset(rng *r, int64_t *chosen, int64_t k, int64_t n);

#endif
