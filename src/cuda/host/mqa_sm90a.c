/* SPDX-License-Identifier: MIT */
/*
 * mqa_sm90a.c: when the Hopper attention kernels (sm90a/) take a call, and what they are given: docs/hopper.md. What
 * they cannot read goes to the portable kernels (mqa.c).
 */
#include "cuda_host.h"

#if FMLAC_HAVE_HOPPER

#include <cuda.h>
#include <stddef.h>
#include <string.h>

#include "../sm90a/params.h"

#define SHORT_MAX     (INT32_MAX - 4096) /* the kernels count positions, slots and rows in 32 bits */
#define SHARED_MAX    232448
#define FEW_LEAST     1024                /* tokens of a multiprocessor */
#define TURNS_LEAST   12288               /* for two blocks a list: tokens of one, and of a multiprocessor */
#define L2_POOL_BYTES ((int64_t)40 << 20) /* of a pool that stays in L2 beside the rest of a call */

extern void fmlak_mqa_pages_bf16_512_sm90a(void);
extern void fmlak_mqa_pages_bf16_576_sm90a(void);
extern void fmlak_mqa_pages_f16_512_sm90a(void);
extern void fmlak_mqa_pages_f16_576_sm90a(void);
extern void fmlak_mqa_turns_bf16_512_sm90a(void);
extern void fmlak_mqa_turns_bf16_576_sm90a(void);
extern void fmlak_mqa_turns_f16_512_sm90a(void);
extern void fmlak_mqa_turns_f16_576_sm90a(void);
extern void fmlak_mqa_rows_bf16_512_sm90a(void);
extern void fmlak_mqa_rows_bf16_576_sm90a(void);
extern void fmlak_mqa_rows_f16_512_sm90a(void);
extern void fmlak_mqa_rows_f16_576_sm90a(void);
extern void fmlak_mqa_rows_turns_bf16_512_sm90a(void);
extern void fmlak_mqa_rows_turns_bf16_576_sm90a(void);
extern void fmlak_mqa_rows_turns_f16_512_sm90a(void);
extern void fmlak_mqa_rows_turns_f16_576_sm90a(void);
extern void fmlak_mqa_codes_bf16_512_sm90a(void);
extern void fmlak_mqa_codes_bf16_576_sm90a(void);
extern void fmlak_mqa_few_bf16_512_sm90a(void);
extern void fmlak_mqa_few_bf16_576_sm90a(void);
extern void fmlak_mqa_codes_together_bf16_512_sm90a(void);
extern void fmlak_mqa_codes_together_bf16_576_sm90a(void);
extern void fmlak_mqa_pair_bf16_512_sm90a(void);
extern void fmlak_mqa_pair_bf16_576_sm90a(void);

#define HOPPER(name, dtype, warps)                                                                                     \
    {                                                                                                                  \
        name, #name, dtype, FMLAC_HOPPER_ROWS, FMLAC_HOPPER_TOKENS, warps, 227, 0                                      \
    }
#define CODES(name)                                                                                                    \
    {                                                                                                                  \
        name, #name, FMLA_BF16, FMLAC_HOPPER_ROWS, FMLAC_CODES_TOKENS, 16, 227, 0                                      \
    }

/* Where tokens come from. */
enum { FROM_PAGES, IN_TURNS, FROM_ROWS, ROWS_IN_TURNS, FROM_CODES, CODES_TOGETHER, SOURCES };

