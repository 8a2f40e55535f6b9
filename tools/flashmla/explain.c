/* SPDX-License-Identifier: MIT */
/*
 * explain.c: `flashmla explain`: the arithmetic behind MLA caches and kernels. The figures that the field quotes, each
 * with its formula; then a model's cache on a request of some length, and what limits decoding it on a device.
 */
#include "bench/bench.h"
#include "program.h"

#include <math.h>
#include <string.h>

static const char usage[] =
    "[options]\n"
    "\n"
    "  --model NAME        v3 (bf16 cache), v32, v4, v41; default v3\n"
    "  --layers N          default 61\n"
    "  --context N         tokens of a request; default 131072\n"
    "  --heads N           query heads on one device; default 128\n"
    "  --queries N         query tokens per request and step; default 1\n"
    "  --device NAME       h100, h800, h200, b200, or this (this processor, measured); default h800\n"
    "  --tflops X          the device's dense bf16 rate instead\n"
    "  --bandwidth X       its memory bandwidth in TB/s instead\n"
    "  --json              print JSON\n"
    "  --help              this text\n";

enum {
    OPT_MODEL = CLI_OPTION_OWN,
    OPT_LAYERS,
    OPT_CONTEXT,
    OPT_HEADS,
    OPT_QUERIES,
    OPT_DEVICE,
    OPT_TFLOPS,
    OPT_BANDWIDTH
};

static const struct option table[] = {
    {"json", no_argument, NULL, CLI_OPTION_JSON},
    {"help", no_argument, NULL, CLI_OPTION_HELP},
    {"model", required_argument, NULL, OPT_MODEL},
    {"layers", required_argument, NULL, OPT_LAYERS},
    {"context", required_argument, NULL, OPT_CONTEXT},
    {"heads", required_argument, NULL, OPT_HEADS},
    {"queries", required_argument, NULL, OPT_QUERIES},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"tflops", required_argument, NULL, OPT_TFLOPS},
    {"bandwidth", required_argument, NULL, OPT_BANDWIDTH},
    {NULL, 0, NULL, 0},
};

typedef struct model {
    const char *name;
    const char *text;
    fmla_kv_format format;
    int d_qk;
    int topk; /* tokens that a query attends; 0: all */
} model;

static const model models[] = {
    {"v3", "dense attention over a bf16 cache", FMLA_KV_BF16, 576, 0},
    {"v32", "2048 chosen tokens of a 656-byte fp8 cache", FMLA_KV_V32, 576, 2048},
    {"v4", "128 window and 512 chosen tokens of a 584-byte fp8 cache", FMLA_KV_V4, 512, 640},
    {"v41", "128 window and 512 chosen tokens of a 528-byte fp8 cache", FMLA_KV_V41, 512, 640},
};

/* Vendors' dense bf16 rates and bandwidths; h800 as the published notes count it (at the clock held under load). */
static const struct device {
    const char *name;
    double tflops;
    double terabytes;
} devices[] = {
    {"h100", 989, 3.35},
    {"h800", 865, 3.35},
    {"h200", 989, 4.8},
    {"b200", 2250, 8.0},
};

typedef struct question {
    const model *model;
    int64_t layers;
    int64_t context;
    int64_t heads;
    int64_t queries;
    const char *device;
    double tflops;
    double terabytes;
    bool json;
} question;

/* Where figures go: a table on standard output, or a JSON array. */
typedef struct sheet {
    cJSON *list; /* NULL: print */
} sheet;

/* 70272 as "70,272". */
static const char *grouped(double value, char *text, size_t size)
{
    char digits[48];
    size_t used = 0;
    int length = snprintf(digits, sizeof digits, "%.0f", value);

    for (int i = 0; i < length && used + 2 < size; i++) {
        if (i > 0 && (length - i) % 3 == 0) {
            text[used++] = ',';
        }
        text[used++] = digits[i];
    }
    text[used] = '\0';
    return text;
}

/* `shown` is the value as people write it, with its unit. */
static void figure(const sheet *s, const char *key, const char *what, const char *formula, double value,
                   const char *shown)
{
    if (s->list == NULL) {
        printf("  %-46s %-46s %s\n", what, formula, shown);
        return;
    }
    cJSON *item = cJSON_CreateObject();
    cJSON_AddStringToObject(item, "key", key);
    cJSON_AddStringToObject(item, "what", what);
    cJSON_AddStringToObject(item, "formula", formula);
    cli_json_number(item, "value", value);
    cJSON_AddStringToObject(item, "shown", shown);
    cJSON_AddItemToArray(s->list, item);
}

