/* SPDX-License-Identifier: MIT */
/*
 * format.h: numbers as bits (bf16, fp16, e4m3, e8m0, e2m1) and tokens as bytes (the KV formats). Portable C,
 * exact, written to be read; it is the rule that every other decoder and encoder of the project is tested
 * against.
 */
#ifndef FLASHMLA_FORMAT_H
#define FLASHMLA_FORMAT_H

#include <string.h>

#include "../problem.h"

/* ---- numbers (number.c) -------------------------------------------------------------------------------- */

static inline uint32_t fmlai_bits_of_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float fmlai_f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

uint16_t fmlai_bf16_from_f32(float x); /* nearest even; NaN stays NaN, overflow gives infinity */
uint16_t fmlai_f16_from_f32(float x);
uint16_t fmlai_bf16_from_f64(double x); /* one rounding, for the oracle */
uint16_t fmlai_f16_from_f64(double x);
float fmlai_f32_from_bf16(uint16_t bits);
float fmlai_f32_from_f16(uint16_t bits);
float fmlai_f32_from_e4m3(uint8_t code);
float fmlai_f32_from_e8m0(uint8_t code);
float fmlai_f32_from_e2m1(uint8_t code);         /* low nibble */
uint8_t fmlai_e4m3_from_f32(float x);            /* beyond 464, infinity, NaN: NaN with x's sign */
uint8_t fmlai_e4m3_from_f32_saturating(float x); /* beyond 448 and infinity: +-448; NaN: NaN */
uint8_t fmlai_e4m3_from_f64_saturating(double x);
uint8_t fmlai_e2m1_from_f32(float x); /* saturates to 6; NaN: magnitude 0 */
uint8_t fmlai_e8m0_from_f32(float x); /* exact powers of two 2^-127..2^127; infinity, NaN: 0xFF */
int fmlai_ceil_log2_f32(float x);     /* smallest e with 2^e >= x; x finite, > 0 */

/* One element of a tensor as float (BF16, F16, F32) or double (also F64), and back with one rounding. */
float fmlai_load_f32(const void *data, fmla_dtype dtype, int64_t i);
double fmlai_load_f64(const void *data, fmla_dtype dtype, int64_t i);
void fmlai_store_f32(void *data, fmla_dtype dtype, int64_t i, float x);
/* Elements begin..end-1 into dst[0..]. */
void fmlai_load_row(const void *data, fmla_dtype dtype, int64_t begin, int64_t end, float *dst);
/* Rounds n floats to bf16. */
void fmlai_round_row(float *x, int64_t n);
void fmlai_store_f64(void *data, fmla_dtype dtype, int64_t i, double x);

/* ---- the table (table.c) ------------------------------------------------------------------------------- */

/* The row of a format, NULL if there is none. */
const fmla_format_info *fmlai_format_row(fmla_kv_format format);
/* Checks a caller's own description: RECORD or PAGE, parts inside the record and apart, group dividing
 * quant_dims. *why is the fault in words, "" if there is none. */
bool fmlai_format_valid(const fmla_format_info *info, const char **why);
/* Bytes a token of d_qk dims takes, one KV head. */
int64_t fmlai_format_token_bytes(const fmla_format_info *info, int32_t d_qk);
/* Bytes of one scale; 0 if the format has none. */
int32_t fmlai_scale_bytes(const fmla_format_info *info);

/* ---- tokens (token.c reads, write.c quantises and converts, cast.c is the fused output's cast) --------- */

/* Where slot `slot` (page * P + offset, not negative) of a pool is. Divisions were a tenth of the time of expanding, so
 * pages of 2^n tokens, which is most of them, do without. */
typedef struct fmlai_place {
    int64_t page, offset;
} fmlai_place;

static inline fmlai_place fmlai_pool_place(const fmlai_pool *pool, int64_t slot)
{
    int64_t size = pool->page_size;
    int64_t page = (size & (size - 1)) == 0 ? slot >> __builtin_ctzll((uint64_t)size) : slot / size;
    return (fmlai_place){page, slot - page * size};
}

/* Where it keeps its data row, and its scales. */
static inline const uint8_t *fmlai_pool_row(const fmlai_pool *pool, int64_t slot)
{
    fmlai_place at = fmlai_pool_place(pool, slot);
    return pool->data + at.page * pool->page_stride + at.offset * pool->token_stride;
}