/* [source][dtype: bf16, fp16][dims: 512, 576]. In turns: another order of tiles; together: clusters share a list. */
static const fmlac_kernel kernels[SOURCES][2][2] = {
    [FROM_PAGES] = {{HOPPER(fmlak_mqa_pages_bf16_512_sm90a, FMLA_BF16, 12),
                     HOPPER(fmlak_mqa_pages_bf16_576_sm90a, FMLA_BF16, 12)},
                    {HOPPER(fmlak_mqa_pages_f16_512_sm90a, FMLA_F16, 12),
                     HOPPER(fmlak_mqa_pages_f16_576_sm90a, FMLA_F16, 12)}},
    [IN_TURNS] = {{HOPPER(fmlak_mqa_turns_bf16_512_sm90a, FMLA_BF16, 12),
                   HOPPER(fmlak_mqa_turns_bf16_576_sm90a, FMLA_BF16, 12)},
                  {HOPPER(fmlak_mqa_turns_f16_512_sm90a, FMLA_F16, 12),
                   HOPPER(fmlak_mqa_turns_f16_576_sm90a, FMLA_F16, 12)}},
    [FROM_ROWS] = {{HOPPER(fmlak_mqa_rows_bf16_512_sm90a, FMLA_BF16, 12),
                    HOPPER(fmlak_mqa_rows_bf16_576_sm90a, FMLA_BF16, 12)},
                   {HOPPER(fmlak_mqa_rows_f16_512_sm90a, FMLA_F16, 12),
                    HOPPER(fmlak_mqa_rows_f16_576_sm90a, FMLA_F16, 12)}},
    [ROWS_IN_TURNS] = {{HOPPER(fmlak_mqa_rows_turns_bf16_512_sm90a, FMLA_BF16, 12),
                        HOPPER(fmlak_mqa_rows_turns_bf16_576_sm90a, FMLA_BF16, 12)},
                       {HOPPER(fmlak_mqa_rows_turns_f16_512_sm90a, FMLA_F16, 12),
                        HOPPER(fmlak_mqa_rows_turns_f16_576_sm90a, FMLA_F16, 12)}},
    [FROM_CODES] = {{CODES(fmlak_mqa_codes_bf16_512_sm90a), CODES(fmlak_mqa_codes_bf16_576_sm90a)}},
    [CODES_TOGETHER] = {{CODES(fmlak_mqa_codes_together_bf16_512_sm90a),
                         CODES(fmlak_mqa_codes_together_bf16_576_sm90a)}},
};

/* Few rows of queries of quantised tokens, [dims: 512, 576]. */
#define FEW(name)                                                                                                      \
    {                                                                                                                  \
        name, #name, FMLA_BF16, FMLAC_FEW_ROWS, FMLAC_FEW_TOKENS, 16, 227, 0                                           \
    }
static const fmlac_kernel few[2] = {FEW(fmlak_mqa_few_bf16_512_sm90a), FEW(fmlak_mqa_few_bf16_576_sm90a)};

/* Pairs of blocks, [dims: 512, 576]. */
#define PAIR(name)                                                                                                     \
    {                                                                                                                  \
        name, #name, FMLA_BF16, FMLAC_PAIR_ROWS, FMLAC_HOPPER_TOKENS, 16, 227, 2                                       \
    }
static const fmlac_kernel pairs[2] = {PAIR(fmlak_mqa_pair_bf16_512_sm90a), PAIR(fmlak_mqa_pair_bf16_576_sm90a)};

typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

_Static_assert(sizeof(fmlac_tensor_map) == sizeof(CUtensorMap), "a tensor map is 128 bytes");

void fmlac_hopper_open(fmlac_state *state, int32_t wanted)
{
    enum cudaDriverEntryPointQueryResult found;
    state->hopper = state->capability == 90 && wanted != 1 && state->shared_block >= SHARED_MAX;
    state->pairs = wanted != 3;
    state->turns = wanted == 5 ? 1 : wanted == 4 ? -1 : 0;
    state->few = wanted == 2;
    state->encode_tensor_map = NULL;
    if (state->hopper && (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &state->encode_tensor_map, 12000,
                                                           cudaEnableDefault, &found) != cudaSuccess ||
                          found != cudaDriverEntryPointSuccess)) {
        state->encode_tensor_map = NULL;
        (void)cudaGetLastError();
    }
}

