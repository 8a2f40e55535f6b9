/* SPDX-License-Identifier: MIT */
/*
 * mqa.cuh: rows of queries attend lists of tokens, on mma.sync m16n8k16 (sm_80 and up). The one core behind dense decode,
 * sparse decode, sparse prefill and the fused operations; what differs is data: the list, the format, the query prologue
 * and the output epilogue.
 *
 * Block: ROWS rows (query token, head) that share a list and a KV head; TOKENS tokens a step; WARPS warps, no roles.
 *
 *   scores   warp (rg, tg): 16 rows x TOKENS / TG tokens, Q and K by ldmatrix from shared memory
 *   softmax  base 2; the row maximum is exchanged through `red`, weights go to `weights` (16 bit), the row's shrink
 *            factor to `alpha`; the row sum stays in registers until the end
 *   values   warp (rv, cg): 16 * MV rows x 512 / CG columns of the output, V = the first columns of the K tile (.trans)
 *
 * Shared memory (layout in mqa_shared): Q [ROWS][row_bytes] | token tiles [stages][TOKENS][row_bytes] | raw bytes of one tile
 * (quantised formats) | weights [ROWS][TOKENS] | red [TG][ROWS] | alpha [ROWS] | addresses of tokens [ring][TOKENS] |
 * masks [ring] | the piece's work. Rows of Q and of tiles are swizzled: 16-byte chunk c of row r lies at c ^ (r & 7) within its 128 bytes.
 *
 * One step i (ring = stages, or 2 for quantised formats):
 *   wait for tile i; BARRIER (tile i is there, everybody is done with step i - 1)
 *   quantised: expand the raw bytes into the tile; BARRIER
 *   start copying tile i + ring - 1
 *   scores; BARRIER (maxima); weights; rows that see part of the tile: clean V; BARRIER (weights); values
 *   warp 0: addresses of tile i + ring go where tile i's were; fetch the list entries after them
 *
 * A token that is not attended has address 0: its tile row is zeros and its score -infinity. A row that sees fewer tokens
 * than its neighbours has weight 0 for the others; so that 0 * NaN cannot happen, values that are not finite are set to 0
 * in such tokens after the scores are taken: a row that does attend them has a NaN score, hence a NaN sum.
 */
#ifndef FLASHMLA_CUDA_SM80_MQA_CUH
#define FLASHMLA_CUDA_SM80_MQA_CUH

#include "common/work.cuh"
#include "ptx/grid.cuh"
#include "tile.cuh"

#define OUT_COLUMNS 512 /* of an output tile; wider d_v goes another way */
#define STAGED_PITCH (OUT_COLUMNS + 8) /* floats */

/* Shapes that follow from the four template parameters. */
#define MQA_SHAPE                                                                                                      \
    constexpr int THREADS = WARPS * 32;                                                                                \
    constexpr int TG = WARPS / (ROWS / 16);          /* token groups of scores */                                      \
    constexpr int NT = TOKENS / TG / 8;              /* 8-token tiles of a warp */                                     \
    constexpr int MV = ROWS >= 32 ? 2 : 1;           /* 16-row tiles of a warp in values */                            \
    constexpr int CG = WARPS / (ROWS / (16 * MV));   /* column groups of values */                                     \
    constexpr int NV = OUT_COLUMNS / CG / 8;         /* 8-column tiles of a warp in values */                          \
    constexpr int WEIGHT_PITCH = TOKENS * 2 + 16;    /* bytes */                                                       \
    (void)THREADS, (void)TG, (void)NT, (void)MV, (void)CG, (void)NV, (void)WEIGHT_PITCH

/* Marks an address of the extra pool. */
#define EXTRA_BIT (1ull << 63)

typedef struct mqa_shared {
    uint32_t q, tiles, raw, weights; /* 32-bit shared addresses */
    float *red, *alpha;
    unsigned long long *address; /* data rows */
    unsigned long long *scale;   /* scale rows, quantised formats */
    uint32_t *mask;              /* two words per tile */
    fmlac_work *work;
    uint32_t tile_bytes;
    int ring;
} mqa_shared;

