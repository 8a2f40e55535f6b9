# SPDX-License-Identifier: MIT
"""Fused RMS norm, RoPE, attention, conjugate RoPE and fp8 cast, and the weight permutations that go with it.

q is the output of Q_b permuted by permute_q_b_proj; out_fp8 and out_sf feed an fp8 grouped product against the output
projection permuted by permute_wv_proj.
"""

from typing import Any, Tuple

from . import _caches as caches
from . import _operations as operations
from . import _torch_bridge as bridge

__all__ = ["prefill", "decode", "permute_q_b_proj", "permute_wv_proj"]


def _check(
    is_rope_neox_style,
    rope_dim,
    num_per_channels,
    use_tma_aligned_col_major_sf,
    round_sf,
    use_packed_ue8m0,
    d_v,
    sm_scale,
):
    for name, value, allowed in (
        ("is_rope_neox_style", bool(is_rope_neox_style), False),
        ("rope_dim", rope_dim, 64),
        ("num_per_channels", num_per_channels, 32),
        ("use_tma_aligned_col_major_sf", bool(use_tma_aligned_col_major_sf), True),
        ("round_sf", bool(round_sf), True),
        ("use_packed_ue8m0", bool(use_packed_ue8m0), True),
        ("d_v", d_v, 512),
    ):
        if value != allowed:
            raise AssertionError(f"{name}: {value}; allowed: {allowed}")
    if sm_scale is None:
        raise AssertionError("sm_scale: is None; allowed: a number")


