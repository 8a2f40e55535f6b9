# SPDX-License-Identifier: MIT
"""The operations on arrays of any kind: one function per C function, with the names, signs and sizes that all published
generations share; what they differ in is settled by the callers.

Arguments are arrays or None, as the public functions have sorted them; results are made beside the query. The torch
operators of _torch.py and the public functions both end here.
"""

import ctypes

from . import _caches as caches
from . import _library as c
from ._context import Call, compute_units
from ._tensors import array, code_dtype, empty, empty_cast, permuted

lib = c.lib


def _scale(scale):
    return c.SCALE_DEFAULT if scale is None else float(scale)


def _check_width(out, d_v, name):
    """A given result fixes the library's d_v; it must be the call's."""
    shape = array(out, name).shape
    if len(shape) == 0 or shape[-1] != d_v:
        raise RuntimeError(f"{name}: shape is {list(shape)}; allowed: [.., {d_v}]")


def decode(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    softmax_scale,
    causal,
    indices,
    attn_sink,
    extra_k_cache,
    extra_indices,
    topk_length,
    extra_topk_length,
    cu_seqlens_q,
    batch_invariant,
    layout,
    out=None,
    lse=None,
    keeper=None,
):
    """fmla_decode; returns (out [b, s_q, h_q, d_v], lse [b, h_q, s_q]), ragged (out [n, h_q, d_v], lse [h_q, n]).
    keeper (_plans.py) is told of a call that went well."""
    call = Call(c.DecodeArgs)
    args = call.args
    view = call.tensor("q", q)
    d_qk = view.shape[-1] if view.shape else 0
    caches.add(call, "kv", k_cache, d_qk, layout, "k_cache")
    if extra_k_cache is not None:
        caches.add(call, "extra_kv", extra_k_cache, d_qk, layout, "extra_k_cache")
    call.tensor("block_table", block_table)
    call.tensor("cache_seqlens", cache_seqlens)
    call.tensor("indices", indices)
    call.tensor("extra_indices", extra_indices, "extra_indices_in_kvcache")
    call.tensor("topk_length", topk_length)
    call.tensor("extra_topk_length", extra_topk_length)
    call.tensor("attn_sink", attn_sink)
    call.tensor("cu_seqlens_q", cu_seqlens_q)
    shape = tuple(view.shape)
    if out is None:
        out = empty(q, shape[:-1] + (head_dim_v,), view.dtype)
    else:
        _check_width(out, head_dim_v, "out")
    if lse is None and len(shape) >= 3:
        lse = empty(
            q, (shape[1], shape[0]) if cu_seqlens_q is not None else (shape[0], shape[2], *shape[1:2]), c.F32
        )
    call.tensor("out", out)
    call.tensor("lse", lse)
    args.softmax_scale = _scale(softmax_scale)
    args.causal = bool(causal)
    args.batch_invariant = bool(batch_invariant)
    args.empty_lse = c.EMPTY_LSE_POS_INF
    call.run(lib.fmla_decode, lib.fmla_decode_workspace_size)
    if keeper is not None:
        keeper.keep(call, out, lse)
    return out, lse


def prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, base2, out=None, lse=None):
    """fmla_prefill; returns (out [s_q, h_q, d_v], max_logits [s_q, h_q], lse [s_q, h_q])."""
    call = Call(c.PrefillArgs)
    args = call.args
    view = call.tensor("q", q)
    call.tensor("kv", kv)
    call.tensor("indices", indices)
    call.tensor("topk_length", topk_length)
    call.tensor("attn_sink", attn_sink)
    rows = tuple(view.shape[:2])
    if out is None:
        out = empty(q, rows + (d_v,), view.dtype)
    else:
        _check_width(out, d_v, "out")
    lse = empty(q, rows, c.F32) if lse is None else lse
    max_logits = empty(q, rows, c.F32)
    call.tensor("out", out)
    call.tensor("lse", lse)
    call.tensor("max_logits", max_logits)
    args.softmax_scale = _scale(sm_scale)
    args.empty_lse = c.EMPTY_LSE_NEG_INF if base2 else c.EMPTY_LSE_POS_INF
    args.lse_base = c.LSE_BASE2 if base2 else c.LSE_NATURAL
    call.run(lib.fmla_prefill, lib.fmla_prefill_workspace_size)
    return out, max_logits, lse


