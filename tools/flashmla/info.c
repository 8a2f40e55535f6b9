/* SPDX-License-Identifier: MIT */
/* info.c: `flashmla info`: what this library is, what this machine offers, and which combinations are accepted. */
#include "program.h"

#include <string.h>

static const char usage[] =
    "[options]\n"
    "\n"
    "Prints the version, the devices, the CPU's instruction tiers, the KV-cache formats, and for every operation the\n"
    "formats and dimensions that the library accepts on the chosen backend.\n"
    "\n" CLI_OPTIONS_HELP;

static const struct option table[] = {CLI_LONG_OPTIONS, {NULL, 0, NULL, 0}};

/* ---- devices and tiers ---- */

static void add_device(cJSON *list, const fmla_device_info *info)
{
    cJSON *item = cJSON_CreateObject();

    cJSON_AddStringToObject(item, "device", fmla_device_name((fmla_device)info->device));
    cJSON_AddNumberToObject(item, "index", info->index);
    cJSON_AddStringToObject(item, "name", info->name);
    cJSON_AddStringToObject(item, "kernels", info->kernels);
    cJSON_AddNumberToObject(item, "compute_units", info->compute_units);
    cJSON_AddNumberToObject(item, "capability", info->capability);
    cJSON_AddNumberToObject(item, "memory_bytes", (double)info->memory_bytes);
    cJSON_AddNumberToObject(item, "shared_memory_bytes", (double)info->shared_memory_bytes);
    cJSON_AddItemToArray(list, item);
}

static void add_devices(cJSON *tree)
{
    static const fmla_device kinds[] = {FMLA_DEVICE_CPU, FMLA_DEVICE_CUDA};
    cJSON *list = cJSON_AddArrayToObject(tree, "devices");

    for (size_t k = 0; k < 2; k++) {
        for (int32_t index = 0; index < 1024; index++) {
            fmla_device_info info = FMLA_DEVICE_INFO_INIT;
            fmla_status status = fmla_device_get(kinds[k], index, &info);
            if (status != FMLA_OK) {
                if (index == 0) {
                    cJSON *item = cJSON_CreateObject();
                    cJSON_AddStringToObject(item, "device", fmla_device_name(kinds[k]));
                    cJSON_AddStringToObject(item, "absent", fmla_status_string(status));
                    cJSON_AddItemToArray(list, item);
                }
                break;
            }
            add_device(list, &info);
        }
    }
}

static void add_tiers(cJSON *tree, const fmla_context *context)
{
    cJSON *list = cJSON_AddArrayToObject(tree, "isa_available");

    for (int isa = FMLA_ISA_SCALAR; isa < FMLA_ISA_COUNT; isa++) {
        if (fmla_isa_available((fmla_isa)isa)) {
            cJSON_AddItemToArray(list, cJSON_CreateString(fmla_isa_name((fmla_isa)isa)));
        }
    }
    cJSON_AddStringToObject(tree, "backend", fmla_device_name(fmla_context_device(context)));
    if (fmla_context_device(context) == FMLA_DEVICE_CPU) {
        cJSON_AddStringToObject(tree, "isa_used", fmla_isa_name(fmla_context_isa(context)));
        cJSON_AddNumberToObject(tree, "threads", fmla_context_threads(context));
    }
}

/* ---- formats ---- */

static bool format_info(int format, fmla_format_info *info)
{
    *info = (fmla_format_info)FMLA_FORMAT_INFO_INIT;
    return fmla_format_get((fmla_kv_format)format, info) == FMLA_OK;
}

static void add_formats(cJSON *tree)
{
    static const char *const layouts[] = {"plain", "record", "page"}; /* in the order of fmla_kv_layout */
    cJSON *list = cJSON_AddArrayToObject(tree, "formats");
    fmla_format_info info;

    for (int format = FMLA_KV_NONE + 1; format < FMLA_KV_COUNT; format++) {
        if (!format_info(format, &info)) {
            continue;
        }
        cJSON *item = cJSON_CreateObject();
        cJSON_AddStringToObject(item, "name", info.name);
        cJSON_AddStringToObject(item, "layout", layouts[info.layout]);
        cJSON_AddNumberToObject(item, "d_qk", info.d_qk);
        cJSON_AddNumberToObject(item, "quant_dims", info.quant_dims);
        cJSON_AddNumberToObject(item, "rope_dims", info.rope_dims);
        cJSON_AddStringToObject(item, "element", fmla_dtype_name((fmla_dtype)info.element));
        cJSON_AddNumberToObject(item, "group", info.group);
        cJSON_AddStringToObject(item, "scale", info.group == 0 ? "none" : fmla_dtype_name((fmla_dtype)info.scale));
        cJSON_AddNumberToObject(item, "bytes_per_token", info.bytes_per_token);
        cJSON_AddBoolToObject(item, "extra_only", info.extra_only != 0);
        cJSON_AddItemToArray(list, item);
    }
}

