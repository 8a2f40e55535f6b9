/* SPDX-License-Identifier: MIT */
/*
 * safetensors_write.c: writing. Tensors are laid out by falling element size behind a padded header, so that each is
 * aligned for its type.
 */
#include "file/output_file.h"
#include "file/safetensors.h"
#include "file/safetensors_text.h"

#include <cJSON.h>
#include <stdlib.h>
#include <string.h>

static const char *dtype_text(int32_t dtype)
{
    switch (dtype) {
    case FMLA_BF16: return "BF16";
    case FMLA_F16: return "F16";
    case FMLA_F32: return "F32";
    case FMLA_F64: return "F64";
    case FMLA_I32: return "I32";
    case FMLA_I64: return "I64";
    case FMLA_U8: return "U8";
    case FMLA_F8_E4M3: return "F8_E4M3";
    case FMLA_F8_E8M0: return "F8_E8M0";
    default: return NULL;
    }
}

static size_t tensor_bytes(const fmla_tensor *tensor)
{
    size_t bytes = fmla_dtype_size((fmla_dtype)tensor->dtype);

    for (int32_t i = 0; i < tensor->rank; i++) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

static bool is_contiguous(const fmla_tensor *tensor)
{
    int64_t stride = 1;

    for (int32_t i = tensor->rank - 1; i >= 0; i--) {
        if (tensor->shape[i] > 1 && tensor->stride[i] != stride) {
            return false;
        }
        stride *= tensor->shape[i];
    }
    return true;
}

int st_add(st_file *file, const char *name, fmla_tensor tensor, char *error, size_t error_size)
{
    if (dtype_text(tensor.dtype) == NULL || tensor.rank < 1 || tensor.rank > FMLA_MAX_RANK ||
        !is_contiguous(&tensor)) {
        return st_fail(error, error_size, "tensor '%.128s' cannot be written: dtype, rank or strides", name);
    }
    if (strcmp(name, "__metadata__") == 0 || st_find(file, name) != NULL ||
        !st_utf8_valid(name, strlen(name))) {
        return st_fail(error, error_size, "tensor name '%.128s' is reserved, taken or not UTF-8", name);
    }
    st_entry *entries = realloc(file->entries, (file->count + 1) * sizeof *entries);
    if (entries != NULL) {
        file->entries = entries;
        entries[file->count].name = strdup(name);
        entries[file->count].tensor = tensor;
    }
    if (entries == NULL || entries[file->count].name == NULL) {
        return st_fail(error, error_size, "not enough memory");
    }
    file->count++;
    return 0;
}

int st_add_meta(st_file *file, const char *key, const char *value, char *error, size_t error_size)
{
    char **meta = realloc(file->meta, (2 * file->meta_count + 2) * sizeof *meta);

    if (meta == NULL) {
        return st_fail(error, error_size, "not enough memory");
    }
    file->meta = meta;
    meta[2 * file->meta_count] = strdup(key);
    meta[2 * file->meta_count + 1] = strdup(value);
    if (meta[2 * file->meta_count] == NULL || meta[2 * file->meta_count + 1] == NULL) {
        free(meta[2 * file->meta_count]);
        free(meta[2 * file->meta_count + 1]);
        return st_fail(error, error_size, "not enough memory");
    }
    file->meta_count++;
    return 0;
}

/* Order of the data: falling element size, else as added. */
static size_t *data_order(const st_file *file)
{
    size_t *order = malloc((file->count + 1) * sizeof *order);
    size_t used = 0;

    for (size_t size = 8; order != NULL && size > 0; size /= 2) {
        for (size_t i = 0; i < file->count; i++) {
            if (fmla_dtype_size((fmla_dtype)file->entries[i].tensor.dtype) == size) {
                order[used++] = i;
            }
        }
    }
    return order;
}

static cJSON *describe(const st_entry *entry, uint64_t begin)
{
    cJSON *item = cJSON_CreateObject();
    cJSON *shape = cJSON_AddArrayToObject(item, "shape");
    cJSON *offsets = cJSON_AddArrayToObject(item, "data_offsets");

    cJSON_AddStringToObject(item, "dtype", dtype_text(entry->tensor.dtype));
    for (int32_t i = 0; i < entry->tensor.rank; i++) {
        cJSON_AddItemToArray(shape, cJSON_CreateNumber((double)entry->tensor.shape[i]));
    }
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)begin));
    cJSON_AddItemToArray(offsets, cJSON_CreateNumber((double)(begin + tensor_bytes(&entry->tensor))));
    return item;
}

/* Size and JSON, padded so that the data begins at a multiple of 64; NULL without memory. */
static char *make_header(const st_file *file, const size_t *order, size_t *size)
{
    cJSON *tree = cJSON_CreateObject();
    uint64_t at = 0;

    if (file->meta_count > 0) {
        cJSON *meta = cJSON_AddObjectToObject(tree, "__metadata__");
        for (size_t i = 0; i < file->meta_count; i++) {
            cJSON_AddStringToObject(meta, file->meta[2 * i], file->meta[2 * i + 1]);
        }
    }
    for (size_t i = 0; i < file->count; i++) {
        const st_entry *entry = &file->entries[order[i]];
        cJSON_AddItemToObject(tree, entry->name, describe(entry, at));
        at += tensor_bytes(&entry->tensor);
    }
    char *text = cJSON_PrintUnformatted(tree);
    cJSON_Delete(tree);
    if (text == NULL) {
        return NULL;
    }
    size_t length = strlen(text);
    *size = (8 + length + 63) / 64 * 64;
    char *header = malloc(*size);
    if (header != NULL) {
        for (int i = 0; i < 8; i++) {
            header[i] = (char)((uint64_t)(*size - 8) >> (8 * i));
        }
        memcpy(header + 8, text, length);
        memset(header + 8 + length, ' ', *size - 8 - length);
    }
    cJSON_free(text);
    return header;
}

int st_write(const st_file *file, const char *path, char *error, size_t error_size)
{
    output_file out;
    size_t header_size = 0;
    size_t *order = data_order(file);
    char *header = order == NULL ? NULL : make_header(file, order, &header_size);
    int result;

    if (header == NULL) {
        result = st_fail(error, error_size, "%s: not enough memory", path);
    } else if (header_size - 8 > ST_MAX_HEADER) {
        result = st_fail(error, error_size, "%s: too many tensors: the header would be %zu bytes", path,
                         header_size);
    } else {
        result = output_begin(&out, path, error, error_size);
        if (result == 0) {
            result = output_put(&out, header, header_size, error, error_size);
        }
        for (size_t i = 0; i < file->count && result == 0; i++) {
            const fmla_tensor *tensor = &file->entries[order[i]].tensor;
            result = output_put(&out, tensor->data, tensor_bytes(tensor), error, error_size);
        }
        if (result == 0) {
            result = output_commit(&out, error, error_size);
        }
    }
    free(header);
    free(order);
    return result;
}
