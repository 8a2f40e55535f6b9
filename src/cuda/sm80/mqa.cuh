/* SPDX-License-Identifier: MIT */
/*
 * mqa.cuh: rows of queries attend lists of tokens, on mma.sync m16n8k16 (sm_80 and up). The one core behind dense
 * decode, sparse decode, sparse prefill and the fused operations; what differs is data: the list, the format, the query
 * prologue and the output epilogue.
 *
 * Block: ROWS rows (query token, head) that share a list and a KV head; TOKENS tokens a step; WARPS warps, no roles.
 *
 *   scores   warp (rg, tg): 16 rows x TOKENS / TG tokens, Q and K by ldmatrix from shared memory
 *   softmax  base 2; the row maximum is exchanged through `red`, weights go to `weights` (16 bit), the row's shrink
 *            factor to `alpha`; the row sum stays in registers until the end
 *   values   warp (rv, cg): 16 * MV rows x 512 / CG columns of the output, V = the first columns of the K tile (.trans)
 *
 * Shared memory (layout in mqa_shared): Q [ROWS][row_bytes] | token tiles [stages][TOKENS][row_bytes] | raw bytes of
 * one tile (quantised formats) | weights [ROWS][TOKENS] | red [TG][ROWS] | alpha [ROWS] | addresses of tokens
 * [ring][TOKENS] | masks [ring] | the piece's work. Rows of Q and of tiles are swizzled: 16-byte chunk c of row r lies
 * at c ^ (r & 7) within its 128 bytes.
 *
 * One step i (ring = stages, or 2 for quantised formats):
 *   wait for tile i; BARRIER (tile i is there, everybody is done with step i - 1)
 *   quantised: expand the raw bytes into the tile; BARRIER
 *   start copying tile i + ring - 1
 *   scores; BARRIER (maxima); weights; rows that see part of the tile: clean V; BARRIER (weights); values
 *   warp 0: addresses of tile i + ring go where tile i's were; fetch the list entries after them
 *
 * A token that is not attended has address 0: its tile row is zeros and its score -infinity. A row that sees fewer
 * tokens than its neighbours has weight 0 for the others; so that 0 * NaN cannot happen, values that are not finite are
 * set to 0 in such tokens after the scores are taken: a row that does attend them has a NaN score, hence a NaN sum.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_CUH
#define FLASHMLA_CUDA_SM80_MQA_CUH

#include "mqa_rows.cuh"
#include "mqa_tokens.cuh"
#include "ptx/grid.cuh"

/* ---- scores and softmax ---------------------------------------------------------------------------------------- */

/* What a thread knows of its two rows (g and g + 8 of its 16). */
typedef struct softmax_rows {
    float scale[2];  /* logits in base 2 = score * scale */
    int32_t seen[2]; /* tokens that the row sees */
    float max[2];    /* so far, -infinity before the first token */
    float sum[2];    /* of this thread's columns */
} softmax_rows;

/* Tokens that rows see: PAGED lists only; rows beyond the last see what all see. */
static __device__ __forceinline__ int32_t row_seen(const fmlac_mqa &p, const fmlac_work &w, int64_t row)
{
    if (p.main.kind != FMLAC_LIST_PAGED || row >= w.rows) {
        return INT32_MAX;
    }
    int64_t j = quotient(w.row0 + row, w.group);
    return (int32_t)paged_count(&p, w.request, w.first + j, j, w.queries);
}

/* ---- values ---------------------------------------------------------------------------------------------------- */

