/* SPDX-License-Identifier: MIT */
/*
 * accuracy.c: `flashmla accuracy`: what storing keys in a format does to attention. The truth is float64 attention on
 * the tokens as they are (bf16); the other side stores and attends them in the format, in float64 too or by the kernels
 * of a backend.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "problem/cache.h"
#include "problem/numbers.h"
#include "file/safetensors.h"

enum { OPTION_IN = CLI_OPTION_OWN, OPTION_TOKENS, OPTION_HEADS, OPTION_SEED };

static const char usage[] =
    "[options]\n\n"
    "Error of attention's output when keys and values are kept in each KV format, against float64 attention on the\n"
    "tokens before they were quantised, for made-up tokens of three kinds or for your own. By default both sides are\n"
    "float64, and the error is the format's alone; with --backend it is that of format and kernels together.\n\n"
    "  --in FILE           .safetensors with q [n_q, h, d] and kv [n, d] (bf16, fp16 or fp32; d 576 or 512)\n"
    "  --tokens N          made-up tokens; default 1024\n"
    "  --heads N           heads; default 8\n"
    "  --seed N            other random numbers; default 1\n"
    "  --backend NAME      oracle (float64, default), cpu, cuda or auto: what stores and attends the tokens\n"
    "  --device-index N    which CUDA device; default 0\n"
    "  --isa NAME          CPU tier: scalar, avx2, avx512bf16, amx, neon; default the best\n"
    "  --threads N         CPU threads; default one per processor\n" CLI_CUDA_HELP
    "  --json              print JSON\n";

typedef struct accuracy_options {
    cli_options shared;
    const char *in;
    int64_t tokens, heads, seed;
} accuracy_options;

/* Queries [n_q, h, d] and tokens [n, d], both bf16. */
typedef struct sample {
    const char *name;
    int64_t n_q, heads, n, d;
    fmla_tensor q, kv;
} sample;

typedef enum distribution {
    GAUSSIAN = 0,
    HEAVY_TAILED = 1, /* cubes of bell-shaped numbers, 1 % of the channels 20 times larger */
    LARGE_ROPE = 2    /* the last 64 dims 8 times larger */
} distribution;

static const char *const distribution_names[] = {"gaussian", "heavy-tailed", "large-rope"};

static void make_sample(sample *s, memory *m, const accuracy_options *o, distribution kind, int64_t d)
{
    rng r;
    rng_seed(&r, (uint64_t)o->seed * 1000 + (uint64_t)kind * 10 + (uint64_t)(d == 576));
    *s = (sample){distribution_names[kind], 4, o->heads, o->tokens, d, {0}, {0}};
    s->q = memory_tensor_4(m, FMLA_BF16, 3, s->n_q, s->heads, d, 0, 0, 0);
    s->kv = memory_tensor_4(m, FMLA_BF16, 2, s->n, d, 0, 0, 0, 0);
    double *channel = xmalloc((size_t)d * sizeof *channel);
    for (int64_t j = 0; j < d; j++) {
        channel[j] = 1;
        if (kind == HEAVY_TAILED && rng_uniform(&r) < 0.01) {
            channel[j] = 20;
        } else if (kind == LARGE_ROPE && j >= d - 64) {
            channel[j] = 8;
        }
    }
    for (int64_t i = 0; i < s->n_q * s->heads * d; i++) {
        /* Large channels of keys meet small ones of queries, as in trained models: logits stay moderate. */
        number_set(s->q.data, FMLA_BF16, i, rng_normal(&r) / channel[i % d]);
    }
    for (int64_t i = 0; i < s->n * d; i++) {
        double x = rng_normal(&r);
        number_set(s->kv.data, FMLA_BF16, i, (kind == HEAVY_TAILED ? x * x * x : x) * channel[i % d]);
    }
    free(channel);
}

/* What a format does: a row of the table. */
typedef struct accuracy_row {
    char name[64];
    double bytes, saving, max_error, relative, cosine, lse_error;
} accuracy_row;

/* Attention of all queries over all tokens of a cache. In formats that are extra caches only, as such. Results are
 * float64; kernels' come by way of float32. */
