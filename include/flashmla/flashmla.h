/* SPDX-License-Identifier: MIT */
/*
 * flashmla.h: multi-head latent attention (MLA) on CPUs and NVIDIA GPUs, behind a stable C ABI.
 *
 *   1. Context        fmla_context_create, fmla_context_destroy, fmla_context_error
 *   2. Attention      fmla_decode, fmla_prefill, fmla_fused_prefill, fmla_fused_decode, fmla_mha_forward,
 *                     fmla_mha_backward
 *   3. Caches         fmla_quantize, fmla_dequantize, fmla_convert, fmla_indices_convert, fmla_fp8_cast
 *   4. Small things   fmla_merge, fmla_permute_q_b, fmla_permute_wv, fmla_schedule
 *   5. Questions      fmla_supports, fmla_format_get, fmla_isa_available, fmla_device_get, names
 *
 * Rules that hold for every function:
 *  - The library never prints, exits, aborts or raises a signal. It returns a status; after a failure
 *    fmla_context_error() names the argument, its value and what is allowed, and no output was written (unless the
 *    status is FMLA_ERROR_DEVICE).
 *  - Every args struct starts with its own size: begin with ..._INIT. Fields left zero mean "absent" or "default".
 *  - Memory belongs to the caller. Nothing is kept after the call returns on the CPU, or after the stream has passed
 *    the call on CUDA. Inputs are never written. Outputs must not overlap inputs or each other.
 *  - On CUDA every tensor is device memory of the context's device, work is enqueued on `stream` (a cudaStream_t; NULL
 *    is the default stream) and the call returns without waiting. On CPU pass NULL.
 *  - Contexts may be used from many threads, one call at a time each; two contexts are independent.
 *  - Strides are free except where an operation says that a dimension is contiguous; the last one always is.
 *  - Empty sets are legal: no requests, no query tokens, no tokens to attend. A row with nothing to attend ("lonely")
 *    gives out 0 and lse as empty_lse says. A token that is not attended is never read into arithmetic.
 *  - Index validity: an entry is attended iff it is inside the pool and its slot is below the length.
 *  - Same inputs give the same bits, for any number of threads.
 *
 * flashmla_types.h holds status, tensors and formats; docs/api.md tells the same with examples.
 * (budget: the operations stay in one file, so that a reader finds all of them; most of it is comment.)
 */
#ifndef FLASHMLA_H
#define FLASHMLA_H

#include <flashmla/flashmla_types.h>
#include <flashmla/flashmla_version.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ============================================== 1. Context ================================================== */

/* Device, threads, scratch memory and the last error. Opaque. */
typedef struct fmla_context fmla_context;

typedef enum fmla_device {
    FMLA_DEVICE_AUTO = 0,  /* CUDA when the plugin and a supported device are there, else CPU */
    FMLA_DEVICE_CPU = 1,
    FMLA_DEVICE_CUDA = 2,
    FMLA_DEVICE_ORACLE = 3 /* float64 reference on the CPU, written for reading: slow, single-threaded, the truth */
} fmla_device;

/* CPU instruction tiers. AUTO takes the best that the processor and its operating system offer. */
typedef enum fmla_isa {
    FMLA_ISA_AUTO = 0,
    FMLA_ISA_SCALAR = 1,
    FMLA_ISA_AVX2 = 2,       /* AVX2 + FMA + F16C */
    FMLA_ISA_AVX512BF16 = 3, /* AVX-512 F/BW/VL/DQ/VBMI + AVX512_BF16 */
    FMLA_ISA_AMX = 4,        /* AMX-BF16 on top of AVX512BF16 */
    FMLA_ISA_NEON = 5,
    FMLA_ISA_COUNT = 6
} fmla_isa;

/* Runs body(user, i) for every i in 0..count-1, in any order, on any threads, and returns when all are done. */
typedef void (*fmla_parallel_body)(void *user, int64_t i);
typedef void (*fmla_parallel_for)(void *pool, int64_t count, fmla_parallel_body body, void *user);

/* Host memory. alloc returns 64-byte aligned memory or NULL; release takes what alloc gave. */
typedef void *(*fmla_alloc)(void *user, size_t size);
typedef void (*fmla_release)(void *user, void *memory);

