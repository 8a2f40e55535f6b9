/* SPDX-License-Identifier: MIT */
/* attention.c: decode, prefill and multi-head attention on a case's tensors. */
#include "run/run.h"

#include <string.h>

static const char *const empty_lse_names[] = {"neg", "pos", NULL};  /* fmla_empty_lse */
static const char *const lse_base_names[] = {"natural", "2", NULL}; /* fmla_lse_base */

/* Width of V when nobody says: the latent part, or all of a narrower key. */
static int64_t default_d_v(int64_t d_qk)
{
    return d_qk < 512 ? d_qk : 512;
}

static int check_q(const run_case *c, const fmla_tensor *q, int32_t low_rank, int32_t high_rank)
{
    if (q->rank >= low_rank && q->rank <= high_rank) {
        return CLI_OK;
    }
    return cli_error("tensor '%sq' has rank %d; %s takes rank %d%s", c->prefix, (int)q->rank, c->operation->name,
                     (int)low_rank, high_rank > low_rank ? ", or one more" : "");
}

/* out [b, s_q, h_q, d_v], lse and max_logits [b, h_q, s_q]; ragged [total_q, h_q, d_v] and [h_q, total_q]. */
static int decode_outputs(run_case *c, fmla_decode_args *a)
{
    const int64_t *q = a->q.shape;
    bool ragged = a->q.rank == 3;
    int64_t d_v = default_d_v(q[a->q.rank - 1]);
    int32_t dtype = a->q.dtype;
    int64_t out[4] = {q[0], q[1], ragged ? 0 : q[2], 0};
    int64_t lse[3] = {ragged ? q[1] : q[0], ragged ? q[0] : q[2], q[1]};

    if (run_integer(c, "d_v", 1, INT32_MAX, &d_v) != CLI_OK || run_dtype(c, "out_dtype", &dtype) != CLI_OK) {
        return CLI_ERROR;
    }
    out[a->q.rank - 1] = d_v;
    if (run_output_new(c, "out", dtype, a->q.rank, out, &a->out) != CLI_OK ||
        run_output_new(c, "lse", FMLA_F32, a->q.rank - 1, lse, &a->lse) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_output_new(c, "max_logits", FMLA_F32, a->q.rank - 1, lse, &a->max_logits);
}

static int decode(run_case *c, bool sparse)
{
    fmla_decode_args a = FMLA_DECODE_ARGS_INIT;

    if (run_input(c, "q", true, &a.q) != CLI_OK || check_q(c, &a.q, 3, 4) != CLI_OK ||
        run_cache(c, "kv", true, &a.kv) != CLI_OK || run_input(c, "attn_sink", false, &a.attn_sink) != CLI_OK ||
        run_input(c, "cu_seqlens_q", a.q.rank == 3, &a.cu_seqlens_q) != CLI_OK) {
        return CLI_ERROR;
    }
    if (sparse) {
        if (run_input(c, "indices", true, &a.indices) != CLI_OK ||
            run_cache(c, "extra_kv", false, &a.extra_kv) != CLI_OK ||
            run_input(c, "extra_indices", false, &a.extra_indices) != CLI_OK ||
            run_input(c, "topk_length", false, &a.topk_length) != CLI_OK ||
            run_input(c, "extra_topk_length", false, &a.extra_topk_length) != CLI_OK) {
            return CLI_ERROR;
        }
    } else if (run_input(c, "block_table", false, &a.block_table) != CLI_OK ||
               run_input(c, "cache_seqlens", true, &a.cache_seqlens) != CLI_OK ||
               run_input(c, "kv_bound", false, &a.kv_bound) != CLI_OK ||
               run_flag(c, "causal", &a.causal) != CLI_OK) {
        return CLI_ERROR;
    }
    if (run_number(c, "softmax_scale", &a.softmax_scale) != CLI_OK ||
        run_choice(c, "empty_lse", empty_lse_names, &a.empty_lse) != CLI_OK ||
        run_choice(c, "lse_base", lse_base_names, &a.lse_base) != CLI_OK ||
        run_flag(c, "batch_invariant", &a.batch_invariant) != CLI_OK || decode_outputs(c, &a) != CLI_OK ||
        run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_decode(c->context, &a, NULL));
}

int run_dense_decode(run_case *c)
{
    return decode(c, false);
}

int run_sparse_decode(run_case *c)
{
    return decode(c, true);
}

int run_sparse_prefill(run_case *c)
{
    fmla_prefill_args a = FMLA_PREFILL_ARGS_INIT;
    int32_t dtype = 0;

    if (run_input(c, "q", true, &a.q) != CLI_OK || check_q(c, &a.q, 3, 3) != CLI_OK ||
        run_input(c, "kv", true, &a.kv) != CLI_OK || run_input(c, "indices", true, &a.indices) != CLI_OK ||
        run_input(c, "topk_length", false, &a.topk_length) != CLI_OK ||
        run_input(c, "attn_sink", false, &a.attn_sink) != CLI_OK) {
        return CLI_ERROR;
    }
    int64_t d_v = default_d_v(a.q.shape[2]);
    dtype = a.q.dtype;
    if (run_number(c, "softmax_scale", &a.softmax_scale) != CLI_OK ||
        run_choice(c, "empty_lse", empty_lse_names, &a.empty_lse) != CLI_OK ||
        run_choice(c, "lse_base", lse_base_names, &a.lse_base) != CLI_OK ||
        run_integer(c, "d_v", 1, INT32_MAX, &d_v) != CLI_OK || run_dtype(c, "out_dtype", &dtype) != CLI_OK) {
        return CLI_ERROR;
    }
    int64_t out[3] = {a.q.shape[0], a.q.shape[1], d_v};
    if (run_output_new(c, "out", dtype, 3, out, &a.out) != CLI_OK ||
        run_output_new(c, "lse", FMLA_F32, 2, out, &a.lse) != CLI_OK ||
        run_output_new(c, "max_logits", FMLA_F32, 2, out, &a.max_logits) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_prefill(c->context, &a, NULL));
}

int run_mha_forward(run_case *c)
{
    fmla_mha_forward_args a = FMLA_MHA_FORWARD_ARGS_INIT;

    if (run_input(c, "q", true, &a.q) != CLI_OK || check_q(c, &a.q, 3, 3) != CLI_OK ||
        run_input(c, "k", true, &a.k) != CLI_OK || run_input(c, "v", true, &a.v) != CLI_OK ||
        run_input(c, "cu_seqlens_q", false, &a.cu_seqlens_q) != CLI_OK ||
        run_input(c, "cu_seqlens_kv", false, &a.cu_seqlens_kv) != CLI_OK ||
        run_number(c, "softmax_scale", &a.softmax_scale) != CLI_OK ||
        run_choice(c, "empty_lse", empty_lse_names, &a.empty_lse) != CLI_OK ||
        run_flag(c, "causal", &a.causal) != CLI_OK) {
        return CLI_ERROR;
    }
    if (a.v.rank != 3) {
        return cli_error("tensor '%sv' has rank %d; mha_forward takes rank 3", c->prefix, (int)a.v.rank);
    }
    int64_t out[3] = {a.q.shape[0], a.q.shape[1], a.v.shape[2]};
    if (run_output_new(c, "out", a.q.dtype, 3, out, &a.out) != CLI_OK ||
        run_output_new(c, "lse", FMLA_F32, 2, out, &a.lse) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_mha_forward(c->context, &a, NULL));
}

int run_mha_backward(run_case *c)
{
    fmla_mha_backward_args a = FMLA_MHA_BACKWARD_ARGS_INIT;
    int32_t dtype = 0;

    if (run_input(c, "q", true, &a.q) != CLI_OK || run_input(c, "k", true, &a.k) != CLI_OK ||
        run_input(c, "v", true, &a.v) != CLI_OK || run_input(c, "out", true, &a.out) != CLI_OK ||
        run_input(c, "lse", true, &a.lse) != CLI_OK || run_input(c, "dout", true, &a.dout) != CLI_OK ||
        run_input(c, "cu_seqlens_q", false, &a.cu_seqlens_q) != CLI_OK ||
        run_input(c, "cu_seqlens_kv", false, &a.cu_seqlens_kv) != CLI_OK ||
        run_number(c, "softmax_scale", &a.softmax_scale) != CLI_OK || run_flag(c, "causal", &a.causal) != CLI_OK) {
        return CLI_ERROR;
    }
    dtype = a.q.dtype;
    if (run_dtype(c, "out_dtype", &dtype) != CLI_OK ||
        run_output_new(c, "dq", dtype, a.q.rank, a.q.shape, &a.dq) != CLI_OK ||
        run_output_new(c, "dk", dtype, a.k.rank, a.k.shape, &a.dk) != CLI_OK ||
        run_output_new(c, "dv", dtype, a.v.rank, a.v.shape, &a.dv) != CLI_OK || run_ready(c) != CLI_OK) {
        return CLI_ERROR;
    }
    return run_called(c, fmla_mha_backward(c->context, &a, NULL));
}
