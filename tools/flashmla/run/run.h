/* SPDX-License-Identifier: MIT */
/*
 * run.h: one operation run on the tensors of a file. A run_case is the file, the case's prefix in it, and the
 * settings; each operation reads its inputs and settings from the case, adds its outputs, and makes the
 * library's call. docs/run.md lists the names.
 *
 * Functions that return int return CLI_OK, or CLI_ERROR after printing what is wrong.
 */
#ifndef FLASHMLA_TOOL_RUN_H
#define FLASHMLA_TOOL_RUN_H

#include "program.h"
#include "file/safetensors.h"

enum { RUN_MAX_SETTINGS = 48, RUN_MAX_OUTPUTS = 8, RUN_NAME = 256 };

typedef struct run_case run_case;

/* Bounds of a comparison; a negative one stands for the published value of this operation and tensor. */
typedef struct run_tolerance {
    double abs;
    double rel;
    double cos_diff;
} run_tolerance;

#define RUN_TOLERANCE_PUBLISHED {-1, -1, -1}

typedef struct run_operation {
    const char *name;
    int (*call)(run_case *c);
} run_operation;

/* key=value from the command line. */
typedef struct run_setting {
    char key[32];
    const char *value;
    bool used;
} run_setting;

typedef struct run_output {
    const char *name;
    fmla_tensor device; /* what the call wrote, on the context's device */
    fmla_tensor host;   /* contiguous copy after run_fetch */
} run_output;

struct run_case {
    const run_operation *operation;
    const char *path;
    const char *prefix; /* before every tensor name */
    bool ignore_unused; /* tensors that the operation does not know are no error */
    cli_options options;
    st_file in;
    bool *tensor_used;
    run_setting settings[RUN_MAX_SETTINGS];
    int setting_count;
    fmla_context *context;
    cli_memory *memory;
    run_output outputs[RUN_MAX_OUTPUTS];
    int output_count;
    /* Set by quantize, dequantize and convert, for the output's metadata and the report. */
    fmla_kv_cache cache_in, cache_out;
    fmla_tensor slots_in, slots_out;
    const fmla_tensor *source; /* the numbers before quantising, in the file; NULL if it has none */
};

/* What to do with the results. */
typedef struct run_request {
    const char *out;            /* NULL: nothing is written */
    const char *compare;        /* NULL: nothing is compared */
    const char *compare_prefix; /* NULL: the case's */
    run_tolerance tolerance;
    int (*report)(run_case *c, cJSON *tree); /* NULL: none; prints when tree is NULL */
} run_request;

/* Both, as a command's options fill them. */
typedef struct run_command {
    run_case c;
    run_request request;
} run_command;

/* Opens the case, runs its operation, compares, writes, prints. Returns the exit status; the case is closed after. */
int run_execute(run_case *c, const run_request *request);

extern const run_operation run_operations[];
extern const int run_operation_count;

/* Each is the `call` of an operation, defined in the run_*.c file of its family and in run/quantize.c. */
int run_dense_decode(run_case *c);
int run_sparse_decode(run_case *c);
int run_sparse_prefill(run_case *c);
int run_fused_prefill(run_case *c);
/* Fills the output "out" with the fused codes times their scales, in the order [s_q, h_q, d]. */
int run_fused_unpack(run_case *c);
int run_fused_decode(run_case *c);
int run_mha_forward(run_case *c);
int run_mha_backward(run_case *c);
int run_merge(run_case *c);
int run_permute_q_b(run_case *c);
int run_permute_wv(run_case *c);
int run_indices_convert(run_case *c);
int run_fp8_cast(run_case *c);
int run_schedule(run_case *c);
int run_quantize(run_case *c);
int run_dequantize(run_case *c);
int run_convert(run_case *c);
/* The report of quantize, dequantize and convert: what the numbers lost. */
int run_transcode_report(run_case *c, cJSON *tree);

/* ---- the case -------------------------------------------------------------------------------------------- */

