/* SPDX-License-Identifier: MIT */
/*
 * The tile kernels of every usable tier against float64, over shapes that fit no vector: each kernel by
 * itself, then the chain over several tiles, with masks, huge logits and NaN.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support_cpu.h"
#include "support_numbers.h"

static const int32_t row_counts[] = {1, 15, 16, 17, 33, 48, 65, 128};
static const int32_t token_counts[] = {1, 2, 7, 16, 31, 48, 127, 128};
static const int32_t dim_counts[] = {1, 16, 33, 64, 80, 191, 576};
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof(array)[0]))

/* A block of rows and a tile of tokens, in the kernels' layouts and as plain numbers. */
typedef struct fixture {
    const fmlai_tile_kernels *k;
    int32_t rows, tokens, d;
    int64_t stride;
    float *q; /* [rows][d], as the kernel sees them */
    float *v; /* [tokens][d] */
    void *tile;
    void *packed_rows, *packed_weights, *packed_sums;
    float *s;      /* [tokens][lanes] */
    float *result; /* [rows][d] */
} fixture;

static void *memory(size_t size)
{
    void *m = NULL;
    assert_int_equal(posix_memalign(&m, 64, size + 64), 0);
    memset(m, 0xFF, size + 64); /* NaN: nothing may rely on what was there */
    return m;
}

static float seen_by(const fmlai_tile_kernels *k, float x)
{
    return k->dtype == FMLA_BF16 ? fmlai_f32_from_bf16(fmlai_bf16_from_f32(x)) : x;
}

static void put(fixture *f, int32_t t, int32_t d, float x)
{
    x = seen_by(f->k, x);
    f->v[t * f->d + d] = x;
    fmlai_store_f32(f->tile, f->k->dtype, t * f->stride + d, x);
}

static void setup(fixture *f, const fmlai_tile_kernels *k, int32_t rows, int32_t tokens, int32_t d,
                  uint64_t *seed)
{
    size_t element = fmla_dtype_size(k->dtype);
    *f = (fixture){.k = k, .rows = rows, .tokens = tokens, .d = d, .stride = fmlai_tile_stride(k->dtype, d)};
    f->q = memory((size_t)(rows * d) * sizeof(float));
    f->v = memory((size_t)(tokens * d) * sizeof(float));
    f->tile = memory((size_t)(tokens * f->stride) * element);
    f->packed_rows = memory(k->packed_rows_bytes(rows, d));
    f->packed_weights = memory(k->packed_weights_bytes(rows, tokens));
    f->packed_sums = memory(k->packed_sums_bytes(rows, d));
    f->s = memory((size_t)(tokens * fmlai_tile_lanes(rows)) * sizeof(float));
    f->result = memory((size_t)(rows * d) * sizeof(float));
    memset(f->tile, 0, (size_t)(tokens * f->stride) * element);
    for (int32_t i = 0; i < rows * d; i++) {
        f->q[i] = seen_by(k, test_random_unit(seed));
    }
    for (int32_t t = 0; t < tokens; t++) {
        for (int32_t i = 0; i < d; i++) {
            put(f, t, i, test_random_unit(seed));
        }
    }
    k->pack_rows(f->packed_rows, f->q, d, rows, d);
}

static void teardown(fixture *f)
{
    void *all[] = {f->q, f->v, f->tile, f->packed_rows, f->packed_weights, f->packed_sums, f->s, f->result};
    for (int32_t i = 0; i < COUNT(all); i++) {
        free(all[i]);
    }
}

static void scores(fixture *f)
{
    f->k->scores(f->s, f->packed_rows, f->tile, f->stride, f->rows, f->tokens, f->d);
}

/* Runs body on both kernel tables of every usable tier (one, where they are the same). */
static void for_each_table(void (*body)(const fmlai_tile_kernels *k))
{
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_cpu *cpu = cpu_open(*isa, 1);
        body(&cpu->tile_f32);
        if (cpu->tile_bf16.dtype != cpu->tile_f32.dtype) {
            body(&cpu->tile_bf16);
        }
        cpu_close(cpu);
    }
}

