"""Kernels before their first launch: list what launches would need, and compile the list on all cores.

:func:`list_kernels` notes the launches of ordinary calls on meta tensors: nothing is compiled, nothing runs, no GPU
need be there. Each note is one specialisation, as exact as a launch would make it: types, alignment, divisibility,
constants, launch configuration. :func:`compile_in_parallel` fills Triton's cache with them, in as many processes as
there are cores, so that a launch finds its kernel on disk. Processes, because part of a compilation holds Python's
lock (34 kernels on two cores: 17.0 s in one thread, 10.6 s in eight threads, 8.8 s in two processes).
"""

import hashlib
import multiprocessing
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import compile as triton_compile
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
from triton.runtime import build, driver
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction, compute_cache_key

from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.meta_mode import MetaMode


@dataclass(frozen=True)
class Extension:
    """A C extension that Triton builds for itself: its driver, or the function that launches kernels of a signature."""

    name: str
    code: str

    def _manager(self) -> Any:
        return get_cache_manager(hashlib.sha256((self.code + build.platform_key()).encode()).hexdigest())

    @property
    def _file(self) -> str:
        return f"{self.name}{sysconfig.get_config_var('EXT_SUFFIX')}"

    def is_cached(self) -> bool:
        return self._manager().get_file(self._file) is not None

    def compile(self) -> None:
        """Put it where :func:`triton.runtime.build.compile_module_from_src` will look for it."""
        from triton.backends.nvidia import driver as nvidia

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.name}.c"
            path.write_text(self.code)
            libraries = [nvidia.libdevice_dir, *_libcuda_folders()]
            built = build._build(self.name, str(path), folder, libraries, nvidia.include_dirs, nvidia.libraries, [])
            self._manager().put(Path(built).read_bytes(), self._file, binary=True)

    @property
    def cost(self) -> int:
        return len(self.code) // 10  # gcc is quick


def driver_extension() -> Extension:
    """What Triton loads kernels with."""
    from triton.backends.nvidia import driver as nvidia

    return Extension("cuda_utils", (Path(nvidia.dirname) / "driver.c").read_text())


@dataclass(frozen=True)
class Specialization:
    """One kernel as some launch needs it.

    Attributes:
        source: function, signature, constants and what is known of its arguments, as Triton's compiler takes them.
        options: of the backend: warps, stages, registers.
    """

    source: Any
    target: GPUTarget
    options: Any

    @property
    def name(self) -> str:
        return self.source.name

    def is_cached(self) -> bool:
        """It is in Triton's cache folder."""
        key = get_cache_key(self.source, make_backend(self.target), self.options, get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{self.name[:150]}.json"))

    def compile(self) -> None:
        """Put it into Triton's cache folder, with the extension that launches it."""
        kernel = triton_compile(self.source, target=self.target, options=self.options.__dict__)
        if self.target.backend == "cuda":
            launcher = self._launcher(kernel.metadata)
            if not launcher.is_cached():
                launcher.compile()

    def _launcher(self, metadata: Any) -> Extension:
        from triton.backends.nvidia import driver as nvidia

        index = {name: (i,) for i, name in enumerate(self.source.fn.arg_names)}
        constants = {index.get(name, name): value for name, value in self.source.constants.items()}
        descriptors = getattr(metadata, "tensordesc_meta", None)
        return Extension("__triton_launcher", nvidia.make_launcher(constants, dict(self.source.signature), descriptors))

    @property
    def cost(self) -> int:
        """Larger for kernels that take longer, roughly: the length of all source that is compiled into it."""
        return sum(len(fn.src) for fn in _called_by(self.source.fn))


@cache
def _called_by(kernel: JITFunction[Any]) -> frozenset[JITFunction[Any]]:
    """The function and all that it calls."""
    found, left = {kernel}, [kernel]
    while left:
        fn = left.pop().fn
        named = [fn.__globals__.get(name) for name in fn.__code__.co_names]
        new = {other for other in named if isinstance(other, JITFunction)} - found
        found |= new
        left += new
    return frozenset(found)


@contextmanager
def list_kernels(gpu_name: str | None = None) -> Iterator[list[Specialization]]:
    """Inside the block, launches on meta tensors are noted instead of made; yields the list, without repetitions.

    They are noted for the GPU that Triton's driver names; no launch at all is made meanwhile.

    Args:
        gpu_name: the GPU whose tuning tables hold, ``"NVIDIA H200"`` say; ``None`` takes the defaults.
    """
    noted: list[Specialization] = []
    seen: set[tuple[int, str]] = set()
    run = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kwargs["debug"] = kwargs.get("debug", self.debug) or knobs.runtime.debug
        kwargs["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        _, keys, target, backend, bind = self.device_caches[driver.active.get_current_device()]
        bound, specialization, options = bind(*args, **kwargs)
        key = id(self), compute_cache_key(keys, specialization, options)
        if key not in seen:
            seen.add(key)
            options, signature, constants, attributes = self._pack_args(backend, kwargs, bound, specialization, options)
            noted.append(Specialization(self.ASTSource(self, signature, constants, attributes), target, options))
        return None

    JITFunction.run = note
    try:
        with tuning.meta_tensors_on(gpu_name), MetaMode():
            yield noted
    finally:
        JITFunction.run = run


def compile_in_parallel(wanted: Sequence[Specialization | Extension], workers: int | None = None) -> None:
    """Compile what is not in the cache.

    The workers are forked, which is quick and keeps what is imported; they use no device and no torch.

    Args:
        workers: processes; by default, as many as this process may use cores.

    Raises:
        Exception: what the first compilation that failed raised, after the others are done.
    """
    missing = [item for item in wanted if not item.is_cached()]
    missing.sort(key=lambda item: -item.cost)  # the long ones first: they decide when all are done
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing))
    if not workers:
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_be_worker, initargs=(missing,)) as pool:
        futures = [pool.submit(_compile_nth, n) for n in range(len(missing))]
    for future in futures:
        future.result()


_work: Sequence[Specialization | Extension] = ()  # a worker's own; kernels cannot go through a pipe, but are inherited


def _be_worker(work: Sequence[Specialization | Extension]) -> None:
    global _work
    _work = work


def _compile_nth(n: int) -> None:
    _work[n].compile()


@cache
def _libcuda_folders() -> list[str]:
    """Where libcuda is; without a driver, a folder with an empty library of that name, which satisfies the linker."""
    from triton.backends.nvidia import driver as nvidia

    try:
        return nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        folder = tempfile.mkdtemp(prefix="tritonllm-libcuda-")
        command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", "-x", "c", os.devnull]
        subprocess.run(command, check=True)
        return [folder]
