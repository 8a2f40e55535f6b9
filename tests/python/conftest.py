# SPDX-License-Identifier: MIT
"""Where the package and its library are found when tests run from the source tree, and the kinds of arrays they use.

FLASHMLA_INSTALLED=1 tests an installed package instead. FLASHMLA_LIBRARY names the library otherwise.
--slices FILE writes counts and the worst errors of the published tests' slices as JSON (test_published_*.py).
FLASHMLA_WITHOUT_TORCH=1 hides torch where it is installed. FLASHMLA_TEST_CUDA=1 runs every test that takes a kit of
arrays with CUDA tensors too (`-k cuda` selects them).
"""

import json
import os
import pathlib
import sys
import time

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


# ---- slices of the published tests -------------------------------------------------------------------------


def pytest_addoption(parser):
    parser.addoption("--slices", metavar="FILE", help="write counts and worst errors of the published tests' slices")


@pytest.fixture
def judge(request):
    """Compares results with references; what it saw goes into the report of its slice, the test function."""
    import published

    seen = published.Judge()
    request.node.user_properties.append(("worst", seen.worst))
    yield seen
    published.give_back()


def pytest_configure(config):
    config.pluginmanager.register(_Slices(config), "flash_mla_slices")


class _Slices:
    """Adds up what the judges of all processes saw, in the process that reports."""

    def __init__(self, config):
        self.config, self.slices = config, {}
        self.begin = self.written = time.monotonic()

    def pytest_runtest_logreport(self, report):
        worst = dict(report.user_properties).get("worst")
        if worst is None or (report.when != "call" and report.passed):
            return
        file, test = report.nodeid.split("::", 1)
        name = pathlib.Path(file).stem.replace("test_published_", "") + "/" + test.split("[")[0].replace("test_", "")
        row = self.slices.setdefault(
            name, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "worst": {}, "failures": []}
        )
        row[report.outcome] += 1
        row["seconds"] = round(row["seconds"] + report.duration, 3)
        if report.failed:
            row["failures"].append(test)
        for what, numbers in worst.items():
            kept = row["worst"].setdefault(what, dict.fromkeys(numbers, 0.0))
            for key, value in numbers.items():
                kept[key] = max(kept[key], float(f"{value:.4g}"))

        if time.monotonic() > self.written + 5:  # a run that is cut off leaves what it has seen
            self.write()

    def pytest_sessionfinish(self):
        self.write()

    def write(self):
        path = self.config.getoption("--slices")
        if path is None or hasattr(self.config, "workerinput"):
            return
        import flash_mla

        self.written = time.monotonic()
        torch = support.torch_or_none()
        on_cuda = torch is not None and "cuda" in support.KITS
        report = {
            "device": torch.cuda.get_device_name() if on_cuda else "cpu",
            "torch": torch.__version__ if torch else None,
            "flash_mla": flash_mla.__version__,
            "share": os.environ.get("FLASHMLA_TEST_SHARE", "1/1") if on_cuda else "a few small cases",
            "seconds": round(self.written - self.begin, 1),
            "slices": dict(sorted(self.slices.items())),
        }
        pathlib.Path(path).write_text(json.dumps(report, indent=1) + "\n")


# ---- fixtures ----------------------------------------------------------------------------------------------


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