static inline const uint8_t *fmlai_pool_scales(const fmlai_pool *pool, int64_t slot)
{
    const fmla_format_info *f = &pool->format;
    if (f->layout == FMLA_LAYOUT_PAGE) {
        fmlai_place at = fmlai_pool_place(pool, slot);
        return pool->data + at.page * pool->page_stride + pool->page_size * pool->token_stride +
               at.offset * f->scale_row_bytes + f->scale_offset;
    }
    return fmlai_pool_row(pool, slot) + f->scale_offset;
}

/* Bytes of a data row, one KV head's. */
static inline int32_t fmlai_pool_row_bytes(const fmlai_pool *pool)
{
    const fmla_format_info *f = &pool->format;
    return f->layout == FMLA_LAYOUT_PLAIN  ? 2 * f->d_qk
           : f->layout == FMLA_LAYOUT_PAGE ? f->data_row_bytes
                                           : (int32_t)fmlai_format_token_bytes(f, f->d_qk);
}

static inline bool fmlai_slot_valid(const fmlai_pool *pool, int64_t slot)
{
    return slot >= 0 && slot / pool->page_size < pool->num_pages;
}

/* The slot that a caller names for token i, valid or not. */
static inline int64_t fmlai_slot_at(const fmlai_slots *slots, int64_t i)
{
    if (!slots->data) {
        return i;
    }
    return slots->dtype == FMLA_I64 ? ((const int64_t *)slots->data)[i * slots->stride]
                                    : ((const int32_t *)slots->data)[i * slots->stride];
}

/* One token as d_qk floats, not yet rounded to bf16: codes as the fp32 product (code * scale) * outer. */
void fmlai_token_read_f32(const fmlai_pool *pool, int64_t slot, int32_t head, float *dst);
/* Dims begin..end-1 of the same, into dst[0..]. */
void fmlai_token_read_dims(const fmlai_pool *pool, int64_t slot, int32_t head, int32_t begin, int32_t end,
                           float *dst);
/* As attention sees it: fmlai_token_read_f32 rounded to bf16 (F16 pools: the fp16 value), in float. */
void fmlai_token_read(const fmlai_pool *pool, int64_t slot, int32_t head, float *dst);
/* Quantises d_qk floats (values of src_dtype: quantiser B rounds its scale to it) into slot `slot`; codes are
 * made of src / outer scale. Bytes of the token's record that hold nothing become 0. */
void fmlai_token_write(const fmlai_pool *pool, int64_t slot, int32_t head, const float *src,
                       fmla_dtype src_dtype, fmla_quantizer quantizer);
/* Copies a token between two pools: bytes if the codes are the same, else read, then write. */
void fmlai_token_convert(const fmlai_pool *dst, int64_t dst_slot, const fmlai_pool *src, int64_t src_slot,
                         int32_t head);

/* Quantiser D on one group: codes and the scale byte of n values. */
uint8_t fmlai_fp8_cast_group(const float *x, int32_t n, uint8_t *codes);
/* The same from doubles: the amax rule in float64, for the oracle. */
uint8_t fmlai_fp8_cast_group_f64(const double *x, int32_t n, uint8_t *codes);

/* ---- addresses of token lists (list.c) ----------------------------------------------------------------- */

/* The request of query token t: t / s_q, or by binary search in cu_seqlens_q; empty requests are skipped. */
int64_t fmlai_mqa_request(const fmlai_mqa *p, int64_t token);
/* A length for query token t of request r. */
int64_t fmlai_lengths_at(const fmlai_lengths *lengths, const fmlai_mqa *p, int64_t token, int64_t request);
/* Number of list entries query token t may see, never negative. PAGED: its visible tokens, at most what
 * max_pages pages hold; INDEXED: its clamped length. */
int64_t fmlai_list_count(const fmlai_token_list *list, const fmlai_mqa *p, int64_t token);
/* Entry i (below fmlai_list_count) of query token t: a slot of the pool, or -1: not to be attended. */
int64_t fmlai_list_slot(const fmlai_token_list *list, const fmlai_mqa *p, int64_t token, int32_t kv_head,
                        int64_t i);

/* Element offset of (token, head) in a row tensor. */
static inline int64_t fmlai_row_offset(const fmlai_rows *rows, const fmlai_mqa *p, int64_t token,
                                       int32_t head)
{
    return (token / p->s_q) * rows->stride[0] + (token % p->s_q) * rows->stride[1] + head * rows->stride[2];
}

/* Element (head, d) of a permuted query token (FMLA_Q_PERMUTED). */
static inline int64_t fmlai_q_permuted(int32_t h_q, int32_t head, int32_t d)
{
    return (int64_t)(d / 16) * h_q * 16 + head * 16 + d % 16;
}

#endif
