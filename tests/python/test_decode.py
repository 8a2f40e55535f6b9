# SPDX-License-Identifier: MIT
"""flash_mla_with_kvcache against attention in float64, over every format and kind of array."""

import numpy as np
import pytest
import support
from support import DenseCase, SparseCase

import flash_mla

PAIRS = [
    ("v32", None),
    ("v32", "v32"),
    ("v4", None),
    ("v4", "v4"),
    ("v41", None),
    ("v41", "v41"),
    ("v41", "v41-fp4"),
]


@pytest.mark.parametrize("causal", [False, True])
def test_dense(kit, causal):
    case = DenseCase(kit)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, causal=causal
    )
    assert tuple(out.shape) == (3, 2, 4, 512) and tuple(lse.shape) == (3, 4, 2) and out.dtype == case.q.dtype
    case.check(kit, out, lse, causal)


@pytest.mark.parametrize("d", [512, 576])
def test_dense_fp16(kit, d):
    case = DenseCase(kit, d=d, dtype="f16", page=5, h_q=3, h_kv=1, s_q=1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, softmax_scale=0.1
    )
    assert out.dtype == case.q.dtype
    case.check(kit, out, lse, scale=0.1)


def test_dense_with_sink_negative_and_zero_scale(kit):
    case = DenseCase(kit, lengths=(9, 3), s_q=1)
    sink = np.array([-support.INF, 0.3, -1.0, 2.0])
    for scale in (-0.2, 0.0):
        out, lse = flash_mla.flash_mla_with_kvcache(
            case.q, case.cache, case.table, case.seqlens, 512, softmax_scale=scale, attn_sink=kit.f32(sink)
        )
        case.check(kit, out, lse, scale=scale, sink=sink)


@pytest.mark.parametrize("main, extra", PAIRS)
@pytest.mark.parametrize("lengths", [False, True])
def test_sparse(kit, main, extra, lengths):
    case = SparseCase(kit, main, extra, lengths=lengths)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, None, None, 512, None, None, **case.keywords
    )
    assert tuple(out.shape) == (2, 2, 3, 512) and tuple(lse.shape) == (2, 3, 2)
    case.check(kit, out, lse)


@pytest.mark.parametrize(
    "main, extra", [("v41-page", None), ("v41-page", "v41-page"), ("v41-page", "v41-fp4-page")]
)
def test_sparse_page_layout(kit, main, extra):
    case = SparseCase(kit, main, extra)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, None, None, 512, kv_layout="page", **case.keywords
    )
    case.check(kit, out, lse)


def test_sparse_over_a_plain_cache(kit):
    rng = np.random.default_rng(5)
    tokens = support.bf16(rng.normal(size=(4, 6, 1, 512)))
    q = support.bf16(rng.normal(size=(1, 1, 2, 512)))
    indices = np.array([[[0, 23, 5, 5, -7, 24]]])
    out, lse = flash_mla.flash_mla_with_kvcache(
        kit.bf16(q), kit.bf16(tokens), head_dim_v=512, indices=kit.i32(indices)
    )
    keys = tokens.reshape(24, 512)[[0, 23, 5, 5]]
    support.check_decode(kit.value(out), kit.value(lse), q, lambda i, j: keys, 512**-0.5)


@pytest.mark.parametrize("name", ["v32", "v4", "v41"])
def test_dense_over_a_quantised_cache(kit, name):
    d, per_token, _ = support.FORMATS[name]
    rng = np.random.default_rng(6)
    pages, tokens = support.random_pages(rng, name, 4, 8, padding=per_token)
    q = support.bf16(rng.normal(size=(2, 1, 2, d)))
    table, lengths = np.array([[3, 0], [2, 1]]), (13, 8)
    out, lse = flash_mla.flash_mla_with_kvcache(
        kit.bf16(q), support.cache_view(kit, pages, 8, per_token), kit.i32(table), kit.i32(lengths), 512
    )
    paged = tokens.reshape(4, 8, d)
    support.check_decode(
        kit.value(out), kit.value(lse), q, lambda i, j: paged[table[i]].reshape(-1, d)[: lengths[i]], d**-0.5
    )


