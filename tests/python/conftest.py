# SPDX-License-Identifier: MIT
"""Where the package and its library are found when tests run from the source tree, and the kinds of arrays they use.

FLASHMLA_INSTALLED=1 tests an installed package instead. FLASHMLA_LIBRARY names the library otherwise.
FLASHMLA_WITHOUT_TORCH=1 hides torch where it is installed. FLASHMLA_TEST_CUDA=1 runs every test that takes a kit of
arrays with CUDA tensors too (`-k cuda` selects them).
"""

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
if not os.environ.get("FLASHMLA_INSTALLED"):
    sys.path.insert(0, str(ROOT / "python"))
    os.environ.setdefault("FLASHMLA_LIBRARY", str(ROOT / "build/default/src/libflashmla.so"))
if os.environ.get("FLASHMLA_WITHOUT_TORCH"):
    sys.modules["torch"] = None
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import support  # noqa: E402


def pytest_report_header(config):
    import flash_mla

    torch = support.torch_or_none()
    return [
        f"flash_mla {flash_mla.__version__} from {flash_mla._library.path}",
        f"torch {torch.__version__ if torch else 'not here'}; arrays: {', '.join(support.KITS)}",
    ]


@pytest.fixture(params=list(support.KITS))
def kit(request):
    """Makes arrays: NumPy with uint16 for bf16, NumPy with ml_dtypes, torch."""
    return support.KITS[request.param]


@pytest.fixture
def host_kit(kit):
    """A kit whose values the library can read without waiting for a device, so that it checks them."""
    if not kit.checks_values:
        pytest.skip("values on a device are not checked")
    return kit


@pytest.fixture
def torch():
    module = support.torch_or_none()
    if module is None:
        pytest.skip("torch is not here")
    return module


@pytest.fixture(autouse=True)
def newest():
    """Every test starts and ends with the default conventions."""
    import flash_mla

    flash_mla.set_compat("newest")
    yield
    flash_mla.set_compat("newest")
