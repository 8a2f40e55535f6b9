/* SPDX-License-Identifier: MIT */
/* supports.c: the table of supports.h, and the question that reads it. */
#include "supports.h"

#include <stdio.h>

#include "../format/format.h"
#include "check.h"
#include "context.h"
#include "read.h"

/* What an operation takes. d_qk, d_v: 1..max; 0: it has none. */
typedef struct rule {
    uint32_t dtypes; /* of q, or of the rows that are cast or merged; 0: not asked */
    bool cache;      /* has a KV cache, kv_format */
    bool second;     /* has a second one: the extra scope, or convert's destination */
    bool attends;    /* reads its caches as attention does: main rules, legal pairs, q's dtype in plain caches */
    bool heads;      /* h_kv > 1, where the format allows */
    int32_t d_qk_min, d_qk_max;
    int32_t d_v_min, d_v_max;
} rule;

#define BF16_ONLY FMLAI_BIT(FMLA_BF16)

/* clang-format off */
static const rule rules[FMLA_OP_COUNT] = {
    /*                          dtypes        cache  second attends heads  d_qk                d_v */
    [FMLA_OP_DENSE_DECODE] =    {FMLAI_HALF,   true,  false, true,  true,  1, FMLAI_D_QK_MAX,  1, FMLAI_D_QK_MAX},
    [FMLA_OP_SPARSE_DECODE] =   {FMLAI_HALF,   true,  true,  true,  false, 1, FMLAI_D_QK_MAX,  1, FMLAI_D_QK_MAX},
    [FMLA_OP_SPARSE_PREFILL] =  {FMLAI_HALF,   true,  false, true,  true,  1, FMLAI_D_QK_MAX,  1, FMLAI_D_QK_MAX},
    [FMLA_OP_FUSED_PREFILL] =   {BF16_ONLY,    true,  false, true,  false, 512, 512,           512, 512},
    [FMLA_OP_FUSED_DECODE] =    {BF16_ONLY,    true,  true,  true,  false, 512, 512,           512, 512},
    [FMLA_OP_MHA_FORWARD] =     {FMLAI_HALF,   false, false, false, true,  1, FMLAI_MHA_D_MAX, 1, FMLAI_MHA_D_MAX},
    [FMLA_OP_MHA_BACKWARD] =    {FMLAI_HALF,   false, false, false, true,  1, FMLAI_MHA_D_MAX, 1, FMLAI_MHA_D_MAX},
    [FMLA_OP_QUANTIZE] =        {FMLAI_FLOATS, true,  false, false, true,  1, FMLAI_D_QK_MAX,  0, 0},
    [FMLA_OP_DEQUANTIZE] =      {FMLAI_FLOATS, true,  false, false, true,  1, FMLAI_D_QK_MAX,  0, 0},
    [FMLA_OP_CONVERT] =         {0,            true,  true,  false, true,  1, FMLAI_D_QK_MAX,  0, 0},
    [FMLA_OP_MERGE] =           {FMLAI_FLOATS, false, false, false, false, 0, 0,               0, 0},
    [FMLA_OP_PERMUTE_Q_B] =     {0,            false, false, false, false, 0, 0,               0, 0},
    [FMLA_OP_PERMUTE_WV] =      {0,            false, false, false, false, 0, 0,               0, 0},
    [FMLA_OP_INDICES_CONVERT] = {0,            false, false, false, false, 0, 0,               0, 0},
    [FMLA_OP_FP8_CAST] =        {FMLAI_FLOATS, false, false, false, false, 0, 0,               0, 0},
    [FMLA_OP_SCHEDULE] =        {0,            false, false, false, false, 0, 0,               0, 0},
};
/* clang-format on */

/* Legal pairs besides a format with itself. The layouts of a pair are those that were published together. */
static const int32_t pairs[][2] = {
    {FMLA_KV_V41, FMLA_KV_V41_FP4},
    {FMLA_KV_V41_PAGE, FMLA_KV_V41_FP4_PAGE},
};

#define refuse(...)      fmlai_fail(error, FMLA_ERROR_INVALID_ARGUMENT, __VA_ARGS__)
#define unsupported(...) fmlai_fail(error, FMLA_ERROR_UNSUPPORTED, __VA_ARGS__)

static bool is_plain(int32_t format)
{
    return format == FMLA_KV_BF16 || format == FMLA_KV_F16;
}

static bool is_format(int32_t format)
{
    return format == FMLA_KV_CUSTOM || fmlai_format_row((fmla_kv_format)format) != NULL;
}

static const char *format_name(int32_t format)
{
    const fmla_format_info *row = fmlai_format_row((fmla_kv_format)format);
    return row != NULL ? row->name : "custom";
}

/* What may stand in the extra scope beside `main`, for messages. */
static const char *partners(int32_t main, char *text, size_t size)
{
    snprintf(text, size, "%s", format_name(main));
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        if (pairs[i][0] == main) {
            snprintf(text, size, "%s, %s", format_name(main), format_name(pairs[i][1]));
        }
    }
    return text;
}

