/* SPDX-License-Identifier: MIT */
/*
 * safetensors.c: reading. A file is a little-endian u64 n, n bytes of JSON (name -> dtype, shape,
 * data_offsets, and "__metadata__": string -> string), then the data. Everything in it is a claim until it is
 * checked: the ranges must tile the data exactly, so that no byte is shared, missing or outside.
 */
#include "file/safetensors.h"
#include "file/safetensors_text.h"

#include <cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct range {
    uint64_t begin;
    uint64_t end;
    size_t entry;
} range;

/* dtype names of the file format, their bytes, and what they are to the library. */
static const struct dtype_row {
    const char *name;
    int32_t bytes;
    fmla_dtype dtype;
} dtype_rows[] = {
    {"BF16", 2, FMLA_BF16},          {"F16", 2, FMLA_F16},          {"F32", 4, FMLA_F32},
    {"F64", 8, FMLA_F64},            {"I32", 4, FMLA_I32},          {"I64", 8, FMLA_I64},
    {"U8", 1, FMLA_U8},              {"I8", 1, FMLA_U8},            {"BOOL", 1, FMLA_U8},
    {"F8_E4M3", 1, FMLA_F8_E4M3},    {"F8_E8M0", 1, FMLA_F8_E8M0},  {"F8_E5M2", 1, FMLA_DTYPE_NONE},
    {"I16", 2, FMLA_DTYPE_NONE},     {"U16", 2, FMLA_DTYPE_NONE},   {"U32", 4, FMLA_DTYPE_NONE},
    {"U64", 8, FMLA_DTYPE_NONE},
};

static const struct dtype_row *find_dtype(const char *name)
{
    for (size_t i = 0; i < sizeof dtype_rows / sizeof dtype_rows[0]; i++) {
        if (strcmp(name, dtype_rows[i].name) == 0) {
            return &dtype_rows[i];
        }
    }
    return NULL;
}

int st_fail(char *error, size_t error_size, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(error, error_size, format, arguments);
    va_end(arguments);
    for (char *c = error; *c != '\0'; c++) {
        *c = (unsigned char)*c < 0x20 || *c == 0x7F ? ' ' : *c; /* names in files may hold anything */
    }
    return -1;
}

/* Well-formed UTF-8 of RFC 3629: shortest forms, no surrogates, at most U+10FFFF. */
bool st_utf8_valid(const char *text, size_t size)
{
    const unsigned char *s = (const unsigned char *)text;

    for (size_t i = 0; i < size;) {
        unsigned char lead = s[i++];
        if (lead < 0x80) {
            continue;
        }
        if (lead < 0xC2 || lead > 0xF4) {
            return false;
        }
        size_t more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
        unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (size - i < more || s[i] < low || s[i] > high) {
            return false;
        }
        for (size_t k = 1; k < more; k++) {
            if (s[i + k] < 0x80 || s[i + k] > 0xBF) {
                return false;
            }
        }
        i += more;
    }
    return true;
}

/* A whole number from JSON in 0..2^53, where doubles count exactly. */
static bool json_count(const cJSON *item, uint64_t *value)
{
    if (!cJSON_IsNumber(item) || !(item->valuedouble >= 0) || item->valuedouble > 9007199254740992.0 ||
        item->valuedouble != floor(item->valuedouble)) {
        return false;
    }
    *value = (uint64_t)item->valuedouble;
    return true;
}

static int map_file(st_file *file, const char *path, char *error, size_t error_size)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0) {
        return st_fail(error, error_size, "%s: %s", path, strerror(errno));
    }
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        close(fd);
        return st_fail(error, error_size, "%s: not a regular file", path);
    }
    if (status.st_size < 8) {
        close(fd);
        return st_fail(error, error_size, "%s: not a safetensors file: %lld bytes, at least 8 are needed",
                       path, (long long)status.st_size);
    }
    file->mapping_size = (size_t)status.st_size;
    file->mapping = mmap(NULL, file->mapping_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file->mapping == MAP_FAILED) {
        file->mapping = NULL;
        return st_fail(error, error_size, "%s: cannot map the file: %s", path, strerror(errno));
    }
    return 0;
}

