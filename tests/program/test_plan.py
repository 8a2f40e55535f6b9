# SPDX-License-Identifier: MIT
"""`flashmla plan`: the published tables, pieces that cover every block once, the picture, bad input."""
import random
import resource
import xml.etree.ElementTree

from program import ProgramTest, main, run

VECTORS = [  # lengths, parts, num_splits, rows (first, last, begin, end, split, first split, last split)
    ("1000,64,0,300", 4, [0, 2, 3, 4, 5],
     [(0, 0, 0, 11, 0, 1, 1), (0, 1, 11, 1, 1, 1, 0), (2, 3, 0, 5, 0, 0, 0), None]),
    ("130,64", 4, [0, 1, 2], [(0, 0, 0, 3, 0, 0, 0), (1, 1, 0, 1, 0, 0, 0), None, None]),
    ("2048", 3, [0, 3], [(0, 0, 0, 13, 0, 1, 1), (0, 0, 13, 26, 1, 1, 1), (0, 0, 26, 32, 2, 1, 1)]),
]


class Plan(ProgramTest):
    def test_published_tables(self):
        for lengths, parts, splits, rows in VECTORS:
            tree = self.good_json("plan", "--lengths", lengths, "--parts", parts, "--form", "2026-01")
            self.assertEqual(tree["num_splits"], splits)
            for i, row in enumerate(rows):
                got = tree["metadata"][8 * i:8 * i + 7]
                if row is None:
                    self.assertGreaterEqual(got[0], len(splits) - 1)
                else:
                    self.assertEqual(tuple(got), row)

    def test_other_forms(self):
        """The same plan in blocks without reordering, and in tokens."""
        blocks = self.good_json("plan", "--lengths", "2048", "--parts", 3, "--form", "2025-09")["metadata"]
        tokens = self.good_json("plan", "--lengths", "2048", "--parts", 3, "--form", "2025-02")["metadata"]
        self.assertEqual([blocks[8 * i:8 * i + 5] for i in range(3)],
                         [[0, 0, 0, 13, 0], [0, 13, 0, 26, 1], [0, 26, 0, 32, 2]])
        self.assertEqual([tokens[8 * i:8 * i + 5] for i in range(3)],
                         [[0, 0, 0, 832, 0], [0, 832, 0, 1664, 1], [0, 1664, 0, 2048, 2]])

    def check_cover(self, blocks, *arguments):
        tree = self.good_json("plan", *arguments)
        at = [0] * len(blocks)
        pieces = [0] * len(blocks)
        for piece in tree["pieces"]:
            request = piece["request"]
            self.assertEqual((piece["begin_block"], piece["split"]), (at[request], pieces[request]))
            at[request], pieces[request] = piece["end_block"], pieces[request] + 1
        self.assertEqual(at, blocks)
        self.assertEqual([b - a for a, b in zip(tree["num_splits"], tree["num_splits"][1:])], pieces)

    def test_pieces_cover_every_block_once(self):
        generator = random.Random(1)
        for _ in range(12):
            count = generator.randrange(1, 40)
            lengths = [generator.choice([0, 1, 63, 64, 65, generator.randrange(5000)]) for _ in range(count)]
            self.check_cover([-(-n // 64) for n in lengths], "--lengths", ",".join(map(str, lengths)), "--parts",
                             generator.randrange(1, 40), "--overhead", generator.randrange(8))

    def test_sparse(self):
        self.check_cover([4] * 3, "--topk", 250, "--batch", 3, "--parts", 5)
        self.check_cover([4 + 2] * 3, "--topk", 250, "--extra-topk", 100, "--batch", 3, "--parts", 7)
        self.check_cover([1, 1, 4], "--topk", 250, "--lengths", "0,64,250", "--parts", 2)

    def test_lengths_from_a_file_and_from_standard_input(self):
        path = self.folder / "lengths.txt"
        path.write_text("1000, 64\n0\t300\n")
        wanted = self.good("plan", "--lengths", "1000,64,0,300", "--parts", 4)
        self.assertEqual(self.good("plan", "--file", path, "--parts", 4), wanted)
        with open(path) as stream:
            self.assertEqual(self.good("plan", "--file", "-", "--parts", 4, stdin=stream), wanted)

    def test_table(self):
        text = self.good("plan", "--lengths", "1000,64,0,300", "--parts", 4, "--form", "2026-01")
        self.assertRegex(text, r"(?m)^ +0 +0 +1/2 +0\.\.11 +16$")
        self.assertRegex(text, r"(?m)^ +1 +0 +2/2 +11\.\.16 +10$")
        self.assertRegex(text, r"(?m)^ +3 +idle$")
        self.assertRegex(text, r"(?m)^num_splits 0 2 3 4 5$")

    def test_picture(self):
        path = self.folder / "plan.svg"
        self.good("plan", "--lengths", "1000,64,0,300", "--parts", 4, "--svg", path)
        root = xml.etree.ElementTree.fromstring(path.read_text())
        space = "{http://www.w3.org/2000/svg}"
        titles = [t.text for t in root.iter(space + "title")]
        self.assertEqual(titles[:3], ["request 0, split 0, blocks 0..11", "request 0, split 1, blocks 11..16",
                                      "request 1, split 0, blocks 0..1"])
        self.assertEqual(len(titles), 5)
        bars = [r for r in root.iter(space + "rect") if r.get("fill").startswith("hsl")]
        self.assertAlmostEqual(float(bars[0].get("width")) / float(bars[1].get("width")), 11 / 5, 3)
        for r in root.iter(space + "rect"):
            if r.get("x"):
                self.assertLessEqual(float(r.get("x")) + float(r.get("width")), float(root.get("width")))

    def test_bad_input(self):
        (self.folder / "words.txt").write_text("12 twelve")
        (self.folder / "empty.txt").write_text(" \n")
        (self.folder / "binary").write_bytes(b"1\0002")
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        for pattern, arguments in (
            ("--lengths, --file, or --topk", []),
            ("exclude each other", ["--lengths", "1", "--file", "x"]),
            ("'-5'|-5 is outside", ["--lengths", "-5"]),
            ("2147483648 is outside", ["--lengths", "2147483648"]),
            ("'5x' is not", ["--lengths", "3,5x"]),
            ("no lengths", ["--lengths", ""]),
            ("no lengths", ["--file", self.folder / "empty.txt"]),
            ("'twelve' is not", ["--file", self.folder / "words.txt"]),
            ("not a text", ["--file", self.folder / "binary"]),
            ("No such file", ["--file", self.folder / "absent"]),
            ("Is a directory", ["--file", self.folder]),
            ("--parts: 0 is outside", ["--lengths", "1", "--parts", "0"]),
            ("--form: '2024' is none of", ["--lengths", "1", "--form", "2024"]),
            ("go with --topk", ["--lengths", "1", "--batch", "2"]),
            ("either lengths or --batch", ["--topk", "64"]),
            ("No such file", ["--lengths", "1", "--svg", self.folder / "absent" / "x.svg"]),
            ("not a regular file", ["--lengths", "1", "--svg", "/dev/full"]),
            ("is not an option", ["1000"]),
        ):
            with self.subTest(pattern):
                self.bad(pattern, "plan", *arguments)
        self.bad("cannot write: File too large", "plan", "--lengths", "1", "--svg", self.folder / "x.svg",
                 preexec_fn=limit)


if __name__ == "__main__":
    main()
