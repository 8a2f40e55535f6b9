/* SPDX-License-Identifier: MIT */
/* check.c: `flashmla check`: runs cases against the reference and tells how it went. */
#include "check/check.h"
#include "check/ids.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SKIPPED 77      /* what CTest understands as "not here" */
#define FAILURES_MAX 40 /* lines printed; the rest is counted */

enum {
    OPTION_OPERATION = CLI_OPTION_OWN,
    OPTION_FORMAT,
    OPTION_SEED,
    OPTION_SHARE,
    OPTION_CASES,
    OPTION_CASE,
    OPTION_IDS,
    OPTION_LIST,
    OPTION_MAY_SKIP,
    OPTION_JSON_FILE
};

static const char usage[] =
    "[options]\n\n"
    "Runs every kernel against the float64 reference on made-up tensors that hold NaN wherever nothing may be read.\n"
    "A failure prints the command that repeats it. The last line is \"N passed, N failed\".\n\n"
    "  --operation NAME    only this operation (dense_decode, sparse_decode, sparse_prefill, ...)\n"
    "  --format NAME       only cases with this KV format as main or extra cache\n"
    "  --cases SET         quick (default), all, or full (for a GPU)\n"
    "  --share K/N         the K-th of N parts (K of 1 to N) into which the cases are dealt, all as long\n"
    "  --case TEXT         one case, as a failure prints it\n"
    "  --ids[=C001,C003]   instead of cases: the faults of tests/cases.md, all or some (all cases run them too)\n"
    "  --seed N            other random numbers; default 1\n"
    "  --list              print the cases instead of running them\n"
    "  --may-skip          exit with 77 when this machine cannot run the tier or device\n"
    "  --json FILE         write the outcome of every case\n"
    "  --backend NAME      auto, cpu or cuda; default cpu\n"
    "  --device-index N    which CUDA device; default 0\n"
    "  --isa NAME          CPU tier: scalar, avx2, avx512bf16, amx, neon; default the best\n"
    "  --threads N         CPU threads; default one per processor\n" CLI_CUDA_HELP;

typedef struct check_options {
    cli_options shared;
    int operation; /* -1: all */
    int64_t format;
    int64_t seed;
    int64_t share, shares;
    case_set set;
    const char *one;
    const char *ids; /* NULL: none */
    bool only_ids;
    const char *json;
    bool list, may_skip;
} check_options;

verdict check_case(checker *k, const test_case *c)
{
    k->why[0] = 0;
    switch (c->op) {
    case FMLA_OP_MHA_FORWARD:
    case FMLA_OP_MHA_BACKWARD:
        return check_mha(k, c);
    case FMLA_OP_QUANTIZE:
        return check_quantize(k, c);
    case FMLA_OP_DEQUANTIZE:
        return check_dequantize(k, c);
    case FMLA_OP_CONVERT:
        return check_convert(k, c);
    case FMLA_OP_MERGE:
        return check_merge(k, c);
    case FMLA_OP_PERMUTE_Q_B:
    case FMLA_OP_PERMUTE_WV:
        return check_permute(k, c);
    case FMLA_OP_INDICES_CONVERT:
        return check_indices_convert(k, c);
    case FMLA_OP_FP8_CAST:
        return check_fp8_cast(k, c);
    case FMLA_OP_SCHEDULE:
        return check_schedule(k, c);
    default:
        return check_attention(k, c);
    }
}

static int parse_share(check_options *o, const char *text)
{
    long long share, shares;
    char more;
    if (sscanf(text, "%lld/%lld%c", &share, &shares, &more) != 2 || shares < 1 || share < 1 || share > shares) {
        return cli_error("--share: '%s'; K/N is meant, K of 1 to N", text);
    }
    o->share = share;
    o->shares = shares;
    return CLI_OK;
}

static int take_option(void *user, int option, const char *argument)
{
    check_options *o = user;
    static const char *const sets[] = {"quick", "all", "full"};
    switch (option) {
    case OPTION_OPERATION:
        o->operation = operation_by_name(argument);
        return o->operation < 0 ? cli_error("--operation: no operation '%s'", argument) : CLI_OK;
    case OPTION_FORMAT:
        o->format = fmla_format_by_name(argument);
        return o->format == FMLA_KV_NONE ? cli_error("--format: no format '%s'", argument) : CLI_OK;
    case OPTION_SEED:
        return cli_parse_int("--seed", argument, 0, INT64_MAX / 2, &o->seed);
    case OPTION_SHARE:
        return parse_share(o, argument);
    case OPTION_CASES:
        for (int i = 0; i < 3; i++) {
            if (strcmp(argument, sets[i]) == 0) {
                o->set = (case_set)i;
                return CLI_OK;
            }
        }
        return cli_error("--cases: '%s'; allowed: quick, all, full", argument);
    case OPTION_CASE:
        o->one = argument;
        return CLI_OK;
    case OPTION_IDS:
        o->ids = argument != NULL ? argument : "all";
        o->only_ids = true;
        return CLI_OK;
    case OPTION_LIST:
        o->list = true;
        return CLI_OK;
    case OPTION_MAY_SKIP:
        o->may_skip = true;
        return CLI_OK;
    case OPTION_JSON_FILE:
        o->json = argument;
        return CLI_OK;
    default:
        return cli_option(&o->shared, option, argument);
    }
}

