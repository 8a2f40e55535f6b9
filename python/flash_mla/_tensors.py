# SPDX-License-Identifier: MIT
"""Arrays of any origin as plain views: torch tensors, NumPy arrays, and host memory behind DLPack.

torch is never imported here: a torch tensor can only arrive where torch has been imported already. Results are made by
torch when the call's first tensor is a torch tensor, by NumPy otherwise.

NumPy has no bf16 and no fp8: uint16 arrays are bf16, uint8 and int8 arrays are bytes of a cache or fp8 codes; the types
of ml_dtypes are understood by their names.
"""

import ctypes
import struct
import sys

import numpy as np

from . import _library as c

CPU = (c.DEVICE_CPU, 0)

_pack_tensor = struct.Struct("=Qii10q").pack_into
_PAD = [(0,) * (c.MAX_RANK - rank) for rank in range(c.MAX_RANK + 1)]

_NUMPY_DTYPES = {
    "uint16": c.BF16,
    "bfloat16": c.BF16,
    "float16": c.F16,
    "float32": c.F32,
    "float64": c.F64,
    "int32": c.I32,
    "int64": c.I64,
    "uint8": c.U8,
    "int8": c.U8,
    "float8_e4m3fn": c.F8_E4M3,
    "float8_e8m0fnu": c.F8_E8M0,
}
_NUMPY_NAMES = {
    c.F16: "float16",
    c.F32: "float32",
    c.F64: "float64",
    c.I32: "int32",
    c.I64: "int64",
    c.U8: "uint8",
    c.F8_E4M3: "uint8",
}
_TORCH_NAMES = {
    "bfloat16": c.BF16,
    "float16": c.F16,
    "float32": c.F32,
    "float64": c.F64,
    "int32": c.I32,
    "int64": c.I64,
    "uint8": c.U8,
    "int8": c.U8,
    "float8_e4m3fn": c.F8_E4M3,
    "float8_e8m0fnu": c.F8_E8M0,
}
_torch_dtypes, _torch_by_code = {}, {}
_torch = _strided = None
_plain_types = set()
_cuda_devices = {}

_BYTES = {c.BF16: 2, c.F16: 2, c.F32: 4, c.F64: 8, c.I32: 4, c.I64: 8, c.U8: 1, c.F8_E4M3: 1, c.F8_E8M0: 1}


class Array:
    """A view: address, element type (fmla_dtype), shape, strides in elements, device (kind, index); owner keeps the
    memory alive."""

    __slots__ = ("owner", "data", "dtype", "shape", "stride", "device")

    def __init__(self, owner, data, dtype, shape, stride, device):
        self.owner, self.data, self.dtype, self.shape, self.stride = owner, data, dtype, shape, stride
        self.device = device

    def pack_into(self, buffer, offset):
        """Writes the view as an fmla_tensor."""
        pad = _PAD[len(self.shape)]
        _pack_tensor(
            buffer, offset, self.data, self.dtype, len(self.shape), *self.shape, *pad, *self.stride, *pad
        )


def torch_module(x):
    """torch, if x is one of its tensors, else None."""
    if type(x) in _plain_types:
        return _torch
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def is_array(x):
    """Whether x is something that array() takes."""
    return torch_module(x) is not None or isinstance(x, np.ndarray) or hasattr(x, "__dlpack__")


def array(x, name):
    """The view of an argument. name is what messages call it.

    Raises AssertionError if x is no array at all, RuntimeError if its type, device or rank cannot be used.
    """
    if type(x) in _plain_types:
        view = _from_torch(x, name)
    elif torch_module(x) is not None:
        _know(torch_module(x))
        view = _from_torch(x, name)
    elif isinstance(x, np.ndarray):
        view = _from_numpy(x, name)
    elif hasattr(x, "__dlpack__"):
        view = _from_dlpack(x, name)
    else:
        raise AssertionError(
            f"{name}: is a {type(x).__name__}; allowed: a torch tensor, a NumPy array, or an object "
            "with DLPack"
        )
    if len(view.shape) > c.MAX_RANK:
        raise RuntimeError(f"{name}: has {len(view.shape)} dimensions; allowed: at most {c.MAX_RANK}")
    return view