static double format_bytes(fmla_kv_format format, int d_qk)
{
    fmla_format_info info = FMLA_FORMAT_INFO_INIT;

    fmla_format_get(format, &info);
    return info.bytes_per_token > 0 ? info.bytes_per_token : 2.0 * d_qk;
}

static void saving(const sheet *s, const char *key, const char *name, fmla_kv_format format, int d_qk)
{
    double bytes = format_bytes(format, d_qk);
    double plain = format_bytes(FMLA_KV_BF16, d_qk);
    char what[64];
    char formula[64];
    char shown[64];

    snprintf(what, sizeof what, "%s saves against bf16-%d", name, d_qk);
    snprintf(formula, sizeof formula, "1 - %.0f / %.0f", bytes, plain);
    snprintf(shown, sizeof shown, "%.2f %%, %.3fx smaller", 100 * (1 - bytes / plain), plain / bytes);
    figure(s, key, what, formula, 100 * (1 - bytes / plain), shown);
}

/* The figures that are quoted about these models and kernels, whatever the question is. */
static void known_figures(const sheet *s)
{
    double elements = 61.0 * (512 + 64);
    double mha = 61.0 * 2 * 128 * (128 + 64);
    double request = 576.0 * 2 * 62 * 128 * 1024;
    char number[64];
    char shown[96];

    snprintf(shown, sizeof shown, "%s B = %.3f KiB", grouped(2 * elements, number, sizeof number), 2 * elements / 1024);
    figure(s, "v3_bytes_per_token", "V3 bf16 cache of a token, whole model", "61 * (512 + 64) * 2 B", 2 * elements,
           shown);
    snprintf(shown, sizeof shown, "%s B = %.0f KiB", grouped(2 * mha, number, sizeof number), 2 * mha / 1024);
    figure(s, "mha_bytes_per_token", "the same with multi-head attention", "61 * 2 * 128 * (128 + 64) * 2 B", 2 * mha,
           shown);
    snprintf(shown, sizeof shown, "%.2fx (V counted 192 wide; with V = 128: %.1fx)", mha / elements,
             61.0 * 128 * (192 + 128) / elements);
    figure(s, "mha_reduction", "reduction against multi-head attention", "2,998,272 / 35,136", mha / elements, shown);
    snprintf(shown, sizeof shown, "%.3f GiB ~ %.2f GiB (62 layers)", request / 1073741824, request / 1073741824);
    figure(s, "request_128k_gib", "a request of 128K tokens, bf16", "576 * 2 * 62 * 128 * 1024 B",
           request / 1073741824, shown);
    saving(s, "v32_saving", "V3.2 fp8", FMLA_KV_V32, 576);
    saving(s, "v4_saving", "V4 fp8", FMLA_KV_V4, 512);
    saving(s, "v41_saving", "V4.1 fp8", FMLA_KV_V41, 512);
    saving(s, "v41_fp4_saving", "V4.1 fp4", FMLA_KV_V41_FP4, 512);
    double mma = 64.0 * (576 + 512) * 2 / 4096;
    double dequant = (1.0 / 64 + 1.0 / 64 + 1.0 / 16 + 1.0 / 256) * 512;
    snprintf(shown, sizeof shown, "%.1f cycles", mma);
    figure(s, "mma_cycles", "tensor-core cycles per KV token, 64 heads", "64 * (576 + 512) * 2 / 4096", mma, shown);
    snprintf(shown, sizeof shown, "%.1f cycles", dequant);
    figure(s, "dequant_cycles", "dequantisation cycles per KV token, H800", "(1/64 + 1/64 + 1/16 + 1/256) * 512",
           dequant, shown);
    snprintf(shown, sizeof shown, "%.1f heads * queries (often quoted as 128)", 0.5 * 865 / 3.35);
    figure(s, "compute_bound_threshold", "compute-bound from, H800", "1/2 * 865 / 3.35", 0.5 * 865 / 3.35, shown);
}

