/* SPDX-License-Identifier: MIT */
/*
 * The oracle's fused operation: against the unfused one with its prologue and epilogue done here, and the
 * layout of codes and scales against the permuted output projection that consumes them.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "support_numbers.h"
#include "support_oracle.h"
#include "support_pool.h"

#define D       512
#define ROPE    64
#define HALF    (ROPE / 2)
#define TOKENS  6
#define QUERIES 3
#define HEADS   4
#define GROUPS  2
#define G       (HEADS / GROUPS)
#define ROWS_A  8 /* rows of a column of scale words: more than QUERIES rounded up to 4 */
#define WORDS   (G * D / 128)
#define TABLE   10
#define D_OUT   3

typedef struct fixture {
    uint16_t kv[TOKENS][D], q[QUERIES][HEADS][D];
    int32_t indices[QUERIES][TOKENS], positions[QUERIES];
    float cos_sin[TABLE][ROPE];
    uint8_t codes[QUERIES][GROUPS][G * D];
    int32_t scale[GROUPS][WORDS][ROWS_A];
    double out[QUERIES][HEADS][D], abs_out[QUERIES][HEADS][D], lse[QUERIES][HEADS], max_logits[QUERIES][HEADS];
    fmlai_mqa p;
} fixture;

static fmlai_rows rows_of(void *data, fmla_dtype dtype, int64_t width)
{
    return (fmlai_rows){.data = data, .dtype = dtype, .stride = {0, HEADS * width, width}};
}

static void fill_inputs(fixture *f)
{
    uint64_t seed = 99;
    for (int i = 0; i < TOKENS * D; i++) {
        (&f->kv[0][0])[i] = fmlai_bf16_from_f32(test_random_unit(&seed));
    }
    for (int i = 0; i < QUERIES * HEADS * D; i++) {
        (&f->q[0][0][0])[i] = fmlai_bf16_from_f32(test_random_unit(&seed));
    }
    for (int i = 0; i < QUERIES * TOKENS; i++) {
        (&f->indices[0][0])[i] = i % TOKENS;
    }
    for (int r = 0; r < TABLE; r++) {
        for (int i = 0; i < HALF; i++) {
            f->cos_sin[r][i] = (float)cos(r * pow(1e-4, i / (double)HALF));
            f->cos_sin[r][HALF + i] = (float)sin(r * pow(1e-4, i / (double)HALF));
        }
    }
    for (int t = 0; t < QUERIES; t++) {
        f->positions[t] = 4 * t + 1;
    }
}

static fixture *make(void)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    fill_inputs(f);
    memset(f->codes, 0xA5, sizeof f->codes);
    memset(f->scale, 0xA5, sizeof f->scale);
    f->p = (fmlai_mqa){
        .batch = 1,
        .s_q = QUERIES,
        .num_tokens = QUERIES,
        .h_q = HEADS,
        .h_kv = 1,
        .d_qk = D,
        .d_v = D,
        .q = rows_of(f->q, FMLA_BF16, D),
        .fused = {.enabled = true,
                  .eps = 1e-4f,
                  .rope_dim = ROPE,
                  .positions = f->positions,
                  .position_stride = 1,
                  .cos_sin = &f->cos_sin[0][0],
                  .cos_sin_rows = TABLE,
                  .cos_sin_stride = ROPE,
                  .codes = &f->codes[0][0][0],
                  .scale = &f->scale[0][0][0],
                  .scale_rows = ROWS_A,
                  .groups = GROUPS,
                  .group_heads = G},
        .main = {.kind = FMLAI_LIST_INDEXED,
                 .pool = pool_over(f->kv, fmlai_format_row(FMLA_KV_BF16), TOKENS, 1, 0, D, 1),
                 .indices = &f->indices[0][0],
                 .index_inner = TOKENS,
                 .topk = TOKENS},
        .scale = 0.0625f,
        .out = rows_of(f->out, FMLA_F64, D),
        .lse = rows_of(f->lse, FMLA_F64, 1),
        .max_logits = rows_of(f->max_logits, FMLA_F64, 1),
        .abs_out = rows_of(f->abs_out, FMLA_F64, D),
        .empty_lse = -INFINITY,
        .lse_factor = 1,
    };
    return f;
}

/* The dims of pair i. */
static void pair_of(bool neox, int i, int *first, int *second)
{
    *first = D - ROPE + (neox ? i : 2 * i);
    *second = D - ROPE + (neox ? i + HALF : 2 * i + 1);
}

/* The codes' value at (query token, head, dim), by the published layout. */
static double cast_value(const fixture *f, int t, int h, int d)
{
    int group = h / G, g = h % G, c = d / 32;
    int byte = c * G + g;
    uint32_t word = (uint32_t)f->scale[group][byte / 4][t];
    double scale = reference_e8m0_value((int)(word >> (8 * (byte % 4)) & 0xFF));
    return scale * reference_e4m3_value(f->codes[t][group][c * G * 32 + g * 32 + d % 32]);
}

/* Attention without fusion over queries rotated here (rounded as the definition says), then rotated back
 * here. */
