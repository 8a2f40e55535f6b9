/* SPDX-License-Identifier: MIT */
/* options.c: what every subcommand shares: errors, progress, option parsing, opening a context. */
#include "file/output_file.h"
#include "program.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static bool progress_shown;

void cli_progress(const char *format, ...)
{
    if (!isatty(STDERR_FILENO)) {
        return;
    }
    if (progress_shown) {
        fputs("\r\033[K", stderr);
        progress_shown = false;
    }
    if (format != NULL) {
        va_list arguments;
        va_start(arguments, format);
        vfprintf(stderr, format, arguments);
        va_end(arguments);
        progress_shown = true;
    }
    fflush(stderr);
}

int cli_error(const char *format, ...)
{
    char message[2048];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    for (char *c = message; *c != '\0'; c++) {
        if ((unsigned char)*c < 0x20 || *c == 0x7F) {
            *c = ' ';
        }
    }
    cli_progress(NULL);
    fflush(stdout);
    fprintf(stderr, "flashmla: %s\n", message);
    return CLI_ERROR;
}

int cli_status(const fmla_context *context, fmla_status status, const char *what)
{
    const char *detail = context == NULL ? "" : fmla_context_error(context);

    return cli_error("%s: %s", what, detail[0] == '\0' ? fmla_status_string(status) : detail);
}

int cli_print_json(cJSON *tree)
{
    char *text = tree == NULL ? NULL : cJSON_Print(tree);

    cJSON_Delete(tree);
    if (text == NULL) {
        return cli_error("not enough memory for the JSON");
    }
    puts(text);
    cJSON_free(text);
    return CLI_OK;
}

int cli_write_json(const char *path, cJSON *tree)
{
    char *text = cJSON_Print(tree), why[512] = "the JSON tree: no memory";
    cJSON_Delete(tree);
    int bad = text == NULL;
    if (!bad && strcmp(path, "-") == 0) {
        bad = puts(text) < 0;
        snprintf(why, sizeof why, "standard output: %s", strerror(errno));
    } else if (!bad) {
        output_file file;
        bad = output_begin(&file, path, why, sizeof why) != 0 ||
              output_put(&file, text, strlen(text), why, sizeof why) != 0 ||
              output_put(&file, "\n", 1, why, sizeof why) != 0 || output_commit(&file, why, sizeof why) != 0;
    }
    free(text);
    return bad ? cli_error("%s", why) : CLI_OK;
}

void cli_json_names_file(struct option *table, int option)
{
    for (; table->name != NULL; table++) {
        if (table->val == CLI_OPTION_JSON) {
            table->has_arg = required_argument;
            table->val = option;
        }
    }
}

void cli_json_number(cJSON *object, const char *name, double value)
{
    if (isnan(value)) {
        cJSON_AddStringToObject(object, name, "nan");
    } else if (isinf(value)) {
        cJSON_AddStringToObject(object, name, value > 0 ? "inf" : "-inf");
    } else {
        cJSON_AddNumberToObject(object, name, value);
    }
}

static int next_option(int argc, char **argv, const struct option *table)
{
    opterr = 0;
    int value = getopt_long(argc, argv, ":h", table, NULL);
    if (value == 'h') {
        return CLI_OPTION_HELP;
    }
    if (value == ':') {
        cli_error("%s: option '%s' needs a value", argv[0], argv[optind - 1]);
        return '?';
    }
    if (value == '?' && optopt > 0 && optopt < 256) {
        cli_error("%s: unknown option '-%c'; `flashmla %s --help` lists them", argv[0], optopt, argv[0]);
    } else if (value == '?') {
        cli_error("%s: unknown or ambiguous option '%s'; `flashmla %s --help` lists them", argv[0], argv[optind - 1],
                  argv[0]);
    }
    return value;
}

int cli_take_options(int argc, char **argv, const struct option *table, const char *usage, int words, cli_taker take,
                     void *user)
{
    for (int option; (option = next_option(argc, argv, table)) != -1;) {
        if (option == CLI_OPTION_HELP) {
            printf("usage: flashmla %s %s", argv[0], usage);
            return CLI_DONE;
        }
        if (take(user, option, optarg) != CLI_OK) {
            return CLI_ERROR;
        }
    }
    return optind + words < argc ? cli_error("%s: '%s' is not an option", argv[0], argv[optind + words]) : CLI_OK;
}

int cli_parse_int(const char *what, const char *text, int64_t low, int64_t high, int64_t *value)
{
    char *end = NULL;

    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (end == text || *end != '\0') {
        return cli_error("%s: '%s' is not a whole number", what, text);
    }
    if (errno == ERANGE || number < low || number > high) {
        return cli_error("%s: %s is outside %lld..%lld", what, text, (long long)low, (long long)high);
    }
    *value = number;
    return CLI_OK;
}

int cli_parse_double(const char *what, const char *text, double *value)
{
    char *end = NULL;
    double number = strtod(text, &end);

    if (end == text || *end != '\0' || isnan(number)) {
        return cli_error("%s: '%s' is not a number", what, text);
    }
    *value = number;
    return CLI_OK;
}

int32_t cli_isa_by_name(const char *name)
{
    for (int32_t isa = 0; isa < FMLA_ISA_COUNT; isa++) {
        if (strcasecmp(name, fmla_isa_name((fmla_isa)isa)) == 0) {
            return isa;
        }
    }
    return -1;
}

int32_t cli_dtype_by_name(const char *name)
{
    for (int32_t dtype = FMLA_BF16; dtype <= FMLA_F8_E8M0; dtype++) {
        if (strcasecmp(name, fmla_dtype_name((fmla_dtype)dtype)) == 0) {
            return dtype;
        }
    }
    return -1;
}

