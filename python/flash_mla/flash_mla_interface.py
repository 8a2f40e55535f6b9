# SPDX-License-Identifier: MIT
"""The public functions under their published names: decode, sparse prefill, multi-head attention, merge.

Shape letters: b requests, s_q query tokens of a request, h_q query heads, h_kv KV heads, d_qk query and key width, d_v
value width, P tokens per page, topk index slots per query token. Logits are softmax_scale * (q . k); every lse is
natural log unless said otherwise, and never includes attn_sink.

Errors: AssertionError for arguments that contradict each other, RuntimeError for tensors of a wrong dtype, shape,
stride, device or value; both name the argument, its value and what is allowed. No result is written then.
"""

from typing import Any, Optional, Tuple

from . import _caches as caches
from . import _library as c
from . import _metadata as metadata
from . import _operations as operations
from . import _plans as plans
from . import _torch_bridge as bridge
from . import compat
from ._metadata import FlashMLASchedMeta, get_mla_metadata
from ._tensors import array, concrete, empty, is_array, permuted, torch_module, uniform_offsets

__all__ = [
    "FlashMLASchedMeta",
    "get_mla_metadata",
    "flash_mla_with_kvcache",
    "flash_mla_sparse_fwd",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "merge_states",
]


def _need(condition, message):
    if not condition:
        raise AssertionError(message)


# ---- decode ------------------------------------------------------------------------------------------------


def flash_mla_with_kvcache(
    q,
    k_cache,
    block_table=None,
    cache_seqlens=None,
    head_dim_v: int = 512,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: Optional[bool] = None,
    indices=None,
    attn_sink=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    topk_length=None,
    extra_topk_length=None,
    enable_batch_invariant: bool = False,
    *,
    kv_layout: Optional[str] = None,
    cu_seqlens_q=None,
    out=None,
    lse=None,
) -> Tuple[Any, Any]:
    """Decode attention over a paged KV cache: dense, or sparse when `indices` is given.

    q: [b, s_q, h_q, d_qk] bf16 or fp16, d_qk 576 or 512, strides free but the last.
    k_cache: [num_pages, P, h_kv, last], any P >= 1, any page stride. bf16/fp16 as q with last = d_qk; or one-byte
        elements (e4m3, int8, uint8) with last 656 (d_qk 576, V3.2), 584 (V4/MODEL1), 528 (V4.1 fp8), all with h_kv 1.
    block_table: [b, max_pages] int32, cache_seqlens: [b] int32. Dense only; with indices both are ignored.
    head_dim_v: 512; V is the first 512 dims of K.
    tile_scheduler_metadata, num_splits: whatever get_mla_metadata gave, or None. Results never depend on them.
    softmax_scale: default d_qk ** -0.5. causal: dense only, aligned to the end of both sequences.
    is_fp8_kvcache: True, False, or None to take it from k_cache's dtype; a contradiction is an error.
    indices: [b, s_q, topk] int32, page * P + slot; entries outside the cache (-1 by custom) are not attended.
    attn_sink: [h_q] float32, natural-log units: out is divided by sum + exp(sink); lse is not changed.
    extra_k_cache, extra_indices_in_kvcache [b, s_q, extra_topk]: a second cache in the same softmax: the same format as
        k_cache, or with V4.1 fp8 also V4.1 fp4 (last 288).
    topk_length, extra_topk_length: [b] (or [b, s_q]) int32: slots from there on are not attended; clamped.
    enable_batch_invariant: a request's bits do not depend on the rest of the batch (on the CPU always so).
    A bool in the place of softmax_scale is read as the old positional order (causal, is_fp8_kvcache, indices).

    Of our own, keyword only. kv_layout: "token" or "page" for 528- and 288-byte caches, default by set_compat().
    cu_seqlens_q: [b + 1] int32 for ragged batches; q is then [total_q, h_q, d_qk]. out, lse: where to write.

    Returns (out [b, s_q, h_q, 512] in q's dtype, lse [b, h_q, s_q] float32, natural log); ragged: out
    [total_q, h_q, 512], lse [h_q, total_q]. Rows with nothing to attend: out 0, lse +inf.
    Source: DeepSeek-V2 (arXiv 2405.04434) 2.1; the published function of 2025-02 to 2026-09.
    """
    if isinstance(softmax_scale, bool):
        _need(
            is_fp8_kvcache is None or indices is None,
            "indices: is given twice; allowed: once (softmax_scale is a "
            "bool, so the positional order is causal, is_fp8_kvcache, indices)",
        )
        causal, is_fp8_kvcache, softmax_scale, indices = (
            softmax_scale,
            causal if isinstance(causal, bool) else None,
            None,
            is_fp8_kvcache if is_array(is_fp8_kvcache) else indices,
        )
    if indices is not None:
        block_table = cache_seqlens = None
    arrays = (
        q,
        k_cache,
        block_table,
        cache_seqlens,
        indices,
        attn_sink,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
        cu_seqlens_q,
    )
    meta, keeper = tile_scheduler_metadata, None
    if out is None and lse is None and bridge.eager(q):
        options = (
            head_dim_v,
            type(meta),
            None if softmax_scale is None else float(softmax_scale),
            bool(causal),
            None if is_fp8_kvcache is None else bool(is_fp8_kvcache),
            bool(enable_batch_invariant),
            kv_layout,
            compat.get_compat(),
        )
        key, plan = plans.find(options, arrays)
        results = None if plan is None else plan.run(arrays)
        if results is not None:
            if type(meta) is FlashMLASchedMeta and not (meta.have_initialized and meta.config is plan.config):
                plan.config = _remember(meta, arrays, causal, enable_batch_invariant, plan.config)
            return results
        if key is not None:
            keeper = plans.Keeper(key, arrays)
    _check_decode(
        head_dim_v,
        tile_scheduler_metadata,
        causal,
        indices,
        block_table,
        cache_seqlens,
        extra_k_cache,
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
    )
    _check_fp8_flag(is_fp8_kvcache, k_cache)
    layout = caches.resolve_layout(kv_layout)
    if bridge.traced(q) and out is None and lse is None:
        return bridge.operators().decode(
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
            extra_indices_in_kvcache,
            topk_length,
            extra_topk_length,
            cu_seqlens_q,
            enable_batch_invariant,
            layout,
        )
    if isinstance(meta, FlashMLASchedMeta) and meta.have_initialized:
        _compare(meta, arrays, causal, enable_batch_invariant)
    results = operations.decode(
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
        extra_indices_in_kvcache,
        topk_length,
        extra_topk_length,
        cu_seqlens_q,
        enable_batch_invariant,
        layout,
        out,
        lse,
        keeper,
    )
    if isinstance(meta, FlashMLASchedMeta) and not meta.have_initialized:
        _remember(meta, arrays, causal, enable_batch_invariant)
    return results