static void compose(const fixture *f, fixture *plain)
{
    plain->p.fused = (fmlai_fused){0};
    for (int t = 0; t < QUERIES; t++) {
        const float *angles = f->cos_sin[f->positions[t]];
        for (int h = 0; h < HEADS; h++) {
            for (int i = 0; i < HALF; i++) {
                int a, b;
                pair_of(f->p.fused.rope_neox, i, &a, &b);
                float x0 = fmlai_f32_from_bf16(f->q[t][h][a]), x1 = fmlai_f32_from_bf16(f->q[t][h][b]);
                float minus = -(x1 * angles[HALF + i]), plus = x1 * angles[i];
                plain->q[t][h][a] = fmlai_bf16_from_f32(fmaf(x0, angles[i], minus));
                plain->q[t][h][b] = fmlai_bf16_from_f32(fmaf(x0, angles[HALF + i], plus));
            }
        }
    }
    oracle_mqa(&plain->p);
    for (int t = 0; t < QUERIES; t++) {
        const float *angles = f->cos_sin[f->positions[t]];
        for (int h = 0; h < HEADS; h++) {
            for (int i = 0; i < HALF; i++) {
                int a, b;
                pair_of(f->p.fused.rope_neox, i, &a, &b);
                double c = (double)angles[i], s = (double)angles[HALF + i];
                double o0 = plain->out[t][h][a], o1 = plain->out[t][h][b];
                plain->out[t][h][a] = o0 * c + o1 * s;
                plain->out[t][h][b] = o1 * c - o0 * s;
            }
        }
    }
}

static void fused_is_the_composition_of_its_parts(void **state)
{
    (void)state;
    for (int neox = 0; neox < 2; neox++) {
        fixture *f = make(), *plain = make();
        f->p.fused.rope_neox = neox;
        oracle_mqa(&f->p);
        compose(f, plain);
        for (int i = 0; i < QUERIES * HEADS; i++) {
            assert_close((&f->lse[0][0])[i], (&plain->lse[0][0])[i], 1e-14);
            assert_close((&f->max_logits[0][0])[i], (&plain->max_logits[0][0])[i], 0);
            for (int d = 0; d < D; d++) {
                assert_close(f->out[i / HEADS][i % HEADS][d], plain->out[i / HEADS][i % HEADS][d], 1e-14);
                assert_true(f->abs_out[i / HEADS][i % HEADS][d] >= fabs(f->out[i / HEADS][i % HEADS][d]) - 1e-14);
            }
        }
        free(f);
        free(plain);
    }
}

/* The norm is a factor on the logits: logits with q_norm are those without, times rho of the stored q. */
static void norm_is_folded_into_the_logits(void **state)
{
    fixture *f = make(), *normed = make();
    (void)state;
    normed->p.fused.q_norm = true;
    oracle_mqa(&f->p);
    oracle_mqa(&normed->p);
    for (int t = 0; t < QUERIES; t++) {
        for (int h = 0; h < HEADS; h++) {
            double squares = 0;
            for (int d = 0; d < D; d++) {
                squares += pow((double)fmlai_f32_from_bf16(f->q[t][h][d]), 2);
            }
            double rho = 1 / sqrt(squares / D + (double)1e-4f);
            assert_true(rho > 1.5);
            assert_close(normed->max_logits[t][h], f->max_logits[t][h] * rho, 1e-13);
        }
    }
    free(f);
    free(normed);
}

static void permuted_storage_is_the_same_query(void **state)
{
    fixture *f = make(), *permuted = make();
    (void)state;
    for (int t = 0; t < QUERIES; t++) {
        uint16_t *q = &permuted->q[t][0][0];
        for (int h = 0; h < HEADS; h++) {
            for (int d = 0; d < D; d++) {
                q[d / 16 * (HEADS * 16) + h * 16 + d % 16] = f->q[t][h][d];
            }
        }
    }
    permuted->p.fused.q_permuted = true;
    f->p.fused.q_norm = permuted->p.fused.q_norm = true;
    oracle_mqa(&f->p);
    oracle_mqa(&permuted->p);
    assert_memory_equal(f->out, permuted->out, sizeof f->out);
    assert_memory_equal(f->lse, permuted->lse, sizeof f->lse);
    assert_memory_equal(f->codes, permuted->codes, sizeof f->codes);
    assert_memory_equal(f->scale, permuted->scale, sizeof f->scale);
    free(f);
    free(permuted);
}

static void codes_are_the_output_rounded_to_e4m3(void **state)
{
    fixture *f = make();
    (void)state;
    oracle_mqa(&f->p);
    for (int t = 0; t < QUERIES; t++) {
        for (int h = 0; h < HEADS; h++) {
            for (int c = 0; c < D / 32; c++) {
                double amax = 1e-4;
                for (int d = c * 32; d < c * 32 + 32; d++) {
                    amax = fmax(amax, fabs(f->out[t][h][d]));
                }
                double scale = ldexp(1, reference_ceil_log2(amax / 448));
                for (int d = c * 32; d < c * 32 + 32; d++) {
                    double rounded = reference_round(&reference_e4m3, f->out[t][h][d] / scale) * scale;
                    assert_close(cast_value(f, t, h, d), rounded, 0);
                }
            }
        }
    }
    for (int i = 0; i < GROUPS * WORDS; i++) {
        for (int t = QUERIES; t < ROWS_A; t++) {
            assert_int_equal((&f->scale[0][0][0])[i * ROWS_A + t], 0); /* padding tokens */
        }
    }
    free(f);
}

