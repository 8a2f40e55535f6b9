/* SPDX-License-Identifier: MIT */
/*
 * combine.cu: joins the partial results of rows whose list was cut, in the order of their parts; the sink is applied
 * once. Two kernels. Where units have few pieces, a warp per row of each unit or, if there are fewer, of each block of
 * the attention kernel that may hold a first piece. Where a few units have many pieces, 512 threads per row of each
 * unit: four teams of a thread per four columns, each adding every fourth piece, with many loads under way at once.
 *
 * Where pieces lie follows from lengths alone. Blocks that find the cut by themselves do so before they wait for the
 * attention kernel.
 */
#define FMLAC_QUOTIENT_32 /* the host cuts nothing where numbers are long */

#include "common/work.cuh"
#include "ptx/grid.cuh"

#define COLUMNS FMLAC_OUT_COLUMNS
#define WARPS   8 /* few pieces: rows of a block */
#define TEAM    128
#define TEAMS   4 /* of a block of threads */
#ifndef AHEAD
#define AHEAD 8 /* pieces of a team whose loads are under way together; 16: with one block a multiprocessor */
#endif
#define CHUNK  (TEAMS * AHEAD)
#define ABSENT (-1.0f)

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

/* The cut of all units, for a whole block; waits for what wrote it. */
static __device__ __forceinline__ cut_view block_cut(const fmlac_mqa &p, int threads)
{
    __shared__ int32_t own[FMLAC_OWN_UNITS + 1];
    __shared__ cut_view found;
    if (!p.cut.own) {
        ptx_grid_wait();
        return cut_read(&p.cut);
    }
    own_costs(&p, own, (int)threadIdx.x, threads);
    __syncthreads();
    if (threadIdx.x < 32) {
        cut_view view = cut_find(&p.cut, own, (int)threadIdx.x);
        if (threadIdx.x == 0) {
            found = view;
        }
    }
    __syncthreads();
    return found;
}

/* lse and maximum of a piece's row; lse is -infinity if nothing was attended there. */
static __device__ __forceinline__ float2 read_scalars(const fmlac_mqa &p, const pieces *s, int32_t part, int32_t row)
{
    return *(const float2 *)(p.cut.partial_scalar + (place_of(&p.cut, s, part) * p.tile_rows + row) * 2);
}

/* Where a row is of queries. */
typedef struct row_name {
    int32_t token, head;
    bool there;
} row_name;

static __device__ __forceinline__ row_name name_row(const fmlac_mqa &p, int32_t unit, int32_t column, int32_t row)
{
    fmlac_work w;
    row_name name;
    int64_t token;
    work_rows(&p, unit, column, &w);
    row_token_head(w, row, &token, &name.head);
    name.token = (int32_t)token;
    name.there = row < w.rows;
    return name;
}

