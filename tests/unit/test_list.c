/* SPDX-License-Identifier: MIT */
/*
 * Token lists: how many tokens a query token sees, which slots they are, and where a slot lies. Tables stand
 * at the end of guarded memory, so that reading an entry that is not needed ends the test.
 */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "format/format.h"
#include "support_pool.h"

static fmlai_mqa problem(int64_t batch, int64_t s_q)
{
    fmlai_mqa p = {.batch = batch, .s_q = s_q, .num_tokens = batch * s_q};
    return p;
}

static fmlai_mqa ragged(int64_t batch, const int32_t *cu_seqlens)
{
    fmlai_mqa p = {.batch = batch, .s_q = cu_seqlens[batch], .num_tokens = cu_seqlens[batch]};
    p.cu_seqlens_q = cu_seqlens;
    return p;
}

static fmlai_token_list paged(const int32_t *seqlens, int64_t num_pages, int64_t page_size, int64_t max_pages)
{
    fmlai_token_list list = {.kind = FMLAI_LIST_PAGED, .seqlens = seqlens, .max_pages = max_pages};
    list.pool.num_pages = num_pages;
    list.pool.page_size = page_size;
    return list;
}

static fmlai_token_list indexed(const int32_t *indices, int64_t topk, int64_t num_pages, int64_t page_size)
{
    fmlai_token_list list = {.kind = FMLAI_LIST_INDEXED, .indices = indices, .topk = topk, .index_outer = topk};
    list.index_inner = topk;
    list.pool.num_pages = num_pages;
    list.pool.page_size = page_size;
    return list;
}

static int32_t *guarded_ints(guarded *g, const int32_t *values, size_t count)
{
    *g = guarded_make(count * sizeof *values);
    memcpy(g->data, values, count * sizeof *values);
    return (int32_t *)(void *)g->data;
}

static void requests_of_query_tokens(void **state)
{
    (void)state;
    fmlai_mqa p = problem(3, 4);
    for (int64_t t = 0; t < 12; t++) {
        assert_int_equal(fmlai_mqa_request(&p, t), t / 4);
    }
}

static void ragged_requests_skip_the_empty_ones(void **state)
{
    (void)state;
    static const int32_t lengths[] = {0, 0, 3, 1, 0, 0, 5, 0, 2, 0};
    int32_t starts[11] = {0}, owner[11];
    for (int32_t r = 0, n = 0; r < 10; r++) {
        for (int32_t i = 0; i < lengths[r]; i++) {
            owner[n++] = r;
        }
        starts[r + 1] = n;
    }
    guarded g;
    fmlai_mqa p = ragged(10, guarded_ints(&g, starts, 11));
    assert_int_equal(p.num_tokens, 11);
    for (int64_t t = 0; t < p.num_tokens; t++) {
        assert_int_equal(fmlai_mqa_request(&p, t), owner[t]);
    }
    guarded_free(&g);
}

static void every_ragged_batch_of_up_to_four_short_requests(void **state)
{
    (void)state;
    for (int code = 0; code < 256; code++) {
        int32_t starts[5] = {0};
        for (int r = 0; r < 4; r++) {
            starts[r + 1] = starts[r] + (code >> 2 * r & 3);
        }
        fmlai_mqa p = ragged(4, starts);
        for (int64_t t = 0; t < p.num_tokens; t++) {
            int64_t r = fmlai_mqa_request(&p, t);
            assert_true(starts[r] <= t && t < starts[r + 1]);
        }
    }
}

static void causal_is_aligned_to_the_ends(void **state)
{
    (void)state;
    static const int32_t seqlens[] = {7, 2, 0, -5};
    fmlai_mqa p = problem(4, 3);
    fmlai_token_list list = paged(seqlens, 100, 4, 2);
    static const int64_t all[] = {7, 7, 7, 2, 2, 2, 0, 0, 0, 0, 0, 0};
    static const int64_t causal[] = {5, 6, 7, 0, 1, 2, 0, 0, 0, 0, 0, 0};
    for (int64_t t = 0; t < 12; t++) {
        list.causal = false;
        assert_int_equal(fmlai_list_count(&list, &p, t), all[t]);
        list.causal = true;
        assert_int_equal(fmlai_list_count(&list, &p, t), causal[t]);
    }
    fmlai_mqa single = problem(4, 1);
    assert_int_equal(fmlai_list_count(&list, &single, 0), 7);
}

static void causal_of_a_ragged_batch_uses_each_request_s_own_length(void **state)
{
    (void)state;
    static const int32_t starts[] = {0, 1, 1, 4, 6}, seqlens[] = {9, 5, 2, 100};
    static const int64_t want[] = {9, 0, 1, 2, 99, 100};
    fmlai_mqa p = ragged(4, starts);
    fmlai_token_list list = paged(seqlens, 1000, 16, 7);
    list.causal = true;
    for (int64_t t = 0; t < 6; t++) {
        assert_int_equal(fmlai_list_count(&list, &p, t), want[t]);
    }
}

