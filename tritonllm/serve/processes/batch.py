"""Runs OpenAI's batch files: a request a line, and an answer a line. What has been answered is not asked again.

An answer is a line that ends in a newline. It is written in one piece as soon as it is there, so after a ``kill -9``
the file holds every finished answer, and at most one line without an end, which is cut off.
"""

import asyncio
import fcntl
import json
import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
from fastapi import FastAPI

from tritonllm.http.guard import without_network
from tritonllm.serve.api.app import make_app
from tritonllm.serve.api.config import ServerConfig
from tritonllm.serve.engines.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
AGAIN = 429  # the engine's queue is full
PAUSE = 0.2  # seconds until a request is sent again
BEGINNING = b'{"id":"batch-'  # of each answer


@dataclass(frozen=True)
class Line:
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Read a file of requests in OpenAI's batch format.

    Raises:
        ValueError: a line that is no request of a batch; the message names it.
        OSError: the file cannot be read.
    """
    lines: dict[str, Line] = {}
    for number, text in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):  # JSON may hold other breaks
        if not text.strip():
            continue
        line = _read_line(f"{path}: line {number}", text)
        if line.custom_id in lines:
            raise ValueError(f"{path}: line {number}: custom_id {line.custom_id!r} is there twice; make it unique")
        lines[line.custom_id] = line
    if not lines:
        raise ValueError(f"{path} has no requests")
    return list(lines.values())


def _read_line(where: str, text: str) -> Line:
    try:
        entry = json.loads(text)
        msgspec.json.encode(entry)  # as it will be asked
    except RecursionError as error:
        raise ValueError(f"{where} is nested too deep") from error
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object")
    custom_id, url, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
    if not isinstance(custom_id, str) or not isinstance(url, str) or not isinstance(body, dict):
        raise ValueError(f"{where} needs custom_id and url as text and body as an object")
    if entry.get("method", "POST") != "POST" or not url.startswith("/v1/"):
        raise ValueError(f"{where}: only POST to a path that begins with /v1/ is known, as /v1/chat/completions")
    if body.get("stream"):
        raise ValueError(f"{where}: a batch cannot be streamed, leave out stream")
    return Line(custom_id, url, body)


@contextmanager
def open_answers(path: Path) -> Iterator[tuple[IO[bytes], set[str]]]:
    """The file of answers, to append to, and the ids that are in it.

    Raises:
        ValueError: the file holds something else, or another process writes to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path}: another process writes to it") from error
        file.seek(0)
        done, end = set(), 0
        for number, text in enumerate(file, 1):
            if not text.endswith(b"\n"):
                begun = text.replace(b" ", b"")[: len(BEGINNING)]
                if begun != BEGINNING[: len(begun)]:  # else its writer was killed, and it is answered again
                    raise ValueError(f"{path}: line {number} is no answer of a batch; name another file")
                break
            try:
                done.add(str(json.loads(text)["custom_id"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}: line {number} is no answer of a batch; name another file") from error
            end += len(text)
        file.truncate(end)
        yield file, done


async def run_batch(llm: AsyncLLM, config: ServerConfig, lines: list[Line], file: IO[bytes], at_once: int) -> int:
    """Answer the lines, ``at_once`` of them together, and write the answers to the file in the order of their ends.

    Returns:
        How many answers are errors.

    Raises:
        EngineDeadError: the engine has died; what was finished is in the file.
    """
    app = make_app(llm, config)
    llm.attach()
    waiting = iter(lines)
    failed = 0

    async def work() -> None:
        nonlocal failed
        for line in waiting:  # shared by all workers
            data, wrong = await answer(app, line)
            await llm.check_health()
            file.write(data)
            file.flush()
            failed += wrong

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, len(lines))):
            group.create_task(work())
    return failed


async def answer(app: FastAPI, line: Line) -> tuple[bytes, bool]:
    """The line of an answer, and whether it is an error."""
    status, request_id, body = await _ask(app, line)
    response = {"status_code": status, "request_id": request_id, "body": body}
    whole = {"id": f"batch-{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": None}
    return msgspec.json.encode(whole) + b"\n", status != 200


async def _ask(app: FastAPI, line: Line) -> tuple[int, str, Any]:
    """Status, request id and body of an answer; asked again while the queue is full."""
    while True:
        status, request_id, body = await _call(app, line.url, msgspec.json.encode(line.body))
        if status != AGAIN:
            return status, request_id, body
        await asyncio.sleep(PAUSE)


async def _call(app: FastAPI, path: str, body: bytes) -> tuple[int, str, Any]:
    """One request to the application, without a network."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, without_network(body), send)
    start = next(message for message in sent if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in sent if message["type"] == "http.response.body")
    request_id = dict(start["headers"]).get(b"x-request-id", b"").decode()
    return start["status"], request_id, json.loads(content)