static __device__ __forceinline__ void finish(const fmlac_mqa &p, const row_name &name, const joined &j, bool writes,
                                              float *factor)
{
    bool lonely = j.total == 0.0f;
    float base2 = j.lse + log2f(j.total);
    int32_t token = name.token, head = name.head;
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

/* A thread's four columns of the pieces that are its team's: at `first`, the second at `from`, then `step` floats
 * apart. */
static __device__ __forceinline__ void load_pieces(float4 x[AHEAD], const float *first, const float *from, int32_t step,
                                                   int count, int team)
{
    if (team < count) {
        x[0] = *(const float4 *)first;
    }
#pragma unroll
    for (int i = 1; i < AHEAD; i++) {
        if (team + i * TEAMS < count) {
            x[i] = *(const float4 *)from;
        }
        from += step;
    }
}

static __device__ __forceinline__ void add_pieces(sums *s, const float4 x[AHEAD], const float *weights, int count,
                                                  int team)
{
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        int k = team + i * TEAMS;
        if (k < count && weights[k] != ABSENT) {
            float weight = weights[k];
            s->total += weight;
            s->x[0] += weight * x[i].x;
            s->x[1] += weight * x[i].y;
            s->x[2] += weight * x[i].z;
            s->x[3] += weight * x[i].w;
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
#pragma unroll 1
    while (border_of(&cut, s, s->last + 1) < s->tiles) {
        s->last++;
    }
    return true;
}

static __device__ __forceinline__ void find_unit(const fmlac_cut &cut, int32_t unit, pieces *s)
{
    s->start = s->cut.starts[unit];
    s->tiles = s->cut.starts[unit + 1] - s->start - cut.overhead;
}

/* The part that holds a unit's first piece. */
static __device__ __forceinline__ int32_t first_part(const fmlac_cut &cut, const pieces *s)
{
    int32_t part = part_of(s->start + cut.overhead + s->cut.least - 1, s);
#pragma unroll 1
    while (part > 0 && border_of(&cut, s, part) != 0) {
        part--;
    }
#pragma unroll 1
    while (s->tiles > 0 && border_of(&cut, s, part + 1) == 0) {
        part++;
    }
    return part;
}

/* The pieces of a unit where lists have equal ones; false: it is the only one. */
static __device__ __forceinline__ bool find_even(const fmlac_mqa &p, int32_t unit, pieces *s)
{
    int32_t tiles = even_tiles(&p), each = even_share(&p, tiles);
    s->first = unit * p.pieces;
    s->last = s->first + (int32_t)((uint32_t)(tiles + each - 1) / (uint32_t)each) - 1;
    return s->last > s->first;
}

/* Four columns of a row, from `column` on. */
static __device__ __forceinline__ void write_columns(const fmlac_mqa &p, int64_t row_at, int column, const float x[4],
                                                     float factor)
{
    float4 four = {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
    store_four(p.out, row_at, column, p.d_v, four);
}

static __device__ __forceinline__ int64_t out_row(const fmlac_mqa &p, const row_name &name)
{
    return row_offset(&p.out, &p, name.token, name.head);
}

/* ---- few pieces: a warp per row ---------------------------------------------------------------------------------- */

extern "C" __global__ void __launch_bounds__(WARPS * 32, 4) fmlak_mqa_combine_sm80(const __grid_constant__ fmlac_mqa p)
{
    const fmlac_cut &cut = p.cut;
    int lane = threadIdx.x % 32;
    int32_t row_groups = p.tile_rows / WARPS, block = (int32_t)quotient(blockIdx.x, row_groups);
    int32_t row = ((int32_t)blockIdx.x - block * row_groups) * WARPS + (int32_t)threadIdx.x / 32;
    pieces s;
    int32_t unit = (int32_t)quotient(block, cut.columns);
    bool joins; /* no: no unit's first, cut piece is here */
    s.column = (int32_t)(block - unit * cut.columns);
    if (p.pieces > 0) {
        joins = find_even(p, unit, &s);
    } else {
        s.first = unit;
        s.cut = block_cut(p, WARPS * 32);
        if (cut.units >= cut.parts) {
            unit = unit_at(&cut, s.cut.starts, (s.first + 1) * s.cut.per, lane);
        }
        find_unit(cut, unit, &s);
        s.first = cut.units < cut.parts ? first_part(cut, &s) : s.first;
        joins = find_last(cut, &s);
    }
    row_name name = name_row(p, unit, s.column, row);
    ptx_grid_wait();
    if (!joins || !name.there) {
        return;
    }
    joined j = {-FMLAC_INFINITY, 0.0f, -FMLAC_INFINITY};
    float factor, sum[COLUMNS / 128][4] = {{0.0f}};
#pragma unroll 1
    for (int32_t k = s.first; k <= s.last; k++) {
        float2 scalars = read_scalars(p, &s, k, row);
        j.lse = larger_or_nan(scalars.x, j.lse);
        j.max = larger_or_nan(scalars.y, j.max);
    }
    for (int32_t k = s.first; k <= s.last; k++) {
        float lse = read_scalars(p, &s, k, row).x;
        if (lse == -FMLAC_INFINITY) {
            continue;
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
    finish(p, name, j, lane == 0, &factor);
    int64_t to = out_row(p, name);
#pragma unroll
    for (int c = 0; c < COLUMNS / 128; c++) {
        write_columns(p, to, c * 128 + lane * 4, sum[c], factor);
    }
}

/* ---- many pieces: 512 threads per row ---------------------------------------------------------------------------- */

/* Largest of lanes that differ in the bits below `lanes`; NaN where one is NaN. */
static __device__ __forceinline__ void lanes_largest(joined *j, int lanes)
{
    for (int step = lanes / 2; step > 0; step /= 2) {
        j->lse = larger_or_nan(j->lse, __shfl_xor_sync(0xFFFFFFFFu, j->lse, step));
        j->max = larger_or_nan(j->max, __shfl_xor_sync(0xFFFFFFFFu, j->max, step));
    }
}

/* Largest of all threads of a block. */
static __device__ __forceinline__ void block_largest(joined *j)
{
    __shared__ float2 largest[TEAMS * TEAM / 32];
    lanes_largest(j, 32);
    if (threadIdx.x % 32 == 0) {
        float2 mine = {j->lse, j->max};
        largest[threadIdx.x / 32] = mine;
    }
    __syncthreads();
    float2 all = largest[threadIdx.x % (TEAMS * TEAM / 32)];
    j->lse = all.x;
    j->max = all.y;
    lanes_largest(j, TEAMS * TEAM / 32);
}

extern "C" __global__ void __launch_bounds__(TEAMS *TEAM, 16 / AHEAD)
    fmlak_mqa_combine_many_sm80(const __grid_constant__ fmlac_mqa p)
{
    __shared__ float weights[CHUNK];
    __shared__ sums others[TEAMS - 1][TEAM];
    const fmlac_cut &cut = p.cut;
    int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM;
    int32_t block = (int32_t)quotient(blockIdx.x, p.tile_rows), row = (int32_t)blockIdx.x - block * p.tile_rows;
    int32_t unit = (int32_t)quotient(block, cut.columns);
    pieces s;
    s.column = (int32_t)(block - unit * cut.columns);
    bool joins;
    if (p.pieces > 0) {
        joins = find_even(p, unit, &s);
    } else {
        s.cut = block_cut(p, TEAMS * TEAM);
        find_unit(cut, unit, &s);
        s.first = first_part(cut, &s);
        joins = find_last(cut, &s);
    }
    row_name name = name_row(p, unit, s.column, row);
    ptx_grid_wait();
    if (!joins || !name.there) {
        return;
    }
    /* The first piece of all lies one place further on than the stride of the others says. */
    const int32_t rows = p.tile_rows * COLUMNS, step = (int32_t)cut.columns * 2 * rows * TEAMS;
    const float *from = p.cut.partial + (place_of(&cut, &s, s.first) * p.tile_rows + row) * COLUMNS + thread * 4;
    int32_t left = s.last + 1 - s.first, own = (int32_t)threadIdx.x; /* piece whose weight is this thread's */
    joined j = {-FMLAC_INFINITY, 0.0f, -FMLAC_INFINITY};
    sums sum = {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f};
    float4 x[AHEAD];
    const float *first = from - (team > 0 ? rows : 0) + team * (step / TEAMS);
    from += (team + TEAMS) * (step / TEAMS) - rows;
    load_pieces(x, first, from, step, left, team);
#pragma unroll 1
    for (int32_t k = own; k < left; k += TEAMS * TEAM) {
        float2 scalars = read_scalars(p, &s, s.first + k, row);
        j.lse = larger_or_nan(scalars.x, j.lse);
        j.max = larger_or_nan(scalars.y, j.max);
    }
    block_largest(&j);
    for (int32_t base = s.first;;) {
        if (own < CHUNK && own < left) {
            float lse = read_scalars(p, &s, base + own, row).x;
            weights[own] = lse != -FMLAC_INFINITY ? exp2f(lse - j.lse) : ABSENT;
        }
        __syncthreads();
        add_pieces(&sum, x, weights, left, team);
        base += CHUNK;
        left -= CHUNK;
        if (left <= 0) {
            break;
        }
        from += AHEAD * step;
        load_pieces(x, from - step, from, step, left, team);
        __syncthreads(); /* weights have been read */
    }
    join_teams(&sum, others, team, thread);
    if (team == 0) {
        float factor;
        j.total = sum.total;
        finish(p, name, j, thread == 0, &factor);
        write_columns(p, out_row(p, name), thread * 4, sum.x, factor);
    }
}
