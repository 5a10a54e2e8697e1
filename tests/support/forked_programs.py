"""Python programs that begin with all imports done, for tests of what they print and answer.

A program that imports the engine and a tokenizer takes 2 s of processor time before it does anything, and each process
that it spawns as much again. Here one process imports them once for all tests (:mod:`support.forking`), and programs,
with what they spawn, are forks of it. How programs begin is tested with those of ``subprocess``.
"""

import atexit
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from support.forking import FORKING, Forks, execute_child, read_at_import

_STARTING = threading.Lock()


def forks() -> Forks:
    """What asks the process that forks: one for all threads, as each of two would take the other's orphans."""
    with _STARTING:
        return _start()


@cache
def _start() -> Forks:
    """Start the process that forks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).with_name("forking.py")), str(theirs.fileno())]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=nothing, stdout=nothing)
    theirs.close()

    @atexit.register
    def end() -> None:
        ours.shutdown(socket.SHUT_RDWR)  # for a process that a test forks has it open, too
        process.wait()

    return Forks(ours)


@cache
def _execute_child() -> Callable[..., None]:
    return execute_child(forks(), read_at_import(os.environ))


class Popen(subprocess.Popen):
    """As its base; but a Python program is a fork, if its variables allow it and there is no GPU."""

    def _execute_child(self, *arguments: Any) -> None:
        plain = super()._execute_child
        plain(*arguments) if torch.cuda.is_available() else _execute_child()(self, *arguments)


def children(process: int, recursive: bool = False) -> list[psutil.Process]:
    """What it has started, in this order, without the processes that fork."""
    found = psutil.Process(process).children(recursive)
    return sorted((child for child in found if child.name() != FORKING), key=lambda child: child.pid)


def run(args: Any, *, input: str | None = None, timeout: float | None = None, **options: Any) -> Any:
    """As ``subprocess.run`` with ``capture_output=True, text=True``."""
    pipe = None if input is None else subprocess.PIPE
    with Popen(args, stdin=pipe, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            out, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, out, errors)
