"""What every process that a server starts does first, and how one ends."""

import atexit
import logging
import os
import shutil
import sys
from contextlib import suppress
from typing import NoReturn

from tritonllm.dist.watch import PARENT_DIED, parent_watch
from tritonllm.system.log_text import OTHERS, OneLineFormatter


def end_with_parent(folder: str) -> None:
    """Wait for the parent's death in a thread; then remove the sockets' folder and end this process at once."""

    def end() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(PARENT_DIED)

    parent_watch(end)


def end_without_threads(status: int) -> NoReturn:
    """End this process as Python does, but do not wait for its threads: what is registered for the end is done, and
    what was written is flushed. A thread inside a tokenizer can neither be broken off, nor go on while Python ends."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            stream.flush()
    os._exit(status)


def log_to_stderr(level: int, replica: int | None = None) -> None:
    """Write the log messages of this process to stderr, from this level on.

    Args:
        replica: which of several engines this is, for each line to say so; ``None`` for the only one.
    """
    handler = logging.StreamHandler(sys.stderr)
    who = "" if replica is None else f"replica {replica}: "
    handler.setFormatter(OneLineFormatter(f"%(levelname)s %(name)s: {who}%(message)s"))
    for name in ("tritonllm", *OTHERS):
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("tritonllm").setLevel(level)
