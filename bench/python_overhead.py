#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What one decode call costs in Python, beyond the C call: from the call to the launch, in microseconds.

The same small decode is made through flash_mla and, with the very same arguments and a ready args struct, through the C
function. Each is timed call by call and the medians are subtracted; on CUDA nothing waits inside a timed call, and the
queue is emptied between groups of calls. Prints a table, and writes it as JSON.

    PYTHONPATH=python FLASHMLA_LIBRARY=build/default/src/libflashmla.so python3 bench/python_overhead.py [--json FILE]
"""

import argparse
import ctypes
import json
import statistics
import sys
import time

import torch

import flash_mla
from flash_mla import _context
from flash_mla import _library as c
from flash_mla import quant

GROUP, GROUPS = 25, 120
LIMIT_US = 25.0


def dense(device):
    """A dense decode call over a bf16 cache: (positional, keywords)."""
    q = torch.zeros(2, 1, 16, 576, dtype=torch.bfloat16, device=device)
    cache = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16, device=device)
    table = torch.arange(4, dtype=torch.int32, device=device).reshape(2, 2)
    return (q, cache, table, torch.full((2,), 64, dtype=torch.int32, device=device), 512), {"causal": True}


def sparse(device, layout, d):
    """A sparse decode call over a quantised cache."""
    cache = quant.quantize_k_cache(torch.ones(2, 64, 1, d, dtype=torch.bfloat16, device=device), layout)
    indices = torch.arange(64, dtype=torch.int32, device=device).reshape(1, 1, 64).repeat(2, 1, 1)
    q = torch.zeros(2, 1, 64, d, dtype=torch.bfloat16, device=device)
    return (q, cache, None, None, 512), {"indices": indices}


def everything(device):
    """Main and extra cache, lengths, sink."""
    arguments, keywords = sparse(device, quant.KVCacheLayout.V41_FP8Sparse, 512)
    _, extra = sparse(device, quant.KVCacheLayout.V41_FP4Sparse, 512)
    keywords.update(
        extra_k_cache=sparse(device, quant.KVCacheLayout.V41_FP4Sparse, 512)[0][1],
        extra_indices_in_kvcache=extra["indices"],
        topk_length=torch.full((2,), 50, dtype=torch.int32, device=device),
        extra_topk_length=torch.full((2,), 9, dtype=torch.int32, device=device),
        attn_sink=torch.zeros(64, device=device),
    )
    return arguments, keywords


CASES = {
    "dense": dense,
    "sparse V3.2": lambda device: sparse(device, quant.KVCacheLayout.V32_FP8Sparse, 576),
    "sparse V4.1 + fp4, lengths, sink": everything,
}


def c_call(call):
    """The C call that a Python call ends in, ready to be made again: the library's function is watched once."""
    real, seen = c.lib.fmla_decode, {}

    def watch(handle, pointer, stream):
        args = c.DecodeArgs.from_buffer_copy(ctypes.cast(pointer, ctypes.POINTER(c.DecodeArgs))[0])
        seen.update(handle=handle, args=args, stream=stream)
        return real(handle, pointer, stream)

    c.lib.fmla_decode = watch
    try:
        flash_mla._plans.forget()
        seen["results"] = call()
    finally:
        c.lib.fmla_decode = real
        flash_mla._plans.forget()
    pointer = ctypes.byref(seen["args"])
    if seen["args"].workspace_size:  # memory that outlives the call
        seen["memory"] = torch.empty(seen["args"].workspace_size, dtype=torch.uint8, device="cuda")
        seen["args"].workspace = seen["memory"].data_ptr()
    handle, stream = seen["handle"], seen["stream"]
    return (lambda: real(handle, pointer, stream)), seen


def medians_us(calls, wait):
    """Median time of one call of each, in microseconds. Groups of the calls take turns, so that all of them meet the
    same clocks and neighbours; the first quarter is warm-up."""
    samples = [[] for _ in calls]
    for _ in range(GROUPS):
        for call, mine in zip(calls, samples):
            for _ in range(GROUP):
                begin = time.perf_counter_ns()
                call()
                mine.append(time.perf_counter_ns() - begin)
            wait()
    return [statistics.median(mine[len(mine) // 4 :]) / 1000 for mine in samples]


def measure(device):
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    rows = {}
    for name, make in CASES.items():
        arguments, keywords = make(device)
        for meta in (False, True):
            extra = (flash_mla.get_mla_metadata()[0],) if meta else ()

            def call(arguments=arguments + extra, keywords=keywords):
                return flash_mla.flash_mla_with_kvcache(*arguments, **keywords)

            plain, keep = c_call(call)
            assert plain() == c.OK
            python, native = medians_us((call, plain), wait)
            rows[name + (", metadata object" if meta else "")] = {
                "python_us": round(python, 2),
                "c_us": round(native, 2),
                "overhead_us": round(python - native, 2),
            }
            del keep
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="where to write the table")
    parser.add_argument("--limit", type=float, default=LIMIT_US, help="fail above this many microseconds (CUDA)")
    options = parser.parse_args()
    rows = measure(options.device)
    print(f"{'decode call':52} {'Python':>9} {'C':>9} {'beyond C':>9}   us, medians")
    for name, row in rows.items():
        print(f"{name:52} {row['python_us']:9.2f} {row['c_us']:9.2f} {row['overhead_us']:9.2f}")
    worst = max(row["overhead_us"] for row in rows.values())
    if options.json:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        report = {
            "device": name,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "threads": _context.c.lib.fmla_context_threads(_context.context((c.DEVICE_CPU, 0)).handle),
            "limit_us": options.limit,
            "worst_us": worst,
            "calls": rows,
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
            file.write("\n")
    return int(options.device == "cuda" and worst > options.limit)


if __name__ == "__main__":
    sys.exit(main())
