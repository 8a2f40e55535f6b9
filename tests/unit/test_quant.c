/* SPDX-License-Identifier: MIT */
/*
 * Quant kernels of every CPU tier against the formats' reader and writer, bit for bit: all codes with all
 * scales, any float as a scale, gathers, odd strides and addresses, the ends of pools; and the quantiser's
 * bytes.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "support_cpu.h"
#include "support_golden.h"
#include "support_numbers.h"
#include "support_pool.h"

#define D_MAX      1100
#define TOKENS_MAX 512

static fmlai_quant_kernels kernels_of(fmla_isa isa)
{
    fmlai_cpu *cpu = cpu_open(isa, 1);
    fmlai_quant_kernels k = cpu->quant;
    cpu_close(cpu);
    return k;
}

static bool same_bf16(uint16_t a, uint16_t b)
{
    return same_f32(fmlai_f32_from_bf16(a), fmlai_f32_from_bf16(b));
}

static void expand_all(const fmlai_expand *table, size_t element, const fmlai_pool *pool, const int64_t *slots,
                       int32_t count, int32_t head, void *dst, int64_t stride)
{
    for (int32_t i = 0; i < count; i += FMLAI_EXPAND_MOST) {
        int32_t n = count - i < FMLAI_EXPAND_MOST ? count - i : FMLAI_EXPAND_MOST;
        uint8_t *to = (uint8_t *)dst + (size_t)(i * stride) * element;
        fmlai_expand_for(table, pool)(pool, slots + i, n, head, to, stride);
    }
}

/* Expands the slots into both kinds of tile and compares with fmlai_token_read; cells beyond d_qk must stay.
 */
static void check_expand(const fmlai_quant_kernels *k, const fmlai_pool *pool, const int64_t *slots,
                         int32_t count, int32_t head)
{
    static float f32[TOKENS_MAX * (D_MAX + 5)];
    static uint16_t bf16[TOKENS_MAX * (D_MAX + 5)];
    float expected[D_MAX];
    int32_t d = pool->format.d_qk;
    int64_t stride = d + 5;
    assert_true(count <= TOKENS_MAX && d <= D_MAX);
    memset(f32, 0xA5, sizeof f32);
    memset(bf16, 0xA5, sizeof bf16);
    expand_all(k->exact_f32, sizeof *f32, pool, slots, count, head, f32, stride);
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_read_f32(pool, slots[i], head, expected);
        for (int32_t j = 0; j < d; j++) {
            if (!same_f32(f32[i * stride + j], expected[j])) {
                fail_msg("%s: token %d, dim %d: exactly %a, should be %a", pool->format.name, i, j,
                         (double)f32[i * stride + j], (double)expected[j]);
            }
        }
    }
    expand_all(k->expand_f32, sizeof *f32, pool, slots, count, head, f32, stride);
    if (pool->format.element != FMLA_F16) {
        expand_all(k->expand_bf16, sizeof *bf16, pool, slots, count, head, bf16, stride);
    }
    for (int32_t i = 0; i < count; i++) {
        fmlai_token_read(pool, slots[i], head, expected);
        for (int32_t j = 0; j < d; j++) {
            float got = f32[i * stride + j];
            if (!same_f32(got, expected[j])) {
                fail_msg("%s: token %d, dim %d: %a, should be %a", pool->format.name, i, j, (double)got,
                         (double)expected[j]);
            }
            uint16_t half = bf16[i * stride + j];
            if (pool->format.element != FMLA_F16 && !same_bf16(half, fmlai_bf16_from_f32(expected[j]))) {
                fail_msg("%s: token %d, dim %d: bf16 %04x, should be %a", pool->format.name, i, j, half,
                         (double)expected[j]);
            }
        }
        for (int64_t j = d; j < stride; j++) {
            assert_int_equal(bf16[i * stride + j], 0xA5A5);
            assert_memory_equal(&f32[i * stride + j], "\xA5\xA5\xA5\xA5", 4);
        }
    }
}

/* ---- every code, every scale ------------------------------------------------------------------------- */

