# SPDX-License-Identifier: MIT
"""Properties over generated calls: results against float64, promises for every input, no input that crashes."""

import numpy as np
import pytest

hypothesis = pytest.importorskip("hypothesis")

import support  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from support import FORMATS, INF, Row, attended, bf16  # noqa: E402

import flash_mla  # noqa: E402
from flash_mla import quant  # noqa: E402

kit = support.KITS.get("torch", support.KITS["numpy"])
quick = settings(max_examples=25, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**32 - 1)
scales = st.floats(-1, 1, width=32)
lengths_of = st.lists(st.integers(0, 70), min_size=0, max_size=4)


@quick
@given(
    seed=seeds,
    lengths=lengths_of,
    s_q=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (4, 4)]),
    d=st.sampled_from([512, 576]),
    page=st.integers(1, 70),
    causal=st.booleans(),
    scale=scales,
)
def test_dense_decode(seed, lengths, s_q, heads, d, page, causal, scale):
    if not lengths:
        lengths = [0]
    case = support.DenseCase(kit, seed, tuple(lengths), s_q, *heads, d=d, page=page)
    out, lse = flash_mla.flash_mla_with_kvcache(
        case.q, case.cache, case.table, case.seqlens, 512, softmax_scale=scale, causal=causal
    )
    case.check(kit, out, lse, causal, scale)


@quick
@given(
    seed=seeds,
    pair=st.sampled_from([("v32", None), ("v32", "v32"), ("v4", "v4"), ("v41", "v41-fp4")]),
    b=st.integers(1, 3),
    s_q=st.integers(1, 2),
    h_q=st.integers(1, 5),
    topk=st.integers(2, 90),
    extra_topk=st.integers(2, 40),
    page=st.integers(1, 70),
    padding=st.integers(0, 3),
    lengths=st.booleans(),
    sink=st.booleans(),
)
def test_sparse_decode(seed, pair, b, s_q, h_q, topk, extra_topk, page, padding, lengths, sink):
    main, extra = pair
    case = support.SparseCase(
        kit,
        main,
        extra,
        seed,
        b,
        s_q,
        h_q,
        topk,
        extra_topk,
        page,
        lengths,
        sink,
        padding * (FORMATS[main][1] if extra in (None, main) else 528 * 288),
    )
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    case.check(kit, out, lse)


@quick
@given(
    seed=seeds,
    s_q=st.integers(0, 5),
    h_q=st.integers(1, 4),
    d=st.sampled_from([512, 576]),
    s_kv=st.integers(0, 40),
    topk=st.integers(0, 50),
    scale=scales,
)
def test_sparse_prefill(seed, s_q, h_q, d, s_kv, topk, scale):
    rng = np.random.default_rng(seed)
    q, kv = bf16(rng.normal(size=(s_q, h_q, d)) / 2), bf16(rng.normal(size=(s_kv, 1, d)) / 2)
    rows = rng.integers(-3, s_kv + 3, (s_q, 1, topk))
    sink = np.where(rng.random(h_q) < 0.3, rng.choice([INF, -INF], h_q), rng.normal(size=h_q))
    length = rng.integers(-2, topk + 3, s_q)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        kit.bf16(q), kit.bf16(kv), kit.i32(rows), scale, 512, kit.f32(sink), kit.i32(length)
    )
    for r in range(s_q):
        keys = kv[attended(rows[r, 0], s_kv, length[r]), 0]
        for h in range(h_q):
            Row(q[r, h], keys, 512, scale, sink[h]).check(
                kit.value(out)[r, h], kit.value(lse)[r, h], kit.value(max_logits)[r, h]
            )


@quick
@given(seed=seeds, order=st.permutations(range(4)), cut=st.integers(0, 4))
def test_batches_permute_and_split(seed, order, cut):
    """Permuting the batch permutes the results; two calls over a split give the same rows; bits, not tolerance."""
    case = support.SparseCase(kit, "v4", None, seed, b=4, s_q=1, lengths=True)

    def call(rows):
        index = rows if not hasattr(kit, "torch") else kit.torch.tensor(rows, dtype=kit.torch.int64)
        keywords = dict(
            case.keywords,
            indices=case.keywords["indices"][index],
            topk_length=case.keywords["topk_length"][index],
        )
        out, lse = flash_mla.flash_mla_with_kvcache(case.q[index], case.cache, None, None, 512, **keywords)
        return [
            kit.raw(out[i : i + 1]).tobytes() + kit.raw(lse[i : i + 1]).tobytes() for i in range(len(rows))
        ]

    wanted = call([0, 1, 2, 3])
    assert call(list(order)) == [wanted[i] for i in order]
    assert call(list(range(cut))) + call(list(range(cut, 4))) == wanted