template <int ROWS, int TOKENS, int WARPS> static __device__ __forceinline__ mqa_shared mqa_shared_plan(const fmlac_mqa &p)
{
    MQA_SHAPE;
    mqa_shared s;
    unsigned char *base = ptx_shared();
    uint32_t at = 0;
    s.tile_bytes = TOKENS * p.row_bytes;
    s.ring = p.quantised ? 2 : p.stages;
    uint32_t origin = ptx_shared_address(base);
    s.q = origin;
    at += ROWS * p.row_bytes;
    s.tiles = origin + at;
    at += (p.quantised ? 1 : p.stages) * s.tile_bytes;
    s.raw = origin + at;
    at += p.quantised ? TOKENS * p.raw_pitch : 0;
    s.weights = origin + at;
    at += ROWS * WEIGHT_PITCH;
    s.red = (float *)(base + at);
    at += TG * ROWS * 4;
    s.alpha = (float *)(base + at);
    at += ROWS * 4;
    s.address = (unsigned long long *)(base + at);
    at += s.ring * TOKENS * 8;
    s.scale = (unsigned long long *)(base + at);
    at += p.quantised ? s.ring * TOKENS * 8 : 0;
    s.mask = (uint32_t *)(base + at);
    at += s.ring * 8;
    s.work = (fmlac_work *)(base + at);
    return s;
}

/* ---- token list: entries, then addresses ----------------------------------------------------------------------- */

/* Warp 0's way through a list. Index lists: entries that name no token are left out, so tiles hold the attended tokens one
 * after another and a row's bits do not depend on what lies between them; main list first, then the extra one. Paged lists
 * keep their places, since what a row sees is counted in places. */
template <int TOKENS> struct list_scan {
    static constexpr int EACH = TOKENS > 32 ? TOKENS / 32 : 1; /* entries of a lane that are fetched ahead */
    int64_t at, end;                                            /* next position, and where the piece ends */
    int32_t entry[EACH];                                        /* PAGED: pages, INDEXED: slots */
};

/* What the list says at a position; -1: nothing is attended there. */
static __device__ __forceinline__ int32_t fetch_entry(const fmlac_mqa &p, const fmlac_work &w, int64_t position)
{
    if (p.main.kind == FMLAC_LIST_PAGED) {
        int64_t at = quotient(position, p.main.pool.page_size);
        return p.main.block_table ? p.main.block_table[w.request * p.main.table_stride + at]
                                  : (int32_t)(w.request * p.main.max_pages + at);
    }
    int64_t at = position - w.main_count;
    return at < 0 ? index_row(&p, &p.main, w.first, w.kv_head)[position] : index_row(&p, &p.extra, w.first, w.kv_head)[at];
}

template <int TOKENS>
static __device__ __forceinline__ void fetch_entries(const fmlac_mqa &p, const fmlac_work &w, list_scan<TOKENS> &scan)
{
#pragma unroll
    for (int i = 0; i < scan.EACH; i++) {
        int64_t position = scan.at + i * 32 + threadIdx.x % 32;
        scan.entry[i] = position < scan.end ? fetch_entry(p, w, position) : -1;
    }
}

/* Address of the token that an entry names, 0 if none. */
static __device__ __forceinline__ unsigned long long entry_address(const fmlac_mqa &p, const fmlac_work &w, int64_t position,
                                                                   int32_t entry, unsigned long long *scale)
{
    bool paged = p.main.kind == FMLAC_LIST_PAGED;
    bool extra = !paged && position >= w.main_count;
    const fmlac_pool *pool = extra ? &p.extra.pool : &p.main.pool;
    if (entry < 0) {
        return 0;
    }
    int64_t place = paged ? position : entry;
    int64_t page = quotient(place, pool->page_size);
    int64_t at = place - page * pool->page_size;
    page = paged ? entry : page;
    if (page >= pool->num_pages) {
        return 0;
    }
    uint8_t *begin = pool->data + page * pool->page_stride;
    if (p.quantised) {
        *scale = pool->layout == FMLAC_LAYOUT_PAGE
                     ? (unsigned long long)(begin + pool->page_size * pool->token_stride + at * pool->scale_row_bytes)
                     : 0;
    }
    return (unsigned long long)(begin + at * pool->token_stride) | (extra ? EXTRA_BIT : 0);
}

static __device__ __forceinline__ void put_address(const fmlac_mqa &p, const mqa_shared &s, int at,
                                                   unsigned long long address, unsigned long long scale)
{
    s.address[at] = address;
    if (p.quantised) {
        s.scale[at] = scale;
    }
}

