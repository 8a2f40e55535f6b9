# SPDX-License-Identifier: MIT
"""Published tests of sparse decode: 2025-09 (V3.2), 2026-01 (V3.2 and V4), 2026-09-30 (V4.1 fp8 and fp4)."""

import itertools

import pytest

torch = pytest.importorskip("torch")


from published import LAYOUTS, Draw, Scope, attend_scopes, few, loose, name  # noqa: E402

import flash_mla  # noqa: E402

YES_NO = (False, True)


def row(main, extra, h_q, b, s_q, scopes, lengths, varlen=True, sink=True, invalid=False, zero=False):
    """A case. scopes: (tokens, slots, page size) of the main and the extra cache; lengths: which of them have some."""
    return {
        "main": main,
        "extra": extra,
        "h_q": h_q,
        "b": b,
        "s_q": s_q,
        "scope": scopes[0],
        "more": scopes[1],
        "lengths": lengths,
        "varlen": varlen,
        "sink": sink,
        "invalid": invalid,
        "zero": zero,
    }


# ---- 2026-01: V3.2 alone, V4 with everything ----------------------------------------------------------------

SIZES = [
    (512, 64, 2),
    (512, 64, 64),
    (512, 64, 69),
    (1024, 576, 2),
    (1024, 576, 61),
    (2046, 2048, 2),
    (2046, 2048, 64),
    (2046, 2048, 576),
]
CORNERS = [(512, 64, 61), (650, 576, 53)]
FLAGS = [flags for flags in itertools.product(YES_NO, repeat=3) if any(flags)]  # sink, all invalid, zero lengths


def formats_2026_01(sizes):
    """(main, extra, scopes, which lengths)."""
    for size in sizes:
        yield "V32", None, (size, None), (False, False)
        for has in YES_NO:
            yield "V4", None, (size, None), (has, False)
        for more in sizes:
            for lengths in itertools.product(YES_NO, repeat=2):
                yield "V4", "V4", (size, more), lengths


def lists_2026_01(sizes, queries, flags):
    for (main, extra, scopes, lengths), h_q, s_q, (sink, invalid, zero) in itertools.product(
        formats_2026_01(sizes), (64, 128), queries, flags
    ):
        for b in (4, 74, 321):
            yield row(main, extra, h_q, b, s_q, scopes, lengths, True, sink, invalid, zero)
        if not any(lengths):
            yield row(main, extra, h_q, 74, s_q, scopes, lengths, False, sink, invalid, zero)


MAIN = list(lists_2026_01(SIZES, (1, 3), [(True, False, False)]))
CORNER = list(lists_2026_01(CORNERS, (3,), FLAGS))
_V4_LONG = [
    (64, (16384, 512, 64), (False, False)),
    (128, (16384, 1024, 64), (False, False)),
    (64, (16384, 1024, 2), (False, True)),
    (128, (16384, 1024, 2), (False, True)),
]
LONG = (
    [row("V32", None, 128, b, 2, ((32768, 2048, 64), None), (False, False)) for b in (2, 64, 74, 128)]
    + [
        row("V4", "V4", h_q, b, 2, ((16384, 128, 256), more), lengths)
        for h_q, more, lengths in _V4_LONG
        for b in (2, 64, 74, 128, 148, 256)
    ]
    + [
        row(main, None, h_q, 148, 2, ((32768, 16384, 64), None), (False, False))
        for main in ("V4", "V32")
        for h_q in (64, 128)
    ]
)

# ---- 2026-09-30: V4.1 ---------------------------------------------------------------------------------------

SIZES_V41 = [
    (512, 64, 5),
    (512, 64, 69),
    (1024, 576, 2),
    (1024, 576, 61),
    (2046, 2048, 1),
    (2046, 2048, 64),
    (2046, 2048, 576),
]
MORE_V41 = [
    (512, 64, 5),
    (512, 64, 69),
    (1024, 576, 2),
    (1024, 576, 123),
    (2046, 2048, 1),
    (2046, 2048, 576),
]


def lists_v41(sizes, more, batches, queries, flags):
    """Which lengths there are changes from case to case, so that every combination meets every pair and head count."""
    for extra, h_q in itertools.product((None, "V41", "FP4"), (64, 128)):
        turn = itertools.cycle(itertools.product(YES_NO, (False,) if extra is None else YES_NO))
        for size, b, s_q in itertools.product(sizes, batches, queries):
            for other in [None] if extra is None else more:
                for sink, invalid, zero in flags:
                    sink = next(SINKS) if sink is None else sink
                    yield row("V41", extra, h_q, b, s_q, (size, other), next(turn), True, sink, invalid, zero)


SINKS = itertools.cycle((True, False, True))
MAIN_V41 = list(lists_v41(SIZES_V41, MORE_V41, (4, 74, 321), (1, 3), [(None, False, False)]))
CORNER_V41 = list(lists_v41(CORNERS, CORNERS, (1, 74, 321), (3,), FLAGS))
PARTIAL = [
    row("V41", extra, 128, 4, 3, ((512, 128, 64), (512, 100, 64)), (False, False)) for extra in ("V41", "FP4")
]
LONG_V41 = [
    row("V41", extra, h_q, b, 4, ((256, 128, 256), (2048, 512, 64)), (False, False))
    for extra in ("V41", "FP4")
    for h_q in (64, 128)
    for b in (64, 128, 256, 512)
] + [
    row("V41", extra, h_q, 1, 4096, ((4096, 128, 64), (4096, 512, 64)), (False, False), False)
    for extra in ("V41", "FP4")
    for h_q in (64, 128)
]

