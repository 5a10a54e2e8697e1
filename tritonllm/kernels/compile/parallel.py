"""Kernels before their first launch: list what launches would need, and compile the list on all cores.

:func:`list_kernels` notes the launches of ordinary calls on meta tensors: nothing is compiled, nothing runs, no GPU
need be there. Each note is one specialisation, as exact as a launch would make it: types, alignment, divisibility,
constants, launch configuration. :func:`compile_in_parallel` fills Triton's cache with them, in as many processes as
there are cores, so that a launch finds its kernel on disk. Processes, because part of a compilation holds Python's
lock (34 kernels on two cores: 17.0 s in one thread, 10.6 s in eight threads, 8.8 s in two processes).
"""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import compile as triton_compile
from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
from triton.runtime import driver
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.jit import JITFunction

from tritonllm.kernels.compile.extensions import Extension, launcher_extensions
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.meta_mode import MetaMode


@dataclass(frozen=True)
class Specialization:
    """One kernel as some launch needs it.

    Attributes:
        source: function, signature, constants and what is known of its arguments, as Triton's compiler takes them.
        options: the options of the backend: warps, stages, registers.
    """

    source: Any
    target: GPUTarget
    options: Any

    @property
    def name(self) -> str:
        return self.source.name

    def is_cached(self) -> bool:
        """Whether it is in Triton's cache folder."""
        key = get_cache_key(self.source, make_backend(self.target), self.options, get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        return bool(manager.get_group(f"{self.name[:150]}.json"))

    def compile(self) -> None:
        """Put it into Triton's cache folder, with what launches it."""
        kernel = triton_compile(self.source, target=self.target, options=self.options.__dict__)
        if self.target.backend == "cuda":
            for extension in launcher_extensions(self.source, kernel.metadata):
                if not extension.is_cached():
                    extension.compile()

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


class _Noted:
    """Stands in Triton's own cache for a kernel that was noted, so that its next launch is found there at once.

    Without it, each launch of the same kernel was bound, packed and described again: half of the time that the start
    of Llama-3.1-8B took on meta tensors.
    """

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        """What Triton asks of a kernel before it launches it."""

    def run(self, *_: Any) -> None:
        """Does nothing: the launch was noted, and is not run."""


@contextmanager
def list_kernels(gpu_name: str | None = None) -> Iterator[list[Specialization]]:
    """Inside the block, launches on meta tensors are noted instead of made; yields the list, without repetitions.

    They are noted for the GPU that Triton's driver names, which must be pretended: a kernel that this process has
    compiled for a device already is launched, not noted.

    Args:
        gpu_name: the GPU whose tuning tables hold, ``"NVIDIA H200"`` say; ``None`` takes the defaults.
    """
    noted: list[Specialization] = []
    stand_ins: list[tuple[dict[Any, Any], Any]] = []

    def note(*, key: str, fn: Any, compile: dict[str, Any], **rest: Any) -> bool:
        kernel, target = fn.jit_function, driver.active.get_current_target()
        written = json.loads(compile["specialization_data"])["options"]
        options = make_backend(target).parse_options({option: _as_tuple(value) for option, value in written.items()})
        source = kernel.ASTSource(kernel, compile["signature"], compile["constants"], compile["configs"][0])
        noted.append(Specialization(source, target, options))
        known = kernel.device_caches[driver.active.get_current_device()][0]
        known[key] = _Noted()
        stand_ins.append((known, key))
        return True  # not to be compiled, and so not launched

    with knobs.runtime.scope(), tuning.meta_tensors_on(gpu_name), MetaMode(once=True):
        knobs.runtime.jit_cache_hook = note
        try:
            yield noted
        finally:
            for known, key in stand_ins:
                known.pop(key, None)


def _as_tuple(value: Any) -> Any:
    """JSON has no tuples, and a kernel's name in the cache tells them from lists."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


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
