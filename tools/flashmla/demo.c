/* SPDX-License-Identifier: MIT */
/*
 * demo.c: `flashmla demo`: caches of real size, every format, every kind of call: what a token costs, how far results
 * are from float64, how fast it goes and how near to what this machine can do.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bench/bench.h"
#include "check/check.h"

static const char usage[] =
    "[options]\n\n"
    "Decodes from paged caches of 16 requests of 4k to 32k tokens in every format, then a fused call and multi-head\n"
    "attention forward and backward; a table of bytes, errors against float64, time and share of this machine's peak.\n"
    "Takes less than half a minute.\n\n"
    "  --json              print JSON\n"
    "  --backend NAME      auto, cpu or cuda; default auto\n"
    "  --device-index N    which CUDA device; default 0\n"
    "  --isa NAME          CPU tier: scalar, avx2, avx512bf16, amx, neon; default the best\n"
    "  --threads N         CPU threads; default one per processor\n";

typedef struct demo_row {
    const char *what;
    const char *text; /* a case; h_q is set by how fast the machine is, unless it is named */
} demo_row;

static const demo_row rows[] = {
    {"dense decode", "op=dense_decode,format=bf16"},
    {"dense decode", "op=dense_decode,format=v32"},
    {"dense decode", "op=dense_decode,format=v4,d_qk=512"},
    {"dense decode", "op=dense_decode,format=v41,d_qk=512"},
    {"dense decode", "op=dense_decode,format=v41-page,d_qk=512"},
    {"sparse decode", "op=sparse_decode,format=bf16,d_qk=576,topk=2048"},
    {"sparse decode", "op=sparse_decode,format=v32,d_qk=576,topk=2048"},
    {"sparse decode", "op=sparse_decode,format=v4,topk=2048"},
    {"sparse decode", "op=sparse_decode,format=v41,topk=2048"},
    {"sparse decode", "op=sparse_decode,format=v41,topk=128,extra=v41-fp4,e_topk=1920,e_page=64"},
    {"sparse prefill", "op=sparse_prefill,s_q=64,s_kv=8192,topk=2048,b=1"},
    {"fused decode", "op=fused_decode,format=v41,topk=128,extra=v41-fp4,e_topk=1024,e_page=64,norm=1"},
    {"MHA forward", "op=mha_forward,b=1,s_q=512,s_kv=512,h_q=16,h_kv=16,causal=1"},
    {"MHA backward", "op=mha_backward,b=1,s_q=512,s_kv=512,h_q=16,h_kv=16,causal=1"},
};

#define ROWS ((int)(sizeof rows / sizeof rows[0]))

typedef struct demo_result {
    test_case c;
    int64_t bytes; /* per token; 0: no cache */
    double saving; /* against bf16 of the same width, percent */
    double max_error, relative, cosine;
    double seconds, gflops, share;
    verdict verdict;
} demo_result;

/* 128 heads where a dense step over all requests (262k tokens) takes no longer than 1 s, else fewer. */
static int64_t choose_heads(double gflops)
{
    int64_t heads = 128;
    while (heads > 8 && 262144.0 * 2 * 1088 * (double)heads * 1e-9 > 1.0 * 0.6 * gflops) {
        heads /= 2;
    }
    return heads;
}

static int complete_case(const demo_row *row, int64_t heads, test_case *c)
{
    char error[256];
    if (case_parse(c, row->text, error, sizeof error) != 0) {
        return cli_error("demo: %s", error);
    }
    c->seed = 7;
    if (strstr(row->text, "h_q=") == NULL) {
        c->h_q = heads;
    }
    if (strstr(row->text, ",b=") == NULL) {
        c->b = 16;
        c->s_kv = 16384;
        c->varlen = 2;
        c->e_kv = 16384;
        if (c->extra != FMLA_KV_NONE) {
            c->s_kv = 128;
        }
    }
    return CLI_OK;
}

