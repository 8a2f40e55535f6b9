/* SPDX-License-Identifier: MIT */
/* memory.c: guarded buffers. */
#include "problem/memory.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "problem/numbers.h"

#define GUARD_BYTE 0xA5

void *xmalloc(size_t size)
{
    void *p = malloc(size ? size : 1);
    if (p == NULL) {
        fprintf(stderr, "flashmla: out of memory (%zu bytes)\n", size);
        exit(2);
    }
    return p;
}

void *xcalloc(size_t count, size_t size)
{
    void *p = calloc(count ? count : 1, size ? size : 1);
    if (p == NULL) {
        fprintf(stderr, "flashmla: out of memory (%zu * %zu bytes)\n", count, size);
        exit(2);
    }
    return p;
}

void memory_reuse_pages(void)
{
#ifdef __GLIBC__
    mallopt(M_MMAP_MAX, 0);
    mallopt(M_TRIM_THRESHOLD, -1);
    mallopt(M_TOP_PAD, 64 << 20);
#endif
}

void memory_return_pages(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}

void *memory_take(memory *m, size_t size, size_t misalign)
{
    buffer *b = xcalloc(1, sizeof *b);
    size_t total = size + 2 * MEMORY_GUARD + 128 + misalign;
    b->block = xmalloc(total);
    uintptr_t start = ((uintptr_t)b->block + MEMORY_GUARD + 63) & ~(uintptr_t)63;
    b->host = (uint8_t *)start + misalign;
    b->size = size;
    memset(b->host - MEMORY_GUARD, GUARD_BYTE, MEMORY_GUARD);
    memset(b->host + size, GUARD_BYTE, MEMORY_GUARD);
    b->next = m->first;
    m->first = b;
    return b->host;
}

fmla_tensor memory_tensor(memory *m, fmla_dtype dtype, int32_t rank, const int64_t *shape, int pad, uint8_t fill)
{
    fmla_tensor t = fmla_tensor_nd(NULL, dtype, rank, shape);
    if (pad) {
        int64_t stride = 1;
        for (int32_t d = rank - 1; d >= 0; d--) {
            t.stride[d] = stride;
            stride *= shape[d] + (d == rank - 1 ? 128 : 1);
        }
    }
    size_t size = tensor_span(&t);
    t.data = memory_take(m, size, 0);
    memset(t.data, fill, size);
    return t;
}

fmla_tensor memory_tensor_4(memory *m, fmla_dtype dtype, int32_t rank, int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                            int pad, uint8_t fill)
{
    const int64_t shape[4] = {n0, n1, n2, n3};
    return memory_tensor(m, dtype, rank, shape, pad, fill);
}

fmla_tensor memory_scale_words(memory *m, int32_t rank, int64_t groups, int64_t rows, int64_t words)
{
    int64_t padded = (rows + 3) / 4 * 4;
    fmla_tensor t = memory_tensor_4(m, FMLA_I32, 3, groups, words, padded, 0, 0, 0);
    t.rank = rank;
    t.shape[rank - 2] = rows;
    t.shape[rank - 1] = words;
    t.stride[0] = words * padded;
    t.stride[rank - 2] = 1;
    t.stride[rank - 1] = padded;
    return t;
}

buffer *memory_find(const memory *m, const void *address)
{
    const uint8_t *p = address;
    for (buffer *b = m->first; b != NULL; b = b->next) {
        if (p >= b->host - MEMORY_GUARD && p <= b->host + b->size) {
            return b;
        }
    }
    return NULL;
}

void memory_fill(memory *m, const void *address, uint8_t fill)
{
    buffer *b = memory_find(m, address);
    memset(b->host, fill, b->size);
    b->filled = true;
    b->fill = fill;
}

static int guard_intact(const uint8_t *guard)
{
    for (int i = 0; i < MEMORY_GUARD; i++) {
        if (guard[i] != GUARD_BYTE) {
            return 0;
        }
    }
    return 1;
}

int memory_intact(const memory *m)
{
    for (const buffer *b = m->first; b != NULL; b = b->next) {
        if (!guard_intact(b->host - MEMORY_GUARD) || !guard_intact(b->host + b->size)) {
            return 0;
        }
    }
    return 1;
}

uint64_t memory_hash(const uint8_t *p, size_t n)
{
    uint64_t hash = 0;
    size_t i = 0;
    uint64_t lanes[4] = {hash, hash + 1, hash + 2, hash + 3};
    for (; i + 32 <= n; i += 32) { /* four at a time: a product takes some cycles */
        uint64_t words[4];
        memcpy(words, p + i, 32);
        for (int j = 0; j < 4; j++) {
            lanes[j] = (lanes[j] ^ words[j]) * 0x9E3779B97F4A7C15u;
            lanes[j] ^= lanes[j] >> 29;
        }
    }
    for (int j = 0; j < 4; j++) {
        hash = (hash ^ lanes[j]) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        memcpy(&word, p + i, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    for (; i < n; i++) {
        hash = (hash ^ p[i]) * 0x100000001B3u;
    }
    return hash;
}

void memory_free(memory *m)
{
    while (m->first != NULL) {
        buffer *b = m->first;
        m->first = b->next;
        free(b->block);
        free(b);
    }
    if (m->device != NULL) {
        cli_memory_close(m->device);
        m->slots = 0;
        m->device = NULL;
    }
}
