/* SPDX-License-Identifier: MIT */
/*
 * The oracle's multi-query attention on cases small enough to be worked out by hand.
 */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "support_numbers.h"
#include "support_oracle.h"
#include "support_pool.h"

#define D_QK    6
#define D_V     4
#define TOKENS  8 /* in the main pool, as 4 pages of 2 */
#define EXTRA   4 /* in the extra pool, one page */
#define QUERIES 4
#define HEADS   2
#define ROWS    (QUERIES * HEADS)
#define EXACT   1e-14 /* a few float64 roundings of numbers around 1 */

/* One request of up to QUERIES query tokens; everything starts as "all tokens of the main pool, in order". */
typedef struct fixture {
    uint16_t main[TOKENS][D_QK], extra[EXTRA][D_QK], q[QUERIES][HEADS][D_QK];
    int32_t indices[QUERIES][TOKENS], extra_indices[QUERIES][EXTRA], table[TOKENS], seqlens[1];
    int32_t lengths[QUERIES];
    float sink[HEADS];
    double out[QUERIES][HEADS][D_V], abs_out[QUERIES][HEADS][D_V];
    double lse[QUERIES][HEADS], max_logits[QUERIES][HEADS], abs_logit[QUERIES][HEADS];
    fmlai_mqa p;
} fixture;

static fmlai_rows rows_of(void *data, fmla_dtype dtype, int64_t width)
{
    return (fmlai_rows){.data = data, .dtype = dtype, .stride = {ROWS * width, HEADS * width, width}};
}

static void set_vector(uint16_t *dst, int32_t n, const double *x)
{
    for (int32_t d = 0; d < n; d++) {
        dst[d] = fmlai_bf16_from_f64(x[d]);
    }
}

static double bf16(uint16_t bits)
{
    return (double)fmlai_f32_from_bf16(bits);
}

static void random_vectors(uint16_t *dst, int64_t n, uint64_t *seed)
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = fmlai_bf16_from_f32(test_random_unit(seed));
    }
}

static void use_indices(fixture *f, int64_t topk)
{
    f->p.main.kind = FMLAI_LIST_INDEXED;
    f->p.main.topk = topk;
}

static void use_pages(fixture *f, int32_t length)
{
    f->p.main.kind = FMLAI_LIST_PAGED;
    f->seqlens[0] = length;
}

static void use_lengths(fixture *f, fmlai_lengths *lengths)
{
    *lengths = (fmlai_lengths){.data = f->lengths, .outer_stride = QUERIES, .inner_stride = 1};
}

static void setup(fixture *f, int64_t queries)
{
    uint64_t seed = 42;
    *f = (fixture){0};
    random_vectors(&f->main[0][0], TOKENS * D_QK, &seed);
    random_vectors(&f->extra[0][0], EXTRA * D_QK, &seed);
    random_vectors(&f->q[0][0][0], ROWS * D_QK, &seed);
    for (int32_t i = 0; i < QUERIES * TOKENS; i++) {
        f->indices[i / TOKENS][i % TOKENS] = i % TOKENS;
        f->extra_indices[i / TOKENS][i % EXTRA] = i % EXTRA;
        f->table[i % TOKENS] = i % TOKENS;
    }
    const fmla_format_info *format = fmlai_format_row(FMLA_KV_BF16);
    f->p = (fmlai_mqa){
        .batch = 1,
        .s_q = queries,
        .num_tokens = queries,
        .h_q = HEADS,
        .h_kv = 1,
        .d_qk = D_QK,
        .d_v = D_V,
        .q = rows_of(f->q, FMLA_BF16, D_QK),
        .main = {.pool = pool_over(f->main, format, TOKENS / 2, 2, 0, D_QK, 1),
                 .block_table = f->table,
                 .table_stride = TOKENS,
                 .max_pages = TOKENS / 2,
                 .seqlens = f->seqlens,
                 .indices = &f->indices[0][0],
                 .index_inner = TOKENS},
        .extra = {.pool = pool_over(f->extra, format, 1, EXTRA, 0, D_QK, 1),
                  .indices = &f->extra_indices[0][0],
                  .index_inner = EXTRA},
        .scale = 1,
        .out = rows_of(f->out, FMLA_F64, D_V),
        .lse = rows_of(f->lse, FMLA_F64, 1),
        .max_logits = rows_of(f->max_logits, FMLA_F64, 1),
        .empty_lse = -INFINITY,
        .lse_factor = 1,
        .abs_out = rows_of(f->abs_out, FMLA_F64, D_V),
        .abs_logit = rows_of(f->abs_logit, FMLA_F64, 1),
    };
    use_indices(f, TOKENS);
}

