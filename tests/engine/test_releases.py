"""What differs between releases of Triton and torch, and which are refused."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from triton.runtime.jit import DependenciesFinder

from tritonllm.kernels.runtime import releases

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("triton", "torch"), [("3.6.0", "2.10.0"), ("3.9.1+gitab", "2.15.0+cu130"), ("3.7.1", "2.13.0+cpu")]
)
def test_supported(triton, torch):
    releases.require_supported(triton, torch)


@pytest.mark.parametrize(
    ("triton", "torch", "package"),
    [
        ("3.5.1", "2.13.0", "Triton 3.5.1"),
        ("3.10.0", "2.15.0", "Triton 3.10.0"),
        ("3.6.0", "2.9.1", "torch 2.9.1"),
        ("3.9.0", "2.16.0", "torch 2.16.0"),
    ],
)
def test_others_are_refused(triton, torch, package):
    with pytest.raises(ImportError, match=f"^{re.escape(package)} is installed, .*Triton 3.9 with torch 2.15"):
        releases.require_supported(triton, torch)


def test_no_version():
    with pytest.raises(ValueError, match="version='main'"):
        releases.release_of("main")


@pytest.mark.parametrize("module", ["kernels.elementwise.norm", "kernels.compile.parallel", "kernels.dense.sm90.gated"])
def test_an_import_of_kernels_refuses_before_it_misses_anything(module):
    code = f"import triton; triton.__version__ = '3.10.0'; import tritonllm.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.splitlines()[-1].startswith("ImportError: Triton 3.10.0 is installed, and tritonllm supports")


def test_pip_keeps_to_what_is_supported():
    """The bounds in pyproject.toml, and the table in the README."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    torches = [name for names in releases.SUPPORTED.values() for name in names]
    for package, names in (("torch", torches), ("triton", [*releases.SUPPORTED])):
        major, minor = releases.release_of(names[-1])
        bounds = f"{package}>={names[0]},<{major}.{minor + 1}"
        assert [line.split(";")[0] for line in wanted if re.match(rf"{package}\b", line)] == [bounds]
    readme = (ROOT / "README.md").read_text()
    for name, of in releases.SUPPORTED.items():
        assert f"| {name} | {', '.join(of)} |" in readme


@pytest.mark.skipif(releases.TRITON < (3, 9), reason="says nothing about it")
def test_a_compilation_warns_of_nothing():
    code = """if True:
        import torch
        from tritonllm.kernels import rms_norm
        from tritonllm.kernels.compile.aot import compile_kernels
        with compile_kernels(90) as kernels:
            rms_norm(torch.empty(4, 64), torch.empty(64))
        assert kernels
    """
    environment = os.environ | {"TRITONLLM_CPU_BACKEND": "compile"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr


SOURCE = """
import triton
import triton.language as tl

SCALE = tl.constexpr(3)

@triton.jit
def inner(x):
    return x * SCALE

@triton.jit
def outer(x_ptr):
    tl.store(x_ptr, inner(tl.load(x_ptr)))
"""


def names(path, first):
    """Of both functions, loaded anew; hashed in this order."""
    spec = importlib.util.spec_from_file_location("two_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    keys = {name: getattr(module, name).cache_key for name in (first, "inner", "outer")}
    return keys["inner"], keys["outer"]


def test_in_any_order(tmp_path):
    path = tmp_path / "two_kernels.py"
    path.write_text(SOURCE)
    assert names(path, "inner") == names(path, "outer")


@pytest.mark.skipif(releases.TRITON >= (3, 8), reason="its names are stable by themselves")
def test_without_it_the_order_counts(tmp_path, monkeypatch):
    path = tmp_path / "two_kernels.py"
    path.write_text(SOURCE)
    update = DependenciesFinder._update_hash
    monkeypatch.setattr(DependenciesFinder, "_update_hash", update.triton_own)
    assert names(path, "inner") != names(path, "outer")
