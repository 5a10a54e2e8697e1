"""A router in a process of its own, as a user starts it."""

import re
import signal
import subprocess
import sys
import threading

import httpx

from support import forked_programs
from support.server import ROOT
from support.waiting import PATIENCE, eventually


def make_client(url: str) -> httpx.Client:
    """One that many threads can use, and that does not read the machine's certificates, which takes 50 ms."""
    return httpx.Client(base_url=url, timeout=PATIENCE, verify=False, limits=httpx.Limits(max_connections=None))


class RouterProcess:
    """Args:
    options: of ``tritonllm route``.
    """

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "tritonllm", "route", "--port", "0", *options]
        self.process = forked_programs.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._listens = threading.Event()
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self._listens.wait(PATIENCE)
        addresses = re.findall(r"routing to .* on (\S+)", self.text)
        assert addresses, f"the router did not start:\n{self.text}"
        self.url = addresses[0]
        self.client = make_client(self.url)
        eventually(self._answers)

    def _answers(self) -> bool:
        try:
            return self.client.get("/version").status_code == 200
        except httpx.TransportError:
            return False

    def _read_log(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if "routing to" in line:
                self._listens.set()
        self._listens.set()  # it ended

    @property
    def text(self) -> str:
        return "".join(self.log)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float = PATIENCE) -> int:
        """The exit status."""
        status = self.process.wait(seconds)
        self._reader.join(PATIENCE)
        return status

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.wait()
        self.process.stderr.close()

    def __enter__(self) -> "RouterProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
