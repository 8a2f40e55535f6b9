/* SPDX-License-Identifier: MIT */
/*
 * tile.h: the kernels of attention on a CPU. Everything (MQA in all its forms, MHA forward and backward)
 * is built from them; a tier is fast if these are.
 *
 * A block of rows (queries; up to FMLAI_TILE_ROWS, padded to a multiple of FMLAI_TILE_LANES) meets tiles of
 * tokens (up to tile_tokens, a matrix [tokens][stride] of tile elements: float, or bf16). Rows are the
 * vector lanes wherever scores are concerned; dims are the lanes where values are summed. Layouts named
 * "packed" belong to the tier: callers ask for their size and pass them on.
 *
 *   pack_rows   rows as floats           -> packed rows
 *   scores      packed rows x tile       -> s [tokens][row_stride] float, raw dot products
 *   softmax     s, running state         -> packed weights, new state, alpha (what old sums must shrink by)
 *   accumulate  packed weights x tile    -> packed sums (sums * alpha + weights^T tile)
 *               scores_of_parts, accumulate_parts: the same of a tile that does not lie in one piece
 *   unpack      packed sums              -> rows as floats
 *   fold        rows of partial results  -> their running sum in float64; finish: that as floats
 *   widen       rows of bf16             -> floats; narrow: floats as bf16
 *   gradients   s, dO.v                  -> P, dS: what backward sums up
 *   squares, rotate, unrotate            what the fused operations do to a row of queries, and of results
 *
 * Tokens that are not attended are never in a tile: the driver leaves them out. The only mask is `visible`:
 * row r sees the first visible[r] tokens of the tile (causal bounds).
 *
 * Memory: tiles and packed buffers start at 64 bytes; a tile's stride comes from fmlai_tile_stride() and its
 * columns d..stride-1 are zero (clear the tile once; who fills it writes d columns). Kernels may read them.
 * Arrays with one entry per row (state, alpha, scale2, visible) have FMLAI_TILE_ROWS entries: kernels read
 * and write the entries of padding rows, and what is there does not matter.
 *
 * Bits: what a kernel computes for a row depends on that row and on the tokens that it sees, in their order;
 * not on the other rows, on their number, or on tokens after the last that the row sees.
 */
#ifndef FLASHMLA_TILE_H
#define FLASHMLA_TILE_H

#include <float.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <flashmla/flashmla.h>

#define FMLAI_TILE_LANES      16
#define FMLAI_TILE_ROWS       128
#define FMLAI_TILE_TOKENS_MAX 128

/* Running softmax of a block of rows, base 2: m the maximum so far, -FLT_MAX before the first token (no
 * finite logit is below it), l the sum of 2^(x - m). l == 0 says that the row saw no token, or none with a
 * logit above -inf; otherwise l >= 1 or NaN. */
typedef struct fmlai_softmax_state {
    float m[FMLAI_TILE_ROWS];
    float l[FMLAI_TILE_ROWS];
} fmlai_softmax_state;

/* A state before its first token. */
static inline void fmlai_softmax_start(fmlai_softmax_state *state)
{
    for (int32_t r = 0; r < FMLAI_TILE_ROWS; r++) {
        state->m[r] = -FLT_MAX;
        state->l[r] = 0.0f;
    }
}

/* rows rounded up to whole vectors: the row_stride of scores. */
static inline int32_t fmlai_tile_lanes(int32_t rows)
{
    return (rows + FMLAI_TILE_LANES - 1) / FMLAI_TILE_LANES * FMLAI_TILE_LANES;
}

/* Elements between tokens of a tile: whole cache lines, an odd number of them, so that tokens do not share
 * cache sets. */
static inline int64_t fmlai_tile_stride(fmla_dtype dtype, int32_t d)
{
    int64_t line = dtype == FMLA_BF16 ? 32 : 16;
    return ((d + line - 1) / line | 1) * line;
}

/* What a core will read after this tile: rows of `bytes` bytes (those of the first one's pool) or halves of rows, which
 * accumulate_parts fetches into its cache beside the products, a few for each of its steps. */
typedef struct fmlai_ahead {
    const uint8_t *rows[2 * FMLAI_TILE_TOKENS_MAX];
    int32_t count;
    int32_t bytes;
    int32_t next; /* the first that is still to be fetched */
} fmlai_ahead;

