# SPDX-License-Identifier: MIT
"""quantize, dequantize, convert: golden bytes both ways, moves between layouts, the report of what was lost."""
import math

from program import GOLDEN, ProgramTest, Tensor, main, make, st_bytes, st_meta, st_read

FILE = GOLDEN / "formats_a.safetensors"
#        format     case       name of the bytes
CASES = [("v32", "v32", "bytes"), ("v4", "v4", "page_bytes"), ("v41", "v41", "bytes"), ("v41-fp4", "v41fp4", "bytes")]


class Golden(ProgramTest):
    def test_quantize_gives_the_published_bytes(self):
        golden = st_read(FILE)
        for name, case, stored in CASES:
            for pages in ("p5.", "p64."):
                prefix, out = f"{case}.{pages}", self.folder / "out"
                with self.subTest(prefix):
                    self.good("quantize", "--format", name, "--in", FILE, "--prefix", prefix, "--out", out)
                    self.assertEqual(st_read(out)[prefix + "kv"].data, golden[prefix + stored].data)
                    self.assertEqual(st_meta(out)["kv_format"], name)

    def test_dequantize_gives_the_published_numbers(self):
        golden = st_read(FILE)
        for name, case, stored in CASES:
            for size in (5, 64):
                prefix, out = f"{case}.p{size}.", self.folder / "out"
                with self.subTest(prefix):
                    path = self.folder / "in.safetensors"
                    path.write_bytes(st_bytes({stored: golden[prefix + stored]}))
                    self.good("dequantize", "--format", name, "--in", path, "--out", out,
                              *(["--page-size", size] if stored == "page_bytes" else []))
                    dst = st_read(out)["dst"]
                    self.assertEqual((dst.shape, dst.data),
                                     (golden[prefix + "dequant"].shape, golden[prefix + "dequant"].data))

    def test_convert_between_layouts_moves_the_bytes(self):
        for name, case, _ in CASES[2:]:
            prefix = f"{case}.p5."
            page, direct, back = (self.folder / n for n in ("page", "direct", "back"))
            source = ("--in", FILE, "--prefix", prefix)
            self.good("quantize", "--format", name + "-page", *source, "--out", direct)
            self.good("convert", "--format", name, "--to", name + "-page", *source, "--out", page)
            self.assertEqual(st_read(page)[prefix + "kv"].data, st_read(direct)[prefix + "kv"].data)
            self.good("convert", "--to", name, "--in", page, "--prefix", prefix, "--out", back)
            self.assertEqual(st_read(back)[prefix + "kv"].data, st_read(FILE)[prefix + "bytes"].data)