static void assert_lonely(const fixture *f, int q, int h, double lse)
{
    for (int d = 0; d < D_V; d++) {
        assert_true(f->out[q][h][d] == 0);
        assert_true(f->abs_out[q][h][d] == 0);
    }
    assert_true(f->lse[q][h] == lse);
    assert_true(f->max_logits[q][h] == -INFINITY);
}

/* ---- the formula ------------------------------------------------------------------------------------------
 */

static void two_tokens_by_hand(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 1);
    use_indices(&f, 2);
    set_vector(f.q[0][0], D_QK, (double[D_QK]){1, 0, 0, 0, 0, 2});
    set_vector(f.q[0][1], D_QK, (double[D_QK]){-1, 0, 0, 0, 0, 0});
    set_vector(f.main[0], D_QK, (double[D_QK]){1, -2, 3, 4, 100, 0.5});
    set_vector(f.main[1], D_QK, (double[D_QK]){2, 6, -5, 0, -7, -1});
    f.p.scale = 0.5f;
    oracle_mqa(&f.p);

    /* head 0: logits 0.5 (1 + 1) = 1 and 0.5 (2 - 2) = 0; head 1: -0.5 and -1 */
    static const double v[2][D_V] = {{1, -2, 3, 4}, {2, 6, -5, 0}};
    double p0[2] = {1 / (1 + exp(-1)), 1 / (1 + exp(-0.5))};
    double lse[2] = {log(exp(1) + 1), log(exp(-0.5) + exp(-1))};
    for (int h = 0; h < HEADS; h++) {
        assert_close(f.lse[0][h], lse[h], EXACT);
        for (int d = 0; d < D_V; d++) {
            assert_close(f.out[0][h][d], p0[h] * v[0][d] + (1 - p0[h]) * v[1][d], EXACT * 10);
            assert_close(f.abs_out[0][h][d], p0[h] * fabs(v[0][d]) + (1 - p0[h]) * fabs(v[1][d]), EXACT * 10);
        }
    }
    assert_close(f.max_logits[0][0], 1, 0);
    assert_close(f.max_logits[0][1], -0.5, 0);
    assert_close(f.abs_logit[0][0], 0.5 * (2 + 2), 0); /* token 1: |1 * 2| + |2 * -1| */
    assert_close(f.abs_logit[0][1], 1, 0);
}

static void an_index_counts_as_often_as_it_occurs(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 1);
    use_indices(&f, 3);
    memset(f.q, 0, sizeof f.q);
    f.indices[0][0] = f.indices[0][2] = 5;
    f.indices[0][1] = 3;
    oracle_mqa(&f.p);
    assert_close(f.lse[0][0], log(3), EXACT);
    for (int d = 0; d < D_V; d++) {
        assert_close(f.out[0][0][d], (2 * bf16(f.main[5][d]) + bf16(f.main[3][d])) / 3, EXACT);
    }
}

static void both_scopes_share_one_softmax(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 1);
    memset(f.q, 0, sizeof f.q);
    use_indices(&f, 2);
    f.p.extra.kind = FMLAI_LIST_INDEXED;
    f.p.extra.topk = 3;
    f.extra_indices[0][1] = -1;
    f.extra_indices[0][2] = 3;
    oracle_mqa(&f.p);
    assert_close(f.lse[0][1], log(4), EXACT);
    for (int d = 0; d < D_V; d++) {
        double sum = bf16(f.main[0][d]) + bf16(f.main[1][d]) + bf16(f.extra[0][d]) + bf16(f.extra[3][d]);
        assert_close(f.out[0][1][d], sum / 4, EXACT);
    }
}

static void any_sign_of_scale(void **state)
{
    fixture f, negated;
    (void)state;
    setup(&f, 1);
    setup(&negated, 1);
    f.p.scale = -3;
    negated.p.scale = 3;
    for (int i = 0; i < ROWS * D_QK; i++) {
        (&negated.q[0][0][0])[i] ^= 0x8000;
    }
    oracle_mqa(&f.p);
    oracle_mqa(&negated.p);
    assert_memory_equal(f.out, negated.out, sizeof f.out);
    assert_memory_equal(f.lse, negated.lse, sizeof f.lse);
    assert_memory_equal(f.abs_logit, negated.abs_logit, sizeof f.abs_logit);
    assert_true(f.abs_logit[0][0] > 0);
    f.p.scale = 0;
    oracle_mqa(&f.p);
    assert_close(f.lse[0][0], log(TOKENS), EXACT);
    assert_close(f.max_logits[0][0], 0, 0);
}

