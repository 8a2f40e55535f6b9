/* SPDX-License-Identifier: MIT */
/*
 * A caller as release 0.1.0 knew the API: every function through a pointer of its exact type, every args struct from
 * its INIT, in C99 and C++. It is never changed to follow the header: if it stops compiling, a downstream breaks.
 */
#include <stdio.h>
#include <string.h>

#include <flashmla/flashmla.h>

typedef fmla_status (*sizer)(fmla_context *, const fmla_decode_args *, size_t *);

typedef struct api {
    fmla_status (*context_create)(const fmla_context_config *, fmla_context **);
    void (*context_destroy)(fmla_context *);
    const char *(*context_error)(const fmla_context *);
    const char *(*last_create_error)(void);
    fmla_device (*context_device)(const fmla_context *);
    fmla_isa (*context_isa)(const fmla_context *);
    int32_t (*context_threads)(const fmla_context *);
    fmla_status (*context_reserve)(fmla_context *, size_t);
    fmla_status (*decode)(fmla_context *, const fmla_decode_args *, void *);
    sizer decode_size;
    fmla_status (*prefill)(fmla_context *, const fmla_prefill_args *, void *);
    fmla_status (*prefill_size)(fmla_context *, const fmla_prefill_args *, size_t *);
    fmla_status (*fused_prefill)(fmla_context *, const fmla_fused_prefill_args *, void *);
    fmla_status (*fused_prefill_size)(fmla_context *, const fmla_fused_prefill_args *, size_t *);
    fmla_status (*fused_decode)(fmla_context *, const fmla_fused_decode_args *, void *);
    fmla_status (*fused_decode_size)(fmla_context *, const fmla_fused_decode_args *, size_t *);
    fmla_status (*mha_forward)(fmla_context *, const fmla_mha_forward_args *, void *);
    fmla_status (*mha_forward_size)(fmla_context *, const fmla_mha_forward_args *, size_t *);
    fmla_status (*mha_backward)(fmla_context *, const fmla_mha_backward_args *, void *);
    fmla_status (*mha_backward_size)(fmla_context *, const fmla_mha_backward_args *, size_t *);
    fmla_status (*quantize)(fmla_context *, const fmla_quantize_args *, void *);
    fmla_status (*dequantize)(fmla_context *, const fmla_dequantize_args *, void *);
    fmla_status (*convert)(fmla_context *, const fmla_convert_args *, void *);
    fmla_status (*indices_convert)(fmla_context *, const fmla_indices_convert_args *, void *);
    fmla_status (*fp8_cast)(fmla_context *, const fmla_fp8_cast_args *, void *);
    fmla_status (*merge)(fmla_context *, const fmla_merge_args *, void *);
    fmla_status (*permute_q_b)(fmla_context *, const fmla_permute_q_b_args *, void *);
    fmla_status (*permute_wv)(fmla_context *, const fmla_permute_wv_args *, void *);
    fmla_status (*schedule)(fmla_context *, const fmla_schedule_args *, void *);
    int32_t (*supports)(fmla_context *, const fmla_support_query *);
    fmla_status (*format_get)(fmla_kv_format, fmla_format_info *);
    fmla_kv_format (*format_by_name)(const char *);
    int32_t (*isa_available)(fmla_isa);
    fmla_status (*device_get)(fmla_device, int32_t, fmla_device_info *);
    const char *(*status_string)(fmla_status);
    const char *(*dtype_name)(fmla_dtype);
    const char *(*isa_name)(fmla_isa);
    const char *(*device_name)(fmla_device);
    const char *(*operation_name)(fmla_operation);
    size_t (*dtype_size)(fmla_dtype);
    int32_t (*version)(void);
} api;

static const api all = {
    fmla_context_create,  fmla_context_destroy,
    fmla_context_error,   fmla_last_create_error,
    fmla_context_device,  fmla_context_isa,
    fmla_context_threads, fmla_context_reserve,
    fmla_decode,          fmla_decode_workspace_size,
    fmla_prefill,         fmla_prefill_workspace_size,
    fmla_fused_prefill,   fmla_fused_prefill_workspace_size,
    fmla_fused_decode,    fmla_fused_decode_workspace_size,
    fmla_mha_forward,     fmla_mha_forward_workspace_size,
    fmla_mha_backward,    fmla_mha_backward_workspace_size,
    fmla_quantize,        fmla_dequantize,
    fmla_convert,         fmla_indices_convert,
    fmla_fp8_cast,        fmla_merge,
    fmla_permute_q_b,     fmla_permute_wv,
    fmla_schedule,        fmla_supports,
    fmla_format_get,      fmla_format_by_name,
    fmla_isa_available,   fmla_device_get,
    fmla_status_string,   fmla_dtype_name,
    fmla_isa_name,        fmla_device_name,
    fmla_operation_name,  fmla_dtype_size,
    fmla_version,
};

