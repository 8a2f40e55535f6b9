# SPDX-License-Identifier: MIT
"""The program as a whole: help, unknown words, the options of every command, info, a full standard output."""
import os
import re
import subprocess

from program import PROGRAM, SOURCE, ProgramTest, main, run


def commands():
    text = run("help").stdout.split("commands:\n", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^  (\S+)", text, re.M)


class Words(ProgramTest):
    def test_help_lists_the_commands(self):
        self.assertEqual(self.good("help"), self.good("--help"))
        for name in ("info", "run", "quantize", "dequantize", "convert", "explain", "plan", "check", "bench", "demo",
                     "accuracy"):
            self.assertIn(name, commands())

    def test_every_command_tells_its_options(self):
        for name in commands():
            with self.subTest(name):
                text = self.good(name, "--help")
                self.assertTrue(text.startswith(f"usage: flashmla {name}"), text)
                self.assertIn("--json", text)
                self.assertEqual(self.good(name, "-h"), text)

    def test_every_command_refuses_what_it_does_not_know(self):
        for name in commands():
            with self.subTest(name):
                self.bad("'--no-such'", name, "--no-such")
                self.bad("'-z'", name, "-z")

    def test_version(self):
        header = (SOURCE / "include/flashmla/flashmla_version.h").read_text()
        wanted = re.search(r'VERSION_STRING "(.*)"', header).group(1)
        self.assertEqual(self.good("--version"), f"flashmla {wanted}\n")
        self.assertEqual(self.good_json("info")["version"], wanted)

    def test_no_command_and_unknown_command(self):
        self.bad("no command")
        self.bad("unknown command 'inf'", "inf")
        self.bad(r"unknown command 'two lines'", "two\nlines")

    def test_an_option_without_its_value(self):
        self.bad("'--isa' needs a value", "info", "--isa")

    def test_full_standard_output(self):
        for command in (["info"], ["explain"], ["help"], ["plan", "--lengths", "5", "--json"]):
            with self.subTest(command[0]), open("/dev/full", "w") as full:
                done = subprocess.run([PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True)
                self.assertEqual(done.returncode, 2)
                self.assertEqual(done.stderr, "flashmla: cannot write standard output: No space left on device\n")


class Backends(ProgramTest):
    def test_values(self):
        for pattern, arguments in (
            ("--backend: 'gpu' is none of auto, cpu, cuda, oracle", ["--backend", "gpu"]),
            ("--isa: 'sse' is none of", ["--isa", "sse"]),
            ("--threads: 'x' is not a whole number", ["--threads", "x"]),
            ("--threads: -1 is outside 0..4096", ["--threads", "-1"]),
            ("--threads: 99999999999999999999 is outside", ["--threads", "99999999999999999999"]),
            ("--threads: '1.5' is not a whole number", ["--threads", "1.5"]),
            ("--device-index: -1 is outside", ["--device-index", "-1"]),
            ("--kernels: 'fast' is none of best, portable, hopper, unpaired, leader, turns", ["--kernels", "fast"]),
            ("--profile: 100 is none of 99, 163, 227", ["--profile", "100"]),
            ("--profile: 48 is outside 99..227", ["--profile", "48"]),
            ("is not an option", ["more"]),
        ):
            with self.subTest(arguments):
                self.bad(pattern, "info", *arguments)

    def test_tiers_are_used_or_refused(self):
        available = self.good_json("info", "--backend", "cpu")["isa_available"]
        for tier in ("scalar", "avx2", "avx512bf16", "amx", "neon"):
            with self.subTest(tier):
                if tier in available:
                    tree = self.good_json("info", "--backend", "cpu", "--isa", tier)
                    self.assertEqual((tree["backend"], tree["isa_used"]), ("cpu", tier))
                else:
                    self.bad(tier, "info", "--backend", "cpu", "--isa", tier)

    def test_threads_and_environment(self):
        self.assertEqual(self.good_json("info", "--backend", "cpu", "--threads", 3)["threads"], 3)
        environment = dict(os.environ, FLASHMLA_ISA="scalar")
        self.assertEqual(self.good_json("info", "--backend", "cpu", env=environment)["isa_used"], "scalar")
        self.bad("FLASHMLA_ISA", "info", "--backend", "cpu", env=dict(os.environ, FLASHMLA_ISA="sse9"))

    def test_cuda_is_listed_or_its_absence_told(self):
        tree = self.good_json("info")
        cuda = [d for d in tree["devices"] if d["device"] == "cuda"]
        self.assertEqual(tree["devices"][0]["device"], "cpu")
        self.assertGreaterEqual(len(cuda), 1)
        if "absent" in cuda[0]:
            self.bad("CUDA|cuda", "info", "--backend", "cuda")


class Info(ProgramTest):
    def test_formats(self):
        formats = {f["name"]: f for f in self.good_json("info")["formats"]}
        sizes = {"bf16": 0, "f16": 0, "v32": 656, "v4": 584, "v41": 528, "v41-page": 528, "v41-fp4": 288,
                 "v41-fp4-page": 288}
        self.assertEqual({name: f["bytes_per_token"] for name, f in formats.items()}, sizes)
        self.assertEqual([n for n, f in formats.items() if f["extra_only"]], ["v41-fp4", "v41-fp4-page"])
        v4 = formats["v4"]
        self.assertEqual((v4["layout"], v4["group"], v4["rope_dims"]), ("page", 64, 64))

    def test_combinations(self):
        operations = self.good_json("info", "--backend", "cpu")["operations"]
        self.assertEqual(len(operations), 16)
        self.assertTrue(all(operations.values()), operations)
        sparse = operations["sparse_decode"]
        for wanted in ("v32 (576)", "v4 + v4 (512)", "v41 + v41-fp4 (512)", "bf16 (512, 576)"):
            self.assertIn(wanted, sparse)
        for refused in ("v41-fp4", "v32 + v4", "v41 + v4"):
            self.assertFalse([pair for pair in sparse if pair.startswith(refused + " (")], refused)
        self.assertIn("BF16 (192, 128)", operations["mha_forward"])

    def test_the_text_tells_the_same(self):
        tree, text = self.good_json("info", "--backend", "cpu"), self.good("info", "--backend", "cpu")
        for name, pairs in tree["operations"].items():
            for pair in pairs:
                self.assertIn(pair, text)
        for item in tree["formats"]:
            self.assertRegex(text, rf"(?m)^  {item['name']} ")


if __name__ == "__main__":
    main()
