# SPDX-License-Identifier: MIT
"""Decode calls that look like an earlier one: same element types, shapes, strides, devices and options.

An engine makes the same call for every layer of every step; only addresses change. The first call of a kind goes the
long way, which checks everything and packs an args struct. A plan keeps that struct, and later calls of the kind put
their addresses into it and go straight to the library. Nothing about the values behind the addresses is kept, and
what the library refuses is done again the long way, for its message.

Plans belong to a thread, as contexts do.
"""

import ctypes
import sys

from . import _context
from . import _library as c

MOST = 512  # plans of one thread; then it starts anew

# The arguments of decode in the order in which they are handed over, as fields of the args struct. Tensors and caches
# both begin with their address.
FIELDS = (
    "q",
    "kv",
    "block_table",
    "cache_seqlens",
    "indices",
    "attn_sink",
    "extra_kv",
    "extra_indices",
    "topk_length",
    "extra_topk_length",
    "cu_seqlens_q",
)
_address = ctypes.c_uint64.from_buffer


def find(options, arrays):
    """(key, plan or None) of a call; no key where it is not made of torch tensors."""
    try:
        key = (
            options,
            *[
                None if x is None else (x.dtype, x.shape, x.stride(), x.device, x.requires_grad)
                for x in arrays
            ],
        )
        return key, _context.plans().get(key)
    except (AttributeError, TypeError, RuntimeError):  # another library's arrays, sparse tensors
        return None, None


class Keeper:
    """Keeps one call, once it went well, as a plan. Not what needed torch.no_grad() or gave rise to a warning: such
    calls are looked at anew each time."""

    __slots__ = ("key", "arrays")

    def __init__(self, key, arrays):
        self.key, self.arrays = key, arrays

    def keep(self, call, out, lse):
        if call.warned or any(x is not None and x.requires_grad for x in self.arrays):
            return
        plans = _context.plans()
        if len(plans) >= MOST:
            plans.clear()
        plans[self.key] = Plan(call, self.arrays, out, lse)


def forget():
    """Forgets this thread's plans."""
    _context.plans().clear()


class Plan:
    """One kind of call, ready to be made again."""

    __slots__ = ("args", "pointer", "cells", "out", "lse", "workspace", "handle", "stream", "config")

    def __init__(self, call, arrays, out, lse):
        torch = sys.modules["torch"]
        self.args = args = c.DecodeArgs.from_buffer_copy(call.args)
        self.pointer = ctypes.byref(args)
        self.cells = [_address(args, call.offsets[f]) for f, x in zip(FIELDS, arrays) if x is not None]
        self.out = (_address(args, call.offsets["out"]), tuple(out.shape))
        self.lse = (_address(args, call.offsets["lse"]), tuple(lse.shape), torch.float32)
        self.workspace = (_address(args, call.offsets["workspace"]), (args.workspace_size,), torch.uint8)
        self.handle = _context.context(call.device).handle
        self.stream = call.device[1] if call.device[0] == c.DEVICE_CUDA else None
        self.config = None  # what a metadata object remembers of the call, once one was used

    def run(self, arrays):
        """The call with other addresses: (out, lse), or None where the library refuses."""
        for cell, x in zip(self.cells, [x for x in arrays if x is not None]):
            cell.value = x.data_ptr()
        make = arrays[0].new_empty
        cell, shape = self.out
        out = make(shape)
        cell.value = out.data_ptr()
        cell, shape, dtype = self.lse
        lse = make(shape, dtype=dtype)
        cell.value = lse.data_ptr()
        stream = None
        if self.stream is not None:
            stream = _context.current_stream(self.stream)
            cell, shape, dtype = self.workspace
            if shape[0]:
                memory = make(shape, dtype=dtype)
                cell.value = memory.data_ptr()
        if c.lib.fmla_decode(self.handle, self.pointer, stream) != c.OK:
            return None
        return out, lse
