# SPDX-License-Identifier: MIT
"""KV caches as callers pass them: a four-dimensional tensor, whose format follows from its dtype and widths.

    dtype of the cache   (d_qk, last dim)   format
    bf16, fp16           (d, d)             plain, q's dtype
    1 byte               (576, 656)         V3.2
                         (512, 584)         V4 (MODEL1), page-level
                         (512, 528)         V4.1 fp8, per token or page-level
                         (512, 288)         V4.1 fp4, per token or page-level

The two layouts of 528- and 288-byte caches have the same shape and cannot be told apart: the keyword kv_layout decides,
else set_compat(), never the data.
"""

import struct
import warnings

from . import _library as c
from . import compat
from ._tensors import array

_pack_cache = struct.Struct("=Qiiiiqqqqqdqqq").pack

_BYTE_DTYPES = (c.U8, c.F8_E4M3)
_PLAIN = {c.BF16: c.KV_BF16, c.F16: c.KV_F16}
_QUANTISED = {(576, 656): c.KV_V32, (512, 584): c.KV_V4, (512, 528): c.KV_V41, (512, 288): c.KV_V41_FP4}
_PAGE_TWIN = {c.KV_V41: c.KV_V41_PAGE, c.KV_V41_FP4: c.KV_V41_FP4_PAGE}
_ACCEPTED = (
    "bf16 or fp16 [.., d_qk]; 1-byte caches: d_qk 576 with 656 bytes per token, d_qk 512 with 584, 528 or 288 "
    "bytes per token"
)


def resolve_layout(kv_layout):
    """ "token" or "page": what the keyword says, else the compat setting."""
    if kv_layout is None:
        return "page" if compat.page_layout() else "token"
    if kv_layout not in ("token", "page"):
        raise AssertionError(f"kv_layout: {kv_layout!r}; allowed: None, 'token', 'page'")
    return kv_layout


def format_of(view, d_qk, layout, name):
    """The fmla_kv_format of a cache's view; RuntimeError naming what is accepted."""
    if len(view.shape) != 4:
        raise RuntimeError(
            f"{name}: shape is {list(view.shape)}; allowed: [num_pages, page_size, h_kv, {_ACCEPTED}]"
        )
    if view.dtype in _PLAIN:
        return _PLAIN[view.dtype]
    if view.dtype not in _BYTE_DTYPES:
        raise RuntimeError(f"{name}: dtype is {c.name_of('dtype_name', view.dtype)}; allowed: {_ACCEPTED}")
    found = _QUANTISED.get((d_qk, view.shape[3]))
    if found is None:
        raise RuntimeError(f"{name}: {view.shape[3]} bytes per token with d_qk {d_qk}; allowed: {_ACCEPTED}")
    return _PAGE_TWIN.get(found, found) if layout == "page" else found


def is_plain(kv_format):
    """Whether the format holds plain bf16 or fp16."""
    return kv_format in (c.KV_BF16, c.KV_F16)


def looks_page_level(view, kv_format):
    """Whether a cache that is read token by token has the page stride of a page-level one."""
    return kv_format in (c.KV_V41, c.KV_V41_FP4) and view.shape[0] > 1 and view.stride[0] % view.shape[3] != 0


def pack(view, kv_format, name):
    """The bytes of the fmla_kv_cache. Strides of dimensions of one element do not matter and are left to the library;
    a page stride may be larger than the page."""
    pages, page_size, heads, width = view.shape
    page_stride, token_stride, head_stride, last = view.stride
    plain = is_plain(kv_format)
    if width > 1 and last != 1:
        raise RuntimeError(f"{name}: stride[3] is {last}; allowed: 1, its last dimension is contiguous")
    for dim in range(3 if plain else 2):
        if view.shape[dim] > 1 and view.stride[dim] == 0:
            raise RuntimeError(
                f"{name}: stride[{dim}] is 0 (expanded); allowed: memory of its own for every token"
            )
    unit = 2 if plain else 1
    if looks_page_level(view, kv_format):
        warnings.warn(
            f"{name}: its page stride {page_stride} is no multiple of {width}, so its pages seem to be "
            "page-level; pass kv_layout='page' if they are",
            stacklevel=5,
        )
    return _pack_cache(
        view.data,
        kv_format,
        heads,
        width if plain else 0,
        0,
        pages,
        page_size,
        page_stride * unit if pages > 1 else 0,
        token_stride * unit if page_size > 1 else 0,
        head_stride * unit if plain and heads > 1 else 0,
        0.0,
        0,
        0,
        0,
    )


def add(call, field, cache, d_qk, layout, name):
    """Sets a cache field of a call; returns (format, view)."""
    view = array(cache, name)
    kv_format = format_of(view, d_qk, layout, name)
    call.cache(field, view, pack(view, kv_format, name), name)
    call.warned = call.warned or looks_page_level(view, kv_format)
    return kv_format, view
