#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""summary.py FOLDER: what run.sh left in a folder as one JSON on standard output.

How each step ended; of the checks how many cases of each operation passed with which kernels, in how many seconds of
all processes together, and which failed and why; of compute-sanitizer how many errors each tool found with which
kernels, and which cases it did not get through and why. Small enough to be committed.
"""
import json
import pathlib
import re
import sys

FOUND = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")


def add(counts, group, case, kernels, verdict, why, seconds):
    entry = counts.setdefault(f"{group}, {kernels}", {})
    verdict = "failed" if verdict == "broken" else verdict
    entry[verdict] = entry.get(verdict, 0) + 1
    entry["seconds"] = entry.get("seconds", 0) + seconds
    if verdict == "failed":
        entry.setdefault("failures", []).append({"case": case, "why": why})


def checks(folder):
    counts = {}
    for path in sorted(folder.glob("check-*.json")):
        tree = json.loads(path.read_text())
        one = tree.get("kernels", "best") + (f" {tree['profile_kib']} KiB" if tree.get("profile_kib") else "")
        matrix = "full" if path.name.startswith("check-full") else "quick"
        if tree.get("cases_not_run"):
            counts.setdefault(path.stem.removeprefix("check-"), {"seconds": 0})["not run"] = tree["cases_not_run"]
        for case in tree["cases"]:
            if "id" in case:
                add(counts, "named faults", case["id"], case.get("set", one), case["verdict"],
                    case.get("why", "no reference"), case["seconds"])
                continue
            group = case["case"].split(",")[0].removeprefix("op=")
            verdicts = case.get("verdicts", {one: case.get("verdict")})
            for name, verdict in verdicts.items():
                why = case.get("why", "no reference")
                why = why.get(name, "no reference") if isinstance(why, dict) else why
                kernels = f"portable {name} KiB" if name.isdigit() else name
                add(counts, group, case["case"], f"{kernels}, {matrix}", verdict, why, case["seconds"] / len(verdicts))
    for entry in counts.values():
        entry["seconds"] = round(entry["seconds"], 1)
    return counts


def sanitizer(folder, steps):
    """Of each tool and set: cases looked at, errors and warnings found, cases not run."""
    tools = {}
    for step in steps:
        if step["step"] == "sanitizer":
            version = re.search(r"^Version (\S+)", (folder / "sanitizer.log").read_text(errors="replace"), re.M)
            tools["version"] = version.group(1) if version else "unknown"
        if not step["step"].startswith("sanitize-"):
            continue
        tool, kernels = step["step"].split("-")[1:3]
        entry = tools.setdefault(f"{tool}, {kernels}", {"cases": 0, "errors": 0, "warnings": 0})
        text = (folder / f"{step['step']}.log").read_text(errors="replace")
        case = re.search(r"^case: (.*)$", text, re.M)
        case = case.group(1) if case else step["step"]
        options = re.search(r"^options: (.*)$", text, re.M)
        if options:
            entry["options"] = options.group(1)
        if step["status"] == 77:
            reason = re.findall(r"^not run: (.*)$", text, re.M)
            entry.setdefault("not run", []).append({"case": case, "why": reason[-1] if reason else "unknown"})
            continue
        found = [[int(n) for n in match if n] for match in FOUND.findall(text)]
        entry["cases"] += 1
        entry["errors"] += sum(numbers[0] for numbers in found)
        entry["warnings"] += sum(numbers[1] for numbers in found if len(numbers) > 1)
        if step["status"] != 0:
            entry.setdefault("failed", []).append({"case": case, "status": step["status"],
                                                   "last line": text.strip().splitlines()[-1]})
    return tools


def main():
    folder = pathlib.Path(sys.argv[1])
    steps = [json.loads(line) for line in (folder / "parts.jsonl").read_text().splitlines()]
    result = {"steps": len(steps), "seconds of all steps": sum(step["seconds"] for step in steps),
              "failed steps": [s["step"] for s in steps if s["status"] not in (0, 77)],
              "steps not possible here": [s["step"] for s in steps if s["status"] == 77], "checks": checks(folder)}
    tools = sanitizer(folder, steps)
    if tools:
        result["compute-sanitizer"] = tools
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