def _check_decode(
    head_dim_v,
    meta,
    causal,
    indices,
    block_table,
    cache_seqlens,
    extra_k_cache,
    extra_indices,
    topk_length,
    extra_topk_length,
):
    """What contradicts itself, before any tensor is looked at."""
    if head_dim_v != 512:
        raise AssertionError(f"head_dim_v: {head_dim_v}; allowed: 512")
    if not (meta is None or isinstance(meta, FlashMLASchedMeta) or is_array(meta)):
        raise AssertionError(
            f"tile_scheduler_metadata: is a {type(meta).__name__}; allowed: what get_mla_metadata returns, or None"
        )
    given = "without indices"
    if indices is None:
        if block_table is None or cache_seqlens is None:
            name = "block_table" if block_table is None else "cache_seqlens"
            shape = "[b, max_pages]" if block_table is None else "[b]"
            raise AssertionError(f"{name}: is None; allowed: {shape} int32 without indices")
        forbidden = (extra_k_cache, extra_indices, topk_length, extra_topk_length)
        names = ("extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length")
    elif causal:
        raise AssertionError("causal: True; allowed: False with indices")
    elif extra_k_cache is None:
        forbidden, names = (extra_indices, extra_topk_length), (
            "extra_indices_in_kvcache",
            "extra_topk_length",
        )
        given = "without extra_k_cache"
    elif extra_indices is None:
        raise AssertionError(
            "extra_indices_in_kvcache: is None; allowed: [b, s_q, extra_topk] int32 with extra_k_cache"
        )
    else:
        return
    for name, x in zip(names, forbidden):
        if x is not None:
            raise AssertionError(f"{name}: is given; allowed: None {given}")