/* Warp 0: addresses and mask of the next tile, from the entries fetched before; then entries are fetched anew. */
template <int TOKENS>
static __device__ __forceinline__ void next_tile(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s, int slot,
                                                 list_scan<TOKENS> &scan)
{
    int lane = threadIdx.x % 32;
    bool compact = p.main.kind != FMLAC_LIST_PAGED;
    uint32_t words[2] = {0, 0};
    int filled = 0;
    while (scan.at < scan.end && filled < TOKENS) {
        int used = 0; /* entries that were looked at */
#pragma unroll
        for (int i = 0; i < scan.EACH; i++) {
            unsigned long long scale = 0;
            unsigned long long address = entry_address(p, w, scan.at + i * 32 + lane, scan.entry[i], &scale);
            bool there = address != 0 && (compact || i * 32 + lane < TOKENS);
            uint32_t mask = __ballot_sync(0xFFFFFFFFu, there);
            int place = compact ? filled + __popc(mask & ((1u << lane) - 1)) : i * 32 + lane;
            if (place < TOKENS && (there || !compact)) {
                put_address(p, s, slot * TOKENS + place, address, scale);
            }
            if (!compact) {
                words[i] = mask;
                continue;
            }
            uint32_t last = __ballot_sync(0xFFFFFFFFu, there && place == TOKENS - 1);
            used = filled >= TOKENS ? used : last ? i * 32 + __popc(last - 1) + 1 : i * 32 + 32;
            filled += __popc(mask);
        }
        if (!compact) {
            scan.at += TOKENS;
            break;
        }
        scan.at += used;
        if (filled < TOKENS && scan.at < scan.end) {
            fetch_entries(p, w, scan);
        }
    }
    filled = filled < TOKENS ? filled : TOKENS;
    for (int i = filled + lane; compact && i < TOKENS; i += 32) {
        put_address(p, s, slot * TOKENS + i, 0, 0);
    }
    if (compact) {
        words[0] = filled < 32 ? (1u << filled) - 1 : 0xFFFFFFFFu;
        words[1] = filled < 32 ? 0 : filled < 64 ? (1u << (filled - 32)) - 1 : 0xFFFFFFFFu;
    }
    if (lane < 2) {
        s.mask[slot * 2 + lane] = lane == 0 ? words[0] : words[1];
    }
    fetch_entries(p, w, scan);
}

/* ---- copying tokens into shared memory ------------------------------------------------------------------------- */

template <int TOKENS, int WARPS>
static __device__ __forceinline__ void copy_plain(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s, int slot,
                                                  uint32_t tile)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int chunks = p.row_bytes / 16;
    for (int t = warp; t < TOKENS; t += WARPS) {
        unsigned long long address = s.address[slot * TOKENS + t];
        const fmlac_pool *pool = address & EXTRA_BIT ? &p.extra.pool : &p.main.pool;
        const uint8_t *row = (const uint8_t *)(address & ~EXTRA_BIT) + w.kv_head * pool->head_stride;
        for (int c = lane; c < chunks; c += 32) {
            uint32_t to = tile + swizzled(t, c, p.row_bytes);
            if (pool->aligned) {
                bool there = address != 0 && c * 8 < p.d_qk;
                ptx_copy_async_16(to, there ? row + c * 16 : pool->data, there ? 16 : 0);
            } else {
                copy_plain_hard(to, row + c * 16, address != 0 ? p.d_qk - c * 8 : 0);
            }
        }
    }
}

/* The raw bytes of a tile: data row, and the scale row where it lies elsewhere. */
template <int TOKENS, int WARPS>
static __device__ __forceinline__ void copy_raw(const fmlac_mqa &p, const mqa_shared &s, int slot)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int t = warp; t < TOKENS; t += WARPS) {
        unsigned long long address = s.address[slot * TOKENS + t];
        if (address == 0) {
            continue;
        }
        const fmlac_pool *pool = address & EXTRA_BIT ? &p.extra.pool : &p.main.pool;
        const uint8_t *row = (const uint8_t *)(address & ~EXTRA_BIT);
        const uint8_t *scales = (const uint8_t *)s.scale[slot * TOKENS + t];
        uint32_t to = s.raw + t * p.raw_pitch;
        uint32_t to_scales = to + pool->raw_scales - pool->scale_offset;
        if (pool->aligned) {
            for (int c = lane; c < pool->data_row_bytes / 16; c += 32) {
                ptx_copy_async_16(to + c * 16, row + c * 16, 16);
            }
            for (int c = lane; scales && c < pool->scale_row_bytes / 8; c += 32) {
                ptx_copy_async_8(to_scales + c * 8, scales + c * 8, 8);
            }
        } else {
            for (int c = lane; c < pool->data_row_bytes; c += 32) {
                ptx_store_shared_u8(to + c, row[c]);
            }
            for (int c = lane; scales && c < pool->scale_row_bytes; c += 32) {
                ptx_store_shared_u8(to_scales + c, scales[c]);
            }
        }
    }
}

