# SPDX-License-Identifier: MIT
"""check, bench, demo and accuracy as commands: what they say when all is well, and what they refuse."""
import json

from program import ProgramTest, main, make, run


class Check(ProgramTest):
    def test_a_small_operation_passes_and_is_counted(self):
        report = self.folder / "report.json"
        text = self.good("check", "--operation", "merge", "--isa", "scalar", "--json", report)
        self.assertRegex(text.splitlines()[-1], r"\A[1-9]\d* passed, 0 failed\Z")
        json.loads(report.read_text())

    def test_listed_cases_can_be_run_one_by_one(self):
        first = self.good("check", "--operation", "indices_convert", "--list").splitlines()[0]
        self.assertEqual(self.good("check", "--case", first).splitlines()[-1], "1 passed, 0 failed")

    def test_shares_are_the_whole(self):
        whole = self.good("check", "--operation", "merge", "--list").splitlines()
        shares = [self.good("check", "--operation", "merge", "--list", "--share", f"{k}/4").splitlines()
                  for k in (1, 2, 3, 4)]
        self.assertEqual(sorted(sum(shares, [])), sorted(whole))

    def test_shares_have_their_part_of_what_is_dear(self):
        def tokens(case):
            field = dict(word.split("=") for word in case.split(","))
            return int(field.get("b", 1)) * int(field.get("s_kv", 64)) * int(field.get("h_kv", 1))

        command = ["check", "--operation", "dense_decode", "--cases", "full", "--list"]
        dear = sorted(self.good(*command).split(), key=tokens)[-16:]
        self.assertGreater(tokens(dear[0]), 2**20)
        for k in range(1, 17):
            share = self.good(*command, "--share", f"{k}/16").split()
            self.assertIn(sum(case in dear for case in share), (0, 1, 2), f"share {k}")

    def test_processes_share_the_cases(self):
        alone, shared = self.folder / "alone.json", self.folder / "shared.json"
        command = ["check", "--operation", "dequantize", "--isa", "scalar"]
        last = self.good(*command, "--json", alone).splitlines()[-1]
        self.assertEqual(self.good(*command, "--json", shared, "--jobs", 3).splitlines()[-1], last)
        cases = [[(case["case"], case["verdict"]) for case in json.loads(path.read_text())["cases"]]
                 for path in (alone, shared)]
        self.assertEqual(*cases)

    def test_a_machine_without_the_device_may_be_skipped(self):
        done = run("check", "--operation", "merge", "--backend", "cuda", "--may-skip")
        self.assertIn(done.returncode, (0, 77))

    def test_bad_input(self):
        for pattern, arguments in (
            ("no operation 'softmax'", ["--operation", "softmax"]),
            ("no format 'v5'", ["--format", "v5"]),
            ("'nonsense'|\"nonsense\"", ["--case", "nonsense"]),
            ("'x'", ["--seed", "x"]),
            ("--isa", ["--isa", "sse"]),
            ("--share: '3/2'", ["--share", "3/2"]),
            ("--share: 'half'", ["--share", "half"]),
            ("--jobs: 0", ["--jobs", "0"]),
            ("--may-skip: without --jobs", ["--jobs", "2", "--may-skip"]),
            ("--sets: for --backend cuda", ["--sets", "portable"]),
            ("--kernels: 'wide'", ["--backend", "cuda", "--sets", "portable,wide"]),
            ("--profile: 98", ["--backend", "cuda", "--sets", "98"]),
            ("--sets: at most 8", ["--backend", "cuda", "--sets", ",".join(["best"] * 9)]),
        ):
            with self.subTest(arguments):
                self.bad(pattern, "check", *arguments)


