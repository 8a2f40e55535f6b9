# SPDX-License-Identifier: MIT
"""Files that lie: each is refused with one line, and nothing is written. Files that are odd but legal are read."""
import json
import os
import resource
import struct

from program import ProgramTest, Tensor, main, make, st_bytes, st_read


def raw(header, data=b"", size=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def entry(dtype="F32", shape=(1,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


FOUR = b"\0" * 4
LIES = {
    "empty": (b"", "at least 8"),
    "seven bytes": (b"\2\0\0\0\0\0\0", "at least 8"),
    "only a size": (struct.pack("<Q", 2), "header claims 2 bytes"),
    "size beyond the file": (raw(b"{}", size=3), "header claims 3 bytes"),
    "size 2^60": (raw(b"{}", size=1 << 60), "header claims 1152921504606846976 bytes"),
    "size 2^64 - 1": (raw(b"{}", size=(1 << 64) - 1), "header claims 18446744073709551615 bytes"),
    "size 2^64 - 8": (raw(b"{}", size=(1 << 64) - 8), "header claims"),
    "size 0": (raw(b""), "not a JSON object"),
    "array": (raw(b"[]"), "not a JSON object"),
    "leading blank": (raw(b" {}"), "not a JSON object"),
    "not JSON": (raw(b'{"a": nonsense}'), "not JSON"),
    "half a JSON": (raw(b'{"a": {"dtype": "F32"'), "not JSON"),
    "deep nesting": (raw(b'{"a":' * 20000 + b"1" + b"}" * 20000), "not JSON"),
    "goes on": (raw(b"{}x"), "goes on"),
    "two objects": (raw(b"{}{}"), "goes on"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "not UTF-8"),
    "overlong UTF-8": (raw(b'{"\xc0\xaf": 1}'), "not UTF-8"),
    "surrogate": (raw(b'{"\xed\xa0\x80": 1}'), "not UTF-8"),
    "cut UTF-8": (raw(b'{"a": "\xe2\x82"}'), "not UTF-8"),
    "NUL byte": (raw(b'{"a\0b": 1}'), "NUL"),
    "escaped NUL": (raw(b'{"a\\u0000b": 1}'), "NUL"),
    "entry is a number": (raw({"a": 1}), "'a'"),
    "entry is null": (raw({"a": None}), "'a'"),
    "no shape": (raw({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, FOUR), "'a'"),
    "no offsets": (raw({"a": {"dtype": "F32", "shape": [1]}}, FOUR), "'a'"),
    "more fields": (raw({"a": dict(entry(), more=1)}, FOUR), "other fields"),
    "field twice": (raw(b'{"a":{"dtype":"F32","shape":[1],"shape":[1],"data_offsets":[0,4]}}', FOUR), "other fields"),
    "dtype is a number": (raw({"a": dict(entry(), dtype=3)}, FOUR), "'a'"),
    "unknown dtype": (raw({"a": entry("F33")}, FOUR), "unknown dtype 'F33'"),
    "dtype in lower case": (raw({"a": entry("f32")}, FOUR), "unknown dtype"),
    "dtype of other size": (raw({"a": entry("F64")}, FOUR), "hold 4 bytes"),
    "shape is a number": (raw({"a": dict(entry(), shape=1)}, FOUR), "'shape'"),
    "negative shape": (raw({"a": entry(shape=(-1,))}, FOUR), "dimension 0"),
    "fraction in shape": (raw({"a": entry(shape=(1.5,))}, FOUR), "dimension 0"),
    "text in shape": (raw({"a": entry(shape=("1",))}, FOUR), "dimension 0"),
    "huge dimension": (raw({"a": entry(shape=(1 << 63,))}, FOUR), "dimension 0"),
    "1e400 in shape": (raw(b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}', FOUR), "dimension 0"),
    "elements overflow": (raw({"a": entry(shape=(1 << 32, 1 << 32, 1))}, FOUR), "64 bits"),
    "elements overflow to 1": (raw({"a": entry(shape=(1 << 33, (1 << 31) + 1, 1 << 33))}, FOUR), "64 bits"),
    "elements overflow beside 0": (raw({"a": entry(shape=(1 << 40, 1 << 40, 0), end=0)}), "64 bits"),
    "elements overflow the sign": (raw({"a": entry(shape=(1 << 32, 1 << 31))}, FOUR), "63 bits"),
    "bytes overflow": (raw({"a": entry("F64", shape=(1 << 31, 1 << 30))}, FOUR), "hold 4 bytes"),
    "rank 6": (raw({"a": entry(shape=(1, 1, 1, 1, 1, 1))}, FOUR), "more than 5"),
    "shape too large": (raw({"a": entry(shape=(2,))}, FOUR), "hold 4 bytes"),
    "shape too small": (raw({"a": entry(shape=(0,))}, FOUR), "hold 4 bytes"),
    "one offset": (raw({"a": dict(entry(), data_offsets=[0])}, FOUR), "two whole numbers"),
    "three offsets": (raw({"a": dict(entry(), data_offsets=[0, 4, 4])}, FOUR), "two whole numbers"),
    "negative offset": (raw({"a": entry(begin=-4, end=0)}, FOUR), "two whole numbers"),
    "offsets reversed": (raw({"a": entry(begin=4, end=0)}, FOUR), "not inside"),
    "offsets beyond": (raw({"a": entry(begin=4, end=8)}, FOUR), "not inside"),
    "end beyond": (raw({"a": entry(shape=(2,), end=8)}, FOUR), "not inside"),
    "offset 2^53": (raw({"a": entry(begin=1 << 53, end=(1 << 53) + 4)}, FOUR), "'a'"),
    "overlap": (raw({"a": entry(), "b": entry(begin=0, end=4)}, FOUR), "overlapping"),
    "partial overlap": (raw({"a": entry(shape=(2,), end=8), "b": entry(begin=4, end=8)}, FOUR * 2), "overlapping"),
    "hole in front": (raw({"a": entry(begin=4, end=8)}, FOUR * 2), "hole"),
    "hole between": (raw({"a": entry(), "b": entry(begin=8, end=12)}, FOUR * 3), "hole"),
    "data left over": (raw({"a": entry()}, FOUR * 2), "end at data byte 4"),
    "data without tensors": (raw({}, FOUR), "end at data byte 0"),
    "name twice": (raw(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                       b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', FOUR * 2), "'a' occurs twice"),
    "metadata is an array": (raw({"__metadata__": []}), "__metadata__"),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "__metadata__: 'a'"),
    "metadata key twice": (raw(b'{"__metadata__":{"a":"1","a":"2"}}'), "'a' occurs twice"),
    "metadata twice": (raw(b'{"__metadata__":{},"__metadata__":{}}'), "occurs twice"),
}


class Reading(ProgramTest):
    def refuse(self, path, pattern):
        self.bad(pattern, "run", "merge", "--in", path, "--out", self.folder / "out.safetensors")

    def test_lies_are_refused(self):
        for name, (blob, pattern) in LIES.items():
            with self.subTest(name):
                path = self.folder / "lie.safetensors"
                path.write_bytes(blob)
                self.refuse(path, pattern)

    def test_a_header_beyond_the_formats_limit_is_refused(self):
        path = self.folder / "long.safetensors"
        with open(path, "wb") as stream:
            stream.write(struct.pack("<Q", 100000001))
            stream.truncate(100000100)
        self.refuse(path, "100000000 is the most")

    def test_what_is_not_a_file_is_refused(self):
        os.mkfifo(self.folder / "pipe")
        for path, pattern in ((self.folder, "not a regular file"), (self.folder / "pipe", "not a regular file"),
                              ("/dev/zero", "not a regular file"), (self.folder / "absent", "No such file"),
                              ("", "No such file")):
            with self.subTest(str(path)):
                self.refuse(path, pattern)

    def test_a_lie_in_the_file_to_compare_with_is_refused(self):
        states = {"outs": make("F32", [1, 1, 1, 4], [1, 2, 3, 4]), "lses": make("F32", [1, 1, 1], [0])}
        lie = self.folder / "lie.safetensors"
        lie.write_bytes(raw({"a": entry(begin=4, end=8)}, FOUR))
        self.bad("not inside", "run", "merge", "--in", self.file(states), "--compare", lie, "--out",
                 self.folder / "out.safetensors")

    def test_odd_but_legal_files_are_read(self):
        """Misaligned data, data out of order, empty tensors, scalars, foreign dtypes, escapes, padding."""
        outs, lses = make("F32", [1, 1, 1, 4], [1, 2, 3, 4]), make("F32", [1, 1, 1], [0.5])
        header = {
            "__metadata__": {"note": "caf\u00e9"},
            "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "lses": {"dtype": "F32", "shape": [1, 1, 1], "data_offsets": [19, 23]},
            "outs": {"dtype": "F32", "shape": [1, 1, 1, 4], "data_offsets": [3, 19]},
            "nothing": {"dtype": "I16", "shape": [0, 7], "data_offsets": [19, 19]},
            "foreign": {"dtype": "F8_E5M2", "shape": [], "data_offsets": [23, 24]},
        }
        text = json.dumps(header).encode() + b"  \n"
        path, out = self.folder / "in.safetensors", self.folder / "out.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"\1\2\3" + outs.data + lses.data + b"\0")
        self.good("run", "merge", "--in", path, "--out", out, "--ignore-unused")
        self.assertEqual(st_read(out)["out"].numbers(), [1, 2, 3, 4])
        self.assertEqual(st_read(out)["lse"].numbers(), [0.5])

    def test_a_foreign_dtype_as_input_is_refused(self):
        tensors = {"outs": Tensor("I16", [1, 1, 1, 4], b"\0" * 8), "lses": make("F32", [1, 1, 1], [0])}
        self.bad("no operation takes", "run", "merge", "--in", self.file(tensors), "--out", self.folder / "out")


class Writing(ProgramTest):
    def setUp(self):
        super().setUp()
        n = 4096
        self.states = self.file({"outs": make("F32", [1, n, 1, 4], [1.0] * (4 * n)),
                                 "lses": make("F32", [1, n, 1], [0.0] * n)})

    def command(self, out):
        return ("run", "merge", "--in", self.states, "--out", out)

    def test_a_full_disk_leaves_nothing_behind(self):
        limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        out = self.folder / "out.safetensors"
        self.bad("out.safetensors: cannot write: File too large", *self.command(out), preexec_fn=limit)
        out.write_bytes(b"as it was")
        self.bad("cannot write", *self.command(out), preexec_fn=limit)
        self.assertEqual(out.read_bytes(), b"as it was")

    def test_devices_and_folders_are_not_replaced(self):
        self.bad("not a regular file", *self.command("/dev/full"))
        self.bad("not a regular file", *self.command("/dev/null"))
        self.bad("not a regular file", *self.command(self.folder))
        self.assertTrue(os.path.exists("/dev/null") and not os.path.isfile("/dev/null"))

    def test_a_folder_that_is_not_there(self):
        self.bad("cannot create: No such file", *self.command(self.folder / "absent" / "out.safetensors"))

    def test_a_long_name(self):
        self.bad("cannot create: File name too long", *self.command(self.folder / ("x" * 250)))

    def test_an_existing_file_is_replaced_whole_and_a_link_is_followed(self):
        out, link = self.folder / "out.safetensors", self.folder / "link"
        out.write_bytes(b"old")
        link.symlink_to(out)
        self.good(*self.command(link))
        self.assertTrue(link.is_symlink())
        self.assertEqual(st_read(out)["lse"].shape, [4096, 1])
        self.assertEqual(len(list(self.folder.iterdir())), 3)

    def test_the_input_may_be_the_output(self):
        self.good("run", "merge", "--in", self.states, "--out", self.states)
        self.assertEqual(sorted(st_read(self.states)), ["lse", "out"])

    def test_what_is_written_follows_the_format(self):
        """Padded header, aligned tensors, no holes, and the same bytes every time."""
        out = self.folder / "out.safetensors"
        blobs = []
        for _ in range(2):
            self.good(*self.command(out))
            blobs.append(out.read_bytes())
        self.assertEqual(*blobs)
        size = struct.unpack("<Q", blobs[0][:8])[0]
        header = json.loads(blobs[0][8:8 + size])
        meta = header.pop("__metadata__")
        self.assertEqual((meta["operation"], meta["backend"]), ("merge", "cpu"))
        self.assertEqual((8 + size) % 64, 0)
        at = 0
        for item in sorted(header.values(), key=lambda i: i["data_offsets"]):
            self.assertEqual(item["data_offsets"][0], at)
            at = item["data_offsets"][1]
        self.assertEqual(8 + size + at, len(blobs[0]))


if __name__ == "__main__":
    main()