static int attend(engine *e, memory *m, const sample *s, const fmla_kv_cache *cache, double *out, double *lse)
{
    any_args a;
    fmla_format_info info = cache_format(cache->format, s->d);
    fmla_tensor indices = memory_tensor_4(m, FMLA_I32, 3, 1, s->n_q, s->n, 0, 0, 0);
    for (int64_t i = 0; i < s->n_q * s->n; i++) {
        ((int32_t *)indices.data)[i] = (int32_t)(i % s->n);
    }
    memset(&a, 0, sizeof a);
    a.decode = (fmla_decode_args)FMLA_DECODE_ARGS_INIT;
    a.decode.q = fmla_tensor_4d(s->q.data, FMLA_BF16, 1, s->n_q, s->heads, s->d);
    a.decode.kv = *cache;
    a.decode.indices = indices;
    if (info.extra_only) {
        int64_t main_format = info.layout == FMLA_LAYOUT_PAGE ? FMLA_KV_V41_PAGE : FMLA_KV_V41;
        a.decode.kv = cache_make(m, main_format, s->d, 1, 1, 1, 0, 0, 0);
        a.decode.indices = memory_tensor_4(m, FMLA_I32, 3, 1, s->n_q, 1, 0, 0, 0xFF);
        a.decode.extra_kv = *cache;
        a.decode.extra_indices = indices;
    }
    bool exact = fmla_context_device(e->context) == FMLA_DEVICE_ORACLE;
    int64_t rows = s->n_q * s->heads;
    a.decode.out = fmla_tensor_4d(out, FMLA_F64, 1, s->n_q, s->heads, 512);
    a.decode.lse = fmla_tensor_3d(lse, FMLA_F64, 1, s->heads, s->n_q);
    if (!exact) {
        a.decode.out = memory_tensor_4(m, FMLA_F32, 4, 1, s->n_q, s->heads, 512, 0, 0);
        a.decode.lse = memory_tensor_4(m, FMLA_F32, 3, 1, s->heads, s->n_q, 0, 0, 0);
    }
    fmla_status status = engine_run(e, m, FMLA_OP_SPARSE_DECODE, &a);
    for (int64_t i = 0; i < rows * 512 && !exact; i++) {
        out[i] = ((const float *)a.decode.out.data)[i];
    }
    for (int64_t i = 0; i < rows && !exact; i++) {
        lse[i] = ((const float *)a.decode.lse.data)[i];
    }
    return status == FMLA_OK ? CLI_OK : cli_status(e->context, status, info.name);
}

static int store(engine *e, memory *m, const sample *s, const fmla_kv_cache *cache, fmla_quantizer quantizer)
{
    any_args a;
    memset(&a, 0, sizeof a);
    a.quantize = (fmla_quantize_args)FMLA_QUANTIZE_ARGS_INIT;
    a.quantize.src = s->kv;
    a.quantize.dst = *cache;
    a.quantize.quantizer = quantizer;
    fmla_status status = engine_run(e, m, FMLA_OP_QUANTIZE, &a);
    return status == FMLA_OK ? CLI_OK : cli_status(e->context, status, "quantising");
}

static void measure(accuracy_row *row, const sample *s, const double *out, const double *lse, const double *truth,
                    const double *true_lse)
{
    double errors = 0, squares = 0, truths = 0;
    for (int64_t i = 0; i < s->n_q * s->heads * 512; i++) {
        double e = out[i] - truth[i];
        row->max_error = fmax(row->max_error, fabs(e));
        errors += e * e;
        squares += out[i] * out[i];
        truths += truth[i] * truth[i];
    }
    for (int64_t i = 0; i < s->n_q * s->heads; i++) {
        row->lse_error = fmax(row->lse_error, fabs(lse[i] - true_lse[i]));
    }
    row->relative = truths > 0 ? sqrt(errors / truths) : 0;
    row->cosine = squares + truths > 0 ? errors / (squares + truths) : 0;
}