def mha_forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    softmax_scale,
    causal,
    out=None,
    lse=None,
):
    """fmla_mha_forward; returns (out [total_q, h_q, d_v], lse [total_q, h_q] with stride[0] 1)."""
    call = Call(c.MhaForwardArgs)
    args = call.args
    view = call.tensor("q", q)
    call.tensor("k", k)
    v_view = call.tensor("v", v)
    call.tensor("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_qo")
    call.tensor("cu_seqlens_kv", cu_seqlens_kv)
    if len(view.shape) == 3 and v_view.shape:
        out = empty(q, (view.shape[0], view.shape[1], v_view.shape[-1]), view.dtype) if out is None else out
        lse = permuted(empty(q, (view.shape[1], view.shape[0]), c.F32), (1, 0)) if lse is None else lse
    call.tensor("out", out)
    call.tensor("lse", lse)
    call.names.update(max_seqlen_q="max_seqlen_qo", max_seqlen_kv="max_seqlen_kv")
    args.max_seqlen_q, args.max_seqlen_kv = int(max_seqlen_q or 0), int(max_seqlen_kv or 0)
    args.softmax_scale = _scale(softmax_scale)
    args.causal = bool(causal)
    args.empty_lse = c.EMPTY_LSE_NEG_INF
    call.run(lib.fmla_mha_forward, lib.fmla_mha_forward_workspace_size)
    return out, lse


