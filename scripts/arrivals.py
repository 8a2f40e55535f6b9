#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""arrivals.py OBJECT...: whether kernels arrive at a barrier while loads from shared memory are under way.

An arrival of sm_90 does not wait for the warp's loads. If it lets somebody overwrite what they read, results are
wrong once in some thousand pieces: no test of a few cases sees it, and the compiler may put loads before arrivals
that the source has after each other's results. So this reads the machine code (`cuobjdump -sass`): every load names a
scoreboard, every instruction those it waits for; between a load and an arrival that follows it there must be such a
wait. Loads further back than WINDOW instructions are not looked at. Exit status 1 if there is none, or no kernel; 77
without cuobjdump.
"""

import re
import shutil
import subprocess
import sys

WINDOW = 40
ARCHITECTURE = "sm_90"  # its arrivals are one instruction; stands for sm_90a, too
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")


def instructions(text):
    """(kernel, text, scoreboard that it sets or 7, mask of those that it waits for) of each instruction."""
    kernel = pending = None
    for line in text.splitlines():
        if found := re.search(r"Function : (\S+)", line):
            kernel = found.group(1)
        elif found := INSTRUCTION.match(line):
            pending = found.group(1)
        elif (found := CONTROL.match(line)) and pending:
            control = int(found.group(1), 16)
            yield kernel, pending, control >> 46 & 7, control >> 52 & 63
            pending = None


def overtaken(text):
    """(kernel, arrival, load) wherever an arrival does not wait for a load."""
    loads, last = [], None
    for number, (kernel, code, sets, waits) in enumerate(instructions(text)):
        if kernel != last or "EXIT" in code:
            loads, last = [], kernel
        for board in range(6):
            done = [i for i, load in enumerate(loads) if load[1] == board]
            if waits >> board & 1 and done:
                loads = loads[done[-1] + 1 :]  # loads of a warp end in order
        if re.search(r"\bLDSM?\b", code) and "RZ, [RZ]" not in code:
            loads.append((number, sets, code))
        if "SYNCS.ARRIVE" in code and code.rstrip().endswith("RZ"):  # else it announces bytes, and lets nobody in
            yield from ((kernel, code, load[2]) for load in loads[-1:] if number - load[0] < WINDOW)


def main():
    tool = shutil.which("cuobjdump")
    if not tool:
        print("arrivals: not checked, cuobjdump is not here")
        return 77
    bad = kernels = 0
    for path in sys.argv[1:]:
        text = subprocess.run([tool, "-arch", ARCHITECTURE, "-sass", path], capture_output=True, text=True).stdout
        kernels += text.count("Function : ")
        for kernel, arrival, load in overtaken(text):
            print(f"error: {kernel}: {arrival.strip()} does not wait for {load.strip()}")
            bad += 1
    print(f"arrivals: {bad} overtake loads in {kernels} kernels")
    return 1 if bad or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
