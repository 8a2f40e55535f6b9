/* SPDX-License-Identifier: MIT */
/* names.c: words for the values of the API. Total functions: a value from elsewhere is "unknown". */
#include <string.h>

#include "../format/format.h"
#include "read.h"

static const char *const unknown = "unknown";

const char *fmla_status_string(fmla_status status)
{
    switch (status) {
    case FMLA_OK:
        return "ok";
    case FMLA_ERROR_INVALID_ARGUMENT:
        return "invalid argument";
    case FMLA_ERROR_UNSUPPORTED:
        return "unsupported";
    case FMLA_ERROR_WORKSPACE_TOO_SMALL:
        return "workspace too small";
    case FMLA_ERROR_BUSY:
        return "context busy with another call";
    case FMLA_ERROR_OUT_OF_MEMORY:
        return "out of memory";
    case FMLA_ERROR_NO_BACKEND:
        return "no CUDA backend on this machine";
    case FMLA_ERROR_NO_DEVICE:
        return "no such device";
    case FMLA_ERROR_UNSUPPORTED_DEVICE:
        return "unsupported device";
    case FMLA_ERROR_DEVICE:
        return "device failure";
    }
    return unknown;
}

const char *fmla_dtype_name(fmla_dtype dtype)
{
    switch (dtype) {
    case FMLA_DTYPE_NONE:
        return "NONE";
    case FMLA_BF16:
        return "BF16";
    case FMLA_F16:
        return "F16";
    case FMLA_F32:
        return "F32";
    case FMLA_F64:
        return "F64";
    case FMLA_I32:
        return "I32";
    case FMLA_I64:
        return "I64";
    case FMLA_U8:
        return "U8";
    case FMLA_F8_E4M3:
        return "F8_E4M3";
    case FMLA_F8_E8M0:
        return "F8_E8M0";
    case FMLA_F4_E2M1:
        return "F4_E2M1";
    }
    return unknown;
}

size_t fmla_dtype_size(fmla_dtype dtype)
{
    switch (dtype) {
    case FMLA_U8:
    case FMLA_F8_E4M3:
    case FMLA_F8_E8M0:
        return 1;
    case FMLA_BF16:
    case FMLA_F16:
        return 2;
    case FMLA_F32:
    case FMLA_I32:
        return 4;
    case FMLA_F64:
    case FMLA_I64:
        return 8;
    case FMLA_DTYPE_NONE:
    case FMLA_F4_E2M1:
        break;
    }
    return 0;
}

const char *fmla_isa_name(fmla_isa isa)
{
    switch (isa) {
    case FMLA_ISA_AUTO:
        return "auto";
    case FMLA_ISA_SCALAR:
        return "scalar";
    case FMLA_ISA_AVX2:
        return "avx2";
    case FMLA_ISA_AVX512BF16:
        return "avx512bf16";
    case FMLA_ISA_AMX:
        return "amx";
    case FMLA_ISA_NEON:
        return "neon";
    case FMLA_ISA_COUNT:
        break;
    }
    return unknown;
}

const char *fmla_device_name(fmla_device device)
{
    switch (device) {
    case FMLA_DEVICE_AUTO:
        return "auto";
    case FMLA_DEVICE_CPU:
        return "cpu";
    case FMLA_DEVICE_CUDA:
        return "cuda";
    case FMLA_DEVICE_ORACLE:
        return "oracle";
    }
    return unknown;
}

const char *fmla_operation_name(fmla_operation operation)
{
    static const char *const names[FMLA_OP_COUNT] = {
        [FMLA_OP_DENSE_DECODE] = "dense_decode",
        [FMLA_OP_SPARSE_DECODE] = "sparse_decode",
        [FMLA_OP_SPARSE_PREFILL] = "sparse_prefill",
        [FMLA_OP_FUSED_PREFILL] = "fused_prefill",
        [FMLA_OP_FUSED_DECODE] = "fused_decode",
        [FMLA_OP_MHA_FORWARD] = "mha_forward",
        [FMLA_OP_MHA_BACKWARD] = "mha_backward",
        [FMLA_OP_QUANTIZE] = "quantize",
        [FMLA_OP_DEQUANTIZE] = "dequantize",
        [FMLA_OP_CONVERT] = "convert",
        [FMLA_OP_MERGE] = "merge",
        [FMLA_OP_PERMUTE_Q_B] = "permute_q_b",
        [FMLA_OP_PERMUTE_WV] = "permute_wv",
        [FMLA_OP_INDICES_CONVERT] = "indices_convert",
        [FMLA_OP_FP8_CAST] = "fp8_cast",
        [FMLA_OP_SCHEDULE] = "schedule",
    };
    return (int32_t)operation >= 0 && operation < FMLA_OP_COUNT ? names[operation] : unknown;
}

fmla_status fmla_format_get(fmla_kv_format format, fmla_format_info *info)
{
    const fmla_format_info *row = fmlai_format_row(format);
    fmlai_error error;
    return row == NULL ? FMLA_ERROR_INVALID_ARGUMENT : fmlai_args_write(info, row, sizeof *row, "info", &error);
}

fmla_kv_format fmla_format_by_name(const char *name)
{
    for (int32_t f = FMLA_KV_NONE + 1; name != NULL && f < FMLA_KV_COUNT; f++) {
        const fmla_format_info *row = fmlai_format_row((fmla_kv_format)f);
        if (row != NULL && strcmp(row->name, name) == 0) {
            return (fmla_kv_format)f;
        }
    }
    return FMLA_KV_NONE;
}

int32_t fmla_version(void)
{
    return FMLA_VERSION;
}
