/* SPDX-License-Identifier: MIT */
/*
 * pair.cuh: attention of up to 128 query rows over a list of quantised tokens by two blocks of a cluster, which split
 * the token's dims (sm_90a). Each block expands and multiplies its own half: no code is expanded twice. Of 64 rows each
 * block is the owner: it gets the other half of their scores, in float, makes their weights and gives them away.
 *
 * ROLES          warps     registers   work
 *   warpgroup 0    0..3      208       rows 0..63: scores of the block's dims, the block's 256 output dims
 *   warpgroup 1    4..7      208       rows 64..127: the same
 *   gather         8, 9      48        raw rows into the ring (bulk copies)
 *   gather, RoPE   10        48        RoPE dims into the tile; raw rows where the block has no such dims
 *   expand         11..14    48        codes to bf16, a unit of 8 rows at a time
 *   finder         15        48        finds the pieces, and where the tokens of a tile lie
 * With d_qk 576 warps 8..11 expand, with 56 registers, and the others, gather, RoPE and finder in this order, have 40.
 * Block 0 has dims 0..255 of K, Q and output, block 1 dims 256..511; of RoPE dims on top (d_qk 576) each has 32. In
 * block r warpgroup r is the owner, the other one the helper; owner and helper of the same rows are called fellows.
 * Accumulators of a warpgroup: output 64 x 256 (128 registers per thread), scores 64 x 64 (32), weights as an A operand
 * (16).
 *
 * SHARED MEMORY  struct pair_plan (pair_plan.cuh): Q | half tiles | scores, weights of the peer | raw rows
 *
 * BARRIERS           arrivals                made by                       waited for by    protects
 *   full[3]            8 units, and 32         expand, and RoPE              warpgroups       a half tile, its note
 *                      copies of RoPE dims                                   (tile 0: RoPE)
 *   empty[3]           8 warps                 warpgroups, after the values  expand, RoPE     the same
 *   rope_empty[3]      8 warps                 warpgroups, after the scores  RoPE             RoPE dims on top of 512
 *   scores_full        1 and 16384 bytes       the peer's helper             owner            scores
 *   scores_empty       4 warps of the peer     the peer's owner, once it     helper           the peer's scores
 *                                              has read them
 *   weights_full       1 and 8704 bytes        the peer's owner              helper           weights, factors
 *   weights_empty      4 warps of the peer     the peer's helper, once it    owner            the peer's weights
 *                                              has read them
 *   places_full[2]     1                       finder                        gather, RoPE     places[], notes[]
 *   places_empty[2]    3 warps                 gather, RoPE                  finder           the same
 *   raw_full[]         33 and the bytes        gather: 32 copies of scales,  expand           a group of raw rows
 *                                              1 for codes and note
 *   raw_empty[]        2 units                 expand, once the rows are in  gather           the same
 *                                              registers
 *   piece_full[4]      1                       finder                        everybody        pieces[]
 *   piece_free[4]      15 warps                everybody else                finder           the same
 *   q_full[2]          1 and the bytes         a lane of the warpgroup       the warpgroup    Q of the warpgroup
 *   named 3 + w        128                     warpgroup w                   itself           Q's place, after its last
 *                                                                                             scores in all warps
 *
 * FULL: nobody arrives for tile t at full[t % 3] before tile t - 3 is full there; one phase would have more arrivals
 * than it counts. Expanding warps, and RoPE dims on top, wait until all warps have freed tile t - 3, or its RoPE dims;
 * who frees any has waited for the tile. V4's RoPE dims, in a ring of four last blocks, wait until t - 4 is free: an
 * owner frees it after the scores of t - 3, a helper too, because its scores are two tiles ahead of its values. Both
 * have waited for t - 3 then, unless there is none; and t - 1, the next in the stage of t - 4, is not free before they
 * have waited for t, so that no phase is missed. Tiles 0, 1, 2 are the first in their stages. Tile 3 has a last block
 * that nobody need free, so its RoPE dims wait until tile 0 is full.
 *
 * ORDER, tile t, whatever piece it is of:
 *   owner                                            helper
 *     scores of t on the block's dims  full[t]         takes weights of t          weights_full
 *     += weights of t - 1 * values of t - 1            moves the output to new references, seldom
 *     adds the fellow's scores of t    scores_full     += weights of t * values of t
 *     maxima, references                               frees t
 *     frees t - 1                                      scores of t + 2             full[t + 2]
 *     weights of t                                     sends them                  scores_empty
 *     moves the output to new references, seldom
 *     sends the weights                weights_empty
 * So the helper is two tiles ahead with scores, and neither waits for what the other has just begun. The owner's
 * weights go out between the products of the next scores, a store behind every third; at once where the next tile is
 * not there yet, and before whatever is rare. Tiles of the next piece follow those of a piece at once: its Q is asked
 * for as soon as the last scores are there; the owner sends what rows are multiplied by in the end as one more message,
 * and writes the output when it has sent the weights of the next piece's first tile; the helper after the last values.
 * An empty list is a tile of no tokens. The owner's first product with values is overwritten by the second, its last
 * scores are of nothing: products must not be conditional.
 */
