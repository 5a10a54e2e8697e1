"""How much memory this machine, or this container, has."""

import os
from pathlib import Path

from tritonllm.system.cpu_threads import CGROUP

GIB = 1 << 30


def host_bytes(cgroup: Path = CGROUP) -> int:
    """The machine's memory, or the container's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # of either version of cgroups
        try:
            limit = (cgroup / name).read_text().strip()
        except OSError:
            continue
        if limit.isdecimal():
            total = min(total, int(limit))
    return total


def slots_for(size: float | None, block_bytes: int) -> int:
    """Blocks that ``size`` GiB hold.

    Raises:
        ValueError: not even one.
    """
    slots = int((size or 0) * GIB) // block_bytes
    if size and not slots:
        raise ValueError(f"kv_offloading_size={size:g} holds no block of {block_bytes / GIB:.2g} GiB: raise it")
    return slots


def check_offloading(size: float | None, cgroup: Path = CGROUP) -> None:
    """Whether so many GiB can be had at all.

    Raises:
        ValueError: they cannot.
    """
    total = host_bytes(cgroup) / GIB
    if size and size > total:
        raise ValueError(f"kv_offloading_size={size:g} is more than the {total:.1f} GiB of memory here: lower it")
