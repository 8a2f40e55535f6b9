/* SPDX-License-Identifier: MIT */
/*
 * combine.cu: joins the partial results of rows whose list was cut, in the order of their parts; the sink is applied
 * once. Two kernels. Where units have few pieces, a warp per row of each block of the attention kernel that holds a
 * first piece. Where a few units have many pieces, 512 threads per row of each unit: first a thread per piece, for its
 * weight, then four teams of a thread per four columns, each adding every fourth run of pieces with many loads under
 * way.
 */
#include "common/work.cuh"
#include "ptx/grid.cuh"

#define LOG2_E      1.4426950408889634f
#define LN_2        0.6931471805599453f
#define COLUMNS     512
#define WARPS       8 /* few pieces: rows of a block */
#define TEAM        128
#define TEAMS       4 /* of a block of threads */
#define AHEAD       8 /* pieces whose loads are under way together: a run */
#define ABSENT      (-1.0f)

/* Sum of 2^(lse - max) over the pieces, and the largest lse and maximum. */
typedef struct joined {
    float lse, total, max;
} joined;

/* The pieces of one unit and column, in the parts first .. last. */
typedef struct pieces {
    cut_view cut;
    int32_t start, tiles;
    int32_t first, last;
    int32_t column;
} pieces;

static __device__ __forceinline__ int32_t border_of(const fmlac_cut *cut, const pieces *s, int32_t part)
{
    return cut_at(cut, s->cut, s->start, s->tiles, part * s->cut.per);
}

/* Where a piece's result lies: the first began here, the others in an earlier part. */
static __device__ __forceinline__ int64_t place_of(const fmlac_cut *cut, const pieces *s, int32_t part)
{
    return (part * cut->columns + s->column) * 2 + (part == s->first);
}

static __device__ __forceinline__ float larger_or_nan(float a, float b)
{
    return is_nan(a) || a > b ? a : b;
}

