/* SPDX-License-Identifier: MIT */
/*
 * The published schedule: known tables in the three forms, and what must hold for any batch: every block is
 * handed out once and in order, no part gets more than the payload, every row is written.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>

#include <cmocka.h>

#include "plan/plan.h"

#define W      5  /* overhead blocks of the published kernels */
#define STRIDE 11 /* of metadata rows: wider than the 8 columns */
#define FILL   -1 /* what the tables hold before the call */

static const fmla_schedule_form forms[3] = {FMLA_SCHEDULE_2025_02, FMLA_SCHEDULE_2025_09, FMLA_SCHEDULE_2026_01};

/* A row in words, whatever the form; positions in blocks. */
typedef struct piece {
    int64_t first, last, begin, end, split;
} piece;

static uint32_t next_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static void *filled(int64_t count)
{
    int32_t *x = malloc((size_t)(count > 0 ? count : 1) * sizeof *x);
    assert_non_null(x);
    for (int64_t i = 0; i < count; i++) {
        x[i] = FILL;
    }
    return x;
}

/* Makes the tables of p and runs it; the caller frees them. */
static void run(fmlai_schedule *p)
{
    fmlai_error error = {0};
    p->metadata_stride = STRIDE;
    p->metadata = filled(p->parts * STRIDE);
    p->num_splits = filled(p->batch + 1);
    assert_int_equal(fmlai_plan_schedule(p, &error), FMLA_OK);
}

static void release(fmlai_schedule *p)
{
    free(p->metadata);
    free(p->num_splits);
}

static fmlai_schedule dense(const int32_t *lengths, int64_t batch, int64_t parts, fmla_schedule_form form)
{
    return (fmlai_schedule){
        .batch = batch, .seqlens = lengths, .topk = -1, .form = form, .overhead_blocks = W, .parts = parts};
}

static int64_t blocks_of_length(int64_t length, fmla_schedule_form form)
{
    int64_t n = (length + 63) / 64;
    return n == 0 && form != FMLA_SCHEDULE_2025_02 ? 1 : n;
}

static piece piece_of(const fmlai_schedule *p, int64_t part)
{
    const int32_t *row = p->metadata + part * STRIDE;
    piece x = {.first = row[0], .last = row[2], .begin = row[1], .end = row[3], .split = row[4]};
    if (p->form == FMLA_SCHEDULE_2026_01) {
        x.last = row[1];
        x.begin = row[2];
    }
    if (p->form == FMLA_SCHEDULE_2025_02) {
        assert_int_equal(x.begin % 64, 0);
        x.begin /= 64;
        x.end = (x.end + 63) / 64;
    } else if (x.last >= 0 && p->seqlens[x.last] == 0) {
        assert_int_equal(x.end, 0); /* a finished request of length 0 */
        x.end = 1;
    }
    return x;
}

static void check_flags(const fmlai_schedule *p, int64_t part, const piece *x, bool idle)
{
    const int32_t *row = p->metadata + part * STRIDE;
    bool first_split = false, last_split = false;
    if (p->form == FMLA_SCHEDULE_2026_01 && !idle) {
        first_split = p->num_splits[x->first + 1] - p->num_splits[x->first] > 1;
        last_split = p->num_splits[x->last + 1] - p->num_splits[x->last] > 1;
        if (x->first != x->last) { /* a request that ends where the part ends is split only by its beginning */
            last_split = x->end != blocks_of_length(p->seqlens[x->last], p->form);
        }
    }
    assert_int_equal(row[5], first_split);
    assert_int_equal(row[6], last_split);
    assert_int_equal(row[7], 0);
    for (int32_t c = FMLAI_PLAN_COLUMNS; c < STRIDE; c++) {
        assert_int_equal(row[c], FILL);
    }
}

/* The work of one part: continues where the parts before it ended, and costs no more than the payload. */
static void check_part(const fmlai_schedule *p, int64_t part, int64_t payload, int64_t *blocks, int64_t *splits)
{
    piece x = piece_of(p, part);
    int64_t cost = 0;
    bool idle = x.first >= p->batch;

    check_flags(p, part, &x, idle);
    if (idle) {
        assert_int_equal(x.first, p->batch);
        return;
    }
    assert_true(x.first <= x.last && x.last < p->batch);
    assert_int_equal(x.split, splits[x.first]);
    for (int64_t r = x.first; r <= x.last; r++) {
        int64_t n = blocks_of_length(p->seqlens[r], p->form);
        int64_t begin = r == x.first ? x.begin : 0;
        int64_t end = r == x.last ? x.end : n;
        assert_int_equal(begin, blocks[r]);
        assert_true(end > begin || n == 0);
        assert_true(end <= n);
        cost += end - begin + W;
        blocks[r] = end;
        splits[r]++;
    }
    assert_true(cost <= payload);
}