/* Multiplications of one reference. */
static double budget_of(const check_options *o)
{
    return o->one != NULL ? 200e6 : o->set == CASES_QUICK ? 8e6 : o->set == CASES_ALL ? 40e6 : 20e6;
}

static int make_list(const check_options *o, case_list *list)
{
    char error[256];
    test_case c;
    if (o->one != NULL) {
        if (case_parse(&c, o->one, error, sizeof error) != 0) {
            return cli_error("--%s", error);
        }
        cases_add(list, CASES_FULL, c);
        return CLI_OK;
    }
    cases_make(list, o->set, o->operation, (uint64_t)o->seed);
    if (o->shares > 1) {
        share_deal(list, o->share, o->shares, budget_of(o));
    }
    size_t kept = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (o->format == 0 || list->cases[i].format == o->format || list->cases[i].extra == o->format) {
            list->cases[kept++] = list->cases[i];
        }
    }
    list->count = kept;
    return CLI_OK;
}

typedef struct tally {
    int64_t passed, failed, not_offered;
    double seconds;
} tally;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void record(cJSON *records, const char *text, verdict v, const char *why, double seconds)
{
    static const char *const names[] = {"passed", "failed", "not offered", "broken"};
    cJSON *one = cJSON_CreateObject();
    cJSON_AddStringToObject(one, "case", text);
    cJSON_AddStringToObject(one, "verdict", names[v]);
    if (v == VERDICT_FAILED) {
        cJSON_AddStringToObject(one, "why", why);
    }
    cJSON_AddNumberToObject(one, "seconds", seconds);
    cJSON_AddItemToArray(records, one);
}

static void run_list(checker *k, const check_options *o, const case_list *list, tally *tallies, cJSON *records)
{
    char replay[128];
    int64_t failures = 0;
    cli_replay_options(&o->shared, replay, sizeof replay);
    for (size_t i = 0; i < list->count; i++) {
        const test_case *c = &list->cases[i];
        char text[512];
        tally *t = &tallies[c->op];
        case_print(c, text, sizeof text);
        cli_progress("%zu/%zu %s", i + 1, list->count, text);
        double start = now();
        verdict v = check_case(k, c);
        double seconds = now() - start;
        t->seconds += seconds;
        t->passed += v == VERDICT_PASSED;
        t->not_offered += v == VERDICT_NOT_OFFERED;
        t->failed += v == VERDICT_FAILED || v == VERDICT_BROKEN;
        if (v == VERDICT_FAILED || v == VERDICT_BROKEN) {
            cli_progress(NULL);
            if (failures++ < FAILURES_MAX) {
                const char *why = v == VERDICT_FAILED ? k->why : "no reference";
                printf("FAILED %s\n       flashmla check%s --case \"%s\"\n", why, replay, text);
                fflush(stdout);
            }
        }
        if (records != NULL) {
            record(records, text, v, k->why, seconds);
        }
    }
    cli_progress(NULL);
}

/* One line per operation: how many, how near to the bounds, how long. */
static int64_t print_tallies(const checker *k, const tally *tallies, int64_t *failed)
{
    int64_t passed = 0, not_offered = 0;
    printf("%-17s %7s %7s %9s %12s %12s\n", "operation", "passed", "failed", "seconds", "out/bound", "lse/bound");
    for (int op = 0; op < FMLA_OP_COUNT; op++) {
        const tally *t = &tallies[op];
        if (t->passed + t->failed + t->not_offered == 0) {
            continue;
        }
        printf("%-17s %7lld %7lld %9.1f", fmla_operation_name((fmla_operation)op), (long long)t->passed,
               (long long)t->failed, t->seconds);
        if (op <= FMLA_OP_MHA_FORWARD) {
            printf(" %12.3f %12.3f", k->worst[op][QUANTITY_OUT], k->worst[op][QUANTITY_LSE]);
        }
        printf("\n");
        passed += t->passed;
        *failed += t->failed;
        not_offered += t->not_offered;
    }
    if (not_offered > 0) {
        printf("%lld cases are not offered by this backend\n", (long long)not_offered);
    }
    return passed;
}

static int write_json(const char *path, cJSON *records, const engine *e)
{
    cJSON *root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "version", FMLA_VERSION_STRING);
    cJSON_AddStringToObject(root, "backend", fmla_device_name(fmla_context_device(e->context)));
    if (e->host) {
        cJSON_AddStringToObject(root, "isa", fmla_isa_name(fmla_context_isa(e->context)));
    } else {
        cJSON_AddStringToObject(root, "kernels", cli_kernels_name(&e->options));
        cJSON_AddNumberToObject(root, "profile_kib", e->options.profile);
    }
    cJSON_AddItemToObject(root, "cases", records);
    return cli_write_json(path, root);
}