static void huge_logits_stay_finite(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 1);
    use_indices(&f, 2);
    set_vector(f.q[0][0], D_QK, (double[D_QK]){1048576, 0, 0, 0, 0, 0});
    set_vector(f.main[0], D_QK, (double[D_QK]){-1048576, 1, 1, 1, 0, 0});
    set_vector(f.main[1], D_QK, (double[D_QK]){1048576, 2, 2, 2, 0, 0});
    oracle_mqa(&f.p);
    assert_close(f.lse[0][0], 1048576.0 * 1048576.0, 0);
    assert_close(f.out[0][0][1], 2, 0);
}

static void lse_in_base_two(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 1);
    memset(f.q, 0, sizeof f.q);
    f.p.lse_factor = 1.44269504f;
    oracle_mqa(&f.p);
    assert_close(f.lse[0][0], 3, 1e-6); /* log2 of 8 tokens */
    use_indices(&f, 0);
    oracle_mqa(&f.p);
    assert_lonely(&f, 0, 0, -INFINITY);
}

static void results_are_rounded_once(void **state)
{
    fixture f;
    uint16_t rounded[QUERIES][HEADS][D_V];
    (void)state;
    setup(&f, 2);
    oracle_mqa(&f.p);
    f.p.out = rows_of(rounded, FMLA_BF16, D_V);
    oracle_mqa(&f.p);
    for (int i = 0; i < 2 * HEADS * D_V; i++) {
        assert_int_equal((&rounded[0][0][0])[i], fmlai_bf16_from_f64((&f.out[0][0][0])[i]));
    }
    f.p.out = rows_of(rounded, FMLA_F16, D_V);
    oracle_mqa(&f.p);
    for (int i = 0; i < 2 * HEADS * D_V; i++) {
        assert_int_equal((&rounded[0][0][0])[i], fmlai_f16_from_f64((&f.out[0][0][0])[i]));
    }
}

/* With one KV head per query head, each reads its own: values of token t, head h begin with 10 t + h. */
static void query_heads_read_their_kv_head(void **state)
{
    fixture f;
    uint16_t kv[2][HEADS][D_QK] = {0};
    (void)state;
    setup(&f, 1);
    memset(f.q, 0, sizeof f.q);
    for (int t = 0; t < 2; t++) {
        for (int h = 0; h < HEADS; h++) {
            kv[t][h][0] = fmlai_bf16_from_f64(10 * t + h);
        }
    }
    f.p.h_kv = HEADS;
    f.p.main.pool = pool_over(kv, fmlai_format_row(FMLA_KV_BF16), 1, 2, 0, D_QK, HEADS);
    use_pages(&f, 2);
    oracle_mqa(&f.p);
    assert_close(f.out[0][0][0], 5, EXACT);
    assert_close(f.out[0][1][0], 6, EXACT);
}

/* ---- sinks and lonely rows --------------------------------------------------------------------------------
 */

static void sink_table(void **state)
{
    static const float sinks[10] = {-INFINITY, -FLT_MAX, -1e4f, -1, 0, 2.5f, 1e4f, FLT_MAX, INFINITY, NAN};
    fixture plain, f;
    (void)state;
    setup(&plain, 1);
    oracle_mqa(&plain.p);
    for (int i = 0; i < 10; i++) {
        setup(&f, 1);
        f.p.sink = f.sink;
        f.sink[0] = sinks[i];
        f.sink[1] = -INFINITY; /* per head: the other one is not touched */
        oracle_mqa(&f.p);
        double share = 1 / (1 + exp((double)sinks[i] - plain.lse[0][0]));
        for (int d = 0; d < D_V; d++) {
            assert_close(f.out[0][0][d], plain.out[0][0][d] * share, EXACT);
            assert_close(f.abs_out[0][0][d], plain.abs_out[0][0][d] * share, EXACT);
            assert_close(f.out[0][1][d], plain.out[0][1][d], 0);
        }
        assert_close(f.lse[0][0], plain.lse[0][0], 0);
        assert_close(f.max_logits[0][0], plain.max_logits[0][0], 0);
        use_indices(&f, 0);
        oracle_mqa(&f.p);
        assert_lonely(&f, 0, 0, -INFINITY);
    }
}

