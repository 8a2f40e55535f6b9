# SPDX-License-Identifier: MIT
"""Results of the published kernels (tests/data/golden), with the tolerances that their own tests use."""

import numpy as np
import pytest
from support import FORMATS, bf16_value, cache_view, golden

import flash_mla


def published_check(got, wanted, absolute, relative, cosine):
    """The published comparison: infinities in the same places, every element close, and the whole in cosine."""
    got, wanted = np.array(got, np.float64), np.array(wanted, np.float64)
    assert got.shape == wanted.shape
    for special in (np.isposinf, np.isneginf, np.isnan):
        assert (special(got) == special(wanted)).all()
        got[special(got)] = wanted[special(wanted)] = 0
    error = np.abs(got - wanted)
    assert ((error < absolute) | (error / (np.abs(wanted) + 1e-6) < relative)).all()
    assert abs(1 - 2 * (got * wanted).sum() / ((got**2).sum() + (wanted**2).sum())) <= cosine


@pytest.mark.parametrize("name", ["mqa_causal", "gqa"])
def test_dense_decode(kit, name):
    g = golden("dense_decode_a.safetensors")
    half = g[name + ".q"].dtype == np.float16
    make = kit.f16 if half else kit.bf16_raw
    out, lse = flash_mla.flash_mla_with_kvcache(
        make(g[name + ".q"]),
        make(g[name + ".k_cache"]),
        kit.i32(g[name + ".block_table"]),
        kit.i32(g[name + ".cache_seqlens"]),
        512,
        softmax_scale=1 / 24,
        causal=bool(g[name + ".causal"][0]),
    )
    wanted = g[name + ".out"] if half else bf16_value(g[name + ".out"])
    published_check(kit.value(out), wanted, 8e-4, 2.01 / 128, 5e-6)
    published_check(kit.value(lse), g[name + ".lse"], 1e-6, 8.01 / 65536, 1e-7)


@pytest.mark.parametrize("name", ["v32_h64", "v32_h128", "v4_h64_extra", "v4_h128"])
def test_sparse_decode(kit, name):
    g = {
        key[len(name) + 1 :]: x
        for key, x in golden("sparse_decode_a.safetensors").items()
        if key.startswith(name + ".")
    }
    _, page, extra_page = g["meta"]
    per_token = FORMATS[name[: name.index("_")]][1]
    keywords = {"indices": kit.i32(g["indices"])}
    keywords.update({key: kit.i32(g[key]) for key in ("topk_length", "extra_topk_length") if key in g})
    if "attn_sink" in g:
        keywords["attn_sink"] = kit.f32(g["attn_sink"])
    if "extra_indices" in g:
        keywords["extra_indices_in_kvcache"] = kit.i32(g["extra_indices"])
        keywords["extra_k_cache"] = cache_view(kit, g["extra_kv_page_bytes"], int(extra_page), per_token)
    out, lse = flash_mla.flash_mla_with_kvcache(
        kit.bf16_raw(g["q"]),
        cache_view(kit, g["kv_page_bytes"], int(page), per_token),
        None,
        None,
        512,
        None,
        None,
        float(g["softmax_scale"][0]),
        False,
        True,
        **keywords,
    )
    published_check(kit.value(out), bf16_value(g["out"]), 1e-3, 2.01 / 128, 5e-6)
    published_check(kit.value(lse), g["lse"], 1e-6, 8.01 / 65536, 1e-7)


@pytest.mark.parametrize("name, d", [("d512_h64", 512), ("d576_h64", 576)])
def test_sparse_prefill(kit, name, d):
    g = golden("sparse_prefill_a.safetensors")
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        kit.bf16_raw(g[name + ".q"]),
        kit.bf16_raw(g[name + ".kv"]),
        kit.i32(g[name + ".indices"]),
        d**-0.5,
        512,
        kit.f32(g[name + ".attn_sink"]),
        kit.i32(g[name + ".topk_length"]),
    )
    published_check(kit.value(out), bf16_value(g[name + ".out"]), 8e-4, 3.01 / 128, 7e-6)
    published_check(kit.value(max_logits), g[name + ".max_logits"], 1e-6, 2.01 / 65536, 1e-7)
    published_check(kit.value(lse), g[name + ".lse"], 1e-6, 2.01 / 65536, 1e-7)