static bool pair_legal(int32_t main, int32_t extra)
{
    if (main == extra || main == FMLA_KV_CUSTOM || extra == FMLA_KV_CUSTOM) {
        return true;
    }
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; i++) {
        if (pairs[i][0] == main && pairs[i][1] == extra) {
            return true;
        }
    }
    return false;
}

static fmla_status check_formats(const rule *r, const fmla_support_query *q, fmlai_error *error)
{
    const char *operation = fmla_operation_name((fmla_operation)q->operation);
    const fmla_format_info *row = fmlai_format_row((fmla_kv_format)q->kv_format);
    char allowed[64];
    if (q->kv_format != FMLA_KV_NONE && (!r->cache || !is_format(q->kv_format))) {
        return refuse("kv: format is %d; allowed: %s", (int)q->kv_format,
                      r->cache ? "1..8, 100 (custom)" : "none in this operation");
    }
    if (q->extra_format != FMLA_KV_NONE && (!r->second || !is_format(q->extra_format))) {
        return refuse("extra_kv: format is %d; allowed: %s%s", (int)q->extra_format,
                      r->second ? "1..8, 100 (custom)" : "none in ", r->second ? "" : operation);
    }
    if (!r->attends) {
        return FMLA_OK;
    }
    if (row != NULL && row->extra_only) {
        return refuse("kv: format is %s; allowed: a main format, this one is legal as extra_kv only", row->name);
    }
    if (q->kv_format != FMLA_KV_NONE && q->extra_format != FMLA_KV_NONE && !pair_legal(q->kv_format, q->extra_format)) {
        return refuse("extra_kv: format is %s; allowed beside kv's %s: %s", format_name(q->extra_format),
                      format_name(q->kv_format), partners(q->kv_format, allowed, sizeof allowed));
    }
    if (q->operation == FMLA_OP_SPARSE_PREFILL || q->operation == FMLA_OP_FUSED_PREFILL) {
        if (q->kv_format != FMLA_KV_NONE && !is_plain(q->kv_format)) {
            return refuse("kv: format is %s; allowed in %s: bf16, f16", format_name(q->kv_format), operation);
        }
    }
    return FMLA_OK;
}

static fmla_status check_dtypes(const rule *r, const fmla_support_query *q, fmlai_error *error)
{
    bool known = q->q_dtype > 0 && q->q_dtype <= FMLA_F4_E2M1;
    if (q->q_dtype == FMLA_DTYPE_NONE || r->dtypes == 0) {
        return FMLA_OK;
    }
    if (!known || !(r->dtypes & FMLAI_BIT(q->q_dtype))) {
        return refuse("q: dtype is %s; allowed in %s: %s", fmla_dtype_name((fmla_dtype)q->q_dtype),
                      fmla_operation_name((fmla_operation)q->operation),
                      r->dtypes == BF16_ONLY    ? "BF16"
                      : r->dtypes == FMLAI_HALF ? "BF16, F16"
                                                : "BF16, F16, F32");
    }
    if (r->attends && is_plain(q->kv_format)) {
        const fmla_format_info *row = fmlai_format_row((fmla_kv_format)q->kv_format);
        if (row->element != q->q_dtype) {
            return refuse("kv: format is %s; allowed: the format of q's dtype, %s", row->name,
                          fmla_dtype_name((fmla_dtype)q->q_dtype));
        }
    }
    return FMLA_OK;
}

static fmla_status check_width(const char *name, int32_t value, int32_t low, int32_t high, fmla_operation operation,
                               fmlai_error *error)
{
    if (value == 0 || high == 0 || (value >= low && value <= high)) {
        return FMLA_OK;
    }
    if (low == high) {
        return unsupported("%s: %d; allowed in %s: %d", name, (int)value, fmla_operation_name(operation), (int)low);
    }
    return unsupported("%s: %d; allowed in %s: %d..%d", name, (int)value, fmla_operation_name(operation), (int)low,
                       (int)high);
}

static fmla_status check_widths(const rule *r, const fmla_support_query *q, fmlai_error *error)
{
    fmla_operation operation = (fmla_operation)q->operation;
    fmla_status status = check_width("d_qk", q->d_qk, r->d_qk_min, r->d_qk_max, operation, error);
    if (status == FMLA_OK) {
        status = check_width("d_v", q->d_v, r->d_v_min, r->d_v_max, operation, error);
    }
    if (status != FMLA_OK) {
        return status;
    }
    if (r->attends && q->d_v > q->d_qk && q->d_qk > 0) {
        return refuse("d_v: %d; allowed: at most d_qk, %d", (int)q->d_v, (int)q->d_qk);
    }
    const int32_t formats[2] = {q->kv_format, q->extra_format};
    for (int32_t i = 0; i < 2; i++) {
        const fmla_format_info *row = fmlai_format_row((fmla_kv_format)formats[i]);
        const char *name = i == 0 ? "kv" : "extra_kv";
        if (row == NULL || is_plain(formats[i])) {
            continue;
        }
        if (check_width(name, row->d_qk, r->d_qk_min, r->d_qk_max, operation, error) != FMLA_OK ||
            (q->d_qk > 0 && row->d_qk != q->d_qk)) {
            return refuse("%s: format %s has d_qk %d; allowed: a format of d_qk %d", name, row->name, (int)row->d_qk,
                          (int)(q->d_qk > 0 ? q->d_qk : r->d_qk_min));
        }
        if (r->attends && q->d_v > 0 && q->d_v != 512) {
            return unsupported("d_v: %d; allowed with format %s: 512", (int)q->d_v, row->name);
        }
    }
    return FMLA_OK;
}

