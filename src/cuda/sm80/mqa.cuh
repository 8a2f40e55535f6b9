/* SPDX-License-Identifier: MIT */
/*
 * mqa.cuh: rows of queries attend lists of tokens, on mma.sync m16n8k16 (sm_80 and up). The one core behind dense
 * decode, sparse decode, sparse prefill and the fused operations; what differs is data: the list, the format, the query
 * prologue and the output epilogue.
 *
 * Block: ROWS rows (query token, head) that share a list and a KV head; tiles of TOKENS tokens lie in `slots` slots of
 * shared memory. Two kinds of warps, each a loop over the same tiles:
 *
 *   scoring warps  (first QW)  16 * QM rows x TOKENS / TG tokens of Q K^T each; softmax in base 2; the weights go where
 *                  the tile's last dims were: those from 512 on, which are not values
 *                  They take turns in walking the list
 *   summing warps  (other PW)  16 * MV rows x 512 / CG columns of the output each, in registers for a whole piece; and
 *                  whatever brings tokens
 *
 * so that scores of tile i + 1 are taken while values of tile i are summed: the tensor cores have both to choose from.
 * No warp waits for one that does the same, where it need not: barriers of slots are mbarriers on which one kind
 * arrives and the other waits.
 *
 * Tile i, in slot i % slots:
 *   list           a scoring warp, another one for every tile, finds where the tokens lie when it has written the
 *                  weights of tile i - slots - 1; ready says that it has. A piece's first tiles are listed by the
 *                  summing warps, side by side, while Q is on its way
 *   full[slot]     when free[slot] says that tile i - slots has been summed, the summing warps copy plain tokens into
 *                  the slot. Raw bytes of quantised ones set out for it then, each to the row that its token will have,
 *                  and a step later, when tile i - slots + 1 has been summed, they are expanded there
 *   scores, then BARRIER_SCORES: maxima are exchanged, and no scoring warp reads the tile any more
 *   ready[slot]    weights, factors by which output rows shrink
 *   free[slot]     values
 *
 * BARRIERS         arrivals                 made by           waited for by  protects
 *   full[slot]     PW and the bytes; codes: summing warps:    scoring warps  the tile. Who waits for ready[] has
 *                  PW; 16 bytes at a time:  their tokens are                 waited for it through them
 *                  PW * 32                  there
 *   ready[slot]    QW                       scoring warps     summing warps  weights, shrink[], the list's last tile
 *   free[slot]     PW                       summing warps     summing warps  the slot
 *   q_full         QW * 32 and the bytes    scoring warps     scoring warps  Q
 *   raw_full[warp] raw_arrivals()           a summing warp    itself         its raw bytes in the next slot
 *   BARRIER_SCORES QW * 32                  scoring warps     themselves     top[], the tile's last dims
 *   BARRIER_SUMS   PW * 32                  summing warps     themselves     where the piece's first tiles begin
 *   BARRIER_LIST   all threads              summing warps     scoring warps, its first tiles in the list; seen[] and
 *                                           (arrive only)     all of them    norm factors
 *   BARRIER_END    all threads              scoring warps     summing warps, factor[]; Q and tiles, where rows are
 *                                           (arrive only)     all of them    staged
 *   __syncthreads                           all               all            work, piece; staged rows
 *
 * The reference that a row's weights are relative to moves only when the maximum outgrows it by 2^8: so outputs are
 * seldom rescaled, and the last division makes up for it.
 *
 * A token that is not attended has address 0: its tile row is zeros and its score -infinity. A row that sees fewer
 * tokens than its neighbours has weight 0 for the others; so that 0 * NaN cannot happen, values that are not finite are
 * set to 0 in such tokens after the scores are taken: a row that does attend them has a NaN score, hence a NaN sum.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_CUH
#define FLASHMLA_CUDA_SM80_MQA_CUH

#include "common/arrive.cuh"
#include "mqa_expand.cuh"
#include "mqa_piece.cuh"
#include "mqa_products.cuh"
#include "mqa_rows.cuh"

/* ---- scoring warps --------------------------------------------------------------------------------------------- */

