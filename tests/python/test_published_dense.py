# SPDX-License-Identifier: MIT
"""Published tests of dense decode: 2026-01 to 2026-09-10 (every pair of heads), 2025-09 (128 heads)."""

import pytest

torch = pytest.importorskip("torch")


from published import DEVICE, INF, REAL, Draw, attend, chunks, few, loose, name  # noqa: E402

import flash_mla  # noqa: E402

PAIRS = [(h, g) for h in (1, 3, 9, 63, 64, 126, 128) for g in (1, 2, 3, 8) if h % g == 0]
D, PAGE = 576, 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def both(rows):
    return [{"dtype": dtype, **row} for dtype in DTYPES for row in rows]


MAIN = both(
    [
        {"b": b, "s_q": s_q, "s_k": s_k, "heads": heads, "varlen": varlen, "causal": causal}
        for b in (1, 2, 6, 64)
        for s_q in (1, 2, 4)
        for s_k in (20, 140, 4096)
        for heads in PAIRS
        for varlen in (False, True)
        for causal in (False, True)
    ]
)
ZERO = both(
    [
        {"b": 128, "s_q": 2, "s_k": 4096, "heads": heads, "varlen": True, "causal": causal, "zero": True}
        for heads in PAIRS
        for causal in (False, True)
    ]
)
LONG = both(
    [
        {"b": 128, "s_q": s_q, "s_k": s_k, "heads": (128, 1), "varlen": True, "causal": causal}
        for s_q in (1, 2)
        for s_k in (4096, 8192, 16384, 32768)
        for causal in (False, True)
    ]
)
OLD = [
    {"b": b, "s_q": s_q, "s_k": s_k, "varlen": varlen, "causal": causal}
    for b in (1, 2, 6, 64)
    for s_q in (1, 2, 4)
    for s_k in (20, 140, 4096)
    for varlen in (False, True)
    for causal in (False, True)
]
OLD_ZERO = [
    {"b": 128, "s_q": 2, "s_k": 4096, "varlen": True, "causal": causal, "zero": True} for causal in (False, True)
]
OLD_LONG = [
    {"b": 128, "s_q": s_q, "s_k": s_k, "varlen": True, "causal": causal}
    for s_q in (1, 2)
    for s_k in (4096, 8192, 16384, 32768)
    for causal in (False, True)
]


def test_the_lists_are_whole():
    assert [len(x) for x in (PAIRS, MAIN, ZERO, LONG)] == [16, 2 * 2304, 2 * 32, 2 * 16]
    assert [len(x) for x in (OLD, OLD_ZERO, OLD_LONG)] == [144, 2, 16]


