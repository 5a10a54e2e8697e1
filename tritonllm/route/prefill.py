"""Requests in two halves: a backend with the role ``prefill`` computes the prompt, and says where another one finds its
keys and values (``kv_transfer_params``, docs/kv-transfer.md). With that the request goes to a backend as any other.

Without it, it goes there as it came: prefill that fails costs time, and nothing else. Short prompts are not split
either: the two requests, and the copy between them, would take longer than a decode backend that computes them itself.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tritonllm.http.ask import Ask, length
from tritonllm.http.errors import RouteError
from tritonllm.route.cause import cause_of
from tritonllm.route.metrics import RouterMetrics
from tritonllm.route.pool import Pool
from tritonllm.route.upstream import Failure, Opened, Upstream, read_rest

logger = logging.getLogger(__name__)
PATHS = ("/v1/completions", "/v1/chat/completions")
PROMPTS = ("prompt", "messages")
PARAMS = "kv_transfer_params"
# Of the whole answer: a first token needs none of these, and some do not go with so few tokens.
LEFT_OUT = (
    *("stream", "stream_options", "n", "best_of", "min_tokens", "max_completion_tokens", "echo", "logprobs"),
    *("top_logprobs", "prompt_logprobs", "response_format", "structured_outputs"),
)
NO_PLACE = (
    "the prefill backend %s answers without kv_transfer_params, so prompts are computed twice: it needs a "
    "kv_transfer_config with kv_role kv_producer (and the kv_connector Peer, Nixl or CudaIpc)"
)
SHORT = "prompts of fewer than %d tokens (prefill_min_tokens) are not split: they go to a decode backend whole"
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Answer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


class _Half(NamedTuple):
    """A backend's answer to a first half."""

    backend: str
    status: int
    body: bytes


def first_half(body: bytes, min_tokens: int = 0, on_short: Callable[[], object] = lambda: None) -> bytes | None:
    """The body that computes the prompt and one token; ``None`` if it is no request for both halves.

    Args:
        body: the body of the request.
        min_tokens: how many tokens its prompts must have together, by :func:`~tritonllm.http.ask.length`; shorter ones
            are not split.
        on_short: called for a request whose prompts are only too short.
    """
    try:
        fields = _FIELDS.decode(body)
    except msgspec.DecodeError:  # the backend says what is wrong
        return None
    if PARAMS in fields or bytes(fields.get("use_beam_search", b"false")) not in (b"false", b"null"):
        return None
    if sum(length(fields[name]) for name in PROMPTS if name in fields) < min_tokens:
        on_short()
        return None
    kept: dict[str, Any] = {name: value for name, value in fields.items() if name not in LEFT_OUT}
    return msgspec.json.encode({**kept, "max_tokens": 1, PARAMS: {"do_remote_decode": True}})


def second_half(body: bytes, answer: bytes) -> bytes | None:
    """The body with what the answer to the first half says; ``None`` if that is nothing."""
    try:
        params = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
    except msgspec.DecodeError:
        return None
    return msgspec.json.encode({**_FIELDS.decode(body), PARAMS: params}) if params else None


class Prefill:
    """Has prompts computed on backends with the role ``prefill``, before others answer.

    Args:
        pool: the pool of backends.
        upstream: asks backends.
        metrics: learns how long it took, and what came of it.
    """

    def __init__(self, pool: Pool, upstream: Upstream, metrics: RouterMetrics) -> None:
        self._pool, self._upstream, self._metrics = pool, upstream, metrics
        self._config, self._told = pool.config, set[str]()  # what was said under this configuration, by its text

    async def prepared(self, ask: Ask) -> Ask:
        """The request that is left when its prompt is computed; the same one if nobody has computed it, or should."""
        if not self._pool.has_prefill or ask.method != "POST" or ask.path not in PATHS:
            return ask
        body = first_half(ask.body, self._pool.config.prefill_min_tokens, self._tell_of_short_ones)
        if body is None:
            return ask
        try:
            answer = await self._answer(dataclasses.replace(ask, body=body))
        except (Failure, RouteError, aiohttp.ClientError, OSError) as error:
            why = error.error.message if isinstance(error, Failure) else cause_of(error).logged
            return self._failed(ask, why)
        if answer.status != 200:
            return self._failed(ask, f"the backend {answer.backend} answers with status {answer.status}")
        rest = second_half(ask.body, answer.body)
        self._metrics.prefilled("no_place" if rest is None else "used")
        if rest is None:
            self._tell(logging.WARNING, NO_PLACE % answer.backend)
            return ask
        return dataclasses.replace(ask, body=rest)

    def _failed(self, ask: Ask, why: str) -> Ask:
        self._metrics.prefilled("failed")
        logger.info("request %s goes on without prefill: %s", ask.request_id, why)
        return ask

    def _tell_of_short_ones(self) -> None:
        self._tell(logging.INFO, SHORT % self._pool.config.prefill_min_tokens)

    def _tell(self, level: int, what: str) -> None:
        """Say it once, and again after a new configuration."""
        if self._config is not self._pool.config:
            self._config, self._told = self._pool.config, set()
        if what not in self._told:
            self._told.add(what)
            logger.log(level, what)

    async def _answer(self, ask: Ask) -> _Half:
        config = self._pool.config
        backend = self._pool.choose(ask, prefill=True)
        with backend.carrying(ask.tokens):
            opened = await self._upstream.open(ask, backend, config, may_move=True)
            try:
                async with asyncio.timeout(config.between_bytes_timeout):
                    answer = await read_rest(opened.response, opened.first, config.max_held_bytes)
                    self._upstream.count_success(opened)
                    return _Half(backend.label, opened.response.status, answer)
            except (aiohttp.ClientError, OSError) as error:
                self._broke_off(opened, error)
                raise
            finally:
                opened.response.close()
                self._metrics.ended(backend.label, time.monotonic() - opened.sent_at)

    def _broke_off(self, opened: Opened, error: Exception) -> None:
        label = opened.backend.label
        self._metrics.broke(label)
        message = f"the backend {label} broke off its answer: {cause_of(error).logged}"
        self._upstream.count_failure(opened.backend, opened.permit, message)