/* What a thread knows of its rows: g and g + 8 of every 16. */
template <class S> struct score_rows {
    float max[S::QM][2];   /* so far, -infinity before the first token */
    float base[S::QM][2];  /* the reference */
    float sum[S::QM][2];   /* of this thread's columns: lse follows from them */
    float taken[S::QM][2]; /* of all the warp's columns, of weights as products take them: outputs are divided by it */
    int all_see;           /* the least that any row of the block sees */
};

/* How many tokens of the piece each row sees, INT32_MAX: all that are attended. */
template <class S>
static __device__ __forceinline__ void count_seen(const fmlac_mqa &p, const mqa_shared &s, const mqa_piece &piece)
{
    const fmlac_work &w = *s.work;
    for (int row = threadIdx.x; row < S::ROWS; row += S::QW * 32) {
        s.seen[row] = INT32_MAX;
        if (p.main.kind == FMLAC_LIST_PAGED && row < w.rows) {
            int64_t j = quotient(w.row0 + row, w.group);
            int64_t seen = paged_count(&p, w.request, w.first + j, j, w.queries);
            if (seen < w.main_count) {
                s.seen[row] = (int)clamped(seen - piece.begin * S::TOKENS, 0, (int64_t)piece.count * S::TOKENS);
            }
        }
    }
}

template <class S> static __device__ __forceinline__ void begin_rows(const mqa_shared &s, score_rows<S> &rows)
{
    int all_see = INT32_MAX;
    for (int row = threadIdx.x % 32; row < S::ROWS; row += 32) {
        all_see = s.seen[row] < all_see ? s.seen[row] : all_see;
    }
    for (int step = 16; step > 0; step /= 2) {
        int other = __shfl_xor_sync(0xFFFFFFFFu, all_see, step);
        all_see = other < all_see ? other : all_see;
    }
    rows.all_see = all_see;
#pragma unroll
    for (int i = 0; i < 2 * S::QM; i++) {
        rows.max[i / 2][i % 2] = rows.base[i / 2][i % 2] = -FMLAC_INFINITY;
        rows.sum[i / 2][i % 2] = rows.taken[i / 2][i % 2] = 0.0f;
    }
}

/* What makes a score a logit in base 2, if it is the same for all rows and greater than 0: then scores are multiplied
 * with it as late as possible. Else 1, and mask_scores multiplies. */
static __device__ __forceinline__ float late_scale(const fmlac_mqa &p)
{
    return p.scale > 0.0f && !p.fused.enabled ? p.scale * LOG2_E : 1.0f;
}

/* Scores that are not attended to -infinity. */
template <class S>
static __device__ __forceinline__ void mask_scores(const fmlac_mqa &p, const mqa_shared &s, float acc[S::QM][S::NT][4],
                                                   const score_rows<S> &rows, uint32_t mask, int row0, int token0)
{
    const uint32_t all = S::NT == 4 ? 0xFFFFFFFFu : (1u << (S::NT % 4 * 8)) - 1;
    bool whole = (mask & all) == all && token0 + S::NT * 8 <= rows.all_see;
    if (!(p.scale > 0.0f) || p.fused.enabled) {
#pragma unroll
        for (int i = 0; i < 2 * S::QM; i++) {
            int m = i / 2, h = i % 2, row = row0 + m * 16 + threadIdx.x % 32 / 4 + h * 8;
            float scale = p.scale * LOG2_E * (p.fused.enabled ? s.factor[row] : 1.0f);
#pragma unroll
            for (int n = 0; n < S::NT; n++) {
                acc[m][n][2 * h] *= scale;
                acc[m][n][2 * h + 1] *= scale;
            }
        }
    }
    if (whole) {
        return;
    }
#pragma unroll
    for (int i = 0; i < 2 * S::QM; i++) {
        int m = i / 2, h = i % 2, seen = s.seen[row0 + m * 16 + threadIdx.x % 32 / 4 + h * 8];
#pragma unroll
        for (int j = 0; j < 2 * S::NT; j++) {
            int column = j / 2 * 8 + threadIdx.x % 4 * 2 + j % 2;
            bool attended = (mask >> column & 1) != 0 && token0 + column < seen;
            acc[m][j / 2][2 * h + j % 2] = attended ? acc[m][j / 2][2 * h + j % 2] : -FMLAC_INFINITY;
        }
    }
}

