"""``python -m bench.route``: what ``tritonllm route`` adds to a request, with a backend that answers at once.

A client, the router and the backend are processes of this machine. The same requests go to the backend itself and
through the router in turns, so that whatever else the machine does meets both alike. ``requests`` are answered in one
piece; ``streams`` send an event every ``--gap`` seconds. Times are those that the client sees, in milliseconds: of
whole requests that follow each other, and between two events of a stream. ``cpu_us`` is the router's processor time, in
microseconds, for a request or an event: what bounds how many of them one router takes.
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import uvicorn

from autotune.revision import commit
from bench.host import processor

ROOT = Path(__file__).parents[1]
PROMPT = "x" * 2000
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":" token"}]}\n\n'
WHOLE = json.dumps({"choices": [{"index": 0, "text": " token" * 50}]}).encode()


async def backend(scope: Any, receive: Any, send: Any) -> None:
    """An ASGI application: ``max_tokens`` events, ``gap`` seconds apart, or one answer at once."""
    body = b""
    while (message := await receive()).get("more_body"):
        body += message["body"]
    body += message.get("body", b"")
    asked = json.loads(body) if body else {}
    kind = b"text/event-stream" if asked.get("stream") else b"application/json"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    if not asked.get("stream"):
        models = json.dumps({"data": [{"id": "m"}]}).encode()
        await send({"type": "http.response.body", "body": models if scope["path"] == "/v1/models" else WHOLE})
        return
    for _ in range(asked["max_tokens"]):
        await send({"type": "http.response.body", "body": EVENT, "more_body": True})
        await asyncio.sleep(asked["gap"])
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def serve_backend() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(f"listens on http://127.0.0.1:{sock.getsockname()[1]}", file=sys.stderr, flush=True)
        uvicorn.Server(uvicorn.Config(backend, lifespan="off", log_level="error")).run([sock])


def start(*command: str) -> tuple[subprocess.Popen[str], str]:
    """A process that says on stderr where it listens, and that address."""
    process = subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"\bon (http://127\S+)$", line.strip()):
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or a full pipe would stop its log
            return process, found[1]
    raise RuntimeError(f"{command[0]} did not start")


async def requests(session: aiohttp.ClientSession, url: str, count: int) -> list[float]:
    """Milliseconds of requests that follow each other."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        async with session.post(f"{url}/v1/completions", json={"model": "m", "prompt": PROMPT}) as answer:
            if await answer.read() != WHOLE:
                raise RuntimeError("another answer came")
        times.append(1e3 * (time.perf_counter() - begin))
    return times


async def streams(session: aiohttp.ClientSession, url: str, count: int, events: int, gap: float) -> list[float]:
    """Milliseconds between events of streams that run together."""

    async def read() -> list[float]:
        body = {"model": "m", "prompt": PROMPT, "stream": True, "max_tokens": events, "gap": gap}
        times, got = [], b""
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            async for data in answer.content.iter_any():
                got += data
                times += [time.perf_counter()] * (len(got) // len(EVENT) - len(times))  # some may come together
        if got != EVENT * events + b"data: [DONE]\n\n":
            raise RuntimeError("another stream came")
        return [1e3 * (b - a) for a, b in pairwise(times)]

    return [gap for gaps in await asyncio.gather(*(read() for _ in range(count))) for gap in gaps]


def percentiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"p50": cuts[49], "p99": cuts[98]}


Run = Callable[[aiohttp.ClientSession, str], Awaitable[list[float]]]


async def compare(urls: dict[str, str], router: psutil.Process, turns: int, each: int, run: Run) -> dict[str, Any]:
    """Both ways in turns.

    Args:
        urls: of the backend (``direct``) and of the router (``routed``).
        each: requests or events of a turn.
    """
    times: dict[str, list[float]] = {name: [] for name in urls}
    spent: dict[str, float] = dict.fromkeys(urls, 0.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for turn in range(turns + 1):
            for name, url in urls.items():
                before = sum(router.cpu_times()[:2])
                found = await run(session, url)
                if turn:  # the first one warms up
                    times[name] += found
                    spent[name] += sum(router.cpu_times()[:2]) - before
    row: dict[str, Any] = {name: percentiles(found) for name, found in times.items()}
    return row | {"cpu_us": 1e6 * spent["routed"] / (turns * each)}


def measure(turns: int, count: int, gap: float) -> list[dict[str, Any]]:
    """A row for requests, and one for each number of streams."""
    started: list[subprocess.Popen[str]] = []
    try:
        process, direct = start("bench.route", "--backend")
        started.append(process)
        process, routed = start("tritonllm", "route", "--port", "0", "--backend", direct)
        started.append(process)
        watched = psutil.Process(process.pid)
        urls = {"direct": direct, "routed": routed}
        asyncio.run(_answers(routed))
        rows = [{"what": "requests", "at_once": 1, "unit": "ms of a request"}]
        rows[0] |= asyncio.run(compare(urls, watched, turns, count, lambda s, u: requests(s, u, count)))
        for many in (1, 32):
            row = {"what": "streams", "at_once": many, "unit": "ms between events", "gap": gap}
            each = many * count

            def run(session: aiohttp.ClientSession, url: str, many: int = many) -> Awaitable[list[float]]:
                return streams(session, url, many, count, gap)

            rows.append(row | asyncio.run(compare(urls, watched, turns, each, run)))
        return rows
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()


async def _answers(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.route", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--turns", type=int, default=5, metavar="N", help="both ways, one after the other (%(default)s)"
    )
    parser.add_argument(
        "--count", type=int, default=200, metavar="N", help="requests, and events a stream (%(default)s)"
    )
    parser.add_argument("--gap", type=float, default=0.01, metavar="S", help="between two events (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the numbers as JSON")
    parser.add_argument("--backend", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.backend:
        serve_backend()
        return 0
    for name, least in (("turns", 1), ("count", 10), ("gap", 0.001)):  # without a gap, events come in one piece
        if not getattr(args, name) >= least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cores = len(os.sched_getaffinity(0))
    machine = {"cpu": f"{processor()}, {cores} cores", "python": platform.python_version()}
    machine |= {name: version(name) for name in ("aiohttp", "uvicorn")}
    facts: dict[str, Any] = {"machine": machine, "commit": commit(), "date": now, "turns": args.turns}
    facts["load"] = "other work ran on the same cores" if os.getloadavg()[0] > 0.5 else "nothing else ran"
    rows = measure(args.turns, args.count, args.gap)
    for row in rows:
        shown = " ".join(
            f"{name} p50 {row[name]['p50']:.2f} p99 {row[name]['p99']:.2f}" for name in ("direct", "routed")
        )
        print(
            f"{row['at_once']:>3} {row['what']:<9} {row['unit']}: {shown}, router {row['cpu_us']:.0f} us of processor"
        )
    if args.out:
        args.out.write_text(json.dumps({**facts, "routing": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
