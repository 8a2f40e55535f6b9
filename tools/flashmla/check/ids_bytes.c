/* SPDX-License-Identifier: MIT */
/*
 * ids_bytes.c: faults in reading records: codes and scales of every format against a reader of its own,
 * which knows nothing but the public description of the format.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check/ids.h"
#include "problem/numbers.h"

#define RECORD_MAX 1152

static double e2m1_value(int code)
{
    static const double values[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

/* A record's numbers: each code times its scale, exact in double; the RoPE part as stored. */
static void read_record(const fmla_format_info *info, const uint8_t *record, double *x)
{
    const uint8_t *scales =
        record + (info->layout == FMLA_LAYOUT_PAGE ? info->data_row_bytes : 0) + info->scale_offset;
    for (int32_t j = 0; j < info->quant_dims; j++) {
        int32_t g = j / info->group;
        double scale;
        if (info->scale == FMLA_F32) {
            float f;
            memcpy(&f, scales + 4 * g, sizeof f);
            scale = (double)f;
        } else {
            scale = info->scale == FMLA_F8_E8M0 ? e8m0_value(scales[g]) : (double)e4m3_value(scales[g]);
        }
        double code = info->element == FMLA_F4_E2M1 ? e2m1_value(record[j / 2] >> (j % 2 * 4) & 15)
                                                    : (double)e4m3_value(record[j]);
        x[j] = code * scale;
    }
    for (int32_t j = 0; j < info->rope_dims; j++) {
        uint16_t bits;
        memcpy(&bits, record + info->rope_offset + 2 * j, sizeof bits);
        x[info->quant_dims + j] = (double)bf16_value(bits);
    }
}

/* All slots of a cache, dequantised, against read_record; one rounding to fp32, and from there to bf16. */
static verdict compare_read(checker *k, memory *m, const fmla_kv_cache *cache, fmla_dtype dtype)
{
    fmla_format_info info = cache_format(cache->format, cache->d_qk);
    int64_t n = cache_slots(cache);
    any_args a;
    memset(&a, 0, sizeof a);
    a.dequantize = (fmla_dequantize_args)FMLA_DEQUANTIZE_ARGS_INIT;
    a.dequantize.src = *cache;
    a.dequantize.dst = memory_tensor_4(m, dtype, 2, n, info.d_qk, 0, 0, 0, POISON_BYTE);
    verdict v = ids_call(k, m, FMLA_OP_DEQUANTIZE, &a, info.name);
    for (int64_t i = 0; i < n && v == VERDICT_PASSED; i++) {
        uint8_t record[RECORD_MAX];
        double x[576];
        cache_get(cache, i, record);
        read_record(&info, record, x);
        for (int32_t j = 0; j < info.d_qk && v == VERDICT_PASSED; j++) {
            float f = (float)x[j];
            double want = dtype == FMLA_F32 ? (double)f : (double)bf16_value(bf16_bits(f));
            double got = tensor_get(&a.dequantize.dst, i, j, 0, 0);
            if (!(got == want || (isnan(got) && isnan(want)))) {
                v = check_fail(k, "%s: token %lld, dim %d is %.9g, not %.9g", info.name, (long long)i, j, got,
                               want);
            }
        }
    }
    return v;
}

/* Scales of every kind; codes of every kind, NaN included. */
static void random_record(rng *r, const fmla_format_info *info, uint8_t *record)
{
    for (int32_t i = 0; i < info->bytes_per_token; i++) {
        record[i] = (uint8_t)rng_below(r, 256);
    }
    uint8_t *scales =
        record + (info->layout == FMLA_LAYOUT_PAGE ? info->data_row_bytes : 0) + info->scale_offset;
    for (int32_t g = 0; g < info->quant_dims / info->group && info->scale == FMLA_F32; g++) {
        float f = (float)((0.1 + rng_uniform(r)) * ldexp(1.0, (int)rng_below(r, 40) - 20));
        memcpy(scales + 4 * g, &f, sizeof f);
    }
}

static verdict historic_records(checker *k, int64_t format, int64_t page)
{
    fmla_format_info info = cache_format(format, 576);
    memory m = {0};
    rng r;
    uint8_t record[RECORD_MAX];
    rng_seed(&r, (uint64_t)(format * 1000 + page));
    fmla_kv_cache cache = cache_make(&m, format, info.d_qk, 1, 5, page, page % 2 == 1, 0, 0xFF);
    for (int64_t i = 0; i < cache_slots(&cache); i++) {
        random_record(&r, &info, record);
        cache_put(&cache, i, record);
    }
    verdict v = compare_read(k, &m, &cache, FMLA_F32);
    v = v == VERDICT_PASSED ? compare_read(k, &m, &cache, FMLA_BF16) : v;
    memory_free(&m);
    return v;
}

/* A cache handed over as the other layout of the same size gives other numbers: nothing guesses. */
verdict c123_historic_records(checker *k)
{
    static const int64_t pages[] = {1, 16, 31, 64};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int64_t i = 0; i < 6 * 4; i++) {
        if (ids_bad(&sum, historic_records(k, FMLA_KV_V32 + i % 6, pages[i / 6]))) {
            return sum;
        }
    }
    static const char *const texts[] = {"format=v32,d_qk=576", "format=v4,extra=v4",
                                        "format=v41,extra=v41-fp4", "format=v41-page,extra=v41-fp4-page",
                                        "format=v41-page,extra=v41-page"};
    for (int i = 0; i < 5; i++) {
        if (ids_bad(
                &sum,
                ids_case(k,
                         "op=sparse_decode,%s,b=2,h_q=8,topk=60,e_topk=50,s_kv=90,page=31,e_page=64,scales=2",
                         texts[i]))) {
            break;
        }
    }
    return sum;
}