/* What the question's model and request come to. */
static void model_figures(const sheet *s, const question *q)
{
    double bytes = format_bytes(q->model->format, q->model->d_qk);
    double whole = bytes * (double)q->layers;
    double attended = q->model->topk > 0 && q->model->topk < q->context ? q->model->topk : (double)q->context;
    double flops = 2.0 * (double)(q->heads * q->queries) * (q->model->d_qk + 512);
    char number[64];
    char formula[96];
    char shown[96];

    snprintf(formula, sizeof formula, "format table; width %d", q->model->d_qk);
    snprintf(shown, sizeof shown, "%s B", grouped(bytes, number, sizeof number));
    figure(s, "bytes_per_token_layer", "cache of a token in one layer", formula, bytes, shown);
    snprintf(formula, sizeof formula, "%.0f * %lld layers", bytes, (long long)q->layers);
    snprintf(shown, sizeof shown, "%s B = %.3f KiB", grouped(whole, number, sizeof number), whole / 1024);
    figure(s, "bytes_per_token", "cache of a token, whole model", formula, whole, shown);
    snprintf(formula, sizeof formula, "%.0f * %lld tokens", whole, (long long)q->context);
    snprintf(shown, sizeof shown, "%.3f GiB", whole * (double)q->context / 1073741824);
    figure(s, "request_gib", "cache of a request", formula, whole * (double)q->context / 1073741824, shown);
    snprintf(formula, sizeof formula, "2 * %lld * %lld * (%d + 512)", (long long)q->heads, (long long)q->queries,
             q->model->d_qk);
    snprintf(shown, sizeof shown, "%s FLOP", grouped(flops, number, sizeof number));
    figure(s, "flops_per_kv_token", "work per KV token", formula, flops, shown);
    snprintf(formula, sizeof formula, "%.0f tokens * %.0f", attended, flops);
    snprintf(shown, sizeof shown, "%.3f GFLOP a layer", attended * flops / 1e9);
    figure(s, "gflop_per_step", "work of a step", formula, attended * flops / 1e9, shown);
}

static void device_figures(const sheet *s, const question *q)
{
    double bytes = format_bytes(q->model->format, q->model->d_qk);
    double flops = 2.0 * (double)(q->heads * q->queries) * (q->model->d_qk + 512);
    double intensity = flops / bytes;
    double balance = q->tflops / q->terabytes;
    double attended = q->model->topk > 0 && q->model->topk < q->context ? q->model->topk : (double)q->context;
    double memory_us = attended * bytes / q->terabytes / 1e6;
    double compute_us = attended * flops / q->tflops / 1e6;
    char formula[96];
    char shown[96];

    snprintf(formula, sizeof formula, "%.0f FLOP / %.0f B", flops, bytes);
    snprintf(shown, sizeof shown, "%.1f FLOP/B", intensity);
    figure(s, "intensity", "arithmetic intensity", formula, intensity, shown);
    snprintf(formula, sizeof formula, "%.4g TFLOP/s / %.4g TB/s", q->tflops, q->terabytes);
    snprintf(shown, sizeof shown, "%.1f FLOP/B", balance);
    figure(s, "balance", "the device's balance", formula, balance, shown);
    snprintf(formula, sizeof formula, "balance * %.0f B / (2 * (%d + 512))", bytes, q->model->d_qk);
    double threshold = balance * bytes / (2.0 * (q->model->d_qk + 512));
    snprintf(shown, sizeof shown, "%.1f heads * queries; here %lld", threshold, (long long)(q->heads * q->queries));
    figure(s, "threshold", "compute-bound from", formula, threshold, shown);
    snprintf(formula, sizeof formula, "%.0f tokens * %.0f B / %.4g TB/s", attended, bytes, q->terabytes);
    snprintf(shown, sizeof shown, "%.3f us a layer and request", memory_us);
    figure(s, "memory_us", "least time by memory", formula, memory_us, shown);
    snprintf(formula, sizeof formula, "%.0f tokens * %.0f FLOP / %.4g TFLOP/s", attended, flops, q->tflops);
    snprintf(shown, sizeof shown, "%.3f us a layer and request", compute_us);
    figure(s, "compute_us", "least time by arithmetic", formula, compute_us, shown);
    snprintf(shown, sizeof shown, "%s", intensity > balance ? "arithmetic" : "memory bandwidth");
    figure(s, "binds", "what binds", "intensity against balance", intensity / balance, shown);
}

static cJSON *section(cJSON *tree, const char *name)
{
    return tree == NULL ? NULL : cJSON_AddArrayToObject(tree, name);
}

