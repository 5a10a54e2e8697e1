"""One request of ``tritonllm bench serve``: what is sent, and what is noted of the answer.

Whatever a server answers is a failure of that request at worst, so that the others' results are not lost.
"""

import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from tritonllm.cli.remote import UNREADABLE, error_text, first_model, message_of


@dataclass(frozen=True)
class PlannedRequest:
    """A request: when to send it (seconds after the beginning), and how long it is."""

    at: float
    input_len: int
    output_len: int


@dataclass
class Told:
    """What came of a request; times are the client's, in seconds."""

    ask: PlannedRequest
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of events with tokens
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft_ms(self) -> float:
        return 1e3 * (self.arrivals[0] - self.sent)

    @property
    def e2el_ms(self) -> float:
        return 1e3 * (self.arrivals[-1] - self.sent)

    @property
    def tpot_ms(self) -> float:
        """0 of one token."""
        return (self.e2el_ms - self.ttft_ms) / max(self.output_tokens - 1, 1)

    def gaps_ms(self) -> Iterator[float]:
        return (1e3 * (b - a) for a, b in zip(self.arrivals, self.arrivals[1:], strict=False))


async def model_of(session: Any, base: str) -> str:
    """The first name that a server has.

    Args:
        session: a session of aiohttp.
        base: the server's address, without ``/v1``.

    Raises:
        RuntimeError: it does not tell one; the message holds what it said.
    """
    import aiohttp
    from aiohttp.http import HttpProcessingError

    try:
        async with session.get(f"{base}/v1/models") as response:
            body = await response.read()
            if response.status != 200:
                raise ValueError(f"{message_of(body)} (status {response.status})")
            return first_model(body)
    except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError) as error:
        said = str(error) or type(error).__name__
        raise RuntimeError(f"--base-url: the server does not tell its models: {said}") from error


async def send(session: Any, base: str, body: dict[str, Any], ask: PlannedRequest) -> Told:
    """Stream one completion, and note when each of its events came.

    Args:
        session: a session of aiohttp.
        base: the server's address, without ``/v1``.
        body: the request, with ``stream`` and ``include_usage``.
    """
    import aiohttp
    from aiohttp.http import HttpProcessingError

    told = Told(ask, sent=time.perf_counter())
    try:
        async with session.post(f"{base}/v1/completions", json=body) as response:
            if response.status != 200:
                told.error = f"status {response.status}: {message_of(await response.read())}"
            else:
                await _note(response, told)
    except (aiohttp.ClientError, HttpProcessingError, OSError, *UNREADABLE) as error:
        told.error = f"{type(error).__name__}: {error}"
    if told.error is None and told.output_tokens != ask.output_len:
        told.error = f"{told.output_tokens!r} tokens came instead of {ask.output_len}"
    elif told.error is None and not told.arrivals:
        told.error = "no event with tokens came"
    return told


async def _note(response: Any, told: Told) -> None:
    """Read the events of a stream up to its end or an error."""
    async for line in lines(response.content):
        arrived = time.perf_counter()
        data = line.removeprefix(b"data:").strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        try:
            event = json.loads(data)
            if event.get("error") is not None:
                told.error = error_text(event["error"])
                return
            if event["choices"]:
                told.arrivals.append(arrived)
            if event.get("usage"):
                told.output_tokens = event["usage"]["completion_tokens"]
        except UNREADABLE as error:
            shown = data[:200].decode(errors="replace")
            told.error = f"an event that cannot be read ({type(error).__name__}: {error}): {shown}"
            return


async def lines(content: Any) -> AsyncIterator[bytes]:
    """The lines of a body, wherever the network has cut it.

    aiohttp's own lines have a limit, and the event with the ids of a long prompt goes beyond it.
    """
    begun: list[bytes] = []
    async for piece in content.iter_any():
        first, *others = piece.split(b"\n")
        begun.append(first)
        for other in others:
            yield b"".join(begun)
            begun = [other]
    if any(begun):  # the last line may lack its end
        yield b"".join(begun)