typedef struct fmla_context_config {
    size_t struct_size;
    int32_t device;       /* fmla_device */
    int32_t device_index; /* CUDA device number; 0 elsewhere */
    int32_t threads;      /* CPU threads, the caller's included; 0: one per processor this process may use */
    int32_t isa;          /* fmla_isa; AUTO: environment variable FLASHMLA_ISA if set, else the best */
    int32_t spin_us;      /* how long an idle worker spins before it sleeps; 0: default (100), -1: never spins */
    int32_t cuda_profile_kib; /* shared memory per block to plan for: 0 the device's own, or 99, 163, 227 */
    int32_t cuda_kernels;     /* 0: the best for the device; 1: portable (mma.sync); 2: Hopper (wgmma). For comparisons:
                               * 3: Hopper, but no pairs of blocks; 4, 5: Hopper, 16-bit tokens by a leader and a
                               * follower only, or by tiles in turn only (docs/hopper.md). Where these two are 0,
                               * FLASHMLA_CUDA_PROFILE_KIB and FLASHMLA_CUDA_KERNELS are read (docs/api.md) */
    int32_t strict;           /* 1: on the CPU, softmax weights stay fp32 in every tier (docs/numerics.md) */
    fmla_parallel_for parallel_for; /* the caller's thread pool instead of the library's; NULL: own pool */
    void *parallel_for_pool;
    fmla_alloc alloc; /* host allocations of this context; NULL: the C library's */
    fmla_release release;
    void *alloc_user;
} fmla_context_config;

#define FMLA_CONTEXT_CONFIG_INIT FMLA_SIZED(fmla_context_config)

/*
 * Makes a context. config NULL means all defaults. On failure *context is NULL and fmla_status_string() is all there is
 * to know, except through fmla_last_create_error().
 * Statuses: OK, INVALID_ARGUMENT (config values, an unknown name in FLASHMLA_ISA), UNSUPPORTED (an ISA this processor
 * lacks), NO_BACKEND, NO_DEVICE, UNSUPPORTED_DEVICE, OUT_OF_MEMORY.
 */
FMLA_API fmla_status fmla_context_create(const fmla_context_config *config, fmla_context **context);

/* Frees it. NULL is allowed. No call may be running in it. */
FMLA_API void fmla_context_destroy(fmla_context *context);

/* The last failure of this context in one line ("" if none). Valid until the next call in it. Never NULL. */
FMLA_API const char *fmla_context_error(const fmla_context *context);

/* The last failed fmla_context_create of the calling thread in one line ("" if none). Never NULL. */
FMLA_API const char *fmla_last_create_error(void);

/* What the context runs on: its device, and on the CPU its ISA tier and number of threads. */
FMLA_API fmla_device fmla_context_device(const fmla_context *context);
FMLA_API fmla_isa fmla_context_isa(const fmla_context *context);
FMLA_API int32_t fmla_context_threads(const fmla_context *context);

/* Takes up to `size` bytes of workspace now, so that later calls allocate nothing. Statuses: OK, OUT_OF_MEMORY. */
FMLA_API fmla_status fmla_context_reserve(fmla_context *context, size_t size);

/* ============================================== 2. Attention ================================================ */

/* softmax_scale left at this value means d_qk^-0.5. Any other value, 0 and negative ones included, is used as it is. */
#define FMLA_SCALE_DEFAULT (-3.0e38f)

/* lse (and max_logits' companion) of lonely rows. */
typedef enum fmla_empty_lse {
    FMLA_EMPTY_LSE_NEG_INF = 0, /* the mathematical value */
    FMLA_EMPTY_LSE_POS_INF = 1  /* the published kernels' convention */
} fmla_empty_lse;

/* Unit of lse and max_logits. */
typedef enum fmla_lse_base {
    FMLA_LSE_NATURAL = 0,
    FMLA_LSE_BASE2 = 1 /* both multiplied by log2(e), as sparse prefill of 2025-09 did */
} fmla_lse_base;

/*
 * Decode attention over a paged cache, dense or sparse (absorbed MLA; multi-query or grouped-query).
 *
 *   logit_t = softmax_scale * (q . k_t)        lse = ln sum exp(logit_t)
 *   out     = sum exp(logit_t) v_t / (sum exp(logit_t) + exp(attn_sink))
 *
 * Dense: `indices` absent. Query token j of request r attends tokens 0..n-1 of its sequence, n = cache_seqlens[r], with
 * `causal` n = cache_seqlens[r] - s_q + j + 1 (end-aligned), with `kv_bound` n = min(kv_bound[r, j], cache_seqlens[r]).
 * Sparse: `indices` present. It attends the valid entries of its index row in `kv`, and of its extra index row in
 * `extra_kv`; each entry counts as often as it occurs. block_table and cache_seqlens must then be absent, causal 0.
 *
 * Ragged batches: q [total_q, h_q, d_qk] with cu_seqlens_q; every "[b, s_q, ...]" below is then "[total_q, ...]", and
 * lse and max_logits are [h_q, total_q].
 *
 * Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, WORKSPACE_TOO_SMALL, BUSY, OUT_OF_MEMORY, DEVICE.
 * Source: FlashMLA's flash_mla_with_kvcache, every release; DeepSeek-V2 (arXiv 2405.04434) section 2.1.
 */
