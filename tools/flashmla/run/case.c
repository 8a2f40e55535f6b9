/* SPDX-License-Identifier: MIT */
/* case.c: a case from file to file: settings, tensors to the device, results back. */
#include "run/run.h"

#include <stdlib.h>
#include <string.h>

int64_t run_elements(const fmla_tensor *tensor)
{
    int64_t n = tensor->rank == 0 ? 0 : 1;

    for (int32_t i = 0; i < tensor->rank; i++) {
        n *= tensor->shape[i];
    }
    return n;
}

int run_set(run_case *c, const char *key, size_t key_length, const char *value)
{
    run_setting *setting = &c->settings[c->setting_count];

    if (c->setting_count == RUN_MAX_SETTINGS || key_length >= sizeof setting->key || key_length == 0) {
        return cli_error("setting '%.*s': name too long, or too many settings", (int)key_length, key);
    }
    memcpy(setting->key, key, key_length);
    for (size_t i = 0; i < key_length; i++) {
        setting->key[i] = setting->key[i] == '-' ? '_' : setting->key[i];
    }
    setting->key[key_length] = '\0';
    setting->value = value;
    setting->used = false;
    for (int i = 0; i < c->setting_count; i++) {
        if (strcmp(c->settings[i].key, setting->key) == 0) {
            return cli_error("setting '%s' is given twice", setting->key);
        }
    }
    c->setting_count++;
    return CLI_OK;
}

int run_open(run_case *c)
{
    char error[1024];

    if (strlen(c->prefix) > RUN_NAME - 64) {
        return cli_error("the prefix '%.64s...' is too long", c->prefix);
    }
    if (st_read(&c->in, c->path, error, sizeof error) != 0) {
        return cli_error("%s", error);
    }
    c->tensor_used = calloc(c->in.count + 1, sizeof *c->tensor_used);
    if (c->tensor_used == NULL) {
        return cli_error("not enough memory");
    }
    if (cli_context_open(&c->options, &c->context) != CLI_OK) {
        return CLI_ERROR;
    }
    return cli_memory_open(c->context, c->options.device_index, &c->memory);
}

void run_close(run_case *c)
{
    for (int i = 0; i < c->output_count; i++) {
        free(c->outputs[i].host.data);
    }
    cli_memory_close(c->memory);
    fmla_context_destroy(c->context);
    free(c->tensor_used);
    st_free(&c->in);
}

static bool is_output(const run_case *c, const char *name)
{
    for (int i = 0; i < c->output_count; i++) {
        if (strcmp(c->outputs[i].name, name) == 0) {
            return true;
        }
    }
    return false;
}

int run_ready(run_case *c)
{
    size_t prefix_length = strlen(c->prefix);

    for (int i = 0; i < c->setting_count; i++) {
        if (!c->settings[i].used) {
            return cli_error("%s has no use for the setting '%s'", c->operation->name, c->settings[i].key);
        }
    }
    for (size_t i = 0; i < c->in.count && !c->ignore_unused; i++) {
        const char *name = c->in.entries[i].name;
        if (strncmp(name, c->prefix, prefix_length) != 0 || c->tensor_used[i]) {
            continue;
        }
        name += prefix_length;
        if (!is_output(c, name) && strcmp(name, "meta") != 0) {
            return cli_error("%s has no use for the tensor '%.128s' of %s (--ignore-unused runs all the same)",
                             c->operation->name, c->in.entries[i].name, c->path);
        }
    }
    return CLI_OK;
}

int run_called(run_case *c, fmla_status status)
{
    return status == FMLA_OK ? CLI_OK : cli_status(c->context, status, c->operation->name);
}

/* ---- settings -------------------------------------------------------------------------------------------- */

/* The full name of a tensor; run_open has seen to it that it fits. */
static void join(const run_case *c, const char *name, char *full)
{
    snprintf(full, RUN_NAME, "%s%s", c->prefix, name);
}

