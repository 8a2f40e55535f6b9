#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Draws the tables of docs/benchmarks.md from bench/results/<device>/*.json, so that no figure is typed by hand.

A table stands between "<!-- begin NAME -->" and "<!-- end NAME -->". benchmarks.py rewrites the tables,
benchmarks.py --check fails if one is not what the results say. A result file is what `flashmla bench --json` wrote
("records", with the limits of the same run); of two files that hold a shape the newer counts. published.json in the
folder holds other people's figures.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/benchmarks.md"


def runs(device):
    """Runs of a device, oldest first."""
    found = []
    for path in sorted((ROOT / "bench/results" / device).glob("*.json")):
        tree = json.loads(path.read_text())
        if path.name != "published.json" and "records" in tree:
            found.append((tree.get("date", ""), path.name, tree))
    return [tree for _, _, tree in sorted(found, key=lambda run: run[:2])]


def newest(device):
    """(kernels, profile in KiB) -> shape's name -> record with its run's date."""
    sets = {}
    for tree in runs(device):
        for record in tree["records"]:
            kernels = record.get("kernels", tree.get("kernels", "best"))
            records = sets.setdefault((kernels, int(record.get("profile_kib", tree.get("profile_kib", 0)))), {})
            records[record["name"]] = dict(record, date=tree.get("date", ""))
    return sets


def published(device):
    path = ROOT / "bench/results" / device / "published.json"
    if not path.is_file():
        return {}, {}
    tree = json.loads(path.read_text())
    return tree["limit"], {record["name"]: record for record in tree["records"]}


def cell(value, digits=0, unit=""):
    return "" if value is None else f"{value:.{digits}f}{unit}"


def share(value, limit):
    return 100 * value / limit if value and limit else None


def short(name):
    return name.split("/", 1)[1].replace("_", "\\_") if "/" in name else name


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def ratio(record, other, limit):
    """How much faster than the published one, each as a share of its run's limit: the limit that is nearer.

    A published time is a span of kernels and is compared with ours; with "*" where ours was only taken between events.
    """
    own = record["limit"]
    shares = {kind: share(record[kind], own[kind]) or 0 for kind in ("gbps", "tflops")}
    near = max(shares, key=shares.get)
    mark = ""
    if "us" in other:
        mark = "" if "span_us" in record else " *"
        faster = other["us"] / record.get("span_us", record["time_us"])["median"]
    elif "tflops" in other:
        faster = record["tflops"] / other["tflops"]
    else:
        return ""
    return cell(faster * limit[near] / own[near], 2, mark) if own[near] else ""


def span(record):
    return cell(record["span_us"]["median"] if "span_us" in record else None, 1)


def compared(device, files):
    """Best kernels against the portable ones and against published figures, as shares of each run's own limits."""
    sets = newest(device)
    best, portable = sets.get(("best", 0), {}), sets.get(("portable", 0), {})
    limit, others = published(device)
    rows = []
    for name in list(best) + [n for n in portable if n not in best]:
        if not name.startswith(files):
            continue
        record = best.get(name) or portable[name]
        slow, other, own = portable.get(name), others.get(name, {}), record["limit"]
        ours = share(record["tflops"], own["tflops"])
        rows.append([
            short(name), cell(record["time_us"]["median"], 1), span(record),
            cell(record["tflops"]), cell(ours, 0, " %"),
            cell(record["gbps"]), cell(share(record["gbps"], own["gbps"]), 0, " %"),
            cell(slow and slow["tflops"]), cell(slow and slow["gbps"]), cell(other.get("us"), 1),
            cell(other.get("tflops")), ratio(record, other, limit),
        ])
    if not rows:
        return ["No results yet."]
    return table(["shape", "us", "span us", "TFLOPS", "of GEMM", "GB/s", "of copy", "portable TFLOPS", "portable GB/s",
                  "published us", "published TFLOPS", "ratio of shares"], rows)


def latency(device):
    rows = []
    for name, record in newest(device).get(("best", 0), {}).items():
        time = record["time_us"]
        if "graph" in time and time["median"] < 200 and not name.startswith("ablate/"):
            rows.append([short(name), cell(time["median"], 1), span(record), cell(time["graph"], 1),
                         cell(time["steady"], 1)])
    if not rows:
        return ["No results yet."]
    return table(["shape", "us", "span us", "in a graph", "one of many in a graph, warm"], rows)


