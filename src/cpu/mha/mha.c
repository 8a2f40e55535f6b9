/* SPDX-License-Identifier: MIT */
/*
 * mha.c: blocks of packed sequences, tiles, rows.
 */
#include "mha.h"

#include <string.h>

#include "../ragged.h"
#include "../rows.h"

int64_t fmlai_mha_blocks(int64_t batch, int64_t total, int32_t size)
{
    return fmlai_ragged_blocks(batch, total, size);
}

bool fmlai_mha_block_at(const int32_t *cu_seqlens, int64_t batch, int64_t total, int32_t size, int64_t id,
                        fmlai_mha_block *block)
{
    fmlai_ragged_block at = fmlai_ragged_block_at(cu_seqlens, batch, size, id);
    int64_t left = fmlai_mha_span_of(cu_seqlens, at.request, total).count - at.first;
    block->request = at.request;
    block->first = at.first;
    block->rows = (int32_t)(left < size ? left : size);
    return left > 0;
}

const fmlai_tile_kernels *fmlai_mha_kernels(const fmlai_cpu *cpu, const fmlai_mha *p)
{
    return p->q.dtype == FMLA_BF16 ? &cpu->tile_bf16 : &cpu->tile_f32;
}

fmlai_pool fmlai_mha_pool(const fmlai_packed *tensor, int64_t tokens, int32_t d)
{
    fmlai_pool pool = {
        .data = tensor->data,
        .format = *fmlai_format_row(tensor->dtype == FMLA_BF16 ? FMLA_KV_BF16 : FMLA_KV_F16),
        .num_pages = 1,
        .page_size = tokens > 0 ? tokens : 1,
        .token_stride = 2 * tensor->stride[0],
        .head_stride = 2 * tensor->stride[1],
        .outer_scale = 1.0f,
    };
    pool.format.d_qk = d;
    return pool;
}

void fmlai_mha_tile_start(const fmlai_tile_kernels *k, fmlai_mha_tile *tile, void *data, int32_t tokens, int32_t d)
{
    size_t size = k->dtype == FMLA_BF16 ? 2 : 4;
    tile->data = data;
    tile->d = d;
    tile->stride = fmlai_tile_stride(k->dtype, d);
    for (int32_t t = 0; t < tokens; t++) {
        memset((uint8_t *)data + ((size_t)t * (size_t)tile->stride + (size_t)d) * size, 0,
               (size_t)(tile->stride - d) * size);
    }
}

void fmlai_mha_tile_fill(const fmlai_cpu *cpu, const fmlai_tile_kernels *k, const fmlai_mha_tile *tile,
                         const fmlai_pool *pool, const int64_t *tokens, int32_t count, int32_t head)
{
    const fmlai_expand *table = k->dtype == FMLA_BF16 ? cpu->quant.expand_bf16 : cpu->quant.expand_f32;
    fmlai_expand_for(table, pool)(pool, tokens, count, head, tile->data, tile->stride);
}

void fmlai_mha_fetch(const fmlai_packed *tensor, int64_t token, int32_t head, int32_t d)
{
    int64_t size = tensor->dtype == FMLA_F32 ? 4 : 2, bytes = d * size;
    const uint8_t *row = (const uint8_t *)tensor->data + (token * tensor->stride[0] + head * tensor->stride[1]) * size;
    for (int64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(row + at);
    }
}

void fmlai_mha_load(const fmlai_tile_kernels *k, float *dst, const fmlai_packed *tensor, int64_t token, int32_t head,
                    int32_t rows, int32_t d)
{
    for (int32_t r = 0; r < FMLAI_MHA_AHEAD && r < rows; r++) {
        fmlai_mha_fetch(tensor, token + r, head, d);
    }
    for (int32_t r = 0; r < rows; r++) {
        if (r + FMLAI_MHA_AHEAD < rows) {
            fmlai_mha_fetch(tensor, token + r + FMLAI_MHA_AHEAD, head, d);
        }
        int64_t first = (token + r) * tensor->stride[0] + head * tensor->stride[1];
        if (tensor->dtype == FMLA_BF16) {
            k->widen(dst + (int64_t)r * d, 0, (const uint16_t *)tensor->data + first, 0, 1, d);
        } else {
            fmlai_row_load(dst + (int64_t)r * d, tensor->data, tensor->dtype, first, d);
        }
    }
}

void fmlai_mha_store_row(const fmlai_tile_kernels *k, const fmlai_packed *tensor, int64_t token, int32_t head,
                         const float *src, int32_t d, float factor)
{
    int64_t first = token * tensor->stride[0] + head * tensor->stride[1];
    float scaled[256];
    if (tensor->dtype == FMLA_BF16) {
        k->narrow((uint16_t *)tensor->data + first, src, factor, d);
        return;
    }
    for (int32_t at = 0; at < d; at += 256) {
        int32_t n = d - at < 256 ? d - at : 256;
        for (int32_t j = 0; j < n; j++) {
            scaled[j] = src[at + j] * factor;
        }
        fmlai_row_store(tensor->data, tensor->dtype, first + at, scaled, n);
    }
}

void fmlai_mha_store(const fmlai_tile_kernels *k, const fmlai_packed *tensor, int64_t token, int32_t head,
                     const float *src, int32_t rows, int32_t d, float factor)
{
    for (int32_t r = 0; r < rows; r++) {
        if (r + FMLAI_MHA_AHEAD < rows) {
            fmlai_mha_fetch(tensor, token + r + FMLAI_MHA_AHEAD, head, d);
        }
        fmlai_mha_store_row(k, tensor, token + r, head, src + (int64_t)r * d, d, factor);
    }
}

void *fmlai_mha_take(fmlai_mha_arena *arena, size_t size)
{
    void *piece = arena->base ? arena->base + arena->used : NULL;
    arena->used += (size + 63) / 64 * 64;
    return piece;
}
