# SPDX-License-Identifier: MIT
"""Published tests of the fused operations: prefill with the output projection, decode of 2026-09-10 and 2026-09-30.

q is what an fp8 product with a permuted weight gives, as in a model; the output goes through a permuted weight and must
be the plain product.
"""

import functools
import itertools

import pytest

torch = pytest.importorskip("torch")

from published import (  # noqa: E402
    CUDA,
    DEVICE,
    INF,
    REAL,
    Draw,
    Scope,
    attend_scopes,
    codes,
    few,
    loose,
    name,
    powers,
    product,
)
from test_published_prefill import Inputs  # noqa: E402

from flash_mla import fused_norm_rope_attn_rope_cast as fused  # noqa: E402
from flash_mla import quant  # noqa: E402

G, EPS, POSITIONS = 8, 1e-4, 131072
SIZES = [
    (64, 64),
    (128, 128),
    (256, 256),
    (512, 512),
    (592, 120),
    (1840, 240),
    (1521, 600),
    (3412, 2896),
    (95, 152),
    (153, 264),
    (2345, 5136),
    (32, 2048),
]
YES_NO = (False, True)
# (sink, all invalid, lengths)
FLAGS = [
    (False, False, False),
    (True, False, False),
    (True, True, False),
    (True, False, True),
    (False, True, True),
]
PREFILL = [
    {"h_q": h_q, "size": size, "s_q": s_q, "amplified": amplified, "flags": flags}
    for h_q, size, s_q, amplified, flags in itertools.product((64, 128), SIZES, (1, 184, 2123), YES_NO, FLAGS)
]


def decode_cases(main, extras):
    """extras: (format, (tokens, slots)) of the extra cache."""
    return [
        {
            "h_q": h_q,
            "main": main,
            "size": size,
            "queries": queries,
            "flags": flags,
            "extra": extra,
            "more": more,
            "extra_lengths": has,
        }
        for h_q, size, queries, flags in itertools.product((64, 128), SIZES, [(1, 1), (69, 3), (19, 80)], FLAGS)
        for extra, more in [(None, None), *extras]
        for has in (YES_NO if extra else (False,))
    ]


MORE = [(32, 2048), (512, 512), (3412, 2896)]
DECODE = {
    "v41": decode_cases("V41", [(extra, more) for extra in ("V41", "FP4") for more in MORE]),
    "page": decode_cases("V41-page", [(extra, more) for extra in ("V41-page", "FP4-page") for more in MORE]),
    "v4": decode_cases("V4", [("V4", more) for more in [(64, 64), (32, 2048), (592, 120), (334, 432)]]),
}


def test_the_lists_are_whole():
    assert (len(PREFILL), len(DECODE["v41"])) == (720, 4680)
    assert len(DECODE["page"]) + len(DECODE["v4"]) == 7920


# ---- weights and tables ------------------------------------------------------------------------------------


def scale_bytes(words):
    """[.., n] int32 words, of any strides, to [.., 4 n] bytes."""
    return words.contiguous().view(torch.uint8)


def numbers(data, words):
    """Codes [.., n] with their scale words to numbers, which bf16 holds exactly."""
    scale = powers(scale_bytes(words))
    data = codes(data.contiguous().view(torch.uint8)).unflatten(-1, (scale.shape[-1], -1))
    return (data * scale[..., None]).flatten(-2)


def cast(draw, rows, columns, group):
    return quant.per_token_cast(draw.normal(rows, columns).div_(10).to(torch.bfloat16), "e4m3", group)


@functools.lru_cache(maxsize=8)
def query_weight(h_q, rank, group):
    """The query projection: numbers of the weight, and of the permuted weight."""
    weight = cast(Draw({"h_q": h_q, "rank": rank, "group": group}), h_q * 512, rank, group)
    permuted = fused.permute_q_b_proj(weight, h_q, 512)
    return numbers(*weight), numbers(*permuted)


@functools.lru_cache(maxsize=8)
def output_weight(h_q, width):
    """The output projection [n_group, width, G * 512]: numbers of the weight, and of the permuted weight."""
    groups = h_q // G
    data, words = cast(Draw({"h_q": h_q, "width": width}), groups * width, G * 512, 32)
    data, words = data.view(groups, width, -1), words.view(torch.int32).reshape(groups, width, -1)
    column_major = words.new_empty(groups, words.shape[2], width).transpose(1, 2)
    column_major.copy_(words)
    permuted = fused.permute_wv_proj((data, column_major), G, 512)
    return numbers(data, words), numbers(*unpermuted(*permuted))


