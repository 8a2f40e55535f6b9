# SPDX-License-Identifier: MIT
"""Quantised caches and weights: what the published test helpers do, under their old and new names."""

import enum
from typing import Any, NamedTuple, Tuple, Union

from . import _library as c
from . import _operations as operations
from ._tensors import code_dtype, concrete, empty, paged

__all__ = [
    "KVCacheLayout",
    "FP8KVCacheLayout",
    "quantize_k_cache",
    "dequantize_k_cache",
    "abs_indices2indices_in_kvcache",
    "per_token_cast",
]


class _Row(NamedTuple):
    kv_format: int
    meta: Tuple[int, int, int, int, int]  # d, d_nope, d_rope, tile, number of tiles
    bytes_per_token: int


class KVCacheLayout(enum.Enum):
    """Formats of quantised caches. The *_Page members are the page-level layouts of 2026-09-10."""

    V32_FP8Sparse = 1
    V4_FP8Sparse = 2
    V41_FP8Sparse = 3
    V41_FP4Sparse = 4
    V41_FP8Sparse_Page = 5
    V41_FP4Sparse_Page = 6
    MODEL1_FP8Sparse = 2
    V41_FP4 = 4

    def get_meta(self):
        """(d, d_nope, d_rope, tile size, number of tiles)."""
        return _ROWS[self].meta

    def get_bytes_per_token(self):
        """Bytes of one token: 656, 584, 528 or 288."""
        return _ROWS[self].bytes_per_token


class FP8KVCacheLayout(enum.Enum):
    """The names of early 2026."""

    V32_FP8Sparse = 1
    MODEL1_FP8Sparse = 2
    V32 = 1
    MODEL1 = 2

    def get_meta(self):
        """(d, d_nope, d_rope, tile size, number of tiles)."""
        return _ROWS[KVCacheLayout(self.value)].meta

    def get_bytes_per_token(self):
        """Bytes of one token: 656 or 584."""
        return _ROWS[KVCacheLayout(self.value)].bytes_per_token


_ROWS = {
    KVCacheLayout.V32_FP8Sparse: _Row(c.KV_V32, (576, 512, 64, 128, 4), 656),
    KVCacheLayout.V4_FP8Sparse: _Row(c.KV_V4, (512, 448, 64, 64, 7), 584),
    KVCacheLayout.V41_FP8Sparse: _Row(c.KV_V41, (512, 448, 64, 32, 16), 528),
    KVCacheLayout.V41_FP4Sparse: _Row(c.KV_V41_FP4, (512, 448, 64, 16, 32), 288),
    KVCacheLayout.V41_FP8Sparse_Page: _Row(c.KV_V41_PAGE, (512, 448, 64, 32, 16), 528),
    KVCacheLayout.V41_FP4Sparse_Page: _Row(c.KV_V41_FP4_PAGE, (512, 448, 64, 16, 32), 288),
}

# Page strides of the published helpers: page-level formats are rounded up to a multiple, V3.2 has a spare row.
_PAGE_MULTIPLE = {c.KV_V4: 576, c.KV_V41_PAGE: 512, c.KV_V41_FP4_PAGE: 512}


def _row(layout):
    if isinstance(layout, FP8KVCacheLayout):
        layout = KVCacheLayout(layout.value)
    if not isinstance(layout, KVCacheLayout):
        raise AssertionError(f"layout: {layout!r}; allowed: a KVCacheLayout or FP8KVCacheLayout")
    return _ROWS[layout]


def _shape(x, name, last):
    shape = tuple(x.shape)
    if len(shape) != 4 or shape[2] != 1 or shape[3] != last:
        raise AssertionError(f"{name}: shape is {list(shape)}; allowed: [num_pages, page_size, 1, {last}]")
    return shape


