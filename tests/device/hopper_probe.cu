/* SPDX-License-Identifier: MIT */
/*
 * hopper_probe.cu: the Hopper attention kernels alone, without the library (not those in turn, for few rows, or of
 * small calls): small problems against a double reference,
 * from the simplest on (budget: one file that builds alone), so that the first line that is wrong says which part is;
 * then times of large ones.
 *
 *   nvcc -O3 -gencode=arch=compute_90a,code=sm_90a -Isrc/cuda -DPROBE_CODES -c tests/device/hopper_probe.cu -o codes.o
 *   nvcc -O3 -gencode=arch=compute_90a,code=sm_90a -Isrc/cuda -DPROBE_ROWS -c tests/device/hopper_probe.cu -o rows.o
 *   nvcc -O3 -gencode=arch=compute_90a,code=sm_90a -Isrc/cuda tests/device/hopper_probe.cu codes.o rows.o -o probe
 *   ./probe            checks, then times
 *   ./probe check      checks only;   ./probe time   times only
 *
 * -DPROBE_PAIRS: the kernels that work in pairs of blocks instead, with 128 heads. Rows come without tensor maps of Q
 * and output, so their borders are not those of large calls (sm90a/border.cuh).
 *
 * Kinds of data: `one token` (lse is the product of Q and K, out is V) - `no query` (Q is 0: weights are equal, out is
 * the mean: weights times V alone) - `no value` (K has rope dims only: lse shows scores and softmax, out is 0) - `all`.
 * A thread that waits for a barrier in vain for seconds says where, and ends the kernel.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <vector>

#ifndef FLASHMLA_EMULATE_H
struct stuck {
    volatile uint32_t count, block, thread, barrier, parity;
};
static __device__ stuck *stuck_report;
static __device__ __forceinline__ void give_up(uint32_t barrier, uint32_t parity, uint32_t looks)
{
    if (looks > (1u << 24)) {
        stuck_report->block = blockIdx.x;
        stuck_report->thread = threadIdx.x;
        stuck_report->barrier = barrier;
        stuck_report->parity = parity;
        stuck_report->count = 1;
        __threadfence_system();
        __trap();
    }
}
#define PTX_WAIT_HOOK(barrier, parity, looks) give_up(barrier, parity, looks)
#endif

void watch_codes(void *report);
void watch_rows(void *report);

#ifdef PROBE_CODES /* these kernels' tiles have another size: a file of their own */
#include "sm90a/mqa_codes.cu"
void watch_codes(void *report)
{
    cudaMemcpyToSymbol(stuck_report, &report, sizeof report);
}
#elif defined PROBE_ROWS /* and these another definition of clusters */
#include "sm90a/mqa_rows_bf16.cu"
void watch_rows(void *report)
{
    cudaMemcpyToSymbol(stuck_report, &report, sizeof report);
}
#else

#ifdef PROBE_PAIRS
#include "sm90a/mqa_pair.cu"
typedef fmlac_pair_sm90a probe_params;
#define PAIR_BLOCKS 2
#define KERNELS_BARRIERS                                                                                               \
    "pair_plan<8>: %u, pair_plan<9>: %u up to %u: full[3], empty[3], rope_empty[3], q_full[2], scores_full, "          \
    "scores_empty, weights_full, weights_empty, places_full[2], places_empty[2], raw_full[], raw_empty[], "            \
    "piece_full[%d], piece_free[%d]",                                                                                  \
        (unsigned)offsetof(pair_plan<8>, full), (unsigned)offsetof(pair_plan<9>, full),                                \
        (unsigned)offsetof(pair_plan<9>, pieces), PIECES, PIECES
#else
#include "sm90a/mqa_bf16.cu"
typedef fmlac_mqa_sm90a probe_params;
#define PAIR_BLOCKS 1
#define KERNELS_BARRIERS                                                                                               \
    "plan<9>, 64-token tiles: full[2][%d] at %u, free[2][2] at %u, piece_full[2], piece_free[2] at %u", PORTIONS,      \
        (unsigned)offsetof(plan<9>, full), (unsigned)offsetof(plan<9>, free), (unsigned)offsetof(plan<9>, piece_full)
#endif
#define TILE_ROWS (64 * PAIR_BLOCKS)
#include "sm80/plan.cu"
#include "sm80/combine.cu"

