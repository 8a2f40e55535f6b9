# SPDX-License-Identifier: MIT
"""The figures of `flashmla explain`, each worked out here by its own formula."""
from program import ProgramTest, main


def by_key(section):
    return {item["key"]: item for item in section}


class Figures(ProgramTest):
    def test_the_quoted_figures(self):
        figures = by_key(self.good_json("explain")["figures"])
        wanted = {
            "v3_bytes_per_token": (61 * (512 + 64) * 2, "70,272 B = 68.625 KiB"),
            "mha_bytes_per_token": (61 * 2 * 128 * (128 + 64) * 2, "5,996,544 B = 5856 KiB"),
            "mha_reduction": (2998272 / 35136, "85.33x (V counted 192 wide; with V = 128: 71.1x)"),
            "request_128k_gib": (576 * 2 * 62 * 128 * 1024 / 2 ** 30, "8.719 GiB ~ 8.72 GiB (62 layers)"),
            "v32_saving": (100 * (1 - 656 / 1152), "43.06 %, 1.756x smaller"),
            "v4_saving": (100 * (1 - 584 / 1024), "42.97 %, 1.753x smaller"),
            "v41_saving": (100 * (1 - 528 / 1024), "48.44 %, 1.939x smaller"),
            "v41_fp4_saving": (100 * (1 - 288 / 1024), "71.88 %, 3.556x smaller"),
            "mma_cycles": (64 * (576 + 512) * 2 / 4096, "34.0 cycles"),
            "dequant_cycles": ((1 / 64 + 1 / 64 + 1 / 16 + 1 / 256) * 512, "50.0 cycles"),
            "compute_bound_threshold": (0.5 * 865 / 3.35, "129.1 heads * queries (often quoted as 128)"),
        }
        self.assertEqual(set(figures), set(wanted))
        for key, (value, shown) in wanted.items():
            self.assertAlmostEqual(figures[key]["value"], value, 9, key)
            self.assertEqual(figures[key]["shown"], shown)

    def test_every_model(self):
        for model, width, size, topk in (("v3", 576, 1152, None), ("v32", 576, 656, 2048), ("v4", 512, 584, 640),
                                         ("v41", 512, 528, 640)):
            tree = self.good_json("explain", "--model", model, "--context", 65536, "--heads", 64, "--device", "h200")
            request, bounds = by_key(tree["request"]), by_key(tree["bounds"])
            attended = topk or 65536
            flops = 2 * 64 * (width + 512)
            self.assertEqual(request["bytes_per_token_layer"]["value"], size)
            self.assertEqual(request["bytes_per_token"]["value"], size * 61)
            self.assertAlmostEqual(request["request_gib"]["value"], size * 61 * 65536 / 2 ** 30, 9)
            self.assertEqual(request["flops_per_kv_token"]["value"], flops)
            self.assertAlmostEqual(request["gflop_per_step"]["value"], attended * flops / 1e9, 9)
            self.assertAlmostEqual(bounds["intensity"]["value"], flops / size, 9)
            self.assertAlmostEqual(bounds["balance"]["value"], 989 / 4.8, 9)
            self.assertAlmostEqual(bounds["threshold"]["value"], 989 / 4.8 * size / (2 * (width + 512)), 9)
            self.assertAlmostEqual(bounds["memory_us"]["value"], attended * size / 4.8e6, 9)
            self.assertAlmostEqual(bounds["compute_us"]["value"], attended * flops / 989e6, 9)

    def test_what_binds(self):
        for heads, queries, word in ((64, 1, "memory bandwidth"), (128, 2, "arithmetic")):
            bounds = by_key(self.good_json("explain", "--heads", heads, "--queries", queries)["bounds"])
            self.assertEqual(bounds["binds"]["shown"], word)

    def test_own_device_and_layers(self):
        tree = self.good_json("explain", "--device", "this", "--tflops", 2, "--bandwidth", 0.5, "--layers", 10)
        self.assertEqual(by_key(tree["bounds"])["balance"]["value"], 4)
        self.assertEqual(by_key(tree["request"])["bytes_per_token"]["value"], 11520)

    def test_this_processor_is_measured(self):
        tree = self.good_json("explain", "--device", "this")
        bounds = by_key(tree["bounds"])
        balance = bounds["balance"]["value"]
        self.assertGreater(balance, 0)
        wanted = "arithmetic" if bounds["intensity"]["value"] > balance else "memory bandwidth"
        self.assertEqual(bounds["binds"]["shown"], wanted)

    def test_the_text_shows_every_figure(self):
        tree, text = self.good_json("explain"), self.good("explain")
        for section in ("figures", "request", "bounds"):
            for item in tree[section]:
                for part in ("what", "formula", "shown"):
                    self.assertIn(item[part], text)

    def test_bad_input(self):
        for pattern, arguments in (
            ("--model: 'v5' is none of", ["--model", "v5"]),
            ("--device: 'h300' is none of", ["--device", "h300"]),
            ("--heads: 0 is outside", ["--heads", "0"]),
            ("--context: 'long' is not", ["--context", "long"]),
            ("--layers: -3 is outside", ["--layers", "-3"]),
            ("--tflops: 0 is not a positive", ["--tflops", "0"]),
            ("--bandwidth: inf is not a positive", ["--bandwidth", "inf"]),
            ("is not an option", ["v3"]),
        ):
            with self.subTest(arguments):
                self.bad(pattern, "explain", *arguments)


if __name__ == "__main__":
    main()
