/* SPDX-License-Identifier: MIT */
/*
 * Offsets beyond 2^31 elements and bytes (promise 5). The memory is virtual: only the pages that a test touches exist.
 * Where the system gives no such mapping the test is skipped.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "support_calls.h"

typedef struct far_memory {
    unsigned char *data;
    size_t size;
} far_memory;

static fmla_context *context;

static int set_up(void **state)
{
    (void)state;
    context = make_context(FMLA_DEVICE_CPU, 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fmla_context_destroy(context);
    return 0;
}

static far_memory map_far(size_t size)
{
    void *data = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
        skip();
    }
    return (far_memory){data, size};
}

static void unmap_far(far_memory m)
{
    munmap(m.data, m.size);
}

static void expect_ok(fmla_status status)
{
    if (status != FMLA_OK) {
        fail_msg("%d: %s", (int)status, fmla_context_error(context));
    }
}

static uint16_t bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)(bits >> 16);
}

/* C022: a slot number times 576 elements passes 2^31 near slot 3.7 million. */
static void c022_slots_beyond_31_bits(void **state)
{
    (void)state;
    static const int64_t slots[4] = {4000000, ((int64_t)1 << 31) / 576, ((int64_t)1 << 31) / 576 + 1, 0};
    static const fmla_kv_format formats[] = {FMLA_KV_BF16, FMLA_KV_V32};
    uint16_t src[4][576], back[4][576];
    for (int32_t i = 0; i < 4; i++) {
        for (int32_t d = 0; d < 576; d++) {
            src[i][d] = bf16((float)(i + 1) * (d % 2 ? 1.0f : -0.5f));
        }
    }
    for (size_t f = 0; f < 2; f++) {
        far_memory cache = map_far((size_t)62501 * 64 * 1152);
        fmla_quantize_args q = FMLA_QUANTIZE_ARGS_INIT;
        fmla_dequantize_args d = FMLA_DEQUANTIZE_ARGS_INIT;
        q.src = fmla_tensor_2d(src, FMLA_BF16, 4, 576);
        q.slots = fmla_tensor_1d(slots, FMLA_I64, 4);
        q.dst = (fmla_kv_cache){.data = cache.data, .format = (int32_t)formats[f], .num_pages = 62501, .page_size = 64};
        expect_ok(fmla_quantize(context, &q, NULL));
        d.src = q.dst;
        d.slots = q.slots;
        d.dst = fmla_tensor_2d(back, FMLA_BF16, 4, 576);
        memset(back, 0, sizeof back);
        expect_ok(fmla_dequantize(context, &d, NULL));
        assert_memory_equal(src, back, sizeof src);
        unmap_far(cache);
    }
}

/* One token of ones at page `page`: dense decode of it gives out 1 and lse = the logit, wherever the page lies. */
static void attend_page(int64_t num_pages, int64_t page_size, int64_t page_stride, int32_t page)
{
    const int64_t d_qk = 576, d_v = 512;
    far_memory cache = map_far((size_t)num_pages * (size_t)page_stride);
    int32_t table[1] = {page}, length[1] = {1};
    uint16_t q[576];
    float out[512], lse[1];
    uint16_t *token = (uint16_t *)(void *)(cache.data + (size_t)page * (size_t)page_stride);
    for (int64_t i = 0; i < d_qk; i++) {
        token[i] = bf16(1.0f);
        q[i] = bf16(0.5f);
    }
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    a.softmax_scale = 0.25f;
    a.q = fmla_tensor_4d(q, FMLA_BF16, 1, 1, 1, d_qk);
    a.kv = (fmla_kv_cache){.data = cache.data,
                           .format = FMLA_KV_BF16,
                           .num_pages = num_pages,
                           .page_size = page_size,
                           .page_stride_bytes = page_stride};
    a.block_table = fmla_tensor_2d(table, FMLA_I32, 1, 1);
    a.cache_seqlens = fmla_tensor_1d(length, FMLA_I32, 1);
    a.out = fmla_tensor_4d(out, FMLA_F32, 1, 1, 1, d_v);
    a.lse = fmla_tensor_3d(lse, FMLA_F32, 1, 1, 1);
    expect_ok(fmla_decode(context, &a, NULL));
    for (int64_t i = 0; i < d_v; i++) {
        assert_true(out[i] == 1.0f);
    }
    assert_true(lse[0] > 71.99f && lse[0] < 72.01f);
    unmap_far(cache);
}

