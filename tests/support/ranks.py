"""Ranks of a group as threads of one process, connected by gloo: for tests of what each of them computes."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from tritonllm.dist.connect import connect
from tritonllm.dist.group import Group

Result = TypeVar("Result")


def run_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """What ``work`` returns on each rank; the first error of any is raised."""
    store, results, errors = dist.HashStore(), {}, []

    def run(rank: int) -> None:
        try:
            group = connect(store, rank, size, torch.device("cpu"), timeout=30.0, local=True)
            with torch.inference_mode():
                results[rank] = work(group)
        except BaseException as error:  # raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def shared_memory() -> set[Path]:
    """Named pieces that are there now; not semaphores, which other processes have for a moment."""
    return {path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}
