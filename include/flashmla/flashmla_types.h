/* SPDX-License-Identifier: MIT */
/*
 * flashmla_types.h: the words of the API: status, numbers, tensor views, KV-cache formats.
 *
 * Shape letters, used in every comment of the project:
 *   b      requests in the batch             h_q    query heads               P     tokens per page
 *   s_q    query tokens of a request         h_kv   KV heads                  topk  index slots per query token
 *   s_kv   tokens of a KV sequence           d_qk   query/key width           d_v   value width
 *   total_q  query tokens of all requests when their number differs (ragged)
 *
 * Every struct here is plain data, copied by the library before it is used; nothing is kept after a call returns.
 */
#ifndef FLASHMLA_TYPES_H
#define FLASHMLA_TYPES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define FMLA_API
#else
#define FMLA_API __attribute__((visibility("default")))
#endif

/* First member set, the rest zero, without a warning in C or C++. */
#if defined(__cplusplus)
extern "C++" { /* also where a caller includes this inside extern "C" */
template <typename T> static inline T fmla_sized()
{
    T made = T();
    made.struct_size = sizeof(T);
    return made;
}
template <typename T> static inline T fmla_sized_scaled(float scale)
{
    T made = fmla_sized<T>();
    made.softmax_scale = scale;
    return made;
}
}
#define FMLA_SIZED(type) fmla_sized<type>()
#define FMLA_SIZED_SCALED(type) fmla_sized_scaled<type>(FMLA_SCALE_DEFAULT)
#else
#define FMLA_SIZED(type) {.struct_size = sizeof(type)}
#define FMLA_SIZED_SCALED(type) {.struct_size = sizeof(type), .softmax_scale = FMLA_SCALE_DEFAULT}
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------------------------- */

/*
 * What a call says. Values never change and are never reused. 1..9: the caller's request; 10..19: the machine.
 * The sentence that names the argument, its value and what is allowed is in fmla_context_error().
 */
typedef enum fmla_status {
    FMLA_OK = 0,
    FMLA_ERROR_INVALID_ARGUMENT = 1,   /* null, wrong shape, dtype, stride, value or combination of arguments */
    FMLA_ERROR_UNSUPPORTED = 2,        /* well-formed, but no backend of this context offers it */
    FMLA_ERROR_WORKSPACE_TOO_SMALL = 3,/* the caller's workspace is smaller than fmla_<op>_workspace_size says */
    FMLA_ERROR_BUSY = 4,               /* another call is running in this context: one call at a time per context */
    FMLA_ERROR_OUT_OF_MEMORY = 10,     /* host or device memory could not be had */
    FMLA_ERROR_NO_BACKEND = 11,        /* the CUDA plugin or its driver is not on this machine */
    FMLA_ERROR_NO_DEVICE = 12,         /* device_index names no device */
    FMLA_ERROR_UNSUPPORTED_DEVICE = 13,/* the device is there, but no kernel was built for it */
    FMLA_ERROR_DEVICE = 14             /* the device runtime reported a failure (launch, copy, earlier fault) */
} fmla_status;

/* ---- numbers ------------------------------------------------------------------------------------------------ */

/* Element types of tensors. FMLA_U8 stands for the bytes of a quantised cache of any 1-byte format. */
typedef enum fmla_dtype {
    FMLA_DTYPE_NONE = 0,
    FMLA_BF16 = 1,
    FMLA_F16 = 2,
    FMLA_F32 = 3,
    FMLA_F64 = 4,      /* outputs of the oracle device only */
    FMLA_I32 = 5,
    FMLA_I64 = 6,
    FMLA_U8 = 7,
    FMLA_F8_E4M3 = 8,  /* e4m3fn: no infinity, NaN is 0x7F and 0xFF */
    FMLA_F8_E8M0 = 9,  /* power-of-two scale 2^(code-127); 0xFF is NaN */
    FMLA_F4_E2M1 = 10  /* two codes a byte, even element in the low nibble; never a tensor's dtype by itself */
} fmla_dtype;

