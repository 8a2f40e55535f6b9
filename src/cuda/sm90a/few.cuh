/* SPDX-License-Identifier: MIT */
/*
 * few.cuh: attention of few query rows (ROWS, 16) over a list of quantised tokens. A product of a warpgroup has 64
 * rows, of which few are there: so products are warps' own (m16n8k16), whose second operands are expanded from codes in
 * registers (few_tokens.cuh). No tile of 16-bit numbers is ever written.
 *
 * ROLES       warps    registers   work
 *   teams     0..11    144         three teams of four warps: each attends every third strip of 32 tokens
 *   others    12..15   80          finder, two gatherers, Q (few_source.cuh)
 *
 * A team's warp has a quarter of a token's dims, for scores and for the output (with 576 dims, a part of the last block
 * for scores). ORDER of a team, for a strip:
 *   parts of scores of its dims    to shared memory; named 1 + team
 *   weights of eight tokens        from the sum of parts; to shared memory; named 4 + team (few_weights.cuh)
 *   += weights * values            of its dims
 * Teams have references and sums of their own and do not wait for each other: what one waits for is filled by the
 * others. At the end of a piece the team that had its last strip joins them (few_output.cuh), so that a row's bits do
 * not depend on what came before.
 *
 * SHARED MEMORY struct few_plan (few_plan.cuh).
 *
 * BARRIERS            arrivals         made by              waited for by    protects
 *   those of few_source.cuh, and
 *   piece_full[2]     1                finder               teams, Q's warp  pieces[]
 *   piece_free[2]     14               all but gatherers    finder           pieces[], and what has two places for
 *                                                                            pieces: q[], sink[], ends[], factor[] ...
 *   left_full[2][k]   4                team k / 2 of those  its last team    left[], left_ends
 *                                      done, half k % 2
 *   left_free[2][k]   4                its last team        who is next      the same
 *   named 1 + team    128              a team               itself           parts[], tops[], ends of a piece
 *   named 4 + team    128              a team               itself           weights[]; whether references move
 */
#ifndef FLASHMLA_CUDA_SM90A_FEW_CUH
#define FLASHMLA_CUDA_SM90A_FEW_CUH

#include "few_output.cuh"
#include "few_source.cuh"

struct few_of {
    static constexpr int TEAM_GROUPS = TEAMS * TEAM_WARPS / 4;
    static constexpr int THREADS = (TEAM_GROUPS + 1) * 128;
    static constexpr int TEAM_REGISTERS = 144;
    static constexpr int OTHER_REGISTERS = 80;
};

/* ---- a team ------------------------------------------------------------------------------------------------------ */

#define MIXED (KIND_F32 | KIND_MIXED)
#define WIDE  (KIND_E8M0 | KIND_WIDE)

