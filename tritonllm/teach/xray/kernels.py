"""What an operation was run by: Triton's launches, why this implementation, and the tensors as text."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel

from tritonllm import env
from tritonllm.kernels.dense.linear import MAX_M
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.registry import CPU_PATHS, LAUNCHERS
from tritonllm.teach.xray.costs import PRODUCTS, bind, name_of, tensors_in


class Launch(NamedTuple):
    """A kernel that Triton launched."""

    name: str
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    shared: int

    def __str__(self) -> str:
        grid = "×".join(map(str, self.grid))
        return f"{self.name} grid {grid}, {self.num_warps} warps, {self.num_stages} stages, {self.shared:,} B shared"


@contextmanager
def watched_launches() -> Iterator[list[Launch]]:
    """Inside the block, all kernels that Triton launches are noted in the list.

    Triton's hooks of a launch are told a kernel's name only. What makes their argument is asked before every launch, in
    all releases from 3.6 to 3.9, and knows the grid too.
    """
    launches: list[Launch] = []
    plain = CompiledKernel.launch_metadata

    def noting(self: Any, grid: Any, stream: Any, *args: Any) -> Any:
        data, size = self.metadata, grid if isinstance(grid, tuple | list) else (grid,)
        numbers = (int(getattr(data, name, 0) or 0) for name in ("num_warps", "num_stages", "shared"))
        launches.append(Launch(self.name, tuple(size), *numbers))
        return plain(self, grid, stream, *args)

    CompiledKernel.launch_metadata = noting
    try:
        yield launches
    finally:
        CompiledKernel.launch_metadata = plain


def reason_of(func: Any, args: Any, kwargs: Any, choices: tuple[tuning.ConfigChoice, ...]) -> str:
    """Why this implementation of an operation ran."""
    name, first = name_of(func), next(tensors_in([*args, *kwargs.values()]), None)
    on_cpu = first is None or first.device.type == "cpu"
    if func in LAUNCHERS:
        if choices:
            return "; ".join(f"{choice.op}: {choice.reason}" for choice in choices)
        if not on_cpu:
            return "one configuration for all sizes"
        if env.CPU_BACKEND not in env.IN_TORCH:
            return "Triton's interpreter, because the tensors are on the CPU"
        if func in CPU_PATHS and env.CPU_BACKEND == "torch":
            return "plain torch for the CPU (or the reference, if that does not fit), because the tensors are there"
        return "reference in plain torch, because the tensors are on the CPU"
    if name not in PRODUCTS:
        return "plain torch"
    if on_cpu:
        return "torch's product (oneDNN or MKL), because the tensors are on the CPU"
    rows = first.shape[0] if first is not None else 0
    more = f": {rows} rows are more than the {MAX_M} that our kernel takes" if rows > MAX_M else ""
    return f"torch's product (cuBLAS){more}"


_SHORT = {"torch.": "", "bfloat": "bf", "float": "f", "uint": "u", "int": "i"}


def dtype_of(x: torch.Tensor) -> str:
    name = str(x.dtype)
    for long, short in _SHORT.items():
        name = name.replace(long, short)
    return name


def shapes_of(func: Any, args: Any, kwargs: Any, result: Any) -> str:
    """``f32[4,192] · f32[384,192] → f32[4,384]``: matrices and more that go in, and what comes out or is changed."""
    bound = bind(func, args, kwargs)
    mutated = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    outputs = list(tensors_in(result)) or list(tensors_in([bound.get(name) for name in mutated if name != "workspace"]))
    inputs = [x for name, value in bound.items() if name not in mutated for x in tensors_in(value)]
    inputs = [x for x in inputs if x.dim() > 1] or inputs
    return f"{_listed(inputs, 3)} → {_listed(outputs, 2)}"


def _listed(tensors: list[torch.Tensor], most: int) -> str:
    """Tensors of one dtype name it once."""
    texts, before = [], ""
    for x in tensors[:most]:
        kind = dtype_of(x)
        texts.append(f"{'' if kind == before else kind}[{','.join(map(str, x.shape))}]")
        before = kind
    more = [f"+{len(tensors) - most}"] if len(tensors) > most else []
    return " ".join([*texts, *more]) or "–"