typedef struct fmla_decode_args {
    size_t struct_size;
    float softmax_scale;       /* FMLA_SCALE_DEFAULT */
    int32_t causal;            /* dense only */
    fmla_tensor q;             /* [b, s_q, h_q, d_qk] BF16 or F16 */
    fmla_kv_cache kv;
    fmla_kv_cache extra_kv;    /* sparse only; absent: format NONE. Legal pairs: docs/formats.md */
    fmla_tensor block_table;   /* [b, max_pages] I32; dense. Absent: request r owns pages r * n .. r * n + n - 1,
                                * n = num_pages / b */
    fmla_tensor cache_seqlens; /* [b] I32; dense */
    fmla_tensor kv_bound;      /* [b, s_q] I32; dense, optional: tokens that a query token may see, instead of causal */
    fmla_tensor indices;       /* [b, s_q, topk] I32; presence selects sparse */
    fmla_tensor extra_indices; /* [b, s_q, extra_topk] I32; with extra_kv only */
    fmla_tensor topk_length;   /* [b] or [b, s_q] I32; optional; clamped to 0..topk */
    fmla_tensor extra_topk_length;
    fmla_tensor attn_sink;     /* [h_q] F32; optional; natural-log units; any value */
    fmla_tensor cu_seqlens_q;  /* [b + 1] I32; ragged query lengths; starts at 0, ends at total_q */
    fmla_tensor out;           /* [b, s_q, h_q, d_v] same dtype as q, or F32; d_v <= d_qk, quantised formats: 512 */
    fmla_tensor lse;           /* [b, h_q, s_q] F32; optional */
    fmla_tensor max_logits;    /* [b, h_q, s_q] F32; optional */
    int32_t empty_lse;         /* fmla_empty_lse */
    int32_t lse_base;          /* fmla_lse_base */
    int32_t batch_invariant;   /* 1: a request's bits do not depend on the rest of the batch (on the CPU always so) */
    int32_t reserved0;
    fmla_tensor abs_out;       /* oracle only, F64, shape of out: sum p_t |v_t| (p with the sink): bounds for tests */
    fmla_tensor abs_logit;     /* oracle only, F64, shape of lse: |softmax_scale| * max_t sum_j |q_j k_tj| */
    void *workspace;           /* optional, 64-byte aligned, at least fmla_decode_workspace_size */
    size_t workspace_size;
} fmla_decode_args;

#define FMLA_DECODE_ARGS_INIT FMLA_SIZED_SCALED(fmla_decode_args)

FMLA_API fmla_status fmla_decode(fmla_context *context, const fmla_decode_args *args, void *stream);
/* Bytes of workspace for these shapes; depends on shapes only and never shrinks when a shape grows. */
FMLA_API fmla_status fmla_decode_workspace_size(fmla_context *context, const fmla_decode_args *args, size_t *size);

/*
 * Sparse prefill: every query token attends its own index row of one unpaged KV tensor. No batch dimension: concatenate
 * sequences and offset the indices. Maths as fmla_decode.
 * Statuses: as fmla_decode. Source: FlashMLA's flash_mla_sparse_fwd.
 */
typedef struct fmla_prefill_args {
    size_t struct_size;
    float softmax_scale;
    int32_t empty_lse;
    fmla_tensor q;           /* [s_q, h_q, d_qk] BF16 or F16 */
    fmla_tensor kv;          /* [s_kv, h_kv, d_qk] q's dtype; h_q % h_kv == 0 */
    fmla_tensor indices;     /* [s_q, h_kv, topk] or, with h_kv = 1, [s_q, topk]; I32 */
    fmla_tensor topk_length; /* [s_q] I32; optional; clamped to 0..topk */
    fmla_tensor attn_sink;   /* [h_q] F32; optional */
    fmla_tensor out;         /* [s_q, h_q, d_v] q's dtype, or F32 */
    fmla_tensor lse;         /* [s_q, h_q] F32; optional */
    fmla_tensor max_logits;  /* [s_q, h_q] F32; optional */
    int32_t lse_base;
    int32_t reserved0;
    fmla_tensor abs_out;     /* oracle only, as in fmla_decode_args */
    fmla_tensor abs_logit;
    void *workspace;
    size_t workspace_size;
} fmla_prefill_args;

#define FMLA_PREFILL_ARGS_INIT FMLA_SIZED_SCALED(fmla_prefill_args)

FMLA_API fmla_status fmla_prefill(fmla_context *context, const fmla_prefill_args *args, void *stream);
FMLA_API fmla_status fmla_prefill_workspace_size(fmla_context *context, const fmla_prefill_args *args, size_t *size);

