# SPDX-License-Identifier: MIT
"""Contexts, one per (device, thread), and one call in them.

A Call fills an args struct field by field, remembers what each C field is called in Python, and runs the function
on the device of its tensors: on CUDA in torch's current stream, with workspace from torch's allocator, so that
captured graphs own theirs and nothing waits.
"""

import ctypes
import os
import re
import sys
import threading

from . import _library as c
from ._tensors import array

_PREFIX = re.compile(r"^(?:fused\.)?([A-Za-z_]\w*)")


class Context:
    """An fmla_context. Freed with the thread that made it; one that a forked child inherits is left alone, since its
    worker threads stayed behind."""

    def __init__(self, device):
        config = c.sized(c.ContextConfig)
        config.device, config.device_index = device
        handle = ctypes.c_void_p()
        self.process = os.getpid()
        self.handle = None
        status = c.lib.fmla_context_create(ctypes.byref(config), ctypes.byref(handle))
        if status != c.OK:
            raise RuntimeError(
                f"{c.name_of('device_name', device[0])}:{device[1]}: "
                f"{c.name_of('status_string', status)}: {c.lib.fmla_last_create_error().decode()}"
            )
        self.handle = handle

    def error(self):
        """The last failure in words."""
        return c.lib.fmla_context_error(self.handle).decode()

    def __del__(self):
        if self.handle is not None and self.process == os.getpid() and not sys.is_finalizing():
            c.lib.fmla_context_destroy(self.handle)


class _PerThread(threading.local):
    def __init__(self):
        self.contexts = {}
        self.plans = {}


_here = _PerThread()


def _forget():
    global _here
    _here = _PerThread()


os.register_at_fork(after_in_child=_forget)


def context(device):
    """This thread's context of a device (kind, index); made at the first call."""
    found = _here.contexts.get(device)
    if found is None:
        found = _here.contexts[device] = Context(device)
    return found


def plans():
    """This thread's plans (_plans.py)."""
    return _here.plans


_units = {}


def compute_units(device):
    """(processors or SMs, capability) of a device; asked once."""
    if device not in _units:
        status, info = c.device_info(*device)
        _units[device] = (info.compute_units, info.capability) if status == c.OK else (1, 0)
    return _units[device]


_raw_stream = None


def current_stream(index):
    """The cudaStream_t of torch's current stream on a device, as an integer."""
    global _raw_stream
    if _raw_stream is None:
        torch = sys.modules["torch"]
        _raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
            lambda i: torch.cuda.current_stream(i).cuda_stream
        )
    return _raw_stream(index)


def _offsets(struct):
    """{field: offset} of a struct, computed once."""
    found = _known_offsets.get(struct)
    if found is None:
        found = _known_offsets[struct] = {name: getattr(struct, name).offset for name, *_ in struct._fields_}
    return found


_known_offsets = {}


