"""Engines and ranks whose processes begin with all imports done, for tests of what they compute and answer.

A process that is spawned imports torch, the engine and transformers' tokenizers anew, 3 s of processor time: more than
all else of most such tests. Here one process imports them once, and the others are forks of it. All else is as in
spawned ones: arguments come pickled, and nothing of the test's process is there. How processes begin and end is tested
without.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import psutil
import torch

from support.forking import FORKING

# The last is what an engine with a tokenizer imports when it loads it.
IMPORTED = [
    "tritonllm.engine.ranks.worker",
    "tritonllm.serve.engines.engine_process",
    "transformers.models.auto.tokenization_auto",
]


@contextmanager
def imported_processes() -> Iterator[None]:
    """What is spawned in the block is forked from a process that has imported the engine; on a GPU it is spawned."""
    if torch.cuda.is_available():
        yield
        return
    get_context = multiprocessing.get_context
    get_context("forkserver").set_forkserver_preload(IMPORTED)
    with patch.object(
        multiprocessing, "get_context", lambda name=None: get_context("forkserver" if name == "spawn" else name)
    ):
        yield


def engine_processes(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Processes of engines and ranks that this one (or another) has started: spawned ones, and forks of the one that
    has imported the engine."""
    found = (process or psutil.Process()).children(recursive=True)
    forked = [child for child in found if "multiprocessing.forkserver" in " ".join(child.cmdline())]
    mine = lambda child: "forking.py" in " ".join(child.cmdline()) and child.name() != FORKING  # noqa: E731
    spawned = [child for child in found if "spawn_main" in " ".join(child.cmdline()) or mine(child)]
    return [*spawned, *(child for child in forked if child.parent() in forked)]