/* How the h_q * d elements of a query token are stored for the fused operations. */
typedef enum fmla_q_layout {
    FMLA_Q_PERMUTED = 0, /* element (h, d) at (d / 16) * (h_q * 16) + h * 16 + d % 16: what fmla_permute_q_b makes */
    FMLA_Q_PLAIN = 1     /* element (h, d) at h * d_qk + d */
} fmla_q_layout;

typedef enum fmla_rope_style {
    FMLA_ROPE_INTERLEAVED = 0, /* pairs (2i, 2i + 1) */
    FMLA_ROPE_NEOX = 1         /* pairs (i, i + rope_dim / 2) */
} fmla_rope_style;

/*
 * The part that fused prefill and fused decode share: RMS norm of q (folded into the logits), RoPE on the last rope_dim
 * dims of q, attention, conjugate RoPE on the output, cast to e4m3 with one e8m0 scale per 32 dims (quantiser D).
 * Token positions outside the table make their query token an error on the CPU and a lonely row on CUDA.
 */
typedef struct fmla_fused_params {
    int32_t q_norm;        /* 1: rho = 1 / sqrt(mean(q^2) + eps), multiplied into the logits */
    float rms_norm_eps;
    int32_t q_layout;      /* fmla_q_layout */
    int32_t rope_style;    /* fmla_rope_style */
    int32_t rope_dim;      /* 0 means 64 */
    int32_t n_wv_group;    /* h_q % n_wv_group == 0; G = h_q / n_wv_group; G * d_v a multiple of 128 */
    fmla_tensor token_positions; /* [s_q] I32: rows of cos_sin_cache */
    fmla_tensor cos_sin_cache;   /* [n, rope_dim] F32: cos of each pair, then sin of each pair */
    fmla_tensor attn_sink;       /* [h_q] F32; optional */
    fmla_tensor out_fp8;   /* [s_q, n_wv_group, G * 512] F8_E4M3 or U8, contiguous: head g, dim d of a group at
                            * (d / 32) * (G * 32) + g * 32 + d % 32 */
    fmla_tensor out_scale; /* [s_q, n_wv_group, G * 512 / 128] I32: four scale bytes a word, byte of (g, c = d / 32) is
                            * number c * G + g; strides (1, A * shape[2], A), A >= s_q a multiple of 4; words of tokens
                            * s_q..A-1 are set to 0 */
    fmla_tensor lse;       /* [s_q, h_q] F32; optional */
    fmla_tensor max_logits;/* [s_q, h_q] F32; optional */
    int32_t empty_lse;
    int32_t reserved0;
    fmla_tensor out_exact; /* oracle only, F64 [s_q, h_q, 512]: the output before the cast */
    fmla_tensor abs_out;   /* oracle only, F64 [s_q, h_q, 512] */
    fmla_tensor abs_logit; /* oracle only, F64 [s_q, h_q] */
    int64_t reserved1[4];  /* 0 */
} fmla_fused_params;

/* Fused prefill over an unpaged bf16 KV tensor. Statuses: as fmla_decode.
 * Source: FlashMLA's fused_norm_rope_attn_rope_cast (2026-09). */
typedef struct fmla_fused_prefill_args {
    size_t struct_size;
    float softmax_scale;
    int32_t reserved0;
    fmla_tensor q;           /* [s_q, h_q, 512] BF16 storage, stride of h_q 512 */
    fmla_tensor kv;          /* [s_kv, 1, 512] BF16 */
    fmla_tensor indices;     /* [s_q, topk] or [s_q, 1, topk] I32 */
    fmla_tensor topk_length; /* [s_q] I32; optional */
    fmla_fused_params fused;
    void *workspace;
    size_t workspace_size;
} fmla_fused_prefill_args;

#define FMLA_FUSED_PREFILL_ARGS_INIT FMLA_SIZED_SCALED(fmla_fused_prefill_args)

FMLA_API fmla_status fmla_fused_prefill(fmla_context *context, const fmla_fused_prefill_args *args, void *stream);
FMLA_API fmla_status fmla_fused_prefill_workspace_size(fmla_context *context, const fmla_fused_prefill_args *args,
                                                       size_t *size);

/*
 * Fused decode over quantised caches; never splits a row, so it equals fused prefill over the same dequantised tokens
 * (main slots, then extra slots, one list) to the bit. No batch dimension: s_q counts query tokens of all requests.
 */
