# SPDX-License-Identifier: MIT
"""Multi-head latent attention on CPUs and NVIDIA GPUs: a drop-in for every published flash_mla, over libflashmla.

    get_mla_metadata, flash_mla_with_kvcache     decode, dense and sparse, over every published cache format
    flash_mla_sparse_fwd                         sparse prefill
    flash_attn_varlen_func (and packed forms)    dense multi-head attention with gradients
    fused_norm_rope_attn_rope_cast               the fused operations and their weight permutations
    quant                                        quantise and dequantise caches, convert indices, cast weights
    merge_states, supports, set_compat           our own additions
    cuda                                         the names of the original's compiled extension

Arguments are torch tensors (CPU or CUDA), NumPy arrays, or host memory behind DLPack; nothing is built against torch,
and torch is not imported here. NumPy has no bf16: uint16 arrays are bf16, ml_dtypes is understood.
"""

from . import _library, _torch_bridge, cuda, fused_norm_rope_attn_rope_cast, quant
from ._context import supports
from ._integrations import patch_sglang, patch_vllm
from .compat import get_compat, set_compat
from .flash_mla_interface import (
    FlashMLASchedMeta,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
    merge_states,
)

__version__ = _library.version()

__all__ = [
    "FlashMLASchedMeta",
    "cuda",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "fused_norm_rope_attn_rope_cast",
    "get_compat",
    "get_mla_metadata",
    "merge_states",
    "patch_sglang",
    "patch_vllm",
    "quant",
    "set_compat",
    "supports",
]

_torch_bridge.attach()