static void assert_within(const fixture *f, const char *what, int32_t row, int32_t column, double x,
                          double expected, double bound)
{
    if (isnan(expected) ? !isnan(x) : !(fabs(x - expected) <= bound)) {
        fail_msg(
            "%s, %s tiles, %d rows, %d tokens, %d dims: %s of row %d, %d: %.9g, expected %.9g within %.3g",
            f->k->name, fmla_dtype_name(f->k->dtype), f->rows, f->tokens, f->d, what, row, column, x,
            expected, bound);
    }
}

static void check_scores(const fixture *f, int unit)
{
    for (int32_t r = 0; r < f->rows; r++) {
        for (int32_t t = 0; t < f->tokens; t++) {
            double sum = 0, size = 0;
            for (int32_t i = 0; i < f->d; i++) {
                double product = (double)f->q[r * f->d + i] * f->v[t * f->d + i];
                sum += product;
                size += fabs(product);
            }
            assert_within(f, "score", r, t, f->s[t * fmlai_tile_lanes(f->rows) + r], sum, ldexp(size, unit));
        }
    }
}

static void scores_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 1;
    for (int32_t i = 0; i < COUNT(row_counts); i++) {
        for (int32_t j = 0; j < COUNT(token_counts); j++) {
            for (int32_t l = 0; l < COUNT(dim_counts); l++) {
                fixture f;
                setup(&f, k, row_counts[i], token_counts[j], dim_counts[l], &seed);
                scores(&f);
                if ((i + j + l) % 3 == 0 ||
                    dim_counts[l] < 100) { /* the reference takes longer than the kernel */
                    check_scores(&f, -20);
                }
                teardown(&f);
            }
        }
    }
}

static void scores_agree_with_float64(void **state)
{
    (void)state;
    for_each_table(scores_of);
}

/* Equal products are the worst case of a long chain: all roundings go the same way. 2^-19 is what lse may be
 * off. */
static void equal_products_of(const fmlai_tile_kernels *k)
{
    static const float values[] = {1.1f, 1.7421875f, 0.3f, 1.9921875f};
    uint64_t seed = 2;
    for (int32_t i = 0; i < COUNT(values); i++) {
        fixture f;
        setup(&f, k, 16, 5, 576, &seed);
        for (int32_t j = 0; j < f.rows * f.d; j++) {
            f.q[j] = seen_by(k, values[i]);
        }
        for (int32_t j = 0; j < f.tokens * f.d; j++) {
            put(&f, j / f.d, j % f.d, values[(i + j / f.d) % COUNT(values)]);
        }
        k->pack_rows(f.packed_rows, f.q, f.d, f.rows, f.d);
        scores(&f);
        check_scores(&f, -19);
        teardown(&f);
    }
}

static void equal_products_keep_their_sum(void **state)
{
    (void)state;
    for_each_table(equal_products_of);
}

/* What the chain should give, in float64, from the scores as the kernels had them. */
typedef struct expected_row {
    double m, l;
    double sums[576], sizes[576]; /* weighted sums of v and of |v| */
} expected_row;

static int32_t clamp(int32_t x, int32_t high)
{
    return x < 0 ? 0 : x > high ? high : x;
}

static void expect_tile(expected_row *e, const fixture *f, int32_t r, float scale2, int32_t visible)
{
    int32_t lanes = fmlai_tile_lanes(f->rows), n = clamp(visible, f->tokens);
    double m = e->m;
    for (int32_t t = 0; t < n; t++) {
        double x = (double)f->s[t * lanes + r] * scale2;
        m = isnan(m) || m > x ? m : x;
    }
    double shrink = exp2(e->m - m);
    e->l *= shrink;
    for (int32_t i = 0; i < f->d; i++) {
        e->sums[i] *= shrink;
        e->sizes[i] *= shrink;
    }
    for (int32_t t = 0; t < n; t++) {
        double w = exp2((double)f->s[t * lanes + r] * scale2 - m);
        e->l += w;
        for (int32_t i = 0; i < f->d; i++) {
            e->sums[i] += w * f->v[t * f->d + i];
            e->sizes[i] += w * fabs(f->v[t * f->d + i]);
        }
    }
    e->m = m;
}

