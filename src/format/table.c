/* SPDX-License-Identifier: MIT */
/*
 * The table of formats, made from formats.def, and the rules that a description of a format must keep. The
 * generic reader and writer of token.c and write.c believe a description, so everything they rely on is
 * checked here.
 */
#include "format.h"

#define FMLAI_FORMAT(symbol, text, layout_, d_qk_, quant, rope, element_, group_, scale_, bytes, data_row, scale_row,  \
                     scale_at, rope_at, extra)                                                                         \
    {.struct_size = sizeof(fmla_format_info),                                                                          \
     .format = FMLA_KV_##symbol,                                                                                       \
     .layout = FMLA_LAYOUT_##layout_,                                                                                  \
     .name = text,                                                                                                     \
     .d_qk = d_qk_,                                                                                                    \
     .quant_dims = quant,                                                                                              \
     .rope_dims = rope,                                                                                                \
     .element = FMLA_##element_,                                                                                       \
     .group = group_,                                                                                                  \
     .scale = FMLA_##scale_,                                                                                           \
     .bytes_per_token = bytes,                                                                                         \
     .data_row_bytes = data_row,                                                                                       \
     .scale_row_bytes = scale_row,                                                                                     \
     .scale_offset = scale_at,                                                                                         \
     .rope_offset = rope_at,                                                                                           \
     .extra_only = extra},

static const fmla_format_info rows[] = {
#include "formats.def"
};

#undef FMLAI_FORMAT

const fmla_format_info *fmlai_format_row(fmla_kv_format format)
{
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].format == (int32_t)format) {
            return &rows[i];
        }
    }
    return NULL;
}

int64_t fmlai_format_token_bytes(const fmla_format_info *info, int32_t d_qk)
{
    return info->layout == FMLA_LAYOUT_PLAIN ? (int64_t)2 * d_qk : info->bytes_per_token;
}

int32_t fmlai_scale_bytes(const fmla_format_info *info)
{
    switch (info->scale) {
    case FMLA_F32:
        return 4;
    case FMLA_F8_E8M0:
    case FMLA_F8_E4M3:
        return 1;
    default:
        return 0;
    }
}

/* Bytes first..first+size-1 of a row, in 64 bits, so that no description can overflow. */
typedef struct span {
    int64_t first, size;
} span;

static bool inside(span part, int64_t row_bytes)
{
    return part.first >= 0 && part.first + part.size <= row_bytes;
}

static bool overlap(span a, span b)
{
    return a.size > 0 && b.size > 0 && a.first < b.first + b.size && b.first < a.first + a.size;
}

static const char *fault_of_elements(const fmla_format_info *f)
{
    if (f->layout != FMLA_LAYOUT_RECORD && f->layout != FMLA_LAYOUT_PAGE) {
        return "layout must be RECORD or PAGE";
    }
    if (f->element != FMLA_F8_E4M3 && f->element != FMLA_F4_E2M1) {
        return "element must be F8_E4M3 or F4_E2M1";
    }
    if (f->quant_dims < 1) {
        return "quant_dims must be at least 1";
    }
    if (f->element == FMLA_F4_E2M1 && f->quant_dims % 2 != 0) {
        return "quant_dims of F4_E2M1 codes must be even";
    }
    if (f->rope_dims < 0) {
        return "rope_dims must not be negative";
    }
    if ((int64_t)f->quant_dims + f->rope_dims != f->d_qk) {
        return "d_qk must be quant_dims + rope_dims";
    }
    return NULL;
}

static const char *fault_of_scales(const fmla_format_info *f)
{
    if (f->scale == FMLA_DTYPE_NONE) {
        return f->group != 0 ? "group must be 0 when scale is NONE" : NULL;
    }
    if (fmlai_scale_bytes(f) == 0) {
        return "scale must be NONE, F32, F8_E8M0 or F8_E4M3";
    }
    if (f->group < 1) {
        return "group must be at least 1 when there are scales";
    }
    if (f->quant_dims % f->group != 0) {
        return "group must divide quant_dims";
    }
    return NULL;
}

static const char *fault_of_offsets(const fmla_format_info *f)
{
    span codes = {0, f->element == FMLA_F4_E2M1 ? f->quant_dims / 2 : f->quant_dims};
    span rope = {f->rope_dims > 0 ? f->rope_offset : 0, (int64_t)2 * f->rope_dims};
    span scales = {f->group > 0 ? f->scale_offset : 0,
                   f->group > 0 ? (int64_t)fmlai_scale_bytes(f) * (f->quant_dims / f->group) : 0};
    if (f->layout == FMLA_LAYOUT_RECORD && (f->data_row_bytes != f->bytes_per_token || f->scale_row_bytes != 0)) {
        return "a RECORD has data_row_bytes = bytes_per_token and scale_row_bytes = 0";
    }
    if (f->scale_row_bytes < 0 || (int64_t)f->data_row_bytes + f->scale_row_bytes != f->bytes_per_token) {
        return "bytes_per_token must be data_row_bytes + scale_row_bytes";
    }
    if (!inside(codes, f->data_row_bytes)) {
        return "the codes do not fit into data_row_bytes";
    }
    if (!inside(rope, f->data_row_bytes)) {
        return "rope_offset puts the RoPE part outside the data row";
    }
    if (overlap(codes, rope)) {
        return "rope_offset puts the RoPE part onto the codes";
    }
    if (!inside(scales, f->layout == FMLA_LAYOUT_RECORD ? f->bytes_per_token : f->scale_row_bytes)) {
        return "scale_offset puts the scales outside their row";
    }
    if (f->layout == FMLA_LAYOUT_RECORD && (overlap(scales, codes) || overlap(scales, rope))) {
        return "scale_offset puts the scales onto the codes or the RoPE part";
    }
    return NULL;
}

bool fmlai_format_valid(const fmla_format_info *info, const char **why)
{
    const char *fault = fault_of_elements(info);
    fault = fault ? fault : fault_of_scales(info);
    fault = fault ? fault : fault_of_offsets(info);
    *why = fault ? fault : "";
    return !fault;
}
