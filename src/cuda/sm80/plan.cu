/* SPDX-License-Identifier: MIT */
/* plan.cu: costs of many units and their running sum, from lengths on the device, and flags to zero; one block. See
 * common/work.cuh. */
#define FMLAC_QUOTIENT_32 /* the host cuts nothing where numbers are long */

#include "common/work.cuh"
#include "ptx/grid.cuh"

#define THREADS 1024

/* Sum over the threads before this one; *total: over all. */
static __device__ int32_t exclusive_sum(int32_t x, int32_t *total)
{
    __shared__ int32_t sums[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int32_t sum = x;
    for (int step = 1; step < 32; step *= 2) {
        int32_t other = __shfl_up_sync(0xFFFFFFFFu, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31) {
        sums[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        int32_t y = sums[lane];
        for (int step = 1; step < 32; step *= 2) {
            int32_t other = __shfl_up_sync(0xFFFFFFFFu, y, step);
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
    int32_t units = (int32_t)cut.units, each = (units + THREADS - 1) / THREADS;
    int32_t begin = threadIdx.x * each;
    int32_t end = begin + each < units ? begin + each : units;
    int32_t cost = 0, total;
    ptx_grid_launch_dependents();
    for (int32_t i = threadIdx.x; cut.flags && i < (int32_t)(cut.parts * cut.columns); i += THREADS) {
        cut.flags[i] = 0;
    }
    if (cut.own) {
        return;
    }
    for (int32_t u = begin; u < end; u++) {
        int32_t own = unit_cost(&p, u);
        cut.starts[u] = own;
        cost += own;
    }
    int32_t start = exclusive_sum(cost, &total);
    for (int32_t u = begin; u < end; u++) {
        int32_t own = cut.starts[u];
        cut.starts[u] = start;
        start += own;
    }
    if (threadIdx.x == 0) {
        cut_view view;
        cut_share(&cut, total, &view);
        cut.starts[units] = total;
        cut.starts[units + 1] = view.per;
        cut.starts[units + 2] = view.least;
    }
}