/* Largest of all threads of a block, all teams of which hold the same; NaN where one is NaN. */
static __device__ float block_largest(float x, float all[TEAM / 32])
{
    for (int step = 16; step > 0; step /= 2) {
        x = larger_or_nan(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    }
    __syncthreads();
    if (threadIdx.x < TEAM && threadIdx.x % 32 == 0) {
        all[threadIdx.x / 32] = x;
    }
    __syncthreads();
    for (int i = 0; i < TEAM / 32; i++) {
        x = larger_or_nan(x, all[i]);
    }
    return x;
}

/* lse and maximum of a piece's row; false: nothing was attended there. */
static __device__ __forceinline__ bool read_scalars(const fmlac_mqa &p, const pieces *s, int32_t part, int64_t row,
                                                    float *lse, float *max)
{
    if (border_of(&p.cut, s, part) == border_of(&p.cut, s, part + 1)) {
        return false;
    }
    const float *scalar = p.cut.partial_scalar + (place_of(&p.cut, s, part) * p.tile_rows + row) * 2;
    *lse = scalar[0];
    *max = scalar[1];
    return true;
}

static __device__ __forceinline__ void finish(const fmlac_mqa &p, const fmlac_work &w, int64_t row, const joined &j,
                                              bool writes, float *factor)
{
    bool lonely = j.total == 0.0f;
    float base2 = j.lse + log2f(j.total);
    int64_t token;
    int32_t head;
    row_token_head(w, (int)row, &token, &head);
    if (writes && p.lse.data) {
        ((float *)p.lse.data)[row_offset(&p.lse, &p, token, head)] = lonely ? p.empty_lse : base2 * LN_2 * p.lse_factor;
    }
    if (writes && p.max_logits.data) {
        ((float *)p.max_logits.data)[row_offset(&p.max_logits, &p, token, head)] = j.max * LN_2 * p.lse_factor;
    }
    float total = p.sink ? j.total + exp2f(p.sink[head] * LOG2_E - j.lse) : j.total;
    *factor = lonely ? 0.0f : 1.0f / total;
}

/* What a thread adds up: four columns, and the weights. */
typedef struct sums {
    float x[4];
    float total;
} sums;

/* Adds the runs of `count` pieces that are this team's: every `teams`-th one. Weights are in shared memory. */
static __device__ __forceinline__ void add_pieces(sums *s, const float *weights, const float *from, int64_t stride,
                                                  int count, int team, int teams)
{
    for (int k = team * AHEAD; k < count; k += teams * AHEAD) {
        float4 x[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (k + i < count && weights[k + i] != ABSENT) {
                x[i] = *(const float4 *)(from + (k + i) * stride);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (k + i < count && weights[k + i] != ABSENT) {
                float weight = weights[k + i];
                s->total += weight;
                s->x[0] += weight * x[i].x;
                s->x[1] += weight * x[i].y;
                s->x[2] += weight * x[i].z;
                s->x[3] += weight * x[i].w;
            }
        }
    }
}

/* Adds the other teams' sums to the first one's. */
static __device__ __forceinline__ void join_teams(sums *s, sums all[TEAMS - 1][TEAM], int team, int thread)
{
    if (team > 0) {
        all[team - 1][thread] = *s;
    }
    __syncthreads();
    for (int i = 0; team == 0 && i < TEAMS - 1; i++) {
        const sums *other = &all[i][thread];
        s->total += other->total;
        for (int j = 0; j < 4; j++) {
            s->x[j] += other->x[j];
        }
    }
}

/* The part that owns a cost. */
static __device__ __forceinline__ int32_t part_of(int32_t cost, const pieces *s)
{
    return (int32_t)((uint32_t)cost / (uint32_t)s->cut.per);
}

/* Where the pieces of a unit end whose first piece is known; false: it is the only one. */
static __device__ __forceinline__ bool find_last(const fmlac_cut &cut, pieces *s)
{
    int32_t end = border_of(&cut, s, s->first + 1);
    if (border_of(&cut, s, s->first) != 0 || end == 0 || end == s->tiles) {
        return false;
    }
    int32_t last = part_of(s->start + cut.overhead + s->tiles - s->cut.least, s) - 1;
    s->last = last > s->first ? last : s->first;
    while (border_of(&cut, s, s->last + 1) < s->tiles) {
        s->last++;
    }
    return true;
}

static __device__ __forceinline__ void find_unit(const fmlac_cut &cut, int64_t unit, pieces *s)
{
    s->cut = cut_read(&cut);
    s->start = cut.starts[unit];
    s->tiles = cut.starts[unit + 1] - s->start - cut.overhead;
}

/* Four columns of a row, from `column` on. */
static __device__ __forceinline__ void write_columns(const fmlac_mqa &p, int64_t row_at, int column, const float x[4],
                                                     float factor)
{
    for (int i = 0; i < 4; i++) {
        if (column + i < p.d_v) {
            store_element(p.out.data, p.out.dtype, row_at + column + i, x[i] * factor);
        }
    }
}

static __device__ __forceinline__ int64_t out_row(const fmlac_mqa &p, const fmlac_work &w, int64_t row)
{
    int64_t token;
    int32_t head;
    row_token_head(w, (int)row, &token, &head);
    return row_offset(&p.out, &p, token, head);
}

/* ---- few pieces: a warp per row ---------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(WARPS * 32) fmlak_mqa_combine_sm80(const __grid_constant__ fmlac_mqa p)
{
    const fmlac_cut &cut = p.cut;
    int lane = threadIdx.x % 32;
    int64_t row_groups = p.tile_rows / WARPS;
    int64_t block = quotient(blockIdx.x, row_groups);
    int64_t row = (blockIdx.x - block * row_groups) * WARPS + threadIdx.x / 32;
    pieces s;
    s.first = (int32_t)quotient(block, cut.columns);
    s.column = (int32_t)(block - s.first * cut.columns);

    ptx_grid_wait();
    int32_t unit = unit_at(&cut, cut.starts, (s.first + 1) * cut.starts[cut.units + 1], lane);
    find_unit(cut, unit, &s);
    if (!find_last(cut, &s)) {
        return; /* no unit's first, cut piece is here */
    }
    fmlac_work w;
    work_rows(&p, unit, s.column, &w);
    if (row >= w.rows) {
        return;
    }
    joined j = {-FMLAC_INFINITY, 0.0f, -FMLAC_INFINITY};
    float lse, max, factor, sum[COLUMNS / 128][4] = {{0.0f}};
    for (int32_t k = s.first; k <= s.last; k++) {
        if (read_scalars(p, &s, k, row, &lse, &max)) {
            j.lse = larger_or_nan(lse, j.lse);
            j.max = larger_or_nan(max, j.max);
        }
    }
    for (int32_t k = s.first; k <= s.last; k++) {
        if (!read_scalars(p, &s, k, row, &lse, &max) || lse == -FMLAC_INFINITY) {
            continue; /* nothing attended in this piece */
        }
        float weight = exp2f(lse - j.lse);
        j.total += weight;
        const float *from = p.cut.partial + (place_of(&cut, &s, k) * p.tile_rows + row) * COLUMNS + lane * 4;
#pragma unroll
        for (int c = 0; c < COLUMNS / 128; c++) {
            float4 x = *(const float4 *)(from + c * 128);
            sum[c][0] += weight * x.x;
            sum[c][1] += weight * x.y;
            sum[c][2] += weight * x.z;
            sum[c][3] += weight * x.w;
        }
    }
    finish(p, w, row, j, lane == 0, &factor);
    int64_t to = out_row(p, w, row);
#pragma unroll
    for (int c = 0; c < COLUMNS / 128; c++) {
        write_columns(p, to, c * 128 + lane * 4, sum[c], factor);
    }
}

