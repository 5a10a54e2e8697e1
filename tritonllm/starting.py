"""Imports, and the end of a process, without searches for garbage.

torch, transformers and the engine make half a million objects that all stay, and Python looks at them again and again
while they come: a seventh of the time that they take. At the end it takes them apart one by one, though all of them go
with the process: a quarter of what a short command takes.
"""

import atexit
import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_searches(*, ours: bool = False) -> Iterator[None]:
    """Inside the block Python searches for no garbage. What no circle holds is freed as ever.

    Args:
        ours: the process is, and no user's program: what is there at the end of the block is left out of later
            searches, too.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
        if ours:
            leave_out_of_searches()
    finally:
        if before:
            gc.enable()


def leave_out_of_searches() -> None:
    """What is there now stays as long as the process does: it is not searched for garbage, and at the end, when only
    what no circle holds is freed, neither is what came since. What has to be closed is not left to that."""
    gc.freeze()
    atexit.unregister(_end)
    atexit.register(_end)


def _end() -> None:
    version = getattr(sys.modules.get("triton"), "__version__", "0.0")
    if tuple(map(int, version.split(".")[:2])) < (3, 9):
        gc.freeze()
    else:  # its bindings print pages of what they call leaks where nobody took them apart
        gc.unfreeze()


def run_spawned(module: str, function: str, *arguments: Any) -> None:
    """The main function of a process that ``spawn`` makes: call one of a module that only the new process imports.

    Args:
        module, function: which.
        arguments: of the function.
    """
    with no_searches(ours=True):
        target = getattr(importlib.import_module(module), function)
    target(*arguments)