void fmlac_hopper_clusters(fmlac_state *state)
{
    const void *kernel = (const void *)kernels[FROM_PAGES][0][1].function;
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_MAX) != cudaSuccess ||
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) != cudaSuccess) {
        (void)cudaGetLastError();
        return;
    }
    for (int i = 0; i < FMLAC_CLUSTERS; i++) {
        cudaLaunchAttribute attribute = {.id = cudaLaunchAttributeClusterDimension,
                                         .val.clusterDim = {.x = 2u << i, .y = 1, .z = 1}};
        cudaLaunchConfig_t config = {.gridDim = {2u << i, 1, 1},
                                     .blockDim = {384, 1, 1},
                                     .dynamicSmemBytes = SHARED_MAX,
                                     .attrs = &attribute,
                                     .numAttrs = 1};
        if (cudaOccupancyMaxActiveClusters(&state->clusters[i], kernel, &config) != cudaSuccess) {
            (void)cudaGetLastError();
            state->clusters[i] = 0;
        }
    }
}

static bool is_plain(const fmlac_list *list)
{
    return list->pool.layout == FMLAC_LAYOUT_PLAIN;
}

/* 16-bit numbers of the query's type, at any address. */
static bool reads_plain(const fmlac_mqa *p, const fmlac_list *list)
{
    const fmlac_pool *pool = &list->pool;
    return is_plain(list) && pool->element == p->q.dtype;
}

/* Whether the expanding producer knows a format: segments of 16 dims with one scale, bf16 dims in whole blocks of
 * 64. */
static bool reads_codes(const fmlac_mqa *p, const fmlac_list *list)
{
    const fmlac_pool *pool = &list->pool;
    const fmlac_pool *first = &p->main.pool;
    return !is_plain(list) && p->q.dtype == FMLAC_BF16 && (p->d_qk == 512 || p->d_qk == 576) && pool->d_qk == p->d_qk &&
           (pool->element == FMLAC_F8_E4M3 || pool->element == FMLAC_F4_E2M1) && pool->group_shift >= 4 &&
           pool->quant_dims + pool->rope_dims == p->d_qk && (pool->rope_dims == 0 || pool->rope_dims == 64) &&
           pool->quant_dims == first->quant_dims && pool->rope_offset % 16 == 0 &&
           (pool->scale != FMLAC_F32 || pool->scale_offset % 4 == 0) &&
           pool->page_size * (pool->token_stride + pool->scale_row_bytes) <= SHORT_MAX;
}

/* Whether there is room for a format's rows as they are stored. */
static bool raw_fits(const fmlac_list *list)
{
    return FMLAC_RAW_PITCH(list->pool.data_row_bytes) <= FMLAC_RAW_PITCH_MAX &&
           list->pool.scale_row_bytes <= (list->pool.d_qk > 512 ? 0 : FMLAC_RAW_SCALES);
}

/* Whether a pair can fetch a format's rows: scales of a half in 16 bytes, and never across a border of the copies.
 * Where the rows lie makes no difference: a row's bits must not depend on it. */
static bool pair_reads(const fmlac_list *list)
{
    const fmlac_pool *pool = &list->pool;
    int32_t unit = pool->scale_bytes <= 8 ? 8 : 16;
    return list->kind == FMLAC_LIST_INDEXED && pool->scale_bytes > 0 &&
           (pool->scale_bytes <= 16 || pool->scale_bytes == 32) && pool->scale_offset % unit == 0 &&
           (pool->layout != FMLAC_LAYOUT_PAGE || pool->scale_row_bytes % unit == 0);
}

/* What a tensor map can have. */
static bool strides_fit(const uint64_t strides[3])
{
    for (int i = 0; i < 3; i++) {
        if (strides[i] == 0 || strides[i] % 16 != 0 || strides[i] >= (uint64_t)1 << 40) {
            return false;
        }
    }
    return true;
}

/* Of heads, query tokens and requests, in bytes. */
static void row_strides(const fmlac_mqa *p, const fmlac_rows *rows, uint64_t strides[3])
{
    const int64_t *stride = rows->stride;
    strides[0] = 2 * (uint64_t)stride[2];
    strides[1] = 2 * (uint64_t)stride[p->s_q > 1 ? 1 : 2];
    strides[2] = 2 * (uint64_t)stride[p->num_tokens > p->s_q ? 0 : 2];
}