/* All formats of the sample's width; *rows is the caller's to free. */
static int measure_formats(engine *oracle, engine *e, const sample *from, accuracy_row *rows, int *count)
{
    memory m = {0};
    sample own = *from, *s = &own; /* what a device is to find lies in the memory of the call */
    own.q = memory_tensor(&m, FMLA_BF16, 3, from->q.shape, 0, 0);
    own.kv = memory_tensor(&m, FMLA_BF16, 2, from->kv.shape, 0, 0);
    tensor_copy(&own.q, &from->q);
    tensor_copy(&own.kv, &from->kv);
    size_t n = (size_t)(s->n_q * s->heads);
    double *truth = memory_take(&m, n * 512 * sizeof(double), 0), *out = memory_take(&m, n * 512 * sizeof(double), 0);
    double *true_lse = memory_take(&m, n * sizeof(double), 0), *lse = memory_take(&m, n * sizeof(double), 0);
    fmla_kv_cache plain = cache_make(&m, FMLA_KV_BF16, s->d, 1, 1, s->n, 0, 0, 0);
    int status = store(oracle, &m, s, &plain, FMLA_QUANTIZER_DEFAULT);
    if (status == CLI_OK) {
        status = attend(oracle, &m, s, &plain, truth, true_lse);
    }
    *count = 0;
    for (int format = FMLA_KV_V32; format < FMLA_KV_COUNT && status == CLI_OK; format++) {
        fmla_format_info info = cache_format(format, s->d);
        for (int q = 0; q < (format == FMLA_KV_V32 ? 2 : 1) && info.d_qk == s->d && status == CLI_OK; q++) {
            if (info.layout == FMLA_LAYOUT_PAGE && format != FMLA_KV_V4) {
                continue; /* the same codes as the record layout */
            }
            accuracy_row *row = &rows[(*count)++];
            memset(row, 0, sizeof *row);
            snprintf(row->name, sizeof row->name, "%s%s", info.name, q ? " (scales of 2025)" : "");
            row->bytes = info.bytes_per_token;
            row->saving = 100 * (1 - (double)info.bytes_per_token / (2.0 * (double)s->d));
            fmla_kv_cache cache = cache_make(&m, format, s->d, 1, 1, s->n, 0, 0, 0);
            status = store(e, &m, s, &cache, q ? FMLA_QUANTIZER_V32_2025 : FMLA_QUANTIZER_DEFAULT);
            if (status == CLI_OK) {
                status = attend(e, &m, s, &cache, out, lse);
            }
            measure(row, s, out, lse, truth, true_lse);
        }
    }
    memory_free(&m);
    return status;
}

static void report(const sample *s, const accuracy_row *rows, int count, cJSON *list)
{
    for (int i = 0; i < count; i++) {
        const accuracy_row *r = &rows[i];
        if (list == NULL) {
            printf("%-14s %4lld %-24s %6.0f %7.1f%% %10.3e %10.3e %10.3e %10.3e\n", s->name, (long long)s->d, r->name,
                   r->bytes, r->saving, r->max_error, r->relative, r->cosine, r->lse_error);
            continue;
        }
        cJSON *one = cJSON_CreateObject();
        cJSON_AddStringToObject(one, "data", s->name);
        cJSON_AddNumberToObject(one, "d_qk", (double)s->d);
        cJSON_AddStringToObject(one, "format", r->name);
        cJSON_AddNumberToObject(one, "bytes_per_token", r->bytes);
        cJSON_AddNumberToObject(one, "saving_percent", r->saving);
        cli_json_number(one, "max_error", r->max_error);
        cli_json_number(one, "relative_error", r->relative);
        cli_json_number(one, "one_minus_cosine", r->cosine);
        cli_json_number(one, "lse_error", r->lse_error);
        cJSON_AddItemToArray(list, one);
    }
}

/* A tensor of a dump as bf16. */
static fmla_tensor to_bf16(memory *m, const fmla_tensor *t)
{
    fmla_tensor copy = memory_tensor(m, FMLA_BF16, t->rank, t->shape, 0, 0);
    for (int64_t i = 0; i < tensor_elements(t); i++) {
        number_set(copy.data, FMLA_BF16, i, number_get(t->data, t->dtype, i));
    }
    return copy;
}

static bool is_real(const fmla_tensor *t)
{
    return t->dtype == FMLA_BF16 || t->dtype == FMLA_F16 || t->dtype == FMLA_F32;
}

