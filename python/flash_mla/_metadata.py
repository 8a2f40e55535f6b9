# SPDX-License-Identifier: MIT
"""Tile-scheduler metadata: advisory here. The library plans for itself, so stale or foreign metadata cannot harm.

The tables are made for callers that look at them, keep them, or copy them into static buffers: their number of rows
depends on heads and queries alone, never on the batch. Number of parts and overhead follow the published kernels, with
processors in place of multiprocessors on the CPU.
"""

import dataclasses
from typing import Any, Optional

from . import _library as c
from . import _operations as operations
from . import compat
from ._tensors import array, is_array

_OVERHEAD = 5


@dataclasses.dataclass
class Config:
    """What the first call with a FlashMLASchedMeta looked like."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    is_fp8_kvcache: bool
    topk: Optional[int]
    extra_page_block_size: Optional[int]
    extra_topk: Optional[int]
    enable_batch_invariant: bool = False


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The opaque scheduler object of flash_mla_with_kvcache. Attributes may be read and set.

    have_initialized: whether a call has used it. config: the shapes of that call (Config); every later call with the
    same object must have the same, else AssertionError names the field. tile_scheduler_metadata [parts, 8] and
    num_splits [b + 1]: int32 tables of the first call, or None where the published kernels would not split.
    """

    Config = Config
    have_initialized: bool = False
    config: Optional[Config] = None
    tile_scheduler_metadata: Any = None
    num_splits: Any = None


def remember(meta, config, make_tables):
    """Records the first call's config and tables; compares every later call with it."""
    if not meta.have_initialized:
        meta.have_initialized, meta.config = True, config
        meta.tile_scheduler_metadata, meta.num_splits = make_tables()
        return
    for field in dataclasses.fields(Config):
        now, then = getattr(config, field.name), getattr(meta.config, field.name)
        if now != then:
            raise AssertionError(
                f"tile_scheduler_metadata: {field.name} is {now}, the object was first used with {then}; "
                "allowed: the same, or a new object from get_mla_metadata()"
            )


def _ceil(x, y):
    return -(-x // y)


def _dense_parts(units, q_tokens_per_head_k, heads_k):
    return max(units // max(heads_k, 1) // max(_ceil(q_tokens_per_head_k, 64), 1), 1)


def first_call_tables(q, config, sparse, cache_seqlens, topk_length, extra_topk_length):
    """The tables that the published kernels would keep in the object; (None, None) where they would not split."""
    units, capability, on_cuda = operations.device_units(q, "q")
    if not sparse:
        parts = _dense_parts(units, config.s_q * config.h_q // max(config.h_k, 1), config.h_k)
        return operations.schedule(q, c.SCHEDULE_2026_01, _OVERHEAD, parts, cache_seqlens)
    if config.topk + (config.extra_topk or 0) <= 640 or config.enable_batch_invariant:
        return None, None
    queries, overhead = max(config.s_q, 1), _OVERHEAD
    if on_cuda and capability >= 100:
        wide = config.h_q == 128 and array(q, "q").shape[-1] == 512
        parts, overhead = (units // queries // 2, 3) if wide else (units // queries, _OVERHEAD)
    else:
        parts = units // queries // max(config.h_q // 64, 1)
    return operations.schedule(
        q,
        c.SCHEDULE_2026_01,
        overhead,
        max(parts, 1),
        batch=config.b,
        topk=config.topk,
        extra_topk=config.extra_topk or 0,
        topk_length=_per_request(topk_length),
        extra_topk_length=_per_request(extra_topk_length) if config.extra_topk else None,
    )


def _per_request(lengths):
    """The schedule knows one length per request; per-token lengths are left out of it."""
    return lengths if lengths is not None and len(lengths.shape) == 1 else None


def get_mla_metadata(
    cache_seqlens=None,
    num_q_tokens_per_head_k=None,
    num_heads_k=None,
    num_heads_q=None,
    is_fp8_kvcache=None,
    topk=None,
    *ignored,
    num_heads_per_head_k=None,
    **ignored_too,
):
    """Scheduler metadata for flash_mla_with_kvcache, in any published form. It never changes results.

    get_mla_metadata() -> (FlashMLASchedMeta(), None)
    get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k[, num_heads_q, is_fp8_kvcache, topk])
        -> (tile_scheduler_metadata [parts, 8] int32, num_splits [b + 1] int32), on the device of cache_seqlens

    cache_seqlens: [b] int32, contiguous; with topk only its length counts. num_q_tokens_per_head_k (older name
    num_heads_per_head_k): s_q * h_q / h_kv. num_heads_q is needed when topk is given. Columns of the first table: those
    of 2025-02 for three arguments, of 2025-09 for more; under set_compat("2026-09-10") and ("2026-04") arguments are
    ignored and the object is returned. Other arguments are accepted and ignored.

    Raises AssertionError for a missing argument, RuntimeError for a wrong tensor.
    Source: published forms of 2025-02, 2025-09 and 2026-01.
    """
    if not is_array(cache_seqlens) or not compat.metadata_as_tensors():
        return FlashMLASchedMeta(), None
    if num_q_tokens_per_head_k is None:
        num_q_tokens_per_head_k = num_heads_per_head_k
    if num_q_tokens_per_head_k is None or num_heads_k is None:
        missing = "num_heads_k" if num_heads_k is None else "num_q_tokens_per_head_k"
        raise AssertionError(f"{missing}: is None; allowed: an integer with cache_seqlens")
    three = num_heads_q is None and is_fp8_kvcache is None and topk is None
    form = c.SCHEDULE_2025_02 if three and compat.get_compat() != "2025-09" else c.SCHEDULE_2025_09
    units, capability, on_cuda = operations.device_units(cache_seqlens, "cache_seqlens")
    if topk is None:
        parts = _dense_parts(units, num_q_tokens_per_head_k, num_heads_k)
        return operations.schedule(cache_seqlens, form, _OVERHEAD, parts, cache_seqlens)
    if num_heads_q is None:
        raise AssertionError("num_heads_q: is None; allowed: an integer with topk")
    heads_k = max(num_heads_k, 1)
    queries = max(num_q_tokens_per_head_k * heads_k // max(num_heads_q, 1), 1)
    group = num_heads_q // heads_k
    if on_cuda and capability >= 100:
        parts = units // heads_k // (max(_ceil(group, 64), 1) * queries)
    else:
        parts = units // 2 // heads_k // (max(_ceil(group, 128), 1) * queries)
    return operations.schedule(
        cache_seqlens,
        form,
        _OVERHEAD,
        max(parts, 1),
        batch=array(cache_seqlens, "cache_seqlens").shape[0],
        topk=topk,
    )
