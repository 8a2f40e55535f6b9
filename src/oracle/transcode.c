/* SPDX-License-Identifier: MIT */
/*
 * transcode.c: the operations that move bytes: caches in and out of their formats, positions to slots, the
 * e4m3 cast of a matrix, the permutations of weights. All are exact; the rules of formats are in ../format.
 */
#include "oracle.h"

/* ---- caches -------------------------------------------------------------------------------------------- */

/* A token's worth of floats, kept for the next call. */
static fmla_status token_row(fmlai_oracle *oracle, int64_t n, fmlai_error *error)
{
    if (n > oracle->row_capacity) {
        float *row = oracle->allocator.alloc(oracle->allocator.user, (size_t)n * sizeof(float));
        if (!row) {
            return fmlai_fail(error, FMLA_ERROR_OUT_OF_MEMORY, "no memory for a token of %lld elements",
                              (long long)n);
        }
        if (oracle->row) {
            oracle->allocator.release(oracle->allocator.user, oracle->row);
        }
        oracle->row = row;
        oracle->row_capacity = n;
    }
    return FMLA_OK;
}

/* The slot of token i, -1 if it is not in the pool. */
static int64_t slot_at(const fmlai_slots *slots, const fmlai_pool *pool, int64_t i)
{
    int64_t slot = fmlai_slot_at(slots, i);
    return fmlai_slot_valid(pool, slot) ? slot : -1;
}

fmla_status fmlai_oracle_quantize(void *state, const fmlai_transcode *p, const fmlai_call *call)
{
    fmlai_oracle *oracle = state;
    int32_t d_qk = p->pool.format.d_qk;
    fmla_status status = token_row(oracle, d_qk, call->error);

    for (int64_t i = 0; status == FMLA_OK && i < p->count; i++) {
        int64_t slot = slot_at(&p->slots, &p->pool, i);
        for (int32_t head = 0; slot >= 0 && head < p->heads; head++) {
            int64_t at = fmlai_oracle_offset(&p->rows, i, head);
            for (int32_t d = 0; d < d_qk; d++) {
                oracle->row[d] = fmlai_load_f32(p->rows.data, p->rows.dtype, at + d);
            }
            fmlai_token_write(&p->pool, slot, head, oracle->row, p->rows.dtype, p->quantizer);
        }
    }
    return status;
}

fmla_status fmlai_oracle_dequantize(void *state, const fmlai_transcode *p, const fmlai_call *call)
{
    fmlai_oracle *oracle = state;
    int32_t d_qk = p->pool.format.d_qk;
    fmla_status status = token_row(oracle, d_qk, call->error);

    for (int64_t i = 0; status == FMLA_OK && i < p->count; i++) {
        int64_t slot = slot_at(&p->slots, &p->pool, i);
        for (int32_t head = 0; head < p->heads; head++) {
            int64_t at = fmlai_oracle_offset(&p->rows, i, head);
            if (slot >= 0) {
                fmlai_token_read_f32(&p->pool, slot, head, oracle->row);
            } else {
                memset(oracle->row, 0, (size_t)d_qk * sizeof(float));
            }
            for (int32_t d = 0; d < d_qk; d++) {
                fmlai_store_f32(p->rows.data, p->rows.dtype, at + d, oracle->row[d]);
            }
        }
    }
    return status;
}

fmla_status fmlai_oracle_convert(void *state, const fmlai_convert *p, const fmlai_call *call)
{
    (void)state;
    (void)call;
    for (int64_t i = 0; i < p->count; i++) {
        int64_t src = slot_at(&p->src_slots, &p->src, i);
        int64_t dst = slot_at(&p->dst_slots, &p->dst, i);
        for (int32_t head = 0; src >= 0 && dst >= 0 && head < p->heads; head++) {
            fmlai_token_convert(&p->dst, dst, &p->src, src, head);
        }
    }
    return FMLA_OK;
}

/* ---- positions ----------------------------------------------------------------------------------------- */

static int32_t slot_of_position(const fmlai_indices_convert *p, int64_t request, int64_t position)
{
    if (position < 0 || position / p->page_size >= p->max_pages) {
        return -1;
    }
    int64_t page = p->block_table[request * p->table_stride + position / p->page_size];
    int64_t slot = page * p->page_size + position % p->page_size;
    return page < 0 || slot > INT32_MAX ? -1 : (int32_t)slot;
}

