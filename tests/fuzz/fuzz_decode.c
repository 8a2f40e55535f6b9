/* SPDX-License-Identifier: MIT */
/*
 * Arbitrary args for fmla_decode over small real buffers: shapes, strides, formats, lengths, block tables and indices
 * come from the input. The call succeeds or says what is wrong; it never touches memory outside the buffers (ASan
 * watches).
 */
#include <stdlib.h>
#include <string.h>

#include <flashmla/flashmla.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { POOL = 1 << 16, INTS = 512 };

typedef struct input {
    const uint8_t *data;
    size_t size;
} input;

/* 0 once the input is used up. */
static uint32_t take(input *in, uint32_t limit)
{
    uint32_t v = 0;
    for (int i = 0; i < (limit <= 256 ? 1 : 2) && in->size > 0; i++) {
        v = v << 8 | *in->data++;
        in->size--;
    }
    return v % limit;
}

/* Mostly small and plausible, sometimes anything. */
static int64_t number(input *in, uint32_t small)
{
    switch (take(in, 64)) {
    case 63:
        return INT64_MIN + take(in, 65536);
    case 62:
        return INT64_MAX - take(in, 65536);
    case 61:
        return -(int64_t)take(in, 65536);
    default:
        return take(in, small);
    }
}

/* A tensor over `bytes` bytes that the shape fits into (or data NULL): only then may the library read it. */
static fmla_tensor tensor(input *in, void *buffer, size_t bytes, fmla_dtype dtype, int rank, const int64_t *shape)
{
    fmla_tensor t = fmla_tensor_nd(buffer, dtype, rank, shape);
    int64_t count = 1;
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0 || shape[i] > 4096) {
            t.data = NULL;
        } else {
            count *= shape[i] ? shape[i] : 1;
        }
    }
    if (t.data != NULL && (size_t)count * fmla_dtype_size(dtype) > bytes) {
        t.data = NULL;
    }
    if (take(in, 32) == 0) {
        t.dtype = (int32_t)take(in, 12);
        t.data = NULL;
    }
    if (take(in, 32) == 0) {
        t.rank = (int32_t)number(in, 7);
        t.data = NULL;
    }
    return t;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t q[1 << 15], out[1 << 16], pool[POOL], extra[POOL];
    static float lse[4096], sink[64];
    static int32_t ints[4][INTS];
    static fmla_context *ctx;
    input in = {data, size};

    if (ctx == NULL) {
        fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
        config.device = FMLA_DEVICE_CPU;
        config.threads = 1;
        if (fmla_context_create(&config, &ctx) != FMLA_OK) {
            abort();
        }
    }
    int64_t b = number(&in, 4), s_q = number(&in, 4), h_q = number(&in, 8), topk = number(&in, 40);
    int32_t format = (int32_t)take(&in, 10);
    int64_t d = format == FMLA_KV_V32 ? 576 : format <= FMLA_KV_F16 ? number(&in, 80) : 512;
    int64_t page = number(&in, 9), pages = number(&in, 8);
    page += page < INT64_MAX;
    int sparse = (int)take(&in, 2);

    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    fmla_dtype dtype = format == FMLA_KV_F16 ? FMLA_F16 : FMLA_BF16;
    a.q = tensor(&in, q, sizeof q, dtype, 4, (int64_t[]){b, s_q, h_q, d});
    a.out = tensor(&in, out, sizeof out, dtype, 4, (int64_t[]){b, s_q, h_q, format <= FMLA_KV_F16 ? d : 512});
    a.lse = tensor(&in, lse, sizeof lse, FMLA_F32, 3, (int64_t[]){b, h_q, s_q});
    a.kv.format = format;
    a.kv.num_pages = pages;
    a.kv.page_size = page;
    a.kv.data = pages >= 0 && pages <= POOL && page > 0 && page <= POOL && pages * page * 1160 <= POOL ? pool : NULL;
    if (sparse) {
        a.indices = tensor(&in, ints[0], sizeof ints[0], FMLA_I32, 3, (int64_t[]){b, s_q, topk});
        if (take(&in, 2)) {
            a.topk_length = tensor(&in, ints[1], sizeof ints[1], FMLA_I32, 1, (int64_t[]){b});
        }
        if (take(&in, 2)) {
            a.extra_kv = a.kv;
            a.extra_kv.format = (int32_t)take(&in, 10);
            a.extra_kv.data = a.kv.data ? extra : NULL;
            a.extra_indices = tensor(&in, ints[2], sizeof ints[2], FMLA_I32, 3, (int64_t[]){b, s_q, topk});
        }
    } else {
        int64_t max_pages = number(&in, 9);
        a.cache_seqlens = tensor(&in, ints[1], sizeof ints[1], FMLA_I32, 1, (int64_t[]){b});
        if (take(&in, 4)) {
            a.block_table = tensor(&in, ints[3], sizeof ints[3], FMLA_I32, 2, (int64_t[]){b, max_pages});
        }
        a.causal = (int32_t)take(&in, 2);
    }
    if (take(&in, 2)) {
        a.attn_sink = tensor(&in, sink, sizeof sink, FMLA_F32, 1, (int64_t[]){h_q});
    }
    for (int j = 0; j < INTS; j++) { /* last: what is left of the input */
        for (int i = 0; i < 4; i++) {
            ints[i][j] = in.size > 0 ? (int32_t)number(&in, 64) : j % 8;
        }
    }
    if (fmla_decode(ctx, &a, NULL) != FMLA_OK && fmla_context_error(ctx)[0] == '\0') {
        abort(); /* refused without a sentence */
    }
    return 0;
}
