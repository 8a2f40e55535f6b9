/* SPDX-License-Identifier: MIT */
/* plan.cu: costs of all units and their running sum, from lengths on the device; one block. See common/work.cuh. */
#include "common/work.cuh"
#include "ptx/grid.cuh"

#define THREADS 1024

/* Sum over the threads before this one; *total: over all. */
static __device__ int64_t exclusive_sum(int64_t x, int64_t *total)
{
    __shared__ int64_t sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t sum = x;
    for (int step = 1; step < 32; step *= 2) {
        int64_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31) {
        sums[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        int64_t y = sums[lane];
        for (int step = 1; step < 32; step *= 2) {
            int64_t other = __shfl_up_sync(0xFFFFFFFFu, y, step);
            y += lane >= step ? other : 0;
        }
        sums[lane] = y;
    }
    __syncthreads();
    *total = sums[31];
    return (warp > 0 ? sums[warp - 1] : 0) + sum - x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fmlak_mqa_plan_sm80(const __grid_constant__ fmlac_mqa p)
{
    const fmlac_cut &cut = p.cut;
    int64_t each = ceil_quotient(cut.units, THREADS);
    int64_t begin = threadIdx.x * each;
    int64_t end = begin + each < cut.units ? begin + each : cut.units;
    int64_t cost = 0, total;
    ptx_grid_launch_dependents();
    for (int64_t u = begin; u < end; u++) {
        int64_t own = unit_tiles(&p, u) + cut.overhead;
        cut.starts[u] = own;
        cost += own;
    }
    int64_t start = exclusive_sum(cost, &total);
    for (int64_t u = begin; u < end; u++) {
        int64_t own = cut.starts[u];
        cut.starts[u] = start;
        start += own;
    }
    if (threadIdx.x == 0) {
        int64_t per = ceil_quotient(total, cut.parts);
        cut.starts[cut.units] = total;
        cut.starts[cut.units + 1] = per < cut.least ? cut.least : per;
    }
}