static int run_row(checker *k, bench_device *device, const test_case *c, double gflops_peak, demo_result *result)
{
    problem p;
    any_args args;
    bench_time time;
    memset(result, 0, sizeof *result);
    result->c = *c;
    if (problem_build(&p, c, c->op == FMLA_OP_MHA_BACKWARD ? &k->engine : &k->oracle) != CLI_OK) {
        return CLI_ERROR;
    }
    problem_args(&p, &args);
    bench_work work = bench_work_of(&p);
    fmla_operation op = (fmla_operation)c->op;
    fmla_status status = bench_measure(&k->engine, device, &p.mem, op, &args, 3, &time);
    if (status == FMLA_OK && !k->engine.host) {
        status = engine_run(&k->engine, &p.mem, op, &args); /* brings the results home */
    }
    if (status != FMLA_OK) {
        cli_status(k->engine.context, status, fmla_operation_name(op));
        problem_free(&p);
        return CLI_ERROR;
    }
    memset(&k->last, 0, sizeof k->last);
    result->verdict = case_is_mqa(c) ? check_attention_outputs(k, &p, NULL) : check_mha_outputs(k, &p);
    result->max_error = k->last.max_error;
    result->relative = k->last.reference_squares > 0 ? sqrt(k->last.error_squares / k->last.reference_squares) : 0;
    result->cosine = compare_cosine(&k->last);
    result->seconds = time.median;
    result->gflops = work.flop / time.median * 1e-9;
    result->share = gflops_peak > 0 ? result->gflops / gflops_peak : 0;
    if (case_is_mqa(c)) {
        const fmla_kv_cache *cache = c->extra != FMLA_KV_NONE ? &p.extra.cache : &p.main.cache;
        result->bytes = cache_record_bytes(cache);
        result->saving = 100 * (1 - (double)result->bytes / (2.0 * (double)c->d_qk));
    }
    problem_free(&p);
    return CLI_OK;
}

static void format_text(const test_case *c, char *text, size_t size)
{
    fmla_format_info a = cache_format(c->format, c->d_qk), b = cache_format(c->extra ? c->extra : c->format, c->d_qk);
    if (!case_is_mqa(c)) {
        snprintf(text, size, "bf16");
    } else {
        snprintf(text, size, "%s%s%s", a.name, c->extra ? "+" : "", c->extra ? b.name : "");
    }
}

static void print_row(const char *what, const demo_result *r)
{
    char format[64], bytes[24] = "-", saving[24] = "-";
    format_text(&r->c, format, sizeof format);
    if (r->bytes > 0) {
        snprintf(bytes, sizeof bytes, "%lld", (long long)r->bytes);
        snprintf(saving, sizeof saving, "%.1f%%", r->saving);
    }
    printf("%-15s %-12s %4lld %6s %7s %10.2e %9.2e %9.2e %9.2f %9.1f", what, format, (long long)r->c.h_q, bytes, saving,
           r->max_error, r->relative, r->cosine, r->seconds * 1e3, r->gflops);
    if (r->share > 0) {
        printf(" %6.1f%%", 100 * r->share);
    } else {
        printf(" %7s", "-");
    }
    printf(" %s\n", r->verdict == VERDICT_PASSED ? "ok" : "WRONG");
    fflush(stdout);
}

static void add_json(cJSON *list, const char *what, const demo_result *r)
{
    char format[64];
    cJSON *one = cJSON_CreateObject();
    format_text(&r->c, format, sizeof format);
    cJSON_AddStringToObject(one, "what", what);
    cJSON_AddStringToObject(one, "operation", fmla_operation_name((fmla_operation)r->c.op));
    cJSON_AddStringToObject(one, "format", format);
    cJSON_AddNumberToObject(one, "h_q", (double)r->c.h_q);
    cJSON_AddNumberToObject(one, "bytes_per_token", (double)r->bytes);
    cJSON_AddNumberToObject(one, "saving_percent", r->saving);
    cli_json_number(one, "max_error", r->max_error);
    cli_json_number(one, "relative_error", r->relative);
    cli_json_number(one, "one_minus_cosine", r->cosine);
    cJSON_AddNumberToObject(one, "milliseconds", r->seconds * 1e3);
    cJSON_AddNumberToObject(one, "gflops", r->gflops);
    cJSON_AddNumberToObject(one, "share_of_peak", r->share);
    cJSON_AddBoolToObject(one, "within_bounds", r->verdict == VERDICT_PASSED);
    cJSON_AddItemToArray(list, one);
}