/* One tile through softmax and accumulate. */
static void step(fixture *f, fmlai_softmax_state *state, const float *scale2, const int32_t *visible,
                 bool first)
{
    float alpha[FMLAI_TILE_ROWS];
    f->k->softmax(state, alpha, f->packed_weights, f->s, scale2, visible, f->rows, f->tokens);
    f->k->accumulate(f->packed_sums, f->packed_weights, f->tile, f->stride, first ? NULL : alpha, visible,
                     f->rows, f->tokens, f->d);
}

static void check_rows(fixture *f, const fmlai_softmax_state *state, const expected_row *expected)
{
    f->k->unpack(f->result, f->d, f->packed_sums, NULL, f->rows, 0, f->rows, f->d);
    for (int32_t r = 0; r < f->rows; r++) {
        const expected_row *e = &expected[r];
        bool empty = e->l == 0;
        int weight = f->k->dtype == FMLA_BF16 ? -8 : -19;
        assert_within(f, "m", r, 0, state->m[r], empty ? -FLT_MAX : e->m, ldexp(fabs(e->m), -22));
        assert_within(f, "l", r, 0, state->l[r], e->l, ldexp(e->l, -20) + ldexp(fabs(e->m) * e->l, -22));
        for (int32_t i = 0; i < f->d; i++) {
            double bound = ldexp(e->sizes[i], weight) + ldexp(fabs(e->m) * e->sizes[i], -22);
            assert_within(f, "sum", r, i, f->result[r * f->d + i], e->sums[i], bound);
        }
    }
}

typedef enum poison { CLEAN, HUGE, NAN_LOGIT, UNSEEN_NAN } poison;

/* Several tiles in a row; all have the same number of tokens, and rows see what `visible` of the tile says.
 */
static void run_chain(const fmlai_tile_kernels *k, int32_t rows, int32_t tokens, int32_t d, bool masked,
                      poison what, uint64_t *seed)
{
    fixture f;
    fmlai_softmax_state state;
    float scale2[FMLAI_TILE_ROWS];
    int32_t visible[FMLAI_TILE_ROWS] = {0};
    expected_row *expected = calloc((size_t)rows, sizeof *expected);
    assert_non_null(expected);
    setup(&f, k, rows, tokens, d, seed);
    fmlai_softmax_start(&state);
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        scale2[r] = (r % 3 ? 2.0f : -1.5f) * (what == HUGE ? 1e30f : 1.0f);
    }
    for (int32_t r = 0; r < rows; r++) {
        expected[r].m = -(double)FLT_MAX;
    }
    for (int32_t tile = 0; tile < 3; tile++) {
        int32_t most = 0;
        for (int32_t i = 0; i < tokens * d; i++) {
            put(&f, i / d, i % d,
                what == HUGE ? -1.0f - fabsf(test_random_unit(seed)) : test_random_unit(seed));
        }
        for (int32_t r = 0; masked && r < rows; r++) {
            visible[r] =
                (int32_t)(test_random(seed) % (uint64_t)(tokens + 3)) - 1; /* -1 and tokens + 1 included */
            most = visible[r] > most ? visible[r] : most;
        }
        if (what == NAN_LOGIT && tile == 1) {
            put(&f, tokens / 2, d - 1, NAN);
        }
        scores(&f);
        if (what == UNSEEN_NAN) { /* after the scores were taken: the mask must hide values of any kind */
            for (int32_t t = tokens / 2; t < tokens; t++) {
                fmlai_store_f32(f.tile, k->dtype, t * f.stride + t % d, t % 2 ? NAN : INFINITY);
                f.v[t * d + t % d] = t % 2 ? NAN : INFINITY;
            }
        }
        for (int32_t r = 0; r < rows; r++) {
            expect_tile(&expected[r], &f, r, scale2[r], masked ? visible[r] : tokens);
        }
        step(&f, &state, scale2, masked ? visible : NULL, tile == 0);
    }
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t i = 0; what == UNSEEN_NAN && i < d;
             i++) { /* an attended infinity: inf and NaN are as good */
            expected[r].sums[i] = isfinite(expected[r].sums[i]) ? expected[r].sums[i] : NAN;
            f.result[r * d + i] = 0;
        }
    }
    if (what == UNSEEN_NAN) {
        k->unpack(f.result, d, f.packed_sums, NULL, rows, 0, rows, d);
        for (int32_t i = 0; i < rows * d; i++) {
            bool finite = isfinite(expected[i / d].sums[i % d]);
            if (finite != (isfinite(f.result[i]) != 0)) {
                fail_msg("%s: sum of row %d, dim %d: %g", k->name, i / d, i % d, (double)f.result[i]);
            }
        }
    } else {
        check_rows(&f, &state, expected);
    }
    teardown(&f);
    free(expected);
}

