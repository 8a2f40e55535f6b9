/* SPDX-License-Identifier: MIT */
/* small.cu: merge of partial states, index conversion, the e4m3 cast of a matrix, weight permutations, schedule tables.
 */
#define FMLAC_INLINE_DIVISION
#include "common/list.cuh"
#include "eight.cuh"

#define THREADS 256

static __device__ __forceinline__ int64_t own_item(void)
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}

static __device__ __forceinline__ int64_t own_warp(void)
{
    return (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
}

/* ---- merge: one warp per (token, head) --------------------------------------------------------------------------- */

static __device__ __forceinline__ float state_lse(const fmlac_merge_state &s, int64_t token, int32_t head)
{
    return s.lse[token * s.lse_stride[0] + head * s.lse_stride[1]];
}

/* Elements at .. at + width - 1 of a state's out; width: at most 8. */
static __device__ __forceinline__ void load_state(const fmlac_merge_state &s, int64_t at, int32_t width, float x[8])
{
    if (s.aligned) {
        load_rows_8(s.out, s.dtype, at, x);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
        x[e] = e < width ? load_element(s.out, s.dtype, at + e) : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) fmlak_merge_sm80(const __grid_constant__ fmlac_merge p)
{
    int64_t at = own_warp();
    int64_t token = quotient(at, p.heads);
    int32_t head = (int32_t)(at - token * p.heads);
    int lane = threadIdx.x % 32;
    float max = -FMLAC_INFINITY, sum = 0.0f;
    if (token >= p.tokens) {
        return;
    }
    for (int32_t i = 0; i < p.count; i++) {
        float lse = state_lse(p.states[i], token, head);
        max = !is_infinite(lse) && (lse > max || is_nan(lse)) ? lse : max; /* a NaN stays: nothing is above it */
    }
    bool empty = max == -FMLAC_INFINITY;
    for (int32_t i = 0; i < p.count; i++) {
        float lse = state_lse(p.states[i], token, head);
        sum += is_infinite(lse) ? 0.0f : expf(lse - max);
    }
    float inverse = __fdiv_rn(1.0f, p.sink && !empty ? sum + expf(p.sink[head] - max) : sum);
    int64_t to = token * p.out.stride[0] + head * p.out.stride[1];
    for (int32_t d = lane * 8; d < p.d; d += 256) {
        float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
        int32_t width = p.d - d < 8 ? p.d - d : 8;
        for (int32_t i = 0; i < p.count; i++) {
            const fmlac_merge_state &s = p.states[i];
            float lse = state_lse(s, token, head);
            if (!is_infinite(lse)) {
                float x[8], weight = expf(lse - max) * inverse;
                load_state(s, token * s.out_stride[0] + head * s.out_stride[1] + d, width, x);
#pragma unroll
                for (int e = 0; e < 8; e++) {
                    sums[e] += weight * x[e];
                }
            }
        }
        if (p.out.aligned) {
            store_rows_8(p.out, to + d, sums);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 8; e++) {
            if (e < width) {
                store_element(p.out.data, p.out.dtype, to + d + e, sums[e]);
            }
        }
    }
    if (lane == 0 && p.lse.data) {
        ((float *)p.lse.data)[token * p.lse.stride[0] + head * p.lse.stride[1]] = empty ? p.empty_lse : max + logf(sum);
    }
}

/* ---- positions to slots ------------------------------------------------------------------------------------------ */

extern "C" __global__ void __launch_bounds__(THREADS)
    fmlak_indices_convert_sm80(const __grid_constant__ fmlac_indices_convert p)
{
    int64_t at = own_item();
    int64_t row = quotient(at, p.topk), i = at - row * p.topk;
    int64_t request = quotient(row, p.s_q), j = row - request * p.s_q;
    if (request >= p.batch) {
        return;
    }
    int64_t position = p.positions[request * p.position_stride[0] + j * p.position_stride[1] + i];
    int64_t slot = -1;
    if (position >= 0) {
        int64_t index = quotient(position, p.page_size);
        if (index < p.max_pages) {
            int64_t page = p.block_table[request * p.table_stride + index];
            slot = page < 0 ? -1 : page * p.page_size + (position - index * p.page_size);
            slot = slot > INT32_MAX ? -1 : slot;
        }
    }
    p.indices[request * p.index_stride[0] + j * p.index_stride[1] + i] = (int32_t)slot;
}

/* ---- cast: a lane has eight columns, a group 4 or 16 neighbouring lanes ------------------------------------------ */

extern "C" __global__ void __launch_bounds__(THREADS) fmlak_fp8_cast_sm80(const __grid_constant__ fmlac_fp8_cast p)
{
    int64_t at = own_item(), chunks = p.cols / 8;
    int64_t row = quotient(at, chunks), column = (at - row * chunks) * 8;
    int64_t from = row * p.src_stride + column, to = row * p.code_stride + column;
    bool there = row < p.rows;
    float x[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f}, top = 1e-4f;
    if (there && p.aligned) {
        load_rows_8(p.src, p.dtype, from, x);
    } else if (there) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = load_element(p.src, p.dtype, from + i);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        top = fmaxf(top, fabsf(x[i]));
    }
    for (int step = 1; step < p.group / 8; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
    }
    bool infinite = is_infinite(top);
    int e = infinite ? 128 : ceil_log2(__fdiv_rn(top, 448.0f));
    float inverse = power_of_two(infinite ? 0 : -e);
    uint32_t codes[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        codes[i / 4] |= (infinite || is_nan(x[i]) ? 0x7F : e4m3_fast(x[i] * inverse)) << (8 * (i & 3));
    }
    if (there && p.aligned) {
        *(uint2 *)(p.codes + to) = {codes[0], codes[1]};
    } else if (there) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            p.codes[to + i] = (uint8_t)(codes[i / 4] >> (8 * (i & 3)));
        }
    }
    if (there && column % p.group == 0) {
        int64_t group = column / p.group;
        p.scale[(row + group / 4 * p.scale_rows) * 4 + group % 4] = (uint8_t)(e + 127);
    }
}

