/* SPDX-License-Identifier: MIT */
/* run.c: `flashmla run`: an operation on the tensors of a file, and the comparison with another file's. */
#include "run/run.h"

#include <string.h>

const run_operation run_operations[] = {
    {"dense_decode", run_dense_decode},
    {"sparse_decode", run_sparse_decode},
    {"sparse_prefill", run_sparse_prefill},
    {"fused_prefill", run_fused_prefill},
    {"fused_decode", run_fused_decode},
    {"mha_forward", run_mha_forward},
    {"mha_backward", run_mha_backward},
    {"quantize", run_quantize},
    {"dequantize", run_dequantize},
    {"convert", run_convert},
    {"merge", run_merge},
    {"permute_q_b", run_permute_q_b},
    {"permute_wv", run_permute_wv},
    {"indices_convert", run_indices_convert},
    {"fp8_cast", run_fp8_cast},
    {"schedule", run_schedule},
};
const int run_operation_count = (int)(sizeof run_operations / sizeof run_operations[0]);

static const char usage[] =
    "<operation> --in FILE [--out FILE] [--compare FILE] [options]\n"
    "\n"
    "Runs an operation on the tensors of a .safetensors file. docs/run.md names the tensors and settings of each:\n"
    "  dense_decode sparse_decode sparse_prefill fused_prefill fused_decode mha_forward mha_backward\n"
    "  quantize dequantize convert merge permute_q_b permute_wv indices_convert fp8_cast schedule\n"
    "\n"
    "  --in FILE              inputs\n"
    "  --prefix TEXT          before every tensor's name, so that one file can hold many cases\n"
    "  --out FILE             where the results go\n"
    "  --compare FILE         compare the results with the tensors of the same names in FILE\n"
    "  --compare-prefix TEXT  before the names there; default that of --prefix\n"
    "  --abs X --rel X --cos X  tolerances; default the published ones of the operation\n"
    "  --kv-format NAME       format of the cache: bf16 f16 v32 v4 v41 v41-page\n"
    "  --extra-kv-format NAME format of the extra cache; default that of the cache\n"
    "  --softmax-scale X      default d_qk ^ -0.5\n"
    "  --causal               0 or 1\n"
    "  --empty-lse pos|neg    sign of the infinite lse of rows with nothing to attend; default neg\n"
    "  --set KEY=VALUE        any other setting of the operation\n"
    "  --ignore-unused        tensors that the operation does not know are no error\n" CLI_OPTIONS_HELP;

/* Fetches, compares and saves after the operation has run. */
static int finish(run_case *c, const run_request *request, cJSON *tree)
{
    int compared = CLI_OK;

    if (run_fetch(c) != CLI_OK) {
        return CLI_ERROR;
    }
    if (strncmp(c->operation->name, "fused", 5) == 0) {
        run_fused_unpack(c);
    }
    if (tree != NULL) {
        run_describe(c, tree);
    } else {
        run_print_outputs(c);
    }
    if (request->report != NULL && request->report(c, tree) != CLI_OK) {
        return CLI_ERROR;
    }
    if (request->compare != NULL) {
        const char *prefix = request->compare_prefix == NULL ? c->prefix : request->compare_prefix;
        compared = run_compare(c, request->compare, prefix, &request->tolerance, tree);
    }
    if (compared != CLI_ERROR && request->out != NULL && run_save(c, request->out) != CLI_OK) {
        return CLI_ERROR;
    }
    return compared;
}

int run_execute(run_case *c, const run_request *request)
{
    cJSON *tree = c->options.json ? cJSON_CreateObject() : NULL;
    int result = run_open(c);

    if (result == CLI_OK) {
        result = c->operation->call(c);
    }
    if (result == CLI_OK) {
        result = finish(c, request, tree);
    }
    run_close(c);
    if (tree != NULL && result != CLI_ERROR) {
        int printed = cli_print_json(tree);
        return printed == CLI_OK ? result : printed;
    }
    cJSON_Delete(tree);
    return result;
}

enum {
    OPT_IN = CLI_OPTION_OWN,
    OPT_OUT,
    OPT_PREFIX,
    OPT_COMPARE,
    OPT_COMPARE_PREFIX,
    OPT_ABS,
    OPT_REL,
    OPT_COS,
    OPT_SET,
    OPT_IGNORE_UNUSED,
    OPT_SETTING /* options that are settings of their own name */
};

