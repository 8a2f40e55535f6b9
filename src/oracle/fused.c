/* SPDX-License-Identifier: MIT */
/*
 * fused.c: what the fused operations do before and after attention.
 *
 * Before: rho = 1 / sqrt(mean(q^2) + eps) from the stored q, folded into the logits (q itself is not scaled);
 * RoPE on the last rope_dim dims of q in fp32, each result one fused multiply-add and rounded to bf16: these
 * roundings are part of the definition, since attention sees the rounded q.
 *
 * After: conjugate RoPE on the output's last rope_dim dims, with the same angles, in float64; then quantiser
 * D per 32 dims. fmlai_mqa.out (the public out_exact, F64) holds the output between the two;
 * fmlai_mqa.abs_out holds A = sum p |v|, of a rotated pair |c| A0 + |s| A1 and |s| A0 + |c| A1: a bound on
 * what the rotation mixes.
 */
#include "oracle.h"

#define CAST_GROUP 32

/* The two dims of pair i, relative to the first rotated dim, and the angle's cosine and sine. */
typedef struct rotation {
    int32_t first, second;
    float c, s;
} rotation;

static rotation rotation_at(const fmlai_fused *f, int64_t token, int32_t i)
{
    int32_t half = f->rope_dim / 2;
    const float *angles = f->cos_sin + f->positions[token * f->position_stride] * f->cos_sin_stride;
    return (rotation){
        .first = f->rope_neox ? i : 2 * i,
        .second = f->rope_neox ? i + half : 2 * i + 1,
        .c = angles[i],
        .s = angles[half + i],
    };
}

static int64_t words_per_group(const fmlai_mqa *p)
{
    return (int64_t)p->fused.group_heads * p->d_v / (4 * CAST_GROUP);
}

void fmlai_oracle_fused_begin(const fmlai_mqa *p)
{
    int64_t words = p->fused.groups * words_per_group(p) * p->fused.scale_rows;
    memset(p->fused.scale, 0, (size_t)words * sizeof(int32_t));
}

double fmlai_oracle_fused_query(const fmlai_mqa *p, int64_t token, int32_t head, double *query)
{
    const fmlai_fused *f = &p->fused;
    double square_sum = 0;

    for (int32_t d = 0; d < p->d_qk; d++) {
        int64_t at = f->q_permuted ? fmlai_row_offset(&p->q, p, token, 0) + fmlai_q_permuted(p->h_q, head, d)
                                   : fmlai_row_offset(&p->q, p, token, head) + d;
        query[d] = fmlai_load_f64(p->q.data, p->q.dtype, at);
        square_sum += query[d] * query[d];
    }
    double *rotated = query + p->d_qk - f->rope_dim;
    for (int32_t i = 0; i < f->rope_dim / 2; i++) {
        rotation r = rotation_at(f, token, i);
        float x0 = (float)rotated[r.first];
        float x1 = (float)rotated[r.second];
        float x1s = x1 * r.s;
        float x1c = x1 * r.c;
        rotated[r.first] = fmlai_f32_from_bf16(fmlai_bf16_from_f32(fmaf(x0, r.c, -x1s)));
        rotated[r.second] = fmlai_f32_from_bf16(fmlai_bf16_from_f32(fmaf(x0, r.s, x1c)));
    }
    return f->q_norm ? 1 / sqrt(square_sum / p->d_qk + (double)f->eps) : 1;
}

void fmlai_oracle_fused_unrotate(const fmlai_mqa *p, int64_t token, double *out, double *magnitude)
{
    const fmlai_fused *f = &p->fused;
    double *o = out + p->d_v - f->rope_dim;
    double *a = magnitude + p->d_v - f->rope_dim;

    for (int32_t i = 0; i < f->rope_dim / 2; i++) {
        rotation r = rotation_at(f, token, i);
        double c = r.c, s = r.s;
        double o0 = o[r.first], o1 = o[r.second];
        double a0 = a[r.first], a1 = a[r.second];
        o[r.first] = o0 * c + o1 * s;
        o[r.second] = -o0 * s + o1 * c;
        a[r.first] = fabs(c) * a0 + fabs(s) * a1;
        a[r.second] = fabs(s) * a0 + fabs(c) * a1;
    }
}

void fmlai_oracle_fused_cast(const fmlai_mqa *p, int64_t token, int32_t head, const double *out)
{
    const fmlai_fused *f = &p->fused;
    int64_t group = head / f->group_heads;
    int64_t g = head % f->group_heads;
    uint8_t *codes = f->codes + (token * f->groups + group) * f->group_heads * p->d_v;
    int32_t *scale = f->scale + token + group * words_per_group(p) * f->scale_rows;

    for (int64_t c = 0; c < p->d_v / CAST_GROUP; c++) {
        int64_t chunk = c * f->group_heads + g; /* chunks are transposed against the heads */
        uint32_t byte =
            fmlai_fp8_cast_group_f64(out + c * CAST_GROUP, CAST_GROUP, codes + chunk * CAST_GROUP);
        int32_t *word = scale + chunk / 4 * f->scale_rows;
        *word = (int32_t)((uint32_t)*word | byte << (8 * (chunk % 4)));
    }
}
