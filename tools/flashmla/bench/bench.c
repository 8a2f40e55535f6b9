/* SPDX-License-Identifier: MIT */
/* bench.c: `flashmla bench`: times operations on shapes and relates them to what this machine can do. */
#include "bench/bench.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LIMIT_RUNS 5

enum {
    OPTION_OPERATION = CLI_OPTION_OWN,
    OPTION_FORMAT,
    OPTION_SHAPE,
    OPTION_SHAPES,
    OPTION_CASE,
    OPTION_RUNS,
    OPTION_REPEAT,
    OPTION_SETS,
    OPTION_ABLATE,
    OPTION_LIST,
    OPTION_PLOT,
    OPTION_LIMIT_TFLOPS,
    OPTION_LIMIT_GBPS,
    OPTION_JSON_FILE
};

static const char usage[] =
    "[options]\n\n"
    "Times operations and relates them to this machine's limits, measured in the same run.\n\n"
    "  --operation NAME    only this operation (dense_decode, sparse_decode, sparse_prefill, ...)\n"
    "  --format NAME       only shapes with this KV format as main or extra cache\n"
    "  --shape TEXT        only shapes whose name contains this; of all files (see --list)\n"
    "  --case TEXT         one shape in the words of `flashmla check`: \"op=dense_decode,b=4,...\"\n"
    "  --ablate NAME       cuda: calls with a technique and without: crossover (two blocks share the expanding of\n"
    "                      tokens), seesaw (two warpgroups take every other tile's scores), splits (lists are cut),\n"
    "                      dequant (quantised tokens)\n"
    "  --runs N            timed runs; default 5 to 50, about half a second; cuda 10, each with cold caches\n"
    "  --list              print the shapes' names\n"
    "  --json FILE         write the records ('-': standard output)\n"
    "  --plot FILE.svg     draw GFLOP/s over tokens (needs gnuplot)\n"
    "  --repeat N          rounds of limits and runs, of which the middle one counts; default 1, cuda 3\n"
    "  --sets LIST         cuda: several choices of kernels on each shape, as in best,portable,hopper,99,163 (the\n"
    "                      numbers: portable ones with that profile)\n"
    "  --limit-tflops X    the compute limit instead of the measured one\n"
    "  --limit-gbps X      the memory limit instead of the measured one\n"
    "  --shapes DIR        directory of shapes; default: the installed or built-in one\n"
    "  --backend NAME      auto, cpu or cuda; default cpu\n"
    "  --device-index N    which CUDA device; default 0\n"
    "  --isa NAME          CPU tier: scalar, avx2, avx512bf16, amx, neon; default the best\n"
    "  --threads N         CPU threads; default: first 1, then one per processor\n" CLI_CUDA_HELP;

typedef struct bench_options {
    cli_options shared;
    int operation;
    int64_t format, runs, repeat;
    const char *shape, *shapes, *one, *json, *plot, *sets, *ablate;
    double limit_tflops, limit_gbps;
    bool list;
} bench_options;

/* One number of threads, or one choice of kernels on the device, with its limits. */
typedef struct station {
    engine engine;
    bench_limit limit;
    bench_device *device; /* NULL on the host; the stations of a device share it */
} station;

#define STATIONS_MAX 6

static int take_option(void *user, int option, const char *argument)
{
    bench_options *o = user;
    switch (option) {
    case OPTION_OPERATION:
        o->operation = operation_by_name(argument);
        return o->operation < 0 ? cli_error("--operation: no operation '%s'", argument) : CLI_OK;
    case OPTION_FORMAT:
        o->format = fmla_format_by_name(argument);
        return o->format == FMLA_KV_NONE ? cli_error("--format: no format '%s'", argument) : CLI_OK;
    case OPTION_SHAPE:
        o->shape = argument;
        return CLI_OK;
    case OPTION_SHAPES:
        o->shapes = argument;
        return CLI_OK;
    case OPTION_CASE:
        o->one = argument;
        return CLI_OK;
    case OPTION_RUNS:
        return cli_parse_int("--runs", argument, 1, 1000, &o->runs);
    case OPTION_SETS:
        o->sets = argument;
        return CLI_OK;
    case OPTION_ABLATE:
        o->ablate = argument;
        return CLI_OK;
    case OPTION_REPEAT:
        return cli_parse_int("--repeat", argument, 1, BENCH_ROUNDS_MAX, &o->repeat);
    case OPTION_LIST:
        o->list = true;
        return CLI_OK;
    case OPTION_PLOT:
        o->plot = argument;
        return CLI_OK;
    case OPTION_LIMIT_TFLOPS:
        return cli_parse_double("--limit-tflops", argument, &o->limit_tflops);
    case OPTION_LIMIT_GBPS:
        return cli_parse_double("--limit-gbps", argument, &o->limit_gbps);
    case OPTION_JSON_FILE:
        o->json = argument;
        return CLI_OK;
    default:
        return cli_option(&o->shared, option, argument);
    }
}

