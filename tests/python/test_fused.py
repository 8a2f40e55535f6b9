# SPDX-License-Identifier: MIT
"""fused_norm_rope_attn_rope_cast against float64, and the permutations that go with it."""

import numpy as np
import pytest
import support
from support import E8M0, E4M3, INF, Row, attended, bf16

from flash_mla import fused_norm_rope_attn_rope_cast as fused
from flash_mla import quant

H, GROUPS, D, EPS, SCALE = 4, 2, 512, 1e-4, 0.05
FLAGS = (False, 64)
TAIL = (GROUPS, 32, True, True, True)


class Case:
    def __init__(self, kit, s_q=5, seed=0):
        rng = np.random.default_rng(seed)
        self.q = bf16(rng.normal(size=(s_q, H, D)))
        angle = rng.uniform(0, 6.3, (40, 32))
        self.cos_sin = np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)
        self.positions = rng.integers(0, 40, s_q)
        self.sink = np.array([0.3, -INF, 1.0, 0.0])
        # element (h, d) of a token is stored at (d / 16) * (h_q * 16) + h * 16 + d % 16
        stored = self.q.reshape(s_q, H, D // 16, 16).transpose(0, 2, 1, 3).reshape(s_q, H, D)
        self.head = (
            True,
            EPS,
            kit.i32(self.positions),
            *FLAGS,
            kit.f32(self.cos_sin),
            *TAIL,
            kit.bf16(stored),
        )
        self.sink_array = kit.f32(self.sink)

    def wanted(self, r, h, keys):
        """out in float64 before the cast, and the row with its lse."""
        q = self.q[r, h].astype(np.float64)
        norm = 1 / np.sqrt((q**2).mean() + EPS)
        c, s = self.cos_sin[self.positions[r], :32].astype(np.float64), self.cos_sin[
            self.positions[r], 32:
        ].astype(np.float64)
        x0, x1 = q[448::2].copy(), q[449::2].copy()
        q[448::2], q[449::2] = x0 * c - x1 * s, x0 * s + x1 * c
        q[448:] = bf16(q[448:])
        row = Row(q, keys, 512, SCALE * norm, self.sink[h])
        out = row.out.copy()
        o0, o1 = row.out[448::2], row.out[449::2]
        out[448::2], out[449::2] = o0 * c + o1 * s, -o0 * s + o1 * c
        return out, row

    def check(self, kit, codes, scales, lse, keys_of, max_logits=None):
        s_q, per_group = len(self.q), H // GROUPS
        assert tuple(codes.shape) == (s_q, GROUPS, per_group * 512)
        assert tuple(scales.shape) == (s_q, GROUPS, per_group * 4)
        padded = -(-s_q // 4) * 4
        assert kit.strides(scales) == (1, padded * per_group * 4, padded)
        codes, words, lse = kit.value(codes), kit.value(scales), kit.value(lse)
        data = (
            np.asarray(codes).view(np.uint8).reshape(s_q, GROUPS, 16, per_group, 32).transpose(0, 1, 3, 2, 4)
        )
        data = data.reshape(s_q, H, 16, 32)
        scale_bytes = (
            np.ascontiguousarray(words)
            .view(np.uint8)
            .reshape(s_q, GROUPS, 16, per_group)
            .transpose(0, 1, 3, 2)
        )
        scale_bytes = scale_bytes.reshape(s_q, H, 16)
        got = (E4M3[data] * E8M0[scale_bytes][..., None]).reshape(s_q, H, 512)
        wanted = np.zeros_like(got)
        for r in range(s_q):
            for h in range(H):
                wanted[r, h], row = self.wanted(r, h, keys_of(r))
                row.out, row.weight = np.zeros(512), np.full(512, INF)
                row.check(
                    got[r, h],
                    lse[r, h],
                    None if max_logits is None else kit.value(max_logits)[r, h],
                    f"token {r}, head {h}",
                )
                if row.max_logits == -INF:
                    assert (data[r, h] & 127 == 0).all() and (scale_bytes[r, h] == 0x69).all()
        distance = 1 - 2 * (got * wanted).sum() / ((got**2).sum() + (wanted**2).sum())
        assert abs(distance) <= 5e-4, distance
        amax = np.abs(wanted.reshape(s_q, H, 16, 32)).max(-1, keepdims=True)
        bound = (
            np.maximum(amax / 16, 1e-4).repeat(32, -1).reshape(got.shape)
        )  # half a step of e4m3 at the top
        assert (np.abs(got - wanted) <= bound).all()


def test_prefill(kit):
    case = Case(kit)
    rng = np.random.default_rng(1)
    kv = bf16(rng.normal(size=(30, 1, 512)))
    indices = rng.integers(-3, 33, (5, 1, 12))
    indices[3] = -1
    length = [12, 5, 0, 12, 99]
    codes, scales, max_logits, lse = fused.prefill(
        *case.head, kit.bf16(kv), kit.i32(indices), SCALE, 512, case.sink_array, kit.i32(length)
    )
    case.check(kit, codes, scales, lse, lambda r: kv[attended(indices[r, 0], 30, length[r]), 0], max_logits)
    for r in (2, 3):
        assert (kit.value(lse)[r] == INF).all() and (kit.value(max_logits)[r] == -INF).all()


def attends(indices, tokens, length):
    """Which slots of [s_q, topk] are attended."""
    return (indices >= 0) & (indices < tokens) & (np.arange(indices.shape[1]) < length[:, None])


@pytest.mark.parametrize(
    "main, extra",
    [
        ("v4", None),
        ("v4", "v4"),
        ("v41", None),
        ("v41", "v41"),
        ("v41", "v41-fp4"),
        ("v41-page", "v41-fp4-page"),
    ],
)
def test_decode_equals_prefill_over_the_same_tokens(kit, main, extra):
    case = Case(kit, s_q=6)
    rng = np.random.default_rng(2)
    pages, tokens = support.random_pages(rng, main, 3, 9)
    indices = rng.integers(-2, 29, (6, 11))
    length = np.array([11, 3, 0, 11, 7, 11])
    keywords = {"topk_length": kit.i32(length), "attn_sink": case.sink_array}
    rows = [tokens[attended(indices[r], 27, length[r])] for r in range(6)]
    if extra:
        extra_pages, extra_tokens = support.random_pages(rng, extra, 2, 10)
        extra_indices, extra_length = rng.integers(-2, 22, (6, 7)), np.array([7, 7, 0, 2, 0, 7])
        keywords.update(
            extra_k_cache=support.cache_view(kit, extra_pages, 10, support.FORMATS[extra][1]),
            extra_indices_in_kvcache=kit.i32(extra_indices),
            extra_topk_length=kit.i32(extra_length),
        )
        rows = [
            np.concatenate([mine, extra_tokens[attended(extra_indices[r], 20, extra_length[r])]])
            for r, mine in enumerate(rows)
        ]
    layout = "page" if main.endswith("page") else None
    codes, scales, lse = fused.decode(
        *case.head,
        support.cache_view(kit, pages, 9, support.FORMATS[main][1]),
        kit.i32(indices),
        SCALE,
        kv_layout=layout,
        **keywords,
    )
    case.check(kit, codes, scales, lse, lambda r: rows[r])
    # The same bits as prefill over every token of both caches, slot by slot: main slots first, then extra slots.
    slots = [np.where(attends(indices, 27, length), indices, -1)]
    pool = [tokens]
    if extra:
        slots.append(np.where(attends(extra_indices, 20, extra_length), extra_indices + 27, -1))
        pool.append(extra_tokens)
    again = fused.prefill(
        *case.head,
        kit.bf16(np.concatenate(pool)[:, None]),
        kit.i32(np.concatenate(slots, 1)[:, None]),
        SCALE,
        attn_sink=case.sink_array,
    )
    assert (kit.raw(codes) == kit.raw(again[0])).all() and (kit.value(scales) == kit.value(again[1])).all()
    assert (kit.value(lse) == kit.value(again[3])).all()


def test_no_norm_and_no_options(kit):
    case = Case(kit)
    kv = bf16(np.random.default_rng(1).normal(size=(8, 1, 512)))
    _, _, max_logits, lse = fused.prefill(
        False, *case.head[1:], kit.bf16(kv), kit.i32(np.arange(8)[None].repeat(5, 0)), SCALE
    )
    q = case.q.astype(np.float64)
    assert np.isfinite(kit.value(lse)).all() and (kit.value(lse) >= kit.value(max_logits)).all()
    assert np.abs(kit.value(max_logits)).max() <= SCALE * (np.abs(q).sum(-1).max() * np.abs(kv).max())


def test_rank_of_indices(kit):
    """(a) of case C060: [T, topk] and [T, 1, topk] are the same call."""
    case = Case(kit)
    kv, rows = kit.bf16(np.random.default_rng(1).normal(size=(30, 1, 512))), np.arange(60).reshape(5, 12)
    a = fused.prefill(*case.head, kv, kit.i32(rows), SCALE)
    b = fused.prefill(*case.head, kv, kit.i32(rows[:, None]), SCALE)
    assert all((kit.raw(x) == kit.raw(y)).all() for x, y in zip(a, b))


@pytest.mark.parametrize(
    "position, value, name",
    [
        (3, True, "is_rope_neox_style"),
        (4, 32, "rope_dim"),
        (7, 128, "num_per_channels"),
        (8, False, "use_tma_aligned_col_major_sf"),
        (9, False, "round_sf"),
        (10, False, "use_packed_ue8m0"),
    ],
)
def test_what_must_be_refused(kit, position, value, name):
    case = Case(kit)
    head = list(case.head)
    head[position] = value
    with pytest.raises(AssertionError, match=name):
        fused.prefill(*head, kit.bf16(np.zeros((4, 1, 512))), kit.i32(np.zeros((5, 1, 4))), SCALE)


def test_groups_must_divide_the_heads(kit):
    case = Case(kit)
    head = list(case.head)
    head[6] = 3
    with pytest.raises(RuntimeError, match="n_wv_group: 3"):
        fused.prefill(*head, kit.bf16(np.zeros((4, 1, 512))), kit.i32(np.zeros((5, 1, 4))), SCALE)


def test_position_outside_the_table(host_kit):
    kit = host_kit
    case = Case(kit)
    head = list(case.head)
    head[2] = kit.i32([0, 1, 40, 2, 3])
    with pytest.raises(RuntimeError, match="token_positions"):
        fused.prefill(*head, kit.bf16(np.zeros((4, 1, 512))), kit.i32(np.zeros((5, 1, 4))), SCALE)


def column_words(kit, words):
    """[.., rows, words] int32 with the row stride 1, as scale tensors come."""
    rows = words.shape[-2]
    memory = np.ascontiguousarray(np.swapaxes(words, -1, -2))
    t = kit.i32(memory)
    axes = (1, 0) if words.ndim == 2 else (0, 2, 1)
    assert rows == words.shape[-2]
    return t.permute(*axes) if hasattr(kit, "torch") else t.transpose(axes)


def test_permute_q_b(kit):
    rng = np.random.default_rng(0)
    h, d, r = 3, 32, 256
    w, words = rng.integers(0, 256, (h * d, r)), rng.integers(-(2**31), 2**31, (h * d, 2))
    got_w, got_sf = fused.permute_q_b_proj((kit.bytes(w), column_words(kit, words)), h, d)
    assert tuple(got_w.shape) == (96, 256) and kit.strides(got_sf) == (1, 96)
    for head in range(h):
        for dim in range(d):
            to = dim % 16 + 16 * head + dim // 16 * 16 * h
            assert (kit.value(got_w)[to] == w[head * d + dim]).all()
            assert (kit.value(got_sf)[to] == words[head * d + dim]).all()


def test_permute_wv(kit):
    rng = np.random.default_rng(0)
    groups, rows, g, d = 2, 6, 4, 64
    w, words = rng.integers(0, 256, (groups, rows, g * d)), rng.integers(
        -(2**31), 2**31, (groups, rows, g * d // 128)
    )
    got_w, got_sf = fused.permute_wv_proj((kit.bytes(w), column_words(kit, words)), g, d)
    assert kit.strides(got_sf) == (16, 1, 8)
    got = np.asarray(kit.value(got_w)).view(np.uint8)
    before = words.astype(np.int32).view(np.uint8)
    after = np.ascontiguousarray(kit.value(got_sf)).view(np.uint8)
    for head in range(g):
        for dim in range(d):
            assert (got[:, :, dim // 32 * 32 * g + 32 * head + dim % 32] == w[:, :, head * d + dim]).all()
        for chunk in range(d // 32):
            assert (after[:, :, chunk * g + head] == before[:, :, head * (d // 32) + chunk]).all()


def test_wv_product_is_the_same_permuted_or_not(kit):
    """Sum over positions of out times weight, either way (the consumer's contract)."""
    case = Case(kit)
    rng = np.random.default_rng(7)
    per_group, d_out = H // GROUPS, 5
    weight = bf16(rng.normal(size=(GROUPS * d_out, per_group * 512)))
    codes, words = quant.per_token_cast(kit.bf16(weight), "e4m3", 32)
    kv = kit.bf16(rng.normal(size=(30, 1, 512)))
    out, out_sf, _, _ = fused.prefill(*case.head, kv, kit.i32(rng.integers(0, 30, (5, 12))), SCALE)

    def numbers(codes, words):
        scale = E8M0[np.ascontiguousarray(kit.value(words)).view(np.uint8)]
        data = E4M3[np.asarray(kit.value(codes)).view(np.uint8)]
        return data * np.repeat(scale, 32, -1)

    plain = numbers(codes, words).reshape(GROUPS, d_out, per_group, 512)
    w3 = kit.bytes(np.asarray(kit.value(codes)).view(np.uint8).reshape(GROUPS, d_out, -1))
    sf3 = column_words(kit, np.ascontiguousarray(kit.value(words)).reshape(GROUPS, d_out, -1))
    permuted = fused.permute_wv_proj((w3, sf3), per_group, 512)
    # In out_fp8 and in the permuted weight a scale byte belongs to (chunk, head); undo that to get numbers.
    weight_p = np.asarray(kit.value(permuted[0])).view(np.uint8).reshape(GROUPS, d_out, 16, per_group, 32)
    weight_s = (
        np.ascontiguousarray(kit.value(permuted[1])).view(np.uint8).reshape(GROUPS, d_out, 16, per_group, 1)
    )
    out_p = np.asarray(kit.value(out)).view(np.uint8).reshape(5, GROUPS, 16, per_group, 32)
    out_s = np.ascontiguousarray(kit.value(out_sf)).view(np.uint8).reshape(5, GROUPS, 16, per_group, 1)
    out_number, weight_number = E4M3[out_p] * E8M0[out_s], E4M3[weight_p] * E8M0[weight_s]
    permuted_sum = np.einsum("tgchk,gochk->tgo", out_number, weight_number)
    heads = out_number.transpose(0, 1, 3, 2, 4).reshape(5, GROUPS, per_group, 512)
    assert np.allclose(permuted_sum, np.einsum("tghd,gohd->tgo", heads, plain), rtol=1e-12)
