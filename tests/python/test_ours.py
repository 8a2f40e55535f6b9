# SPDX-License-Identifier: MIT
"""What goes beyond the published functions, one test for each such promise of the operations' description."""

import numpy as np
import pytest
import support
from support import INF, DenseCase, Row, SparseCase, bf16

import flash_mla
from flash_mla import quant
from flash_mla import flash_mla_interface as interface


def raw(kit, results):
    return [kit.raw(x).tobytes() for x in results]


def test_metadata_takes_both_spellings_and_both_results_are_accepted(kit):
    case = DenseCase(kit)
    wanted = raw(kit, flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512))
    for meta in (
        flash_mla.get_mla_metadata(),
        flash_mla.get_mla_metadata(case.seqlens, num_heads_per_head_k=4, num_heads_k=2),
        flash_mla.get_mla_metadata(cache_seqlens=case.seqlens, num_q_tokens_per_head_k=4, num_heads_k=2),
    ):
        assert (
            raw(
                kit,
                flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512, *meta),
            )
            == wanted
        )


@pytest.mark.parametrize("d, page", [(512, 1), (576, 3), (512, 128)])
def test_dense_any_page_size_and_both_widths(kit, d, page):
    case = DenseCase(kit, lengths=(9, 2), s_q=1, d=d, page=page)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, case.table, case.seqlens, 512)
    case.check(kit, out, lse)


def test_dense_takes_a_sink(kit):
    case = DenseCase(kit, lengths=(9, 0), s_q=1)
    sink = np.array([INF, -INF, 1.0, np.nan])
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, attn_sink=kit.f32(sink)
    )
    out, lse = kit.value(out), kit.value(lse)
    assert (out[0, 0, 0] == 0).all() and np.isnan(out[0, 0, 3]).all()
    assert (out[1] == 0).all() and (lse[1] == INF).all() and np.isfinite(lse[0]).all()
    Row(case.q_value[0, 0, 2], case.keys[0][:, 1], 512, 576**-0.5, 1.0).check(out[0, 0, 2], lse[0, 2, 0])


def test_dense_empty_batch_and_table_garbage(kit):
    case = DenseCase(kit, lengths=(5,))
    out, lse = flash_mla.flash_mla_with_kvcache(case.q[:0], case.cache, case.table[:0], case.seqlens[:0], 512)
    assert tuple(out.shape) == (0, 2, 4, 512) and tuple(lse.shape) == (0, 4, 2)


def test_sparse_invalid_indices_are_ignored(kit):
    case = SparseCase(kit, "v32", lengths=False, sink=False)
    rows = np.full_like(case.indices, -5)
    rows[0, :, ::2] = 2**31 - 1
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, indices=kit.i32(rows))
    assert (kit.value(out) == 0).all() and (kit.value(lse) == INF).all()


def test_sparse_lengths_are_clamped(kit):
    case = SparseCase(kit, "v4", "v4", sink=False)
    keywords = dict(case.keywords, topk_length=kit.i32([10**6, -3]), extra_topk_length=kit.i32([-1, 99]))
    case.length, case.extra_length = [24, 0], [0, 10]
    case.check(kit, *flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **keywords))


def test_sparse_lengths_per_query_token(kit):
    case = SparseCase(kit, "v41", sink=False)
    lengths = np.array([[3, 20], [0, 24]])
    keywords = dict(case.keywords, topk_length=kit.i32(lengths))
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **keywords)
    support.check_decode(
        kit.value(out),
        kit.value(lse),
        case.q_value,
        lambda i, j: case.tokens[support.attended(case.indices[i, j], len(case.tokens), lengths[i, j])],
        case.d**-0.5,
    )


def test_sparse_fp16_query_over_a_quantised_cache(kit):
    case = SparseCase(kit, "v32", lengths=False, sink=False)
    q = case.q_value.astype(np.float16)
    out, lse = flash_mla.flash_mla_with_kvcache(kit.f16(q), case.cache, None, None, 512, **case.keywords)
    support.check_decode(kit.value(out), kit.value(lse), q.astype(np.float64), case.keys_of, 576**-0.5)