static void check_schedule(const int32_t *lengths, int64_t batch, int64_t parts, fmla_schedule_form form)
{
    fmlai_schedule p = dense(lengths, batch, parts, form);
    int64_t *blocks = calloc((size_t)batch + 1, sizeof *blocks);
    int64_t *splits = calloc((size_t)batch + 1, sizeof *splits);
    int64_t total = 0;

    assert_true(blocks && splits);
    run(&p);
    for (int64_t r = 0; r < batch; r++) {
        total += blocks_of_length(lengths[r], form) + W;
    }
    for (int64_t part = 0; part < parts; part++) {
        check_part(&p, part, (total + parts - 1) / parts + W, blocks, splits);
    }
    assert_int_equal(p.num_splits[0], 0);
    for (int64_t r = 0; r < batch; r++) {
        assert_int_equal(blocks[r], blocks_of_length(lengths[r], form));
        assert_int_equal(p.num_splits[r + 1] - p.num_splits[r], splits[r]);
        assert_true(splits[r] >= 1);
    }
    assert_true(p.num_splits[batch] <= batch + parts);
    release(&p);
    free(blocks);
    free(splits);
}

static void check_all_forms(const int32_t *lengths, int64_t batch, int64_t parts)
{
    for (int f = 0; f < 3; f++) {
        check_schedule(lengths, batch, parts, forms[f]);
    }
}

/* ---- known tables -----------------------------------------------------------------------------------------
 */

typedef struct vector {
    int32_t batch, parts;
    int32_t lengths[4];
    int32_t num_splits[5];
    int32_t rows[3][4][8]; /* per form; parts beyond the written ones have no work */
} vector;

static const vector vectors[3] = {
    {.batch = 4,
     .parts = 4,
     .lengths = {1000, 64, 0, 300},
     .num_splits = {0, 2, 3, 4, 5},
     .rows = {{{0, 0, 0, 704, 0}, {0, 704, 1, 64, 1}, {2, 0, 3, 300, 0}, {4, 0, 3, 300, 0}},
              {{0, 0, 0, 11, 0}, {0, 11, 1, 1, 1}, {2, 0, 3, 5, 0}, {4, 0, 3, 5, 0}},
              {{0, 0, 0, 11, 0, 1, 1}, {0, 1, 11, 1, 1, 1, 0}, {2, 3, 0, 5, 0, 0, 0}, {4, 3, 0, 5}}}},
    {.batch = 2,
     .parts = 4,
     .lengths = {130, 64},
     .num_splits = {0, 1, 2},
     .rows = {{{0, 0, 0, 130, 0}, {1, 0, 1, 64, 0}, {2, 0, 1, 64, 0}, {2, 0, 1, 64, 0}},
              {{0, 0, 0, 3, 0}, {1, 0, 1, 1, 0}, {2, 0, 1, 1, 0}, {2, 0, 1, 1, 0}},
              {{0, 0, 0, 3, 0, 0, 0}, {1, 1, 0, 1, 0, 0, 0}, {2, 1, 0, 1}, {2, 1, 0, 1}}}},
    {.batch = 1,
     .parts = 3,
     .lengths = {2048},
     .num_splits = {0, 3},
     .rows = {{{0, 0, 0, 832, 0}, {0, 832, 0, 1664, 1}, {0, 1664, 0, 2048, 2}},
              {{0, 0, 0, 13, 0}, {0, 13, 0, 26, 1}, {0, 26, 0, 32, 2}},
              {{0, 0, 0, 13, 0, 1, 1}, {0, 0, 13, 26, 1, 1, 1}, {0, 0, 26, 32, 2, 1, 1}}}},
};