static void promise_2_lonely_rows(void **state)
{
    fixture f;
    (void)state;
    setup(&f, 2);
    memset(f.main, 0xFF, sizeof f.main); /* NaN */
    memset(f.q, 0xFF, sizeof f.q);
    for (int variant = 0; variant < 4; variant++) {
        memset(f.out, 0xFF, sizeof f.out);
        f.p.empty_lse = variant % 2 ? INFINITY : -INFINITY;
        if (variant == 0) {
            use_indices(&f, 0);
        } else if (variant == 1) {
            memset(f.indices, 0xFF, sizeof f.indices);
            use_indices(&f, TOKENS);
        } else if (variant == 2) {
            use_pages(&f, 0);
        } else {
            use_lengths(&f, &f.p.main.bound); /* all zero */
            use_pages(&f, TOKENS);
        }
        oracle_mqa(&f.p);
        for (int row = 0; row < 2 * HEADS; row++) {
            assert_lonely(&f, row / HEADS, row % HEADS, (double)f.p.empty_lse);
        }
    }
}

/* ---- what is attended -------------------------------------------------------------------------------------
 */

static void promise_4_only_valid_slots_below_the_length_are_attended(void **state)
{
    static const int32_t bad[8] = {-1, -2, -123456, INT32_MIN, TOKENS, TOKENS + 1, 2147480000, INT32_MAX};
    fixture f;
    (void)state;
    setup(&f, 1);
    memset(f.q, 0, sizeof f.q);
    use_lengths(&f, &f.p.main.length);
    for (int i = 0; i < 8; i++) {
        memset(f.main, 0xFF, sizeof f.main);
        memset(f.main[2], 0, sizeof f.main[2]);
        memset(f.main[6], 0, sizeof f.main[6]);
        f.indices[0][0] = 2;
        f.indices[0][1] = bad[i];
        f.indices[0][2] = 6;
        f.indices[0][3] = 1; /* in range, NaN, and beyond the length */
        f.lengths[0] = 3;
        oracle_mqa(&f.p);
        assert_close(f.lse[0][0], log(2), EXACT);
        assert_close(f.out[0][0][0], 0, 0);
        f.lengths[0] = -5; /* clamped */
        oracle_mqa(&f.p);
        assert_lonely(&f, 0, 0, -INFINITY);
    }
}

static void promise_4_table_entries_beyond_the_length_are_not_used(void **state)
{
    fixture f, whole;
    (void)state;
    setup(&f, 1);
    setup(&whole, 1);
    use_indices(&whole, 5);
    oracle_mqa(&whole.p);
    use_pages(&f, 5);
    f.table[0] = 3; /* page order is the table's */
    f.table[1] = 0;
    f.table[2] = 2;
    memcpy(f.main[6], whole.main[0], 2 * sizeof f.main[0]);
    memcpy(f.main[0], whole.main[2], 2 * sizeof f.main[0]);
    memset(f.main[5], 0xFF, sizeof f.main[5]); /* slot 1 of the third page: beyond the length */
    memset(f.main[2], 0xFF, 2 * sizeof f.main[2]);
    for (int i = 3; i < TOKENS; i++) {
        f.table[i] = 2147480000;
    }
    oracle_mqa(&f.p);
    assert_memory_equal(f.out, whole.out, sizeof f.out);
    assert_memory_equal(f.lse, whole.lse, sizeof f.lse);
}

static void nan_in_an_attended_token_takes_the_row(void **state)
{
    fixture f;
    (void)state;
    for (int d = 0; d < D_QK; d += D_QK - 1) { /* a value, then a dim that only the logit sees */
        setup(&f, 2);
        f.main[4][d] = 0x7FC0;
        f.indices[1][4] = -1;
        oracle_mqa(&f.p);
        assert_true(isnan(f.lse[0][0]) && isnan(f.max_logits[0][0]));
        for (int j = 0; j < D_V; j++) {
            assert_true(isnan(f.out[0][0][j]));
            assert_false(isnan(f.out[1][0][j]));
        }
        assert_true(isfinite(f.lse[1][0]));
    }
}