static bool wanted(const bench_options *o, const test_case *c)
{
    return (o->operation < 0 || c->op == o->operation) &&
           (o->format == 0 || c->format == o->format || c->extra == o->format);
}

/* "best", "portable 99". */
static const char *set_name(const station *s, char *text, size_t size)
{
    const cli_options *o = &s->engine.options;
    snprintf(text, size, "%s", cli_kernels_name(o));
    if (o->profile > 0) {
        snprintf(text, size, "%s %d", cli_kernels_name(o), (int)o->profile);
    }
    return text;
}

static void print_line(const station *s, const bench_shape *shape, const bench_rounds *measured, double tflops,
                       double gbps, double share, double goal)
{
    const bench_time *time = &measured->time[measured->middle];
    if (s->device == NULL) {
        char wanted_share[16] = "";
        if (goal > 0) {
            snprintf(wanted_share, sizeof wanted_share, "%7.0f%%", 100 * goal);
        }
        printf("%-56s %3d %12.1f %10.1f %8.2f %7.1f%%%s\n", shape->name, (int)fmla_context_threads(s->engine.context),
               time->median * 1e6, tflops * 1e3, gbps, 100 * share, wanted_share);
    } else {
        char span[16] = "", graph[16] = "", steady[16] = "", set[32];
        if (measured->span.runs > 0) {
            snprintf(span, sizeof span, "%.1f", measured->span.median * 1e6);
        }
        if (time->graph > 0) {
            snprintf(graph, sizeof graph, "%.1f", time->graph * 1e6);
            snprintf(steady, sizeof steady, "%.1f", time->steady * 1e6);
        }
        printf("%-64s %9.1f %9s %8s %8s %7.1f %7.0f %6.1f%% %s\n", shape->name, time->median * 1e6, span, graph, steady,
               tflops, gbps, 100 * share, set_name(s, set, sizeof set));
    }
    fflush(stdout);
}

/* Adds the record and prints its line. */
static void report(const bench_options *o, const station *s, const bench_shape *shape, const bench_rounds *measured,
                   const bench_work *work, cJSON *records)
{
    const bench_time *time = &measured->time[measured->middle];
    const bench_limit *here = &measured->limit[measured->middle];
    fmla_isa isa = fmla_context_isa(s->engine.context);
    double tflops = work->flop / time->median * 1e-12, gbps = work->bytes / time->median * 1e-9;
    double compute = o->limit_tflops > 0 ? o->limit_tflops : bench_compute_limit(here, isa) * 1e-3;
    double memory_limit = o->limit_gbps > 0 ? o->limit_gbps : s->device ? here->copy : here->read;
    double least = compute > 0 ? work->flop / (compute * 1e12) : 0;
    if (memory_limit > 0 && work->bytes / (memory_limit * 1e9) > least) {
        least = work->bytes / (memory_limit * 1e9);
    }
    cJSON *r = bench_record(shape, measured), *limit = cJSON_CreateObject();
    cJSON_AddStringToObject(r, "backend", fmla_device_name(fmla_context_device(s->engine.context)));
    cJSON_AddStringToObject(r, "isa", s->engine.host ? fmla_isa_name(isa) : "");
    cJSON_AddNumberToObject(r, "threads", s->engine.host ? fmla_context_threads(s->engine.context) : 0);
    if (s->device) {
        cJSON_AddStringToObject(r, "kernels", cli_kernels_name(&s->engine.options));
        cJSON_AddNumberToObject(r, "profile_kib", s->engine.options.profile);
    }
    cJSON_AddNumberToObject(r, "tflops", tflops);
    cJSON_AddNumberToObject(r, "gbps", gbps);
    cJSON_AddNumberToObject(r, "gbps_published", work->bytes_published / time->median * 1e-9);
    cJSON_AddNumberToObject(limit, "tflops", compute);
    cJSON_AddNumberToObject(limit, "gbps", memory_limit);
    cJSON_AddItemToObject(r, "limit", limit);
    cJSON_AddNumberToObject(r, "of_limit", least / time->median);
    double goal = shape->goal[s->engine.host && fmla_context_threads(s->engine.context) > 1];
    if (goal > 0) {
        cJSON_AddNumberToObject(r, "goal", goal);
    }
    cJSON_AddItemToArray(records, r);
    if (o->json == NULL || strcmp(o->json, "-") != 0) {
        print_line(s, shape, measured, tflops, gbps, least / time->median, goal);
    }
}

