#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""summary.py FOLDER: what run.sh left in a folder as one JSON on standard output.

How each step ended, and of the checks how many cases of each operation passed with which kernels, and which failed and
why. Small enough to be committed.
"""
import json
import pathlib
import sys


def add(counts, case, kernels):
    name = case["id"] if "id" in case else case["case"].split(",")[0].removeprefix("op=")
    group = "named faults" if "id" in case else name
    entry = counts.setdefault(f"{group}, {kernels}", {"passed": 0, "failed": 0, "not offered": 0, "failures": []})
    verdict = "failed" if case["verdict"] == "broken" else case["verdict"]
    entry[verdict] += 1
    if verdict == "failed":
        entry["failures"].append({"case": case.get("id") or case["case"], "why": case.get("why", "no reference")})


def main():
    folder = pathlib.Path(sys.argv[1])
    counts, steps = {}, []
    for line in (folder / "parts.jsonl").read_text().splitlines():
        steps.append(json.loads(line))
    for path in sorted(folder.glob("check-*.json")):
        tree = json.loads(path.read_text())
        kernels = tree.get("kernels", "best") + (f" {tree['profile_kib']} KiB" if tree.get("profile_kib") else "")
        matrix = "full" if path.name.startswith("check-full") else "quick"
        for case in tree["cases"]:
            add(counts, case, kernels if "id" in case else f"{kernels}, {matrix}")
    seconds = sum(step["seconds"] for step in steps)
    print(json.dumps({"steps": len(steps), "seconds of all steps": seconds,
                      "failed steps": [s["step"] for s in steps if s["status"] not in (0, 77)],
                      "checks": counts}, indent=1))


if __name__ == "__main__":
    main()