def test_strides_are_honoured(kit):
    """Every dimension over-allocated by one, the last by 128, as the published tests do."""
    case = SparseCase(kit, "v32", lengths=False, sink=False)
    b, s_q, h_q, d = case.q_value.shape
    big = np.full((b + 1, s_q + 1, h_q + 1, d + 128), np.nan, np.float32)
    big[:b, :s_q, :h_q, :d] = case.q_value
    indices = np.full((b + 1, s_q + 1, 24 + 128), 7, np.int32)
    indices[:b, :s_q, :24] = case.indices
    out, lse = flash_mla.flash_mla_with_kvcache(
        kit.bf16(big)[:b, :s_q, :h_q, :d],
        case.cache,
        None,
        None,
        512,
        indices=kit.i32(indices)[:b, :s_q, :24],
    )
    case.check(kit, out, lse)


def test_ragged_queries_equal_their_requests(kit):
    case = DenseCase(kit, lengths=(30, 12), s_q=3)
    flat = case.q.reshape(6, 4, 576)[:5]
    out, lse = flash_mla.flash_mla_with_kvcache(
        flat, case.cache, case.table, case.seqlens, 512, causal=True, cu_seqlens_q=kit.i32([0, 3, 5])
    )
    assert tuple(out.shape) == (5, 4, 512) and tuple(lse.shape) == (4, 5)
    for i, (begin, end) in enumerate(((0, 3), (3, 5))):
        alone, alone_lse = flash_mla.flash_mla_with_kvcache(
            flat[begin:end][None],
            case.cache,
            case.table[i : i + 1],
            case.seqlens[i : i + 1],
            512,
            causal=True,
        )
        assert (kit.raw(out[begin:end]) == kit.raw(alone[0])).all()
        assert (kit.value(lse)[:, begin:end] == kit.value(alone_lse)[0]).all()


def test_out_and_lse_are_written_where_told(kit):
    case = DenseCase(kit)
    wanted, wanted_lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
    out, lse = kit.bf16(np.full(tuple(wanted.shape), 5.0)), kit.f32(np.zeros(tuple(wanted_lse.shape)))
    got, got_lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, out=out, lse=lse
    )
    assert got is out and got_lse is lse
    assert (kit.raw(out) == kit.raw(wanted)).all() and (kit.raw(lse) == kit.raw(wanted_lse)).all()


def test_zero_size_calls(kit):
    case = SparseCase(kit, "v41", lengths=False, sink=False)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, None, None, 512, indices=kit.i32(np.zeros((2, 2, 0)))
    )
    assert (kit.value(out) == 0).all() and (kit.value(lse) == support.INF).all()
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q[:0], case.cache, None, None, 512, indices=kit.i32(case.indices)[:0]
    )
    assert tuple(out.shape) == (0, 2, 3, 512) and tuple(lse.shape) == (0, 3, 2)


def test_kinds_of_arrays_agree_to_the_bit():
    results = []
    for kit in (kit for kit in support.KITS.values() if kit.checks_values):
        case = SparseCase(kit, "v4", "v4")
        out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
        results.append((kit.raw(out), kit.raw(lse)))
    assert all((a == results[0][0]).all() and (b == results[0][1]).all() for a, b in results)


def test_dlpack_alone_is_enough(torch):
    """Arrays that offer nothing but DLPack; results are NumPy's."""
    kit, numpy_kit = support.KITS["torch"], support.KITS["numpy"]
    case = DenseCase(kit)
    wrap = support.HostDLPack
    out, lse = flash_mla.flash_mla_with_kvcache(
        wrap(case.q), wrap(case.cache), wrap(case.table), wrap(case.seqlens), 512
    )
    assert isinstance(out, np.ndarray) and isinstance(lse, np.ndarray)
    case.check(numpy_kit, out, lse)


def test_dlpack_of_numpy_arrays():
    """DLPack without torch: uint16 is bf16 there as well."""
    kit = support.KITS["numpy"]
    case = DenseCase(kit)
    out, lse = flash_mla.flash_mla_with_kvcache(
        *map(support.HostDLPack, (case.q, case.cache, case.table, case.seqlens)), 512
    )
    case.check(kit, out, lse)
