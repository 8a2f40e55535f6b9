# SPDX-License-Identifier: MIT
"""flash_attn_varlen_* against attention in float64, forward and backward."""

import numpy as np
import pytest
import support
from support import INF, Row, bf16

import flash_mla
from flash_mla import flash_mla_interface as interface

LENGTHS_Q, LENGTHS_K = (7, 0, 20, 4), (
    12,
    5,
    9,
    0,
)  # queries without keys, keys without queries, more queries than keys


class Case:
    def __init__(self, kit, d=192, d_v=128, h_q=4, h_kv=2, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, seed=0):
        rng = np.random.default_rng(seed)
        self.lengths_q, self.lengths_k = lengths_q, lengths_k
        n_q, n_k = sum(lengths_q), sum(lengths_k)
        self.values = {
            name: bf16(rng.normal(size=shape) / 2)
            for name, shape in (
                ("q", (n_q, h_q, d)),
                ("k", (n_k, h_kv, d)),
                ("v", (n_k, h_kv, d_v)),
                ("do", (n_q, h_q, d_v)),
            )
        }
        self.q, self.k, self.v, self.do = (kit.bf16(self.values[name]) for name in ("q", "k", "v", "do"))
        self.cu_q = kit.i32(np.cumsum([0, *lengths_q]))
        self.cu_k = kit.i32(np.cumsum([0, *lengths_k]))
        self.max_q, self.max_k = max(lengths_q), max(lengths_k)

    @property
    def arguments(self):
        return self.q, self.k, self.v, self.cu_q, self.cu_k, self.max_q, self.max_k

    def sequences(self):
        begin_q = begin_k = 0
        for n_q, n_k in zip(self.lengths_q, self.lengths_k):
            yield slice(begin_q, begin_q + n_q), slice(begin_k, begin_k + n_k)
            begin_q, begin_k = begin_q + n_q, begin_k + n_k

    def check(self, kit, out, lse, scale, causal):
        q, k, v = (self.values[name] for name in "qkv")
        out, lse, group = kit.value(out), kit.value(lse), q.shape[1] // k.shape[1]
        for rows, columns in self.sequences():
            n_q, n_k = rows.stop - rows.start, columns.stop - columns.start
            for r in range(n_q):
                seen = max(n_k - n_q + r + 1, 0) if causal else n_k
                for h in range(q.shape[1]):
                    keys, values = k[columns, h // group][:seen], v[columns, h // group][:seen]
                    row = Row(q[rows][r, h], keys, v.shape[2], scale, values=values)
                    row.lse = -INF if seen == 0 else row.lse
                    row.check(out[rows][r, h], lse[rows][r, h], what=f"row {rows.start + r}, head {h}")

    def gradients(self, scale, causal):
        """dq, dk, dv in float64, from the formulas."""
        q, k, v, do = (self.values[name].astype(np.float64) for name in ("q", "k", "v", "do"))
        group = q.shape[1] // k.shape[1]
        dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
        for rows, columns in self.sequences():
            n_q, n_k = rows.stop - rows.start, columns.stop - columns.start
            mask = (
                np.arange(n_k)[None] <= n_k - n_q + np.arange(n_q)[:, None]
                if causal
                else np.ones((n_q, n_k), bool)
            )
            for h in range(q.shape[1]):
                kk, vv, g = k[columns, h // group], v[columns, h // group], do[rows, h]
                e = np.where(mask, np.exp(scale * q[rows, h] @ kk.T), 0)
                p = e / np.maximum(e.sum(1, keepdims=True), 1e-300)
                dp = g @ vv.T
                ds = p * (dp - (p * dp).sum(1, keepdims=True))
                dq[rows, h] = scale * ds @ kk
                dk[columns, h // group] += scale * ds.T @ q[rows, h]
                dv[columns, h // group] += p.T @ g
        return dq, dk, dv


def close(got, wanted, what):
    """The cosine distance that docs/numerics.md allows, and no element far off."""
    distance = 1 - 2 * (got * wanted).sum() / ((got**2).sum() + (wanted**2).sum())
    assert np.isfinite(got).all() and abs(distance) <= 1e-5, f"{what}: cosine distance {distance}"
    assert np.abs(got - wanted).max() <= 0.02 * np.abs(wanted).max(), what


@pytest.mark.parametrize("d", [128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_forward(kit, d, causal):
    case = Case(kit, d)
    out, lse = flash_mla.flash_attn_varlen_func(*case.arguments, causal=causal)
    assert tuple(out.shape) == (31, 4, 128) and tuple(lse.shape) == (31, 4) and kit.strides(lse)[0] == 1
    case.check(kit, out, lse, d**-0.5, causal)


def test_packed_forms_are_slices(kit):
    n = (9, 3)
    case = Case(kit, h_q=2, h_kv=2, lengths_q=n, lengths_k=n)
    wanted = flash_mla.flash_attn_varlen_func(*case.arguments, 0.0, 0.1, True)
    qkv = kit.bf16(np.concatenate([case.values[name] for name in "qkv"], -1))
    kv = kit.bf16(np.concatenate([case.values[name] for name in "kv"], -1))
    for got in (
        flash_mla.flash_attn_varlen_qkvpacked_func(qkv, case.cu_q, 9, 192, 0.0, 0.1, True),
        flash_mla.flash_attn_varlen_kvpacked_func(
            case.q, kv, case.cu_q, case.cu_k, 9, 9, 192, 0.0, 0.1, True
        ),
    ):
        assert all((kit.raw(a) == kit.raw(b)).all() for a, b in zip(got, wanted))


def test_equal_lengths_without_varlen(kit):
    case = Case(kit, lengths_q=(6, 6), lengths_k=(10, 10))
    wanted = flash_mla.flash_attn_varlen_func(*case.arguments)
    only_count = kit.i32([0, 99, 7])
    got = flash_mla.flash_attn_varlen_func(
        case.q, case.k, case.v, only_count, only_count, 0, 0, is_varlen=False
    )
    assert all((kit.raw(a) == kit.raw(b)).all() for a, b in zip(got, wanted))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_backward_helpers(kit, causal, heads):
    case = Case(kit, h_q=heads[0], h_kv=heads[1])
    out, lse = interface._flash_attn_varlen_forward(*case.arguments, causal=causal, softmax_scale=0.08)
    got = interface._flash_attn_varlen_backward(
        case.do,
        case.q,
        case.k,
        case.v,
        out,
        lse,
        case.cu_q,
        case.cu_k,
        case.max_q,
        case.max_k,
        causal=causal,
        softmax_scale=0.08,
    )
    for name, mine, wanted in zip(("dq", "dk", "dv"), got, case.gradients(0.08, causal)):
        close(kit.value(mine), wanted, name)
    assert (kit.value(got[0])[-4:] == 0).all(), "rows without keys have no gradient"


def test_helpers_write_where_told(kit):
    case = Case(kit)
    out, lse = kit.bf16(np.ones((31, 4, 128))), kit.strided(kit.f32(np.ones(124)), (31, 4), (1, 31))
    got = interface._flash_attn_varlen_forward(*case.arguments, out=out, lse=lse)
    assert got[0] is out and got[1] is lse
    case.check(kit, out, lse, 192**-0.5, False)
    dq = kit.bf16(np.ones((31, 4, 192)))
    results = interface._flash_attn_varlen_backward(
        case.do, case.q, case.k, case.v, out, lse, case.cu_q, case.cu_k, case.max_q, case.max_k, dq=dq
    )
    assert results[0] is dq
    close(kit.value(dq), case.gradients(192**-0.5, False)[0], "dq")
    with pytest.raises(AssertionError, match="lse: stride"):
        interface._flash_attn_varlen_forward(*case.arguments, lse=kit.f32(np.ones((31, 4))))


@pytest.mark.parametrize("form", ["plain", "kvpacked", "qkvpacked"])
def test_autograd(torch, form):
    kit = support.KITS["torch"]
    n = (9, 4) if form == "qkvpacked" else LENGTHS_Q
    case = Case(kit, h_q=2, h_kv=2, lengths_q=n, lengths_k=n if form == "qkvpacked" else LENGTHS_K)
    q, k, v = (x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    if form == "plain":
        out, lse = flash_mla.flash_attn_varlen_func(q, k, v, *case.arguments[3:], causal=True)
    elif form == "kvpacked":
        out, lse = flash_mla.flash_attn_varlen_kvpacked_func(
            q, torch.cat([k, v], -1), *case.arguments[3:], 192, causal=True
        )
    else:
        out, lse = flash_mla.flash_attn_varlen_qkvpacked_func(
            torch.cat([q, k, v], -1), case.cu_q, case.max_q, 192, causal=True
        )
    assert out.requires_grad and not lse.requires_grad
    (out.float() * case.do.float()).sum().backward()
    for x, name, wanted in zip((q, k, v), ("dq", "dk", "dv"), case.gradients(192**-0.5, True)):
        assert x.grad.dtype == torch.bfloat16 and x.grad.shape == x.shape
        close(kit.value(x.grad), wanted, name)


def test_autograd_of_a_plain_sum_and_of_one_input(torch):
    """The gradient of a sum is an expanded scalar; only v asks for its gradient here."""
    kit = support.KITS["torch"]
    case = Case(kit)
    v = case.v.clone().requires_grad_()
    out, _ = flash_mla.flash_attn_varlen_func(case.q, case.k, v, *case.arguments[3:])
    out.sum().backward()
    case.values["do"] = np.ones_like(case.values["do"])
    close(kit.value(v.grad), case.gradients(192**-0.5, False)[2], "dv")


def test_bits_repeat(kit):
    case = Case(kit)
    first = None
    for _ in range(3):
        out, lse = interface._flash_attn_varlen_forward(*case.arguments)
        grads = interface._flash_attn_varlen_backward(
            case.do, case.q, case.k, case.v, out, lse, *case.arguments[3:]
        )
        bits = [kit.raw(x).tobytes() for x in (out, lse, *grads)]
        first = first or bits
        assert bits == first
