/* SPDX-License-Identifier: MIT */
/* Dense decode over a paged bf16 cache: two requests, 16 heads, pages of 64 tokens. Prints each request's first lse. */
#include <stdio.h>
#include <stdlib.h>

#include <flashmla/flashmla.h>

enum { B = 2, H = 16, D = 576, DV = 512, PAGE = 64, PAGES = 8 };

/* bf16 numbers in [-0.5, 0.5), the same on every machine. */
static void fill(uint16_t *x, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        float f = (float)(seed >> 8) / 16777216.0f - 0.5f;
        union {
            float f;
            uint32_t u;
        } bits = {f};
        x[i] = (uint16_t)(bits.u >> 16);
    }
}

int main(void)
{
    static uint16_t q[B * H * D], out[B * H * DV], cache[PAGES * PAGE * D];
    static float lse[B * H];
    const int32_t table[B][4] = {{5, 0, 3, 7}, {2, 6, 0, 0}}, lengths[B] = {200, 77};
    fill(q, B * H * D, 1);
    fill(cache, PAGES * PAGE * D, 2);

    fmla_context *ctx;
    if (fmla_context_create(NULL, &ctx) != FMLA_OK) {
        fprintf(stderr, "%s\n", fmla_last_create_error());
        return 1;
    }
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    a.q = fmla_tensor_4d(q, FMLA_BF16, B, 1, H, D);
    a.kv = (fmla_kv_cache){.data = cache, .format = FMLA_KV_BF16, .num_pages = PAGES, .page_size = PAGE};
    a.block_table = fmla_tensor_2d(table, FMLA_I32, B, 4);
    a.cache_seqlens = fmla_tensor_1d(lengths, FMLA_I32, B);
    a.out = fmla_tensor_4d(out, FMLA_BF16, B, 1, H, DV);
    a.lse = fmla_tensor_3d(lse, FMLA_F32, B, H, 1);
    fmla_status status = fmla_decode(ctx, &a, NULL);
    if (status != FMLA_OK) {
        fprintf(stderr, "%s: %s\n", fmla_status_string(status), fmla_context_error(ctx));
    } else {
        printf("lse of head 0: %.6f and %.6f on %s\n", lse[0], lse[H], fmla_isa_name(fmla_context_isa(ctx)));
    }
    fmla_context_destroy(ctx);
    return status == FMLA_OK ? 0 : 1;
}
