/* SPDX-License-Identifier: MIT */
/* plan.c: `flashmla plan`: which worker does which blocks of a batch, as a table, the raw metadata, and a picture. */
#include "plan.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "--lengths 1000,64,0,300 | --file FILE [options]\n"
    "\n"
    "The split-KV schedule of a batch: blocks of 64 tokens, shared among workers at about the same cost.\n"
    "\n"
    "  --lengths N,N,...   tokens of each request (dense), or with --topk its topk_length\n"
    "  --file FILE         the same numbers from a text file, separated by blanks, commas or lines; '-' reads them\n"
    "                      from standard input\n"
    "  --topk N            sparse: index slots of a row\n"
    "  --extra-topk N      sparse: slots of the extra scope\n"
    "  --batch N           sparse without lengths: number of requests\n"
    "  --parts N           workers; default 8\n"
    "  --overhead N        fixed cost of a piece in blocks; default 5\n"
    "  --form NAME         print the raw tables of this generation too: 2025-02, 2025-09, 2026-01\n"
    "  --svg FILE          draw it\n" CLI_OPTIONS_HELP;

enum {
    OPT_LENGTHS = CLI_OPTION_OWN,
    OPT_FILE,
    OPT_TOPK,
    OPT_EXTRA_TOPK,
    OPT_BATCH,
    OPT_PARTS,
    OPT_OVERHEAD,
    OPT_FORM,
    OPT_SVG
};

static const struct option table[] = {
    CLI_LONG_OPTIONS,
    {"lengths", required_argument, NULL, OPT_LENGTHS},
    {"file", required_argument, NULL, OPT_FILE},
    {"topk", required_argument, NULL, OPT_TOPK},
    {"extra-topk", required_argument, NULL, OPT_EXTRA_TOPK},
    {"batch", required_argument, NULL, OPT_BATCH},
    {"parts", required_argument, NULL, OPT_PARTS},
    {"overhead", required_argument, NULL, OPT_OVERHEAD},
    {"form", required_argument, NULL, OPT_FORM},
    {"svg", required_argument, NULL, OPT_SVG},
    {NULL, 0, NULL, 0},
};

typedef struct plan_request {
    cli_options options;
    const char *lengths_text;
    const char *file;
    const char *svg;
    int64_t topk; /* -1: dense */
    int64_t extra_topk;
    int64_t batch;
    int64_t parts;
    int64_t overhead;
    const char *form; /* NULL: no raw tables */
} plan_request;

/* ---- lengths ---- */

static int add_length(plan *p, int32_t length, size_t *capacity)
{
    if ((size_t)p->batch == *capacity) {
        *capacity = *capacity == 0 ? 64 : 2 * *capacity;
        int32_t *grown = realloc(p->lengths, *capacity * sizeof *grown);
        if (grown == NULL) {
            return cli_error("not enough memory");
        }
        p->lengths = grown;
    }
    p->lengths[p->batch++] = length;
    return CLI_OK;
}

static int parse_lengths(const char *what, const char *text, plan *p)
{
    size_t capacity = 0;

    while (*text != '\0') {
        if (*text == ',' || isspace((unsigned char)*text)) {
            text++;
            continue;
        }
        char word[32];
        size_t length = strcspn(text, ", \t\r\n\v\f");
        int64_t value = 0;
        snprintf(word, sizeof word, "%.*s", (int)(length < 31 ? length : 31), text);
        if (cli_parse_int(what, word, 0, INT32_MAX, &value) != CLI_OK ||
            add_length(p, (int32_t)value, &capacity) != CLI_OK) {
            return CLI_ERROR;
        }
        text += length;
    }
    return p->batch > 0 ? CLI_OK : cli_error("%s: no lengths", what);
}