/* The limits of a device at this time; the clock follows power and heat. */
static bench_limit device_limit(bench_device *device)
{
    bench_limit limit = {0};
    limit.gemm = bench_device_gemm(device, LIMIT_RUNS);
    limit.copy = bench_device_copy(device, LIMIT_RUNS);
    return limit;
}

/* The limits for a round of several. */
static bench_limit round_limit(const station *s, int64_t of)
{
    if (s->device) {
        return device_limit(s->device);
    }
    const fmla_context *context = s->engine.context;
    return of > 1 ? bench_peak(fmla_context_threads(context), fmla_context_isa(context)) : s->limit;
}

static fmla_status run_rounds(const bench_options *o, station *s, problem *p, fmla_operation op, const any_args *args,
                              bench_rounds *measured)
{
    fmla_status status = FMLA_OK;
    int64_t wanted = o->repeat > 0 ? o->repeat : s->device ? 3 : 1;
    memset(measured, 0, sizeof *measured);
    for (int i = 0; i < wanted && status == FMLA_OK; i++) {
        measured->limit[i] = round_limit(s, wanted);
        status = bench_measure(&s->engine, s->device, &p->mem, op, args, (int32_t)o->runs, &measured->time[i]);
        measured->count = i + 1;
    }
    for (int i = 0; i < measured->count; i++) { /* the round that half of the others do not exceed */
        int below = 0;
        for (int j = 0; j < measured->count; j++) {
            double a = measured->time[i].median, b = measured->time[j].median;
            below += b < a || (b <= a && j < i);
        }
        measured->middle = below == (measured->count - 1) / 2 ? i : measured->middle;
    }
    if (s->device && status == FMLA_OK) {
        status = bench_measure_span(&s->engine, s->device, &p->mem, op, args, (int32_t)o->runs, &measured->span);
    }
    return status;
}

static bench_work plain_work(const test_case *c)
{
    double bytes = bench_bytes_of(c);
    return (bench_work){.bytes = bytes, .bytes_published = bytes};
}

/* Measures on one station and reports. */
static int run_station(const bench_options *o, station *s, problem *p, const any_args *args, const bench_shape *shape,
                       const bench_work *work, cJSON *records)
{
    bench_rounds measured;
    fmla_status status = run_rounds(o, s, p, (fmla_operation)shape->c.op, args, &measured);
    if (status == FMLA_ERROR_UNSUPPORTED) {
        printf("%-56s not offered: %s\n", shape->name, engine_error(&s->engine));
    } else if (status != FMLA_OK) {
        return cli_status(s->engine.context, status, shape->name);
    } else {
        report(o, s, shape, &measured, work, records);
    }
    return CLI_OK;
}

