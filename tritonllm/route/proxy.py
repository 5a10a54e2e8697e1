"""Answer a request with what a backend says: choose, send, retry, relay.

Once a byte of an answer has gone to the client no other backend is asked for it: two of them would stream some tokens
twice.
"""

import asyncio
import logging
import random
import time

import aiohttp

from tritonllm.http.ask import Ask
from tritonllm.http.errors import RouteError
from tritonllm.http.events import WholeEvents
from tritonllm.http.reply import Reply
from tritonllm.route.backend import Backend
from tritonllm.route.budget import RetryBudget
from tritonllm.route.cause import Cause, cause_of
from tritonllm.route.config import RouterConfig
from tritonllm.route.metrics import RouterMetrics
from tritonllm.route.pool import Pool
from tritonllm.route.prefill import Prefill
from tritonllm.route.upstream import Failure, Opened, Upstream, answer_headers

logger = logging.getLogger(__name__)
SAME_AGAIN = (0.05, 0.15)  # seconds before a backend that has just failed is asked again, because there is no other
ENDS_WITH_DONE = ("/v1/completions", "/v1/chat/completions")


class BrokenAnswer(RouteError):
    """A backend went away, or stood still, in the middle of an answer."""


class Proxy:
    """Answers clients' requests with the answers of backends.

    Args:
        pool: the pool of backends.
        session: the session to ask them with.
        metrics: the metrics of the router.
    """

    def __init__(self, pool: Pool, session: aiohttp.ClientSession, metrics: RouterMetrics) -> None:
        self._pool, self._metrics = pool, metrics
        self._upstream = Upstream(session, metrics)
        self._prefill = Prefill(pool, self._upstream, metrics)
        self._budget = RetryBudget(pool.config.retry_ratio, pool.config.retry_reserve)

    def apply(self, config: RouterConfig) -> None:
        self._budget.ratio = config.retry_ratio

    async def answer(self, ask: Ask, reply: Reply) -> str:
        """Answer, and tell which backend did.

        Raises:
            RouteError: no backend could; or one broke off, of which the client does not know yet.
        """
        config = self._pool.config
        self._budget.add_request()
        ask = await self._prefill.prepared(ask)
        tried: list[Backend] = []
        while True:
            backend = self._pool.choose(ask, tried)
            if backend in tried:
                await asyncio.sleep(random.uniform(*SAME_AGAIN))
                backend = self._pool.choose(ask, tried)
            tried.append(backend)
            is_last = len(tried) > config.max_retries
            try:
                with backend.carrying(ask.tokens):
                    opened = await self._upstream.open(ask, backend, config, may_move=ask.repeatable and not is_last)
                    try:
                        await self._relay(ask, opened, reply, config)
                    finally:
                        opened.response.close()  # unless it was read to its end: stop what the backend still does
                        self._metrics.ended(backend.label, time.monotonic() - opened.sent_at)
                return backend.label
            except Failure as failure:
                if is_last or not self._may_retry(ask, failure):
                    await self._give_up(failure, reply)
                    return backend.label
                self._metrics.retried(backend.label)
                logger.info("request %s goes on to another backend: %s", ask.request_id, failure.error.message)

    def _may_retry(self, ask: Ask, failure: Failure) -> bool:
        """Whether there is somebody to ask, it does no harm, and the budget allows it."""
        if failure.begun and not (ask.repeatable and failure.reason != "first_byte_timeout"):
            return False
        if failure.is_paid:
            return True
        return self._is_usable(ask.model) and self._budget.take()

    def _is_usable(self, model: str | None) -> bool:
        return any(backend.usable and backend.serves(model) for backend in self._pool.answering)

    async def _give_up(self, failure: Failure, reply: Reply) -> None:
        if failure.answer is None:
            raise failure.error
        await reply.whole(*failure.answer)

    def on_down(self, backend: Backend) -> None:
        """A backend is dead: what waits for its first byte goes elsewhere, as far as the budget reaches."""
        self._metrics.ejected(backend.label, "probe")
        for waiting in list(self._upstream.waiting.get(backend, ())):
            if waiting.may_move and not waiting.moved and self._is_usable(waiting.model) and self._budget.take():
                waiting.moved = True
                waiting.timeout.reschedule(asyncio.get_running_loop().time())

    async def _relay(self, ask: Ask, opened: Opened, reply: Reply, config: RouterConfig) -> None:
        """Hand an answer on.

        Raises:
            BrokenAnswer: it broke off.
        """
        kind = opened.response.headers.get("Content-Type", "").lower().partition(";")[0].strip()
        try:
            if kind == "text/event-stream":
                await self._relay_events(ask, opened, reply, config)
            elif kind == "application/json" and ask.method != "HEAD":
                await self._relay_whole(opened, reply, config)
            else:
                await self._relay_bytes(opened, reply, config)
            self._upstream.count_success(opened)
        except (aiohttp.ClientError, OSError) as error:
            raise self._broken(opened, cause_of(error)) from error

    def _broken(self, opened: Opened, why: Cause) -> BrokenAnswer:
        backend = opened.backend
        self._metrics.broke(backend.label)
        message = f"the backend {backend.label} broke off its answer: {why.logged}"
        self._upstream.count_failure(backend, opened.permit, message)
        return BrokenAnswer(502, message, "backend_failed", told=f"{backend.told} broke off its answer: {why.told}")

    async def _next(self, opened: Opened, config: RouterConfig) -> bytes:
        try:
            async with asyncio.timeout(config.between_bytes_timeout):
                return await opened.response.content.readany()
        except TimeoutError as error:
            if isinstance(error, aiohttp.ClientError):
                raise
            raise TimeoutError(f"nothing came for {config.between_bytes_timeout:g} seconds") from error

    async def _relay_events(self, ask: Ask, opened: Opened, reply: Reply, config: RouterConfig) -> None:
        events, response = WholeEvents(), opened.response
        await reply.start(response.status, answer_headers(response, (b"content-length",)), is_events=True)
        data = opened.first
        while data:
            if whole := events.add(data):
                await reply.part(whole)
            data = await self._next(opened, config)
        is_framed = "Content-Length" in response.headers or "Transfer-Encoding" in response.headers
        if not is_framed and ask.path in ENDS_WITH_DONE and not events.is_done:
            why = "it ended without [DONE]"  # where the connection's end ends the answer
            raise self._broken(opened, Cause(why, why))
        await reply.end(events.rest)

    async def _relay_whole(self, opened: Opened, reply: Reply, config: RouterConfig) -> None:
        """Held until it is whole, so that the client gets either it or an error."""
        response, data = opened.response, opened.first
        parts: list[bytes] = []
        size = 0
        while data:
            parts.append(data)
            size += len(data)
            if size > config.max_held_bytes:
                await self._relay_bytes(Opened(response, b"".join(parts), opened.backend, opened.permit), reply, config)
                return
            data = await self._next(opened, config)
        headers = answer_headers(response, (b"content-length",))
        await reply.whole(response.status, [*headers, (b"content-length", b"%d" % size)], b"".join(parts))

    async def _relay_bytes(self, opened: Opened, reply: Reply, config: RouterConfig) -> None:
        await reply.start(opened.response.status, answer_headers(opened.response))
        data = opened.first
        while data:
            await reply.part(data)
            data = await self._next(opened, config)
        await reply.end()
