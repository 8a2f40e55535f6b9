/* SPDX-License-Identifier: MIT */
/* Sparse decode over two fp8/fp4 caches, as V4.1 does it: a sliding window in fp8, compressed tokens in fp4. */
#include <stdio.h>
#include <stdlib.h>

#include <flashmla/flashmla.h>

enum { H = 64, D = 512, PAGE = 64, WINDOW = 128, LONG = 1024, TOPK = 128, EXTRA_TOPK = 512 };

static void fill(float *x, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) / 16777216.0f - 0.5f;
    }
}

/* Quantises n random tokens into a new cache of the format. */
static fmla_status make_cache(fmla_context *ctx, fmla_kv_format format, int64_t n, fmla_kv_cache *cache, float *rows)
{
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;
    fmla_format_get(format, &info);
    *cache = (fmla_kv_cache){.format = format, .num_pages = n / PAGE, .page_size = PAGE};
    cache->data = calloc((size_t)n, (size_t)info.bytes_per_token);
    if (cache->data == NULL) {
        return FMLA_ERROR_OUT_OF_MEMORY;
    }
    fill(rows, (size_t)n * D, (uint32_t)format);
    fmla_quantize_args a = FMLA_QUANTIZE_ARGS_INIT;
    a.src = fmla_tensor_2d(rows, FMLA_F32, n, D);
    a.dst = *cache;
    return fmla_quantize(ctx, &a, NULL);
}

int main(void)
{
    static uint16_t q[H * D], out[H * D];
    static float rows[LONG * D], lse[H];
    static int32_t window[TOPK], far[EXTRA_TOPK];
    fmla_context *ctx;
    if (fmla_context_create(NULL, &ctx) != FMLA_OK) {
        fprintf(stderr, "%s\n", fmla_last_create_error());
        return 1;
    }
    for (int i = 0; i < H * D; i++) {
        q[i] = (uint16_t)(0x3c00 + i % 64); /* small bf16 numbers */
    }
    for (int i = 0; i < TOPK; i++) {
        window[i] = i;
    }
    for (int i = 0; i < EXTRA_TOPK; i++) {
        far[i] = i < 300 ? i * 3 : -1; /* -1: nothing to attend in this slot */
    }
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    a.q = fmla_tensor_4d(q, FMLA_BF16, 1, 1, H, D);
    a.indices = fmla_tensor_3d(window, FMLA_I32, 1, 1, TOPK);
    a.extra_indices = fmla_tensor_3d(far, FMLA_I32, 1, 1, EXTRA_TOPK);
    a.out = fmla_tensor_4d(out, FMLA_BF16, 1, 1, H, D);
    a.lse = fmla_tensor_3d(lse, FMLA_F32, 1, H, 1);
    fmla_status status = make_cache(ctx, FMLA_KV_V41, WINDOW, &a.kv, rows);
    if (status == FMLA_OK) {
        status = make_cache(ctx, FMLA_KV_V41_FP4, LONG, &a.extra_kv, rows);
    }
    if (status == FMLA_OK) {
        status = fmla_decode(ctx, &a, NULL);
    }
    if (status == FMLA_OK) {
        printf("lse of head 0 over %d window and 300 compressed tokens: %.6f\n", TOPK, lse[0]);
    } else {
        fprintf(stderr, "%s: %s\n", fmla_status_string(status), fmla_context_error(ctx));
    }
    free(a.kv.data);
    free(a.extra_kv.data);
    fmla_context_destroy(ctx);
    return status == FMLA_OK ? 0 : 1;
}
