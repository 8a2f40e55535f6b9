# SPDX-License-Identifier: MIT
"""What code of any published generation does, row by row of the table of generations accepted (docs/integration.md)."""

import inspect

import numpy as np
import pytest
import support
from support import DenseCase, SparseCase

import flash_mla
from flash_mla import fused_norm_rope_attn_rope_cast as fused


def same(kit, a, b):
    return all((kit.raw(x) == kit.raw(y)).all() for x, y in zip(a, b))


# ---- row: get_mla_metadata and arguments 6, 7 --------------------------------------------------------------


def test_g1_code(kit):
    """2025-02: three arguments, tables passed on, positional."""
    case = DenseCase(kit, h_kv=1)
    meta, num_splits = flash_mla.get_mla_metadata(case.seqlens, case.s_q * case.h_q // 1, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, meta, num_splits, causal=True
    )
    case.check(kit, out, lse, causal=True)


def test_g3_code(kit):
    """2025-08: tables may be left out."""
    case = DenseCase(kit)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, None, None, None, True
    )
    case.check(kit, out, lse, causal=True)


def test_g4_code(kit):
    """2025-09: six arguments, fp8 flag, indices."""
    case = SparseCase(kit, "v32", lengths=False, sink=False)
    meta, num_splits = flash_mla.get_mla_metadata(kit.i32([9, 9]), case.s_q * case.h_q, 1, case.h_q, True, 24)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, None, None, 512, meta, num_splits, None, False, True, case.keywords["indices"]
    )
    case.check(kit, out, lse)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q,
        case.cache,
        kit.i32([[1], [1]]),
        kit.i32([9, 9]),
        512,
        meta,
        num_splits,
        is_fp8_kvcache=True,
        indices=case.keywords["indices"],
    )
    case.check(kit, out, lse)


def test_g5_code(kit):
    """2026-01: opaque object, everything of the sparse call, positional."""
    case = SparseCase(kit, "v4", "v4")
    k = case.keywords
    meta, num_splits = flash_mla.get_mla_metadata()
    for _ in range(2):
        out, lse = flash_mla.flash_mla_with_kvcache(
            case.q,
            case.cache,
            None,
            None,
            512,
            meta,
            num_splits,
            case.d**-0.5,
            False,
            True,
            k["indices"],
            k["attn_sink"],
            k["extra_k_cache"],
            k["extra_indices_in_kvcache"],
            k["topk_length"],
            k["extra_topk_length"],
        )
        case.check(kit, out, lse)


def test_g7_code(kit):
    """2026-09: V4.1 caches, batch-invariant flag, 17 positional arguments."""
    case = SparseCase(kit, "v41", "v41-fp4")
    k = case.keywords
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q,
        case.cache,
        None,
        None,
        512,
        flash_mla.get_mla_metadata()[0],
        None,
        None,
        False,
        True,
        k["indices"],
        k["attn_sink"],
        k["extra_k_cache"],
        k["extra_indices_in_kvcache"],
        k["topk_length"],
        k["extra_topk_length"],
        True,
    )
    case.check(kit, out, lse)