const fmla_tensor *run_peek(run_case *c, const char *name)
{
    char full[RUN_NAME];

    join(c, name, full);
    for (size_t i = 0; i < c->in.count; i++) {
        if (strcmp(c->in.entries[i].name, full) == 0) {
            c->tensor_used[i] = true;
            return &c->in.entries[i].tensor;
        }
    }
    return NULL;
}

static void scalar_text(const fmla_tensor *tensor, char *text, size_t size)
{
    int64_t integer = 0;
    int32_t narrow = 0;
    double real = 0;
    float single = 0;

    switch (tensor->dtype) {
    case FMLA_I32:
        memcpy(&narrow, tensor->data, sizeof narrow);
        snprintf(text, size, "%d", (int)narrow);
        break;
    case FMLA_I64:
        memcpy(&integer, tensor->data, sizeof integer);
        snprintf(text, size, "%lld", (long long)integer);
        break;
    case FMLA_U8:
        snprintf(text, size, "%d", *(const unsigned char *)tensor->data);
        break;
    case FMLA_F32:
        memcpy(&single, tensor->data, sizeof single);
        snprintf(text, size, "%.9g", (double)single);
        break;
    case FMLA_F64:
        memcpy(&real, tensor->data, sizeof real);
        snprintf(text, size, "%.17g", real);
        break;
    default:
        snprintf(text, size, "a %s tensor", fmla_dtype_name((fmla_dtype)tensor->dtype));
        break;
    }
}

/* The setting's text, or NULL if nobody gave it. `text` is used when it comes from a tensor. */
static const char *find_setting(run_case *c, const char *key, char *text, size_t size)
{
    char full[RUN_NAME];
    const fmla_tensor *tensor = run_peek(c, key); /* known to the operation even where the command line wins */

    for (int i = 0; i < c->setting_count; i++) {
        if (strcmp(c->settings[i].key, key) == 0) {
            c->settings[i].used = true;
            return c->settings[i].value;
        }
    }
    if (tensor != NULL && run_elements(tensor) == 1) {
        scalar_text(tensor, text, size);
        return text;
    }
    join(c, key, full);
    const char *value = st_meta(&c->in, full);
    return value != NULL ? value : st_meta(&c->in, key);
}

bool run_has(run_case *c, const char *key)
{
    char text[64];

    return find_setting(c, key, text, sizeof text) != NULL;
}

int run_integer(run_case *c, const char *key, int64_t low, int64_t high, int64_t *value)
{
    char text[64];
    const char *found = find_setting(c, key, text, sizeof text);

    return found == NULL ? CLI_OK : cli_parse_int(key, found, low, high, value);
}

int run_flag(run_case *c, const char *key, int32_t *value)
{
    static const char *const names[] = {"0", "1", "false", "true", NULL};
    int32_t place = *value;
    int result = run_choice(c, key, names, &place);

    *value = place % 2;
    return result;
}

int run_number(run_case *c, const char *key, float *value)
{
    char text[64];
    double number = *value;
    const char *found = find_setting(c, key, text, sizeof text);

    if (found != NULL && cli_parse_double(key, found, &number) != CLI_OK) {
        return CLI_ERROR;
    }
    *value = (float)number;
    return CLI_OK;
}

int run_choice(run_case *c, const char *key, const char *const *names, int32_t *value)
{
    char text[64];
    char known[256] = "";
    const char *found = find_setting(c, key, text, sizeof text);

    if (found == NULL) {
        return CLI_OK;
    }
    for (int32_t i = 0; names[i] != NULL; i++) {
        if (strcmp(found, names[i]) == 0) {
            *value = i;
            return CLI_OK;
        }
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i > 0 ? ", " : "", names[i]);
    }
    return cli_error("%s: '%s' is none of %s", key, found, known);
}