/* The checked header as a JSON tree, and where the data begins. */
static cJSON *parse_header(const st_file *file, const char *path, uint64_t *data_begin, char *error,
                           size_t error_size)
{
    const unsigned char *bytes = file->mapping;
    uint64_t size = 0;

    for (int i = 7; i >= 0; i--) {
        size = size << 8 | bytes[i];
    }
    if (size > ST_MAX_HEADER || size > file->mapping_size - 8) {
        st_fail(error, error_size,
                "%s: the header claims %llu bytes; the file has %zu after its size, and %d is the most", path,
                (unsigned long long)size, file->mapping_size - 8, ST_MAX_HEADER);
        return NULL;
    }
    const char *text = (const char *)bytes + 8;
    if (size < 2 || text[0] != '{') {
        st_fail(error, error_size, "%s: the header is not a JSON object", path);
        return NULL;
    }
    if (!st_utf8_valid(text, size)) {
        st_fail(error, error_size, "%s: the header is not UTF-8", path);
        return NULL;
    }
    if (memchr(text, '\0', size) != NULL || memmem(text, size, "\\u0000", 6) != NULL) {
        st_fail(error, error_size, "%s: the header holds a NUL character", path);
        return NULL;
    }
    const char *end = NULL;
    cJSON *tree = cJSON_ParseWithLengthOpts(text, size, &end, 0);
    if (tree == NULL) {
        st_fail(error, error_size, "%s: the header is not JSON: fault near byte %lld", path,
                end == NULL ? 0LL : (long long)(end - text));
        return NULL;
    }
    while (end < text + size && (*end == ' ' || *end == '\n' || *end == '\t' || *end == '\r')) {
        end++;
    }
    if (end != text + size) {
        cJSON_Delete(tree);
        st_fail(error, error_size, "%s: the header goes on after its JSON object, at byte %lld", path,
                (long long)(end - text));
        return NULL;
    }
    *data_begin = 8 + size;
    return tree;
}

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A key that occurs twice among count pairs, or NULL. */
static const char *find_twice(char **pairs, size_t count)
{
    const char *twice = NULL;
    const char **keys = malloc((count + 1) * sizeof *keys);

    for (size_t i = 0; i < count && keys != NULL; i++) {
        keys[i] = pairs[2 * i];
    }
    if (keys != NULL) {
        qsort(keys, count, sizeof *keys, compare_texts);
    }
    for (size_t i = 1; i < count && keys != NULL && twice == NULL; i++) {
        twice = strcmp(keys[i - 1], keys[i]) == 0 ? keys[i] : NULL;
    }
    free(keys);
    return twice;
}

static int read_meta(st_file *file, const cJSON *meta, const char *path, char *error, size_t error_size)
{
    if (!cJSON_IsObject(meta)) {
        return st_fail(error, error_size, "%s: __metadata__ is not an object", path);
    }
    file->meta = calloc(2 * (size_t)cJSON_GetArraySize(meta) + 1, sizeof *file->meta);
    for (const cJSON *item = meta->child; item != NULL && file->meta != NULL; item = item->next) {
        if (!cJSON_IsString(item)) {
            return st_fail(error, error_size, "%s: __metadata__: '%.128s' is not a string", path, item->string);
        }
        char **pair = &file->meta[2 * file->meta_count++];
        pair[0] = strdup(item->string);
        pair[1] = strdup(item->valuestring);
        if (pair[0] == NULL || pair[1] == NULL) {
            return st_fail(error, error_size, "%s: not enough memory", path);
        }
    }
    const char *twice = find_twice(file->meta, file->meta_count);
    return twice == NULL ? 0 : st_fail(error, error_size, "%s: __metadata__: '%.128s' occurs twice", path, twice);
}

/* Shape: elements counted without overflow; the product is bounded by what a file can hold. */
static int read_shape(const cJSON *shape, fmla_tensor *tensor, uint64_t *elements, const char *label,
                      char *error, size_t error_size)
{
    int64_t dims[FMLA_MAX_RANK] = {1};
    int rank = 0;
    bool empty = false;

    *elements = 1;
    if (!cJSON_IsArray(shape)) {
        return st_fail(error, error_size, "%s: 'shape' is not an array", label);
    }
    for (const cJSON *item = shape->child; item != NULL; item = item->next) {
        uint64_t n = 0;
        if (rank == FMLA_MAX_RANK) {
            return st_fail(error, error_size, "%s: more than %d dimensions", label, FMLA_MAX_RANK);
        }
        if (!json_count(item, &n)) {
            return st_fail(error, error_size, "%s: dimension %d is not a whole number in 0..2^53", label,
                           rank);
        }
        empty = empty || n == 0;
        if (n != 0 && __builtin_mul_overflow(*elements, n, elements)) {
            return st_fail(error, error_size, "%s: the number of elements does not fit 64 bits", label);
        }
        dims[rank++] = (int64_t)n;
    }
    if (*elements > INT64_MAX) {
        return st_fail(error, error_size, "%s: the number of elements does not fit 63 bits", label);
    }
    *elements = empty ? 0 : *elements;
    *tensor = fmla_tensor_nd(NULL, FMLA_DTYPE_NONE, rank == 0 ? 1 : rank, dims);
    return 0;
}

