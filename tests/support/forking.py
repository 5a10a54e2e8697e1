"""A process that has imported the engine, and forks for each Python program that it is asked to run: the process that
:mod:`support.forked_programs` starts. A fork has one of its own, for the processes that it spawns.

A fork runs its program as ``python`` would, with its own arguments, variables, folder and files; what Python does at
its end, it does. The kernel makes it a child of the process that asked, which is for that moment the one that orphans
go to: whoever starts it can wait for it, and what it starts is found among its descendants, as ever.
"""

import atexit
import ctypes
import importlib
import json
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# What an LLM, an engine and a server import, and at last a tokenizer. All of a server but what imports
# prometheus_client, which looks for a variable at that moment.
IMPORTED = [
    "tritonllm.cli",
    "tritonllm.offline.llm",
    "tritonllm.engine.ranks.worker",
    "tritonllm.serve.engines.engine_process",
    *(
        f"tritonllm.serve.api.{name}_api"
        for name in ("admin", "completions", "messages", "pooling", "profile", "responses")
    ),
    "tritonllm.serve.api.tracing",
    "transformers.models.auto.tokenization_auto",
]
# Variables that something reads while it is imported: a program that has others of them is no fork.
READ_AT_IMPORT = re.compile(
    "TRITON|TORCH(?!ELASTIC|_NCCL)|PYTORCH|CUDA|OMP_|MKL_|HF_|TRANSFORMERS_|TOKENIZERS_|LD_|PYTHON(?!PATH|UNBUFFERED)"
)
MOST_BYTES = 1 << 17  # of a request: variables are nearly all of it
NETWORK = "/proc/thread-self/ns/net"  # of the calling thread
NAME, ADOPT_ORPHANS = 15, 36  # PR_SET_NAME and PR_SET_CHILD_SUBREAPER of prctl(2)
FORKING = "forking"  # name of a process that forks; programs have another
SPAWNED = "--multiprocessing-fork"  # an argument of processes that multiprocessing spawns
libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int | bytes) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class Forks:
    """The side that asks.

    Args:
        requests: the socket to the process that forks.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests, self._lock = requests, threading.Lock()

    def start(self, words: list[str], environment: dict[str, str], cwd: str, files: dict[int, int], alone: bool) -> int:
        """Run a program, on the calling thread's network.

        Args:
            words: of ``python``'s command line, without its name.
            files: number of each file that it has, and which of this process's it is.
            alone: in a session of its own.

        Returns:
            Its process id: a child of this process.
        """
        request = {"words": words, "environment": environment, "cwd": cwd, "files": list(files), "alone": alone}
        with self._lock, open(NETWORK) as network:
            prctl(ADOPT_ORPHANS, 1)
            try:
                sent = [network.fileno(), *files.values()]
                socket.send_fds(self._requests, [json.dumps(request).encode()], sent)
                answer = self._requests.recv(64)
            finally:
                prctl(ADOPT_ORPHANS, 0)
        if not answer:
            raise ChildProcessError("the process that forks has ended")
        return int(answer)


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns in the forks only, with what was asked for; ends with who asks."""
    while True:
        data, files, _, _ = socket.recv_fds(requests, MOST_BYTES, 253)
        if not data:
            os._exit(0)
        receives, sends = os.pipe()
        between = os.fork()
        if not between:
            parent = os.getpid()
            process = os.fork()
            if not process:
                while os.getppid() == parent:  # a program that asks is told whose it is
                    time.sleep(0.001)
                requests.close()
                os.close(receives)
                os.close(sends)
                network, *files = files
                if os.fstat(network).st_ino != os.stat(NETWORK).st_ino and libc.setns(network, 0):
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(network)
                request = json.loads(data)
                place(dict(zip(request["files"], files, strict=True)))
                return request
            os.write(sends, str(process).encode())
            os._exit(0)
        os.waitpid(between, 0)  # behind it, the fork belongs to who asks
        os.close(sends)
        requests.send(os.read(receives, 64))
        for file in (receives, *files):
            os.close(file)