/* A warp's share of a strip's scores. Returns the kind that it is of, KIND_ANY: its values go the long way, too. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t score_strip(const fmlac_pool &pool, uint32_t kind, bool plain,
                                                       const strip_view &v, uint32_t q, uint32_t warp, uint32_t parts,
                                                       float own[4])
{
    if (kind != KIND_ANY) {
        few_query x;
        load_query<BLOCKS>(&x, q, warp);
        if constexpr (BLOCKS == 9) {
            kind = kind == MIXED ? kind : strip_scores<BLOCKS, KIND_F32, KIND_F32>(pool, v, x, warp, parts, own);
            if (kind == MIXED) {
                q_as_bf16(&x);
                kind = strip_scores<BLOCKS, MIXED, MIXED>(pool, v, x, warp, parts, own);
            }
        } else if (kind == KIND_FP4) {
            kind = strip_scores<BLOCKS, KIND_FP4, KIND_FP4>(pool, v, x, warp, parts, own);
        } else if (kind == KIND_E8M0) {
            kind = strip_scores<BLOCKS, KIND_E8M0, KIND_E8M0>(pool, v, x, warp, parts, own);
        } else if (plain) {
            kind = strip_scores<BLOCKS, WIDE, KIND_PLAIN>(pool, v, x, warp, parts, own);
        } else {
            kind = strip_scores<BLOCKS, WIDE, WIDE>(pool, v, x, warp, parts, own);
        }
    }
    if (kind == KIND_ANY) {
        hard_scores<BLOCKS>(pool, v, q, warp, parts, own);
    }
    return kind;
}

template <int BLOCKS>
static __device__ __forceinline__ void sum_strip(float o[FEW_OUTPUT], const fmlac_pool &pool, uint32_t kind, bool plain,
                                                 const strip_view &v, uint32_t warp, uint32_t weights)
{
    if constexpr (BLOCKS == 9) {
        if (kind == MIXED) {
            strip_values<MIXED, MIXED>(o, pool, v, warp, weights);
        } else {
            strip_values<KIND_F32, KIND_F32>(o, pool, v, warp, weights);
        }
    } else if (kind == KIND_FP4) {
        strip_values<KIND_FP4, KIND_FP4>(o, pool, v, warp, weights);
    } else if (kind == KIND_E8M0) {
        strip_values<KIND_E8M0, KIND_E8M0>(o, pool, v, warp, weights);
    } else if (plain) {
        strip_values<WIDE, KIND_PLAIN>(o, pool, v, warp, weights);
    } else {
        strip_values<WIDE, WIDE>(o, pool, v, warp, weights);
    }
}

/* Where a team is: four times the number of its next strip, and the piece's number modulo 4. All else is found anew
 * wherever it is asked: there are no registers. */
typedef uint32_t team_walk;

static __device__ __forceinline__ uint32_t piece_number(team_walk walk)
{
    return walk & 3;
}

static __device__ __forceinline__ uint32_t entry_of(team_walk walk)
{
    return uniform(walk) / 4 % ENTRIES;
}

static __device__ __forceinline__ uint32_t own_team(void)
{
    return uniform(ptx_thread() / TEAM_THREADS);
}

static __device__ __forceinline__ uint32_t own_warp(void)
{
    return uniform(ptx_thread() / 32 % TEAM_WARPS);
}

/* Attends a strip. */
template <int BLOCKS>
static __device__ __forceinline__ void attend(float o[FEW_OUTPUT], few_rows &r, const fmlac_mqa &p, const piece &c,
                                              few_plan<BLOCKS> *m, team_walk walk)
{
    const volatile strip &own = m->strips[entry_of(walk)];
    const uint32_t i = piece_number(walk);
    const uint32_t extra = uniform(own.flags);
    const fmlac_pool &pool = pool_of(p, extra != 0);
    const uint32_t team = own_team(), warp = own_warp();
    const bool plain = is_plain_block(pool, warp * WARP_BLOCKS + WARP_BLOCKS - 1);
    const pool_view *known = &m->pools[extra];
    const uint32_t rows = uniform(own.rows);
    const strip_view v = {rows, m->pitch, rows + known->scales, known->scale_pitch, known->plain};
    volatile uint32_t *mixed = &m->mixed[team][warp]; /* such scales were met */
    float s[4] = {}, factor[2];
    const uint32_t kind =
        score_strip<BLOCKS>(pool, uniform(known->kind | *mixed), plain, v, ptx_shared_address(m->q[i & 1]), warp,
                            ptx_shared_address(m->parts[team][warp]), s);
    if (kind == MIXED) {
        *mixed = KIND_MIXED;
    }
    team_sync(team);
    const volatile strip &again = m->strips[entry_of(walk)];
    const int32_t position = c.begin * TOKENS + again.position;
    const uint32_t there = again.there;
    const bool unseen = *(const volatile int32_t *)&c.all_see < position + STRIP_TOKENS;
    sum_parts(s, m, team, warp);
    if (there != 0xFFFFFFFFu || unseen) {
        few_hide(s, there, c, position, warp);
    }
    if (p.max_logits.data) {
        float *max = &m->max[0][ptx_thread()];
        max[0] = fmaxf(max[0], fmaxf(s[0], s[1]));
        max[TEAMS * TEAM_THREADS] = fmaxf(max[TEAMS * TEAM_THREADS], fmaxf(s[2], s[3]));
    }
    const float scale[2] = {row_scale(p, m, i & 1, 0), row_scale(p, m, i & 1, 1)};
    if (few_weigh(s, scale, r, m, team, warp, factor)) {
        few_rescale(o, factor); /* seldom */
    }
    const uint32_t weights = ptx_shared_address(m->weights[team]);
    const bool clean =
        unseen && plain && c.all_see < c.work.main_count; /* 16-bit numbers that some rows must not meet */
    if (kind == KIND_ANY || clean) {
        const int32_t from = unseen ? c.all_see - position : STRIP_TOKENS;
        hard_values(o, pool, v, warp, weights, from < 0 ? 0 : (uint32_t)from);
    } else {
        sum_strip<BLOCKS>(o, pool, kind, plain, v, warp, weights);
    }
}