static size_t inits(void)
{
    const fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    const fmla_decode_args decode = FMLA_DECODE_ARGS_INIT;
    const fmla_prefill_args prefill = FMLA_PREFILL_ARGS_INIT;
    const fmla_fused_prefill_args fused_prefill = FMLA_FUSED_PREFILL_ARGS_INIT;
    const fmla_fused_decode_args fused_decode = FMLA_FUSED_DECODE_ARGS_INIT;
    const fmla_mha_forward_args forward = FMLA_MHA_FORWARD_ARGS_INIT;
    const fmla_mha_backward_args backward = FMLA_MHA_BACKWARD_ARGS_INIT;
    const fmla_quantize_args quantize = FMLA_QUANTIZE_ARGS_INIT;
    const fmla_dequantize_args dequantize = FMLA_DEQUANTIZE_ARGS_INIT;
    const fmla_convert_args convert = FMLA_CONVERT_ARGS_INIT;
    const fmla_indices_convert_args indices = FMLA_INDICES_CONVERT_ARGS_INIT;
    const fmla_fp8_cast_args cast = FMLA_FP8_CAST_ARGS_INIT;
    const fmla_merge_args merge = FMLA_MERGE_ARGS_INIT;
    const fmla_permute_q_b_args q_b = FMLA_PERMUTE_Q_B_ARGS_INIT;
    const fmla_permute_wv_args wv = FMLA_PERMUTE_WV_ARGS_INIT;
    const fmla_schedule_args schedule = FMLA_SCHEDULE_ARGS_INIT;
    const fmla_support_query query = FMLA_SUPPORT_QUERY_INIT;
    const fmla_format_info format = FMLA_FORMAT_INFO_INIT;
    const fmla_device_info device = FMLA_DEVICE_INFO_INIT;
    return config.struct_size + decode.struct_size + prefill.struct_size + fused_prefill.struct_size +
           fused_decode.struct_size + forward.struct_size + backward.struct_size + quantize.struct_size +
           dequantize.struct_size + convert.struct_size + indices.struct_size + cast.struct_size + merge.struct_size +
           q_b.struct_size + wv.struct_size + schedule.struct_size + query.struct_size + format.struct_size +
           device.struct_size;
}

/* One request of one query token and one head over three tokens, all ones: out 1, lse ln 3 + 4 * 4^-0.5. */
static int attend(fmla_context *context)
{
    static const uint16_t one[4] = {0x3F80, 0x3F80, 0x3F80, 0x3F80};
    uint16_t cache[16];
    int32_t length[1] = {3};
    float out[4] = {0, 0, 0, 0}, lse[1] = {0};
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    int i;
    for (i = 0; i < 16; i++) {
        cache[i] = 0x3F80;
    }
    a.q = fmla_tensor_4d(one, FMLA_BF16, 1, 1, 1, 4);
    memset(&a.kv, 0, sizeof a.kv);
    a.kv.data = cache;
    a.kv.format = FMLA_KV_BF16;
    a.kv.num_pages = 1;
    a.kv.page_size = 4;
    a.cache_seqlens = fmla_tensor_1d(length, FMLA_I32, 1);
    a.out = fmla_tensor_4d(out, FMLA_F32, 1, 1, 1, 4);
    a.lse = fmla_tensor_3d(lse, FMLA_F32, 1, 1, 1);
    if (all.decode(context, &a, NULL) != FMLA_OK) {
        printf("decode: %s\n", all.context_error(context));
        return 1;
    }
    if (!(out[0] > 0.999f && out[3] < 1.001f && lse[0] > 3.09f && lse[0] < 3.11f)) {
        printf("decode: out %g, lse %g\n", (double)out[0], (double)lse[0]);
        return 1;
    }
    return 0;
}

int main(void)
{
    fmla_context_config config = FMLA_CONTEXT_CONFIG_INIT;
    fmla_context *context = NULL;
    int failed;
    config.device = FMLA_DEVICE_CPU;
    config.threads = 1;
    if (inits() == 0 || all.context_create(&config, &context) != FMLA_OK) {
        printf("context: %s\n", all.last_create_error());
        return 1;
    }
    failed = attend(context);
    all.context_destroy(context);
    return failed;
}
