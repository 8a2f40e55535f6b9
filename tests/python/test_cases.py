# SPDX-License-Identifier: MIT
"""Faults that users of such libraries met, each with its number."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import INF, DenseCase, SparseCase, bf16

import flash_mla
from flash_mla import quant


def test_c055_padded_page_stride_without_a_copy(kit):
    """A V4 cache whose pages are apart is a non-contiguous view; it is read and written in place."""
    big = np.full((6, 64 * 584 + 640), 0x7F, np.uint8)  # NaN codes in the gaps
    tokens = bf16(np.random.default_rng(0).normal(size=(3, 64, 1, 512)))
    source = quant.quantize_k_cache(kit.bf16(tokens), quant.KVCacheLayout.V4_FP8Sparse)
    flat = kit.strided(source, (3, 64 * 584), (kit.strides(source)[0], 1))
    big[::2, : 64 * 584] = np.asarray(kit.value(flat)).view(np.uint8)
    whole = kit.bytes(big)
    step = 2 * big.shape[1]
    cache = kit.strided(whole, (3, 64, 1, 584), (step, 584, 584, 1))
    values = quant.dequantize_k_cache(cache, quant.KVCacheLayout.V4_FP8Sparse)
    assert (
        kit.raw(values) == kit.raw(quant.dequantize_k_cache(source, quant.KVCacheLayout.V4_FP8Sparse))
    ).all()
    rows = np.random.default_rng(1).integers(0, 192, (2, 1, 40))
    q = kit.bf16(np.random.default_rng(2).normal(size=(2, 1, 3, 512)))
    results = [
        flash_mla.flash_mla_with_kvcache(q, x, None, None, 512, indices=kit.i32(rows))
        for x in (cache, source)
    ]
    assert all((kit.raw(a) == kit.raw(b)).all() for a, b in zip(*results))


def test_c060a_rank_of_indices(kit):
    """[T, topk] and [T, 1, topk] are the same call; other ranks are named."""
    q, kv = kit.bf16(np.random.default_rng(0).normal(size=(3, 2, 512))), kit.bf16(np.ones((9, 1, 512)))
    rows = np.random.default_rng(1).integers(-1, 10, (3, 7))
    wide = np.full((3, 50), 4)
    wide[:, :7] = rows
    results = [
        flash_mla.flash_mla_sparse_fwd(q, kv, x, 0.1)
        for x in (kit.i32(rows), kit.i32(rows[:, None]), kit.i32(wide)[:, :7])
    ]
    for other in results[1:]:
        assert all((kit.raw(a) == kit.raw(b)).all() for a, b in zip(other, results[0]))
    with pytest.raises(RuntimeError, match="indices: shape"):
        flash_mla.flash_mla_sparse_fwd(q, kv, kit.i32(rows[:, None, None]), 0.1)


def test_c060b_position_past_the_table_is_refused_on_the_host(host_kit):
    kit = host_kit
    with pytest.raises(RuntimeError, match="abs_indices"):
        quant.abs_indices2indices_in_kvcache(kit.i32([[[64]]]), kit.i32([[3]]), 64)


def test_c060c_a_call_between_two_calls_changes_neither(kit):
    """What another call does with scratch memory does not show: same bits before and after, larger and smaller."""
    case, other = SparseCase(kit, "v4", "v4"), DenseCase(kit, lengths=(900,), s_q=4, h_q=8)
    first = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    bits = [kit.raw(x).copy() for x in first]
    flash_mla.flash_mla_with_kvcache(other.q, other.cache, other.table, other.seqlens, 512)
    again = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    assert all((kit.raw(a) == b).all() and (kit.raw(c) == b).all() for a, b, c in zip(first, bits, again))


def test_c082_base_of_prefill_statistics(kit):
    """Natural log, said so in the docstring; base 2 under the compat setting of the generation that had it."""
    rng = np.random.default_rng(0)
    q, kv = bf16(rng.normal(size=(4, 2, 512))), bf16(rng.normal(size=(30, 1, 512)))
    rows = rng.integers(0, 30, (4, 1, 11))
    logits = 0.07 * np.einsum("thd,tkd->thk", q.astype(np.float64), kv[rows[:, 0], 0].astype(np.float64))
    natural = np.log(np.exp(logits).sum(-1))
    for setting, unit in (("newest", 1.0), ("2026-04", 1.0), ("2025-09", np.log(2))):
        flash_mla.set_compat(setting)
        _, max_logits, lse = flash_mla.flash_mla_sparse_fwd(kit.bf16(q), kit.bf16(kv), kit.i32(rows), 0.07)
        assert np.abs(kit.value(lse) - natural / unit).max() < 1e-5
        assert np.abs(kit.value(max_logits) - logits.max(-1) / unit).max() < 1e-5
    text = " ".join(flash_mla.flash_mla_sparse_fwd.__doc__.split())
    assert "natural log" in text and 'set_compat("2025-09") both are in base 2' in text


@pytest.mark.parametrize("ranks", [2, 4])
def test_c083_context_parallel(kit, ranks):
    """Selected tokens dealt to ranks, one of which owns none: merged, they are the unsharded call."""
    rng = np.random.default_rng(ranks)
    case = SparseCase(kit, "v32", lengths=False, sink=True)
    owner = rng.integers(0, ranks - 1, case.indices.shape)  # the last rank owns nothing
    outs, lses = [], []
    keywords = {key: value for key, value in case.keywords.items() if key != "attn_sink"}
    for rank in range(ranks):
        keywords["indices"] = kit.i32(np.where(owner == rank, case.indices, -1))
        out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **keywords)
        outs.append(out)
        lses.append(lse)
    assert (kit.value(lses[-1]) == INF).all() and (kit.value(outs[-1]) == 0).all()
    out, lse = flash_mla.merge_states(outs, lses, kit.f32(case.sink))
    wanted, wanted_lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, None, None, 512, **case.keywords
    )
    assert tuple(out.shape) == tuple(wanted.shape) and tuple(lse.shape) == tuple(wanted_lse.shape) == (
        2,
        3,
        2,
    )
    assert np.abs(kit.value(lse) - kit.value(wanted_lse)).max() < 1e-5
    assert np.abs(kit.value(out) - kit.value(wanted)).max() < 2.0**-6 * np.abs(kit.value(wanted)).max()
    assert "[b, h_q, s_q]" in flash_mla.flash_mla_with_kvcache.__doc__


def test_c119_nothing_is_built_against_torch():
    """The library links neither torch nor Python; importing the package imports neither torch nor ml_dtypes."""
    readelf = subprocess.run(["readelf", "-d", flash_mla._library.path], capture_output=True, text=True)
    if readelf.returncode == 0:
        needed = [line for line in readelf.stdout.splitlines() if "NEEDED" in line]
        assert needed and not any(
            word in line for line in needed for word in ("torch", "c10", "python", "cuda")
        )
    code = (
        "import sys, flash_mla, numpy as np\n"
        "assert 'torch' not in sys.modules and 'ml_dtypes' not in sys.modules\n"
        "q = np.zeros((1, 1, 2, 576), np.uint16); c = np.zeros((1, 64, 1, 576), np.uint16)\n"
        "o, l = flash_mla.flash_mla_with_kvcache(q, c, np.zeros((1, 1), np.int32), np.array([3], np.int32), 512)\n"
        "assert abs(l - np.log(3)).max() < 1e-6 and 'torch' not in sys.modules\n"
        "print('fine')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr


def test_threads_have_contexts_of_their_own(kit):
    """Calls from many threads at a time: the same bits, no "busy"."""
    case = SparseCase(kit, "v4", "v4")
    wanted = [
        kit.raw(x).tobytes()
        for x in flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    ]
    failures = []

    def work():
        try:
            for _ in range(10):
                got = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
                assert [kit.raw(x).tobytes() for x in got] == wanted
        except BaseException as error:  # carried to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


def test_a_forked_child_works():
    """The parent's worker threads do not exist in a child; the child makes its own."""
    code = (
        "import os, numpy as np, flash_mla\n"
        "q = np.zeros((4, 1, 64, 576), np.uint16); c = np.zeros((8, 64, 1, 576), np.uint16)\n"
        "def call():\n"
        "    return flash_mla.flash_mla_with_kvcache(q, c, np.arange(8, dtype=np.int32).reshape(4, 2),\n"
        "                                            np.full(4, 100, np.int32), 512)[1]\n"
        "call()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if abs(call() - np.log(100)).max() < 1e-5 else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert abs(call() - np.log(100)).max() < 1e-5\n"
        "print('fine')"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "fine", done.stderr
