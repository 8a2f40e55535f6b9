# SPDX-License-Identifier: MIT
"""Between the public functions and torch, without importing torch: whether a call is being traced, and the
operators and autograd function of _torch.py, which is imported when the first torch tensor arrives."""

import sys


def _never():
    return False


# torch.compiler.is_compiling once torch is known: called through this name so that a trace can see through it.
is_compiling = _never
_operators = None
_plain_types = ()


def attach():
    """Makes ready for torch if it has been imported. Returns the module _torch, or None."""
    global is_compiling, _operators, _plain_types
    if _operators is None and "torch" in sys.modules and hasattr(sys.modules["torch"], "Tensor"):
        from . import _torch

        _operators, _plain_types = _torch, _torch.PLAIN_TYPES
        is_compiling = _torch.is_compiling
    return _operators


def traced(q):
    """True if q is being traced (torch.compile, export, fake tensors), so that the call must go to an operator."""
    if is_compiling():
        return True
    if type(q) in _plain_types or "torch" not in sys.modules:
        return False
    return attach() is not None and _operators.is_traced(q)


def eager(q):
    """True if q is a plain torch tensor and nothing is being traced."""
    return not is_compiling() and type(q) in _plain_types


def operators():
    """The operators registered with torch."""
    return _operators


def attention_with_gradient(*arguments):
    """Multi-head attention as an autograd function."""
    return attach().Attention.apply(*arguments)