/* Remembers key=value of the command line; `value` must live as long as the case. '-' in the key becomes '_'. */
int run_set(run_case *c, const char *key, size_t key_length, const char *value);
/* Opens file, context and memory. options, operation, path and prefix are set already. */
int run_open(run_case *c);
void run_close(run_case *c);
/* Last step before the library's call: nothing that was given may be left unused. */
int run_ready(run_case *c);
/* Turns the call's status into the exit status. */
int run_called(run_case *c, fmla_status status);
/* Waits for the call and copies the outputs to host memory. */
int run_fetch(run_case *c);
/* Writes the outputs to a file, with the prefix, and the format of a cache as metadata. */
int run_save(const run_case *c, const char *path);
/* Adds "operation", "backend", "isa", "threads" and the outputs' shapes to the tree. */
void run_describe(const run_case *c, cJSON *tree);
/* Prints name, dtype and shape of every output. */
void run_print_outputs(const run_case *c);

/* ---- inputs and settings --------------------------------------------------------------------------------- */

/* The tensor on the context's device, as in the file (contiguous). Absent: rank 0, an error only when required. */
int run_input(run_case *c, const char *name, bool required, fmla_tensor *tensor);
/* The same without a copy to the device; NULL if absent. Marks it used. */
const fmla_tensor *run_peek(run_case *c, const char *name);
/* The first of several names (NULL-terminated) that is there, or NULL. */
const char *run_first_name(const run_case *c, const char *const *names);
/* An I32 tensor of rank 2 or 3 whose last two dims [rows, words] are stored column by column, padded to 4 rows. */
int run_input_columns(run_case *c, const char *name, fmla_tensor *tensor);
/* A paged cache: tensor `name` or one of its other names, with the settings <name>_format and page sizes. */
int run_cache(run_case *c, const char *name, bool required, fmla_kv_cache *cache);

/* From the command line, else a one-element tensor, else the file's metadata, else the default given. */
int run_integer(run_case *c, const char *key, int64_t low, int64_t high, int64_t *value);
int run_flag(run_case *c, const char *key, int32_t *value);
int run_number(run_case *c, const char *key, float *value);
/* One of the NULL-terminated names; value is its place. */
int run_choice(run_case *c, const char *key, const char *const *names, int32_t *value);
int run_dtype(run_case *c, const char *key, int32_t *value);
int run_format(run_case *c, const char *key, int32_t *value);
bool run_has(run_case *c, const char *key);

/* ---- outputs --------------------------------------------------------------------------------------------- */

/* A new contiguous output on the device. `name` must be a literal. */
int run_output_new(run_case *c, const char *name, int32_t dtype, int32_t rank, const int64_t *shape,
                   fmla_tensor *tensor);
/* An I32 output of rank 2 or 3 laid out as run_input_columns lays inputs out; zeroed first. */
int run_output_columns(run_case *c, const char *name, int32_t rank, const int64_t *shape, fmla_tensor *tensor);
/* The bytes of a cache as [pages, P, 1, bytes], or [pages, page stride] when pages are padded; zeroed first. */
int run_output_cache(run_case *c, const char *name, const fmla_format_info *info, fmla_kv_cache *cache);

/* ---- comparison ------------------------------------------------------------------------------------------ */

/*
 * Compares every output with the tensor of its name in another file: positions of infinities and NaN must
 * agree, every element be within abs or rel, the whole within cos_diff; integers and bytes must be equal.
 * Prints a table, or adds "comparison" to tree. CLI_OK, CLI_FAILED (some tensor is outside), CLI_ERROR
 * (nothing comparable).
 */
int run_compare(const run_case *c, const char *path, const char *prefix, const run_tolerance *wanted, cJSON *tree);

/* Differences of two runs of numbers, for reports. */
typedef struct run_difference {
    double max_abs;
    double max_rel;
    double rms;      /* root mean square of the differences */
    double rms_reference;
    double cos_diff; /* |1 - 2 sum ab / (sum aa + sum bb)| */
    double cosine;
    int64_t outside; /* elements beyond abs and rel, or whose infinities and NaN disagree */
} run_difference;

run_difference run_measure(const fmla_tensor *answer, const fmla_tensor *reference, double abs_tolerance,
                           double rel_tolerance);
int64_t run_elements(const fmla_tensor *tensor);

#endif