/* ---- many pieces: 512 threads per row ---------------------------------------------------------------------------- */

/* The part that holds a unit's first piece. */
static __device__ __forceinline__ int32_t first_part(const fmlac_cut &cut, const pieces *s)
{
    int32_t part = part_of(s->start + cut.overhead + s->cut.least - 1, s);
    while (part > 0 && border_of(&cut, s, part) != 0) {
        part--;
    }
    while (s->tiles > 0 && border_of(&cut, s, part + 1) == 0) {
        part++;
    }
    return part;
}

extern "C" __global__ void __launch_bounds__(TEAMS *TEAM, 1)
    fmlak_mqa_combine_many_sm80(const __grid_constant__ fmlac_mqa p)
{
    __shared__ float weights[TEAM], largest[TEAM / 32];
    __shared__ sums others[TEAMS - 1][TEAM];
    const fmlac_cut &cut = p.cut;
    int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    int64_t block = quotient(blockIdx.x, p.tile_rows), row = blockIdx.x - block * p.tile_rows;
    int64_t unit = quotient(block, cut.columns);
    pieces s;
    s.column = (int32_t)(block - unit * cut.columns);

    ptx_grid_wait();
    find_unit(cut, unit, &s);
    s.first = first_part(cut, &s);
    fmlac_work w;
    work_rows(&p, unit, s.column, &w);
    if (row >= w.rows || !find_last(cut, &s)) {
        return;
    }
    joined j = {-FMLAC_INFINITY, 0.0f, -FMLAC_INFINITY};
    float lse, max;
    for (int32_t k = s.first + thread; k <= s.last; k += TEAM) {
        if (read_scalars(p, &s, k, row, &lse, &max)) {
            j.lse = larger_or_nan(lse, j.lse);
            j.max = larger_or_nan(max, j.max);
        }
    }
    j.lse = block_largest(j.lse, largest);
    j.max = block_largest(j.max, largest);
    sums sum = {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f};
    for (int32_t base = s.first; base <= s.last; base += TEAM) {
        __syncthreads();
        if (team == 0) {
            bool there = base + thread <= s.last && read_scalars(p, &s, base + thread, row, &lse, &max);
            weights[thread] = there && lse != -FMLAC_INFINITY ? exp2f(lse - j.lse) : ABSENT;
        }
        __syncthreads();
        /* The first piece of all lies one place further on than the stride of the others says. */
        int64_t left = s.last + 1 - base, stride = cut.columns * 2 * p.tile_rows * COLUMNS;
        int first = base == s.first;
        const float *from = cut.partial + (place_of(&cut, &s, base) * p.tile_rows + row) * COLUMNS + thread * 4;
        if (first && team == 0) {
            add_pieces(&sum, weights, from, stride, 1, 0, 1);
        }
        from += first ? stride - p.tile_rows * COLUMNS : 0;
        add_pieces(&sum, weights + first, from, stride, (int)(left < TEAM ? left : TEAM) - first, team, TEAMS);
    }
    join_teams(&sum, others, team, thread);
    if (team == 0) {
        float factor;
        j.total = sum.total;
        finish(p, w, row, j, thread == 0, &factor);
        write_columns(p, out_row(p, w, row), thread * 4, sum.x, factor);
    }
}
