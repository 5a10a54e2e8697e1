"""Which grids ordinary calls would launch, on tensors that take no memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.runtime.jit import JITFunction

from tritonllm.kernels.compile.aot import pretend, target_of
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.meta_mode import MetaMode

MOST = (2**31 - 1, 65535, 65535)  # programs along x, y and z (CUDA C++ Programming Guide, "Technical Specifications")


@contextmanager
def grids_of_launches(arch: int) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Inside the block, launches on meta tensors are noted instead of made: yields ``(kernel, grid)`` of each."""
    noted: list[tuple[str, tuple[int, ...]]] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        noted.append((self.__name__, tuple(grid)))

    with (
        patch.object(JITFunction, "run", note),
        pretend(target_of(arch)),
        tuning.meta_tensors_on(None),
        MetaMode(),
    ):
        yield noted


def too_large(grids: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Those that no GPU launches."""
    return [(name, grid) for name, grid in grids if any(n > most for n, most in zip(grid, MOST, strict=False))]