/* More than 64 heads of quantised tokens: two blocks share the expanding. */
static const fmlac_kernel *choose_pair(const fmlac_state *state, const fmlac_mqa *p, bool extra)
{
    uint64_t strides[3];
    row_strides(p, &p->q, strides);
    bool fits = state->pairs && state->processors >= 2 && p->h_q / p->h_kv > FMLAC_HOPPER_ROWS &&
                pair_reads(&p->main) && (!extra || pair_reads(&p->extra)) && state->encode_tensor_map &&
                strides_fit(strides);
    return fits ? &pairs[p->d_qk > 512] : NULL;
}

/* Of tokens, pages and KV heads, in bytes. */
static void page_strides(const fmlac_mqa *p, uint64_t strides[3])
{
    const fmlac_pool *pool = &p->main.pool;
    strides[0] = (uint64_t)pool->token_stride;
    strides[1] = (uint64_t)pool->page_stride;
    strides[2] = (uint64_t)(p->h_kv > 1 ? pool->head_stride : pool->page_stride);
}

static bool is_short(const fmlac_list *list)
{
    const fmlac_pool *pool = &list->pool;
    bool paged = list->kind == FMLAC_LIST_PAGED;
    return list->kind == FMLAC_LIST_NONE ||
           (pool->num_pages <= SHORT_MAX && pool->page_size <= SHORT_MAX && list->topk <= SHORT_MAX / 2 &&
            (!paged || list->max_pages <= SHORT_MAX / pool->page_size));
}

/* Whether more than two blocks attend a list, on average in ragged batches: then L2 answers soon enough for tiles in
 * turn. With two it pays where lists are long and there is much to do; how long they are is known on the device alone,
 * so what counts is how long they may be, and how much the pool holds. Both orders give the same bits. */
static bool takes_turns(const fmlac_state *state, const fmlac_mqa *p)
{
    if (state->turns != 0) {
        return state->turns > 0;
    }
    int64_t queries = p->cu_seqlens_q ? p->num_tokens / (p->batch > 0 ? p->batch : 1) : p->s_q;
    int64_t rows = queries * (p->h_q / p->h_kv), tokens = p->main.pool.num_pages * p->main.pool.page_size;
    bool is_long = p->main.capacity >= TURNS_LEAST && tokens >= (int64_t)state->processors * TURNS_LEAST;
    return rows > 2 * FMLAC_HOPPER_ROWS || (rows > FMLAC_HOPPER_ROWS && is_long);
}

/* The same for index lists: whether many blocks attend tokens of a pool that L2 holds. */
static bool rows_take_turns(const fmlac_state *state, const fmlac_mqa *p)
{
    const fmlac_pool *pool = &p->main.pool;
    bool cached = p->num_tokens >= state->processors &&
                  pool->num_pages * pool->page_size <= L2_POOL_BYTES / (2 * p->d_qk * p->h_kv);
    return p->main.kind == FMLAC_LIST_INDEXED && p->extra.kind == FMLAC_LIST_NONE &&
           (state->turns == 0 ? cached : state->turns > 0);
}

/* Whether few rows have straight runs for a pool's codes (few_kind in sm90a/few_tokens.cuh): the relay has more. */
static bool few_is_straight(const fmlac_pool *pool)
{
    bool e4m3 = pool->element == FMLAC_F8_E4M3, all = pool->quant_dims == 512;
    if (pool->outer_scale != 1.0f) {
        return false;
    }
    if (pool->d_qk > 512) {
        return e4m3 && pool->scale == FMLAC_F32 && pool->group_shift >= 7 && all;
    }
    if (!e4m3) {
        return pool->scale == FMLAC_F8_E4M3 && pool->group_shift == 4 && all;
    }
    return pool->scale == FMLAC_F8_E8M0 && pool->scale_offset % 4 == 0 &&
           (pool->group_shift == 6 || (pool->group_shift == 5 && all));
}

static bool few_is_narrow(const fmlac_pool *pool)
{
    return FMLAC_STRIP_PITCH(pool->data_row_bytes) <= FMLAC_STRIP_PITCH_MAX;
}

/* Few rows of queries of quantised tokens, if there is enough to do: this kernel's first tile comes later than the
 * relay's. Ragged batches: how many rows share a list is not known here. */
