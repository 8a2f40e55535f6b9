# SPDX-License-Identifier: MIT
"""What torch is told about the library: an autograd function for multi-head attention, and, from torch 2.4 on, custom
operators flash_mla::* with shape functions, so that torch.compile and torch.export trace through.

Eager calls do not go through the operators: torch's dispatch in Python costs more than the whole call. This module is
imported only where torch has been.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from . import _operations as operations
from ._tensors import code_dtype

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
AVAILABLE = hasattr(torch, "library") and hasattr(torch.library, "custom_op")

if AVAILABLE:
    is_compiling = torch.compiler.is_compiling
else:

    def is_compiling():
        """Older versions trace nothing of this package."""
        return False


def is_traced(q):
    """Whether q is a stand-in without data: a fake or functional tensor of a trace."""
    if not AVAILABLE or not isinstance(q, torch.Tensor) or type(q) in PLAIN_TYPES:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(q, FakeTensor) or torch._is_functional_tensor(q)


class Attention(torch.autograd.Function):
    """Dense multi-head attention; gradients for q, k, v; the gradient of lse is ignored."""

    @staticmethod
    def forward(
        ctx, q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, softmax_scale, causal
    ):
        out, lse = operations.mha_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, softmax_scale, causal
        )
        ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv)
        ctx.rest = (max_seqlen_q, max_seqlen_kv, softmax_scale, causal)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _):
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv = ctx.saved_tensors
        gradients = operations.mha_backward(
            last_contiguous(dout), q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, *ctx.rest
        )
        return (*gradients, None, None, None, None, None, None)


def last_contiguous(x):
    """x itself, or a copy if its last dimension has gaps (gradients of sums are expanded scalars)."""
    return x if x.stride(-1) == 1 else x.contiguous()


if AVAILABLE:

    @torch.library.custom_op("flash_mla::decode", mutates_args=())
    def decode(
        q: Tensor,
        k_cache: Tensor,
        block_table: Optional[Tensor],
        cache_seqlens: Optional[Tensor],
        head_dim_v: int,
        softmax_scale: Optional[float],
        causal: bool,
        indices: Optional[Tensor],
        attn_sink: Optional[Tensor],
        extra_k_cache: Optional[Tensor],
        extra_indices: Optional[Tensor],
        topk_length: Optional[Tensor],
        extra_topk_length: Optional[Tensor],
        cu_seqlens_q: Optional[Tensor],
        batch_invariant: bool,
        layout: str,
    ) -> Tuple[Tensor, Tensor]:
        """flash_mla_with_kvcache."""
        return operations.decode(
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
        )

    @decode.register_fake
    def _(
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
    ):
        out = q.new_empty(q.shape[:-1] + (head_dim_v,))
        if cu_seqlens_q is not None:
            return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
        return out, q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)

    @torch.library.custom_op("flash_mla::sparse_prefill", mutates_args=())
    def sparse_prefill(
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        d_v: int,
        attn_sink: Optional[Tensor],
        topk_length: Optional[Tensor],
        base2: bool,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """flash_mla_sparse_fwd."""
        return operations.prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, base2)

    @sparse_prefill.register_fake
    def _(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, base2):
        rows = q.shape[:2]
        return (
            q.new_empty(rows + (d_v,)),
            q.new_empty(rows, dtype=torch.float32),
            q.new_empty(rows, dtype=torch.float32),
        )

    @torch.library.custom_op("flash_mla::mha_forward", mutates_args=())
    def mha_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        softmax_scale: Optional[float],
        causal: bool,
    ) -> Tuple[Tensor, Tensor]:
        """flash_attn_varlen_func."""
        return operations.mha_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, softmax_scale, causal
        )

    @mha_forward.register_fake
    def _(q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, softmax_scale, causal):
        return (
            q.new_empty(q.shape[:2] + (v.shape[2],)),
            q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32).permute(1, 0),
        )

    @torch.library.custom_op("flash_mla::mha_backward", mutates_args=())
    def mha_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        softmax_scale: Optional[float],
        causal: bool,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """The gradients of flash_attn_varlen_func."""
        return operations.mha_backward(
            last_contiguous(dout),
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
        )

    @mha_backward.register_fake
    def _(
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
    ):
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def _save(ctx, inputs, output):
        q, k, v, cu_seqlens_q, cu_seqlens_kv, *rest = inputs
        ctx.save_for_backward(q, k, v, *output, cu_seqlens_q, cu_seqlens_kv)
        ctx.mark_non_differentiable(output[1])
        ctx.rest = rest

    def _gradients(ctx, dout, _):
        q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv = ctx.saved_tensors
        gradients = mha_backward(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_kv, *ctx.rest)
        return (*gradients, None, None, None, None, None, None)

    mha_forward.register_autograd(_gradients, setup_context=_save)

    def _fused_shapes(q, n_wv_group):
        tokens, heads = q.shape[:2]
        width = heads // n_wv_group * 512
        padded = (tokens + 3) // 4 * 4
        return (
            q.new_empty((tokens, n_wv_group, width), dtype=code_dtype(q)),
            q.new_empty((n_wv_group, width // 128, padded), dtype=torch.int32).permute(2, 0, 1)[:tokens],
            q.new_empty((tokens, heads), dtype=torch.float32),
            q.new_empty((tokens, heads), dtype=torch.float32),
        )

    @torch.library.custom_op("flash_mla::fused_prefill", mutates_args=())
    def fused_prefill(
        norm: bool,
        eps: float,
        token_positions: Tensor,
        cos_sin_cache: Tensor,
        n_wv_group: int,
        q: Tensor,
        kv: Tensor,
        indices: Tensor,
        sm_scale: float,
        attn_sink: Optional[Tensor],
        topk_length: Optional[Tensor],
    ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
        """fused_norm_rope_attn_rope_cast.prefill."""
        return operations.fused_prefill(
            norm,
            eps,
            token_positions,
            cos_sin_cache,
            n_wv_group,
            q,
            kv,
            indices,
            sm_scale,
            attn_sink,
            topk_length,
        )

    @fused_prefill.register_fake
    def _(
        norm,
        eps,
        token_positions,
        cos_sin_cache,
        n_wv_group,
        q,
        kv,
        indices,
        sm_scale,
        attn_sink,
        topk_length,
    ):
        return _fused_shapes(q, n_wv_group)

    @torch.library.custom_op("flash_mla::fused_decode", mutates_args=())
    def fused_decode(
        norm: bool,
        eps: float,
        token_positions: Tensor,
        cos_sin_cache: Tensor,
        n_wv_group: int,
        q: Tensor,
        k_cache: Tensor,
        indices: Tensor,
        sm_scale: float,
        attn_sink: Optional[Tensor],
        topk_length: Optional[Tensor],
        extra_k_cache: Optional[Tensor],
        extra_indices: Optional[Tensor],
        extra_topk_length: Optional[Tensor],
        layout: str,
    ) -> Tuple[Tensor, Tensor, Tensor]:
        """fused_norm_rope_attn_rope_cast.decode."""
        return operations.fused_decode(
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
        )

    @fused_decode.register_fake
    def _(
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
        codes, scale, _, lse = _fused_shapes(q, n_wv_group)
        return codes, scale, lse