def test_published_parameter_order():
    names = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    assert names[:17] == [
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
        "enable_batch_invariant",
    ]
    assert list(inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters)[:7] == [
        "q",
        "kv",
        "indices",
        "sm_scale",
        "d_v",
        "attn_sink",
        "topk_length",
    ]
    assert list(inspect.signature(flash_mla.flash_attn_varlen_func).parameters) == [
        "q",
        "k",
        "v",
        "cu_seqlens_qo",
        "cu_seqlens_kv",
        "max_seqlen_qo",
        "max_seqlen_kv",
        "dropout_p",
        "softmax_scale",
        "causal",
        "deterministic",
        "is_varlen",
    ]
    assert list(inspect.signature(flash_mla.flash_attn_varlen_qkvpacked_func).parameters) == [
        "qkv",
        "cu_seqlens",
        "max_seqlen",
        "head_dim_qk",
        "dropout_p",
        "softmax_scale",
        "causal",
        "deterministic",
        "is_varlen",
    ]
    assert list(inspect.signature(flash_mla.flash_attn_varlen_kvpacked_func).parameters) == [
        "q",
        "kv",
        "cu_seqlens_qo",
        "cu_seqlens_kv",
        "max_seqlen_qo",
        "max_seqlen_kv",
        "head_dim_qk",
        "dropout_p",
        "softmax_scale",
        "causal",
        "deterministic",
        "is_varlen",
    ]
    head = [
        "enable_q_norm",
        "rms_norm_eps",
        "token_positions",
        "is_rope_neox_style",
        "rope_dim",
        "cos_sin_cache",
        "n_wv_group",
        "num_per_channels",
        "use_tma_aligned_col_major_sf",
        "round_sf",
        "use_packed_ue8m0",
        "q",
    ]
    assert list(inspect.signature(fused.prefill).parameters) == head + [
        "kv",
        "indices",
        "sm_scale",
        "d_v",
        "attn_sink",
        "topk_length",
    ]
    assert list(inspect.signature(fused.decode).parameters)[:-1] == head + [
        "k_cache",
        "indices_in_kvcache",
        "sm_scale",
        "d_v",
        "attn_sink",
        "topk_length",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "extra_topk_length",
    ]


# ---- row: cache kinds and dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize("main", ["v32", "v4", "v41"])
def test_int8_uint8_and_e4m3_caches(kit, main):
    case = SparseCase(kit, main)
    wanted = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    case.check(kit, *wanted)
    views = [np.uint8, np.int8] if not hasattr(kit, "torch") else [kit.torch.uint8, kit.torch.int8]
    for dtype in views:
        got = flash_mla.flash_mla_with_kvcache(
            case.q, case.cache.view(dtype), None, None, 512, **case.keywords
        )
        assert same(kit, got, wanted)


# ---- row: is_fp8_kvcache -----------------------------------------------------------------------------------


def test_is_fp8_kvcache(kit):
    sparse, dense = SparseCase(kit, "v32"), DenseCase(kit)
    for flag in (None, True):
        flash_mla.flash_mla_with_kvcache(
            sparse.q, sparse.cache, None, None, 512, is_fp8_kvcache=flag, **sparse.keywords
        )
    for flag in (None, False):
        flash_mla.flash_mla_with_kvcache(
            dense.q, dense.cache, dense.table, dense.seqlens, 512, is_fp8_kvcache=flag
        )
    with pytest.raises(AssertionError, match="is_fp8_kvcache: False"):
        flash_mla.flash_mla_with_kvcache(
            sparse.q, sparse.cache, None, None, 512, is_fp8_kvcache=False, **sparse.keywords
        )
    with pytest.raises(AssertionError, match="is_fp8_kvcache: True"):
        flash_mla.flash_mla_with_kvcache(
            dense.q, dense.cache, dense.table, dense.seqlens, 512, is_fp8_kvcache=True
        )


# ---- row: block_table, cache_seqlens -----------------------------------------------------------------------


def test_block_table_and_cache_seqlens(kit):
    dense, sparse = DenseCase(kit), SparseCase(kit)
    a = flash_mla.flash_mla_with_kvcache(dense.q, dense.cache, dense.table, dense.seqlens, 512)
    b = flash_mla.flash_mla_with_kvcache(
        q=dense.q,
        k_cache=dense.cache,
        block_table=dense.table,
        cache_seqlens=dense.seqlens,
        head_dim_v=512,
        tile_scheduler_metadata=None,
        num_splits=None,
    )
    assert same(kit, a, b)
    flash_mla.flash_mla_with_kvcache(sparse.q, sparse.cache, head_dim_v=512, **sparse.keywords)
    for missing in ("block_table", "cache_seqlens"):
        keywords = {"block_table": dense.table, "cache_seqlens": dense.seqlens, missing: None}
        with pytest.raises(AssertionError, match=missing + ": is None"):
            flash_mla.flash_mla_with_kvcache(dense.q, dense.cache, head_dim_v=512, **keywords)