/* Row maxima of a step over all scoring warps: to rows.max. After it nobody reads the tile's scores any more. */
template <class S>
static __device__ __forceinline__ void exchange_maxima(const float acc[S::QM][S::NT][4], score_rows<S> &rows,
                                                       float scale, float *top, int row0, int tg)
{
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * S::QM; i++) {
        int m = i / 2, h = i % 2;
        float max = acc[m][0][2 * h];
#pragma unroll
        for (int n = 0; n < S::NT; n++) {
            max = fmaxf(max, fmaxf(acc[m][n][2 * h], acc[m][n][2 * h + 1]));
        }
        max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, 1));
        max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFFu, max, 2)) * scale;
        rows.max[m][h] = fmaxf(rows.max[m][h], max);
        if (S::TG > 1 && lane % 4 == 0) {
            top[tg * S::ROWS + row0 + m * 16 + lane / 4 + 8 * h] = max;
        }
    }
    ptx_barrier_sync(BARRIER_SCORES, S::QW * 32);
#pragma unroll
    for (int i = 0; S::TG > 1 && i < 2 * S::QM; i++) {
#pragma unroll
        for (int other = 0; other < S::TG; other++) {
            float max = top[other * S::ROWS + row0 + i / 2 * 16 + lane / 4 + i % 2 * 8];
            rows.max[i / 2][i % 2] = fmaxf(rows.max[i / 2][i % 2], max);
        }
    }
}

/* Rounded weights of 16 rows, times ones: tensor cores sum them for all lanes of a row. */
template <class S>
static __device__ __forceinline__ void add_taken(float taken[2], const uint32_t weights[2][S::NT], const float alpha[2])
{
    const uint32_t one = S::F16 ? 0x3C003C00u : 0x3F803F80u;
    float sum[4] = {taken[0] * alpha[0], 0.0f, taken[1] * alpha[1], 0.0f};
#pragma unroll
    for (int n = 0; n < S::NT; n += 2) {
        const bool two = n + 1 < S::NT;
        const uint32_t a[4] = {weights[0][n], weights[1][n], two ? weights[0][n + two] : 0,
                               two ? weights[1][n + two] : 0};
        multiply<S::F16>(sum, a, one, one);
    }
    taken[0] = sum[0];
    taken[1] = sum[2];
}

/* Scores times `scale` to weights in shared memory, and what output rows shrink by. */
template <class S>
static __device__ __forceinline__ void write_weights(float acc[S::QM][S::NT][4], score_rows<S> &rows, float scale,
                                                     float *shrink, uint32_t tile, int row0, int tg)
{
    int lane = threadIdx.x % 32, q = lane % 4;
    uint32_t weights[2][S::NT];
    float shrinks[2];
#pragma unroll
    for (int i = 0; i < 2 * S::QM; i++) {
        int m = i / 2, h = i % 2, row = row0 + m * 16 + lane / 4 + 8 * h;
        float before = rows.base[m][h];
        float base = rows.max[m][h] > before + LAZY ? rows.max[m][h] : before;
        float reference = base == -FMLAC_INFINITY ? 0.0f : base; /* nothing attended yet */
        float alpha = base == before ? 1.0f : ptx_exp2(before - reference);
        float sum = 0.0f;
        rows.base[m][h] = base;
        if (tg == 0 && q == 0) {
            shrink[row] = alpha;
        }
        uint32_t to = weights_of<S>(tile, row) + (tg * S::NT * 8 + 2 * q) * 2;
        bool far = fmlac_is_far(reference);
        float factor = far ? 1.0f : scale;
        if (__any_sync(0xFFFFFFFFu, far)) {
#pragma unroll
            for (int n = 0; n < S::NT; n++) {
                acc[m][n][2 * h] *= far ? scale : 1.0f;
                acc[m][n][2 * h + 1] *= far ? scale : 1.0f;
            }
        }
#pragma unroll
        for (int n = 0; n < S::NT; n++) {
            float low = ptx_exp2(__fmaf_rn(acc[m][n][2 * h], factor, -reference));
            float high = ptx_exp2(__fmaf_rn(acc[m][n][2 * h + 1], factor, -reference));
            sum += low + high;
            weights[h][n] = pack<S::F16>(low, high);
            ptx_store_shared_u32(to + n * 16, weights[h][n]);
        }
        rows.sum[m][h] = rows.sum[m][h] * alpha + sum;
        shrinks[h] = alpha;
        if (h == 1) {
            add_taken<S>(rows.taken[m], weights, shrinks);
        }
    }
}