static void chains_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 3;
    for (int32_t i = 0; i < COUNT(row_counts); i++) {
        for (int32_t j = 0; j < COUNT(token_counts); j++) {
            int32_t d = dim_counts[(i * 3 + j) % COUNT(dim_counts)];
            d = row_counts[i] * token_counts[j] > 3000 && d > 100 ? 97 : d;
            run_chain(k, row_counts[i], token_counts[j], d, j % 2 == 1, CLEAN, &seed);
            run_chain(k, row_counts[i], token_counts[j], dim_counts[j % 5], i % 2 == 1, CLEAN, &seed);
        }
    }
}

static void running_softmax_and_sums_agree_with_float64(void **state)
{
    (void)state;
    for_each_table(chains_of);
}

static void huge_chains_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 4;
    run_chain(k, 17, 5, 16, false, HUGE, &seed);
    run_chain(k, 65, 48, 33, true, HUGE, &seed);
}

/* Every logit is about -1e31 or 1e31. */
static void c090_no_floor_under_logits(void **state)
{
    (void)state;
    for_each_table(huge_chains_of);
}

static void nan_chains_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 5;
    run_chain(k, 1, 1, 1, false, NAN_LOGIT, &seed);
    run_chain(k, 33, 31, 64, false, NAN_LOGIT, &seed);
    run_chain(k, 128, 127, 80, true, NAN_LOGIT, &seed);
}

/* Rows that see the token are NaN in all elements, for good; the others are as exact as ever. */
static void nan_logit_stays_in_its_row(void **state)
{
    (void)state;
    for_each_table(nan_chains_of);
}

static void unseen_chains_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 6;
    for (int32_t i = 0; i < COUNT(row_counts); i++) {
        run_chain(k, row_counts[i], token_counts[i], 48, true, UNSEEN_NAN, &seed);
        run_chain(k, row_counts[i], 128, 33, true, UNSEEN_NAN, &seed);
    }
}

/* An infinity or NaN reaches just the sums of rows that see its token, and of these just its dim. */
static void c004_unseen_values_reach_no_sum(void **state)
{
    (void)state;
    for_each_table(unseen_chains_of);
}

/* Minus infinity everywhere: as if there were no tokens. */
static void infinite_logits_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 7;
    fixture f;
    fmlai_softmax_state state;
    float scale2[FMLAI_TILE_ROWS];
    setup(&f, k, 20, 9, 16, &seed);
    fmlai_softmax_start(&state);
    for (int32_t i = 0; i < FMLAI_TILE_ROWS; i++) {
        scale2[i] = 1.0f;
    }
    for (int32_t i = 0; i < f.tokens * fmlai_tile_lanes(f.rows); i++) {
        f.s[i] = -INFINITY;
    }
    step(&f, &state, scale2, NULL, true);
    f.k->unpack(f.result, f.d, f.packed_sums, NULL, f.rows, 0, f.rows, f.d);
    for (int32_t r = 0; r < f.rows; r++) {
        assert_true(state.m[r] == -FLT_MAX && state.l[r] == 0.0f);
        for (int32_t i = 0; i < f.d; i++) {
            assert_true(f.result[r * f.d + i] == 0.0f);
        }
    }
    teardown(&f);
}