static void bounds_replace_causal_and_stay_inside_the_length(void **state)
{
    (void)state;
    static const int32_t seqlens[] = {10, 4}, negative[] = {-5, -1},
                         bounds[] = {-1, 0, 3, 10, INT_MAX, INT_MIN, 9, 1, 4, 9, 5, 9};
    fmlai_mqa p = problem(2, 3);
    fmlai_token_list list = paged(seqlens, 100, 4, 3);
    list.causal = true;
    list.bound = (fmlai_lengths){.data = bounds, .outer_stride = 6, .inner_stride = 2};
    static const int64_t want[] = {0, 3, 10, 4, 4, 4};
    for (int64_t t = 0; t < 6; t++) {
        assert_int_equal(fmlai_list_count(&list, &p, t), want[t]);
    }
    list.bound = (fmlai_lengths){.data = bounds + 2, .per_request = true, .outer_stride = 5};
    for (int64_t t = 0; t < 6; t++) {
        assert_int_equal(fmlai_list_count(&list, &p, t), t < 3 ? 3 : 1);
    }
    list.seqlens = negative;
    for (int64_t t = 0; t < 6; t++) {
        assert_int_equal(fmlai_list_count(&list, &p, t), 0);
    }
}

static void a_length_beyond_the_table_ends_with_it(void **state)
{
    (void)state;
    static const int32_t seqlens[] = {INT_MAX, 33, 32};
    fmlai_mqa p = problem(3, 1);
    fmlai_token_list list = paged(seqlens, 100, 16, 2);
    for (int64_t t = 0; t < 3; t++) {
        assert_int_equal(fmlai_list_count(&list, &p, t), 32);
    }
    list.max_pages = 0;
    assert_int_equal(fmlai_list_count(&list, &p, 0), 0);
    list.max_pages = INT64_MAX / 2; /* times the page size: more than 64 bits */
    assert_int_equal(fmlai_list_count(&list, &p, 0), INT_MAX);
}

static void lengths_of_index_lists_are_clamped(void **state)
{
    (void)state;
    static const int32_t lengths[] = {-3, 0, 5, 64, 65, INT_MAX};
    static const int64_t want[] = {0, 0, 5, 64, 64, 64};
    fmlai_token_list list = indexed(NULL, 64, 10, 10);
    fmlai_mqa p = problem(3, 2);
    assert_int_equal(fmlai_list_count(&list, &p, 5), 64);
    list.length = (fmlai_lengths){.data = lengths, .outer_stride = 2, .inner_stride = 1};
    for (int64_t t = 0; t < 6; t++) {
        assert_int_equal(fmlai_list_count(&list, &p, t), want[t]);
    }
    list.length = (fmlai_lengths){.data = lengths, .per_request = true, .outer_stride = 2};
    for (int64_t t = 0; t < 6; t++) {
        assert_int_equal(fmlai_list_count(&list, &p, t), want[t / 2 * 2]);
    }
    static const int32_t starts[] = {0, 0, 4, 6};
    fmlai_mqa r = ragged(3, starts);
    list.length.outer_stride = 1;
    assert_int_equal(fmlai_list_count(&list, &r, 3), 0);
    assert_int_equal(fmlai_list_count(&list, &r, 4), 5);
}

static void an_absent_list_is_empty(void **state)
{
    (void)state;
    fmlai_token_list list = {.kind = FMLAI_LIST_NONE};
    fmlai_mqa p = problem(1, 1);
    assert_int_equal(fmlai_list_count(&list, &p, 0), 0);
    assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, 0), -1);
}

static void slots_through_a_table_and_without(void **state)
{
    (void)state;
    static const int32_t seqlens[] = {5, 6}, table[] = {7, 0, 1, 99, 3, 2, 9};
    fmlai_mqa p = problem(2, 2);
    fmlai_token_list list = paged(seqlens, 10, 3, 2);
    static const int64_t identity[] = {6, 7, 8, 9, 10, 11};
    for (int64_t i = 0; i < 6; i++) {
        assert_int_equal(fmlai_list_slot(&list, &p, 2, 0, i), identity[i]);
    }
    list.block_table = table;
    list.table_stride = 4; /* a padded table */
    static const int64_t first[] = {21, 22, 23, 0, 1}, second[] = {9, 10, 11, 6, 7, 8};
    for (int64_t i = 0; i < 5; i++) {
        assert_int_equal(fmlai_list_slot(&list, &p, 1, 0, i), first[i]);
    }
    for (int64_t i = 0; i < 6; i++) {
        assert_int_equal(fmlai_list_slot(&list, &p, 3, 0, i), second[i]);
    }
}