#ifndef FLASHMLA_CUDA_SM90A_PAIR_CUH
#define FLASHMLA_CUDA_SM90A_PAIR_CUH

#include "output.cuh"
#include "pair_exchange.cuh"
#include "pair_expand.cuh"
#include "ptx/grid.cuh"
#include "ptx/wgmma.cuh"
#include "softmax.cuh"

/* ---- products ---------------------------------------------------------------------------------------------------- */

/* Where the last block of a half tile is. */
template <int BLOCKS> static __device__ __forceinline__ uint32_t last_block(tile_place tile)
{
    return BLOCKS == 9 ? PAIR_AT(k) + tile.slot * HALF_BLOCKS * BLOCK_BYTES + (HALF_BLOCKS - 1) * BLOCK_BYTES
                       : PAIR_AT(k_last) + tile.last * BLOCK_BYTES;
}

/* s = Q * tile^T over the block's dims; ends with the commit. OWNER: and the weights of the tile before, whose factors
 * are 1, go to the helper behind every third product, if `waiting`. */
template <int BLOCKS, int OWNER>
static __device__ __forceinline__ void pair_scores(float s[32], const pair_view &v, tile_place tile,
                                                   const uint32_t a[16], uint32_t waiting)
{
    const float ones[4] = {1.0f, 1.0f, 0.0f, 0.0f};
    uint32_t peer = OWNER ? to_peer() : 0;
    uint32_t q = ptx_wgmma_tile(PAIR_AT(q) + v.group * HALF_BLOCKS * BLOCK_BYTES, BLOCK_BYTES);
    uint32_t k = ptx_wgmma_tile(PAIR_AT(k) + tile.slot * sizeof(pair_plan<BLOCKS>::k[0]), BLOCK_BYTES);
    uint32_t last = ptx_wgmma_tile(last_block<BLOCKS>(tile), BLOCK_BYTES);
    ptx_wgmma_hold<32>(s);
    ptx_wgmma_fence();
#pragma unroll
    for (int i = 0; i < HALF_BLOCKS * 4; i++) {
        uint32_t offset = i / 4 * BLOCK_BYTES + i % 4 * 32;
        ptx_wgmma_n64_ss<0>(
            s, ptx_wgmma_advance(q, offset),
            i / 4 == HALF_BLOCKS - 1 ? ptx_wgmma_advance(last, i % 4 * 32) : ptx_wgmma_advance(k, offset), i > 0);
        if (OWNER && i % 3 == 0 && i / 3 < WEIGHT_PARTS) {
            send_part<BLOCKS>(a, ones, v, i / 3, peer, waiting);
        }
    }
    if (BLOCKS == 9) {
        uint32_t q_rope = ptx_wgmma_tile(PAIR_AT(q_rope) + v.group * NARROW_BYTES, BLOCK_BYTES);
        uint32_t k_rope = ptx_wgmma_tile(PAIR_AT(k_last) + tile.slot * NARROW_BYTES, BLOCK_BYTES);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            ptx_wgmma_n64_ss_narrow(s, ptx_wgmma_advance(q_rope, i * 32), ptx_wgmma_advance(k_rope, i * 32), 1);
        }
    }
    ptx_wgmma_commit();
}