/* A row's sum over token groups, by way of `top`, to the thread that finishes the row. */
template <class S>
static __device__ __forceinline__ void join_sums(float &sum, float *top, int row, int tg, bool has, bool finishes)
{
    if (has) {
        top[tg * S::ROWS + row] = sum;
    }
    ptx_barrier_sync(BARRIER_SCORES, S::QW * 32);
    for (int other = 1; other < S::TG && finishes; other++) {
        sum += top[other * S::ROWS + row];
    }
}

/* Factors of output rows, for which the summing warps wait, lse and maxima: each of the lanes that share rows finishes
 * one. `top`: not in use by a step; `other_top`: in use until all warps are here. */
template <class S>
static __device__ __forceinline__ void finish_rows(const fmlac_mqa &p, const mqa_shared &s, const mqa_piece &piece,
                                                   const score_rows<S> &rows, float *top, float *other_top, int row0,
                                                   int tg)
{
    int lane = threadIdx.x % 32, q = lane % 4, row = row0 + q / 2 * 16 + lane / 4 + q % 2 * 8;
    float own = 0.0f, taken = 0.0f, base = 0.0f, max = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * S::QM; i++) {
        float sum = rows.sum[i / 2][i % 2];
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
        own = q == i ? sum : own;
        taken = q == i ? rows.taken[i / 2][i % 2] : taken;
        base = q == i ? rows.base[i / 2][i % 2] : base;
        max = q == i ? rows.max[i / 2][i % 2] : max;
    }
    bool finishes = tg == 0 && q < 2 * S::QM, cut = piece.place >= 0;
    if (S::TG > 1) {
        join_sums<S>(own, top, row, tg, q < 2 * S::QM, finishes);
        join_sums<S>(taken, other_top, row, tg, q < 2 * S::QM, finishes);
    }
    if (finishes) {
        s.factor[row] = factor_of_row(p, s, row, base, own, taken, cut);
    }
    ptx_barrier_arrive(BARRIER_END, S::THREADS);
    if (finishes) {
        float *scalars = cut ? p.cut.partial_scalar + (piece.place * S::ROWS + row) * 2 : nullptr;
        finish_row(p, s, row, base, max, own, scalars);
    }
}

/* A scoring warp, another one for every tile: where the tokens of the tile lie that the summing warps will ask for when
 * the weights of tile i + 1 (at: the place of tile i) are there. */
template <class S>
static __device__ __forceinline__ void walk_ahead(const fmlac_mqa &p, const mqa_shared &s, const mqa_piece &piece,
                                                  int i, int at, uint32_t &asked)
{
    int ahead = listed_first(s);
    if (i % S::QW == (int)ptx_thread() / 32 && i + ahead < piece.count) {
        int64_t next = next_tile<S>(p, s, i + ahead, place_after(s, at, ahead), asked);
        asked = ask_for_entries(p, s, next + (S::QW - 1) * S::TOKENS);
    }
}