# ---- torch -------------------------------------------------------------------------------------------------


def _know(torch):
    """Looks at torch once: which of the element types this version has, and its plain classes."""
    global _torch, _strided
    if _torch is None:
        _torch, _strided = torch, torch.strided
        for name, dtype in _TORCH_NAMES.items():
            if hasattr(torch, name):
                _torch_dtypes[getattr(torch, name)] = dtype
                _torch_by_code.setdefault(dtype, getattr(torch, name))
        _plain_types.update((torch.Tensor, torch.nn.Parameter))


def torch_dtypes(torch):
    """torch dtype -> fmla_dtype, for the types that this version of torch has."""
    _know(torch)
    return _torch_dtypes


def _from_torch(x, name):
    # Attributes in the order of their cost; a decode call looks at a dozen tensors.
    dtype = _torch_dtypes.get(x.dtype)
    if dtype is None:
        raise RuntimeError(f"{name}: dtype is {x.dtype}; allowed: {', '.join(map(str, _torch_dtypes))}")
    if x.is_cuda:
        device = _cuda_device(x.get_device())
    elif x.is_cpu and x.layout is _strided:
        device = CPU
    else:
        raise RuntimeError(
            f"{name}: is on {x.device} with layout {x.layout}; allowed: strided tensors on cpu or cuda"
        )
    if x.requires_grad and _torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: requires grad, and this function has no gradient; allowed: {name}.detach(), or the call "
            "under torch.no_grad()"
        )
    return Array(x, x.data_ptr(), dtype, x.shape, x.stride(), device)


def _cuda_device(index):
    device = _cuda_devices.get(index)
    if device is None:
        device = _cuda_devices[index] = (c.DEVICE_CUDA, index)
    return device


# ---- NumPy -------------------------------------------------------------------------------------------------