/* o = or += weights * values of the block's dims; ends with the commit. A product takes two blocks, however far apart
 * they are. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_values(float o[128], const uint32_t a[16], tile_place tile, int accumulate)
{
    uint32_t at = PAIR_AT(k) + tile.slot * sizeof(pair_plan<BLOCKS>::k[0]), second = at + 2 * BLOCK_BYTES;
    uint32_t low = ptx_wgmma_tile(at, BLOCK_BYTES), high = ptx_wgmma_tile(second, last_block<BLOCKS>(tile) - second);
    ptx_wgmma_hold<128>(o);
    ptx_wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        ptx_wgmma_n128_rs<0>(o, a + 4 * k, ptx_wgmma_advance(low, k * 2048), k > 0 || accumulate);
        ptx_wgmma_n128_rs<0>(o + 64, a + 4 * k, ptx_wgmma_advance(high, k * 2048), k > 0 || accumulate);
    }
    ptx_wgmma_commit();
}

/* ---- a warpgroup ------------------------------------------------------------------------------------------------- */

/* Waits for tile `turn` to be there. */
template <int BLOCKS> static __device__ __forceinline__ void await_tile(uint32_t turn)
{
    ring_place place = ring_at<STAGES>(turn);
    ptx_mbarrier_wait(PAIR_AT(full) + place.at * 8, place.use);
    ptx_fence_async_proxy(); /* by readers: it takes longer where tiles are written */
}

template <int BLOCKS> static __device__ __forceinline__ uint32_t tile_note(const pair_plan<BLOCKS> *m, uint32_t slot)
{
    return *(const volatile uint32_t *)&m->stage_notes[slot];
}

/* Where a warpgroup is, counted over all pieces. */
typedef struct pair_turns {
    uint32_t scored; /* the next tile whose scores are due */
    uint32_t tile;   /* helper: the next one whose values are due */
    uint32_t message;
    uint32_t piece; /* of the next scores */
    bool there;     /* that piece is */
    bool fresh;     /* owner: the tile of the last scores was its piece's first */
    bool begins;    /* owner: the next one is */
} pair_turns;

/* The warpgroup's 64 rows of Q, the block's dims, set out, by one lane. Rows beyond the last head are zeros; those of
 * another KV head's heads are computed and not read. */
template <int BLOCKS>
static __device__ __forceinline__ void box_query(const fmlac_pair_sm90a &all, const piece &c, int group)
{
    uint32_t full = PAIR_AT(q_full) + group * 8, to = PAIR_AT(q) + group * HALF_BLOCKS * BLOCK_BYTES;
    int32_t rank = (int32_t)ptx_cluster_rank();
    int32_t head = c.work.kv_head * c.work.group + (int32_t)c.work.row0 + group * 64;
    ptx_mbarrier_arrive_expect(full, HALF_BLOCKS * BLOCK_BYTES + (BLOCKS == 9 ? NARROW_BYTES : 0));
#pragma unroll 1
    for (int block = 0; block < HALF_BLOCKS; block++) {
        ptx_tma_load_4d(to + block * BLOCK_BYTES, &all.q, full, rank * PAIR_DIMS + block * 64, head, c.inner, c.outer,
                        PTX_L2_EVICT_NORMAL);
    }
    if (BLOCKS == 9) {
        ptx_tma_load_4d(PAIR_AT(q_rope) + group * NARROW_BYTES, &all.q_rope, full, 2 * PAIR_DIMS + rank * 32, head,
                        c.inner, c.outer, PTX_L2_EVICT_NORMAL);
    }
}