/* Raw bytes to a bf16 tile. */
template <int TOKENS, int WARPS>
static __device__ __forceinline__ void expand_raw(const fmlac_mqa &p, const mqa_shared &s, int slot)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int chunks = p.row_bytes / 16;
    for (int t = warp; t < TOKENS; t += WARPS) {
        unsigned long long address = s.address[slot * TOKENS + t];
        const fmlac_pool *pool = address & EXTRA_BIT ? &p.extra.pool : &p.main.pool;
        uint32_t raw = s.raw + t * p.raw_pitch;
        for (int c = lane; c < chunks; c += 32) {
            uint32_t to = s.tiles + swizzled(t, c, p.row_bytes);
            int j = c * 8;
            if (address != 0 && j < pool->quant_dims) {
                expand_8(pool, raw, j, to);
                continue;
            }
            uint32_t x[4] = {0, 0, 0, 0};
            if (address != 0 && j < pool->d_qk) {
                uint32_t from = raw + pool->rope_offset + 2 * (j - pool->quant_dims);
                ptx_load_shared_64(x, from);
                ptx_load_shared_64(x + 2, from + 8);
            }
            ptx_store_shared_128(to, x);
        }
    }
}

/* ---- query prologue -------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ void row_token_head(const fmlac_work &w, int row, int64_t *token, int32_t *head)
{
    int64_t at = w.row0 + row;
    int64_t j = quotient(at, w.group);
    *token = w.first + j;
    *head = w.kv_head * w.group + (int32_t)(at - j * w.group);
}

template <int ROWS, int WARPS>
static __device__ __forceinline__ void load_q(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int chunks = p.row_bytes / 16;
    for (int r = warp; r < ROWS; r += WARPS) {
        int64_t token;
        int32_t head;
        row_token_head(w, r < w.rows ? r : 0, &token, &head);
        const uint8_t *row = (const uint8_t *)p.q.data + 2 * row_offset(&p.q, &p, token, head);
        for (int c = lane; c < chunks; c += 32) {
            uint32_t to = s.q + swizzled(r, c, p.row_bytes);
            if (p.q.aligned) {
                bool there = r < w.rows && c * 8 < p.d_qk;
                ptx_copy_async_16(to, there ? row + c * 16 : (const uint8_t *)p.q.data, there ? 16 : 0);
            } else {
                copy_plain_hard(to, row + c * 16, r < w.rows ? p.d_qk - c * 8 : 0);
            }
        }
    }
}

/* Fused: element d of the stored query. */
static __device__ __forceinline__ float fused_q(const fmlac_mqa &p, int64_t token, int32_t head, int d)
{
    int64_t at = p.fused.q_permuted
                     ? row_offset(&p.q, &p, token, 0) + (int64_t)(d / 16) * p.h_q * 16 + head * 16 + d % 16
                     : row_offset(&p.q, &p, token, head) + d;
    return float_of_bf16(((const uint16_t *)p.q.data)[at]);
}