typedef struct fmla_fused_decode_args {
    size_t struct_size;
    float softmax_scale;
    int32_t reserved0;
    fmla_tensor q;             /* as fused prefill */
    fmla_kv_cache kv;          /* any format with d_qk 512 that may be a main cache */
    fmla_kv_cache extra_kv;
    fmla_tensor indices;       /* [s_q, topk] I32 */
    fmla_tensor extra_indices; /* [s_q, extra_topk] I32; with extra_kv only */
    fmla_tensor topk_length;   /* [s_q] I32; optional */
    fmla_tensor extra_topk_length;
    fmla_fused_params fused;
    void *workspace;
    size_t workspace_size;
} fmla_fused_decode_args;

#define FMLA_FUSED_DECODE_ARGS_INIT FMLA_SIZED_SCALED(fmla_fused_decode_args)

FMLA_API fmla_status fmla_fused_decode(fmla_context *context, const fmla_fused_decode_args *args, void *stream);
FMLA_API fmla_status fmla_fused_decode_workspace_size(fmla_context *context, const fmla_fused_decode_args *args,
                                                      size_t *size);

/*
 * Dense multi-head attention over packed sequences (training, prefill with expanded keys), forward and backward.
 * Request r: query tokens cu_seqlens_q[r]..cu_seqlens_q[r+1]-1, key tokens likewise. `causal` is end-aligned: query j
 * sees keys <= s_k - s_q + j. Rows without keys: out 0, lse -inf (empty_lse), zero gradients. Grouped heads allowed.
 * Absent cu_seqlens: one sequence (b = 1) of all tokens.
 * Statuses: as fmla_decode. Source: FlashMLA's flash_attn_varlen_func.
 */
typedef struct fmla_mha_forward_args {
    size_t struct_size;
    float softmax_scale;
    int32_t causal;
    fmla_tensor q;             /* [total_q, h_q, d_qk] BF16 or F16 */
    fmla_tensor k;             /* [total_kv, h_kv, d_qk]; h_q % h_kv == 0 */
    fmla_tensor v;             /* [total_kv, h_kv, d_v] */
    fmla_tensor cu_seqlens_q;  /* [b + 1] I32 */
    fmla_tensor cu_seqlens_kv; /* [b + 1] I32 */
    int64_t max_seqlen_q;      /* a hint for CUDA grids; 0: total_q. Too small: an error on the CPU, never lost rows */
    int64_t max_seqlen_kv;
    fmla_tensor out;           /* [total_q, h_q, d_v] q's dtype */
    fmla_tensor lse;           /* [total_q, h_q] F32; optional */
    int32_t empty_lse;
    int32_t reserved0;
    fmla_tensor abs_out;       /* oracle only */
    fmla_tensor abs_logit;
    void *workspace;
    size_t workspace_size;
} fmla_mha_forward_args;

#define FMLA_MHA_FORWARD_ARGS_INIT FMLA_SIZED_SCALED(fmla_mha_forward_args)

FMLA_API fmla_status fmla_mha_forward(fmla_context *context, const fmla_mha_forward_args *args, void *stream);
FMLA_API fmla_status fmla_mha_forward_workspace_size(fmla_context *context, const fmla_mha_forward_args *args,
                                                     size_t *size);

/* P = exp(scale q k^T - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO out)), dQ = scale dS K, dK = scale dS^T Q. */
typedef struct fmla_mha_backward_args {
    size_t struct_size;
    float softmax_scale;
    int32_t causal;
    fmla_tensor q, k, v;       /* as forward */
    fmla_tensor out;           /* forward's result */
    fmla_tensor lse;           /* forward's result; lonely rows of either sign of infinity */
    fmla_tensor dout;          /* [total_q, h_q, d_v] q's dtype */
    fmla_tensor cu_seqlens_q, cu_seqlens_kv;
    int64_t max_seqlen_q, max_seqlen_kv;
    fmla_tensor dq, dk, dv;    /* shapes of q, k, v; q's dtype (F64 on the oracle) */
    void *workspace;
    size_t workspace_size;
} fmla_mha_backward_args;

#define FMLA_MHA_BACKWARD_ARGS_INIT FMLA_SIZED_SCALED(fmla_mha_backward_args)

FMLA_API fmla_status fmla_mha_backward(fmla_context *context, const fmla_mha_backward_args *args, void *stream);
FMLA_API fmla_status fmla_mha_backward_workspace_size(fmla_context *context, const fmla_mha_backward_args *args,
                                                      size_t *size);

/* ============================================== 3. Caches =================================================== */

typedef enum fmla_quantizer {
    FMLA_QUANTIZER_DEFAULT = 0, /* the format's published quantiser: power-of-two scales (e4m3), e4m3 scales (e2m1) */
    FMLA_QUANTIZER_V32_2025 = 1 /* V32 only: scale = amax / 448 rounded to the input dtype, as first published */
} fmla_quantizer;