/* The same in the tier, or with the kernels, that the shape is about. */
static int run_other(const bench_options *o, station *s, problem *p, const any_args *args, const bench_shape *shape,
                     const bench_work *work, cJSON *records)
{
    station other = *s;
    cli_options options = s->engine.options;
    int status = CLI_OK;
    if (s->engine.host) {
        options.isa = shape->isa;
        options.threads = fmla_context_threads(s->engine.context);
    } else {
        status = cli_option(&options, CLI_OPTION_KERNELS, shape->kernels);
    }
    if (s->engine.host && !fmla_isa_available(shape->isa)) {
        printf("%-56s no %s here\n", shape->name, fmla_isa_name(shape->isa));
        return CLI_OK;
    }
    if (status != CLI_OK || engine_open(&other.engine, &options) != CLI_OK) {
        return CLI_ERROR;
    }
    status = run_station(o, &other, p, args, shape, work, records);
    engine_close(&other.engine);
    return status;
}

static int run_shape(const bench_options *o, station *stations, int count, const bench_shape *shape, cJSON *records)
{
    problem p;
    any_args args;
    engine *maker = &stations[count - 1].engine; /* the fastest; what it makes is not judged here */
    bool attention = shape->c.op <= FMLA_OP_MHA_BACKWARD;
    int status = attention ? problem_build(&p, &shape->c, maker) : bench_bytes_problem(&p, &shape->c, maker, &args);
    if (status != CLI_OK) {
        return status;
    }
    if (attention) {
        problem_args(&p, &args);
    }
    bench_work work = attention ? bench_work_of(&p) : plain_work(&shape->c);
    for (int i = 0; i < count && status == CLI_OK; i++) {
        station *s = &stations[i];
        bool other = s->engine.host ? shape->isa != FMLA_ISA_AUTO : shape->kernels != NULL;
        p.mem.resident = i > 0; /* the tensors are there already, and nobody looks at the results */
        status = (other ? run_other : run_station)(o, s, &p, &args, shape, &work, records);
    }
    problem_free(&p);
    return status;
}

static cJSON *limits_json(const station *stations, int count)
{
    cJSON *list = cJSON_CreateArray();
    for (int i = 0; i < (stations[0].device ? 1 : count); i++) {
        cJSON *one = cJSON_CreateObject();
        if (stations[i].device) {
            cJSON_AddNumberToObject(one, "gemm_bf16_tflops", stations[i].limit.gemm * 1e-3);
            cJSON_AddNumberToObject(one, "copy_gbps", stations[i].limit.copy);
            cJSON_AddItemToArray(list, one);
            continue;
        }
        cJSON_AddNumberToObject(one, "threads", fmla_context_threads(stations[i].engine.context));
        cJSON_AddNumberToObject(one, "fma_gflops", stations[i].limit.fma);
        cJSON_AddNumberToObject(one, "fma_avx2_gflops", stations[i].limit.fma_avx2);
        cJSON_AddNumberToObject(one, "dot_bf16_gflops", stations[i].limit.dot_bf16);
        cJSON_AddNumberToObject(one, "dot_amx_gflops", stations[i].limit.dot_amx);
        cJSON_AddNumberToObject(one, "read_gbps", stations[i].limit.read);
        cJSON_AddNumberToObject(one, "fork_join_us", stations[i].limit.fork);
        cJSON_AddItemToArray(list, one);
    }
    return list;
}

static int write_json(const bench_options *o, const station *stations, int count, cJSON *records, cJSON *ratios)
{
    fmla_device_info info = FMLA_DEVICE_INFO_INIT;
    fmla_device device = fmla_context_device(stations[0].engine.context);
    cJSON *root = cJSON_CreateObject();
    time_t now = time(NULL);
    struct tm date;
    char text[16] = "";
    if (gmtime_r(&now, &date) != NULL) {
        strftime(text, sizeof text, "%Y-%m-%d", &date);
    }
    cJSON_AddStringToObject(root, "version", FMLA_VERSION_STRING);
    cJSON_AddStringToObject(root, "date", text);
    if (stations[0].device) {
        cJSON_AddStringToObject(root, "kernels", cli_kernels_name(&o->shared));
        cJSON_AddNumberToObject(root, "profile_kib", o->shared.profile);
    }
    if (fmla_device_get(device, o->shared.device_index, &info) == FMLA_OK) {
        cJSON_AddStringToObject(root, "device", info.name);
    }
    cJSON_AddItemToObject(root, "peaks", limits_json(stations, count));
    cJSON_AddItemReferenceToObject(root, "records", records);
    cJSON_AddItemReferenceToObject(root, "ratios", ratios);
    return cli_write_json(o->json, root);
}