template <class S>
static __device__ __forceinline__ void scoring_warp(const fmlac_mqa &p, const mqa_shared &s, const mqa_piece &piece)
{
    int warp = threadIdx.x / 32, at = piece.at, i;
    int row0 = warp / S::TG * 16 * S::QM, tg = warp % S::TG, token0 = tg * S::NT * 8;
    score_rows<S> rows;
    held_rows<S> held;
    begin_rows<S>(s, rows);
    if (piece.count > 0) {
        ptx_mbarrier_wait(s.q_full, piece.parity);
    }
    hold_rows<S>(held, s.q, p.row_bytes / 128, row0);
    uint32_t asked = NOT_ASKED;
    if (piece.count > listed_first(s)) {
        asked = ask_for_entries(p, s, (piece.begin + listed_first(s) + warp) * S::TOKENS);
    }
#pragma unroll 1
    for (i = 0; tile_exists(p, s, i < piece.count, at); i++) {
        int slot = slot_of(s, at);
        uint32_t tile = s.tiles + slot * (S::TOKENS * PITCH);
        float *top = s.top + (i & 1) * (S::TG * S::ROWS);
        float acc[S::QM][S::NT][4];
        ptx_mbarrier_wait(s.full + slot * 8, parity_of(s, at));
        scores<S>(acc, held, s.q, tile, p.row_bytes / 128, row0, token0);
        uint32_t mask = ((volatile uint32_t *)s.mask)[at * 2 + token0 / 32] >> (token0 % 32);
        mask_scores<S>(p, s, acc, rows, mask, row0, i * S::TOKENS + token0);
        exchange_maxima<S>(acc, rows, late_scale(p), top, row0, tg);
        write_weights<S>(acc, rows, late_scale(p), s.shrink + slot * S::ROWS, tile, row0, tg);
        if (rows.all_see < (i + 1) * S::TOKENS) {
            clean_values<S>(tile, (int)clamped(rows.all_see - i * S::TOKENS, 0, S::TOKENS));
        }
        arrive_together_anew(s.ready + slot * 8);
        walk_ahead<S>(p, s, piece, i, at, asked);
        at = after(at, s.ring);
    }
    finish_rows<S>(p, s, piece, rows, s.top + (i & 1) * (S::TG * S::ROWS), s.top + (~i & 1) * (S::TG * S::ROWS), row0,
                   tg);
    if (threadIdx.x == 0) {
        s.piece->at = at;
    }
}

/* ---- summing warps --------------------------------------------------------------------------------------------- */

/* Where a summing warp's part of the output begins. */
template <class S> static __device__ __forceinline__ int summed_row(void)
{
    return ((int)ptx_thread() / 32 - S::QW) / S::CG * 16 * S::MV;
}

template <class S> static __device__ __forceinline__ int summed_column(void)
{
    return ((int)ptx_thread() / 32 - S::QW) % S::CG * S::NV * 8;
}

/* Rows shrink where a reference moved. */
template <class S> static __device__ __forceinline__ void shrink_rows(float out[S::MV][S::NV][4], const float *shrink)
{
    int g = ptx_thread() % 32 / 4, row0 = summed_row<S>();
    float by[S::MV][2];
    bool any = false;
#pragma unroll
    for (int i = 0; i < 2 * S::MV; i++) {
        by[i / 2][i % 2] = shrink[row0 + i / 2 * 16 + i % 2 * 8 + g];
        any = any || by[i / 2][i % 2] != 1.0f;
    }
    if (!__any_sync(0xFFFFFFFFu, any)) {
        return;
    }
#pragma unroll
    for (int m = 0; m < S::MV; m++) {
#pragma unroll
        for (int n = 0; n < S::NV; n++) {
            out[m][n][0] *= by[m][0];
            out[m][n][1] *= by[m][0];
            out[m][n][2] *= by[m][1];
            out[m][n][3] *= by[m][1];
        }
    }
}

/* Rows go out through shared memory, where Q and tiles were. */
template <class S>
static __device__ __forceinline__ void stage_rows(const float out[S::MV][S::NV][4], const mqa_shared &s)
{
    int lane = ptx_thread() % 32, g = lane / 4, row0 = summed_row<S>(), column0 = summed_column<S>();
    float *staged = (float *)ptx_shared();
#pragma unroll
    for (int m = 0; m < S::MV; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = row0 + m * 16 + g + 8 * h;
            float factor = s.factor[row];
            float *to = staged + row * STAGED_PITCH + column0 + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < S::NV; n++) {
                float2 pair = {out[m][n][2 * h] * factor, out[m][n][2 * h + 1] * factor};
                *(float2 *)(to + n * 8) = pair;
            }
        }
    }
}