class Bench(ProgramTest):
    def test_shapes_are_listed(self):
        names = self.good("bench", "--list", "--operation", "dense_decode").split()
        self.assertTrue(names)
        self.assertEqual(len(names), len(set(names)))

    def test_ablations_are_pairs_of_calls(self):
        for name, variants in (("crossover", ["alone", "pairs"]), ("seesaw", ["leader", "turns"]),
                               ("splits", ["whole", "cut"]), ("dequant", ["bf16", "v32-any-scale", "v32"])):
            names = self.good("bench", "--backend", "cuda", "--ablate", name, "--list").split()
            calls = [line.split("/", 3)[3] for line in names]
            self.assertEqual(names, [f"ablate/{name}/{v}/{call}" for call in dict.fromkeys(calls) for v in variants])
        self.bad("'x' is none of crossover", "bench", "--backend", "cuda", "--ablate", "x")
        self.bad("--ablate: for --backend cuda", "bench", "--ablate", "splits")

    def shapes(self, ratios):
        tree = {"for": "cpu", "groups": [{"name": "g", "operation": "merge", "topk": [2, 3]}], "ratios": ratios}
        (self.folder / "own.json").write_text(json.dumps(tree))
        return ["bench", "--list", "--shapes", self.folder]

    def test_ratios_that_are_not_understood_are_refused(self):
        good = {"of": "own/g/topk=3", "to": "own/g/topk=2", "at_most": 2}
        self.assertEqual(self.good(*self.shapes([good] * 16)).split(), ["own/g/topk=2", "own/g/topk=3"])
        for pattern, ratios in (
            ('own.json: group "ratios", entry 17: allowed are 16 ratios', [good] * 17),
            ('own.json: group "ratios", entry 2: allowed are "of" and "to"', [good, {"of": "a", "at_most": 1}]),
            ('own.json: group "ratios", entry 1: allowed are "of" and "to"', [{"to": "a", "at_most": 1}]),
            ('own.json: group "ratios", entry 1: allowed are "of" and "to"', [dict(good, to="x" * 500)]),
            ('own.json: group "ratios", entry 1: allowed is an "at_most"', [{"of": "a", "to": "b"}]),
            ('own.json: group "ratios": allowed is a list', good),
        ):
            with self.subTest(pattern):
                self.bad(pattern, *self.shapes(ratios))

    def test_bad_input(self):
        for pattern, arguments in (
            ("no shape matches", ["--shape", "no such shape"]),
            ("no such directory", ["--shapes", self.folder / "absent"]),
            ("no operation 'x'", ["--operation", "x"]),
            ("--runs", ["--runs", "many"]),
        ):
            with self.subTest(arguments):
                self.bad(pattern, "bench", *arguments)


class Accuracy(ProgramTest):
    def test_every_format_is_rated_and_narrower_ones_are_worse(self):
        rows = self.good_json("accuracy", "--tokens", 64, "--heads", 2)
        gaussian = {row["format"]: row["relative_error"] for row in rows
                    if row["data"] == "gaussian" and row["d_qk"] == 512}
        self.assertLess(gaussian["v41"], gaussian["v41-fp4"])
        self.assertLess(0, gaussian["v4"])

    def test_kernels_err_a_little_more(self):
        def errors(*arguments):
            rows = self.good_json("accuracy", "--tokens", 64, "--heads", 2, *arguments)
            return {(row["data"], row["d_qk"], row["format"]): row["relative_error"] for row in rows}

        exact, kernels = errors(), errors("--backend", "cpu", "--isa", "scalar")
        self.assertEqual(exact, errors("--backend", "oracle"))
        self.assertEqual(exact.keys(), kernels.keys())
        self.assertNotEqual(exact, kernels)
        for key, error in exact.items():
            self.assertAlmostEqual(kernels[key], error, delta=0.02 * error)

    def test_own_tensors(self):
        values = [((i * 37) % 101 - 50) / 50 for i in range(20 * 512)]
        path = self.file({"q": make("F32", [1, 2, 512], values[:1024]), "kv": make("F32", [20, 512], values)})
        self.assertTrue(self.good_json("accuracy", "--in", path))

    def test_bad_input(self):
        path = self.file({"q": make("F32", [1, 2, 8], [0] * 16)})
        for pattern, arguments in (
            ("No such file", ["--in", self.folder / "absent"]),
            ("kv", ["--in", path]),
            ("--tokens: 0", ["--tokens", "0"]),
            ("--heads", ["--heads", "x"]),
        ):
            with self.subTest(arguments):
                self.bad(pattern, "accuracy", *arguments)


class Demo(ProgramTest):
    def test_bad_input(self):
        self.bad("--backend", "demo", "--backend", "gpu")


if __name__ == "__main__":
    main()
