"""Compile kernels for a GPU that is not there.

:func:`compile_kernels` swaps Triton's driver for one that only names a target and makes every launch stop after
compilation, so the ordinary launchers, called on CPU tensors, compile with the exact specialisation (alignment,
divisibility, constants) that the same call would have on that GPU. It needs ``TRITONLLM_CPU_BACKEND=compile`` and
cannot share a process with Triton's interpreter.
"""

import itertools
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tritonllm import env

Arch = int | str  # 90 for sm_90; "gfx942" for AMD's MI300


def target_of(arch: Arch) -> GPUTarget:
    """The architecture as Triton names it."""
    return GPUTarget("cuda", arch, 32) if isinstance(arch, int) else GPUTarget("hip", arch, 64)


@dataclass(frozen=True)
class CompiledKernel:
    """One compiled specialisation of a kernel."""

    name: str
    arch: Arch
    shared_bytes: int
    num_warps: int
    num_stages: int
    asm: dict[str, Any]

    @property
    def sass(self) -> str:
        return self.asm["sass"]

    def resource_usage(self) -> tuple[int, int]:
        """``(registers per thread, bytes spilled)``; for NVIDIA GPUs.

        A kernel without a stack spills nothing. Only for one that has a stack is ptxas run again, which tells what of
        it was spilled: that takes as long as the compilation did.
        """
        assert isinstance(self.arch, int)
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder) / "kernel.cubin"
            cubin.write_bytes(self.asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
            assert found, usage
            registers, stack = map(int, found.groups())
            return registers, self._spilled(Path(folder) / "kernel.ptx") if stack else 0

    def _spilled(self, path: Path) -> int:
        from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

        assert isinstance(self.arch, int)
        path.write_text(self.asm["ptx"])
        command = [get_ptxas(self.arch).path, "-v", f"--gpu-name={sm_arch_from_capability(self.arch)}", str(path)]
        done = subprocess.run([*command, "-o", f"{path}.o"], capture_output=True, text=True, check=True)
        return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr))


_DEVICES = itertools.count(10_000)  # numbers that no GPU here has


class _TargetOnly:
    """Stands in for Triton's driver: knows the target, owns no device."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target
        self._device = next(_DEVICES)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device  # Triton keeps compiled kernels by device: a new one has none, so none is left unnoticed

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def pretend(target: GPUTarget) -> Iterator[None]:
    """Inside the block, Triton takes the machine to have such a GPU: it can compile for it, and launch nothing."""
    previous = driver._active
    driver.set_active(_TargetOnly(target))
    try:
        yield
    finally:
        driver._active = previous


@contextmanager
def compile_kernels(arch: Arch, *, every: int = 1) -> Iterator[list[CompiledKernel]]:
    """Inside the block, launches compile for ``arch`` (80, 90, 100, "gfx942") and do not run; yields what was compiled.

    Args:
        every: how many launches of a kernel there are for each that is compiled; the first one is.

    Raises:
        RuntimeError: if the process does not run with ``TRITONLLM_CPU_BACKEND=compile``.
    """
    if env.CPU_BACKEND != "compile":
        raise RuntimeError("ahead-of-time compilation needs TRITONLLM_CPU_BACKEND=compile in the environment")
    compiled: list[CompiledKernel] = []
    launches: Counter[JITFunction[Any]] = Counter()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        number = launches[self]
        launches[self] += 1
        if number % every:
            return None
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        meta = kernel.metadata
        compiled.append(CompiledKernel(self.__name__, arch, meta.shared, meta.num_warps, meta.num_stages, kernel.asm))
        return kernel

    JITFunction.run = compile_only
    try:
        with pretend(target_of(arch)):
            yield compiled
    finally:
        JITFunction.run = run
