"""What is tuned and benchmarked: one operation at one size, with its inputs, its reference and the work it must do."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tritonllm.testing import RELATIVE_ERROR

Inputs = dict[str, Any]


class TensorFactory:
    """Makes input tensors on one device: random values from a seed, or no values at all, where kernels only compile.

    Args:
        device: of every tensor.
        seed: of the random values; ``None`` leaves every tensor uninitialised, so that gigabytes cost nothing.
    """

    def __init__(self, device: torch.device, seed: int | None) -> None:
        self.device = device
        self._generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def empty(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, mean: float = 0, std: float = 1) -> torch.Tensor:
        t = self.empty(*shape, dtype=dtype)
        return t if self._generator is None else t.normal_(mean, std, generator=self._generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)."""
        t = self.empty(*shape, dtype=torch.float32)
        return t if self._generator is None else t.uniform_(generator=self._generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """In [low, high)."""
        t = self.empty(*shape, dtype=dtype)
        return t if self._generator is None else t.random_(low, high, generator=self._generator)

    def permutation(self, n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        if self._generator is None:
            return self.empty(n, dtype=dtype)
        return torch.randperm(n, generator=self._generator, dtype=dtype, device=self.device)

    def filled(self, value: float, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def tensor(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Work:
    """The least that a problem needs: bytes moved (inputs read once, outputs written once) and operations."""

    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Problem(ABC):
    """One operation at one size. Subclasses are frozen dataclasses whose fields are the size."""

    mutates: ClassVar[tuple[str, ...]] = ()  # inputs that `run` and `reference` overwrite

    @property
    @abstractmethod
    def name(self) -> str:
        """Short, with every number that matters: ``silu_and_mul T64 N14336``."""

    def shared(self, new: TensorFactory) -> Inputs:
        """Inputs that all input sets share (weights, tables)."""
        return {}

    @abstractmethod
    def inputs(self, new: TensorFactory) -> Inputs:
        """Inputs of one set."""

    @abstractmethod
    def run(self, x: Inputs) -> Sequence[torch.Tensor]:
        """Call the public operation and return everything it wrote."""

    @abstractmethod
    def reference(self, x: Inputs) -> Sequence[torch.Tensor]:
        """The same from the operation's reference, in float32 where it has floats."""

    @abstractmethod
    def work(self, x: Inputs) -> Work:
        """The least work for these inputs."""

    def error_allowed(self, dtype: torch.dtype) -> float:
        """The relative error that a float output of this dtype may have."""
        return RELATIVE_ERROR[dtype]

    def mismatches_allowed(self) -> float:
        """The fraction of an integer output that may differ: 0, but for ties that rounding decides."""
        return 0.0


def make_sets(problem: Problem, device: torch.device, count: int, *, values: bool = True) -> list[Inputs]:
    """``count`` sets of inputs, each from a seed of its own; a function of the problem alone."""

    def factory(what: object) -> TensorFactory:
        return TensorFactory(device, zlib.crc32(f"{problem!r} {what}".encode()) if values else None)

    shared = problem.shared(factory("shared"))
    return [shared | problem.inputs(factory(index)) for index in range(count)]


def without_effects(problem: Problem, x: Inputs) -> Inputs:
    """The same inputs with copies of those that the problem overwrites."""
    return x | {name: x[name].clone() for name in problem.mutates}
