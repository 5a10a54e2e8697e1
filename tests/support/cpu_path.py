"""Runs what the CPU runs of an operation, whichever backend the process has."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tritonllm.kernels.runtime.registry import CPU_PATHS, OPS, REFERENCES


class CpuPath(TorchDispatchMode):
    """Inside the context our operators run their CPU path, or their reference where that does not take the arguments.

    Attributes:
        taken: for each operator that was called, whether its CPU path took it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in REFERENCES:
            return func(*args, **(kwargs or {}))
        with self:
            took = func in CPU_PATHS and CPU_PATHS[func](*args)
            self.taken.append((next(name for name, op in OPS.items() if op is func), took))
            if not took:
                REFERENCES[func](*args)
        return None


def on_cpu(public: Any, *args: Any, takes: bool = True, **kwargs: Any) -> Any:
    """The public function by its CPU path, which must take it (or, with ``takes=False``, leave it to the reference)."""
    mode = CpuPath()
    with torch.no_grad(), mode:
        result = public(*args, **kwargs)
    assert mode.taken[-1][1] == takes, f"{mode.taken[-1][0]}: the CPU path {'did not take' if takes else 'took'} this"
    return result