def _is_plain(k_cache):
    """Whether a cache has 2-byte elements."""
    size = getattr(k_cache, "itemsize", None)
    return size == 2 if size is not None else array(k_cache, "k_cache").dtype in (c.BF16, c.F16)


def _check_fp8_flag(is_fp8_kvcache, k_cache):
    if is_fp8_kvcache is not None and bool(is_fp8_kvcache) == _is_plain(k_cache):
        plain = not is_fp8_kvcache
        raise AssertionError(
            f"is_fp8_kvcache: {is_fp8_kvcache}, but k_cache has {'1' if plain else '2'}-byte elements; allowed: "
            f"{plain}, or None"
        )


def _shape(x, name):
    shape = getattr(x, "shape", None)
    return array(x, name).shape if shape is None else shape


def _compare(meta, arrays, causal, batch_invariant):
    """Refuses what contradicts a metadata object before anything is written."""
    try:
        _remember(meta, arrays, causal, batch_invariant)
    except IndexError:
        pass  # dimensions are missing: the call itself says which


def _remember(meta, arrays, causal, batch_invariant, known=None):
    """Records a call in a metadata object, or compares it with the one recorded there. Returns the Config that the
    object then holds: `known`, if it is an equal one."""
    q, k_cache, _, cache_seqlens, indices, _, extra_k_cache, extra_indices, topk_length, extra_topk_length = arrays[:-1]
    shape, cache, cu_seqlens_q = _shape(q, "q"), _shape(k_cache, "k_cache"), arrays[-1]
    if cu_seqlens_q is not None:
        b, s_q, h_q = _shape(cu_seqlens_q, "cu_seqlens_q")[0] - 1, shape[0], shape[1]
    else:
        b, s_q, h_q = shape[0], shape[1], shape[2]
    config = metadata.Config(
        b,
        s_q,
        h_q,
        cache[1],
        cache[2],
        bool(causal),
        not _is_plain(k_cache),
        None if indices is None else _shape(indices, "indices")[-1],
        None if extra_k_cache is None else _shape(extra_k_cache, "extra_k_cache")[1],
        None if extra_k_cache is None else _shape(extra_indices, "extra_indices_in_kvcache")[-1],
        bool(batch_invariant),
    )
    if not (meta.have_initialized and meta.config == config):
        metadata.remember(
            meta,
            config,
            lambda: metadata.first_call_tables(
                q, config, indices is not None, cache_seqlens, topk_length, extra_topk_length
            ),
        )
    if known == config:
        meta.config = known
    return meta.config


# ---- sparse prefill ----------------------------------------------------------------------------------------


def flash_mla_sparse_fwd(
    q, kv, indices, sm_scale: float, d_v: int = 512, attn_sink=None, topk_length=None, *, out=None, lse=None
) -> Tuple[Any, Any, Any]:
    """Sparse prefill: every query token attends its own index row of one unpaged KV tensor.

    q: [s_q, h_q, d_qk] bf16 (or fp16). kv: [s_kv, h_kv, d_qk] as q; V is its first 512 dims; rows may overlap.
    indices: [s_q, h_kv, topk] int32 (with h_kv 1 also [s_q, topk]); entries < 0 or >= s_kv are not attended, an entry
        that occurs twice counts twice. No batch dimension: concatenate sequences and offset the indices.
    sm_scale: multiplies q . k. d_v: 512. attn_sink: [h_q] float32. topk_length: [s_q] int32, per query token.
    out, lse (keyword only, our own): where to write.

    Returns (out [s_q, h_q, 512] in q's dtype, max_logits [s_q, h_q] float32, lse [s_q, h_q] float32). max_logits and
    lse are in natural log units (of sm_scale * q . k); under set_compat("2025-09") both are in base 2, as that
    generation's were. Rows with nothing to attend: out 0, max_logits -inf, lse +inf (2025-09: -inf).
    Source: the published function of 2025-09 to 2026-09.
    """
    _need(d_v == 512, f"d_v: {d_v}; allowed: 512")
    _need(sm_scale is not None, "sm_scale: is None; allowed: a number")
    base2 = compat.prefill_base2()
    if bridge.traced(q) and out is None and lse is None:
        return bridge.operators().sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, base2)
    return operations.prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, base2, out, lse)