static void logits_of_minus_infinity_weigh_nothing(void **state)
{
    (void)state;
    for_each_table(infinite_logits_of);
}

/* A row of a block has the bits that it has alone, and tokens after the last that it sees do not change them.
 */
static void bits_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 8;
    fixture all, one;
    fmlai_softmax_state all_state, one_state;
    float scale2[FMLAI_TILE_ROWS];
    int32_t visible[FMLAI_TILE_ROWS] = {0};
    setup(&all, k, 70, 128, 200, &seed);
    scores(&all);
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        scale2[r] = 0.5f;
        visible[r] = 1 + r * 37 % 128;
    }
    fmlai_softmax_start(&all_state);
    step(&all, &all_state, scale2, visible, true);
    k->unpack(all.result, all.d, all.packed_sums, NULL, all.rows, 0, all.rows, all.d);
    for (int32_t r = 0; r < all.rows; r += 3) {
        setup(&one, k, 1, visible[r], all.d, &seed);
        memcpy(one.q, all.q + r * all.d, (size_t)all.d * sizeof(float));
        for (int32_t i = 0; i < one.tokens * one.d; i++) {
            put(&one, i / one.d, i % one.d, all.v[i]);
        }
        k->pack_rows(one.packed_rows, one.q, one.d, 1, one.d);
        fmlai_softmax_start(&one_state);
        scores(&one);
        step(&one, &one_state, scale2, NULL, true);
        k->unpack(one.result, one.d, one.packed_sums, NULL, 1, 0, 1, one.d);
        assert_true(one_state.m[0] == all_state.m[r]);
        assert_true(one_state.l[0] == all_state.l[r]);
        assert_memory_equal(one.result, all.result + r * all.d, (size_t)all.d * sizeof(float));
        teardown(&one);
    }
    teardown(&all);
}

static void promise_8_rows_do_not_depend_on_their_block(void **state)
{
    (void)state;
    for_each_table(bits_of);
}

/* pack_turned gives what pack_weights gives. */
static void same_if_turned(fixture *f, const float *w)
{
    const fmlai_tile_kernels *k = f->k;
    int32_t lanes = fmlai_tile_lanes(f->rows), stride = fmlai_tile_lanes(f->tokens);
    size_t size = (size_t)(f->rows * f->d) * sizeof(float);
    float *turned = memory((size_t)(f->rows * stride) * sizeof(float)), *direct = memory(size);
    for (int32_t i = 0; i < f->rows * stride; i++) {
        turned[i] = i % stride < f->tokens ? w[i % stride * lanes + i / stride] : NAN;
    }
    k->pack_weights(f->packed_weights, w, f->rows, f->tokens);
    k->accumulate(f->packed_sums, f->packed_weights, f->tile, f->stride, NULL, NULL, f->rows, f->tokens, f->d);
    k->unpack(direct, f->d, f->packed_sums, NULL, f->rows, 0, f->rows, f->d);
    k->pack_turned(f->packed_weights, turned, stride, f->rows, f->tokens);
    k->accumulate(f->packed_sums, f->packed_weights, f->tile, f->stride, NULL, NULL, f->rows, f->tokens, f->d);
    k->unpack(f->result, f->d, f->packed_sums, NULL, f->rows, 0, f->rows, f->d);
    assert_memory_equal(direct, f->result, size);
    free(direct);
    free(turned);
}

