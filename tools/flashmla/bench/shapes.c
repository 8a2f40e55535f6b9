/* SPDX-License-Identifier: MIT */
/*
 * shapes.c: reads bench/shapes/<file>.json: {"for": "cpu" or "cuda", "groups": [{"name": ..., "operation": ...,
 * ...}]}. A member of a group is a field of a test case; a list of values makes a shape for each, crossed with the
 * other lists. A list of lists under "together" sets several fields at once: {"together": ["h_q", "topk"], "values":
 * [[64, 512], ...]}. "goal": the share of the limit to reach on one thread and on more. "isa": the CPU tier that the
 * group is about. Beside the groups, "ratios": [{"of": shape, "to": shape, "at_most": ...}] are goals for one shape's
 * time in terms of another's. Files that are for something else than a device are read only where --shape names their
 * shapes.
 */
#include "bench/bench.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *bench_shapes_folder(char *text, size_t size)
{
    static const char beside[] = "/../share/flashmla/shapes";
    ssize_t length = readlink("/proc/self/exe", text, size - sizeof beside);
    if (length > 0) {
        text[length] = 0;
        char *slash = strrchr(text, '/');
        memcpy(slash != NULL ? slash : text, beside, sizeof beside);
        if (access(text, R_OK) == 0) {
            return text;
        }
    }
    return FLASHMLA_SHAPES_DIR;
}

static char *read_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    char *text = NULL;
    size_t size = 0;
    if (f == NULL) {
        return NULL;
    }
    for (;;) {
        char *more = realloc(text, size + 65537);
        if (more == NULL) {
            break;
        }
        text = more;
        size_t n = fread(text + size, 1, 65536, f);
        size += n;
        text[size] = 0;
        if (n == 0) {
            break;
        }
    }
    fclose(f);
    return text;
}

static void append(char *text, size_t size, const char *key, const cJSON *value)
{
    size_t used = strlen(text);
    if (strcmp(key, "operation") == 0) {
        key = "op";
    }
    if (cJSON_IsString(value)) {
        snprintf(text + used, size - used, "%s%s=%s", used ? "," : "", key, value->valuestring);
    } else {
        snprintf(text + used, size - used, "%s%s=%.9g", used ? "," : "", key, cJSON_GetNumberValue(value));
    }
}

typedef struct expansion {
    bench_shapes *list;
    const char *prefix; /* file/group */
    const char *filter;
    const cJSON *group;
} expansion;

static int add_shape(const expansion *x, const char *text, const char *varying)
{
    bench_shape shape;
    char error[256];
    memset(&shape, 0, sizeof shape);
    snprintf(shape.name, sizeof shape.name, "%s%s%s", x->prefix, varying[0] ? "/" : "", varying);
    if (x->filter != NULL && strstr(shape.name, x->filter) == NULL) {
        return CLI_OK;
    }
    if (case_parse(&shape.c, text, error, sizeof error) != 0) {
        return cli_error("shape %s: %s", shape.name, error);
    }
    shape.c.seed = 1;
    const char *isa = cJSON_GetStringValue(cJSON_GetObjectItem(x->group, "isa"));
    if (isa != NULL && cli_isa_by_name(isa) < 0) {
        return cli_error("shape %s: no tier '%s'", shape.name, isa);
    }
    shape.isa = isa != NULL ? (fmla_isa)cli_isa_by_name(isa) : FMLA_ISA_AUTO;
    const cJSON *goal = cJSON_GetObjectItem(x->group, "goal");
    for (int i = 0; i < 2 && i < cJSON_GetArraySize(goal); i++) {
        shape.goal[i] = cJSON_GetArrayItem(goal, i)->valuedouble;
    }
    bench_shape *larger = xmalloc((x->list->count + 1) * sizeof *larger);
    if (x->list->count > 0) {
        memcpy(larger, x->list->shapes, x->list->count * sizeof *larger);
    }
    free(x->list->shapes);
    x->list->shapes = larger;
    x->list->shapes[x->list->count++] = shape;
    return CLI_OK;
}

static bool is_remark(const char *member)
{
    return strcmp(member, "name") == 0 || strcmp(member, "note") == 0 || strcmp(member, "goal") == 0 ||
           strcmp(member, "isa") == 0;
}