static const fmlac_kernel *choose_few(const fmlac_state *state, const fmlac_mqa *p)
{
    bool paged = p->main.kind == FMLAC_LIST_PAGED, ragged = paged && p->cu_seqlens_q;
    int64_t rows = p->h_q / p->h_kv * (paged ? p->s_q : 1), lists = (paged ? p->batch : p->num_tokens) * p->h_kv;
    int64_t list = paged ? p->main.capacity : p->main.topk + p->extra.topk;
    bool extra = p->extra.kind != FMLAC_LIST_NONE;
    bool straight = few_is_straight(&p->main.pool) && (!extra || few_is_straight(&p->extra.pool));
    bool narrow = few_is_narrow(&p->main.pool) && (!extra || few_is_narrow(&p->extra.pool));
    bool pays = straight && list >= fmlac_ceil(FEW_LEAST * (int64_t)state->processors, lists > 0 ? lists : 1);
    bool fits = (state->few || pays) && !ragged && narrow && rows <= FMLAC_FEW_ROWS && fmlac_hopper_unpaired(p);
    return fits ? &few[p->d_qk > 512] : NULL;
}

bool fmlac_hopper_few(const fmlac_kernel *kernel)
{
    return kernel == &few[0] || kernel == &few[1];
}

const fmlac_kernel *fmlac_hopper_choose(const fmlac_state *state, const fmlac_mqa *p)
{
    int wide = p->d_qk > 512, f16 = p->q.dtype == FMLAC_F16;
    bool extra = p->extra.kind != FMLAC_LIST_NONE;
    if (!state->hopper || p->fused.enabled || !p->q.aligned || p->d_qk > 576 || p->d_v > FMLAC_OUT_COLUMNS ||
        (p->q.dtype != FMLAC_BF16 && !f16) || !is_short(&p->main) || !is_short(&p->extra) ||
        p->num_tokens > SHORT_MAX / p->h_q || p->batch > SHORT_MAX / p->h_q) {
        return NULL;
    }
    if (reads_codes(p, &p->main) && (!extra || reads_codes(p, &p->extra))) {
        const fmlac_kernel *pair = choose_pair(state, p, extra), *other = pair ? pair : choose_few(state, p);
        return other ? other : fmlac_hopper_unpaired(p);
    }
    if (!reads_plain(p, &p->main) || (extra && !reads_plain(p, &p->extra))) {
        return NULL;
    }
    uint64_t strides[3];
    page_strides(p, strides);
    bool pages = p->main.kind == FMLAC_LIST_PAGED && p->main.pool.page_size % FMLAC_HOPPER_TOKENS == 0 &&
                 p->main.pool.aligned && state->encode_tensor_map && strides_fit(strides);
    int source = pages ? (takes_turns(state, p) ? IN_TURNS : FROM_PAGES)
                       : (rows_take_turns(state, p) ? ROWS_IN_TURNS : FROM_ROWS);
    return &kernels[source][f16][wide];
}

/* Whether a kernel of this call's numbers is one for pages. */
static bool reads_pages(const fmlac_kernel *kernel, const fmlac_mqa *p)
{
    bool wide = p->d_qk > 512, f16 = p->q.dtype == FMLAC_F16;
    return kernel == &kernels[FROM_PAGES][f16][wide] || kernel == &kernels[IN_TURNS][f16][wide];
}

bool fmlac_hopper_together(const fmlac_kernel *kernel, const fmlac_mqa *p)
{
    return (reads_pages(kernel, p) && p->main.pool.num_pages > 0) || kernel == &kernels[FROM_CODES][0][p->d_qk > 512];
}

const fmlac_kernel *fmlac_hopper_unpaired(const fmlac_mqa *p)
{
    bool extra = p->extra.kind != FMLAC_LIST_NONE;
    bool fits = raw_fits(&p->main) && (!extra || raw_fits(&p->extra));
    return fits ? &kernels[FROM_CODES][0][p->d_qk > 512] : NULL;
}

