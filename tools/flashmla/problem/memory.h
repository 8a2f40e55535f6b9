/* SPDX-License-Identifier: MIT */
/*
 * memory.h: the buffers of a problem. Everything is built in host memory, every buffer between guard bytes.
 * Calls are always written with host addresses; an engine (problem/engine.h) whose context runs on a device copies the
 * buffers that a call names there, guards included, and its results back.
 */
#ifndef FLASHMLA_TOOL_PROBLEM_MEMORY_H
#define FLASHMLA_TOOL_PROBLEM_MEMORY_H

#include "program.h"

#define MEMORY_GUARD 256

typedef struct buffer {
    struct buffer *next;
    uint8_t *host; /* behind the guard */
    size_t size;
    void *device; /* the block on the device, guards included; NULL: not there yet */
    bool bound;   /* the last call on a device named it */
    bool filled;  /* since the last call every byte is `fill` */
    uint8_t fill;
    bool kept;     /* see engine_keep */
    bool there;    /* kept, and the device has had its bytes since */
    int slot;      /* there, and 1 + slot of what the device said of it then (cli_memory_hash); 0: it says nothing */
    uint64_t hash; /* of a buffer kept on the host */
    void *block;   /* what free() takes */
} buffer;

typedef struct memory {
    buffer *first;
    cli_memory *device; /* NULL until a device is asked for */
    bool resident;      /* see engine_resident */
    int slots;          /* of hashes that were used */
} memory;

/* size bytes at `misalign` bytes behind a 64-byte boundary, between guards. Ends the program when there is no memory.
 */
void *memory_take(memory *m, size_t size, size_t misalign);
/* A tensor in memory of its own. pad: every dimension is over-allocated by 1, the last by 128 elements. Filled with
 * `fill`. */
fmla_tensor memory_tensor(memory *m, fmla_dtype dtype, int32_t rank, const int64_t *shape, int pad, uint8_t fill);
fmla_tensor memory_tensor_4(memory *m, fmla_dtype dtype, int32_t rank, int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                            int pad, uint8_t fill);
/* Packed scales, four to a word, rows contiguous and padded to a multiple of four: [groups, rows, words], or [rows,
 * words] of one group. Filled with 0. */
fmla_tensor memory_scale_words(memory *m, int32_t rank, int64_t groups, int64_t rows, int64_t words);
/* Sets every byte of the buffer that holds the address. */
void memory_fill(memory *m, const void *address, uint8_t fill);
buffer *memory_find(const memory *m, const void *address);
/* 1 if all guard bytes are as they were written. */
int memory_intact(const memory *m);
/* Order-dependent hash of n bytes. */
uint64_t memory_hash(const uint8_t *p, size_t n);
void memory_free(memory *m);

/* The pages that large buffers give back are used again by the next ones, instead of fetched anew from the system,
 * zeroed one by one: for processes that build problem after problem. */
void memory_reuse_pages(void);
/* Gives all of them back to the system. */
void memory_return_pages(void);

/* malloc and calloc that end the program with a message. */
void *xmalloc(size_t size);
void *xcalloc(size_t count, size_t size);

#endif