/* Goes through the group's members; a list branches. */
static int expand(const expansion *x, const cJSON *member, const char *text, const char *varying)
{
    char longer[512], names[128];
    while (member != NULL && is_remark(member->string)) {
        member = member->next;
    }
    if (member == NULL) {
        return add_shape(x, text, varying);
    }
    if (strcmp(member->string, "together") == 0) {
        const cJSON *row, *values = cJSON_GetObjectItem(x->group, "values");
        cJSON_ArrayForEach(row, values)
        {
            snprintf(longer, sizeof longer, "%s", text);
            snprintf(names, sizeof names, "%s", varying);
            for (int i = 0; i < cJSON_GetArraySize(member) && i < cJSON_GetArraySize(row); i++) {
                const char *key = cJSON_GetStringValue(cJSON_GetArrayItem(member, i));
                append(longer, sizeof longer, key ? key : "?", cJSON_GetArrayItem(row, i));
                append(names, sizeof names, key ? key : "?", cJSON_GetArrayItem(row, i));
            }
            if (expand(x, member->next, longer, names) != CLI_OK) {
                return CLI_ERROR;
            }
        }
        return CLI_OK;
    }
    if (strcmp(member->string, "values") == 0) {
        return expand(x, member->next, text, varying);
    }
    if (cJSON_IsArray(member)) {
        const cJSON *value;
        cJSON_ArrayForEach(value, member)
        {
            snprintf(longer, sizeof longer, "%s", text);
            snprintf(names, sizeof names, "%s", varying);
            append(longer, sizeof longer, member->string, value);
            append(names, sizeof names, member->string, value);
            if (expand(x, member->next, longer, names) != CLI_OK) {
                return CLI_ERROR;
            }
        }
        return CLI_OK;
    }
    snprintf(longer, sizeof longer, "%s", text);
    append(longer, sizeof longer, member->string, member);
    return expand(x, member->next, longer, varying);
}

static int read_ratio(bench_ratio *r, const char *path, int number, const cJSON *ratio)
{
    const char *of = cJSON_GetStringValue(cJSON_GetObjectItem(ratio, "of"));
    const char *to = cJSON_GetStringValue(cJSON_GetObjectItem(ratio, "to"));
    const cJSON *at_most = cJSON_GetObjectItem(ratio, "at_most");
    if (of == NULL || to == NULL || strlen(of) >= sizeof r->of || strlen(to) >= sizeof r->to) {
        return cli_error(
            "%s: group \"ratios\", entry %d: allowed are \"of\" and \"to\", both names of shapes of less than "
            "%zu characters",
            path, number, sizeof r->of);
    }
    if (!cJSON_IsNumber(at_most) || !(at_most->valuedouble > 0)) {
        return cli_error("%s: group \"ratios\", entry %d: allowed is an \"at_most\" above 0", path, number);
    }
    strcpy(r->of, of);
    strcpy(r->to, to);
    r->at_most = at_most->valuedouble;
    return CLI_OK;
}

static int read_ratios(bench_shapes *list, const char *path, const cJSON *ratios)
{
    const cJSON *ratio;
    int number = 0, status = ratios == NULL || cJSON_IsArray(ratios)
                                 ? CLI_OK
                                 : cli_error("%s: group \"ratios\": allowed is a list of ratios", path);
    cJSON_ArrayForEach(ratio, ratios)
    {
        number++;
        if (status == CLI_OK && list->ratio_count == BENCH_RATIOS_MAX) {
            status = cli_error("%s: group \"ratios\", entry %d: allowed are %d ratios in all files that are read", path,
                               number, BENCH_RATIOS_MAX);
        }
        if (status == CLI_OK) {
            status = read_ratio(&list->ratios[list->ratio_count++], path, number, ratio);
        }
    }
    return status;
}

static int read_shapes(bench_shapes *list, const char *path, const char *base, fmla_device device, const char *filter)
{
    char *text = read_file(path);
    cJSON *root = text ? cJSON_Parse(text) : NULL;
    int status = CLI_OK;
    free(text);
    if (root == NULL) {
        return cli_error("%s: cannot be read as JSON", path);
    }
    const char *meant_for = cJSON_GetStringValue(cJSON_GetObjectItem(root, "for"));
    const cJSON *group;
    if (filter != NULL || (meant_for != NULL && strcmp(meant_for, fmla_device_name(device)) == 0)) {
        cJSON_ArrayForEach(group, cJSON_GetObjectItem(root, "groups"))
        {
            char prefix[96];
            const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(group, "name"));
            snprintf(prefix, sizeof prefix, "%s/%s", base, name ? name : "?");
            expansion x = {list, prefix, filter, group};
            if (status == CLI_OK) {
                status = expand(&x, group->child, "", "");
            }
        }
        if (status == CLI_OK) {
            status = read_ratios(list, path, cJSON_GetObjectItem(root, "ratios"));
        }
    }
    cJSON_Delete(root);
    return status;
}

static int is_json(const struct dirent *entry)
{
    size_t n = strlen(entry->d_name);
    return n > 5 && n < 64 && strcmp(entry->d_name + n - 5, ".json") == 0;
}

int bench_shapes_read(bench_shapes *list, const char *directory, fmla_device device, const char *filter)
{
    struct dirent **entries;
    int count = scandir(directory, &entries, is_json, alphasort), status = CLI_OK;
    if (count < 0) {
        return cli_error("%s: no such directory of shapes", directory);
    }
    for (int i = 0; i < count; i++) {
        char path[4096], base[64];
        const char *name = entries[i]->d_name;
        snprintf(path, sizeof path, "%s/%s", directory, name);
        snprintf(base, sizeof base, "%.*s", (int)(strlen(name) - 5), name);
        if (status == CLI_OK) {
            status = read_shapes(list, path, base, device, filter);
        }
        free(entries[i]);
    }
    free(entries);
    return status;
}

void bench_shapes_free(bench_shapes *list)
{
    free(list->shapes);
    memset(list, 0, sizeof *list);
}
