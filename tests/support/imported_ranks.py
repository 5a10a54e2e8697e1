"""Ranks that begin with the engine imported, for tests of what ranks compute.

A process that an engine spawns imports torch and the engine anew, 1.7 s of processor time: more than all else of most
tests with ranks. Here one process imports them once, and the ranks are forks of it. All else is as in a spawned one:
its arguments come pickled, and nothing of the test's process is there. How ranks begin and end is tested without.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def imported_ranks() -> Iterator[None]:
    """What is spawned in the block is forked from a process that has imported what ranks need."""
    get_context = multiprocessing.get_context
    get_context("forkserver").set_forkserver_preload(["tritonllm.engine.worker"])
    with patch.object(
        multiprocessing, "get_context", lambda name=None: get_context("forkserver" if name == "spawn" else name)
    ):
        yield
