/* SPDX-License-Identifier: MIT */
/*
 * values.c: checks of what stands inside lengths, tables and slots. Only where the library can read them without a copy
 * from a device: on the CPU and the oracle. Elsewhere a bad value means "not attended" or "skipped".
 * Indices of sparse attention are never checked: an index outside the pool is a legal way to say "nothing".
 */
#include "../format/format.h"
#include "check.h"

static bool skip(const fmlai_checker *c)
{
    return fmlai_failed(c) || !c->values || c->shapes_only;
}

void fmlai_check_cu_seqlens(fmlai_checker *c, const char *name, const int32_t *cu, int64_t batch, int64_t total,
                            const char *max_name, int64_t max)
{
    if (skip(c)) {
        return;
    }
    if (cu[0] != 0) {
        fmlai_invalid(c, "%s[0]: %d; allowed: 0", name, (int)cu[0]);
    }
    for (int64_t r = 0; r < batch && !fmlai_failed(c); r++) {
        int64_t length = (int64_t)cu[r + 1] - cu[r];
        if (length < 0) {
            fmlai_invalid(c, "%s[%lld]: %d; allowed: at least %d, the entry before it", name, (long long)r + 1,
                          (int)cu[r + 1], (int)cu[r]);
        } else if (max > 0 && length > max) {
            fmlai_invalid(c, "%s: %lld; request %lld has %lld tokens, allowed: at least that, or 0", max_name,
                          (long long)max, (long long)r, (long long)length);
        }
    }
    if (!fmlai_failed(c) && cu[batch] != total) {
        fmlai_invalid(c, "%s[%lld]: %d; allowed: %lld, all tokens", name, (long long)batch, (int)cu[batch],
                      (long long)total);
    }
}

void fmlai_check_paged(fmlai_checker *c, const char *name, const fmlai_token_list *list, int64_t batch)
{
    const int64_t page = list->pool.page_size;
    int64_t capacity;
    if (skip(c)) {
        return;
    }
    if (!fmlai_mul(list->max_pages, page, &capacity)) {
        capacity = INT64_MAX;
    }
    for (int64_t r = 0; r < batch && !fmlai_failed(c); r++) {
        int64_t length = list->seqlens[r];
        if (length < 0 || length > capacity) {
            fmlai_invalid(c, "%s[%lld]: %lld; %s %lld pages of %lld tokens, allowed: 0..%lld", name, (long long)r,
                          (long long)length,
                          list->block_table == NULL ? "the cache has for a request" : "block_table has",
                          (long long)list->max_pages, (long long)page, (long long)capacity);
            return;
        }
        for (int64_t j = 0; list->block_table != NULL && j * page < length; j++) {
            int64_t entry = list->block_table[r * list->table_stride + j];
            if (entry < 0 || entry >= list->pool.num_pages) {
                fmlai_invalid(c, "block_table[%lld, %lld]: %lld; needed for %s[%lld] = %lld, allowed: 0..%lld",
                              (long long)r, (long long)j, (long long)entry, name, (long long)r, (long long)length,
                              (long long)list->pool.num_pages - 1);
                return;
            }
        }
    }
}

void fmlai_check_slots(fmlai_checker *c, const char *name, const fmlai_slots *slots, int64_t count, int64_t tokens)
{
    if (skip(c) || slots->data == NULL) {
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = fmlai_slot_at(slots, i);
        if (slot >= tokens) {
            fmlai_invalid(c, "%s[%lld]: %lld; the cache has %lld tokens, allowed: below that, or negative to skip",
                          name, (long long)i, (long long)slot, (long long)tokens);
            return;
        }
    }
}

void fmlai_check_positions(fmlai_checker *c, const char *name, const int32_t *positions, int64_t stride, int64_t count,
                           int64_t rows)
{
    if (skip(c)) {
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        int64_t position = positions[i * stride];
        if (position < 0 || position >= rows) {
            fmlai_invalid(c, "%s[%lld]: %lld; cos_sin_cache has %lld rows, allowed: 0..%lld", name, (long long)i,
                          (long long)position, (long long)rows, (long long)rows - 1);
            return;
        }
    }
}

/* One position: inside the table, its entry a page, its slot an int32. */
static void check_page_position(fmlai_checker *c, const fmlai_indices_convert *p, int64_t r, int64_t token, int64_t k)
{
    int64_t a = p->positions[r * p->position_stride[0] + token * p->position_stride[1] + k];
    int64_t page = a / p->page_size;
    if (a < 0) {
        return;
    }
    if (page >= p->max_pages) {
        fmlai_invalid(c,
                      "positions[%lld, %lld, %lld]: %lld; block_table has %lld pages of %lld tokens, allowed: below "
                      "their product, or negative",
                      (long long)r, (long long)token, (long long)k, (long long)a, (long long)p->max_pages,
                      (long long)p->page_size);
        return;
    }
    int64_t entry = p->block_table[r * p->table_stride + page], slot;
    if (entry < 0 || !fmlai_mul(entry, p->page_size, &slot) || slot + a % p->page_size > INT32_MAX) {
        fmlai_invalid(c,
                      "block_table[%lld, %lld]: %lld; needed for positions[%lld, %lld, %lld] = %lld, allowed: 0..%lld",
                      (long long)r, (long long)page, (long long)entry, (long long)r, (long long)token, (long long)k,
                      (long long)a, (long long)(INT32_MAX - a % p->page_size) / p->page_size);
    }
}

void fmlai_check_page_positions(fmlai_checker *c, const fmlai_indices_convert *p)
{
    if (skip(c)) {
        return;
    }
    for (int64_t r = 0; r < p->batch; r++) {
        for (int64_t token = 0; token < p->s_q; token++) {
            for (int64_t k = 0; k < p->topk && !fmlai_failed(c); k++) {
                check_page_position(c, p, r, token, k);
            }
        }
    }
}

void fmlai_check_not_negative(fmlai_checker *c, const char *name, const int32_t *lengths, int64_t count)
{
    if (skip(c)) {
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        if (lengths[i] < 0) {
            fmlai_invalid(c, "%s[%lld]: %d; allowed: at least 0", name, (long long)i, (int)lengths[i]);
            return;
        }
    }
}