/* Q for the next piece sets out once the warpgroup's scores of the piece before are done in all warps. */
template <int BLOCKS>
static __device__ __forceinline__ void fetch_query(const fmlac_pair_sm90a &all, const pair_plan<BLOCKS> *m,
                                                   pair_turns *turns, int group)
{
    ring_place at = ring_at<PIECES>(turns->piece);
    ptx_mbarrier_wait(ptx_shared_address(&m->piece_full[at.at]), at.use);
    const piece &c = m->pieces[at.at];
    ptx_barrier_sync(BARRIER_GROUP + group, 128);
    turns->there = uniform(c.there) != 0;
    if (turns->there && uniform(ptx_thread() / 32) % 4 == 0 && ptx_elect()) {
        box_query<BLOCKS>(all, c, group);
    }
    __syncwarp();
}

/* Q of piece number `piece` is there. */
template <int BLOCKS> static __device__ __forceinline__ void await_query(uint32_t piece, int group)
{
    ptx_mbarrier_wait(PAIR_AT(q_full) + group * 8, piece & 1);
}

/* A thread's first row of its warpgroup's 64; the other one is 8 further on. Read anew. */
static __device__ __forceinline__ int pair_row(void)
{
    int thread = (int)ptx_thread();
    return thread / 32 * 16 + thread % 32 / 4;
}

/* The owner has all weights of a piece (Q of the next has been asked for): what rows end with goes out and to the
 * helper. Of four lanes, which share two rows, each sees to one: this is code that has not run for long, and so takes
 * as long as there is of it. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_finish(const fmlac_pair_sm90a &all, const uint32_t a[16],
                                                   softmax_rows &rows, const pair_view &v, pair_plan<BLOCKS> *m,
                                                   pair_turns *turns)
{
    const fmlac_mqa &p = all.mqa;
    const piece &c = m->pieces[(turns->piece - 1) % PIECES];
    int q = (int)ptx_thread() % 4, row = pair_row() + q % 2 * 8;
    float sink = row_sink(p, c, row);
    join_sums(rows);
    float reference = rows.reference[0], sum = rows.sum[0], max = rows.max[0];
    if (q % 2 == 1) {
        reference = rows.reference[1];
        sum = rows.sum[1];
        max = rows.max[1];
    }
    float own = row_factor(reference, sum, sink);
    if (q < 2) {
        store_scalars(p, c, row, reference, max, sum);
        m->last[turns->piece & 1][row % 64] = own;
    }
    float factor[2] = {__shfl_sync(0xFFFFFFFFu, own, threadIdx.x % 32 & ~1u),
                       __shfl_sync(0xFFFFFFFFu, own, threadIdx.x % 32 | 1u)};
    send_weights<BLOCKS>(a, factor, v, turns->message++);
}

/* Whether weights wait for the products of tile `turn`: if that is not there they go out at once. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t hold_weights(const uint32_t a[16], const pair_view &v, uint32_t turn,
                                                        pair_turns *turns)
{
    ring_place place = ring_at<STAGES>(turn);
    if (__all_sync(0xFFFFFFFFu, ptx_mbarrier_test(PAIR_AT(full) + place.at * 8, place.use))) {
        ptx_mbarrier_wait(PAIR_AT(weights_empty), (turns->message & 1) ^ 1);
        return 1;
    }
    const float ones[2] = {1.0f, 1.0f};
    send_weights<BLOCKS>(a, ones, v, turns->message++);
    return 0;
}

/* The owner's tiles, until anything else is due than the next one: after a piece's first and last, after one for which
 * the output must be multiplied, and at the end. Returns the note of the last one; 0: that was the end. */