static int explain(const question *q)
{
    cJSON *tree = q->json ? cJSON_CreateObject() : NULL;
    sheet s = {section(tree, "figures")};

    if (tree == NULL) {
        puts("figures that are quoted");
    }
    known_figures(&s);
    if (tree == NULL) {
        printf("\n%s: %s; %lld layers, %lld heads, %lld tokens\n", q->model->name, q->model->text,
               (long long)q->layers, (long long)q->heads, (long long)q->context);
    } else {
        cJSON_AddStringToObject(tree, "model", q->model->name);
        cJSON_AddStringToObject(tree, "device", q->device);
    }
    s.list = section(tree, "request");
    model_figures(&s, q);
    if (tree == NULL) {
        bool here = strcmp(q->device, "this") == 0;
        printf("\non %s: %.4g TFLOP/s%s, %.4g TB/s\n", here ? "this processor" : q->device, q->tflops,
               here ? "" : " dense bf16", q->terabytes);
    }
    s.list = section(tree, "bounds");
    device_figures(&s, q);
    return tree == NULL ? CLI_OK : cli_print_json(tree);
}

static int take_model(question *q, const char *name)
{
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        if (strcmp(name, models[i].name) == 0) {
            q->model = &models[i];
            return CLI_OK;
        }
    }
    return cli_error("--model: '%s' is none of v3, v32, v4, v41", name);
}

static int take_rate(const char *what, const char *text, double *value)
{
    if (cli_parse_double(what, text, value) != CLI_OK) {
        return CLI_ERROR;
    }
    return *value > 0 && isfinite(*value) ? CLI_OK : cli_error("%s: %s is not a positive number", what, text);
}

/* Rates of the processors that this process may use. */
static void measure_this(question *q)
{
    fmla_device_info info = FMLA_DEVICE_INFO_INIT;
    bool known = fmla_device_get(FMLA_DEVICE_CPU, 0, &info) == FMLA_OK && info.compute_units > 0;

    cli_progress("measuring this processor");
    bench_limit limit = bench_peak(known ? info.compute_units : 1, FMLA_ISA_AUTO);
    cli_progress(NULL);
    q->tflops = q->tflops > 0 ? q->tflops : fmax(limit.fma, limit.dot_bf16) / 1e3;
    q->terabytes = q->terabytes > 0 ? q->terabytes : limit.read / 1e3;
}

/* The device's rates, unless the caller gave both. */
static int find_device(question *q)
{
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        if (strcmp(q->device, devices[i].name) == 0) {
            q->tflops = q->tflops > 0 ? q->tflops : devices[i].tflops;
            q->terabytes = q->terabytes > 0 ? q->terabytes : devices[i].terabytes;
            return CLI_OK;
        }
    }
    if (strcmp(q->device, "this") != 0) {
        return cli_error("--device: '%s' is none of h100, h800, h200, b200, this", q->device);
    }
    if (q->tflops <= 0 || q->terabytes <= 0) {
        measure_this(q);
    }
    if (q->tflops > 0 && q->terabytes > 0) {
        return CLI_OK;
    }
    return cli_error("--device this: could not be measured; give --tflops and --bandwidth");
}

static int take_option(void *user, int option, const char *argument)
{
    question *q = user;

    switch (option) {
    case CLI_OPTION_JSON: q->json = true; return CLI_OK;
    case OPT_MODEL: return take_model(q, argument);
    case OPT_LAYERS: return cli_parse_int("--layers", argument, 1, 10000, &q->layers);
    case OPT_CONTEXT: return cli_parse_int("--context", argument, 1, (int64_t)1 << 40, &q->context);
    case OPT_HEADS: return cli_parse_int("--heads", argument, 1, 1 << 20, &q->heads);
    case OPT_QUERIES: return cli_parse_int("--queries", argument, 1, 1 << 20, &q->queries);
    case OPT_DEVICE: q->device = argument; return CLI_OK;
    case OPT_TFLOPS: return take_rate("--tflops", argument, &q->tflops);
    case OPT_BANDWIDTH: return take_rate("--bandwidth", argument, &q->terabytes);
    default: return CLI_ERROR;
    }
}

int cmd_explain(int argc, char **argv)
{
    question q = {.model = &models[0], .layers = 61, .context = 131072, .heads = 128, .queries = 1, .device = "h800"};
    int status = cli_take_options(argc, argv, table, usage, 0, take_option, &q);
    if (status != CLI_OK) {
        return status;
    }
    if (find_device(&q) != CLI_OK) {
        return CLI_ERROR;
    }
    return explain(&q);
}
