"""Faults of clients and processes, against a server that is under load: what must hold after each.

After every fault that the server survives, nothing runs or waits, the pool of cache blocks is full again, and a request
gets an answer. The faults that can repeat come in rounds: from the first round to the last, memory and open files must
not grow.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serving import NAME, Server, eventually, server, socket_folders

IDLE_SECONDS = 60.0
GROWTH_MB, GROWTH_FDS, GROWTH_THREADS = 48.0, 8, 2  # after the first round, that allocators and pools may still take
DRAIN = 10  # seconds of the server that gets SIGTERM


@dataclass(frozen=True)
class Scale:
    """How much of each fault.

    Attributes:
        streams: that leave at random.
        others: of the other faults' requests.
        tokens: most of an output.
        body: bytes that the server takes.
        stand_still: seconds for which a process is stopped, or a reader reads nothing.
    """

    streams: int
    others: int
    tokens: int
    body: int
    stand_still: float


FULL = Scale(500, 64, 512, 16 << 20, 5.0)
SMALL = Scale(40, 6, 64, 1 << 20, 0.5)
BAD_BODIES: tuple[tuple[str, bytes, dict[str, str], int], ...] = (
    ("not JSON", b'{"prompt": [1, 2', {"Content-Type": "application/json"}, 400),
    ("not UTF-8", b'{"prompt": "\xff\xfe"}', {"Content-Type": "application/json"}, 400),
    ("a field that is not here", b'{"prompt": [5, 6], "audio": 1}', {"Content-Type": "application/json"}, 400),
    ("a wrong type", b'{"prompt": {"a": 1}}', {"Content-Type": "application/json"}, 400),
    ("tokens beyond the vocabulary", b'{"prompt": [999999999]}', {"Content-Type": "application/json"}, 400),
    ("deep nesting", b'{"prompt": ' + b"[" * 20000 + b"]" * 20000 + b"}", {"Content-Type": "application/json"}, 400),
    ("another kind of body", b'{"prompt": [5, 6]}', {"Content-Type": "text/plain"}, 415),
)
RAW = (  # what no HTTP client would send; the server closes the connection, whatever it answers
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"\x16\x03\x01\x02\x00 TLS to a port without it",
    b"POST /v1/completions HTTP/1.1\r\nHo",
)


class Faults:
    """Args:
    folder: of the model's configuration.
    options: of the server.
    vocab: prompts are of the ids below this.
    scale: how much.
    rounds: of the faults that repeat.
    """

    def __init__(self, folder: Path, options: Sequence[str], vocab: int, scale: Scale, rounds: int) -> None:
        self._folder, self._vocab, self._scale, self._rounds = folder, vocab, scale, rounds
        self._options = [*options, "--max-queue", "4096", "--max-body-bytes", str(scale.body)]
        self._chance = random.Random(0)

    def run(self) -> Iterator[dict[str, Any]]:
        """A row for each fault: ``fault``, ``passed``, ``why``, and what was seen."""
        repeated: tuple[tuple[str, Callable[[Server], dict[str, Any]]], ...] = (
            ("streams that leave at random", lambda s: asyncio.run(self._leaving(s))),
            ("answers that nobody waits for", lambda s: asyncio.run(self._impatient(s))),
            ("bad and oversized bodies", lambda s: asyncio.run(self._bad_bodies(s))),
            ("slow readers", self._slow_readers),
            ("SIGSTOP of the API process", lambda s: asyncio.run(self._stopped(s))),
        )
        with server(self._folder, self._options) as running:
            seen = []
            for number in range(self._rounds):
                for name, fault in repeated:
                    yield self._survived(f"{name}, round {number + 1}", running, fault)
                seen.append(running.resources())
            yield _growth(seen)
        yield self._ended("kill -9 of the engine", 1, lambda s: os.kill(s.engine, signal.SIGKILL))
        yield self._ended("SIGTERM under load", 0, lambda s: s.process.terminate())
        yield self._ended("kill -9 of the API process", -9, lambda s: s.process.kill())

    def _survived(self, name: str, running: Server, fault: Callable[[Server], dict[str, Any]]) -> dict[str, Any]:
        begin, wrong = time.monotonic(), []
        found = fault(running)
        wrong += found.pop("wrong", [])
        if not eventually(running.is_idle, IDLE_SECONDS):
            wrong.append("requests or blocks are left over")
        if asyncio.run(self._answers(running)) != 1:
            wrong.append("a request afterwards gets no answer")
        seconds = time.monotonic() - begin
        return {"fault": name, "passed": not wrong, "why": "; ".join(wrong), "seconds": seconds, **found}

    def _body(self, tokens: int | None = None, **more: Any) -> dict[str, Any]:
        prompt = self._chance.choices(range(2, self._vocab), k=self._chance.randrange(8, 128))
        length = self._chance.randrange(self._scale.tokens // 4, self._scale.tokens) if tokens is None else tokens
        return {"model": NAME, "prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0, **more}

    async def _answers(self, running: Server, count: int = 1) -> int:
        """How many of these small requests get their answer."""
        async with _session(running) as session:

            async def one() -> bool:
                async with session.post("/v1/completions", json=self._body(4)) as response:
                    answer = await response.json()
                    return response.status == 200 and answer["usage"]["completion_tokens"] == 4

            return sum(await asyncio.gather(*(one() for _ in range(count))))

    async def _leaving(self, running: Server) -> dict[str, Any]:
        async with _session(running) as session:

            async def one() -> tuple[int, bool]:
                leave, events = self._chance.randrange(self._scale.tokens), 0
                body = self._body(stream=True, return_token_ids=True)
                await asyncio.sleep(self._chance.random() * 3)
                async with session.post("/v1/completions", json=body) as response:
                    if response.status != 200:
                        return response.status, False
                    async for line in response.content:
                        events += line.startswith(b"data: ")
                        if events > leave:
                            response.close()
                            return 200, True
                    return 200, False

            ends = await asyncio.gather(*(one() for _ in range(self._scale.streams)))
        bad = [status for status, _ in ends if status != 200]
        left = sum(gone for _, gone in ends)
        return {"left": left, "stayed": len(ends) - left, "wrong": [f"{len(bad)} got status {bad[0]}"] if bad else []}

    async def _impatient(self, running: Server) -> dict[str, Any]:
        async with _session(running) as session:

            async def one() -> bool:
                try:
                    async with asyncio.timeout(self._chance.random()):
                        async with session.post(
                            "/v1/completions", json=self._body(self._scale.tokens, n=2)
                        ) as response:
                            await response.read()
                            return True
                except TimeoutError:
                    return False

            answered = sum(await asyncio.gather(*(one() for _ in range(self._scale.others))))
        return {"answered": answered, "aborted": self._scale.others - answered}

    async def _bad_bodies(self, running: Server) -> dict[str, Any]:
        wrong, oversized = [], b'{"prompt": "' + b"a" * self._scale.body + b'"}'
        kind = {"Content-Type": "application/json"}
        async with _session(running) as session:
            streams = [asyncio.create_task(self._answers(running)) for _ in range(4)]
            for name, body, headers, status in (*BAD_BODIES, ("an oversized body", oversized, kind, 413)):
                got = await _status(session, body, headers)
                if got != status:
                    wrong.append(f"{name} got {got} instead of {status}")
            for raw in RAW:
                await asyncio.to_thread(self._raw, running, raw)
            if sum(await asyncio.gather(*streams)) != len(streams):
                wrong.append("another request got no answer")
        return {"bodies": len(BAD_BODIES) + 1 + len(RAW), "wrong": wrong}

    def _raw(self, running: Server, data: bytes) -> None:
        with _connection(running) as connection:
            connection.sendall(data)
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionError):
                connection.recv(4096)

    def _slow_readers(self, running: Server) -> dict[str, Any]:
        """They ask for streams, read nothing, and leave; others are answered meanwhile."""
        connections = []
        for _ in range(self._scale.others):
            body = json.dumps(self._body(self._scale.tokens, n=2, stream=True, return_token_ids=True)).encode()
            connection = _connection(running, buffer=4096)
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n" % len(body) + body
            )
            connections.append(connection)
        begin = time.monotonic()
        answered = asyncio.run(self._answers(running, 8))
        meanwhile = time.monotonic() - begin
        time.sleep(self._scale.stand_still)
        for connection in connections:
            connection.close()
        wrong = [] if answered == 8 else [f"{8 - answered} others got no answer"]
        return {"readers": len(connections), "others_seconds": meanwhile, "wrong": wrong}

    async def _stopped(self, running: Server) -> dict[str, Any]:
        """The engine goes on while nobody reads; every stream is whole afterwards."""
        async with _session(running) as session:

            async def one() -> int:
                tokens, body = 0, self._body(self._scale.tokens, stream=True, return_token_ids=True)
                async with session.post("/v1/completions", json=body) as response:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            tokens += sum(len(one["token_ids"]) for one in json.loads(line[6:])["choices"])
                return tokens

            tasks = [asyncio.create_task(one()) for _ in range(self._scale.others)]
            await asyncio.sleep(0.5)
            os.kill(running.process.pid, signal.SIGSTOP)
            await asyncio.sleep(self._scale.stand_still)
            os.kill(running.process.pid, signal.SIGCONT)
            lengths = await asyncio.gather(*tasks)
        short = sum(length != self._scale.tokens for length in lengths)
        return {"streams": len(lengths), "wrong": [f"{short} streams are not whole"] if short else []}

    def _ended(self, name: str, status: int, fault: Callable[[Server], None]) -> dict[str, Any]:
        """A server of its own whose end is the fault; nothing may stay, and no client may wait for ever."""
        folders, begin, wrong = socket_folders(), time.monotonic(), []
        with server(self._folder, [*self._options, "--drain-seconds", str(DRAIN)]) as running:
            ends, exit_status = asyncio.run(self._under_load(running, fault))
            if exit_status != status:
                wrong.append(f"the exit status is {exit_status} instead of {status}")
            left = running.left_behind()
            if left:
                wrong.append(f"{len(left)} processes are left")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
        if not eventually(lambda: socket_folders() <= folders, 15):
            wrong.append("a folder of sockets is left")
        if ends.get("hangs"):
            wrong.append(f"{ends['hangs']} clients hang")
        if status == 0 and ends.get("whole", 0) == 0:
            wrong.append("no running request came to its end")
        seconds = time.monotonic() - begin
        return {"fault": name, "passed": not wrong, "why": "; ".join(wrong), "seconds": seconds, "clients": ends}

    async def _under_load(self, running: Server, fault: Callable[[Server], None]) -> tuple[dict[str, int], int | None]:
        """How the clients' streams end (``whole``, ``error``, ``broken``, ``hangs``), and the exit status."""
        async with _session(running) as session:

            async def one(tokens: int) -> str:
                last = b""
                body = self._body(tokens, stream=True, return_token_ids=True)
                try:
                    async with asyncio.timeout(90), session.post("/v1/completions", json=body) as response:
                        async for line in response.content:
                            if line.startswith(b'data: {"error"'):
                                return "error"
                            last = line if line.startswith(b"data:") else last
                except TimeoutError:
                    return "hangs"
                except OSError:
                    return "broken"
                except Exception as error:  # aiohttp's own
                    return "broken" if type(error).__module__.startswith("aiohttp") else "raised"
                return "whole" if last.startswith(b"data: [DONE]") else "broken"

            lengths = [self._scale.tokens // (1 + number % 4) for number in range(self._scale.others)]
            tasks = [asyncio.create_task(one(length)) for length in lengths]
            await asyncio.to_thread(eventually, lambda: running.metric("vllm:num_requests_running") > 0, 30)
            fault(running)
            ends = await asyncio.gather(*tasks)
            status = await asyncio.to_thread(running.ended, DRAIN + 30)
        return {kind: ends.count(kind) for kind in sorted(set(ends))}, status


def _growth(seen: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """From the first round to the last, of both processes."""
    limits = {"rss_mb": GROWTH_MB, "fds": GROWTH_FDS, "threads": GROWTH_THREADS}
    wrong = [
        f"{who}: {what} grew from {seen[0][who][what]:.0f} to {seen[-1][who][what]:.0f}"
        for who in seen[0]
        for what, limit in limits.items()
        if seen[-1][who][what] - seen[0][who][what] > limit
    ]
    return {"fault": "growth over the rounds", "passed": not wrong, "why": "; ".join(wrong), "after_rounds": seen}


def _session(running: Server) -> Any:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=60)
    return aiohttp.ClientSession(running.url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _status(session: Any, body: bytes, headers: dict[str, str]) -> int | str:
    """The status; of a connection that the server closes while it is sent a body, 413 if it said so, else the error."""
    try:
        async with session.post("/v1/completions", data=body, headers=headers) as response:
            await response.read()
            return response.status
    except OSError as error:
        return type(error).__name__


def _connection(running: Server, buffer: int | None = None) -> socket.socket:
    """Args:
    buffer: bytes that the kernel keeps for a reader.
    """
    host, _, port = running.url.removeprefix("http://").partition(":")
    made = socket.socket()
    if buffer is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    made.connect((host, int(port)))
    return made