class Options(ProgramTest):
    def test_the_report(self):
        """Powers of two survive; 1 + 2^-7 is rounded to 1 in a group whose largest number is 1 + 2^-7 ... 448."""
        exact = self.file({"src": make("BF16", [2, 512], [2.0 ** (i % 8) for i in range(1024)])})
        tree = self.good_json("quantize", "--format", "v41", "--in", exact, "--out", self.folder / "out")
        self.assertEqual((tree["error"]["max_abs"], tree["error"]["rms"], tree["error"]["elements"]), (0, 0, 1024))
        self.assertAlmostEqual(tree["error"]["cosine"], 1, 12)

        values = [1.0078125] * 512
        rough = self.file({"src": make("BF16", [1, 512], values)})
        error = self.good_json("quantize", "--format", "v41", "--in", rough, "--out", self.folder / "out")["error"]
        self.assertEqual(error["max_abs"], 0.0078125)
        self.assertAlmostEqual(error["max_rel"], 0.0078125 / (1.0078125 + 1e-6), 12)
        self.assertAlmostEqual(error["rms"], 0.0078125, 12)
        self.assertAlmostEqual(error["rms_reference"], 1.0078125, 12)
        text = self.good("quantize", "--format", "v41", "--in", rough, "--out", self.folder / "out")
        self.assertRegex(text, r"error of 512 numbers: max abs 0\.0078125, max rel 0\.00775\d+, rms 0\.0078125 ")
        self.assertRegex(text, r"cosine 1\.0")

    def test_slots_choose_places_and_negative_ones_are_skipped(self):
        rows = [[float(1 + r)] * 512 for r in range(3)]
        path = self.file({"src": make("BF16", [3, 512], sum(rows, [])), "slots": make("I64", [3], [6, -1, 0])})
        out = self.folder / "out"
        tree = self.good_json("quantize", "--format", "v41", "--page-size", 4, "--in", path, "--out", out)
        self.assertEqual(tree["error"]["max_abs"], 0)
        kv = st_read(out)["kv"]
        self.assertEqual(kv.shape, [2, 4, 1, 528])
        self.assertTrue(any(kv.data[6 * 528:7 * 528]) and any(kv.data[:528]))
        self.assertFalse(any(kv.data[528:6 * 528]) or any(kv.data[7 * 528:]))
        listed = self.file({"kv": kv, "slots": make("I32", [4], [0, 6, 99, -1])})
        self.good("dequantize", "--format", "v41", "--in", listed, "--out", out, "--dtype", "f32")
        dst = st_read(out)["dst"]
        self.assertEqual((dst.dtype, dst.shape), ("F32", [4, 1, 512]))
        self.assertEqual(dst.numbers(), rows[2] + rows[0] + [0.0] * 1024)

    def test_page_stride_pads_pages(self):
        path = self.file({"src": make("BF16", [3, 512], [1.0] * 1536)})
        out, back = self.folder / "out", self.folder / "back"
        self.good("quantize", "--format", "v4", "--page-size", 2, "--page-stride", 1728, "--in", path, "--out", out)
        kv = st_read(out)["kv"]
        self.assertEqual(kv.shape, [2, 1728])
        self.assertFalse(any(kv.data[1168:1728]))
        self.good("dequantize", "--in", out, "--out", back)
        self.assertEqual(st_read(back)["dst"].numbers()[:1536], [1.0] * 1536)

    def test_the_first_published_quantizer(self):
        """Its scale is amax / 448 in bf16, not a power of two."""
        path, out = self.file({"src": make("BF16", [1, 576], [3.0] * 576)}), self.folder / "out"
        self.good("quantize", "--format", "v32", "--quantizer", "v32-2025", "--in", path, "--out", out)
        scale = Tensor("F32", [1], st_read(out)["kv"].data[512:516]).numbers()[0]
        self.assertLess(abs(scale - 3 / 448), 3 / 448 / 256)
        self.assertNotEqual(math.frexp(scale)[0], 0.5)

    def test_plain_formats_convert(self):
        path, out = self.file({"src": make("F32", [2, 2, 64], [0.1 * i for i in range(256)])}), self.folder / "out"
        self.good("quantize", "--format", "f16", "--page-size", 2, "--in", path, "--out", out)
        self.assertEqual((st_read(out)["kv"].dtype, st_read(out)["kv"].shape), ("F16", [1, 2, 2, 64]))

    def test_bad_input(self):
        src, out = self.file({"src": make("BF16", [1, 512], [1.0] * 512)}), self.folder / "out"
        cache = self.file({"kv": Tensor("U8", [1, 2, 1, 528], bytes(1056))}, name="cache")
        pages = self.file({"kv": Tensor("U8", [1, 1000], bytes(1000))}, name="pages")
        src, cache, pages = (("--in", path, "--out", out) for path in (src, cache, pages))
        for pattern, command in [
            ("needs the setting 'kv_format'", ["quantize", *src]),
            ("'v5' is none of bf16, f16, v32", ["quantize", "--format", "v5", *src]),
            ("--in FILE and --out FILE", ["quantize", "--format", "v41", *src[:2]]),
            ("--in FILE and --out FILE", ["convert", "--format", "v41", "--out", out]),
            ("is not an option", ["quantize", "--format", "v41", *src, "more"]),
            ("lacks", ["quantize", "--format", "v41", *src, "--prefix", "x."]),
            ("576", ["quantize", "--format", "v32", *src]),
            ("page_size: 0 is outside", ["quantize", "--format", "v41", "--page-size", 0, *src]),
            ("page_size: 'x'", ["quantize", "--format", "v41", "--page-size", "x", *src]),
            ("less than the", ["quantize", "--format", "v41", "--page-stride", 5, *src]),
            ("quantizer: 'new' is none of", ["quantize", "--format", "v41", "--quantizer", "new", *src]),
            ("no use for the setting 'to_format'", ["quantize", "--format", "v41", "--to", "v4", *src]),
            ("page_stride_bytes|not fit|memory",
             ["quantize", "--format", "v41", "--num-pages", 2147483647, "--page-size", 2147483647, *src]),
            ("lacks", ["dequantize", "--format", "v41", *src, "--prefix", "x."]),
            ("kv_format", ["dequantize", *cache]),
            ("a v32 cache is", ["dequantize", "--format", "v32", *cache]),
            ("'x8' is no dtype", ["dequantize", "--format", "v41", "--dtype", "x8", *cache]),
            ("needs the setting 'page_size'", ["dequantize", "--format", "v41", *pages]),
            ("does not hold", ["dequantize", "--format", "v41", "--page-size", 2, *pages]),
            ("needs the setting 'to_format'", ["convert", "--format", "v41", *cache]),
            ("d_qk", ["convert", "--format", "v41", "--to", "v32", *cache]),
        ]:
            with self.subTest(" ".join(map(str, command))):
                self.bad(pattern, *command)


if __name__ == "__main__":
    main()