/* Until the slot of the tile at a place in the ring is free: the phase before the tile's own. */
static __device__ __forceinline__ void wait_free(const mqa_shared &s, int at)
{
    ptx_mbarrier_wait(s.free + slot_of(s, at) * 8, parity_of(s, at) ^ 1);
}

/* A summing warp brings its part of the tile at a place in the ring, if there is one. */
template <class S> static __device__ __forceinline__ bool bring_plain(const fmlac_mqa &p, const mqa_shared &s, int at)
{
    int slot = slot_of(s, at);
    bool there = tile_exists(p, s, true, at);
    if (there) {
        wait_free(s, at);
        copy_plain<S>(p, s, at, s.tiles + slot * (S::TOKENS * PITCH), s.full + slot * 8);
    }
    return there;
}

/* The same where raw bytes, which are under way, are to be expanded; those of the tile after it set out. `own`: the
 * warp's tokens, first of this tile, then of the next. */
template <class S>
static __device__ __forceinline__ bool bring_codes(const fmlac_mqa &p, const mqa_shared &s, int warp, int at, bool last,
                                                   uint32_t &own)
{
    int slot = slot_of(s, at), next = after(at, s.ring);
    if (own == 0) {
        return false;
    }
    ptx_mbarrier_wait(s.raw_full + warp * 8, at & 1);
    uint32_t of_next = own_tokens<S>(s, warp, !last, next);
    if (of_next != 0) {
        wait_free(s, next);
        copy_raw<S>(p, s, warp, next, s.tiles + slot_of(s, next) * (S::TOKENS * PITCH), of_next);
    }
    expand<S>(p, s, warp, at, s.tiles + slot * (S::TOKENS * PITCH), own);
    arrive_together_anew(s.full + slot * 8);
    own = of_next;
    return true;
}

/* A summing warp sums the tile at a place in the ring. */
template <class S>
static __device__ __forceinline__ void sum_tile(float out[S::MV][S::NV][4], const mqa_shared &s, int at)
{
    int slot = slot_of(s, at);
    ptx_mbarrier_wait(s.ready + slot * 8, parity_of(s, at));
    shrink_rows<S>(out, s.shrink + slot * S::ROWS);
    values<S>(out, s.tiles + slot * (S::TOKENS * PITCH), summed_row<S>(), summed_column<S>());
    uint32_t seen = 0; /* a sum of everything that was loaded */
#pragma unroll
    for (int i = 0; i < S::MV + S::NV - 1; i++) {
        seen ^= __float_as_uint(i < S::MV ? out[i][0][0] : out[0][i - S::MV + 1][0]);
    }
    arrive_after(s.free + slot * 8, seen);
}

/* Step by step: a tile is summed, and another brought. The first steps only bring. */
template <class S>
static __device__ __forceinline__ void summing_warp(const fmlac_mqa &p, const mqa_shared &s, const mqa_piece &piece)
{
    float out[S::MV][S::NV][4];
#pragma unroll
    for (int m = 0; m < S::MV; m++) {
#pragma unroll
        for (int n = 0; n < S::NV; n++) {
            out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0.0f;
        }
    }
    if (BULK(p)) {
        ptx_fence_async_proxy(); /* staged rows were where tokens go */
    }
    uint32_t own = 0;
    int warp = threadIdx.x / 32 - S::QW, at = piece.at;
    list_first<S>(p, s, warp, piece.count);
    ptx_barrier_arrive(BARRIER_LIST, S::THREADS);
    if constexpr (S::CODES) {
        own = own_tokens<S>(s, warp, piece.count > 0, at);
        if (own != 0) {
            copy_raw<S>(p, s, warp, at, s.tiles + slot_of(s, at) * (S::TOKENS * PITCH), own);
        }
    }
    int left = piece.count, held = 0; /* tiles to bring, and brought but not summed; `at`: the next one */
#pragma unroll 1
    while (left > 0 || held > 0) {
        if (left == 0 || held == brought_ahead<S>(s)) {
            sum_tile<S>(out, s, place_after(s, at, s.ring - held));
            held--;
        }
        if (left > 0) {
            bool there;
            if constexpr (S::CODES) {
                there = bring_codes<S>(p, s, warp, at, left == 1, own);
            } else {
                there = bring_plain<S>(p, s, at);
            }
            left = there ? left - 1 : 0;
            held += there;
            at = there ? after(at, s.ring) : at;
        }
    }
    ptx_barrier_sync(BARRIER_END, S::THREADS);
    stage_rows<S>(out, s);
}