/* ---- permutations: one warp per source row ------------------------------------------------------------------------
 */

extern "C" __global__ void __launch_bounds__(THREADS) fmlak_permute_q_b_sm80(const __grid_constant__ fmlac_permute p)
{
    int64_t row = own_warp();
    int lane = threadIdx.x % 32;
    if (row >= p.rows) {
        return;
    }
    int64_t h = quotient(row, p.d), d = row - h * p.d;
    int64_t to = d % 16 + 16 * h + d / 16 * 16 * p.heads;
    if (p.aligned) {
        for (int64_t c = lane * 16; c < p.cols; c += 512) {
            *(uint4 *)(p.out_weight + to * p.cols + c) = *(const uint4 *)(p.weight + row * p.weight_stride[1] + c);
        }
    } else {
        for (int64_t c = lane; c < p.cols; c += 32) {
            p.out_weight[to * p.cols + c] = p.weight[row * p.weight_stride[1] + c];
        }
    }
    for (int64_t w = lane; w < p.words; w += 32) {
        p.out_scale[to * p.out_scale_stride[1] + w * p.out_scale_stride[2]] =
            p.scale[row * p.scale_stride[1] + w * p.scale_stride[2]];
    }
}

/* Chunk c of head g, 32 columns, becomes number c * G + g; its scale byte with it. */
extern "C" __global__ void __launch_bounds__(THREADS) fmlak_permute_wv_sm80(const __grid_constant__ fmlac_permute p)
{
    int64_t at = own_warp();
    int64_t group = quotient(at, p.rows), row = at - group * p.rows;
    int lane = threadIdx.x % 32;
    if (group >= p.groups) {
        return;
    }
    int32_t chunks = p.d / 32;
    const uint8_t *from = p.weight + group * p.weight_stride[0] + row * p.weight_stride[1];
    const int32_t *scale = p.scale + group * p.scale_stride[0] + row * p.scale_stride[1];
    uint8_t *to = p.out_weight + (group * p.rows + row) * p.cols;
    int32_t *out_scale = p.out_scale + group * p.out_scale_stride[0] + row * p.out_scale_stride[1];
    int32_t each = p.aligned ? 16 : 1, lanes = 32 / each; /* bytes at a time, lanes to a chunk */
    for (int32_t i = lane / lanes; i < chunks * p.heads; i += each) {
        int32_t source = i % p.heads * chunks + i / p.heads, byte = lane % lanes * each;
        if (p.aligned) {
            *(uint4 *)(to + i * 32 + byte) = *(const uint4 *)(from + source * 32 + byte);
        } else {
            to[i * 32 + byte] = from[source * 32 + byte];
        }
    }
    for (int32_t w = lane; w < p.words; w += 32) {
        uint32_t word = 0;
        for (int32_t i = 4 * w; i < 4 * w + 4; i++) {
            int32_t source = i % p.heads * chunks + i / p.heads;
            uint32_t byte = (uint32_t)scale[source / 4 * p.scale_stride[2]] >> (8 * (source % 4)) & 0xFF;
            word |= byte << (8 * (i % 4));
        }
        out_scale[w * p.out_scale_stride[2]] = (int32_t)word;
    }
}