/* A team's strips of a piece. Returns its turn: in which order teams learn that there are no more. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t attend_strips(float o[FEW_OUTPUT], few_rows &r, const fmlac_mqa &p,
                                                         const piece &c, few_plan<BLOCKS> *m, team_walk &walk)
{
#pragma unroll 1
    for (;;) {
        const uint32_t entry = entry_of(walk);
        ptx_mbarrier_wait(ptx_shared_address(&m->strip_full[entry]), walk / 4 / ENTRIES & 1);
        const volatile strip &own = m->strips[entry];
        const uint32_t flags = uniform(own.flags);
        if (flags & STRIP_LAST) {
            walk += 4 * TEAMS;
            arrive_together(ptx_shared_address(&m->strip_free[entry]));
            return (own_team() + TEAMS - flags / STRIP_TEAM) % TEAMS;
        }
        attend(o, r, p, c, m, walk);
        /* behind products with what was loaded last */
        const uint32_t same = entry_of(walk);
        if (arrives(ptx_thread() % 32, lane_after(__float_as_uint(o[FEW_OUTPUT - 1])))) {
            ptx_mbarrier_arrive(ptx_shared_address(&m->place_free[*(volatile uint32_t *)&m->strips[same].place]));
            ptx_mbarrier_arrive(ptx_shared_address(&m->strip_free[same]));
        }
        walk += 4 * TEAMS;
    }
}

template <int BLOCKS> static __device__ __forceinline__ void attend_pieces(const fmlac_mqa &p, few_plan<BLOCKS> *m)
{
    team_walk walk = 4 * own_team();
#pragma unroll 1
    for (;;) {
        uint32_t i = piece_number(walk);
        ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[i & 1]), use_parity(i));
        const piece &c = m->pieces[i & 1];
        if (!uniform(c.there)) {
            break;
        }
        float o[FEW_OUTPUT];
        few_rows r;
#pragma unroll
        for (int j = 0; j < FEW_OUTPUT; j++) {
            o[j] = 0.0f;
        }
        few_begin(r, m);
        ptx_mbarrier_wait(ptx_shared_address(&m->q_full[i & 1]), use_parity(i));
        const uint32_t turn = attend_strips(o, r, p, c, m, walk);
        i = piece_number(walk);
        const float scale[2] = {row_scale(p, m, i & 1, 0), row_scale(p, m, i & 1, 1)};
        if (turn < TEAMS - 1) {
            leave_strips(o, r, scale, m, own_team(), turn, i);
        } else {
            const team_place place = {own_team(), i & 1};
            join_strips(o, r, scale, m, place, i);
            few_store(p, c, o, m, place);
        }
        arrive_together(ptx_shared_address(&m->piece_free[i & 1]));
        walk = (walk & ~3u) | ((walk + 1) & 3);
    }
}