/* A station for each choice of kernels; without --sets the one that --kernels and --profile make. */
static int open_sets(const bench_options *o, station *stations, int *count)
{
    cli_options sets[STATIONS_MAX];
    bench_device *device = NULL;
    int named = 0, status = cli_take_sets(&o->shared, o->sets, sets, STATIONS_MAX, &named);
    for (int i = 0; i < named && status == CLI_OK; i++) {
        station *s = &stations[i];
        status = engine_open(&s->engine, &sets[i]);
        if (status != CLI_OK) {
            return status;
        }
        (*count)++;
        if (device == NULL) {
            status = bench_device_open(&device, o->shared.device_index);
        }
        s->device = device;
        s->limit = i > 0 || status != CLI_OK ? stations[0].limit : device_limit(device);
    }
    return status;
}

/* On the CPU without --threads: one thread, then all. */
static int open_stations(const bench_options *o, station *stations, int *count)
{
    *count = 0;
    if (o->shared.device == FMLA_DEVICE_CUDA) {
        return open_sets(o, stations, count);
    }
    if (o->sets != NULL) {
        return cli_error("--sets: for --backend cuda");
    }
    for (int i = 0; i < 2; i++) {
        cli_options options = o->shared;
        if (options.device == FMLA_DEVICE_CPU && options.threads == 0 && i == 0) {
            options.threads = 1;
        } else if (i == 1 && (options.device != FMLA_DEVICE_CPU || options.threads != 0)) {
            break;
        }
        if (engine_open(&stations[i].engine, &options) != CLI_OK) {
            return CLI_ERROR;
        }
        if (i == 1 && fmla_context_threads(stations[1].engine.context) == 1) {
            engine_close(&stations[1].engine);
            break;
        }
        *count = i + 1;
        const fmla_context *context = stations[i].engine.context;
        if (!stations[i].engine.host) {
            return cli_error("bench: --backend auto found a device; say --backend cuda");
        }
        stations[i].limit = bench_peak(fmla_context_threads(context), fmla_context_isa(context));
        if (bench_fork(&stations[i].engine, &stations[i].limit.fork) != FMLA_OK) {
            return cli_error("bench: %s", engine_error(&stations[i].engine));
        }
    }
    return CLI_OK;
}

static void print_head(const bench_options *o, const station *stations, int count)
{
    if (o->json != NULL && strcmp(o->json, "-") == 0) {
        return;
    }
    if (stations[0].device) {
        printf("limits: %.1f TFLOP/s bf16 matrix products, %.0f GB/s copies; times in us, with cold caches\n"
               "us: between events around a call; span: from its first kernel's begin to its last one's end, by CUPTI\n"
               "graph: one call in a graph; steady: a call of many in a graph, caches warm\n\n"
               "%-64s %9s %9s %8s %8s %7s %7s %7s\n",
               stations[0].limit.gemm * 1e-3, stations[0].limit.copy, "shape", "us", "span", "graph", "steady",
               "TFLOP/s", "GB/s", "limit");
        return;
    }
    for (int i = 0; i < count; i++) {
        const bench_limit *l = &stations[i].limit;
        printf("limits, %d threads: %.1f GFLOP/s fp32 multiply-add, ",
               (int)fmla_context_threads(stations[i].engine.context), l->fma);
        if (l->dot_bf16 > 0) {
            printf("%.1f GFLOP/s bf16 dot product, ", l->dot_bf16);
        }
        if (l->dot_amx > 0) {
            printf("%.1f GFLOP/s AMX, ", l->dot_amx);
        }
        printf("%.1f GB/s read, %.2f us fork and join\n", l->read, l->fork);
    }
    const fmla_context *context = stations[0].engine.context;
    printf("%s, %s\n\n%-56s %3s %12s %10s %8s %8s%8s\n", fmla_device_name(fmla_context_device(context)),
           fmla_isa_name(fmla_context_isa(context)), "shape", "thr", "us", "GFLOP/s", "GB/s", "of limit", "goal");
}

