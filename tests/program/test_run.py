# SPDX-License-Identifier: MIT
"""`flashmla run` itself: where settings come from, prefixes, comparison, and every way to ask for the impossible."""
import json

from program import GOLDEN, ProgramTest, Tensor, main, make, run, st_read

PREFILL = GOLDEN / "sparse_prefill_a.safetensors"
DECODE = GOLDEN / "sparse_decode_a.safetensors"
STATES = {"outs": make("F32", [2, 1, 1, 4], [1, 2, 3, 4, 5, 6, 7, 8]), "lses": make("F32", [2, 1, 1], [0, 0])}


def tiny(**more):
    tensors = {"q": make("BF16", [1, 1, 1, 64], [1.0] * 64), "kv": make("BF16", [1, 2, 1, 64], [0.5] * 64 + [1.0] * 64),
               "cache_seqlens": make("I32", [1], [2])}
    tensors.update(more)
    return tensors


class Settings(ProgramTest):
    def lse(self, tensors, *arguments, meta=None):
        return self.results("dense_decode", tensors, *arguments, meta=meta)["lse"].numbers()[0]

    def test_precedence_command_line_then_tensor_then_metadata_then_default(self):
        one_token = tiny(cache_seqlens=make("I32", [1], [1]))  # lse = scale * 32
        with_tensor = dict(one_token, softmax_scale=make("F64", [], [0.25]))
        meta = {"softmax_scale": "0.5"}
        self.assertEqual(self.lse(one_token), 32 / 8)
        self.assertEqual(self.lse(one_token, meta=meta), 16)
        self.assertEqual(self.lse(with_tensor, meta=meta), 8)
        self.assertEqual(self.lse(with_tensor, "--softmax-scale", "2", meta=meta), 64)
        self.assertEqual(self.lse(with_tensor, "--set", "softmax_scale=2"), 64)
        self.assertEqual(self.lse(one_token, "--softmax-scale", "-1"), -32)

    def test_metadata_with_the_prefix_goes_before_metadata_without(self):
        tensors = {"a." + k: v for k, v in tiny(cache_seqlens=make("I32", [1], [1])).items()}
        path, out = self.file(tensors, {"softmax_scale": "0.5", "a.softmax_scale": "0.25"}), self.folder / "out"
        self.good("run", "dense_decode", "--in", path, "--prefix", "a.", "--out", out)
        self.assertEqual(sorted(st_read(out)), ["a.lse", "a.max_logits", "a.out"])
        self.assertEqual(st_read(out)["a.lse"].numbers(), [8.0])

    def test_base_2(self):
        natural = self.lse(tiny())
        self.assertAlmostEqual(self.lse(tiny(), "--set", "lse_base=2"), natural * 1.4426950408889634, 4)

    def test_dtypes_of_a_cache_of_bytes(self):
        """U8, I8 and F8_E4M3 mean the same bytes."""
        case = {k[len("v4_h128."):]: v for k, v in st_read(DECODE).items() if k.startswith("v4_h128.")}
        outs = set()
        for dtype in ("U8", "F8_E4M3", "F8_E8M0"):
            case["kv_page_bytes"] = Tensor(dtype, case["kv_page_bytes"].shape, case["kv_page_bytes"].data)
            outs.add(self.results("sparse_decode", case, "--kv-format", "v4")["out"].data)
        self.assertEqual(len(outs), 1)

    def test_thread_count_changes_no_bit(self):
        blobs = set()
        for threads in (1, 2, 5):
            out = self.folder / f"out{threads}"
            self.good("run", "sparse_decode", "--in", DECODE, "--prefix", "v4_h64_extra.", "--kv-format", "v4", "--out",
                      out, "--threads", threads)
            blobs.add(out.read_bytes())
        self.assertEqual(len(blobs), 1)