template <int BLOCKS>
static __device__ __forceinline__ uint32_t own_tiles(const fmlac_pair_sm90a &all, float o[128], uint32_t a[16],
                                                     softmax_rows &rows, row_bases *bases, const pair_view &v,
                                                     pair_plan<BLOCKS> *m, pair_turns *turns)
{
    uint32_t note, waiting = 0; /* whether the weights are still here */
#pragma unroll 1
    do {
        uint32_t turn = turns->scored;
        tile_place tile = place_of(turn), before = place_of(turn + STAGES * LASTS - 1);
        bool there = turns->there;
        note = 0;
        if (waiting) {
            waiting = hold_weights<BLOCKS>(a, v, turn, turns);
        }
        if (there) {
            await_tile<BLOCKS>(turn);
            note = uniform(tile_note(m, tile.slot));
        }
        float s[32];
        pair_scores<BLOCKS, 1>(s, v, tile, a, waiting); /* at the end: of any tile, and not used */
        turns->message += waiting;
        pair_values<BLOCKS>(o, a, before, !turns->fresh);
        ptx_wgmma_wait<1>();
        ptx_wgmma_hold<32>(s);
        if (there) {
            if (BLOCKS == 9) {
                arrive_warp(PAIR_AT(rope_empty) + tile.slot * 8);
            }
            if (!(note & NOTE_MORE)) {
                turns->piece++;
                fetch_query<BLOCKS>(all, m, turns, v.group);
            }
            add_scores<BLOCKS>(s, v, turn);
            find_bases(s, rows, note & NOTE_COUNT, bases);
        }
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        if (turn > 0) {
            arrive_warp(PAIR_AT(empty) + before.slot * 8);
        }
        if (there) {
            weigh_from(s, rows, bases, a);
            turns->scored = turn + 1;
            turns->fresh = (note & NOTE_FIRST) != 0;
        }
        waiting = (note & (NOTE_FIRST | NOTE_MORE)) == NOTE_MORE && !bases->moves;
    } while (waiting);
    if (note != 0) {
        send_weights<BLOCKS>(a, bases->factor, v, turns->message++);
    }
    return note;
}

/* The owner goes on until the output of a piece is complete: it has scores of the next piece's first tile then, so that
 * the tensor cores do not wait at the border. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_own(const fmlac_pair_sm90a &all, float o[128], uint32_t a[16],
                                                softmax_rows &rows, const pair_view &v, pair_plan<BLOCKS> *m,
                                                pair_turns *turns)
{
    row_bases bases;
    uint32_t note;
#pragma unroll 1
    do {
        if (turns->begins && turns->there) {
            await_query<BLOCKS>(turns->piece, v.group);
            rows.reference[0] = rows.reference[1] = rows.max[0] = rows.max[1] = -FMLAC_INFINITY;
            rows.sum[0] = rows.sum[1] = 0.0f;
        }
        turns->begins = false;
        note = own_tiles<BLOCKS>(all, o, a, rows, &bases, v, m, turns);
        if (note != 0 && !(note & NOTE_FIRST) && bases.moves) {
            rescale(o, bases.factor);
        }
        if (note != 0 && !(note & NOTE_MORE)) {
            pair_finish<BLOCKS>(all, a, rows, v, m, turns);
            turns->begins = true;
        }
    } while (note != 0 && (!(note & NOTE_FIRST) || turns->scored == 1));
}

/* The helper's scores of the next tile. */
template <int BLOCKS>
static __device__ __forceinline__ void help_scores(const fmlac_pair_sm90a &all, const pair_view &v,
                                                   const pair_plan<BLOCKS> *m, pair_turns *turns)
{
    uint32_t turn = turns->scored;
    tile_place tile = place_of(turn);
    await_tile<BLOCKS>(turn);
    uint32_t note = uniform(tile_note(m, tile.slot));
    if (note & NOTE_FIRST) {
        await_query<BLOCKS>(turns->piece, v.group);
    }
    float s[32];
    pair_scores<BLOCKS, 0>(s, v, tile, NULL, 0);
    ptx_wgmma_wait<0>();
    ptx_wgmma_hold<32>(s);
    if (BLOCKS == 9) {
        arrive_warp(PAIR_AT(rope_empty) + tile.slot * 8);
    }
    send_scores<BLOCKS>(s, v, turn);
    turns->scored = turn + 1;
    if (!(note & NOTE_MORE)) {
        turns->piece++;
        fetch_query<BLOCKS>(all, m, turns, v.group);
    }
}

