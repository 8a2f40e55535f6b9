# SPDX-License-Identifier: MIT
"""What scripts/benchmarks.py makes of results: like is compared with like, and a mark says where it is not."""
import importlib.util
import json
import pathlib
import tempfile
import unittest

from program import SOURCE


def record(name, us, span=None, kernels="best", tflops=100, gbps=10):
    one = {"name": name, "kernels": kernels, "profile_kib": 0, "time_us": {"median": us}, "tflops": tflops,
           "gbps": gbps, "limit": {"tflops": 800, "gbps": 4000}}
    return dict(one, span_us={"median": span}) if span else one


class Tables(unittest.TestCase):
    def setUp(self):
        spec = importlib.util.spec_from_file_location("benchmarks", SOURCE / "scripts/benchmarks.py")
        self.script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.script)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.script.ROOT = pathlib.Path(folder.name)
        self.results = self.script.ROOT / "bench/results/card"
        self.results.mkdir(parents=True)

    def write(self, name, *records, **more):
        (self.results / name).write_text(json.dumps(dict(more, records=records)))

    def rows(self, lines):
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]

    def test_spans_are_compared_with_spans(self):
        self.write("published.json", {"name": "g/a", "us": 20}, {"name": "g/b", "us": 20},
                   {"name": "g/c", "tflops": 50}, limit={"tflops": 400, "gbps": 4000})
        self.write("2026-01-01.json", record("g/a", 25, 10), record("g/b", 25), record("g/c", 25, 10),
                   record("g/d", 25), record("ablate/x/y/z", 25), date="2026-01-01")
        rows = {row[0]: row for row in self.rows(self.script.compared("card", "g/"))}
        self.assertEqual(set(rows), {"a", "b", "c", "d"})
        # twice as fast on twice the limit; 0.8 times as fast by the time between events; by published TFLOPS
        self.assertEqual([rows[name][-1] for name in "abcd"], ["1.00", "0.40 *", "1.00", ""])
        self.assertEqual([rows[name][1:3] for name in "ab"], [["25.0", "10.0"], ["25.0", ""]])

    def test_newer_results_count(self):
        self.write("2026-01-01.json", record("g/a", 25), date="2026-01-01")
        self.write("2026-01-02.json", record("g/a", 24), date="2026-01-02")
        self.assertEqual(self.rows(self.script.compared("card", "g/"))[0][1], "24.0")

    def test_variants_stand_below_each_other(self):
        self.write("2026-01-01.json", record("ablate/crossover/alone/b=1", 12, 10, kernels="unpaired"),
                   record("ablate/crossover/pairs/b=1", 12, 5),
                   record("ablate/splits/whole/b=2", 10, 9), record("ablate/splits/cut/b=2", 4))
        rows = self.rows(self.script.ablations("card"))
        self.assertEqual([row[:3] + row[-1:] for row in rows], [
            ["crossover", "b=1", "alone", "1.00"], ["crossover", "b=1", "pairs", "0.50"],
            ["splits", "b=2", "whole", "1.00"], ["splits", "b=2", "cut", "0.40"]])
        self.assertEqual(self.script.latency("card"), ["No results yet."])


if __name__ == "__main__":
    unittest.main()
