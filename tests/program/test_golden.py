# SPDX-License-Identifier: MIT
"""Golden results of the published kernels, through `flashmla run`, on every instruction tier and the oracle."""
from program import GOLDEN, ProgramTest, main, run, st_bytes, st_read, tiers

CASES = [
    ("dense_decode", "dense_decode_a", "mqa_causal.", []),
    ("dense_decode", "dense_decode_a", "gqa.", []),
    ("sparse_decode", "sparse_decode_a", "v32_h64.", ["--kv-format", "v32"]),
    ("sparse_decode", "sparse_decode_a", "v32_h128.", ["--kv-format", "v32"]),
    ("sparse_decode", "sparse_decode_a", "v4_h128.", ["--kv-format", "v4"]),
    ("sparse_decode", "sparse_decode_a", "v4_h64_extra.", ["--kv-format", "v4", "--extra-kv-format", "v4"]),
    ("sparse_prefill", "sparse_prefill_a", "d512_h64.", []),
    ("sparse_prefill", "sparse_prefill_a", "d576_h64.", []),
]


class Golden(ProgramTest):
    def compare(self, *backend):
        for operation, name, prefix, options in CASES:
            path = GOLDEN / f"{name}.safetensors"
            with self.subTest(case=prefix, backend=backend):
                tree = self.good_json("run", operation, "--in", path, "--prefix", prefix, "--compare", path,
                                      "--empty-lse", "pos", *options, *backend)
                compared = [item["name"] for item in tree["comparison"]]
                wanted = [n for n in ("out", "lse", "max_logits") if prefix + n in st_read(path)]
                self.assertEqual(compared, wanted)
                self.assertTrue(all(item["ok"] for item in tree["comparison"]))

    def test_every_tier(self):
        self.assertIn("scalar", tiers())
        for tier in tiers():
            self.compare("--backend", "cpu", "--isa", tier)

    def test_oracle(self):
        self.compare("--backend", "oracle")

    def test_a_wrong_result_fails(self):
        """One output element off by more than the tolerance gives exit status 1, and so does a wrong infinity."""
        path = GOLDEN / "dense_decode_a.safetensors"
        for name, at in (("gqa.out", 1), ("gqa.lse", 3)):
            tensors = {k: v for k, v in st_read(path).items() if k.startswith("gqa.")}
            data = bytearray(tensors[name].data)
            data[at] ^= 0x40
            tensors[name].data = bytes(data)
            wrong = self.folder / "wrong.safetensors"
            wrong.write_bytes(st_bytes(tensors))
            arguments = ("run", "dense_decode", "--in", path, "--prefix", "gqa.", "--compare", wrong)
            done = run(*arguments, "--empty-lse", "pos")
            self.assertEqual((done.returncode, done.stderr), (1, ""))
            self.assertIn("FAILED", done.stdout)

    def test_lonely_rows_take_the_sign_that_is_asked_for(self):
        path = GOLDEN / "dense_decode_a.safetensors"
        for sign, word in (("neg", "-inf"), ("pos", "inf")):
            out = self.folder / "out.safetensors"
            self.good("run", "dense_decode", "--in", path, "--prefix", "gqa.", "--out", out, "--empty-lse", sign)
            infinite = {str(x) for x in st_read(out)["gqa.lse"].numbers() if abs(x) == float("inf")}
            self.assertEqual(infinite, {word})


if __name__ == "__main__":
    main()
