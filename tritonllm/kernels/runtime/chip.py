"""What a launcher asks about the GPU that it launches on, or compiles for."""

import functools
from typing import NamedTuple

import torch
from triton.runtime import driver

from tritonllm import env

# Shared memory that one program may use, bytes (CUDA C++ Programming Guide, "Technical Specifications"): by compute
# capability; the least for those that are not listed.
LEAST_SHARED_MEMORY = 101376
SHARED_MEMORY = dict.fromkeys((86, 89, 120), LEAST_SHARED_MEMORY) | {80: 166912, 90: 232448, 100: 232448}


class Chip(NamedTuple):
    """What launch configurations depend on of a GPU.

    Attributes:
        backend: the name of Triton's backend, ``cuda`` or ``hip``.
        arch: 90 for compute capability 9.0; a name for AMD's.
        processors: how many multiprocessors it has; as an H200 where there is no GPU.
    """

    backend: str
    arch: int | str
    processors: int


@functools.cache  # torch takes 0.1 ms to tell, as long as ten launches
def _of_gpu(index: int) -> Chip:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Chip("hip", properties.gcnArchName.split(":")[0], properties.multi_processor_count)
    return Chip("cuda", 10 * properties.major + properties.minor, properties.multi_processor_count)


def chip_of(device: torch.device) -> Chip | None:
    """The GPU behind ``device``; for meta tensors and ahead-of-time compilation, the target of Triton's driver.

    ``None`` where nothing will be launched: on the CPU, and without a driver (the tuner asks for keys).
    """
    if device.type == "cuda":
        return _of_gpu(device.index or 0)
    if device.type == "cpu" and env.CPU_BACKEND != "compile":
        return None
    try:
        target = driver.active.get_current_target()
    except RuntimeError:
        return None
    return Chip(target.backend, target.arch, 132)


def processors(device: torch.device) -> int:
    """Multiprocessors; an H200's where there is no GPU."""
    chip = chip_of(device)
    return 132 if chip is None else chip.processors


def on_amd(device: torch.device) -> bool:
    """A GPU of AMD, which knows no register limit and no dependent launch."""
    chip = chip_of(device)
    return chip is not None and chip.backend == "hip"


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on an NVIDIA GPU; an H200's where there is no GPU."""
    chip = chip_of(device)
    if chip is None or not isinstance(chip.arch, int):
        return SHARED_MEMORY[90]
    return SHARED_MEMORY.get(chip.arch, LEAST_SHARED_MEMORY)


def has_small_memory(device: torch.device) -> bool:
    """Whether a program may use 99 KB of shared memory (sm_86, sm_89, sm_120) and not 163 or more."""
    return shared_memory(device) == LEAST_SHARED_MEMORY