static int parse_backend(cli_options *options, const char *name)
{
    static const char *const names[] = {"auto", "cpu", "cuda", "oracle"}; /* in the order of fmla_device */

    for (int32_t device = 0; device < 4; device++) {
        if (strcmp(name, names[device]) == 0) {
            options->device = device;
            return CLI_OK;
        }
    }
    return cli_error("--backend: '%s' is none of auto, cpu, cuda, oracle", name);
}

/* In the order of cuda_kernels. */
static const char *const kernel_sets[] = {"best", "portable", "hopper", "unpaired", "leader", "turns"};

static int parse_kernels(cli_options *options, const char *name)
{
    for (int32_t set = 0; set < (int32_t)(sizeof kernel_sets / sizeof *kernel_sets); set++) {
        if (strcmp(name, kernel_sets[set]) == 0) {
            options->kernels = set;
            return CLI_OK;
        }
    }
    return cli_error("--kernels: '%s' is none of best, portable, hopper, unpaired, leader, turns", name);
}

static int parse_profile(cli_options *options, const char *text)
{
    int64_t number = 0;
    int result = cli_parse_int("--profile", text, 99, 227, &number);
    if (result == CLI_OK && number != 99 && number != 163 && number != 227) {
        result = cli_error("--profile: %s is none of 99, 163, 227", text);
    }
    options->profile = (int32_t)number;
    return result;
}

/* A name of --kernels, or a number of --profile for the portable ones. */
static int take_set(cli_options *options, const char *name)
{
    options->profile = 0;
    if (name[0] >= '0' && name[0] <= '9') {
        options->kernels = 0;
        return parse_profile(options, name) == CLI_OK ? parse_kernels(options, "portable") : CLI_ERROR;
    }
    return parse_kernels(options, name);
}

int cli_take_sets(const cli_options *shared, const char *list, cli_options *sets, int max, int *count)
{
    const char *name = list;
    *count = 0;
    do {
        char one[64];
        size_t length = name != NULL ? strcspn(name, ",") : 0;
        if (*count == max) {
            return cli_error("--sets: at most %d", max);
        }
        cli_options *set = &sets[(*count)++];
        *set = *shared;
        if (name != NULL) {
            snprintf(one, sizeof one, "%.*s", (int)length, name);
            name = name[length] == ',' ? name + length + 1 : NULL;
            if (take_set(set, one) != CLI_OK) {
                return CLI_ERROR;
            }
        }
    } while (name != NULL);
    return CLI_OK;
}

void cli_replay_options(const cli_options *options, char *text, size_t size)
{
    size_t used = 0;
    text[0] = 0;
    if (options->device == FMLA_DEVICE_CUDA) {
        used += (size_t)snprintf(text, size, " --backend cuda");
    }
    if (options->kernels != 0) {
        used += (size_t)snprintf(text + used, size - used, " --kernels %s", kernel_sets[options->kernels]);
    }
    if (options->profile != 0) {
        used += (size_t)snprintf(text + used, size - used, " --profile %d", (int)options->profile);
    }
    if (options->isa != FMLA_ISA_AUTO) {
        used += (size_t)snprintf(text + used, size - used, " --isa %s", fmla_isa_name((fmla_isa)options->isa));
    }
    if (options->threads != 0) {
        used += (size_t)snprintf(text + used, size - used, " --threads %d", (int)options->threads);
    }
    if (options->strict) {
        snprintf(text + used, size - used, " --strict");
    }
}

const char *cli_kernels_name(const cli_options *options)
{
    return kernel_sets[options->kernels];
}

int cli_option(void *user, int option, const char *argument)
{
    cli_options *options = user;
    int64_t number = 0;
    int result = CLI_OK;

    switch (option) {
    case CLI_OPTION_BACKEND:
        return parse_backend(options, argument);
    case CLI_OPTION_DEVICE_INDEX:
        result = cli_parse_int("--device-index", argument, 0, 1024, &number);
        options->device_index = (int32_t)number;
        return result;
    case CLI_OPTION_ISA:
        options->isa = cli_isa_by_name(argument);
        if (options->isa < 0) {
            return cli_error("--isa: '%s' is none of auto, scalar, avx2, avx512bf16, amx, neon", argument);
        }
        return CLI_OK;
    case CLI_OPTION_THREADS:
        result = cli_parse_int("--threads", argument, 0, 4096, &number);
        options->threads = (int32_t)number;
        return result;
    case CLI_OPTION_KERNELS:
        return parse_kernels(options, argument);
    case CLI_OPTION_PROFILE:
        return parse_profile(options, argument);
    case CLI_OPTION_STRICT:
        options->strict = 1;
        return CLI_OK;
    case CLI_OPTION_JSON:
        options->json = true;
        return CLI_OK;
    default:
        return CLI_ERROR; /* '?': next_option has said why */
    }
}

int cli_context_open(const cli_options *options, fmla_context **context)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;

    config.device = options->device;
    config.device_index = options->device_index;
    config.isa = options->isa;
    config.threads = options->threads;
    config.cuda_kernels = options->kernels;
    config.cuda_profile_kib = options->profile;
    config.strict = options->strict;
    fmla_status status = fmla_context_create(&config, context);
    if (status != FMLA_OK) {
        const char *detail = fmla_last_create_error();
        return cli_error("%s", detail[0] == '\0' ? fmla_status_string(status) : detail);
    }
    return CLI_OK;
}
