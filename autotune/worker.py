"""A process that answers requests, and that may crash or hang without taking the search with it.

Parent and child speak JSON lines: ``{"call": method, "args": {...}}`` one way, ``{"result": ...}`` or
``{"failed": reason}`` the other. A child that dies, or does not answer in time, is killed and replaced at the next
call.
"""

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any


class Failed(Exception):
    """A call came to nothing; the message says why. The worker can take the next one."""


class Worker:
    """The parent's side.

    Args:
        handler: ``module:Class``, made once in each child.
        environ: variables to set in the child.
        arguments: keyword arguments of the handler; what JSON can hold.
    """

    def __init__(
        self, handler: str, environ: Mapping[str, str] | None = None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._handler = handler
        self._arguments = json.dumps(dict(arguments or {}))
        self._environ = dict(environ or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (what the child prints, for when it dies)

    def _start(self) -> subprocess.Popen[bytes]:
        self._log.seek(0)
        self._log.truncate()
        return subprocess.Popen(
            [sys.executable, "-c", "from autotune.worker import serve; serve()", self._handler, self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env=os.environ | self._environ,
        )

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it printed nothing"

    def call(self, method: str, timeout: float, **args: Any) -> Any:
        """Have the child run ``method(**args)`` and return its result.

        Raises:
            Failed: the method raised ``Failed``, the child died, or ``timeout`` seconds passed.
        """
        if self._child is None:
            self._child = self._start()
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it died while idle: reading says so
            child.stdin.write(json.dumps({"call": method, "args": args}).encode() + b"\n")
        ready, _, _ = select.select([child.stdout], [], [], timeout)
        answer = child.stdout.readline() if ready else b""
        if not ready:
            self.close()
            raise Failed(f"no answer within {timeout:.0f} s")
        if not answer.endswith(b"\n"):
            code = child.wait()
            self.close()
            raise Failed(f"the worker died (exit code {code}): {self._last_words()}")
        reply = json.loads(answer)
        if "failed" in reply:
            raise Failed(reply["failed"])
        return reply["result"]

    def close(self) -> None:
        """End the child, whatever it is doing."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def serve() -> None:
    """The child's side: make the handler that the command line names, and answer until standard input closes."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not look like an answer
    module, _, name = sys.argv[1].partition(":")
    handler = getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"result": getattr(handler, request["call"])(**request["args"])}
        except Failed as reason:
            reply = {"failed": str(reason)}
        answers.write(json.dumps(reply).encode() + b"\n")