static int read_sample(sample *s, memory *m, const char *path)
{
    st_file file;
    char error[512];
    int status = CLI_OK;
    if (st_read(&file, path, error, sizeof error) != 0) {
        return cli_error("%s", error);
    }
    const fmla_tensor *q = st_find(&file, "q"), *kv = st_find(&file, "kv");
    if (q == NULL || kv == NULL || q->rank != 3 || kv->rank != 2 || !is_real(q) || !is_real(kv)) {
        status = cli_error("%s: needs q [n_q, h, d] and kv [n, d] of bf16, fp16 or fp32", path);
    } else if (q->shape[2] != kv->shape[1] || (kv->shape[1] != 576 && kv->shape[1] != 512)) {
        status = cli_error("%s: q has d = %lld, kv %lld; allowed: the same, 576 or 512", path, (long long)q->shape[2],
                           (long long)kv->shape[1]);
    } else if (kv->shape[0] < 1 || q->shape[0] < 1 || q->shape[1] < 1 || kv->shape[0] > 1 << 24) {
        status = cli_error("%s: q and kv need at least one token, kv at most 2^24", path);
    } else {
        *s = (sample){"dump", q->shape[0], q->shape[1], kv->shape[0], kv->shape[1], to_bf16(m, q), to_bf16(m, kv)};
    }
    st_free(&file);
    return status;
}

static int run_accuracy(const accuracy_options *o)
{
    engine oracle, user;
    accuracy_row rows[FMLA_KV_COUNT + 1];
    cJSON *list = o->shared.json ? cJSON_CreateArray() : NULL;
    int count, status = engine_open_host(&oracle, FMLA_DEVICE_ORACLE, FMLA_ISA_AUTO, 1);
    memset(&user, 0, sizeof user);
    if (status == CLI_OK) {
        status = engine_open(&user, &o->shared);
    }
    if (status == CLI_OK && list == NULL) {
        printf("%-14s %4s %-24s %6s %8s %10s %10s %10s %10s\n", "data", "d_qk", "format", "B/tok", "saved", "max error",
               "relative", "1-cosine", "lse error");
    }
    for (int i = 0; i < (o->in ? 1 : 6) && status == CLI_OK; i++) {
        memory m = {0};
        sample s = {0};
        cli_progress("%d", i + 1);
        if (o->in != NULL) {
            status = read_sample(&s, &m, o->in);
        } else {
            make_sample(&s, &m, o, (distribution)(i / 2), i % 2 ? 512 : 576);
        }
        if (status == CLI_OK) {
            status = measure_formats(&oracle, &user, &s, rows, &count);
        }
        cli_progress(NULL);
        if (status == CLI_OK) {
            report(&s, rows, count, list);
        }
        memory_free(&m);
    }
    if (status == CLI_OK && list != NULL) {
        status = cli_print_json(list);
    } else {
        cJSON_Delete(list);
    }
    engine_close(&user);
    engine_close(&oracle);
    return status;
}

static int take_option(void *user, int option, const char *argument)
{
    accuracy_options *o = user;
    switch (option) {
    case OPTION_IN:
        o->in = argument;
        return CLI_OK;
    case OPTION_TOKENS:
        return cli_parse_int("--tokens", argument, 1, 1 << 20, &o->tokens);
    case OPTION_HEADS:
        return cli_parse_int("--heads", argument, 1, 1024, &o->heads);
    case OPTION_SEED:
        return cli_parse_int("--seed", argument, 0, 1000000000, &o->seed);
    default:
        return cli_option(&o->shared, option, argument);
    }
}

int cmd_accuracy(int argc, char **argv)
{
    static const struct option table[] = {
        CLI_LONG_OPTIONS,
        {"in", required_argument, NULL, OPTION_IN},
        {"tokens", required_argument, NULL, OPTION_TOKENS},
        {"heads", required_argument, NULL, OPTION_HEADS},
        {"seed", required_argument, NULL, OPTION_SEED},
        {NULL, 0, NULL, 0},
    };
    accuracy_options o = {.shared = CLI_OPTIONS_INIT, .tokens = 1024, .heads = 8, .seed = 1};
    o.shared.device = FMLA_DEVICE_ORACLE;
    int status = cli_take_options(argc, argv, table, usage, 0, take_option, &o);
    return status == CLI_OK ? run_accuracy(&o) : status;
}