static void print_head(const checker *k, const bench_limit *limit, double peak, int64_t heads)
{
    const fmla_context *context = k->engine.context;
    printf("flashmla %s on %s", FMLA_VERSION_STRING, fmla_device_name(fmla_context_device(context)));
    if (k->engine.host) {
        printf(", %s, %d threads; this machine: %.0f GFLOP/s %s, %.0f GB/s from memory",
               fmla_isa_name(fmla_context_isa(context)), (int)fmla_context_threads(context), peak,
               peak == limit->dot_bf16 ? "bf16 dot product" : "fp32 multiply-add", limit->read);
    } else if (peak > 0) {
        printf("; this device: %.0f GFLOP/s bf16 matrix products, %.0f GB/s copies", peak, limit->copy);
    }
    printf(
        "\n16 requests of 4k to 32k tokens in pages of 64, one query token each, %lld heads where not said otherwise;\n"
        "errors of sampled rows against float64 on the same cache bytes\n\n",
        (long long)heads);
    printf("%-15s %-12s %4s %6s %7s %10s %9s %9s %9s %9s %7s\n", "call", "format", "h_q", "B/tok", "saved", "max error",
           "relative", "1-cosine", "ms", "GFLOP/s", "of peak");
}

/* The machine's limits, measured; on a device, that is opened for timing. */
static int find_limits(checker *k, bench_device **device, bench_limit *limit)
{
    int status = CLI_OK;
    if (k->engine.host) {
        *limit = bench_peak(fmla_context_threads(k->engine.context), fmla_context_isa(k->engine.context));
    } else {
        status = bench_device_open(device, k->engine.options.device_index);
    }
    if (*device != NULL) {
        limit->gemm = bench_device_gemm(*device, 5);
        limit->copy = bench_device_copy(*device, 5);
    }
    return status;
}

static int run_demo(const cli_options *options)
{
    checker *k = NULL;
    bench_device *device = NULL;
    bench_limit limit = {0};
    cJSON *list = cJSON_CreateArray();
    double start = bench_now(), peak = 0, best = 0;
    int wrong = 0, status = checker_open(&k, options, 1, 6e7);
    int64_t heads = 128;
    if (status == CLI_OK) {
        status = find_limits(k, &device, &limit);
        fmla_isa isa = fmla_context_isa(k->engine.context);
        peak = bench_compute_limit(&limit, isa);
        heads = k->engine.host ? choose_heads(isa == FMLA_ISA_SCALAR ? peak / 20 : peak) : heads;
        if (status == CLI_OK && !options->json) {
            print_head(k, &limit, peak, heads);
        }
    }
    for (int i = 0; i < ROWS && status == CLI_OK; i++) {
        test_case c;
        demo_result result = {0};
        cli_progress("%d/%d %s", i + 1, ROWS, rows[i].text);
        status = complete_case(&rows[i], heads, &c);
        if (status == CLI_OK) {
            status = run_row(k, device, &c, peak, &result);
        }
        cli_progress(NULL);
        if (status == CLI_OK) {
            wrong += result.verdict != VERDICT_PASSED;
            best = result.gflops > best ? result.gflops : best;
            add_json(list, rows[i].what, &result);
            if (!options->json) {
                print_row(rows[i].what, &result);
            }
            if (result.verdict == VERDICT_FAILED) {
                fprintf(stderr, "flashmla: %s: %s\n", rows[i].what, k->why);
            }
        }
    }
    if (status == CLI_OK && options->json) {
        status = cli_print_json(list);
        list = NULL;
    } else if (status == CLI_OK) {
        printf("\n%d calls, %d within their error bounds; fastest %.0f GFLOP/s; %.1f s in all\n", ROWS, ROWS - wrong,
               best, bench_now() - start);
    }
    cJSON_Delete(list);
    bench_device_close(device);
    checker_close(k);
    return status == CLI_OK && wrong > 0 ? CLI_FAILED : status;
}

int cmd_demo(int argc, char **argv)
{
    static const struct option table[] = {CLI_LONG_OPTIONS, {NULL, 0, NULL, 0}};
    cli_options options = CLI_OPTIONS_INIT;
    int status = cli_take_options(argc, argv, table, usage, 0, cli_option, &options);
    if (status != CLI_OK) {
        return status;
    }
    return run_demo(&options);
}
