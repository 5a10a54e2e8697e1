"""Ranks of a group as threads of one process, connected by gloo: for tests of what each of them computes."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from support.waiting import PATIENCE
from tritonllm.dist.connect import connect
from tritonllm.dist.group import Group

Result, Joined = TypeVar("Result"), TypeVar("Joined")
CPU = torch.device("cpu")


def run_ranks(size: int, work: Callable[[Group], Result]) -> list[Result]:
    """What ``work`` returns on each rank; the first error of any is raised."""
    return in_threads(size, lambda store, rank: connect(store, rank, size, CPU, timeout=PATIENCE), work)


def in_threads(size: int, join: Callable[[dist.Store, int], Joined], work: Callable[[Joined], Result]) -> list[Result]:
    """What ``work`` returns on each rank, given what ``join`` returns there.

    Nobody begins before all have joined: gloo takes a rank that leaves for one that has failed, if another one is still
    connecting.
    """
    store, results, errors, joined = dist.HashStore(), {}, [], threading.Barrier(size)

    def run(rank: int) -> None:
        try:
            group = join(store, rank)
            joined.wait(PATIENCE)
            with torch.inference_mode():
                results[rank] = work(group)
        except BaseException as error:  # raised below
            errors.append(error)
            joined.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert len(results) == size, "some never came to an end"
    return [results[rank] for rank in range(size)]


def shared_memory() -> set[Path]:
    """Named pieces that are there now, but for those of other users, and those that processes have which this one has
    not started: other tests run on the same machine. Not semaphores."""
    paths = [path for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")]
    found = set()
    for path in paths:
        with suppress(FileNotFoundError):  # somebody has removed it meanwhile
            if path.stat().st_uid == os.getuid():
                found.add(path)
    if found:
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        found -= {path for pid in psutil.pids() if pid not in own for path in _held(pid)}
    return found


def _held(pid: int) -> Iterator[Path]:
    """Files that a process has open or mapped."""
    folder = Path(f"/proc/{pid}")
    with suppress(OSError):  # it has ended, or is another user's
        for link in (folder / "fd").iterdir():  # first these: who maps a piece has it open until then
            with suppress(OSError):
                yield link.readlink()
        for line in (folder / "maps").read_text().splitlines():
            yield Path(line.split(maxsplit=5)[-1])
