/* SPDX-License-Identifier: MIT */
/* quantize.c: `flashmla quantize`, `dequantize` and `convert`: the run operations with options of their own. */
#include "run/run.h"

#include <string.h>

enum {
    OPT_IN = CLI_OPTION_OWN,
    OPT_OUT,
    OPT_PREFIX,
    OPT_SETTING
};

/* Option names and the settings they stand for, in the order of OPT_SETTING. */
static const char *const settings[] = {"kv_format",         "to_format",    "page_size", "to_page_size",
                                       "page_stride_bytes", "to_page_stride_bytes", "num_pages", "quantizer",
                                       "out_dtype"};

static const struct option table[] = {
    CLI_LONG_OPTIONS,
    {"in", required_argument, NULL, OPT_IN},
    {"out", required_argument, NULL, OPT_OUT},
    {"prefix", required_argument, NULL, OPT_PREFIX},
    {"format", required_argument, NULL, OPT_SETTING},
    {"to", required_argument, NULL, OPT_SETTING + 1},
    {"page-size", required_argument, NULL, OPT_SETTING + 2},
    {"to-page-size", required_argument, NULL, OPT_SETTING + 3},
    {"page-stride", required_argument, NULL, OPT_SETTING + 4},
    {"to-page-stride", required_argument, NULL, OPT_SETTING + 5},
    {"num-pages", required_argument, NULL, OPT_SETTING + 6},
    {"quantizer", required_argument, NULL, OPT_SETTING + 7},
    {"dtype", required_argument, NULL, OPT_SETTING + 8},
    {NULL, 0, NULL, 0},
};

static const char usage[] =
    "--in FILE --out FILE --format NAME [options]\n"
    "\n"
    "  quantize    tensor `src` ([tokens, d], [tokens, heads, d] or [pages, P, heads, d]), optional `slots` -> `kv`\n"
    "  dequantize  tensor `kv` ([pages, P, 1, bytes] or [pages, page stride]), optional `slots` -> `dst`\n"
    "  convert     tensor `kv`, optional `src_slots` and `dst_slots` -> `kv` in the format --to\n"
    "\n"
    "A report says what the numbers lost. Formats: bf16 f16 v32 v4 v41 v41-page v41-fp4 v41-fp4-page.\n"
    "\n"
    "  --in FILE, --out FILE  .safetensors files\n"
    "  --prefix TEXT          before every tensor's name\n"
    "  --format NAME          format of the cache (convert: of the one that is read)\n"
    "  --to NAME              convert: format to write\n"
    "  --page-size P          tokens of a page; quantize: default 64\n"
    "  --page-stride BYTES    quantize: bytes from page to page; default no padding\n"
    "  --num-pages N          quantize: pages; default as many as the tokens need\n"
    "  --to-page-size P, --to-page-stride BYTES   convert: of the cache to write\n"
    "  --quantizer NAME       quantize: default, or v32-2025 (v32 as first published)\n"
    "  --dtype NAME           dequantize: bf16 (default), f16, f32\n" CLI_OPTIONS_HELP;

static int take_option(void *user, int option, const char *argument)
{
    run_command *command = user;

    switch (option) {
    case OPT_IN: command->c.path = argument; return CLI_OK;
    case OPT_OUT: command->request.out = argument; return CLI_OK;
    case OPT_PREFIX: command->c.prefix = argument; return CLI_OK;
    default: break;
    }
    if (option >= OPT_SETTING) {
        const char *key = settings[option - OPT_SETTING];
        return run_set(&command->c, key, strlen(key), argument);
    }
    return cli_option(&command->c.options, option, argument);
}

static int transcode(int argc, char **argv, const run_operation *operation)
{
    run_command command = {
        .c = {.operation = operation, .prefix = "", .ignore_unused = true, .options = CLI_OPTIONS_INIT},
        .request = {.report = run_transcode_report},
    };
    int status = cli_take_options(argc, argv, table, usage, 0, take_option, &command);
    if (status != CLI_OK) {
        return status;
    }
    if (command.c.path == NULL || command.request.out == NULL) {
        return cli_error("%s: --in FILE and --out FILE are needed", argv[0]);
    }
    return run_execute(&command.c, &command.request);
}

int cmd_quantize(int argc, char **argv)
{
    static const run_operation operation = {"quantize", run_quantize};

    return transcode(argc, argv, &operation);
}

int cmd_dequantize(int argc, char **argv)
{
    static const run_operation operation = {"dequantize", run_dequantize};

    return transcode(argc, argv, &operation);
}

int cmd_convert(int argc, char **argv)
{
    static const run_operation operation = {"convert", run_convert};

    return transcode(argc, argv, &operation);
}
