/* SPDX-License-Identifier: MIT */
/* main.c: finds the subcommand and runs it. */
#include "program.h"

#include <errno.h>
#include <locale.h>
#include <signal.h>
#include <string.h>

static const struct subcommand {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} subcommands[] = {
    {"info", cmd_info, "version, devices, instruction tiers, formats, supported combinations"},
    {"run", cmd_run, "run one operation on tensors of a .safetensors file, compare the result"},
    {"quantize", cmd_quantize, "write tokens into a KV cache of a format, with an error report"},
    {"dequantize", cmd_dequantize, "read tokens out of a KV cache"},
    {"convert", cmd_convert, "copy a KV cache from one format to another"},
    {"explain", cmd_explain, "the arithmetic of a model's cache and kernels: bytes, FLOPs, what binds"},
    {"plan", cmd_plan, "the split-KV schedule of a batch, as a table and as a picture"},
    {"check", cmd_check, "check every kernel against the float64 reference"},
    {"bench", cmd_bench, "time operations and relate them to this machine's own limits"},
    {"demo", cmd_demo, "decode from caches of every format: bytes, errors, time in one table"},
    {"accuracy", cmd_accuracy, "error of attention when keys and values are kept in each format"},
};

static void print_usage(FILE *stream)
{
    fputs("usage: flashmla <command> [options]\n\ncommands:\n", stream);
    for (size_t i = 0; i < sizeof subcommands / sizeof subcommands[0]; i++) {
        fprintf(stream, "  %-12s%s\n", subcommands[i].name, subcommands[i].summary);
    }
    fputs("\n`flashmla <command> --help` tells a command's options; `flashmla --version` the version.\n"
          "Exit status: 0 all well, 1 a comparison or check failed, 2 bad input.\n", stream);
}

static int run_subcommand(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : NULL;

    if (name == NULL) {
        return cli_error("no command; `flashmla help` lists them");
    }
    if (strcmp(name, "help") == 0 || strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0) {
        print_usage(stdout);
        return CLI_OK;
    }
    if (strcmp(name, "--version") == 0 || strcmp(name, "version") == 0) {
        printf("flashmla %s\n", FMLA_VERSION_STRING);
        return CLI_OK;
    }
    for (size_t i = 0; i < sizeof subcommands / sizeof subcommands[0]; i++) {
        if (strcmp(name, subcommands[i].name) == 0) {
            int status = subcommands[i].run(argc - 1, argv + 1);
            return status == CLI_DONE ? CLI_OK : status;
        }
    }
    return cli_error("unknown command '%s'; `flashmla help` lists them", name);
}

int main(int argc, char **argv)
{
    setlocale(LC_NUMERIC, "C");
    /* A file size limit then shows as a failed write, which is reported and cleaned up after. */
    signal(SIGXFSZ, SIG_IGN);

    int status = run_subcommand(argc, argv);
    cli_progress(NULL);
    if ((fflush(stdout) != 0 || ferror(stdout)) && status == CLI_OK) {
        status = cli_error("cannot write standard output: %s", strerror(errno));
    }
    return status;
}