static void index_rows_have_three_strides(void **state)
{
    (void)state;
    int32_t indices[2 * 100];
    for (int32_t i = 0; i < 200; i++) {
        indices[i] = i;
    }
    fmlai_mqa p = problem(2, 3);
    fmlai_token_list list = indexed(indices, 4, 200, 1);
    list.index_outer = 100;
    list.index_inner = 20;
    list.index_head = 7;
    assert_int_equal(fmlai_list_slot(&list, &p, 5, 1, 3), 100 + 2 * 20 + 7 + 3);
    assert_int_equal(fmlai_list_slot(&list, &p, 1, 0, 0), 20);
}

static void promise_4_an_index_is_valid_iff_inside_the_pool(void **state)
{
    (void)state;
    static const int32_t indices[] = {0, 99, 100, -1, INT_MIN, INT_MAX, 114514, -123456, 50, 2147480000};
    static const int64_t want[] = {0, 99, -1, -1, -1, -1, -1, -1, 50, -1};
    guarded g;
    fmlai_mqa p = problem(1, 1);
    fmlai_token_list list = indexed(guarded_ints(&g, indices, 10), 10, 20, 5);
    for (int64_t i = 0; i < 10; i++) {
        assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, i), want[i]);
    }
    list.pool.num_pages = 0;
    assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, 0), -1);
    list.pool.num_pages = INT64_MAX / 4; /* times the page size: more than 64 bits */
    assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, 5), INT_MAX);
    guarded_free(&g);
}

static void promise_4_a_page_outside_the_pool_is_not_attended(void **state)
{
    (void)state;
    static const int32_t seqlens[] = {12}, table[] = {9, 10, -1, 2147480000};
    fmlai_mqa p = problem(1, 1);
    fmlai_token_list list = paged(seqlens, 10, 3, 4);
    list.block_table = table;
    list.table_stride = 4;
    for (int64_t i = 0; i < 12; i++) {
        assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, i), i < 3 ? 27 + i : -1);
    }
    list.block_table = NULL; /* pages 0..9 of a request that claims more */
    list.max_pages = 40;
    assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, 29), 29);
    assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, 30), -1);
}

static void promise_4_table_entries_past_the_length_are_not_read(void **state)
{
    (void)state;
    static const int32_t seqlens[] = {6}, table[] = {5, 4};
    guarded g;
    fmlai_mqa p = problem(1, 2);
    fmlai_token_list list = paged(seqlens, 10, 4, 1000000);
    list.block_table = guarded_ints(&g, table, 2);
    list.table_stride = 1000000;
    for (int64_t t = 0; t < 2; t++) {
        int64_t count = fmlai_list_count(&list, &p, t);
        assert_int_equal(count, 6);
        for (int64_t i = 0; i < count; i++) {
            assert_int_equal(fmlai_list_slot(&list, &p, t, 0, i), (i < 4 ? 20 : 12) + i);
        }
    }
    guarded_free(&g);
}

static void promise_6_any_page_size(void **state)
{
    (void)state;
    static const int32_t table[] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3};
    static const int64_t page_sizes[] = {1, 2, 5, 31, 53, 64, 69, 480, 576};
    fmlai_mqa p = problem(1, 1);
    for (size_t k = 0; k < sizeof page_sizes / sizeof page_sizes[0]; k++) {
        int64_t size = page_sizes[k];
        int32_t seqlens[] = {(int32_t)(25 * size - (size > 1))};
        fmlai_token_list list = paged(seqlens, 10, size, 25);
        list.block_table = table;
        list.table_stride = 25;
        int64_t count = fmlai_list_count(&list, &p, 0);
        assert_int_equal(count, seqlens[0]);
        int64_t i = 0;
        for (int page = 0; page < 25; page++) {
            for (int64_t offset = 0; offset < size && i < count; offset++, i++) {
                assert_int_equal(fmlai_list_slot(&list, &p, 0, 0, i), table[page] * size + offset);
            }
        }
    }
}

/* ---- pools too large for 32 bits: addresses only, the memory is never touched
 * -------------------------------- */

static int64_t offset_of(const fmlai_pool *pool, const uint8_t *at)
{
    return (int64_t)((uintptr_t)at - (uintptr_t)pool->data);
}

