# SPDX-License-Identifier: MIT
"""get_mla_metadata in all its forms, FlashMLASchedMeta, and that neither ever changes a result."""

import numpy as np
import pytest
from support import DenseCase, SparseCase

import flash_mla
from flash_mla import _library as c
from flash_mla import _operations as operations

VECTORS = [  # lengths, parts, num_splits, rows: the published test vectors, overhead 5
    (
        (1000, 64, 0, 300),
        4,
        [0, 2, 3, 4, 5],
        [(0, 0, 0, 11, 0, 1, 1), (0, 1, 11, 1, 1, 1, 0), (2, 3, 0, 5, 0, 0, 0), None],
    ),
    ((130, 64), 4, [0, 1, 2], [(0, 0, 0, 3, 0, 0, 0), (1, 1, 0, 1, 0, 0, 0), None, None]),
    ((2048,), 3, [0, 3], [(0, 0, 0, 13, 0, 1, 1), (0, 0, 13, 26, 1, 1, 1), (0, 0, 26, 32, 2, 1, 1)]),
]


@pytest.mark.parametrize("lengths, parts, splits, rows", VECTORS)
def test_published_vectors(kit, lengths, parts, splits, rows):
    seqlens = kit.i32(lengths)
    table, num_splits = operations.schedule(seqlens, c.SCHEDULE_2026_01, 5, parts, seqlens)
    assert tuple(table.shape) == (parts, 8) and list(kit.value(num_splits)) == splits
    for got, wanted in zip(kit.value(table).tolist(), rows):
        if wanted is None:
            assert got[0] >= len(lengths)
        else:  # first, last, begin, end, split, flags; the table's order is first, last, begin, end, split, flags
            assert tuple(got[:7]) == wanted


