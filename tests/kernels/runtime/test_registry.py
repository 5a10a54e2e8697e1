"""A public function's reference is the function itself while operators run their references."""

import importlib
import inspect
from collections.abc import Sequence
from threading import Thread
from typing import NamedTuple

import pytest
import torch
from support.compare import assert_close

from tritonllm import kernels
from tritonllm.kernels import linear_ref, rms_norm, rms_norm_ref
from tritonllm.kernels.runtime import registry
from tritonllm.kernels.runtime.registry import OPS, REFERENCES, register_op, with_reference


@pytest.fixture
def launches(monkeypatch) -> list[str]:
    """The operators that run their references, in order."""
    ran: list[str] = []

    def noting(name, run):
        return lambda *args: (ran.append(name), run(*args))[1]

    importlib.import_module("tritonllm.kernels.dense.linear")
    for name, op in OPS.items():
        monkeypatch.setitem(REFERENCES, op, noting(name, REFERENCES[op]))
    return ran


@pytest.mark.parametrize("name", [name for name in kernels.__all__ if name.endswith("_ref")])
def test_has_the_signature_of_the_public_function(name):
    public, reference = getattr(kernels, name.removesuffix("_ref")), getattr(kernels, name)
    assert inspect.signature(reference) == inspect.signature(public)
    assert (reference.__name__, reference.__module__) == (name, public.__module__)
    assert reference.__doc__.splitlines()[0] == f"The reference of :func:`{public.__name__}`, in plain torch."


def test_operators_run_their_references_inside_only(device, launches):
    x, weight = torch.randn(3, 32, device=device), torch.randn(32, device=device)
    assert_close(rms_norm(x, weight), rms_norm_ref(x, weight))
    assert launches == ["norm"]
    rms_norm(x, weight)
    assert launches == ["norm"]


def test_so_do_those_that_a_reference_calls(device, launches):
    x, weight = torch.randn(3, 32, device=device), torch.randn(8, 32, device=device)
    linear_ref(x, weight, norm_weight=x[0])
    assert launches == ["linear", "norm"]


def test_an_error_ends_it(device, launches):
    x, weight = torch.randn(3, 32, device=device), torch.randn(32, device=device)
    for bad in (x.int(), x[0, :0], None):
        with pytest.raises(ValueError, match="weight must"):
            rms_norm_ref(x, bad)
    rms_norm(x, weight)
    assert launches == []


def test_may_be_called_inside_another(device, launches):
    x, weight = torch.randn(3, 32, device=device), torch.randn(32, device=device)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(rms_norm_ref(x, weight), weight)

    with_reference(twice)(x)
    assert launches == ["norm", "norm"]
    twice(x)
    assert launches == ["norm"] * 3


def test_other_threads_do_not_notice(device, launches):
    x, weight = torch.randn(3, 32, device=device), torch.randn(32, device=device)

    def start_another() -> None:
        other = Thread(target=rms_norm, args=(x, weight))
        other.start()
        other.join()

    with_reference(start_another)()
    assert launches == []


class _Options(NamedTuple):
    scale: float
    flags: Sequence[int]


class _Output(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor | None


def test_operators_take_the_fields_of_named_tuples_one_by_one(device, monkeypatch):
    for name in ("OPS", "LAUNCHERS", "REFERENCES"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    seen = []

    def run(x: torch.Tensor, options: _Options, to: _Output) -> None:
        seen.append((options.scale, list(options.flags), to.lse))
        to.out.copy_(x * options.scale)

    run.__name__ = "_test_of_groups"
    op = register_op(mutates=("out", "lse"), reference=run)(run)
    x, options = torch.ones(3, device=device), _Options(2.0, [1, 2])
    out = torch.empty_like(x)
    op(x, *options, *_Output(out, None))
    assert seen == [(2.0, [1, 2], None)] and out.tolist() == [2.0] * 3
    kinds = ["Tensor x", "float scale", "SymInt[] flags", "Tensor(a3!) out", "Tensor(a4!)? lse"]
    assert str(op._schema) == f"tritonllm::test_of_groups({', '.join(kinds)}) -> ()"


def test_arguments_of_an_operator_have_one_name_each():
    def _twice(scale: float, options: _Options) -> None: ...

    with pytest.raises(TypeError, match="two arguments are named scale"):
        register_op(mutates=(), reference=_twice)(_twice)


def test_launches_go_to_the_device_of_their_tensors(monkeypatch):
    class Context:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    class On:
        def __init__(self, index):
            self.device = torch.device("cuda", index)

    current, seen = [0], []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Context)
    signature = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in (("size", int), ("x", torch.Tensor))
        ]
    )
    launch = registry._on_its_device(lambda size, x: seen.append((size, x.device.index, current[-1])), signature)
    for size, index in ((3, 0), (4, 1), (5, 0)):
        launch(size, On(index))
    assert seen == [(3, 0, 0), (4, 1, 1), (5, 0, 0)] and current == [0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_gpu():
    x = torch.randn(5, 64, device="cuda:1", dtype=torch.bfloat16)
    with torch.cuda.device(0):
        out = kernels.silu_and_mul(x)
    torch.testing.assert_close(out, kernels.silu_and_mul_ref(x), rtol=2e-2, atol=2e-2)
    assert out.device == x.device