/* Fused: RoPE on the last rope_dim dims, rounded to bf16; alpha[row] receives the norm factor. */
template <int ROWS, int WARPS>
static __device__ __forceinline__ void load_q_fused(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const fmlac_fused &f = p.fused;
    int plain = p.d_qk - f.rope_dim, half = f.rope_dim / 2;
    for (int r = warp; r < ROWS; r += WARPS) {
        float squares = 0;
        int64_t token;
        int32_t head;
        row_token_head(w, r < w.rows ? r : 0, &token, &head);
        const float *angle = f.cos_sin + f.positions[token * f.position_stride] * f.cos_sin_stride;
        for (int d = lane; d < p.row_bytes / 2; d += 32) {
            float x = r < w.rows && d < p.d_qk ? fused_q(p, token, head, d) : 0.0f;
            squares += x * x;
            if (d >= plain && d < p.d_qk) {
                int at = d - plain;
                int pair = f.rope_neox ? at % half : at / 2;
                bool second = f.rope_neox ? at >= half : at & 1;
                int other = f.rope_neox ? (second ? d - half : d + half) : d ^ 1;
                float y = fused_q(p, token, head, other);
                float c = angle[pair], sine = angle[half + pair];
                x = second ? __fmaf_rn(y, sine, __fmul_rn(x, c)) : __fmaf_rn(x, c, -__fmul_rn(y, sine));
            }
            ptx_store_shared_u16(s.q + swizzled(r, d / 8, p.row_bytes) + (d % 8) * 2, (uint16_t)bf16_of_float(x));
        }
        for (int step = 16; step > 0; step /= 2) {
            squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
        }
        if (lane == 0) {
            s.alpha[r] = f.q_norm ? 1.0f / sqrtf(squares / p.d_qk + f.eps) : 1.0f;
        }
    }
}

/* ---- scores and softmax ---------------------------------------------------------------------------------------- */

/* What a thread knows of its two rows (g and g + 8 of its 16). */
typedef struct softmax_rows {
    float scale[2];   /* logits in base 2 = score * scale */
    int32_t seen[2];  /* tokens that the row sees */
    float max[2];     /* so far, -infinity before the first token */
    float sum[2];     /* of this thread's columns */
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

/* ---- output epilogue ------------------------------------------------------------------------------------------- */

/* lse, maximum and the factor 1 / sum of one row; `partial`: of a piece. Returns the factor. */
static __device__ __forceinline__ float finish_row(const fmlac_mqa &p, const fmlac_work &w, int row, float max, float sum,
                                                   float *partial)
{
    bool lonely = sum == 0.0f;
    float base2 = max + log2f(sum);
    max = is_nan(sum) ? sum : max;
    if (partial) {
        partial[0] = lonely ? -FMLAC_INFINITY : base2;
        partial[1] = max;
        return lonely ? 0.0f : 1.0f / sum;
    }
    int64_t token;
    int32_t head;
    if (row >= w.rows) {
        return 0.0f;
    }
    row_token_head(w, row, &token, &head);
    if (p.lse.data) {
        float lse = lonely ? p.empty_lse : base2 * LN_2 * p.lse_factor;
        ((float *)p.lse.data)[row_offset(&p.lse, &p, token, head)] = lse;
    }
    if (p.max_logits.data) {
        ((float *)p.max_logits.data)[row_offset(&p.max_logits, &p, token, head)] = max * LN_2 * p.lse_factor;
    }
    if (lonely) {
        return 0.0f;
    }
    float total = p.sink ? sum + exp2f(p.sink[head] * LOG2_E - max) : sum;
    return 1.0f / total;
}

/* Four elements of an output row from `column` on. */
static __device__ __forceinline__ void store_four(const fmlac_rows &out, int64_t at, int column, int end, const float4 &x)
{
    if (out.aligned && column + 4 <= end) {
        if (out.dtype == FMLAC_F32) {
            *(float4 *)((float *)out.data + at + column) = x;
        } else {
            bool f16 = out.dtype == FMLAC_F16;
            uint2 pairs = {f16 ? ptx_pack_f16(x.x, x.y) : ptx_pack_bf16(x.x, x.y),
                           f16 ? ptx_pack_f16(x.z, x.w) : ptx_pack_bf16(x.z, x.w)};
            *(uint2 *)((uint16_t *)out.data + at + column) = pairs;
        }
        return;
    }
    for (int i = 0; i < 4 && column + i < end; i++) {
        store_element(out.data, out.dtype, at + column + i, i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w);
    }
}

/* Fused: conjugate RoPE of the staged row's column; its partner is read where it lies. */
static __device__ __forceinline__ float unrotated(const fmlac_fused &f, const float *angle, const float *row, int column)
{
    int at = column - (OUT_COLUMNS - f.rope_dim), half = f.rope_dim / 2;
    if (at < 0) {
        return row[column];
    }
    int pair = f.rope_neox ? at % half : at / 2;
    bool second = f.rope_neox ? at >= half : at & 1;
    int other = f.rope_neox ? (second ? column - half : column + half) : column ^ 1;
    float c = angle[pair], s = angle[half + pair];
    return second ? row[column] * c - row[other] * s : row[column] * c + row[other] * s;
}

/* Fused: four columns as e4m3; eight neighbouring lanes share a power-of-two scale. */
static __device__ __forceinline__ void cast_four(const fmlac_mqa &p, int64_t token, int32_t head, int column,
                                                 const float x[4])
{
    const fmlac_fused &f = p.fused;
    int64_t heads = f.group_heads, group = head / f.group_heads, g = head % f.group_heads;
    float top = 1e-4f;
    for (int i = 0; i < 4; i++) {
        top = fmaxf(top, fabsf(x[i]));
    }
    for (int step = 1; step < 8; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, step));
    }
    bool infinite = is_infinite(top);
    int e = infinite ? 128 : ceil_log2(__fdiv_rn(top, 448.0f));
    float inverse = power_of_two(infinite ? 0 : -e);
    uint32_t codes = 0;
