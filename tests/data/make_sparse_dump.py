# SPDX-License-Identifier: MIT
"""Writes a file of attention cases for `flashmla run`, whose expected results are float64 attention in numpy.

usage: make_sparse_dump.py OUT [SEED]

The caches are made from random bytes and decoded here, byte by byte as docs/formats.md says, without the library: an
outside truth for readers and kernels. Every token that no row attends is NaN; indices repeat, and some are negative or
beyond the pool. Keys are about 0.1, as in the published tests, to whose data the published tolerances belong. Each
case has its settings as metadata, so that `flashmla run OPERATION --in OUT --prefix CASE. --compare OUT` needs nothing
else; `cases` in the metadata lists them as operation:prefix.
"""
import json
import struct
import sys

import numpy as np


def f32_to_bf16(x):
    """Bits, rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_to_f64(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3(codes):
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float64)
    value = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 512)
    value = np.where((codes & 0x7F) == 0x7F, np.nan, value)
    return np.where(codes >> 7, -value, value)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Cache:
    """Random tokens of a format: `pages` as bytes, `values` as attention sees them (bf16 numbers in float64)."""

    def __init__(self, rng, name, num_pages, page_size, pad):
        tokens = num_pages * page_size
        self.name, self.page_size = name, page_size
        rows, scale_rows, self.values = getattr(self, name.replace("-page", "").replace("-", "_"))(rng, tokens)
        width = rows.shape[1] + scale_rows.shape[1]
        self.pages = rng.integers(0, 256, (num_pages, page_size * width + pad), np.uint8)  # padding is noise
        for page in range(num_pages):
            mine = slice(page * page_size, (page + 1) * page_size)
            if name == "v4" or name.endswith("-page"):
                record = np.concatenate([rows[mine].ravel(), scale_rows[mine].ravel()])
            else:
                record = np.concatenate([rows[mine], scale_rows[mine]], axis=1).ravel()
            self.pages[page, :record.size] = record
        self.width, self.data_width = width, rows.shape[1]

    @staticmethod
    def codes(rng, shape):
        codes = rng.integers(0, 256, shape, np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x38
        return codes

    @staticmethod
    def rope(rng, tokens):
        bits = f32_to_bf16(rng.normal(0, 0.1, (tokens, 64)))
        return bits.view(np.uint8).reshape(tokens, 128), bf16_to_f64(bits)

    def v32(self, rng, tokens):
        codes = self.codes(rng, (tokens, 512))
        scale = (rng.uniform(0.5, 2, (tokens, 4)) / 2048).astype(np.float32)  # not powers of two
        rope, rope_values = self.rope(rng, tokens)
        product = e4m3(codes).astype(np.float32) * np.repeat(scale, 128, 1)
        values = np.concatenate([bf16_to_f64(f32_to_bf16(product)), rope_values], 1)
        return np.concatenate([codes, scale.view(np.uint8), rope], 1), np.empty((tokens, 0), np.uint8), values

    def v4(self, rng, tokens):
        codes = self.codes(rng, (tokens, 448))
        scale = rng.integers(114, 118, (tokens, 8)).astype(np.uint8)  # the last is the pad byte
        rope, rope_values = self.rope(rng, tokens)
        values = e4m3(codes) * np.repeat(2.0 ** (scale[:, :7].astype(np.float64) - 127), 64, 1)
        return np.concatenate([codes, rope], 1), scale, np.concatenate([values, rope_values], 1)

    def v41(self, rng, tokens):
        codes = self.codes(rng, (tokens, 512))
        scale = rng.integers(114, 118, (tokens, 16)).astype(np.uint8)
        return codes, scale, e4m3(codes) * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, 1)

    def v41_fp4(self, rng, tokens):
        codes = rng.integers(0, 256, (tokens, 256), np.uint8)
        scale = rng.integers(0x01, 0x18, (tokens, 32)).astype(np.uint8)
        numbers = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], 2).reshape(tokens, 512)
        return codes, scale, numbers * np.repeat(e4m3(scale), 16, 1)

    def poison(self, attended):
        """Every byte of a token that nobody attends becomes 0xFF: NaN in codes, scales and bf16 alike (not in e2m1)."""
        for token in set(range(len(self.values))) - set(attended):
            page, slot = self.pages[token // self.page_size], token % self.page_size
            if self.name == "v4" or self.name.endswith("-page"):
                page[slot * self.data_width:(slot + 1) * self.data_width] = 0xFF
                scales = self.width - self.data_width
                base = self.page_size * self.data_width + slot * scales
                page[base:base + scales] = 0xFF
            else:
                page[slot * self.width:(slot + 1) * self.width] = 0xFF


def draw_indices(rng, shape, tokens):
    """Mostly valid, some repeated, some not in the pool. Half of the pool is never drawn."""
    drawn = rng.integers(0, tokens // 2, shape) * 2
    strange = rng.choice(np.array([-1, -2147483648, tokens, 2147483647]), shape)
    return np.where(rng.random(shape) < 0.2, strange, drawn).astype(np.int32)


def attend(q, keys, scale, sink):
    """One query head over its tokens: out, lse, largest logit."""
    if len(keys) == 0:
        return np.zeros(512), -np.inf, -np.inf
    logits = scale * (keys @ q)
    top = logits.max()
    weights = np.exp(logits - top)
    lse = top + np.log(weights.sum())
    with np.errstate(over="ignore"):
        return weights @ keys[:, :512] / weights.sum() / (1 + np.exp(sink - lse)), lse, top


class File:
    def __init__(self):
        self.header, self.blobs, self.size = {"__metadata__": {}}, [], 0

    def add(self, name, dtype, array):
        blob = np.ascontiguousarray(array).tobytes()
        self.header[name] = {"dtype": dtype, "shape": list(array.shape),
                             "data_offsets": [self.size, self.size + len(blob)]}
        self.blobs.append(blob)
        self.size += len(blob)

    def meta(self, **pairs):
        self.header["__metadata__"].update({key: str(value) for key, value in pairs.items()})

    def write(self, path):
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text + b"".join(self.blobs))


def decode_case(file, rng, case, formats, b, s_q, h_q, topk, page_sizes):
    d_qk = 576 if formats[0] == "v32" else 512
    scale = np.float32(d_qk ** -0.5 * 1.25)
    q = f32_to_bf16(rng.normal(0, 4, (b, s_q, h_q, d_qk)))
    sink = rng.choice(np.array([-np.inf, np.inf, 0.0, 1.5, -4.0]), h_q).astype(np.float32)
    scopes = []
    for i, name in enumerate(formats):
        cache = Cache(rng, name, 5, page_sizes[i], 48 * i)
        indices = draw_indices(rng, (b, s_q, topk), len(cache.values))
        lengths = rng.integers(0, topk + 1, b).astype(np.int32)
        scopes.append((cache, indices, lengths))
    scopes[0][1][-1, -1] = -1  # one lonely row, unless the extra scope has something
    out = np.zeros((b, s_q, h_q, 512))
    lse, top = np.zeros((b, h_q, s_q)), np.zeros((b, h_q, s_q))
    attended = [set() for _ in scopes]
    for r in range(b):
        for j in range(s_q):
            keys = []
            for seen, (cache, indices, lengths) in zip(attended, scopes):
                row = [t for t in indices[r, j, :lengths[r]] if 0 <= t < len(cache.values)]
                seen.update(row)
                keys.append(cache.values[row])
            for h in range(h_q):
                row_q = bf16_to_f64(q[r, j, h])
                out[r, j, h], lse[r, h, j], top[r, h, j] = attend(row_q, np.concatenate(keys), float(scale), sink[h])
    for prefix, seen, (cache, indices, lengths) in zip(("", "extra_"), attended, scopes):
        cache.poison(seen)
        file.add(f"{case}.{prefix}kv_page_bytes", "U8", cache.pages)
        file.add(f"{case}.{prefix}indices", "I32", indices)
        file.add(f"{case}.{prefix}topk_length", "I32", lengths)
        file.meta(**{f"{case}.{prefix}kv_format": cache.name, f"{case}.{prefix}page_size": cache.page_size})
    file.add(f"{case}.q", "BF16", q)
    file.add(f"{case}.attn_sink", "F32", sink)
    file.add(f"{case}.softmax_scale", "F32", np.array([scale]))
    for name, array in (("out", out), ("lse", lse), ("max_logits", top)):
        file.add(f"{case}.{name}", "F64", array)
    return f"sparse_decode:{case}."


def prefill_case(file, rng, case, s_q, h_q, s_kv, topk):
    q, kv = f32_to_bf16(rng.normal(0, 4, (s_q, h_q, 576))), f32_to_bf16(rng.normal(0, 0.1, (s_kv, 1, 576)))
    indices, lengths = draw_indices(rng, (s_q, 1, topk), s_kv), rng.integers(0, topk + 1, s_q).astype(np.int32)
    out, lse, top = np.zeros((s_q, h_q, 512)), np.zeros((s_q, h_q)), np.zeros((s_q, h_q))
    seen = set()
    for j in range(s_q):
        row = [t for t in indices[j, 0, :lengths[j]] if 0 <= t < s_kv]
        seen.update(row)
        for h in range(h_q):
            keys = bf16_to_f64(kv[row, 0])
            out[j, h], lse[j, h], top[j, h] = attend(bf16_to_f64(q[j, h]), keys, 576 ** -0.5, -np.inf)
    kv[sorted(set(range(s_kv)) - seen)] = 0x7FC0
    for name, dtype, array in (("q", "BF16", q), ("kv", "BF16", kv), ("indices", "I32", indices),
                               ("topk_length", "I32", lengths), ("out", "F64", out), ("lse", "F64", lse),
                               ("max_logits", "F64", top)):
        file.add(f"{case}.{name}", dtype, array)
    return f"sparse_prefill:{case}."


def main(path, seed=1):
    rng, file = np.random.default_rng(int(seed)), File()
    cases = [
        decode_case(file, rng, "v32", ["v32"], 2, 2, 3, 70, [7]),
        decode_case(file, rng, "v32_extra", ["v32", "v32"], 2, 1, 16, 33, [64, 2]),
        decode_case(file, rng, "v4", ["v4"], 3, 1, 5, 64, [13]),
        decode_case(file, rng, "v4_extra", ["v4", "v4"], 2, 2, 8, 40, [16, 1]),
        decode_case(file, rng, "v41", ["v41"], 2, 1, 17, 100, [31]),
        decode_case(file, rng, "v41_page", ["v41-page", "v41-page"], 2, 1, 4, 50, [8, 5]),
        decode_case(file, rng, "v41_fp4", ["v41", "v41-fp4"], 2, 2, 4, 50, [8, 5]),
        decode_case(file, rng, "v41_fp4_page", ["v41-page", "v41-fp4-page"], 2, 1, 6, 50, [8, 64]),
        prefill_case(file, rng, "prefill", 5, 4, 90, 60),
    ]
    file.meta(cases=" ".join(cases), origin="numpy float64, make_sparse_dump.py")
    file.write(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