class Call:
    """One call of a C function: its args struct, and the Python names of the fields that were set."""

    def __init__(self, struct):
        self.args = c.sized(struct)
        self.struct = struct
        self.offsets = _offsets(struct)
        self.names = {}
        self.views = []
        self.device = None
        self.first = None
        self.warned = False  # whether an argument looked odd enough to say so

    def tensor(self, field, x, name=None, base=0, kind=None):
        """Sets a tensor field from an argument; None leaves it absent. Returns the view."""
        if x is None:
            return None
        name = name or field
        view = array(x, name)
        if view.device != self.device:
            self.place(view, name)
        self.names[field] = name
        self.views.append(view)
        view.pack_into(self.args, self.offsets[field] if kind is None else base + _offsets(kind)[field])
        return view

    def cache(self, field, view, packed, name):
        """Sets a cache field from its view and what _caches.pack() made of it."""
        self.place(view, name)
        self.names[field] = name
        self.views.append(view)
        ctypes.memmove(ctypes.addressof(self.args) + self.offsets[field], packed, len(packed))

    def place(self, view, name):
        """The first view says where the call runs; all others must be there."""
        if self.device is None:
            self.device, self.first = view.device, name
        elif view.device != self.device:
            raise RuntimeError(
                f"{name}: is on {_device_text(view.device)}; allowed: {_device_text(self.device)}, where "
                f"{self.first} is"
            )

    def run(self, function, measure=None):
        """Runs it. measure is the function's _workspace_size twin. Raises RuntimeError with the library's sentence."""
        here = context(self.device)
        pointer = ctypes.byref(self.args)
        stream = workspace = None
        if self.device[0] == c.DEVICE_CUDA:
            stream = current_stream(self.device[1])
            if measure is not None:
                workspace = self._workspace(here, pointer, measure)
        status = function(here.handle, pointer, stream)
        if status != c.OK:
            raise RuntimeError(self.translate(status, here.error()))
        return workspace

    def _workspace(self, here, pointer, measure):
        """Workspace from torch, in stream order; the library asks for its own only where this gives none."""
        size = ctypes.c_size_t()
        status = measure(here.handle, pointer, ctypes.byref(size))
        if status != c.OK:
            raise RuntimeError(self.translate(status, here.error()))
        if size.value == 0:
            return None
        torch = sys.modules["torch"]
        memory = torch.empty(size.value, dtype=torch.uint8, device=f"cuda:{self.device[1]}")
        self.args.workspace, self.args.workspace_size = memory.data_ptr(), size.value
        return memory

    def translate(self, status, sentence):
        """The library's sentence with the argument's Python name in front."""
        match = _PREFIX.match(sentence)
        python = self.names.get(match.group(1)) if match else None
        if python is None or python == match.group(0):
            return sentence or c.name_of("status_string", status)
        if python == match.group(1):
            return sentence[match.start(1) :]
        return f"{python}: {sentence}"


def _device_text(device):
    return "cpu" if device[0] == c.DEVICE_CPU else f"cuda:{device[1]}"


def supports(
    operation, *, kv_format=None, extra_format=None, q_dtype=None, h_q=0, h_kv=0, d_qk=0, d_v=0, device="cpu"
):
    """Whether a combination is accepted, by the same table that checks calls.

    operation: "dense_decode", "sparse_decode", "sparse_prefill", "fused_prefill", "fused_decode", "mha_forward",
        "mha_backward", "quantize", "dequantize", "convert", "merge", "permute_q_b", "permute_wv", "indices_convert",
        "fp8_cast", "schedule".
    kv_format, extra_format: "bf16", "f16", "v32", "v4", "v41", "v41-page", "v41-fp4", "v41-fp4-page"; None: not
        asked.
    q_dtype: "BF16", "F16", "F32"; None: not asked. h_q, h_kv, d_qk, d_v: 0: not asked.
    device: "cpu", "cuda", "cuda:1".
    Returns a bool. Raises AssertionError for unknown words, RuntimeError where the device is not there.
    """
    query = c.sized(c.SupportQuery)
    operations = [c.name_of("operation_name", i) for i in range(c.OP_COUNT)]
    dtypes = {c.name_of("dtype_name", i).lower(): i for i in range(c.BF16, c.F4_E2M1 + 1)}
    query.operation = _word(operation, {name: i for i, name in enumerate(operations)}, "operation")
    formats = {c.format_info(i).name.decode(): i for i in range(1, c.KV_COUNT)}
    if kv_format is not None:
        query.kv_format = _word(kv_format, formats, "kv_format")
    if extra_format is not None:
        query.extra_format = _word(extra_format, formats, "extra_format")
    if q_dtype is not None:
        query.q_dtype = _word(str(q_dtype).lower(), dtypes, "q_dtype")
    query.h_q, query.h_kv, query.d_qk, query.d_v = h_q, h_kv, d_qk, d_v
    return bool(c.lib.fmla_supports(context(_device_named(device)).handle, ctypes.byref(query)))


def _word(word, allowed, name):
    if word not in allowed:
        raise AssertionError(f"{name}: {word!r}; allowed: {', '.join(allowed)}")
    return allowed[word]


def _device_named(device):
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or not (index == "" or index.isdigit()):
        raise AssertionError(f"device: {device!r}; allowed: cpu, cuda, cuda:<number>")
    return ({"cpu": c.DEVICE_CPU, "cuda": c.DEVICE_CUDA}[kind], int(index or 0))
