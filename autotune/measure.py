"""What the tuner's worker processes do: compile candidates without a GPU, and check and time them on one."""

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from triton.errors import TritonError
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from autotune import ops
from autotune.problem import Inputs, Problem, make_sets
from autotune.timing import median_us
from autotune.verify import Prepared, prepare, verify
from autotune.worker import Failed
from tritonllm.kernels.compile.aot import CompiledKernel, compile_kernels, pretend, target_of
from tritonllm.kernels.compile.cache_folder import read_kernels_from, write_kernels_to
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.gpus import gpu_at

# What Triton, ptxas and the CUDA runtime raise for a configuration that does not work on the chip.
CANDIDATE_ERRORS = (TritonError, RuntimeError, subprocess.CalledProcessError)


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()[:200]}"


@contextmanager
def launches_skipped() -> Iterator[set[JITFunction]]:
    """Inside, launching a Triton function does nothing but note it."""
    run, launched = JITFunction.run, set()
    JITFunction.run = lambda self, *args, **kwargs: launched.add(self)
    try:
        yield launched
    finally:
        JITFunction.run = run


class Compiler:
    """Compiles for a GPU that need not be there; needs ``TRITONLLM_CPU_BACKEND=compile``.

    The results lie in Triton's cache on disk, where the process that measures finds them, or in ``kernels``: a folder
    of :mod:`tritonllm.kernels.compile.cache_folder`.
    """

    def __init__(self, kernels: str | None = None) -> None:
        if kernels is not None:
            write_kernels_to(Path(kernels), binary_only=False)  # whether it spills is asked of the stage before
        self._inputs: tuple[Problem, Inputs] | None = None
        self._usage: dict[str, tuple[int, int]] = {}

    def _run(self, problem: Problem) -> None:
        if self._inputs is None or self._inputs[0] != problem:
            self._inputs = problem, make_sets(problem, torch.device("cpu"), 1, values=False)[0]
        problem.run(self._inputs[1])

    def _resource_usage(self, kernel: CompiledKernel) -> tuple[int, int]:
        digest = hashlib.sha256(kernel.asm["ptx"].encode()).hexdigest()
        if digest not in self._usage:
            self._usage[digest] = kernel.resource_usage()
        return self._usage[digest]

    def describe(self, op: str, problem: int, arch: int) -> list[tuning.Key]:
        """The different keys with which the problem asks for configurations on such a GPU."""
        tunable = ops.load(op)
        with pretend(target_of(arch)), launches_skipped(), tuning.override(op, tunable.default) as asked:
            self._run(tunable.problems[problem])
        return [key for index, key in enumerate(asked) if key not in asked[:index]]

    def compile(
        self, op: str, problem: int, key: dict[str, Any], config: tuning.Config, arch: int, shared_limit: int
    ) -> None:
        """Raise ``Failed`` unless the problem compiles, fits the chip's shared memory and spills no register."""
        tunable = ops.load(op)
        try:
            with tuning.override(op, tunable.only_for(key, config)), compile_kernels(arch) as kernels:
                self._run(tunable.problems[problem])
            for kernel in kernels:
                if kernel.shared_bytes > shared_limit:
                    raise Failed(f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory")
                _, spilled = self._resource_usage(kernel)
                if spilled:
                    raise Failed(f"{kernel.name} spills {spilled} bytes of registers")
        except CANDIDATE_ERRORS as error:
            raise Failed(_brief(error)) from error


class Gpu:
    """Checks and times on the GPU of this process (on another device, with another timer, in tests).

    Kernels that the folder ``kernels`` holds are not compiled.
    """

    def __init__(
        self, device: str = "cuda", timer: Callable[..., float] = median_us, kernels: str | None = None
    ) -> None:
        if kernels is not None:
            read_kernels_from(Path(kernels))
        self._device = torch.device(device)
        self._timer = timer
        self._prepared: Prepared | None = None

    def info(self) -> dict[str, Any]:
        index = torch.cuda.current_device()
        gpu = gpu_at(index)
        return {
            "gpu": gpu.name,
            "arch": gpu.arch,
            "processors": gpu.processors,
            "memory_gib": round(gpu.memory_gib),
            "shared_limit": driver.active.utils.get_device_properties(index)["max_shared_mem"],
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def _prepare(self, problem: Problem) -> Prepared:
        if self._prepared is None or self._prepared.problem != problem:
            self._prepared = None  # frees the last problem's tensors first
            torch.cuda.empty_cache()
            self._prepared = prepare(problem, self._device)
        return self._prepared

    def measure(self, op: str, problem: int, key: dict[str, Any], config: tuning.Config, careful: bool) -> float:
        """Microseconds, if the result is right; otherwise raise ``Failed``."""
        tunable = ops.load(op)
        task = tunable.problems[problem]
        ready = self._prepare(task)
        try:
            with tuning.override(op, tunable.only_for(key, config)) as asked:
                verdict = verify(task, ready.untouched, ready.expected)
                if key not in asked:
                    raise Failed(f"the launch asks for {asked}, not for {key}")
                if not verdict.ok:
                    raise Failed(f"output {verdict.output}: error {verdict.error:.3g} > {verdict.limit:.3g}")
                samples, sample_ms = (12, 3.0) if careful else (3, 1.0)
                return self._timer(
                    lambda i: task.run(ready.sets[i]), len(ready.sets), samples=samples, sample_ms=sample_ms
                )
        except CANDIDATE_ERRORS as error:
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # raises, and so ends this process, if the CUDA context is lost
            raise Failed(_brief(error)) from error
