# SPDX-License-Identifier: MIT
"""Cases of tests/data/make_sparse_dump.py (float64 attention in numpy, caches decoded there) on every backend here."""
import subprocess
import sys

from program import SOURCE, ProgramTest, main, st_meta, tiers

try:
    import numpy  # noqa: F401
except ImportError:
    print("numpy is not installed")
    sys.exit(77)


class Dump(ProgramTest):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "dump.safetensors"
        subprocess.run([sys.executable, "-B", SOURCE / "tests/data/make_sparse_dump.py", self.path], check=True)
        self.cases = [case.split(":") for case in st_meta(self.path)["cases"].split()]

    def compare(self, *backend):
        self.assertEqual(len(self.cases), 9)
        for operation, prefix in self.cases:
            with self.subTest(prefix, backend=backend):
                tree = self.good_json("run", operation, "--in", self.path, "--prefix", prefix, "--compare", self.path,
                                      *backend)
                self.assertEqual([(item["name"], item["ok"]) for item in tree["comparison"]],
                                 [("out", True), ("lse", True), ("max_logits", True)])

    def test_every_tier(self):
        for tier in tiers():
            self.compare("--backend", "cpu", "--isa", tier)

    def test_oracle(self):
        self.compare("--backend", "oracle")


if __name__ == "__main__":
    main()
