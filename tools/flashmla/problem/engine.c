/* SPDX-License-Identifier: MIT */
/* engine.c: which members of an args struct are addresses, and how they reach a device. */
#include "problem/engine.h"

#include <stdlib.h>
#include <string.h>

typedef enum member_kind { MEMBER_END = 0, MEMBER_TENSOR, MEMBER_CACHE } member_kind;

typedef struct member {
    member_kind kind;
    size_t offset;
} member;

#define T(op, name)                                                                                                    \
    {                                                                                                                  \
        MEMBER_TENSOR, offsetof(fmla_##op##_args, name)                                                                \
    }
#define C(op, name)                                                                                                    \
    {                                                                                                                  \
        MEMBER_CACHE, offsetof(fmla_##op##_args, name)                                                                 \
    }
#define FUSED(op)                                                                                                      \
    T(op, fused.token_positions), T(op, fused.cos_sin_cache), T(op, fused.attn_sink), T(op, fused.out_fp8),            \
        T(op, fused.out_scale), T(op, fused.lse), T(op, fused.max_logits), T(op, fused.out_exact),                     \
        T(op, fused.abs_out), T(op, fused.abs_logit)
#define MEMBERS_MAX 20
#define DECODE                                                                                                         \
    {                                                                                                                  \
        T(decode, q), C(decode, kv), C(decode, extra_kv), T(decode, block_table), T(decode, cache_seqlens),            \
            T(decode, kv_bound), T(decode, indices), T(decode, extra_indices), T(decode, topk_length),                 \
            T(decode, extra_topk_length), T(decode, attn_sink), T(decode, cu_seqlens_q), T(decode, out),               \
            T(decode, lse), T(decode, max_logits)                                                                      \
    }

static const member members[FMLA_OP_COUNT][MEMBERS_MAX] = {
    [FMLA_OP_DENSE_DECODE] = DECODE,
    [FMLA_OP_SPARSE_DECODE] = DECODE,
    [FMLA_OP_SPARSE_PREFILL] = {T(prefill, q), T(prefill, kv), T(prefill, indices), T(prefill, topk_length),
                                T(prefill, attn_sink), T(prefill, out), T(prefill, lse), T(prefill, max_logits)},
    [FMLA_OP_FUSED_PREFILL] = {T(fused_prefill, q), T(fused_prefill, kv), T(fused_prefill, indices),
                               T(fused_prefill, topk_length), FUSED(fused_prefill)},
    [FMLA_OP_FUSED_DECODE] = {T(fused_decode, q), C(fused_decode, kv), C(fused_decode, extra_kv),
                              T(fused_decode, indices), T(fused_decode, extra_indices), T(fused_decode, topk_length),
                              T(fused_decode, extra_topk_length), FUSED(fused_decode)},
    [FMLA_OP_MHA_FORWARD] = {T(mha_forward, q), T(mha_forward, k), T(mha_forward, v), T(mha_forward, cu_seqlens_q),
                             T(mha_forward, cu_seqlens_kv), T(mha_forward, out), T(mha_forward, lse)},
    [FMLA_OP_MHA_BACKWARD] = {T(mha_backward, q), T(mha_backward, k), T(mha_backward, v), T(mha_backward, out),
                              T(mha_backward, lse), T(mha_backward, dout), T(mha_backward, cu_seqlens_q),
                              T(mha_backward, cu_seqlens_kv), T(mha_backward, dq), T(mha_backward, dk),
                              T(mha_backward, dv)},
    [FMLA_OP_QUANTIZE] = {T(quantize, src), T(quantize, slots), C(quantize, dst)},
    [FMLA_OP_DEQUANTIZE] = {C(dequantize, src), T(dequantize, slots), T(dequantize, dst)},
    [FMLA_OP_CONVERT] = {C(convert, src), C(convert, dst), T(convert, src_slots), T(convert, dst_slots)},
    [FMLA_OP_MERGE] = {T(merge, attn_sink), T(merge, out), T(merge, lse)},
    [FMLA_OP_PERMUTE_Q_B] = {T(permute_q_b, weight), T(permute_q_b, scale), T(permute_q_b, out_weight),
                             T(permute_q_b, out_scale)},
    [FMLA_OP_PERMUTE_WV] = {T(permute_wv, weight), T(permute_wv, scale), T(permute_wv, out_weight),
                            T(permute_wv, out_scale)},
    [FMLA_OP_INDICES_CONVERT] = {T(indices_convert, positions), T(indices_convert, block_table),
                                 T(indices_convert, indices)},
    [FMLA_OP_FP8_CAST] = {T(fp8_cast, src), T(fp8_cast, codes), T(fp8_cast, scale)},
    [FMLA_OP_SCHEDULE] = {T(schedule, cache_seqlens), T(schedule, topk_length), T(schedule, extra_topk_length),
                          T(schedule, metadata), T(schedule, num_splits)},
};

#define PIECE ((size_t)1 << 21) /* bytes of a device's buffer that are looked at together */

int engine_open(engine *e, const cli_options *options)
{
    memset(e, 0, sizeof *e);
    e->options = *options;
    int status = cli_context_open(options, &e->context);
    if (status == CLI_OK) {
        e->host = fmla_context_device(e->context) != FMLA_DEVICE_CUDA;
    }
    return status;
}

int engine_open_host(engine *e, fmla_device device, fmla_isa isa, int32_t threads)
{
    cli_options options = CLI_OPTIONS_INIT;
    options.device = device;
    options.isa = isa;
    options.threads = threads;
    return engine_open(e, &options);
}

void engine_close(engine *e)
{
    fmla_context_destroy(e->context);
    e->context = NULL;
}

const char *engine_error(const engine *e)
{
    return fmla_context_error(e->context);
}

/* A buffer's bytes on the device. Blocks start as far off a 64-byte boundary as the host's, so that alignments carry
 * over.
 */
static uint8_t *on_device(const buffer *b)
{
    return (uint8_t *)b->device + ((uintptr_t)(b->host - MEMORY_GUARD) & 63) + MEMORY_GUARD;
}

static int download(memory *m, const buffer *b)
{
    return cli_memory_download(m->device, b->host - MEMORY_GUARD, on_device(b) - MEMORY_GUARD,
                               b->size + 2 * MEMORY_GUARD);
}

/* What is all one byte is made so over there: the guards have been there since the first time. */
static int upload(memory *m, buffer *b)
{
    bool first = b->device == NULL;
    if (first) {
        b->device = cli_memory_new(m->device, b->size + 2 * MEMORY_GUARD + 64);
    }
    if (b->device == NULL) {
        return CLI_ERROR;
    }
    bool fill = b->filled;
    b->filled = false;
    if (!fill) {
        return cli_memory_upload(m->device, on_device(b) - MEMORY_GUARD, b->host - MEMORY_GUARD,
                                 b->size + 2 * MEMORY_GUARD);
    }
    int status = cli_memory_fill(m->device, on_device(b), b->fill, b->size);
    if (first && status == CLI_OK) {
        status = cli_memory_upload(m->device, on_device(b) - MEMORY_GUARD, b->host - MEMORY_GUARD, MEMORY_GUARD);
    }
    if (first && status == CLI_OK) {
        status = cli_memory_upload(m->device, on_device(b) + b->size, b->host + b->size, MEMORY_GUARD);
    }
    return status;
}

/* The buffer's bytes and its guards, to whole words. */
static int hash_there(memory *m, const buffer *b, int *slot)
{
    const uint8_t *begin = on_device(b) - MEMORY_GUARD, *end = on_device(b) + b->size + MEMORY_GUARD;
    begin += -(uintptr_t)begin & 7;
    int status = cli_memory_hash(m->device, begin, (size_t)(end - begin), m->slots);
    *slot = status == CLI_OK ? ++m->slots : 0;
    return status;
}

/* The device address of a host address; its buffer is copied there. 0, or -1. */
static int bind_address(memory *m, void **address)
{
    if (*address == NULL) {
        return 0;
    }
    buffer *b = memory_find(m, *address);
    if (b == NULL) {
        return -1;
    }
    b->bound = true;
    if ((b->device == NULL || !(m->resident || b->there)) && upload(m, b) != CLI_OK) {
        return -1;
    }
    if (b->kept && !b->there && hash_there(m, b, &b->slot) == CLI_ERROR) {
        return -1;
    }
    b->there = b->kept;
    *address = on_device(b) + ((uint8_t *)*address - b->host);
    return 0;
}

static fmla_tensor *member_tensor(any_args *args, const member *where)
{
    return (fmla_tensor *)(void *)((char *)args + where->offset);
}

static fmla_kv_cache *member_cache(any_args *args, const member *where)
{
    return (fmla_kv_cache *)(void *)((char *)args + where->offset);
}

static int bind_merge(memory *m, const fmla_merge_args *host, fmla_merge_args *bound)
{
    /* Small arrays of views stay on the host; they live as long as the buffers they describe. */
    size_t size = (size_t)host->count * sizeof(fmla_tensor);
    fmla_tensor *outs = memory_take(m, size, 0);
    fmla_tensor *lses = memory_take(m, size, 0);
    memcpy(outs, host->outs, size);
    memcpy(lses, host->lses, size);
    for (int32_t i = 0; i < host->count; i++) {
        if (bind_address(m, &outs[i].data) != 0 || bind_address(m, &lses[i].data) != 0) {
            return -1;
        }
    }
    bound->outs = outs;
    bound->lses = lses;
    return 0;
}

fmla_status engine_bind(engine *e, memory *m, fmla_operation op, const any_args *args, any_args *bound)
{
    *bound = *args;
    if (e->host) {
        return FMLA_OK;
    }
    if (m->device == NULL && cli_memory_open(e->context, e->options.device_index, &m->device) != CLI_OK) {
        return FMLA_ERROR_DEVICE;
    }
    for (buffer *b = m->first; b != NULL; b = b->next) {
        b->bound = b->bound && m->resident;
    }
    for (const member *where = members[op]; where->kind != MEMBER_END; where++) {
        void **address =
            where->kind == MEMBER_TENSOR ? &member_tensor(bound, where)->data : &member_cache(bound, where)->data;
        if (bind_address(m, address) != 0) {
            return FMLA_ERROR_DEVICE;
        }
    }
    if (op == FMLA_OP_MERGE && bind_merge(m, &args->merge, &bound->merge) != 0) {
        return FMLA_ERROR_DEVICE;
    }
    return FMLA_OK;
}

fmla_status engine_call(engine *e, fmla_operation op, const any_args *a)
{
    switch (op) {
    case FMLA_OP_DENSE_DECODE:
    case FMLA_OP_SPARSE_DECODE:
        return fmla_decode(e->context, &a->decode, e->stream);
    case FMLA_OP_SPARSE_PREFILL:
        return fmla_prefill(e->context, &a->prefill, e->stream);
    case FMLA_OP_FUSED_PREFILL:
        return fmla_fused_prefill(e->context, &a->fused_prefill, e->stream);
    case FMLA_OP_FUSED_DECODE:
        return fmla_fused_decode(e->context, &a->fused_decode, e->stream);
    case FMLA_OP_MHA_FORWARD:
        return fmla_mha_forward(e->context, &a->mha_forward, e->stream);
    case FMLA_OP_MHA_BACKWARD:
        return fmla_mha_backward(e->context, &a->mha_backward, e->stream);
    case FMLA_OP_QUANTIZE:
        return fmla_quantize(e->context, &a->quantize, e->stream);
    case FMLA_OP_DEQUANTIZE:
        return fmla_dequantize(e->context, &a->dequantize, e->stream);
    case FMLA_OP_CONVERT:
        return fmla_convert(e->context, &a->convert, e->stream);
    case FMLA_OP_MERGE:
        return fmla_merge(e->context, &a->merge, e->stream);
    case FMLA_OP_PERMUTE_Q_B:
        return fmla_permute_q_b(e->context, &a->permute_q_b, e->stream);
    case FMLA_OP_PERMUTE_WV:
        return fmla_permute_wv(e->context, &a->permute_wv, e->stream);
    case FMLA_OP_INDICES_CONVERT:
        return fmla_indices_convert(e->context, &a->indices_convert, e->stream);
    case FMLA_OP_FP8_CAST:
        return fmla_fp8_cast(e->context, &a->fp8_cast, e->stream);
    case FMLA_OP_SCHEDULE:
        return fmla_schedule(e->context, &a->schedule, e->stream);
    default:
        return FMLA_ERROR_UNSUPPORTED;
    }
}

fmla_status engine_wait(engine *e, memory *m)
{
    if (e->host || m->device == NULL) {
        return FMLA_OK;
    }
    return cli_memory_synchronize(m->device) == CLI_OK ? FMLA_OK : FMLA_ERROR_DEVICE;
}

/* Every buffer that the call named and nobody keeps, with its guards: a kernel that wrote where it should not is seen
 * on the host. */
static fmla_status fetch(memory *m)
{
    for (buffer *b = m->first; b != NULL; b = b->next) {
        if (b->bound && !b->kept && download(m, b) != CLI_OK) {
            return FMLA_ERROR_DEVICE;
        }
    }
    return FMLA_OK;
}

fmla_status engine_run(engine *e, memory *m, fmla_operation op, const any_args *args)
{
    any_args bound;
    fmla_status status = engine_bind(e, m, op, args, &bound);
    if (status == FMLA_OK) {
        status = engine_call(e, op, &bound);
    }
    if (status == FMLA_OK) {
        status = engine_wait(e, m);
    }
    if (status == FMLA_OK && !e->host && !m->resident) {
        status = fetch(m);
    }
    return status;
}

fmla_status engine_resident(engine *e, memory *m, bool on)
{
    fmla_status status = FMLA_OK;
    if (e->host || m->device == NULL) {
        return FMLA_OK;
    }
    for (buffer *b = m->first; b != NULL && on && status == FMLA_OK; b = b->next) {
        b->bound = false;
        if (b->device != NULL && !b->there && upload(m, b) != CLI_OK) {
            status = FMLA_ERROR_DEVICE;
        }
    }
    if (!on && m->resident) {
        status = fetch(m);
    }
    m->resident = on;
    return status;
}

void engine_keep(engine *e, memory *m, const fmla_tensor *const *without, int count)
{
    for (buffer *b = m->first; b != NULL; b = b->next) {
        bool keep = !b->kept;
        for (int i = 0; i < count && keep; i++) {
            keep = without[i]->data == NULL || memory_find(m, without[i]->data) != b;
        }
        if (keep) {
            b->kept = true;
            b->there = false;
            b->slot = 0;
            b->hash = e->host ? memory_hash(b->host, b->size) : 0;
        }
    }
}

void engine_release(memory *m)
{
    for (buffer *b = m->first; b != NULL; b = b->next) {
        b->kept = b->there = false;
        b->slot = 0;
    }
}

/* Whether the buffers that the device has told something of are as they were then. All of them are asked for before
 * any answer is waited for; one that cannot be is left to device_same. */
static fmla_status hashes_same(memory *m, bool *same)
{
    uint64_t hashes[CLI_HASHES];
    int slots = m->slots, pairs[CLI_HASHES][2], count = 0;
    for (buffer *b = m->first; b != NULL; b = b->next) {
        if (b->there && b->slot != 0) {
            int now, before = b->slot;
            if (hash_there(m, b, &now) == CLI_ERROR) {
                return FMLA_ERROR_DEVICE;
            }
            b->slot = now != 0 ? before : 0;
            pairs[count][0] = before - 1;
            pairs[count][1] = now - 1;
            count += now != 0;
        }
    }
    if (slots == 0) {
        return FMLA_OK;
    }
    if (cli_memory_hashes(m->device, hashes) != CLI_OK) {
        return FMLA_ERROR_DEVICE;
    }
    for (int i = 0; i < count && *same; i++) {
        *same = hashes[pairs[i][0]] == hashes[pairs[i][1]];
    }
    return FMLA_OK;
}

/* Whether a buffer on the device, guards included, still holds what the host's holds: piece by piece, through a cache.
 */
static bool device_same(memory *m, const buffer *b, uint8_t *piece, bool *same)
{
    const uint8_t *host = b->host - MEMORY_GUARD;
    const uint8_t *device = on_device(b) - MEMORY_GUARD;
    size_t left = b->size + 2 * MEMORY_GUARD;
    for (size_t at = 0, n; left > 0 && *same; at += n, left -= n) {
        n = left < PIECE ? left : PIECE;
        if (cli_memory_download(m->device, piece, device + at, n) != CLI_OK) {
            return false;
        }
        *same = memcmp(piece, host + at, n) == 0;
    }
    return true;
}

fmla_status engine_untouched(engine *e, memory *m, bool *untouched)
{
    uint8_t *piece = e->host ? NULL : xmalloc(PIECE);
    fmla_status status = FMLA_OK;
    *untouched = true;
    if (!e->host) {
        status = hashes_same(m, untouched);
    }
    for (const buffer *b = m->first; b != NULL && *untouched && status == FMLA_OK; b = b->next) {
        if (e->host && b->kept) {
            *untouched = memory_hash(b->host, b->size) == b->hash;
        } else if (b->there && b->slot == 0 && !device_same(m, b, piece, untouched)) {
            status = FMLA_ERROR_DEVICE;
        }
    }
    free(piece);
    return status;
}