def place(files: dict[int, int]) -> None:
    """Give files the numbers that they are to have, where others than these and the first three are closed."""
    beyond = max(*files, *files.values(), 2) + 1
    copies = {number: os.dup2(file, beyond + i) for i, (number, file) in enumerate(files.items())}
    for file in files.values():
        os.close(file)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


def become(request: dict[str, Any]) -> list[str]:
    """Make this fork what Python is at the beginning of a program, and return the program's words."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prctl(NAME, b"python")
    if request["alone"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder not in ("", *sys.path):
            sys.path.insert(1, folder)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the rest of the process
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=bool(os.environ.get("PYTHONUNBUFFERED")))
    asks, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forking = os.fork()
    if not forking:
        asks.close()
        prctl(NAME, FORKING.encode())
        return become(serve(alone_with(answers)))
    answers.close()
    atexit.register(os.waitpid, forking, 0)
    atexit.register(asks.shutdown, socket.SHUT_RDWR)  # for a process that the program forks has it open, too
    forks = Forks(asks)
    spawn_forks(forks)
    subprocess.Popen._execute_child = execute_child(forks, read_at_import(os.environ))
    return request["words"]


def alone_with(requests: socket.socket) -> socket.socket:
    """The same socket, and no other file is open: others wait for the end of what the program has."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    only = socket.socket(fileno=os.dup2(requests.detach(), 3, inheritable=False))
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    return only


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if READ_AT_IMPORT.match(name)}


def execute_child(forks: Forks, counted: dict[str, str]) -> Callable[..., None]:
    """The method of ``subprocess.Popen`` that starts a process; of it a Python program is a fork, if it may be.

    Args:
        counted: the variables that were read when the forks' imports were done.
    """
    plain = subprocess.Popen._execute_child

    def start(self: Any, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, *others: Any):
        cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_, alone, _ = others
        environment = {**(os.environ if env is None else env)}
        words = [] if isinstance(args, str | bytes) or args[0] != sys.executable else [*map(str, args[1:])]
        if words[:1] == ["-u"]:
            words, environment["PYTHONUNBUFFERED"] = words[1:], "1"
        is_program = words and (words[0] in ("-m", "-c") or words[0].endswith(".py"))
        if not is_program or executable or preexec_fn or pass_fds or shell or read_at_import(environment) != counted:
            return plain(self, args, executable, preexec_fn, close_fds, pass_fds, *others)
        files = {number: number if file == -1 else file for number, file in enumerate((p2cread, c2pwrite, errwrite))}
        self.pid = forks.start(words, environment, str(cwd or os.getcwd()), files, alone)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    return start


def spawn_forks(forks: Forks) -> None:
    """From here on, what multiprocessing spawns is a fork."""
    spawn = multiprocessing.util.spawnv_passfds

    def spawnv_passfds(path: Any, words: list[Any], files: list[int]) -> int:
        if SPAWNED not in words:  # it tracks resources, and needs nothing of ours
            return spawn(path, words, files)
        words = words[words.index("-c") :]
        return forks.start(words, dict(os.environ), os.getcwd(), {file: file for file in (0, 1, 2, *files)}, False)

    multiprocessing.util.spawnv_passfds = spawnv_passfds


def run(words: list[str]) -> None:
    """Do what Python does with them: a module's name behind ``-m``, a text behind ``-c``, or a file."""
    kind, arguments = words[0], words[1:]
    if kind == "-m":
        sys.path[0], sys.argv = os.getcwd(), arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0], sys.argv = "", [kind, *arguments[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        try:
            exec(arguments[0], main.__dict__)
        except EOFError as error:
            if traceback.extract_tb(error.__traceback__)[-1].name != "_main":
                raise
            sys.exit(1)  # who spawned it was killed while it waited for this fork: elsewhere it would not have waited
    else:
        sys.path[0], sys.argv = str(Path(kind).absolute().parent), words
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who asks, who gets Ctrl-C, too
    prctl(NAME, FORKING.encode())
    sys.path[0] = str(ROOT)
    from tritonllm.system.starting import no_searches

    with no_searches(ours=True):
        for name in IMPORTED:
            importlib.import_module(name)
    run(become(serve(socket.socket(fileno=int(sys.argv[1])))))