@quick
@given(seed=seeds, page=st.integers(1, 40), other=st.integers(1, 40))
def test_page_size_changes_no_bit(seed, page, other):
    rng = np.random.default_rng(seed)
    n, results = 55, []
    tokens, q = bf16(rng.normal(size=(n, 576))), kit.bf16(rng.normal(size=(1, 1, 3, 576)))
    for p in (page, other):
        pages = -(-n // p)
        table = rng.permutation(pages + 1)[:pages]
        cache = np.full((pages + 1, p, 1, 576), np.nan, np.float32)
        for j, where in enumerate(table):
            part = tokens[j * p : (j + 1) * p]
            cache[where, : len(part), 0] = part
        out, lse = flash_mla.flash_mla_with_kvcache(
            q, kit.bf16(cache), kit.i32(table[None]), kit.i32([n]), 512
        )
        results.append(kit.raw(out).tobytes() + kit.raw(lse).tobytes())
    assert results[0] == results[1]


@quick
@given(
    seed=seeds,
    pages=st.integers(0, 3),
    page=st.integers(1, 9),
    layout=st.sampled_from(list(quant.KVCacheLayout)),
    magnitude=st.integers(-30, 20),
)
def test_quantising_again_changes_nothing(seed, pages, page, layout, magnitude):
    """What a cache holds is a fixed point: dequantised values quantise to themselves."""
    rng = np.random.default_rng(seed)
    x = kit.bf16(rng.normal(size=(pages, page, 1, layout.get_meta()[0])) * 2.0**magnitude)
    once = quant.dequantize_k_cache(quant.quantize_k_cache(x, layout), layout)
    if "FP4" in layout.name:
        return  # scales of fp4 depend on the largest element, which may have been rounded
    twice = quant.dequantize_k_cache(quant.quantize_k_cache(once, layout), layout)
    assert (kit.raw(once) == kit.raw(twice)).all()


@quick
@given(seed=seeds, split=st.lists(st.integers(0, 2), min_size=30, max_size=30), sink=st.booleans())
def test_merging_shards(seed, split, sink):
    rng = np.random.default_rng(seed)
    kv, q = bf16(rng.normal(size=(30, 1, 512))), bf16(rng.normal(size=(2, 3, 512)) / 2)
    owner, states = np.array(split), []
    sinks = kit.f32(rng.normal(size=3)) if sink else None
    for rank in range(3):
        rows = np.where(owner == rank, np.arange(30), -1)[None, None].repeat(2, 0)
        out, _, lse = flash_mla.flash_mla_sparse_fwd(kit.bf16(q), kit.bf16(kv), kit.i32(rows), 0.05)
        states.append((out, lse))
    out, lse = flash_mla.merge_states([s[0] for s in states], [s[1] for s in states], sinks)
    for r in range(2):
        for h in range(3):
            row = Row(q[r, h], kv[:, 0], 512, 0.05, None if sinks is None else kit.value(sinks)[h])
            row.check(kit.value(out)[r, h], kit.value(lse)[r, h], ulp=2.0**-7)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 600),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.just([]),
    st.tuples(
        st.lists(st.integers(0, 5), max_size=5),
        st.sampled_from(["uint16", "uint8", "int32", "float32", "float16", "int64", "complex64", "bool"]),
    ),
)


@settings(quick, max_examples=200)
@given(values=st.lists(anything, min_size=17, max_size=17), good=st.sets(st.integers(0, 16)))
def test_garbage_is_refused_or_answered(values, good):
    """Any mixture of right and wrong arguments: an answer, or one of the two documented errors (TypeError and
    ValueError for what is not even a number)."""
    case = support.SparseCase(support.KITS["numpy"], "v4", "v4")
    k = case.keywords
    right = [
        case.q,
        case.cache,
        None,
        None,
        512,
        None,
        None,
        0.1,
        False,
        None,
        k["indices"],
        k["attn_sink"],
        k["extra_k_cache"],
        k["extra_indices_in_kvcache"],
        k["topk_length"],
        k["extra_topk_length"],
        False,
    ]
    mixed = [
        right[i] if i in good else np.zeros(*v) if isinstance(v, tuple) else v for i, v in enumerate(values)
    ]
    try:
        out, lse = flash_mla.flash_mla_with_kvcache(*mixed)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        assert str(error)
    else:
        assert out.shape[-1] == 512 and lse.dtype == np.float32