static int read_entry(st_file *file, const cJSON *item, uint64_t data_size, range *where, char *error,
                      size_t error_size, const char *path)
{
    char label[512];
    st_entry *entry = &file->entries[file->count];
    const cJSON *dtype = cJSON_GetObjectItemCaseSensitive(item, "dtype");
    const cJSON *offsets = cJSON_GetObjectItemCaseSensitive(item, "data_offsets");
    uint64_t elements = 0;
    uint64_t bytes = 0;

    snprintf(label, sizeof label, "%s: tensor '%.128s'", path, item->string);
    if (!cJSON_IsObject(item) || !cJSON_IsString(dtype)) {
        return st_fail(error, error_size, "%s: no dtype, shape and data_offsets", label);
    }
    if (cJSON_GetArraySize(item) != 3) {
        return st_fail(error, error_size, "%s: other fields than dtype, shape and data_offsets", label);
    }
    const struct dtype_row *row = find_dtype(dtype->valuestring);
    if (row == NULL) {
        return st_fail(error, error_size, "%s: unknown dtype '%.32s'", label, dtype->valuestring);
    }
    if (read_shape(cJSON_GetObjectItemCaseSensitive(item, "shape"), &entry->tensor, &elements, label, error,
                   error_size) != 0) {
        return -1;
    }
    if (!cJSON_IsArray(offsets) || cJSON_GetArraySize(offsets) != 2 ||
        !json_count(offsets->child, &where->begin) || !json_count(offsets->child->next, &where->end)) {
        return st_fail(error, error_size, "%s: 'data_offsets' is not two whole numbers", label);
    }
    if (where->begin > where->end || where->end > data_size) {
        return st_fail(error, error_size, "%s: data_offsets [%llu, %llu] are not inside the %llu data bytes",
                       label, (unsigned long long)where->begin, (unsigned long long)where->end,
                       (unsigned long long)data_size);
    }
    if (__builtin_mul_overflow(elements, (uint64_t)row->bytes, &bytes) ||
        bytes != where->end - where->begin) {
        return st_fail(error, error_size,
                       "%s: data_offsets hold %llu bytes; dtype %s and the shape need %llu * %d", label,
                       (unsigned long long)(where->end - where->begin), row->name,
                       (unsigned long long)elements, row->bytes);
    }
    entry->tensor.dtype = row->dtype;
    entry->name = strdup(item->string);
    where->entry = file->count;
    if (entry->name == NULL) {
        return st_fail(error, error_size, "%s: not enough memory", path);
    }
    file->count++;
    return 0;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(((const st_entry *)a)->name, ((const st_entry *)b)->name);
}

static int compare_ranges(const void *a, const void *b)
{
    const range *x = a;
    const range *y = b;

    if (x->begin != y->begin) {
        return x->begin < y->begin ? -1 : 1;
    }
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The ranges must follow each other from 0 to the end: the format allows neither overlaps nor holes. */
static int check_tiling(const st_file *file, range *ranges, uint64_t data_size, const char *path, char *error,
                        size_t error_size)
{
    uint64_t at = 0;

    qsort(ranges, file->count, sizeof *ranges, compare_ranges);
    for (size_t i = 0; i < file->count; i++) {
        const char *name = file->entries[ranges[i].entry].name;
        if (ranges[i].begin != at) {
            return st_fail(error, error_size, "%s: tensor '%.128s' begins at data byte %llu, %s %llu", path,
                           name, (unsigned long long)ranges[i].begin,
                           ranges[i].begin < at ? "overlapping another that ends at"
                                                : "leaving a hole after the one before, which ends at",
                           (unsigned long long)at);
        }
        at = ranges[i].end;
    }
    if (at != data_size) {
        return st_fail(error, error_size, "%s: the tensors end at data byte %llu, the file holds %llu", path,
                       (unsigned long long)at, (unsigned long long)data_size);
    }
    return 0;
}

static uint64_t range_size(const range *r)
{
    return r->end - r->begin;
}

/* Points every tensor at its bytes; one that lies misaligned for its type (legal in a file) gets a copy. */
static int place_data(st_file *file, const range *ranges, const char *base)
{
    size_t total = 0;
    size_t at = 0;

    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < file->count; i++) {
            fmla_tensor *tensor = &file->entries[ranges[i].entry].tensor;
            size_t align = fmla_dtype_size((fmla_dtype)tensor->dtype);
            const char *data = base + ranges[i].begin;
            bool aligned = align < 2 || (uintptr_t)data % align == 0;
            size_t rounded = ((size_t)range_size(&ranges[i]) + 63) & ~(size_t)63;
            if (pass == 0) {
                total += aligned ? 0 : rounded;
            } else if (aligned) {
                tensor->data = (void *)(uintptr_t)data;
            } else {
                tensor->data = memcpy((char *)file->copies + at, data, range_size(&ranges[i]));
                at += rounded;
            }
        }
        if (pass == 0 && total > 0) {
            file->copies = aligned_alloc(64, total);
            if (file->copies == NULL) {
                return -1;
            }
        }
    }
    return 0;
}