def _from_numpy(x, name):
    dtype = _NUMPY_DTYPES.get(x.dtype.name) if x.dtype.isnative else None
    if dtype is None:
        raise RuntimeError(
            f"{name}: dtype is {x.dtype.str if not x.dtype.isnative else x.dtype}; allowed: "
            f"{', '.join(_NUMPY_DTYPES)} in the machine's byte order (uint16 is read as bf16)"
        )
    size = x.itemsize
    strides = tuple(stride // size for stride in x.strides)
    if any(stride % size for stride in x.strides):
        raise RuntimeError(
            f"{name}: strides are {x.strides} bytes; allowed: multiples of its {size}-byte elements"
        )
    return Array(x, x.__array_interface__["data"][0], dtype, x.shape, strides, CPU)


# ---- DLPack ------------------------------------------------------------------------------------------------


class _DLTensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_DL_CPU = 1
# (DLDataTypeCode, bits): int 0, uint 1, float 2, bfloat 4, float8_e4m3fn 10, float8_e8m0fnu 14.
_DL_DTYPES = {
    (4, 16): c.BF16,
    (1, 16): c.BF16,
    (2, 16): c.F16,
    (2, 32): c.F32,
    (2, 64): c.F64,
    (0, 32): c.I32,
    (0, 64): c.I64,
    (1, 8): c.U8,
    (0, 8): c.U8,
    (10, 8): c.F8_E4M3,
    (14, 8): c.F8_E8M0,
}

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _from_dlpack(x, name):
    # The capsule is read, not consumed: it stays the view's owner, and frees what it holds when the view goes.
    capsule = x.__dlpack__()
    t = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    if t.device_type != _DL_CPU:
        raise RuntimeError(
            f"{name}: is on DLPack device type {t.device_type}; allowed: host memory (1), or torch " "tensors"
        )
    dtype = _DL_DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
    if dtype is None:
        raise RuntimeError(
            f"{name}: DLPack dtype (code {t.code}, {t.bits} bits, {t.lanes} lanes); allowed: bf16, "
            "fp16, fp32, fp64, int32, int64, bytes, e4m3fn"
        )
    shape = tuple(t.shape[i] for i in range(t.ndim))
    if t.strides:
        strides = tuple(t.strides[i] for i in range(t.ndim))
    else:
        strides = contiguous_strides(shape)
    return Array((x, capsule), (t.data or 0) + t.byte_offset, dtype, shape, strides, CPU)


# ---- making arrays -----------------------------------------------------------------------------------------


def contiguous_strides(shape):
    """Row-major strides in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _dtype_like(like, dtype):
    """The array library's own type for an fmla_dtype; `like`'s where the two agree."""
    torch = torch_module(like)
    if torch is not None:
        known = torch_dtypes(torch)
        return like.dtype if known.get(like.dtype) == dtype else _torch_by_code.get(dtype, torch.uint8)
    own = getattr(like, "dtype", None)
    if isinstance(own, np.dtype) and _NUMPY_DTYPES.get(own.name) == dtype:
        return own
    if dtype == c.BF16:
        ml_dtypes = sys.modules.get("ml_dtypes")
        return np.dtype(ml_dtypes.bfloat16) if ml_dtypes is not None else np.dtype("uint16")
    return np.dtype(_NUMPY_NAMES[dtype])


def empty(like, shape, dtype):
    """A contiguous array beside `like`: of its library, on its device."""
    torch = torch_module(like)
    if torch is not None:
        return torch.empty(shape, dtype=_dtype_like(like, dtype), device=like.device)
    return np.empty(shape, dtype=_dtype_like(like, dtype))


def empty_cast(like, shape, own_dtype):
    """empty() with the array library's own dtype."""
    torch = torch_module(like)
    if torch is not None:
        return torch.empty(shape, dtype=own_dtype, device=like.device)
    return np.empty(shape, dtype=own_dtype)


def paged(like, pages, page_bytes, page_size, token_bytes, own_dtype):
    """A zeroed byte cache [pages, page_size, 1, token_bytes] whose pages are page_bytes apart."""
    shape, strides = (pages, page_size, 1, token_bytes), (page_bytes, token_bytes, token_bytes, 1)
    torch = torch_module(like)
    if torch is not None:
        base = torch.zeros(pages * page_bytes, dtype=torch.uint8, device=like.device)
        return base.as_strided(shape, strides).view(own_dtype)
    base = np.zeros(pages * page_bytes, dtype=np.uint8)
    if base.size == 0:
        return base.reshape(shape).view(own_dtype)
    return np.lib.stride_tricks.as_strided(base, shape, strides).view(own_dtype)


def code_dtype(like):
    """The type in which fp8 codes and quantised caches are handed out: e4m3 where the library has it, else bytes."""
    torch = torch_module(like)
    if torch is not None:
        return getattr(torch, "float8_e4m3fn", torch.uint8)
    ml_dtypes = sys.modules.get("ml_dtypes")
    if ml_dtypes is not None and getattr(like, "dtype", None) == ml_dtypes.bfloat16:
        return np.dtype(ml_dtypes.float8_e4m3fn)
    return np.dtype("uint8")


def permuted(x, axes):
    """The same memory with its axes in another order."""
    return x.permute(*axes) if torch_module(x) is not None else x.transpose(axes)


def concrete(x):
    """x as something that can be sliced and reshaped: itself, or a NumPy copy of what came as DLPack."""
    if torch_module(x) is not None or isinstance(x, np.ndarray):
        return x
    view = array(x, "array")
    raw = np.dtype(f"u{_BYTES[view.dtype]}")
    extent = 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride)) if all(view.shape) else 0
    if extent == 0:
        return np.empty(view.shape, _dtype_like(None, view.dtype))
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * (extent * raw.itemsize)).from_address(view.data)).view(raw)
    strides = tuple(s * raw.itemsize for s in view.stride)
    return (
        np.lib.stride_tricks.as_strided(flat, view.shape, strides).copy().view(_dtype_like(None, view.dtype))
    )


def uniform_offsets(like, batch, total):
    """[0, total / b, 2 total / b, ...] int32, b + 1 entries, beside `like`; made without waiting for the device."""
    step = total // batch if batch else 0
    torch = torch_module(like)
    if torch is not None:
        return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * step
    return np.arange(batch + 1, dtype=np.int32) * np.int32(step)