class Comparison(ProgramTest):
    def compare(self, wanted, *arguments):
        path = self.file(STATES)
        other = self.file(wanted, name="other.safetensors")
        done = run("run", "merge", "--in", path, "--compare", other, "--json", *arguments)
        self.assertEqual(done.stderr, "")
        return done.returncode, json.loads(done.stdout)["comparison"]

    def test_within_and_outside(self):
        right = make("F32", [1, 1, 4], [3, 4, 5, 6])
        near = make("F32", [1, 1, 4], [3.125, 4, 5, 6])
        self.assertEqual(self.compare({"out": right})[0], 0)
        status, (item,) = self.compare({"out": near})
        self.assertEqual((status, item["ok"], item["outside"], item["max_abs"]), (1, False, 1, 0.125))
        self.assertAlmostEqual(item["max_rel"], 0.125 / 3.125, 5)
        dots, ours, theirs = 9.375 + 16 + 25 + 36, 9 + 77, 9.765625 + 77
        self.assertAlmostEqual(item["cos_diff"], 1 - 2 * dots / (ours + theirs), 9)
        self.assertEqual(self.compare({"out": near}, "--abs", 0.2)[0], 1)  # the cosine still fails
        self.assertEqual(self.compare({"out": near}, "--abs", 0.2, "--cos", 0.01)[0], 0)
        self.assertEqual(self.compare({"out": near}, "--rel", 0.05, "--cos", 0.01)[0], 0)
        self.assertEqual(self.compare({"out": near}, "--rel", 0.03, "--cos", 0.01)[0], 1)

    def test_infinities_and_nan_must_stand_at_the_same_places(self):
        for value in (float("inf"), float("-inf"), float("nan")):
            wanted = {"out": make("F32", [1, 1, 4], [value, 4, 5, 6])}
            self.assertEqual(self.compare(wanted, "--abs", 1e30, "--rel", 1e30, "--cos", 1e30)[0], 1)

    def test_other_float_dtypes_compare_by_value(self):
        for dtype in ("F64", "BF16", "F16"):
            self.assertEqual(self.compare({"out": make(dtype, [1, 1, 4], [3, 4, 5, 6])})[0], 0)

    def test_integers_are_compared_exactly(self):
        tensors = {"positions": make("I32", [1, 1, 2], [0, 1]), "block_table": make("I32", [1, 1], [3])}
        path = self.file(tensors)
        for last, status in ((13, 0), (14, 1)):
            other = self.file({"indices": make("I32", [1, 1, 2], [12, last])}, name="other")
            done = run("run", "indices_convert", "--in", path, "--compare", other, "--set", "page_size=4")
            self.assertEqual((done.returncode, done.stderr), (status, ""))

    def test_the_result_is_written_although_the_comparison_fails(self):
        path, other = self.file(STATES), self.file({"out": make("F32", [1, 1, 4], [0] * 4)}, name="other")
        out = self.folder / "out"
        self.assertEqual(run("run", "merge", "--in", path, "--compare", other, "--out", out).returncode, 1)
        self.assertEqual(st_read(out)["out"].numbers(), [3, 4, 5, 6])

    def test_prefixes(self):
        path = self.file(STATES)
        other = self.file({"x/out": make("F32", [1, 1, 4], [3, 4, 5, 6])}, name="other")
        self.good("run", "merge", "--in", path, "--compare", other, "--compare-prefix", "x/")

    def test_what_cannot_be_compared(self):
        path, out = self.file(STATES), self.folder / "out"
        for pattern, tensors in (
            ("none of the results", {"Out": make("F32", [1, 1, 4], [0] * 4)}),
            ("another shape", {"out": make("F32", [1, 4], [0] * 4)}),
            ("another shape", {"out": make("F32", [1, 1, 5], [0] * 5)}),
            ("another shape or dtype", {"out": make("I32", [1, 1, 4], [0] * 4)}),
        ):
            other = self.file(tensors, name="other")
            self.bad(pattern, "run", "merge", "--in", path, "--compare", other, "--out", out)


