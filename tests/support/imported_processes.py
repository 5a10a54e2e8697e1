"""Engines and ranks whose processes begin with all imports done, for tests of what they compute and answer.

A process that is spawned imports torch, the engine and transformers' tokenizers anew, 3 s of processor time: more than
all else of most such tests. Here each is a fork of the process of :mod:`support.forked_programs`, which has imported
them once. All else is as in spawned ones: arguments come pickled, and nothing of the test's process is there. How
processes begin and end is tested without.
"""

import multiprocessing.util
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from support.forked_programs import forks
from support.forking import FORKING, spawn_forks


@contextmanager
def imported_processes() -> Iterator[None]:
    """What is spawned in the block is forked from a process that has imported the engine; on a GPU it is spawned."""
    if torch.cuda.is_available():
        yield
        return
    plain = multiprocessing.util.spawnv_passfds
    spawn_forks(forks())
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = plain


def engine_processes(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes of engines and ranks that this one (or another) has started: spawned ones, and forks of the one that
    has imported the engine."""
    found = [(child, " ".join(child.cmdline())) for child in (process or psutil.Process()).children(recursive=True)]
    forked = [child for child, line in found if "forking.py" in line and child.name() != FORKING]
    return [*(child for child, line in found if "spawn_main" in line), *forked]
