# SPDX-License-Identifier: MIT
"""What the tests share: numbers as bits, attention in float64, caches decoded independently, arrays of every kind."""

import importlib
import json
import os
import pathlib
import struct

import numpy as np

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "data/golden"
INF = float("inf")

# ---- numbers -----------------------------------------------------------------------------------------------


def bf16_bits(x):
    """float array to bf16 bits, round to nearest even, NaN kept."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(np.asarray(x, np.float32)), np.uint16(0x7FC0), rounded)


def bf16_value(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def bf16(x):
    """x rounded to bf16, as float32."""
    return bf16_value(bf16_bits(x))


def _e4m3_table():
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0), mantissa * 2.0**-9)
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code & 128, -value, value)


E4M3 = _e4m3_table()
E8M0 = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256) - 127.0))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

# ---- caches ------------------------------------------------------------------------------------------------


def _codes_fp4(data):
    return E2M1[np.stack([data & 15, data >> 4], -1).reshape(*data.shape[:-1], -1)]


def decode_pages(pages, name, page_size):
    """Bytes [num_pages, page bytes] to values [num_pages, P, d], rounded to bf16. Written from docs/formats.md."""
    n, p = len(pages), page_size
    if name == "v32":
        rec = pages[:, : 656 * p].reshape(n, p, 656)
        scale = np.repeat(rec[..., 512:528].copy().view("<f4"), 128, -1)
        rope = bf16_value(rec[..., 528:].copy().view("<u2"))
        return np.concatenate([bf16(E4M3[rec[..., :512]].astype(np.float32) * scale), rope], -1)
    if name == "v4":
        rows = pages[:, : 576 * p].reshape(n, p, 576)
        scale = E8M0[pages[:, 576 * p : 584 * p].reshape(n, p, 8)[..., :7]]
        rope = bf16_value(rows[..., 448:].copy().view("<u2"))
        return np.concatenate([bf16(E4M3[rows[..., :448]] * np.repeat(scale, 64, -1)), rope], -1)
    data_bytes, scale_bytes = (512, 16) if name.startswith("v41") and "fp4" not in name else (256, 32)
    if name.endswith("-page"):
        data = pages[:, : data_bytes * p].reshape(n, p, data_bytes)
        scale = pages[:, data_bytes * p : (data_bytes + scale_bytes) * p].reshape(n, p, scale_bytes)
    else:
        rec = pages[:, : (data_bytes + scale_bytes) * p].reshape(n, p, data_bytes + scale_bytes)
        data, scale = rec[..., :data_bytes], rec[..., data_bytes:]
    if data_bytes == 512:
        return bf16(E4M3[data] * np.repeat(E8M0[scale], 32, -1))
    return bf16(_codes_fp4(data) * np.repeat(E4M3[scale], 16, -1))


FORMATS = {  # name: (d_qk, bytes per token, quant layout member)
    "v32": (576, 656, "V32_FP8Sparse"),
    "v4": (512, 584, "V4_FP8Sparse"),
    "v41": (512, 528, "V41_FP8Sparse"),
    "v41-fp4": (512, 288, "V41_FP4Sparse"),
    "v41-page": (512, 528, "V41_FP8Sparse_Page"),
    "v41-fp4-page": (512, 288, "V41_FP4Sparse_Page"),
}


def random_pages(rng, name, num_pages, page_size, padding=0):
    """A quantised cache of random tokens: (page bytes [num_pages, stride], values [num_pages * P, d])."""
    d, per_token, _ = FORMATS[name]
    pages = rng.integers(0, 256, (num_pages, page_size * per_token + padding), dtype=np.uint8)

    def codes(shape):  # e4m3 without NaN, magnitudes up to 1.875
        return (rng.integers(0, 0x40, shape) | rng.integers(0, 2, shape) << 7).astype(np.uint8)

    def scales(shape):  # around 2^-3
        return rng.integers(122, 126, shape).astype(np.uint8)

    p = page_size
    if name == "v32":
        rec = pages[:, : 656 * p].reshape(num_pages, p, 656)
        rec[..., :512] = codes(rec[..., :512].shape)
        rec[..., 512:528] = (rng.uniform(0.05, 0.3, (num_pages, p, 4)).astype("<f4")).view(np.uint8)
        rec[..., 528:] = bf16_bits(rng.normal(0, 0.3, (num_pages, p, 64))).view(np.uint8)
    elif name == "v4":
        rows = pages[:, : 576 * p].reshape(num_pages, p, 576)
        rows[..., :448] = codes(rows[..., :448].shape)
        rows[..., 448:] = bf16_bits(rng.normal(0, 0.3, (num_pages, p, 64))).view(np.uint8)
        pages[:, 576 * p : 584 * p] = scales((num_pages, 8 * p))
    else:
        fp4 = "fp4" in name
        data_bytes, scale_bytes = (256, 32) if fp4 else (512, 16)
        data = (
            rng.integers(0, 256, (num_pages, p, data_bytes)).astype(np.uint8)
            if fp4
            else codes((num_pages, p, data_bytes))
        )
        scale = (
            rng.integers(0x10, 0x28, (num_pages, p, scale_bytes)).astype(np.uint8)
            if fp4
            else scales((num_pages, p, scale_bytes))
        )
        if name.endswith("-page"):
            pages[:, : data_bytes * p] = data.reshape(num_pages, -1)
            pages[:, data_bytes * p : per_token * p] = scale.reshape(num_pages, -1)
        else:
            pages[:, : per_token * p] = np.concatenate([data, scale], -1).reshape(num_pages, -1)
    return pages, decode_pages(pages, name, p).reshape(-1, d)


def cache_view(kit, pages, page_size, per_token):
    """Page bytes as the four-dimensional tensor [num_pages, P, 1, bytes] that callers pass, padding kept."""
    stride = pages.shape[1]
    return kit.strided(
        kit.bytes(pages), (len(pages), page_size, 1, per_token), (stride, per_token, per_token, 1)
    )


# ---- attention ---------------------------------------------------------------------------------------------


class Row:
    """One row of attention in float64: out, lse, max_logits, and the sizes that tolerances need."""

    def __init__(self, q, keys, d_v, scale, sink=None, values=None):
        q, keys = np.asarray(q, np.float64), np.asarray(keys, np.float64)
        values = keys[:, :d_v] if values is None else np.asarray(values, np.float64)
        if len(keys) == 0:
            self.out, self.lse, self.max_logits = np.zeros(d_v), INF, -INF
            self.weight, self.size = np.zeros(d_v), 0.0
            return
        logits = scale * (keys @ q)
        self.max_logits = logits.max()
        e = np.exp(logits - self.max_logits)
        self.lse = self.max_logits + np.log(e.sum())
        total = e.sum()
        if sink is not None:
            with np.errstate(over="ignore"):
                total = total + np.exp(np.float64(sink) - self.max_logits)
        p = e / total
        self.out, self.weight = p @ values, p @ np.abs(values)
        self.size = abs(scale) * (np.abs(keys) @ np.abs(q)).max()

    def check(self, out, lse, max_logits=None, what="", ulp=2.0**-8):
        """Results within the bounds of docs/numerics.md, for weights rounded to bf16."""
        error = np.abs(out - self.out)
        bound = 1.01 * ulp * np.abs(self.out) + ulp * self.weight + 1e-30
        assert (error <= bound).all(), f"{what}: out off by {(error / bound).max():.3g} bounds"
        for name, got, wanted in (("lse", lse, self.lse), ("max_logits", max_logits, self.max_logits)):
            if got is None:
                continue
            if np.isinf(wanted):
                assert got == wanted, f"{what}: {name} is {got}, not {wanted}"
            else:
                bound = 2.0**-22 * abs(wanted) + 2.0**-19 * self.size + 2.0**-23
                assert abs(got - wanted) <= bound, f"{what}: {name} is {got}, not {wanted}"


def attended(indices, tokens, length=None):
    """The valid entries of an index row."""
    row = np.asarray(indices)[: None if length is None else max(int(length), 0)]
    return row[(row >= 0) & (row < tokens)]


def check_decode(out, lse, q, keys_of, scale, sink=None):
    """Every row of a decode call; keys_of(i, j) gives the tokens that request i's query j attends, [n, d], or per KV
    head [n, h_kv, d]."""
    b, s_q, h_q, _ = q.shape
    for i in range(b):
        for j in range(s_q):
            keys = keys_of(i, j)
            for h in range(h_q):
                mine = keys if keys.ndim == 2 else keys[:, h // (h_q // keys.shape[1])]
                row = Row(q[i, j, h], mine, 512, scale, None if sink is None else sink[h])
                row.check(out[i, j, h], lse[i, h, j], what=f"request {i}, query {j}, head {h}")


# ---- golden files ------------------------------------------------------------------------------------------

_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I32": "<i4", "U8": "u1"}


def golden(name):
    """A safetensors file of tests/data/golden as {name: array}; bf16 as uint16."""
    raw = (GOLDEN / name).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    tensors = {}
    for key, item in json.loads(raw[8 : 8 + size]).items():
        if key != "__metadata__":
            begin, end = item["data_offsets"]
            tensors[key] = (
                np.frombuffer(raw[8 + size + begin : 8 + size + end], _DTYPES[item["dtype"]])
                .reshape(item["shape"])
                .copy()
            )
    return tensors


# ---- arrays of every kind ----------------------------------------------------------------------------------


def torch_or_none():
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


class NumpyKit:
    """NumPy arrays; bf16 as uint16."""

    name = "numpy"
    checks_values = True  # on the host the library looks at lengths, tables and positions before it starts

    def bf16(self, x):
        return bf16_bits(x)

    def bf16_raw(self, bits):
        return np.array(bits, np.uint16)

    def f16(self, x):
        return np.asarray(x, np.float16)

    def f32(self, x):
        return np.array(x, np.float32)

    def i32(self, x):
        return np.array(x, np.int32)

    def bytes(self, x):
        return np.array(x, np.uint8)

    def strided(self, x, shape, strides):
        return np.lib.stride_tricks.as_strided(x, shape, [s * x.itemsize for s in strides])

    def value(self, x):
        """Any result as float64 (bf16, fp16, fp32) or as integers."""
        if x.dtype.name in ("uint16", "bfloat16"):
            return bf16_value(x.view(np.uint16)).astype(np.float64)
        if x.dtype.name.startswith("float8"):
            return x.view(np.uint8)
        return x.astype(np.float64) if x.dtype.kind == "f" else x

    def raw(self, x):
        """A result's bits."""
        return np.ascontiguousarray(x).view(np.uint8)

    def strides(self, x):
        return tuple(s // x.itemsize for s in x.strides)


class MlDtypesKit(NumpyKit):
    """NumPy arrays with the types of ml_dtypes."""

    name = "ml_dtypes"

    def __init__(self, module):
        self.module = module

    def bf16(self, x):
        return bf16_bits(x).view(self.module.bfloat16)

    def bf16_raw(self, bits):
        return np.array(bits, np.uint16).view(self.module.bfloat16)

    def bytes(self, x):
        return np.array(x, np.uint8).view(self.module.float8_e4m3fn)


class TorchKit:
    """torch tensors; caches as e4m3 where torch has it."""

    def __init__(self, torch, device="cpu"):
        self.torch, self.device = torch, device
        self.name = "torch" if device == "cpu" else device
        self.checks_values = device == "cpu"

    def _from(self, x):
        return self.torch.from_numpy(x).to(self.device)

    def bf16_raw(self, bits):
        return self._from(np.array(bits, np.uint16).view(np.int16)).view(self.torch.bfloat16)

    def bf16(self, x):
        return self.bf16_raw(bf16_bits(x))

    def f16(self, x):
        return self._from(np.array(x, np.float16))

    def f32(self, x):
        return self._from(np.array(x, np.float32))

    def i32(self, x):
        return self._from(np.array(x, np.int32))

    def bytes(self, x):
        t = self._from(np.array(x, np.uint8))
        return t.view(self.torch.float8_e4m3fn) if hasattr(self.torch, "float8_e4m3fn") else t

    def strided(self, x, shape, strides):
        return x.as_strided(shape, strides)

    def value(self, x):
        torch, x = self.torch, x.detach().cpu()
        if x.dtype in (torch.bfloat16, torch.float16, torch.float32):
            return x.to(torch.float64).numpy()
        if x.dtype == torch.int32:
            return x.numpy()
        return x.view(torch.uint8).numpy()

    def raw(self, x):
        torch, x = self.torch, x.detach().cpu().contiguous()
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
        return x.view(whole).numpy().view(np.uint8)

    def strides(self, x):
        return tuple(x.stride())


KITS = {"numpy": NumpyKit()}
try:
    KITS["ml_dtypes"] = MlDtypesKit(importlib.import_module("ml_dtypes"))
except ImportError:
    pass
if torch_or_none() is not None:
    KITS["torch"] = TorchKit(torch_or_none())
    if os.environ.get("FLASHMLA_TEST_CUDA"):
        KITS["cuda"] = TorchKit(torch_or_none(), "cuda")


class HostDLPack:
    """Somebody else's array: nothing but DLPack, over a NumPy array (bf16 by way of torch, whose DLPack has it)."""

    def __init__(self, exporter):
        self.exporter = exporter

    def __dlpack__(self, **keywords):
        return self.exporter.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.exporter.__dlpack_device__()


class DenseCase:
    """Inputs of a dense decode call over a bf16 or fp16 cache whose unused memory is NaN."""

    def __init__(self, kit, seed=0, lengths=(37, 0, 130), s_q=2, h_q=4, h_kv=2, d=576, page=16, dtype="bf16"):
        rng = np.random.default_rng(seed)
        self.b, self.s_q, self.h_q, self.page, self.lengths = len(lengths), s_q, h_q, page, lengths
        make = kit.bf16 if dtype == "bf16" else kit.f16
        rounded = bf16 if dtype == "bf16" else lambda x: np.asarray(x, np.float16).astype(np.float32)
        self.q_value = rounded(rng.normal(size=(self.b, s_q, h_q, d)) / 3)
        max_pages = max(-(-n // page) for n in lengths) + 2
        num_pages = sum(-(-n // page) for n in lengths) + 3
        order = iter(rng.permutation(num_pages))
        table = np.full((self.b, max_pages), 2147480000, np.int32)
        pool = np.full((num_pages, page, h_kv, d), np.nan, np.float32)
        self.keys = []
        for i, n in enumerate(lengths):
            keys = rounded(rng.normal(size=(n, h_kv, d)) / 3)
            self.keys.append(keys)
            for j in range(-(-n // page)):
                table[i, j] = next(order)
                part = keys[j * page : (j + 1) * page]
                pool[table[i, j], : len(part)] = part
        self.q, self.cache = make(self.q_value), make(pool)
        self.table, self.seqlens = kit.i32(table), kit.i32(lengths)

    def check(self, kit, out, lse, causal=False, scale=None, sink=None):
        scale = self.q_value.shape[-1] ** -0.5 if scale is None else scale

        def keys_of(i, j):
            n = self.lengths[i] - self.s_q + j + 1 if causal else self.lengths[i]
            return self.keys[i][: max(n, 0)]

        check_decode(kit.value(out), kit.value(lse), self.q_value, keys_of, scale, sink)


class SparseCase:
    """Inputs of a sparse decode call: main cache, optional extra cache, invalid entries, lengths, sink."""

    def __init__(
        self,
        kit,
        main="v32",
        extra=None,
        seed=0,
        b=2,
        s_q=2,
        h_q=3,
        topk=24,
        extra_topk=10,
        page=8,
        lengths=True,
        sink=True,
        padding=0,
    ):
        rng = np.random.default_rng(seed)
        self.d = FORMATS[main][0]
        self.b, self.s_q, self.h_q, self.main, self.extra = b, s_q, h_q, main, extra
        self.q_value = bf16(rng.normal(size=(b, s_q, h_q, self.d)) / 2)
        self.q = kit.bf16(self.q_value)
        pages, self.tokens = random_pages(rng, main, 5, page, padding)
        self.cache = cache_view(kit, pages, page, FORMATS[main][1])
        self.indices = self._indices(rng, len(self.tokens), topk)
        self.length = rng.integers(0, topk + 1, b) if lengths else None
        self.sink = rng.normal(size=h_q) if sink else None
        if sink:
            self.sink[0] = -INF
        self.keywords = {"indices": kit.i32(self.indices)}
        if lengths:
            self.keywords["topk_length"] = kit.i32(self.length)
        if sink:
            self.keywords["attn_sink"] = kit.f32(self.sink)
        if extra is None:
            return
        pages, self.extra_tokens = random_pages(rng, extra, 4, page + 1, padding)
        self.extra_indices = self._indices(rng, len(self.extra_tokens), extra_topk)
        self.extra_length = rng.integers(0, extra_topk + 1, b) if lengths else None
        self.keywords["extra_k_cache"] = cache_view(kit, pages, page + 1, FORMATS[extra][1])
        self.keywords["extra_indices_in_kvcache"] = kit.i32(self.extra_indices)
        if lengths:
            self.keywords["extra_topk_length"] = kit.i32(self.extra_length)

    def _indices(self, rng, tokens, topk):
        indices = rng.integers(0, tokens, (self.b, self.s_q, topk))
        indices[rng.random(indices.shape) < 0.2] = -1
        indices[..., 0] = tokens - 1
        indices[..., 1] = tokens
        return indices.astype(np.int32)

    def keys_of(self, i, j):
        length = None if self.length is None else self.length[i]
        keys = self.tokens[attended(self.indices[i, j], len(self.tokens), length)]
        if self.extra is None:
            return keys
        length = None if self.extra_length is None else self.extra_length[i]
        more = self.extra_tokens[attended(self.extra_indices[i, j], len(self.extra_tokens), length)]
        return np.concatenate([keys, more])

    def check(self, kit, out, lse, scale=None):
        check_decode(
            kit.value(out),
            kit.value(lse),
            self.q_value,
            self.keys_of,
            self.d**-0.5 if scale is None else scale,
            self.sink,
        )