/* ---- supported combinations ---- */

static bool supported(fmla_context *context, int operation, int format, int extra, int d_qk)
{
    fmla_support_query query = FMLA_SUPPORT_QUERY_INIT;

    query.operation = operation;
    query.kv_format = format;
    query.extra_format = extra;
    query.d_qk = d_qk;
    return fmla_supports(context, &query) != 0;
}

/* "v41 + v41-fp4", "bf16 (512, 576)": a pair of formats with the key widths it takes. */
static void add_pair(cJSON *list, fmla_context *context, int operation, int format, int extra)
{
    static const int widths[] = {512, 576};
    fmla_format_info main_info;
    fmla_format_info extra_info;
    char text[96];
    char dims[32] = "";

    if (!format_info(format, &main_info) || (extra != FMLA_KV_NONE && !format_info(extra, &extra_info))) {
        return;
    }
    for (size_t i = 0; i < 2; i++) {
        if ((main_info.d_qk == 0 || main_info.d_qk == widths[i]) &&
            supported(context, operation, format, extra, widths[i])) {
            size_t used = strlen(dims);
            snprintf(dims + used, sizeof dims - used, "%s%d", used > 0 ? ", " : "", widths[i]);
        }
    }
    if (dims[0] == '\0') {
        return;
    }
    snprintf(text, sizeof text, "%s%s%s (%s)", main_info.name, extra == FMLA_KV_NONE ? "" : " + ",
             extra == FMLA_KV_NONE ? "" : extra_info.name, dims);
    cJSON_AddItemToArray(list, cJSON_CreateString(text));
}

/* Key and value widths of multi-head attention; the library takes others too, these are the published ones. */
static void add_mha(cJSON *list, fmla_context *context, int operation)
{
    static const int dims[][2] = {{192, 128}, {128, 128}};
    static const fmla_dtype dtypes[] = {FMLA_BF16, FMLA_F16};
    char text[64];

    for (size_t i = 0; i < 4; i++) {
        fmla_support_query query = FMLA_SUPPORT_QUERY_INIT;
        query.operation = operation;
        query.q_dtype = dtypes[i / 2];
        query.d_qk = dims[i % 2][0];
        query.d_v = dims[i % 2][1];
        if (fmla_supports(context, &query)) {
            snprintf(text, sizeof text, "%s (%d, %d)", fmla_dtype_name(dtypes[i / 2]), query.d_qk, query.d_v);
            cJSON_AddItemToArray(list, cJSON_CreateString(text));
        }
    }
}

static bool takes_cache(int operation)
{
    return operation == FMLA_OP_DENSE_DECODE || operation == FMLA_OP_SPARSE_DECODE ||
           operation == FMLA_OP_FUSED_DECODE || operation == FMLA_OP_SPARSE_PREFILL ||
           operation == FMLA_OP_FUSED_PREFILL || operation == FMLA_OP_QUANTIZE || operation == FMLA_OP_DEQUANTIZE ||
           operation == FMLA_OP_CONVERT;
}

static void add_operations(cJSON *tree, fmla_context *context)
{
    cJSON *operations = cJSON_AddObjectToObject(tree, "operations");

    for (int op = 0; op < FMLA_OP_COUNT; op++) {
        cJSON *list = cJSON_AddArrayToObject(operations, fmla_operation_name((fmla_operation)op));
        if (op == FMLA_OP_MHA_FORWARD || op == FMLA_OP_MHA_BACKWARD) {
            add_mha(list, context, op);
        } else if (takes_cache(op)) {
            for (int format = FMLA_KV_NONE + 1; format < FMLA_KV_COUNT; format++) {
                add_pair(list, context, op, format, FMLA_KV_NONE);
                bool two = op == FMLA_OP_SPARSE_DECODE || op == FMLA_OP_FUSED_DECODE;
                for (int extra = FMLA_KV_NONE + 1; two && extra < FMLA_KV_COUNT; extra++) {
                    add_pair(list, context, op, format, extra);
                }
            }
        } else if (supported(context, op, 0, 0, 0)) {
            cJSON_AddItemToArray(list, cJSON_CreateString("yes"));
        }
    }
}

