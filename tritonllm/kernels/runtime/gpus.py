"""Which GPU's tuning tables hold: its own, or those of its nearest relative."""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch


class Gpu(NamedTuple):
    """A kind of GPU.

    Attributes:
        name: the name that its driver gives it, ``"NVIDIA H200"``.
        arch: 90 for compute capability 9.0.
        processors: how many multiprocessors it has.
        memory_gib: how much memory it has, in GiB.
    """

    name: str
    arch: int
    processors: int
    memory_gib: float


def gpu_at(index: int) -> Gpu:
    """A GPU of this machine, by its index."""
    found = torch.cuda.get_device_properties(index)
    gib = found.total_memory / 2**30
    return Gpu(found.name, 10 * found.major + found.minor, found.multi_processor_count, gib)


@functools.cache
def tuned_gpus(tables: Path) -> tuple[Gpu, ...]:
    """The GPUs that have tables in this folder; each table names its GPU."""
    files = [min(folder.glob("*.json"), default=None) for folder in sorted(tables.iterdir())]
    heads = [json.loads(file.read_text()) for file in files if file is not None]
    return tuple(Gpu(head["gpu"], head["arch"], head["processors"], head["memory_gib"]) for head in heads)


def nearest(gpu: Gpu, tuned: Sequence[Gpu]) -> Gpu | None:
    """The GPU whose tables hold for this one: itself, or one with the same instructions and the most like numbers of
    processors and bytes of memory; ``None`` if no tuned GPU has its architecture."""

    def unlike(other: Gpu) -> tuple[bool, float]:
        ratios = gpu.processors / other.processors, gpu.memory_gib / other.memory_gib
        return other.name != gpu.name, sum(abs(math.log2(ratio)) for ratio in ratios)

    return min((other for other in tuned if other.name == gpu.name or other.arch == gpu.arch), key=unlike, default=None)