/* ---- the block --------------------------------------------------------------------------------------------------- */

template <int BLOCKS> static __device__ __forceinline__ void init_few(const fmlac_mqa &p, few_plan<BLOCKS> *m)
{
    const uint32_t team = TEAM_WARPS * WARP_ARRIVALS;
    for (int i = 0; i < 2; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->piece_full[i]), WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_free[i]), (TEAMS * TEAM_WARPS + 2) * WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->q_full[i]), WARP_ARRIVALS);
    }
    for (int i = 0; i < PLACES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->places_full[i]), WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->places_empty[i]), GATHERERS * WARP_ARRIVALS);
    }
    for (int i = 0; i < ENTRIES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->strip_full[i]), 32 + WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->strip_free[i]), team);
    }
    for (int i = 0; i < RING_PLACES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->place_free[i]), team);
    }
    for (int i = 0; i < 2 * LEFT_STEPS; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->left_full[0][i]), team);
        ptx_mbarrier_init(ptx_shared_address(&m->left_free[0][i]), team);
    }
    for (int i = 0; i < TEAMS * TEAM_WARPS; i++) {
        m->mixed[i / TEAM_WARPS][i % TEAM_WARPS] = 0;
    }
    const strip_ring r = ring_of<BLOCKS>(p);
    m->pitch = r.pitch;
    view_pool<BLOCKS>(&m->pools[0], p.main.pool, r);
    if (p.extra.kind != FMLAC_LIST_NONE) {
        view_pool<BLOCKS>(&m->pools[1], p.extra.pool, r);
    }
    for (int i = 0; i < TEAMS; i++) {
        ptx_barrier_begin(BARRIER_TEAM + i, TEAM_THREADS);
        ptx_barrier_begin(BARRIER_VOTE + i, TEAM_THREADS);
    }
    ptx_mbarrier_init_fence();
}

/* By the warps that do not multiply; a barrier of the block follows. */
template <int BLOCKS> static __device__ __forceinline__ void few_prologue(const fmlac_mqa &p, few_plan<BLOCKS> *m)
{
    const int thread = (int)threadIdx.x - few_of::TEAM_GROUPS * 128;
    if (thread < 0) {
        return;
    }
    if (thread == 127) {
        init_few(p, m);
        m->walk.guess = -1;
    }
    if (is_whole(p) && thread < 32 && (int32_t)blockIdx.x < whole_pieces(p)) {
        prefetch_list(p, whole_work(p, (int32_t)blockIdx.x), 0, thread);
    }
    walk_costs(p, &m->walk, thread, 128);
}

/* BLOCKS: 64-dim blocks of a token, 8 or 9. */
template <int BLOCKS> static __device__ __forceinline__ void few(const fmlac_mqa_sm90a &all)
{
    const fmlac_mqa &p = all.mqa;
    few_plan<BLOCKS> *m = (few_plan<BLOCKS> *)ptx_shared();
    few_prologue(p, m);
    __syncthreads();
    ptx_grid_launch_dependents();
    const int group = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0);
    if (group < few_of::TEAM_GROUPS) {
        ptx_registers_take<few_of::TEAM_REGISTERS>();
        attend_pieces(p, m);
    } else {
        ptx_registers_give<few_of::OTHER_REGISTERS>();
        const uint32_t warp = uniform(threadIdx.x / 32) % 4;
        if (warp == 0) {
            find_tiles(all, m);
        } else if (warp <= GATHERERS) {
            gather_strips(p, m, warp - 1);
        } else {
            bring_queries(p, m);
        }
    }
}

/* A kernel of a file. */
#define FEW_KERNEL(name, blocks)                                                                                       \
    extern "C" __global__ void __launch_bounds__(few_of::THREADS, 1) name(const __grid_constant__ fmlac_mqa_sm90a all) \
    {                                                                                                                  \
        few<blocks>(all);                                                                                              \
    }

#endif