/* Token t, group g gets scale byte t + 37 g; codes run through all bytes, from `first` on. */
static void fill_codes_and_scales(const fmlai_pool *pool, int32_t first)
{
    const fmla_format_info *f = &pool->format;
    for (int64_t t = 0; t < 256; t++) {
        uint8_t *row = (uint8_t *)(uintptr_t)fmlai_pool_row(pool, t);
        uint8_t *scales = (uint8_t *)(uintptr_t)fmlai_pool_scales(pool, t);
        int32_t bytes = f->element == FMLA_F4_E2M1 ? f->quant_dims / 2 : f->quant_dims;
        for (int32_t j = 0; j < bytes; j++) {
            row[j] = (uint8_t)(j + first);
        }
        for (int32_t g = 0; g < f->quant_dims / f->group; g++) {
            scales[g] = (uint8_t)(t + 37 * g);
        }
    }
}

static void promise_9_every_code_and_scale_expands_exactly(void **state)
{
    const fmla_kv_format formats[] = {FMLA_KV_V4, FMLA_KV_V41, FMLA_KV_V41_PAGE, FMLA_KV_V41_FP4,
                                      FMLA_KV_V41_FP4_PAGE};
    int64_t slots[256];
    (void)state;
    for (int32_t i = 0; i < 256; i++) {
        slots[i] = i;
    }
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_quant_kernels k = kernels_of(*isa);
        for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
            guarded memory = guarded_make((size_t)fmlai_format_row(formats[f])->bytes_per_token * 256);
            fmlai_pool pool = pool_over(memory.data, fmlai_format_row(formats[f]), 4, 64, 0, 0, 1);
            for (int32_t first = 0; first < 256; first += 128) {
                fill_codes_and_scales(&pool, first);
                check_expand(&k, &pool, slots, 256, 0);
            }
            guarded_free(&memory);
        }
    }
}

/* Any bits as V32's scales: all exponents with zero mantissa, and random ones. */
static void promise_9_v32_takes_any_float_as_scale(void **state)
{
    uint64_t seed = 7;
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_quant_kernels k = kernels_of(*isa);
        guarded memory = guarded_make(656 * 512);
        fmlai_pool pool = pool_over(memory.data, fmlai_format_row(FMLA_KV_V32), 8, 64, 0, 0, 1);
        int64_t slots[512];
        for (int64_t t = 0; t < 512; t++) {
            uint8_t *row = memory.data + 656 * t;
            slots[t] = t;
            for (int32_t j = 0; j < 656; j++) {
                row[j] = j < 512 ? (uint8_t)(j + 128 * (t % 2)) : (uint8_t)test_random(&seed);
            }
            for (int32_t g = 0; g < 4; g++) {
                uint32_t bits = (uint32_t)test_random(&seed);
                if (g < 2) {
                    bits = (uint32_t)(t + 3 * g) << 23; /* +-2^e, zero, infinities */
                } else if (g == 2) {
                    bits &= 0xFFFF0000u; /* bf16, as the first quantiser writes */
                }
                memcpy(row + 512 + 4 * g, &bits, sizeof bits);
            }
        }
        check_expand(&k, &pool, slots, 512, 0);
        guarded_free(&memory);
    }
}

/* ---- where tokens lie -------------------------------------------------------------------------------- */

static void fill_random(uint8_t *data, size_t size, uint64_t *seed)
{
    for (size_t i = 0; i < size; i++) {
        data[i] = (uint8_t)test_random(seed);
    }
}

/* Every format at odd addresses, with odd page strides and sizes, gathered in any order with repetitions. */
static void gathers_from_anywhere(void **state)
{
    const int64_t page_sizes[] = {1, 5, 64};
    uint64_t seed = 11;
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_quant_kernels k = kernels_of(*isa);
        for (int32_t f = FMLA_KV_BF16; f < FMLA_KV_COUNT; f++) {
            for (size_t s = 0; s < 3; s++) {
                const fmla_format_info *row = fmlai_format_row((fmla_kv_format)f);
                int32_t d = 61 + 8 * (int32_t)s, heads = row->layout == FMLA_LAYOUT_PLAIN ? 3 : 1;
                int64_t page_bytes = page_sizes[s] * fmlai_format_token_bytes(row, d) * heads;
                fmlai_pool pool = pool_over(NULL, row, 5, page_sizes[s], page_bytes + 3, d, heads);
                guarded memory = guarded_make(pool_bytes(&pool, heads));
                int64_t slots[40];
                fill_random(memory.data, memory.size, &seed);
                pool.data = memory.data;
                for (int32_t i = 0; i < 40; i++) {
                    slots[i] = i < 3 ? 5 * page_sizes[s] - 1
                                     : (int64_t)(test_random(&seed) % (uint64_t)(5 * page_sizes[s]));
                }
                check_expand(&k, &pool, slots, 40, heads - 1);
                check_expand(&k, &pool, slots, 1, 0);
                guarded_free(&memory);
            }
        }
    }
}

