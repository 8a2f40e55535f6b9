/* SPDX-License-Identifier: MIT */
/*
 * The safetensors reader of the tests: 8 bytes of header length, a JSON header, then the tensors' bytes.
 */
#include "support_golden.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <cjson/cJSON.h>

struct golden {
    uint8_t *bytes;
    size_t size;
    size_t data; /* where the tensors start */
    cJSON *header;
};

golden *golden_open(const char *file)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", FLASHMLA_GOLDEN_DIR, file);
    FILE *f = fopen(path, "rb");
    if (!f) {
        fail_msg("cannot open %s", path);
    }
    golden *g = calloc(1, sizeof *g);
    assert_non_null(g);
    assert_int_equal(fseek(f, 0, SEEK_END), 0);
    g->size = (size_t)ftell(f);
    rewind(f);
    g->bytes = malloc(g->size);
    assert_non_null(g->bytes);
    assert_int_equal(fread(g->bytes, 1, g->size, f), g->size);
    fclose(f);
    uint64_t header = 0;
    assert_true(g->size > sizeof header);
    memcpy(&header, g->bytes, sizeof header);
    assert_true(header < g->size - sizeof header);
    g->data = sizeof header + header;
    g->header = cJSON_ParseWithLength((const char *)g->bytes + sizeof header, header);
    assert_non_null(g->header);
    return g;
}

static fmla_dtype dtype_by_name(const char *name)
{
    static const struct {
        const char *name;
        fmla_dtype dtype;
    } names[] = {{"BF16", FMLA_BF16}, {"F16", FMLA_F16}, {"F32", FMLA_F32}, {"I32", FMLA_I32}, {"U8", FMLA_U8}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(name, names[i].name) == 0) {
            return names[i].dtype;
        }
    }
    return FMLA_DTYPE_NONE;
}

golden_tensor golden_get(const golden *g, const char *name)
{
    const cJSON *entry = cJSON_GetObjectItemCaseSensitive(g->header, name);
    if (!entry) {
        fail_msg("no tensor %s in the golden data", name);
    }
    const cJSON *shape = cJSON_GetObjectItemCaseSensitive(entry, "shape");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(entry, "data_offsets");
    golden_tensor t = {.count = 1};
    t.dtype = dtype_by_name(cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(entry, "dtype")));
    t.rank = cJSON_GetArraySize(shape);
    assert_in_range(t.rank, 1, FMLA_MAX_RANK);
    for (int32_t i = 0; i < t.rank; i++) {
        t.shape[i] = (int64_t)cJSON_GetNumberValue(cJSON_GetArrayItem(shape, i));
        t.count *= t.shape[i];
    }
    size_t begin = (size_t)cJSON_GetNumberValue(cJSON_GetArrayItem(offsets, 0));
    size_t end = (size_t)cJSON_GetNumberValue(cJSON_GetArrayItem(offsets, 1));
    size_t element = t.dtype == FMLA_U8 ? 1 : t.dtype == FMLA_BF16 || t.dtype == FMLA_F16 ? 2 : 4;
    assert_true(t.dtype != FMLA_DTYPE_NONE && end - begin == (size_t)t.count * element);
    assert_true(g->data + end <= g->size);
    t.data = g->bytes + g->data + begin;
    return t;
}

void golden_close(golden *g)
{
    cJSON_Delete(g->header);
    free(g->bytes);
    free(g);
}