static void c024_page_numbers_whose_product_exceeds_32_bits(void **state)
{
    (void)state;
    static const int32_t seqlens[] = {32}, table[] = {1050000};
    fmlai_mqa p = problem(1, 1);
    fmlai_token_list list = paged(seqlens, 1050001, 32, 1);
    list.block_table = table;
    list.pool = pool_over((void *)(uintptr_t)4096, fmlai_format_row(FMLA_KV_BF16), 1050001, 32, 0, 576, 1);
    for (int64_t i = 0; i < 32; i++) {
        int64_t slot = fmlai_list_slot(&list, &p, 0, 0, i);
        assert_int_equal(slot, INT64_C(1050000) * 32 + i);
        assert_int_equal(offset_of(&list.pool, fmlai_pool_row(&list.pool, slot)),
                         INT64_C(1050000) * 32 * 1152 + i * 1152);
    }
}

static void c025_pages_of_480_tokens(void **state)
{
    (void)state;
    static const int32_t pages[] = {0, 7766, 7767, 7768, 163000};
    const fmla_format_info *row = fmlai_format_row(FMLA_KV_BF16);
    fmlai_pool pool = pool_over((void *)(uintptr_t)4096, row, 163001, 480, 0, 576, 1);
    for (int k = 0; k < 5; k++) {
        fmlai_mqa p = problem(1, 1);
        int32_t seqlens[] = {480};
        fmlai_token_list list = paged(seqlens, 163001, 480, 1);
        list.block_table = pages + k;
        int64_t slot = fmlai_list_slot(&list, &p, 0, 0, 479);
        assert_int_equal(slot, pages[k] * INT64_C(480) + 479);
        assert_int_equal(offset_of(&pool, fmlai_pool_row(&pool, slot)),
                         pages[k] * INT64_C(552960) + 479 * INT64_C(1152));
    }
}

static void c027_pages_on_both_sides_of_2_gib(void **state)
{
    (void)state;
    const int64_t stride = 1002240;
    static const fmla_kv_format formats[] = {FMLA_KV_V32, FMLA_KV_V4, FMLA_KV_V41_FP4_PAGE};
    for (int k = 0; k < 3; k++) {
        const fmla_format_info *row = fmlai_format_row(formats[k]);
        fmlai_pool pool = pool_over((void *)(uintptr_t)4096, row, 5000, 64, stride, 0, 1);
        for (int64_t page = 2142; page <= 4300; page += page == 2143 ? 2157 : 1) {
            int64_t slot = page * 64 + 63;
            int64_t data = page * stride + 63 * row->data_row_bytes;
            int64_t scales = row->layout == FMLA_LAYOUT_PAGE
                                 ? page * stride + 64 * row->data_row_bytes + 63 * row->scale_row_bytes
                                 : data + row->scale_offset;
            assert_int_equal(offset_of(&pool, fmlai_pool_row(&pool, slot)), data);
            assert_int_equal(offset_of(&pool, fmlai_pool_scales(&pool, slot)), scales);
        }
    }
}

static void offsets_of_results_exceed_32_bits(void **state)
{
    (void)state;
    fmlai_mqa p = problem(100000, 3);
    fmlai_rows rows = {.stride = {3 * 128 * 576, 128 * 576, 576}};
    assert_int_equal(fmlai_row_offset(&rows, &p, 299999, 127), INT64_C(299999) * 128 * 576 + 127 * 576);
    assert_int_equal(fmlai_q_permuted(64, 5, 35), 2 * 64 * 16 + 5 * 16 + 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(requests_of_query_tokens),
        cmocka_unit_test(ragged_requests_skip_the_empty_ones),
        cmocka_unit_test(every_ragged_batch_of_up_to_four_short_requests),
        cmocka_unit_test(causal_is_aligned_to_the_ends),
        cmocka_unit_test(causal_of_a_ragged_batch_uses_each_request_s_own_length),
        cmocka_unit_test(bounds_replace_causal_and_stay_inside_the_length),
        cmocka_unit_test(a_length_beyond_the_table_ends_with_it),
        cmocka_unit_test(lengths_of_index_lists_are_clamped),
        cmocka_unit_test(an_absent_list_is_empty),
        cmocka_unit_test(slots_through_a_table_and_without),
        cmocka_unit_test(index_rows_have_three_strides),
        cmocka_unit_test(promise_4_an_index_is_valid_iff_inside_the_pool),
        cmocka_unit_test(promise_4_a_page_outside_the_pool_is_not_attended),
        cmocka_unit_test(promise_4_table_entries_past_the_length_are_not_read),
        cmocka_unit_test(promise_6_any_page_size),
        cmocka_unit_test(c024_page_numbers_whose_product_exceeds_32_bits),
        cmocka_unit_test(c025_pages_of_480_tokens),
        cmocka_unit_test(c027_pages_on_both_sides_of_2_gib),
        cmocka_unit_test(offsets_of_results_exceed_32_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