extern "C" __global__ void fmlak_mqa_codes_bf16_512_sm90a(const __grid_constant__ fmlac_mqa_sm90a all);
extern "C" __global__ void fmlak_mqa_codes_bf16_576_sm90a(const __grid_constant__ fmlac_mqa_sm90a all);
extern "C" __global__ void fmlak_mqa_rows_bf16_512_sm90a(const __grid_constant__ fmlac_mqa_sm90a all);
extern "C" __global__ void fmlak_mqa_rows_bf16_576_sm90a(const __grid_constant__ fmlac_mqa_sm90a all);

enum { PAGES, ROWS_16, V32, V41, V41_FP4 };
enum { ALL, NO_QUERY, NO_VALUE };

struct problem {
    const char *name;
    int source, d_qk, batch, s_q, heads, tokens, data, causal;
    int page_size; /* of paged lists; index lists: topk = tokens out of a pool of 2 * tokens */
    int parts;     /* 0: every list in one piece */
    float scale;
};

static float of_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static double of_e4m3(uint8_t code)
{
    int e = code >> 3 & 15, m = code & 7;
    double x = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return code & 0x80 ? -x : x;
}

static uint32_t random_state = 1;

static uint32_t random_bits(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

static float random_float(void)
{
    return (float)(random_bits() % 2001) / 1000.0f - 1.0f;
}

static void must(cudaError_t code, const char *what)
{
    if (code != cudaSuccess) {
        printf("%s: %s\n", what, cudaGetErrorString(code));
        exit(1);
    }
}

template <typename T> static T *on_device(const std::vector<T> &x)
{
    void *memory;
    must(cudaMalloc(&memory, x.size() * sizeof(T) + 64), "cudaMalloc");
    must(cudaMemcpyAsync(memory, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice, 0), "copy");
    return (T *)memory;
}

template <typename T> static std::vector<T> from_device(const void *memory, size_t count)
{
    std::vector<T> x(count);
    must(cudaMemcpyAsync(x.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost, 0), "copy");
    must(cudaStreamSynchronize(0), "synchronize");
    return x;
}

/* ---- a problem's tensors ----------------------------------------------------------------------------------------- */

struct tensors {
    std::vector<uint16_t> q;
    std::vector<uint8_t> pool;
    std::vector<float> keys; /* of a slot, as attention sees it; empty in timed problems */
    std::vector<int32_t> table, lengths, indices;
    int64_t slots;
};

static bool is_paged(const problem &x)
{
    return x.page_size > 0;
}

static int bytes_of_token(const problem &x)
{
    return x.source == V32 ? 656 : x.source == V41 ? 528 : x.source == V41_FP4 ? 288 : 2 * x.d_qk;
}

static void make_token(const problem &x, uint8_t *bytes, float *key)
{
    int codes = x.source == V41_FP4 ? 256 : 512;
    if (x.source < V32) {
        for (int d = 0; d < x.d_qk; d++) {
            uint16_t bits = x.data == NO_VALUE && d < 512 ? 0 : to_bf16(random_float());
            memcpy(bytes + 2 * d, &bits, 2);
            if (key) {
                key[d] = of_bf16(bits);
            }
        }
        return;
    }
    static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    for (int i = 0; i < codes; i++) {
        uint8_t code = (uint8_t)random_bits();
        bytes[i] = x.source != V41_FP4 && (code & 0x7F) == 0x7F ? 0 : code;
    }
    for (int g = 0; g < (x.source == V32 ? 4 : x.source == V41 ? 16 : 32); g++) {
        float scale = ldexpf(1.0f, -8 - (int)(random_bits() % 3));
        uint8_t e8m0 = (uint8_t)(127 - 8 - random_bits() % 3), e4m3 = (uint8_t)(0x20 + random_bits() % 8);
        if (x.source == V32) {
            memcpy(bytes + 512 + 4 * g, &scale, 4);
        } else {
            bytes[codes + g] = x.source == V41 ? e8m0 : e4m3;
        }
    }
    for (int d = 512; d < x.d_qk; d++) {
        uint16_t bits = to_bf16(random_float());
        memcpy(bytes + 528 + 2 * (d - 512), &bits, 2);
    }
    for (int d = 0; key && d < x.d_qk; d++) {
        float scale = 1;
        if (x.source == V32 && d >= 512) {
            uint16_t bits;
            memcpy(&bits, bytes + 528 + 2 * (d - 512), 2);
            key[d] = of_bf16(bits);
            continue;
        }
        if (x.source == V32) {
            memcpy(&scale, bytes + 512 + d / 128 * 4, 4);
        } else if (x.source == V41) {
            scale = ldexpf(1.0f, bytes[512 + d / 32] - 127);
        } else {
            scale = (float)of_e4m3(bytes[256 + d / 16]);
        }
        uint8_t nibble = bytes[d / 2] >> (d % 2 * 4) & 15;
        float code =
            x.source == V41_FP4 ? (nibble & 8 ? -e2m1[nibble & 7] : e2m1[nibble & 7]) : (float)of_e4m3(bytes[d]);
        key[d] = code * scale;
    }
}

static tensors make(const problem &x, bool with_keys)
{
    tensors t;
    int pages = is_paged(x) ? (x.tokens + x.page_size - 1) / x.page_size : 1;
    int bytes = bytes_of_token(x);
    t.slots = is_paged(x) ? (int64_t)x.batch * pages * x.page_size : 2 * (int64_t)x.tokens;
    t.q.resize((size_t)x.batch * x.s_q * x.heads * x.d_qk);
    for (uint16_t &q : t.q) {
        q = x.data == NO_QUERY ? 0 : to_bf16(random_float());
    }
    t.pool.assign((size_t)t.slots * bytes, 0xFF); /* NaN wherever nothing may be read */
    t.keys.resize(with_keys ? (size_t)t.slots * x.d_qk : 0);
    for (int64_t i = 0; is_paged(x) && i < (int64_t)x.batch * pages; i++) {
        t.table.push_back((int32_t)((i * 7 + 3) % (x.batch * pages)));
    }
    if (x.batch * pages % 7 == 0) {
        for (size_t i = 0; i < t.table.size(); i++) {
            t.table[i] = (int32_t)i;
        }
    }
    for (int b = 0; is_paged(x) && b < x.batch; b++) {
        int length = x.tokens - b % 3 * (x.tokens / 4);
        t.lengths.push_back(length);
        for (int j = 0; j < length; j++) {
            int64_t slot = (int64_t)t.table[b * pages + j / x.page_size] * x.page_size + j % x.page_size;
            make_token(x, &t.pool[slot * bytes], with_keys ? &t.keys[slot * x.d_qk] : nullptr);
        }
    }
    for (int64_t slot = 0; !is_paged(x) && slot < t.slots; slot++) {
        make_token(x, &t.pool[slot * bytes], with_keys ? &t.keys[slot * x.d_qk] : nullptr);
    }
    for (int64_t i = 0; !is_paged(x) && i < (int64_t)x.batch * x.s_q * x.tokens; i++) {
        t.indices.push_back(random_bits() % 16 == 0 && with_keys ? -1 : (int32_t)(random_bits() % t.slots));
    }
    return t;
}

/* ---- the kernel's description ------------------------------------------------------------------------------------ */

struct run_state {
    probe_params all;
    void *out, *lse;
    const void *kernel;
    unsigned blocks, threads, cluster;
    unsigned combine_blocks;
};

static void describe_pool(const problem &x, const tensors &t, fmlac_pool *pool)
{
    int pages = is_paged(x) ? (int)(t.slots / x.page_size) : 1;
    pool->data = on_device(t.pool);
    pool->num_pages = pages;
    pool->page_size = is_paged(x) ? x.page_size : t.slots;
    pool->token_stride = bytes_of_token(x);
    pool->page_stride = pool->page_size * pool->token_stride;
    pool->outer_scale = 1;
    pool->d_qk = x.d_qk;
    pool->aligned = 1;
    pool->element = x.source == V41_FP4 ? FMLAC_F4_E2M1 : x.source >= V32 ? FMLAC_F8_E4M3 : FMLAC_BF16;
    if (x.source >= V32) {
        pool->layout = FMLAC_LAYOUT_RECORD;
        pool->quant_dims = 512;
        pool->rope_dims = x.d_qk - 512;
        pool->group = x.source == V32 ? 128 : x.source == V41 ? 32 : 16;
        pool->group_shift = x.source == V32 ? 7 : x.source == V41 ? 5 : 4;
        pool->scale = x.source == V32 ? FMLAC_F32 : x.source == V41 ? FMLAC_F8_E8M0 : FMLAC_F8_E4M3;
        pool->scale_offset = x.source == V41_FP4 ? 256 : 512;
        pool->rope_offset = 528;
        pool->data_row_bytes = bytes_of_token(x);
    }
}

/* A tensor map of 16-bit numbers, boxes of 64 rows x `columns` dims. */
static void encode(fmlac_tensor_map *map, void *data, const cuuint64_t dims[4], const cuuint64_t strides[3],
                   cuuint32_t columns)
{
    typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                     const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                     CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
    must(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
         "driver");
    cuuint32_t box[4] = {columns, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
    CUresult result = ((encode_tiled)function)((CUtensorMap *)map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, dims,
                                               strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                               columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        printf("cuTensorMapEncodeTiled: %d\n", (int)result);
        exit(1);
    }
}

#ifdef PROBE_PAIRS
static void encode_all(probe_params *all)
{
    const fmlac_mqa &p = all->mqa;
    cuuint64_t dims[4] = {(cuuint64_t)p.d_qk, (cuuint64_t)p.h_q, (cuuint64_t)p.s_q, (cuuint64_t)p.batch};
    cuuint64_t strides[3] = {2 * (cuuint64_t)p.q.stride[2], 2 * (cuuint64_t)p.q.stride[1],
                             2 * (cuuint64_t)p.q.stride[0]};
    encode(&all->q, p.q.data, dims, strides, 64);
    encode(&all->q_rope, p.q.data, dims, strides, 32);
}
#else
static void encode_all(probe_params *all)
{
    const fmlac_pool &pool = all->mqa.main.pool;
    cuuint64_t dims[4] = {(cuuint64_t)pool.d_qk, (cuuint64_t)pool.page_size, (cuuint64_t)pool.num_pages, 1};
    cuuint64_t strides[3] = {(cuuint64_t)pool.token_stride, (cuuint64_t)pool.page_stride, (cuuint64_t)pool.page_stride};
    encode(&all->pages, pool.data, dims, strides, 64);
}
#endif

static void describe_rows(fmlac_rows *rows, void *data, int32_t dtype, int s_q, int heads, int width)
{
    rows->data = data;
    rows->dtype = dtype;
    rows->aligned = 1;
    rows->stride[0] = (int64_t)s_q * heads * width;
    rows->stride[1] = (int64_t)heads * width;
    rows->stride[2] = width;
}

static run_state describe(const problem &x, const tensors &t, int processors)
{
    run_state r;
    memset(&r, 0, sizeof r);
    fmlac_mqa &p = r.all.mqa;
    int64_t tokens = (int64_t)x.batch * x.s_q, rows = tokens * x.heads;
    std::vector<uint16_t> out((size_t)rows * 512, 0xFFFF);
    std::vector<float> lse((size_t)rows, NAN);
    p.batch = x.batch;
    p.s_q = x.s_q;
    p.num_tokens = tokens;
    p.h_q = x.heads;
    p.h_kv = 1;
    p.d_qk = x.d_qk;
    p.d_v = 512;
    p.scale = x.scale;
    p.empty_lse = -INFINITY;
    p.lse_factor = 1;
    p.tile_rows = TILE_ROWS;
    p.tile_tokens = PAIR_BLOCKS == 1 && x.source >= V32 ? FMLAC_CODES_TOKENS : 64;
    p.aligned = 1;
    describe_rows(&p.q, on_device(t.q), FMLAC_BF16, x.s_q, x.heads, x.d_qk);
    r.out = on_device(out);
    r.lse = on_device(lse);
    describe_rows(&p.out, r.out, FMLAC_BF16, x.s_q, x.heads, 512);
    describe_rows(&p.lse, r.lse, FMLAC_F32, x.s_q, x.heads, 1);
    describe_pool(x, t, &p.main.pool);
    int64_t group_rows = is_paged(x) ? (int64_t)x.s_q * x.heads : x.heads;
    if (is_paged(x)) {
        p.main.kind = FMLAC_LIST_PAGED;
        p.main.block_table = on_device(t.table);
        p.main.max_pages = p.main.table_stride = (x.tokens + x.page_size - 1) / x.page_size;
        p.main.capacity = p.main.max_pages * x.page_size;
        p.main.seqlens = on_device(t.lengths);
        p.main.causal = x.causal;
    } else {
        p.main.kind = FMLAC_LIST_INDEXED;
        p.main.indices = on_device(t.indices);
        p.main.topk = p.main.index_inner = x.tokens;
        p.main.index_outer = (int64_t)x.s_q * x.tokens;
    }
    r.cluster = PAIR_BLOCKS;
    processors /= (int)r.cluster;
    p.cut.row_tiles = p.cut.columns = (group_rows + p.tile_rows - 1) / p.tile_rows;
    p.cut.units = is_paged(x) ? x.batch : tokens;
    p.cut.parts = x.parts < 0 ? processors / p.cut.columns : x.parts;
    p.cut.overhead = p.cut.least = x.parts < 0 ? 4 : 1;
    p.cut.longest = (int32_t)((is_paged(x) ? p.main.capacity : x.tokens) / p.tile_tokens) + 1 + p.cut.overhead;
    int64_t blocks = p.cut.parts ? p.cut.parts * p.cut.columns : p.cut.units * p.cut.columns;
    r.blocks = (unsigned)(p.cut.parts == 0 && blocks > processors ? processors : blocks) * r.cluster;
    if (p.cut.parts) {
        p.cut.starts = on_device(std::vector<int32_t>((size_t)p.cut.units + 3)); /* by the plan kernel: own is 0 */
        p.cut.partial = on_device(std::vector<float>((size_t)blocks * 2 * p.tile_rows * 512, NAN));
        p.cut.partial_scalar = on_device(std::vector<float>((size_t)blocks * 2 * p.tile_rows * 2, NAN));
        r.combine_blocks = (unsigned)blocks * p.tile_rows / 8;
    }
    bool wide = x.d_qk > 512;
    r.threads = x.source >= V32 ? 512 : 384;
#ifdef PROBE_PAIRS
    r.kernel = wide ? (const void *)fmlak_mqa_pair_bf16_576_sm90a : (const void *)fmlak_mqa_pair_bf16_512_sm90a;
#else
    r.kernel = x.source == PAGES
                   ? wide ? (const void *)fmlak_mqa_pages_bf16_576_sm90a : (const void *)fmlak_mqa_pages_bf16_512_sm90a
               : x.source == ROWS_16
                   ? wide ? (const void *)fmlak_mqa_rows_bf16_576_sm90a : (const void *)fmlak_mqa_rows_bf16_512_sm90a
               : wide ? (const void *)fmlak_mqa_codes_bf16_576_sm90a
                      : (const void *)fmlak_mqa_codes_bf16_512_sm90a;
#endif
    if (PAIR_BLOCKS > 1 || x.source == PAGES) {
        encode_all(&r.all);
    }
    return r;
}

static void start(const void *kernel, const void *params, unsigned blocks, unsigned threads, size_t shared,
                  unsigned cluster)
{
    cudaLaunchAttribute attribute;
    memset(&attribute, 0, sizeof attribute);
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {dim3(blocks), dim3(threads), shared, 0, &attribute, cluster > 1 ? 1u : 0u};
    void *arguments[1] = {(void *)params};
    if (shared) {
        must(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared), "shared memory");
    }
    must(cudaLaunchKernelExC(&config, kernel, arguments), "launch");
}

static void enqueue(const run_state &r)
{
    if (r.all.mqa.cut.parts) {
        start((const void *)fmlak_mqa_plan_sm80, &r.all.mqa, 1, 1024, 0, 1);
    }
    start(r.kernel, &r.all, r.blocks, r.threads, 232448, r.cluster);
    if (r.all.mqa.cut.parts) {
        start((const void *)fmlak_mqa_combine_sm80, &r.all.mqa, r.combine_blocks, 256, 0, 1);
    }
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

/* Slots that a query token attends. */
static std::vector<int64_t> list_of(const problem &x, const tensors &t, int64_t token)
{
    std::vector<int64_t> list;
    int b = (int)(token / x.s_q), j = (int)(token % x.s_q);
    if (!is_paged(x)) {
        for (int k = 0; k < x.tokens; k++) {
            int32_t entry = t.indices[token * x.tokens + k];
            if (entry >= 0) {
                list.push_back(entry);
            }
        }
        return list;
    }
    int pages = (x.tokens + x.page_size - 1) / x.page_size;
    int seen = x.causal ? t.lengths[b] - x.s_q + j + 1 : t.lengths[b];
    for (int k = 0; k < seen; k++) {
        list.push_back((int64_t)t.table[b * pages + k / x.page_size] * x.page_size + k % x.page_size);
    }
    return list;
}

struct errors {
    double lse, left, right; /* output dims 0..255, 256..511, relative to the mean of |weight * value| */
    int64_t worst_row;
};

static errors compare(const problem &x, const tensors &t, const std::vector<uint16_t> &out,
                      const std::vector<float> &lse)
{
    errors e = {0, 0, 0, -1};
    double worst = 0;
    for (int64_t row = 0; row < (int64_t)lse.size(); row++) {
        std::vector<int64_t> list = list_of(x, t, row / x.heads);
        std::vector<double> z(list.size());
        double top = -INFINITY, sum = 0, row_worst = 0;
        for (size_t i = 0; i < list.size(); i++) {
            double dot = 0;
            for (int d = 0; d < x.d_qk; d++) {
                dot += (double)of_bf16(t.q[row * x.d_qk + d]) * t.keys[list[i] * x.d_qk + d];
            }
            z[i] = dot * x.scale;
            top = z[i] > top ? z[i] : top;
        }
        for (double &y : z) {
            y = exp(y - top);
            sum += y;
        }
        double want = top + log(sum), difference = fabs(want - lse[row]);
        difference = list.empty() ? (lse[row] == -INFINITY ? 0 : 1) : difference == difference ? difference : 1e9;
        e.lse = difference > e.lse ? difference : e.lse;
        row_worst = difference;
        for (int d = 0; d < 512; d++) {
            double o = 0, size = 1e-3;
            for (size_t i = 0; i < list.size(); i++) {
                o += z[i] / sum * t.keys[list[i] * x.d_qk + d];
                size += z[i] / sum * fabs(t.keys[list[i] * x.d_qk + d]);
            }
            double off = fabs(o - of_bf16(out[row * 512 + d])) / size;
            off = off == off ? off : 1e9;
            double &half = d < 256 ? e.left : e.right;
            half = off > half ? off : half;
            row_worst = off > row_worst ? off : row_worst;
        }
        if (row_worst > worst) {
            worst = row_worst;
            e.worst_row = row;
        }
    }
    return e;
}

static const problem checks[] = {
    {"pages, one token", PAGES, 576, 1, 1, 64, 1, ALL, 0, 64, 0, 0.05f},
    {"pages, no value, 1 tile", PAGES, 576, 1, 1, 64, 64, NO_VALUE, 0, 64, 0, 0.05f},
    {"pages, no query, 1 tile", PAGES, 576, 1, 1, 64, 64, NO_QUERY, 0, 64, 0, 0.05f},
    {"pages, all, 1 tile", PAGES, 576, 1, 1, 64, 64, ALL, 0, 64, 0, 0.05f},
    {"pages, no query, 2 tiles", PAGES, 576, 1, 1, 64, 128, NO_QUERY, 0, 64, 0, 0.05f},
    {"pages, no value, 2 tiles", PAGES, 576, 1, 1, 64, 128, NO_VALUE, 0, 64, 0, 0.05f},
    {"pages, all, 3 tiles", PAGES, 576, 1, 1, 64, 190, ALL, 0, 64, 0, 0.05f},
    {"pages, all, 20 tiles, 5 rows", PAGES, 576, 1, 1, 5, 1234, ALL, 0, 64, 0, 0.05f},
    {"pages, logits to 100", PAGES, 576, 1, 1, 64, 1000, ALL, 0, 64, 0, 3.0f},
    {"pages, scale below 0", PAGES, 576, 1, 1, 64, 300, ALL, 0, 128, 0, -0.5f},
    {"pages, d 512", PAGES, 512, 2, 1, 64, 300, ALL, 0, 64, 0, 0.05f},
    {"pages, causal, s_q 3", PAGES, 576, 3, 3, 40, 200, ALL, 1, 64, 0, 0.05f},
    {"pages, cut in parts", PAGES, 576, 3, 2, 64, 900, ALL, 1, 64, 7, 0.05f},
    {"pages, many pieces a block", PAGES, 576, 40, 1, 16, 130, ALL, 0, 64, 0, 0.05f},
    {"rows, one token", ROWS_16, 576, 1, 1, 64, 1, ALL, 0, 0, 0, 0.05f},
    {"rows, 1 tile", ROWS_16, 576, 1, 1, 64, 64, ALL, 0, 0, 0, 0.05f},
    {"rows, 20 tiles", ROWS_16, 576, 1, 3, 128, 1234, ALL, 0, 0, 0, 0.05f},
    {"rows, d 512", ROWS_16, 512, 1, 3, 64, 500, ALL, 0, 0, 0, 0.05f},
    {"rows, pages of 5", ROWS_16, 576, 2, 2, 64, 333, ALL, 1, 5, 0, 0.05f},
    {"V3.2, one token", V32, 576, 1, 1, 64, 1, ALL, 0, 0, 0, 0.05f},
    {"V3.2, no query, 1 tile", V32, 576, 1, 1, 64, 64, NO_QUERY, 0, 0, 0, 0.05f},
    {"V3.2, 20 tiles", V32, 576, 1, 2, 128, 1234, ALL, 0, 0, 0, 0.05f},
    {"V3.2, cut in parts", V32, 576, 2, 2, 64, 2048, ALL, 0, 0, 9, 0.05f},
    {"V4.1 fp8, 9 tiles", V41, 512, 1, 2, 64, 555, ALL, 0, 0, 0, 0.05f},
    {"V4.1 fp4, 9 tiles", V41_FP4, 512, 1, 2, 64, 555, ALL, 0, 0, 0, 0.05f},
};

static int check(const problem &x, int processors)
{
    tensors t = make(x, true);
    run_state r = describe(x, t, processors);
    enqueue(r);
    cudaError_t code = cudaStreamSynchronize(0);
    if (code != cudaSuccess) {
        printf("%-30s %s\n", x.name, cudaGetErrorString(code));
        return -1;
    }
    size_t rows = (size_t)x.batch * x.s_q * x.heads;
    errors e = compare(x, t, from_device<uint16_t>(r.out, rows * 512), from_device<float>(r.lse, rows));
    bool good = e.lse < 1e-4 * (1 + fabs(x.scale) * 20) && e.left < 1.0 / 128 && e.right < 1.0 / 128;
    printf("%-30s %s  lse %.2e  out %.2e | %.2e  worst row %lld\n", x.name, good ? "good " : "WRONG", e.lse, e.left,
           e.right, (long long)e.worst_row);
    fflush(stdout);
    return good ? 0 : 1;
}

/* ---- times ------------------------------------------------------------------------------------------------------- */

#ifndef FLASHMLA_EMULATE_H
static const problem times[] = {
    {"dense b128 h128 4096", PAGES, 576, 128, 1, 128, 4096, ALL, 0, 64, -1, 0.04f},
    {"dense b128 h128 16384", PAGES, 576, 128, 1, 128, 16384, ALL, 0, 64, -1, 0.04f},
    {"dense b128 s_q 2 h128 8192", PAGES, 576, 128, 2, 128, 8192, ALL, 1, 64, -1, 0.04f},
    {"dense b128 h16 8192", PAGES, 576, 128, 1, 16, 8192, ALL, 0, 64, -1, 0.04f},
    {"dense b1 h128 8192", PAGES, 576, 1, 1, 128, 8192, ALL, 0, 64, -1, 0.04f},
    {"prefill d576 h128 topk 2048", ROWS_16, 576, 1, 4096, 128, 2048, ALL, 0, 0, 0, 0.04f},
    {"prefill d512 h64 topk 512", ROWS_16, 512, 1, 4096, 64, 512, ALL, 0, 0, 0, 0.04f},
    {"V3.2 b128 s_q 2 h128 2048", V32, 576, 128, 2, 128, 2048, ALL, 0, 0, -1, 0.04f},
    {"V3.2 b128 s_q 2 h64 2048", V32, 576, 128, 2, 64, 2048, ALL, 0, 0, -1, 0.04f},
    {"V4.1 fp8 b128 s_q 2 h64 2048", V41, 512, 128, 2, 64, 2048, ALL, 0, 0, -1, 0.04f},
    {"V4.1 fp4 b128 s_q 2 h64 2048", V41_FP4, 512, 128, 2, 64, 2048, ALL, 0, 0, -1, 0.04f},
};

static void measure(const problem &x, int processors)
{
    /* Index lists: a pool of 32768 tokens; the requests of a paged list share one set of pages. */
    problem pool = x;
    pool.batch = 1;
    pool.s_q = 1;
    pool.tokens = is_paged(x) ? x.tokens : 16384;
    tensors t = make(pool, false);
    t.q.resize((size_t)x.batch * x.s_q * x.heads * x.d_qk);
    for (uint16_t &q : t.q) {
        q = to_bf16(random_float());
    }
    if (is_paged(x)) {
        std::vector<int32_t> one = t.table;
        t.table.clear();
        for (int b = 0; b < x.batch; b++) {
            t.table.insert(t.table.end(), one.begin(), one.end());
        }
        t.lengths.assign((size_t)x.batch, x.tokens);
    } else {
        t.indices.resize((size_t)x.batch * x.s_q * x.tokens);
        for (int32_t &index : t.indices) {
            index = (int32_t)(random_bits() % t.slots);
        }
    }
    run_state r = describe(x, t, processors);
    cudaEvent_t begin, end;
    must(cudaEventCreate(&begin), "event");
    must(cudaEventCreate(&end), "event");
    for (int i = 0; i < 3; i++) {
        enqueue(r);
    }
    must(cudaEventRecord(begin, 0), "event");
    for (int i = 0; i < 10; i++) {
        enqueue(r);
    }
    must(cudaEventRecord(end, 0), "event");
    must(cudaStreamSynchronize(0), x.name);
    float ms;
    must(cudaEventElapsedTime(&ms, begin, end), "event");
    double seconds = ms / 1e4, flops = 2.0 * x.batch * x.s_q * x.heads * x.tokens * (x.d_qk + 512);
    printf("%-30s %9.1f us  %6.1f TFLOPS\n", x.name, seconds * 1e6, flops / seconds / 1e12);
    fflush(stdout);
}
#endif

int main(int argc, char **argv)
{
    int processors = 0, failures = 0;
    must(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0), "device");
#ifndef FLASHMLA_EMULATE_H
    stuck *report, *seen_from_device;
    must(cudaHostAlloc((void **)&report, sizeof *report, cudaHostAllocMapped), "cudaHostAlloc");
    memset((void *)report, 0, sizeof *report);
    must(cudaHostGetDevicePointer((void **)&seen_from_device, report, 0), "mapped memory");
    must(cudaMemcpyToSymbol(stuck_report, &seen_from_device, sizeof seen_from_device), "symbol");
    watch_codes(seen_from_device);
    if (PAIR_BLOCKS == 1) {
        watch_rows(seen_from_device);
    }
#endif
    if (argc < 2 || strcmp(argv[1], "time") != 0) {
        for (problem x : checks) {
            if (PAIR_BLOCKS > 1 && x.source < V32) {
                continue;
            }
            x.heads = PAIR_BLOCKS > 1 ? 128 : x.heads;
            int result = check(x, processors);
            failures += result != 0;
            if (result < 0) {
#ifndef FLASHMLA_EMULATE_H
                printf("stuck: %u block %u thread %u barrier at byte %u parity %u\n", report->count, report->block,
                       report->thread, report->barrier, report->parity);
                printf(KERNELS_BARRIERS);
                printf("\n");
#endif
                return 1;
            }
        }
        printf("%d wrong\n", failures);
    }
#ifndef FLASHMLA_EMULATE_H
    if (argc < 2 || strcmp(argv[1], "check") != 0) {
        for (problem x : times) {
            if (PAIR_BLOCKS > 1 && x.source < V32) {
                continue;
            }
            x.heads = PAIR_BLOCKS > 1 ? 128 : x.heads;
            measure(x, processors);
        }
    }
#endif
    return failures != 0;
}

#endif