def prefill(
    enable_q_norm,
    rms_norm_eps,
    token_positions,
    is_rope_neox_style,
    rope_dim,
    cos_sin_cache,
    n_wv_group,
    num_per_channels,
    use_tma_aligned_col_major_sf,
    round_sf,
    use_packed_ue8m0,
    q,
    kv,
    indices,
    sm_scale,
    d_v=512,
    attn_sink=None,
    topk_length=None,
) -> Tuple[Any, Any, Any, Any]:
    """Fused attention over an unpaged bf16 KV tensor.

    enable_q_norm, rms_norm_eps: RMS norm of q over its 512 dims, multiplied into the logits. token_positions: [s_q]
    int32, rows of cos_sin_cache [*, 64] float32 (32 cos, then 32 sin). is_rope_neox_style: False. rope_dim: 64.
    n_wv_group: divides h_q; G = h_q / n_wv_group. num_per_channels: 32. The three scale flags: True.
    q: [s_q, h_q, 512] bf16, permuted storage: element (h, d) of a token at (d / 16) * (h_q * 16) + h * 16 + d % 16.
    kv: [s_kv, 1, 512] bf16. indices: [s_q, 1, topk] (or [s_q, topk]) int32, outside [0, s_kv) not attended.
    attn_sink: [h_q] float32. topk_length: [s_q] int32.

    Returns (out_fp8 [s_q, n_wv_group, G * 512] e4m3, out_sf [s_q, n_wv_group, G * 512 / 128] int32, max_logits
    [s_q, h_q], lse [s_q, h_q] float32 natural log). Head g, dim d of a group is at
    (d / 32) * (G * 32) + g * 32 + d % 32;
    the scale byte (e8m0) of head g, chunk c is number c * G + g of its group, four to a word, lowest first; words have
    strides (1, A * G * 4, A), A = s_q rounded up to a multiple of 4. Lonely rows: codes 0, lse +inf, max_logits -inf.
    Where the array library has no e4m3 type, codes are uint8.
    Raises AssertionError and RuntimeError as flash_mla_with_kvcache. Source: published op of 2026-09.
    """
    _check(
        is_rope_neox_style,
        rope_dim,
        num_per_channels,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        d_v,
        sm_scale,
    )
    run = bridge.operators().fused_prefill if bridge.traced(q) else operations.fused_prefill
    return run(
        bool(enable_q_norm),
        rms_norm_eps,
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


def decode(
    enable_q_norm,
    rms_norm_eps,
    token_positions,
    is_rope_neox_style,
    rope_dim,
    cos_sin_cache,
    n_wv_group,
    num_per_channels,
    use_tma_aligned_col_major_sf,
    round_sf,
    use_packed_ue8m0,
    q,
    k_cache,
    indices_in_kvcache,
    sm_scale,
    d_v=512,
    attn_sink=None,
    topk_length=None,
    extra_k_cache=None,
    extra_indices_in_kvcache=None,
    extra_topk_length=None,
    *,
    kv_layout=None,
) -> Tuple[Any, Any, Any]:
    """Fused attention over paged caches; the bits of fused prefill over the same dequantised tokens.

    As prefill, but: k_cache, extra_k_cache: [num_pages, P, 1, bytes] as in flash_mla_with_kvcache (d_qk 512; bf16, 584,
    528, extra also 288 bytes). indices_in_kvcache: [s_q, topk] int32, extra_indices_in_kvcache: [s_q, extra_topk].
    topk_length, extra_topk_length: [s_q] int32. There is no batch dimension: s_q counts query tokens of all requests.
    kv_layout (our own): "token" or "page" for 528- and 288-byte caches.

    Returns (out_fp8, out_sf, lse).
    """
    _check(
        is_rope_neox_style,
        rope_dim,
        num_per_channels,
        use_tma_aligned_col_major_sf,
        round_sf,
        use_packed_ue8m0,
        d_v,
        sm_scale,
    )
    if extra_k_cache is None:
        for name, x in (
            ("extra_indices_in_kvcache", extra_indices_in_kvcache),
            ("extra_topk_length", extra_topk_length),
        ):
            if x is not None:
                raise AssertionError(f"{name}: is given; allowed: None without extra_k_cache")
    elif extra_indices_in_kvcache is None:
        raise AssertionError(
            "extra_indices_in_kvcache: is None; allowed: [s_q, extra_topk] int32 with extra_k_cache"
        )
    run = bridge.operators().fused_decode if bridge.traced(q) else operations.fused_decode
    return run(
        bool(enable_q_norm),
        rms_norm_eps,
        token_positions,
        cos_sin_cache,
        n_wv_group,
        q,
        k_cache,
        indices_in_kvcache,
        sm_scale,
        attn_sink,
        topk_length,
        extra_k_cache,
        extra_indices_in_kvcache,
        extra_topk_length,
        caches.resolve_layout(kv_layout),
    )


def permute_q_b_proj(w_and_sf, h_q, d_q):
    """Row permutation of Q_b's weight, so that its product is stored as prefill and decode read q.

    w_and_sf: (w [h_q * d_q, R] e4m3 or bytes, sf [h_q * d_q, R / group / 4] int32 with stride[0] 1, group 32 or 128).
    Row h * d_q + d moves to d % 16 + 16 * h + (d / 16) * 16 * h_q, its scale words with it; d_q a multiple of 16.
    Returns new (w, sf), sf with strides (1, rows rounded up to a multiple of 4). Byte-exact.
    """
    w, sf = w_and_sf
    return operations.permute_q_b(w, sf, h_q, d_q)


def permute_wv_proj(w_and_sf, wv_group_size, d_o):
    """Column permutation of the output projection's weight, to match out_fp8.

    w_and_sf: (w [n_group, D_out, G * d_o] e4m3 or bytes, sf [n_group, D_out, G * d_o / 128] int32 with stride[1] 1).
    Column g * d_o + d moves to (d / 32) * 32 G + 32 g + d % 32, scale byte g * (d_o / 32) + d / 32 to (d / 32) * G + g.
    Returns new (w, sf), sf with strides (words * A, 1, A), A = D_out rounded up to a multiple of 4. Byte-exact.
    """
    w, sf = w_and_sf
    return operations.permute_wv(w, sf, wv_group_size, d_o)
