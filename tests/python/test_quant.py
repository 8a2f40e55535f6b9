# SPDX-License-Identifier: MIT
"""flash_mla.quant: golden bytes, old and new names, index conversion, casts."""

import numpy as np
import pytest
import support
from support import bf16, golden

import flash_mla
from flash_mla import quant

L = quant.KVCacheLayout
FILES = {"v32": L.V32_FP8Sparse, "v4": L.V4_FP8Sparse, "v41": L.V41_FP8Sparse, "v41fp4": L.V41_FP4Sparse}


@pytest.mark.parametrize("name, page", [(name, page) for name in FILES for page in (5, 64)])
def test_golden_bytes(kit, name, page):
    files = golden("formats_a.safetensors")
    layout, key = FILES[name], f"{name}.p{page}"
    cache = quant.quantize_k_cache(kit.bf16_raw(files[key + ".k"]), layout)
    per_token = layout.get_bytes_per_token()
    pages = len(files[key + ".k"])
    assert tuple(cache.shape) == (pages, page, 1, per_token)
    stride = kit.strides(cache)[0]
    data = np.asarray(kit.value(kit.strided(cache, (pages, page * per_token), (stride, 1)))).view(np.uint8)
    wanted = files[key + (".page_bytes" if name == "v4" else ".bytes")].reshape(pages, -1)
    assert (data == wanted).all()
    values = quant.dequantize_k_cache(cache, layout)
    assert values.dtype == kit.bf16_raw(files[key + ".k"]).dtype or kit.name == "numpy"
    assert (kit.raw(values) == files[key + ".dequant"].view(np.uint8)).all()


@pytest.mark.parametrize(
    "layout, page, stride",
    [
        (L.V32_FP8Sparse, 5, 656 * 6),
        (L.V4_FP8Sparse, 1, 1152),
        (L.V4_FP8Sparse, 2, 1728),
        (L.V4_FP8Sparse, 5, 3456),
        (L.V4_FP8Sparse, 64, 37440),
        (L.V4_FP8Sparse, 256, 149760),
        (L.V41_FP8Sparse, 5, 528 * 5),
        (L.V41_FP4Sparse, 5, 288 * 5),
        (L.V41_FP8Sparse_Page, 5, 3072),
        (L.V41_FP8Sparse_Page, 64, 33792),
        (L.V41_FP8Sparse_Page, 69, 36864),
        (L.V41_FP4Sparse_Page, 1, 512),
        (L.V41_FP4Sparse_Page, 64, 18432),
    ],
)
def test_page_strides_of_the_published_helpers(kit, layout, page, stride):
    x = kit.bf16(np.zeros((2, page, 1, layout.get_meta()[0])))
    per_token = layout.get_bytes_per_token()
    assert kit.strides(quant.quantize_k_cache(x, layout)) == (stride, per_token, per_token, 1)


@pytest.mark.parametrize("layout", list(L))
def test_quantise_and_back(kit, layout):
    """Independent decoding of what was written, and one ulp of the format's steps."""
    d = layout.get_meta()[0]
    x = bf16(np.random.default_rng(1).normal(size=(3, 6, 1, d)))
    values = kit.value(quant.dequantize_k_cache(quant.quantize_k_cache(kit.bf16(x), layout), layout))
    step = 1 / 4 if "FP4" in layout.name else 1 / 8
    assert np.abs(values - x).max() <= step * np.abs(x).max()
    if "V41" not in layout.name:
        assert (values[..., -64:] == x[..., -64:]).all()


def test_meta():
    assert L.V32_FP8Sparse.get_meta() == (576, 512, 64, 128, 4)
    assert L.V4_FP8Sparse.get_meta() == (512, 448, 64, 64, 7)
    assert L.V41_FP8Sparse.get_meta() == (512, 448, 64, 32, 16)
    assert L.V41_FP4Sparse.get_meta() == (512, 448, 64, 16, 32)
    assert [
        m.get_bytes_per_token() for m in (L.V32_FP8Sparse, L.V4_FP8Sparse, L.V41_FP8Sparse, L.V41_FP4Sparse)
    ] == [656, 584, 528, 288]
    assert L.MODEL1_FP8Sparse is L.V4_FP8Sparse and L.V41_FP4 is L.V41_FP4Sparse
    old = quant.FP8KVCacheLayout
    assert old.V32.value == 1 and old.MODEL1.value == 2 and old.MODEL1_FP8Sparse is old.MODEL1
    assert old.MODEL1.get_meta() == L.V4_FP8Sparse.get_meta() and old.V32.get_bytes_per_token() == 656