/* ---- tensors ------------------------------------------------------------------------------------------------ */

#define FMLA_MAX_RANK 5

/*
 * A view of the caller's memory. stride[] counts elements of dtype, not bytes, and may be anything (padded, zero for
 * broadcast reads); where a dimension must be contiguous the operation says so. rank 0 means "argument absent"; a
 * tensor with a zero in shape may have data NULL.
 */
typedef struct fmla_tensor {
    void *data;
    int32_t dtype; /* fmla_dtype */
    int32_t rank;
    int64_t shape[FMLA_MAX_RANK];
    int64_t stride[FMLA_MAX_RANK];
} fmla_tensor;

/* Contiguous views, row-major. */
static inline fmla_tensor fmla_tensor_nd(const void *data, fmla_dtype dtype, int32_t rank, const int64_t *shape)
{
    fmla_tensor t;
    int64_t stride = 1;
    int32_t i;
    memset(&t, 0, sizeof t);
    t.data = (void *)(uintptr_t)data;
    t.dtype = (int32_t)dtype;
    t.rank = rank;
    for (i = rank - 1; i >= 0 && i < FMLA_MAX_RANK; i--) {
        t.shape[i] = shape[i];
        t.stride[i] = stride;
        stride = (int64_t)((uint64_t)stride * (uint64_t)shape[i]); /* what no call takes may wrap */
    }
    return t;
}

static inline fmla_tensor fmla_tensor_1d(const void *data, fmla_dtype dtype, int64_t n0)
{
    return fmla_tensor_nd(data, dtype, 1, &n0);
}

static inline fmla_tensor fmla_tensor_2d(const void *data, fmla_dtype dtype, int64_t n0, int64_t n1)
{
    int64_t shape[2];
    shape[0] = n0;
    shape[1] = n1;
    return fmla_tensor_nd(data, dtype, 2, shape);
}

static inline fmla_tensor fmla_tensor_3d(const void *data, fmla_dtype dtype, int64_t n0, int64_t n1, int64_t n2)
{
    int64_t shape[3];
    shape[0] = n0;
    shape[1] = n1;
    shape[2] = n2;
    return fmla_tensor_nd(data, dtype, 3, shape);
}

static inline fmla_tensor fmla_tensor_4d(const void *data, fmla_dtype dtype, int64_t n0, int64_t n1, int64_t n2,
                                         int64_t n3)
{
    int64_t shape[4];
    shape[0] = n0;
    shape[1] = n1;
    shape[2] = n2;
    shape[3] = n3;
    return fmla_tensor_nd(data, dtype, 4, shape);
}

/* ---- KV-cache formats --------------------------------------------------------------------------------------- */

/*
 * Every published format of one token's keys and values, byte by byte in docs/formats.md. Formats are explicit: the
 * library never guesses one from shapes, strides or data, and never removes one. V is always the first d_v dims of K.
 */
typedef enum fmla_kv_format {
    FMLA_KV_NONE = 0,
    FMLA_KV_BF16 = 1,         /* plain bf16, any d_qk (BF16-576, BF16-512): 2 * d_qk bytes per token and KV head */
    FMLA_KV_F16 = 2,          /* plain fp16, any d_qk (FP16-576, FP16-512) */
    FMLA_KV_V32 = 3,          /* V3.2: 656 B = 512 e4m3, 4 f32 scales per 128, 64 bf16 RoPE; token record */
    FMLA_KV_V4 = 4,           /* V4 (MODEL1): 584 B = 448 e4m3 + 64 bf16 RoPE; 7 e8m0 scales per 64 at the page's end */
    FMLA_KV_V41 = 5,          /* V4.1 fp8: 528 B = 512 e4m3, 16 e8m0 scales per 32; token record */
    FMLA_KV_V41_PAGE = 6,     /* the same bytes, all data rows of a page first, then all scale rows */
    FMLA_KV_V41_FP4 = 7,      /* V4.1 fp4: 288 B = 512 e2m1, 32 e4m3 scales per 16; token record; extra scope only */
    FMLA_KV_V41_FP4_PAGE = 8, /* the same bytes, page layout; extra scope only */
    FMLA_KV_COUNT = 9,
    FMLA_KV_CUSTOM = 100      /* described by fmla_kv_cache.custom */
} fmla_kv_format;