def test_sparse_plain_extra_cache(kit):
    rng = np.random.default_rng(0)
    main, extra, q = (
        bf16(rng.normal(size=shape)) for shape in ((2, 4, 1, 576), (3, 2, 1, 576), (1, 1, 2, 576))
    )
    out, lse = flash_mla.flash_mla_with_kvcache(
        kit.bf16(q),
        kit.bf16(main),
        None,
        None,
        512,
        indices=kit.i32([[[7, 0]]]),
        extra_k_cache=kit.bf16(extra),
        extra_indices_in_kvcache=kit.i32([[[5, 6, 0]]]),
    )
    keys = np.concatenate([main.reshape(8, 576)[[7, 0]], extra.reshape(6, 576)[[5, 0]]])
    support.check_decode(kit.value(out), kit.value(lse), q, lambda i, j: keys, 576**-0.5)


@pytest.mark.parametrize("padding", [0, 1, 37, 4096])
def test_any_page_stride_and_alignment(kit, padding):
    case = SparseCase(kit, "v4", padding=padding, seed=padding)
    case.check(kit, *flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords))


def test_a_page_stride_that_proves_the_page_layout_is_warned_about(kit):
    case = SparseCase(kit, "v41", padding=16, lengths=False, sink=False)
    with pytest.warns(UserWarning, match="kv_layout='page'"):
        flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)


def test_nan_of_unattended_tokens_never_leaks(kit):
    """Decode and prefill: slots beyond the length hold in-range indices of NaN tokens."""
    rng = np.random.default_rng(0)
    kv = bf16(rng.normal(size=(8, 1, 512)))
    poisoned = kv.copy()
    poisoned[4:] = np.nan
    q = bf16(rng.normal(size=(1, 2, 512)))
    rows, length = kit.i32([[[0, 3, 5, 7]]]), kit.i32([2])
    prefill = [
        flash_mla.flash_mla_sparse_fwd(kit.bf16(q), kit.bf16(x), rows, 0.1, topk_length=length)
        for x in (kv, poisoned)
    ]
    decode = [
        flash_mla.flash_mla_with_kvcache(
            kit.bf16(q[None]),
            kit.bf16(x.reshape(2, 4, 1, 512)),
            None,
            None,
            512,
            indices=rows,
            topk_length=length,
        )
        for x in (kv, poisoned)
    ]
    for a, b in (prefill, decode):
        assert raw(kit, a) == raw(kit, b)


def test_nan_of_an_attended_token_shows(kit):
    kv = np.ones((4, 1, 512), np.float32)
    kv[2, 0, 7] = np.nan
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        kit.bf16(np.ones((1, 1, 512))), kit.bf16(kv), kit.i32([[[0, 2]]]), 0.1
    )
    assert (
        np.isnan(kit.value(out)).all()
        and np.isnan(kit.value(lse)).all()
        and np.isnan(kit.value(max_logits)).all()
    )


def test_prefill_any_heads_topk_and_repeated_indices(kit):
    rng = np.random.default_rng(0)
    kv, q = bf16(rng.normal(size=(20, 1, 576))), bf16(rng.normal(size=(3, 5, 576)))
    rows = rng.integers(0, 4, (3, 1, 37))
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(kit.bf16(q), kit.bf16(kv), kit.i32(rows), -0.1)
    for r in range(3):
        for h in range(5):
            Row(q[r, h], kv[rows[r, 0], 0], 512, -0.1).check(
                kit.value(out)[r, h], kit.value(lse)[r, h], kit.value(max_logits)[r, h]
            )
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        kit.bf16(q), kit.bf16(kv), kit.i32(np.zeros((3, 1, 0))), 0.1
    )
    assert (
        (kit.value(out) == 0).all()
        and (kit.value(lse) == INF).all()
        and (kit.value(max_logits) == -INF).all()
    )


def test_prefill_more_than_65535_query_tokens(kit):
    kv = bf16(np.random.default_rng(0).normal(size=(4, 1, 512)))
    q = np.broadcast_to(kv[:1], (70000, 1, 512))
    rows = np.zeros((70000, 1, 1), np.int32)
    rows[-1] = 3
    out, _, _ = flash_mla.flash_mla_sparse_fwd(kit.bf16(q), kit.bf16(kv), kit.i32(rows), 0.1)
    out = kit.value(out[-2:])
    assert (out[0, 0] == kv[0, 0]).all() and (out[1, 0] == kv[3, 0]).all()