/*
 * Writes tokens into a cache. Token i goes to slot slots[i] (page * P + offset), or to slot i. Negative slots are
 * skipped (padding tokens); a slot beyond the pool is an error on the CPU, skipped on CUDA. Plain formats just convert.
 * Bytes of unwritten slots stay as they are; V4's pad byte is written 0.
 * Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, BUSY, DEVICE. Source: docs/formats.md, quantisers A, B, C.
 */
typedef struct fmla_quantize_args {
    size_t struct_size;
    fmla_tensor src;    /* [n, d_qk] or [n, h_kv, d_qk]; BF16, F16 or F32 */
    fmla_tensor slots;  /* [n] I64 or I32; optional */
    fmla_kv_cache dst;
    int32_t quantizer;  /* fmla_quantizer */
    int32_t reserved0;
} fmla_quantize_args;

#define FMLA_QUANTIZE_ARGS_INIT FMLA_SIZED(fmla_quantize_args)

FMLA_API fmla_status fmla_quantize(fmla_context *context, const fmla_quantize_args *args, void *stream);

/*
 * Reads tokens out of a cache: dst row i is slot slots[i], or slot i. Rows of invalid slots become 0.
 * BF16 dst: the value rounded once, as attention sees it; F32 dst: the exact fp32 product code * scale.
 * Statuses: as fmla_quantize. Source: docs/formats.md.
 */
typedef struct fmla_dequantize_args {
    size_t struct_size;
    fmla_kv_cache src;
    fmla_tensor slots;  /* [n] I64 or I32; optional */
    fmla_tensor dst;    /* [n, d_qk] or [n, h_kv, d_qk]; BF16, F16 or F32 */
} fmla_dequantize_args;

#define FMLA_DEQUANTIZE_ARGS_INIT FMLA_SIZED(fmla_dequantize_args)

FMLA_API fmla_status fmla_dequantize(fmla_context *context, const fmla_dequantize_args *args, void *stream);

/*
 * Copies tokens between two caches whose formats share d_qk: dequantise (bf16), then quantise; between two layouts of
 * the same codes the bytes move unchanged. Token i goes from src_slots[i] (or i) to dst_slots[i] (or i).
 */
typedef struct fmla_convert_args {
    size_t struct_size;
    fmla_kv_cache src;
    fmla_kv_cache dst;
    fmla_tensor src_slots; /* [n] I64 or I32; optional; absent: the smaller pool's slots 0..n-1 */
    fmla_tensor dst_slots; /* [n] I64 or I32; optional */
} fmla_convert_args;

#define FMLA_CONVERT_ARGS_INIT FMLA_SIZED(fmla_convert_args)

FMLA_API fmla_status fmla_convert(fmla_context *context, const fmla_convert_args *args, void *stream);

/*
 * Positions in a request to slots of the pool: a < 0 gives -1, else block_table[i, a / P] * P + a % P. A position
 * beyond the table, or a table entry that is not a page, is an error on the CPU and gives -1 on CUDA.
 */
typedef struct fmla_indices_convert_args {
    size_t struct_size;
    int64_t page_size;
    fmla_tensor positions;   /* [b, s_q, topk] I32 */
    fmla_tensor block_table; /* [b, max_pages] I32 */
    fmla_tensor indices;     /* [b, s_q, topk] I32, out */
} fmla_indices_convert_args;

#define FMLA_INDICES_CONVERT_ARGS_INIT FMLA_SIZED(fmla_indices_convert_args)

FMLA_API fmla_status fmla_indices_convert(fmla_context *context, const fmla_indices_convert_args *args, void *stream);

/*
 * Quantiser D on a matrix: e4m3 codes and one e8m0 scale byte per `group` columns, four bytes packed in a word; scale
 * words token-aligned column-major (strides (1, A), A >= n a multiple of 4). Prepares weights for the permutations.
 */
typedef struct fmla_fp8_cast_args {
    size_t struct_size;
    fmla_tensor src;    /* [n, d] BF16, F16 or F32 */
    fmla_tensor codes;  /* [n, d] F8_E4M3 or U8 */
    fmla_tensor scale;  /* [n, d / group / 4] I32 */
    int32_t group;      /* 32 or 128; d % (4 * group) == 0 */
    int32_t reserved0;
} fmla_fp8_cast_args;

#define FMLA_FP8_CAST_ARGS_INIT FMLA_SIZED(fmla_fp8_cast_args)

FMLA_API fmla_status fmla_fp8_cast(fmla_context *context, const fmla_fp8_cast_args *args, void *stream);

/* ============================================== 4. Small things ============================================= */

