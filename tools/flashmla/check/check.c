/* SPDX-License-Identifier: MIT */
/* check.c: `flashmla check`: what is asked for, and the list of cases. */
#include "check/ids.h"
#include "check/session.h"

#include <string.h>

#define SKIPPED 77 /* what CTest understands as "not here" */

enum {
    OPTION_OPERATION = CLI_OPTION_OWN,
    OPTION_FORMAT,
    OPTION_SEED,
    OPTION_SHARE,
    OPTION_SETS,
    OPTION_JOBS,
    OPTION_MEMORY,
    OPTION_SKIP,
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
    "  --operation LIST    only these operations (dense_decode, sparse_decode, sparse_prefill, ...)\n"
    "  --format NAME       only cases with this KV format as main or extra cache\n"
    "  --cases SET         quick (default), all, or full (for a GPU)\n"
    "  --share K/N         the K-th of N parts (K of 1 to N) into which the cases are dealt, all as long\n"
    "  --sets LIST         cuda: several sets of kernels on each case, as in portable,hopper,99,163 (the last two\n"
    "                      are profiles of the portable ones); the case and its reference are made once\n"
    "  --jobs N            so many processes share the cases, the dearest first\n"
    "  --memory N          GiB that the cases of all processes may hold at one time, here and on the device; default\n"
    "                      three quarters of this machine's\n"
    "  --skip N            with --jobs, all but the N dearest cases: a run that was stopped goes on\n"
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

static int take_operations(check_options *o, const char *names)
{
    char copy[512], *rest = copy;
    snprintf(copy, sizeof copy, "%s", names);
    for (o->operation_count = 0; rest != NULL && o->operation_count < FMLA_OP_COUNT;) {
        const char *name = strsep(&rest, ",");
        int operation = operation_by_name(name);
        if (operation < 0) {
            return cli_error("--operation: no operation '%s'", name);
        }
        o->operations[o->operation_count++] = operation;
    }
    return CLI_OK;
}

static int take_option(void *user, int option, const char *argument)
{
    check_options *o = user;
    static const char *const sets[] = {"quick", "all", "full"};
    switch (option) {
    case OPTION_OPERATION:
        return take_operations(o, argument);
    case OPTION_FORMAT:
        o->format = fmla_format_by_name(argument);
        return o->format == FMLA_KV_NONE ? cli_error("--format: no format '%s'", argument) : CLI_OK;
    case OPTION_SEED:
        return cli_parse_int("--seed", argument, 0, INT64_MAX / 2, &o->seed);
    case OPTION_SHARE:
        return parse_share(o, argument);
    case OPTION_SETS:
        o->sets = argument;
        return CLI_OK;
    case OPTION_JOBS:
        return cli_parse_int("--jobs", argument, 1, JOBS_MAX, &o->jobs);
    case OPTION_MEMORY:
        return cli_parse_int("--memory", argument, 1, 1 << 20, &o->memory);
    case OPTION_SKIP:
        return cli_parse_int("--skip", argument, 0, INT32_MAX, &o->skip);
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
    for (int i = 0; i < o->operation_count; i++) {
        cases_make(list, o->set, o->operations[i], (uint64_t)o->seed);
    }
    if (o->operation_count == 0) {
        cases_make(list, o->set, -1, (uint64_t)o->seed);
    }
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
        {"sets", required_argument, NULL, OPTION_SETS},
        {"jobs", required_argument, NULL, OPTION_JOBS},
        {"memory", required_argument, NULL, OPTION_MEMORY},
        {"skip", required_argument, NULL, OPTION_SKIP},
        {"cases", required_argument, NULL, OPTION_CASES},
        {"case", required_argument, NULL, OPTION_CASE},
        {"ids", optional_argument, NULL, OPTION_IDS},
        {"list", no_argument, NULL, OPTION_LIST},
        {"may-skip", no_argument, NULL, OPTION_MAY_SKIP},
        {NULL, 0, NULL, 0},
    };
    check_options o = {.shared = CLI_OPTIONS_INIT, .seed = 1, .share = 1, .shares = 1, .jobs = 1};
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
    } else if (o.ids == NULL && o.operation_count == 0 && o.format == 0 && o.one == NULL) {
        o.ids = o.set == CASES_QUICK ? "quick" : "all";
    }
    if (optind < argc) {
        return cli_error("check: unexpected argument '%s'", argv[optind]);
    }
    if (o.skip > 0 && o.jobs == 1) {
        return cli_error("--skip: with --jobs");
    }
    if (o.may_skip && o.jobs > 1) { /* a process that has opened a device cannot give it to others */
        return cli_error("--may-skip: without --jobs");
    }
    if (o.may_skip && !usable(&o)) {
        printf("skipped: this machine cannot run %s\n",
               o.shared.device == FMLA_DEVICE_CUDA ? "cuda" : fmla_isa_name((fmla_isa)o.shared.isa));
        return SKIPPED;
    }
    if (o.sets != NULL && o.shared.device != FMLA_DEVICE_CUDA) {
        return cli_error("--sets: for --backend cuda");
    }
    status = cli_take_sets(&o.shared, o.sets, o.choices, CHECK_CHOICES, &o.choice_count);
    status = status == CLI_OK && o.ids != NULL ? ids_valid(o.ids) : status;
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