#pragma unroll 1
    for (int i = 3; i >= 0; i--) {
        float y = i == 0 ? x[0] : i == 1 ? x[1] : i == 2 ? x[2] : x[3];
        codes = codes << 8 | (infinite || is_nan(y) ? 0x7F : e4m3_of_float(y * inverse, true));
    }
    int64_t chunk = column / 32 * heads + g;
    uint8_t *to = f.codes + (token * f.groups + group) * heads * OUT_COLUMNS + chunk * 32 + column % 32;
    for (int i = 0; i < 4; i++) {
        to[i] = (uint8_t)(codes >> (8 * i));
    }
    if (column % 32 == 0) {
        int64_t words = heads * OUT_COLUMNS / 128;
        f.scale[((group * words + chunk / 4) * f.scale_rows + token) * 4 + chunk % 4] = (uint8_t)(e + 127);
    }
}

/* A warp takes a staged row where it belongs. */
static __device__ __forceinline__ void store_row(const fmlac_mqa &p, const fmlac_work &w, int row, const float *staged,
                                                 float *partial)
{
    int lane = threadIdx.x % 32;
    int64_t token;
    int32_t head;
    row_token_head(w, row, &token, &head);
    int64_t at = p.fused.enabled ? 0 : row_offset(&p.out, &p, token, head);
    const float *angle = nullptr;
    if (p.fused.enabled && w.tiles > 0) {
        angle = p.fused.cos_sin + p.fused.positions[token * p.fused.position_stride] * p.fused.cos_sin_stride;
    }
#pragma unroll 1
    for (int column = lane * 4; column < OUT_COLUMNS; column += 128) {
        float4 x = *(const float4 *)(staged + column);
        if (partial) {
            *(float4 *)(partial + (int64_t)row * OUT_COLUMNS + column) = x;
        } else if (p.fused.enabled) {
            float y[4] = {x.x, x.y, x.z, x.w};
            for (int i = 0; angle && i < 4; i++) {
                y[i] = unrotated(p.fused, angle, staged, column + i);
            }
            cast_four(p, token, head, column, y);
        } else {
            store_four(p.out, at, column, p.d_v, x);
        }
    }
}

/* ---- one piece of work ----------------------------------------------------------------------------------------- */

template <int TOKENS, int WARPS>
static __device__ __forceinline__ void start_copy(const fmlac_mqa &p, const fmlac_work &w, const mqa_shared &s, int slot,
                                                  bool inside)
{
    /* Tiles of a paged list are copied even if no page of theirs is valid: their rows must become zeros. */
    bool there = inside && (p.main.kind == FMLAC_LIST_PAGED || s.mask[slot * 2] != 0);
    if (there && p.quantised) {
        copy_raw<TOKENS, WARPS>(p, s, slot);
    } else if (there) {
        copy_plain<TOKENS, WARPS>(p, w, s, slot, s.tiles + slot * s.tile_bytes);
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
            ptx_store_shared_u32(s.weights + row * WEIGHT_PITCH + (token0 + n * 8 + 2 * q) * 2,
                                 pack<F16>(low, high));
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
    int row0 = warp / TG * 16, tg = warp % TG;                 /* scores */
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
            start_copy<TOKENS, WARPS>(p, w, s, i, begin + i < end);
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
            start_copy<TOKENS, WARPS>(p, w, s, slot == 0 ? s.ring - 1 : slot - 1, tile + s.ring - 1 < end);

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