static const struct option table[] = {
    CLI_LONG_OPTIONS,
    {"in", required_argument, NULL, OPT_IN},
    {"out", required_argument, NULL, OPT_OUT},
    {"prefix", required_argument, NULL, OPT_PREFIX},
    {"compare", required_argument, NULL, OPT_COMPARE},
    {"compare-prefix", required_argument, NULL, OPT_COMPARE_PREFIX},
    {"abs", required_argument, NULL, OPT_ABS},
    {"rel", required_argument, NULL, OPT_REL},
    {"cos", required_argument, NULL, OPT_COS},
    {"set", required_argument, NULL, OPT_SET},
    {"ignore-unused", no_argument, NULL, OPT_IGNORE_UNUSED},
    {"kv-format", required_argument, NULL, OPT_SETTING},
    {"extra-kv-format", required_argument, NULL, OPT_SETTING + 1},
    {"softmax-scale", required_argument, NULL, OPT_SETTING + 2},
    {"causal", required_argument, NULL, OPT_SETTING + 3},
    {"empty-lse", required_argument, NULL, OPT_SETTING + 4},
    {"page-size", required_argument, NULL, OPT_SETTING + 5},
    {"extra-page-size", required_argument, NULL, OPT_SETTING + 6},
    {"d-v", required_argument, NULL, OPT_SETTING + 7},
    {"out-dtype", required_argument, NULL, OPT_SETTING + 8},
    {NULL, 0, NULL, 0},
};

static int parse_tolerance(const char *what, const char *text, double *value)
{
    if (cli_parse_double(what, text, value) != CLI_OK) {
        return CLI_ERROR;
    }
    return *value >= 0 ? CLI_OK : cli_error("%s: %s is negative", what, text);
}

static int set_pair(run_case *c, const char *pair)
{
    const char *equals = strchr(pair, '=');

    if (equals == NULL) {
        return cli_error("--set: '%s' is not KEY=VALUE", pair);
    }
    return run_set(c, pair, (size_t)(equals - pair), equals + 1);
}

static const char *setting_name(int value)
{
    for (const struct option *o = table; o->name != NULL; o++) {
        if (o->val == value) {
            return o->name;
        }
    }
    return "";
}

static int take_option(void *user, int option, const char *argument)
{
    run_command *command = user;
    run_case *c = &command->c;
    run_request *request = &command->request;

    switch (option) {
    case OPT_IN: c->path = argument; return CLI_OK;
    case OPT_OUT: request->out = argument; return CLI_OK;
    case OPT_PREFIX: c->prefix = argument; return CLI_OK;
    case OPT_COMPARE: request->compare = argument; return CLI_OK;
    case OPT_COMPARE_PREFIX: request->compare_prefix = argument; return CLI_OK;
    case OPT_ABS: return parse_tolerance("--abs", argument, &request->tolerance.abs);
    case OPT_REL: return parse_tolerance("--rel", argument, &request->tolerance.rel);
    case OPT_COS: return parse_tolerance("--cos", argument, &request->tolerance.cos_diff);
    case OPT_SET: return set_pair(c, argument);
    case OPT_IGNORE_UNUSED: c->ignore_unused = true; return CLI_OK;
    default: break;
    }
    if (option >= OPT_SETTING) {
        return run_set(c, setting_name(option), strlen(setting_name(option)), argument);
    }
    return cli_option(&c->options, option, argument);
}

static const run_operation *find_operation(const char *name)
{
    for (int i = 0; i < run_operation_count; i++) {
        if (strcmp(name, run_operations[i].name) == 0) {
            return &run_operations[i];
        }
    }
    return NULL;
}

int cmd_run(int argc, char **argv)
{
    run_command command = {.c = {.prefix = "", .options = CLI_OPTIONS_INIT},
                           .request = {.tolerance = RUN_TOLERANCE_PUBLISHED}};
    int status = cli_take_options(argc, argv, table, usage, argc, take_option, &command);
    if (status != CLI_OK) {
        return status;
    }
    if (optind + 1 != argc) {
        return cli_error("run: %s; `flashmla run --help` lists the operations",
                         optind == argc ? "no operation" : "more than one operation");
    }
    command.c.operation = find_operation(argv[optind]);
    if (command.c.operation == NULL) {
        return cli_error("run: unknown operation '%s'; `flashmla run --help` lists them", argv[optind]);
    }
    if (command.c.path == NULL) {
        return cli_error("run: --in FILE is missing");
    }
    return run_execute(&command.c, &command.request);
}
