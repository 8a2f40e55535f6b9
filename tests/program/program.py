# SPDX-License-Identifier: MIT
"""What the tests of the program share: running it, and safetensors files written and read without any package."""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ.get("FLASHMLA_SOURCE", pathlib.Path(__file__).resolve().parents[2]))
PROGRAM = os.environ.get("FLASHMLA_PROGRAM", str(SOURCE / "build/default/tools/flashmla/flashmla"))
GOLDEN = SOURCE / "tests/data/golden"

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2}
CODE = {"F16": "e", "F32": "f", "F64": "d", "I32": "i", "I64": "q", "U8": "B", "F8_E4M3": "B", "F8_E8M0": "B",
        "I16": "h"}


class Tensor:
    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, list(shape), bytes(data)

    def numbers(self):
        if self.dtype == "BF16":
            return [bf16_value(h) for h in struct.unpack(f"<{len(self.data) // 2}H", self.data)]
        return list(struct.unpack(f"<{len(self.data) // WIDTH[self.dtype]}{CODE[self.dtype]}", self.data))


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bf16_bits(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def bf16_value(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def bf16(x):
    return bf16_value(bf16_bits(x))


def make(dtype, shape, values):
    values = list(values)
    if dtype == "BF16":
        return Tensor(dtype, shape, struct.pack(f"<{len(values)}H", *map(bf16_bits, values)))
    return Tensor(dtype, shape, struct.pack(f"<{len(values)}{CODE[dtype]}", *values))


def st_bytes(tensors, meta=None):
    """A file's bytes: the header as the format demands, the data in the order given."""
    header, data = {}, b""
    if meta:
        header["__metadata__"] = meta
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [len(data), len(data) + len(t.data)]}
        data += t.data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def st_read(path):
    blob = pathlib.Path(path).read_bytes()
    size = struct.unpack("<Q", blob[:8])[0]
    header = json.loads(blob[8:8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, item in header.items():
        begin, end = item["data_offsets"]
        tensors[name] = Tensor(item["dtype"], item["shape"], blob[8 + size + begin:8 + size + end])
    return tensors


def st_meta(path):
    blob = pathlib.Path(path).read_bytes()
    return json.loads(blob[8:8 + struct.unpack("<Q", blob[:8])[0]]).get("__metadata__", {})


def run(*arguments, **options):
    """Runs the program; on the CPU unless the arguments say otherwise, so that a GPU in the machine changes nothing."""
    if arguments and arguments[0] in ("run", "quantize", "dequantize", "convert") and "--backend" not in arguments:
        arguments += ("--backend", "cpu")
    return subprocess.run([PROGRAM, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=300, **options)


_tiers = []


def tiers():
    """The instruction tiers that this build and processor offer."""
    if not _tiers:
        _tiers.extend(json.loads(run("info", "--json", "--backend", "cpu").stdout)["isa_available"])
    return _tiers


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="flashmla-test-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def file(self, tensors, meta=None, name="in.safetensors"):
        path = self.folder / name
        path.write_bytes(st_bytes(tensors, meta))
        return path

    def good(self, *arguments, **options):
        """Runs, demands success and a silent standard error, gives standard output."""
        done = run(*arguments, **options)
        self.assertEqual((done.returncode, done.stderr), (0, ""), f"{arguments}\n{done.stdout}")
        return done.stdout

    def good_json(self, *arguments, **options):
        return json.loads(self.good(*arguments, "--json", **options))

    def bad(self, pattern, *arguments, status=2, **options):
        """Runs, demands exit status 2 and one line on standard error that matches; nothing may have been written."""
        before = sorted(self.folder.iterdir())
        done = run(*arguments, **options)
        self.assertEqual(done.returncode, status, f"{arguments}\n{done.stdout}{done.stderr}")
        self.assertRegex(done.stderr, r"\Aflashmla: [^\n]+\n\Z", str(arguments))
        self.assertRegex(done.stderr, pattern, str(arguments))
        self.assertEqual(sorted(self.folder.iterdir()), before, str(arguments))

    def results(self, operation, tensors, *arguments, meta=None):
        """Runs an operation on tensors and gives the output tensors."""
        path, out = self.file(tensors, meta), self.folder / "out.safetensors"
        self.good("run", operation, "--in", path, "--out", out, *arguments)
        return st_read(out)

    def assertClose(self, got, wanted, abs_tolerance, rel_tolerance):
        self.assertEqual(len(got), len(wanted))
        for i, (a, b) in enumerate(zip(got, wanted)):
            if a != b:
                self.assertLessEqual(abs(a - b), abs_tolerance + rel_tolerance * abs(b), f"element {i}: {a}, not {b}")


main = unittest.main