def test_mha_accepts_deterministic(kit):
    q, k = kit.bf16(np.ones((2, 1, 128))), kit.bf16(np.ones((3, 1, 128)))
    cu = kit.i32([0, 2]), kit.i32([0, 3])
    assert raw(kit, flash_mla.flash_attn_varlen_func(q, k, k, *cu, 2, 3, deterministic=True)) == raw(
        kit, flash_mla.flash_attn_varlen_func(q, k, k, *cu, 2, 3)
    )


def test_mha_refuses_dropout_and_unsupported_widths(kit):
    q, k = kit.bf16(np.ones((2, 1, 128))), kit.bf16(np.ones((3, 1, 128)))
    cu = kit.i32([0, 2]), kit.i32([0, 3])
    with pytest.raises(AssertionError, match="dropout_p: 0.1"):
        flash_mla.flash_attn_varlen_func(q, k, k, *cu, 2, 3, 0.1)
    wide = kit.bf16(np.ones((2, 1, 8192)))
    with pytest.raises(RuntimeError, match="d_qk"):
        flash_mla.flash_attn_varlen_func(wide, wide, wide, kit.i32([0, 2]), kit.i32([0, 2]), 2, 2)


def test_mha_causal_rows_without_keys(kit):
    """out 0, lse -inf, zero gradients (dQ of the row, and nothing added to dK, dV)."""
    rng = np.random.default_rng(0)
    q, k, do = (kit.bf16(rng.normal(size=(n, 2, 128))) for n in (5, 2, 5))
    cu = kit.i32([0, 5]), kit.i32([0, 2])
    out, lse = flash_mla.flash_attn_varlen_func(q, k, k, *cu, 5, 2, causal=True)
    assert (kit.value(out)[:3] == 0).all() and (kit.value(lse)[:3] == -INF).all()
    dq, dk, dv = interface._flash_attn_varlen_backward(do, q, k, k, out, lse, *cu, 5, 2, causal=True)
    assert (
        (kit.value(dq)[:3] == 0).all()
        and np.isfinite(kit.value(dk)).all()
        and np.isfinite(kit.value(dv)).all()
    )
    cut = [kit.i32([0, 2]), kit.i32([0, 2])]
    again = interface._flash_attn_varlen_backward(
        do[3:], q[3:], k, k, out[3:], lse[3:], *cut, 2, 2, causal=True
    )
    assert raw(kit, (dk, dv)) == raw(kit, again[1:])


def test_mha_fp16(kit):
    q = np.random.default_rng(0).normal(size=(3, 1, 128)).astype(np.float16)
    out, lse = flash_mla.flash_attn_varlen_func(
        kit.f16(q), kit.f16(q), kit.f16(q), kit.i32([0, 3]), kit.i32([0, 3]), 3, 3
    )
    for r in range(3):
        Row(q[r, 0], q[:, 0], 128, 128**-0.5).check(kit.value(out)[r, 0], kit.value(lse)[r, 0])


def test_batch_invariance_and_order(kit):
    """A request alone, in another order, among others: the same bits."""
    case = SparseCase(kit, "v4", "v4", b=4, s_q=1)
    batched = ("indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, None, None, 512, **case.keywords, enable_batch_invariant=True
    )
    for i in range(4):
        keywords = {k: v[i : i + 1] if k in batched else v for k, v in case.keywords.items()}
        alone = flash_mla.flash_mla_with_kvcache(
            case.q[i : i + 1], case.cache, None, None, 512, **keywords, enable_batch_invariant=True
        )
        assert raw(kit, alone) == raw(kit, (out[i : i + 1], lse[i : i + 1]))


def test_invalid_slots_at_the_end_change_no_bit(kit):
    case = SparseCase(kit, "v41", lengths=False)
    wanted = raw(
        kit,
        flash_mla.flash_mla_with_kvcache(
            case.q, case.cache, None, None, 512, **case.keywords, enable_batch_invariant=True
        ),
    )
    longer = np.concatenate([case.indices, np.full((2, 2, 200), -1)], -1)
    keywords = dict(case.keywords, indices=kit.i32(longer), enable_batch_invariant=True)
    assert (
        raw(kit, flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **keywords)) == wanted
    )