int run_dtype(run_case *c, const char *key, int32_t *value)
{
    char text[64];
    const char *found = find_setting(c, key, text, sizeof text);

    if (found == NULL) {
        return CLI_OK;
    }
    *value = cli_dtype_by_name(found);
    return *value > 0 ? CLI_OK : cli_error("%s: '%s' is no dtype; bf16, f16, f32 and f64 are", key, found);
}

int run_format(run_case *c, const char *key, int32_t *value)
{
    char text[64];
    char known[256] = "";
    const char *found = find_setting(c, key, text, sizeof text);

    if (found == NULL) {
        return CLI_OK;
    }
    *value = (int32_t)fmla_format_by_name(found);
    if (*value != FMLA_KV_NONE) {
        return CLI_OK;
    }
    for (int format = FMLA_KV_NONE + 1; format < FMLA_KV_COUNT; format++) {
        fmla_format_info info = FMLA_FORMAT_INFO_INIT;
        size_t used = strlen(known);
        fmla_format_get((fmla_kv_format)format, &info);
        snprintf(known + used, sizeof known - used, "%s%s", used > 0 ? ", " : "", info.name);
    }
    return cli_error("%s: '%s' is none of %s", key, found, known);
}

/* ---- inputs ---------------------------------------------------------------------------------------------- */

static int missing(const run_case *c, const char *name)
{
    return cli_error("%s needs the tensor '%s%s', which %s lacks", c->operation->name, c->prefix, name, c->path);
}

static int upload(run_case *c, const char *name, const fmla_tensor *source, fmla_tensor *tensor)
{
    size_t size = (size_t)run_elements(source) * fmla_dtype_size((fmla_dtype)source->dtype);

    *tensor = *source;
    if (source->dtype == FMLA_DTYPE_NONE) {
        return cli_error("tensor '%s%s' has a dtype that no operation takes", c->prefix, name);
    }
    if (cli_memory_is_host(c->memory)) {
        return CLI_OK; /* calls read inputs where the file is mapped */
    }
    tensor->data = cli_memory_new(c->memory, size);
    return tensor->data == NULL ? CLI_ERROR : cli_memory_upload(c->memory, tensor->data, source->data, size);
}

int run_input(run_case *c, const char *name, bool required, fmla_tensor *tensor)
{
    const fmla_tensor *source = run_peek(c, name);

    memset(tensor, 0, sizeof *tensor);
    if (source == NULL) {
        return required ? missing(c, name) : CLI_OK;
    }
    return upload(c, name, source, tensor);
}

const char *run_first_name(const run_case *c, const char *const *names)
{
    char full[RUN_NAME];

    for (; *names != NULL; names++) {
        join(c, *names, full);
        if (st_find(&c->in, full) != NULL) {
            return *names;
        }
    }
    return NULL;
}

/* Strides of [rows, words] or [groups, rows, words] with rows next to each other, padded to a multiple of 4. */
static int64_t column_strides(fmla_tensor *tensor)
{
    int64_t rows = tensor->shape[tensor->rank - 2];
    int64_t words = tensor->shape[tensor->rank - 1];
    int64_t padded = (rows + 3) / 4 * 4;

    tensor->stride[tensor->rank - 2] = 1;
    tensor->stride[tensor->rank - 1] = padded;
    if (tensor->rank == 3) {
        tensor->stride[0] = words * padded;
    }
    return (tensor->rank == 3 ? tensor->shape[0] : 1) * words * padded;
}

/* Copies rank 2 or 3 I32 elements between two layouts of one shape, on the host. */
static void copy_words(const fmla_tensor *to, const fmla_tensor *from)
{
    bool deep = from->rank == 3;
    int64_t rows = from->shape[from->rank - 2];
    int64_t words = from->shape[from->rank - 1];

    for (int64_t g = 0; g < (deep ? from->shape[0] : 1); g++) {
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t w = 0; w < words; w++) {
                int64_t at = g * from->stride[0] * deep + r * from->stride[from->rank - 2] +
                             w * from->stride[from->rank - 1];
                int64_t put = g * to->stride[0] * deep + r * to->stride[to->rank - 2] +
                              w * to->stride[to->rank - 1];
                ((int32_t *)to->data)[put] = ((const int32_t *)from->data)[at];
            }
        }
    }
}