# ---- multi-head attention ----------------------------------------------------------------------------------


def _check_mha(dropout_p):
    _need(dropout_p == 0.0, f"dropout_p: {dropout_p}; allowed: 0.0")


def _sequences(q, k, cu_seqlens_q, cu_seqlens_kv, max_q, max_kv, is_varlen):
    """cu_seqlens and hints; without is_varlen all sequences are equally long and cu_seqlens say only how many."""
    if is_varlen:
        return cu_seqlens_q, cu_seqlens_kv, max_q, max_kv
    batch = array(cu_seqlens_q, "cu_seqlens_qo").shape[0] - 1
    offsets = []
    for name, x in (("q", q), ("k", k)):
        total = x.shape[0]
        _need(
            batch > 0 and total % batch == 0,
            f"is_varlen: False with {total} tokens of {name} in {batch} sequences; " "allowed: a multiple",
        )
        offsets.append(uniform_offsets(x, batch, total))
    return offsets[0], offsets[1], 0, 0


def _flash_attn_varlen_forward(
    q,
    k,
    v,
    cu_seqlens_qo,
    cu_seqlens_kv,
    max_seqlen_qo,
    max_seqlen_kv,
    out=None,
    lse=None,
    causal=False,
    softmax_scale=None,
    is_varlen=True,
):
    """Forward without autograd; returns (out, lse). A given lse must have stride[0] == 1."""
    if lse is not None:
        stride = array(lse, "lse").stride
        _need(not stride or stride[0] == 1, f"lse: stride[0] is {stride[0] if stride else None}; allowed: 1")
    q, k, v = concrete(q), concrete(k), concrete(v)
    cu_q, cu_kv, max_q, max_kv = _sequences(
        q, k, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, is_varlen
    )
    return operations.mha_forward(q, k, v, cu_q, cu_kv, max_q, max_kv, softmax_scale, causal, out, lse)