/* Fetches the next `step` of them. */
static inline void fmlai_fetch_ahead(fmlai_ahead *ahead, int32_t step)
{
    int32_t end = ahead->count - ahead->next < step ? ahead->count : ahead->next + step;
    for (; ahead->next < end; ahead->next++) {
        const uint8_t *row = ahead->rows[ahead->next];
        for (int32_t i = 0; i < ahead->bytes; i += 64) {
            __builtin_prefetch(row + i, 0, 2);
        }
    }
}

/* A tile in parts of FMLAI_TILE_PART tokens (the last may be shorter), `stride` elements between tokens. Parts may lie
 * in a buffer, or in a cache that holds what kernels multiply: without alignment, with anything behind a token. So of a
 * token d elements are read, rounded up to 32, which it must have. */
#define FMLAI_TILE_PART 16

typedef struct fmlai_tile_parts {
    const void *at[FMLAI_TILE_TOKENS_MAX / FMLAI_TILE_PART];
    int64_t stride;
    fmlai_ahead *ahead; /* for accumulate_parts; NULL: nothing */
} fmlai_tile_parts;

/* A tile that lies in one piece, as parts. */
static inline fmlai_tile_parts fmlai_tile_parts_of(const void *tile, int64_t stride, fmla_dtype dtype)
{
    fmlai_tile_parts parts = {.stride = stride};
    int64_t part_bytes = FMLAI_TILE_PART * stride * (dtype == FMLA_BF16 ? 2 : 4);
    for (int32_t i = 0; i < FMLAI_TILE_TOKENS_MAX / FMLAI_TILE_PART; i++) {
        parts.at[i] = (const uint8_t *)tile + i * part_bytes;
    }
    return parts;
}

/* Of a tile's tokens, how many row `row` sees; visible NULL: all. */
static inline int32_t fmlai_tile_seen(const int32_t *visible, int32_t row, int32_t tokens)
{
    if (!visible || visible[row] > tokens) {
        return tokens;
    }
    return visible[row] < 0 ? 0 : visible[row];
}

/* How many tokens every row sees, and how many any row does. */
typedef struct fmlai_tile_range {
    int32_t least, most;
} fmlai_tile_range;

static inline fmlai_tile_range fmlai_tile_seen_range(const int32_t *visible, int32_t rows, int32_t tokens)
{
    fmlai_tile_range seen = {tokens, visible ? 0 : tokens};
    for (int32_t r = 0; visible && r < rows; r++) {
        const int32_t n = fmlai_tile_seen(visible, r, tokens);
        seen.least = n < seen.least ? n : seen.least;
        seen.most = n > seen.most ? n : seen.most;
    }
    return seen;
}

/* The row behind those from `begin` on that see as many tokens as it. */
static inline int32_t fmlai_tile_seen_alike(const int32_t *visible, int32_t begin, int32_t rows)
{
    int32_t end = begin + 1;
    while (end < rows && visible[end] == visible[begin]) {
        end++;
    }
    return end;
}

