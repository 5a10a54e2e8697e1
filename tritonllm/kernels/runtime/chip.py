"""What a launcher asks about the GPU that it launches on, or compiles for."""

import functools
from typing import NamedTuple

import torch
from triton.runtime import driver

from tritonllm import env


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