/* The main pool as [h_kv][num_pages][page_size][d_qk]. */
static bool encode_pages(const fmlac_state *state, const fmlac_mqa *p, fmlac_tensor_map *map)
{
    const fmlac_pool *pool = &p->main.pool;
    encode_tiled encode = (encode_tiled)state->encode_tensor_map;
    cuuint64_t dims[4] = {(cuuint64_t)p->d_qk, (cuuint64_t)pool->page_size, (cuuint64_t)pool->num_pages,
                          (cuuint64_t)p->h_kv};
    uint64_t strides[3];
    cuuint32_t box[4] = {64, FMLAC_HOPPER_TOKENS, 1, 1}, steps[4] = {1, 1, 1, 1};
    page_strides(p, strides);
    return encode((CUtensorMap *)map,
                  p->q.dtype == FMLAC_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                  pool->data, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Rows of 16-bit numbers as [batch][s_q][h_q][dims], in boxes of `heads` heads x `width` dims, 64 or 32. */
static bool encode_rows(const fmlac_state *state, const fmlac_mqa *p, const fmlac_rows *rows, int32_t dims,
                        uint32_t heads, uint32_t width, fmlac_tensor_map *map)
{
    encode_tiled encode = (encode_tiled)state->encode_tensor_map;
    cuuint64_t sizes[4] = {(cuuint64_t)dims, (cuuint64_t)p->h_q, (cuuint64_t)p->s_q,
                           (cuuint64_t)fmlac_ceil(p->num_tokens, p->s_q)};
    uint64_t strides[3];
    cuuint32_t box[4] = {width, heads, 1, 1}, steps[4] = {1, 1, 1, 1};
    row_strides(p, rows, strides);
    return encode && strides_fit(strides) &&
           encode((CUtensorMap *)map,
                  rows->dtype == FMLAC_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
                  rows->data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  width == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* Q of a pair's call. */
static bool encode_queries(const fmlac_state *state, const fmlac_mqa *p, fmlac_pair_sm90a *to)
{
    return encode_rows(state, p, &p->q, (int32_t)p->d_qk, FMLAC_HOPPER_ROWS, 64, &to->q) &&
           encode_rows(state, p, &p->q, (int32_t)p->d_qk, FMLAC_HOPPER_ROWS, 32, &to->q_rope);
}

/* Whether a row tile is of one query token and so its Q one run of boxes. With codes it comes that way only within
 * clusters that share a list: elsewhere that has won nothing. */
static bool takes_q(const fmlac_kernel *kernel, const fmlac_mqa *p)
{
    bool single = p->s_q == 1 || (p->h_kv == 1 && p->tile_rows == FMLAC_HOPPER_ROWS && p->h_q % FMLAC_HOPPER_ROWS == 0);
    if (kernel->cluster > 0 || kernel == &kernels[FROM_CODES][0][p->d_qk > 512] || fmlac_hopper_few(kernel)) {
        return false;
    }
    return p->main.kind == FMLAC_LIST_INDEXED || (reads_pages(kernel, p) && !p->cu_seqlens_q && single);
}

/* Whether blocks that find the cut by themselves have a short way to it (is_plain_paged in sm90a/piece.cuh). */
static bool plain_paged(const fmlac_mqa *p)
{
    return p->cut.parts > 0 && p->cut.own && p->main.kind == FMLAC_LIST_PAGED && !p->cu_seqlens_q &&
           !p->main.bound.data && p->h_kv == 1;
}

/* Q and, of index lists of rows and pages in turns, the output by TMA, where maps can describe them (border.cuh). A
 * warp's box of output must not reach into another KV head's heads. */
static void encode_border(const fmlac_state *state, const fmlac_kernel *kernel, const fmlac_mqa *p, fmlac_mqa_sm90a *to)
{
    bool indexed = p->main.kind == FMLAC_LIST_INDEXED, apart = p->h_kv == 1 || p->h_q / p->h_kv % FMLAC_HOPPER_BOX == 0;
    to->has_q = takes_q(kernel, p) && p->scale > 0.0f &&
                encode_rows(state, p, &p->q, (int32_t)p->d_qk, FMLAC_HOPPER_ROWS, 64, &to->q);
    bool mapped = indexed ? is_plain(&p->main)
                          : kernel == &kernels[IN_TURNS][p->q.dtype == FMLAC_F16][p->d_qk > 512] && takes_q(kernel, p);
    to->has_out = mapped && apart && p->d_v == FMLAC_OUT_COLUMNS && p->out.dtype == p->q.dtype &&
                  (uintptr_t)p->out.data % 16 == 0 &&
                  encode_rows(state, p, &p->out, FMLAC_OUT_COLUMNS, FMLAC_HOPPER_BOX, 64, &to->out);
}

static fmla_status enqueue_pairs(const fmlac_state *state, const fmlai_call *call, fmlac_launch *launch,
                                 const fmlac_mqa *p)
{
    fmlac_pair_sm90a all;
    memset(&all, 0, offsetof(fmlac_pair_sm90a, mqa));
    all.mqa = *p;
    if (!encode_queries(state, p, &all)) {
        return fmlai_fail(call->error, FMLA_ERROR_DEVICE, "%s: no tensor map of the queries", launch->name);
    }
    return fmlac_enqueue(state, call, launch, &all);
}

fmla_status fmlac_hopper_enqueue(const fmlac_state *state, const fmlai_call *call, fmlac_launch *launch,
                                 const fmlac_kernel *kernel, const fmlac_mqa *p)
{
    fmlac_mqa_sm90a all;
    int wide = p->d_qk > 512, f16 = p->q.dtype == FMLAC_F16;
    memset(&all.pages, 0, sizeof all.pages);
    memset(&all.q, 0, sizeof all - offsetof(fmlac_mqa_sm90a, q));
    all.mqa = *p;
    if (reads_pages(kernel, p) && !encode_pages(state, p, &all.pages)) {
        if (p->pieces > 0) {
            return fmlai_fail(call->error, FMLA_ERROR_DEVICE, "%s: no tensor map of the pages", kernel->name);
        }
        kernel = &kernels[FROM_ROWS][f16][wide];
    }
    if (kernel == &kernels[FROM_CODES][0][wide] && p->pieces > 0) {
        kernel = &kernels[CODES_TOGETHER][0][wide];
    }
    encode_border(state, kernel, p, &all);
    if (plain_paged(p)) {
        all.mqa.cut.own = FMLAC_OWN_PAGED;
    }
    launch->kernel = (const void *)kernel->function;
    launch->name = kernel->name;
    if (kernel->cluster > 0) {
        launch->blocks *= kernel->cluster;
        launch->cluster = kernel->cluster;
    }
    if (kernel == &pairs[wide]) {
        return enqueue_pairs(state, call, launch, p);
    }
    return fmlac_enqueue(state, call, launch, &all);
}

size_t fmlac_hopper_shared(void)
{
    return SHARED_MAX;
}

#else

void fmlac_hopper_open(fmlac_state *state, int32_t wanted)
{
    (void)wanted;
    state->hopper = false;
}

void fmlac_hopper_clusters(fmlac_state *state)
{
    (void)state;
}

const fmlac_kernel *fmlac_hopper_choose(const fmlac_state *state, const fmlac_mqa *p)
{
    (void)state;
    (void)p;
    return NULL;
}

fmla_status fmlac_hopper_enqueue(const fmlac_state *state, const fmlai_call *call, fmlac_launch *launch,
                                 const fmlac_kernel *kernel, const fmlac_mqa *p)
{
    (void)kernel;
    return fmlac_enqueue(state, call, launch, p);
}

size_t fmlac_hopper_shared(void)
{
    return 0;
}

const fmlac_kernel *fmlac_hopper_unpaired(const fmlac_mqa *p)
{
    (void)p;
    return NULL;
}

bool fmlac_hopper_together(const fmlac_kernel *kernel, const fmlac_mqa *p)
{
    (void)kernel;
    (void)p;
    return false;
}

bool fmlac_hopper_few(const fmlac_kernel *kernel)
{
    (void)kernel;
    return false;
}

#endif