typedef struct fmlai_tile_kernels {
    const char *name;
    fmla_dtype dtype;     /* element of tiles: FMLA_F32 or FMLA_BF16 */
    int32_t tile_tokens;  /* tokens in a tile that suit the caches; kernels take 1..FMLAI_TILE_TOKENS_MAX */
    /* Bytes of the packed layouts; rows and tokens as passed to the kernels. */
    size_t (*packed_rows_bytes)(int32_t rows, int32_t d);
    size_t (*packed_weights_bytes)(int32_t rows, int32_t tokens);
    size_t (*packed_sums_bytes)(int32_t rows, int32_t d);
    /* src: [rows][src_stride] floats, d of each. BF16 tiles round to bf16 (exact for bf16 data). */
    void (*pack_rows)(void *packed, const float *src, int64_t src_stride, int32_t rows, int32_t d);
    /* s[t * row_stride + r], row_stride = fmlai_tile_lanes(rows); lanes beyond rows: anything. 64-byte
     * aligned. */
    void (*scores)(float *s, const void *packed_rows, const void *tile, int64_t tile_stride, int32_t rows,
                   int32_t tokens, int32_t d);
    /* logit (base 2) = s * scale2[row]; scale2 includes log2(e). visible NULL: all tokens. s may be
     * overwritten. alpha[row]: 2^(m_old - m_new), 1 if nothing changed. A NaN logit makes the row's m and l
     * NaN for good. Rows whose logits are all -inf keep m and l as they were. */
    void (*softmax)(fmlai_softmax_state *state, float *alpha, void *packed_weights, float *s,
                    const float *scale2, const int32_t *visible, int32_t rows, int32_t tokens);
    /* Packs given weights w[t * row_stride + r] as softmax would: for backward and tests. */
    void (*pack_weights)(void *packed_weights, const float *w, int32_t rows, int32_t tokens);
    /* The same of w[r * w_stride + t]: for backward, where tokens have been the lanes. w starts at 64 bytes, w_stride
     * is a multiple of 16; columns up to the next multiple of 16 are read. */
    void (*pack_turned)(void *packed_weights, const float *w, int64_t w_stride, int32_t rows, int32_t tokens);
    /* sums = sums * alpha + weights^T * tile[:, 0:d]; alpha NULL: sums start at zero. A weight of a token
     * that its row does not see contributes nothing, even if the token's values are NaN or infinite. */
    void (*accumulate)(void *packed_sums, const void *packed_weights, const void *tile, int64_t tile_stride,
                       const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens, int32_t d);
    /* The same of a tile in parts. NULL: this tier takes whole tiles. */
    void (*scores_of_parts)(float *s, const void *packed_rows, const fmlai_tile_parts *tile, int32_t rows,
                            int32_t tokens, int32_t d);
    void (*accumulate_parts)(void *packed_sums, const void *packed_weights, const fmlai_tile_parts *tile,
                             const float *alpha, const int32_t *visible, int32_t rows, int32_t tokens, int32_t d);
    /* Rows first..first+count-1 of the `rows` that accumulate was given, as floats [count][dst_stride]. next, if not
     * NULL: sums whose same rows will be asked for next. */
    void (*unpack)(float *dst, int64_t dst_stride, const void *packed_sums, const void *next, int32_t rows,
                   int32_t first, int32_t count, int32_t d);
    /* From here to narrow, and squares, rotate and unrotate: pointers without alignment. begin: sums[i] = x[i], n of
     * them. */
    void (*begin)(double *sums, const float *x, int32_t n);
    /* sums[i] = sums[i] * keep + x[i] * join, n of them. */
    void (*fold)(double *sums, const float *x, double keep, double join, int32_t n);
    /* dst[i] = sums[i] * factor, n of them. */
    void (*finish)(float *dst, const double *sums, double factor, int32_t n);
    /* Rows of n bf16 numbers, src_stride of them apart, as floats; src may begin at any byte. */
    void (*widen)(float *dst, int64_t dst_stride, const void *src, int64_t src_stride, int32_t rows, int32_t n);
    /* dst[i] = x[i] * factor as bf16, to nearest even, n of them. As fmlai_store_f32. */
    void (*narrow)(void *dst, const float *x, float factor, int32_t n);
    /* s to P = 2^(s * scale2 - lse2), ds (which holds dO.v) to dS = P * (ds - delta), both [t * row_stride + r] from 64
     * bytes on, exactly 0 where row r does not see token t (visible is not NULL). lse2 and delta have an entry per row,
     * or (by_token) per token. */
    void (*gradients)(float *s, float *ds, float scale2, const float *lse2, const float *delta, bool by_token,
                      const int32_t *visible, int32_t rows, int32_t tokens);
    /* The sums of the squares of rows of n floats, n a multiple of 16. */
    void (*squares)(double *sums, const float *x, int64_t stride, int32_t rows, int32_t n);
    /* RoPE as docs/numerics.md defines it: x0 = fma(x0, c, -(x1 s)), x1 = fma(x0, s, x1 c), rounded to bf16, of `pairs`
     * pairs: dims 2 i and 2 i + 1, or (neox) i and i + pairs. Cosines, then sines. */
    void (*rotate)(float *x, const float *cos_sin, int32_t pairs, bool neox);
    /* The conjugate: x0 c + x1 s, x1 c - x0 s, in float64, rounded to float once. */
    void (*unrotate)(float *x, const float *cos_sin, int32_t pairs, bool neox);
} fmlai_tile_kernels;

/* Tiers: each is given the tables of the tier below, replaces what it does better and leaves the rest. */
void fmlai_tile_init_scalar(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16);
void fmlai_tile_init_avx2(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16);
void fmlai_tile_init_avx512bf16(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16);
/* On top of avx512bf16. */
void fmlai_tile_init_amx(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16);
void fmlai_tile_init_neon(fmlai_tile_kernels *f32, fmlai_tile_kernels *bf16);

#endif