/* The helper goes on until the output of a piece is complete; its scores are two tiles ahead of its values. factor:
 * what rows are multiplied by in the end. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_help(const fmlac_pair_sm90a &all, float o[128], uint32_t a[16],
                                                 const pair_view &v, const pair_plan<BLOCKS> *m, pair_turns *turns,
                                                 float factor[2])
{
    uint32_t note;
#pragma unroll 1
    do {
#pragma unroll 1
        while (turns->there && turns->scored < turns->tile + 2) {
            help_scores<BLOCKS>(all, v, m, turns);
        }
        tile_place tile = place_of(turns->tile);
        take_weights<BLOCKS>(a, factor, v, turns->message++);
        note = uniform(tile_note(m, tile.slot));
        bool fresh = (note & NOTE_FIRST) != 0;
        if (!fresh && __any_sync(0xFFFFFFFFu, factor[0] != 1.0f || factor[1] != 1.0f)) {
            rescale(o, factor);
        }
        pair_values<BLOCKS>(o, a, tile, !fresh);
        ptx_wgmma_wait<0>();
        ptx_wgmma_hold<128>(o);
        arrive_warp(PAIR_AT(empty) + tile.slot * 8);
        turns->tile++;
    } while (note & NOTE_MORE);
    take_weights<BLOCKS>(a, factor, v, turns->message++);
}

/* Everything that a warpgroup does. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_consume(const fmlac_pair_sm90a &all, pair_plan<BLOCKS> *m,
                                                    const pair_view &v, bool owner)
{
    const fmlac_mqa &p = all.mqa;
    pair_turns turns = {0, 0, 0, 0, false, false, true};
    softmax_rows rows = {p.scale * LOG2_E, {0}, {0}, {0}};
    float o[128], factor[2];
    uint32_t a[16] = {0};
    fetch_query<BLOCKS>(all, m, &turns, v.group);
#pragma unroll 1
    for (uint32_t i = 0;; i++) {
        const piece &c = m->pieces[i % PIECES];
        if (!c.there) {
            return;
        }
        if (owner) {
            pair_own<BLOCKS>(all, o, a, rows, v, m, &turns);
            int row = pair_row() % 64;
            __syncwarp();
            factor[0] = m->last[(i + 1) & 1][row];
            factor[1] = m->last[(i + 1) & 1][row + 8];
        } else {
            pair_help<BLOCKS>(all, o, a, v, m, &turns, factor);
        }
        store_output(p, c, pair_row(), o, factor, ptx_cluster_rank() * PAIR_DIMS, NO_STAGE);
        __syncwarp();
        arrive_warp(ptx_shared_address(&m->piece_free[i % PIECES]));
    }
}

/* ---- the block --------------------------------------------------------------------------------------------------- */

template <int BLOCKS>
static __device__ __forceinline__ void pair_barriers(const fmlac_mqa &p, pair_plan<BLOCKS> *m, uint32_t rank)
{
    typedef raw_ring<BLOCKS> ring;
    uint32_t copies = rope_chunks<BLOCKS>(p, rank) > 0 ? 32 : 0;
    for (int i = 0; i < STAGES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->full[i]), TILE_UNITS * WARP_ARRIVALS + copies);
        ptx_mbarrier_init(ptx_shared_address(&m->empty[i]), MMA_WARPS * WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->rope_empty[i]), MMA_WARPS * WARP_ARRIVALS);
    }
    for (int i = 0; i < ring::GROUPS; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->raw_full[i]), 32 + WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->raw_empty[i]), GROUP_UNITS * WARP_ARRIVALS);
    }
    for (int i = 0; i < 2; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->places_full[i]), WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->places_empty[i]), (GATHER_WARPS + 1) * WARP_ARRIVALS);
    }
    for (int i = 0; i < PIECES; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->piece_full[i]), WARP_ARRIVALS);
        ptx_mbarrier_init(ptx_shared_address(&m->piece_free[i]), (MMA_WARPS + LOAD_WARPS) * WARP_ARRIVALS);
    }
    for (int i = 0; i < 2; i++) {
        ptx_mbarrier_init(ptx_shared_address(&m->q_full[i]), 1);
    }
    ptx_mbarrier_init(ptx_shared_address(&m->scores_full), 1);
    ptx_mbarrier_init(ptx_shared_address(&m->weights_full), 1);
    ptx_mbarrier_init(ptx_shared_address(&m->scores_empty), 4 * WARP_ARRIVALS);
    ptx_mbarrier_init(ptx_shared_address(&m->weights_empty), 4 * WARP_ARRIVALS);
    ptx_mbarrier_arrive_expect(ptx_shared_address(&m->scores_full), SCORE_BYTES);
    ptx_mbarrier_arrive_expect(ptx_shared_address(&m->weights_full), WEIGHT_BYTES);
    begin_named_barriers();
    ptx_mbarrier_init_fence();
}