static int run_bench(const bench_options *o, const bench_shapes *list)
{
    station stations[STATIONS_MAX];
    int count = 0;
    cJSON *records = cJSON_CreateArray(), *ratios = NULL;
    memset(stations, 0, sizeof stations);
    int status = open_stations(o, stations, &count);
    if (status == CLI_OK) {
        print_head(o, stations, count);
        for (size_t i = 0; i < list->count && status == CLI_OK; i++) {
            cli_progress("%zu/%zu %s", i + 1, list->count, list->shapes[i].name);
            status = run_shape(o, stations, count, &list->shapes[i], records);
        }
        cli_progress(NULL);
        ratios = bench_ratios(list, records, o->json == NULL || strcmp(o->json, "-") != 0);
    }
    if (status == CLI_OK && o->json != NULL) {
        status = write_json(o, stations, count, records, ratios);
    }
    if (status == CLI_OK && o->plot != NULL) {
        status = bench_plot(o->plot, records);
    }
    bench_device_close(stations[0].device);
    for (int i = 0; i < count; i++) {
        engine_close(&stations[i].engine);
    }
    cJSON_Delete(ratios);
    cJSON_Delete(records);
    return status;
}

static int make_list(const bench_options *o, bench_shapes *list)
{
    char error[256];
    if (o->one != NULL) {
        list->shapes = xcalloc(1, sizeof *list->shapes);
        list->count = 1;
        snprintf(list->shapes[0].name, sizeof list->shapes[0].name, "%s", o->one);
        return case_parse(&list->shapes[0].c, o->one, error, sizeof error) == 0 ? CLI_OK : cli_error("--%s", error);
    }
    fmla_device device = o->shared.device == FMLA_DEVICE_CUDA ? FMLA_DEVICE_CUDA : FMLA_DEVICE_CPU;
    if (o->ablate != NULL && (device != FMLA_DEVICE_CUDA || o->sets != NULL)) {
        return cli_error("--ablate: for --backend cuda, and without --sets");
    }
    int status = o->ablate != NULL ? bench_ablation(list, o->ablate, o->shape)
                                   : bench_shapes_read(list, o->shapes, device, o->shape);
    size_t kept = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (wanted(o, &list->shapes[i].c)) {
            list->shapes[kept++] = list->shapes[i];
        }
    }
    list->count = kept;
    return status == CLI_OK && kept == 0 ? cli_error("bench: no shape matches; --list prints them") : status;
}

int cmd_bench(int argc, char **argv)
{
    struct option table[] = {
        CLI_LONG_OPTIONS,
        {"operation", required_argument, NULL, OPTION_OPERATION},
        {"format", required_argument, NULL, OPTION_FORMAT},
        {"shape", required_argument, NULL, OPTION_SHAPE},
        {"shapes", required_argument, NULL, OPTION_SHAPES},
        {"case", required_argument, NULL, OPTION_CASE},
        {"runs", required_argument, NULL, OPTION_RUNS},
        {"repeat", required_argument, NULL, OPTION_REPEAT},
        {"sets", required_argument, NULL, OPTION_SETS},
        {"ablate", required_argument, NULL, OPTION_ABLATE},
        {"list", no_argument, NULL, OPTION_LIST},
        {"plot", required_argument, NULL, OPTION_PLOT},
        {"limit-tflops", required_argument, NULL, OPTION_LIMIT_TFLOPS},
        {"limit-gbps", required_argument, NULL, OPTION_LIMIT_GBPS},
        {NULL, 0, NULL, 0},
    };
    bench_options o = {.shared = CLI_OPTIONS_INIT, .operation = -1};
    char folder[4096];
    o.shapes = bench_shapes_folder(folder, sizeof folder);
    bench_shapes list = {0};
    cli_json_names_file(table, OPTION_JSON_FILE);
    o.shared.device = FMLA_DEVICE_CPU;
    int status = cli_take_options(argc, argv, table, usage, 0, take_option, &o);
    status = status == CLI_OK ? make_list(&o, &list) : status;
    if (status == CLI_OK && o.list) {
        for (size_t i = 0; i < list.count; i++) {
            printf("%s\n", list.shapes[i].name);
        }
    } else if (status == CLI_OK) {
        status = run_bench(&o, &list);
    }
    bench_shapes_free(&list);
    return status;
}