def mha_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_q,
    cu_seqlens_kv,
    max_seqlen_q,
    max_seqlen_kv,
    softmax_scale,
    causal,
    dq=None,
    dk=None,
    dv=None,
):
    """fmla_mha_backward; returns (dq, dk, dv) with the shapes of q, k, v."""
    call = Call(c.MhaBackwardArgs)
    args = call.args
    views = {name: call.tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    call.tensor("out", out)
    call.tensor("lse", lse)
    call.tensor("dout", dout, "do")
    call.tensor("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_qo")
    call.tensor("cu_seqlens_kv", cu_seqlens_kv)
    gradients = []
    for name, given in (("q", dq), ("k", dk), ("v", dv)):
        gradients.append(empty(q, tuple(views[name].shape), views["q"].dtype) if given is None else given)
        call.tensor("d" + name, gradients[-1])
    call.names.update(max_seqlen_q="max_seqlen_qo", max_seqlen_kv="max_seqlen_kv")
    args.max_seqlen_q, args.max_seqlen_kv = int(max_seqlen_q or 0), int(max_seqlen_kv or 0)
    args.softmax_scale = _scale(softmax_scale)
    args.causal = bool(causal)
    call.run(lib.fmla_mha_backward, lib.fmla_mha_backward_workspace_size)
    return tuple(gradients)


# ---- fused norm-RoPE-attention-RoPE-cast -------------------------------------------------------------------


def _fused(call, view, q, norm, eps, token_positions, cos_sin_cache, n_wv_group, attn_sink, with_max_logits):
    """The params that prefill and decode share; makes the results."""
    base = call.struct.fused.offset
    params = call.args.fused

    def put(field, x):
        call.tensor(field, x, base=base, kind=c.FusedParams)

    params.q_norm, params.rms_norm_eps, params.n_wv_group = bool(norm), float(eps), int(n_wv_group)
    params.empty_lse = c.EMPTY_LSE_POS_INF
    call.names["n_wv_group"] = "n_wv_group"
    put("token_positions", token_positions)
    put("cos_sin_cache", cos_sin_cache)
    put("attn_sink", attn_sink)
    tokens, heads = (tuple(view.shape[:2]) + (0, 0))[:2]
    group = heads // n_wv_group if n_wv_group > 0 and heads % n_wv_group == 0 else 0
    padded = -(-tokens // 4) * 4
    out_fp8 = empty_cast(q, (tokens, n_wv_group, group * 512), code_dtype(q))
    # Words of one token are A apart: memory is [group][word][token], the tensor [token, group, word].
    out_sf = permuted(empty(q, (n_wv_group, group * 512 // 128, padded), c.I32), (2, 0, 1))[:tokens]
    lse = empty(q, (tokens, heads), c.F32)
    max_logits = empty(q, (tokens, heads), c.F32) if with_max_logits else None
    put("out_fp8", out_fp8)
    put("out_scale", out_sf)
    put("lse", lse)
    put("max_logits", max_logits)
    return out_fp8, out_sf, max_logits, lse


def _check_groups(view, n_wv_group):
    if len(view.shape) != 3:
        raise RuntimeError(f"q: shape is {list(view.shape)}; allowed: [s_q, h_q, 512]")
    if n_wv_group < 1 or view.shape[1] % n_wv_group:
        raise RuntimeError(f"n_wv_group: {n_wv_group}; allowed: a divisor of h_q, {view.shape[1]}")


def fused_prefill(
    norm, eps, token_positions, cos_sin_cache, n_wv_group, q, kv, indices, sm_scale, attn_sink, topk_length
):
    """fmla_fused_prefill; returns (out_fp8, out_sf, max_logits, lse)."""
    call = Call(c.FusedPrefillArgs)
    view = call.tensor("q", q)
    _check_groups(view, n_wv_group)
    call.tensor("kv", kv)
    call.tensor("indices", indices)
    call.tensor("topk_length", topk_length)
    call.args.softmax_scale = _scale(sm_scale)
    results = _fused(call, view, q, norm, eps, token_positions, cos_sin_cache, n_wv_group, attn_sink, True)
    call.run(lib.fmla_fused_prefill, lib.fmla_fused_prefill_workspace_size)
    return results


def fused_decode(
    norm,
    eps,
    token_positions,
    cos_sin_cache,
    n_wv_group,
    q,
    k_cache,
    indices,
    sm_scale,
    attn_sink,
    topk_length,
    extra_k_cache,
    extra_indices,
    extra_topk_length,
    layout,
):
    """fmla_fused_decode; returns (out_fp8, out_sf, lse)."""
    call = Call(c.FusedDecodeArgs)
    view = call.tensor("q", q)
    _check_groups(view, n_wv_group)
    caches.add(call, "kv", k_cache, view.shape[2], layout, "k_cache")
    if extra_k_cache is not None:
        caches.add(call, "extra_kv", extra_k_cache, view.shape[2], layout, "extra_k_cache")
    call.tensor("indices", indices, "indices_in_kvcache")
    call.tensor("extra_indices", extra_indices, "extra_indices_in_kvcache")
    call.tensor("topk_length", topk_length)
    call.tensor("extra_topk_length", extra_topk_length)
    call.args.softmax_scale = _scale(sm_scale)
    results = _fused(call, view, q, norm, eps, token_positions, cos_sin_cache, n_wv_group, attn_sink, False)
    call.run(lib.fmla_fused_decode, lib.fmla_fused_decode_workspace_size)
    return results[0], results[1], results[3]


# ---- weights and caches ------------------------------------------------------------------------------------


def _scale_words(like, groups, rows, words):
    """Scale words, columns A = 4 k >= rows apart: [rows, words], or [groups, rows, words]."""
    padded = -(-rows // 4) * 4
    if groups is None:
        return permuted(empty(like, (words, padded), c.I32), (1, 0))[:rows]
    return permuted(empty(like, (groups, words, padded), c.I32), (0, 2, 1))[:, :rows]


def permute_q_b(weight, scale, h_q, d_q):
    """fmla_permute_q_b; returns new (weight, scale)."""
    call = Call(c.PermuteQBArgs)
    w = call.tensor("weight", weight, "w")
    s = call.tensor("scale", scale, "sf")
    if len(w.shape) != 2 or len(s.shape) != 2:
        raise RuntimeError(
            f"(w, sf): shapes are {list(w.shape)}, {list(s.shape)}; allowed: [h_q * d_q, R], "
            "[h_q * d_q, R / group / 4]"
        )
    out_weight = empty_cast(weight, tuple(w.shape), weight.dtype)
    out_scale = _scale_words(weight, None, *s.shape)
    call.tensor("out_weight", out_weight)
    call.tensor("out_scale", out_scale)
    call.args.h_q, call.args.d_q = h_q, d_q
    call.run(lib.fmla_permute_q_b)
    return out_weight, out_scale


def permute_wv(weight, scale, wv_group_size, d_o):
    """fmla_permute_wv; returns new (weight, scale)."""
    call = Call(c.PermuteWvArgs)
    w = call.tensor("weight", weight, "w")
    s = call.tensor("scale", scale, "sf")
    if len(w.shape) != 3 or len(s.shape) != 3:
        raise RuntimeError(
            f"(w, sf): shapes are {list(w.shape)}, {list(s.shape)}; allowed: [n_group, D_out, G * d_o], "
            "[n_group, D_out, G * d_o / 128]"
        )
    out_weight = empty_cast(weight, tuple(w.shape), weight.dtype)
    out_scale = _scale_words(weight, *s.shape)
    call.tensor("out_weight", out_weight)
    call.tensor("out_scale", out_scale)
    call.args.wv_group_size, call.args.d_o = wv_group_size, d_o
    call.run(lib.fmla_permute_wv)
    return out_weight, out_scale


def quantize(tokens, cache, kv_format, quantizer):
    """fmla_quantize: tokens [n, d] into a cache [pages, page_size, 1, bytes], in order."""
    call = Call(c.QuantizeArgs)
    call.tensor("src", tokens, "input_k_cache")
    view = array(cache, "cache")
    call.cache("dst", view, caches.pack(view, kv_format, "cache"), "cache")
    call.args.quantizer = quantizer
    call.run(lib.fmla_quantize)


def dequantize(cache, kv_format, tokens):
    """fmla_dequantize: every token of a cache, in order, into tokens [n, d]."""
    call = Call(c.DequantizeArgs)
    view = array(cache, "quant_k_cache")
    call.cache("src", view, caches.pack(view, kv_format, "quant_k_cache"), "quant_k_cache")
    call.tensor("dst", tokens)
    call.run(lib.fmla_dequantize)


def indices_convert(positions, block_table, page_size):
    """fmla_indices_convert; returns int32 indices with the shape of positions."""
    call = Call(c.IndicesConvertArgs)
    view = call.tensor("positions", positions, "abs_indices")
    call.tensor("block_table", block_table)
    indices = empty(positions, tuple(view.shape), c.I32)
    call.tensor("indices", indices)
    call.args.page_size = page_size
    call.run(lib.fmla_indices_convert)
    return indices


def fp8_cast(x, group):
    """fmla_fp8_cast of a matrix [n, d]; returns (codes [n, d], scale words [n, d / group / 4])."""
    call = Call(c.Fp8CastArgs)
    view = call.tensor("src", x, "x")
    if len(view.shape) != 2:
        raise RuntimeError(f"x: shape is {list(view.shape)}; allowed: [n, d]")
    codes = empty_cast(x, tuple(view.shape), code_dtype(x))
    scale = _scale_words(x, None, view.shape[0], view.shape[1] // group // 4)
    call.tensor("codes", codes)
    call.tensor("scale", scale)
    call.args.group = group
    call.run(lib.fmla_fp8_cast)
    return codes, scale


def merge(outs, lses, attn_sink, positive_empty, out, lse):
    """fmla_merge of states [n, h, d] and [n, h] into out and lse."""
    call = Call(c.MergeArgs)
    count = len(outs)
    states = []
    for kind, arrays in (("outs", outs), ("lses", lses)):
        packed = (c.Tensor * count)()
        for i, x in enumerate(arrays):
            view = array(x, f"{kind}[{i}]")
            call.place(view, f"{kind}[{i}]")
            call.views.append(view)
            view.pack_into(packed, i * ctypes.sizeof(c.Tensor))
        states.append(packed)
    call.args.outs, call.args.lses, call.args.count = states[0], states[1], count
    call.args.empty_lse = c.EMPTY_LSE_POS_INF if positive_empty else c.EMPTY_LSE_NEG_INF
    call.tensor("attn_sink", attn_sink)
    call.tensor("out", out)
    call.tensor("lse", lse)
    call.run(lib.fmla_merge)
    return out, lse


# ---- schedule ----------------------------------------------------------------------------------------------


def schedule(
    like,
    form,
    overhead_blocks,
    parts,
    cache_seqlens=None,
    batch=0,
    topk=-1,
    extra_topk=0,
    topk_length=None,
    extra_topk_length=None,
):
    """fmla_schedule; returns (tile_scheduler_metadata [parts, 8], num_splits [b + 1]), int32, beside `like`."""
    call = Call(c.ScheduleArgs)
    view = call.tensor("cache_seqlens", cache_seqlens)
    call.tensor("topk_length", topk_length)
    call.tensor("extra_topk_length", extra_topk_length)
    if view is not None:
        batch = view.shape[0] if view.shape else 0
    metadata, num_splits = empty(like, (parts, 8), c.I32), empty(like, (batch + 1,), c.I32)
    call.tensor("metadata", metadata)
    call.tensor("num_splits", num_splits)
    args = call.args
    args.batch, args.topk, args.extra_topk = (0, -1, 0) if view is not None else (batch, topk, extra_topk)
    args.form, args.overhead_blocks = form, overhead_blocks
    call.run(lib.fmla_schedule)
    return metadata, num_splits


def device_units(like, name):
    """(compute units, capability, on_cuda) of an array's device."""
    device = array(like, name).device
    return compute_units(device) + (device[0] == c.DEVICE_CUDA,)