fmla_status fmlai_oracle_indices_convert(void *state, const fmlai_indices_convert *p, const fmlai_call *call)
{
    (void)state;
    (void)call;
    for (int64_t r = 0; r < p->batch; r++) {
        for (int64_t j = 0; j < p->s_q; j++) {
            const int32_t *from = p->positions + r * p->position_stride[0] + j * p->position_stride[1];
            int32_t *to = p->indices + r * p->index_stride[0] + j * p->index_stride[1];
            for (int64_t i = 0; i < p->topk; i++) {
                to[i] = slot_of_position(p, r, from[i]);
            }
        }
    }
    return FMLA_OK;
}

/* ---- matrices ------------------------------------------------------------------------------------------ */

/* Byte k of a row of words: byte k % 4 of word k / 4, the lowest first. */
static uint32_t byte_of_word(int32_t word, int64_t k)
{
    return ((uint32_t)word >> (8 * (k % 4))) & 0xFF;
}

fmla_status fmlai_oracle_fp8_cast(void *state, const fmlai_fp8_cast *p, const fmlai_call *call)
{
    float x[128];
    (void)state;
    (void)call;
    for (int64_t i = 0; i < p->rows; i++) {
        for (int64_t w = 0; w < p->cols / p->group / 4; w++) {
            uint32_t word = 0;
            for (int64_t b = 0; b < 4; b++) {
                int64_t column = (w * 4 + b) * p->group;
                for (int32_t d = 0; d < p->group; d++) {
                    x[d] = fmlai_load_f32(p->src, p->dtype, i * p->src_stride + column + d);
                }
                uint32_t byte = fmlai_fp8_cast_group(x, p->group, p->codes + i * p->code_stride + column);
                word |= byte << (8 * b);
            }
            p->scale[i + w * p->scale_rows] = (int32_t)word;
        }
    }
    return FMLA_OK;
}

/* Row h * d + i of a query projection moves, with its scale words, to where fmlai_q_permuted says. */
static void permute_q_b(const fmlai_permute *p)
{
    for (int32_t h = 0; h < p->heads; h++) {
        for (int32_t i = 0; i < p->d; i++) {
            int64_t from = (int64_t)h * p->d + i;
            int64_t to = fmlai_q_permuted(p->heads, h, i);
            memcpy(p->out_weight + to * p->cols, p->weight + from * p->weight_stride[1], (size_t)p->cols);
            for (int64_t w = 0; w < p->words; w++) {
                p->out_scale[to * p->out_scale_stride[1] + w * p->out_scale_stride[2]] =
                    p->scale[from * p->scale_stride[1] + w * p->scale_stride[2]];
            }
        }
    }
}

/* One row of an output projection: the 32 columns of head g, chunk c move from (g, c) to (c, g), and their
 * scale byte with them. */
static void permute_wv_row(const fmlai_permute *p, int64_t group, int64_t r)
{
    const uint8_t *weight = p->weight + group * p->weight_stride[0] + r * p->weight_stride[1];
    const int32_t *scale = p->scale + group * p->scale_stride[0] + r * p->scale_stride[1];
    uint8_t *out_weight = p->out_weight + (group * p->rows + r) * p->cols;
    int32_t *out_scale = p->out_scale + group * p->out_scale_stride[0] + r * p->out_scale_stride[1];

    for (int64_t w = 0; w < p->words; w++) {
        uint32_t word = 0;
        for (int64_t to = 4 * w; to < 4 * w + 4; to++) {
            int64_t c = to / p->heads;
            int64_t g = to % p->heads;
            int64_t from = g * (p->d / 32) + c;
            memcpy(out_weight + to * 32, weight + from * 32, 32);
            word |= byte_of_word(scale[from / 4 * p->scale_stride[2]], from) << (8 * (to % 4));
        }
        out_scale[w * p->out_scale_stride[2]] = (int32_t)word;
    }
}

fmla_status fmlai_oracle_permute(void *state, const fmlai_permute *p, const fmlai_call *call)
{
    (void)state;
    (void)call;
    if (p->kind == FMLA_OP_PERMUTE_Q_B) {
        permute_q_b(p);
        return FMLA_OK;
    }
    for (int64_t group = 0; group < p->groups; group++) {
        for (int64_t r = 0; r < p->rows; r++) {
            permute_wv_row(p, group, r);
        }
    }
    return FMLA_OK;
}