int run_input_columns(run_case *c, const char *name, fmla_tensor *tensor)
{
    const fmla_tensor *source = run_peek(c, name);

    if (source == NULL) {
        return missing(c, name);
    }
    if (source->dtype != FMLA_I32 || source->rank < 2 || source->rank > 3) {
        return cli_error("tensor '%s%s' must be i32 of rank 2 or 3", c->prefix, name);
    }
    fmla_tensor columns = *source;
    size_t size = (size_t)column_strides(&columns) * sizeof(int32_t);
    columns.data = calloc(size + 1, 1);
    *tensor = columns;
    tensor->data = cli_memory_new(c->memory, size);
    int result = CLI_ERROR;
    if (columns.data != NULL && tensor->data != NULL) {
        copy_words(&columns, source);
        result = cli_memory_upload(c->memory, tensor->data, columns.data, size);
    }
    free(columns.data);
    return result;
}

/* ---- outputs --------------------------------------------------------------------------------------------- */

static int add_output(run_case *c, const char *name, size_t elements, fmla_tensor *tensor)
{
    size_t size = elements * fmla_dtype_size((fmla_dtype)tensor->dtype);
    void *zeros = calloc(size + 1, 1);

    tensor->data = cli_memory_new(c->memory, size);
    int result = tensor->data == NULL || zeros == NULL ? CLI_ERROR
                                                       : cli_memory_upload(c->memory, tensor->data, zeros, size);
    free(zeros);
    if (result == CLI_OK) {
        c->outputs[c->output_count++] = (run_output){.name = name, .device = *tensor};
    }
    return result;
}

int run_output_new(run_case *c, const char *name, int32_t dtype, int32_t rank, const int64_t *shape,
                   fmla_tensor *tensor)
{
    size_t elements = 1;

    for (int32_t i = 0; i < rank; i++) {
        if (shape[i] < 0 || __builtin_mul_overflow(elements, (size_t)shape[i], &elements) ||
            elements > SIZE_MAX / 16) {
            return cli_error("%s: the output '%s' would not fit memory", c->operation->name, name);
        }
    }
    *tensor = fmla_tensor_nd(NULL, (fmla_dtype)dtype, rank, shape);
    return add_output(c, name, elements, tensor);
}

int run_output_columns(run_case *c, const char *name, int32_t rank, const int64_t *shape, fmla_tensor *tensor)
{
    *tensor = fmla_tensor_nd(NULL, FMLA_I32, rank, shape);
    return add_output(c, name, (size_t)column_strides(tensor), tensor);
}

int run_fetch(run_case *c)
{
    for (int i = 0; i < c->output_count; i++) {
        run_output *output = &c->outputs[i];
        const fmla_tensor *device = &output->device;
        fmla_tensor strided = *device;
        bool columns = device->rank > 1 && device->stride[device->rank - 1] != 1;
        size_t width = fmla_dtype_size((fmla_dtype)device->dtype);
        size_t packed = (size_t)run_elements(device) * width;
        size_t size = columns ? (size_t)column_strides(&strided) * width : packed;

        output->host = fmla_tensor_nd(malloc(packed + 1), (fmla_dtype)device->dtype, device->rank, device->shape);
        strided.data = columns ? malloc(size + 1) : output->host.data;
        int result = CLI_ERROR;
        if (output->host.data == NULL || strided.data == NULL) {
            cli_error("not enough memory");
        } else {
            result = cli_memory_download(c->memory, strided.data, device->data, size);
        }
        if (columns && result == CLI_OK) {
            copy_words(&output->host, &strided);
        }
        if (columns) {
            free(strided.data);
        }
        if (result != CLI_OK) {
            return result;
        }
    }
    return CLI_OK;
}