static void promise_7_causal_is_aligned_to_the_end(void **state)
{
    fixture f, alone;
    (void)state;
    for (int32_t length = 0; length <= TOKENS; length++) {
        setup(&f, QUERIES);
        f.p.main.causal = true;
        use_pages(&f, length);
        oracle_mqa(&f.p);
        for (int32_t j = 0; j < QUERIES; j++) {
            int32_t seen = length - QUERIES + j + 1;
            setup(&alone, 1);
            memcpy(alone.q[0], f.q[j], sizeof f.q[j]);
            use_pages(&alone, seen < 0 ? 0 : seen);
            oracle_mqa(&alone.p);
            assert_memory_equal(f.out[j], alone.out[0], sizeof f.out[j]);
            assert_memory_equal(f.lse[j], alone.lse[0], sizeof f.lse[j]);
        }
    }
}

static void an_explicit_bound_per_row(void **state)
{
    static const int32_t bounds[QUERIES] = {3, 0, 100, -1};
    fixture f;
    (void)state;
    setup(&f, QUERIES);
    memset(f.q, 0, sizeof f.q);
    memcpy(f.lengths, bounds, sizeof bounds);
    use_lengths(&f, &f.p.main.bound);
    use_pages(&f, 6);
    oracle_mqa(&f.p);
    assert_close(f.lse[0][0], log(3), EXACT);
    assert_lonely(&f, 1, 0, -INFINITY);
    assert_close(f.lse[2][0], log(6), EXACT);
    assert_lonely(&f, 3, 0, -INFINITY);
}

/* Parts of a list, merged, are the list; the sink is applied at the end. */
static void promise_7_merging_parts_gives_the_whole(void **state)
{
    fixture whole, parts[3];
    fmlai_merge_state states[3];
    double out[HEADS][D_V], lse[HEADS];
    (void)state;
    setup(&whole, 1);
    whole.sink[0] = 0.5f;
    whole.sink[1] = 3;
    whole.p.sink = whole.sink;
    oracle_mqa(&whole.p);
    for (int i = 0; i < 3; i++) {
        setup(&parts[i], 1);
        for (int t = 0; t < TOKENS; t++) { /* tokens 0..2, none, 3..7 */
            parts[i].indices[0][t] = i == (t < 3 ? 0 : 2) ? t : -1;
        }
        oracle_mqa(&parts[i].p);
        states[i].out = (fmlai_packed){.data = parts[i].out, .dtype = FMLA_F64, .stride = {0, D_V}};
        states[i].lse = (fmlai_packed){.data = parts[i].lse, .dtype = FMLA_F64, .stride = {0, 1}};
    }
    fmlai_merge merge = {.tokens = 1,
                         .heads = HEADS,
                         .d = D_V,
                         .count = 3,
                         .states = states,
                         .sink = whole.sink,
                         .empty_lse = -INFINITY};
    merge.result.out = (fmlai_packed){.data = out, .dtype = FMLA_F64, .stride = {0, D_V}};
    merge.result.lse = (fmlai_packed){.data = lse, .dtype = FMLA_F64, .stride = {0, 1}};
    oracle_merge(&merge);
    for (int h = 0; h < HEADS; h++) {
        assert_close(lse[h], whole.lse[0][h], EXACT);
        for (int d = 0; d < D_V; d++) {
            assert_close(out[h][d], whole.out[0][h][d], EXACT);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_tokens_by_hand),
        cmocka_unit_test(an_index_counts_as_often_as_it_occurs),
        cmocka_unit_test(both_scopes_share_one_softmax),
        cmocka_unit_test(any_sign_of_scale),
        cmocka_unit_test(huge_logits_stay_finite),
        cmocka_unit_test(lse_in_base_two),
        cmocka_unit_test(results_are_rounded_once),
        cmocka_unit_test(query_heads_read_their_kv_head),
        cmocka_unit_test(sink_table),
        cmocka_unit_test(promise_2_lonely_rows),
        cmocka_unit_test(promise_4_only_valid_slots_below_the_length_are_attended),
        cmocka_unit_test(promise_4_table_entries_beyond_the_length_are_not_used),
        cmocka_unit_test(nan_in_an_attended_token_takes_the_row),
        cmocka_unit_test(promise_7_causal_is_aligned_to_the_end),
        cmocka_unit_test(an_explicit_bound_per_row),
        cmocka_unit_test(promise_7_merging_parts_gives_the_whole),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
