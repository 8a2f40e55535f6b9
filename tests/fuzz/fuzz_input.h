/* SPDX-License-Identifier: MIT */
/*
 * fuzz_input.h: arguments of calls from a fuzzer's bytes. Numbers are mostly small and plausible, sometimes anything;
 * once the bytes are used up they are 0. Tensors and caches lie in memory of exactly their size, so that ASan sees
 * whoever goes beyond, or, if that is more than there may be, nowhere.
 */
#ifndef FLASHMLA_FUZZ_INPUT_H
#define FLASHMLA_FUZZ_INPUT_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <flashmla/flashmla.h>

#define FUZZ_BYTES   (1 << 17) /* of a tensor or a cache */
#define FUZZ_BUFFERS 40

typedef struct input {
    const uint8_t *data;
    size_t size;
    void *buffers[FUZZ_BUFFERS];
    int count;
} input;

static uint32_t take(input *in, uint32_t limit)
{
    uint32_t v = 0;
    for (int i = 0; i < (limit <= 256 ? 1 : 2) && in->size > 0; i++) {
        v = v << 8 | *in->data++;
        in->size--;
    }
    return v % limit;
}

static bool seldom(input *in)
{
    return take(in, 48) == 47;
}

static int64_t number(input *in, uint32_t small)
{
    switch (take(in, 96)) {
    case 95:
        return INT64_MIN + take(in, 65536);
    case 94:
        return INT64_MAX - take(in, 65536);
    case 93:
        return -(int64_t)take(in, 65536);
    default:
        return take(in, small);
    }
}

static int32_t number_32(input *in, uint32_t small)
{
    return (int32_t)number(in, small);
}

/* Memory of the call, of at most FUZZ_BYTES; NULL: there is none. */
static void *memory(input *in, int64_t bytes)
{
    if (bytes < 0 || bytes > FUZZ_BYTES || in->count == FUZZ_BUFFERS) {
        return NULL;
    }
    uint8_t *buffer = malloc((size_t)bytes ? (size_t)bytes : 1);
    for (int64_t i = 0; i < bytes; i++) {
        buffer[i] = (uint8_t)(i % 61); /* no NaN and no infinity in any type */
    }
    in->buffers[in->count++] = buffer;
    return buffer;
}

static void free_memory(input *in)
{
    for (int i = 0; i < in->count; i++) {
        free(in->buffers[i]);
    }
}

/* Elements of a shape, -1: too many. */
static int64_t elements(int rank, const int64_t *shape)
{
    int64_t count = 1;
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0 || shape[i] > FUZZ_BYTES || count > FUZZ_BYTES) {
            return -1;
        }
        count *= shape[i];
    }
    return count;
}

static fmla_tensor tensor(input *in, fmla_dtype dtype, int rank, const int64_t *shape)
{
    fmla_tensor t = fmla_tensor_nd(NULL, dtype, rank, shape);
    const int64_t count = elements(rank, shape);
    t.data = count < 0 ? NULL : memory(in, count * (int64_t)fmla_dtype_size(dtype));
    for (int64_t i = 0; dtype == FMLA_I32 && t.data != NULL && i < count; i++) {
        ((int32_t *)t.data)[i] = in->size > 0 ? number_32(in, 24) : (int32_t)(i % 8);
    }
    if (seldom(in)) {
        t.dtype = (int32_t)take(in, 14);
        t.data = NULL;
    }
    if (seldom(in)) {
        t.rank = number_32(in, 7);
        t.data = NULL;
    }
    if (seldom(in)) {
        t.stride[take(in, FMLA_MAX_RANK)] = take(in, 2) ? 0 : number(in, 600);
        t.data = NULL;
    }
    return t;
}

/* The same, absent half of the time. */
static fmla_tensor tensor_or_none(input *in, fmla_dtype dtype, int rank, const int64_t *shape)
{
    fmla_tensor none;
    memset(&none, 0, sizeof none);
    return take(in, 2) ? tensor(in, dtype, rank, shape) : none;
}

/* A format of the caller's own, to be held by him. */
static fmla_format_info *custom_format(input *in)
{
    fmla_format_info *info = memory(in, sizeof *info);
    if (info == NULL || fmla_format_get((fmla_kv_format)(FMLA_KV_V32 + take(in, 6)), info) != FMLA_OK) {
        return NULL;
    }
    info->struct_size = sizeof *info;
    info->format = FMLA_KV_CUSTOM;
    int32_t *fields[] = {
        &info->layout,       &info->d_qk,        &info->quant_dims,      &info->rope_dims,      &info->element,
        &info->group,        &info->scale,       &info->bytes_per_token, &info->data_row_bytes, &info->scale_row_bytes,
        &info->scale_offset, &info->rope_offset, &info->extra_only};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        if (take(in, 16) == 15) {
            *fields[i] = number_32(in, 700);
        }
    }
    return info;
}

/* `width`: of plain formats. */
static fmla_kv_cache cache(input *in, int64_t width)
{
    fmla_kv_cache kv;
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    memset(&kv, 0, sizeof kv);
    kv.format = (int32_t)take(in, 12);
    kv.num_heads = take(in, 4) ? 0 : number_32(in, 4);
    kv.num_pages = number(in, 8);
    kv.page_size = number(in, 9);
    int64_t token =
        2 * (width >= 0 && width < 4096 ? width : 0) * (kv.num_heads > 0 && kv.num_heads < 64 ? kv.num_heads : 1);
    if (kv.format >= FMLA_KV_COUNT) {
        kv.format = FMLA_KV_CUSTOM;
        kv.custom = custom_format(in);
        token = kv.custom ? kv.custom->bytes_per_token : 0;
    } else if (kv.format > FMLA_KV_F16 && fmla_format_get((fmla_kv_format)kv.format, &info) == FMLA_OK) {
        token = info.bytes_per_token;
    }
    const int64_t slots = elements(2, (int64_t[]){kv.num_pages, kv.page_size});
    kv.data = slots < 0 || token < 0 || token > FUZZ_BYTES ? NULL : memory(in, slots * token);
    if (seldom(in)) {
        int64_t *fields[] = {&kv.page_stride_bytes, &kv.token_stride_bytes, &kv.head_stride_bytes};
        *fields[take(in, 3)] = number(in, 2000);
        kv.data = NULL;
    }
    if (seldom(in)) {
        kv.d_qk = number_32(in, 700);
        kv.data = NULL;
    }
    if (seldom(in)) {
        kv.outer_scale = number_32(in, 4);
    }
    return kv;
}

static fmla_context *cpu_context(void)
{
    static fmla_context *context;
    if (context == NULL) {
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
        config.device = FMLA_DEVICE_CPU;
        config.threads = 1;
        if (fmla_context_create(&config, &context) != FMLA_OK) {
            abort();
        }
    }
    return context;
}

/* A refusal comes with a sentence. */
static void expect_sentence(fmla_status status)
{
    if (status != FMLA_OK && fmla_context_error(cpu_context())[0] == '\0') {
        abort();
    }
}

#endif
