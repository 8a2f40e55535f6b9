/* SPDX-License-Identifier: MIT */
/*
 * cuda_host.h: the host side of the CUDA plugin: its state, launches, and descriptions as kernels want them. Plain C
 * over the CUDA runtime; a call enqueues kernels on the caller's stream and touches nothing else.
 */
#ifndef FLASHMLA_CUDA_HOST_H
#define FLASHMLA_CUDA_HOST_H

#include <cuda_runtime_api.h>

#include "../../backend.h"
#include "../../format/format.h"
#include "../common/params.h"

#define FMLAC_CLUSTERS 4 /* kinds of clusters: of 2, 4, 8 and 16 blocks */

typedef struct fmlac_state {
    fmlai_allocator allocator;
    int device;
    int processors;       /* multiprocessors */
    int capability;       /* 10 * major + minor */
    int shared_block;     /* bytes of shared memory that a block may have: the device's, or the profile's if smaller */
    int shared_processor; /* bytes of a multiprocessor */
    int64_t l2_bytes;
    bool dependent_launch;        /* programmatic dependent launch: sm_90 and up */
    bool check;                   /* FLASHMLA_CHECK=1 */
    fmlac_report *report;         /* device memory, with check only */
    bool hopper;                  /* the kernels of sm90a/ may be used */
    bool pairs;                   /* and those of pairs of blocks */
    int turns;                    /* 16-bit tokens by tiles in turn: 1 always, -1 never, 0 where that is faster */
    bool few;                     /* those for few rows are used whether they pay or not */
    int clusters[FMLAC_CLUSTERS]; /* of 2, 4, 8, 16 blocks that run at a time */
    void *encode_tensor_map;      /* the driver's cuTensorMapEncodeTiled; NULL: no TMA */
} fmlac_state;

/* A tiled attention kernel. */
typedef struct fmlac_kernel {
    void (*function)(void);
    const char *name;
    fmla_dtype dtype;
    int rows, tokens, warps;
    int shared_kib; /* profile that it was made for */
    int cluster;    /* blocks that work together on a row tile; 0: one */
} fmlac_kernel;

/* One kernel launch. */
typedef struct fmlac_launch {
    const void *kernel;
    const char *name;
    int64_t blocks;
    int threads;
    size_t shared;
    int cluster;    /* blocks of a cluster, 0: no clusters */
    bool dependent; /* may begin before the launch ahead of it has ended (its kernel waits by itself) */
} fmlac_launch;

/* DEVICE with the name of what failed; the runtime's error state is cleared. */
fmla_status fmlac_cuda_fail(fmlai_error *error, cudaError_t code, const char *what);
/* Makes `device` current and remembers what was; fmlac_leave puts it back. */
fmla_status fmlac_enter(int device, int *before, fmlai_error *error);
void fmlac_leave(int before);
/* Enqueues a kernel with its parameter struct on the call's stream. The state's device is current. */
fmla_status fmlac_enqueue(const fmlac_state *state, const fmlai_call *call, const fmlac_launch *launch,
                          const void *params);
/* One launch with the state's device made current around it. */
fmla_status fmlac_run(const fmlac_state *state, const fmlai_call *call, const fmlac_launch *launch, const void *params);

/* describe.c */
void fmlac_describe_pool(fmlac_pool *to, const fmlai_pool *from);
void fmlac_describe_rows(fmlac_rows *to, const fmlai_rows *from, int32_t unit, int64_t width);
void fmlac_describe_packed(fmlac_packed *to, const fmlai_packed *from, int64_t width);
void fmlac_describe_slots(fmlac_slots *to, const fmlai_slots *from);
void fmlac_describe_mqa(fmlac_mqa *to, const fmlai_mqa *from);

/* check.c: with FLASHMLA_CHECK=1, looks at the values in a description's tensors and waits for the answer. */
fmla_status fmlac_check_mqa(const fmlac_state *state, const fmlac_mqa *p, const fmlai_call *call);

/* mqa_sm90a.c: the Hopper attention kernels. `wanted`: cuda_kernels of the context's configuration. */
void fmlac_hopper_open(fmlac_state *state, int32_t wanted);
/* The kernel of blocks that work alone for what pairs or kernels for few rows would do, NULL: none. */
const fmlac_kernel *fmlac_hopper_unpaired(const fmlac_mqa *p);
/* Whether it can work in clusters whose blocks share a list (sm90a/together.cuh). */
bool fmlac_hopper_together(const fmlac_kernel *kernel, const fmlac_mqa *p);
/* Whether a kernel is one for few rows of quantised tokens (sm90a/few.cuh). */
bool fmlac_hopper_few(const fmlac_kernel *kernel);
/* How many clusters the device runs at a time, which is current. */
void fmlac_hopper_clusters(fmlac_state *state);
/* The kernel for a description, NULL: the portable ones. */
const fmlac_kernel *fmlac_hopper_choose(const fmlac_state *state, const fmlac_mqa *p);
size_t fmlac_hopper_shared(void);
/* Enqueues it; launch: all but kernel and name. */
fmla_status fmlac_hopper_enqueue(const fmlac_state *state, const fmlai_call *call, fmlac_launch *launch,
                                 const fmlac_kernel *kernel, const fmlac_mqa *p);

/* Entries of the backend's table. */
size_t fmlac_mqa_workspace(const void *state, const fmlai_mqa *p);
fmla_status fmlac_mqa_run(void *state, const fmlai_mqa *p, const fmlai_call *call);
size_t fmlac_mha_forward_workspace(const void *state, const fmlai_mha *p);
fmla_status fmlac_mha_forward(void *state, const fmlai_mha *p, const fmlai_call *call);
size_t fmlac_mha_backward_workspace(const void *state, const fmlai_mha *p);
fmla_status fmlac_mha_backward(void *state, const fmlai_mha *p, const fmlai_call *call);
fmla_status fmlac_quantize(void *state, const fmlai_transcode *p, const fmlai_call *call);
fmla_status fmlac_dequantize(void *state, const fmlai_transcode *p, const fmlai_call *call);
fmla_status fmlac_convert_run(void *state, const fmlai_convert *p, const fmlai_call *call);
fmla_status fmlac_indices_convert_run(void *state, const fmlai_indices_convert *p, const fmlai_call *call);
fmla_status fmlac_fp8_cast_run(void *state, const fmlai_fp8_cast *p, const fmlai_call *call);
fmla_status fmlac_merge_run(void *state, const fmlai_merge *p, const fmlai_call *call);
fmla_status fmlac_permute_run(void *state, const fmlai_permute *p, const fmlai_call *call);
fmla_status fmlac_schedule_run(void *state, const fmlai_schedule *p, const fmlai_call *call);

static inline int64_t fmlac_ceil(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

#endif
