# SPDX-License-Identifier: MIT
"""Decode calls that look like an earlier one go straight to the library: what may and may not be taken for the same."""

import math
import warnings

import numpy as np
import pytest
import support
from support import DenseCase, SparseCase

import flash_mla
from flash_mla import _context, _plans, quant

torch = pytest.importorskip("torch")
kit = support.KITS["cuda" if "cuda" in support.KITS else "torch"]


@pytest.fixture(autouse=True)
def no_plans():
    _plans.forget()


def decode(case, q=None, **keywords):
    q = case.q if q is None else q
    return flash_mla.flash_mla_with_kvcache(q, case.cache, case.table, case.seqlens, 512, **keywords)


def kept():
    return len(_context.plans())


def same(a, b):
    return all((kit.raw(x) == kit.raw(y)).all() for x, y in zip(a, b))


def test_other_values_at_other_addresses():
    cases = [DenseCase(kit, seed, lengths) for seed, lengths in enumerate([(37, 0, 130), (128, 130, 1), (130, 17, 20)])]
    for case in cases:  # one pool size and one table width for all
        room = torch.full((30, *case.cache.shape[1:]), float("nan"), dtype=case.cache.dtype, device=case.cache.device)
        room[: len(case.cache)] = case.cache
        case.cache = room
    results = [decode(case, causal=True) for case in (*cases, *cases)]
    assert kept() == 1
    for case, (out, lse) in zip((*cases, *cases), results):  # each result has memory of its own
        case.check(kit, out, lse, causal=True)
        assert out.is_contiguous() and lse.is_contiguous()


def test_sparse_with_everything():
    for seed in (0, 1, 0):
        case = SparseCase(kit, "v41", "v41-fp4", seed)
        case.check(kit, *flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords))
    assert kept() == 1


def test_arguments_that_indices_make_void(monkeypatch):
    case, run, results = SparseCase(kit, "v41", "v41-fp4"), _plans.Plan.run, []
    monkeypatch.setattr(_plans.Plan, "run", lambda plan, arrays: results.append(run(plan, arrays)) or results[-1])
    table, lengths = kit.i32(np.ones((2, 3))), kit.i32([1, 2])
    for i in range(3):
        got = flash_mla.flash_mla_with_kvcache(case.q, case.cache, table, lengths, 512, **case.keywords)
        case.check(kit, *got)
    assert kept() == 1 and len(results) == 2 and None not in results


def test_what_makes_another_kind():
    case = DenseCase(kit)
    wanted = decode(case)
    wide = torch.zeros(*case.q.shape[:-1], 600, dtype=case.q.dtype, device=case.q.device)
    wide[..., :576] = case.q
    calls = [
        lambda: decode(case, wide[..., :576]),  # strides
        lambda: decode(case, case.q[:, :1]),  # shape
        lambda: decode(case, causal=True),
        lambda: decode(case, softmax_scale=576**-0.5),
        lambda: decode(case, enable_batch_invariant=True),
        lambda: decode(case, is_fp8_kvcache=False),
        lambda: decode(case, tile_scheduler_metadata=flash_mla.get_mla_metadata()[0]),
        lambda: decode(DenseCase(kit, dtype="f16")),
        lambda: decode(DenseCase(kit, d=512)),
        lambda: decode(DenseCase(kit, page=32)),
        lambda: decode(DenseCase(kit, h_kv=1)),
    ]
    for n, call in enumerate(calls):
        first = call()
        assert kept() == n + 2
        assert same(call(), first) and kept() == n + 2
    for n in (0, 3, 4, 5, 6):
        assert same(calls[n](), wanted)


def test_a_scale_of_one_is_not_true():
    """1.0 and True are equal as keys; only one of them is a scale."""
    case = DenseCase(kit)
    for _ in range(2):
        args = (case.q, case.cache, case.table, case.seqlens, 512, None, None)
        case.check(kit, *flash_mla.flash_mla_with_kvcache(*args, 1.0), scale=1.0)
        case.check(kit, *flash_mla.flash_mla_with_kvcache(*args, 1), scale=1.0)
        case.check(kit, *flash_mla.flash_mla_with_kvcache(*args, True), causal=True)
    assert kept() == 2


def test_a_query_that_requires_grad_is_still_refused():
    case = DenseCase(kit)
    decode(case)
    q = case.q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="q: requires grad"):
        decode(case, q)
    with torch.no_grad():
        assert same(decode(case, q), decode(case))
    with pytest.raises(RuntimeError, match="q: requires grad"):
        decode(case, q)


def test_what_needed_no_grad_is_not_kept():
    case = DenseCase(kit)
    q = case.q.clone().requires_grad_()
    with torch.no_grad():
        decode(case, q)
    assert kept() == 0
    with pytest.raises(RuntimeError, match="q: requires grad"):
        decode(case, q)