class Faults(ProgramTest):
    def fault(self, pattern, operation, tensors, *arguments):
        with self.subTest(pattern):
            self.bad(pattern, "run", operation, "--in", self.file(tensors), "--out", self.folder / "out", *arguments)

    def test_command_line(self):
        path, out = self.file(STATES), self.folder / "out"
        for pattern, command in (
            ("no operation", ["--in", path]),
            ("more than one", ["merge", "merge", "--in", path]),
            ("unknown operation 'attention'", ["attention", "--in", path]),
            ("--in FILE is missing", ["merge", "--out", out]),
            ("not KEY=VALUE", ["merge", "--in", path, "--set", "x"]),
            ("'=1'|''", ["merge", "--in", path, "--set", "=1"]),
            ("is given twice", ["merge", "--in", path, "--empty-lse", "neg", "--set", "empty-lse=pos"]),
            ("no use for the setting 'causal'", ["merge", "--in", path, "--causal", "1", "--out", out]),
            ("no use for the setting 'soft'", ["merge", "--in", path, "--set", "soft=1", "--out", out]),
            ("'maybe' is none of neg, pos", ["merge", "--in", path, "--empty-lse", "maybe", "--out", out]),
            ("--abs: -1 is negative", ["merge", "--in", path, "--abs", "-1"]),
            ("--rel: 'x' is not a number", ["merge", "--in", path, "--rel", "x"]),
            ("--rel: 'nan' is not a number", ["merge", "--in", path, "--rel", "nan"]),
            ("No such file", ["merge", "--in", path, "--compare", self.folder / "absent", "--out", out]),
            ("prefix 'xxxx", ["merge", "--in", path, "--prefix", "x" * 300, "--out", out]),
        ):
            with self.subTest(pattern):
                self.bad(pattern, "run", *command)

    def test_tensors(self):
        q, kv, lengths = (tiny()[k] for k in ("q", "kv", "cache_seqlens"))
        self.fault("needs the tensor 'q'", "dense_decode", {"kv": kv, "cache_seqlens": lengths})
        self.fault("needs the tensor 'kv'", "dense_decode", {"q": q, "cache_seqlens": lengths})
        self.fault("needs the tensor 'cache_seqlens'", "dense_decode", {"q": q, "kv": kv})
        self.fault("needs the tensor 'indices'", "sparse_decode", {"q": q, "kv": kv})
        self.fault("needs the tensor 'cu_seqlens_q'", "dense_decode", tiny(q=make("BF16", [1, 1, 64], [0.0] * 64)))
        self.fault("no use for the tensor 'cache_seqlen'", "dense_decode", tiny(cache_seqlen=lengths))
        self.fault("rank 2", "dense_decode", tiny(q=make("BF16", [1, 64], [0.0] * 64)))
        self.fault("plain cache is", "dense_decode", tiny(kv=make("BF16", [2, 64], [0.0] * 128)))
        self.fault("kv_format", "dense_decode", tiny(kv=Tensor("U8", [1, 2, 1, 128], bytes(256))))
        self.fault("q", "dense_decode", tiny(q=make("F32", [1, 1, 1, 64], [0.0] * 64)))
        self.fault("cache_seqlens", "dense_decode", tiny(cache_seqlens=make("F32", [1], [2.0])))
        self.fault("cache_seqlens", "dense_decode", tiny(cache_seqlens=make("I32", [2], [1, 1])))
        self.fault("is BF16; a f16 cache", "dense_decode", tiny(), "--kv-format", "f16")
        self.fault("is BF16; a v32 cache", "dense_decode", tiny(), "--kv-format", "v32")
        self.fault("causal: '2'", "dense_decode", tiny(), "--causal", "2")
        self.fault("out_dtype: 'i8'", "dense_decode", tiny(), "--out-dtype", "i8")
        self.fault("d_v", "dense_decode", tiny(), "--d-v", "65")
        self.fault("softmax_scale: 'a BF16 tensor'", "dense_decode", tiny(softmax_scale=make("BF16", [1], [1.0])))
        self.fault("fp4|extra", "sparse_decode", {
            "q": make("BF16", [1, 1, 1, 512], [0.0] * 512), "kv": Tensor("U8", [1, 1, 1, 288], bytes(288)),
            "indices": make("I32", [1, 1, 1], [0])}, "--kv-format", "v41-fp4")
        self.fault("page_size", "indices_convert", {"positions": make("I32", [1, 1, 1], [0]),
                                                    "block_table": make("I32", [1, 1], [0])})
        self.fault("positions|block_table", "indices_convert", {
            "positions": make("I32", [1, 1, 1], [4]), "block_table": make("I32", [1, 1], [0])}, "--set", "page_size=4")
        self.fault("1..4096 states", "merge", {"outs": make("F32", [1, 1, 1, 4], [0] * 4),
                                               "lses": make("F32", [2, 1, 1], [0, 0])})
        self.fault("rank 2; merge takes rank 3", "merge", {"outs": STATES["outs"], "lses": make("F32", [2, 1], [0, 0])})
        self.fault("must be i32 of rank 2 or 3", "permute_q_b", {
            "weight": Tensor("U8", [16, 128], bytes(2048)), "scale": make("F32", [16, 1], [0] * 16)}, "--set", "d_q=16")
        self.fault("h_q|d_q|weight", "permute_q_b", {
            "weight": Tensor("U8", [16, 128], bytes(2048)), "scale": make("I32", [16, 1], [0] * 16)}, "--set", "d_q=15")
        self.fault("group", "fp8_cast", {"src": make("BF16", [1, 128], [0.0] * 128)}, "--set", "group=48")
        self.fault("schedule", "schedule", {"cache_seqlens": make("F32", [1], [1.0])})
        self.fault("does not divide", "fused_prefill", {
            "q": make("BF16", [1, 2, 512], [0.0] * 1024), "kv": make("BF16", [1, 1, 512], [0.0] * 512),
            "indices": make("I32", [1, 1], [0]), "token_positions": make("I32", [1], [0]),
            "cos_sin_cache": make("F32", [1, 64], [0.0] * 64)}, "--set", "n_wv_group=3")

    def test_unused_tensors_can_be_allowed(self):
        path = self.file(tiny(note=make("F32", [1], [1.0])))
        self.good("run", "dense_decode", "--in", path, "--ignore-unused")


if __name__ == "__main__":
    main()