static int read_lengths(const char *path, plan *p)
{
    FILE *stream = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    size_t size = 0;
    size_t used = 0;
    char *text = NULL;
    int result = CLI_OK;

    if (stream == NULL) {
        return cli_error("%s: %s", path, strerror(errno));
    }
    do {
        if (size - used < 4096) {
            size = size == 0 ? 65536 : 2 * size;
            char *grown = size > (size_t)1 << 28 ? NULL : realloc(text, size);
            if (grown == NULL) {
                result = cli_error("%s: too long", path);
                break;
            }
            text = grown;
        }
        used += fread(text + used, 1, size - used - 1, stream);
    } while (!feof(stream) && !ferror(stream));
    if (result == CLI_OK && ferror(stream)) {
        result = cli_error("%s: %s", path, strerror(errno));
    }
    if (result == CLI_OK) {
        text[used] = '\0';
        result = memchr(text, '\0', used) != NULL ? cli_error("%s: not a text of numbers", path)
                                                  : parse_lengths(path, text, p);
    }
    free(text);
    if (stream != stdin) {
        fclose(stream);
    }
    return result;
}

/* ---- the library's schedule ---- */

static int schedule(fmla_context *context, const plan_request *r, const plan *p, fmla_schedule_form form,
                    int32_t *metadata, int32_t *num_splits)
{
    fmla_schedule_args a = FMLA_SCHEDULE_ARGS_INIT;
    fmla_tensor lengths = fmla_tensor_1d(p->lengths, FMLA_I32, p->batch);

    if (r->topk < 0) {
        a.cache_seqlens = lengths;
    } else if (p->lengths != NULL) {
        a.topk_length = lengths;
    }
    a.batch = p->batch;
    a.topk = r->topk;
    a.extra_topk = r->extra_topk;
    a.form = form;
    a.overhead_blocks = (int32_t)r->overhead;
    a.metadata = fmla_tensor_2d(metadata, FMLA_I32, p->parts, 8);
    a.num_splits = fmla_tensor_1d(num_splits, FMLA_I32, p->batch + 1);
    fmla_status status = fmla_schedule(context, &a, NULL);
    return status == FMLA_OK ? CLI_OK : cli_status(context, status, "plan");
}

/* Blocks of request i by the published rule: main slots in whole blocks, then the extra ones. */
static int64_t blocks_of(const plan_request *r, const plan *p, int64_t i)
{
    int64_t length = p->lengths != NULL ? p->lengths[i] : r->topk;

    if (r->topk >= 0) {
        length = length > r->topk ? r->topk : length;
        length = length == 0 ? 1 : length;
        length = r->extra_topk > 0 ? (length + 63) / 64 * 64 + r->extra_topk : length;
    }
    return (length > 1 ? length - 1 : 0) / 64 + 1;
}

/* The pieces of every worker, from the newest form of the metadata. */
static int find_pieces(const plan_request *r, plan *p, const int32_t *metadata)
{
    size_t capacity = (size_t)(p->parts + p->batch + 1);

    p->pieces = calloc(capacity, sizeof *p->pieces);
    if (p->pieces == NULL) {
        return cli_error("not enough memory");
    }
    for (int64_t part = 0; part < p->parts; part++) {
        const int32_t *row = metadata + 8 * part;
        for (int64_t request = row[0]; request <= row[1] && request < p->batch; request++) {
            if ((size_t)p->piece_count == capacity || request < 0) {
                return cli_error("the schedule is not one: worker %lld", (long long)part);
            }
            plan_piece *piece = &p->pieces[p->piece_count++];
            piece->worker = part;
            piece->request = request;
            piece->begin = request == row[0] ? row[2] : 0;
            piece->end = request == row[1] ? row[3] : blocks_of(r, p, request);
            if (r->topk < 0 && p->lengths[request] == 0) {
                piece->end = piece->begin; /* counted as a block, but there is nothing to read */
            }
            piece->split = request == row[0] ? row[4] : 0;
        }
    }
    return CLI_OK;
}

/* ---- printing ---- */

static int64_t piece_cost(const plan *p, const plan_piece *piece)
{
    int64_t blocks = piece->end - piece->begin;

    return (blocks > 0 ? blocks : 1) + p->overhead;
}

