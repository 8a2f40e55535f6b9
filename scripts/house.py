#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The rules of the house, checked: who may include whom, budgets, the public surface, silence, heads of files.

Each rule is a function that yields complaints "path:line: sentence". No output but the last line means clean.
"""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
STANDARD = re.compile(r"^(assert|ctype|errno|float|inttypes|limits|math|setjmp|stdarg|stdatomic|stdbool|stddef|stdint|"
                      r"stdio|stdlib|string|time)\.h$")
INTRINSICS = re.compile(r"immintrin|xmmintrin|emmintrin|arm_neon|simde|cuda")
MAX_FILE, MAX_FUNCTION, MAX_ROLE, MAX_LINE = 600, 80, 150, 120


def tracked():
    out = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True,
                         check=True)
    return [ROOT / line for line in out.stdout.splitlines() if (ROOT / line).is_file()]


def rel(path):
    return path.relative_to(ROOT).as_posix()


def includes(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        m = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if m:
            yield number, m.group(1), '"' in line


def target(path, name, quoted):
    """The project's file that an include names, or None."""
    for base in ([path.parent] if quoted else []) + [ROOT / "src", ROOT / "include", ROOT / "tools/flashmla"]:
        candidate = (base / name).resolve()
        if candidate.is_file() and ROOT in candidate.parents:
            return rel(candidate)
    return None


# folder -> what of ours it may see, besides itself and the public headers
MAY_SEE = {
    "src/problem.h": [],
    "src/backend.h": ["src/problem.h"],
    "src/format/": ["src/problem.h"],
    "src/plan/": ["src/problem.h", "src/backend.h"],
    "src/oracle/": ["src/problem.h", "src/backend.h", "src/format/", "src/plan/"],
    "src/api/": ["src/problem.h", "src/backend.h", "src/format/"],
    "src/cpu/": ["src/problem.h", "src/backend.h", "src/format/", "src/plan/"],
    "src/cuda/host/": ["src/problem.h", "src/backend.h", "src/format/", "src/plan/", "src/cuda/"],
    "src/cuda/ptx/": [],
    "src/cuda/common/": ["src/cuda/ptx/"],
    "src/cuda/sm80/": ["src/cuda/ptx/", "src/cuda/common/"],
    "src/cuda/sm90a/": ["src/cuda/ptx/", "src/cuda/common/"],
    "tools/": [],
    "examples/": [],
}
PLAIN = ("src/api", "src/plan", "src/format", "src/oracle", "src/cpu/mqa", "src/cpu/mha", "src/cpu/quant")
ISA_FOLDERS = ["src/cpu/scalar/", "src/cpu/avx2/", "src/cpu/avx512bf16/", "src/cpu/amx/", "src/cpu/neon/"]
# A tier that is another one with some kernels replaced.
BUILT_ON = {"src/cpu/amx/": "src/cpu/avx512bf16/"}


def rule_includes(files):
    for path in files:
        name = rel(path)
        if path.suffix not in {".c", ".h", ".cu", ".cuh"}:
            continue
        if name.startswith("include/"):
            for number, inc, _ in includes(path):
                if not STANDARD.match(inc) and not inc.startswith("flashmla/"):
                    yield f"{name}:{number}: public headers include C standard headers only, not {inc}"
            continue
        home = max((k for k in MAY_SEE if name.startswith(k)), key=len, default=None)
        if home is None:
            continue
        isa = next((f for f in ISA_FOLDERS if name.startswith(f)), None)
        plain = name.startswith(PLAIN)
        for number, inc, quoted in includes(path):
            seen = target(path, inc, quoted)
            if seen is None:
                if plain and INTRINSICS.search(inc):
                    yield f"{name}:{number}: {home} sees no intrinsics and no CUDA ({inc})"
                continue
            if seen.startswith(("include/", home)) or any(seen.startswith(p) for p in MAY_SEE[home]):
                other = next((f for f in ISA_FOLDERS if seen.startswith(f)), None)
                if other and other not in (isa, BUILT_ON.get(isa)):
                    yield f"{name}:{number}: tiers do not see each other ({seen})"
                continue
            yield f"{name}:{number}: {home} must not see {seen}"


def rule_asm(files):
    for path in files:
        name = rel(path)
        if name.startswith("src/cuda/") and not name.startswith("src/cuda/ptx/") and path.suffix in {".cu", ".cuh"}:
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if re.search(r"\basm\b\s*(volatile)?\s*\(", line):
                    yield f"{name}:{number}: inline asm lives in src/cuda/ptx/ alone"


def functions(lines):
    """(first line, length, header) of each function body: a line that starts a brace in column 0 to its closing one."""
    start = None
    for number, line in enumerate(lines, 1):
        if line.startswith("{") and start is None:
            header, k = "", number - 2
            while k >= 0 and lines[k].strip() and not lines[k].startswith(("}", "#", "/*", " */")):
                header = lines[k] + " " + header
                k -= 1
            start = (number, header)
        elif line.startswith("}") and start is not None:
            yield start[0], number - start[0] - 1, start[1]
            start = None


