# SPDX-License-Identifier: MIT
"""The ctypes mirror against the header: the numbers that the C tests pin, and the C compiler's own."""

import ctypes
import re
import shutil
import subprocess

import pytest
from conftest import ROOT

from flash_mla import _library as c

LAYOUT = ROOT / "tests/abi/layout.def"
LINES = [line for line in LAYOUT.read_text().splitlines() if re.match(r"(SIZE|FIELD|VALUE)\(", line)]


def parsed(kind):
    return [re.split(r",\s*", line[len(kind) + 1 : -1]) for line in LINES if line.startswith(kind + "(")]


@pytest.mark.parametrize("name, size", parsed("SIZE"))
def test_sizes(name, size):
    assert ctypes.sizeof(c.STRUCTS[name]) == int(size)


def test_fields_are_those_of_the_header_in_place():
    wanted = {(name, field): int(offset) for name, field, offset in parsed("FIELD")}
    ours = {
        (name, field): getattr(struct, field).offset
        for name, struct in c.STRUCTS.items()
        for field, *_ in struct._fields_
    }
    assert ours == wanted


@pytest.mark.parametrize("name, value", parsed("VALUE"))
def test_values(name, value):
    assert getattr(c, name[len("FMLA_") :]) == int(value)


def test_the_compiler_agrees(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    lines = [f'printf("%zu\\n", sizeof({name}));' for name in c.STRUCTS]
    lines += [
        f'printf("%zu\\n", offsetof({name}, {field}));'
        for name, struct in c.STRUCTS.items()
        for field, *_ in struct._fields_
    ]
    lines += ['printf("%g\\n", (double)FMLA_SCALE_DEFAULT);', 'printf("%d\\n", FMLA_MAX_RANK);']
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <flashmla/flashmla.h>\n#include <stdio.h>\nint main(void)\n{\n"
        + "\n".join(lines)
        + "\nreturn 0;\n}\n"
    )
    subprocess.run([compiler, "-I", ROOT / "include", source, "-o", tmp_path / "layout"], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.split()
    wanted = [ctypes.sizeof(struct) for struct in c.STRUCTS.values()]
    wanted += [
        getattr(struct, field).offset for struct in c.STRUCTS.values() for field, *_ in struct._fields_
    ]
    assert [float(x) for x in printed] == [float(x) for x in wanted] + [c.SCALE_DEFAULT, c.MAX_RANK]


def test_every_struct_of_the_header_is_mirrored():
    text = "".join(
        (ROOT / "include/flashmla" / name).read_text() for name in ("flashmla.h", "flashmla_types.h")
    )
    assert set(re.findall(r"^\} (fmla_\w+);", text, re.M)) - set(c.STRUCTS) == {
        name
        for name in re.findall(r"^\} (fmla_\w+);", text, re.M)
        if re.search(rf"typedef enum {name} ", text)
    }


def test_version_is_the_headers():
    import flash_mla

    text = (ROOT / "include/flashmla/flashmla_version.h").read_text()
    assert flash_mla.__version__ == re.search(r'VERSION_STRING "(.*)"', text).group(1)