# ---- 2025-09: V3.2 with the first quantiser, 128 heads ------------------------------------------------------


def old(b, s_q, s_k, topk, varlen=False, invalid=False, zero=False):
    return row("V32", None, 128, b, s_q, ((s_k, topk, 64), None), (False, False), varlen, False, invalid, zero)


OLD = [
    old(b, s_q, s_k, topk, varlen)
    for b in (1, 2, 6, 64)
    for s_q in (1, 2, 4)
    for s_k in (20, 140, 4096)
    for varlen in YES_NO
    for topk in (128, 2048)
]
OLD_CORNER = [old(128, 2, 4096, topk, True, invalid=True) for topk in (128, 2048, 4096)] + [
    old(128, 2, 4096, topk, True, zero=True) for topk in (128, 2048)
]
OLD_LONG = [old(128, s_q, s_k, 2048, True) for s_q in (1, 2) for s_k in (4096, 8192, 16384, 32768)]


def test_the_lists_are_whole():
    assert [len(x) for x in (MAIN, CORNER, LONG)] == [3680, 1036, 32]
    assert [len(x) for x in (MAIN_V41, CORNER_V41, PARTIAL, LONG_V41)] == [1092, 420, 2, 20]
    assert [len(x) for x in (OLD, OLD_CORNER, OLD_LONG)] == [144, 5, 8]
    for extra, h_q in itertools.product((None, "V41", "FP4"), (64, 128)):
        met = {case["lengths"] for case in MAIN_V41 if (case["extra"], case["h_q"]) == (extra, h_q)}
        assert len(met) == (2 if extra is None else 4)


def scopes_of(draw, case, first=False):
    """The main scope, and the extra one if there is one; requests have lengths of their own in each."""
    scopes = []
    for layout, size, has in zip((case["main"], case["extra"]), (case["scope"], case["more"]), case["lengths"]):
        if layout is not None:
            tokens, topk, page = size
            lengths = draw.lengths(case["b"], tokens, case["s_q"], case["varlen"], case["zero"])
            scopes.append(Scope(draw, layout, lengths, case["s_q"], topk, page, has, case["invalid"], first))
    return scopes


def run(judge, case, first=False):
    """One case. first: 2025-09, with its default scale, its quantiser and its tables."""
    draw = Draw(case)
    b, s_q, h_q, d = case["b"], case["s_q"], case["h_q"], LAYOUTS[case["main"]][0]
    scopes = scopes_of(draw, case, first)
    q = loose(draw.normal(b, s_q, h_q, d, dtype=torch.bfloat16).clamp_(-1, 1))
    sink = draw.sink(h_q) if case["sink"] else None
    scale = None if first else d**-0.55
    if first:
        lengths = torch.full((b,), case["scope"][0], dtype=torch.int32, device=q.device)
        meta, splits = flash_mla.get_mla_metadata(lengths, s_q * h_q, 1, h_q, True, case["scope"][1])
    else:
        meta, splits = flash_mla.get_mla_metadata()
    keywords = {"attn_sink": sink, "topk_length": scopes[0].lengths}
    if len(scopes) > 1:
        keywords.update(
            extra_k_cache=scopes[1].cache.tensor,
            extra_indices_in_kvcache=loose(scopes[1].slots),
            extra_topk_length=scopes[1].lengths,
        )
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        scopes[0].cache.tensor,
        None,
        None,
        512,
        meta,
        splits,
        scale,
        is_fp8_kvcache=True,
        indices=loose(scopes[0].slots),
        **keywords,
    )
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    wanted, wanted_lse, _ = attend_scopes(q, scopes, scale or d**-0.5, sink)
    judge.compare("out", out, wanted, 8e-4 if first else 1e-3, 2.01 / 128, 5e-6)
    judge.compare("lse", lse, wanted_lse.transpose(1, 2), 1e-6, 8.01 / 65536)


def cost(b, s_q, h_q, scope, more, **_):
    slots = scope[1] + (more[1] if more else 0)
    return b * (s_q * h_q * slots + 8 * (scope[0] + (more[0] if more else 0)))


SMALL = 1e6


@pytest.mark.parametrize("case", few(MAIN, cost, SMALL, 7), ids=name)
def test_2026_01(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(CORNER, cost, SMALL, 5, b=4), ids=name)
def test_2026_01_corner(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(LONG, cost, SMALL, 1, b=2, scope=(3000, 128, 64)), ids=name)
def test_2026_01_long(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(MAIN_V41, cost, SMALL, 6), ids=name)
def test_v41(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(CORNER_V41, cost, SMALL, 4, b=2), ids=name)
def test_v41_corner(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(PARTIAL, cost, SMALL), ids=name)
def test_v41_partial_block(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(LONG_V41, cost, SMALL, 1, b=2, s_q=4), ids=name)
def test_v41_long(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(OLD, cost, SMALL, 3), ids=name)
def test_2025_09(judge, case):
    run(judge, case, True)


@pytest.mark.parametrize("case", few(OLD_CORNER, cost, SMALL, 2, b=3, scope=(150, 128, 64)), ids=name)
def test_2025_09_corner(judge, case):
    run(judge, case, True)


@pytest.mark.parametrize("case", few(OLD_LONG, cost, SMALL, 1, b=2, scope=(3000, 128, 64)), ids=name)
def test_2025_09_long(judge, case):
    run(judge, case, True)