def _page_bytes(row, page_size):
    used = page_size * row.bytes_per_token
    multiple = _PAGE_MULTIPLE.get(row.kv_format)
    if multiple is not None:
        return -(-used // multiple) * multiple
    return used + row.bytes_per_token if row.kv_format == c.KV_V32 else used


def quantize_k_cache(
    input_k_cache,
    layout: Union[KVCacheLayout, FP8KVCacheLayout, int] = KVCacheLayout.V32_FP8Sparse,
    tile_size: int = 128,
    *,
    dv: int = None,
) -> Any:
    """Quantises a cache.

    input_k_cache: [num_pages, P, 1, d] bf16, fp16 or float32; d is 576 for V3.2, else 512.
    layout: a KVCacheLayout (or FP8KVCacheLayout); scales are powers of two (fp8), or e4m3 (fp4). An integer (or dv=)
    selects the first published quantiser, (x, dv=512, tile_size=128): V3.2 with scales amax / 448 in bf16.

    Returns [num_pages, P, 1, bytes] e4m3 (uint8 where the array library has no e4m3), with the page strides of the
    published helpers; padding is 0. Raises AssertionError or RuntimeError. Exact rules: docs/formats.md.
    """
    layout = dv if dv is not None else layout
    historic = isinstance(layout, int)
    if historic and (layout != 512 or tile_size != 128):
        raise AssertionError(f"dv, tile_size: {layout}, {tile_size}; allowed: 512, 128")
    row = _ROWS[KVCacheLayout.V32_FP8Sparse] if historic else _row(layout)
    x = concrete(input_k_cache)
    pages, page_size, _, d = _shape(x, "input_k_cache", row.meta[0])
    page_bytes = page_size * row.bytes_per_token if historic else _page_bytes(row, page_size)
    cache = paged(x, pages, page_bytes, page_size, row.bytes_per_token, code_dtype(x))
    operations.quantize(
        x.reshape(pages * page_size, d),
        cache,
        row.kv_format,
        c.QUANTIZER_V32_2025 if historic else c.QUANTIZER_DEFAULT,
    )
    return cache


def dequantize_k_cache(
    quant_k_cache,
    layout: Union[KVCacheLayout, FP8KVCacheLayout, int] = 512,
    tile_size: int = 128,
    d: int = 576,
    *,
    dv: int = None,
) -> Any:
    """Dequantises a cache: [num_pages, P, 1, bytes] to [num_pages, P, 1, d] bf16, rounded once, as attention reads it.

    layout: a KVCacheLayout (or FP8KVCacheLayout), or the first published form (qc, dv=512, tile_size=128, d=576).
    NumPy results are ml_dtypes.bfloat16 if ml_dtypes is imported, else uint16.
    """
    layout = dv if dv is not None else layout
    if isinstance(layout, int):
        if (layout, tile_size, d) != (512, 128, 576):
            raise AssertionError(f"dv, tile_size, d: {layout}, {tile_size}, {d}; allowed: 512, 128, 576")
        layout = KVCacheLayout.V32_FP8Sparse
    row = _row(layout)
    pages, page_size, _, _ = _shape(quant_k_cache, "quant_k_cache", row.bytes_per_token)
    tokens = empty(quant_k_cache, (pages * page_size, row.meta[0]), c.BF16)
    operations.dequantize(quant_k_cache, row.kv_format, tokens)
    return tokens.reshape(pages, page_size, 1, row.meta[0])


def abs_indices2indices_in_kvcache(abs_indices, block_table, block_size: int) -> Any:
    """Positions in requests to slots of the cache: [b, s_q, topk] int32 to the same shape.

    a < 0 gives -1, else block_table[i, a / block_size] * block_size + a % block_size.
    block_table: [b, max_pages] int32.
    A position beyond the table is an error on the CPU and gives -1 on CUDA.
    """
    return operations.indices_convert(abs_indices, block_table, block_size)


def per_token_cast(
    x,
    fmt: str = "e4m3",
    num_per_channels: int = 32,
    use_tma_aligned_col_major_sf: bool = True,
    round_sf: bool = True,
    use_packed_ue8m0: bool = True,
) -> Tuple[Any, Any]:
    """Casts a matrix [n, d] to e4m3 with one power-of-two scale per num_per_channels (32 or 128) columns.

    Returns (codes [n, d], scales [n, d / num_per_channels / 4] int32 with strides (1, n rounded up to 4): four e8m0
    bytes a word). Prepares weights for permute_q_b_proj and permute_wv_proj. fmt: "e4m3"; the three flags: True.
    """
    for name, value, allowed in (
        ("fmt", fmt, ("e4m3",)),
        ("num_per_channels", num_per_channels, (32, 128)),
        ("use_tma_aligned_col_major_sf", use_tma_aligned_col_major_sf, (True,)),
        ("round_sf", round_sf, (True,)),
        ("use_packed_ue8m0", use_packed_ue8m0, (True,)),
    ):
        if value not in allowed:
            raise AssertionError(f"{name}: {value!r}; allowed: {', '.join(map(str, allowed))}")
    return operations.fp8_cast(x, num_per_channels)