/*
 * Joins attention results over disjoint token sets (context parallel, cascades, chunked prefill):
 * lse = ln sum exp(lse_s), out = sum exp(lse_s - lse) out_s, the sink applied once if given. States with lse of either
 * infinity are empty and their out is not read; all empty: out 0, lse by empty_lse. NaN lse or attended NaN out: NaN.
 */
typedef struct fmla_merge_args {
    size_t struct_size;
    const fmla_tensor *outs;  /* count tensors [n, h, d]; BF16, F16 or F32 (F64 on the oracle) */
    const fmla_tensor *lses;  /* count tensors [n, h] F32 (F64 on the oracle), unsinked, natural log */
    int32_t count;            /* >= 1, at most 4096 */
    int32_t empty_lse;
    fmla_tensor attn_sink;    /* [h] F32; optional */
    fmla_tensor out;          /* [n, h, d] BF16, F16 or F32 */
    fmla_tensor lse;          /* [n, h] F32; optional */
} fmla_merge_args;

#define FMLA_MERGE_ARGS_INIT FMLA_SIZED(fmla_merge_args)

FMLA_API fmla_status fmla_merge(fmla_context *context, const fmla_merge_args *args, void *stream);

/*
 * Row permutation of Q_b's weight, so that its product is stored as FMLA_Q_PERMUTED: row h * d_q + d moves to row
 * d % 16 + 16 h + (d / 16) * 16 h_q, its scale words with it. Byte-exact.
 */
typedef struct fmla_permute_q_b_args {
    size_t struct_size;
    int32_t h_q;
    int32_t d_q;            /* a multiple of 16 */
    fmla_tensor weight;     /* [h_q * d_q, R] F8_E4M3 or U8 */
    fmla_tensor scale;      /* [h_q * d_q, R / group / 4] I32, stride of rows 1; group 32 or 128 */
    fmla_tensor out_weight; /* [h_q * d_q, R] contiguous */
    fmla_tensor out_scale;  /* shape of scale, strides (1, A), A >= rows a multiple of 4 */
} fmla_permute_q_b_args;

#define FMLA_PERMUTE_Q_B_ARGS_INIT FMLA_SIZED(fmla_permute_q_b_args)

FMLA_API fmla_status fmla_permute_q_b(fmla_context *context, const fmla_permute_q_b_args *args, void *stream);

/*
 * Column permutation of the output projection's weight to match out_fp8: column g * d_o + d moves to
 * (d / 32) * 32 G + 32 g + d % 32, scale byte g * (d_o / 32) + d / 32 to byte (d / 32) * G + g. Byte-exact.
 */
typedef struct fmla_permute_wv_args {
    size_t struct_size;
    int32_t wv_group_size;  /* G */
    int32_t d_o;            /* a multiple of 32, G * d_o a multiple of 128 */
    fmla_tensor weight;     /* [n_group, D_out, G * d_o] F8_E4M3 or U8 */
    fmla_tensor scale;      /* [n_group, D_out, G * d_o / 128] I32, stride of D_out 1 */
    fmla_tensor out_weight; /* shape of weight, contiguous */
    fmla_tensor out_scale;  /* shape of scale, strides (shape[2] * A, 1, A), A >= D_out a multiple of 4 */
} fmla_permute_wv_args;

#define FMLA_PERMUTE_WV_ARGS_INIT FMLA_SIZED(fmla_permute_wv_args)

FMLA_API fmla_status fmla_permute_wv(fmla_context *context, const fmla_permute_wv_args *args, void *stream);

/* Column layout of tile-scheduler metadata: the published generations. */
typedef enum fmla_schedule_form {
    FMLA_SCHEDULE_2025_02 = 1, /* token positions; releases of 2025-02 to 2025-08 */
    FMLA_SCHEDULE_2025_09 = 4, /* blocks; 2025-09 */
    FMLA_SCHEDULE_2026_01 = 5  /* blocks, reordered, with split flags; 2026-01 and later */
} fmla_schedule_form;

/*
 * The split-KV schedule of a batch as integer tables: which part works on which blocks. The library plans for itself;
 * these tables serve callers of older generations and whoever wants to see or draw a schedule.
 * Statuses: OK, INVALID_ARGUMENT. Source: cost model and cutting rule in src/plan/plan.h.
 */
typedef struct fmla_schedule_args {
    size_t struct_size;
    fmla_tensor cache_seqlens;      /* [b] I32; dense; or absent with topk >= 0 and batch */
    fmla_tensor topk_length;        /* [b] I32; sparse, optional */
    fmla_tensor extra_topk_length;  /* [b] I32; sparse, optional */
    int64_t batch;                  /* sparse without lengths: b */
    int64_t topk;                   /* sparse: slots per row; dense: -1 */
    int64_t extra_topk;             /* 0: no extra scope */
    int32_t form;                   /* fmla_schedule_form */
    int32_t overhead_blocks;        /* fixed cost of a piece in blocks; published kernels: 5, one 3 */
    fmla_tensor metadata;           /* [parts, 8] I32, out */
    fmla_tensor num_splits;         /* [b + 1] I32, out */
} fmla_schedule_args;

