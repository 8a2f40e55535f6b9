# SPDX-License-Identifier: MIT
"""set_compat and FLASH_MLA_COMPAT: the points that only a setting can decide, and that nothing else changes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from support import INF, SparseCase
from test_prefill import Case

import flash_mla

ALL = ("newest", "2026-09-10", "2026-04", "2025-09")


@pytest.mark.parametrize("setting", ALL)
def test_layout_of_528_and_288(kit, setting):
    flash_mla.set_compat(setting)
    suffix = "-page" if setting == "2026-09-10" else ""
    case = SparseCase(kit, "v41" + suffix, "v41-fp4" + suffix)
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    case.check(kit, out, lse)
    other = SparseCase(kit, "v41-page" if not suffix else "v41", "v41-fp4-page" if not suffix else "v41-fp4")
    out, lse = flash_mla.flash_mla_with_kvcache(
        other.q, other.cache, None, None, 512, **other.keywords, kv_layout="token" if suffix else "page"
    )
    other.check(kit, out, lse)


@pytest.mark.parametrize("setting", ALL)
def test_base_of_sparse_prefill(kit, setting):
    case = Case(kit)
    natural = flash_mla.flash_mla_sparse_fwd(case.q, case.kv, case.index_array, 0.06, **case.keywords)
    flash_mla.set_compat(setting)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
        case.q, case.kv, case.index_array, 0.06, **case.keywords
    )
    assert (kit.raw(out) == kit.raw(natural[0])).all()
    lonely = kit.value(natural[2]) == INF
    assert lonely[2].all() and lonely[3].all() and lonely.sum() == 6
    if setting == "2025-09":
        assert (kit.value(lse)[lonely] == -INF).all() and (kit.value(max_logits)[lonely] == -INF).all()
        for got, before in ((lse, natural[2]), (max_logits, natural[1])):
            assert np.allclose(
                kit.value(got)[~lonely], kit.value(before)[~lonely] / np.log(2), rtol=1e-6, atol=1e-6
            )
    else:
        assert (kit.raw(lse) == kit.raw(natural[2])).all() and (
            kit.raw(max_logits) == kit.raw(natural[1])
        ).all()


@pytest.mark.parametrize("setting", ALL)
def test_metadata_with_arguments(kit, setting):
    flash_mla.set_compat(setting)
    meta, splits = flash_mla.get_mla_metadata(kit.i32([500, 70]), 128, 1)
    if setting in ("newest", "2025-09"):
        assert meta.shape[1] == 8 and tuple(splits.shape) == (3,)
        six = flash_mla.get_mla_metadata(kit.i32([500, 70]), 128, 1, 128, False)
        same = (kit.value(meta) == kit.value(six[0])).all()
        assert same == (
            setting == "2025-09"
        ), "three arguments: token positions, unless the setting says blocks"
    else:
        assert isinstance(meta, flash_mla.FlashMLASchedMeta) and splits is None


@pytest.mark.parametrize("setting", ALL)
def test_everything_else_stays(kit, setting):
    """is_fp8 inferred, decode lse natural with +inf, MHA lse -inf."""
    flash_mla.set_compat(setting)
    case = SparseCase(kit, "v32")
    out, lse = flash_mla.flash_mla_with_kvcache(case.q, case.cache, None, None, 512, **case.keywords)
    case.check(kit, out, lse)
    q, k = kit.bf16(np.ones((2, 1, 128))), kit.bf16(np.ones((0, 1, 128)))
    _, lse = flash_mla.flash_attn_varlen_func(q, k, k, kit.i32([0, 2]), kit.i32([0, 0]), 2, 0)
    assert (kit.value(lse) == -INF).all()


def test_set_and_get():
    assert flash_mla.get_compat() == "newest"
    assert flash_mla.set_compat("2026-04") == "newest" and flash_mla.get_compat() == "2026-04"
    with pytest.raises(AssertionError, match="compat: '2024'; allowed: newest, 2026-09-10, 2026-04, 2025-09"):
        flash_mla.set_compat("2024")
    assert flash_mla.get_compat() == "2026-04"


@pytest.mark.parametrize(
    "value, wanted", [("", "newest"), ("2025-09", "2025-09"), ("2026-09-10", "2026-09-10")]
)
def test_environment(value, wanted):
    environment = {**os.environ, "FLASH_MLA_COMPAT": value, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import flash_mla; print(flash_mla.get_compat())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == wanted, done.stderr
    environment["FLASH_MLA_COMPAT"] = "yesterday"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0 and "yesterday" in done.stderr
