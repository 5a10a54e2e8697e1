"""A kernel's name in the cache does not depend on what was compiled before it."""

import importlib.util

import pytest
from triton.runtime.jit import DependenciesFinder

import tritonllm.kernels.runtime.registry  # noqa: F401 (makes names stable)

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


def test_without_it_the_order_counts(tmp_path, monkeypatch):
    """Should a later Triton do without, so can we."""
    path = tmp_path / "two_kernels.py"
    path.write_text(SOURCE)
    update = DependenciesFinder._update_hash
    monkeypatch.setattr(DependenciesFinder, "_update_hash", update.triton_own)
    if names(path, "inner") == names(path, "outer"):
        pytest.fail("Triton's names are stable now: tritonllm/kernels/stable_names.py can go")
