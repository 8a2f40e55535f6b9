# SPDX-License-Identifier: MIT
"""The published kernels' own tests, as tables say them: how they make data, what they compare with, how close.

Written anew. Data: the published distributions, seeded by the case's name. References: attention on the dequantised
values, in float64 on the CPU and, on CUDA, in float32 with products that are exact on bf16 values; caches are read here
byte by byte, not by the library. On CUDA every case runs, or the share that FLASHMLA_TEST_SHARE=K/N names, from 1/N to
N/N; on the CPU a few small ones of each slice, through the same code.
"""

import os
import random
import zlib

import support

torch = support.torch_or_none()
CUDA = bool(os.environ.get("FLASHMLA_TEST_CUDA"))
DEVICE = "cuda" if CUDA else "cpu"
INF = float("inf")
if torch is not None:
    if CUDA:
        torch.set_num_threads(1)  # several of these processes share the processors
    REAL = torch.float32 if CUDA else torch.float64
    FP8 = getattr(torch, "float8_e4m3fn", None)



def give_back():
    """Memory that torch keeps after a large case, to the other processes on the device."""
    if CUDA and torch.cuda.memory_reserved() > 4 << 30:
        torch.cuda.empty_cache()


# ---- cases -------------------------------------------------------------------------------------------------


def few(cases, cost, limit, count=8, **smaller):
    """All cases on CUDA, or one of n shares of them; on the CPU `count` of those whose cost is at most `limit` once
    they are made `smaller`, always the same ones."""
    if CUDA:
        mine, of = map(int, os.environ.get("FLASHMLA_TEST_SHARE", "1/1").split("/"))
        return random.Random(0).sample(cases, len(cases))[mine - 1 :: of]
    cheap = [{**case, **smaller} for case in cases]
    cheap = [case for case in cheap if cost(**case) <= limit]
    assert cheap, "a slice without a case for the CPU"
    return random.Random(0).sample(cheap, min(count, len(cheap)))


def name(case):
    """A case in words."""
    return ",".join(f"{key}={_word(value)}" for key, value in case.items())