static void c024_page_number_beyond_a_million(void **state)
{
    (void)state;
    attend_page(1050001, 32, 32 * 1152, 0);
    attend_page(1050001, 32, 32 * 1152, 1050000);
}

static void c025_page_of_480_tokens(void **state)
{
    (void)state;
    static const int32_t pages[] = {7766, 7767, 7768, 163000};
    for (size_t i = 0; i < sizeof pages / sizeof pages[0]; i++) {
        attend_page(163001, 480, 480 * 1152, pages[i]);
    }
}

static void c027_both_sides_of_two_gibibytes(void **state)
{
    (void)state;
    attend_page(2144, 64, 1002240, 2142);
    attend_page(2144, 64, 1002240, 2143);
}

/* Strides of q, out and lse beyond 2^31 elements; extreme strides where a dimension has one element. */
static void promise_5_tensor_strides_beyond_31_bits(void **state)
{
    (void)state;
    const int64_t far_stride = ((int64_t)1 << 31) + 64;
    far_memory q = map_far((size_t)far_stride * 2 + 4096), out = map_far((size_t)far_stride * 4 + 4096);
    far_memory lse = map_far((size_t)far_stride * 4 + 4096);
    uint16_t kv[2][64];
    int32_t indices[2][1] = {{0}, {1}};
    for (int32_t i = 0; i < 64; i++) {
        kv[0][i] = bf16(1.0f);
        kv[1][i] = bf16(2.0f);
        ((uint16_t *)(void *)q.data)[i] = bf16(1.0f);
        ((uint16_t *)(void *)q.data)[far_stride + i] = bf16(-1.0f);
    }
    fmla_prefill_args a = FMLA_PREFILL_ARGS_INIT;
    a.softmax_scale = 1.0f;
    a.q = fmla_tensor_3d(q.data, FMLA_BF16, 2, 1, 64);
    a.q.stride[0] = far_stride;
    a.q.stride[1] = INT64_MAX; /* one head: never stepped */
    a.kv = fmla_tensor_3d(kv, FMLA_BF16, 2, 1, 64);
    a.kv.stride[1] = INT64_MIN;
    a.indices = fmla_tensor_3d(indices, FMLA_I32, 2, 1, 1);
    a.out = fmla_tensor_3d(out.data, FMLA_F32, 2, 1, 64);
    a.out.stride[0] = far_stride;
    a.lse = fmla_tensor_2d(lse.data, FMLA_F32, 2, 1);
    a.lse.stride[0] = far_stride;
    a.lse.stride[1] = INT64_MAX;
    expect_ok(fmla_prefill(context, &a, NULL));
    assert_true(((float *)(void *)out.data)[63] == 1.0f);
    assert_true(((float *)(void *)out.data)[far_stride + 63] == 2.0f);
    assert_true(((float *)(void *)lse.data)[0] == 64.0f);
    assert_true(((float *)(void *)lse.data)[far_stride] == -128.0f);
    unmap_far(q);
    unmap_far(out);
    unmap_far(lse);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(c022_slots_beyond_31_bits),
        cmocka_unit_test(c024_page_number_beyond_a_million),
        cmocka_unit_test(c025_page_of_480_tokens),
        cmocka_unit_test(c027_both_sides_of_two_gibibytes),
        cmocka_unit_test(promise_5_tensor_strides_beyond_31_bits),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
