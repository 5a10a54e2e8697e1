"""A server over the demonstration model in a process of its own, as a user starts it."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import httpx
import psutil

from support import forked_programs
from support.waiting import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
MODEL = "demo"


class RunningServer:
    """Args:
    options: of ``tritonllm serve``.
    environment: variables beside those of this process.
    program: what Python runs, that takes the arguments of ``tritonllm``.
    """

    def __init__(
        self, *options: str, environment: dict[str, str] | None = None, program: Sequence[str] = ("-m", "tritonllm")
    ) -> None:
        command = [sys.executable, *program, "serve", "--served-model-name", MODEL, "other-name"]
        if "--uds" not in options:
            command += ["--port", "0"]
        inherited = {name: value for name, value in os.environ.items() if name != "TRITONLLM_API_KEY"}
        self.process = forked_programs.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**inherited, **(environment or {})},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self._listens.wait(PATIENCE)
        (address,) = re.findall(r"serving .* on (\S+)", self.text) or [self._did_not_start()]
        self.url = address
        self.client = httpx.Client(base_url=address, timeout=PATIENCE) if address.startswith("http") else None
        if self.client is not None:
            eventually(self._answers)

    def _did_not_start(self) -> str:
        self.process.kill()
        raise AssertionError(f"the server did not start:\n{self.text}")

    def _answers(self) -> bool:
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if " serving " in line:
                self._listens.set()
        self._listens.set()  # it ended

    @property
    def text(self) -> str:
        return "".join(self.log)

    def children(self) -> list[psutil.Process]:
        return forked_programs.children(self.process.pid, recursive=True)

    def engine(self) -> psutil.Process:
        """The engine process: the only child that holds a model (the other one tracks resources)."""
        return max(self.children(), key=lambda child: child.memory_info().rss)

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status."""
        status = self.process.wait(seconds)
        self._reader.join(PATIENCE)
        return status

    def metric(self, name: str) -> float:
        text = self.client.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE))

    def is_idle(self) -> bool:
        """Nothing runs or waits, and the whole cache is free."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.wait()
        self.process.stderr.close()


@contextmanager
def running_server(*options: str, **settings: Any) -> Iterator[RunningServer]:
    server = RunningServer(*options, **settings)
    try:
        yield server
    finally:
        server.close()


def refuses(server: RunningServer) -> bool:
    """It takes no new connections; they do not wait either."""
    try:
        httpx.get(f"{server.url}/health", timeout=2)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        pass
    return False


def socket_folders() -> set[Path]:
    """Folders of sockets between API and engine processes, of anybody's servers."""
    return set(Path(gettempdir()).glob("tritonllm-ipc-*"))
