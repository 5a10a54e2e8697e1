"""Which tests run where.

Kernel tests need a GPU or the interpreter, ahead-of-time tests the compile backend; neither can share a process with
the other. `make test` runs one process for each; what a process cannot run is left out, and its header says so.
"""

import gc
import multiprocessing.util
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected: of half a million objects that imports make, none is garbage

import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from support import selection  # noqa: E402
from support.examples import NORMAL  # noqa: E402

from tritonllm import env  # noqa: E402
from tritonllm.system.starting import leave_out_of_searches  # noqa: E402

# A folder for temporary files of this process and those that it starts: tests look there for what others leave behind,
# and another run on the same machine must not be taken for them.
tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="tests-")
# Behind what multiprocessing removes of it (-100).
multiprocessing.util.Finalize(None, shutil.rmtree, (tempfile.tempdir,), {"ignore_errors": True}, exitpriority=-200)

# A shell starts what runs in its background with Ctrl-C ignored, and processes hand that on; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
HAS_GPU = torch.cuda.is_available()

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=NORMAL
)
settings.register_profile("quick", settings.get_profile("default"), max_examples=8)
settings.register_profile("thorough", deadline=None, max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def _left_out() -> dict[str, str]:
    """Folders that this process cannot test, with the reason."""
    out = {}
    if env.CPU_BACKEND != "compile":
        out["aot"] = "needs TRITONLLM_CPU_BACKEND=compile (make test-aot)"
    if env.CPU_BACKEND == "compile" or (not HAS_GPU and not env.TRITON_INTERPRET):
        out["kernels"] = "needs a GPU or TRITON_INTERPRET=1 (make test-kernels)"
    if env.CPU_BACKEND not in env.IN_TORCH:
        for path in HERE.iterdir():
            if path.is_dir() and path.name not in ("kernels", "aot"):
                out[path.name] = "needs the torch backend (make test-engine, test-e2e, test-serve and test-teach)"
    return out


LEFT_OUT = _left_out()


def pytest_addoption(parser: pytest.Parser) -> None:
    parts = parser.getgroup("parts of the tests (tests/support/selection.py)")
    parts.addoption("--quick", action="store_true", help="those of `make test`")
    parts.addoption("--fifth", type=int, choices=range(selection.FIFTHS), help="a fifth of what --quick leaves out")
    parser.addoption("--results", type=Path, metavar="FILE", help="write outcomes and measured numbers to FILE as JSON")
    parser.addoption("--pauses", type=int, metavar="SEED", help="pause at random (tests/support/pauses.py)")
    parser.addoption("--update-screenshots", action="store_true", help="put those that tests take into docs/img/")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick"):
        settings.load_profile("quick")
    if (seed := config.getoption("--pauses")) is not None:
        from support.pauses import Pauses

        config.pluginmanager.register(Pauses(seed))
    path = config.getoption("--results")
    if path is not None and not hasattr(config, "workerinput"):  # the workers of pytest-xdist report to their parent
        from support.results import ResultsWriter

        config.pluginmanager.register(ResultsWriter(path))


def pytest_report_header() -> list[str]:
    where = torch.cuda.get_device_name() if HAS_GPU else f"CPU ({env.CPU_BACKEND})"
    return [f"tritonllm: {where}", *(f"  left out: tests/{name}: {why}" for name, why in sorted(LEFT_OUT.items()))]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return True if collection_path.parent == HERE and collection_path.name in LEFT_OUT else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a GPU every kernel test and every test marked `also_gpu` is a GPU test; without one, tests marked `gpu` are
    deselected. Then ``--quick`` and ``--fifth`` choose among what is left."""
    chosen = set(items)
    if HAS_GPU:
        for item in items:
            if HERE / "kernels" in item.path.parents or item.get_closest_marker("also_gpu"):
                item.add_marker(pytest.mark.gpu)
    else:
        chosen = {item for item in items if not item.get_closest_marker("gpu")}
    within = [item for item in items if item in chosen]
    if config.getoption("--quick"):
        chosen = selection.quick(within)
    elif (fifth := config.getoption("--fifth")) is not None:
        chosen = selection.rest(within, fifth)
    if left := [item for item in items if item not in chosen]:
        items[:] = [item for item in items if item in chosen]
        config.hook.pytest_deselected(items=left)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A part that has nothing of this fifth has passed."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("--fifth") is not None:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_finish() -> None:
    """Leave out of each search for garbage what is there before the first test: a tenth of the processor time."""
    leave_out_of_searches()
    gc.enable()


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_GPU else "cpu")