typedef enum fmla_kv_layout {
    FMLA_LAYOUT_PLAIN = 0,  /* elements only; token and head strides are free */
    FMLA_LAYOUT_RECORD = 1, /* one record per token: codes, scales and RoPE part at fixed offsets */
    FMLA_LAYOUT_PAGE = 2    /* a page holds P data rows, then P scale rows */
} fmla_kv_layout;

/*
 * A format as data: one row of the library's table, and what a caller fills to describe a format of his own
 * (FMLA_KV_CUSTOM). Elements 0..quant_dims-1 are stored as codes of `element`, scaled in groups of `group`; the
 * rope_dims after them are stored as bf16. Offsets count bytes from the start of the token's data row (rope_offset),
 * and of the record (RECORD) or of the token's scale row (PAGE) (scale_offset).
 */
typedef struct fmla_format_info {
    size_t struct_size;
    int32_t format;          /* fmla_kv_format */
    int32_t layout;          /* fmla_kv_layout */
    char name[24];           /* "v32", as the program and the Python module spell it */
    int32_t d_qk;            /* 0: any (plain formats) */
    int32_t quant_dims;      /* 0 in plain formats */
    int32_t rope_dims;
    int32_t element;         /* fmla_dtype of the codes: BF16, F16, F8_E4M3, F4_E2M1 */
    int32_t group;           /* elements per scale; 0: no scales */
    int32_t scale;           /* fmla_dtype of a scale: NONE, F32, F8_E8M0, F8_E4M3 */
    int32_t bytes_per_token; /* 0 in plain formats: 2 * d_qk */
    int32_t data_row_bytes;  /* RECORD: bytes_per_token; PAGE: without the scale row */
    int32_t scale_row_bytes; /* PAGE only */
    int32_t scale_offset;
    int32_t rope_offset;
    int32_t extra_only;      /* 1: legal as the extra cache only */
} fmla_format_info;

#define FMLA_FORMAT_INFO_INIT FMLA_SIZED(fmla_format_info)

/*
 * A paged KV cache: num_pages pages of page_size tokens. Token i of the pool is slot i % page_size of page
 * i / page_size. Strides are in bytes; 0 means contiguous. Quantised formats: one KV head, a page is one run of
 * page_size * bytes_per_token bytes, page_stride_bytes may be larger, the excess is never read as data. Any
 * alignment is legal, 16 bytes is fast. A cache that is not paged ([b, s_max, ...]) is one with page_size = s_max and
 * no block table.
 */
typedef struct fmla_kv_cache {
    void *data;
    int32_t format;              /* fmla_kv_format; FMLA_KV_NONE: absent */
    int32_t num_heads;           /* h_kv; 0 means 1 */
    int32_t d_qk;                /* plain formats: key width, 0 means the query's; others: 0 or the format's */
    int32_t reserved0;           /* 0 */
    int64_t num_pages;
    int64_t page_size;           /* P >= 1 */
    int64_t page_stride_bytes;
    int64_t token_stride_bytes;  /* plain formats; others: 0 or bytes_per_token (RECORD) */
    int64_t head_stride_bytes;   /* plain formats only */
    double outer_scale;          /* quantised formats: every dequantised code is multiplied by it; 0 means none (1) */
    const fmla_format_info *custom; /* FMLA_KV_CUSTOM only */
    int64_t reserved1[2];        /* 0 */
} fmla_kv_cache;

#ifdef __cplusplus
}
#endif

#endif