/* ---- pieces of work -------------------------------------------------------------------------------------------- */

template <class S> static __device__ __forceinline__ void mqa_run(const fmlac_mqa &p, const mqa_shared &s)
{
    const mqa_piece &piece = *s.piece;
    const fmlac_work &w = *s.work;
    if (threadIdx.x < S::QW * 32) {
        count_seen<S>(p, s, piece);
        if (piece.count > 0 && p.fused.enabled) {
            load_q_fused<S>(p, w, s);
            ptx_mbarrier_arrive(s.q_full);
        } else if (piece.count > 0) {
            load_q<S>(p, s);
        }
        ptx_barrier_sync(BARRIER_LIST, S::THREADS);
        scoring_warp<S>(p, s, piece);
    } else {
        summing_warp<S>(p, s, piece);
    }
    __syncthreads();
    if (ptx_thread() == 0) {
        s.piece->parity ^= piece.count > 0;
    }
    float *partial = piece.place < 0 ? nullptr : p.cut.partial + piece.place * S::ROWS * OUT_COLUMNS;
    store_rows<S>(p, s, (int)ptx_thread() / 32, S::QW + S::PW, (float *)ptx_shared(), partial);
}

/* A warp, not the one that finds pieces. Who arrives: each warp, or each lane. */
template <class S>
static __device__ __forceinline__ void begin_barriers(const fmlac_mqa &p, const mqa_shared &s, uint32_t lane)
{
    if (lane < (uint32_t)s.slots) {
        ptx_mbarrier_init(s.full + lane * 8, S::PW * (S::CODES || BULK(p) ? WARP_ARRIVALS : 32));
        ptx_mbarrier_init(s.ready + lane * 8, S::QW * WARP_ARRIVALS);
        ptx_mbarrier_init(s.free + lane * 8, S::PW * WARP_ARRIVALS);
    } else if (lane == (uint32_t)s.slots) {
        ptx_mbarrier_init(s.q_full, S::QW * 32);
        ptx_barrier_begin(BARRIER_SCORES, S::QW * 32);
        ptx_barrier_begin(BARRIER_SUMS, S::PW * 32);
        ptx_barrier_begin(BARRIER_LIST, S::THREADS);
        ptx_barrier_begin(BARRIER_END, S::THREADS);
    } else if (S::CODES && lane - s.slots <= S::PW) {
        ptx_mbarrier_init(s.raw_full + (lane - s.slots - 1) * 8, raw_arrivals(p));
    }
}

/* All pieces of this block. */
template <class S> static __device__ __forceinline__ void mqa_block(const fmlac_mqa &p)
{
    mqa_shared s = mqa_shared_plan(p, S::SLOTS > 0 ? S::SLOTS : p.stages);
    if (threadIdx.x >= S::THREADS - 32) {
        begin_barriers<S>(p, s, threadIdx.x % 32);
    }
    if (threadIdx.x < 32) {
        begin_pieces(p, s, (int)threadIdx.x);
    }
    for (;;) {
        if (ptx_thread() == 0 && lists_alike(p)) {
            find_alike<S>(p, s);
        } else if (ptx_thread() == 0) {
            find_piece<S>(p, s);
        }
        __syncthreads();
        if (s.piece->count < 0) {
            return;
        }
        mqa_run<S>(p, s);
        if (p.cut.parts == 0) {
            return;
        }
        __syncthreads();
    }
}

#endif