template <int TOKENS, int MV, int NV, int PITCH, int F16>
static __device__ __forceinline__ void values(float out[MV][NV][4], uint32_t weights, uint32_t tile, uint32_t row_bytes,
                                              int row0, int column0)
{
    int lane = threadIdx.x % 32;
    uint32_t w_at = weights + (row0 + lane % 16) * PITCH + (lane / 16) * 16;
    uint32_t v_at = tile + (lane % 16) * row_bytes + column0 * 2; /* column0: a multiple of 64 */
    uint32_t v_chunk = ((lane / 16) ^ (lane & 7)) << 4;
#pragma unroll 1
    for (int k = 0; k < TOKENS / 16; k++) {
        uint32_t a[MV][4];
#pragma unroll
        for (int m = 0; m < MV; m++) {
            ptx_ldmatrix_x4(a[m], w_at + m * 16 * PITCH + k * 32);
        }
#pragma unroll
        for (int n = 0; n < NV; n += 2) {
            uint32_t b[4];
            ptx_ldmatrix_x4_trans(b, v_at + k * 16 * row_bytes + (n / 8) * 128 + (v_chunk ^ ((n % 8) * 16)));
#pragma unroll
            for (int m = 0; m < MV; m++) {
                multiply<F16>(out[m][n], a[m], b[0], b[1]);
                multiply<F16>(out[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* ---- one piece of work ----------------------------------------------------------------------------------------- */

template <int TOKENS, int WARPS>
static __device__ __forceinline__ void start_copy(const fmlac_mqa &p, const mqa_shared &s, int slot, bool inside)
{
    /* Tiles of a paged list are copied even if no page of theirs is valid: their rows must become zeros. */
    bool there = inside && (p.main.kind == FMLAC_LIST_PAGED || s.mask[slot * 2] != 0);
    if (there && p.quantised) {
        copy_raw<TOKENS, WARPS>(p, s, slot);
    } else if (there) {
        copy_plain<TOKENS, WARPS>(p, s, slot, s.tiles + slot * s.tile_bytes);
    }
    ptx_copy_async_commit();
}

static __device__ __forceinline__ void wait_copies(int ring)
{
    if (ring <= 2) {
        ptx_copy_async_wait<0>();
    } else if (ring == 3) {
        ptx_copy_async_wait<1>();
    } else {
        ptx_copy_async_wait<2>();
    }
}

/* Scores to weights: masks, maxima, exponentials. Ends with the weights in shared memory, not yet visible to all. */
template <int ROWS, int TOKENS, int WARPS, int F16>
static __device__ __forceinline__ void softmax_step(float acc[][4], softmax_rows &rows, const mqa_shared &s, int slot,
                                                    int64_t tile, int row0, int tg)
{
    MQA_SHAPE;
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int token0 = tg * (TOKENS / TG);
    uint32_t mask = s.mask[slot * 2 + token0 / 32] >> (token0 % 32);
    float top[2] = {-FMLAC_INFINITY, -FMLAC_INFINITY};
    int limit[2];
    for (int h = 0; h < 2; h++) {
        limit[h] = (int)clamped(rows.seen[h] - tile * TOKENS - token0, 0, TOKENS);
    }
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int column = n * 8 + 2 * q + i % 2;
            bool attended = (mask >> column & 1) != 0 && column < limit[i / 2];
            acc[n][i] = attended ? acc[n][i] * rows.scale[i / 2] : -FMLAC_INFINITY;
            top[i / 2] = fmaxf(top[i / 2], acc[n][i]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(0xFFFFFFFFu, top[h], 2));
        if (q == 0) {
            s.red[tg * ROWS + row0 + g + 8 * h] = top[h];
        }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = row0 + g + 8 * h;
        float max = rows.max[h];
#pragma unroll
        for (int i = 0; i < TG; i++) {
            max = fmaxf(max, s.red[i * ROWS + row]);
        }
        float reference = max == -FMLAC_INFINITY ? 0.0f : max; /* nothing attended yet */
        float alpha = ptx_exp2(rows.max[h] - reference);
        rows.max[h] = max;
        rows.sum[h] *= alpha;
        if (tg == 0 && q == 0) {
            s.alpha[row] = alpha;
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float low = ptx_exp2(acc[n][2 * h] - reference), high = ptx_exp2(acc[n][2 * h + 1] - reference);
            rows.sum[h] += low + high;
            ptx_store_shared_u32(s.weights + row * WEIGHT_PITCH + (token0 + n * 8 + 2 * q) * 2, pack<F16>(low, high));
        }
    }
}

/* One row tile against tiles [begin, end) of its list; `place`: -1, or where the partial result goes. */
template <int ROWS, int TOKENS, int WARPS, int F16>
static __device__ __forceinline__ void mqa_piece(const fmlac_mqa &p, const mqa_shared &s, int64_t begin, int64_t end,
                                                 int64_t place)
{
    MQA_SHAPE;
    const fmlac_work &w = *s.work;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
    int row0 = warp / TG * 16, tg = warp % TG;                        /* scores */
    int out_row0 = warp / CG * 16 * MV, column0 = warp % CG * NV * 8; /* values */
    float out[MV][NV][4];
#pragma unroll
    for (int m = 0; m < MV; m++) {
#pragma unroll
        for (int n = 0; n < NV; n++) {
            out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.0f;
        }
    }
    softmax_rows rows;
    for (int h = 0; h < 2; h++) {
        rows.scale[h] = p.scale * LOG2_E;
        rows.seen[h] = row_seen(p, w, row0 + g + 8 * h);
        rows.max[h] = -FMLAC_INFINITY;
        rows.sum[h] = 0.0f;
    }

    if (begin < end) {
        /* The fewest tokens that a row sees. */
        int32_t all_see = INT32_MAX;
        for (int r = lane; p.main.kind == FMLAC_LIST_PAGED && r < ROWS; r += 32) {
            int32_t seen = row_seen(p, w, r);
            all_see = seen < all_see ? seen : all_see;
        }
        for (int step = 16; step > 0; step /= 2) {
            int32_t other = __shfl_xor_sync(0xFFFFFFFFu, all_see, step);
            all_see = other < all_see ? other : all_see;
        }
        list_scan<TOKENS> scan;
        int64_t count = w.main_count + w.extra_count;
        scan.at = begin * TOKENS;
        scan.end = end * TOKENS < count ? end * TOKENS : count;
        if (warp == 0) {
            fetch_entries(p, w, scan);
            for (int i = 0; i < s.ring; i++) {
                next_tile(p, w, s, i, scan);
            }
        }
        if (p.fused.enabled) {
            load_q_fused<ROWS, WARPS>(p, w, s);
        } else {
            load_q<ROWS, WARPS>(p, w, s);
        }
        __syncthreads();
        if (p.fused.enabled) {
            rows.scale[0] *= s.alpha[row0 + g];
            rows.scale[1] *= s.alpha[row0 + g + 8];
        }
        for (int i = 0; i + 1 < s.ring; i++) {
            start_copy<TOKENS, WARPS>(p, s, i, begin + i < end);
        }
        bool paged = p.main.kind == FMLAC_LIST_PAGED;
        int slot = 0;
#pragma unroll 1
        for (int64_t tile = begin; tile < end; tile++) {
            uint32_t keys = p.quantised ? s.tiles : s.tiles + slot * s.tile_bytes;
            wait_copies(s.ring);
            __syncthreads();
            if (!paged && s.mask[slot * 2] == 0) {
                break; /* the list has no more tokens */
            }
            if (p.quantised) {
                expand_raw<TOKENS, WARPS>(p, s, slot);
                __syncthreads();
            }
            start_copy<TOKENS, WARPS>(p, s, slot == 0 ? s.ring - 1 : slot - 1, tile + s.ring - 1 < end);

            float acc[NT][4];
            scores<NT, F16>(acc, s.q, keys, p.row_bytes, row0, tg * (TOKENS / TG));
            softmax_step<ROWS, TOKENS, WARPS, F16>(acc, rows, s, slot, tile, row0, tg);
            if (all_see < w.main_count && all_see < (tile + 1) * TOKENS) {
                int first = (int)clamped(all_see - tile * TOKENS, 0, TOKENS);
                clean_rows<TOKENS, THREADS>(keys, p.row_bytes, first, F16 ? 0x7C00u : 0x7F80u);
            }
            __syncthreads();
#pragma unroll
            for (int m = 0; m < MV; m++) {
                float low = s.alpha[out_row0 + m * 16 + g], high = s.alpha[out_row0 + m * 16 + g + 8];
                if (__any_sync(0xFFFFFFFFu, low != 1.0f || high != 1.0f)) {
#pragma unroll
                    for (int n = 0; n < NV; n++) {
                        out[m][n][0] *= low;
                        out[m][n][1] *= low;
                        out[m][n][2] *= high;
                        out[m][n][3] *= high;
                    }
                }
            }
            values<TOKENS, MV, NV, WEIGHT_PITCH, F16>(out, s.weights, keys, p.row_bytes, out_row0, column0);
            if (warp == 0) {
                next_tile(p, w, s, slot, scan);
            }
            slot = slot + 1 == s.ring ? 0 : slot + 1;
        }
        ptx_copy_async_wait<0>();
    }

    /* Sums of a row: over the quad, then over the token groups. */
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        rows.sum[h] += __shfl_xor_sync(0xFFFFFFFFu, rows.sum[h], 1);
        rows.sum[h] += __shfl_xor_sync(0xFFFFFFFFu, rows.sum[h], 2);
        if (lane % 4 == 0) {
            s.red[tg * ROWS + row0 + g + 8 * h] = rows.sum[h];
        }
    }
    __syncthreads();
    float *partial = place < 0 ? nullptr : p.cut.partial + place * ROWS * OUT_COLUMNS;
    if (tg == 0 && lane % 4 == 0) {
        for (int h = 0; h < 2; h++) {
            int row = row0 + g + 8 * h;
            float sum = 0.0f;
            for (int i = 0; i < TG; i++) {
                sum += s.red[i * ROWS + row];
            }
            float *scalars = place < 0 ? nullptr : p.cut.partial_scalar + (place * ROWS + row) * 2;
            s.alpha[row] = finish_row(p, w, row, rows.max[h], sum, scalars);
        }
    }
    /* Rows go out through shared memory, where Q and tiles were: 16 rows of every row group at a time. */
    float *staged = (float *)ptx_shared();
    constexpr int GROUPS = WARPS / CG;
#pragma unroll
    for (int m = 0; m < MV; m++) {
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float factor = s.alpha[out_row0 + m * 16 + g + 8 * h];
            float *to = staged + (warp / CG * 16 + g + 8 * h) * STAGED_PITCH + column0 + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < NV; n++) {
                float2 pair = {out[m][n][2 * h] * factor, out[m][n][2 * h + 1] * factor};
                *(float2 *)(to + n * 8) = pair;
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int r = warp; r < GROUPS * 16; r += WARPS) {
            int row = r / 16 * 16 * MV + m * 16 + r % 16;
            if (row < w.rows) {
                store_row(p, w, row, staged + r * STAGED_PITCH, partial);
            }
        }
    }
    __syncthreads();
}

/* All pieces of this block. */
template <int ROWS, int TOKENS, int WARPS, int F16> static __device__ __forceinline__ void mqa_block(const fmlac_mqa &p)
{
    int64_t block = blockIdx.x;
    int64_t part = quotient(block, p.cut.columns);
    int64_t column = block - part * p.cut.columns;
    mqa_shared s = mqa_shared_plan<ROWS, TOKENS, WARPS>(p);
    if (p.cut.parts == 0) {
        if (threadIdx.x == 0) {
            work_rows(&p, part, column, s.work);
            work_count(&p, s.work);
        }
        __syncthreads();
        if (s.work->rows > 0) {
            mqa_piece<ROWS, TOKENS, WARPS, F16>(p, s, 0, s.work->tiles, -1);
        }
        return;
    }
    ptx_grid_wait();
    ptx_grid_launch_dependents();
    int64_t per = p.cut.starts[p.cut.units + 1];
    int64_t low = part * per, high = low + per;
    int64_t unit = unit_at(&p.cut, low, threadIdx.x % 32);
#pragma unroll 1
    for (; unit < p.cut.units && p.cut.starts[unit] < high; unit++) {
        int64_t start = p.cut.starts[unit];
        int64_t all = p.cut.starts[unit + 1] - start - p.cut.overhead;
        int64_t begin = cut_at(&p.cut, start, all, low), end = cut_at(&p.cut, start, all, high);
        if (all == 0 ? start < low : begin == end) {
            continue;
        }
        if (threadIdx.x == 0) {
            work_rows(&p, unit, column, s.work);
            work_count(&p, s.work);
        }
        __syncthreads();
        if (s.work->rows > 0) {
            bool whole = begin == 0 && end == all;
            int64_t tiles = s.work->tiles; /* a row tile may need fewer than its unit's longest */
            mqa_piece<ROWS, TOKENS, WARPS, F16>(p, s, begin < tiles ? begin : tiles, end < tiles ? end : tiles,
                                                whole ? -1 : block * 2 + (begin == 0));
        }
        __syncthreads();
    }
}

#endif