def _word(value):
    if isinstance(value, (tuple, list)):
        return "x".join(map(str, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


class Draw:
    """Random numbers of one case: tensors on the device, and plain choices."""

    def __init__(self, case):
        seed = zlib.crc32(name(case).encode())
        self.device = torch.Generator(DEVICE).manual_seed(seed)
        self.host = torch.Generator("cpu").manual_seed(seed)
        self.choose = random.Random(seed).choice

    def normal(self, *shape, dtype=None):
        return torch.randn(shape, generator=self.device, device=DEVICE, dtype=dtype)

    def clamped(self, *shape, dtype, part=10):
        """Normal / part, clamped to 1. Older versions of torch know no fp16 arithmetic on the CPU."""
        return self.normal(*shape, dtype=dtype if CUDA else None).div_(part).clamp_(-1, 1).to(dtype)

    def uniform(self, *shape):
        return torch.rand(shape, generator=self.device, device=DEVICE)

    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self.device, device=DEVICE, dtype=torch.int32)

    def permutation(self, n):
        return torch.randperm(n, generator=self.device, device=DEVICE)

    def lengths(self, b, mean, least, varlen, zero=False):
        """Tokens per request: max(Normal(mean, mean / 2), least), about half of them 0 if asked for."""
        lengths = torch.full((b,), float(mean))
        if varlen:
            lengths = mean + torch.randn(b, generator=self.host) * mean / 2
        lengths = lengths.clamp(min=least).int()
        return lengths * (torch.rand(b, generator=self.host) < 0.5) if zero else lengths

    def sink(self, h_q):
        """[h_q], about 31 % of it -inf and 31 % +inf."""
        sink, kind = self.normal(h_q), self.normal(h_q)
        return sink.masked_fill(kind < -0.5, -INF).masked_fill(kind > 0.5, INF)


def loose(x):
    """The same values with room after every dimension: 1, and 128 after the last."""
    room = x.new_zeros([n + 1 for n in x.shape[:-1]] + [x.shape[-1] + 128])
    view = room[tuple(slice(0, n) for n in x.shape)]
    view.copy_(x)
    return view


# ---- comparison --------------------------------------------------------------------------------------------


class Judge:
    """Compares results as the published tests do, and keeps the worst of each tensor for the report."""

    def __init__(self):
        self.worst = {}

    def compare(self, what, got, wanted, abs_tol, rel_tol, cos_tol=1e-7):
        """Infinities and NaN at the same places; each element close by either measure; nearly the same direction."""
        assert got.shape == wanted.shape, f"{what}: shape is {tuple(got.shape)}, not {tuple(wanted.shape)}"
        got, wanted = got.to(REAL), wanted.to(REAL)
        odd = ~torch.isfinite(wanted)
        same = (got == wanted) | (torch.isnan(got) & torch.isnan(wanted)) | torch.isfinite(wanted)
        same &= odd | torch.isfinite(got)
        got, wanted = got.masked_fill(odd, 0), wanted.masked_fill(odd, 0)
        error, size = (got - wanted).abs_(), wanted.abs()
        share = torch.minimum(error / abs_tol, error / (size + 1e-6) / rel_tol)
        double = torch.float64
        norms = (got * got).sum(dtype=double) + (wanted * wanted).sum(dtype=double)
        numbers = [(~same).sum(), share.max() if share.numel() else error.sum(), error.sum() * 0]
        numbers[2] = error.max() if error.numel() else numbers[2]
        numbers += [2 * (got * wanted).sum(dtype=double), norms, (wanted * wanted).sum(dtype=double)]
        odd_count, share, error, dot, norms, square = torch.stack([n.to(double) for n in numbers]).tolist()
        cos = 0.0 if square < 1e-12 else abs(1 - dot / norms)
        row = self.worst.setdefault(what, {"of_tolerance": 0.0, "abs": 0.0, "cos": 0.0, "cos_of_tolerance": 0.0})
        for key, value in (("of_tolerance", share), ("abs", error), ("cos", cos), ("cos_of_tolerance", cos / cos_tol)):
            row[key] = max(row[key], value)
        assert odd_count == 0, f"{what}: {int(odd_count)} infinities or NaN are not where they should be"
        assert share < 1, f"{what}: off by {share:.3g} of the tolerance, {error:.3g} at most"
        assert cos <= cos_tol, f"{what}: 1 - cos is {cos:.3g}, more than {cos_tol:.3g}"


# ---- references --------------------------------------------------------------------------------------------


def product(a, b, exact):
    """a @ b, where b holds bf16 or fp16 values, and a too if exact. On CUDA in 11-bit tensor-core products summed in
    float32: exact for such values; another a is cut in two such parts."""
    if not CUDA:
        return a @ b
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        if exact:
            return a @ b
        high = (a.view(torch.int32) & -8192).view(torch.float32)
        return (high @ b).add_((a - high) @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def attend(q, k, weight, scale, sink=None, d_v=512):
    """q [.., h, d], k [.., n, d] without NaN, weight [.., h or 1, n]: how often each token is attended; k may lack q's
    third dimension from the end, and is shared along it then. scale: a number or [.., h, 1]. Returns out [.., h, d_v],
    lse and largest logit [.., h]."""
    shared = q.dim() > k.dim()
    logits = product(q.flatten(-3, -2) if shared else q, k.transpose(-1, -2), True)
    logits = (logits.unflatten(-2, q.shape[-3:-1]) if shared else logits).mul_(scale).masked_fill_(weight == 0, -INF)
    top = logits.amax(-1)
    base = top.masked_fill(top == -INF, 0)
    p = logits.sub_(base[..., None]).exp_()
    if weight.dtype != torch.bool:
        p.mul_(weight)
    total = p.sum(-1)
    lonely = total == 0
    lse = (total.log() + base).masked_fill_(lonely, INF)
    if sink is not None:
        total = total + torch.exp(sink.to(REAL) - base)
    out = product(p.flatten(-3, -2) if shared else p, k[..., :d_v], False)
    out = out.unflatten(-2, q.shape[-3:-1]) if shared else out
    return out.div_(total.masked_fill(lonely, 1)[..., None]), lse, top


def chunks(n, elements, most=1 << 29 if CUDA else 1 << 26):
    """Slices of n things of so many elements each, few enough for `most`; each slice costs a hundred launches."""
    step = max(1, most // max(elements, 1))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


# ---- caches ------------------------------------------------------------------------------------------------

# name: (d_qk, bytes of a token, code bytes of a row, row, scale bytes of a row, page-level)
LAYOUTS = {
    "V32": (576, 656, 512, 656, 16, False),
    "V4": (512, 584, 448, 576, 8, True),
    "V41": (512, 528, 512, 528, 16, False),
    "FP4": (512, 288, 256, 288, 32, False),
    "V41-page": (512, 528, 512, 512, 16, True),
    "FP4-page": (512, 288, 256, 256, 32, True),
}


def codes(data):
    """e4m3 bytes to numbers, in bf16."""
    if FP8 is not None:
        return data.view(FP8).to(torch.bfloat16)
    return torch.nn.functional.embedding(data.int(), _table("e4m3"))[..., 0]


_tables = {}


def _table(which):
    """Numbers of each byte: one e4m3 number, or two of e2m1."""
    if which not in _tables:
        if which == "e4m3":
            numbers = support.E4M3[:, None]
        else:
            byte = support.np.arange(256)
            numbers = support.np.stack([support.E2M1[byte & 15], support.E2M1[byte >> 4]], 1)
        _tables[which] = torch.tensor(numbers, dtype=torch.bfloat16, device=DEVICE)
    return _tables[which]


def powers(data):
    """e8m0 bytes from 1 to 254 to numbers, in bf16."""
    return (data.int() << 23).view(torch.float32).to(torch.bfloat16)


class Cache:
    """A quantised cache by its bytes."""

    def __init__(self, cache, layout, page):
        d, token, self.code_bytes, row, scale, by_page = LAYOUTS[layout]
        self.layout, self.page, self.d = layout, page, d
        self.tensor, raw, pages = cache, cache.view(torch.uint8), cache.shape[0]
        stride = raw.stride(0)
        self.whole = raw.as_strided((pages, stride), (stride, 1))
        self.rows = raw.as_strided((pages, page, row), (stride, row, 1))
        if by_page:
            self.scales = raw.as_strided((pages, page, scale), (stride, scale, 1), page * row)
        else:
            first = self.code_bytes
            self.scales = self.rows[..., first : first + scale]
        self.used = page * token

    def poison(self, keep):
        """NaN wherever a token that is not kept, or no token at all, lies. keep: [pages * page] bool."""
        drop = ~keep.reshape(-1, self.page, 1)
        self.rows.masked_fill_(drop, 255)
        self.scales.masked_fill_(drop, 255)
        self.whole[:, self.used :] = 255

    def take(self, slots):
        """The tokens of slots [..], in REAL; zeros where a slot is negative."""
        at = slots.clamp(min=0).long()
        page, row = torch.div(at, self.page, rounding_mode="floor"), at % self.page
        data, scale = self.rows[page, row], self.scales[page, row]
        part = data[..., : self.code_bytes]
        if self.layout.startswith("FP4"):
            number = torch.nn.functional.embedding(part.int(), _table("e2m1")).flatten(-2)
            number = _scaled(number, codes(scale))
        elif self.layout == "V32":
            scale = scale.contiguous().view(torch.float32)
            number = _scaled(codes(part).float(), scale).to(torch.bfloat16)
        else:
            number = _scaled(codes(part), powers(scale[..., :7] if self.layout == "V4" else scale))
        if self.d != number.shape[-1]:
            rope = data[..., -128:].contiguous().view(torch.bfloat16)
            number = torch.cat([number, rope], -1)
        return number.to(REAL).masked_fill_((slots < 0)[..., None], 0)


def _scaled(number, scale):
    """Groups of equal size times their scale."""
    return (number.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


# ---- scopes of sparse decode -------------------------------------------------------------------------------


class Scope:
    """One cache and the index rows into it: random subsets, -1 where a request has too few tokens, NaN wherever nothing
    is attended."""

    def __init__(
        self, draw, layout, lengths, s_q, topk, page, with_lengths=False, invalid=False, old=False, fixed=None
    ):
        from flash_mla import quant

        b, d = len(lengths), LAYOUTS[layout][0]
        self.layout, self.page, self.topk = layout, page, topk
        count = torch.div(lengths + page - 1, page, rounding_mode="floor")
        first = (count.cumsum(0) - count).to(DEVICE)
        pages = int(count.sum()) + 1
        order = draw.permutation(pages)
        tokens = draw.normal(pages * page, d, dtype=torch.bfloat16).mul_(0.1).clamp_(-1, 1)
        tokens = tokens.reshape(pages, page, 1, d)
        member = {"V32": "V32_FP8Sparse", "V4": "V4_FP8Sparse", "V41": "V41_FP8Sparse", "FP4": "V41_FP4Sparse"}
        names = {**member, "V41-page": "V41_FP8Sparse_Page", "FP4-page": "V41_FP4Sparse_Page"}
        kind = 512 if old else quant.KVCacheLayout[names[layout]]  # 512: the first quantiser, by its signature
        self.cache = Cache(quant.quantize_k_cache(tokens, kind), layout, page)
        del tokens
        self.position = self._positions(draw, lengths.to(DEVICE), s_q, topk, invalid, old)
        at = self.position.clamp(min=0)
        which = torch.div(at, page, rounding_mode="floor") + first[:, None, None]
        slot = order[which] * page + at % page
        self.slots = torch.where(self.position < 0, slot.new_full((), -1), slot).int()
        self.first, self.order, self.tokens = first, order, lengths.to(DEVICE)
        self.longest = max(int(lengths.max()), 1)
        self.lengths = fixed if fixed is not None else draw.integers(topk + 1, b) if with_lengths else None
        self.attended = self.slots
        if self.lengths is not None:
            past = torch.arange(topk, device=DEVICE) >= self.lengths[:, None, None]
            self.attended = self.slots.masked_fill(past, -1)
        keep = torch.zeros(pages * page + 1, dtype=torch.bool, device=DEVICE)
        keep[self.attended.flatten().long()] = True  # -1 is the spare one at the end
        self.cache.poison(keep[:-1])

    def all_tokens(self, part):
        """Every token of some requests, [requests, longest, d]; zeros past a request's end."""
        position = torch.arange(self.longest, device=DEVICE)
        page = torch.div(position, self.page, rounding_mode="floor") + self.first[part, None]
        slot = self.order[page.clamp(max=len(self.order) - 1)] * self.page + position % self.page
        read = slot.masked_fill(position >= self.tokens[part, None], -1)
        return self.cache.take(read).masked_fill_((self.counts(part).sum(1) == 0)[..., None], 0)

    def counts(self, part):
        """How often the queries of some requests attend each token, [requests, s_q, longest]."""
        at = self.position[part].masked_fill(self.attended[part] < 0, self.longest)
        counts = torch.zeros(*at.shape[:2], self.longest + 1, dtype=REAL, device=DEVICE)
        return counts.scatter_add_(2, at, torch.ones_like(at, dtype=REAL))[..., : self.longest]

    @staticmethod
    def _positions(draw, lengths, s_q, topk, invalid, shuffled):
        b, longest = len(lengths), max(int(lengths.max()), 1)
        position = torch.full((b, s_q, topk), -1, dtype=torch.int64, device=DEVICE)
        if invalid:
            return position
        taken = min(topk, longest)
        rank = draw.uniform(b, s_q, longest)
        rank.masked_fill_(torch.arange(longest, device=DEVICE) >= lengths[:, None, None], 2)
        rank, found = rank.topk(taken, largest=False)
        position[..., :taken] = found.masked_fill(rank == 2, -1)
        return position.gather(-1, draw.uniform(b, s_q, topk).argsort(-1)) if shuffled else position


def attend_scopes(q, scopes, scale, sink=None):
    """Reference of sparse decode. q [b, s_q, h, d], scale a number or [b, s_q, h, 1]. Returns out, lse, largest logit.
    Tokens are fetched slot by slot, or, where the queries of a request attend more slots than it has tokens, once per
    request and weighed by how often each is attended."""
    b, s_q, heads, d = q.shape
    width = sum(s.topk for s in scopes)
    tokens = sum(s.longest for s in scopes)
    by_request = s_q * width > 2 * tokens
    each = tokens * (d + 3 * s_q * heads) if by_request else s_q * width * (d + 2 * heads)
    parts = []
    for part in chunks(b, each):
        mine = scale[part] if isinstance(scale, torch.Tensor) else scale
        if by_request:
            k = torch.cat([s.all_tokens(part) for s in scopes], 1)
            weight = torch.cat([s.counts(part) for s in scopes], 2)
        else:
            k = torch.cat([s.cache.take(s.attended[part]) for s in scopes], 2)
            weight = torch.cat([s.attended[part] >= 0 for s in scopes], 2)
        parts.append(attend(q[part].to(REAL), k, weight[:, :, None], mine, sink))
    return [torch.cat(x) for x in zip(*parts)]