# ---- row: heads, dims, topk, P, s_q ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "h_q, topk, page, s_q", [(1, 1, 1, 1), (16, 65, 5, 3), (65, 7, 69, 1), (96, 130, 2, 1)]
)
def test_any_heads_topk_page_and_queries(kit, h_q, topk, page, s_q):
    case = SparseCase(kit, "v41", "v41-fp4", b=1, s_q=s_q, h_q=h_q, topk=topk + 2, page=page, extra_topk=3)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    case.check(kit, out, lse)


@pytest.mark.parametrize("h_q, h_kv, page", [(9, 3, 1), (8, 8, 7), (63, 1, 64)])
def test_any_dense_heads_and_page(kit, h_q, h_kv, page):
    case = DenseCase(kit, lengths=(21,), s_q=1, h_q=h_q, h_kv=h_kv, page=page)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
    case.check(kit, out, lse)


# ---- row: fused --------------------------------------------------------------------------------------------


def test_fused_takes_keywords_and_v4_caches(kit):
    rng = np.random.default_rng(0)
    pages, _ = support.random_pages(rng, "v4", 2, 4)
    names = dict(
        enable_q_norm=True,
        rms_norm_eps=1e-6,
        token_positions=kit.i32([0, 1]),
        is_rope_neox_style=False,
        rope_dim=64,
        cos_sin_cache=kit.f32(np.ones((2, 64))),
        n_wv_group=1,
        num_per_channels=32,
        use_tma_aligned_col_major_sf=True,
        round_sf=True,
        use_packed_ue8m0=True,
        q=kit.bf16(rng.normal(size=(2, 2, 512))),
    )
    codes, _, lse = fused.decode(
        **names,
        k_cache=support.cache_view(kit, pages, 4, 584),
        indices_in_kvcache=kit.i32([[0, 7, -1], [3, 3, 3]]),
        sm_scale=0.1,
        d_v=512,
    )
    assert tuple(codes.shape) == (2, 1, 1024) and np.isfinite(kit.value(lse)).all()
    _, _, max_logits, _ = fused.prefill(
        **names, kv=kit.bf16(np.ones((3, 1, 512))), indices=kit.i32([[[0]], [[2]]]), sm_scale=0.1
    )
    assert np.isfinite(kit.value(max_logits)).all()


# ---- row: README's positional form -------------------------------------------------------------------------


def test_readme_positional_form(kit):
    """(.., is_causal, is_fp8_kvcache, indices) in the places of softmax_scale, causal, is_fp8_kvcache."""
    sparse, dense = SparseCase(kit, "v32", lengths=False, sink=False), DenseCase(kit)
    meta = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        sparse.q, sparse.cache, None, None, 512, *meta, False, True, sparse.keywords["indices"]
    )
    sparse.check(kit, out, lse)
    meta = flash_mla.get_mla_metadata()
    for tail, causal in (
        ((True, False, None), True),
        ((True, False), True),
        ((False,), False),
        ((True,), True),
    ):
        out, lse = flash_mla.flash_mla_with_kvcache(
            dense.q, dense.cache, dense.table, dense.seqlens, 512, None, None, *tail
        )
        dense.check(kit, out, lse, causal=causal)
    with pytest.raises(AssertionError, match="indices: is given twice"):
        flash_mla.flash_mla_with_kvcache(
            sparse.q,
            sparse.cache,
            None,
            None,
            512,
            *meta,
            False,
            True,
            sparse.keywords["indices"],
            sparse.keywords["indices"],
        )


# ---- package layout ----------------------------------------------------------------------------------------


def test_names_and_modules():
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    for name in (
        "get_mla_metadata",
        "flash_mla_with_kvcache",
        "flash_mla_sparse_fwd",
        "flash_attn_varlen_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_varlen_kvpacked_func",
        "fused_norm_rope_attn_rope_cast",
        "quant",
        "cuda",
        "__version__",
    ):
        assert hasattr(flash_mla, name)
    assert flash_mla.FlashMLASchedMeta is FlashMLASchedMeta
    for name in ("prefill", "decode", "permute_q_b_proj", "permute_wv_proj"):
        assert callable(getattr(flash_mla.fused_norm_rope_attn_rope_cast, name))