static void outer_scales_and_custom_formats_expand(void **state)
{
    fmla_format_info custom = {.struct_size = sizeof custom,
                               .format = FMLA_KV_CUSTOM,
                               .layout = FMLA_LAYOUT_PAGE,
                               .name = "custom",
                               .d_qk = 90,
                               .quant_dims = 80,
                               .rope_dims = 10,
                               .element = FMLA_F4_E2M1,
                               .group = 20,
                               .scale = FMLA_F32,
                               .bytes_per_token = 81,
                               .data_row_bytes = 64,
                               .scale_row_bytes = 17,
                               .scale_offset = 1,
                               .rope_offset = 43};
    const char *why;
    uint64_t seed = 3;
    int64_t slots[15];
    (void)state;
    assert_true(fmlai_format_valid(&custom, &why));
    for (int32_t i = 0; i < 15; i++) {
        slots[i] = (i * 7) % 15;
    }
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_quant_kernels k = kernels_of(*isa);
        for (int32_t f = FMLA_KV_V32; f <= FMLA_KV_COUNT; f++) {
            const fmla_format_info *row = f == FMLA_KV_COUNT ? &custom : fmlai_format_row((fmla_kv_format)f);
            guarded memory = guarded_make((size_t)row->bytes_per_token * 15);
            fmlai_pool pool = pool_over(memory.data, row, 3, 5, 0, 0, 1);
            fill_random(memory.data, memory.size, &seed);
            pool.outer_scale = f == FMLA_KV_COUNT ? 1.0f : 0.3f;
            check_expand(&k, &pool, slots, 15, 0);
            guarded_free(&memory);
        }
    }
}

/* ---- writing ----------------------------------------------------------------------------------------- */

/* Values that quantisers stumble over, then anything. */
static float awkward(uint64_t *seed, int32_t kind)
{
    static const float values[] = {0.0f,           -0.0f,    448.0f,   0.0546875f,  0x1p-9f,   0x1p-10f,
                                   0x3p-11f,       464.0f,   0x1.cp8f, -0x1.cp8f,   1e-30f,    -0x1p-140f,
                                   3e38f,          0x1p-13f, 0x1.8p0f, 0x1.0002p0f, 0x1.fep7f, -6.0f,
                                   0x1.fffffep-7f, 2688.0f,  0x1.04p3f};
    uint64_t r = test_random(seed);
    switch (kind) {
    case 0:
        return values[r % (sizeof values / sizeof values[0])];
    case 1:
        return test_random_bf16(seed, -20, 20);
    case 2:
        return test_random_unit(seed) * 448.0f;
    case 3:
        return test_random_unit(seed) * 0x1p-14f;
    case 4:
        return r % 97 == 0 ? NAN : r % 89 == 0 ? -INFINITY : test_random_unit(seed);
    default:
        return r % 64 == 0 ? test_random_unit(seed) : 0.0f;
    }
}

