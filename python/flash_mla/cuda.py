# SPDX-License-Identifier: MIT
"""The names of the original's compiled extension, for code that called it directly. Nothing here is CUDA only.

Decode functions return (out, lse, tile_scheduler_metadata, num_splits) from 2026 on, (out, lse) before; the last two
are what was passed in, since the library plans for itself.
"""

from . import _operations as operations
from . import flash_mla_interface as interface
from . import fused_norm_rope_attn_rope_cast as fused

__all__ = [
    "get_mla_metadata",
    "get_mla_decoding_metadata",
    "fwd_kvcache_mla",
    "dense_decode_fwd",
    "sparse_decode_fwd",
    "sparse_prefill_fwd",
    "dense_prefill_fwd",
    "dense_prefill_bwd",
    "fused_norm_rope_attn_rope_cast_fwd",
    "fused_norm_rope_attn_rope_cast_decode",
    "permute_q_b_proj",
    "permute_wv_proj",
]

get_mla_metadata = interface.get_mla_metadata
get_mla_decoding_metadata = interface.get_mla_metadata
sparse_prefill_fwd = interface.flash_mla_sparse_fwd
fused_norm_rope_attn_rope_cast_fwd = fused.prefill
fused_norm_rope_attn_rope_cast_decode = fused.decode


def fwd_kvcache_mla(q, k_cache, *rest):
    """Decode as of 2025: (q, k_cache[, None], head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
    tile_scheduler_metadata, num_splits[, is_fp8_kvcache, indices]); the first form had a v_cache, always None.
    Returns (out, lse)."""
    given = len(rest) + 2
    if rest and rest[0] is None:
        rest = rest[1:]
    if not 7 <= len(rest) <= 9:
        raise AssertionError(f"fwd_kvcache_mla: {given} arguments; allowed: 9 to 12")
    head_dim_v, cache_seqlens, block_table, softmax_scale, causal, metadata, num_splits, *fp8_and_indices = (
        rest
    )
    is_fp8_kvcache, indices = (fp8_and_indices + [None, None])[:2]
    return interface.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        metadata,
        num_splits,
        softmax_scale=float(softmax_scale),
        causal=causal and indices is None,
        is_fp8_kvcache=is_fp8_kvcache or None,
        indices=indices,
    )


def dense_decode_fwd(
    q,
    k_cache,
    head_dim_v,
    cache_seqlens,
    block_table,
    softmax_scale,
    causal,
    tile_scheduler_metadata=None,
    num_splits=None,
):
    """Dense decode as of 2026; returns (out, lse, tile_scheduler_metadata, num_splits)."""
    out, lse = interface.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale=float(softmax_scale), causal=causal
    )
    return out, lse, tile_scheduler_metadata, num_splits


def sparse_decode_fwd(
    q,
    k_cache,
    indices,
    topk_length,
    attn_sink,
    tile_scheduler_metadata,
    num_splits,
    extra_k_cache,
    extra_indices_in_kvcache,
    extra_topk_length,
    head_dim_v,
    softmax_scale,
    enable_batch_invariant=False,
):
    """Sparse decode as of 2026; returns (out, lse, tile_scheduler_metadata, num_splits)."""
    out, lse = interface.flash_mla_with_kvcache(
        q,
        k_cache,
        None,
        None,
        head_dim_v,
        softmax_scale=float(softmax_scale),
        indices=indices,
        attn_sink=attn_sink,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        enable_batch_invariant=enable_batch_invariant,
    )
    return out, lse, tile_scheduler_metadata, num_splits


def dense_prefill_fwd(
    workspace,
    q,
    k,
    v,
    cu_seqlens_qo,
    cu_seqlens_kv,
    out,
    lse,
    mask_mode_code,
    softmax_scale,
    max_seqlen_qo,
    max_seqlen_kv,
    is_varlen=True,
):
    """Multi-head attention into out and lse. mask_mode_code: 1 is causal, 0 is not. workspace is not used."""
    del workspace
    interface._flash_attn_varlen_forward(
        q,
        k,
        v,
        cu_seqlens_qo,
        cu_seqlens_kv,
        max_seqlen_qo,
        max_seqlen_kv,
        out,
        lse,
        mask_mode_code == 1,
        softmax_scale,
        is_varlen,
    )


def dense_prefill_bwd(
    workspace,
    do,
    q,
    k,
    v,
    out,
    lse,
    cu_seqlens_qo,
    cu_seqlens_kv,
    dq,
    dk,
    dv,
    mask_mode_code,
    softmax_scale,
    max_seqlen_qo,
    max_seqlen_kv,
    is_varlen=True,
):
    """Gradients of multi-head attention into dq, dk, dv. workspace is not used."""
    del workspace
    interface._flash_attn_varlen_backward(
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
        dq,
        dk,
        dv,
        mask_mode_code == 1,
        softmax_scale,
        is_varlen,
    )


def permute_q_b_proj(w, sf, h_q, d_q):
    """As fused_norm_rope_attn_rope_cast.permute_q_b_proj, with w and sf apart."""
    return operations.permute_q_b(w, sf, h_q, d_q)


def permute_wv_proj(w, sf, wv_group_size, d_o):
    """As fused_norm_rope_attn_rope_cast.permute_wv_proj, with w and sf apart."""
    return operations.permute_wv(w, sf, wv_group_size, d_o)