def tokens_covered(table, num_splits, lengths, order):
    """What the rows cover, in blocks, per request; order: columns of (first, begin, last, end)."""
    blocks = [max(-(-n // 64), 1) for n in lengths]
    covered = [0] * len(lengths)
    for row in table:
        first, begin, last, end = (row[k] for k in order)
        if first >= len(lengths):
            continue
        for r in range(first, last + 1):
            lo, hi = (begin if r == first else 0), (end if r == last else blocks[r])
            covered[r] += hi - lo
    return covered, blocks


@pytest.mark.parametrize("lengths", [(1000, 64, 1, 300), (64,), (5000, 5000), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_tables_cover_every_block(kit, lengths):
    six = flash_mla.get_mla_metadata(kit.i32(lengths), 16, 1, 16, False, None)
    three = flash_mla.get_mla_metadata(kit.i32(lengths), 16, 1)
    for (table, splits), in_tokens in ((six, False), (three, True)):
        rows = kit.value(table).tolist()
        if in_tokens:  # G1 counts tokens
            rows = [[r[0], r[1] // 64, r[2], -(-r[3] // 64), *r[4:]] for r in rows]
        covered, blocks = tokens_covered(rows, splits, lengths, (0, 1, 2, 3))
        assert covered == blocks
        splits = kit.value(splits).tolist()
        assert (
            splits[0] == 0
            and all(b > a for a, b in zip(splits, splits[1:]))
            and len(splits) == len(lengths) + 1
        )


def test_every_form(kit):
    lengths = kit.i32([100, 200])
    obj, none = flash_mla.get_mla_metadata()
    assert isinstance(obj, flash_mla.FlashMLASchedMeta) and none is None
    for call in (
        lambda: flash_mla.get_mla_metadata(lengths, 128, 1),
        lambda: flash_mla.get_mla_metadata(lengths, 128, 1, 128),
        lambda: flash_mla.get_mla_metadata(lengths, 128, 1, 128, True),
        lambda: flash_mla.get_mla_metadata(lengths, 128, 1, 128, True, 2048),
        lambda: flash_mla.get_mla_metadata(cache_seqlens=lengths, num_heads_per_head_k=128, num_heads_k=1),
        lambda: flash_mla.get_mla_metadata(
            lengths, num_q_tokens_per_head_k=128, num_heads_k=1, num_heads_q=128, is_fp8_kvcache=True, topk=64
        ),
        lambda: flash_mla.get_mla_metadata(lengths, 128, 1, something_new=3),
    ):
        table, splits = call()
        assert (
            table.shape[1] == 8
            and tuple(splits.shape) == (3,)
            and table.dtype == lengths.dtype == splits.dtype
        )
    assert isinstance(flash_mla.get_mla_metadata(num_heads_q=128)[0], flash_mla.FlashMLASchedMeta)


def test_rows_do_not_depend_on_the_batch(kit):
    """Engines copy the tables into buffers made for another batch size."""
    sizes = {tuple(flash_mla.get_mla_metadata(kit.i32([5] * b), 128, 1)[0].shape) for b in (1, 2, 77)}
    assert len(sizes) == 1


def test_what_must_be_refused(kit):
    lengths = kit.i32([100, 200])
    with pytest.raises(AssertionError, match="num_heads_k"):
        flash_mla.get_mla_metadata(lengths, 128)
    with pytest.raises(AssertionError, match="num_heads_q"):
        flash_mla.get_mla_metadata(lengths, 128, 1, topk=64)
    with pytest.raises(RuntimeError, match="cache_seqlens: dtype"):
        flash_mla.get_mla_metadata(kit.f32([1, 2]), 128, 1)
    if kit.checks_values:
        with pytest.raises(RuntimeError, match="cache_seqlens"):
            flash_mla.get_mla_metadata(kit.i32([-4]), 128, 1)


def test_object_records_the_first_call_and_refuses_another(kit):
    case, (meta, _) = DenseCase(kit), flash_mla.get_mla_metadata()
    assert (meta.have_initialized, meta.config, meta.tile_scheduler_metadata, meta.num_splits) == (
        False,
        None,
        None,
        None,
    )
    call = (case.q, case.cache, case.table, case.seqlens, 512, meta, None)
    flash_mla.flash_mla_with_kvcache(*call, causal=True)
    assert meta.have_initialized and meta.config.b == 3 and meta.config.s_q == 2 and meta.config.h_q == 4
    assert (meta.config.page_block_size, meta.config.h_k, meta.config.causal, meta.config.is_fp8_kvcache) == (
        16,
        2,
        True,
        False,
    )
    assert (meta.config.topk, meta.config.extra_page_block_size, meta.config.extra_topk) == (None, None, None)
    assert meta.config.enable_batch_invariant is False
    assert meta.tile_scheduler_metadata.shape[1] == 8 and tuple(meta.num_splits.shape) == (4,)
    flash_mla.flash_mla_with_kvcache(*call, softmax_scale=0.5, causal=True)
    for keywords, field in (
        ({"causal": False}, "causal"),
        ({"causal": True, "enable_batch_invariant": True}, "enable_batch_invariant"),
    ):
        with pytest.raises(AssertionError, match=field):
            flash_mla.flash_mla_with_kvcache(*call, **keywords)
    with pytest.raises(AssertionError, match="b is 2"):
        flash_mla.flash_mla_with_kvcache(
            case.q[:2], case.cache, case.table[:2], case.seqlens[:2], 512, meta, None, causal=True
        )


def test_object_of_a_sparse_call(kit):
    case = SparseCase(kit, "v41", "v41-fp4")
    meta, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, meta, **case.keywords)
    config = meta.config
    assert (config.topk, config.extra_topk, config.page_block_size, config.extra_page_block_size) == (
        24,
        10,
        8,
        9,
    )
    assert config.is_fp8_kvcache is True and meta.tile_scheduler_metadata is None and meta.num_splits is None
    wide = {"indices": kit.i32(np.zeros((2, 2, 700)) - 1), "topk_length": kit.i32([3, 700])}
    meta, _ = flash_mla.get_mla_metadata()
    flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, meta, **wide)
    assert meta.tile_scheduler_metadata.shape[1] == 8 and tuple(meta.num_splits.shape) == (3,)


@pytest.mark.parametrize("dense", [True, False])
def test_metadata_never_changes_results(kit, dense):
    """None, the object, right tables, tables of other lengths, shapes and generations, garbage."""
    case = DenseCase(kit) if dense else SparseCase(kit)
    head = (case.q, case.cache, case.table, case.seqlens) if dense else (case.q, case.cache, None, None)
    keywords = {} if dense else case.keywords
    wanted = flash_mla.flash_mla_with_kvcache(*head, 512, None, None, **keywords)
    garbage = kit.i32(np.random.default_rng(0).integers(-(2**31), 2**31, (9, 8)))
    for meta in (
        flash_mla.get_mla_metadata(),
        flash_mla.get_mla_metadata(kit.i32([1, 2, 3]), 8, 1),
        flash_mla.get_mla_metadata(kit.i32([9000] * 50), 1, 1, 64, True, 4096),
        (garbage, garbage[0]),
        (garbage[:, :3], None),
        (flash_mla.FlashMLASchedMeta(), garbage),
    ):
        got = flash_mla.flash_mla_with_kvcache(*head, 512, *meta, **keywords)
        assert all((kit.raw(a) == kit.raw(b)).all() for a, b in zip(got, wanted))


def test_object_is_stale_but_results_are_right(kit):
    """C069: the same object over layers and steps whose lengths differ."""
    meta, _ = flash_mla.get_mla_metadata()
    for seed, lengths in enumerate([(37, 0, 130), (1, 200, 3), (64, 64, 64)]):
        case = DenseCase(kit, seed=seed, lengths=lengths)
        out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512, meta)
        case.check(kit, out, lse)