def unpermuted(data, words):
    """[.., G * 512] codes and scales, 32-wide chunks transposed against heads, back to head by head."""
    data = data.view(torch.uint8).unflatten(-1, (16, G, 32)).transpose(-3, -2).flatten(-3)
    scale = scale_bytes(words).unflatten(-1, (16, G)).transpose(-2, -1).flatten(-2)
    return data, scale.contiguous().view(torch.int32)


@functools.lru_cache(maxsize=1)
def angles():
    """cos and sin, [positions, 64]."""
    frequency = 100000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angle = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], 1).float().to(DEVICE)


class Query:
    """Queries of s_q tokens as the projection stores them, and as attention sees them."""

    def __init__(self, draw, s_q, h_q):
        rank, group = draw.choose((1024, 1536) if CUDA else (1024,)), draw.choose((32, 128))
        plain, permuted = query_weight(h_q, rank, group)
        lora = numbers(*cast(draw, s_q, rank, group))
        self.stored = product(lora.to(REAL), permuted.to(REAL).t(), True).to(torch.bfloat16).view(s_q, h_q, 512)
        # Element (h, d) of a token lies at (d / 16) * (h_q * 16) + h * 16 + d % 16.
        q = self.stored.reshape(s_q, 32, h_q, 16).transpose(1, 2).reshape(s_q, h_q, 512)
        wanted = product(lora[:4].to(REAL), plain.to(REAL).t(), True).view(-1, h_q, 512)
        assert ((q[:4].to(REAL) - wanted).abs() <= 2.0**-7 * wanted.abs() + 1e-4).all()
        self.positions = draw.integers(POSITIONS, s_q)
        turn = angles()[self.positions.long()][:, None]
        self.cos, self.sin = turn[..., :32], turn[..., 32:]
        self.norm = draw.choose(YES_NO)
        square = q.to(REAL).square().mean(-1, keepdim=True)
        self.factor = torch.rsqrt(square + EPS) if self.norm else torch.ones_like(square)
        # fma(x, cos, -(y sin)) and fma(x, sin, y cos), to the bit: q is rounded to bf16 after it.
        x, y, double = q[..., 448::2].float(), q[..., 449::2].float(), torch.float64
        first = x.to(double) * self.cos - (y * self.sin).to(double)
        second = x.to(double) * self.sin + (y * self.cos).to(double)
        q[..., 448::2], q[..., 449::2] = first.float().to(torch.bfloat16), second.float().to(torch.bfloat16)
        self.q = q

    def arguments(self, h_q):
        """The first twelve arguments of prefill and decode."""
        room = loose(self.stored.flatten(1)).unflatten(1, self.stored.shape[1:])  # only the first stride is free
        return (self.norm, EPS, self.positions, False, 64, angles(), h_q // G, 32, True, True, True, room)

    def turned_back(self, out):
        """Conjugate RoPE of a result."""
        x, y = out[..., 448::2].clone(), out[..., 449::2].clone()
        out[..., 448::2], out[..., 449::2] = x * self.cos + y * self.sin, y * self.cos - x * self.sin
        return out


def check_out(judge, out_fp8, out_sf, wanted, lonely, amplified=False):
    """Codes and scales against [s_q, h_q, 512]; lonely: [s_q, h_q]. Returns the numbers by group [s_q, n_group,
    G * 512]."""
    s_q, h_q, _ = wanted.shape
    assert out_fp8.shape == (s_q, h_q // G, G * 512) and out_fp8.is_contiguous()
    rows = -(-s_q // 4) * 4
    assert out_sf.shape == (s_q, h_q // G, G * 4) and out_sf.stride() == (1, rows * G * 4, rows)
    got = numbers(*unpermuted(out_fp8, out_sf)).to(REAL)
    tolerances = (1.0, 1.0, 1e-3) if amplified else (1.1e-3, 1.01 / 8, 1e-3)
    judge.compare("out, amplified" if amplified else "out", got.view(wanted.shape), wanted, *tolerances)
    if lonely.any():
        bytes_of = (out_fp8.view(torch.uint8).unflatten(-1, (16, G, 32)), scale_bytes(out_sf).unflatten(-1, (16, G)))
        data = bytes_of[0].transpose(2, 3).reshape(s_q, h_q, 512)[lonely]
        scale = bytes_of[1].transpose(2, 3).reshape(s_q, h_q, 16)[lonely]
        assert (data & 127 == 0).all() and (scale == 0x69).all()  # a zero may have either sign
    return got


# ---- prefill -----------------------------------------------------------------------------------------------


def prefill_cost(h_q, size, s_q, **_):
    return s_q * h_q * (size[0] + 1024)


@pytest.mark.parametrize("case", few(PREFILL, prefill_cost, 4e5, 5, h_q=64), ids=name)
def test_prefill(judge, case):
    (sink, invalid, lengths), h_q, amplified = case["flags"], case["h_q"], case["amplified"]
    draw = Draw(case)
    query = Query(draw, case["s_q"], h_q)
    rest = {"d_qk": 512, "sink": sink, "lengths": lengths}
    inputs = Inputs(draw, {**case, **rest}, invalid=invalid)
    width = draw.choose((256, 512, 1024) if CUDA else (256,))
    out_fp8, out_sf, top, lse = fused.prefill(
        *query.arguments(h_q), inputs.kv, inputs.indices, 0.5, 512, inputs.sink, inputs.lengths
    )
    wanted, wanted_top, wanted_lse = inputs.attend(0.5 * query.factor, query.q)
    wanted = query.turned_back(wanted)
    got = check_out(judge, out_fp8, out_sf, wanted, wanted_lse == INF, amplified)
    if amplified:
        judge.compare("max_logits, amplified", top, wanted_top, 1.0, 1.0)
        judge.compare("lse, amplified", lse, wanted_lse, 1e-4, 8.01 / 65536)
    else:
        judge.compare("max_logits", top, wanted_top, 1e-5, 4.01 / 65536)
        judge.compare("lse", lse, wanted_lse, 1e-5, 4.01 / 65536)
    plain, permuted = output_weight(h_q, width)
    by_group = wanted.view(case["s_q"], h_q // G, G * 512).transpose(0, 1)
    what, tolerance = ("projection, amplified", 100) if amplified else ("projection", 1.0)
    judge.compare(
        what,
        product(got.transpose(0, 1), permuted.to(REAL).transpose(1, 2), True),
        product(by_group.contiguous(), plain.to(REAL).transpose(1, 2), False),
        tolerance,
        tolerance,
        1e-3,
    )


# ---- decode ------------------------------------------------------------------------------------------------


def decode_cost(h_q, size, queries, more, **_):
    return queries[0] * queries[1] * h_q * (size[1] + (more[1] if more else 0) + 1024)


def decode(judge, case):
    (sink, invalid, lengths), h_q, (b, s_q) = case["flags"], case["h_q"], case["queries"]
    draw = Draw(case)
    query = Query(draw, b * s_q, h_q)
    scopes = []
    for layout, size, has, base in (
        (case["main"], case["size"], lengths, 64),
        (case["extra"], case["more"], case["extra_lengths"], 128),
    ):
        if layout is not None:
            tokens, topk = size
            each = draw.integers(topk + 1, b) if has else None
            scope = Scope(
                draw,
                layout,
                draw.lengths(b, tokens, 1, False),
                s_q,
                topk,
                base + topk % 8,
                invalid=invalid,
                fixed=each,
            )
            scopes.append(scope)
    sinks = draw.sink(h_q) if sink else None
    flat = [loose(s.slots.flatten(0, 1)) for s in scopes]
    counts = [None if s.lengths is None else s.lengths.repeat_interleave(s_q) for s in scopes]
    more = (scopes[1].cache.tensor, flat[1], counts[1]) if len(scopes) > 1 else (None, None, None)
    scale = 512**-0.55
    out_fp8, out_sf, lse = fused.decode(
        *query.arguments(h_q),
        scopes[0].cache.tensor,
        flat[0],
        scale,
        512,
        sinks,
        counts[0],
        *more,
        kv_layout="page" if case["main"] == "V41-page" else None,
    )
    shape = (b, s_q, h_q, -1)
    results = attend_scopes(query.q.view(shape), scopes, scale * query.factor.view(shape), sinks)
    wanted, wanted_lse, _ = (x.flatten(0, 1) for x in results)
    wanted = query.turned_back(wanted.to(torch.bfloat16).to(REAL))  # the published reference rounds before RoPE
    check_out(judge, out_fp8, out_sf, wanted, wanted_lse == INF)
    judge.compare("lse", lse, wanted_lse, 1e-5, 4.01 / 65536)


SMALL = 5e5


@pytest.mark.parametrize("case", few(DECODE["v41"], decode_cost, SMALL, 4, h_q=64), ids=name)
def test_decode(judge, case):
    decode(judge, case)


@pytest.mark.parametrize("case", few(DECODE["page"], decode_cost, SMALL, 2, h_q=64), ids=name)
def test_decode_2026_09_10(judge, case):
    decode(judge, case)


@pytest.mark.parametrize("case", few(DECODE["v4"], decode_cost, SMALL, 2, h_q=64), ids=name)
def test_decode_v4(judge, case):
    decode(judge, case)


def test_the_weights_say_the_same_permuted_or_not():
    for width in (256, 512):
        plain, permuted = output_weight(64, width)
        assert torch.equal(plain, permuted) and torch.isfinite(plain).all()
