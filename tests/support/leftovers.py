"""What this process holds of the system, so that a test can tell what an engine has left behind."""

import gc
import os
import re
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from support.forking import FORKING
from support.ranks import shared_memory

NUMBER = re.compile(r"\d+")


def held() -> Counter[str]:
    """Open files by what they are, mappings of memory that others may have too, threads of Python and of libraries,
    child processes but those that wait for work, named shared memory and folders for temporary files. Numbers in names
    (of sockets, threads, processes) are left out: those of two engines differ."""
    gc.collect()
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that which has listed the folder
            found[f"open: {_plain(os.readlink(f'/proc/self/fd/{number}'))}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if "s" in words[1]:
            found[f"mapped: {_plain(words[-1])}"] += 1
    found.update(f"thread: {_plain(thread.name)}" for thread in threading.enumerate())
    found["threads of the system"] = len(os.listdir("/proc/self/task"))
    found.update(f"process: {_name(child)}" for child in psutil.Process().children(recursive=True))
    found.update(f"shared memory: {_plain(str(path))}" for path in shared_memory())
    for name in (FORKING, "ray::IDLE"):  # they wait for work, of any engine
        found.pop(f"process: {name}", None)
    return found


def _plain(name: str) -> str:
    return NUMBER.sub("*", name)


def _name(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return process.name()
    return "gone"