/* ---- schedule tables: one block; the rule is in src/plan/plan.h -----------------------------------------------------
 */

enum { FORM_2025_02 = 1, FORM_2025_09 = 4, FORM_2026_01 = 5 };

static __device__ __forceinline__ int64_t schedule_length(const fmlac_schedule &p, int64_t request)
{
    if (p.seqlens) {
        return clamped(p.seqlens[request], 0, INT32_MAX);
    }
    int64_t length = p.topk_length ? clamped(p.topk_length[request], 0, p.topk) : p.topk;
    length = length < 1 ? 1 : length;
    if (p.extra_topk > 0) {
        int64_t extra = p.extra_topk_length ? clamped(p.extra_topk_length[request], 0, p.extra_topk) : p.extra_topk;
        length = (length + 63) / 64 * 64 + extra;
    }
    return length;
}

static __device__ __forceinline__ int64_t schedule_blocks(const fmlac_schedule &p, int64_t request)
{
    int64_t length = schedule_length(p, request);
    return length < 1 && p.form != FORM_2025_02 ? 1 : (length + 63) / 64;
}

typedef struct cursor {
    int64_t request, block, split;
} cursor;

/* The row of a part that worked from `begin` to `end`. */
static __device__ void schedule_row(const fmlac_schedule &p, int32_t *row, const cursor &begin, const cursor &end)
{
    bool in_tokens = p.form == FORM_2025_02;
    bool cut = end.block > 0; /* the last request goes on in the next part */
    int64_t unit = in_tokens ? 64 : 1;
    int64_t last = cut ? end.request : end.request - 1;
    int64_t last_end = end.block * unit;
    bool same = begin.request == last;
    if (!cut && last >= 0) {
        int64_t length = schedule_length(p, last);
        last_end = in_tokens || length == 0 ? length : schedule_blocks(p, last);
    }
    bool newest = p.form == FORM_2026_01;
    row[0] = (int32_t)begin.request;
    row[1] = (int32_t)(newest ? last : begin.block * unit);
    row[2] = (int32_t)(newest ? begin.block : last);
    row[3] = (int32_t)last_end;
    row[4] = (int32_t)begin.split;
    row[5] = newest && (begin.block > 0 || (same && cut));
    row[6] = newest && (cut || (same && begin.block > 0));
    row[7] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_schedule_sm80(const __grid_constant__ fmlac_schedule p)
{
    __shared__ int64_t sums[THREADS];
    __shared__ int64_t blocks[THREADS];
    int64_t sum = 0;
    for (int64_t i = threadIdx.x; i < p.batch; i += THREADS) {
        sum += schedule_blocks(p, i) + p.overhead_blocks;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if ((int)threadIdx.x < step) {
            sums[threadIdx.x] += sums[threadIdx.x + step];
        }
        __syncthreads();
    }
    int64_t overhead = p.overhead_blocks;
    int64_t payload = (sums[0] + p.parts - 1) / p.parts + overhead;

    /* Thread 0 walks; all threads fetch the lengths ahead of it, THREADS requests at a time. */
    __shared__ cursor at, begin;
    __shared__ int64_t part, budget;
    if (threadIdx.x == 0) {
        at = {0, 0, 0};
        begin = at;
        part = 0;
        budget = payload;
        p.num_splits[0] = 0;
    }
    __syncthreads();
    for (int64_t base = 0; base < p.batch; base += THREADS) {
        blocks[threadIdx.x] = base + threadIdx.x < p.batch ? schedule_blocks(p, base + threadIdx.x) : 0;
        __syncthreads();
        while (threadIdx.x == 0 && part < p.parts && at.request < p.batch && at.request < base + THREADS) {
            int64_t rest = blocks[at.request - base] - at.block;
            if (budget >= rest + overhead) {
                p.num_splits[at.request + 1] = p.num_splits[at.request] + (int32_t)at.split + 1;
                budget -= rest + overhead;
                at = {at.request + 1, 0, 0};
                continue;
            }
            if (budget > overhead) {
                at.block += budget - overhead;
                at.split++;
            }
            schedule_row(p, p.metadata + part * p.metadata_stride, begin, at);
            part++;
            begin = at;
            budget = payload;
        }
        __syncthreads();
    }
    while (threadIdx.x == 0 && part < p.parts) {
        schedule_row(p, p.metadata + part * p.metadata_stride, begin, at);
        part++;
        begin = at;
    }
}