static void known_tables_in_three_forms(void **state)
{
    (void)state;
    for (int v = 0; v < 3; v++) {
        for (int f = 0; f < 3; f++) {
            fmlai_schedule p = dense(vectors[v].lengths, vectors[v].batch, vectors[v].parts, forms[f]);
            run(&p);
            assert_memory_equal(p.num_splits, vectors[v].num_splits, (size_t)(p.batch + 1) * sizeof(int32_t));
            for (int64_t part = 0; part < p.parts; part++) {
                const int32_t *expected = vectors[v].rows[f][part];
                assert_memory_equal(p.metadata + part * STRIDE, expected, 8 * sizeof(int32_t));
            }
            release(&p);
        }
    }
}

/* A sparse request is scheduled like a dense one of its effective length. */
static void check_sparse(fmlai_schedule sparse, const int32_t *effective)
{
    fmlai_schedule p = dense(effective, sparse.batch, sparse.parts, sparse.form);
    run(&p);
    run(&sparse);
    assert_memory_equal(p.num_splits, sparse.num_splits, (size_t)(p.batch + 1) * sizeof(int32_t));
    assert_memory_equal(p.metadata, sparse.metadata, (size_t)(p.parts * STRIDE) * sizeof(int32_t));
    release(&p);
    release(&sparse);
}

static void sparse_lengths(void **state)
{
    static const int32_t topk_length[4] = {0, 2048, 65, 5000};
    static const int32_t extra_length[4] = {512, 0, 1, -7};
    fmlai_schedule p = {.batch = 4, .topk = 2048, .form = FMLA_SCHEDULE_2026_01, .overhead_blocks = W, .parts = 7};
    (void)state;

    check_sparse(p, (int32_t[4]){2048, 2048, 2048, 2048});
    p.topk_length = topk_length;
    check_sparse(p, (int32_t[4]){1, 2048, 65, 2048});
    p.extra_topk = 100;
    check_sparse(p, (int32_t[4]){64 + 100, 2048 + 100, 128 + 100, 2048 + 100});
    p.extra_topk_length = extra_length;
    check_sparse(p, (int32_t[4]){64 + 100, 2048, 128 + 1, 2048});
    p.topk_length = NULL;
    p.form = FMLA_SCHEDULE_2025_09;
    check_sparse(p, (int32_t[4]){2048 + 100, 2048, 2048 + 1, 2048});
}

static void slots_beyond_int32_are_refused(void **state)
{
    int32_t num_splits[2], metadata[8];
    fmlai_schedule p = {.batch = 1,
                        .form = FMLA_SCHEDULE_2026_01,
                        .overhead_blocks = W,
                        .parts = 1,
                        .topk = INT32_MAX - 10,
                        .extra_topk = 11,
                        .metadata = metadata,
                        .metadata_stride = 8,
                        .num_splits = num_splits};
    fmlai_error error = {0};
    (void)state;
    assert_int_equal(fmlai_plan_schedule(&p, &error), FMLA_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, "extra_topk 11"));
    p.extra_topk = 0;
    assert_int_equal(fmlai_plan_schedule(&p, &error), FMLA_OK);
}

/* ---- properties -------------------------------------------------------------------------------------------
 */

static void any_batch_on_any_number_of_parts(void **state)
{
    int32_t lengths[64];
    uint32_t seed = 20250221;
    (void)state;
    for (int64_t parts = 1; parts <= 200; parts++) {
        int64_t batch = 1 + next_random(&seed) % 64;
        uint32_t longest = 1u << next_random(&seed) % 17;
        for (int64_t r = 0; r < batch; r++) {
            lengths[r] = next_random(&seed) % 4 == 0 ? 0 : (int32_t)(next_random(&seed) % longest);
        }
        check_all_forms(lengths, batch, parts);
    }
}

static void c021_empty_batches_and_zero_lengths(void **state)
{
    static const int32_t zeros[5] = {0};
    static const int64_t parts[3] = {1, 132, 8};
    (void)state;
    for (int i = 0; i < 3; i++) {
        check_all_forms(zeros, 0, parts[i]);
        check_all_forms(zeros, 5, parts[i]);
        for (int f = 0; f < 3; f++) {
            fmlai_schedule p = dense(zeros, 5, parts[i], forms[f]);
            run(&p);
            for (int r = 0; r < 5; r++) {
                assert_int_equal(p.num_splits[r + 1], r + 1); /* nothing is split */
            }
            release(&p);
        }
    }
}

