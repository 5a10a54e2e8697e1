"""One request to one backend: until its answer's first byte, or why there is none."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

import aiohttp
from yarl import URL

from tritonllm.http.ask import Ask
from tritonllm.http.errors import RouteError
from tritonllm.http.reply import end_to_end
from tritonllm.route.backend import Backend
from tritonllm.route.cause import Cause, cause_of
from tritonllm.route.config import RouterConfig
from tritonllm.route.metrics import RouterMetrics

logger = logging.getLogger(__name__)
REFUSALS = (429, 503)  # nothing was done for the request
RETRIED = (429, 502, 503, 504)
# Not the client's to say, or said by aiohttp: the body is sent with its length, and comes back as it is.
DROPPED = (b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id")
DROPPED_FROM_ANSWERS = (b"date", b"server", b"x-request-id")
UNASKED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")  # what aiohttp would add


class TooLongError(aiohttp.ClientError):
    """An answer that has to be held whole is longer than it may be."""


async def read_rest(response: aiohttp.ClientResponse, first: bytes, most: int) -> bytes:
    """The whole body of an answer.

    Args:
        first: what was read of it.
        most: bytes of all of it.

    Raises:
        TooLongError: it is longer; no more than a buffer beyond was read.
    """
    parts, size = [first], len(first)
    while size <= most and (part := await response.content.readany()):
        parts.append(part)
        size += len(part)
    if size > most:
        raise TooLongError(f"its answer is longer than {most} bytes")
    return b"".join(parts)


@dataclass(eq=False)
class Failure(Exception):
    """A backend has failed: nothing has been sent to the client, and another backend may do better.

    Args:
        reason: a word for the metrics.
        error: what the client gets if nobody else is asked.
        answer: what it gets instead, if the backend said something: status, headers, body.
        begun: whether the backend may have begun with the request.
        is_paid: whether its retry is counted already.
    """

    reason: str
    error: RouteError
    answer: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
    begun: bool = True
    is_paid: bool = False


@dataclass(eq=False)
class Waiting:
    """A request that waits for its answer's first byte.

    Args:
        timeout: the timeout that ends the wait.
        model: the name of the model that the request names; ``None`` if it names none.
        may_move: whether another backend may be asked.
        moved: whether the wait was ended because the backend was found dead.
    """

    timeout: asyncio.Timeout
    model: str | None
    may_move: bool
    moved: bool = False


@dataclass(eq=False)
class Opened:
    """An answer that has begun."""

    response: aiohttp.ClientResponse
    first: bytes
    backend: Backend
    permit: int
    sent_at: float = field(default_factory=time.monotonic)


class Upstream:
    """Sends requests to backends, and follows those that wait.

    Args:
        session: the session to ask with.
        metrics: learns of each answer and failure.
    """

    def __init__(self, session: aiohttp.ClientSession, metrics: RouterMetrics) -> None:
        self._session, self._metrics = session, metrics
        self.waiting: dict[Backend, set[Waiting]] = {}

    async def open(self, ask: Ask, backend: Backend, config: RouterConfig, may_move: bool) -> Opened:
        """Send a request and wait for the answer's first byte. The caller closes the response.

        Raises:
            Failure: there is no answer, or one that says to ask another backend.
        """
        permit, sent_at = backend.breaker.begin(), time.monotonic()
        settled = opened = False
        response: aiohttp.ClientResponse | None = None
        try:
            response, first = await self._first_byte(ask, backend, config, may_move)
            self._metrics.answered(backend.label, response.status, time.monotonic() - sent_at)
            settled = True
            if response.status in RETRIED:
                raise await self._refusal(response, first, backend, permit, config)
            if response.status >= 500:
                self.count_failure(backend, permit, f"status {response.status}")
            else:
                backend.breaker.answered(permit)
            opened = True
            return Opened(response, first, backend, permit, sent_at)
        except Failure as failure:
            if not settled:
                settled = True
                self._metrics.failed(backend.label, failure.reason)
                self.count_failure(backend, permit, failure.error.message)
            raise
        finally:
            if not settled:  # cancelled: the client has left
                backend.breaker.forgotten(permit)
            if response is not None and not opened:
                response.close()

    async def _first_byte(
        self, ask: Ask, backend: Backend, config: RouterConfig, may_move: bool
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        response: aiohttp.ClientResponse | None = None
        waiting: Waiting | None = None
        done = False
        try:
            async with asyncio.timeout(config.first_byte_timeout) as timeout:
                waiting = Waiting(timeout, ask.model, may_move)
                self.waiting.setdefault(backend, set()).add(waiting)
                response = await self._send(ask, backend, config)
                first = await response.content.readany()
            done = True
            return response, first
        except aiohttp.ClientConnectorError as error:  # nothing was sent
            raise Failure("connect", _unreachable(backend, cause_of(error)), begun=False) from error
        except aiohttp.ConnectionTimeoutError as error:
            seconds = f"no connection within {config.connect_timeout:g} seconds"
            raise Failure("connect", _unreachable(backend, Cause(seconds, seconds)), begun=False) from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError):
                raise self._too_late(backend, waiting, config) from error
            raise Failure("disconnect", _unreachable(backend, cause_of(error))) from error
        finally:
            if waiting is not None:
                self._forget(backend, waiting)
            if response is not None and not done:
                response.close()

    def _forget(self, backend: Backend, waiting: Waiting) -> None:
        self.waiting[backend].discard(waiting)
        if not self.waiting[backend]:
            del self.waiting[backend]

    async def _send(self, ask: Ask, backend: Backend, config: RouterConfig) -> aiohttp.ClientResponse:
        key = backend.config.key
        out = () if key is None else (b"authorization", b"x-api-key")
        headers = [(name.decode("latin-1"), _as_text(value)) for name, value in ask.headers if name not in out]
        headers += [("Accept-Encoding", "identity"), ("X-Request-Id", ask.request_id)]
        if key is not None:
            headers.append(("Authorization", f"Bearer {key}"))
        return await self._session.request(
            ask.method,
            URL(backend.config.base + ask.target, encoded=True),
            headers=headers,
            data=ask.body or None,
            allow_redirects=False,
            skip_auto_headers=UNASKED,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout),
        )

    def _too_late(self, backend: Backend, waiting: Waiting | None, config: RouterConfig) -> Failure:
        if waiting is not None and waiting.moved:
            what = "was found dead before it answered"
            return Failure("dead", failed(backend, Cause(what, what)), is_paid=True)
        what = f"did not answer within {config.first_byte_timeout:g} seconds"
        return Failure("first_byte_timeout", failed(backend, Cause(what, what), 504, "backend_timeout"))

    async def _refusal(
        self, response: aiohttp.ClientResponse, first: bytes, backend: Backend, permit: int, config: RouterConfig
    ) -> Failure:
        """What an answer that asks for a retry becomes. Its body goes to the client if nobody else is asked."""
        status = response.status
        if status == 429:
            backend.breaker.succeeded(permit)  # it lives
        else:
            self.count_failure(backend, permit, f"status {status}")
        if status in REFUSALS:
            backend.pause(retry_after(response.headers.get("Retry-After")))
        what = f"answered with status {status}"
        error = failed(backend, Cause(what, what))
        try:
            async with asyncio.timeout(config.between_bytes_timeout):
                body = await read_rest(response, first, config.max_held_bytes)
        except (aiohttp.ClientError, OSError):
            return Failure(f"status_{status}", error, begun=status not in REFUSALS)
        answer = (status, answer_headers(response), body)
        return Failure(f"status_{status}", error, answer, begun=status not in REFUSALS)

    def count_success(self, opened: Opened) -> None:
        """An answer has come whole."""
        if opened.response.status < 500:
            opened.backend.breaker.succeeded(opened.permit)

    def count_failure(self, backend: Backend, permit: int, error: str) -> None:
        backend.note(error)
        if backend.breaker.failed(permit):
            self._metrics.ejected(backend.label, "circuit")
            seconds = backend.breaker.seconds_left
            logger.warning("the circuit of backend %s is open for %.1f seconds: %s", backend.label, seconds, error)


def failed(backend: Backend, what: Cause, status: int = 502, code: str = "backend_failed") -> RouteError:
    """The error of a request that a backend failed.

    Args:
        what: goes on after its name.
    """
    return RouteError(status, f"the backend {backend.label} {what.logged}", code, told=f"{backend.told} {what.told}")


def _unreachable(backend: Backend, why: Cause) -> RouteError:
    return failed(backend, Cause(f"did not answer: {why.logged}", f"did not answer: {why.told}"))


def answer_headers(response: aiohttp.ClientResponse, drop: tuple[bytes, ...] = ()) -> list[tuple[bytes, bytes]]:
    return end_to_end(response.raw_headers, (*DROPPED_FROM_ANSWERS, *drop))


def _as_text(value: bytes) -> str:
    """A header's value as the client library wants it, which writes it as UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def retry_after(value: str | None, default: float = 1.0) -> float:
    """Seconds of a ``Retry-After`` header, which has a number of them or a date (RFC 9110, 10.2.3)."""
    if value is None:
        return default
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return default
