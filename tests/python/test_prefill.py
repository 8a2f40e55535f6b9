# SPDX-License-Identifier: MIT
"""flash_mla_sparse_fwd against attention in float64."""

import numpy as np
import pytest
from support import INF, Row, attended, bf16

import flash_mla

INVALID = (-2147483648, -123456, -1, 60, 114514, 1919810, 2147480000, 2147483647)


class Case:
    """Query tokens over 60 KV tokens; rows with invalid entries, duplicates, and one with nothing to attend."""

    def __init__(self, kit, d=512, s_q=5, h_q=3, topk=20, dtype="bf16", sink=True, lengths=True, seed=0):
        rng = np.random.default_rng(seed)
        rounded = bf16 if dtype == "bf16" else lambda x: np.asarray(x, np.float16).astype(np.float32)
        make = kit.bf16 if dtype == "bf16" else kit.f16
        self.q_value, self.kv_value = rounded(rng.normal(size=(s_q, h_q, d)) / 3), rounded(
            rng.normal(size=(60, 1, d))
        )
        self.q, self.kv = make(self.q_value), make(self.kv_value)
        self.indices = rng.integers(0, 60, (s_q, 1, topk))
        self.indices[:, 0, : len(INVALID)] = INVALID
        self.indices[2] = rng.choice(INVALID, topk)
        self.length = np.array([topk, 12, topk, 0, topk + 9])[:s_q] if lengths else None
        self.sink = np.array([0.5, -INF, INF])[:h_q] if sink else None
        self.keywords = {}
        if sink:
            self.keywords["attn_sink"] = kit.f32(self.sink)
        if lengths:
            self.keywords["topk_length"] = kit.i32(self.length)
        self.index_array = kit.i32(self.indices)

    def check(self, kit, out, max_logits, lse, scale):
        out, max_logits, lse = kit.value(out), kit.value(max_logits), kit.value(lse)
        for r in range(len(self.q_value)):
            keys = self.kv_value[
                attended(self.indices[r, 0], 60, None if self.length is None else self.length[r]), 0
            ]
            for h in range(self.q_value.shape[1]):
                row = Row(self.q_value[r, h], keys, 512, scale, None if self.sink is None else self.sink[h])
                row.check(out[r, h], lse[r, h], max_logits[r, h], f"token {r}, head {h}")


@pytest.mark.parametrize("d, dtype", [(512, "bf16"), (576, "bf16"), (512, "f16")])
@pytest.mark.parametrize("options", [False, True])
def test_prefill(kit, d, dtype, options):
    case = Case(kit, d, dtype=dtype, sink=options, lengths=options)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        case.q, case.kv, case.index_array, 0.06, **case.keywords
    )
    assert tuple(out.shape) == (5, 3, 512) and tuple(max_logits.shape) == tuple(lse.shape) == (5, 3)
    assert out.dtype == case.q.dtype
    assert kit.strides(out) == (1536, 512, 1) and kit.strides(lse) == kit.strides(max_logits) == (3, 1)
    case.check(kit, out, max_logits, lse, 0.06)


def test_positional_as_published(kit):
    case = Case(kit)
    out = flash_mla.flash_mla_sparse_fwd(
        case.q, case.kv, case.index_array, 0.06, 512, case.keywords["attn_sink"], case.keywords["topk_length"]
    )
    case.check(kit, *out, 0.06)


def test_rows_of_kv_may_overlap(kit):
    """A zero-copy view with rows 64 elements apart, as lmdeploy passes for bf16 caches."""
    flat = bf16(np.random.default_rng(3).normal(size=64 * 20 + 576))
    kv = kit.strided(kit.bf16(flat), (21, 1, 576), (64, 576, 1))
    q = bf16(np.random.default_rng(4).normal(size=(1, 2, 576)))
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        kit.bf16(q), kv, kit.i32([[[0, 20, 7]]]), sm_scale=0.05
    )
    keys = np.stack([flat[64 * i : 64 * i + 576] for i in (0, 20, 7)])
    for h in range(2):
        Row(q[0, h], keys, 512, 0.05).check(
            kit.value(out)[0, h], kit.value(lse)[0, h], kit.value(max_logits)[0, h]
        )


def test_out_and_lse_are_written_where_told(kit):
    case = Case(kit)
    wanted = flash_mla.flash_mla_sparse_fwd(case.q, case.kv, case.index_array, 0.06)
    out, lse = kit.bf16(np.zeros((5, 3, 512))), kit.f32(np.zeros((5, 3)))
    got = flash_mla.flash_mla_sparse_fwd(case.q, case.kv, case.index_array, 0.06, out=out, lse=lse)
    assert got[0] is out and got[2] is lse
    assert all((kit.raw(a) == kit.raw(b)).all() for a, b in zip(got, wanted))
