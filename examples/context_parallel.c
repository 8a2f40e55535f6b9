/* SPDX-License-Identifier: MIT */
/*
 * Context parallel decode: the keys of one request are dealt to two ranks like cards (rank r holds tokens r, r + 2,
 * ...). Each rank attends its own part, with an explicit bound per query token because the causal edge lies in global
 * positions; fmla_merge joins the two results. Prints the largest difference from the undivided call.
 */
#include <math.h>
#include <stdio.h>

#include <flashmla/flashmla.h>

enum { S_Q = 3, H = 8, D = 576, DV = 512, LEN = 101, RANKS = 2 };

static uint16_t q[S_Q * H * D], keys[LEN * D], part[RANKS][LEN * D];
static float whole[S_Q * H * DV], outs[RANKS][S_Q * H * DV], merged[S_Q * H * DV], lses[RANKS][H * S_Q];

static void fill(uint16_t *x, size_t n, uint32_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (uint16_t)((seed & 0x8000u) | 0x3e00u | (seed >> 24 & 0x7f)); /* +-0.125 .. 0.25 as bf16 */
    }
}

/* Attention of all query tokens over `len` keys, query token j seeing bound[j] of them. */
static fmla_status attend(fmla_context *ctx, uint16_t *k, int32_t len, const int32_t *bound, float *out, float *lse)
{
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;
    a.q = fmla_tensor_4d(q, FMLA_BF16, 1, S_Q, H, D);
    a.kv = (fmla_kv_cache){.data = k, .format = FMLA_KV_BF16, .num_pages = 1, .page_size = LEN};
    a.cache_seqlens = fmla_tensor_1d(&len, FMLA_I32, 1);
    a.kv_bound = fmla_tensor_2d(bound, FMLA_I32, 1, S_Q);
    a.out = fmla_tensor_4d(out, FMLA_F32, 1, S_Q, H, DV);
    a.lse = fmla_tensor_3d(lse, FMLA_F32, 1, H, S_Q);
    return fmla_decode(ctx, &a, NULL);
}

int main(void)
{
    fmla_context *ctx;
    int32_t bound[RANKS + 1][S_Q], count[RANKS];
    fmla_tensor out_views[RANKS], lse_views[RANKS];
    float lse[H * S_Q];

    fill(q, S_Q * H * D, 1);
    fill(keys, LEN * D, 2);
    for (int r = 0; r < RANKS; r++) {
        count[r] = (LEN - r + RANKS - 1) / RANKS;
        for (int i = 0; i < count[r] * D; i++) {
            part[r][i] = keys[(i / D * RANKS + r) * D + i % D];
        }
        for (int j = 0; j < S_Q; j++) {
            bound[RANKS][j] = LEN - S_Q + j + 1;                     /* causal, global */
            bound[r][j] = (bound[RANKS][j] - r + RANKS - 1) / RANKS; /* of these, the rank's */
        }
        out_views[r] = fmla_tensor_3d(outs[r], FMLA_F32, S_Q, H, DV);
        lse_views[r] = fmla_tensor_2d(lses[r], FMLA_F32, S_Q, H); /* lse is [h_q, s_q]: swap strides */
        lse_views[r].stride[0] = 1;
        lse_views[r].stride[1] = S_Q;
    }
    if (fmla_context_create(NULL, &ctx) != FMLA_OK) {
        fprintf(stderr, "%s\n", fmla_last_create_error());
        return 1;
    }
    fmla_status status = attend(ctx, keys, LEN, bound[RANKS], whole, lse);
    for (int r = 0; r < RANKS && status == FMLA_OK; r++) {
        status = attend(ctx, part[r], count[r], bound[r], outs[r], lses[r]);
    }
    if (status == FMLA_OK) {
        fmla_merge_args m = FMLA_MERGE_ARGS_INIT;
        m.outs = out_views;
        m.lses = lse_views;
        m.count = RANKS;
        m.out = fmla_tensor_3d(merged, FMLA_F32, S_Q, H, DV);
        status = fmla_merge(ctx, &m, NULL);
    }
    float worst = 0;
    for (int i = 0; i < S_Q * H * DV; i++) {
        worst = fmaxf(worst, fabsf(merged[i] - whole[i]));
    }
    if (status == FMLA_OK) {
        printf("two ranks merged differ from one call by at most %.2e\n", worst);
    } else {
        fprintf(stderr, "%s: %s\n", fmla_status_string(status), fmla_context_error(ctx));
    }
    fmla_context_destroy(ctx);
    return status == FMLA_OK && worst < 1e-2f ? 0 : 1;
}
