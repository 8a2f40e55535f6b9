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
    """(key, plan or None) of a call; no key where it is not made of torch tensors.

    What is asked of a tensor is what costs least and still settles its part of the args struct: strides only where
    they are not those of the shape. get_device is -1 on the host.
    """
    try:
        key = (
            options,
            *[
                None if x is None else (x.dtype, x.shape, x.is_contiguous() or x.stride(), x.get_device())
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


def _like(torch, beside, dtype, shape):
    """One element that looks like a tensor of this shape: empty_like() makes a contiguous one of it, in half the time
    that a shape and a dtype take."""
    one = torch.empty(1, dtype=dtype, device=beside.device)
    return one.expand(shape) if 0 not in shape else one.new_empty(shape)


class Plan:
    """One kind of call, ready to be made again."""

    __slots__ = ("args", "pointer", "cells", "floats", "out", "lse", "workspace", "handle", "stream", "config", "make")

    def __init__(self, call, arrays, out, lse):
        torch = sys.modules["torch"]
        self.args = args = c.DecodeArgs.from_buffer_copy(call.args)
        self.pointer = ctypes.byref(args)
        used = [(i, field) for i, field in enumerate(FIELDS) if arrays[i] is not None]
        self.cells = [(_address(args, call.offsets[field]), i) for i, field in used]
        self.floats = [i for i, _ in used if arrays[i].is_floating_point()]
        self.make = torch.empty_like
        self.out = (_address(args, call.offsets["out"]), _like(torch, out, out.dtype, out.shape))
        self.lse = (_address(args, call.offsets["lse"]), _like(torch, out, lse.dtype, lse.shape))
        self.workspace = None
        if args.workspace_size:
            memory = _like(torch, out, torch.uint8, (args.workspace_size,))
            self.workspace = (_address(args, call.offsets["workspace"]), memory)
        self.handle = _context.context(call.device).handle
        self.stream = call.device[1] if call.device[0] == c.DEVICE_CUDA else None
        self.config = None  # what a metadata object remembers of the call, once one was used

    def run(self, arrays):
        """The call with other addresses: (out, lse), or None where it must go the long way after all."""
        for i in self.floats:
            if arrays[i].requires_grad:
                return None
        for cell, i in self.cells:
            cell.value = arrays[i].data_ptr()
        make = self.make
        cell, like = self.out
        out = make(like)
        cell.value = out.data_ptr()
        cell, like = self.lse
        lse = make(like)
        cell.value = lse.data_ptr()
        stream = None
        if self.stream is not None:
            stream = _context.current_stream(self.stream)
            if self.workspace is not None:
                cell, like = self.workspace
                memory = make(like)
                cell.value = memory.data_ptr()
        if c.lib.fmla_decode(self.handle, self.pointer, stream) != c.OK:
            return None
        return out, lse