def ablations(device):
    """A call's variants below each other in the order of the run, with their time in terms of the first one's."""
    calls = {}
    for record in (record for tree in runs(device) for record in tree["records"]):
        if record["name"].startswith("ablate/"):
            _, what, variant, call = record["name"].split("/", 3)
            calls.setdefault((what, call), {})[variant] = record
    rows = []
    for (what, call), variants in calls.items():
        first = next(iter(variants.values()))
        for variant, record in variants.items():
            kind = "span_us" if "span_us" in record and "span_us" in first else "time_us"
            rows.append([what, call.replace("_", "\\_"), variant, cell(record["time_us"]["median"], 1), span(record),
                         cell(record["tflops"]), cell(record["gbps"]),
                         cell(record[kind]["median"] / first[kind]["median"], 2)])
    if not rows:
        return ["No results yet."]
    return table(["technique", "call", "variant", "us", "span us", "TFLOPS", "GB/s", "of the first"], rows)


def profiles(device):
    sets = newest(device)
    kinds = sorted(kind for kind in sets if kind[1])
    names = [name for kind in kinds for name in sets[kind]]
    rows = [[short(name)] + [cell(sets[kind].get(name, {}).get("tflops")) for kind in kinds]
            for name in dict.fromkeys(names)]
    if not rows:
        return ["No results yet."]
    return table(["shape, TFLOPS"] + [f"{kernels}, {kib} KiB" for kernels, kib in kinds], rows)


def limits(device):
    rows = []
    for tree in runs(device):
        peaks = (tree.get("peaks") or [{}])[0]
        if "gemm_bf16_tflops" in peaks:
            rows.append([tree.get("date", ""), tree.get("device", ""), str(len(tree["records"])),
                         cell(peaks["gemm_bf16_tflops"]), cell(peaks["copy_gbps"])])
    if not rows:
        return ["No results yet."]
    return table(["date", "device", "records", "GEMM TFLOPS", "copy GB/s"], rows)


def processor(device):
    """Shapes on a CPU, on one thread and on more: of all runs the one with the middle share, and the goal."""
    shapes = {}
    for tree in runs(device):
        for record in tree["records"]:
            shapes.setdefault(record["name"], {}).setdefault(min(record["threads"], 2), []).append(record)
    for records in shapes.values():
        for threads, several in records.items():
            records[threads] = sorted(several, key=lambda record: record.get("of_limit", 0))[len(several) // 2]
    rows = []
    for name, records in shapes.items():
        row = [short(name)]
        for threads in (1, 2):
            record = records.get(threads, {})
            reached, goal = record.get("of_limit"), record.get("goal")
            row += [cell(record["time_us"]["median"] if record else None, 0), cell(record and 1000 * record["tflops"]),
                    cell(reached and 100 * reached, 1, " %"), cell(goal and 100 * goal, 0, " %")]
        rows.append(row)
    if not rows:
        return ["No results yet."]
    shares = ["GFLOP/s", "of limit", "goal"]
    return table(["shape", "1 thread, us"] + shares + ["2 threads, us"] + shares, rows)


TABLES = {
    "epyc-turin goals": lambda: processor("epyc-turin"),
    "h200 limits": lambda: limits("h200"),
    "h200 goals": lambda: compared("h200", "gpu_goals/"),
    "h200 latency": lambda: latency("h200"),
    "h200 ablations": lambda: ablations("h200"),
    "h200 profiles": lambda: profiles("h200"),
}


def main():
    text = PAGE.read_text()

    def drawn(match):
        return "\n".join([match.group(1), ""] + TABLES[match.group(2)]() + ["", match.group(3)])

    pattern = re.compile(r"(<!-- begin (.*?) -->).*?(<!-- end \2 -->)", re.S)
    new = pattern.sub(drawn, text)
    if sys.argv[1:] == ["--check"]:
        if new != text:
            print("docs/benchmarks.md: its tables are not those of bench/results; scripts/benchmarks.py draws them")
        return new != text
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
