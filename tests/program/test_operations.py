# SPDX-License-Identifier: MIT
"""Every operation through `flashmla run`, against arithmetic written out in Python."""
import itertools
import math
import random

from program import ProgramTest, Tensor, bf16, main, make, st_read, tiers

INF = float("inf")


def randoms(seed, n, scale=1.0):
    generator = random.Random(seed)
    return [bf16(scale * (2 * generator.random() - 1)) for _ in range(n)]


def words_of(byte_rows):
    """Rows of bytes as I32 words, little-endian."""
    return Tensor("I32", [len(byte_rows), len(byte_rows[0]) // 4], b"".join(bytes(row) for row in byte_rows))


def attend(q, keys, values, scale, sink=None):
    """One row: (out, lse)."""
    logits = [scale * sum(a * b for a, b in zip(q, k)) for k in keys]
    if not logits:
        return [0.0] * len(values), -INF
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    lse = top + math.log(sum(weights))
    total = sum(weights) + (0 if sink is None else math.exp(sink - top))
    return [sum(w * v[d] for w, v in zip(weights, values)) / total for d in range(len(values[0]))], lse


class Attention(ProgramTest):
    def test_dense_decode_of_a_cache_without_block_table(self):
        """b 2, s_q 2, h_q 3, d 64, pages of 5 tokens; causal; lengths 7 and 1; a sink; fp32 out."""
        b, s_q, h, d, pages, size = 2, 2, 3, 64, 4, 5
        q, kv = randoms(1, b * s_q * h * d), randoms(2, pages * size * d)
        lengths, sinks, scale = [7, 1], [0.5, -INF, 1.0], 0.25
        token = lambda r, t: kv[((r * pages // b) * size + t) * d:][:d]
        out, lse = [], [0.0] * (b * h * s_q)
        for r, j, head in itertools.product(range(b), range(s_q), range(h)):
            row = q[((r * s_q + j) * h + head) * d:][:d]
            keys = [token(r, t) for t in range(max(0, lengths[r] - s_q + j + 1))]
            o, lse[(r * h + head) * s_q + j] = attend(row, keys, [k[:32] for k in keys], scale, sinks[head])
            out += o if keys else [0.0] * 32
        for tier in tiers():
            result = self.results("dense_decode", {
                "q": make("BF16", [b, s_q, h, d], q), "kv_cache": make("BF16", [pages, size, 1, d], kv),
                "cache_seqlens": make("I32", [b], lengths), "attn_sink": make("F32", [h], sinks),
                "softmax_scale": make("F32", [1], [scale]), "causal": make("I32", [1], [1])},
                "--d-v", 32, "--out-dtype", "f32", "--isa", tier)
            self.assertClose(result["out"].numbers(), out, 1e-2, 1e-2)
            self.assertClose(result["lse"].numbers(), lse, 1e-5, 1e-5)
            self.assertEqual((result["out"].shape, result["lse"].shape), ([b, s_q, h, 32], [b, h, s_q]))

    def test_sparse_decode_ragged(self):
        """Query tokens 1 and 2 of two requests; duplicate, negative and far indices."""
        h, d = 2, 64
        q, kv = randoms(3, 3 * h * d), randoms(4, 6 * d)
        indices = [[0, 5, -1], [5, 5, 6], [-1, 1 << 30, -7]]
        out, lse = [], [[0.0] * 3 for _ in range(h)]
        for token, head in itertools.product(range(3), range(h)):
            keys = [kv[i * d:][:d] for i in indices[token] if 0 <= i < 6]
            o, lse[head][token] = attend(q[(token * h + head) * d:][:d], keys, keys, 1.0)
            out += o if keys else [0.0] * d
        result = self.results("sparse_decode", {
            "q": make("BF16", [3, h, d], q), "kv": make("BF16", [3, 2, d], kv),
            "indices": make("I32", [3, 3], sum(indices, [])), "cu_seqlens_q": make("I32", [3], [0, 1, 3])},
            "--softmax-scale", 1, "--out-dtype", "f32")
        self.assertClose(result["out"].numbers(), out, 1e-2, 1e-2)
        self.assertClose(result["lse"].numbers(), sum(lse, []), 1e-5, 1e-5)

    def mha(self, causal):
        h, h_kv, d, d_v, n_q, n_kv = 2, 1, 16, 8, 3, 4
        q, k, v = randoms(5, n_q * h * d), randoms(6, n_kv * h_kv * d), randoms(7, n_kv * h_kv * d_v)
        cu_q, cu_kv, scale = [0, 2, 3], [0, 3, 4], 0.5
        rows, out, lse = [], [], []
        for r in range(2):
            s_q, s_k = cu_q[r + 1] - cu_q[r], cu_kv[r + 1] - cu_kv[r]
            for j, head in itertools.product(range(s_q), range(h)):
                seen = range(cu_kv[r], cu_kv[r] + (max(0, s_k - s_q + j + 1) if causal else s_k))
                row = q[((cu_q[r] + j) * h + head) * d:][:d]
                o, l = attend(row, [k[t * d:][:d] for t in seen], [v[t * d_v:][:d_v] for t in seen], scale)
                rows.append((row, seen, o, l))
                out += o
                lse.append(l)
        tensors = {
            "q": make("BF16", [n_q, h, d], q), "k": make("BF16", [n_kv, h_kv, d], k),
            "v": make("BF16", [n_kv, h_kv, d_v], v), "cu_seqlens_q": make("I32", [3], cu_q),
            "cu_seqlens_kv": make("I32", [3], cu_kv)}
        return tensors, rows, out, lse, (q, k, v, h, d, d_v, scale)

    def test_mha_forward(self):
        for causal in (0, 1):
            tensors, _, out, lse, _ = self.mha(causal)
            for tier in tiers():
                result = self.results("mha_forward", tensors, "--causal", causal, "--softmax-scale", 0.5, "--isa", tier)
                self.assertClose(result["out"].numbers(), out, 1e-2, 1e-2)
                self.assertClose(result["lse"].numbers(), lse, 1e-5, 1e-5)

    def test_mha_backward(self):
        tensors, rows, out, lse, (q, k, v, h, d, d_v, scale) = self.mha(1)
        dout = randoms(8, len(out))
        dq, dk, dv = [0.0] * len(q), [0.0] * len(k), [0.0] * len(v)
        for i, (row, seen, o, l) in enumerate(rows):
            g = dout[i * d_v:][:d_v]
            delta = sum(a * b for a, b in zip(g, o))
            for t in seen:
                p = math.exp(scale * sum(a * b for a, b in zip(row, k[t * d:][:d])) - l)
                ds = scale * p * (sum(a * b for a, b in zip(g, v[t * d_v:][:d_v])) - delta)
                for x in range(d_v):
                    dv[t * d_v + x] += p * g[x]
                for x in range(d):
                    dq[i * d + x] += ds * k[t * d + x]
                    dk[t * d + x] += ds * row[x]
        tensors.update(out=make("BF16", [3, h, d_v], out), lse=make("F32", [3, h], lse),
                       dout=make("BF16", [3, h, d_v], dout))
        result = self.results("mha_backward", tensors, "--causal", 1, "--softmax-scale", scale)
        for name, wanted in (("dq", dq), ("dk", dk), ("dv", dv)):
            self.assertClose(result[name].numbers(), wanted, 2e-2, 2e-2)


class Fused(ProgramTest):
    """s_q 3, two heads in one group, pages of 2 tokens."""
    S, H, D, TOKENS = 3, 2, 512, 8

    def tensors(self):
        positions = [0, 2, 1]
        angles = [[(p + 1) / 10000 ** (i / 32) for i in range(32)] for p in range(3)]
        table = sum(([math.cos(a) for a in row] + [math.sin(a) for a in row] for row in angles), [])
        return {
            "q": make("BF16", [self.S, self.H, self.D], randoms(9, self.S * self.H * self.D)),
            "indices": make("I32", [self.S, 4], [0, 3, -1, 7, 2, 2, 99, 5, -1, -1, -1, -1]),
            "token_positions": make("I32", [self.S], positions),
            "cos_sin_cache": make("F32", [3, 64], table),
            "attn_sink": make("F32", [self.H], [0.25, -INF])}, angles, positions

    def reference(self, kv, indices, layout):
        """The published steps, for q with its norm."""
        tensors, angles, positions = self.tensors()
        stored = tensors["q"].numbers()
        out, lse = [], []
        for s, head in itertools.product(range(self.S), range(self.H)):
            base = s * self.H * self.D
            at = {"plain": lambda d: base + head * self.D + d,
                  "permuted": lambda d: base + d // 16 * self.H * 16 + head * 16 + d % 16}[layout]
            q = [stored[at(d)] for d in range(self.D)]
            rho = 1 / math.sqrt(sum(x * x for x in q) / self.D + 1e-4)
            turn = angles[positions[s]]
            for i, a in enumerate(turn):
                x, y = q[448 + 2 * i], q[449 + 2 * i]
                q[448 + 2 * i] = bf16(x * math.cos(a) - y * math.sin(a))
                q[449 + 2 * i] = bf16(x * math.sin(a) + y * math.cos(a))
            keys = [kv[i * self.D:][:self.D] for i in indices[s * 4:][:4] if 0 <= i < self.TOKENS]
            o, l = attend(q, keys, keys, 0.05 * rho, (0.25, -INF)[head])
            o = o if keys else [0.0] * self.D
            for i, a in enumerate(turn):
                x, y = o[448 + 2 * i], o[449 + 2 * i]
                o[448 + 2 * i], o[449 + 2 * i] = x * math.cos(a) + y * math.sin(a), y * math.cos(a) - x * math.sin(a)
            out += o
            lse.append(l)
        return out, lse

    def test_fused_prefill(self):
        kv = randoms(10, self.TOKENS * self.D)
        for layout in ("plain", "permuted"):
            tensors, _, _ = self.tensors()
            out, lse = self.reference(kv, tensors["indices"].numbers(), layout)
            tensors["kv"] = make("BF16", [self.TOKENS, 1, self.D], kv)
            for tier in tiers():
                result = self.results("fused_prefill", tensors, "--softmax-scale", 0.05, "--set", "q_norm=1", "--set",
                                      f"q_layout={layout}", "--isa", tier)
                self.assertClose(result["out"].numbers(), out, 2e-3, 0.07)
                self.assertClose(result["lse"].numbers(), lse, 1e-5, 1e-4)
                self.assertEqual(result["out_fp8"].shape, [self.S, 1, self.H * self.D])
                self.assertEqual(result["out_scale"].shape, [1, self.H * self.D // 128, 4])
                self.assertEqual(result["out_scale"].numbers()[3::4], [0] * (self.H * self.D // 128))

    def test_fused_decode_equals_fused_prefill_on_the_same_tokens(self):
        """Bit for bit, over a V4.1 cache and the numbers that it decodes to."""
        source = self.file({"src": make("BF16", [self.TOKENS, self.D], randoms(11, self.TOKENS * self.D))})
        cache, numbers = self.folder / "cache", self.folder / "numbers"
        self.good("quantize", "--format", "v41", "--page-size", 2, "--in", source, "--out", cache)
        self.good("dequantize", "--in", cache, "--out", numbers)
        tensors, _, _ = self.tensors()
        tensors["kv"] = st_read(cache)["kv"]
        decode = self.results("fused_decode", tensors, "--kv-format", "v41", "--set", "q_norm=1")
        tensors["kv"] = Tensor("BF16", [self.TOKENS, 1, self.D], st_read(numbers)["dst"].data)
        prefill = self.results("fused_prefill", tensors, "--set", "q_norm=1")
        for name in ("out_fp8", "out_scale", "lse"):
            self.assertEqual(decode[name].data, prefill[name].data, name)


class Small(ProgramTest):
    def test_merge(self):
        outs = [[1.0, 2.0], [4.0, -2.0], [7.0, float("nan")]]
        lses = [0.5, 1.5, -INF]
        weights = [math.exp(x) for x in lses]
        total = sum(weights) + math.exp(0.25)
        wanted = [sum(w * o[d] for w, o in zip(weights[:2], outs)) / total for d in range(2)]
        result = self.results("merge", {"outs": make("F32", [3, 1, 1, 2], sum(outs, [])),
                                        "lses": make("F32", [3, 1, 1], lses), "attn_sink": make("F32", [1], [0.25])})
        self.assertClose(result["out"].numbers(), wanted, 1e-6, 1e-6)
        self.assertClose(result["lse"].numbers(), [math.log(sum(weights))], 1e-6, 1e-6)

    def test_indices_convert(self):
        result = self.results("indices_convert", {
            "positions": make("I32", [2, 1, 3], [0, 5, -3, 4, 8, -1]),
            "block_table": make("I32", [2, 3], [7, 2, 9, 1, 0, 4])}, "--set", "page_size=4")
        self.assertEqual(result["indices"].numbers(), [28, 9, -1, 0, 16, -1])

    def test_permute_q_b(self):
        h, d, width = 3, 32, 128
        rows = [[(r * 7 + c) % 256 for c in range(width)] for r in range(h * d)]
        scales = [[(r * 5 + c) % 256 for c in range(4)] for r in range(h * d)]
        moved, moved_scales = [None] * (h * d), [None] * (h * d)
        for head, x in itertools.product(range(h), range(d)):
            to = x % 16 + 16 * head + x // 16 * 16 * h
            moved[to], moved_scales[to] = rows[head * d + x], scales[head * d + x]
        result = self.results("permute_q_b", {"weight": Tensor("F8_E4M3", [h * d, width], bytes(sum(rows, []))),
                                              "scale": words_of(scales)}, "--set", f"d_q={d}")
        self.assertEqual(result["out_weight"].data, bytes(sum(moved, [])))
        self.assertEqual(result["out_scale"].data, bytes(sum(moved_scales, [])))

    def test_permute_wv(self):
        groups, rows, g_size, d = 2, 3, 2, 64
        width = g_size * d
        weight = [[(r * 11 + c) % 256 for c in range(width)] for r in range(groups * rows)]
        scale = [[(r * 3 + c) % 256 for c in range(width // 32)] for r in range(groups * rows)]
        moved = [[0] * width for _ in weight]
        moved_scale = [[0] * (width // 32) for _ in weight]
        for r, g, x in itertools.product(range(groups * rows), range(g_size), range(d)):
            moved[r][x // 32 * 32 * g_size + 32 * g + x % 32] = weight[r][g * d + x]
            moved_scale[r][x // 32 * g_size + g] = scale[r][g * (d // 32) + x // 32]
        shape = [groups, rows, width // 128]
        result = self.results("permute_wv", {
            "weight": Tensor("U8", [groups, rows, width], bytes(sum(weight, []))),
            "scale": Tensor("I32", shape, bytes(sum(scale, [])))}, "--set", f"d_o={d}")
        self.assertEqual(result["out_weight"].data, bytes(sum(moved, [])))
        self.assertEqual(result["out_scale"].data, bytes(sum(moved_scale, [])))

    def test_fp8_cast(self):
        """One group per case: code of the largest element 448 at a power-of-two scale, the published clamp at 1e-4."""
        d = 128
        src = [0.0] * d + [bf16(x / 8) for x in range(d)]
        result = self.results("fp8_cast", {"src": make("BF16", [2, d], src)}, "--set", "group=32")
        scales = [result["scale"].data[4 * r:4 * r + 4] for r in range(2)]
        self.assertEqual(scales[0], bytes([105] * 4))
        self.assertEqual(result["codes"].data[:d], bytes(d))
        for group in range(4):
            top = (32 * group + 31) / 8
            self.assertEqual(scales[1][group], 127 + math.ceil(math.log2(top / 448)))
        codes = result["codes"].data[d:]
        value = lambda c: (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7) if c >> 3 else (c & 7) / 512
        for i in range(d):
            decoded = value(codes[i]) * 2.0 ** (scales[1][i // 32] - 127)
            self.assertLessEqual(abs(decoded - src[d + i]), src[d + i] / 16 + 1e-6)

    def test_schedule(self):
        result = self.results("schedule", {"cache_seqlens": make("I32", [4], [1000, 64, 0, 300])}, "--set", "parts=4")
        rows = result["metadata"].numbers()
        self.assertEqual(result["num_splits"].numbers(), [0, 2, 3, 4, 5])
        self.assertEqual([rows[8 * i:8 * i + 7] for i in range(3)],
                         [[0, 0, 0, 11, 0, 1, 1], [0, 1, 11, 1, 1, 1, 0], [2, 3, 0, 5, 0, 0, 0]])
        self.assertGreaterEqual(rows[24], 4)


if __name__ == "__main__":
    main()