class Pool:
    """A paged cache whose pages lie in any order; NaN in unused slots, rubbish in unused table entries."""

    def __init__(self, draw, lengths, h_kv, dtype):
        b = len(lengths)
        count = torch.div(lengths + PAGE - 1, PAGE, rounding_mode="floor")
        used, width = int(count.sum()), max(-(-int(lengths.max()) // 256) * 4, 1)
        count, self.seqlens = count.to(DEVICE), lengths.to(DEVICE)
        first = count.cumsum(0) - count
        self.lengths, self.first, self.h_kv = lengths, first * PAGE, h_kv
        self.tokens = draw.clamped(used * PAGE, h_kv, D, dtype=dtype)
        order = draw.permutation(used + 2)[:used]
        column = torch.arange(width, device=DEVICE)
        self.table = torch.full((b, width), 2147480000, dtype=torch.int32, device=DEVICE)
        if used:
            at = (first[:, None] + column).clamp(max=used - 1)
            self.table = torch.where(column < count[:, None], order[at].int(), self.table)
        request = torch.repeat_interleave(torch.arange(b, device=DEVICE), count * PAGE, output_size=used * PAGE)
        position = torch.arange(used * PAGE, device=DEVICE) - self.first[request]
        unused = position >= self.seqlens[request]
        self.cache = torch.full((used + 2, PAGE, h_kv, D), float("nan"), dtype=dtype, device=DEVICE)
        tokens = self.tokens.masked_fill(unused[:, None, None], float("nan"))
        self.cache[order] = tokens.view(used, PAGE, h_kv, D)

    def attend(self, q, causal, scale):
        """Reference: out [b, s_q, h_q, 512], lse [b, h_q, s_q]."""
        b, s_q, h_q, _ = q.shape
        group, longest = h_q // self.h_kv, max(int(self.lengths.max()), 1)
        if not len(self.tokens):
            return q.new_zeros(b, s_q, h_q, 512, dtype=REAL), q.new_full((b, h_q, s_q), INF, dtype=REAL)
        # Rows of a KV head: query by query, its heads in each.
        rows = q.view(b, s_q, self.h_kv, group, D).transpose(1, 2).reshape(b, self.h_kv, s_q * group, D)
        last = self.seqlens[:, None].expand(b, s_q)
        if causal:
            last = last - (s_q - 1) + torch.arange(s_q, device=DEVICE)
        last = last.repeat_interleave(group, 1)
        parts = []
        for part in chunks(b, longest * (self.h_kv * D + 3 * h_q * s_q)):
            n = max(int(self.lengths[part].max()), 1)
            position = torch.arange(n, device=DEVICE)
            at = (self.first[part, None] + position).clamp(max=len(self.tokens) - 1)
            k = self.tokens[at].transpose(1, 2).to(REAL)
            k.masked_fill_((position >= self.seqlens[part, None])[:, None, :, None], 0)
            weight = position < last[part, None, :, None]
            parts.append(attend(rows[part].to(REAL), k, weight, scale)[:2])
        out, lse = (torch.cat(x) for x in zip(*parts))
        out = out.view(b, self.h_kv, s_q, group, 512).transpose(1, 2).reshape(b, s_q, h_q, 512)
        return out, lse.view(b, self.h_kv, s_q, group).transpose(2, 3).reshape(b, h_q, s_q)


def run(judge, case, h_q=128, h_kv=1, old=False):
    """One case through the interface of its time: tables made with the lengths (2025-09), or the object."""
    draw = Draw(case)
    b, s_q, causal = case["b"], case["s_q"], case["causal"]
    dtype = DTYPES[case.get("dtype", "bf16")]
    lengths = draw.lengths(b, case["s_k"], s_q, case["varlen"], case.get("zero", False))
    pool = Pool(draw, lengths, h_kv, dtype)
    q = loose(draw.clamped(b, s_q, h_q, D, dtype=dtype, part=1 if old else 10))
    made = (pool.seqlens, s_q * h_q // h_kv, h_kv, h_q) if old else ()
    meta, splits = flash_mla.get_mla_metadata(*made)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, pool.cache, pool.table, pool.seqlens, 512, meta, splits, causal=causal
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    wanted, wanted_lse = pool.attend(q, causal, D**-0.5)
    judge.compare("out", out, wanted, 8e-4, 2.01 / 128, 5e-6)
    judge.compare("lse", lse, wanted_lse, 1e-6, 8.01 / 65536)


def cost(b, s_q, s_k, heads=(128, 1), **_):
    return b * s_k * (heads[1] * 8 + s_q * heads[0])


SMALL = 4e5


@pytest.mark.parametrize("case", few(MAIN, cost, SMALL, 8), ids=name)
def test_main(judge, case):
    run(judge, case, *case["heads"])


@pytest.mark.parametrize("case", few(ZERO, cost, SMALL, 2, b=8, s_k=140), ids=name)
def test_zero_lengths(judge, case):
    run(judge, case, *case["heads"])


@pytest.mark.parametrize("case", few(LONG, cost, SMALL, 1, b=2, s_k=500), ids=name)
def test_long(judge, case):
    run(judge, case, *case["heads"])


@pytest.mark.parametrize("case", few(OLD, cost, SMALL, 3), ids=name)
def test_2025_09(judge, case):
    run(judge, case, old=True)


@pytest.mark.parametrize("case", few(OLD_ZERO, cost, SMALL, 1, b=8, s_k=140), ids=name)
def test_2025_09_zero_lengths(judge, case):
    run(judge, case, old=True)


@pytest.mark.parametrize("case", few(OLD_LONG, cost, SMALL, 1, b=2, s_k=500), ids=name)
def test_2025_09_long(judge, case):
    run(judge, case, old=True)