/* ---- every code, every scale, through attention ---- */

/*
 * One request, one query token of zeros that attends one token: the weight is 1 and the output is the token
 * itself. The record of that token is given; a NaN anywhere in it makes the whole row NaN.
 */
static verdict attend_record(checker *k, int64_t format, const uint8_t *record)
{
    fmla_format_info info = cache_format(format, 576);
    double x[576];
    bool nan = false;
    trial t;
    verdict v = trial_make(k, &t, "op=sparse_decode,format=%s,d_qk=%d,topk=1,s_kv=1,h_q=16,page=4", info.name,
                           info.d_qk);
    if (v == VERDICT_PASSED) {
        cache_put(&t.p.main.cache, scope_slot(&t.p, &t.p.main, 0, 0, 0), record);
        memset(t.p.q.data, 0, tensor_span(&t.p.q));
        v = trial_run(k, &t);
    }
    read_record(&info, record, x);
    for (int32_t j = 0; j < info.d_qk; j++) {
        nan = nan || isnan(x[j]);
    }
    for (int64_t h = 0; h < 16 && v == VERDICT_PASSED; h++) {
        double lse = tensor_get(&t.p.lse, 0, h, 0, 0);
        for (int32_t j = 0; j < 512 && v == VERDICT_PASSED; j++) {
            double got = tensor_get(&t.p.out, 0, 0, h, j), want = (double)bf16_value(bf16_bits((float)x[j]));
            if (nan ? !isnan(got) || !isnan(lse) : got != want || fabs(lse) > 1e-6) {
                v = check_fail(k, "%s attended alone: head %lld, dim %d is %.9g, not %.9g; lse %.9g",
                               info.name, (long long)h, j, got, nan ? (double)NAN : want, lse);
            }
        }
    }
    trial_free(&t);
    return v;
}

/* Scale byte of group g; code of element j; RoPE part 1. */
static void plain_record(const fmla_format_info *info, uint8_t *record, const uint8_t *scale, int scales,
                         const uint8_t *code)
{
    uint8_t *at = record + (info->layout == FMLA_LAYOUT_PAGE ? info->data_row_bytes : 0) + info->scale_offset;
    const uint16_t one = 0x3F80;
    const float one_f32 = 1;
    memset(record, 0, RECORD_MAX);
    for (int32_t j = 0; j < info->quant_dims; j++) {
        record[j] = code[j];
    }
    for (int32_t g = 0; g < info->quant_dims / info->group; g++) {
        if (info->scale == FMLA_F32) {
            memcpy(at + 4 * g, &one_f32, sizeof one_f32);
        } else {
            at[g] = scale[g % scales];
        }
    }
    for (int32_t j = 0; j < info->rope_dims; j++) {
        memcpy(record + info->rope_offset + 2 * j, &one, sizeof one);
    }
}

verdict c094_scale_codes(checker *k)
{
    static const int64_t formats[] = {FMLA_KV_V4, FMLA_KV_V41, FMLA_KV_V41_PAGE};
    static const uint8_t scales[] = {0, 1, 127, 134, 254}, with_nan[] = {127, 127, 255};
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 3; i++) {
        fmla_format_info info = cache_format(formats[i], 512);
        uint8_t record[RECORD_MAX], code[512];
        for (int32_t j = 0; j < 512; j++) {
            /* 448 where the scale is small, so that the product is a normal bf16; 1 where it is large. */
            code[j] = j / info.group % 5 < 2 ? 0x7E : 0x38;
        }
        plain_record(&info, record, scales, 5, code);
        if (ids_bad(&sum, attend_record(k, formats[i], record))) {
            break;
        }
        plain_record(&info, record, with_nan, 3, code);
        if (ids_bad(&sum, attend_record(k, formats[i], record))) {
            break;
        }
        memory m = {0};
        fmla_kv_cache cache = cache_make(&m, formats[i], 512, 1, 2, 2, 0, 0, 0);
        for (int64_t slot = 0; slot < 4; slot++) {
            plain_record(&info, record, slot % 2 ? with_nan : scales, slot % 2 ? 3 : 5, code);
            cache_put(&cache, slot, record);
        }
        verdict v = compare_read(k, &m, &cache, FMLA_F32);
        memory_free(&m);
        if (ids_bad(&sum, v)) {
            break;
        }
    }
    return sum;
}

verdict c108_every_code_in_software(checker *k)
{
    static const int64_t formats[] = {FMLA_KV_V32, FMLA_KV_V4, FMLA_KV_V41, FMLA_KV_V41_PAGE};
    static const uint8_t one = 127;
    verdict sum = VERDICT_NOT_OFFERED;
    for (int i = 0; i < 4 * 3; i++) {
        fmla_format_info info = cache_format(formats[i / 3], 576);
        uint8_t record[RECORD_MAX], code[512];
        for (int32_t j = 0; j < 512; j++) {
            /* All codes but NaN, one way and the other; then with NaN. */
            code[j] = (uint8_t)(i % 3 == 1 ? 255 - j : j);
            code[j] = (code[j] & 0x7F) == 0x7F && i % 3 != 2 ? 0x01 : code[j];
        }
        plain_record(&info, record, &one, 1, code);
        if (ids_bad(&sum, attend_record(k, formats[i / 3], record))) {
            break;
        }
    }
    return sum;
}
