# SPDX-License-Identifier: MIT
"""Published tests of sparse prefill: 2025-09 (base 2), 2026-01 (both widths), 2026-09-30 (amplified keys)."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from published import DEVICE, REAL, Draw, attend, chunks, few, loose, name  # noqa: E402

import flash_mla  # noqa: E402

YES_NO = (False, True)
INVALID = (-(2**31), -123456, -1, None, 114514, 1919810, 2147480000, 2**31 - 1)  # None: the number of tokens
SIZES = [
    (128, 128),
    (256, 256),
    (512, 512),
    (592, 128),
    (1840, 256),
    (1592, 384),
    (1521, 512),
    (95, 128),
    (153, 256),
    (114, 384),
]


def cases(d_qk, sizes, queries, heads=(64, 128), flags=((False, False),), amplified=(False,), **rest):
    """flags: (sink, lengths)."""
    return [
        {
            "d_qk": d,
            "h_q": h_q,
            "s_q": s_q,
            "size": size,
            "sink": sink,
            "lengths": lengths,
            "amplified": amplifier,
            **rest,
        }
        for d, h_q, size, s_q, (sink, lengths), amplifier in itertools.product(
            d_qk, heads, sizes, queries, flags, amplified
        )
    ]


ALL_FLAGS, BOTH = list(itertools.product(YES_NO, repeat=2)), [(True, True)]
POISONED = [(1, 128, 128), (1, 256, 256), (1234, 4321, 4096), (4096, 2048, 2048)]


def poisoned(d_qk, amplified=(False,)):
    return [
        case
        for s_q, s_kv, topk in POISONED
        for case in cases(d_qk, [(s_kv, topk)], [s_q], flags=BOTH, amplified=amplified, poisoned=True)
    ]


MOSTLY = [(32, 2048), (64, 8192)]
SLICES = {
    "2026_01": cases((512, 576), SIZES, (1, 62, 213)),
    "2026_01_features": [  # listed twice
        case
        for turn in (0, 1)
        for case in cases((512, 576), SIZES[3:], (62, 213), flags=ALL_FLAGS, turn=turn)
    ],
    "2026_01_poisoned": poisoned((512, 576)),
    "2026_01_mostly_invalid": cases((512, 576), MOSTLY, (1, 1024), flags=BOTH),
    "v41": cases((512,), SIZES, (1, 62, 213)),
    "v41_features": cases((512,), SIZES[3:], (62, 213), flags=ALL_FLAGS, amplified=YES_NO),
    "v41_poisoned": poisoned((512,), YES_NO),
    "v41_mostly_invalid": cases((512,), MOSTLY, (1, 1024), flags=BOTH),
}
HUGE = cases((512, 576), [(256, 256)], (70000,)) + cases((512,), [(256, 256)], (70000,), again=True)
OLD = cases((576,), SIZES, (1, 62), (128,)) + cases((576,), MOSTLY, (1, 1024), (128,))


def test_the_lists_are_whole():
    assert {key: len(rows) for key, rows in SLICES.items()} == {
        "2026_01": 120,
        "2026_01_features": 448,
        "2026_01_poisoned": 16,
        "2026_01_mostly_invalid": 16,
        "v41": 60,
        "v41_features": 224,
        "v41_poisoned": 16,
        "v41_mostly_invalid": 8,
    }
    assert (len(HUGE), len(OLD)) == (6, 24)


class Inputs:
    """Queries, keys around a common offset, index rows with invalid entries anywhere, NaN in keys nobody attends."""

    def __init__(self, draw, case, repeated=False, invalid=False):
        (s_kv, topk), s_q, d = case["size"], case["s_q"], case["d_qk"]
        offset = draw.choose(range(-50, 51)) / 1000
        self.q = loose(self._numbers(draw, offset, s_q, case["h_q"], d))
        kv = self._numbers(draw, offset, s_kv, 1, d)
        if case["amplified"]:
            factor = torch.where(draw.uniform(s_kv) < 0.02, 1 + 255 * draw.uniform(s_kv), draw.uniform(1) * 0 + 1)
            kv = (kv * factor[:, None, None]).to(torch.bfloat16)
        indices = self._indices(draw, s_q, s_kv, topk, repeated)
        if case.get("poisoned"):
            indices[draw.normal(s_q) < -2] = -1
        if invalid:
            indices.fill_(-1)
        self.lengths = None
        if case["lengths"]:
            self.lengths = draw.integers(max(topk + 1, 64), s_q).clamp(max=topk)
        valid = (indices >= 0) & (indices < s_kv)
        if self.lengths is not None:
            valid &= torch.arange(topk, device=DEVICE) < self.lengths[:, None]
        # How often a query token attends each key; entry s_kv takes what is not attended.
        self.counts = torch.zeros(s_q, s_kv + 1, dtype=REAL, device=DEVICE)
        at = torch.where(valid, indices, indices.new_full((), s_kv)).long()
        self.counts.scatter_add_(1, at, torch.ones_like(at, dtype=REAL))
        self.counts = self.counts[:, :s_kv]
        self.keys = kv
        kv = kv.masked_fill(~self.counts.any(0)[:, None, None], float("nan"))
        self.kv, self.indices = loose(kv), loose(indices[:, None])
        self.sink = draw.sink(case["h_q"]) if case["sink"] else None

    @staticmethod
    def _numbers(draw, offset, *shape):
        return draw.normal(*shape).div_(10).add_(offset).clamp_(-10, 10).to(torch.bfloat16)

    @staticmethod
    def _indices(draw, s_q, s_kv, topk, repeated):
        if repeated:  # 2025-09: with repetition, most of them from the last 20,000 tokens
            recent = s_kv - 1 - draw.integers(min(s_kv, 20000), s_q, topk)
            return torch.where(draw.uniform(s_q, topk) < 31 / 32, recent, draw.integers(s_kv, s_q, topk))
        taken = min(s_kv, topk)
        found = draw.uniform(s_q, s_kv).topk(taken).indices.int()
        wrong = torch.tensor([s_kv if i is None else i for i in INVALID], dtype=torch.int32, device=DEVICE)
        wrong = wrong[draw.integers(len(wrong), s_q, topk - taken).long()]
        return torch.cat([found, wrong], 1).gather(1, draw.uniform(s_q, topk).argsort(1))

    def attend(self, scale, q=None):
        """Reference: out, largest logit, lse, of all query tokens; of another q's if given. scale: a number, or one per
        row, [s_q, h_q, 1]."""
        k, q = self.keys[:, 0].to(REAL), self.q if q is None else q
        parts = []
        for part in chunks(len(q), q.shape[1] * len(k) * 3):
            by_row = scale[part] if isinstance(scale, torch.Tensor) else scale
            out, lse, top = attend(q[part].to(REAL), k, self.counts[part, None], by_row, self.sink)
            parts.append((out, top, lse))
        return [torch.cat(x) for x in zip(*parts)]


def run(judge, case, amplified=False):
    inputs = Inputs(Draw(case), case)
    out, top, lse = flash_mla.flash_mla_sparse_fwd(
        inputs.q, inputs.kv, inputs.indices, 0.5, attn_sink=inputs.sink, topk_length=inputs.lengths
    )
    assert (out.dtype, top.dtype, lse.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    wanted, wanted_top, wanted_lse = inputs.attend(0.5)
    if case["amplified"]:
        judge.compare("out, amplified", out, wanted, 1.0, 1.0, 1e-5)
        judge.compare("max_logits, amplified", top, wanted_top, 1.0, 1.0)
        judge.compare("lse, amplified", lse, wanted_lse, 1e-5, 4.01 / 65536)
        return
    judge.compare("out", out, wanted, 8e-4, 3.01 / 128, 7e-6)
    judge.compare("max_logits", top, wanted_top, 1e-6, 2.01 / 65536)
    judge.compare("lse", lse, wanted_lse, 1e-6, 2.01 / 65536)


def cost(s_q, h_q, size, **_):
    return s_q * h_q * size[0] + s_q * size[1] * 64


SMALL = 4e6


def listed(slice_name, count, **smaller):
    return pytest.mark.parametrize("case", few(SLICES[slice_name], cost, SMALL, count, **smaller), ids=name)


@listed("2026_01", 4)
def test_2026_01(judge, case):
    run(judge, case)


@listed("2026_01_features", 4)
def test_2026_01_features(judge, case):
    run(judge, case)


@listed("2026_01_poisoned", 1, s_q=60, size=(432, 409))
def test_2026_01_poisoned(judge, case):
    run(judge, case)


@listed("2026_01_mostly_invalid", 2)
def test_2026_01_mostly_invalid(judge, case):
    run(judge, case)


@listed("v41", 2)
def test_v41(judge, case):
    run(judge, case)


@listed("v41_features", 4)
def test_v41_features(judge, case):
    run(judge, case)


@listed("v41_poisoned", 1, s_q=60, size=(432, 409))
def test_v41_poisoned(judge, case):
    run(judge, case)


@listed("v41_mostly_invalid", 1)
def test_v41_mostly_invalid(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(HUGE, cost, SMALL, 1, s_q=100), ids=name)
def test_huge(judge, case):
    """Published as a run without a look at the results; here the two ends are looked at."""
    inputs = Inputs(Draw(case), case)
    results = flash_mla.flash_mla_sparse_fwd(inputs.q, inputs.kv, inputs.indices, 0.5)
    ends = torch.cat([torch.arange(32), torch.arange(case["s_q"] - 32, case["s_q"])]).to(DEVICE)
    inputs.q, inputs.counts = inputs.q[ends], inputs.counts[ends]
    wanted = inputs.attend(0.5)
    judge.compare("out", results[0][ends], wanted[0], 8e-4, 3.01 / 128, 7e-6)
    judge.compare("lse", results[2][ends], wanted[2], 1e-6, 2.01 / 65536)
    assert torch.isfinite(results[0]).all()


@pytest.mark.parametrize("case", few(OLD, cost, SMALL, 3), ids=name)
def test_2025_09(judge, case):
    """With the conventions of 2025-09: base 2, lonely lse -inf, default scale, repeated indices."""
    flash_mla.set_compat("2025-09")
    inputs = Inputs(Draw(case), case, repeated=case["size"][0] > case["size"][1])
    scale = case["d_qk"] ** -0.5
    out, top, lse = flash_mla.flash_mla_sparse_fwd(inputs.q, inputs.kv, inputs.indices, scale)
    wanted, wanted_top, wanted_lse = inputs.attend(scale)
    unit = torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
    wanted_lse = wanted_lse.masked_fill(wanted_lse == float("inf"), -float("inf"))
    judge.compare("out", out, wanted, 8e-4, 2.01 / 128, 7e-6)
    judge.compare("max_logits", top, wanted_top / unit, 1e-6, 2.01 / 65536)
    judge.compare("lse", lse, wanted_lse / unit, 1e-6, 2.01 / 65536)