def test_old_enum_is_the_same_bytes(kit):
    x = kit.bf16(np.random.default_rng(0).normal(size=(1, 3, 1, 512)))
    a = quant.quantize_k_cache(x, quant.FP8KVCacheLayout.MODEL1_FP8Sparse)
    b = quant.quantize_k_cache(x, L.V4_FP8Sparse)
    assert (kit.raw(a) == kit.raw(b)).all()
    assert (
        kit.raw(quant.dequantize_k_cache(a, quant.FP8KVCacheLayout.MODEL1))
        == kit.raw(quant.dequantize_k_cache(b, L.V4_FP8Sparse))
    ).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: quant.quantize_k_cache(x, 512, 128),
        lambda x: quant.quantize_k_cache(x, dv=512, tile_size=128),
    ],
)
def test_first_published_quantiser(kit, call):
    """scale = amax / 448 rounded to bf16; an all-zero group has scale 1 and zero codes."""
    x = bf16(np.random.default_rng(0).normal(size=(2, 3, 1, 576)))
    x[0, 0, 0, :128] = 0
    cache = call(kit.bf16(x))
    data = np.asarray(kit.value(cache)).view(np.uint8)
    scales = np.ascontiguousarray(data[..., 512:528]).view("<f4")[:, :, 0]
    amax = np.abs(x[:, :, 0, :512].reshape(2, 3, 4, 128)).max(-1)
    wanted = bf16(amax.astype(np.float32) / np.float32(448))
    wanted[0, 0, 0] = 1
    assert (scales == wanted).all() and (data[0, 0, 0, :128] & 127 == 0).all()
    values = kit.value(quant.dequantize_k_cache(cache))
    assert np.abs(values - x).max() <= np.abs(x).max() / 8
    assert (
        kit.raw(quant.dequantize_k_cache(cache, 512, 128, 576)) == kit.raw(quant.dequantize_k_cache(cache))
    ).all()


def test_float_and_half_inputs(kit):
    x = np.random.default_rng(0).normal(size=(1, 2, 1, 512)).astype(np.float16)
    halves = quant.quantize_k_cache(kit.f16(x), L.V41_FP8Sparse)
    floats = quant.quantize_k_cache(kit.f32(x.astype(np.float32)), L.V41_FP8Sparse)
    assert (kit.raw(halves) == kit.raw(floats)).all()


def test_indices(kit):
    table = np.array([[4, 1, 9], [2, 7, 0]])
    positions = np.array([[[0, 11, -1, 5]], [[4, -7, 8, 3]]])
    big = np.zeros((2, 5), np.int32)
    big[:, :3] = table
    got = quant.abs_indices2indices_in_kvcache(kit.i32(positions), kit.i32(big)[:, :3], 4)
    assert (kit.value(got) == np.array([[[16, 39, -1, 5]], [[28, -1, 0, 11]]])).all()
    if not kit.checks_values:
        return
    with pytest.raises(RuntimeError, match="abs_indices"):
        quant.abs_indices2indices_in_kvcache(kit.i32(positions + 8), kit.i32(big)[:, :3], 4)


@pytest.mark.parametrize("group", [32, 128])
def test_per_token_cast(kit, group):
    x = bf16(np.random.default_rng(0).normal(size=(5, 512)))
    codes, words = quant.per_token_cast(kit.bf16(x), "e4m3", group, True, True, True)
    assert tuple(words.shape) == (5, 512 // group // 4) and kit.strides(words) == (1, 8)
    scale = support.E8M0[np.ascontiguousarray(kit.value(words)).view(np.uint8)]
    amax = np.maximum(np.abs(x.reshape(5, -1, group)).max(-1), 1e-4)
    assert (scale == 2.0 ** np.ceil(np.log2(amax / 448))).all()
    got = support.E4M3[np.asarray(kit.value(codes)).view(np.uint8)] * np.repeat(scale, group, -1)
    assert np.abs(got - x).max() <= np.abs(x).max() / 16


def test_what_must_be_refused(kit):
    x = kit.bf16(np.zeros((1, 2, 1, 512)))
    for call, name in (
        (lambda: quant.quantize_k_cache(x, L.V32_FP8Sparse), "input_k_cache"),
        (lambda: quant.quantize_k_cache(x, "v4"), "layout"),
        (lambda: quant.quantize_k_cache(x, 448, 64), "dv"),
        (lambda: quant.dequantize_k_cache(x, L.V4_FP8Sparse), "quant_k_cache"),
        (lambda: quant.per_token_cast(x, "e5m2"), "fmt"),
        (lambda: quant.per_token_cast(x, "e4m3", 64), "num_per_channels"),
    ):
        with pytest.raises(AssertionError, match=name):
            call()


def test_quantised_here_attended_there(kit):
    """quantize_k_cache's padded pages go straight into decode."""
    rng = np.random.default_rng(2)
    x = bf16(rng.normal(size=(3, 5, 1, 512)))
    cache = quant.quantize_k_cache(kit.bf16(x), L.V4_FP8Sparse)
    tokens = kit.value(quant.dequantize_k_cache(cache, L.V4_FP8Sparse)).reshape(15, 512)
    q = bf16(rng.normal(size=(1, 1, 2, 512)))
    out, lse = flash_mla.flash_mla_with_kvcache(
        kit.bf16(q), cache, None, None, 512, indices=kit.i32(np.arange(15)[None, None])
    )
    support.check_decode(kit.value(out), kit.value(lse), q, lambda i, j: tokens, 512**-0.5)
