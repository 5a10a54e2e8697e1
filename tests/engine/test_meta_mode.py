"""Shapes, types and strides of operations on meta tensors, against torch's own functions for them."""

import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from tritonllm.kernels import rms_norm
from tritonllm.kernels.runtime import registry
from tritonllm.kernels.runtime.meta_mode import MetaMode

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def meta(*shape, dtype=F32):
    return torch.empty(*shape, dtype=dtype, device="meta")


OPERATIONS = {
    "mul": lambda: meta(4, 1, dtype=BF16) * meta(3),
    "mul by a number": lambda: [meta(4, dtype=dtype) * 0.5 for dtype in (BF16, I32)],
    "number times": lambda: 0.9 * meta(4, dtype=BF16),
    "add": lambda: [meta(4, dtype=I32) + 50, meta(0, 3) + meta(1, 3, dtype=I64)],
    "sub": lambda: [meta(4, 3) - meta(3), 1 - meta(4, dtype=I32)],
    "of strides": lambda: [meta(4, 6).t() * 2, torch.empty_like(meta(4, 6)[:, :3]), torch.sigmoid(meta(2, 3, 4).mT)],
    "in place": lambda: [meta(4, 3).add_(meta(3)), meta(4).mul_(2), meta(4).copy_(meta(1))],
    "remainder": lambda: meta(7, dtype=I64) % 3,
    "floor_divide": lambda: [meta(7, dtype=I64) // 16, meta(4, 1, dtype=I32) // meta(3, dtype=I64), meta(4) // 2],
    "clamp": lambda: meta(7, dtype=I32).clamp(max=3),
    "clamp_min, clamp_max": lambda: [meta(7, dtype=I32).clamp_min(1), meta(2, 7).clamp_max(3)],
    "compare": lambda: [meta(4, dtype=I32) < 3, meta(4, 1) >= meta(3), meta(0, 3) == 1, meta(4) != meta(3, 4)],
    "and": lambda: [(meta(4, 1) < 3) & (meta(3) > 1), meta(4, dtype=I32) & meta(4, dtype=I64)],
    "pointwise": lambda: [torch.sigmoid(meta(4, dtype=BF16)), meta(3).cos(), meta(3).sin()],
    "like": lambda: [torch.empty_like(meta(4, 3, dtype=BF16)), torch.empty_like(meta(4), dtype=I32)],
    "where": lambda: torch.where(meta(4, 1, dtype=torch.bool), meta(4, 5, dtype=I32), meta(5, dtype=I32)),
    "where with a number": lambda: [
        torch.where(meta(4, 1, dtype=torch.bool), *values)
        for values in ((meta(4, 5, dtype=I32), -1), (0, meta(5, dtype=I64)), (meta(5, dtype=BF16), 0.5))
    ],
    "arange": lambda: (
        [torch.arange(*args, device="meta") for args in ((5,), (2, 9), (0, 10, 3), (4, 4))]
        + [torch.arange(5, dtype=I32, device="meta")]
    ),
    "mm": lambda: [meta(4, 3, dtype=BF16).mm(meta(3, 5, dtype=BF16)), meta(4, 3) @ meta(3, 5)],
    "matmul": lambda: meta(2, 4, 3) @ meta(3, 5),
    "mm into": lambda: torch.mm(meta(4, 3), meta(3, 5), out=meta(4, 5)),
    "addmm": lambda: [torch.addmm(meta(5), meta(4, 3), meta(3, 5)), meta(4, 5).addmm_(meta(4, 3), meta(3, 5), alpha=2)],
    "linear": lambda: [
        F.linear(meta(2, 4, 3), meta(5, 3), meta(5)),
        F.linear(meta(4, 3, dtype=BF16), meta(5, 3, dtype=BF16)),
    ],
    "embedding": lambda: F.embedding(meta(4, dtype=I32), meta(9, 6, dtype=BF16)),
    "repeat": lambda: [meta(4, 3).repeat(2, 1), meta(4, 3).repeat(2, 1, 3)],
}


def described(result):
    tensors = result if isinstance(result, list) else [result]
    return [(t.shape, t.dtype, t.stride(), t.device) for t in tensors]


@pytest.mark.parametrize("name", OPERATIONS)
def test_agrees_with_torch(name):
    with torch.inference_mode():
        expected = described(OPERATIONS[name]())
        with MetaMode():
            assert described(OPERATIONS[name]()) == expected


def test_other_devices_are_as_ever():
    with MetaMode():
        assert torch.equal(torch.ones(2, 3) @ torch.ones(3, 1), torch.full((2, 1), 3.0))
        assert torch.equal(torch.arange(3) * 2, torch.tensor([0, 2, 4]))


def test_our_operators_call_their_launchers(monkeypatch):
    rms_norm(meta(5, 8), meta(8))  # outside, nobody launches
    op, calls = registry.OPS["norm"], []
    monkeypatch.setitem(registry.LAUNCHERS, op, lambda x, *rest: calls.append((x.shape, (x * 2).shape)))
    with MetaMode():
        rms_norm(meta(4, 8), meta(8))
    assert calls == [((4, 8), (4, 8))]


def test_once_leaves_out_what_would_be_the_same_again(monkeypatch):
    """Not what differs in a shape, a stride, a type, an alignment or a number, nor what failed."""
    calls = []
    monkeypatch.setitem(registry.LAUNCHERS, registry.OPS["norm"], lambda x, *rest: calls.append(x.shape))
    wide = meta(4, 32)
    others = [
        lambda: rms_norm(meta(5, 8), meta(8)),
        lambda: rms_norm(meta(4, 8), meta(8), eps=0.5),
        lambda: rms_norm(meta(4, 8, dtype=BF16), meta(8, dtype=BF16)),
        lambda: rms_norm(wide[:, :8], meta(8)),
        lambda: rms_norm(wide[:, 8:16], meta(8)),
        lambda: rms_norm(wide[:, 1:9], meta(8)),
    ]
    with MetaMode(once=True):
        for _ in range(3):
            rms_norm(meta(4, 8), meta(8))
        assert len(calls) == 1
        for number, other in enumerate(others, start=2):
            other(), other()
            assert len(calls) == number
    with MetaMode(once=True):
        rms_norm(meta(4, 8), meta(8))
        assert len(calls) == len(others) + 2

    def fail(*_):
        raise RuntimeError("this")

    monkeypatch.setitem(registry.LAUNCHERS, registry.OPS["norm"], fail)
    with MetaMode(once=True):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="this"):
                rms_norm(meta(4, 8), meta(8))


LIST = """
import sys, torch
from tritonllm.config.engine import EngineConfig
from tritonllm.engine.start.precompile import Target, kernels_of
from tritonllm.models.families import spec_from_config
from support.real_configs import QWEN3_0_6B
config = EngineConfig.from_kwargs(model="x", max_model_len=4096)
print(len(kernels_of(spec_from_config(QWEN3_0_6B), config, Target(90, None, torch.bfloat16, 4096))))
print(sorted({"sympy", "torch._dynamo"} & set(sys.modules)))
"""


def test_a_list_of_kernels_needs_neither_sympy_nor_a_compiler():
    """They take longer to import than everything else that a list needs."""
    path = f"{__file__.rsplit('/', 2)[0]}:{__file__.rsplit('/', 3)[0]}"
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    count, imported = done.stdout.split("\n")[:2]
    assert int(count) > 10 and imported == "[]"