#define FMLA_SCHEDULE_ARGS_INIT FMLA_SIZED(fmla_schedule_args)

FMLA_API fmla_status fmla_schedule(fmla_context *context, const fmla_schedule_args *args, void *stream);

/* ============================================== 5. Questions ================================================ */

typedef enum fmla_operation {
    FMLA_OP_DENSE_DECODE = 0,
    FMLA_OP_SPARSE_DECODE = 1,
    FMLA_OP_SPARSE_PREFILL = 2,
    FMLA_OP_FUSED_PREFILL = 3,
    FMLA_OP_FUSED_DECODE = 4,
    FMLA_OP_MHA_FORWARD = 5,
    FMLA_OP_MHA_BACKWARD = 6,
    FMLA_OP_QUANTIZE = 7,
    FMLA_OP_DEQUANTIZE = 8,
    FMLA_OP_CONVERT = 9,
    FMLA_OP_MERGE = 10,
    FMLA_OP_PERMUTE_Q_B = 11,
    FMLA_OP_PERMUTE_WV = 12,
    FMLA_OP_INDICES_CONVERT = 13,
    FMLA_OP_FP8_CAST = 14,
    FMLA_OP_SCHEDULE = 15,
    FMLA_OP_COUNT = 16
} fmla_operation;

/* A combination to ask about. Zero fields are not asked about. */
typedef struct fmla_support_query {
    size_t struct_size;
    int32_t operation;    /* fmla_operation */
    int32_t kv_format;    /* fmla_kv_format: main cache, or the only one */
    int32_t extra_format; /* fmla_kv_format */
    int32_t q_dtype;      /* fmla_dtype */
    int32_t h_q, h_kv, d_qk, d_v;
} fmla_support_query;

#define FMLA_SUPPORT_QUERY_INIT FMLA_SIZED(fmla_support_query)

/*
 * 1 if a call with this combination is accepted, 0 if not; then fmla_context_error() says why. The same table
 * validates calls. Statuses are not involved: an ill-formed query is simply not supported.
 */
FMLA_API int32_t fmla_supports(fmla_context *context, const fmla_support_query *query);

/* Fills *info (set info->struct_size first) with a format's row. Statuses: OK, INVALID_ARGUMENT. */
FMLA_API fmla_status fmla_format_get(fmla_kv_format format, fmla_format_info *info);
/* Format by name ("bf16", "v32", "v41-page", ...), FMLA_KV_NONE if unknown. */
FMLA_API fmla_kv_format fmla_format_by_name(const char *name);

/* 1 if this processor and operating system can run the tier and it was built. */
FMLA_API int32_t fmla_isa_available(fmla_isa isa);

/* What a device is. Strings are never NULL. */
typedef struct fmla_device_info {
    size_t struct_size;
    int32_t device;           /* fmla_device: CPU or CUDA */
    int32_t index;
    char name[128];
    char kernels[128];        /* the tiers or architectures built and usable here, best first */
    int32_t compute_units;    /* processors this process may use, or SMs */
    int32_t capability;       /* CUDA: 10 * major + minor; CPU: best fmla_isa */
    int64_t memory_bytes;
    int64_t shared_memory_bytes; /* CUDA: per block, opted in; CPU: L2 bytes of one core */
} fmla_device_info;

#define FMLA_DEVICE_INFO_INIT FMLA_SIZED(fmla_device_info)

/* Statuses: OK, INVALID_ARGUMENT, NO_BACKEND (no plugin or driver), NO_DEVICE (index beyond the last). */
FMLA_API fmla_status fmla_device_get(fmla_device device, int32_t index, fmla_device_info *info);

/* Names: total functions, never NULL; unknown values give "unknown". */
FMLA_API const char *fmla_status_string(fmla_status status);
FMLA_API const char *fmla_dtype_name(fmla_dtype dtype);
FMLA_API const char *fmla_isa_name(fmla_isa isa);
FMLA_API const char *fmla_device_name(fmla_device device);
FMLA_API const char *fmla_operation_name(fmla_operation operation);
/* Bytes of one element; 0 for F4_E2M1 and unknown values. */
FMLA_API size_t fmla_dtype_size(fmla_dtype dtype);
/* FMLA_VERSION of the library that is running. */
FMLA_API int32_t fmla_version(void);

#ifdef __cplusplus
}
#endif

#endif