def _flash_attn_varlen_backward(
    do,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_qo,
    cu_seqlens_kv,
    max_seqlen_qo,
    max_seqlen_kv,
    dq=None,
    dk=None,
    dv=None,
    causal=False,
    softmax_scale=None,
    is_varlen=True,
):
    """Gradients (dq, dk, dv) from forward's results and the gradient of out; lse's own gradient is ignored."""
    q, k, v = concrete(q), concrete(k), concrete(v)
    cu_q, cu_kv, max_q, max_kv = _sequences(
        q, k, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, is_varlen
    )
    return operations.mha_backward(
        do, q, k, v, out, lse, cu_q, cu_kv, max_q, max_kv, softmax_scale, causal, dq, dk, dv
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_qo,
    cu_seqlens_kv,
    max_seqlen_qo,
    max_seqlen_kv,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> Tuple[Any, Any]:
    """Dense multi-head attention over packed sequences, with gradients for q, k and v.

    q: [total_q, h_q, d_qk], k: [total_kv, h_kv, d_qk], v: [total_kv, h_kv, d_v], bf16 or fp16, last dim contiguous;
        h_q % h_kv == 0; (d_qk, d_v) (192, 128) and (128, 128) were published, others the library takes work as well.
    cu_seqlens_qo, cu_seqlens_kv: [b + 1] int32, from 0 to the totals. max_seqlen_*: longest sequence, a hint.
    dropout_p: 0.0. softmax_scale: default d_qk ** -0.5. causal: end-aligned, query r sees keys <= s_k - s_q + r.
    deterministic: True or False; results are deterministic either way, gradients included.
    is_varlen: False says that all sequences are equally long; cu_seqlens then only tell how many there are.

    Returns (out [total_q, h_q, d_v] in q's dtype, lse [total_q, h_q] float32 natural log, stride[0] 1).
    Rows without keys: out 0, lse -inf, gradients 0. The gradient of lse is ignored.
    Source: the published function of 2025-08 to 2026-09.
    """
    _check_mha(dropout_p)
    del deterministic
    q, k, v = concrete(q), concrete(k), concrete(v)
    cu_q, cu_kv, max_q, max_kv = _sequences(
        q, k, cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, is_varlen
    )
    if bridge.traced(q):
        return bridge.operators().mha_forward(
            q, k, v, cu_q, cu_kv, int(max_q or 0), int(max_kv or 0), softmax_scale, causal
        )
    if torch_module(q) is not None:
        return bridge.attention_with_gradient(q, k, v, cu_q, cu_kv, max_q, max_kv, softmax_scale, causal)
    return operations.mha_forward(q, k, v, cu_q, cu_kv, max_q, max_kv, softmax_scale, causal)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> Tuple[Any, Any]:
    """flash_attn_varlen_func over qkv [total, h, 2 * head_dim_qk + d_v]: q, k and v side by side in the last dim."""
    qkv = concrete(qkv)
    return flash_attn_varlen_func(
        qkv[:, :, :head_dim_qk],
        qkv[:, :, head_dim_qk : 2 * head_dim_qk],
        qkv[:, :, 2 * head_dim_qk :],
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        deterministic,
        is_varlen,
    )


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_qo,
    cu_seqlens_kv,
    max_seqlen_qo,
    max_seqlen_kv,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> Tuple[Any, Any]:
    """flash_attn_varlen_func over kv [total_kv, h_kv, head_dim_qk + d_v]: k and v side by side in the last dim."""
    kv = concrete(kv)
    return flash_attn_varlen_func(
        q,
        kv[:, :, :head_dim_qk],
        kv[:, :, head_dim_qk:],
        cu_seqlens_qo,
        cu_seqlens_kv,
        max_seqlen_qo,
        max_seqlen_kv,
        dropout_p,
        softmax_scale,
        causal,
        deterministic,
        is_varlen,
    )


# ---- merge (our own) ---------------------------------------------------------------------------------------


def merge_states(
    outs, lses, attn_sink=None, *, empty_lse: float = float("inf"), out=None, lse=None
) -> Tuple[Any, Any]:
    """Joins attention results over disjoint token sets: context parallel ranks, cascades, chunks.

    outs: list of [n, h, d], or of decode's [b, s_q, h, d]; bf16, fp16 or float32. lses: list of [n, h] float32, or of
    decode's [b, h, s_q]; natural log, without sink. States whose lse is +inf or -inf are empty; their out is not read.
    attn_sink: [h] float32, applied once, here: the parts are computed without it. empty_lse: +inf (as the decode
    functions give) or -inf, for rows that are empty everywhere.

    Returns (out, lse) in the shapes and dtype of the first state: lse = ln sum exp(lse_s), out = sum exp(lse_s - lse)
    out_s. Raises AssertionError or RuntimeError naming outs[i] or lses[i].
    """
    _need(
        len(outs) == len(lses) and len(outs) > 0,
        f"lses: {len(lses)} of them with {len(outs)} outs; allowed: as many, " "at least 1",
    )
    _need(empty_lse in (float("inf"), float("-inf")), f"empty_lse: {empty_lse}; allowed: inf, -inf")
    outs, lses = [concrete(x) for x in outs], [concrete(x) for x in lses]
    shape = tuple(outs[0].shape)
    batched = len(shape) == 4
    if batched:
        b, s_q, h, d = shape
        for i, (o, ls) in enumerate(zip(outs, lses)):
            _need(tuple(o.shape) == shape, f"outs[{i}]: shape is {list(o.shape)}; allowed: {list(shape)}")
            _need(
                tuple(ls.shape) == (b, h, s_q),
                f"lses[{i}]: shape is {list(ls.shape)}; allowed: {[b, h, s_q]}",
            )
        outs = [x.reshape(b * s_q, h, d) for x in outs]
        lses = [permuted(x, (0, 2, 1)).reshape(b * s_q, h) for x in lses]
    _need(
        not batched or (out is None and lse is None),
        "out, lse: are given; allowed: None with states [b, s_q, h, d]",
    )
    first = array(outs[0], "outs[0]")
    out = empty(outs[0], tuple(first.shape), first.dtype) if out is None else out
    lse = empty(outs[0], tuple(first.shape[:2]), c.F32) if lse is None else lse
    operations.merge(outs, lses, attn_sink, empty_lse > 0, out, lse)
    if batched:
        return out.reshape(shape), permuted(lse.reshape(b, s_q, h), (0, 2, 1))
    return out, lse