static void lonely_tokens_give_zero_codes(void **state)
{
    fixture *f = make();
    (void)state;
    for (int i = 0; i < TOKENS; i++) {
        f->indices[1][i] = i % 2 ? -1 : TOKENS;
    }
    oracle_mqa(&f->p);
    for (int h = 0; h < HEADS; h++) {
        assert_true(f->lse[1][h] == -INFINITY && f->max_logits[1][h] == -INFINITY);
    }
    for (int group = 0; group < GROUPS; group++) {
        for (int i = 0; i < G * D; i++) {
            assert_int_equal(f->codes[1][group][i] & 0x7F, 0);
        }
        for (int w = 0; w < WORDS; w++) {
            assert_int_equal(f->scale[group][w][1], 0x69696969);
        }
    }
    free(f);
}

/* An output projection with 32-granular scales, in its own and in the permuted order. */
typedef struct projection {
    uint8_t weight[GROUPS][D_OUT][G * D], out_weight[GROUPS][D_OUT][G * D];
    int32_t scale[GROUPS][WORDS][4], out_scale[GROUPS][WORDS][4];
} projection;

static double weight_value(const uint8_t *weight, const int32_t *scale, int column)
{
    int byte = column / 32;
    uint32_t word = (uint32_t)scale[byte / 4 * 4];
    return reference_e4m3_value(weight[column]) * reference_e8m0_value((int)(word >> (8 * (byte % 4)) & 0xFF));
}

static projection *make_projection(void)
{
    uint64_t seed = 3;
    projection *w = calloc(1, sizeof *w);
    assert_non_null(w);
    for (int i = 0; i < GROUPS * D_OUT * G * D; i++) {
        (&w->weight[0][0][0])[i] = (uint8_t)(test_random(&seed) % 0x7F);
    }
    for (int i = 0; i < GROUPS * WORDS * 4; i++) {
        uint64_t r = test_random(&seed);
        (&w->scale[0][0][0])[i] = (int32_t)(0x78787878 + (r & 0x07070707));
    }
    fmlai_permute p = {.kind = FMLA_OP_PERMUTE_WV,
                       .groups = GROUPS,
                       .rows = D_OUT,
                       .cols = G * D,
                       .words = WORDS,
                       .heads = G,
                       .d = D,
                       .weight = &w->weight[0][0][0],
                       .weight_stride = {D_OUT * G * D, G * D},
                       .scale = &w->scale[0][0][0],
                       .scale_stride = {WORDS * 4, 1, 4},
                       .out_weight = &w->out_weight[0][0][0],
                       .out_scale = &w->out_scale[0][0][0],
                       .out_scale_stride = {WORDS * 4, 1, 4}};
    oracle_permute(&p);
    return w;
}

/* Codes in stored order times the permuted weight are the output in its own order times the weight. */
static void wv_of_unpermuted_equals_wv_of_permuted(void **state)
{
    fixture *f = make();
    projection *w = make_projection();
    (void)state;
    oracle_mqa(&f->p);
    for (int i = 0; i < QUERIES * GROUPS * D_OUT; i++) {
        int t = i % QUERIES, group = i / QUERIES % GROUPS, r = i / (QUERIES * GROUPS);
        double own = 0, permuted = 0, size = 0;
        for (int column = 0; column < G * D; column++) {
            int h = group * G + column / D;
            double x = weight_value(w->weight[group][r], &w->scale[group][0][r], column);
            own += cast_value(f, t, h, column % D) * x;
            size += fabs(cast_value(f, t, h, column % D) * x);
        }
        for (int column = 0; column < G * D; column++) {
            uint32_t word = (uint32_t)f->scale[group][column / 128][t];
            double scale = reference_e8m0_value((int)(word >> (8 * (column / 32 % 4)) & 0xFF));
            permuted += reference_e4m3_value(f->codes[t][group][column]) * scale *
                        weight_value(w->out_weight[group][r], &w->out_scale[group][0][r], column);
        }
        assert_true(size > 1);
        assert_close(permuted, own, 1e-13 * size);
    }
    free(f);
    free(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fused_is_the_composition_of_its_parts),
        cmocka_unit_test(norm_is_folded_into_the_logits),
        cmocka_unit_test(permuted_storage_is_the_same_query),
        cmocka_unit_test(codes_are_the_output_rounded_to_e4m3),
        cmocka_unit_test(lonely_tokens_give_zero_codes),
        cmocka_unit_test(wv_of_unpermuted_equals_wv_of_permuted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