/* What need not wait for the scout; a barrier of the cluster follows. */
template <int BLOCKS>
static __device__ __forceinline__ void pair_prologue(const fmlac_pair_sm90a &all, pair_plan<BLOCKS> *m, uint32_t rank)
{
    const fmlac_mqa &p = all.mqa;
    if (threadIdx.x == MMA_WARPS * 32) {
        pair_barriers<BLOCKS>(p, m, rank);
        m->walk.guess = -1;
    }
    if (threadIdx.x / 32 == MMA_WARPS + 1) {
        fmlac_work w = {};
        int32_t begin;
        if (walk_guess(p, (int32_t)(blockIdx.x / 2), &w, &begin)) {
            prefetch_list(p, w, begin, (int)threadIdx.x % 32);
        }
    }
    if (threadIdx.x == 0) {
        ptx_tma_prefetch_map(&all.q);
        if (BLOCKS == 9) {
            ptx_tma_prefetch_map(&all.q_rope);
        }
    }
}

/* BLOCKS: 64-dim blocks of a token, 8 or 9. */
template <int BLOCKS> static __device__ __forceinline__ void pair(const fmlac_pair_sm90a &all)
{
    const fmlac_mqa &p = all.mqa;
    pair_plan<BLOCKS> *m = (pair_plan<BLOCKS> *)ptx_shared();
    uint32_t rank = ptx_cluster_rank();
    pair_prologue<BLOCKS>(all, m, rank);
    __syncthreads();
    ptx_cluster_sync_barriers();
    ptx_grid_wait();
    ptx_grid_launch_dependents();
    int group = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 128), 0);
    int warp = __shfl_sync(0xFFFFFFFFu, (int)(threadIdx.x / 32), 0) - MMA_WARPS;
    if (group < 2) {
        ptx_registers_take<208>();
        pair_view v = {threadIdx.x % 128 * 16, group};
        pair_consume<BLOCKS>(all, m, v, (uint32_t)group == rank);
    } else if (BLOCKS == 9 && group == 2) {
        ptx_registers_give<56>();
        expand<BLOCKS>(p, m, warp, rank);
    } else {
        ptx_registers_give<BLOCKS == 9 ? 40 : 48>();
        bool rope = rope_chunks<BLOCKS>(p, rank) > 0;
        warp -= BLOCKS == 9 ? EXPAND_WARPS : 0;
        if (warp < GATHER_WARPS || (warp == GATHER_WARPS && !rope)) {
            gather<BLOCKS>(p, m, warp, GATHER_WARPS + !rope, rank);
        } else if (warp == GATHER_WARPS) {
            gather_rope<BLOCKS>(p, m, rank);
        } else if (BLOCKS == 8 && warp < LOAD_WARPS) {
            expand<BLOCKS>(p, m, warp - GATHER_WARPS - 1, rank);
        } else {
            find_tokens(p, m);
        }
    }
    ptx_cluster_sync(); /* the peer may still write here */
}

#endif
