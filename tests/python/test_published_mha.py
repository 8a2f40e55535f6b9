# SPDX-License-Identifier: MIT
"""Published tests of dense multi-head attention, forward and backward: 2025-08 and later."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from published import CUDA, DEVICE, INF, REAL, Draw, few, name, product  # noqa: E402

import flash_mla  # noqa: E402

YES_NO = (False, True)


def cases(batch, heads):
    return [
        {"b": batch, "s": s, "heads": h, "dims": dims, "varlen": varlen, "causal": causal}
        for s, varlen, h, dims, causal in itertools.product(
            ((4096, 4096), (8192, 8192)), YES_NO, heads, ((128, 128), (192, 128)), YES_NO
        )
    ]


LATER, FIRST = cases(2, ((128, 128), (32, 4))), cases(4, ((32, 32), (32, 4)))
EMPTY = [
    {"b": 3, "s": s, "heads": (8, 8), "dims": dims, "varlen": True, "causal": causal, "empty": empty}
    for s, dims, causal, empty in itertools.product(
        ((300, 200), (100, 700)), ((128, 128), (192, 128)), YES_NO, ("q", "kv", "both")
    )
]
SLICED = [
    {"b": 2, "s": (512, 700), "heads": heads, "dims": dims, "varlen": varlen, "causal": causal, "sliced": True}
    for heads, dims, varlen, causal in itertools.product(
        ((16, 16), (16, 2)), ((128, 128), (192, 128)), YES_NO, YES_NO
    )
]


def test_the_lists_are_whole():
    assert (len(LATER), len(FIRST)) == (32, 32)


def lengths(draw, case):
    b, (s_q, s_k), empty = case["b"], case["s"], case.get("empty")
    q = draw.lengths(b, s_q, 1, case["varlen"])
    k = torch.maximum(draw.lengths(b, s_k, 1, case["varlen"]), q) if case["varlen"] else draw.lengths(b, s_k, 1, False)
    if empty in ("q", "both"):
        q[0] = 0
    if empty in ("kv", "both"):
        k[-1] = 0
    return q, k


def offsets(n):
    return torch.cat([n.new_zeros(1), n.cumsum(0)]).int().to(DEVICE)


def heads_of(x, rows, part, group=1):
    """[n, h, d] to [heads, rows, d] of some query heads."""
    at = torch.arange(part.start, part.stop, device=DEVICE) // group
    return x[rows][:, at].transpose(0, 1).to(REAL)


def reference(q, k, v, do, n_q, n_k, scale, causal):
    """out, lse, dq, dk, dv, sequence by sequence and some heads at a time; without do no gradients."""
    h_q, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.zeros(len(q), h_q, v.shape[2], dtype=REAL, device=DEVICE)
    lse = torch.full((len(q), h_q), -INF, dtype=REAL, device=DEVICE)
    gradients = [torch.zeros(x.shape, dtype=REAL, device=DEVICE) for x in (q, k, v)] if do is not None else None
    first_q, first_k = 0, 0
    for a, b in zip(n_q.tolist(), n_k.tolist()):
        rows, columns = slice(first_q, first_q + a), slice(first_k, first_k + b)
        first_q, first_k = first_q + a, first_k + b
        step = max(1, (1 << 29) // max(a * b, 1))
        for head in range(0, h_q if a and b else 0, step):
            part = slice(head, min(head + step, h_q))
            qq, kk, vv = heads_of(q, rows, part), heads_of(k, columns, part, group), heads_of(v, columns, part, group)
            logits = product(qq, kk.transpose(1, 2), True).mul_(scale)
            if causal:
                hidden = torch.ones(a, b, dtype=torch.bool, device=DEVICE).triu_(b - a + 1)
                logits.masked_fill_(hidden, -INF)
            mine = torch.logsumexp(logits, -1)
            p = logits.sub_(mine.masked_fill(mine == -INF, 0)[..., None]).exp_()
            oo = product(p, vv, False)
            out[rows, part], lse[rows, part] = oo.transpose(0, 1), mine.transpose(0, 1)
            if do is None:
                continue
            dd = heads_of(do, rows, part)
            gradients[2][columns, part] = product(p.transpose(1, 2).contiguous(), dd, False).transpose(0, 1)
            ds = product(dd, vv.transpose(1, 2), True).sub_((dd * oo).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            gradients[0][rows, part] = product(ds, kk, False).transpose(0, 1)
            gradients[1][columns, part] = product(ds.transpose(1, 2).contiguous(), qq, False).transpose(0, 1)
    return out, lse, gradients


def run(judge, case):
    draw = Draw(case)
    (h_q, h_kv), (d, d_v) = case["heads"], case["dims"]
    n_q, n_k = lengths(draw, case)
    total_q, total_k = int(n_q.sum()), int(n_k.sum())

    def numbers(n, h, width):
        if case.get("sliced"):  # a slice of a buffer with room before and after every dimension but the first
            return draw.normal(n, h + 2, width + 64, dtype=torch.bfloat16).div_(10)[:, 1:-1, 32:-32]
        return draw.normal(n, h, width, dtype=torch.bfloat16).div_(10)

    q, k, v, do = numbers(total_q, h_q, d), numbers(total_k, h_kv, d), numbers(total_k, h_kv, d_v), None
    backward, scale = h_q == h_kv, (d + 100) ** -0.5
    if backward:
        do = draw.normal(total_q, h_q, d_v, dtype=torch.bfloat16).div_(10)
        q, k, v = (x.requires_grad_() for x in (q, k, v))

    def call():
        out, lse = flash_mla.flash_attn_varlen_func(
            q,
            k,
            v,
            offsets(n_q),
            offsets(n_k),
            int(n_q.max()),
            int(n_k.max()),
            softmax_scale=scale,
            causal=case["causal"],
            is_varlen=case["varlen"],
        )
        gradients = torch.autograd.grad(out, (q, k, v), do) if backward else ()
        return out.detach(), lse.detach(), gradients

    out, lse, gradients = call()
    assert lse.shape == (total_q, h_q) and lse.stride(0) == 1
    for _ in range(4):
        again = call()
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
        assert all(torch.equal(a, b) for a, b in zip(gradients, again[2]))
    if case["s"] == (8192, 8192) and h_q == 128:
        return  # published as a run without a look at the results
    wanted, wanted_lse, wanted_gradients = reference(
        q.detach(), k.detach(), v.detach(), do, n_q, n_k, scale, case["causal"]
    )
    judge.compare("out", out, wanted, 1e-3, 8.01 / 128, 7e-6)
    judge.compare("lse", lse, wanted_lse, 1e-6, 2.01 / 65536)
    for what, got, gradient in zip(("dq", "dk", "dv"), gradients, wanted_gradients or ()):
        judge.compare(what, got, gradient, 1e-3, 8.01 / 128, 7e-6)


def cost(s, **_):
    return s[0] * s[1]


SMALL = {} if CUDA else {"s": (60, 90), "heads": (4, 4)}


@pytest.mark.parametrize("case", few(LATER, cost, 1e6, 2, **SMALL), ids=name)
def test_later(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(FIRST, cost, 1e6, 2, **{**SMALL, "heads": (4, 2)}), ids=name)
def test_2025_08(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(EMPTY, cost, 1e6, 3, **SMALL), ids=name)
def test_empty(judge, case):
    run(judge, case)


@pytest.mark.parametrize("case", few(SLICED, cost, 1e6, 2, **SMALL), ids=name)
def test_slices_of_larger_buffers(judge, case):
    run(judge, case)
