# SPDX-License-Identifier: MIT
"""Shims for engines that carry a copy of flash_mla instead of importing it; docs/integration.md says how to use."""

import functools
import importlib

from . import flash_mla_interface as interface

_VLLM_MODULES = ("vllm.v1.attention.ops.flashmla", "vllm.attention.ops.flashmla")
_SGLANG_MODULES = ("sgl_kernel.flash_mla",)


def _without_descale(*arguments, descale_q=None, descale_k=None, **keywords):
    """The engines' decode has two more keywords, for a dense fp8 cache of vLLM's own, which is not read here."""
    if descale_q is not None or descale_k is not None:
        raise AssertionError("descale_q, descale_k: are given; allowed: None")
    return interface.flash_mla_with_kvcache(*arguments, **keywords)


def _supported(*_arguments, **_keywords):
    return True, None


def _patch(function, paths):
    """Replaces, in each of the modules that can be imported, the names that this package has."""
    replacements = {name: getattr(interface, name) for name in interface.__all__ if name != "merge_states"}
    replacements.update(
        flash_mla_with_kvcache=functools.wraps(interface.flash_mla_with_kvcache)(_without_descale),
        flash_mla_sparse_prefill=interface.flash_mla_sparse_fwd,
        is_flashmla_supported=_supported,
        is_flashmla_dense_supported=_supported,
        is_flashmla_sparse_supported=_supported,
    )
    done = {}
    for path in paths:
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        done[path] = sorted(name for name in replacements if hasattr(module, name))
        for name in done[path]:
            setattr(module, name, replacements[name])
    if not done:
        raise ImportError(f"{function}: cannot import {' or '.join(paths)}")
    return done


def patch_vllm():
    """Puts this package's functions into vLLM's module of FlashMLA operations, under the names that it has there.

    Call it before vLLM's attention backends are imported (they copy the names), for example from a plugin of the
    entry point group vllm.general_plugins. Returns {module: [names replaced]}. Raises ImportError if vLLM has no such
    module.
    """
    return _patch("patch_vllm", _VLLM_MODULES)


def patch_sglang():
    """Puts this package's functions into sgl_kernel.flash_mla, from which SGLang's backends take them.

    Call it before SGLang's attention backends are imported. Returns {module: [names replaced]}. Raises ImportError if
    sgl_kernel has no such module.
    """
    return _patch("patch_sglang", _SGLANG_MODULES)
