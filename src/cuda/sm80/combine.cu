/* SPDX-License-Identifier: MIT */
/*
 * combine.cu: joins the partial results of rows whose list was cut. One warp per row of each block of the attention
 * kernel that holds a first piece; pieces are added in the order of their parts, the sink once.
 */
#include "common/work.cuh"
#include "ptx/grid.cuh"

#define LOG2_E  1.4426950408889634f
#define LN_2    0.6931471805599453f
#define COLUMNS 512
#define WARPS   8

/* Part `part`'s piece of the unit is not empty: the place of its result, else -1. */
static __device__ __forceinline__ int64_t piece_place(const fmlac_cut *cut, int64_t start, int64_t tiles, int64_t per,
                                                      int64_t part, int64_t column)
{
    int64_t begin = cut_at(cut, start, tiles, part * per), end = cut_at(cut, start, tiles, (part + 1) * per);
    return begin == end ? -1 : (part * cut->columns + column) * 2 + (begin == 0);
}

/* Sum of 2^(lse - max) over the pieces, and the largest lse and maximum. */
typedef struct joined {
    float lse, total, max;
} joined;

static __device__ __forceinline__ void finish(const fmlac_mqa &p, const fmlac_work &w, int64_t row, const joined &j,
                                              float *factor)
{
    bool lonely = j.total == 0.0f;
    float base2 = j.lse + log2f(j.total);
    int64_t at = quotient(w.row0 + row, w.group);
    int64_t token = w.first + at;
    int32_t head = w.kv_head * w.group + (int32_t)(w.row0 + row - at * w.group);
    if (threadIdx.x % 32 == 0 && p.lse.data) {
        ((float *)p.lse.data)[row_offset(&p.lse, &p, token, head)] = lonely ? p.empty_lse : base2 * LN_2 * p.lse_factor;
    }
    if (threadIdx.x % 32 == 0 && p.max_logits.data) {
        ((float *)p.max_logits.data)[row_offset(&p.max_logits, &p, token, head)] = j.max * LN_2 * p.lse_factor;
    }
    float total = p.sink ? j.total + exp2f(p.sink[head] * LOG2_E - j.lse) : j.total;
    *factor = lonely ? 0.0f : 1.0f / total;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) fmlak_mqa_combine_sm80(const __grid_constant__ fmlac_mqa p)
{
    int lane = threadIdx.x % 32;
    int64_t row_groups = p.tile_rows / WARPS;
    int64_t block = quotient(blockIdx.x, row_groups);
    int64_t row = (blockIdx.x - block * row_groups) * WARPS + threadIdx.x / 32;
    const fmlac_cut &cut = p.cut;
    int64_t part = quotient(block, cut.columns), column = block - part * cut.columns;

    ptx_grid_wait();
    int64_t per = cut.starts[cut.units + 1];
    int64_t unit = unit_at(&cut, (part + 1) * per, lane);
    int64_t start = cut.starts[unit];
    int64_t tiles = cut.starts[unit + 1] - start - cut.overhead;
    int64_t end = cut_at(&cut, start, tiles, (part + 1) * per);
    if (cut_at(&cut, start, tiles, part * per) != 0 || end == 0 || end == tiles) {
        return; /* no unit's first, cut piece is here */
    }
    fmlac_work w;
    work_rows(&p, unit, column, &w);
    if (row >= w.rows) {
        return;
    }
    int64_t last = part;
    while (cut_at(&cut, start, tiles, (last + 1) * per) < tiles) {
        last++;
    }
    joined j = {-FMLAC_INFINITY, 0.0f, -FMLAC_INFINITY};
    for (int64_t k = part; k <= last; k++) {
        int64_t place = piece_place(&cut, start, tiles, per, k, column);
        if (place >= 0) {
            const float *scalar = cut.partial_scalar + (place * p.tile_rows + row) * 2;
            j.lse = is_nan(scalar[0]) || scalar[0] > j.lse ? scalar[0] : j.lse;
            j.max = is_nan(scalar[1]) || scalar[1] > j.max ? scalar[1] : j.max;
        }
    }
    float sum[COLUMNS / 32] = {0.0f};
    for (int64_t k = part; k <= last; k++) {
        int64_t place = piece_place(&cut, start, tiles, per, k, column);
        float lse = place < 0 ? -FMLAC_INFINITY : cut.partial_scalar[(place * p.tile_rows + row) * 2];
        if (lse == -FMLAC_INFINITY) {
            continue; /* nothing attended in this piece */
        }
        float weight = exp2f(lse - j.lse);
        j.total += weight;
        const float *from = cut.partial + (place * p.tile_rows + row) * COLUMNS + lane * 4;
#pragma unroll
        for (int c = 0; c < COLUMNS / 128; c++) {
            float4 x = *(const float4 *)(from + c * 128);
            sum[4 * c] += weight * x.x;
            sum[4 * c + 1] += weight * x.y;
            sum[4 * c + 2] += weight * x.z;
            sum[4 * c + 3] += weight * x.w;
        }
    }
    float factor;
    finish(p, w, row, j, &factor);
    int64_t at = quotient(w.row0 + row, w.group);
    int32_t head = w.kv_head * w.group + (int32_t)(w.row0 + row - at * w.group);
    int64_t to = row_offset(&p.out, &p, w.first + at, head);
#pragma unroll
    for (int c = 0; c < COLUMNS / 128; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int d = c * 128 + lane * 4 + i;
            if (d < p.d_v) {
                store_element(p.out.data, p.out.dtype, to + d, sum[4 * c + i] * factor);
            }
        }
    }
}