static int64_t run_ids(checker *k, const check_options *o, cJSON *records, int64_t *failed)
{
    char replay[128];
    ids_tally t = {0};
    cli_replay_options(&o->shared, replay, sizeof replay);
    ids_run(k, o->ids, replay, records, &t);
    printf("%-17s %7lld %7lld %9.1f\n", "named faults", (long long)t.passed, (long long)t.failed, t.seconds);
    if (t.not_offered > 0) {
        printf("%lld named faults are not offered by this backend\n", (long long)t.not_offered);
    }
    *failed += t.failed;
    return t.passed;
}

static int run_checks(const check_options *o, const case_list *list)
{
    checker *k = xcalloc(1, sizeof *k);
    tally tallies[FMLA_OP_COUNT] = {0};
    cJSON *records = o->json ? cJSON_CreateArray() : NULL;
    int64_t failed = 0;
    int status = engine_open_host(&k->oracle, FMLA_DEVICE_ORACLE, FMLA_ISA_AUTO, 1);
    if (status == CLI_OK) {
        status = engine_open(&k->engine, &o->shared);
    }
    if (status == CLI_OK) {
        k->class = class_of(k->engine.context);
        k->budget = budget_of(o);
        printf("checking %s, %s, %d threads, against the float64 reference\n",
               fmla_device_name(fmla_context_device(k->engine.context)),
               fmla_isa_name(fmla_context_isa(k->engine.context)), (int)fmla_context_threads(k->engine.context));
        fflush(stdout);
        run_list(k, o, list, tallies, records);
        int64_t passed = print_tallies(k, tallies, &failed);
        if (o->ids != NULL) {
            passed += run_ids(k, o, records, &failed);
        }
        if (records != NULL) {
            status = write_json(o->json, records, &k->engine);
        }
        printf("%lld passed, %lld failed\n", (long long)passed, (long long)failed);
        status = failed > 0 ? CLI_FAILED : status;
    }
    for (int i = 0; i < CHECK_OTHERS; i++) {
        engine_close(&k->others[i]);
    }
    engine_close(&k->engine);
    engine_close(&k->oracle);
    free(k);
    return status;
}

/* Can this machine run what is asked for? */
static bool usable(const check_options *o)
{
    fmla_device_info info = FMLA_DEVICE_INFO_INIT;
    if (o->shared.device == FMLA_DEVICE_CUDA) {
        return fmla_device_get(FMLA_DEVICE_CUDA, o->shared.device_index, &info) == FMLA_OK;
    }
    return o->shared.isa == FMLA_ISA_AUTO || fmla_isa_available((fmla_isa)o->shared.isa);
}

int cmd_check(int argc, char **argv)
{
    struct option table[] = {
        CLI_LONG_OPTIONS,
        {"operation", required_argument, NULL, OPTION_OPERATION},
        {"format", required_argument, NULL, OPTION_FORMAT},
        {"seed", required_argument, NULL, OPTION_SEED},
        {"share", required_argument, NULL, OPTION_SHARE},
        {"cases", required_argument, NULL, OPTION_CASES},
        {"case", required_argument, NULL, OPTION_CASE},
        {"ids", optional_argument, NULL, OPTION_IDS},
        {"list", no_argument, NULL, OPTION_LIST},
        {"may-skip", no_argument, NULL, OPTION_MAY_SKIP},
        {NULL, 0, NULL, 0},
    };
    check_options o = {.shared = CLI_OPTIONS_INIT, .operation = -1, .seed = 1, .share = 1, .shares = 1};
    case_list list = {0};
    memory_reuse_pages();
    cli_json_names_file(table, OPTION_JSON_FILE);
    o.shared.device = FMLA_DEVICE_CPU;
    int status = cli_take_options(argc, argv, table, usage, 1, take_option, &o);
    if (status != CLI_OK) {
        return status;
    }
    if (o.only_ids && optind + 1 == argc) {
        o.ids = argv[optind++]; /* "--ids C001" is "--ids=C001" */
    } else if (o.ids == NULL && o.operation < 0 && o.format == 0 && o.one == NULL) {
        o.ids = o.set == CASES_QUICK ? "quick" : "all";
    }
    if (optind < argc) {
        return cli_error("check: unexpected argument '%s'", argv[optind]);
    }
    if (o.may_skip && !usable(&o)) {
        printf("skipped: this machine cannot run %s\n", o.shared.device == FMLA_DEVICE_CUDA
                                                             ? "cuda" : fmla_isa_name((fmla_isa)o.shared.isa));
        return SKIPPED;
    }
    status = o.ids != NULL ? ids_valid(o.ids) : CLI_OK;
    if (status == CLI_OK && !o.only_ids) {
        status = make_list(&o, &list);
    }
    if (status == CLI_OK && !o.only_ids && list.count == 0 && o.shares == 1) {
        status = cli_error("check: no case matches");
    } else if (status == CLI_OK && o.list) {
        for (size_t i = 0; i < list.count; i++) {
            char text[512];
            case_print(&list.cases[i], text, sizeof text);
            printf("%s\n", text);
        }
        if (o.ids != NULL) {
            ids_print(o.ids);
        }
    } else if (status == CLI_OK) {
        status = run_checks(&o, &list);
    }
    cases_free(&list);
    return status;
}