def test_v32_scales_need_not_be_powers_of_two(kit):
    case = SparseCase(kit, "v32")
    data = np.asarray(kit.value(kit.strided(case.cache, (5, 8, 1, 656), kit.strides(case.cache)))).view(
        np.uint8
    )
    scales = np.ascontiguousarray(data[..., 512:528]).view("<f4")
    assert (np.frexp(scales)[0] != 0.5).any()
    case.check(kit, *flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords))


def test_quant_conversion_of_any_negative_index(kit):
    got = quant.abs_indices2indices_in_kvcache(kit.i32([[[-1, -2147483648]]]), kit.i32([[3]]), 64)
    assert (kit.value(got) == -1).all()


def test_merge_states(kit):
    rng = np.random.default_rng(0)
    outs = [bf16(rng.normal(size=(3, 2, 8))) for _ in range(3)]
    lses = rng.normal(size=(3, 3, 2)).astype(np.float32)
    lses[0, 0], lses[1, 0], lses[2, 0, 0] = INF, -INF, INF
    sink = np.array([0.4, -INF])
    out, lse = flash_mla.merge_states([kit.bf16(x) for x in outs], [kit.f32(x) for x in lses], kit.f32(sink))
    out, lse = kit.value(out), kit.value(lse)
    assert lse[0, 0] == INF and (out[0, 0] == 0).all()
    with np.errstate(invalid="ignore"):
        weight = np.where(np.isinf(lses), 0, np.exp(lses.astype(np.float64)))
    total = weight.sum(0)
    assert np.allclose(lse[1:], np.log(total[1:]), atol=1e-6)
    wanted = sum(w[..., None] * o for w, o in zip(weight, outs)) / (total + np.exp(sink))[..., None]
    assert np.abs(out[1:] - wanted[1:]).max() <= 2.0**-7
    out, lse = flash_mla.merge_states([kit.bf16(outs[0])], [kit.f32(lses[1])], empty_lse=-INF)
    assert kit.value(lse)[0, 0] == -INF
    with pytest.raises(AssertionError, match="lses: 2 of them with 1 outs"):
        flash_mla.merge_states([kit.bf16(outs[0])], [kit.f32(x) for x in lses[:2]])
    with pytest.raises(RuntimeError, match=r"lses\[1\]"):
        flash_mla.merge_states([kit.bf16(x) for x in outs[:2]], [kit.f32(lses[0]), kit.f32(lses[1][:2])])


def test_supports():
    assert flash_mla.supports("sparse_decode", kv_format="v41", extra_format="v41-fp4", q_dtype="bf16", h_q=7)
    assert not flash_mla.supports("sparse_decode", kv_format="v41-fp4")
    assert not flash_mla.supports("sparse_decode", kv_format="v4", extra_format="v41")
    assert flash_mla.supports("mha_backward", q_dtype="BF16", d_qk=192, d_v=128, h_q=8, h_kv=2)
    assert not flash_mla.supports("sparse_decode", kv_format="v32", h_kv=2)
    for keywords, word in (
        ({"operation": "prefil"}, "operation"),
        ({"kv_format": "v5"}, "kv_format"),
        ({"q_dtype": "int4"}, "q_dtype"),
        ({"device": "tpu"}, "device"),
    ):
        with pytest.raises(AssertionError, match=word):
            flash_mla.supports(**{"operation": "sparse_decode", **keywords})


def test_int64_strides(kit):
    """A query token stride beyond 2^31 elements, over memory that is reserved but never touched."""
    if kit.name != "numpy":
        pytest.skip("one kind of array is enough")
    case = DenseCase(kit, lengths=(5,), s_q=1)
    import mmap

    step = 2**31 + 64
    try:
        memory = np.frombuffer(mmap.mmap(-1, 2 * (step + 4 * 576)), np.uint16)
    except (OSError, ValueError):
        pytest.skip("no address space of 4 GiB here")
    q = np.lib.stride_tricks.as_strided(
        memory, (1, 2, 4, 576), [2 * step * 2, 2 * step, 2 * 576, 2], writeable=True
    )
    q[0, 0], q[0, 1] = case.q[0, 0], case.q[0, 0]
    out, _ = flash_mla.flash_mla_with_kvcache(q, case.cache, case.table, case.seqlens, 512)
    assert (kit.value(out)[0, 0] == kit.value(out)[0, 1]).all()