static void print_plan(const plan *p)
{
    int64_t at = 0;

    printf("%lld requests, %lld workers, a block is 64 tokens, a piece costs its blocks + %lld\n", (long long)p->batch,
           (long long)p->parts, (long long)p->overhead);
    printf("%8s %8s %7s %16s %7s\n", "worker", "request", "split", "blocks", "cost");
    for (int64_t part = 0; part < p->parts; part++) {
        int64_t total = 0;
        int64_t first = at;
        for (; at < p->piece_count && p->pieces[at].worker == part; at++) {
            const plan_piece *piece = &p->pieces[at];
            int64_t cost = piece_cost(p, piece);
            printf("%8lld %8lld %3lld/%-3d %7lld..%-7lld %7lld\n", (long long)part, (long long)piece->request,
                   (long long)piece->split + 1, p->num_splits[piece->request + 1] - p->num_splits[piece->request],
                   (long long)piece->begin, (long long)piece->end, (long long)cost);
            total += cost;
        }
        if (at == first) {
            printf("%8lld     idle\n", (long long)part);
        } else if (at - first > 1) {
            printf("%8s %8s %7s %16s %7lld\n", "", "", "", "together", (long long)total);
        }
    }
}

static void print_raw(const char *form, const int32_t *metadata, const int32_t *num_splits, int64_t parts,
                      int64_t batch)
{
    printf("metadata, form %s\n", form);
    for (int64_t i = 0; i < parts; i++) {
        for (int k = 0; k < 8; k++) {
            printf("%9d", metadata[8 * i + k]);
        }
        putchar('\n');
    }
    printf("num_splits");
    for (int64_t i = 0; i <= batch; i++) {
        printf(" %d", num_splits[i]);
    }
    putchar('\n');
}

static cJSON *int_array(const int32_t *values, int64_t count)
{
    return cJSON_CreateIntArray(values, (int)count);
}

static cJSON *plan_json(const plan *p)
{
    cJSON *tree = cJSON_CreateObject();
    cJSON *pieces = cJSON_AddArrayToObject(tree, "pieces");

    cJSON_AddNumberToObject(tree, "parts", (double)p->parts);
    cJSON_AddNumberToObject(tree, "overhead_blocks", (double)p->overhead);
    for (int64_t i = 0; i < p->piece_count; i++) {
        cJSON *item = cJSON_CreateObject();
        cJSON_AddNumberToObject(item, "worker", (double)p->pieces[i].worker);
        cJSON_AddNumberToObject(item, "request", (double)p->pieces[i].request);
        cJSON_AddNumberToObject(item, "split", (double)p->pieces[i].split);
        cJSON_AddNumberToObject(item, "begin_block", (double)p->pieces[i].begin);
        cJSON_AddNumberToObject(item, "end_block", (double)p->pieces[i].end);
        cJSON_AddItemToArray(pieces, item);
    }
    cJSON_AddItemToObject(tree, "num_splits", int_array(p->num_splits, p->batch + 1));
    return tree;
}

static int show(fmla_context *context, const plan_request *r, plan *p, int32_t *metadata)
{
    static const char *const names[] = {"2025-02", "2025-09", "2026-01"};
    static const fmla_schedule_form forms[] = {FMLA_SCHEDULE_2025_02, FMLA_SCHEDULE_2025_09, FMLA_SCHEDULE_2026_01};
    cJSON *tree = r->options.json ? plan_json(p) : NULL;

    if (tree == NULL) {
        print_plan(p);
    }
    for (size_t i = 0; i < 3 && r->form != NULL; i++) {
        if (strcmp(names[i], r->form) != 0) {
            continue;
        }
        if (schedule(context, r, p, forms[i], metadata, p->num_splits) != CLI_OK) {
            cJSON_Delete(tree);
            return CLI_ERROR;
        }
        if (tree == NULL) {
            print_raw(r->form, metadata, p->num_splits, p->parts, p->batch);
        } else {
            cJSON_AddStringToObject(tree, "form", r->form);
            cJSON_AddItemToObject(tree, "metadata", int_array(metadata, 8 * p->parts));
        }
    }
    return tree == NULL ? CLI_OK : cli_print_json(tree);
}

