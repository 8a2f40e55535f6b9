/* SPDX-License-Identifier: MIT */
/*
 * cache.h: KV caches by their bytes, from the public description of a format alone. A token's record is the
 * bytes of its data row (plain formats: of all KV heads), then those of its scale row, whatever the layout.
 */
#ifndef FLASHMLA_TOOL_PROBLEM_CACHE_H
#define FLASHMLA_TOOL_PROBLEM_CACHE_H

#include "problem/cases.h"
#include "problem/engine.h"
#include "problem/random.h"

/* A format's row with d_qk and the byte counts of plain formats filled in. */
fmla_format_info cache_format(int64_t format, int64_t d_qk);

/* A cache filled with `fill`. pad: pages and, in plain formats, token rows are longer than need be. */
fmla_kv_cache cache_make(memory *m, int64_t format, int64_t d_qk, int64_t heads, int64_t pages, int64_t page, int pad,
                         int64_t misalign, uint8_t fill);
int64_t cache_slots(const fmla_kv_cache *cache);
/* Bytes from the first page's start to the last page's end. */
size_t cache_bytes(const fmla_kv_cache *cache);
int64_t cache_record_bytes(const fmla_kv_cache *cache);
void cache_put(const fmla_kv_cache *cache, int64_t slot, const uint8_t *record);
void cache_get(const fmla_kv_cache *cache, int64_t slot, uint8_t *record);
/* The cache with one KV head of a plain cache. */
fmla_kv_cache cache_head(const fmla_kv_cache *cache, int32_t head);

/*
 * n records of random tokens: numbers by `data`, then maker's quantiser; scales 1: V32's first quantiser, scales 2:
 * random codes and scales that no quantiser makes. *records is the caller's to free. CLI_OK or CLI_ERROR (printed).
 */
int cache_records(engine *maker, rng *r, const fmla_kv_cache *like, const test_case *c, int64_t n, uint8_t **records);

#endif
