/* SPDX-License-Identifier: MIT */
/*
 * combine.cu: joins the partial results of rows whose list was cut. A team of 128 threads per row of each block of the
 * attention kernel that holds a first piece: first a thread per piece, for its weight, then a thread per four columns,
 * adding the pieces in the order of their parts with many loads under way. The sink is applied once. Where a unit has
 * many pieces, the four teams of a block share one row, each taking every fourth run of pieces; else each team has its
 * own row.
 */
#include "common/work.cuh"
#include "ptx/grid.cuh"

#define LOG2_E      1.4426950408889634f
#define LN_2        0.6931471805599453f
#define COLUMNS     512
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
    int64_t start, tiles, per;
    int64_t first, last;
    int64_t column;
} pieces;

static __device__ __forceinline__ int64_t border_of(const fmlac_cut *cut, const pieces *s, int64_t part)
{
    return cut_at(cut, s->start, s->tiles, part * s->per);
}

/* Where a piece's result lies: the first began here, the others in an earlier part. */
static __device__ __forceinline__ int64_t place_of(const fmlac_cut *cut, const pieces *s, int64_t part)
{
    return (part * cut->columns + s->column) * 2 + (part == s->first);
}

static __device__ __forceinline__ float larger_or_nan(float a, float b)
{
    return is_nan(a) || a > b ? a : b;
}

/* Largest of all threads of a team; NaN where one is NaN. */
static __device__ float team_largest(float x, float all[TEAM / 32])
{
    for (int step = 16; step > 0; step /= 2) {
        x = larger_or_nan(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        all[threadIdx.x % TEAM / 32] = x;
    }
    __syncthreads();
    for (int i = 0; i < TEAM / 32; i++) {
        x = larger_or_nan(x, all[i]);
    }
    return x;
}

/* lse and maximum of a piece's row; false: nothing was attended there. */
static __device__ __forceinline__ bool read_scalars(const fmlac_mqa &p, const pieces *s, int64_t part, int64_t row,
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
                                              float *factor)
{
    bool lonely = j.total == 0.0f;
    float base2 = j.lse + log2f(j.total);
    int64_t at = quotient(w.row0 + row, w.group);
    int64_t token = w.first + at;
    int32_t head = w.kv_head * w.group + (int32_t)(w.row0 + row - at * w.group);
    if (threadIdx.x % TEAM == 0 && p.lse.data) {
        ((float *)p.lse.data)[row_offset(&p.lse, &p, token, head)] = lonely ? p.empty_lse : base2 * LN_2 * p.lse_factor;
    }
    if (threadIdx.x % TEAM == 0 && p.max_logits.data) {
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

/* Whether part `part` holds a unit's first piece, and it was cut there; which one, and where its pieces end. */
static __device__ bool find_pieces(const fmlac_cut &cut, int64_t part, int64_t *unit, pieces *s)
{
    s->per = cut.starts[cut.units + 1];
    *unit = unit_at(&cut, (part + 1) * s->per, threadIdx.x % 32);
    s->start = cut.starts[*unit];
    s->tiles = cut.starts[*unit + 1] - s->start - cut.overhead;
    s->first = part;
    int64_t end = border_of(&cut, s, part + 1);
    if (border_of(&cut, s, part) != 0 || end == 0 || end == s->tiles) {
        return false;
    }
    s->last = quotient(s->start + cut.overhead + s->tiles - cut.least, s->per) - 1;
    s->last = s->last > part ? s->last : part;
    while (border_of(&cut, s, s->last + 1) < s->tiles) {
        s->last++;
    }
    return true;
}

/* The four columns of a thread, and by its first thread the row's lse and maximum. */
static __device__ __forceinline__ void write_row(const fmlac_mqa &p, const fmlac_work &w, int64_t row, const joined &j,
                                                 const sums &sum, int thread)
{
    float factor;
    finish(p, w, row, j, &factor);
    int64_t at = quotient(w.row0 + row, w.group);
    int32_t head = w.kv_head * w.group + (int32_t)(w.row0 + row - at * w.group);
    int64_t to = row_offset(&p.out, &p, w.first + at, head);
    for (int i = 0; i < 4; i++) {
        int d = thread * 4 + i;
        if (d < p.d_v) {
            store_element(p.out.data, p.out.dtype, to + d, sum.x[i] * factor);
        }
    }
}

extern "C" __global__ void __launch_bounds__(TEAMS *TEAM, 1)
    fmlak_mqa_combine_sm80(const __grid_constant__ fmlac_mqa p)
{
    __shared__ float weights[TEAMS][TEAM], largest[TEAMS][TEAM / 32];
    __shared__ sums others[TEAMS - 1][TEAM];
    const fmlac_cut &cut = p.cut;
    int team = threadIdx.x / TEAM, thread = threadIdx.x % TEAM, rows = cut.combine_rows;
    int64_t row_groups = p.tile_rows / rows;
    int64_t block = quotient(blockIdx.x, row_groups);
    int64_t row = (blockIdx.x - block * row_groups) * rows + (rows > 1 ? team : 0);
    int64_t part = quotient(block, cut.columns), unit;
    pieces s;
    s.column = block - part * cut.columns;

    ptx_grid_wait();
    if (!find_pieces(cut, part, &unit, &s)) {
        return;
    }
    fmlac_work w;
    work_rows(&p, unit, s.column, &w);
    bool own = row < w.rows; /* all teams stay for the barriers */
    joined j = {-FMLAC_INFINITY, 0.0f, -FMLAC_INFINITY};
    float lse, max;
    for (int64_t k = s.first + thread; own && k <= s.last; k += TEAM) {
        if (read_scalars(p, &s, k, row, &lse, &max)) {
            j.lse = larger_or_nan(lse, j.lse);
            j.max = larger_or_nan(max, j.max);
        }
    }
    j.lse = team_largest(j.lse, largest[team]);
    j.max = team_largest(j.max, largest[team]);
    sums sum = {{0.0f, 0.0f, 0.0f, 0.0f}, 0.0f};
    const int teams = rows > 1 ? 1 : TEAMS, mine = rows > 1 ? 0 : team;
    for (int64_t base = s.first; base <= s.last; base += TEAM) {
        bool there = own && base + thread <= s.last && read_scalars(p, &s, base + thread, row, &lse, &max);
        __syncthreads();
        weights[team][thread] = there && lse != -FMLAC_INFINITY ? exp2f(lse - j.lse) : ABSENT;
        __syncthreads();
        /* The first piece of all lies one place further on than the stride of the others says. */
        int64_t left = s.last + 1 - base, stride = cut.columns * 2 * p.tile_rows * COLUMNS;
        int first = base == s.first;
        const float *from = cut.partial + (place_of(&cut, &s, base) * p.tile_rows + row) * COLUMNS + thread * 4;
        if (first && mine == 0) {
            add_pieces(&sum, weights[team], from, stride, 1, 0, 1);
        }
        from += first ? stride - p.tile_rows * COLUMNS : 0;
        add_pieces(&sum, weights[team] + first, from, stride, (int)(left < TEAM ? left : TEAM) - first, mine, teams);
    }
    if (rows == 1) {
        join_teams(&sum, others, team, thread);
    }
    if (own && mine == 0) {
        j.total = sum.total;
        write_row(p, w, row, j, sum, thread);
    }
}
