# SPDX-License-Identifier: MIT
"""The package around the functions: python -m, shims for engines, docstrings, the search for the library."""

import importlib
import inspect
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import support
from support import DenseCase

import flash_mla
from flash_mla import _library as c

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def python(*arguments, **changes):
    environment = {**ENVIRONMENT, **changes}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )


def test_main_prints_what_the_program_prints():
    done = python("-m", "flash_mla")
    assert done.returncode == 0 and done.stdout.startswith(f"flashmla {flash_mla.__version__}\n"), done.stderr
    for word in ("devices", "formats", "operations", "v41-fp4-page", "sparse_decode", "fused_decode"):
        assert word in done.stdout
    program = os.environ.get("FLASHMLA_PROGRAM")
    if program:
        assert subprocess.run([program, "info"], capture_output=True, text=True).stdout == done.stdout


def test_every_public_function_is_described():
    modules = (
        flash_mla,
        flash_mla.flash_mla_interface,
        flash_mla.fused_norm_rope_attn_rope_cast,
        flash_mla.quant,
        flash_mla.cuda,
    )
    for module in modules:
        for name in module.__all__:
            member = getattr(module, name)
            assert inspect.getdoc(member), f"{module.__name__}.{name}"
    for name in (
        "q",
        "k_cache",
        "indices",
        "attn_sink",
        "topk_length",
        "extra_k_cache",
        "kv_layout",
        "cu_seqlens_q",
    ):
        assert name in flash_mla.flash_mla_with_kvcache.__doc__


def test_typed_marker():
    assert (pathlib.Path(flash_mla.__file__).parent / "py.typed").exists()


def test_where_the_library_is_looked_for(monkeypatch, tmp_path):
    """The package's own, then FLASHMLA_LIBRARY, then the system's; a message that lists what was tried."""
    monkeypatch.setenv("FLASHMLA_LIBRARY", str(tmp_path / "nothing.so"))
    places = list(c._candidates())
    assert places[-2:] == [str(tmp_path / "nothing.so"), "libflashmla.so.0"]
    assert all(pathlib.Path(place).parent == pathlib.Path(c.__file__).parent for place in places[:-2])
    monkeypatch.delenv("FLASHMLA_LIBRARY")
    assert list(c._candidates()) == places[:-2] + places[-1:]
    monkeypatch.setattr(c, "_candidates", lambda: iter([str(tmp_path / "nothing.so"), "libnowhere.so.9"]))
    with pytest.raises(ImportError, match="FLASHMLA_LIBRARY.*nothing.so.*libnowhere.so.9"):
        c._load()


@pytest.fixture
def no_engines():
    """No module of the engines before or after."""

    def forget():
        importlib.invalidate_caches()
        for name in [name for name in sys.modules if name.split(".")[0] in ("vllm", "sgl_kernel")]:
            del sys.modules[name]

    forget()
    yield
    forget()


def make_engine(folder, path, text):
    """A package that looks like the engine's module of FlashMLA operations."""
    parts = path.split(".")
    for i in range(1, len(parts)):
        (folder.joinpath(*parts[:i])).mkdir(parents=True, exist_ok=True)
        (folder.joinpath(*parts[:i]) / "__init__.py").touch()
    folder.joinpath(*parts[:-1], parts[-1] + ".py").write_text(text)


@pytest.mark.parametrize(
    "path, names",
    [
        (
            "vllm.v1.attention.ops.flashmla",
            [
                "FlashMLASchedMeta",
                "flash_mla_with_kvcache",
                "get_mla_metadata",
                "is_flashmla_dense_supported",
                "is_flashmla_sparse_supported",
            ],
        ),
        ("sgl_kernel.flash_mla", ["flash_mla_with_kvcache", "get_mla_metadata"]),
        (
            "vllm.attention.ops.flashmla",
            ["flash_mla_sparse_prefill", "flash_mla_with_kvcache", "is_flashmla_supported"],
        ),
    ],
)
def test_patch(tmp_path, monkeypatch, no_engines, path, names):
    make_engine(
        tmp_path,
        path,
        "\n".join(f"def {name}(*a, **k):\n    raise RuntimeError('the engine\\'s own')" for name in names)
        + "\ndef other():\n    return 7\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = flash_mla.patch_sglang() if path.startswith("sgl") else flash_mla.patch_vllm()
    assert done == {path: names}
    module = sys.modules[path]
    assert module.other() == 7
    kit = support.KITS["numpy"]
    case = DenseCase(kit)
    out, lse = module.flash_mla_with_kvcache(
        q=case.q,
        k_cache=case.cache,
        block_table=case.table,
        cache_seqlens=case.seqlens,
        head_dim_v=512,
        tile_scheduler_metadata=None,
        num_splits=None,
        softmax_scale=0.1,
        causal=True,
        descale_q=None,
        descale_k=None,
    )
    case.check(kit, out, lse, causal=True, scale=0.1)
    with pytest.raises(AssertionError, match="descale_q"):
        module.flash_mla_with_kvcache(
            case.q, case.cache, case.table, case.seqlens, 512, descale_q=1.0, descale_k=1.0
        )
    for name in names:
        if name.startswith("is_"):
            assert getattr(module, name)() == (True, None)


@pytest.mark.parametrize("engine", ["vllm", "sgl_kernel"])
def test_patch_without_the_engines_module(tmp_path, monkeypatch, no_engines, engine):
    (tmp_path / (engine + ".py")).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    patch = flash_mla.patch_vllm if engine == "vllm" else flash_mla.patch_sglang
    with pytest.raises(ImportError, match=patch.__name__):
        patch()


def test_devices_and_formats_are_the_librarys():
    status, info = c.device_info(c.DEVICE_CPU, 0)
    assert status == c.OK and info.compute_units >= 1
    assert c.format_info(c.KV_V4).bytes_per_token == 584
    with pytest.raises(RuntimeError, match="kv_format: 77"):
        c.format_info(77)


def test_lmdeploys_calls():
    """Its padded heads, its three-dimensional indices, and its way to tell the generations apart."""
    kit = support.KITS["numpy"]
    rng = np.random.default_rng(0)
    q, kv = rng.normal(size=(3, 64, 576)), rng.normal(size=(40, 1, 576))
    rows = kit.i32(rng.integers(-1, 40, (3, 1, 16)))
    out, _, lse = flash_mla.flash_mla_sparse_fwd(kit.bf16(q), kit.bf16(kv), rows, sm_scale=0.1)
    assert out.shape == (3, 64, 512) and lse.shape == (3, 64)
    assert hasattr(
        flash_mla.get_mla_metadata(kit.i32([3]), 64, 1, num_heads_q=64, is_fp8_kvcache=True, topk=16)[0],
        "shape",
    )


@pytest.mark.parametrize("page", ["README.md", "docs/integration.md"])
def test_the_documentations_lines_run(torch, page):
    text = (support.GOLDEN.parents[2] / page).read_text()
    code = text[text.index("```python\n") + 10 :]
    names = {}
    exec(code[: code.index("```")], names)
    assert names["out"].shape == (2, 1, 128, 512) and names["lse"].shape == (2, 128, 1)
    assert torch.isfinite(names["out"].float()).all() and torch.isfinite(names["lse"]).all()
