"""Servers and routers in processes of their own, for measurements and faults: started, watched from outside, ended."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).parents[1]
START_SECONDS = 420.0  # with an empty folder of compiled kernels
IDLE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
NAME = "bench"  # of the model in requests


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds; whether it came to hold."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def descendants(pid: int) -> list[int]:
    """The processes that this one and its children have started, as far as they live."""
    found: list[int] = []
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(one) for task in tasks for one in (task / "children").read_text().split()]
    except OSError:
        return found
    for child in children:
        found += [child, *descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    """A zombie has ended: only nobody has taken note of it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resources(pid: int) -> dict[str, float]:
    """Memory in MB, open files and threads of a process that lives."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    memory = int(status["VmRSS"].split()[0]) / 1024
    return {"rss_mb": memory, "fds": len(os.listdir(f"/proc/{pid}/fd")), "threads": int(status["Threads"])}


class Listening:
    """A process of this package that listens for HTTP; ready when this is made.

    Args:
        command: of ``tritonllm``.
        says: what its log says when it listens, with the address as the first group.
        environment: variables that are set for it.

    Raises:
        RuntimeError: it did not start; the message holds the end of its log.
    """

    def __init__(
        self, command: Sequence[str], says: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        with tempfile.NamedTemporaryFile(prefix=f"{command[0]}-log-", suffix=".txt", delete=False) as log:
            self._log = Path(log.name)
            begin = time.monotonic()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tritonllm", *command],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env=os.environ | environment,
            )
        try:
            eventually(lambda: re.search(says, self.log) is not None or self.process.poll() is not None, START_SECONDS)
            address = re.search(says, self.log)
            if address is None:
                raise RuntimeError(f"tritonllm {command[0]} did not start: {self.log[-3000:]}")
            self.url = address[1]
            if not eventually(self.is_ready, 60):
                raise RuntimeError(f"tritonllm {command[0]} did not become ready: {self.log[-3000:]}")
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - begin

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def get(self, path: str) -> str:
        with urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def is_ready(self) -> bool:
        try:
            return '"ready"' in self.get("/ready")
        except OSError:
            return False

    def ended(self, seconds: float) -> int | None:
        """The exit status; ``None``: it goes on."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            if self.ended(60) is None:
                self.process.kill()
                self.process.wait()
        self._log.unlink(missing_ok=True)


class Router(Listening):
    """``tritonllm route``; ready when each of its backends can be used.

    Args:
        options: of the command.
    """

    def __init__(self, options: Sequence[str]) -> None:
        super().__init__(["route", "--port", "0", *options], r"routing to .* on (\S+)")

    def is_ready(self) -> bool:
        try:
            return all(one["usable"] and one["models"] for one in json.loads(self.get("/status"))["backends"])
        except OSError:
            return False


class Server(Listening):
    """``tritonllm serve`` with made-up weights and without a tokenizer.

    Args:
        folder: of the model's configuration.
        options: more options of the command.
        environment: variables that are set for it.
    """

    def __init__(
        self, folder: Path, options: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        command = ["serve", str(folder), "--served-model-name", NAME, "--port", "0", "--load-format", "dummy"]
        command += ["--skip-tokenizer-init", "--generation-config", "vllm", *options]
        super().__init__(command, r" serving .* on (\S+)", environment)
        self.children = descendants(self.process.pid)

    @property
    def engine(self) -> int:
        """The engine process: of the children the one that takes most memory."""
        return max(filter(is_alive, self.children), key=lambda pid: resources(pid)["rss_mb"])

    def metric(self, name: str) -> float:
        """Summed over its labels."""
        found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(float(value) for value in found)

    def is_idle(self) -> bool:
        """Nothing runs or waits, and the whole pool of blocks is free."""
        return all(self.metric(name) == 0 for name in IDLE)

    def resources(self) -> dict[str, dict[str, float]]:
        """Of the process that was started (which speaks HTTP, if it is the only one that does) and of the engine's."""
        return {"api": resources(self.process.pid), "engine": resources(self.engine)}

    def left_behind(self) -> list[int]:
        """Its processes that live on, after a while to end."""
        eventually(lambda: not any(map(is_alive, self.children)), 15)
        return [pid for pid in self.children if is_alive(pid)]


@contextmanager
def server(folder: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    made = Server(folder, options)
    try:
        yield made
    finally:
        made.close()


def socket_folders() -> set[Any]:
    """Folders of sockets between API and engine processes, of anybody's servers."""
    return set(Path(tempfile.gettempdir()).glob("tritonllm-ipc-*"))