def rule_budgets(files):
    for path in files:
        name = rel(path)
        if path.suffix not in {".c", ".h", ".cu", ".cuh", ".py"} or name.startswith("tests/data/"):
            continue
        text = path.read_text()
        lines = text.splitlines()
        waived = re.search(r"budget: ", text)
        if len(lines) > MAX_FILE and not waived:
            yield f"{name}: {len(lines)} lines, allowed {MAX_FILE} (cut it, or say why in a comment 'budget: ...')"
        for number, line in enumerate(lines, 1):
            if len(line) > MAX_LINE:
                yield f"{name}:{number}: {len(line)} columns, allowed {MAX_LINE}"
        if path.suffix == ".py" or name.startswith("tests/"):
            continue
        for number, length, header in functions(lines):
            allowed = MAX_ROLE if re.search(r"__global__|__device__", header) else MAX_FUNCTION
            near = "\n".join(lines[max(0, number - 12):number])
            if length > allowed and "budget: " not in near:
                yield f"{name}:{number}: function of {length} lines, allowed {allowed}"


def rule_surface(files):
    header = (ROOT / "include/flashmla/flashmla.h").read_text()
    declared = re.findall(r"FMLA_API [\w ]*?[ *](fmla_\w+)\(", header)
    exported = re.findall(r"^\s+(fmla_\w+);", (ROOT / "src/flashmla.map").read_text(), re.M)
    for symbol in sorted(set(declared) ^ set(exported)):
        yield f"src/flashmla.map: {symbol} is not both declared and exported"
    paragraphs = header.split("\n\n")
    for symbol in declared:
        family = symbol.removesuffix("_workspace_size")  # documented at its args struct
        spoken = [p for p in paragraphs if re.search(rf"[ *]({symbol}\(|{family}_args;)|}} {family}_args;", p)]
        if not any("/*" in p for p in spoken):
            yield f"include/flashmla/flashmla.h: {symbol} has no comment"


def rule_silent(files):
    for path in files:
        name = rel(path)
        if not name.startswith("src/") or path.suffix not in {".c", ".h", ".cu", ".cuh"}:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = re.sub(r'".*?"|/\*.*|//.*', "", line)
            if re.search(r"(?<!\w)(printf|puts|exit|abort|assert|perror)\s*\(", code) and "format(printf" not in line:
                yield f"{name}:{number}: the library never prints, exits, aborts or asserts"


def rule_heads(files):
    for path in files:
        name = rel(path)
        if path.suffix in {".c", ".h", ".cu", ".cuh"} and not name.startswith("tests/data/"):
            head = path.read_text()[:600]
            if "SPDX-License-Identifier: MIT" not in head or head.count("/*") < 2:
                yield f"{name}:1: a file opens with its licence line and a comment that says what it holds"
        if path.suffix in {".c", ".cu"} and re.search(r"#\s*if\s+0\b", path.read_text()):
            yield f"{name}: no #if 0"


def rule_cases(files):
    """tests/cases.md: a fault called tested is named in the files of its row, and every named test has a row."""
    table, rows = "tests/cases.md", {}
    for number, line in enumerate((ROOT / table).read_text().splitlines(), 1):
        m = re.match(r"\| (C\d{3}) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", line)
        if not m:
            if re.match(r"\| C\d", line):
                yield f"{table}:{number}: not a row of four columns"
            continue
        fault, state, where = m.groups()
        if fault in rows or (rows and fault < max(rows)):
            yield f"{table}:{number}: {fault} is not in order"
        rows[fault] = state
        if not re.match(r"(tested|benchmark|not planned|waits: \w)", state):
            yield f"{table}:{number}: unknown state '{state}'"
        places = re.findall(r"`(\w[\w/.]*/[\w.]+\.\w+)`", where)
        if not places and state.startswith(("tested", "benchmark")):
            yield f"{table}:{number}: {fault} is {state}, but no file is named"
        for place in places:
            if not (ROOT / place).is_file():
                yield f"{table}:{number}: {place} does not exist"
            elif state.startswith("tested") and not re.search(rf"{fault}(?!\d)", (ROOT / place).read_text(), re.I):
                yield f"{table}:{number}: {place} does not name {fault}"
    for path in files:
        name = rel(path)
        if name.startswith(("tests/", "tools/flashmla/check/ids")) and path.suffix in {".c", ".def", ".py"}:
            named = re.findall(r"(?:\b|_)c(\d{3})(?=[a-z]?_)|FAULT\(C(\d{3})", path.read_text())
            for lower, upper in sorted(set(named)):
                fault = "C" + lower + upper
                if not rows.get(fault, "").startswith(("tested", "waits: GPU")):
                    yield f"{name}: names {fault}, which {table} does not call tested"


def main():
    files = tracked()
    complaints = 0
    for rule in (rule_includes, rule_asm, rule_budgets, rule_surface, rule_silent, rule_heads, rule_cases):
        for complaint in rule(files):
            print(complaint)
            complaints += 1
    print(f"house rules: {len(files)} files, {complaints} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