static int read_tree(st_file *file, const cJSON *tree, uint64_t data_begin, range *ranges, const char *path,
                     char *error, size_t error_size)
{
    uint64_t data_size = file->mapping_size - data_begin;
    bool meta_seen = false;

    for (const cJSON *item = tree->child; item != NULL; item = item->next) {
        if (strcmp(item->string, "__metadata__") == 0) {
            if (meta_seen) {
                return st_fail(error, error_size, "%s: __metadata__ occurs twice", path);
            }
            meta_seen = true;
            if (read_meta(file, item, path, error, error_size) != 0) {
                return -1;
            }
        } else if (read_entry(file, item, data_size, &ranges[file->count], error, error_size, path) != 0) {
            return -1;
        }
    }
    if (check_tiling(file, ranges, data_size, path, error, error_size) != 0) {
        return -1;
    }
    if (place_data(file, ranges, (const char *)file->mapping + data_begin) != 0) {
        return st_fail(error, error_size, "%s: not enough memory", path);
    }
    qsort(file->entries, file->count, sizeof *file->entries, compare_names);
    for (size_t i = 1; i < file->count; i++) {
        if (strcmp(file->entries[i - 1].name, file->entries[i].name) == 0) {
            return st_fail(error, error_size, "%s: tensor '%.128s' occurs twice", path,
                           file->entries[i].name);
        }
    }
    return 0;
}

int st_read(st_file *file, const char *path, char *error, size_t error_size)
{
    uint64_t data_begin = 0;

    memset(file, 0, sizeof *file);
    if (map_file(file, path, error, error_size) != 0) {
        return -1;
    }
    cJSON *tree = parse_header(file, path, &data_begin, error, error_size);
    int result = -1;
    if (tree != NULL) {
        size_t count = (size_t)cJSON_GetArraySize(tree);
        range *ranges = calloc(count + 1, sizeof *ranges);
        file->entries = calloc(count + 1, sizeof *file->entries);
        if (ranges == NULL || file->entries == NULL) {
            st_fail(error, error_size, "%s: not enough memory", path);
        } else {
            result = read_tree(file, tree, data_begin, ranges, path, error, error_size);
        }
        free(ranges);
        cJSON_Delete(tree);
    }
    if (result != 0) {
        st_free(file);
    }
    return result;
}

void st_free(st_file *file)
{
    for (size_t i = 0; i < file->count; i++) {
        free(file->entries[i].name);
    }
    for (size_t i = 0; i < 2 * file->meta_count; i++) {
        free(file->meta[i]);
    }
    free(file->entries);
    free(file->meta);
    free(file->copies);
    if (file->mapping != NULL) {
        munmap(file->mapping, file->mapping_size);
    }
    memset(file, 0, sizeof *file);
}

const fmla_tensor *st_find(const st_file *file, const char *name)
{
    for (size_t i = 0; i < file->count; i++) {
        if (strcmp(file->entries[i].name, name) == 0) {
            return &file->entries[i].tensor;
        }
    }
    return NULL;
}

const char *st_meta(const st_file *file, const char *key)
{
    for (size_t i = 0; i < file->meta_count; i++) {
        if (strcmp(file->meta[2 * i], key) == 0) {
            return file->meta[2 * i + 1];
        }
    }
    return NULL;
}