/* ---- printing ---- */

static const char *text_of(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

    return cJSON_IsString(item) ? item->valuestring : "";
}

static double number_of(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);

    return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

static void print_list(const cJSON *list, const char *indent)
{
    int column = 0;

    for (const cJSON *item = list->child; item != NULL; item = item->next) {
        int width = (int)strlen(item->valuestring) + 2;
        if (column > 0 && column + width > 92) {
            printf("\n%s", indent);
            column = 0;
        }
        printf("%s%s", item->valuestring, item->next == NULL ? "" : ", ");
        column += width;
    }
    puts(list->child == NULL ? "not supported" : "");
}

static void print_devices(const cJSON *tree)
{
    const cJSON *item = NULL;

    puts("devices");
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(tree, "devices")) {
        if (text_of(item, "absent")[0] != '\0') {
            printf("  %-7s %s\n", text_of(item, "device"), text_of(item, "absent"));
            continue;
        }
        printf("  %-5s %d %s: %.0f units, %.1f GiB, kernels %s\n", text_of(item, "device"),
               (int)number_of(item, "index"), text_of(item, "name"), number_of(item, "compute_units"),
               number_of(item, "memory_bytes") / 1073741824.0, text_of(item, "kernels"));
    }
    printf("  CPU tiers here: ");
    print_list(cJSON_GetObjectItemCaseSensitive(tree, "isa_available"), "    ");
    printf("  used: %s%s%s", text_of(tree, "backend"), text_of(tree, "isa_used")[0] == '\0' ? "" : ", ",
           text_of(tree, "isa_used"));
    if (number_of(tree, "threads") > 0) {
        printf(", %.0f threads", number_of(tree, "threads"));
    }
    putchar('\n');
}

static void print_info(const cJSON *tree)
{
    const cJSON *item = NULL;

    printf("flashmla %s\n\n", text_of(tree, "version"));
    print_devices(tree);
    printf("\nformats\n  %-14s%-8s%6s%7s%6s%9s%7s%9s%13s\n", "name", "layout", "d_qk", "quant", "rope", "element",
           "group", "scale", "bytes/token");
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(tree, "formats")) {
        char d_qk[16] = "any";
        char bytes[24] = "2 * d_qk";
        if (number_of(item, "d_qk") > 0) {
            snprintf(d_qk, sizeof d_qk, "%.0f", number_of(item, "d_qk"));
            snprintf(bytes, sizeof bytes, "%.0f", number_of(item, "bytes_per_token"));
        }
        printf("  %-14s%-8s%6s%7.0f%6.0f%9s%7.0f%9s%13s%s\n", text_of(item, "name"), text_of(item, "layout"), d_qk,
               number_of(item, "quant_dims"), number_of(item, "rope_dims"), text_of(item, "element"),
               number_of(item, "group"), text_of(item, "scale"), bytes,
               cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(item, "extra_only")) ? "  extra only" : "");
    }
    puts("\noperations: main format [+ extra format] (key widths); multi-head attention (d_qk, d_v)");
    cJSON_ArrayForEach(item, cJSON_GetObjectItemCaseSensitive(tree, "operations")) {
        printf("  %-16s", item->string);
        print_list(item, "                  ");
    }
}

int cmd_info(int argc, char **argv)
{
    cli_options options = CLI_OPTIONS_INIT;
    fmla_context *context = NULL;

    int status = cli_take_options(argc, argv, table, usage, 0, cli_option, &options);
    if (status != CLI_OK) {
        return status;
    }
    if (cli_context_open(&options, &context) != CLI_OK) {
        return CLI_ERROR;
    }
    cJSON *tree = cJSON_CreateObject();
    int32_t version = fmla_version();
    char text[32];
    snprintf(text, sizeof text, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
    cJSON_AddStringToObject(tree, "version", text);
    add_devices(tree);
    add_tiers(tree, context);
    add_formats(tree);
    add_operations(tree, context);
    fmla_context_destroy(context);
    if (options.json) {
        return cli_print_json(tree);
    }
    print_info(tree);
    cJSON_Delete(tree);
    return CLI_OK;
}