static fmla_status check_heads(const rule *r, const fmla_support_query *q, fmlai_error *error)
{
    bool quantised = (q->kv_format != FMLA_KV_NONE && !is_plain(q->kv_format)) ||
                     (q->extra_format != FMLA_KV_NONE && !is_plain(q->extra_format));
    if (q->h_q < 0 || q->h_kv < 0) {
        return refuse("%s: %d; allowed: at least 1", q->h_q < 0 ? "h_q" : "h_kv", (int)(q->h_q < 0 ? q->h_q : q->h_kv));
    }
    if (q->h_kv > 1 && quantised) {
        return refuse("h_kv: %d; allowed with a quantised format: 1", (int)q->h_kv);
    }
    if (q->h_kv > 1 && !r->heads) {
        return refuse("h_kv: %d; allowed in %s: 1", (int)q->h_kv, fmla_operation_name((fmla_operation)q->operation));
    }
    if (q->h_q > 0 && q->h_kv > 0 && q->h_q % q->h_kv != 0) {
        return refuse("h_q: %d; allowed: a multiple of h_kv, %d", (int)q->h_q, (int)q->h_kv);
    }
    return FMLA_OK;
}

fmla_status fmlai_supports(const fmla_support_query *q, fmlai_error *error)
{
    if (q->operation < 0 || q->operation >= FMLA_OP_COUNT) {
        return refuse("operation: %d; allowed: 0..%d", (int)q->operation, FMLA_OP_COUNT - 1);
    }
    const rule *r = &rules[q->operation];
    fmla_status status = check_formats(r, q, error);
    if (status == FMLA_OK) {
        status = check_dtypes(r, q, error);
    }
    if (status == FMLA_OK) {
        status = check_widths(r, q, error);
    }
    if (status == FMLA_OK) {
        status = check_heads(r, q, error);
    }
    return status;
}

/* ---- the backend's part ---------------------------------------------------------------------------------------- */

/* A backend leaves a function NULL to say that it lacks the operation. */
static bool offered(const fmlai_backend *b, fmla_operation operation)
{
    switch (operation) {
    case FMLA_OP_DENSE_DECODE:
    case FMLA_OP_SPARSE_DECODE:
    case FMLA_OP_SPARSE_PREFILL:
    case FMLA_OP_FUSED_PREFILL:
    case FMLA_OP_FUSED_DECODE:
        return b->mqa != NULL;
    case FMLA_OP_MHA_FORWARD:
        return b->mha_forward != NULL;
    case FMLA_OP_MHA_BACKWARD:
        return b->mha_backward != NULL;
    case FMLA_OP_QUANTIZE:
        return b->quantize != NULL;
    case FMLA_OP_DEQUANTIZE:
        return b->dequantize != NULL;
    case FMLA_OP_CONVERT:
        return b->convert != NULL;
    case FMLA_OP_MERGE:
        return b->merge != NULL;
    case FMLA_OP_PERMUTE_Q_B:
    case FMLA_OP_PERMUTE_WV:
        return b->permute != NULL;
    case FMLA_OP_INDICES_CONVERT:
        return b->indices_convert != NULL;
    case FMLA_OP_FP8_CAST:
        return b->fp8_cast != NULL;
    case FMLA_OP_SCHEDULE:
        return b->schedule != NULL;
    case FMLA_OP_COUNT:
        break;
    }
    return false;
}

fmla_status fmlai_context_supports(const fmla_context *context, const fmla_support_query *query, fmlai_error *error)
{
    const fmlai_backend *backend = context->backend;
    fmla_status status = fmlai_supports(query, error);
    if (status != FMLA_OK) {
        return status;
    }
    if (!offered(backend, (fmla_operation)query->operation)) {
        return unsupported("%s: not offered by the %s device", fmla_operation_name((fmla_operation)query->operation),
                           backend->name);
    }
    if (backend->supports != NULL && !backend->supports(context->state, query, error)) {
        error->status = FMLA_ERROR_UNSUPPORTED;
        return FMLA_ERROR_UNSUPPORTED;
    }
    return FMLA_OK;
}

int32_t fmla_supports(fmla_context *context, const fmla_support_query *query)
{
    fmla_support_query q;
    fmlai_error error = {.status = FMLA_OK};
    if (context == NULL) {
        return 0;
    }
    fmla_status status = fmlai_args_read(&q, sizeof q, query, "query", &error);
    if (status == FMLA_OK) {
        status = fmlai_context_supports(context, &q, &error);
    }
    /* The sentence goes where fmla_context_error finds it, unless a call is running that owns the place. */
    if (status != FMLA_OK && !atomic_flag_test_and_set(&context->running)) {
        context->error = error;
        atomic_flag_clear(&context->running);
    }
    return status == FMLA_OK;
}