/* Weights given by a caller, against float64; weights of unseen tokens are zero, as the contract says. */
static void given_weights_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 9;
    for (int32_t i = 0; i < COUNT(row_counts); i++) {
        fixture f;
        int32_t rows = row_counts[i], tokens = token_counts[COUNT(token_counts) - 1 - i],
                lanes = fmlai_tile_lanes(rows);
        float *w = memory((size_t)(tokens * lanes) * sizeof(float)), alpha[FMLAI_TILE_ROWS];
        setup(&f, k, rows, tokens, dim_counts[i % 6], &seed);
        for (int32_t j = 0; j < tokens * lanes; j++) {
            w[j] = seen_by(k, test_random_unit(&seed));
        }
        for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
            alpha[r] = test_random_unit(&seed);
        }
        same_if_turned(&f, w);
        k->pack_weights(f.packed_weights, w, rows, tokens);
        k->accumulate(f.packed_sums, f.packed_weights, f.tile, f.stride, NULL, NULL, rows, tokens, f.d);
        k->accumulate(f.packed_sums, f.packed_weights, f.tile, f.stride, alpha, NULL, rows, tokens, f.d);
        k->unpack(f.result, f.d, f.packed_sums, NULL, rows, 0, rows, f.d);
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t d = 0; d < f.d; d++) {
                double sum = 0, size = 0;
                for (int32_t t = 0; t < tokens; t++) {
                    sum += (double)w[t * lanes + r] * f.v[t * f.d + d];
                    size += fabs((double)w[t * lanes + r] * f.v[t * f.d + d]);
                }
                assert_within(&f, "sum", r, d, f.result[r * f.d + d], sum * (1 + (double)alpha[r]),
                              ldexp(size, -20));
            }
        }
        free(w);
        teardown(&f);
    }
}

static void given_weights_agree_with_float64(void **state)
{
    (void)state;
    for_each_table(given_weights_of);
}

/* Values down to the smallest bf16 among large ones and alone: processors' bf16 products take subnormal
 * numbers for zero. */
static void tiny_values_of(const fmlai_tile_kernels *k)
{
    uint64_t seed = 10;
    for (int32_t kind = 0; kind < 3; kind++) {
        fixture f;
        float *w = memory((size_t)(31 * 48) * sizeof(float));
        setup(&f, k, 33, 31, 96, &seed);
        for (int32_t j = 0; j < 31 * 48; j++) {
            w[j] = seen_by(k, fabsf(test_random_unit(&seed)));
        }
        for (int32_t j = 0; j < f.tokens * f.d; j++) {
            float x = fmlai_f32_from_bf16((uint16_t)(1 + test_random(&seed) % (kind == 0 ? 127 : 63 * 128)));
            if (kind < 2 || j % f.d < 40) {
                put(&f, j / f.d, j % f.d, test_random(&seed) % 2 ? x : -x);
            }
        }
        k->pack_weights(f.packed_weights, w, f.rows, f.tokens);
        k->accumulate(f.packed_sums, f.packed_weights, f.tile, f.stride, NULL, NULL, f.rows, f.tokens, f.d);
        k->unpack(f.result, f.d, f.packed_sums, NULL, f.rows, 0, f.rows, f.d);
        for (int32_t r = 0; r < f.rows; r++) {
            for (int32_t d = 0; d < f.d; d++) {
                double sum = 0, size = 0;
                for (int32_t t = 0; t < f.tokens; t++) {
                    sum += (double)w[t * 48 + r] * f.v[t * f.d + d];
                    size += fabs((double)w[t * 48 + r] * f.v[t * f.d + d]);
                }
                double bound =
                    ldexp(size, -19) + 62 * ldexp(1, -149); /* an fp32 sum is a multiple of 2^-149 */
                assert_within(&f, "sum", r, d, f.result[r * f.d + d], sum, bound);
            }
        }
        free(w);
        teardown(&f);
    }
}

static void c094_tiny_values_keep_their_accuracy(void **state)
{
    (void)state;
    for_each_table(tiny_values_of);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scores_agree_with_float64),
        cmocka_unit_test(equal_products_keep_their_sum),
        cmocka_unit_test(running_softmax_and_sums_agree_with_float64),
        cmocka_unit_test(c090_no_floor_under_logits),
        cmocka_unit_test(nan_logit_stays_in_its_row),
        cmocka_unit_test(c004_unseen_values_reach_no_sum),
        cmocka_unit_test(logits_of_minus_infinity_weigh_nothing),
        cmocka_unit_test(promise_8_rows_do_not_depend_on_their_block),
        cmocka_unit_test(given_weights_agree_with_float64),
        cmocka_unit_test(c094_tiny_values_keep_their_accuracy),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
