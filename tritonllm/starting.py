"""Imports without searches for garbage.

torch, transformers and the engine make half a million objects that all stay, and Python looks at them again and again
while they come: a seventh of the time that they take.
"""

import atexit
import gc
import importlib
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
    """What is there now stays as long as the process does: it is not searched for garbage before its end.

    At the end it is: the bindings of Triton 3.9 print pages of what they call leaks where nobody took them apart.
    """
    gc.freeze()
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)


def run_spawned(module: str, function: str, *arguments: Any) -> None:
    """The main function of a process that ``spawn`` makes: call one of a module that only the new process imports.

    Args:
        module, function: which.
        arguments: of the function.
    """
    with no_searches(ours=True):
        target = getattr(importlib.import_module(module), function)
    target(*arguments)
