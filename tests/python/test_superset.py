# SPDX-License-Identifier: MIT
"""What code of any published generation does, row by row of the table of generations accepted (docs/integration.md)."""

import inspect
import pathlib

import numpy as np
import pytest
import support
from support import DenseCase, SparseCase
from test_mha import Case as MhaCase
from test_prefill import Case as PrefillCase

import flash_mla
from flash_mla import fused_norm_rope_attn_rope_cast as fused
from flash_mla import quant


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


@pytest.mark.parametrize("dense", [True, False])
def test_arguments_6_and_7(kit, dense):
    """Object and None, tables, None and None, object and table: the same bits."""
    case = DenseCase(kit) if dense else SparseCase(kit)
    head = (case.q, case.cache, case.table, case.seqlens) if dense else (case.q, case.cache, None, None)
    keywords = {} if dense else case.keywords
    tables = flash_mla.get_mla_metadata(kit.i32([37, 0, 130]), case.s_q * case.h_q, 1)
    meta = flash_mla.FlashMLASchedMeta()
    pairs = [(None, None), (meta, None), tables, (flash_mla.FlashMLASchedMeta(), tables[1]), (tables[0], None)]
    results = [flash_mla.flash_mla_with_kvcache(*head, 512, *pair, **keywords) for pair in pairs]
    assert all(same(kit, result, results[0]) for result in results[1:])
    case.check(kit, *results[0])
    keyword = flash_mla.flash_mla_with_kvcache(
        *head, 512, tile_scheduler_metadata=tables[0], num_splits=tables[1], **keywords
    )
    assert same(kit, keyword, results[0])


@pytest.mark.parametrize("spelling", ["num_heads_per_head_k", "num_q_tokens_per_head_k"])
def test_keywords_of_get_mla_metadata(kit, spelling):
    """Both spellings, everything by keyword, and what no generation knew."""
    tables = flash_mla.get_mla_metadata(
        cache_seqlens=kit.i32([5, 70]),
        num_heads_k=1,
        num_heads_q=128,
        is_fp8_kvcache=True,
        topk=128,
        some_later_keyword=7,
        **{spelling: 256},
    )
    wanted = flash_mla.get_mla_metadata(kit.i32([5, 70]), 256, 1, 128, True, 128)
    assert same(kit, tables, wanted)
    meta, none = flash_mla.get_mla_metadata(another=1)
    assert isinstance(meta, flash_mla.FlashMLASchedMeta) and none is None


# ---- row: metadata reuse -----------------------------------------------------------------------------------


def test_one_object_over_layers_and_steps(kit):
    """Lengths grow from step to step, caches change from layer to layer."""
    meta, _ = flash_mla.get_mla_metadata()
    for step, layer in ((0, 0), (0, 1), (1, 0), (1, 1)):
        case = DenseCase(kit, seed=2 * step + layer, lengths=(37 + 90 * step, step, 130))
        case.check(kit, *flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512, meta))


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


@pytest.mark.parametrize("dtype, d", [("bf16", 576), ("f16", 576), ("bf16", 512), ("f16", 512)])
def test_plain_caches(kit, dtype, d):
    case = DenseCase(kit, dtype=dtype, d=d)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
    if dtype == "bf16":
        case.check(kit, out, lse)
    else:
        assert out.dtype == case.q.dtype and np.isfinite(kit.value(out)).all()


@pytest.mark.parametrize(
    "main, extra", [("v32", "v32"), ("v4", "v4"), ("v41", "v41"), ("v41", "v41-fp4"), ("v41-page", "v41-fp4-page")]
)
def test_quantised_caches(kit, main, extra):
    case = SparseCase(kit, main, extra)
    layout = "page" if main.endswith("page") else None
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, None, None, 512, kv_layout=layout, **case.keywords
    )
    case.check(kit, out, lse)


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


# ---- row: lse ----------------------------------------------------------------------------------------------


def test_shapes_of_lse(kit):
    """[b, h_q, s_q] in decode, [s_q, h_q] in prefill, [total_q, h_q] with stride 1 in multi-head attention; a given one
    may have any strides."""
    case = DenseCase(kit)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
    assert tuple(lse.shape) == (3, 4, 2) and tuple(out.shape) == (3, 2, 4, 512)
    room = kit.f32(np.zeros((3, 2, 9)))
    strided = kit.strided(room, (3, 4, 2), (18, 2, 9))
    _, got = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512, lse=strided)
    assert got is strided and (kit.value(got) == kit.value(lse)).all()
    prefill = PrefillCase(kit)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(prefill.q, prefill.kv, prefill.index_array, 0.1)
    assert tuple(lse.shape) == tuple(max_logits.shape) == tuple(prefill.q.shape[:2])
    mha = MhaCase(kit)
    _, lse = flash_mla.flash_attn_varlen_func(*mha.arguments)
    assert tuple(lse.shape) == tuple(mha.q.shape[:2]) and kit.strides(lse)[0] == 1


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


# ---- row: helper names -------------------------------------------------------------------------------------


def test_helper_names(kit):
    """Both enums, every member's name, the first quantiser's signature: the same bytes and numbers."""
    new, old = quant.KVCacheLayout, quant.FP8KVCacheLayout
    assert new.MODEL1_FP8Sparse is new.V4_FP8Sparse and new.V41_FP4 is new.V41_FP4Sparse
    assert (old.V32.value, old.MODEL1.value) == (1, 2)
    for member, other in ((new.V32_FP8Sparse, old.V32_FP8Sparse), (new.V4_FP8Sparse, old.MODEL1_FP8Sparse)):
        x = kit.bf16(np.random.default_rng(0).normal(size=(2, 3, 1, member.get_meta()[0])))
        a, b = quant.quantize_k_cache(x, member), quant.quantize_k_cache(x, other)
        assert same(kit, (a,), (b,)) and member.get_meta() == other.get_meta()
        assert same(kit, (quant.dequantize_k_cache(a, member),), (quant.dequantize_k_cache(a, other),))
        assert a.shape[-1] == member.get_bytes_per_token() == other.get_bytes_per_token()
    first = quant.quantize_k_cache(kit.bf16(np.ones((1, 2, 1, 576))), 512, 128)
    assert (kit.value(quant.dequantize_k_cache(first, 512, 128, 576)) == 1).all()


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


ROWS = {  # the table of docs/integration.md: topic, and the tests above that are its row
    "`get_mla_metadata`": [test_g1_code, test_g4_code, test_g5_code, test_keywords_of_get_mla_metadata],
    "arguments 6 and 7 of decode": [test_arguments_6_and_7, test_g3_code],
    "`FlashMLASchedMeta`": [test_one_object_over_layers_and_steps, test_g5_code],
    "caches": [test_plain_caches, test_quantised_caches, test_int8_uint8_and_e4m3_caches],
    "`is_fp8_kvcache`": [test_is_fp8_kvcache, test_g7_code],
    "`block_table`, `cache_seqlens`": [test_block_table_and_cache_seqlens],
    "heads, page size, topk, s_q, d_qk": [test_any_heads_topk_page_and_queries, test_any_dense_heads_and_page],
    "lse": [test_shapes_of_lse],
    "fused operations": [test_fused_takes_keywords_and_v4_caches, test_published_parameter_order],
    "`quant`": [test_helper_names],
    "README's positional call": [test_readme_positional_form],
    "compiled extension": [test_names_and_modules],
}


def test_every_row_of_the_documented_table_is_here():
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs/integration.md").read_text()
    table = page.split("## Generations accepted")[1].split("\n\n")[1]
    topics = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert topics == list(ROWS) and all(ROWS.values())
