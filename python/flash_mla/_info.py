# SPDX-License-Identifier: MIT
"""What `flashmla info` prints, from Python: version, devices, tiers, formats, and the accepted combinations."""

import ctypes

from . import _library as c
from ._context import context

_LAYOUTS = ("plain", "record", "page")  # in the order of fmla_kv_layout
_WIDTHS = (512, 576)
_TAKES_CACHE = (
    c.OP_DENSE_DECODE,
    c.OP_SPARSE_DECODE,
    c.OP_SPARSE_PREFILL,
    c.OP_FUSED_PREFILL,
    c.OP_FUSED_DECODE,
    c.OP_QUANTIZE,
    c.OP_DEQUANTIZE,
    c.OP_CONVERT,
)
_TAKES_TWO = (c.OP_SPARSE_DECODE, c.OP_FUSED_DECODE)
_MHA_WIDTHS = ((192, 128), (128, 128))


def _devices():
    for kind in (c.DEVICE_CPU, c.DEVICE_CUDA):
        name = c.name_of("device_name", kind)
        for index in range(1024):
            status, info = c.device_info(kind, index)
            if status != c.OK:
                if index == 0:
                    yield f"  {name:<7} {c.name_of('status_string', status)}"
                break
            yield (
                f"  {name:<5} {info.index} {info.name.decode()}: {info.compute_units} units, "
                f"{info.memory_bytes / 2 ** 30:.1f} GiB, kernels {info.kernels.decode()}"
            )


def _formats():
    for kv_format in range(1, c.KV_COUNT):
        f = c.format_info(kv_format)
        scale = c.name_of("dtype_name", f.scale) if f.group else "none"
        yield (
            f"  {f.name.decode():<14}{_LAYOUTS[f.layout]:<8}{f.d_qk or 'any':>6}{f.quant_dims:7}{f.rope_dims:6}"
            f"{c.name_of('dtype_name', f.element):>9}{f.group:7}{scale:>9}"
            f"{f.bytes_per_token if f.d_qk else '2 * d_qk':>13}{'  extra only' if f.extra_only else ''}"
        )


def _supported(here, operation, kv_format=0, extra=0, q_dtype=0, d_qk=0, d_v=0):
    query = c.sized(c.SupportQuery)
    query.operation, query.kv_format, query.extra_format, query.q_dtype = operation, kv_format, extra, q_dtype
    query.d_qk, query.d_v = d_qk, d_v
    return bool(c.lib.fmla_supports(here.handle, ctypes.byref(query)))


def _pair(here, operation, kv_format, extra):
    """ "v41 + v41-fp4 (512)": a pair of formats with the key widths it takes, or nothing."""
    info = c.format_info(kv_format)
    widths = [
        d for d in _WIDTHS if info.d_qk in (0, d) and _supported(here, operation, kv_format, extra, d_qk=d)
    ]
    name = info.name.decode() + (" + " + c.format_info(extra).name.decode() if extra else "")
    return [f"{name} ({', '.join(map(str, widths))})"] if widths else []


def _combinations(here, operation):
    found = []
    if operation in (c.OP_MHA_FORWARD, c.OP_MHA_BACKWARD):
        for dtype in (c.BF16, c.F16):
            found += [
                f"{c.name_of('dtype_name', dtype)} ({d_qk}, {d_v})"
                for d_qk, d_v in _MHA_WIDTHS
                if _supported(here, operation, q_dtype=dtype, d_qk=d_qk, d_v=d_v)
            ]
    elif operation in _TAKES_CACHE:
        for kv_format in range(1, c.KV_COUNT):
            for extra in range(c.KV_COUNT if operation in _TAKES_TWO else 1):
                found += _pair(here, operation, kv_format, extra)
    elif _supported(here, operation):
        found.append("yes")
    return found


def _wrapped(items, indent):
    """Items, comma-separated, in lines of about 92 columns."""
    if not items:
        return "not supported"
    text, column = "", 0
    for i, item in enumerate(items):
        width = len(item) + 2
        if column > 0 and column + width > 92:
            text, column = text + "\n" + indent, 0
        text += item + (", " if i + 1 < len(items) else "")
        column += width
    return text


def _tiers(here):
    tiers = [
        c.name_of("isa_name", isa)
        for isa in range(c.ISA_SCALAR, c.ISA_COUNT)
        if c.lib.fmla_isa_available(isa)
    ]
    yield "  CPU tiers here: " + _wrapped(tiers, "    ")
    kind = c.lib.fmla_context_device(here.handle)
    used = "  used: " + c.name_of("device_name", kind)
    if kind == c.DEVICE_CPU:
        used += f", {c.name_of('isa_name', c.lib.fmla_context_isa(here.handle))}"
        used += f", {c.lib.fmla_context_threads(here.handle)} threads"
    yield used


def text():
    """The whole page."""
    here = context((c.DEVICE_AUTO, 0))
    lines = [
        f"flashmla {c.version()}",
        "",
        "devices",
        *_devices(),
        *_tiers(here),
        "",
        "formats",
        f"  {'name':<14}{'layout':<8}{'d_qk':>6}{'quant':>7}{'rope':>6}{'element':>9}{'group':>7}{'scale':>9}"
        f"{'bytes/token':>13}",
        *_formats(),
        "",
        "operations: main format [+ extra format] (key widths); multi-head attention (d_qk, d_v)",
    ]
    for operation in range(c.OP_COUNT):
        lines.append(
            f"  {c.name_of('operation_name', operation):<16}"
            + _wrapped(_combinations(here, operation), " " * 18)
        )
    return "\n".join(lines)