static void writers_agree_bit_for_bit(void **state)
{
    uint64_t seed = 23;
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_quant_kernels k = kernels_of(*isa);
        for (int32_t f = FMLA_KV_BF16; f < FMLA_KV_COUNT; f++) {
            const fmla_format_info *row = fmlai_format_row((fmla_kv_format)f);
            guarded got = guarded_make((size_t)fmlai_format_token_bytes(row, 100) * 3);
            guarded expected = guarded_make(got.size);
            fmlai_pool pool = pool_over(got.data, row, 1, 3, 0, 100, 1);
            fmlai_pool reference = pool;
            reference.data = expected.data;
            for (int32_t n = 0; n < 240; n++) {
                float token[D_MAX];
                fmla_quantizer quantizer =
                    f == FMLA_KV_V32 && n % 4 == 3 ? FMLA_QUANTIZER_V32_2025 : FMLA_QUANTIZER_DEFAULT;
                pool.outer_scale = reference.outer_scale = n % 20 == 19 ? 0.7f : 1.0f;
                for (int32_t j = 0; j < pool.format.d_qk; j++) {
                    token[j] = awkward(&seed, n % 6);
                }
                k.write(&pool, n % 3, 0, token, FMLA_BF16, quantizer);
                fmlai_token_write(&reference, n % 3, 0, token, FMLA_BF16, quantizer);
                if (n % 6 == 4) { /* NaN payloads are free: compare what is read back */
                    float a[D_MAX], b[D_MAX];
                    fmlai_token_read_f32(&pool, n % 3, 0, a);
                    fmlai_token_read_f32(&reference, n % 3, 0, b);
                    for (int32_t j = 0; j < pool.format.d_qk; j++) {
                        assert_true(same_f32(a[j], b[j]));
                    }
                    memcpy(got.data, expected.data, got.size);
                }
                assert_memory_equal(got.data, expected.data, got.size);
            }
            guarded_free(&got);
            guarded_free(&expected);
        }
    }
}

/* ---- another implementation's bytes ------------------------------------------------------------------ */

typedef struct golden_case {
    const char *name, *bytes;
    fmla_kv_format format;
} golden_case;

static void check_golden(const golden *g, fmlai_cpu *cpu, const golden_case *c, int64_t page_size)
{
    char name[64];
    snprintf(name, sizeof name, "%s.p%d.k", c->name, (int)page_size);
    golden_tensor k = golden_get(g, name);
    snprintf(name, sizeof name, "%s.p%d.%s", c->name, (int)page_size, c->bytes);
    golden_tensor bytes = golden_get(g, name);
    snprintf(name, sizeof name, "%s.p%d.dequant", c->name, (int)page_size);
    golden_tensor dequant = golden_get(g, name);

    const fmla_format_info *row = fmlai_format_row(c->format);
    int64_t pages = bytes.shape[0];
    guarded memory = guarded_make((size_t)bytes.count);
    uint16_t *values = malloc((size_t)k.count * 2);
    fmlai_call call = cpu_call();
    fmlai_transcode t = {
        .count = pages * page_size,
        .heads = 1,
        .rows = {.data = values, .dtype = FMLA_BF16, .stride = {row->d_qk, 0}},
        .pool = pool_over(memory.data, row, pages, page_size, 0, 0, 1),
    };
    assert_int_equal(k.count, t.count * row->d_qk);
    memcpy(values, k.data, (size_t)k.count * 2);
    assert_int_equal(fmlai_cpu_backend.quantize(cpu, &t, &call), FMLA_OK);
    assert_memory_equal(memory.data, bytes.data, (size_t)bytes.count);
    memset(values, 0xA5, (size_t)k.count * 2);
    assert_int_equal(fmlai_cpu_backend.dequantize(cpu, &t, &call), FMLA_OK);
    assert_memory_equal(values, dequant.data, (size_t)dequant.count * 2);
    free(values);
    guarded_free(&memory);
}

static void golden_formats(void **state)
{
    const golden_case cases[] = {{"v32", "bytes", FMLA_KV_V32},
                                 {"v4", "page_bytes", FMLA_KV_V4},
                                 {"v41", "bytes", FMLA_KV_V41},
                                 {"v41fp4", "bytes", FMLA_KV_V41_FP4}};
    golden *g = golden_open("formats_a.safetensors");
    (void)state;
    for (const fmla_isa *isa = cpu_isas(); *isa != FMLA_ISA_AUTO; isa++) {
        fmlai_cpu *cpu = cpu_open(*isa, 2);
        for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
            check_golden(g, cpu, &cases[c], 5);
            check_golden(g, cpu, &cases[c], 64);
        }
        cpu_close(cpu);
    }
    golden_close(g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(promise_9_every_code_and_scale_expands_exactly),
        cmocka_unit_test(promise_9_v32_takes_any_float_as_scale),
        cmocka_unit_test(gathers_from_anywhere),
        cmocka_unit_test(outer_scales_and_custom_formats_expand),
        cmocka_unit_test(writers_agree_bit_for_bit),
        cmocka_unit_test(golden_formats),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