static int make_plan(const plan_request *r, plan *p)
{
    fmla_context *context = NULL;
    int32_t *metadata = calloc((size_t)p->parts * 8, sizeof *metadata);
    int result = CLI_ERROR;

    p->num_splits = calloc((size_t)p->batch + 1, sizeof *p->num_splits);
    if (metadata == NULL || p->num_splits == NULL) {
        result = cli_error("not enough memory");
    } else if (cli_context_open(&r->options, &context) == CLI_OK) {
        result = schedule(context, r, p, FMLA_SCHEDULE_2026_01, metadata, p->num_splits);
        if (result == CLI_OK) {
            result = find_pieces(r, p, metadata);
        }
        if (result == CLI_OK && r->svg != NULL) {
            result = plan_draw(p, r->svg);
        }
        if (result == CLI_OK) {
            result = show(context, r, p, metadata);
        }
    }
    fmla_context_destroy(context);
    free(metadata);
    return result;
}

/* ---- options ---- */

static int take_form(plan_request *r, const char *name)
{
    r->form = name;
    if (strcmp(name, "2025-02") == 0 || strcmp(name, "2025-09") == 0 || strcmp(name, "2026-01") == 0) {
        return CLI_OK;
    }
    return cli_error("--form: '%s' is none of 2025-02, 2025-09, 2026-01", name);
}

static int take_option(void *user, int option, const char *argument)
{
    plan_request *r = user;

    switch (option) {
    case OPT_LENGTHS: r->lengths_text = argument; return CLI_OK;
    case OPT_FILE: r->file = argument; return CLI_OK;
    case OPT_SVG: r->svg = argument; return CLI_OK;
    case OPT_TOPK: return cli_parse_int("--topk", argument, 0, INT32_MAX, &r->topk);
    case OPT_EXTRA_TOPK: return cli_parse_int("--extra-topk", argument, 0, INT32_MAX, &r->extra_topk);
    case OPT_BATCH: return cli_parse_int("--batch", argument, 1, 1 << 24, &r->batch);
    case OPT_PARTS: return cli_parse_int("--parts", argument, 1, 1 << 20, &r->parts);
    case OPT_OVERHEAD: return cli_parse_int("--overhead", argument, 0, 4096, &r->overhead);
    case OPT_FORM: return take_form(r, argument);
    default: return cli_option(&r->options, option, argument);
    }
}

static int check_request(const plan_request *r)
{
    bool lengths = r->lengths_text != NULL || r->file != NULL;

    if (r->lengths_text != NULL && r->file != NULL) {
        return cli_error("plan: --lengths and --file exclude each other");
    }
    if (r->topk < 0 && (!lengths || r->batch > 0 || r->extra_topk > 0)) {
        return cli_error(lengths ? "plan: --batch and --extra-topk go with --topk"
                                 : "plan: --lengths, --file, or --topk with --batch is needed");
    }
    if (r->topk >= 0 && lengths == (r->batch > 0)) {
        return cli_error("plan: --topk needs either lengths or --batch");
    }
    return CLI_OK;
}

int cmd_plan(int argc, char **argv)
{
    plan_request r = {.topk = -1, .parts = 8, .overhead = 5, .options = {.device = FMLA_DEVICE_CPU}};
    plan p = {0};
    int status = cli_take_options(argc, argv, table, usage, 0, take_option, &r);
    if (status != CLI_OK) {
        return status;
    }
    if (check_request(&r) != CLI_OK) {
        return CLI_ERROR;
    }
    int result = r.file != NULL           ? read_lengths(r.file, &p)
                 : r.lengths_text != NULL ? parse_lengths("--lengths", r.lengths_text, &p)
                                          : CLI_OK;
    p.batch = r.batch > 0 ? r.batch : p.batch;
    p.parts = r.parts;
    p.overhead = r.overhead;
    if (result == CLI_OK) {
        result = make_plan(&r, &p);
    }
    free(p.lengths);
    free(p.pieces);
    free(p.num_splits);
    return result;
}
