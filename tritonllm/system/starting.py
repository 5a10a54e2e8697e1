"""Imports, and the end of a process, without searches for garbage; and a start that may be stopped.

torch, transformers and the engine make half a million objects that all stay, and Python looks at them again and again
while they come: a seventh of the time that they take. At the end it takes them apart one by one, though all of them go
with the process: a quarter of what a short command takes.
"""

import atexit
import gc
import importlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


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


@contextmanager
def later(*numbers: int) -> Iterator[None]:
    """Put these signals off, where they come inside the block, until it ends: what is in it is not broken off."""
    if threading.current_thread() is not threading.main_thread():  # no other one gets signals
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in dict.fromkeys(came):
            signal.raise_signal(number)


@contextmanager
def stopped_by_sigterm(said: str) -> Iterator[Callable[[], None]]:
    """Inside the block SIGTERM ends this process with status 0, by ``SystemExit``: what was begun is undone.

    That exception can come at any line, in an import or in what a library calls back as well, and not all of these let
    it through. So it comes again at the next call of what this yields, and at the block's end, whatever ends it.

    Args:
        said: is logged then.

    Yields:
        Raises ``SystemExit`` if SIGTERM has come.
    """
    asked = False

    def check() -> None:
        if asked:
            sys.exit(0)

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        check()  # nothing is said here, perhaps in the middle of what is being said

    if threading.current_thread() is not threading.main_thread():  # no other one gets signals
        yield check
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield check
    except Exception:  # what an import makes of it, say
        check()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if asked:
            logger.info(said)
    check()


def run_spawned(module: str, function: str, *arguments: Any) -> None:
    """The main function of a process that ``spawn`` makes: call one of a module that only the new process imports.

    Args:
        module, function: the names of the module and of its function.
        arguments: the arguments of the function.
    """
    with no_searches(ours=True):
        target = getattr(importlib.import_module(module), function)
    target(*arguments)
