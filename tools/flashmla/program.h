/* SPDX-License-Identifier: MIT */
/*
 * program.h: what the subcommands of `flashmla` share: the table of subcommands, the options that every one
 * of them takes, how they report errors and progress, and memory on the device that a context runs on.
 *
 * Exit status: 0 all well, 1 a comparison or check failed, 2 bad input or a machine that cannot do it. Errors
 * are one line on standard error that begins with "flashmla: ". Results go to standard output, progress to a
 * terminal only.
 */
#ifndef FLASHMLA_TOOL_PROGRAM_H
#define FLASHMLA_TOOL_PROGRAM_H

#include <cJSON.h>
#include <flashmla/flashmla.h>
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>

enum { CLI_OK = 0, CLI_FAILED = 1, CLI_ERROR = 2, CLI_DONE = 3 /* within the program: nothing is left to do */ };

/* ---- subcommands: argv[0] is the subcommand's name; the result is the exit status ------------------- */

int cmd_info(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_quantize(int argc, char **argv);
int cmd_dequantize(int argc, char **argv);
int cmd_convert(int argc, char **argv);
int cmd_explain(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_demo(int argc, char **argv);
int cmd_accuracy(int argc, char **argv);

/* ---- errors and progress ---------------------------------------------------------------------------- */

/* Prints "flashmla: <message>" and returns CLI_ERROR. Line breaks in the message become spaces. */
int cli_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same for a failed library call: "<what>: <the context's error or the status's name>". context may be NULL. */
int cli_status(const fmla_context *context, fmla_status status, const char *what);

/* Replaces the progress line; nothing happens unless standard error is a terminal. NULL clears the line. */
void cli_progress(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints the tree and a line break to standard output and deletes it. Returns CLI_OK or CLI_ERROR. */
int cli_print_json(cJSON *tree);

/* The same into a file; "-" is standard output. */
int cli_write_json(const char *path, cJSON *tree);

/* For commands whose --json names a file: gives the shared option an argument and the number `option`. */
void cli_json_names_file(struct option *table, int option);

/* Adds a number; NaN and infinities, which JSON lacks, become the strings "nan", "inf" and "-inf". */
void cli_json_number(cJSON *object, const char *name, double value);

/* ---- options ---------------------------------------------------------------------------------------- */

/* What CLI_LONG_OPTIONS set. Start from CLI_OPTIONS_INIT. */
typedef struct cli_options {
    int32_t device;       /* --backend auto|cpu|cuda|oracle, fmla_device */
    int32_t device_index; /* --device-index N */
    int32_t isa;          /* --isa NAME, fmla_isa */
    int32_t threads;      /* --threads N; 0: one per processor */
    int32_t kernels;      /* --kernels NAME, cuda_kernels of the configuration */
    int32_t profile;      /* --profile N, cuda_profile_kib */
    int32_t strict;       /* --strict, of the configuration */
    bool json;            /* --json */
} cli_options;

#define CLI_OPTIONS_INIT {.device = FMLA_DEVICE_AUTO}

/* Values of the shared long options; a subcommand's own begin at CLI_OPTION_OWN. */
enum {
    CLI_OPTION_BACKEND = 1000,
    CLI_OPTION_DEVICE_INDEX,
    CLI_OPTION_ISA,
    CLI_OPTION_THREADS,
    CLI_OPTION_KERNELS,
    CLI_OPTION_PROFILE,
    CLI_OPTION_STRICT,
    CLI_OPTION_JSON,
    CLI_OPTION_HELP,
    CLI_OPTION_OWN = 2000
};

/* First entries of a subcommand's struct option table. */
#define CLI_LONG_OPTIONS \
    {"backend", required_argument, NULL, CLI_OPTION_BACKEND}, \
    {"device-index", required_argument, NULL, CLI_OPTION_DEVICE_INDEX}, \
    {"isa", required_argument, NULL, CLI_OPTION_ISA}, \
    {"threads", required_argument, NULL, CLI_OPTION_THREADS}, \
    {"kernels", required_argument, NULL, CLI_OPTION_KERNELS}, \
    {"profile", required_argument, NULL, CLI_OPTION_PROFILE}, \
    {"strict", no_argument, NULL, CLI_OPTION_STRICT}, \
    {"json", no_argument, NULL, CLI_OPTION_JSON}, \
    {"help", no_argument, NULL, CLI_OPTION_HELP}

#define CLI_CUDA_HELP \
    "  --kernels NAME      CUDA kernels: best (default), portable, hopper; for comparisons unpaired (Hopper's, no\n" \
    "                      pairs of blocks), leader, turns (16-bit tokens in one of the two orders only)\n" \
    "  --profile N         shared memory of a block that CUDA kernels may use: 99, 163 or 227 KiB; default all\n" \
    "  --strict            a strict context: softmax weights in fp32 on the CPU, no change on CUDA\n"

#define CLI_OPTIONS_HELP \
    "  --backend NAME      auto, cpu, cuda or oracle (float64 reference); default auto\n" \
    "  --device-index N    which CUDA device; default 0\n" \
    "  --isa NAME          CPU tier: scalar, avx2, avx512bf16, amx, neon; default the best\n" \
    "  --threads N         CPU threads; default one per processor\n" CLI_CUDA_HELP \
    "  --json              print JSON\n" \
    "  --help              this text\n"

/* Takes an option of a command. CLI_OK, or CLI_ERROR with the message printed. */
typedef int (*cli_taker)(void *user, int option, const char *argument);

/*
 * Hands a command's options to `take`, all but --help, which prints "usage: flashmla", the command's name and `usage`,
 * and gives CLI_DONE. Up to `words` arguments may be left; they begin at argv[optind]. Not CLI_OK: the command returns
 * what it got (CLI_ERROR: message printed).
 */
int cli_take_options(int argc, char **argv, const struct option *table, const char *usage, int words, cli_taker take,
                     void *user);

/* Takes a shared option; as cli_taker with cli_options for its user. */
int cli_option(void *options, int option, const char *argument);

/* The choices of kernels that a list of --sets names, each a name of --kernels or a number of --profile for the
 * portable ones; NULL: the one of --kernels and --profile. CLI_OK, or CLI_ERROR with the message printed. */
int cli_take_sets(const cli_options *shared, const char *list, cli_options *sets, int max, int *count);

/* The options that repeat a choice of backend and kernels, each with a blank before it; 128 characters suffice. */
void cli_replay_options(const cli_options *options, char *text, size_t size);
/* best, portable, hopper, unpaired, leader or turns. */
const char *cli_kernels_name(const cli_options *options);

/* Opens a context as the options say. CLI_OK, or CLI_ERROR with the message printed. */
int cli_context_open(const cli_options *options, fmla_context **context);

/* Numbers from text, all of it, within [low, high]; `what` names it in the message. CLI_OK or CLI_ERROR. */
int cli_parse_int(const char *what, const char *text, int64_t low, int64_t high, int64_t *value);
int cli_parse_double(const char *what, const char *text, double *value);

/* Names to values; -1 if unknown. Spelled as the library spells them, in any case. */
int32_t cli_isa_by_name(const char *name);
int32_t cli_dtype_by_name(const char *name);

/* ---- memory of the context's device ----------------------------------------------------------------- */

/*
 * Where the tensors of calls live. On the CPU and the oracle it is host memory, 64-byte aligned; on CUDA it
 * is device memory, had through the driver (libcuda.so.1), which is looked up at run time. All blocks go with
 * the memory.
 */
typedef struct cli_memory cli_memory;

/* CLI_OK, or CLI_ERROR with the message printed. */
int cli_memory_open(const fmla_context *context, int32_t device_index, cli_memory **memory);
void cli_memory_close(cli_memory *memory);
/* Whether memories that are opened from now on, on a device, cut their blocks from chunks that stay with the process
 * (without a guard's room between them, so not under a tool that looks for accesses out of bounds). forget: the chunks
 * so far go back to the device when the next memory is opened. */
void cli_memory_pool(bool on, bool forget);
/* NULL with the message printed when there is not enough. size 0 gives a valid block. */
void *cli_memory_new(cli_memory *memory, size_t size);
/* Copies and fills wait for earlier work of the default stream. CLI_OK or CLI_ERROR (message printed). */
int cli_memory_upload(cli_memory *memory, void *block, const void *source, size_t size);
int cli_memory_fill(cli_memory *memory, void *block, uint8_t byte, size_t size);
int cli_memory_download(cli_memory *memory, void *target, const void *block, size_t size);
/* Numbers that tell whether `size` bytes, rounded down to 8, of device memory at a multiple of 8 have changed: each
 * call of cli_memory_hash has the device compute one, into a slot that was not used before, and does not wait. CLI_OK,
 * CLI_ERROR (printed), or CLI_DONE: host memory, no such slot, or the driver cannot compute it. cli_memory_hashes waits
 * and gets them all, once there was one. */
#define CLI_HASHES 256
int cli_memory_hash(cli_memory *memory, const void *block, size_t size, int slot);
int cli_memory_hashes(cli_memory *memory, uint64_t hashes[CLI_HASHES]);
/* Waits for all work of the default stream, as a timer needs it. */
int cli_memory_synchronize(cli_memory *memory);
bool cli_memory_is_host(const cli_memory *memory);

#endif
