/* SPDX-License-Identifier: MIT */
/* fused.c: the fused norm-RoPE-attention-RoPE-cast on a case's tensors. */
#include "run/run.h"

#include "problem/numbers.h"

#include <string.h>

static const char *const empty_lse_names[] = {"neg", "pos", NULL};
static const char *const layout_names[] = {"permuted", "plain", NULL};    /* fmla_q_layout */
static const char *const rope_names[] = {"interleaved", "neox", NULL};    /* fmla_rope_style */

/* Everything of fmla_fused_params but the outputs. */
static int fused_inputs(run_case *c, fmla_fused_params *f)
{
    int64_t rope_dim = 0;
    int64_t groups = 1;

    f->rms_norm_eps = 1e-4F;
    if (run_input(c, "token_positions", true, &f->token_positions) != CLI_OK ||
        run_input(c, "cos_sin_cache", true, &f->cos_sin_cache) != CLI_OK ||
        run_input(c, "attn_sink", false, &f->attn_sink) != CLI_OK || run_flag(c, "q_norm", &f->q_norm) != CLI_OK ||
        run_number(c, "rms_norm_eps", &f->rms_norm_eps) != CLI_OK ||
        run_choice(c, "q_layout", layout_names, &f->q_layout) != CLI_OK ||
        run_choice(c, "rope_style", rope_names, &f->rope_style) != CLI_OK ||
        run_integer(c, "rope_dim", 0, 4096, &rope_dim) != CLI_OK ||
        run_integer(c, "n_wv_group", 1, INT32_MAX, &groups) != CLI_OK ||
        run_choice(c, "empty_lse", empty_lse_names, &f->empty_lse) != CLI_OK) {
        return CLI_ERROR;
    }
    f->rope_dim = (int32_t)rope_dim;
    f->n_wv_group = (int32_t)groups;
    return CLI_OK;
}

static int fused_outputs(run_case *c, const fmla_tensor *q, fmla_fused_params *f)
{
    if (q->rank != 3) {
        return cli_error("tensor '%sq' has rank %d; %s takes [s_q, h_q, 512]", c->prefix, (int)q->rank,
                         c->operation->name);
    }
    if (q->shape[1] % f->n_wv_group != 0) {
        return cli_error("n_wv_group: %d does not divide %lld heads", (int)f->n_wv_group, (long long)q->shape[1]);
    }
    int64_t width = q->shape[1] / f->n_wv_group * q->shape[2];
    int64_t codes[3] = {q->shape[0], f->n_wv_group, width};
    int64_t words = width / 128;
    int64_t padded = (q->shape[0] + 3) / 4 * 4;

    /* The words' own layout is [n_wv_group, words, padded tokens]; that is how the file has them, too. */
    int64_t stored[3] = {f->n_wv_group, words, padded};
    fmla_tensor unpacked;
    if (run_output_new(c, "out_fp8", FMLA_F8_E4M3, 3, codes, &f->out_fp8) != CLI_OK ||
        run_output_new(c, "out_scale", FMLA_I32, 3, stored, &f->out_scale) != CLI_OK ||
        run_output_new(c, "lse", FMLA_F32, 2, q->shape, &f->lse) != CLI_OK ||
        run_output_new(c, "max_logits", FMLA_F32, 2, q->shape, &f->max_logits) != CLI_OK ||
        run_output_new(c, "out", FMLA_F32, 3, q->shape, &unpacked) != CLI_OK) {
        return CLI_ERROR;
    }
    int64_t shape[3] = {q->shape[0], f->n_wv_group, words};
    int64_t stride[3] = {1, padded * words, padded};
    memcpy(f->out_scale.shape, shape, sizeof shape);
    memcpy(f->out_scale.stride, stride, sizeof stride);
    return CLI_OK;
}

int run_fused_prefill(run_case *c)
{
    fmla_fused_prefill_args a = FMLA_FUSED_PREFILL_ARGS_INIT;

    if (run_input(c, "q", true, &a.q) != CLI_OK || run_input(c, "kv", true, &a.kv) != CLI_OK ||
        run_input(c, "indices", true, &a.indices) != CLI_OK ||
        run_input(c, "topk_length", false, &a.topk_length) != CLI_OK ||
        run_number(c, "softmax_scale", &a.softmax_scale) != CLI_OK || fused_inputs(c, &a.fused) != CLI_OK ||
        fused_outputs(c, &a.q, &a.fused) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_fused_prefill(c->context, &a, NULL));
}

int run_fused_decode(run_case *c)
{
    fmla_fused_decode_args a = FMLA_FUSED_DECODE_ARGS_INIT;

    if (run_input(c, "q", true, &a.q) != CLI_OK || run_cache(c, "kv", true, &a.kv) != CLI_OK ||
        run_cache(c, "extra_kv", false, &a.extra_kv) != CLI_OK ||
        run_input(c, "indices", true, &a.indices) != CLI_OK ||
        run_input(c, "extra_indices", false, &a.extra_indices) != CLI_OK ||
        run_input(c, "topk_length", false, &a.topk_length) != CLI_OK ||
        run_input(c, "extra_topk_length", false, &a.extra_topk_length) != CLI_OK ||
        run_number(c, "softmax_scale", &a.softmax_scale) != CLI_OK || fused_inputs(c, &a.fused) != CLI_OK ||
        fused_outputs(c, &a.q, &a.fused) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_fused_decode(c->context, &a, NULL));
}

static const fmla_tensor *fetched(const run_case *c, const char *name)
{
    for (int i = 0; i < c->output_count; i++) {
        if (strcmp(c->outputs[i].name, name) == 0) {
            return &c->outputs[i].host;
        }
    }
    return NULL;
}

int run_fused_unpack(run_case *c)
{
    const fmla_tensor *out = fetched(c, "out");
    const fmla_tensor *codes = fetched(c, "out_fp8");
    const fmla_tensor *scales = fetched(c, "out_scale");
    int64_t groups = codes->shape[1];
    int64_t heads = out->shape[1] / groups; /* of a group */
    int64_t d_v = out->shape[2];
    int64_t padded = scales->shape[2];

    for (int64_t i = 0; i < run_elements(out); i++) {
        int64_t d = i % d_v;
        int64_t head = i / d_v % out->shape[1];
        int64_t token = i / d_v / out->shape[1];
        int64_t group = head / heads;
        int64_t g = head % heads;
        int64_t place = (token * groups + group) * codes->shape[2] + d / 32 * (heads * 32) + g * 32 + d % 32;
        int64_t byte = d / 32 * heads + g;
        int64_t word = (group * scales->shape[1] + byte / 4) * padded + token;
        uint32_t scale = ((const uint32_t *)scales->data)[word] >> (8 * (byte % 4)) & 0xFF;
        ((float *)out->data)[i] =
            (float)(e4m3_value(((const uint8_t *)codes->data)[place]) * e8m0_value((uint8_t)scale));
    }
    return CLI_OK;
}