static void c033_batches_beyond_sixteen_thousand(void **state)
{
    static const int32_t batches[5] = {16384, 16385, 16600, 17000, 40000};
    static int32_t lengths[40000];
    (void)state;
    for (int32_t r = 0; r < 40000; r++) {
        lengths[r] = r % 64 + 1;
    }
    for (int i = 0; i < 5; i++) {
        check_all_forms(lengths, batches[i], 132);
        check_all_forms(lengths, batches[i], 20000);
    }
}

static void c067_every_row_says_so_when_it_has_no_work(void **state)
{
    static const int32_t lengths[3] = {64, 1, 40};
    (void)state;
    for (int f = 0; f < 3; f++) {
        fmlai_schedule p = dense(lengths, 3, 200, forms[f]);
        run(&p);
        int64_t idle = 0;
        for (int64_t part = 0; part < p.parts; part++) {
            const int32_t *row = p.metadata + part * STRIDE;
            idle += row[0] == 3;
            for (int c = 0; c < FMLAI_PLAN_COLUMNS; c++) {
                assert_int_not_equal(row[c], FILL);
            }
        }
        assert_int_equal(idle, 197);
        release(&p);
    }
}

static void c079_pieces_of_one_block(void **state)
{
    int32_t lengths[8];
    (void)state;
    for (int32_t k = 0; k < 300; k += 7) {
        for (int32_t r = 0; r < 8; r++) {
            lengths[r] = 64 * (k + r % 3) + r % 2;
        }
        check_all_forms(lengths, 8, 132);
        check_all_forms(lengths, 1, 132);
    }
}

static void c127_one_long_request_uses_the_machine(void **state)
{
    static const int32_t length = 100000;
    fmlai_schedule p = dense(&length, 1, 256, FMLA_SCHEDULE_2026_01);
    (void)state;
    run(&p);
    /* 1563 blocks, 7 of them per part and 5 of overhead: ceil(1563 / 7) pieces. */
    assert_int_equal(p.num_splits[1], 224);
    release(&p);
}

static void c128_a_full_machine_splits_little(void **state)
{
    int32_t lengths[256];
    (void)state;
    for (int r = 0; r < 256; r++) {
        lengths[r] = 8192;
    }
    fmlai_schedule p = dense(lengths, 256, 132, FMLA_SCHEDULE_2026_01);
    run(&p);
    for (int r = 0; r < 256; r++) {
        assert_true(p.num_splits[r + 1] - p.num_splits[r] <= 2);
    }
    assert_true(p.num_splits[256] <= 256 + 132);
    release(&p);
}

static void promise_8_chunks_depend_on_the_length_alone(void **state)
{
    static const int64_t counts[] = {
        0, 1, 511, 512, 513, 1023, 1024, 1025, 2048, 2049, 4096, 1000000, INT64_C(1) << 40};
    (void)state;
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        int64_t chunks = fmlai_plan_chunks(counts[i]);
        int64_t last = chunks > 0 ? fmlai_plan_chunk_tokens(counts[i], chunks - 1) : 0;
        assert_true(chunks == 0 ? counts[i] == 0 : last >= 1);
        assert_true(last <= FMLAI_PLAN_CHUNK_TOKENS);
        assert_int_equal(chunks > 0 ? fmlai_plan_chunk_begin(chunks - 1) + last : 0, counts[i]);
        for (int64_t c = 0; c + 1 < chunks && c < 1000; c++) {
            assert_int_equal(fmlai_plan_chunk_tokens(counts[i], c), c < 2 ? 512 : 1024);
            assert_int_equal(fmlai_plan_chunk_begin(c) + fmlai_plan_chunk_tokens(counts[i], c),
                             fmlai_plan_chunk_begin(c + 1));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_tables_in_three_forms),
        cmocka_unit_test(sparse_lengths),
        cmocka_unit_test(slots_beyond_int32_are_refused),
        cmocka_unit_test(any_batch_on_any_number_of_parts),
        cmocka_unit_test(c021_empty_batches_and_zero_lengths),
        cmocka_unit_test(c033_batches_beyond_sixteen_thousand),
        cmocka_unit_test(c067_every_row_says_so_when_it_has_no_work),
        cmocka_unit_test(c079_pieces_of_one_block),
        cmocka_unit_test(c127_one_long_request_uses_the_machine),
        cmocka_unit_test(c128_a_full_machine_splits_little),
        cmocka_unit_test(promise_8_chunks_depend_on_the_length_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