def test_gradients_of_a_sink_are_refused():
    case = SparseCase(kit)
    call = dict(case.keywords)
    flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **call)
    call["attn_sink"] = torch.nn.Parameter(call["attn_sink"])
    with pytest.raises(RuntimeError, match="attn_sink: requires grad"):
        flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **call)


def test_the_compat_setting_is_part_of_the_kind():
    tokens = kit.bf16(np.random.default_rng(0).normal(size=(2, 32, 1, 512)))
    q, rows = kit.bf16(np.random.default_rng(1).normal(size=(1, 1, 2, 512))), kit.i32([[[3, 40, 61]]])
    results = {}
    for layout, setting in (("V41_FP8Sparse", "newest"), ("V41_FP8Sparse_Page", "2026-09-10")) * 2:
        cache = quant.quantize_k_cache(tokens, quant.KVCacheLayout[layout])
        flash_mla.set_compat(setting)
        results[setting] = flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, indices=rows)
    assert same(*results.values()) and kept() == 2


def test_a_refusal_has_its_message_and_does_no_harm():
    """Values are looked at on the host only; there a length beyond the table is refused with the argument's name."""
    case = DenseCase(support.KITS["torch"])
    wanted = decode(case)
    bad = case.seqlens.clone()
    bad[1] = 16 * case.table.shape[1] + 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cache_seqlens"):
            flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, bad, 512)
        assert same(decode(case), wanted)


def test_wrong_tensors_after_a_good_call():
    case = DenseCase(kit)
    decode(case)
    for argument, value, message in (
        (2, case.table.long(), "block_table"),
        (3, case.seqlens[:2], "cache_seqlens"),
        (1, case.cache[..., :512], "k_cache"),
        (0, case.q[..., ::2], "q"),
    ):
        arguments = [case.q, case.cache, case.table, case.seqlens, 512]
        arguments[argument] = value
        with pytest.raises(RuntimeError, match=message):
            flash_mla.flash_mla_with_kvcache(*arguments)
    with pytest.raises(AssertionError, match="head_dim_v: 256"):
        flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 256)


def test_every_odd_page_stride_is_warned_about():
    memory = np.zeros((3, 8 * 528 + 16), np.uint8)
    cache = support.cache_view(kit, memory, 8, 528)
    q, rows = kit.bf16(np.zeros((1, 1, 2, 512))), kit.i32([[[3, 9]]])
    for _ in range(3):
        with pytest.warns(UserWarning, match="kv_layout='page'"):
            flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, indices=rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, indices=rows, kv_layout="page")


def test_metadata_is_still_recorded_and_compared():
    case, (meta, _) = DenseCase(kit), flash_mla.get_mla_metadata()
    for _ in range(3):
        decode(case, tile_scheduler_metadata=meta)
    assert meta.have_initialized and (meta.config.b, meta.config.s_q, meta.config.h_q) == (3, 2, 4)
    other, (fresh, _) = DenseCase(kit, lengths=(5, 6)), flash_mla.get_mla_metadata()
    for _ in range(2):
        with pytest.raises(AssertionError, match="tile_scheduler_metadata: b is 2"):
            decode(other, tile_scheduler_metadata=meta)
        decode(other, tile_scheduler_metadata=fresh)
    assert fresh.config.b == 2 and fresh.num_splits is not None
    meta.have_initialized = False  # callers may reset it
    decode(other, tile_scheduler_metadata=meta)
    assert meta.config.b == 2
    decode(other, tile_scheduler_metadata=meta)


def test_nothing_to_do():
    case = DenseCase(kit)
    for _ in range(2):
        out, lse = flash_mla.flash_mla_with_kvcache(case.q[:0], case.cache, case.table[:0], case.seqlens[:0], 512)
        assert tuple(out.shape) == (0, 2, 4, 512) and tuple(lse.shape) == (0, 4, 2)
        assert out.stride() == torch.empty(out.shape).stride() and lse.stride() == torch.empty(lse.shape).stride()


def test_parameters_and_inference_mode():
    case = DenseCase(kit)
    for _ in range(2):
        with torch.inference_mode():
            case.check(kit, *decode(case, torch.nn.Parameter(case.q)))
        case.check(kit, *decode(case))


def test_not_more_than_so_many(monkeypatch):
    monkeypatch.setattr(_plans, "MOST", 5)
    case = DenseCase(kit, lengths=(3, 4))
    for n in range(12):
        scale = math.ldexp(1.0, -n)
        case.check(kit, *decode(case, softmax_scale=scale), scale=scale)
        assert 1 <= kept() <= 5


def test_arrays_of_others_make_no_plan():
    case, host = DenseCase(support.KITS["torch"]), DenseCase(support.KITS["numpy"])
    for _ in range(2):
        out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, host.table, host.seqlens, 512)
        case.check(support.KITS["torch"], out, lse)
        out, lse = flash_mla.flash_mla_with_kvcache(host.q, host.cache, host.table, host.seqlens, 512)
        case.check(support.KITS["numpy"], out, lse)
    assert kept() == 0
